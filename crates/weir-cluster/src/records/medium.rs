//! The medium of a write log.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The medium of a write log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Medium {
    /// Memory: lost with the process.
    #[default]
    Ram,
    /// A preallocated file or block device: outlives the process.
    Flash,
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Medium::Ram => "ram",
            Medium::Flash => "flash",
        })
    }
}

/// Not a medium.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a medium: use ram or flash")]
pub struct NotAMedium(String);

impl FromStr for Medium {
    type Err = NotAMedium;

    fn from_str(text: &str) -> Result<Medium, NotAMedium> {
        match text {
            "ram" => Ok(Medium::Ram),
            "flash" => Ok(Medium::Flash),
            _ => Err(NotAMedium(text.chars().take(64).collect())),
        }
    }
}
