//! What the owner has asked for, from the message to the answer: each request's data until it begins, and its time.

use std::collections::BTreeMap;

use weir_block::{Meter, Nanos, RequestKind};

use crate::lun::redirect::Data;
use crate::lun::router::Kind;

/// A request's data, until it begins.
pub struct Waiting {
    pub data: Data,
    pub durable: bool,
    pub by_file: bool,
}

struct One {
    kind: RequestKind,
    bytes: u64,
    arrived: Nanos,
    waiting: Option<Waiting>,
}

/// The requests that were not answered, by their numbers in messages.
#[derive(Default)]
pub struct Asked {
    all: BTreeMap<u64, One>,
    meter: Meter,
}

impl Asked {
    /// Whether this number is that of a request that was not answered.
    pub fn has(&self, id: u64) -> bool {
        self.all.contains_key(&id)
    }

    pub fn arrive(&mut self, id: u64, (kind, bytes): (Kind, u64), waiting: Option<Waiting>, now: Nanos) {
        let kind = meter_kind(kind);
        self.meter.arrive(kind, now);
        self.all.insert(id, One { kind, bytes, arrived: now, waiting });
    }

    /// The data of a request that begins; once.
    pub fn begin(&mut self, id: u64) -> Option<Waiting> {
        self.all.get_mut(&id)?.waiting.take()
    }

    pub fn answer(&mut self, id: u64, is_done: bool, now: Nanos) {
        if let Some(One { kind, bytes, arrived, .. }) = self.all.remove(&id) {
            self.meter.complete(kind, bytes, arrived, now, is_done);
        }
    }

    /// Nobody waits for an answer any more.
    pub fn clear(&mut self, now: Nanos) {
        for One { kind, bytes, arrived, .. } in std::mem::take(&mut self.all).into_values() {
            self.meter.complete(kind, bytes, arrived, now, false);
        }
    }

    /// From messages to answers.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }
}

/// What freed space counts as.
fn meter_kind(kind: Kind) -> RequestKind {
    match kind {
        Kind::Read => RequestKind::Read,
        Kind::Write => RequestKind::Write,
        Kind::Punch => RequestKind::Discard,
        Kind::Flush => RequestKind::Flush,
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test")]

    use super::*;

    #[test]
    fn requests_count_from_the_message_to_the_answer_and_those_without_one_as_errors() {
        let at = |micros: u64| Nanos(micros * 1000);
        let mut asked = Asked::default();
        let waiting = || Some(Waiting { data: Data::None, durable: true, by_file: false });
        asked.arrive(7, (Kind::Read, 4096), waiting(), at(10));
        asked.arrive(8, (Kind::Flush, 0), None, at(20));
        assert!(asked.has(7) && !asked.has(9));
        assert!(asked.begin(7).unwrap().durable && asked.begin(7).is_none() && asked.has(7));
        assert!(asked.begin(8).is_none());
        asked.answer(7, true, at(60));
        asked.answer(7, true, at(70));
        asked.clear(at(90));
        let meter = asked.meter();
        let (read, flush) = (meter.kind(RequestKind::Read), meter.kind(RequestKind::Flush));
        assert_eq!((read.arrivals, read.completions, read.errors, read.bytes), (1, 1, 0, 4096));
        assert!(read.latency.max().abs_diff(50_000) <= 500, "{}", read.latency.max());
        assert_eq!((flush.arrivals, flush.completions, flush.errors), (1, 0, 1));
        assert_eq!(meter.in_flight(), 0);
    }
}
