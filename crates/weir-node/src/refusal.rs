//! Why another node's connection is turned away.

/// The kind of reason. Each kind has its own limit of log lines and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It said nothing, or not enough, in time.
    Silent,
    /// It has not proven to be a node of the cluster.
    Unproven,
    /// Its greeting is malformed, in another node's name, or meant for another process.
    Misgreeted,
    /// The record does not allow what it asks for.
    NotAllowed,
    /// There is no room for it, or its right to connect could not be checked; it may try again.
    NoRoom,
}

/// Why a connection is turned away, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// The kind.
    pub why: Why,
    /// For people.
    pub reason: String,
}

impl Refusal {
    /// A refusal of this kind.
    #[must_use]
    pub fn new(why: Why, reason: impl ToString) -> Refusal {
        Refusal { why, reason: reason.to_string() }
    }
}
