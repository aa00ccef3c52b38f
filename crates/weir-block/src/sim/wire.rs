//! Connections: two directions of bytes in order, in pieces, late, until they break.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::{Happening, ProcessId, Ready, State, World};
use crate::clock::Nanos;
use crate::operation::{Interest, Received, Sent};

/// The network's treatment of bytes sent from now on.
#[derive(Clone, Copy, Debug)]
pub struct Wires {
    /// A piece takes between `least` and `most`.
    pub least: Duration,
    /// See `least`.
    pub most: Duration,
    /// Once in so many pieces (never when 0) it takes up to `longest`; later pieces wait behind it.
    pub late: u32,
    /// See `late`.
    pub longest: Duration,
    /// Once in so many calls (never when 0) a send or receive is partial.
    pub partial: u32,
    /// Bytes that a new connection buffers in each direction.
    pub capacity: usize,
    /// One bit of the next piece of at least that many bytes is flipped.
    pub flip_bit: Option<usize>,
}

impl Default for Wires {
    fn default() -> Wires {
        Wires {
            least: Duration::from_micros(20),
            most: Duration::from_micros(200),
            late: 0,
            longest: Duration::ZERO,
            partial: 0,
            capacity: 256 << 10,
            flip_bit: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The other side has closed.
    Closed,
    /// The connection broke.
    Broken,
}

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    End(Ending),
}

/// One direction: the bytes in flight to one end.
#[derive(Debug)]
pub(super) struct Pipe {
    reader: ProcessId,
    flying: VecDeque<(u64, Piece)>,
    arrived: VecDeque<u8>,
    /// Bytes in both.
    held: usize,
    capacity: usize,
    ended: Option<Ending>,
    /// Its bytes are never corrupted.
    sound: bool,
    /// The reader has closed its end: arriving bytes are dropped.
    closed: bool,
    /// The reader's slots that wait to read, and to write in the other direction.
    reading: Option<usize>,
    writing: Option<usize>,
    /// The reader's slot that waits for the end of the connection.
    ending: Option<usize>,
    /// Tasks that wait to read, and to write in the other direction.
    reading_task: Option<Waker>,
    writing_task: Option<Waker>,
}

impl Pipe {
    fn new(reader: ProcessId, capacity: usize) -> Pipe {
        Pipe {
            reader,
            flying: VecDeque::new(),
            arrived: VecDeque::new(),
            held: 0,
            capacity,
            ended: None,
            sound: false,
            closed: false,
            reading: None,
            writing: None,
            ending: None,
            reading_task: None,
            writing_task: None,
        }
    }
}

/// One end of a simulated connection. Dropping it closes it, like a descriptor.
#[derive(Debug)]
pub struct End {
    world: World,
    /// The pipe that arrives here; the other direction is its neighbour.
    pipe: usize,
}

impl World {
    /// Sets the network's behaviour from now on.
    pub fn set_wires(&self, wires: Wires) {
        self.lock().wires = wires;
    }

    /// The network's behaviour.
    #[must_use]
    pub fn wires(&self) -> Wires {
        self.lock().wires
    }

    /// Two ends of a new connection, for two processes.
    #[must_use]
    pub fn connect(&self, one: ProcessId, other: ProcessId) -> (End, End) {
        let mut state = self.lock();
        let (pipe, capacity) = (state.pipes.len(), state.wires.capacity);
        state.pipes.push(Pipe::new(one, capacity));
        state.pipes.push(Pipe::new(other, capacity));
        let end = |pipe| End { world: self.clone(), pipe };
        (end(pipe), end(pipe + 1))
    }

    /// As [`World::connect`], for protocols without checksums: the network never corrupts bytes.
    #[must_use]
    pub fn connect_uncorrupted(&self, one: ProcessId, other: ProcessId) -> (End, End) {
        let ends = self.connect(one, other);
        let mut state = self.lock();
        for pipe in [ends.0.pipe, ends.1.pipe] {
            state.pipes[pipe].sound = true;
        }
        drop(state);
        ends
    }

    /// Blocks traffic from one machine to another until a world time. Bytes in flight stay in flight.
    pub fn block(&self, from: usize, to: usize, until: Nanos) {
        let mut state = self.lock();
        let now = state.now;
        state.blocked.retain(|&(one, other, end)| (one, other) != (from, to) && end > now);
        state.blocked.push((from, to, until.0));
    }

    /// Whether traffic from one machine to another is blocked now.
    #[must_use]
    pub fn is_blocked(&self, from: usize, to: usize) -> bool {
        self.lock().blocked_until(from, to).is_some()
    }

    /// Ends all partitions.
    pub fn unblock(&self) {
        let mut state = self.lock();
        let now = state.now;
        state.blocked.clear();
        for pipe in 0..state.pipes.len() {
            if !state.pipes[pipe].flying.is_empty() {
                state.at(now, Happening::Deliver(pipe));
            }
        }
    }

    /// The machine of a process that lost power is up again: it answers bytes for the process with a reset.
    pub fn restore_power(&self, process: ProcessId) {
        self.lock().hang_up(process, Ending::Broken);
    }

    /// Breaks connections between two machines: a part of the bytes in flight still arrives, cut anywhere; then both ends get an
    /// error. Returns the number of connections.
    pub fn cut(&self, one: usize, other: usize) -> usize {
        let mut state = self.lock();
        let mut cut = 0;
        for pipe in (0..state.pipes.len()).step_by(2) {
            let ends = [state.machine_at(pipe), state.machine_at(pipe + 1)];
            if ends == [one, other] || ends == [other, one] {
                cut += usize::from(state.cut(pipe));
            }
        }
        cut
    }
}

fn fired(slot: usize) -> Ready {
    Ready { slot, result: 0, file: None }
}

impl State {
    fn machine_at(&self, pipe: usize) -> usize {
        self.processes[self.pipes[pipe].reader.0].machine
    }

    /// The time of the process at this end.
    fn time_at(&self, pipe: usize) -> u64 {
        self.time_of(self.pipes[pipe].reader)
    }

    fn blocked_until(&self, from: usize, to: usize) -> Option<u64> {
        let all = self
            .blocked
            .iter()
            .filter(|&&(one, other, until)| (one, other) == (from, to) && until > self.now);
        all.map(|&(.., until)| until).max()
    }

    fn cut(&mut self, pipe: usize) -> bool {
        let open = |pipe: &Pipe| pipe.ended.is_none() && !pipe.closed;
        if !open(&self.pipes[pipe]) || !open(&self.pipes[pipe + 1]) {
            return false;
        }
        for pipe in [pipe, pipe + 1] {
            let mut keep = self.random.below(self.pipes[pipe].held as u64 + 1) as usize;
            let direction = &mut self.pipes[pipe];
            keep = keep.saturating_sub(direction.arrived.len());
            let last = direction.flying.back().map_or(self.now, |last| last.0);
            let mut kept = VecDeque::new();
            while let Some((at, Piece::Bytes(mut bytes))) = direction.flying.pop_front() {
                bytes.truncate(keep);
                keep -= bytes.len();
                if !bytes.is_empty() {
                    kept.push_back((at, Piece::Bytes(bytes)));
                }
            }
            kept.push_back((last, Piece::End(Ending::Broken)));
            direction.flying = kept;
            self.at(last, Happening::Deliver(pipe));
        }
        true
    }

    /// Delivers the bytes that have arrived at this end.
    pub(super) fn deliver(&mut self, pipe: usize) {
        let (from, to) = (self.machine_at(pipe ^ 1), self.machine_at(pipe));
        if let Some(until) = self.blocked_until(from, to) {
            if until != u64::MAX {
                self.at(until, Happening::Deliver(pipe));
            }
            return;
        }
        let now = self.now;
        let direction = &mut self.pipes[pipe];
        let alive = self.processes[direction.reader.0].alive;
        let mut news = false;
        while direction.flying.front().is_some_and(|(at, _)| *at <= now) {
            let Some((_, piece)) = direction.flying.pop_front() else { break };
            match piece {
                Piece::Bytes(bytes) if direction.closed || direction.ended.is_some() => {
                    direction.held -= bytes.len()
                }
                // A machine without power does not answer.
                Piece::Bytes(_) if !alive => {}
                Piece::Bytes(bytes) => direction.arrived.extend(bytes),
                Piece::End(ending) => direction.ended = Some(ending),
            }
            news = true;
        }
        let (reader, ended, closed) = (direction.reader, direction.ended, direction.closed);
        if news {
            self.readable(pipe, reader);
        }
        if ended.is_some() {
            self.writable(pipe);
            if let Some(slot) = self.pipes[pipe].ending.take() {
                self.tell(reader, fired(slot));
            }
        } else if news && closed {
            // The closing side's kernel answers with a reset.
            self.push(pipe ^ 1, now, Piece::End(Ending::Broken));
        }
    }

    /// Wakes the readers at this end.
    fn readable(&mut self, pipe: usize, reader: ProcessId) {
        if let Some(slot) = self.pipes[pipe].reading.take() {
            self.tell(reader, fired(slot));
        }
        self.pipes[pipe].reading_task.take().into_iter().for_each(Waker::wake);
    }

    /// Wakes the writers at this end.
    fn writable(&mut self, pipe: usize) {
        if let Some(slot) = self.pipes[pipe].writing.take() {
            self.tell(self.pipes[pipe].reader, fired(slot));
        }
        self.pipes[pipe].writing_task.take().into_iter().for_each(Waker::wake);
    }

    /// Sends a piece to the end of a direction.
    fn push(&mut self, pipe: usize, sent: u64, piece: Piece) {
        let wires = self.wires;
        let delay = if self.random.once_in(wires.late) {
            self.random.between(wires.most, wires.longest)
        } else {
            self.random.between(wires.least, wires.most)
        };
        let direction = &mut self.pipes[pipe];
        if matches!(direction.flying.back(), Some((_, Piece::End(_)))) || direction.ended.is_some() {
            return;
        }
        let at = direction.flying.back().map_or(0, |last| last.0).max(sent + delay);
        if let Piece::Bytes(bytes) = &piece {
            direction.held += bytes.len();
        }
        direction.flying.push_back((at, piece));
        self.at(at, Happening::Deliver(pipe));
    }

    /// The number of bytes, of `length`, that a call transfers.
    fn part(&mut self, length: usize) -> usize {
        let odds = self.wires.partial;
        if length > 1 && self.random.once_in(odds) {
            1 + self.random.below(length as u64 - 1) as usize
        } else {
            length
        }
    }

    fn receive(&mut self, pipe: usize, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        let room: usize = targets.iter().map(|target| target.len()).sum();
        let direction = &self.pipes[pipe];
        if direction.arrived.is_empty() {
            return match direction.ended {
                None => Ok(Received::Nothing),
                Some(Ending::Closed) => Ok(Received::End),
                Some(Ending::Broken) => Err(io::Error::from_raw_os_error(libc::ECONNRESET)),
            };
        }
        let most = room.min(direction.arrived.len());
        let count = self.part(most);
        let direction = &mut self.pipes[pipe];
        let mut bytes = direction.arrived.drain(..count);
        for target in targets {
            for target in target.iter_mut() {
                let Some(byte) = bytes.next() else { break };
                *target = byte;
            }
        }
        drop(bytes);
        direction.held -= count;
        // The other end waits for room in this direction.
        self.writable(pipe ^ 1);
        Ok(Received::Bytes(count))
    }

    fn send(&mut self, pipe: usize, sent: u64, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        if self.pipes[pipe].closed || self.pipes[pipe].ended == Some(Ending::Broken) {
            return Err(io::Error::from_raw_os_error(libc::EPIPE));
        }
        let other = &self.pipes[pipe ^ 1];
        let room = other.capacity.saturating_sub(other.held);
        let offered: usize = slices.iter().map(|slice| slice.len()).sum();
        if room == 0 {
            return Ok(Sent::Full);
        }
        let count = self.part(room.min(offered));
        let mut bytes = Vec::with_capacity(count);
        for slice in slices {
            bytes.extend_from_slice(&slice[..slice.len().min(count - bytes.len())]);
        }
        if !self.pipes[pipe].sound && self.wires.flip_bit.is_some_and(|least| count >= least) {
            self.wires.flip_bit = None;
            let (index, bit) = (self.random.below(count as u64) as usize, self.random.below(8));
            bytes[index] ^= 1 << bit;
        }
        self.push(pipe ^ 1, sent, Piece::Bytes(bytes));
        Ok(Sent::Bytes(count))
    }

    fn close(&mut self, pipe: usize, sent: u64) {
        let direction = &mut self.pipes[pipe];
        // An ended process has no effect.
        if !self.processes[direction.reader.0].alive || std::mem::replace(&mut direction.closed, true) {
            return;
        }
        // Closing with unread bytes is a reset, as with the kernel's TCP.
        let ending = if direction.arrived.is_empty() { Ending::Closed } else { Ending::Broken };
        direction.held -= direction.arrived.len();
        direction.arrived.clear();
        self.push(pipe ^ 1, sent, Piece::End(ending));
    }

    /// The kernel closes a killed process's connections; a machine that is up again answers with a reset.
    fn hang_up(&mut self, process: ProcessId, ending: Ending) {
        let now = self.now;
        for pipe in 0..self.pipes.len() {
            if self.pipes[pipe].reader == process && !std::mem::replace(&mut self.pipes[pipe].closed, true) {
                self.push(pipe ^ 1, now, Piece::End(ending));
            }
        }
    }

    pub(super) fn killed(&mut self, process: ProcessId) {
        self.hang_up(process, Ending::Closed);
    }

    fn is_readable(&self, pipe: usize) -> bool {
        !self.pipes[pipe].arrived.is_empty() || self.pipes[pipe].ended.is_some()
    }

    fn is_writable(&self, pipe: usize) -> bool {
        let other = &self.pipes[pipe ^ 1];
        other.held < other.capacity || self.pipes[pipe].ended.is_some()
    }

    pub(super) fn watch(&mut self, pipe: usize, interest: Interest, slot: usize) {
        let ready = match interest {
            Interest::Read => self.is_readable(pipe),
            Interest::Write => self.is_writable(pipe),
            Interest::HangUp => self.pipes[pipe].ended.is_some(),
        };
        let direction = &mut self.pipes[pipe];
        match (ready, interest) {
            (true, _) => {
                let reader = direction.reader;
                self.tell(reader, fired(slot));
            }
            (false, Interest::Read) => direction.reading = Some(slot),
            (false, Interest::Write) => direction.writing = Some(slot),
            (false, Interest::HangUp) => direction.ending = Some(slot),
        }
    }

    /// Cancels a watch, even if it has fired and the process has not collected it.
    pub(super) fn unwatch(&mut self, process: ProcessId, pipe: usize, interest: Interest, slot: usize) {
        let direction = &mut self.pipes[pipe];
        match interest {
            Interest::Read => direction.reading = direction.reading.filter(|known| *known != slot),
            Interest::Write => direction.writing = direction.writing.filter(|known| *known != slot),
            Interest::HangUp => direction.ending = direction.ending.filter(|known| *known != slot),
        }
        self.processes[process.0].ready.retain(|ready| ready.slot != slot);
    }
}

impl End {
    /// Whether the other side has closed the connection, or it broke.
    pub(crate) fn has_ended(&self) -> bool {
        self.world.lock().pipes[self.pipe].ended.is_some()
    }

    /// Reads the bytes that have arrived, for code without a reactor; 0 bytes at the end of the stream.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn poll_receive(&mut self, context: &mut Context<'_>, target: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut state = self.world.lock();
        match state.receive(self.pipe, &mut [IoSliceMut::new(target)]) {
            Ok(Received::Bytes(count)) => Poll::Ready(Ok(count)),
            Ok(Received::End) => Poll::Ready(Ok(0)),
            Ok(Received::Nothing) => {
                state.pipes[self.pipe].reading_task = Some(context.waker().clone());
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Sends a part of `bytes`, for code without a reactor.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn poll_send(&mut self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.world.lock();
        let sent = state.time_at(self.pipe);
        match state.send(self.pipe, sent, &[IoSlice::new(bytes)]) {
            Ok(Sent::Bytes(count)) => Poll::Ready(Ok(count)),
            Ok(Sent::Full) => {
                state.pipes[self.pipe].writing_task = Some(context.waker().clone());
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Its number in the reactor.
    pub(crate) fn number(&self) -> i32 {
        self.pipe as i32
    }

    pub(crate) fn receive(&mut self, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        self.world.lock().receive(self.pipe, targets)
    }

    pub(crate) fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        let mut state = self.world.lock();
        state.activity += 1;
        let sent = state.time_at(self.pipe);
        state.send(self.pipe, sent, slices)
    }

    pub(crate) fn close(&mut self) {
        let mut state = self.world.lock();
        let sent = state.time_at(self.pipe);
        state.close(self.pipe, sent);
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.close();
    }
}
