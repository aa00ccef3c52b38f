//! The report of a load: one HTML file.

use std::path::Path;

use weir_diagnose::{Environment, report};
use weir_load::summary::Summary;

use crate::commands::diagnose::replace;
use crate::failure::Failure;

/// Writes the measurements, with the machine and the command that repeats them.
pub fn write(file: &Path, summaries: &[Summary]) -> Result<(), Failure> {
    let mut targets: Vec<&str> = summaries.iter().map(|summary| summary.target.as_str()).collect();
    targets.dedup();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut environment = Environment::here(&targets.join(", "), host.trim(), std::env::args());
    environment.versions.insert("weir".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    replace(file, &report::loads(summaries, &environment).map_err(Failure::failed)?)
}
