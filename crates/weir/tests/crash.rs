//! A killed verifying load, and the verdict by its record: all data present, or exactly the missing blocks.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Nbdkit, Place, assert_shape};
use serde_json::{Value, json};
use weir_load::verify::{Sector, read_sector};

const BLOCK: usize = 4096;
const DEPTH: u64 = 16;

/// The version of a block, if all its sectors have the same one.
fn version(block: &[u8]) -> Option<u32> {
    let mut versions = block.as_chunks::<512>().0.iter().map(|sector| match read_sector(sector) {
        Sector::Stamped { version, .. } => Some(version),
        _ => None,
    });
    let first = versions.next()??;
    versions.all(|version| version == Some(first)).then_some(first)
}

/// Reads the lines of a load's intervals until `count` writes have been answered. Intervals during the prefill have none, so a
/// fixed number of intervals says nothing on a busy machine.
fn wait_for_writes(lines: &mut impl Iterator<Item = std::io::Result<String>>, count: u64) {
    let mut answered = 0;
    while answered < count {
        let line: Value = serde_json::from_str(&lines.next().expect("the load goes on").unwrap()).unwrap();
        assert_eq!(line["type"], "interval", "{line}");
        let writes = line["kinds"].as_array().unwrap().iter().filter(|kind| kind["kind"] == "write");
        answered += writes.map(|kind| kind["ios"].as_u64().unwrap()).sum::<u64>();
    }
}

/// Runs a load on `disk` and kills it while requests are in flight. Returns the disk's content from some time before that.
fn killed_load(place: &Place) -> Vec<u8> {
    let line = format!(
        "bench disk --size 4M --rw randwrite --verify --history record --qd {DEPTH} --runtime 1h --warmup 0s --format jsonl"
    );
    let mut child = place.command(&line).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let pid = child.id().to_string();
    let signal = |name: &str| Command::new("kill").args([name, &pid]).status().unwrap().success();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // About four versions of each block, then about eight more.
    wait_for_writes(&mut lines, 4 * 1024);
    assert!(signal("-STOP"));
    // Wait for writes already submitted to the kernel.
    std::thread::sleep(Duration::from_millis(100));
    let earlier = std::fs::read(place.path().join("disk")).unwrap();
    assert!(signal("-CONT"));
    wait_for_writes(&mut lines, 8 * 1024);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it was killed, it has not ended");
    earlier
}

/// The findings of `weir bench verify`, by kind; it fails if and only if there is one.
fn faults(place: &Place) -> Value {
    let output = place.weir("bench verify --history record disk --output json");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = if found["verification"]["mismatches"] == 0 { 0 } else { 1 };
    assert_eq!(output.status.code(), Some(expected), "{found}");
    assert_eq!(found["verification"]["checked"], 1024);
    found["verification"]["faults"].clone()
}

#[test]
fn after_a_kill_everything_acknowledged_is_there_and_damage_is_told_apart() {
    let place = Place::new();
    let earlier = killed_load(&place);
    let found = place.json("bench verify --history record disk");
    assert_shape(&found, "bench verify");
    assert_eq!(
        (&found["verification"]["mismatches"], &found["unreadable"]),
        (&json!(0), &json!(0)),
        "{found}"
    );
    assert!(found["writes"].as_u64().unwrap() > 1024, "{found}");
    assert!(found["unanswered_blocks"].as_u64().unwrap() <= DEPTH, "{found}");
    assert!(place.ok("bench verify --history record disk --engine psync").contains("every block is right"));

    let disk = place.path().join("disk");
    let good = std::fs::read(&disk).unwrap();
    let of = |block: usize| block * BLOCK..(block + 1) * BLOCK;
    // Blocks whose earlier version must be stale, even if their newest write was not answered.
    let older = (0..good.len() / BLOCK).filter(|&block| {
        matches!((version(&earlier[of(block)]), version(&good[of(block)])), (Some(old), Some(new)) if old + 3 < new)
    });
    let blocks: Vec<Range<usize>> = older.map(of).take(5).collect();
    let [lost, stale, torn, misplaced, other] =
        blocks.try_into().expect("the load goes over 1024 blocks often");
    let half = torn.start + BLOCK / 2..torn.end;
    let damages: [(&str, Range<usize>, Vec<u8>); 4] = [
        ("lost", lost.clone(), vec![0; BLOCK]),
        ("stale", stale.clone(), earlier[stale].to_vec()),
        ("torn", half.clone(), earlier[half].to_vec()),
        ("misplaced", misplaced, good[other].to_vec()),
    ];
    let mut all = good.clone();
    for (name, place_of, bytes) in damages {
        let mut damaged = good.clone();
        damaged[place_of.clone()].copy_from_slice(&bytes);
        all[place_of].copy_from_slice(&bytes);
        std::fs::write(&disk, &damaged).unwrap();
        assert_eq!(faults(&place), json!({ name: 1 }), "{name}");
    }
    std::fs::write(&disk, &all).unwrap();
    assert_eq!(faults(&place), json!({"lost": 1, "stale": 1, "torn": 1, "misplaced": 1}));
    let output = place.weir("bench verify --history record disk");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("4 blocks are wrong: 1 lost, 1 misplaced, 1 stale, 1 torn"), "{said}");
    assert!(said.contains(&format!("lost block at byte {}", lost.start)), "{said}");
    std::fs::write(&disk, &good).unwrap();
    assert_eq!(faults(&place), json!({}), "what was put right is right");
}

#[test]
fn a_killed_server_that_keeps_its_data_is_told_from_one_that_does_not() {
    let place = Place::new();
    let (socket, disk) = (place.path().join("s"), place.path().join("disk"));
    std::fs::File::create(&disk).unwrap().set_len(4 << 20).unwrap();
    let file = disk.to_str().unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    for (arguments, record) in [(["file", file], "kept"), (["memory", "4M"], "forgotten")] {
        let server = Nbdkit::start(&socket, &arguments);
        let line = format!(
            "bench {uri} --rw randrw --verify --history {record} --runtime 1h --warmup 0s --format jsonl --destroy"
        );
        let mut child = place.command(&line).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        wait_for_writes(&mut lines, 1);
        drop(server);
        let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
        assert!(last["incomplete"].as_str().unwrap().contains("the target failed"), "{last}");
        assert_eq!(child.wait().unwrap().code(), Some(1));
        let _again = Nbdkit::start(&socket, &arguments);
        let output = place.weir(&format!("bench verify --history {record} {uri} --output json"));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let (faults, code) = (&found["verification"]["faults"], output.status.code());
        if record == "kept" {
            assert_eq!((faults, code), (&json!({}), Some(0)), "{found}");
        } else {
            assert_eq!((faults, code), (&json!({ "lost": found["verification"]["mismatches"] }), Some(1)));
            assert!(found["verification"]["mismatches"].as_u64().unwrap() > 900, "of 1024 blocks: {found}");
        }
    }
    assert!(
        place.ok("bench verify --history kept disk").contains("every block is right"),
        "and below the server"
    );
}

#[test]
fn what_cannot_be_judged_is_said() {
    let place = Place::new();
    let short = "--size 1M --rw randwrite --verify --runtime 100ms --warmup 0s";
    place.ok(&format!("bench disk {short} --history record"));
    let found = place.json("bench verify --history record disk");
    assert_eq!(found["unanswered_blocks"], 0, "a load that came to its end leaves nothing open: {found}");
    let said = place.fails(&format!("bench disk {short} --history record --destroy"), 4);
    assert!(said.contains("record") && said.contains("is there already"), "{said}");
    std::fs::File::options().write(true).open(place.path().join("disk")).unwrap().set_len(4096).unwrap();
    std::fs::write(place.path().join("text"), "text").unwrap();
    for (line, code, hint) in [
        ("bench verify --history record disk", 2, "has only 4KiB"),
        ("bench verify --history text disk", 2, "too short"),
        ("bench verify --history none disk", 3, "none"),
        ("bench verify --history record gone", 3, "gone"),
        ("bench verify --history record null", 2, "keeps nothing"),
        ("bench verify --history record disk --engine null", 2, "reads nothing"),
        ("bench verify disk", 2, "--history"),
        ("bench disk --verify --history new", 2, "writing --rw"),
        ("bench disk --rw write --history new", 2, "--verify"),
    ] {
        let said = place.fails(line, code);
        assert!(said.contains(hint), "{line}: {said}");
    }
}
