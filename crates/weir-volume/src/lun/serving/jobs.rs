//! The coordinator's jobs on a disk, from their begin to their end: I/O of the file and the LUN, and work for the threads.

use std::sync::Arc;

use weir_block::{Buffer, Code, ErrorKind, IoError, Reactor, WriteSource};

use super::file_work::{FileWork, Layout};
use super::peer::PeerError;
use super::{Done, Flush, PANICKED, ServedDisk, Slot, Waiting, Working};
use crate::lun::coordinator::{self, Job};
use crate::lun::filesystem::error::{MAY_BE_OF_NODE, REFUSED};
use crate::lun::leases::{Lease, Piece};
use crate::lun::redirect::{Data, ToOwner};
use crate::lun::router::{Kind, Range};
use crate::planted::Bug;

fn no_thread(errno: i32) -> IoError {
    IoError::from_errno(errno, "starting a thread for a disk's file")
}

impl ServedDisk {
    pub(super) fn execute(&mut self, reactor: &mut Reactor, working: Working) {
        let Working { job, what } = working;
        let slot = self.slots.insert(Slot::Job(working));
        let begun = match what {
            Job::Request { request, gives_up } => match request.kind {
                Kind::Read => {
                    self.asked.begin(request.id);
                    self.read_file(reactor, slot, request.range)
                }
                Kind::Write => self.write_file(reactor, slot, (request.id, request.range), gives_up),
                Kind::Punch => {
                    self.asked.begin(request.id);
                    self.layout.clear(gives_up);
                    let range = (request.range.0, request.range.1);
                    let around = (gives_up.0, gives_up.1.min(self.size));
                    self.on_thread(reactor, true, slot, move |file| file.punch(range, around))
                }
                Kind::Flush => Err(IoError::new(ErrorKind::Bug, Code::Io, "a flush through the filesystem")),
            },
            Job::Block { id, kind, piece } => self.block(reactor, slot, (id, kind), piece),
            Job::Prepare { range, allocates } => {
                let range = (range.0, range.1.min(self.size));
                match allocates {
                    true => {
                        let file = Arc::clone(&self.work);
                        let work = move || Done::Allocated(slot, file.allocate(range));
                        self.long.ask(reactor, work, Done::Allocated(slot, Err(PANICKED))).map_err(no_thread)
                    }
                    false => self.on_thread(reactor, false, slot, move |file| file.look(range)),
                }
            }
            Job::Change { change, range } => self.begin_change(reactor, slot, change, range),
        };
        if let Err(error) = begun {
            self.slots.remove(slot);
            match error.code {
                Code::NoMemory if !self.stops => self.starved.push_back(Working { job, what }),
                _ => self.executed(reactor, job, Err(error), Vec::new()),
            }
        }
    }

    fn begin_change(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        change: u64,
        range: Range,
    ) -> Result<(), IoError> {
        if !self.planted.has(Bug::KeepClonedLayout) {
            self.layout.clear(range);
        }
        let Some(work) = self.changes.remove(&change) else {
            return Err(IoError::new(ErrorKind::Bug, Code::Io, "a change that nobody wants"));
        };
        self.on_thread(reactor, true, slot, move |file| file.change(work).map(|()| Vec::new()))
    }

    fn on_thread(
        &mut self,
        reactor: &mut Reactor,
        is_long: bool,
        slot: usize,
        work: impl FnOnce(&dyn FileWork) -> Layout + Send + 'static,
    ) -> Result<(), IoError> {
        let file = Arc::clone(&self.work);
        let offload = if is_long { &mut self.long } else { &mut self.short };
        let work = move || Done::Looked(slot, work(&*file));
        offload.ask(reactor, work, Done::Looked(slot, Err(PANICKED))).map_err(no_thread)
    }

    fn buffer(&self, length: u64) -> Result<Buffer, IoError> {
        let no_memory = IoError::new(ErrorKind::Retry, Code::NoMemory, "reading for another node");
        self.pool.take(length as usize).ok_or(no_memory)
    }

    fn read_file(&mut self, reactor: &mut Reactor, slot: usize, range: Range) -> Result<(), IoError> {
        let buffer = self.buffer(range.1 - range.0)?;
        self.file.read(reactor, slot as u32, range.0, buffer);
        Ok(())
    }

    fn block(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        (id, kind): (u64, Kind),
        piece: Piece,
    ) -> Result<(), IoError> {
        let length = piece.end - piece.start;
        let buffer = if kind == Kind::Read { Some(self.buffer(length)?) } else { None };
        let (Some(Waiting { data, durable, by_file }), Lease::ReadWrite(at) | Lease::ReadOnly(at)) =
            (self.asked.begin(id), piece.lease)
        else {
            return Err(IoError::new(ErrorKind::Bug, Code::Io, "block I/O without blocks"));
        };
        let (target, at) = if by_file { (&self.file, piece.start) } else { (&self.lun, at) };
        match buffer {
            Some(buffer) => target.read(reactor, slot as u32, at, buffer),
            None => target.write(reactor, slot as u32, at, self.source(data, length)?, durable),
        }
        Ok(())
    }

    fn write_file(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        (id, range): (u64, Range),
        gives_up: Range,
    ) -> Result<(), IoError> {
        let Some(Waiting { data, durable, .. }) = self.asked.begin(id) else {
            return Err(IoError::new(ErrorKind::Bug, Code::Io, "a redirected write without data"));
        };
        let is_in_place = self.is_in_place(range);
        if !is_in_place {
            if !self.has_space(range) {
                self.ahead.found_none(range, self.size);
            }
            if !self.planted.has(Bug::KeepKnownLayout) {
                self.layout.clear(gives_up);
            }
        }
        let source = self.source(data, range.1 - range.0)?;
        // What is not in place is made durable with its blocks.
        self.file.write(reactor, slot as u32, range.0, source, durable && is_in_place);
        Ok(())
    }

    fn source(&self, data: Data, length: u64) -> Result<WriteSource, IoError> {
        match data {
            Data::Bytes(buffer) => Ok(WriteSource::Shared(buffer, 0, length as usize)),
            Data::Zeroes => Ok(WriteSource::zeroes(&self.zeroes, length)),
            Data::None => Err(IoError::new(ErrorKind::Bug, Code::Io, "a write without data")),
        }
    }

    /// A write there moves nothing: the file has the blocks, durably, and alone.
    fn is_in_place(&self, range: Range) -> bool {
        self.layout.of(range).all(|piece| matches!(piece.lease, Lease::ReadWrite(_)))
    }

    /// The file has blocks there, if perhaps shared ones.
    fn has_space(&self, range: Range) -> bool {
        self.layout.of(range).all(|piece| matches!(piece.lease, Lease::ReadWrite(_) | Lease::ReadOnly(_)))
    }

    pub(super) fn io_ended(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        result: Result<u64, i32>,
        buffer: Option<Buffer>,
    ) {
        let done = result.map_err(|errno| IoError::from_errno(errno, "I/O of the volume's coordinator"));
        match self.slots.get(slot) {
            Some(Slot::Flush(_)) => match done {
                Ok(_) => self.flushed(reactor, slot, Ok(())),
                Err(error) => self.judge(reactor, slot, error),
            },
            Some(Slot::Job(Working { what, .. })) => match (*what, done) {
                (Job::Request { request, .. }, Ok(_)) if request.kind == Kind::Write => {
                    match self.is_in_place(request.range) || self.planted.has(Bug::AnswerBeforeCommit) {
                        true => self.finish(reactor, slot, Ok(()), Vec::new()),
                        false => self.commits.arrive(slot),
                    }
                }
                (Job::Block { piece, .. }, Ok(count))
                    if buffer.is_some() && count < piece.end - piece.start =>
                {
                    let error = IoError::from_errno(libc::EIO, "reading behind the end of a LUN");
                    self.finish(reactor, slot, Err(error), Vec::new());
                }
                (what, Ok(count)) => {
                    if let Some(mut buffer) = buffer {
                        buffer.bytes_mut()[count as usize..].fill(0);
                        let id = match what {
                            Job::Request { request, .. } => request.id,
                            Job::Block { id, .. } => id,
                            Job::Change { .. } | Job::Prepare { .. } => return,
                        };
                        self.read = Some((id, buffer));
                        self.finish(reactor, slot, Ok(()), Vec::new());
                        // Nobody waits for it if the connection is gone.
                        self.read = None;
                    } else {
                        self.finish(reactor, slot, Ok(()), Vec::new());
                    }
                }
                (_, Err(error)) => self.finish(reactor, slot, Err(error), Vec::new()),
            },
            None => {}
        }
    }

    /// Commits the writes that have arrived since the last commit began.
    pub(super) fn commit(&mut self, reactor: &mut Reactor) {
        if !self.commits.start() {
            return;
        }
        let range = |slot: &usize| match self.slots.get(*slot) {
            Some(Slot::Job(Working { what, .. })) => (what.range().0, what.range().1.min(self.size)),
            Some(Slot::Flush(_)) | None => (0, 0),
        };
        let ranges: Vec<Range> = self.commits.running().map(range).collect();
        let (file, otherwise) = (Arc::clone(&self.work), vec![Err(PANICKED); ranges.len()]);
        let work = move || Done::Committed(file.commit(&ranges));
        if let Err(errno) = self.short.ask(reactor, work, Done::Committed(otherwise)) {
            self.committed(reactor, std::iter::repeat(Err(no_thread(errno))));
        }
    }

    fn committed(&mut self, reactor: &mut Reactor, layouts: impl IntoIterator<Item = Layout>) {
        let slots: Vec<usize> = self.commits.finish().collect();
        for (slot, layout) in slots.into_iter().zip(layouts) {
            self.finish_with(reactor, slot, layout);
        }
    }

    pub(super) fn worked(&mut self, reactor: &mut Reactor, done: Done) {
        match done {
            Done::Committed(layouts) => self.committed(reactor, layouts),
            Done::Looked(slot, layout) => {
                let is_look = matches!(
                    self.slots.get(slot),
                    Some(Slot::Job(Working { what: Job::Prepare { allocates: false, .. }, .. }))
                );
                self.finish_with(reactor, slot, layout);
                if is_look {
                    self.look_on(reactor);
                }
            }
            Done::Allocated(slot, allocated) => {
                self.ahead.done(matches!(allocated, Ok(Some(_))));
                self.finish_with(reactor, slot, allocated.map(Option::unwrap_or_default));
            }
            Done::Judged(slot, error, is_shut_down) => self.judged(reactor, slot, error, is_shut_down),
            Done::Settled(slot, error, layout) => self.settled(reactor, slot, error, layout),
        }
    }

    fn finish_with(&mut self, reactor: &mut Reactor, slot: usize, layout: Layout) {
        match layout {
            Ok(layout) => self.finish(reactor, slot, Ok(()), layout),
            Err(error) => self.finish(reactor, slot, Err(error), Vec::new()),
        }
    }

    /// A job has ended. `layout`: what the filesystem has in its range, if that may be new.
    fn finish(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        result: Result<(), IoError>,
        layout: Vec<Piece>,
    ) {
        match result {
            Ok(()) => self.end(reactor, slot, Ok(()), layout),
            Err(error) => self.judge(reactor, slot, error),
        }
    }

    /// An operation has failed. What a node has to say of the storage that is fenced, whose filesystem has shut down, or that does not reach
    /// the LUN, is no answer: its owner waits for another coordinator (P9). A failed flush is one, unless the LUN has refused it: what was to
    /// be made durable may be gone, and another flush would not tell (P8).
    fn judge(&mut self, reactor: &mut Reactor, slot: usize, error: IoError) {
        let is_flush = matches!(self.slots.get(slot), Some(Slot::Flush(_)));
        match error.errno {
            errno if REFUSED.contains(&errno) => self.judged(reactor, slot, error, true),
            errno if MAY_BE_OF_NODE.contains(&errno) && !is_flush => {
                let file = Arc::clone(&self.work);
                let look = move || Done::Judged(slot, error, !file.is_usable());
                if self.short.ask(reactor, look, Done::Judged(slot, error, false)).is_err() {
                    self.judged(reactor, slot, error, false);
                }
            }
            _ => self.judged(reactor, slot, error, false),
        }
    }

    fn judged(&mut self, reactor: &mut Reactor, slot: usize, error: IoError, is_no_answer: bool) {
        if is_no_answer {
            self.newly_refused = true;
            self.drop_peer(reactor, Some(&PeerError::Refused(error)));
        }
        match self.slots.get(slot) {
            Some(Slot::Flush(_)) => self.flushed(reactor, slot, Err(error)),
            Some(Slot::Job(Working { what, .. })) => match *what {
                Job::Request { request, gives_up }
                    if request.kind == Kind::Write && !self.is_in_place(request.range) && !is_no_answer =>
                {
                    self.settle(reactor, (slot, error), (request.range, gives_up));
                }
                _ => self.end(reactor, slot, Err(error), Vec::new()),
            },
            None => {}
        }
    }

    /// A write has failed that may have moved blocks, or have begun to.
    fn settle(
        &mut self,
        reactor: &mut Reactor,
        (slot, error): (usize, IoError),
        (range, around): (Range, Range),
    ) {
        let (file, size) = (Arc::clone(&self.work), self.size);
        let within = move |range: Range| (range.0, range.1.min(size));
        let work = move || Done::Settled(slot, error, file.settle(within(range), within(around)));
        if self.long.ask(reactor, work, Done::Settled(slot, error, Err(PANICKED))).is_err() {
            self.settled(reactor, slot, error, Err(PANICKED));
        }
    }

    fn settled(&mut self, reactor: &mut Reactor, slot: usize, error: IoError, layout: Layout) {
        if layout.is_err() {
            self.work.distrust();
        }
        self.end(reactor, slot, Err(error), layout.unwrap_or_default());
    }

    fn flushed(&mut self, reactor: &Reactor, slot: usize, result: Result<(), IoError>) {
        if let Slot::Flush(Flush { id, connection }) = self.slots.remove(slot)
            && connection == self.connection
            && self.peer.is_there()
        {
            self.answer(reactor, id, result);
            self.peer.send(ToOwner::Flushed { id, result });
        }
    }

    fn end(&mut self, reactor: &mut Reactor, slot: usize, result: Result<(), IoError>, layout: Vec<Piece>) {
        if !self.slots.contains(slot) {
            return;
        }
        let Slot::Job(Working { job, what }) = self.slots.remove(slot) else { return };
        self.executed(reactor, job, result, if layout.is_empty() { self.known(what) } else { layout });
    }

    /// What is known of a job's range.
    fn known(&self, what: Job) -> Vec<Piece> {
        match what {
            Job::Request { .. } => {
                self.layout.of(what.range()).filter(|piece| piece.lease != Lease::Nothing).collect()
            }
            Job::Block { .. } | Job::Change { .. } | Job::Prepare { .. } => Vec::new(),
        }
    }

    fn executed(&mut self, reactor: &mut Reactor, job: u64, result: Result<(), IoError>, layout: Vec<Piece>) {
        for piece in &layout {
            self.layout.set(*piece);
        }
        self.step(reactor, coordinator::Event::Executed { job, result, layout });
    }
}
