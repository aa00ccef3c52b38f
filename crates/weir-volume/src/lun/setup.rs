//! Makes a LUN a volume: looks at what it has, says what would be done, and does it.
//!
//! Nothing is formatted, and nothing mounted, unless the operator repeats the LUN's identity: a filesystem does not show whether another
//! host has it mounted, and a second mount destroys it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use weir_block::Nanos;
use weir_block::size::Size;

use super::filesystem::mount::{drop_buffers, exclusive};
use super::filesystem::pages::Pages;
use super::filesystem::{Content, FilesystemError, Kind, Mounted, Superblock, content};
use super::heartbeat::area::{behind, in_file, is_free, volume_at};
use super::heartbeat::layout::AREA;
use super::heartbeat::listener::{BEAT_EVERY, SILENCE};
use super::heartbeat::{Area, Slot, VolumeId};
use super::identity::identity;
use super::mkfs;
use super::reservations::check_unused;
use super::setup_error::SMALLEST;
pub use super::setup_error::{SetupError, several_paths};
use super::survey::Survey;

/// The filesystem ends at a multiple of this many bytes.
const ALIGNMENT: u64 = 1 << 20;
/// Bytes at each end of a LUN where former formats have their signatures.
const SIGNATURES: u64 = 4 << 20;

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lun {
    /// The path, as given.
    pub path: PathBuf,
    /// By which this LUN is known on every host: its WWN or serial number, or what there is.
    pub identity: String,
    /// Bytes.
    pub size: u64,
    /// Smallest unit of I/O on this path, in bytes.
    pub sector: u32,
    /// Its filesystem, if it has one that a volume can have.
    pub content: Content,
    /// What else there is.
    pub survey: Survey,
}

/// What the operator wants of a LUN.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Make this filesystem. Whatever is there is lost.
    pub format: Option<Kind>,
    /// The LUN's identity, repeated.
    pub identity: Option<String>,
    /// A format may destroy what is there.
    pub destroy: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Make a filesystem, of this many bytes, and the heartbeat area behind it.
    Format {
        /// Which one.
        kind: Kind,
        /// Bytes.
        size: u64,
    },
    /// Use the one that is there, with the heartbeat area behind it, from this byte.
    UseBehind(u64),
    /// Use the one that is there, with the heartbeat area in a file.
    UseInFile,
}

impl Plan {
    /// In words.
    #[must_use]
    pub fn describe(&self, lun: &Lun) -> String {
        let (path, identity) = (lun.path.display(), &lun.identity);
        match self {
            Plan::Format { kind, size } => format!(
                "format {path} (LUN {identity}) with {kind}, {} of {}; {}",
                Size(*size),
                Size(lun.size),
                match lun.is_blank() {
                    true => format!("found there: {}", lun.describe()),
                    false => format!("this DESTROYS what is there: {}", lun.describe()),
                }
            ),
            Plan::UseBehind(_) => {
                format!(
                    "use the {} on {path} (LUN {identity}), with a heartbeat area behind it",
                    lun.describe()
                )
            }
            Plan::UseInFile => {
                format!(
                    "use the {} on {path} (LUN {identity}), with a heartbeat area in a file",
                    lun.describe()
                )
            }
        }
    }
}

/// A LUN that is ready to be a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Its filesystem.
    pub superblock: Superblock,
    /// First byte of the heartbeat area.
    pub area: u64,
}

impl Lun {
    /// Looks at a path. Changes nothing; but it may find the LUN in use only on this host. Blocks.
    ///
    /// # Errors
    /// [`SetupError::NotADevice`], [`SetupError::Filesystem`] ([`FilesystemError::is_busy`]: mounted on this host).
    pub fn examine(path: &Path) -> Result<Lun, SetupError> {
        let metadata = std::fs::metadata(path).map_err(FilesystemError::system("examine", path))?;
        if !metadata.file_type().is_block_device() {
            return Err(SetupError::NotADevice(path.to_path_buf()));
        }
        let device = exclusive(path)?;
        // Another host may have written since this one looked last.
        drop_buffers(&device, path)?;
        let failed = |error: rustix::io::Errno| FilesystemError::system("examine", path)(error.into());
        let sector = rustix::fs::ioctl_blksszget(&device).map_err(failed)?;
        let size = rustix::fs::seek(&device, rustix::fs::SeekFrom::End(0)).map_err(failed)?;
        let content = content(&device, path)?;
        let survey = Survey::new(&direct(path)?, path, size)?;
        let (path, identity) = (path.to_path_buf(), identity(metadata.rdev(), size));
        Ok(Lun { path, identity, size, sector, content, survey })
    }

    /// Whether nothing was found on it. See [`Survey::is_blank`].
    #[must_use]
    pub fn is_blank(&self) -> bool {
        self.content == Content::Other && self.survey.is_blank()
    }

    /// A format that its filesystem has not.
    fn other_format(&self, kind: Kind) -> Option<String> {
        let is_other = |name: &&String| name.split(' ').next() != Some(kind.name());
        self.survey.recognised.iter().find(is_other).cloned()
    }

    /// What it has, in words.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.content {
            Content::Other => self.survey.describe(),
            Content::Filesystem(found) => {
                let label = match found.label.is_empty() {
                    true => "without a label".to_owned(),
                    false => format!("{:?}", found.label),
                };
                let beside = self.other_format(found.kind).map(|other| format!(", and {other}"));
                format!("{} {label}{}", found.kind, beside.unwrap_or_default())
            }
        }
    }

    /// What is to be done to make it a volume. Changes nothing.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn plan(&self, wish: &Wish) -> Result<Plan, SetupError> {
        let (path, identity) = (self.path.clone(), self.identity.clone());
        if self.size < SMALLEST {
            return Err(SetupError::TooSmall { path, size: self.size });
        }
        if let Some(said) = wish.identity.clone().filter(|said| *said != identity) {
            return Err(SetupError::OtherLun { path, identity, said });
        }
        match (&self.content, wish.format) {
            (_, Some(kind)) => {
                let size = (self.size - AREA as u64) / ALIGNMENT * ALIGNMENT;
                Ok(Plan::Format { kind, size })
            }
            (Content::Filesystem(Superblock { unsuitable: Some(source), .. }), None) => {
                Err(FilesystemError::Unsuitable { path, source: source.clone() }.into())
            }
            (Content::Filesystem(found), None) => {
                if let Some(other) = self.other_format(found.kind) {
                    return Err(SetupError::Ambiguous { path, kind: found.kind, found: other });
                }
                if found.sector < self.sector {
                    let (filesystem, path_sector) = (found.sector, self.sector);
                    return Err(FilesystemError::Sectors { path, filesystem, path_sector }.into());
                }
                Ok(behind(found, self.size).map_or(Plan::UseInFile, Plan::UseBehind))
            }
            (Content::Other, None) => {
                Err(SetupError::NoFilesystem { path, found: self.describe(), identity })
            }
        }
    }

    /// Looks for whoever uses the LUN: for their keys, and if it has a heartbeat area, for some seconds for their heartbeats.
    ///
    /// # Errors
    /// [`SetupError::InUse`], [`SetupError::Heartbeat`], [`SetupError::Reservation`].
    pub fn listen(&self) -> Result<(), SetupError> {
        check_unused(&self.path)?;
        let Content::Filesystem(found) = &self.content else { return Ok(()) };
        let Some(at) = behind(found, self.size) else { return Ok(()) };
        let Some(volume) = volume_at(&self.path, at)? else { return Ok(()) };
        let mut area = Area::open(&self.path, at, volume)?;
        let (first, until) = (area.slots()?, Nanos::now() + SILENCE + BEAT_EVERY);
        while Nanos::now() < until {
            thread::sleep(BEAT_EVERY / 2);
            let changed = area.slots()?.into_iter().zip(&first).find(|(now, before)| now != *before);
            if let Some((Slot::Beat(beat), _)) = changed {
                return Err(SetupError::InUse { path: self.path.clone(), volume, beat: Box::new(beat) });
            }
        }
        Ok(())
    }

    /// Carries a plan out, after the operator has repeated the identity. `may_write`: no other process sets the LUN up; it is asked before
    /// each write, and a program that writes is ended when it may not go on. Blocks.
    ///
    /// # Errors
    /// [`SetupError`]. A format that has begun may have destroyed what was there.
    pub fn set_up(
        &self,
        plan: &Plan,
        wish: &Wish,
        volume: VolumeId,
        label: &str,
        may_write: &dyn Fn() -> bool,
    ) -> Result<Ready, SetupError> {
        let (path, identity) = (self.path.clone(), self.identity.clone());
        if wish.identity.as_ref() != Some(&identity) {
            return Err(SetupError::NotConfirmed { path, identity, what: plan.describe(self) });
        }
        if matches!(plan, Plan::Format { .. }) && !self.is_blank() && !wish.destroy {
            return Err(SetupError::HasData { path, identity, found: self.describe() });
        }
        self.listen()?;
        self.check_goes_on(may_write)?;
        // The plan is for what was there when the operator's word was checked, and the listening has taken seconds.
        let now = Lun::examine(&self.path)?;
        if now != *self {
            return Err(SetupError::Changed { path, before: self.describe(), now: now.describe() });
        }
        if let Plan::UseBehind(at) = plan
            && !wish.destroy
            && !is_free(&self.path, *at)?
        {
            return Err(SetupError::DataBehind { path, at: *at });
        }
        let superblock = match (plan, &self.content) {
            (Plan::Format { kind, size }, _) => self.format(*kind, *size, label, may_write)?,
            (_, Content::Filesystem(found)) => found.clone(),
            (_, Content::Other) => {
                return Err(SetupError::NoFilesystem { path, found: self.describe(), identity });
            }
        };
        self.check_goes_on(may_write)?;
        let area = match behind(&superblock, self.size) {
            Some(at) if *plan != Plan::UseInFile => {
                // Of a former volume, whose nodes were listened for.
                wipe(&self.path, at)?;
                at
            }
            _ => {
                let mounted = Mounted::new(&self.path)?;
                let at = in_file(&mounted)?;
                drop(mounted);
                wipe(&self.path, at)?;
                at
            }
        };
        self.check_goes_on(may_write)?;
        Area::create(&self.path, area, volume)?;
        Ok(Ready { superblock, area })
    }

    fn check_goes_on(&self, may_write: &dyn Fn() -> bool) -> Result<(), SetupError> {
        match may_write() {
            true => Ok(()),
            false => Err(SetupError::Ended(self.path.clone())),
        }
    }

    fn format(
        &self,
        kind: Kind,
        size: u64,
        label: &str,
        may_write: &dyn Fn() -> bool,
    ) -> Result<Superblock, SetupError> {
        // mkfs leaves the signatures of other formats where it writes nothing itself.
        for at in [0, self.size.saturating_sub(SIGNATURES) / ALIGNMENT * ALIGNMENT] {
            self.check_goes_on(may_write)?;
            zero(&self.path, at, (self.size - at).min(SIGNATURES + ALIGNMENT))?;
        }
        mkfs::make(kind, &self.path, size, label, may_write)?;
        let device = File::open(&self.path).map_err(FilesystemError::system("open", &self.path))?;
        match content(&device, &self.path)? {
            Content::Filesystem(found) if found.unsuitable.is_none() => Ok(found),
            other => Err(SetupError::Format {
                program: mkfs::program(kind),
                path: self.path.clone(),
                said: format!("it has made what cannot be used: {other:?}"),
            }),
        }
    }
}

/// Writes zeroes where a heartbeat area is to be.
fn wipe(path: &Path, at: u64) -> Result<(), FilesystemError> {
    zero(path, at, AREA as u64)
}

fn zero(path: &Path, at: u64, length: u64) -> Result<(), FilesystemError> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_DIRECT | libc::O_DSYNC | libc::O_CLOEXEC);
    let file = options.open(path).map_err(FilesystemError::system("open", path))?;
    let zeroes = Pages::new(length as usize);
    file.write_all_at(&zeroes.bytes()[..length as usize], at).map_err(FilesystemError::system("write", path))
}

/// For reading past this host's buffers.
fn direct(path: &Path) -> Result<File, FilesystemError> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT | libc::O_CLOEXEC);
    options.open(path).map_err(FilesystemError::system("open", path))
}
