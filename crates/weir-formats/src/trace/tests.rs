use proptest::prelude::*;

use super::*;

const BLKPARSE: &str = "\
  8,0    1        1     0.000000000   697  A   W 223490 + 8 <- (8,1) 223427
  8,0    1        2     0.000001829   697  Q   W 223488 + 8 [kjournald]
  8,0    1        3     0.000009921   697  G   W 223488 + 8 [kjournald]
  8,0    0        4     0.500000000   700  Q   R 0 + 64 [fio]
  8,0    0        5     0.250000000   700  Q  RA 64 + 64 [fio]
  8,0    0        6     0.600000000   700  Q FWS [fio]
  8,0    0        7     0.700000000   700  Q  FN [fio]
  8,0    0        8     0.800000000   700  Q  DS 1024 + 2048 [fstrim]
  8,0    0        9     1.000001829   700  Q  WS 223496 + 8 [fio]
  8,0    0       10     1.000002000   700  C  WS 223496 + 8 [0]
CPU0 (8,0):
 Reads Queued:           2,       64KiB  Writes Queued:           2,        8KiB
";

#[test]
fn blkparse_is_read_at_the_queue() {
    let without = BLKPARSE.replace("  8,0    0        6     0.600000000   700  Q FWS [fio]\n", "");
    let profile = import(without.as_bytes(), "trace", None).unwrap();
    assert_eq!((profile.read.requests(), profile.read.bytes()), (2, 65_536));
    assert_eq!((profile.write.requests(), profile.write.bytes()), (2, 8_192));
    assert_eq!((profile.flushes, profile.discards), (1, 1));
    assert_eq!(profile.seconds, 1.0);
    // In the order of their times, the second read comes before the first, and the second write continues at the end of the
    // first.
    assert_eq!((profile.read.random.requests, profile.write.sequential.requests), (2, 1));
    assert!(profile.hours.is_empty() && profile.source == "trace");

    let error = import(BLKPARSE.as_bytes(), "trace", None).unwrap_err().to_string();
    assert!(error.contains("line 6") && error.contains("<sector> + <sectors>"), "{error}");
}

#[test]
fn one_of_several_devices_is_chosen() {
    let text = "8,0 0 1 0.0 1 Q R 0 + 8 [a]\n8,16 0 1 0.5 1 Q W 0 + 8 [a]\n";
    let error = import(text.as_bytes(), "trace", None).unwrap_err().to_string();
    assert!(error.contains("8,0, 8,16") && error.contains("--device"), "{error}");
    let profile = import(text.as_bytes(), "trace", Some("8,16")).unwrap();
    assert_eq!((profile.read.requests(), profile.write.requests()), (0, 1));
    let error = import(text.as_bytes(), "trace", Some("8,32")).unwrap_err().to_string();
    assert_eq!(error, "the trace has no requests to 8,32");
}

#[test]
fn logs_of_fio_are_read() {
    let second = "fio version 2 iolog\n/dev/x add\n/dev/x open\n/dev/x write 0 4096\n/dev/x write 4096 4096\n\
                  /dev/x datasync 0 0\n/dev/x read 65536 8192\n/dev/x close\n";
    let profile = import(second.as_bytes(), "log", None).unwrap();
    assert_eq!((profile.write.requests(), profile.write.sequential.requests), (2, 1));
    assert_eq!((profile.read.bytes(), profile.flushes, profile.seconds), (8192, 1, 0.0));
    assert_eq!(profile.iops(), None);
    // From fio 3.33 with --rate_iops=20,20 --runtime=4: it counts in microseconds.
    let third = "fio version 3 iolog\n20 x add\n180 x open\n183 x read 61440 4096\n445 x write 774144 4096\n\
                 3950196 x trim 0 1048576\n4000183 x read 765952 4096\n4000454 x close\n";
    let profile = import(third.as_bytes(), "log", None).unwrap();
    assert_eq!((profile.read.requests(), profile.discards, profile.seconds), (2, 1, 4.0));
    for (text, hint) in [
        ("fio version 1 iolog\n", "versions 2 and 3"),
        ("fio version 2 iolog\n/dev/x read 1\n", "line 2"),
        ("fio version 2 iolog\n/dev/x read 1 -1\n", "not numbers"),
        (
            "fio version 2 iolog\n/dev/x read 18446744073709551615 4096\n",
            "line 2: `/dev/x read 18446744073709551615 4096`: the request ends beyond 16 EiB",
        ),
        ("fio version 2 iolog\n/dev/x burn 1 1\n", "not known"),
        ("fio version 2 iolog\n/dev/x read\n", "missing"),
        ("fio version 3 iolog\n/dev/x read 0 4096\n", "microseconds"),
        ("fio version 3 iolog\n", "no requests"),
    ] {
        let error = import(text.as_bytes(), "log", None).unwrap_err().to_string();
        assert!(error.contains(hint), "{text}: {error}");
    }
}

/// A record in the tracer's format.
fn record(version: u8, command: u16, (sector, length): (u64, u32), micros: u64) -> Vec<u8> {
    let mut record = Vec::new();
    let head = [command.to_le_bytes(), (u16::from(version) << 8).to_le_bytes()].concat();
    let numbers = [7u32, length, 1].map(u32::to_le_bytes);
    if version == 1 {
        record.extend(numbers.concat());
        record.extend(head);
    } else {
        record.extend(head);
        record.extend(numbers.concat());
    }
    record.extend([sector, micros].map(u64::to_le_bytes).concat());
    if version == 2 {
        record.extend(99u64.to_le_bytes());
    }
    record
}

#[test]
fn traces_of_virtual_disks_are_read() {
    for version in [1, 2] {
        let requests =
            [(0x28, (0, 4096), 1_000_000), (0x8a, (64, 65536), 1_500_000), (0x2a, (192, 512), 2_000_000)];
        let mut trace: Vec<u8> = Vec::new();
        for (command, range, at) in requests {
            trace.extend(record(version, command, range, at));
        }
        trace.extend(record(version, 0x12, (0, 36), 2_000_000));
        let profile = import(&trace, "vm", None).unwrap();
        assert_eq!(
            (profile.read.bytes(), profile.write.requests(), profile.seconds),
            (4096, 2, 1.0),
            "{version}"
        );
        assert_eq!(profile.write.sequential.requests, 1);
        let error = import(&trace[..trace.len() - 1], "vm", None).unwrap_err().to_string();
        assert!(error.contains("record 4 (byte ") && error.contains("only"), "{error}");
        trace.extend(record(3 - version, 0x28, (0, 4096), 1));
        assert!(import(&trace, "vm", None).is_err());
        let beyond = [record(version, 0x28, (u64::MAX, 1), 0), record(version, 0x28, (0, 512), 0)].concat();
        let error = import(&beyond, "vm", None).unwrap_err().to_string();
        assert!(error.contains("record 1 (byte 0)") && error.contains("16 EiB"), "{error}");
    }
}

#[test]
fn other_files_are_not_guessed_at() {
    for bytes in [&b""[..], b"hello", b"\xff\xfe\x00", &[0; 400]] {
        let error = import(bytes, "x", None).unwrap_err();
        assert_eq!(error, ImportError::Unknown);
    }
}

/// The profiler looks at every block of a request and counts in u64: the import refuses impossible numbers of a damaged file
/// first.
#[test]
fn lengths_and_times_that_no_disk_has_seen_are_refused() {
    let discard = "8,0 0 1 0.0 1 Q D 0 + 4194304 [a]\n8,0 0 1 1.0 1 Q R 0 + 2097152 [a]\n";
    assert_eq!(import(discard.as_bytes(), "x", None).unwrap().read.bytes(), 1 << 30);
    for (text, hint) in [
        (
            "fio version 2 iolog\nx read 0 9000000000000000000\n",
            "line 2: `x read 0 9000000000000000000`: the request is longer",
        ),
        (
            "fio version 2 iolog\nx wait 18446744073709551615 0\nx read 0 4096\n",
            "line 3: `x read 0 4096`: the time",
        ),
        ("fio version 3 iolog\n0 x read 0 4096\n18446744073709551 x read 0 4096\n", "line 3"),
        ("8,0 0 1 0.0 1 Q W 0 + 2097153 [a]\n", "longer than 1 GiB"),
        ("8,0 0 1 0.0 1 Q R 0 + 8 [a]\n8,0 0 2 18446744073.7 1 Q R 0 + 8 [a]\n", "beyond 100 years"),
        ("8,0 0 1 0.0 1 Q R 36028797018963967 + 9 [a]\n", "16 EiB"),
    ] {
        let error = import(text.as_bytes(), "log", None).unwrap_err().to_string();
        assert!(error.contains(hint), "{text}: {error}");
    }
    for version in [1, 2] {
        let long = record(version, 0x28, (0, u32::MAX), 0);
        let error = import(&long, "vm", None).unwrap_err().to_string();
        assert!(error.contains("record 1 (byte 0)") && error.contains("1 GiB"), "{error}");
        let late =
            [record(version, 0x28, (0, 512), 0), record(version, 0x28, (0, 512), u64::MAX / 1_000)].concat();
        let error = import(&late, "vm", None).unwrap_err().to_string();
        assert!(error.contains("record 2") && error.contains("100 years"), "{error}");
    }
}

/// Numbers that could cause overflow or endless work.
fn hostile() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..100_000,
        any::<u64>(),
        (0u64..64, 0u64..3).prop_map(|(power, less)| (1u64 << power).saturating_sub(less)),
        (0u64..100_000).prop_map(|less| u64::MAX - less),
        (0u64..100_000).prop_map(|less| u64::MAX / 1_000_000_000 - less),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_number_is_read_or_refused(lines in proptest::collection::vec((0usize..4, [hostile(), hostile(), hostile()]), 1..6)) {
        let (mut second, mut third) = ("fio version 2 iolog\n".to_owned(), "fio version 3 iolog\n".to_owned());
        let (mut blkparse, mut vscsi) = (String::new(), Vec::new());
        for (action, [time, offset, length]) in lines {
            let word = ["read", "write", "trim", "wait"][action];
            second += &format!("x {word} {offset} {length}\n");
            third += &format!("{time} x {word} {offset} {length}\n");
            let rwbs = ["R", "W", "D", "FWS"][action];
            blkparse += &format!("8,0 0 1 {time}.5 1 Q {rwbs} {offset} + {length} [a]\n");
            let command = [0x28, 0x2a, 0x42, 0x35][action];
            vscsi.extend(record(1, command, (offset, length as u32), time));
        }
        for trace in [second.as_bytes(), third.as_bytes(), blkparse.as_bytes(), &vscsi] {
            if let Ok(profile) = import(trace, "x", None) {
                prop_assert!(Profile::from_json(&serde_json::to_string(&profile).unwrap()).is_ok());
            }
        }
    }
}

proptest! {
    #[test]
    fn nothing_makes_it_panic(head in 0usize..6, tail: Vec<u8>, words in "[0-9,. +QRWDFN\n-]{0,200}") {
        let heads: [&[u8]; 6] = [b"", b"8,0 0 1 0.0 1 Q ", b"fio version 2 iolog\n", b"fio version 3 iolog\n", &[1; 64], &[2; 80]];
        let bytes = [heads[head], &tail].concat();
        let _ = import(&bytes, "x", None);
        let text = [heads[head], words.as_bytes()].concat();
        if let Ok(profile) = import(&text, "x", None) {
            prop_assert!(Profile::from_json(&serde_json::to_string(&profile).unwrap()).is_ok());
        }
    }
}
