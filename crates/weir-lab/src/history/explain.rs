//! Violations in words.

use std::fmt;

use weir_block::Nanos;

use super::{Action, FOREIGN, INITIAL, Judgement, Operation, Violation, Witness};

/// A time in seconds, to the microsecond.
struct Seconds(Nanos);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.0 / 1000;
        write!(f, "{}.{:06}", micros / 1_000_000, micros % 1_000_000)
    }
}

/// A value as people compare it.
struct Value(u64);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            INITIAL => f.write_str("zeroes"),
            FOREIGN => f.write_str("something that is no write's value"),
            value => write!(f, "{value:#x}"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = match self.action {
            Action::Read => "read",
            Action::Write => "write",
        };
        let (client, node, connection, value) = (self.client, self.node, self.connection, Value(self.value));
        write!(f, "{action} of {value} by client {client} on n{node} (connection {connection}), ")?;
        match self.completed {
            Some(completed) => write!(f, "{} to {} s", Seconds(self.invoked), Seconds(completed)),
            None => write!(f, "from {} s, without an answer", Seconds(self.invoked)),
        }
    }
}

impl fmt::Display for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = Value(self.value);
        match &self.there {
            Some(there) => write!(f, "  {value} was there by then: {there}")?,
            None if self.value == INITIAL => write!(f, "  {value} was there from the beginning")?,
            None => write!(f, "  {value} was never answered")?,
        }
        match &self.needed {
            Some(needed) => write!(f, "\n  {value} was used last by: {needed}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::WrittenTwice([one, other]) => write!(
                f,
                "sector {}: two writes carry the same value, so the history cannot be judged\n  {one}\n  {other}",
                one.register
            ),
            Violation::NeverWritten(read) => {
                write!(f, "sector {}: nobody has written what was read\n  {read}", read.register)
            }
            Violation::ReadBeforeWritten { read, write } => write!(
                f,
                "sector {}: a value was read before its write began\n  {read}\n  {write}",
                read.register
            ),
            Violation::BothNeeded([one, other]) => write!(
                f,
                "sector {}: {} and {} were each seen after the other one had been there\n{one}\n{other}",
                self.register(),
                Value(one.value),
                Value(other.value),
            ),
            Violation::Between { stays, comes } => write!(
                f,
                "sector {}: {} was seen again although {} had been there in between\n{stays}\n{comes}",
                self.register(),
                Value(stays.value),
                Value(comes.value),
            ),
        }
    }
}

impl fmt::Display for Judgement {
    /// The counts, then the first violations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Judgement { operations, registers, unknown, stale, violations, first, .. } = self;
        write!(
            f,
            "{operations} operations on {registers} sectors, {unknown} writes without an answer, {stale} stale reads, \
             {violations} violations"
        )?;
        first.iter().try_for_each(|violation| write!(f, "\n{violation}"))
    }
}
