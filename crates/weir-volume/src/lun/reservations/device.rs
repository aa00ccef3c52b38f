//! The kernel's and the LUN's interface to SCSI-3 persistent reservations.
//!
//! The kernel changes keys (`IOC_PR_*` of `linux/pr.h`), on each path of a multipath device. Since Linux 7.0 it also reads them. Before,
//! and where it does not, this module sends PERSISTENT RESERVE IN itself (`SG_IO`; SPC-4, section 6.15).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::key::Key;

/// `_IOW('p', 200, struct pr_registration)` and so on: the structures have 24, 16, 24, 16 and 16 bytes.
const IOC_PR_REGISTER: libc::Ioctl = 0x4018_70C8_u32 as libc::Ioctl;
const IOC_PR_RESERVE: libc::Ioctl = 0x4010_70C9_u32 as libc::Ioctl;
const IOC_PR_PREEMPT: libc::Ioctl = 0x4018_70CB_u32 as libc::Ioctl;
const IOC_PR_READ_KEYS: libc::Ioctl = 0xC010_70CE_u32 as libc::Ioctl;
const IOC_PR_READ_RESERVATION: libc::Ioctl = 0x8010_70CF_u32 as libc::Ioctl;
const SG_IO: libc::Ioctl = 0x2285;

/// The existing key of this path is replaced, whatever it is.
const PR_FL_IGNORE_KEY: u32 = 1;
/// Those that are registered write, and everybody reads; it outlives whoever has made it (`PR_WRITE_EXCLUSIVE_ALL_REGS`). The kernel's
/// number, and that of SPC-4.
const ALL_REGISTRANTS: u32 = 5;
const ALL_REGISTRANTS_SPC: u8 = 7;

/// SPC-4, table 213: of PERSISTENT RESERVE IN.
const READ_KEYS: u8 = 0;
const READ_RESERVATION: u8 = 1;
/// More keys than any cluster has.
const MOST_KEYS: usize = 1024;
/// SAM-5, section 5.3: status codes; SPC-4, section 4.5: sense keys.
const CHECK_CONDITION: u8 = 0x02;
const RESERVATION_CONFLICT: i32 = 0x18;
const ILLEGAL_REQUEST: u8 = 5;
const UNIT_ATTENTION: u8 = 6;
/// A LUN reports each event of the past once, instead of an answer.
const ATTEMPTS: u32 = 8;
/// The time limit of a command, in milliseconds: that of the kernel's own ones.
const LIMIT_MS: u32 = 30_000;

/// Why the LUN or the kernel has not done something.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This device has none.
    #[error("{} has no persistent reservations: {reason}", .path.display())]
    Unsupported {
        /// The device.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The LUN refuses it to this host: its key is not registered, or somebody else's reservation stands.
    #[error("{} refuses to {action}: reservation conflict", .path.display())]
    Conflict {
        /// The operation, as in "register a key".
        action: &'static str,
        /// The device.
        path: PathBuf,
    },
    /// Another answer of the LUN or of the path.
    #[error("{} cannot {action}: the answer is {status:#x}", .path.display())]
    Status {
        /// As above.
        action: &'static str,
        /// The device.
        path: PathBuf,
        /// SCSI: host byte and status byte. NVMe: the status.
        status: i32,
    },
    /// The kernel's error.
    #[error("cannot {action} on {}: {source}", .path.display())]
    System {
        /// As above.
        action: &'static str,
        /// The device.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// What a LUN shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// All keys, of all hosts and of other programs.
    pub keys: Vec<Key>,
    /// The reservation.
    pub reservation: Reservation,
}

/// A LUN's reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reservation {
    /// Everybody may write.
    #[default]
    None,
    /// Those that are registered may write.
    Registrants,
    /// Of another type: not Weir's.
    Other,
}

#[repr(C)]
struct Registration {
    old_key: u64,
    new_key: u64,
    flags: u32,
    pad: u32,
}

#[repr(C)]
struct Reserve {
    key: u64,
    kind: u32,
    flags: u32,
}

/// `old_key` is the own key, and `new_key` the one that is removed.
#[repr(C)]
struct Preempt {
    old_key: u64,
    new_key: u64,
    kind: u32,
    flags: u32,
}

#[repr(C)]
struct ReadKeys {
    generation: u32,
    count: u32,
    keys: *mut u64,
}

#[repr(C)]
#[derive(Default)]
struct ReadReservation {
    key: u64,
    generation: u32,
    kind: u32,
}

/// `struct sg_io_hdr` (`scsi/sg.h`).
#[repr(C)]
struct SgIo {
    interface: libc::c_int,
    direction: libc::c_int,
    command_length: u8,
    sense_limit: u8,
    pieces: u16,
    length: libc::c_uint,
    data: *mut u8,
    command: *const u8,
    sense: *mut u8,
    limit_ms: libc::c_uint,
    flags: libc::c_uint,
    number: libc::c_int,
    user: *mut libc::c_void,
    status: u8,
    masked_status: u8,
    message_status: u8,
    sense_length: u8,
    host_status: u16,
    driver_status: u16,
    residual: libc::c_int,
    duration: libc::c_uint,
    info: libc::c_uint,
}

/// A device that may have reservations.
#[derive(Debug)]
pub struct Device {
    file: File,
    path: PathBuf,
}

impl Device {
    /// Opens a whole LUN. A reservation is the LUN's: it would keep other hosts from what else is on it, if the device is a part of it.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`]: it is a part; [`DeviceError::System`].
    pub fn open(path: &Path) -> Result<Device, DeviceError> {
        let failed = |source| DeviceError::System { action: "open it", path: path.to_path_buf(), source };
        let file = File::open(path).map_err(failed)?;
        let number = file.metadata().map_err(failed)?.rdev();
        let base = PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(number), libc::minor(number)));
        let device = Device { file, path: path.to_path_buf() };
        if base.join("partition").exists() {
            return Err(device.unsupported("it is a partition"));
        }
        match std::fs::read_to_string(base.join("dm/uuid")) {
            Ok(uuid) if !uuid.starts_with("mpath-") => {
                Err(device.unsupported("it is a device-mapper device, and no multipath device"))
            }
            _ => Ok(device),
        }
    }

    fn unsupported(&self, reason: impl Into<String>) -> DeviceError {
        DeviceError::Unsupported { path: self.path.clone(), reason: reason.into() }
    }

    /// Registers a key for this host, in place of any other one of it. It lifts a fence.
    ///
    /// # Errors
    /// [`DeviceError`]. It may be registered.
    pub fn register(&self, key: Key) -> Result<(), DeviceError> {
        let mut argument = Registration { old_key: 0, new_key: key.0, flags: PR_FL_IGNORE_KEY, pad: 0 };
        self.change("register a key", IOC_PR_REGISTER, &mut argument)
    }

    /// Takes this host's key back. With the last key, the reservation ends.
    ///
    /// # Errors
    /// As above; [`DeviceError::Conflict`]: this host has another key, or none.
    pub fn unregister(&self, key: Key) -> Result<(), DeviceError> {
        let mut argument = Registration { old_key: key.0, new_key: 0, flags: 0, pad: 0 };
        self.change("take a key back", IOC_PR_REGISTER, &mut argument)
    }

    /// Reserves the LUN for all that are registered, now and later. `key`: this host's.
    ///
    /// # Errors
    /// As above; [`DeviceError::Conflict`]: it has another reservation.
    pub fn reserve(&self, key: Key) -> Result<(), DeviceError> {
        let mut argument = Reserve { key: key.0, kind: ALL_REGISTRANTS, flags: 0 };
        self.change("reserve it", IOC_PR_RESERVE, &mut argument)
    }

    /// Removes another host's key. What the LUN has accepted from that host goes on. (The command that aborts that, too, hung in Linux
    /// 6.1's target, and no signal ends a thread that waits for it.)
    ///
    /// # Errors
    /// As above. [`DeviceError::Conflict`]: this host has another key or none, or nobody has that one.
    pub fn preempt(&self, own: Key, other: Key) -> Result<(), DeviceError> {
        let mut argument = Preempt { old_key: own.0, new_key: other.0, kind: ALL_REGISTRANTS, flags: 0 };
        self.change("remove a key", IOC_PR_PREEMPT, &mut argument)
    }

    fn change<T>(
        &self,
        action: &'static str,
        request: libc::Ioctl,
        argument: &mut T,
    ) -> Result<(), DeviceError> {
        match self.ioctl(request, argument) {
            Ok(0) => Ok(()),
            // The LUN's answer is a positive number: since Linux 6.4 the status alone, before with the "message byte".
            Ok(status) if status & 0xFFFF_00FF_u32 as i32 == RESERVATION_CONFLICT => {
                Err(DeviceError::Conflict { action, path: self.path.clone() })
            }
            Ok(status) => Err(DeviceError::Status { action, path: self.path.clone(), status }),
            Err(source) => Err(self.failed(action, source)),
        }
    }

    fn failed(&self, action: &'static str, source: io::Error) -> DeviceError {
        match source.raw_os_error() {
            // The last one: a loop device's.
            Some(libc::ENOTTY | libc::EOPNOTSUPP | libc::EINVAL) => {
                self.unsupported("its driver does not know them")
            }
            _ => DeviceError::System { action, path: self.path.clone(), source },
        }
    }

    fn ioctl<T>(&self, request: libc::Ioctl, argument: &mut T) -> io::Result<i32> {
        loop {
            // SAFETY: each caller passes the structure that `request` names; the kernel writes to nothing else but what that points to.
            let answer = unsafe { libc::ioctl(self.file.as_raw_fd(), request, std::ptr::from_mut(argument)) };
            match answer {
                0.. => return Ok(answer),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// What the LUN shows now.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn read(&self) -> Result<Registered, DeviceError> {
        match self.read_by_kernel() {
            Err(DeviceError::Unsupported { .. }) => self.read_by_command(),
            other => other,
        }
    }

    fn read_by_kernel(&self) -> Result<Registered, DeviceError> {
        let mut keys = vec![0_u64; MOST_KEYS];
        let mut argument = ReadKeys { generation: 0, count: MOST_KEYS as u32, keys: keys.as_mut_ptr() };
        self.change("read the keys", IOC_PR_READ_KEYS, &mut argument)?;
        if argument.count as usize > MOST_KEYS {
            return Err(self.incomplete());
        }
        keys.truncate(argument.count as usize);
        let mut held = ReadReservation::default();
        self.change("read the reservation", IOC_PR_READ_RESERVATION, &mut held)?;
        let reservation = match held.kind {
            0 => Reservation::None,
            ALL_REGISTRANTS => Reservation::Registrants,
            _ => Reservation::Other,
        };
        Ok(Registered { keys: keys.into_iter().map(Key).collect(), reservation })
    }

    fn read_by_command(&self) -> Result<Registered, DeviceError> {
        let keys = keys_of(&self.command(READ_KEYS)?);
        let reservation = reservation_of(&self.command(READ_RESERVATION)?);
        match (keys, reservation) {
            (Some(keys), Some(reservation)) => Ok(Registered { keys, reservation }),
            _ => Err(self.incomplete()),
        }
    }

    /// A key that is not seen would look like one that was removed.
    fn incomplete(&self) -> DeviceError {
        let source = io::Error::new(io::ErrorKind::InvalidData, "its answer is incomplete");
        self.failed("read the keys", source)
    }

    /// PERSISTENT RESERVE IN.
    fn command(&self, action: u8) -> Result<Vec<u8>, DeviceError> {
        const DOING: &str = "read the keys";
        for _ in 0..ATTEMPTS {
            let (answer, sense) = match self.try_command(action) {
                Ok(Answer::Data(data)) => return Ok(data),
                Ok(Answer::Status { status, sense }) => (status, sense),
                Err(error) => return Err(self.failed(DOING, error)),
            };
            match (answer, sense) {
                (_, Some(UNIT_ATTENTION)) => {}
                (_, Some(ILLEGAL_REQUEST)) => return Err(self.unsupported("the LUN does not know them")),
                (status, _) => {
                    return Err(DeviceError::Status { action: DOING, path: self.path.clone(), status });
                }
            }
        }
        Err(DeviceError::Status { action: DOING, path: self.path.clone(), status: CHECK_CONDITION.into() })
    }

    fn try_command(&self, action: u8) -> io::Result<Answer> {
        let mut data = vec![0_u8; 8 + 8 * MOST_KEYS];
        let length = (data.len() as u16).to_be_bytes();
        let command = [0x5E, action, 0, 0, 0, 0, 0, length[0], length[1], 0];
        let mut sense = [0_u8; 32];
        let mut argument = SgIo {
            interface: i32::from(b'S'),
            // From the device.
            direction: -3,
            command_length: command.len() as u8,
            sense_limit: sense.len() as u8,
            pieces: 0,
            length: data.len() as libc::c_uint,
            data: data.as_mut_ptr(),
            command: command.as_ptr(),
            sense: sense.as_mut_ptr(),
            limit_ms: LIMIT_MS,
            flags: 0,
            number: 0,
            user: std::ptr::null_mut(),
            status: 0,
            masked_status: 0,
            message_status: 0,
            sense_length: 0,
            host_status: 0,
            driver_status: 0,
            residual: 0,
            duration: 0,
            info: 0,
        };
        self.ioctl(SG_IO, &mut argument)?;
        if argument.status == 0 && argument.host_status == 0 {
            data.truncate(data.len().saturating_sub(argument.residual.max(0) as usize));
            return Ok(Answer::Data(data));
        }
        let is_sensed = argument.status == CHECK_CONDITION && argument.sense_length >= 8;
        // SPC-4, section 4.5: in fixed and in descriptor format.
        let sense = match sense[0] & 0x7F {
            0x70 | 0x71 if is_sensed => Some(sense[2] & 0xF),
            0x72 | 0x73 if is_sensed => Some(sense[1] & 0xF),
            _ => None,
        };
        let status = i32::from(argument.host_status) << 16 | i32::from(argument.status);
        Ok(Answer::Status { status, sense })
    }
}

/// Of a SCSI command.
enum Answer {
    Data(Vec<u8>),
    Status { status: i32, sense: Option<u8> },
}

/// READ KEYS: the generation, the length of what follows, and the keys. `None`: the answer is cut off.
fn keys_of(data: &[u8]) -> Option<Vec<Key>> {
    let list = listed(data)?;
    Some(
        list.chunks_exact(8)
            .map(|key| Key(u64::from_be_bytes(key.try_into().expect("eight bytes"))))
            .collect(),
    )
}

/// READ RESERVATION: the generation, the length, and if there is a reservation, key, four obsolete bytes, one of zeroes, and the type.
fn reservation_of(data: &[u8]) -> Option<Reservation> {
    Some(match listed(data)? {
        [] => Reservation::None,
        list => match list.get(13)? & 0xF {
            ALL_REGISTRANTS_SPC => Reservation::Registrants,
            _ => Reservation::Other,
        },
    })
}

fn listed(data: &[u8]) -> Option<&[u8]> {
    let length = u32::from_be_bytes(data.get(4..8)?.try_into().expect("four bytes"));
    data.get(8..8_usize.checked_add(length as usize)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Answers of Linux 6.1's target.
    #[test]
    fn answers_of_a_lun_are_read() {
        let mut keys = vec![0, 0, 0, 2, 0, 0, 0, 16];
        keys.extend(1_u64.to_be_bytes());
        keys.extend(0x57AB_u64.to_be_bytes());
        assert_eq!(keys_of(&keys), Some(vec![Key(1), Key(0x57AB)]));
        assert_eq!(keys_of(&keys[..20]), None, "it says that there are more");
        assert_eq!(keys_of(&[0, 0, 0, 2, 0, 0, 0, 0]), Some(Vec::new()));
        let mut held = vec![0, 0, 0, 2, 0, 0, 0, 16];
        held.extend([0; 16]);
        held[8 + 13] = 7;
        assert_eq!(reservation_of(&held), Some(Reservation::Registrants));
        held[8 + 13] = 5;
        assert_eq!(reservation_of(&held), Some(Reservation::Other));
        assert_eq!(reservation_of(&held[..12]), None);
        assert_eq!(reservation_of(&[0, 0, 0, 2, 0, 0, 0, 0]), Some(Reservation::None));
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        let size_in = |request: libc::Ioctl| (request as u32 >> 16 & 0x3FFF) as usize;
        assert_eq!(size_of::<Registration>(), size_in(IOC_PR_REGISTER));
        assert_eq!(size_of::<Reserve>(), size_in(IOC_PR_RESERVE));
        assert_eq!(size_of::<Preempt>(), size_in(IOC_PR_PREEMPT));
        assert_eq!(size_of::<ReadKeys>(), size_in(IOC_PR_READ_KEYS));
        assert_eq!(size_of::<ReadReservation>(), size_in(IOC_PR_READ_RESERVATION));
        assert_eq!(size_of::<SgIo>(), 88);
    }

    #[test]
    fn what_has_no_reservations_says_so() {
        // No device at all: its driver knows no such call.
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = Device::open(file.path()).unwrap();
        assert!(matches!(device.read(), Err(DeviceError::Unsupported { .. })), "{:?}", device.read());
        let registered = device.register(Key(1));
        assert!(matches!(registered, Err(DeviceError::Unsupported { .. })), "{registered:?}");
    }
}
