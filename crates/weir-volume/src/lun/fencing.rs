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

    /// A program fences nodes where reservations do not.
    #[must_use]
    pub fn has_command(&self) -> bool {
        self.command.program.is_some()
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

    /// Has a node fenced, in an epoch. `target`: what the command gets; a reservation needs no name. `is_over`: nobody waits for it any more, and it is not to
    /// happen.
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
            if is_over() {
                return Err("nobody waits for the fence any more".to_owned());
            }
            let fenced = self.command.fence(&target, epoch);
            fenced.map_err(|error| error.to_string())
        };
        match self.reservations.fence(Key::new(self.volume, process), process.node, &is_over) {
            Ok(()) => Ok(()),
            Err(error) if is_over() => Err(error.to_string()),
            Err(ReservationError::Unused) => target.and_then(by_command),
            Err(error) if error.asks_for_command() => {
                target.and_then(by_command).map_err(|text| format!("{error}; {text}"))
            }
            Err(error) => Err(error.to_string()),
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use super::*;

    const VOLUME: VolumeId = VolumeId([7; 16]);
    const ME: Process<u64> = Process { node: 1, incarnation: 1 };
    const OTHER: Process<u64> = Process { node: 2, incarnation: 1 };

    fn fencing(directory: &Path, lun: PathBuf, program: Option<&str>) -> Fencing {
        let wait = Duration::from_secs(1);
        let reservations = Reservations { is_on: true, lun: lun.clone(), key: Key::new(VOLUME, ME), wait };
        let command = FenceCommand {
            program: program.map(PathBuf::from),
            limit: Duration::from_secs(10),
            volume: "v".into(),
            lun,
            lock: directory.join("lock"),
        };
        Fencing::new(VOLUME, ME, reservations, command)
    }

    fn fence(fencing: &Fencing) -> Result<(), String> {
        let target = Target { name: "n2".into(), node: OTHER.node, incarnation: OTHER.incarnation };
        fencing.fence(OTHER, Ok(target), 1, || false)
    }

    #[test]
    fn where_the_lun_does_not_keep_a_node_away_the_command_does() {
        let directory = tempfile::tempdir().unwrap();
        let (absent, file) = (directory.path().join("absent"), directory.path().join("file"));
        std::fs::write(&file, "").unwrap();
        // A path that does not answer, and one that has no reservations.
        for lun in [&absent, &file] {
            fence(&fencing(directory.path(), lun.clone(), Some("/bin/true"))).unwrap();
        }
        let text = fence(&fencing(directory.path(), absent.clone(), Some("/bin/false"))).unwrap_err();
        assert!(text.contains("absent") && text.ends_with("fence n2` failed (exit code 1)"), "{text}");
        let text = fence(&fencing(directory.path(), file.clone(), None)).unwrap_err();
        assert!(text.contains("confirm-fenced v n2"), "{text}");
        let of = |lun: &PathBuf, program| fencing(directory.path(), lun.clone(), program);
        of(&file, Some("/bin/true")).admit("n1").unwrap();
        assert_eq!(of(&file, Some("/bin/true")).tier(), Tier::Command);
        assert_eq!(of(&file, None).tier(), Tier::Operator);
        // A node that cannot tell whether it is registered is not admitted.
        let text = of(&absent, Some("/bin/true")).admit("n1").unwrap_err();
        assert!(text.contains("absent"), "{text}");
    }
}
