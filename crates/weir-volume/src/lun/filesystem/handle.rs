//! Files of XFS by their handles: the kernel changes no times of a file that is open in this way (Linux, `fs/xfs/xfs_handle.c`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::ptr;

use rustix::io::{FdFlags, fcntl_setfd};

/// `_IOWR('X', 106, struct xfs_fsop_handlereq)` and `_IOWR('X', 107, …)` (xfsprogs, `libxfs/xfs_fs.h`).
const XFS_IOC_FD_TO_HANDLE: libc::Ioctl = 0xC038_586A_u32 as libc::Ioctl;
const XFS_IOC_OPEN_BY_HANDLE: libc::Ioctl = 0xC038_586B_u32 as libc::Ioctl;

/// `struct xfs_handle`: the filesystem's identity and the file's.
const HANDLE: usize = 24;

/// `struct xfs_fsop_handlereq`.
#[repr(C)]
struct Request {
    fd: u32,
    path: *mut libc::c_void,
    flags: u32,
    given: *mut libc::c_void,
    given_length: u32,
    found: *mut libc::c_void,
    found_length: *mut u32,
}

/// Opens `file` once more, for direct I/O. `root`: a directory of the file's filesystem.
pub(super) fn open_without_times(root: impl AsFd, file: &File) -> io::Result<File> {
    let mut handle = [0u64; HANDLE / 8];
    let handle = handle.as_mut_ptr().cast();
    let mut length = HANDLE as u32;
    let mut request = Request {
        fd: file.as_raw_fd().cast_unsigned(),
        path: ptr::null_mut(),
        flags: 0,
        given: ptr::null_mut(),
        given_length: 0,
        found: handle,
        found_length: &raw mut length,
    };
    // SAFETY: the kernel writes a handle of 24 bytes and its length; both outlive the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), XFS_IOC_FD_TO_HANDLE, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    request.flags = (libc::O_RDWR | libc::O_DIRECT | libc::O_LARGEFILE).cast_unsigned();
    (request.given, request.given_length) = (handle, length);
    // SAFETY: the kernel reads a handle of this length.
    let opened = unsafe { libc::ioctl(root.as_fd().as_raw_fd(), XFS_IOC_OPEN_BY_HANDLE, &raw mut request) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that nobody else has.
    let opened = unsafe { File::from_raw_fd(opened) };
    // The call has no flag for it.
    fcntl_setfd(&opened, FdFlags::CLOEXEC)?;
    Ok(opened)
}
