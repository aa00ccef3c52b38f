//! A *simulated* disk of 15 000 revolutions a minute: the time that a mechanical disk would take. The bytes are the
//! layer's below.
//!
//! Seek curve, rotation and transfer after Ruemmler and Wilkes, "An introduction to disk drive modeling" (IEEE Computer,
//! 1994): short seeks grow with the root of the distance; a write settles longer than a read. Writes go to the medium
//! before they are answered (write-through). After a read the disk reads on into its cache until it has to move. Of the
//! requests that wait, the one that the head can reach first comes first; within a track they are taken as they arrived, so a
//! sequential writer who loses its order pays with revolutions.
//!
//! Two simplifications: the stroke is spread over the disk's size, however small, so that a measurement on part of the
//! address space means what it would on the whole disk; and tracks are skewed such that going on to the next one costs
//! nothing.

use std::collections::VecDeque;
use std::time::Duration;

use weir_block::{Nanos, RequestKind};

use super::settings::Switch;
use super::timing::{Fate, Request, Timing};

/// One revolution at 15 000 per minute.
pub const REVOLUTION: Duration = Duration::from_millis(4);

/// Bytes of a track: 128 MiB/s at the medium.
pub const TRACK: u64 = 512 << 10;

/// The shortest seek, settling included.
const SHORTEST_SEEK: f64 = 0.2e6;

/// Root term of the seek curve, in nanoseconds for the whole stroke: with [`SHORTEST_SEEK`] an average of 3.1 ms over random distances.
const SEEK_ROOT: f64 = 5.5e6;

/// A write needs the head steadier than a read.
const WRITE_SETTLE: Duration = Duration::from_micros(400);

/// The controller's overhead before it moves the head. It prepares a request that continues the last one during that one.
const OVERHEAD: Duration = Duration::from_micros(100);

/// Command and transfer between disk and host of a request that needs no movement: 300 MiB/s and 20 µs.
const COMMAND: Duration = Duration::from_micros(20);
const INTERFACE: u64 = 300 << 20;

/// The size of the read-ahead, and of the data kept behind the last read, in bytes.
const READ_AHEAD: u64 = 1 << 20;

/// The mechanics of the simulated disk. Switched off by [`super::Faults::simulated_disk`], requests pass at once.
#[derive(Debug)]
pub struct Mechanism {
    switch: Switch,
    seen: u64,
    on: bool,
    /// Bytes of the whole stroke.
    size: u64,
    waiting: VecDeque<(Nanos, Request)>,
    /// Under the head, until when.
    busy: Option<(Nanos, usize)>,
    /// Time for which the disk stood still.
    stood_still: Duration,
    /// The latest time that the disk has seen.
    time: Nanos,
    /// Most requests that were here at once since the disk was last idle.
    depth: usize,
    /// The head's position: the byte after the last one that passed under it for a request.
    head: u64,
    /// The time at which the head got there.
    free_since: Nanos,
    cache: Option<ReadAhead>,
}

/// The read-ahead after a read: from `start`, and up to `filled` at `since`; it grows with time, until the head moves.
#[derive(Clone, Copy, Debug)]
struct ReadAhead {
    start: u64,
    filled: u64,
    since: Nanos,
    /// The head is needed elsewhere: no more data is read ahead.
    stopped: bool,
    /// The end of the last requested range.
    asked: u64,
}

impl ReadAhead {
    fn end(&self, now: Nanos) -> u64 {
        if self.stopped {
            return self.filled;
        }
        let more = (now - self.since).as_nanos() * u128::from(TRACK) / REVOLUTION.as_nanos();
        (self.filled + more as u64).min(self.asked + READ_AHEAD)
    }

    /// The time at which it will reach `offset`; `None` if it will not, or begins behind it.
    fn reaches(&self, from: u64, to: u64, now: Nanos) -> Option<Nanos> {
        if from < self.start || to > self.asked + READ_AHEAD {
            return None;
        }
        let end = self.end(now);
        match to.saturating_sub(end) {
            0 => Some(now),
            _ if self.stopped => None,
            missing => Some(now + transfer(missing)),
        }
    }
}

impl Mechanism {
    /// A disk of `size` bytes (1 or more) that is simulated while `switch` says so.
    #[must_use]
    pub fn new(switch: Switch, size: u64) -> Mechanism {
        let on = switch.get().simulated_disk;
        Mechanism {
            switch,
            seen: 0,
            on,
            size: size.max(1),
            waiting: VecDeque::new(),
            busy: None,
            stood_still: Duration::ZERO,
            time: Nanos(0),
            depth: 0,
            head: 0,
            free_since: Nanos(0),
            cache: None,
        }
    }

    /// The disk's own time. Never goes back.
    ///
    /// This process may be late to handle a completion. As long as enough requests wait, the disk has worked on meanwhile. If
    /// the queue runs empty because this process has not delivered the answers, the disk's time stops at the completion: the
    /// stall is this process's, and must not cost a revolution.
    fn disk_time(&mut self, now: Nanos) -> Nanos {
        let time = Nanos(now.0.saturating_sub(self.stood_still.as_nanos() as u64));
        self.time = match self.busy {
            Some((end, _)) if time > end && 2 * self.waiting.len() <= self.depth => {
                let held = end.max(self.time);
                self.stood_still += time - held;
                held
            }
            _ => time,
        };
        self.time
    }

    /// Takes up the next request, if the head is free and one is there.
    fn take_up(&mut self, now: Nanos) {
        if self.busy.is_some() {
            return;
        }
        // The disk was free since then, even if this process is late; it serves no request before its arrival.
        let Some(first) = self.waiting.iter().map(|(arrived, _)| *arrived).min() else { return };
        let begin = self.free_since.max(first);
        debug_assert!(begin <= now, "what is waiting has arrived");
        let there = |(_, (arrived, _)): &(usize, &(Nanos, Request))| *arrived <= begin;
        let nearest =
            self.waiting.iter().enumerate().filter(there).min_by_key(|(_, (_, r))| self.reach(r, begin));
        let Some((place, _)) = nearest else { return };
        let Some((arrived, request)) = self.waiting.remove(place) else { return };
        let end = self.serve(&request, arrived, begin);
        self.busy = Some((end, request.key));
    }

    /// The earliest time at which the head is over the request; at once if it is in the cache or on this track, or needs no
    /// medium.
    fn reach(&self, request: &Request, now: Nanos) -> Nanos {
        let end = request.offset + request.bytes;
        let cached = || self.cache.is_some_and(|cache| cache.reaches(request.offset, end, now).is_some());
        let moves = match request.kind {
            RequestKind::Read => !cached(),
            kind => kind.changes_data() && kind != RequestKind::Discard,
        };
        let here = request.offset.abs_diff(self.head) < TRACK;
        if moves && !here { self.position(request, now) } else { now }
    }

    /// The completion time of a request that is begun at `now`.
    fn serve(&mut self, request: &Request, arrived: Nanos, now: Nanos) -> Nanos {
        match request.kind {
            RequestKind::Read => self.read(request, now),
            RequestKind::Write | RequestKind::WriteZeroes => self.write(request, arrived, now),
            // Nothing is kept back that would have to be flushed.
            RequestKind::Flush | RequestKind::Discard | RequestKind::Extents => now + COMMAND,
        }
    }

    fn read(&mut self, request: &Request, now: Nanos) -> Nanos {
        let (from, to) = (request.offset, request.offset + request.bytes);
        if let Some(cache) = &mut self.cache
            && let Some(there) = cache.reaches(from, to, now)
        {
            (cache.filled, cache.since) = (cache.end(there), there);
            cache.asked = cache.asked.max(to);
            cache.start = cache.start.max(cache.asked.saturating_sub(READ_AHEAD));
            if !cache.stopped {
                self.head = cache.filled;
            }
            return there.max(now + COMMAND + interface(request.bytes));
        }
        let end = self.position(request, now) + transfer(request.bytes);
        self.cache = Some(ReadAhead { start: from, filled: to, since: end, stopped: false, asked: to });
        self.head = to;
        end
    }

    fn write(&mut self, request: &Request, arrived: Nanos, now: Nanos) -> Nanos {
        let goes_on = request.offset == self.head
            && self.cache.is_none_or(|cache| cache.stopped)
            // Sent after the answer, it comes too late for this revolution.
            && arrived < self.free_since;
        let begin = if goes_on { self.free_since } else { self.position(request, now) };
        if let Some(cache) = &mut self.cache {
            (cache.filled, cache.stopped) = (cache.end(now), true);
            // The write replaces data in the cache.
            if request.offset < cache.filled && request.offset + request.bytes > cache.start {
                self.cache = None;
            }
        }
        self.head = request.offset + request.bytes;
        begin + transfer(request.bytes)
    }

    /// The time at which the head is over the first byte: seek, settle, and wait for the platter.
    fn position(&self, request: &Request, now: Nanos) -> Nanos {
        let tracks = request.offset.abs_diff(self.head) / TRACK;
        let share = (tracks * TRACK) as f64 / self.size as f64;
        let seek = if tracks == 0 { 0.0 } else { SHORTEST_SEEK + SEEK_ROOT * share.min(1.0).sqrt() };
        let settle =
            if tracks > 0 && request.kind != RequestKind::Read { WRITE_SETTLE } else { Duration::ZERO };
        let over = now + OVERHEAD + Duration::from_nanos(seek as u64) + settle;
        let revolution = REVOLUTION.as_nanos() as u64;
        let wanted = transfer(request.offset % TRACK).as_nanos() as u64;
        over + Duration::from_nanos((wanted + revolution - over.0 % revolution) % revolution)
    }
}

impl Timing for Mechanism {
    fn arrive(&mut self, request: Request, now: Nanos) {
        if let Some(faults) = self.switch.changed(&mut self.seen) {
            self.on = faults.simulated_disk;
        }
        let now = self.disk_time(now);
        if self.busy.is_none() && self.waiting.is_empty() {
            self.depth = 0;
        }
        self.waiting.push_back((now, request));
        self.depth = self.depth.max(self.waiting.len() + usize::from(self.busy.is_some()));
        if self.on {
            self.take_up(now);
        }
    }

    fn next(&mut self, now: Nanos) -> Option<(usize, Fate)> {
        let (now, on) = (self.disk_time(now), self.on);
        if let Some((end, key)) = self.busy.take_if(|(end, _)| *end <= now || !on) {
            self.free_since = end.min(now);
            if self.on {
                self.take_up(now);
            }
            return Some((key, Fate::PassOn));
        }
        if self.on {
            return None;
        }
        self.waiting.pop_front().map(|(_, request)| (request.key, Fate::PassOn))
    }

    fn returned(&mut self, _key: usize, _now: Nanos) {}

    fn deadline(&self) -> Nanos {
        match self.busy {
            Some((end, _)) if self.on => end + self.stood_still,
            Some(_) => Nanos(0),
            None if !self.on && !self.waiting.is_empty() => Nanos(0),
            None => Nanos::NEVER,
        }
    }
}

/// The time that the head needs for so many bytes.
fn transfer(bytes: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * REVOLUTION.as_nanos() / u128::from(TRACK)) as u64)
}

/// The time that so many bytes need between disk and host.
fn interface(bytes: u64) -> Duration {
    Duration::from_nanos(bytes * 1_000_000_000 / INTERFACE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{Faults, Line};
    use fastrand::Rng;

    const SIZE: u64 = 256 << 20;
    const SECOND: u64 = 1_000_000_000;

    fn disk() -> Mechanism {
        let switch = Switch::default();
        switch.set(Faults { simulated_disk: true, ..Faults::default() });
        Mechanism::new(switch, SIZE)
    }

    fn order_lost(dispatchers: usize) -> Line {
        let switch = Switch::default();
        switch.set(Faults::order_lost(dispatchers));
        Line::new(switch, 11)
    }

    /// IOPS of a closed loop at that depth for ten seconds of the disk's time, through `line`.
    fn iops(
        mut line: Line,
        depth: usize,
        kind: RequestKind,
        bytes: u64,
        mut offset: impl FnMut(u64) -> u64,
    ) -> u64 {
        let (mut disk, mut issued, mut done) = (disk(), 0, 0);
        let mut requests: Vec<Request> = Vec::new();
        let mut free: Vec<usize> = (0..depth).collect();
        let mut now = Nanos(SECOND);
        while now < Nanos(11 * SECOND) {
            while let Some(key) = free.pop() {
                let request = Request { key, kind, offset: offset(issued), bytes };
                requests.resize(depth, request);
                requests[key] = request;
                issued += 1;
                line.arrive(request, now);
            }
            while let Some((key, _)) = line.next(now) {
                disk.arrive(requests[key], now);
            }
            while let Some((key, fate)) = disk.next(now) {
                assert_eq!(fate, Fate::PassOn);
                line.returned(key, now);
                free.push(key);
                done += 1;
            }
            if free.is_empty() {
                now = line.deadline().min(disk.deadline()).max(Nanos(now.0 + 1));
            }
        }
        done / 10
    }

    fn sequential(bytes: u64) -> impl FnMut(u64) -> u64 {
        move |n| n * bytes % SIZE
    }

    fn random(bytes: u64) -> impl FnMut(u64) -> u64 {
        let mut rng = Rng::with_seed(5);
        move |_| rng.u64(0..SIZE / bytes) * bytes
    }

    #[test]
    fn sequential_reads_come_at_the_speed_of_the_track() {
        let reads = iops(order_lost(1), 8, RequestKind::Read, 8192, sequential(8192));
        assert!((15_000..=16_500).contains(&reads), "{reads}: 128 MiB/s are 16 384");
        let alone = iops(order_lost(1), 1, RequestKind::Read, 8192, sequential(8192));
        assert!(alone > 15_000, "{alone}: the cache reads on");
    }

    #[test]
    fn random_requests_come_as_a_disk_of_this_speed_does_them() {
        for kind in [RequestKind::Read, RequestKind::Write] {
            let eight = iops(order_lost(1), 8, kind, 8192, random(8192));
            assert!((270..=360).contains(&eight), "{kind:?}: {eight}");
            let one = iops(order_lost(1), 1, kind, 8192, random(8192));
            assert!((150..=210).contains(&one), "{kind:?}: {one}: seek, settle, half a revolution");
        }
    }

    #[test]
    fn a_sequential_writer_streams_only_while_the_next_request_is_there() {
        let queued = iops(order_lost(1), 8, RequestKind::Write, 8192, sequential(8192));
        assert!((15_000..=16_500).contains(&queued), "{queued}");
        let alone = iops(order_lost(1), 1, RequestKind::Write, 8192, sequential(8192));
        assert!((240..=260).contains(&alone), "{alone}: one a revolution, 250");
    }

    /// The published measurement: two threads that dispatch one writer's sequence cost it more than nine tenths.
    #[test]
    fn lost_order_costs_sequential_writes_and_nothing_else() {
        let factor = |kind, offsets: fn() -> Box<dyn FnMut(u64) -> u64>| {
            let (one, two) = (
                iops(order_lost(1), 8, kind, 8192, offsets()),
                iops(order_lost(2), 8, kind, 8192, offsets()),
            );
            two as f64 / one as f64
        };
        let in_order = || Box::new(sequential(8192)) as Box<dyn FnMut(u64) -> u64>;
        let at_random = || Box::new(random(8192)) as Box<dyn FnMut(u64) -> u64>;
        let written = factor(RequestKind::Write, in_order);
        assert!(written < 0.1, "{written}");
        for (kind, offsets) in [
            (RequestKind::Read, in_order as fn() -> _),
            (RequestKind::Write, at_random),
            (RequestKind::Read, at_random),
        ] {
            let left = factor(kind, offsets);
            assert!((0.9..1.1).contains(&left), "{kind:?}: {left}");
        }
    }

    #[test]
    fn switched_off_it_passes_everything_at_once() {
        let mut disk = disk();
        let request = |key| Request { key, kind: RequestKind::Write, offset: 100 << 20, bytes: 4096 };
        (0..3).for_each(|key| disk.arrive(request(key), Nanos(5)));
        assert_eq!(disk.next(Nanos(5)), None);
        assert!(disk.deadline() > Nanos(5));
        disk.switch.set(Faults::default());
        disk.arrive(request(3), Nanos(6));
        let passed: Vec<usize> = std::iter::from_fn(|| disk.next(Nanos(6))).map(|(key, _)| key).collect();
        assert_eq!(passed, [0, 1, 2, 3]);
    }

    #[test]
    fn time_that_this_process_missed_is_not_the_disks() {
        let mut disk = disk();
        let write = |key, n: u64| Request { key, kind: RequestKind::Write, offset: n * 8192, bytes: 8192 };
        (0..2).for_each(|n| disk.arrive(write(n, n as u64), Nanos(SECOND)));
        let due = disk.deadline();
        let late = due + Duration::from_millis(3);
        assert_eq!(disk.next(late), Some((0, Fate::PassOn)));
        disk.arrive(write(2, 2), late);
        // The second goes on where the first ended, and so does what came late.
        let next = disk.deadline();
        assert_eq!(next - late, transfer(8192));
        assert_eq!(disk.next(next), Some((1, Fate::PassOn)));
        assert_eq!(disk.deadline() - next, transfer(8192));
    }
}
