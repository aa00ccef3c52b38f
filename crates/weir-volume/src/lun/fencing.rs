//! Keeps nodes from a LUN, and lets this one back: by the LUN's [`reservations`](super::reservations), or else by the operator's
//! [`fence_command`](super::fence_command). The first of these *tiers* that works is the proof.
//!
//! A node is let back by both: it does not know which one has fenced it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::claim::Process;
use super::fence_command::{FenceCommand, Target};
use super::heartbeat::VolumeId;
use super::reservations::{Key, ReservationError, Reservations};

/// How a node is kept from the LUN: the first tier that this node can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// The LUN refuses its writes.
    Reservations,
    /// A program of the operator does it.
    Command,
    /// The operator does it, and says so.
    #[default]
    Operator,
}

impl Tier {
    /// In one word, for operators and programs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Tier::Reservations => "reservations",
            Tier::Command => "fence-command",
            Tier::Operator => "operator",
        }
    }
}

/// The tiers of one LUN, on one node. Its methods block for as long as the LUN or the command does.
#[derive(Clone, Debug)]
pub struct Fencing {
    volume: VolumeId,
    me: Process<u64>,
    reservations: Reservations,
    command: FenceCommand,
    /// This process was registered on the LUN when it was last admitted.
    has_key: Arc<AtomicBool>,
}

impl Fencing {
    /// Of a process that is not admitted yet. With `command.program` absent, the operator fences.
    #[must_use]
    pub fn new(
        volume: VolumeId,
        me: Process<u64>,
        reservations: Reservations,
        command: FenceCommand,
    ) -> Fencing {
        Fencing { volume, me, reservations, command, has_key: Arc::default() }
    }

    /// What this node uses, as far as it knows: before it is admitted, it does not know whether the LUN has reservations.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match self.command.program {
            _ if self.has_key() => Tier::Reservations,
            Some(_) => Tier::Command,
            None => Tier::Operator,
        }
    }

    /// Whether this process was registered on the LUN when it was last admitted.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.has_key.load(Ordering::Relaxed)
    }

    /// Waits until nothing that may lift a fence of this node is under way, of a former process either.
    ///
    /// # Errors
    /// In words.
    pub fn await_no_admission(&self) -> Result<(), String> {
        self.locked().map(drop)
    }

    /// Lifts a fence of either kind from this node. `name`: the node's.
    ///
    /// # Errors
    /// In words: this node does not reach the LUN. The fence may be lifted.
    pub fn admit(&self, name: &str) -> Result<(), String> {
        let Process { node, incarnation } = self.me;
        let target = Target { name: name.to_owned(), node, incarnation };
        // First: without it, the LUN may be out of reach.
        self.command.admit(&target).map_err(|error| error.to_string())?;
        // The kernel holds it, too, for a call that outlives this process.
        let lock = self.locked()?;
        let has_key = self.reservations.admit().map_err(|error| error.to_string())?;
        self.has_key.store(has_key, Ordering::Relaxed);
        drop(lock);
        Ok(())
    }

    /// Has a node fenced, in an epoch. `target`: what the command gets; a reservation needs no name. `is_over`: nobody waits for it any more.
    ///
    /// # Errors
    /// In words. The node may be fenced, or be fenced later.
    pub fn fence(
        &self,
        process: Process<u64>,
        target: Result<Target, String>,
        epoch: u64,
        is_over: impl Fn() -> bool,
    ) -> Result<(), String> {
        let by_command = |target: Target| {
            let fenced = self.command.fence(&target, epoch);
            fenced.map_err(|error| error.to_string())
        };
        match self.reservations.fence(Key::new(self.volume, process), process.node, is_over) {
            Ok(()) => Ok(()),
            Err(ReservationError::Unused) => target.and_then(by_command),
            Err(error) => target.and_then(by_command).map_err(|text| format!("{error}; {text}")),
        }
    }

    /// Whether the LUN still has this process's key.
    ///
    /// # Errors
    /// [`ReservationError::NotRegistered`]: this node is fenced. Others: the LUN does not tell.
    pub fn check(&self) -> Result<(), ReservationError> {
        self.reservations.check()
    }

    /// Takes this process's key back. Nothing of it uses the LUN any more.
    ///
    /// # Errors
    /// In words. The key may stay there: it does no harm to others.
    pub fn leave(&self) -> Result<(), String> {
        if !self.has_key() {
            return Ok(());
        }
        let _lock = self.locked()?;
        self.reservations.leave().map_err(|error| error.to_string())
    }

    fn locked(&self) -> Result<std::fs::File, String> {
        self.command.locked().map_err(|error| format!("{}: {error}", self.command.lock.display()))
    }
}
