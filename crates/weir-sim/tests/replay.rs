//! A seed gives the same run in this process, in another one, and through the command line.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

use weir_sim::{Bug, many, run};

fn weir_sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir-sim")).args(arguments).output().unwrap()
}

fn text(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in [7, 9, 2, 6] {
        let first = run(seed, None, true);
        assert!(first.trace.len() > 300, "too short a run");
        assert_eq!(first.trace, run(seed, None, true).trace);
        assert_eq!(first.counts.steps, run(seed, None, false).counts.steps, "tracing changes nothing");
    }
    assert_ne!(run(7, None, true).trace, run(8, None, true).trace);
}

#[test]
fn another_process_gives_the_same_trace() {
    let output = weir_sim(&["run", "--seed", "7", "--trace"]);
    assert!(output.status.success());
    let mut expected = run(7, None, true).trace.join("\n");
    assert!(text(&output).starts_with(&expected), "line by line");
    expected.push('\n');
    let verdict = text(&output).strip_prefix(&expected).unwrap();
    assert!(verdict.starts_with("seed 7,") && verdict.ends_with("all promises held\n"), "{verdict}");
}

/// The number of threads does not matter.
#[test]
fn threads_make_no_difference() {
    let one = many(0..48, 1, None, false, &|_| {});
    let three = many(0..48, 3, None, false, &|_| {});
    assert_eq!((one.seeds, one.counts.steps), (48, three.counts.steps));
    assert_eq!(one.counts.faults, three.counts.faults);
}

#[test]
fn a_violation_is_reported_with_its_seed_and_a_status() {
    let bug = Bug::AcknowledgeOneCopyShort;
    let summary = many(0..32, 2, Some(bug), false, &|_| {});
    let (seed, violation) = summary.violations.first().unwrap();
    let output = weir_sim(&["run", "--seed", &seed.to_string(), "--bug", bug.name()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains(violation), "{}", text(&output));
    let output = weir_sim(&["many", "--seeds", "32", "--bug", bug.name(), "--output", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["violations"].as_array().unwrap().len(), summary.violations.len());
    assert_eq!(report["faults"]["crash"], summary.counts.faults[0]);
}

#[test]
fn invalid_arguments_are_reported() {
    let output = weir_sim(&["run", "--seed", "1", "--bug", "typo"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("there are acknowledge-one-copy-short"));
    let output = weir_sim(&["atlas"]);
    assert!(output.status.success() && text(&output).contains("lease-loss"));
}
