//! `make bench` in its short form, with debug binaries: every section runs against every peer and gives its rows. The speeds have
//! no meaning here.
#![expect(clippy::unwrap_used, reason = "a test")]

#[path = "../../weir-lab/tests/common/program.rs"]
mod program;

use std::process::Command;

use serde_json::Value;

/// Cells of the short form by their subjects, and the drivers of each.
const BOTH: &[&str] = &["weir", "fio"];
const OWN: &[&str] = &["-"];
type Rows = &'static [(&'static str, &'static [&'static str])];
const CELLS: [(&str, Rows); 17] = [
    ("generator null", &[("null", BOTH)]),
    ("generator file", &[("weir", OWN), ("fio io_uring", OWN), ("fio io_uring, batched", OWN)]),
    ("generator nbd unix randread 4k qd32 on nbdkit memory", &[("nbdkit memory", BOTH)]),
    ("generator nbd unix randread 4k qd32 on qemu-storage-daemon", &[("qemu-storage-daemon", BOTH)]),
    ("generator nbd unix randread 4k qd32 on weir", &[("weir", BOTH)]),
    (
        "nbd unix randread 4k qd32",
        &[
            ("weir", BOTH),
            ("qemu-storage-daemon", BOTH),
            ("nbdkit memory", BOTH),
            ("nbdkit file", BOTH),
            ("bare echo", OWN),
        ],
    ),
    (
        "nbd tcp randread 4k qd32",
        &[("weir", BOTH), ("qemu-storage-daemon", BOTH), ("nbdkit memory", BOTH), ("bare echo", OWN)],
    ),
    (
        "write-back+1 nbd randwrite 4k qd32",
        &[("weir", BOTH), ("qemu quorum + nbdkit tcp", BOTH), ("bare echo", OWN)],
    ),
    ("tls channel 4k qd32", &[("channel, plaintext", OWN), ("channel, TLS", OWN), ("bare rustls", OWN)]),
    ("tls write-back+1 randwrite 4k qd32", &[("weir, plaintext", &["weir"]), ("weir, TLS", &["weir"])]),
    (
        "media randwrite 4k qd1",
        &[
            ("backing alone", &["weir"]),
            ("write-back+0 on ram", &["weir"]),
            ("write-back+1 on ram", &["weir"]),
            ("write-back+0 on flash", &["weir"]),
            ("write-back+1 on flash", &["weir"]),
            ("bare echo", OWN),
            ("bare synced write 8k qd1", OWN),
        ],
    ),
    (
        "files randread 4k qd32",
        &[("disk's file (FUSE)", &["weir"]), ("NBD export", &["weir"]), ("ordinary file", &["weir"])],
    ),
    (
        "volume backing randread 4k qd32",
        &[
            ("LUN as a backing", OWN),
            ("LUN, bare io_uring", OWN),
            ("direct, coordinator", OWN),
            ("direct, other node", OWN),
            ("file-redirected, local", OWN),
            ("file-redirected, tcp", OWN),
            ("block-redirected, tcp", OWN),
            ("qemu-s-d, raw LUN, tcp", &["weir"]),
        ],
    ),
    (
        "routes write 8k qd8",
        &[
            ("LUN as a backing", OWN),
            ("LUN, bare io_uring", OWN),
            ("direct, coordinator", OWN),
            ("direct, other node", OWN),
            ("file-redirected, local", OWN),
            ("file-redirected, tcp", OWN),
            ("block-redirected, tcp", OWN),
            ("qemu-s-d, raw LUN, tcp", &["weir"]),
        ],
    ),
    (
        "volume nbd randread 4k qd32",
        &[
            ("direct, coordinator", &["weir"]),
            ("direct, other node", &["weir"]),
            ("file-redirected, local", &["weir"]),
            ("file-redirected, tcp", &["weir"]),
            ("block-redirected, tcp", &["weir"]),
            ("qemu-s-d, raw LUN", &["weir"]),
            ("qemu-s-d, qcow2 on LUN", &["weir"]),
        ],
    ),
    (
        "neighbour pinned write-back+1 randwrite 4k qd1",
        &[("alone", OWN), ("weir, polling off", OWN), ("weir, polling on", OWN)],
    ),
    ("profile nbd unix write-through randread 4k qd32", &[("weir", &["weir"]), ("bare echo", OWN)]),
];

#[test]
fn every_section_gives_a_row_for_every_peer_and_driver() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = directory.path().join("results.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir-peers"));
    command
        .arg("--short")
        .arg("--weir")
        .arg(program::build())
        .arg("--out")
        .arg(&out)
        .arg("--storage")
        .arg(directory.path());
    let ended = command.output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{text}\n{errors}");
    assert!(text.lines().last().unwrap().starts_with("targets: "), "{text}");
    // The last line names all missed targets, however many they are.
    let table = text.lines().filter(|line| !line.starts_with("targets: ") && !line.contains(" ratios in "));
    assert!(table.clone().all(|line| line.chars().count() <= 100), "{text}");

    let results: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    assert_eq!(results["schema"], "weir-peers/1");
    assert_eq!(results["failures"], serde_json::json!([]));
    let rows = results["rows"].as_array().unwrap();
    let mut expected = 0;
    for (cell, subjects) in CELLS {
        for (subject, drivers) in subjects {
            for driver in *drivers {
                let is_it = |row: &&Value| {
                    let name = row["cell"].as_str().unwrap();
                    (name == cell || name.starts_with(&format!("{cell} randread")))
                        && row["subject"] == *subject
                        && row["driver"] == *driver
                };
                let row = rows.iter().find(is_it);
                let row =
                    row.unwrap_or_else(|| panic!("no row of {subject} under {driver} in {cell}: {text}"));
                let figure = if *subject == "alone" { "neighbour_steps_per_second" } else { "iops" };
                assert!(row[figure].as_f64().unwrap() > 0.0, "{row}");
                assert!((0.0..=1.0).contains(&row["steal_fraction"].as_f64().unwrap()), "{row}");
                expected += 1;
            }
        }
    }
    assert_eq!(rows.len(), expected, "a new row: name it here\n{text}");
    let compared = |name: &str, peer: &str| {
        let compared = results["results"].as_array().unwrap();
        compared
            .iter()
            .any(|one| one["name"] == name && one["peer"] == peer && one["target_ratio"].is_number())
    };
    assert!(compared("nbd unix randread 4k qd32 iops", "bare echo"), "{text}");
    assert!(compared("write-back+1 nbd randwrite 4k qd32 fio iops", "qemu quorum + nbdkit tcp"), "{text}");
    assert!(compared("neighbour pinned write-back+1 randwrite 4k qd1 neighbour-steps", "weir, polling off"));
    let layers = results["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 5, "{text}");
    for of_way in layers {
        let layers = of_way["layers"].as_array().unwrap();
        assert_eq!(layers[0]["layer"], "export", "{of_way}");
        let own: f64 = layers.iter().filter_map(|layer| layer["own_us"].as_f64()).sum();
        assert!((own / layers[0]["mean_us"].as_f64().unwrap() - 1.0).abs() < 0.01, "{of_way}");
        let names: Vec<&str> = layers.iter().map(|layer| layer["layer"].as_str().unwrap()).collect();
        let is_redirected = !of_way["subject"].as_str().unwrap().starts_with("direct");
        let shows_it = names.contains(&"redirected") || names.contains(&"coordinator");
        assert!(shows_it || !is_redirected, "{of_way}");
    }
    let profiles = results["profiles"].as_array().unwrap();
    assert_eq!(profiles.len(), 2, "{text}");
    for profile in profiles {
        let groups = profile["groups"].as_array().unwrap();
        let whole: f64 = groups.iter().map(|group| group["fraction"].as_f64().unwrap()).sum();
        assert!((whole - 1.0).abs() < 0.01, "{profile}");
    }
}
