//! SCSI-3 persistent reservations: the LUN itself keeps a node from writing (tier 1 of `VOLUME.md` §2).
//!
//! Each node registers a key, and the LUN is reserved for all that are registered. Whoever fences a node removes its keys. From then on
//! the LUN refuses its writes with `EBADE`; what the LUN had accepted before may still be executed, and is waited for.
//!
//! What proves a fence is what the LUN shows afterwards, and never the status of a command: a command may fail because another node was
//! first, or because this node itself was fenced, and a repeated one finds nothing to remove.
//!
//! To register lifts a fence. [`super::admission`] decides when a node may do that; nothing here does it by itself.

mod device;
mod key;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

pub use self::device::{Device, DeviceError, Registered, Reservation};
pub use self::key::Key;

/// The part of a wait after which it looks whether it is still wanted.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why a LUN's reservation was not changed as it should be.
#[derive(Debug, thiserror::Error)]
pub enum ReservationError {
    /// This node uses none here: the device has none, or the configuration says so.
    #[error("persistent reservations are not used")]
    Unused,
    /// The LUN or the way to it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Switched off here, and in use.
    #[error(
        "{} has a persistent reservation, and lun.reservations is \"off\" on this node: set it to \"auto\", or remove the reservation \
         (sg_persist --out --clear) when no node uses the LUN", .lun.display()
    )]
    SwitchedOff {
        /// The LUN.
        lun: PathBuf,
    },
    /// Other programs, another cluster, or a former volume.
    #[error(
        "{} has {what} that this volume has not made: make sure that nothing else uses the LUN, and remove it (sg_persist --out --preempt with that key; \
         --clear would lift every fence, too), or set lun.reservations = \"off\" on every node", .lun.display()
    )]
    Foreign {
        /// The LUN.
        lun: PathBuf,
        /// A key or the reservation.
        what: String,
    },
    /// It is to be a volume.
    #[error(
        "hosts that have used {} before have left {what} on it: make sure that none of them uses it any more, and remove it \
         (sg_persist --out --clear, with a key that was registered)", .lun.display()
    )]
    Left {
        /// The LUN.
        lun: PathBuf,
        /// A key or the reservation.
        what: String,
    },
    /// Another node has removed it.
    #[error("this node's key {key} is not registered on {} any more: another node has fenced this one", .lun.display())]
    NotRegistered {
        /// The LUN.
        lun: PathBuf,
        /// The key.
        key: Key,
    },
    /// The node that is to be fenced has the own bits.
    #[error("the key of host {node} has the same bits as this node's: rename one of the two nodes")]
    SameBits {
        /// The other host.
        node: u64,
    },
    /// It was removed in vain.
    #[error("host {node} still has a key on {}, or has registered it again{}", .lun.display(), after_colon(.failure.as_ref()))]
    StillThere {
        /// The host.
        node: u64,
        /// The LUN.
        lun: PathBuf,
        /// What the LUN has answered.
        failure: Option<DeviceError>,
    },
    /// The user is gone.
    #[error("the fence is not wanted any more")]
    Over,
}

impl ReservationError {
    /// Whether the reservation does not keep a node away that is still to be fenced, so that a command has to. Not if this node is fenced
    /// itself, or may not use the LUN: such a node fences nobody. Nor if the other one has just been admitted again.
    pub(super) fn asks_for_command(&self) -> bool {
        match self {
            ReservationError::Unused
            | ReservationError::Device(_)
            | ReservationError::SameBits { .. }
            | ReservationError::StillThere { failure: Some(_), .. } => true,
            ReservationError::StillThere { failure: None, .. }
            | ReservationError::Foreign { .. }
            | ReservationError::Left { .. }
            | ReservationError::NotRegistered { .. }
            | ReservationError::SwitchedOff { .. }
            | ReservationError::Over => false,
        }
    }
}

fn after_colon(failure: Option<&DeviceError>) -> String {
    failure.map_or_else(String::new, |failure| format!(": {failure}"))
}

/// Makes sure that no host has a key on a LUN that is to be a volume. One without reservations has none.
///
/// # Errors
/// [`ReservationError::Left`]; [`ReservationError::Device`]: it does not tell.
pub fn check_unused(lun: &Path) -> Result<(), ReservationError> {
    let found = match Device::open(lun).and_then(|device| device.read()) {
        Err(DeviceError::Unsupported { .. }) => return Ok(()),
        other => other?,
    };
    let what = match (found.keys.first(), found.reservation) {
        (Some(key), _) => format!("a registered key ({key})"),
        (None, Reservation::None) => return Ok(()),
        (None, _) => "a persistent reservation".to_owned(),
    };
    Err(ReservationError::Left { lun: lun.to_path_buf(), what })
}

/// This process's part in the reservation of a LUN. Its methods block for as long as the LUN does not answer.
#[derive(Clone, Debug)]
pub struct Reservations {
    /// This node uses them, if the device has them.
    pub is_on: bool,
    /// The LUN's path on this host.
    pub lun: PathBuf,
    /// This process's key.
    pub key: Key,
    /// What the LUN has accepted from a node before it is fenced has been executed after this long.
    pub wait: Duration,
}

impl Reservations {
    /// Registers this process's key, whether the node was fenced or not, in place of a former process's, and reserves the LUN for all that
    /// are registered. Returns whether the LUN has reservations.
    ///
    /// # Errors
    /// [`ReservationError`]: this node does not use the LUN. It may be registered.
    pub fn admit(&self) -> Result<bool, ReservationError> {
        let (device, found) = match self.device() {
            Err(ReservationError::Unused) => return Ok(false),
            other => other?,
        };
        self.check_foreign(&found)?;
        // A former process's key may stay on another path of this host. Nobody uses it there, and a fence removes it, too.
        device.register(self.key)?;
        self.reserved(&device, &device.read()?)?;
        self.check_own(&device.read()?)?;
        Ok(true)
    }

    /// Removes all keys of a node, waits for what the LUN has accepted from it, and makes sure that the LUN still shows that. `is_over` ends
    /// the wait.
    ///
    /// # Errors
    /// [`ReservationError::Unused`]: it is to be fenced in another way. Others: it may be fenced, but what it has issued may be under way.
    pub fn fence(&self, victim: Key, node: u64, is_over: impl Fn() -> bool) -> Result<(), ReservationError> {
        if victim.is_same_node(self.key) {
            return Err(ReservationError::SameBits { node });
        }
        let (device, mut found) = self.device()?;
        self.reserved(&device, &found)?;
        // The LUN may have taken its time to answer.
        if is_over() {
            return Err(ReservationError::Over);
        }
        let mut failure = None;
        for key in found.keys.extract_if(.., |key| key.is_same_node(victim)) {
            failure = device.preempt(self.key, key).err().or(failure);
        }
        let is_fenced = |failure: Option<DeviceError>| {
            let found = device.read()?;
            self.check_own(&found)?;
            if found.keys.iter().any(|key| key.is_same_node(victim)) {
                return Err(ReservationError::StillThere { node, lun: self.lun.clone(), failure });
            }
            Ok(())
        };
        is_fenced(failure)?;
        let until = Nanos::now() + self.wait;
        while Nanos::now() < until {
            if is_over() {
                return Err(ReservationError::Over);
            }
            thread::sleep(LOOK_AGAIN);
        }
        is_fenced(None)
    }

    /// Whether this process's key is registered, as it was. Makes the reservation again if somebody has ended it: it lets everybody write.
    ///
    /// # Errors
    /// [`ReservationError::NotRegistered`]: this node is fenced. Others: the LUN does not tell.
    pub fn check(&self) -> Result<(), ReservationError> {
        let (device, found) = self.device()?;
        if !found.keys.contains(&self.key) {
            return Err(ReservationError::NotRegistered { lun: self.lun.clone(), key: self.key });
        }
        self.reserved(&device, &found)
    }

    /// Takes this process's key back. The last one ends the reservation.
    ///
    /// # Errors
    /// [`ReservationError`]. The key may stay there, until this node registers again.
    pub fn leave(&self) -> Result<(), ReservationError> {
        let (device, found) = match self.device() {
            Err(ReservationError::Unused) => return Ok(()),
            other => other?,
        };
        match found.keys.contains(&self.key) {
            true => Ok(device.unregister(self.key)?),
            false => Ok(()),
        }
    }

    /// The device and what it shows, if this node uses reservations there.
    fn device(&self) -> Result<(Device, Registered), ReservationError> {
        let found = Device::open(&self.lun).and_then(|device| Ok((device.read()?, device)));
        match found {
            Err(DeviceError::Unsupported { .. }) => Err(ReservationError::Unused),
            Err(error) => Err(error.into()),
            Ok((found, device)) if self.is_on => Ok((device, found)),
            Ok((found, _)) if found.reservation == Reservation::None => Err(ReservationError::Unused),
            Ok(_) => Err(ReservationError::SwitchedOff { lun: self.lun.clone() }),
        }
    }

    fn reserved(&self, device: &Device, found: &Registered) -> Result<(), ReservationError> {
        match found.reservation {
            Reservation::Registrants => Ok(()),
            _ => Ok(device.reserve(self.key)?),
        }
    }

    fn check_foreign(&self, found: &Registered) -> Result<(), ReservationError> {
        let foreign = found.keys.iter().find(|key| !key.is_same_volume(self.key));
        let what = match (foreign, found.reservation) {
            (Some(key), _) => format!("a registered key ({key})"),
            (None, Reservation::Other) => "a persistent reservation".to_owned(),
            (None, Reservation::None | Reservation::Registrants) => return Ok(()),
        };
        Err(ReservationError::Foreign { lun: self.lun.clone(), what })
    }

    /// The LUN is reserved for those that are registered, and this process is.
    fn check_own(&self, found: &Registered) -> Result<(), ReservationError> {
        match found.reservation {
            Reservation::Registrants if found.keys.contains(&self.key) => Ok(()),
            Reservation::Registrants | Reservation::None => {
                Err(ReservationError::NotRegistered { lun: self.lun.clone(), key: self.key })
            }
            Reservation::Other => {
                let what = "a persistent reservation".to_owned();
                Err(ReservationError::Foreign { lun: self.lun.clone(), what })
            }
        }
    }
}
