//! Load over an NBD connection.

use weir_block::Nanos;
use weir_nbd::client::{CommandFlags, Connection, NbdCommand, errno_text};

use super::{Done, Engine};
use crate::error::LoadError;
use crate::io::Io;
use crate::tally::IoKind;

/// One connection to an export; its slots are the generator's.
#[derive(Debug)]
pub struct NbdEngine {
    connection: Connection,
    write_flags: CommandFlags,
}

impl NbdEngine {
    /// Drives `connection`, whose depth must be the workload's; with `fua` every write is durable.
    #[must_use]
    pub fn new(connection: Connection, fua: bool) -> NbdEngine {
        NbdEngine { connection, write_flags: CommandFlags { fua, ..CommandFlags::NONE } }
    }

    /// The connection.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }
}

impl Engine for NbdEngine {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn buffer(&mut self, slot: u32, length: u32) -> &mut [u8] {
        self.connection.buffer(slot, length)
    }

    fn data(&self, slot: u32, length: u32) -> &[u8] {
        self.connection.data(slot, length)
    }

    #[inline]
    fn queue(&mut self, io: Io) {
        let Io { offset, length, .. } = io;
        let command = match io.kind {
            IoKind::Read => NbdCommand::Read { offset, length },
            IoKind::Write => NbdCommand::Write { offset, length, flags: self.write_flags },
            IoKind::Flush => NbdCommand::Flush,
        };
        self.connection.start(io.slot, command);
    }

    fn reap(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), LoadError> {
        loop {
            self.connection.pump(until, done)?;
            if !done.is_empty()
                || self.connection.in_flight() == 0
                || (until != Nanos::NEVER && Nanos::now() >= until)
            {
                return Ok(());
            }
        }
    }

    fn errno_text(&self, errno: u32) -> String {
        errno_text(errno)
    }
}
