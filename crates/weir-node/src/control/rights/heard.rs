//! The answers of the members of disks' sets about owners whom they hear ([`crate::control::hearing`] asks them).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use weir_block::Nanos;

/// The members' latest answers, each under a lock that whoever asks it holds.
#[derive(Debug, Default)]
pub(in crate::control) struct Members(Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<Said>>>>);

/// One member's answers.
#[derive(Debug, Default)]
pub(in crate::control) struct Said {
    /// By the name of the disk.
    pub disks: BTreeMap<String, Heard>,
    /// It has not answered in time, and is not asked again before this.
    pub silent_until: Nanos,
}

/// Its answer about one disk.
#[derive(Clone, Copy, Debug)]
pub(in crate::control) struct Heard {
    pub epoch: u64,
    pub at: Nanos,
    pub hears: bool,
}

impl Members {
    pub fn of(&self, member: &str) -> Arc<tokio::sync::Mutex<Said>> {
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(members.entry(member.to_owned()).or_default())
    }
}
