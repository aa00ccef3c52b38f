//! The `weir` program that end-to-end tests run.

use std::path::PathBuf;
use std::process::Command;

/// The program, as current as the calling test: `WEIR_PROGRAM`, or the result of a cargo build with the test's profile.
pub fn build() -> PathBuf {
    if let Some(program) = std::env::var_os("WEIR_PROGRAM") {
        return program.into();
    }
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()));
    build.args(["build", "--quiet", "-p", "weir"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    // Cargo sets variables for the test's own package. The build script of `ring` runs again when they change, and cargo then rebuilds
    // every crate that depends on it.
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
        {
            build.env_remove(name);
        }
    }
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "cargo cannot build the weir program");
    // target/<profile>/deps/<this test>
    std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("weir")
}
