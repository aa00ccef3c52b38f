//! Makes a range read as zeroes, by the cheapest supported method.

/// Bytes of zeroes per operation when no other method works.
pub(super) const WRITE_PIECE: u64 = 2 << 20;

/// Maximum length of one `fallocate`, in bytes: it holds the file's lock, and other requests wait for it.
const ALLOCATE_PIECE: u64 = 256 << 20;

/// Methods, from the cheapest to the most expensive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// Free the space.
    Punch,
    /// Keep the space, marked as zero.
    ZeroRange,
    /// Write zeroes.
    Write,
}

impl Method {
    /// The mode for `fallocate`; `None` when zeroes are written.
    pub fn mode(self) -> Option<i32> {
        match self {
            Method::Punch => Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            Method::ZeroRange => Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
            Method::Write => None,
        }
    }
}

/// The methods of the storage. The backing does not repeat one that fails as unsupported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Methods {
    pub punch: bool,
    pub zero_range: bool,
}

impl Methods {
    /// The cheapest allowed method.
    pub fn choose(self, may_unmap: bool, fast_only: bool) -> Option<Method> {
        if may_unmap && self.punch {
            Some(Method::Punch)
        } else if self.zero_range {
            Some(Method::ZeroRange)
        } else if fast_only {
            None
        } else {
            Some(Method::Write)
        }
    }

    pub fn rule_out(&mut self, method: Method) {
        match method {
            Method::Punch => self.punch = false,
            Method::ZeroRange => self.zero_range = false,
            Method::Write => {}
        }
    }
}

/// A range in progress, piece by piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZeroJob {
    /// First byte not yet started.
    pub next: u64,
    /// End of the piece in flight.
    pub started: u64,
    pub end: u64,
    pub may_unmap: bool,
    pub fast_only: bool,
    pub fua: bool,
    /// The method of the piece in flight.
    pub method: Method,
}

impl ZeroJob {
    /// Length of the next piece, in bytes.
    pub fn piece(&self) -> u64 {
        let most = if self.method == Method::Write { WRITE_PIECE } else { ALLOCATE_PIECE };
        most.min(self.end - self.next)
    }
}
