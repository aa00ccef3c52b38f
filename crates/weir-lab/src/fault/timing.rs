//! Decisions of a fault about the requests that reach it.

use weir_block::{Nanos, RequestKind};

/// A request, as far as its timing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Names it among those that are held or below. Given out anew once it has returned.
    pub key: usize,
    /// Its kind.
    pub kind: RequestKind,
    /// First byte; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub bytes: u64,
}

/// The fate of a request whose time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes on to the layer below.
    PassOn,
    /// It is answered with an error and never reaches the layer below.
    Fail,
}

/// Decides when requests go on, in which order, and which fail. Has no clock: it is given the time, which never goes
/// back.
pub trait Timing {
    /// A request arrives.
    fn arrive(&mut self, request: Request, now: Nanos);

    /// The next request whose time has come, if there is one. Called until it says no.
    fn next(&mut self, now: Nanos) -> Option<(usize, Fate)>;

    /// A request that went on was answered by the layer below.
    fn returned(&mut self, key: usize, now: Nanos);

    /// The time of the next call of [`Timing::next`] even if nothing arrives or returns.
    fn deadline(&self) -> Nanos;
}
