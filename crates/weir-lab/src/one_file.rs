//! A FUSE filesystem with one file, which a program serves: a disk, once there is a loop device over it.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use rustix::mount::UnmountFlags;
use weir_block::Nanos;

use crate::error::LabError;

/// The file's name.
const FILE: &str = "disk";
/// The file's inode.
const INODE: INodeNo = INodeNo(2);
/// The time for which the kernel may cache names and attributes: they never change.
const UNCHANGED: Duration = Duration::from_secs(3600);
/// Time limit for the remaining users of the file at its end.
const PATIENCE: Duration = Duration::from_secs(3);

/// Answers the file's requests, at once or later.
pub trait FileServer: Send + Sync + 'static {
    /// Bytes of the file.
    fn size(&self) -> u64;
    /// Reads.
    fn read(&self, offset: u64, bytes: u32, reply: ReplyData);
    /// Writes.
    fn write(&self, offset: u64, data: &[u8], reply: ReplyWrite);
    /// Makes what was written durable.
    fn flush(&self, reply: ReplyEmpty);
}

/// The file, while it is served. Its users have closed it before it is dropped.
pub struct OneFile {
    // Ends the service when it is unmounted.
    _session: BackgroundSession,
    mount: PathBuf,
}

impl OneFile {
    /// Mounts a filesystem on `mount`, a directory, with a file that `server` serves. Needs root.
    ///
    /// # Errors
    /// FUSE is not available.
    pub fn serve(server: impl FileServer, mount: &Path, name: &str) -> Result<OneFile, LabError> {
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName(name.into())];
        let adapter = Adapter { server, mount: mount.to_owned() };
        let session = fuser::spawn_mount(adapter, mount, &config)
            .map_err(LabError::system(format!("mounting FUSE on {} (it needs root)", mount.display())))?;
        Ok(OneFile { _session: session, mount: mount.to_owned() })
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.mount.join(FILE)
    }
}

impl Drop for OneFile {
    fn drop(&mut self) {
        // The kernel closes the file a moment after a device on it is gone, and much later if a process has it open.
        let deadline = Nanos::now() + PATIENCE;
        while !unmount(&self.mount, &[]) {
            if Nanos::now() > deadline {
                unmount(&self.mount, &["--lazy"]);
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Unmounts; false while something has the filesystem in use.
fn unmount(mount: &Path, options: &[&str]) -> bool {
    let mut command = Command::new("umount");
    command.args(options).arg(mount).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Fails all requests of the file if the thread that holds it panics, those to come among them. Without an answer they would wait without
/// end, and the process that serves the file with them: not even a signal ends it then.
pub struct FailOnPanic<'a>(pub &'a Path);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            // It ends the service, and then says that the file is in use.
            let _ = rustix::mount::unmount(self.0, UnmountFlags::FORCE);
        }
    }
}

struct Adapter<S> {
    server: S,
    mount: PathBuf,
}

impl<S: FileServer> Adapter<S> {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            INODE => (FileType::RegularFile, 0o600, self.server.size()),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl<S: FileServer> Filesystem for Adapter<S> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Several requests at once, as to any disk. A kernel without it sends them one by one, which is as right.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(INODE).filter(|_| parent == INodeNo::ROOT && name == FILE) {
            Some(attributes) => reply.entry(&UNCHANGED, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&UNCHANGED, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // A page cache in front of the disk would answer for it.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _fail_on_panic = FailOnPanic(&self.mount);
        self.server.read(offset, size, reply);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _fail_on_panic = FailOnPanic(&self.mount);
        self.server.write(offset, data, reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let _fail_on_panic = FailOnPanic(&self.mount);
        self.server.flush(reply);
    }
}
