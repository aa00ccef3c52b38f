//! One call, one answer; or several pipelined requests, whose answers come as they finish.

use std::time::Duration;

use weir_block::{Extent, Nanos};

use super::connection::{Connection, Options};
use super::decoder::Done;
use super::error::NbdError;
use super::handshake::Export;
use super::slot::{CommandFlags, NbdCommand};
use crate::uri::Uri;

/// Identifies a request of [`NbdClient::submit`] until [`NbdClient::poll`] returns its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The answer to one pipelined request.
#[derive(Debug)]
pub struct Completed {
    /// The request's ticket.
    pub ticket: Ticket,
    /// The request.
    pub command: NbdCommand,
    /// The answer, or the reason of the failure.
    pub result: Result<Answer, NbdError>,
}

/// The answer to a successful request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Success, without data.
    Done,
    /// The data of a read.
    Data(Vec<u8>),
    /// The extents of a block status, merged; they may end before the requested range does.
    Extents(Vec<Extent>),
}

/// A session with an export.
///
/// After an error for which [`NbdError::is_connection`] is true the session is unusable.
#[derive(Debug)]
pub struct NbdClient {
    connection: Connection,
    free: Vec<u32>,
    /// The pending request of each slot.
    pending: Vec<Option<(Ticket, NbdCommand)>>,
    next_ticket: u64,
    done: Vec<Done>,
    finished: std::collections::VecDeque<Completed>,
    timeout: Duration,
}

impl NbdClient {
    /// Connects to `uri` with [`Options::default`].
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn connect(uri: &Uri) -> Result<NbdClient, NbdError> {
        NbdClient::connect_with(uri, &Options::default())
    }

    /// Connects to `uri`.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn connect_with(uri: &Uri, options: &Options) -> Result<NbdClient, NbdError> {
        Ok(NbdClient {
            connection: Connection::open(uri, options)?,
            free: (0..options.depth).rev().collect(),
            pending: vec![None; options.depth as usize],
            next_ticket: 0,
            done: Vec::new(),
            finished: std::collections::VecDeque::new(),
            timeout: options.timeout,
        })
    }

    /// The server's description of the export.
    #[must_use]
    pub fn export(&self) -> &Export {
        self.connection.export()
    }

    /// Fills `data` from `offset`. Splits reads above the server's maximum.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), NbdError> {
        let mut at = offset;
        for part in data.chunks_mut(self.export().maximum_block as usize) {
            let length = part.len() as u32;
            if let Answer::Data(data) = self.call(NbdCommand::Read { offset: at, length }, &[])? {
                part.copy_from_slice(&data);
            }
            at += u64::from(length);
        }
        Ok(())
    }

    /// Writes `data` at `offset`, durably with `fua`. Splits writes above the server's maximum.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<(), NbdError> {
        let flags = CommandFlags { fua, ..CommandFlags::NONE };
        let mut at = offset;
        for part in data.chunks(self.export().maximum_block as usize) {
            let length = part.len() as u32;
            self.call(NbdCommand::Write { offset: at, length, flags }, part)?;
            at += u64::from(length);
        }
        Ok(())
    }

    /// Makes all answered writes durable.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn flush(&mut self) -> Result<(), NbdError> {
        self.call(NbdCommand::Flush, &[]).map(drop)
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn write_zeroes(&mut self, offset: u64, length: u64, flags: CommandFlags) -> Result<(), NbdError> {
        self.call(NbdCommand::WriteZeroes { offset, length, flags }, &[]).map(drop)
    }

    /// Discards a range.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn trim(&mut self, offset: u64, length: u64, flags: CommandFlags) -> Result<(), NbdError> {
        self.call(NbdCommand::Trim { offset, length, flags }, &[]).map(drop)
    }

    /// The allocation of `length` bytes from `offset`. The extents may end before the range does.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn block_status(&mut self, offset: u64, length: u64) -> Result<Vec<Extent>, NbdError> {
        match self.call(NbdCommand::BlockStatus { offset, length }, &[])? {
            Answer::Extents(extents) => Ok(extents),
            Answer::Done | Answer::Data(_) => Ok(Vec::new()),
        }
    }

    /// Number of submitted requests whose answer [`NbdClient::poll`] has not returned yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len() + self.finished.len()
    }

    /// Starts a request without waiting for its answer; `data` is that of a write. Waits for room when the depth
    /// is reached.
    ///
    /// # Errors
    /// The export cannot do this, or the connection fails.
    pub fn submit(&mut self, command: NbdCommand, data: &[u8]) -> Result<Ticket, NbdError> {
        self.check(command, data)?;
        while self.free.is_empty() {
            self.pump(Nanos::NEVER)?;
        }
        let slot = self.free.pop().expect("the loop above ends when a slot is free");
        self.connection.buffer(slot, data.len() as u32).copy_from_slice(data);
        self.connection.start(slot, command);
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.pending[slot as usize] = Some((ticket, command));
        // Sends it now: otherwise the server may be idle while the caller computes.
        self.pump(Nanos(0))?;
        Ok(ticket)
    }

    /// The next answer; `None` if nothing is in flight or no answer comes within `wait`.
    ///
    /// # Errors
    /// The connection fails. The failure of a request is in [`Completed::result`].
    pub fn poll(&mut self, wait: Duration) -> Result<Option<Completed>, NbdError> {
        let until = Nanos::now() + wait.min(self.timeout);
        loop {
            if let Some(completed) = self.finished.pop_front() {
                return Ok(Some(completed));
            }
            if self.connection.in_flight() == 0 {
                return Ok(None);
            }
            let late = Nanos::now() >= until;
            self.pump(until)?;
            if late && self.finished.is_empty() {
                return Ok(None);
            }
        }
    }

    /// Ends the session with `DISC`.
    pub fn disconnect(self) {
        self.connection.disconnect();
    }

    fn call(&mut self, command: NbdCommand, data: &[u8]) -> Result<Answer, NbdError> {
        let ticket = self.submit(command, data)?;
        loop {
            if let Some(at) = self.finished.iter().position(|completed| completed.ticket == ticket) {
                let completed = self.finished.remove(at).expect("the position was just found");
                return completed.result;
            }
            self.pump(Nanos::NEVER)?;
        }
    }

    fn pump(&mut self, until: Nanos) -> Result<(), NbdError> {
        self.connection.pump(until, &mut self.done)?;
        for Done { slot, errno } in self.done.drain(..) {
            let Some((ticket, command)) = self.pending[slot as usize].take() else { continue };
            self.free.push(slot);
            let result = match (errno, command) {
                (0, NbdCommand::Read { length, .. }) => {
                    Ok(Answer::Data(self.connection.data(slot, length).to_vec()))
                }
                (0, NbdCommand::BlockStatus { .. }) => {
                    Ok(Answer::Extents(self.connection.extents(slot).to_vec()))
                }
                (0, _) => Ok(Answer::Done),
                _ => Err(NbdError::Request { command, errno }),
            };
            self.finished.push_back(Completed { ticket, command, result });
        }
        Ok(())
    }

    /// Checks that the export supports the command. The server checks ranges.
    fn check(&self, command: NbdCommand, data: &[u8]) -> Result<(), NbdError> {
        let export = self.export();
        let impossible = |reason| Err(NbdError::Impossible { command, reason });
        match command {
            _ if command.range().1 > u32::MAX.into() && !export.extended_headers => {
                impossible("without extended headers, a request covers less than 4 GiB")
            }
            NbdCommand::Read { length, .. } | NbdCommand::Write { length, .. }
                if length > export.maximum_block =>
            {
                impossible("larger than the server takes at once")
            }
            NbdCommand::Write { length, .. } if data.len() != length as usize => {
                impossible("the data has not the length of the request")
            }
            NbdCommand::Flush if !export.can_flush() => impossible("the server does not offer flush"),
            NbdCommand::Trim { .. } if !export.can_trim() => impossible("the server does not offer trim"),
            NbdCommand::WriteZeroes { .. } if !export.can_write_zeroes() => {
                impossible("the server does not offer write_zeroes")
            }
            NbdCommand::BlockStatus { .. } if export.allocation_context.is_none() => {
                impossible("the server does not offer block status (base:allocation)")
            }
            NbdCommand::Write { flags, .. }
            | NbdCommand::Trim { flags, .. }
            | NbdCommand::WriteZeroes { flags, .. }
                if flags.fua && !export.can_fua() =>
            {
                impossible("the server does not offer FUA")
            }
            _ => Ok(()),
        }
    }
}
