//! Operations on files whose content the simulation keeps.

use super::file::{FileId, Operation};
use super::storage::Storage;
use super::{PAGE, State, World};
use crate::operation::FileKind;

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
