//! The option of all examples for the format of their figures.

use clap::ValueEnum;
use serde::Serialize;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Output {
    Text,
    Json,
}

impl Output {
    /// Prints a report: as a line of JSON, or by `text`.
    pub fn print<T: Serialize>(self, report: &T, text: impl FnOnce(&T)) {
        match self {
            Output::Json => println!("{}", serde_json::to_string(report).unwrap()),
            Output::Text => text(report),
        }
    }
}
