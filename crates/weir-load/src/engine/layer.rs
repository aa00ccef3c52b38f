//! Load on a layer, from within its shard.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use weir_block::{Buffer, Completion, Layer, LayerInfo, Nanos, Outcome, Payload, Reactor, Request, Tag};

use crate::checker::{self, Checker};
use crate::data::Data;
use crate::error::LoadError;
use crate::generator::Generator;
use crate::io::Io;
use crate::submitters::{HOLD, Submitters};
use crate::summary::Summary;
use crate::tally::IoKind;
use crate::workload::Workload;

/// Up to this many bytes a write is lent to the layer, as an export lends what it has received; above, it is
/// given in an aligned buffer.
const LARGEST_LENT: usize = 64 << 10;

/// A load that a shard's loop advances. It never waits.
///
/// A workload of several threads is issued by as many [`Submitters`]: they share its sequence, and its depth is that of
/// all of them together.
///
/// The loop calls [`LayerLoad::pump`] after the layer was advanced, with everything the layer has finished. The load removes its
/// own completions from that, and submits the next requests. It ends by itself. A verifying load judges the reads of the mix;
/// there is no final pass over all blocks.
#[derive(Debug)]
pub struct LayerLoad {
    generator: Generator,
    workload: Workload,
    name: String,
    /// By slot.
    tags: Vec<Tag>,
    /// The same, sorted by tag, to find a tag's slot.
    slots: Vec<(Tag, u32)>,
    /// Payload of the next write.
    data: Vec<u8>,
    content: Data,
    /// Requests of the generator that the layer has not accepted yet. Waiting here counts as latency: a layer that applies
    /// backpressure makes its clients wait, and without this queue the load would not have the requested depth.
    held: VecDeque<Io>,
    /// With several submitters: the requests that they hold, and the times at which they pass them on.
    submitters: Option<Submitters>,
    taken: BinaryHeap<Reverse<(Nanos, u32)>>,
    /// By slot, while it is taken.
    requests: Vec<Option<Io>>,
    checker: Option<Checker>,
    warm_until: Nanos,
    counted_from: Nanos,
    /// Time of the last call of [`LayerLoad::pump`].
    pumped: Nanos,
    ended: Option<Nanos>,
    first_error: Option<String>,
}

impl LayerLoad {
    /// A load on a layer that is called `name` in the summary and described by `info`. Each slot (a number below
    /// the queue depth) gets the tag that `tag` names for it; no two may be equal, and no other request of this
    /// layer may carry one of them.
    ///
    /// # Errors
    /// The workload does not fit the layer.
    pub fn start(
        name: &str,
        workload: &Workload,
        info: &LayerInfo,
        now: Nanos,
        tag: impl Fn(u32) -> Tag,
    ) -> Result<LayerLoad, LoadError> {
        let threads = workload.threads.max(1);
        let depth = workload.queue_depth.saturating_mul(threads);
        let workload = Workload { threads: 1, queue_depth: depth, ..workload.clone() };
        check(name, &workload, info)?;
        let span = workload.spans(info.size)?[0];
        let tags: Vec<Tag> = (0..workload.queue_depth).map(tag).collect();
        let mut slots: Vec<(Tag, u32)> = tags.iter().copied().zip(0..).collect();
        slots.sort_unstable();
        let mut data = vec![0; if workload.access.writes() { workload.block_size.0 as usize } else { 0 }];
        let mut content = Data::new(&workload, 0);
        content.fill(&mut data);
        let run = checker::new_run();
        let checker = workload.verify.then(|| Checker::new(&workload, span, run, None)).transpose()?;
        Ok(LayerLoad {
            generator: Generator::new(&workload, span, 0, now)?,
            name: name.into(),
            tags,
            slots,
            data,
            content,
            held: VecDeque::new(),
            submitters: (threads > 1).then(|| Submitters::new(threads as usize, HOLD, workload.seed)),
            taken: BinaryHeap::new(),
            requests: vec![None; workload.queue_depth as usize],
            checker,
            warm_until: now + workload.warmup,
            counted_from: now,
            pumped: now,
            ended: None,
            first_error: None,
            workload,
        })
    }

    /// Removes this load's answers from `completions`, leaves the others in their order, and submits the next requests. The layer
    /// must be advanced afterwards.
    pub fn pump(&mut self, reactor: &mut Reactor, layer: &mut dyn Layer, completions: &mut Vec<Completion>) {
        let now = reactor.now();
        self.pumped = now;
        for completion in
            completions.extract_if(.., |completion| slot_of(&self.slots, completion.tag).is_some())
        {
            let slot = slot_of(&self.slots, completion.tag).expect("the filter has just found it");
            take_answer(&mut self.checker, &mut self.first_error, slot, &completion);
            self.generator.complete(slot, now, completion.result.is_ok());
        }
        if now >= self.warm_until && self.counted_from < self.warm_until {
            self.generator.clear_tally();
            self.counted_from = now;
        }
        while let Some(io) = self.generator.next(now) {
            match &mut self.submitters {
                None => self.held.push_back(io),
                Some(submitters) => {
                    self.taken.push(Reverse((submitters.passes_at(now), io.slot)));
                    self.requests[io.slot as usize] = Some(io);
                }
            }
        }
        while let Some(&Reverse((at, slot))) = self.taken.peek()
            && at <= now
        {
            self.taken.pop();
            self.held.extend(self.requests[slot as usize].take());
        }
        while let Some(&io) = self.held.front()
            && self.submit(io, reactor, layer)
        {
            self.held.pop_front();
        }
        if self.ended.is_none() && self.generator.in_flight() == 0 && self.generator.exhausted(now) {
            self.ended = Some(now);
        }
    }

    /// False when the layer or the pool of buffers has no room now.
    fn submit(&mut self, io: Io, reactor: &mut Reactor, layer: &mut dyn Layer) -> bool {
        let kind = match io.kind {
            IoKind::Read => weir_block::RequestKind::Read,
            IoKind::Write => weir_block::RequestKind::Write,
            IoKind::Flush => weir_block::RequestKind::Flush,
        };
        let length = io.length as usize;
        let by_buffer = io.kind == IoKind::Read || length > LARGEST_LENT;
        if !layer.has_room(kind, u64::from(io.length)) || (by_buffer && !reactor.buffers().has_room(length)) {
            return false;
        }
        let buffer = if by_buffer { reactor.buffers().take(length) } else { None };
        match (&mut self.checker, io.kind) {
            (Some(checker), _) => checker.before(io, &mut self.data),
            (None, IoKind::Write) => self.content.renew(&mut self.data[..length]),
            (None, _) => {}
        }
        let (tag, offset) = (self.tags[io.slot as usize], io.offset);
        let request = match (io.kind, buffer) {
            (IoKind::Read, Some(buffer)) => Request::Read { tag, offset, buffer },
            (IoKind::Write, buffer) => Request::Write {
                tag,
                offset,
                payload: payload(&self.data[..length], buffer),
                fua: self.workload.fua,
            },
            (IoKind::Flush, _) => Request::Flush { tag },
            (IoKind::Read, None) => return false,
        };
        layer.submit(reactor, request);
        true
    }

    /// Time at which [`LayerLoad::pump`] must be called even without an event.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let handed_on = self.taken.peek().map_or(Nanos::NEVER, |Reverse((at, _))| *at);
        self.generator.wake(self.pumped).min(handed_on)
    }

    /// Stops generating; requests already generated are still submitted and completed.
    pub fn stop(&mut self) {
        self.generator.stop();
    }

    /// The result, once the load has ended.
    #[must_use]
    pub fn finished(&self) -> Option<Summary> {
        let ended = self.ended?;
        let runtime = ended - self.counted_from;
        let mut summary = Summary::new(&self.name, "layer", &self.workload, self.generator.tally(), runtime);
        summary.first_error = self.first_error.clone();
        summary.never_made = self.generator.never_made(ended);
        summary.verification = self.checker.as_ref().map(|checker| checker.found.clone());
        Some(summary)
    }
}

fn check(name: &str, workload: &Workload, info: &LayerInfo) -> Result<(), LoadError> {
    workload.validate()?;
    let (minimum, maximum) = (u64::from(info.logical_block), u64::from(info.max_transfer));
    if !workload.fits(minimum, maximum) {
        use weir_block::size::Size;
        let (minimum, maximum) = (Size(minimum), Size(maximum));
        return Err(LoadError::BlockSize {
            target: name.into(),
            minimum,
            maximum,
            block_size: workload.block_size,
        });
    }
    if workload.access.writes() && !info.writable {
        return Err(LoadError::ReadOnly(name.into()));
    }
    Ok(())
}

fn payload(data: &[u8], buffer: Option<Buffer>) -> Payload<'_> {
    match buffer {
        None => Payload::Lent(data),
        Some(mut buffer) => {
            buffer.bytes_mut().copy_from_slice(data);
            Payload::Given(buffer)
        }
    }
}

fn slot_of(slots: &[(Tag, u32)], tag: Tag) -> Option<u32> {
    slots.binary_search_by_key(&tag, |&(tag, _)| tag).ok().map(|at| slots[at].1)
}

fn take_answer(
    checker: &mut Option<Checker>,
    first_error: &mut Option<String>,
    slot: u32,
    completion: &Completion,
) {
    match (&completion.result, checker) {
        (Ok(Outcome::Read(buffer)), Some(checker)) => checker.after(slot, buffer.bytes()),
        (Ok(_), Some(checker)) => checker.after(slot, &[]),
        (Ok(_), None) => {}
        (Err(error), _) => {
            first_error.get_or_insert_with(|| error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::workload::Access;
    use weir_block::size::Size;
    use weir_block::{Event, IoError, LayerMeter, ReactorConfig, RequestKind};

    /// A disk in memory that holds back each answer until the next advance, and takes four requests at a time.
    struct Memory {
        data: Vec<u8>,
        pending: Vec<Completion>,
        forgets: bool,
        foreign: bool,
    }

    impl Memory {
        fn new() -> Memory {
            Memory { data: vec![0; 1 << 20], pending: Vec::new(), forgets: false, foreign: false }
        }
    }

    impl Layer for Memory {
        fn info(&self) -> LayerInfo {
            LayerInfo {
                size: self.data.len() as u64,
                logical_block: 512,
                preferred_block: 4096,
                max_transfer: 1 << 20,
                writable: true,
                fast_zeroes: true,
                discards: true,
            }
        }

        fn has_room(&self, _: RequestKind, _: u64) -> bool {
            self.pending.len() < 4
        }

        fn submit(&mut self, _: &mut Reactor, request: Request<'_>) {
            let (tag, (offset, length)) = (request.tag(), request.range());
            let range = offset as usize..(offset + length) as usize;
            let result = match request {
                Request::Read { mut buffer, .. } => {
                    buffer.bytes_mut().copy_from_slice(&self.data[range]);
                    Ok(Outcome::Read(buffer))
                }
                Request::Write { payload, .. } => {
                    if !self.forgets {
                        self.data[range].copy_from_slice(payload.bytes());
                    }
                    Ok(Outcome::Done)
                }
                _ => Err(IoError::invalid("not in this test")),
            };
            self.pending.push(Completion { tag, result });
        }

        fn on_event(&mut self, _: &mut Reactor, _: Event) {}

        fn advance(&mut self, _: &mut Reactor, done: &mut Vec<Completion>) {
            if self.foreign {
                done.push(Completion { tag: Tag(1), result: Ok(Outcome::Done) });
            }
            done.append(&mut self.pending);
        }

        fn in_flight(&self) -> usize {
            self.pending.len()
        }

        fn meters(&self, _: &mut Vec<LayerMeter>) {}
    }

    fn drive(layer: &mut Memory, workload: &Workload) -> Summary {
        let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let tag = |slot| Tag(u64::from(u32::MAX - slot) << 8);
        let mut load = LayerLoad::start("memory", workload, &layer.info(), Nanos::now(), tag).unwrap();
        let mut completions = Vec::new();
        loop {
            layer.advance(&mut reactor, &mut completions);
            load.pump(&mut reactor, layer, &mut completions);
            assert!(
                completions.drain(..).all(|completion| completion.tag == Tag(1)),
                "only foreign ones are left"
            );
            if let Some(summary) = load.finished() {
                return summary;
            }
        }
    }

    #[test]
    fn every_request_is_answered_and_checked() {
        for block_size in [512, 4096, 128 << 10] {
            let workload = Workload {
                access: Access::RandRw { read_percent: 50 },
                block_size: Size(block_size),
                runtime: Some(Duration::from_millis(50)),
                verify: true,
                ..Workload::default()
            };
            let mut layer = Memory { foreign: true, ..Memory::new() };
            let summary = drive(&mut layer, &workload);
            assert!(summary.is_clean() && summary.kinds.len() == 2, "{summary:?}");
            layer.forgets = true;
            assert!(!drive(&mut layer, &workload).is_clean(), "lost writes are seen");
        }
    }

    #[test]
    fn one_pass_asks_for_every_block_once() {
        let workload = Workload { access: Access::Read, runtime: None, ..Workload::default() };
        let summary = drive(&mut Memory::new(), &workload);
        assert_eq!(summary.kind(IoKind::Read).unwrap().ios, 256);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let info = LayerInfo { logical_block: 4096, writable: false, ..Memory::new().info() };
        let start = |workload: &Workload| {
            LayerLoad::start("disk", workload, &info, Nanos(0), |slot| Tag(u64::from(slot)))
                .unwrap_err()
                .to_string()
        };
        let small = start(&Workload { block_size: Size(512), ..Workload::default() });
        assert!(small.contains("multiples of 4KiB"), "{small}");
        let write = start(&Workload { access: Access::Write, ..Workload::default() });
        assert!(write.contains("takes no writes"), "{write}");
    }
}
