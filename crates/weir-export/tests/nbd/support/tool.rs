//! Other people's programs. A test that needs one fails without it.

use std::path::PathBuf;
use std::process::{Command, Output};

/// Runs a program to its end.
pub fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap_or_else(|error| {
        panic!(
            "this test needs `{program}` ({error}); install qemu-utils, libnbd-bin, python3-libnbd and fio"
        )
    })
}

/// Runs a program that must succeed; returns its output.
pub fn run_ok(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\nstdout: {printed}\nstderr: {complaint}",
        output.status
    );
    printed
}

/// Runs a Python script against libnbd; `arguments` are its `sys.argv[1:]`.
pub fn python(script: &str, arguments: &[&str]) -> String {
    let mut all = vec!["-c", script];
    all.extend_from_slice(arguments);
    run_ok("/usr/bin/python3", &all)
}

/// A path in a directory that lives in memory.
pub fn scratch(directory: &tempfile::TempDir, name: &str) -> (PathBuf, String) {
    let path = directory.path().join(name);
    let text = path.to_str().expect("temporary paths are text").to_owned();
    (path, text)
}
