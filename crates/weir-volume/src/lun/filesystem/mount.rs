//! A detached mount: of a filesystem that is in no mount table, at no path, and so in reach of no other program (`fsopen`, `fsconfig`,
//! `fsmount`; Linux 5.2). It ends with its last descriptor, thus with the process.
//!
//! There is nothing in Linux that keeps a defragmenter, `fstrim` or a curious user from an ordinary mount. And one that has leaked into
//! another process's mount namespace outlives `umount`, and blocks the next coordinator (`VOLUME.md` §1).

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Dir, Mode, OFlags, RenameFlags, ResolveFlags, StatVfs, StatVfsMountFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use super::error::{FilesystemError, MAY_BE_OF_NODE, REFUSED};
use super::extent_sizes::prepare_directory;
use super::handle;
use super::identify::{content, open_lun};
use super::superblock::{Content, Kind, Superblock};
use crate::error::is_damage;
use crate::lun::identity::identity_of;

/// Longest message of the kernel that is kept, in bytes.
const LONGEST_MESSAGE: usize = 1024;
/// Attempts to use a LUN that is in use, and the pause between two: half a second.
const BUSY_ATTEMPTS: u32 = 25;
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// `_IO(0x12, 97)` (Linux, `include/uapi/linux/fs.h`).
const BLKFLSBUF: libc::Ioctl = 0x1261;

/// A filesystem that only the holder of this can reach.
#[derive(Debug)]
pub struct Mounted {
    /// Its root directory. Closed first.
    root: OwnedFd,
    /// The mount, which ends with this descriptor, as soon as no file in it is open any more.
    _mount: OwnedFd,
    lun: PathBuf,
    /// The LUN's, if it has one: the path may lead to a copy later.
    identity: Option<String>,
    superblock: Superblock,
    /// Files of which an operator was told that they are not served.
    told: Mutex<BTreeSet<String>>,
    /// Files of which it may have more than it shows, by their inodes.
    distrusted: Mutex<BTreeSet<u64>>,
    /// Something has failed with it, and the coordinator's next look is due.
    is_suspect: AtomicBool,
}

impl Mounted {
    /// Mounts the filesystem on `lun`: drops what this host has in its buffers of the LUN, and replays the filesystem's log. The caller
    /// has made sure that nobody else has it mounted ([`crate::lun::claim`]).
    ///
    /// Needs root (`CAP_SYS_ADMIN`).
    ///
    /// # Errors
    /// [`FilesystemError`]. Nothing is mounted then. [`FilesystemError::is_busy`]: something on this host has the LUN open exclusively,
    /// or mounted.
    pub fn new(lun: &Path) -> Result<Mounted, FilesystemError> {
        let device = exclusive(lun)?;
        // Whatever an earlier look has left here is older than what another node has written since.
        drop_buffers(&device, lun)?;
        let superblock = suitable(&device, lun)?;
        let found = device.metadata().map_err(FilesystemError::system("examine", lun))?;
        let identity = identity_of(found.rdev());
        check_sectors(&device, lun, &superblock)?;
        // The kernel opens it exclusively itself.
        drop(device);
        let mount =
            patiently(|| mount(lun, superblock.kind)).map_err(|error| explained(error, &superblock))?;
        // The mount's own descriptor is for paths only (`O_PATH`).
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&mount, ".", flags, Mode::empty())
            .map_err(|error| FilesystemError::system("open the root directory of", lun)(error.into()))?;
        if superblock.kind == Kind::Xfs {
            prepare_directory(&root, lun)?;
        }
        Ok(Mounted {
            root,
            _mount: mount,
            lun: lun.to_path_buf(),
            identity,
            superblock,
            told: Mutex::default(),
            distrusted: Mutex::default(),
            is_suspect: AtomicBool::new(false),
        })
    }

    /// What it has of a file is not known, until it is mounted anew. Returns whether that is news.
    pub(in crate::lun) fn distrust(&self, inode: u64) -> bool {
        self.distrusted.lock().unwrap_or_else(PoisonError::into_inner).insert(inode)
    }

    /// Whether what it shows of a file is all that it has.
    pub(in crate::lun) fn trusts(&self, inode: u64) -> bool {
        !self.distrusted.lock().unwrap_or_else(PoisonError::into_inner).contains(&inode)
    }

    /// Tells an operator, once, that a file of it has an extent-size hint, of `bytes`, which XFS takes back from none that has extents.
    pub(in crate::lun) fn tell_hint(&self, name: &str, bytes: u32) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert(name.to_owned()) {
            let remedy = "`weir disk compact` gives the disk a file without it";
            tracing::warn!(
                file = name,
                bytes,
                remedy,
                "a disk's file has an extent-size hint: all of its I/O is redirected"
            );
        }
    }

    /// The LUN's path on this host.
    #[must_use]
    pub fn lun(&self) -> &Path {
        &self.lun
    }

    /// The identity of the LUN on which it was mounted.
    #[must_use]
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// What its superblock says.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Opens a regular file in its root directory for direct I/O, past the page cache: another node's writes do not go through that.
    ///
    /// # Errors
    /// [`FilesystemError::System`]. A name that leads elsewhere (`..`, a link, another directory) is refused.
    pub fn open(&self, name: &str) -> Result<File, FilesystemError> {
        self.open_with(name, OFlags::empty())
    }

    /// Opens `file`, which is of this filesystem, once more for direct I/O that changes no times of the file, where the filesystem can do
    /// that (XFS). Elsewhere the first write after each tick of the kernel's clock has a time to change. io_uring leaves such a write to
    /// another thread, so that later ones come before it.
    ///
    /// # Errors
    /// The system's.
    pub fn open_without_times(&self, file: &File) -> io::Result<File> {
        match self.superblock.kind {
            Kind::Xfs => handle::open_without_times(&self.root, file),
            Kind::Ext4 => file.try_clone(),
        }
    }

    /// Creates a file in its root directory, mode 0600, and opens it as [`Mounted::open`] does.
    ///
    /// # Errors
    /// [`FilesystemError::System`]; it exists.
    pub fn create(&self, name: &str) -> Result<File, FilesystemError> {
        self.open_with(name, OFlags::CREATE | OFlags::EXCL)
    }

    /// Examines a file in its root directory, without following a link.
    ///
    /// # Errors
    /// [`FilesystemError::System`]; [`FilesystemError::is_absent`].
    pub fn stat(&self, name: &str) -> Result<rustix::fs::Stat, FilesystemError> {
        let path = self.lun.join(name);
        let found = match name.is_empty() || name.contains('/') {
            true => Err(rustix::io::Errno::INVAL),
            false => rustix::fs::statat(&self.root, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW),
        };
        found.map_err(|error| FilesystemError::system("examine", &path)(error.into()))
    }

    /// Removes a file from its root directory.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn remove(&self, name: &str) -> Result<(), FilesystemError> {
        let path = self.lun.join(name);
        let removed = match name.contains('/') {
            true => Err(rustix::io::Errno::INVAL),
            false => rustix::fs::unlinkat(&self.root, name, rustix::fs::AtFlags::empty()),
        };
        removed.map_err(|error| FilesystemError::system("remove", &path)(error.into()))
    }

    /// Renames a file of its root directory, unless there is another one of the new name.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn rename(&self, from: &str, to: &str) -> Result<(), FilesystemError> {
        self.rename_with(from, to, RenameFlags::NOREPLACE)
    }

    /// Renames a file of its root directory to a name that another one may have, which is gone then.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn replace(&self, from: &str, to: &str) -> Result<(), FilesystemError> {
        self.rename_with(from, to, RenameFlags::empty())
    }

    fn rename_with(&self, from: &str, to: &str, flags: RenameFlags) -> Result<(), FilesystemError> {
        let path = self.lun.join(to);
        let renamed = match from.contains('/') || to.contains('/') {
            true => Err(rustix::io::Errno::INVAL),
            false => rustix::fs::renameat_with(&self.root, from, &self.root, to, flags),
        };
        renamed.map_err(|error| FilesystemError::system("rename a file to", &path)(error.into()))
    }

    /// The names in its root directory.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn names(&self) -> Result<Vec<String>, FilesystemError> {
        let failed = |error: rustix::io::Errno| {
            FilesystemError::system("read the root directory of", &self.lun)(error.into())
        };
        let entries = Dir::read_from(&self.root).map_err(failed)?;
        let mut names = Vec::new();
        for entry in entries {
            // Other programs' names, which need not be text, are none of ours.
            names.extend(entry.map_err(failed)?.file_name().to_str().ok().map(str::to_owned));
        }
        Ok(names)
    }

    fn open_with(&self, name: &str, extra: OFlags) -> Result<File, FilesystemError> {
        let path = self.lun.join(name);
        let failed = FilesystemError::system("open", &path);
        if name.is_empty() || name.contains('/') {
            return Err(failed(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOFOLLOW | extra;
        let mode = if extra.is_empty() { Mode::empty() } else { Mode::RUSR | Mode::WUSR };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let file = rustix::fs::openat2(&self.root, name, flags, mode, resolve);
        file.map(File::from).map_err(|error| failed(error.into()))
    }

    /// How full it is.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn statvfs(&self) -> Result<StatVfs, FilesystemError> {
        let space = rustix::fs::fstatvfs(&self.root);
        space.map_err(|error| FilesystemError::system("measure", &self.lun)(error.into()))
    }

    /// Bytes of it, and those of them that are free.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn space(&self) -> Result<(u64, u64), FilesystemError> {
        let space = self.statvfs()?;
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        Ok((bytes(space.f_blocks), bytes(space.f_bavail)))
    }

    /// Looks whether the filesystem works, and this host reaches the LUN. One that cannot write to its LUN shuts down, and all that it is asked
    /// for fails from then on, until it is mounted again: XFS refuses `fstat` then, ext4 `fsync`. One that ext4 has made read-only says so,
    /// or refuses `fsync`, depending on the kernel. Blocks on the LUN.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn check(&self) -> Result<(), FilesystemError> {
        let failed = |action| FilesystemError::system(action, &self.lun);
        let system = |action| move |error: rustix::io::Errno| failed(action)(error.into());
        rustix::fs::fstat(&self.root).map_err(system("examine the filesystem on"))?;
        self.check_writable()?;
        rustix::fs::fsync(&self.root).map_err(system("sync the filesystem on"))?;
        self.read_lun()
    }

    /// Whether `error`, of an operation on a file in it, comes from the filesystem as a whole, which has shut down or does not reach its LUN.
    /// Another node can do then what this one cannot, unless what is on the LUN is damaged. Blocks as [`Mounted::check`] does.
    pub fn has_failed(&self, error: &io::Error) -> bool {
        self.suspect(error) && !is_damage(error) && self.check().is_err()
    }

    /// Something that was done with it has ended with this error: its coordinator looks at it soon, if it may be the filesystem's own, which
    /// is returned.
    pub(in crate::lun) fn suspect(&self, error: &io::Error) -> bool {
        let may_be = |errno| MAY_BE_OF_NODE.contains(&errno) || REFUSED.contains(&errno);
        let is_suspect = error.raw_os_error().is_some_and(may_be);
        if is_suspect {
            self.is_suspect.store(true, Ordering::Relaxed);
        }
        is_suspect
    }

    /// Whether it is suspect since the last call.
    pub(in crate::lun) fn take_suspicion(&self) -> bool {
        self.is_suspect.swap(false, Ordering::Relaxed)
    }

    fn check_writable(&self) -> Result<(), FilesystemError> {
        if !self.statvfs()?.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(libc::EROFS);
        Err(FilesystemError::system("write to the filesystem on", &self.lun)(source))
    }

    fn read_lun(&self) -> Result<(), FilesystemError> {
        match open_lun(&self.lun, self.superblock.uuid, self.identity(), false, None) {
            Ok(_) => Ok(()),
            // It says nothing of the LUN.
            Err(FilesystemError::System { source, .. }) if is_of_host(&source) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes everything that was done in it durable.
    ///
    /// # Errors
    /// [`FilesystemError::System`].
    pub fn sync(&self) -> Result<(), FilesystemError> {
        let synced = rustix::fs::syncfs(&self.root);
        synced.map_err(|error| FilesystemError::system("sync", &self.lun)(error.into()))?;
        // On a filesystem that ext4 has made read-only after an error, `syncfs` does nothing and succeeds, in kernels that mark it so.
        self.check_writable()
    }
}

/// The host, or this process, has no descriptor or no memory left.
fn is_of_host(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Opens a LUN exclusively: nothing else on this host has it mounted, or open in the same way. That is the proof that former processes of
/// this host have let go of it. Waits for half a second at most.
///
/// # Errors
/// [`FilesystemError::System`].
pub fn exclusive(lun: &Path) -> Result<File, FilesystemError> {
    let mut options = OpenOptions::new();
    // Not for writing: a host that is fenced may be refused that, and has to prove this before it is admitted again.
    options.read(true).custom_flags(libc::O_EXCL | libc::O_CLOEXEC);
    patiently(|| options.open(lun).map_err(FilesystemError::system("open exclusively", lun)))
}

/// Drops what this host has in its buffers of a LUN.
///
/// # Errors
/// The system's.
pub fn drop_buffers(device: &File, lun: &Path) -> Result<(), FilesystemError> {
    // SAFETY: BLKFLSBUF has no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), BLKFLSBUF, 0) } != 0 {
        return Err(FilesystemError::system("drop the buffers of", lun)(io::Error::last_os_error()));
    }
    Ok(())
}

/// Paths to one LUN may differ in their sectors, and a filesystem is made on one of them.
fn check_sectors(device: &File, lun: &Path, superblock: &Superblock) -> Result<(), FilesystemError> {
    let path_sector = rustix::fs::ioctl_blksszget(device)
        .map_err(|error| FilesystemError::system("ask for the sector size of", lun)(error.into()))?;
    match superblock.sector {
        filesystem if filesystem < path_sector => {
            Err(FilesystemError::Sectors { path: lun.to_path_buf(), filesystem, path_sector })
        }
        _ => Ok(()),
    }
}

fn suitable(device: &File, lun: &Path) -> Result<Superblock, FilesystemError> {
    let unsuitable = |source| FilesystemError::Unsuitable { path: lun.to_path_buf(), source };
    match content(device, lun)? {
        Content::Filesystem(Superblock { unsuitable: Some(source), .. }) => Err(unsuitable(source)),
        Content::Filesystem(found) => Ok(found),
        Content::Other => {
            let source = io::Error::new(io::ErrorKind::InvalidData, "it has neither ext4 nor XFS");
            Err(FilesystemError::System { action: "mount", path: lun.to_path_buf(), source })
        }
    }
}

/// Repeats for a moment what finds the LUN in use: a process that this one is about to start has each descriptor that was just closed
/// here until it executes its program.
fn patiently<T>(attempt: impl Fn() -> Result<T, FilesystemError>) -> Result<T, FilesystemError> {
    for _ in 0..BUSY_ATTEMPTS {
        match attempt() {
            Err(error) if error.is_busy() || is_unmounting(&error) => std::thread::sleep(BUSY_PAUSE),
            done => return done,
        }
    }
    attempt()
}

/// XFS takes no filesystem of the same identity twice on a host, and on another path to the LUN an unmount of this host may still be under way.
fn is_unmounting(error: &FilesystemError) -> bool {
    matches!(error, FilesystemError::Mount { kind: Kind::Xfs, source, .. } if source.raw_os_error() == Some(libc::EINVAL))
}

/// The kernel's own words for that, "duplicate UUID", are in its log alone. On hosts of their own, two nodes share no kernel.
fn explained(error: FilesystemError, superblock: &Superblock) -> FilesystemError {
    match (&error, is_unmounting(&error)) {
        (FilesystemError::Mount { path, .. }, true) => match mounted_elsewhere(path, superblock.uuid) {
            Some(other) => FilesystemError::InThisKernel { path: path.clone(), other },
            None => error,
        },
        _ => error,
    }
}

/// Another device of this host by which XFS has a filesystem of this identity mounted, at a path or not.
fn mounted_elsewhere(lun: &Path, uuid: [u8; 16]) -> Option<PathBuf> {
    let own = lun.canonicalize().ok()?;
    let mounted = std::fs::read_dir("/sys/fs/xfs").ok()?.flatten();
    let devices = mounted.map(|entry| Path::new("/dev").join(entry.file_name()));
    devices.filter(|device| *device != own).find(|device| {
        let found = File::open(device).ok().and_then(|opened| content(&opened, device).ok());
        matches!(found, Some(Content::Filesystem(found)) if found.uuid == uuid)
    })
}

fn mount(lun: &Path, kind: Kind) -> Result<OwnedFd, FilesystemError> {
    let context = fsopen(kind.name(), FsOpenFlags::FSOPEN_CLOEXEC)
        .map_err(|error| FilesystemError::system("prepare a mount of", lun)(error.into()))?;
    let mounted = || -> rustix::io::Result<OwnedFd> {
        let context = context.as_fd();
        fsconfig_set_string(context, "source", lun)?;
        // A discard that comes late would hit blocks that are another file's by then.
        fsconfig_set_flag(context, "nodiscard")?;
        if kind == Kind::Ext4 {
            fsconfig_set_string(context, "data", "ordered")?;
            fsconfig_set_string(context, "errors", "remount-ro")?;
        }
        fsconfig_create(context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOATIME
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC
            | MountAttrFlags::MOUNT_ATTR_NOSUID;
        fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    mounted().map_err(|error| FilesystemError::Mount {
        path: lun.to_path_buf(),
        kind,
        said: said(context.as_fd()),
        source: error.into(),
    })
}

/// What the kernel says of a mount that failed: one message for each read (`fs/fsopen.c`).
fn said(context: BorrowedFd<'_>) -> String {
    let mut messages = Vec::new();
    let mut buffer = [0; LONGEST_MESSAGE];
    while let Ok(length @ 1..) = rustix::io::read(context, &mut buffer) {
        let text = String::from_utf8_lossy(&buffer[..length]);
        // The first two characters are its level.
        messages.push(text.trim().get(2..).unwrap_or_default().to_owned());
    }
    messages.join("; ")
}
