//! The engine for files in this host's memory: synchronous system calls.
//!
//! A call on tmpfs never waits for a device, so a synchronous call costs only the copy. With io_uring the kernel would pass it to
//! a worker thread, which takes longer than the copy.

use std::io;
use std::os::fd::RawFd;

use weir_block::{Buffer, SharedFile, WriteSource};

use super::Finished;

/// Executes operations synchronously and keeps their results for the next `advance`.
pub(super) struct SyncEngine {
    file: SharedFile,
    pub finished: Vec<Finished>,
    /// The vectors of the current write; empty between calls, kept to reuse the memory.
    vectors: Vec<libc::iovec>,
}

impl SyncEngine {
    pub fn new(file: SharedFile) -> SyncEngine {
        SyncEngine { file, finished: Vec::new(), vectors: Vec::new() }
    }

    pub fn read(&mut self, slot: u32, offset: u64, mut buffer: Buffer) {
        let result = read_all(self.file.as_raw_fd(), buffer.bytes_mut(), offset);
        self.finished.push(Finished { slot, result, buffer: Some(buffer) });
    }

    pub fn write(&mut self, slot: u32, offset: u64, source: &WriteSource) {
        self.vectors.clear();
        self.vectors.extend(source.vectors());
        let result = write_all(self.file.as_raw_fd(), &mut self.vectors, offset, false);
        self.finished.push(Finished { slot, result, buffer: None });
    }

    /// As [`SyncEngine::write`], from borrowed bytes: nothing outlives the call. `durable`: durable when it completes.
    pub fn write_lent(&mut self, slot: u32, offset: u64, bytes: &[u8], durable: bool) {
        let whole = &mut [vector(bytes.as_ptr().cast_mut(), bytes.len())];
        let result = write_all(self.file.as_raw_fd(), whole, offset, durable);
        self.finished.push(Finished { slot, result, buffer: None });
    }

    pub fn sync(&mut self, slot: u32) {
        // SAFETY: no pointers.
        let result = unsafe { libc::fdatasync(self.file.as_raw_fd()) };
        let result = if result < 0 { Err(last_errno()) } else { Ok(0) };
        self.finished.push(Finished { slot, result, buffer: None });
    }

    pub fn allocate(&mut self, slot: u32, mode: i32, offset: u64, length: u64) {
        // SAFETY: no pointers.
        let result = unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset as i64, length as i64) };
        let result = if result < 0 { Err(last_errno()) } else { Ok(0) };
        self.finished.push(Finished { slot, result, buffer: None });
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Reads until `target` is full or the file ends. Returns the number of bytes read.
fn read_all(fd: RawFd, target: &mut [u8], offset: u64) -> Result<u64, i32> {
    let mut moved = 0;
    while moved < target.len() {
        let rest = &mut target[moved..];
        // SAFETY: `rest` is writable memory of that length.
        let n =
            unsafe { libc::pread(fd, rest.as_mut_ptr().cast(), rest.len(), (offset + moved as u64) as i64) };
        match n {
            0 => break,
            n if n > 0 => moved += n as usize,
            _ if last_errno() == libc::EINTR => {}
            _ => return Err(last_errno()),
        }
    }
    Ok(moved as u64)
}

fn vector(start: *mut u8, length: usize) -> libc::iovec {
    libc::iovec { iov_base: start.cast(), iov_len: length }
}

/// Writes all bytes of `vectors`, in several calls if necessary.
fn write_all(fd: RawFd, mut vectors: &mut [libc::iovec], offset: u64, durable: bool) -> Result<u64, i32> {
    let flags = if durable { libc::RWF_DSYNC } else { 0 };
    let mut moved = 0;
    while !vectors.is_empty() {
        let at = (offset + moved) as i64;
        let n = match &*vectors {
            // For one piece the kernel need not copy vectors: 4 % of a write of 4 KiB, by a profile.
            // SAFETY: the vector describes readable memory that outlives the call.
            [one] if !durable => unsafe { libc::pwrite(fd, one.iov_base, one.iov_len, at) },
            all => {
                let count = all.len().min(libc::UIO_MAXIOV as usize) as i32;
                // SAFETY: as above, for every vector.
                unsafe { libc::pwritev2(fd, all.as_ptr(), count, at, flags) }
            }
        };
        match n {
            // Would otherwise repeat without end.
            0 => return Err(libc::EIO),
            n if n > 0 => {
                moved += n as u64;
                vectors = skip(vectors, n as usize);
            }
            _ if last_errno() == libc::EINTR => {}
            _ => return Err(last_errno()),
        }
    }
    Ok(moved)
}

/// The rest of `vectors` after `moved` bytes.
fn skip(mut vectors: &mut [libc::iovec], mut moved: usize) -> &mut [libc::iovec] {
    while !vectors.is_empty() {
        if moved < vectors[0].iov_len {
            // SAFETY: stays inside the memory that the vector describes.
            vectors[0].iov_base = unsafe { vectors[0].iov_base.cast::<u8>().add(moved) }.cast();
            vectors[0].iov_len -= moved;
            break;
        }
        moved -= vectors[0].iov_len;
        vectors = &mut vectors[1..];
    }
    vectors
}
