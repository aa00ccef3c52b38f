//! The engine for storage whose calls block: all operations use the shard's reactor.

use weir_block::{Buffer, OwnerId, Reactor, SharedFile, Token, WriteSource};

/// Starts operations on the reactor; their events carry `owner` and the slot.
pub(crate) struct UringEngine {
    file: SharedFile,
    owner: OwnerId,
}

impl UringEngine {
    pub fn new(file: SharedFile, owner: OwnerId) -> UringEngine {
        UringEngine { file, owner }
    }

    pub fn read(&self, reactor: &mut Reactor, slot: u32, offset: u64, buffer: Buffer) {
        reactor.read(&self.file, offset, buffer, self.token(slot));
    }

    pub fn write(&self, reactor: &mut Reactor, slot: u32, offset: u64, source: WriteSource, durable: bool) {
        let token = self.token(slot);
        if durable {
            reactor.write_durable(&self.file, offset, source, token);
        } else {
            reactor.write(&self.file, offset, source, token);
        }
    }

    pub fn sync(&self, reactor: &mut Reactor, slot: u32) {
        reactor.sync(&self.file, self.token(slot));
    }

    pub fn allocate(&self, reactor: &mut Reactor, slot: u32, mode: i32, offset: u64, length: u64) {
        reactor.allocate(&self.file, mode, offset, length, self.token(slot));
    }

    fn token(&self, slot: u32) -> Token {
        Token { owner: self.owner, slot }
    }
}
