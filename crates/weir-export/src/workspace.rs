//! Resources that all clients of a shard share: the receive space, and the rules that divide memory.

use std::io::IoSlice;
use std::time::Duration;

use weir_block::{BufferPool, LayerInfo, Nanos, Token};
use weir_nbd::server::RequestHead;

/// Most bytes taken from a socket in one call.
pub(crate) const WINDOW: usize = 64 << 10;

/// A write of at least this many bytes, of which not all have arrived, is received into a buffer of its own.
pub(crate) const DIRECT: usize = 32 << 10;

/// The same, when much memory is held by clients that stop in the middle of their requests.
const DIRECT_WHEN_SCARCE: usize = 4 << 10;

/// Bytes that a shard keeps of requests that are incomplete or have to wait.
const STASH_LIMIT: usize = 32 << 20;

/// From this size on, in bytes, requests let a connection pass that has waited for memory for [`PATIENCE`].
const YIELDS: usize = 64 << 10;

/// A read or write that is too large for the layer or for the shard's memory goes in parts of at most so many bytes.
const LARGEST_PART: u64 = 1 << 20;

/// The time that a large request waits for memory before others are held back in its favour, and then the time for which they
/// are. If it still lacks memory by then (clients that do not move may hold it), others go on for a while.
pub(crate) const PATIENCE: Duration = Duration::from_millis(250);

/// The receive space and send scratch of one shard.
///
/// Connections do not own a receive buffer: they receive here, work off what is complete, and keep only the rest.
/// Ten thousand idle ones therefore cost almost nothing.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) receive: Box<[u8]>,
    pub(crate) slices: Vec<IoSlice<'static>>,
    /// Bytes that connections keep of incomplete or waiting requests.
    pub(crate) stashed: usize,
    /// The connection that has waited longest for memory of the shard, and since when.
    first_in_line: Option<(Token, Nanos)>,
    /// The same for memory of its disk's share, which no other disk can give back.
    first_in_disk: Option<(Token, Nanos)>,
}

impl Workspace {
    /// A workspace for one shard, about 300 KiB.
    #[must_use]
    pub fn new() -> Workspace {
        Workspace {
            receive: vec![0; DIRECT + RequestHead::LONGEST + WINDOW].into_boxed_slice(),
            slices: Vec::new(),
            stashed: 0,
            first_in_line: None,
            first_in_disk: None,
        }
    }

    /// The number of bytes that a connection may receive beyond its stash. All of them may turn out to have to wait, so the
    /// limit falls as the shard's stash grows (P10).
    pub(crate) fn window(&self) -> usize {
        (STASH_LIMIT.saturating_sub(self.stashed) / 2).clamp(DIRECT_WHEN_SCARCE, WINDOW)
    }

    /// A connection has to wait for memory of the shard. The first that does is the first in line.
    pub(crate) fn line_up(&mut self, who: Token, now: Nanos) {
        self.first_in_line.get_or_insert((who, now));
    }

    /// A connection has to wait because other connections of its disk hold the disk's share. Other disks do not let it pass.
    pub(crate) fn line_up_in_disk(&mut self, who: Token, now: Nanos) {
        self.first_in_disk.get_or_insert((who, now));
    }

    /// A connection got its memory, or is gone.
    pub(crate) fn leave_line(&mut self, who: Token) {
        for line in [&mut self.first_in_line, &mut self.first_in_disk] {
            if line.is_some_and(|(first, _)| first == who) {
                *line = None;
            }
        }
    }

    /// The time since which the first in line has waited; `None` if no connection waits.
    pub(crate) fn longest_wait(&self) -> Option<Nanos> {
        let lines = [self.first_in_line, self.first_in_disk];
        lines.into_iter().flatten().map(|(_, since)| since).min()
    }

    /// Whether a connection of some disk waits for memory of the shard. If so, the shard searches the other connections for
    /// clients that hold memory and do not move, so every disk needs its turns.
    #[must_use]
    pub fn somebody_waits(&self) -> bool {
        self.longest_wait().is_some()
    }

    /// Whether a request has to let another one pass that would otherwise starve beside many smaller ones.
    pub(crate) fn yields(&self, who: Token, wanted: usize) -> bool {
        if wanted < YIELDS {
            return false;
        }
        let ahead =
            |(first, since): (Token, Nanos)| first != who && waited_turns(Nanos::now() - since) % 2 == 1;
        let in_disk = self.first_in_disk.filter(|(first, _)| first.owner == who.owner);
        self.first_in_line.is_some_and(ahead) || in_disk.is_some_and(ahead)
    }

    /// From which size on an incomplete write gets a buffer.
    pub(crate) fn direct(&self) -> usize {
        if self.stashed < STASH_LIMIT / 2 { DIRECT } else { DIRECT_WHEN_SCARCE }
    }
}

fn waited_turns(waited: Duration) -> u128 {
    waited.as_nanos() / PATIENCE.as_nanos()
}

impl Default for Workspace {
    fn default() -> Workspace {
        Workspace::new()
    }
}

/// Whether a connection that holds `held` bytes of the shard's buffers may take `wanted` more.
///
/// The connection may then hold at most `free × (free / limit)⁴`, where `free` is the rest of the pool. Busy clients hardly
/// notice. Clients that stop reading, or stop in the middle of a write, never return their memory; the rule leaves something
/// for others however many such clients there are: after n of them a newcomer may still hold `limit × (1 + 4n)^-1.25`, which
/// with a pool of 256 MiB is 2.5 MiB beside 10 and 8 KiB beside 1000. (A fixed fraction of the free memory would fall
/// exponentially.)
pub(crate) fn fair(pool: &BufferPool, held: usize, wanted: usize) -> bool {
    let limit = pool.limit() as f64;
    let free = limit - pool.lent() as f64 - wanted as f64;
    let share = free / limit;
    free > 0.0 && (held + wanted) as f64 <= free * share * share * share * share && pool.has_room(wanted)
}

/// Whether a disk whose connections hold `held` bytes of the shard's buffers may take `wanted` more. As [`fair`], with the sum of
/// its connections and a flatter rule, because disks are fewer: one alone gets 38 % of the pool however many connections it has,
/// and after n such disks the next one gets `limit × (1 + n)^-2`, which with a pool of 256 MiB is 2 MiB beside 10.
pub(crate) fn fair_to_disks(pool: &BufferPool, held: usize, wanted: usize) -> bool {
    let limit = pool.limit() as f64;
    let free = limit - pool.lent() as f64 - wanted as f64;
    free > 0.0 && (held + wanted) as f64 <= free * free / limit
}

/// The largest request that [`fair`] is sure to admit on an idle shard, in bytes.
pub(crate) fn largest_fair(pool: &BufferPool) -> usize {
    pool.limit() / 5
}

/// The largest read or write that goes to the layer as it is, in bytes; larger ones go in parts.
pub(crate) fn largest_whole(pool: &BufferPool, info: &LayerInfo) -> u64 {
    (largest_fair(pool) as u64).min(info.max_transfer.into())
}

/// Bytes of a part, a multiple of every block size: small enough that several are in flight at once.
pub(crate) fn part_size(pool: &BufferPool, info: &LayerInfo) -> u64 {
    let most = largest_whole(pool, info).min(2 * LARGEST_PART) / 2;
    1 << most.max(info.logical_block.into()).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hogs_leave_something_for_others() {
        let pool = BufferPool::new(64 << 20);
        let mut held = Vec::new();
        for _ in 0..200 {
            let mut mine = Vec::new();
            while fair(&pool, mine.len() * 4096, 4096) {
                mine.push(pool.take(4096).expect("fair implies room"));
            }
            held.push(mine);
        }
        assert!(held[0].len() * 4096 >= 12 << 20, "one alone gets a fifth");
        assert!(held[199].len() >= 3, "the two-hundredth still gets {} pages", held[199].len());
    }

    #[test]
    fn disks_leave_something_for_others_however_many_connections_they_have() {
        let pool = BufferPool::new(64 << 20);
        let mut held = Vec::new();
        for _ in 0..20 {
            let mut mine = Vec::new();
            while fair_to_disks(&pool, mine.len() << 16, 1 << 16) {
                mine.push(pool.take(1 << 16).expect("a fair share leaves room"));
            }
            held.push(mine);
        }
        let first = held[0].len() << 16;
        assert!((23 << 20..26 << 20).contains(&first), "one alone gets 38 %, not {first}");
        assert!(held[19].len() >= 2, "the twentieth still gets {} pieces", held[19].len());
    }

    #[test]
    fn the_largest_fair_request_passes_when_idle() {
        let pool = BufferPool::new(64 << 20);
        assert!(fair(&pool, 0, largest_fair(&pool)) && fair_to_disks(&pool, 0, largest_fair(&pool)));
        assert!(!fair(&pool, 0, pool.limit() / 4));
    }
}
