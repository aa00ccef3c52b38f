//! Mounting a disk's file, and removing what a killed process has left.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use weir_block::mounts::mounts;

use super::wire::LARGEST;

/// The kernel's device.
const DEVICE: &str = "/dev/fuse";

/// The type of such mounts in the list of mounts.
const TYPE: &str = "fuse.weir";

/// A file of its own at `path`, and the descriptor by which the kernel asks for it. Unmounted when it is dropped.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
}

impl Mount {
    /// Makes the file and mounts it. `name` is shown in the list of mounts. The kernel's requests wait at the descriptor, which does not
    /// block.
    ///
    /// # Errors
    /// This process may not mount, or the kernel has no FUSE.
    pub fn new(path: &Path, name: &str) -> io::Result<(Mount, OwnedFd)> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let device = rustix::fs::open(DEVICE, flags, Mode::empty())
            .map_err(|error| io::Error::new(error.kind(), format!("opening {DEVICE}: {error}")))?;
        // A socket, which nobody opens as a file: without its mount, nobody writes to the directory below instead.
        match rustix::fs::mknodat(
            rustix::fs::CWD,
            path,
            rustix::fs::FileType::Socket,
            Mode::from_raw_mode(0o600),
            0,
        ) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) if is_placeholder(path) => {}
            Err(rustix::io::Errno::EXIST) => {
                let text = format!("{} is there already, and not Weir's: move it away", path.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            Err(error) => return Err(error.into()),
        }
        let options = format!(
            "fd={},rootmode={:o},user_id=0,group_id=0,allow_other,default_permissions,max_read={LARGEST}",
            device.as_raw_fd(),
            libc::S_IFREG,
        );
        let options = CString::new(options).map_err(io::Error::other)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount(format!("weir:{name}"), path, TYPE, flags, Some(options.as_c_str()))?;
        Ok((Mount { path: path.to_owned() }, device))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Unmounts a file without asking its server, which may be this process, and removes what it was mounted on.
fn remove(path: &Path) {
    if let Err(error) = unmount(path, UnmountFlags::DETACH) {
        tracing::warn!(path = %path.display(), %error, "fuse: cannot unmount a disk's file");
        return;
    }
    if is_placeholder(path) {
        let _ = fs::remove_file(path);
    }
}

/// Whether the file below a mount is there and not mounted on. Another file is somebody's, and stays.
fn is_placeholder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Removes the mounts below `directory` that a former process has left.
///
/// # Errors
/// The list of mounts cannot be read.
pub fn remove_leftovers(directory: &Path) -> io::Result<usize> {
    // The list has no links in its paths.
    let directory = directory.canonicalize()?;
    let left = leftovers(&fs::read("/proc/self/mountinfo")?, &directory);
    for path in &left {
        remove(path);
    }
    Ok(left.len())
}

/// The mounts of this kind below `directory`, the newest first. `list` is as in proc(5).
fn leftovers(list: &[u8], directory: &Path) -> Vec<PathBuf> {
    // VOLUME/DISK.raw: a directory below may be another node's.
    let is_file = |path: &Path| path.strip_prefix(directory).is_ok_and(|rest| rest.components().count() == 2);
    let ours = mounts(list).filter(|mount| mount.kind == TYPE.as_bytes() && is_file(&mount.point));
    let mut found: Vec<PathBuf> = ours.map(|mount| mount.point).collect();
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_this_kind_below_the_directory_are_left_over() {
        let list = b"22 1 0:5 / /proc rw shared:5 - proc proc rw\n\
            90 28 0:70 / /run/weir/v/d.raw rw,nosuid shared:9 - fuse.weir weir:d rw,user_id=0\n\
            91 28 0:71 / /run/weir/v/e\\040f.raw rw,nosuid - fuse.weir weir:e rw\n\
            94 28 0:74 / /run/weir/b/v/d.raw rw,nosuid - fuse.weir weir:d rw\n\
            92 28 0:72 / /run/weirder/v/d.raw rw - fuse.weir weir:d rw\n\
            93 28 0:73 / /run/weir/other rw - fuse.sshfs host: rw\n\
            short line\n";
        let expected = ["/run/weir/v/e f.raw", "/run/weir/v/d.raw"].map(PathBuf::from);
        assert_eq!(leftovers(list, Path::new("/run/weir")), expected);
    }
}
