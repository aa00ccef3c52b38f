//! Making a range read as zeroes, by the cheapest way that works.

/// Zeroes written per operation when nothing better works, in bytes.
pub(super) const WRITE_PIECE: u64 = 2 << 20;

/// Most bytes that one `fallocate` is asked for: it holds the file's lock, and other requests wait behind it.
const ALLOCATE_PIECE: u64 = 256 << 20;

/// Ways from the cheapest to the dearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Give the space back.
    Punch,
    /// Keep the space, marked as zero.
    ZeroRange,
    /// Write zeroes.
    Write,
}

impl Way {
    /// The mode for `fallocate`; `None` when zeroes are written.
    pub fn mode(self) -> Option<i32> {
        match self {
            Way::Punch => Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            Way::ZeroRange => Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
            Way::Write => None,
        }
    }
}

/// Which ways the storage offers. What it turns out not to do is not tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ways {
    pub punch: bool,
    pub zero_range: bool,
}

impl Ways {
    /// The cheapest way allowed.
    pub fn choose(self, may_unmap: bool, fast_only: bool) -> Option<Way> {
        if may_unmap && self.punch {
            Some(Way::Punch)
        } else if self.zero_range {
            Some(Way::ZeroRange)
        } else if fast_only {
            None
        } else {
            Some(Way::Write)
        }
    }

    pub fn rule_out(&mut self, way: Way) {
        match way {
            Way::Punch => self.punch = false,
            Way::ZeroRange => self.zero_range = false,
            Way::Write => {}
        }
    }
}

/// A range under way, piece by piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZeroJob {
    /// First byte not yet started.
    pub next: u64,
    /// End of the piece that is with the kernel.
    pub started: u64,
    pub end: u64,
    pub may_unmap: bool,
    pub fast_only: bool,
    pub fua: bool,
    /// Of the piece that is with the kernel.
    pub way: Way,
}

impl ZeroJob {
    /// Length of the next piece, in bytes.
    pub fn piece(&self) -> u64 {
        let most = if self.way == Way::Write { WRITE_PIECE } else { ALLOCATE_PIECE };
        most.min(self.end - self.next)
    }
}
