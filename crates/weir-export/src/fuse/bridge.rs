//! Between the kernel's device and an NBD connection: requests of a file become requests of a client, and replies become answers.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use tokio::sync::oneshot;
use weir_block::{Protection, Received, Sent};

use super::file::{Asked, File};
use super::translation::{HEAD, Translation};
use super::wire::LONGEST_REQUEST;

/// Requests that are taken from the kernel in one go. Each is a system call, and the connection has its turn in between.
const BATCH: usize = 32;

/// The file while somebody has it open and the disk is here, on the disk's shard. The last closing, or dropping it, gives the file back,
/// with what is not answered.
#[derive(Debug)]
pub struct Bridge {
    /// Present until it is given back.
    file: Option<File>,
    back: Option<oneshot::Sender<File>>,
    /// The last request that was taken from the kernel.
    request: Box<[u8]>,
    /// The header for the connection, of which `head_taken` bytes are taken.
    head: [u8; HEAD],
    head_taken: usize,
    /// Bytes of `request` that are to follow it.
    payload: Range<usize>,
    translation: Translation,
    has_ended: bool,
    /// Present once the file is given back while requests of killed programs are under way: their answers have no receiver.
    stale: Option<Arc<()>>,
}

impl Bridge {
    /// Serves `file` until its last opener or the connection is gone, then gives it to `back`. The descriptor of the connection is the
    /// kernel's device.
    #[must_use]
    pub fn new(file: File, back: oneshot::Sender<File>) -> Bridge {
        Bridge {
            file: Some(file),
            back: Some(back),
            request: vec![0; LONGEST_REQUEST].into_boxed_slice(),
            head: [0; HEAD],
            head_taken: HEAD,
            payload: 0..0,
            translation: Translation::default(),
            has_ended: false,
            stale: None,
        }
    }

    fn give_back(&mut self) {
        let (Some(mut file), Some(back)) = (self.file.take(), self.back.take()) else { return };
        self.translation.leave(&mut file);
        // This fails when the task that mounted the file has ended; then the file is unmounted, too.
        let _ = back.send(file);
        (self.request, self.payload) = (Box::default(), 0..0);
    }

    /// Puts the rest of the last request into the targets, from `filled` on. Returns up to where they are filled then.
    fn pour(&mut self, targets: &mut [IoSliceMut<'_>], filled: usize) -> usize {
        let head = copy(&self.head[self.head_taken..], targets, filled);
        self.head_taken += head;
        let payload = copy(&self.request[self.payload.clone()], targets, filled + head);
        self.payload.start += payload;
        filled + head + payload
    }

    /// Takes one request from the kernel. False: there is none now, or the last opener has gone.
    fn take_one(&mut self, device: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(false) };
        let length = match rustix::io::read(device, &mut self.request[..]) {
            Ok(length) => length,
            Err(Errno::AGAIN) => return Ok(false),
            // Interrupted; or its sender has gone.
            Err(Errno::INTR | Errno::NOENT) => return Ok(true),
            Err(Errno::NODEV) => {
                self.has_ended = true;
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        match file.take(device, &self.request[..length])? {
            Asked::Nothing => {}
            Asked::Open { unique, .. } => file.opened(device, unique)?,
            Asked::Interrupted(unique) => self.translation.interrupt(file, device, unique)?,
            Asked::Closed | Asked::Ended => {
                self.has_ended = true;
                // At once: the connection may have to wait for what killed readers have asked for, and openers would wait with it.
                self.stale = file.outlive();
                if self.stale.is_some() {
                    self.give_back();
                }
                return Ok(false);
            }
            Asked::Io(io) => {
                self.head = self.translation.request(&io);
                (self.head_taken, self.payload) = (0, io.payload);
            }
        }
        Ok(true)
    }
}

impl Protection for Bridge {
    fn receive(&mut self, fd: BorrowedFd<'_>, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        let room: usize = targets.iter().map(|target| target.len()).sum();
        let mut filled = self.pour(targets, 0);
        for _ in 0..BATCH {
            if filled == room || self.has_ended || !self.take_one(fd)? {
                break;
            }
            filled = self.pour(targets, filled);
        }
        Ok(match filled {
            0 if self.has_ended => Received::End,
            0 => Received::Nothing,
            filled => Received::Bytes(filled),
        })
    }

    fn send(&mut self, fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        // The kernel takes each answer whole and at once, and the connection offers whole replies.
        if let Some(file) = &mut self.file {
            self.translation.replies(file, fd, slices)?;
        }
        Ok(Sent::Bytes(slices.iter().map(|slice| slice.len()).sum()))
    }

    fn end(&mut self, _fd: BorrowedFd<'_>) {
        self.has_ended = true;
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Copies as much as fits into the targets, from `filled` on.
fn copy(from: &[u8], targets: &mut [IoSliceMut<'_>], filled: usize) -> usize {
    let (mut skip, mut copied) = (filled, 0);
    for target in targets {
        let full = skip.min(target.len());
        skip -= full;
        let room = &mut target[full..];
        let length = room.len().min(from.len() - copied);
        room[..length].copy_from_slice(&from[copied..copied + length]);
        copied += length;
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_go_into_the_targets_one_after_the_other() {
        let (mut one, mut two) = ([0; 3], [0; 4]);
        let mut targets = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        assert_eq!(copy(b"ab", &mut targets, 0), 2);
        assert_eq!(copy(b"cdefgh", &mut targets, 2), 5);
        assert_eq!(copy(b"x", &mut targets, 7), 0);
        assert_eq!((&one, &two), (b"abc", b"defg"));
    }
}
