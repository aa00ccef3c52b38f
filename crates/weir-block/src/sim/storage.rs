//! Files whose content is kept by the simulation that uses the world: several of them may show one storage.

use super::file::{FileId, Operation};
use super::{PAGE, State, World};
use crate::operation::FileKind;

/// A file's content. It must not use the world. Offsets and lengths are whole pages of 4096 bytes.
pub trait Storage: Send {
    /// Reads, when the operation takes effect.
    ///
    /// # Errors
    /// The error number.
    fn read(&mut self, offset: u64, target: &mut [u8]) -> Result<(), i32>;

    /// Writes.
    ///
    /// # Errors
    /// The error number.
    fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) -> Result<(), i32>;

    /// Makes what was written durable.
    ///
    /// # Errors
    /// The error number.
    fn sync(&mut self) -> Result<(), i32>;
}

impl World {
    /// A file of `length` bytes whose content is `storage`. Its medium delays operations, fails them, and makes them partial; it cannot lose
    /// power.
    #[must_use]
    pub fn file_on(&self, length: u64, storage: Box<dyn Storage>) -> FileId {
        let file = self.file(length);
        self.lock().files[file.0].storage = Some(storage);
        file
    }
}

impl State {
    /// An operation on such a file takes effect. `length`: what it transfers at most.
    pub(super) fn perform_on_storage(&mut self, operation: &mut Operation, length: usize) -> Option<i32> {
        let storage = self.files[operation.file].storage.as_mut()?;
        let (whole, offset) = (operation.length(), operation.offset);
        // A page is never torn.
        let length = if length < whole { (length / PAGE * PAGE).max(PAGE).min(whole) } else { whole };
        let done = match operation.kind {
            FileKind::Read => {
                let mut bytes = vec![0; length];
                storage.read(offset, &mut bytes).map(|()| {
                    operation.fill(&bytes);
                    length
                })
            }
            FileKind::Write { durable } => {
                storage.write(offset, &operation.bytes()[..length], durable).map(|()| length)
            }
            FileKind::Sync => storage.sync().map(|()| 0),
            FileKind::Allocate { .. } => Err(libc::EOPNOTSUPP),
        };
        Some(done.map_or_else(|errno| -errno, |length| length as i32))
    }
}
