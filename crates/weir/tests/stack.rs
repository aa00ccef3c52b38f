//! `weir diagnose --stack`: layers described in a file.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};

use serde_json::Value;

mod common;

use common::Place;

const SIZE: u64 = 16 << 20;

/// The shortest measurement that there is.
const SHORT: &str = "--tier probe --repeats 1 --runtime 200ms --more 0 --seed 3";

fn image(place: &Place, name: &str, size: u64) {
    File::create(place.path().join(name)).unwrap().set_len(size).unwrap();
}

/// The output of a complete measurement; on a busy machine the measurement may call itself not trusted.
fn measured(place: &Place, line: &str) -> Value {
    let output = place.weir(&format!("{line} --output json {SHORT}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 6)), "weir {line}: {said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn describe(place: &Place, layers: &[(&str, &str)]) {
    let layer = |(name, target): &(&str, &str)| {
        format!("[[layer]]\nname = \"{name}\"\ntarget = \"{}\"\n\n", place.path().join(target).display())
    };
    let text: String = layers.iter().map(layer).collect();
    fs::write(place.path().join("stack.toml"), text).unwrap();
}

#[test]
fn two_ways_to_the_same_file_are_measured() {
    let place = Place::new();
    image(&place, "low", SIZE);
    std::os::unix::fs::symlink(place.path().join("low"), place.path().join("high")).unwrap();
    describe(&place, &[("disk", "low"), ("link", "high")]);
    let dry = place.ok(&format!("diagnose --stack stack.toml --destroy --dry-run {SHORT}"));
    assert!(dry.contains("2 layers: disk, link") && dry.contains("6 cells"), "{dry}");

    let said = measured(&place, "diagnose --stack stack.toml --destroy --report r.html");
    assert_eq!(said["interrupted"], false, "{said}");
    let report: Value = serde_json::from_str(&place.read("r.json")).unwrap();
    let names: Vec<&str> =
        report["layers"].as_array().unwrap().iter().map(|layer| layer["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["disk", "link", "generator alone"]);
    assert_eq!(report["environment"]["versions"]["block layer counted by"], "/proc/diskstats");
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() >= 12 && rows.iter().all(|row| row["counters"].is_object()), "{rows:#?}");

    // Without --destroy nothing is written, and the measurement assumes that all layers lead to the same storage.
    let before = fs::read(place.path().join("low")).unwrap();
    measured(&place, "diagnose --stack stack.toml --report s.html");
    assert!(fs::read(place.path().join("low")).unwrap() == before);
}

#[test]
fn layers_that_are_not_the_same_storage_are_refused() {
    let place = Place::new();
    image(&place, "low", SIZE);
    image(&place, "other", SIZE);
    image(&place, "small", SIZE / 2);
    describe(&place, &[("disk", "low"), ("copy", "other")]);
    let said = place.fails(&format!("diagnose --stack stack.toml --destroy {SHORT}"), 4);
    assert!(said.contains("do not lead to the same storage") && said.contains("copy"), "{said}");
    describe(&place, &[("disk", "low"), ("part", "small")]);
    let said = place.fails("diagnose --stack stack.toml", 4);
    assert!(said.contains("line 5") && said.contains("8388608 bytes"), "{said}");
}

#[test]
fn a_description_is_held_against_what_there_is() {
    let place = Place::new();
    image(&place, "low", SIZE);
    describe(&place, &[("disk", "low"), ("gone", "nowhere")]);
    let said = place.fails("diagnose --stack stack.toml", 3);
    assert!(said.contains("line 5") && said.contains("nowhere"), "{said}");
    fs::write(place.path().join("stack.toml"), "[[layer]]\nname = \"a\"\ntarget = 7\n").unwrap();
    let said = place.fails("diagnose --stack stack.toml", 2);
    assert!(said.contains("line 3"), "{said}");
    assert!(place.fails("diagnose --stack none.toml", 3).contains("none.toml"));
}
