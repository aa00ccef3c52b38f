//! The fault atlas: each kind of fault, the promises that cover it, and its limits.
//!
//! A fault beyond the promises proves nothing: the loss of both copies of a log, a clock at double speed. So each kind has
//! limits, and the code that injects it keeps them.
//!
//! Half of the seeds have their logs in RAM, lost with the first crash; the others on flash, where a copy survives the end of its
//! process and a power cut. There a copy counts as lost when its flash is lost or its durable content is damaged.

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "FAULTS describes each")]
pub enum Fault {
    Crash,
    Pause,
    ClockDrift,
    ConnectionCut,
    ConnectionStall,
    PartitionOneWay,
    PartitionFull,
    ConnectFailure,
    CorruptRecord,
    RegistryAway,
    RegistrySlow,
    RegistryUnreachable,
    LostAnswer,
    LeaseLoss,
    DuplicateNotice,
    PolicyChange,
    BackingError,
    BackingFull,
    BackingSlow,
    BackingPowerCut,
    LateWrite,
    Move,
    CleanRestart,
    PowerCut,
    TornFrame,
    FlashReplaced,
    FlashBitError,
    FlashLostWrite,
    FlashMisdirected,
    FlashFailure,
}

/// Number of kinds.
pub const KINDS: usize = FAULTS.len();

/// The atlas entry of one kind.
#[derive(Clone, Copy, Debug)]
pub struct FaultEntry {
    /// The kind.
    pub fault: Fault,
    /// Its name in reports.
    pub name: &'static str,
    /// The fault.
    pub what: &'static str,
    /// The promises that cover it.
    pub covered_by: &'static str,
    /// Its limits, which keep it within the promises.
    pub limits: &'static str,
}

/// The atlas.
pub const FAULTS: [FaultEntry; 30] = [
    FaultEntry {
        fault: Fault::Crash,
        name: "crash",
        what: "a process ends at any time or right after a takeover or a change of the set, and restarts later \
                 without its RAM: owner, log, replica; its connections break, or stay silent until it is back",
        covered_by: "P1, P2, P7; P5 for the backing",
        limits: "with logs in RAM, a process that holds the last living complete copy of a set that is committed, or may be, \
                 does not crash; so at most N under write-back+N, and none under write-back+0. On flash the copy stays",
    },
    FaultEntry {
        fault: Fault::Pause,
        name: "pause",
        what: "a process pauses for 10 ms to 4 s and then continues; it handles what arrived meanwhile in any order",
        covered_by: "P2, P4, P9",
        limits: "a paused process may be replaced, but it lives: its copy does not count as lost",
    },
    FaultEntry {
        fault: Fault::ClockDrift,
        name: "clock-drift",
        what: "a process's clock runs up to 4 % fast or slow; its lease and its fence grace use that clock",
        covered_by: "P2, P4",
        limits: "less than the margin between the lease in the registry and the process's own deadline (10 %)",
    },
    FaultEntry {
        fault: Fault::ConnectionCut,
        name: "connection-cut",
        what: "a connection between owner and replica breaks; a part of the bytes in flight still arrives, in order; \
                 both ends reconnect and resend what was not confirmed",
        covered_by: "P1, P9",
        limits: "none: an intact connection loses and duplicates nothing (TCP)",
    },
    FaultEntry {
        fault: Fault::ConnectionStall,
        name: "connection-stall",
        what: "no traffic between two nodes for 10 to 900 ms, around the peer deadline of 300 ms",
        covered_by: "P9, P10",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::PartitionOneWay,
        name: "partition-one-way",
        what: "messages from one node to another do not arrive for 50 ms to 3 s; the other direction works",
        covered_by: "P1, P2, P9",
        limits: "none: nodes that cannot reach each other may or may not reach the registry",
    },
    FaultEntry {
        fault: Fault::PartitionFull,
        name: "partition-full",
        what: "a node and all others cannot reach each other for 50 ms to 3 s",
        covered_by: "P1, P2, P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::ConnectFailure,
        name: "connect-failure",
        what: "one connection attempt to a living peer fails",
        covered_by: "P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::CorruptRecord,
        name: "corrupt-record",
        what: "one bit of a batch flips between the owner's arena and the replica",
        covered_by: "P11",
        limits: "one bit, which CRC-32C always detects; the source copy stays intact",
    },
    FaultEntry {
        fault: Fault::RegistryAway,
        name: "registry-away",
        what: "no node reaches the registry for 50 ms to 1.5 s; leases continue to expire",
        covered_by: "P3, P9",
        limits: "it keeps its committed state (consensus is external)",
    },
    FaultEntry {
        fault: Fault::RegistrySlow,
        name: "registry-slow",
        what: "every answer of the registry takes up to 800 ms more for up to 2 s, longer than a lease",
        covered_by: "P2, P3, P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::RegistryUnreachable,
        name: "registry-unreachable",
        what: "one node cannot reach the registry for 100 ms to 3 s; it still reaches its peers and the storage",
        covered_by: "P2, P4, P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::LostAnswer,
        name: "lost-answer",
        what: "the answer to a requested change is lost; the change commits before, afterwards, twice, or never",
        covered_by: "P3",
        limits: "a compare-and-swap commits at most once: the second one finds another epoch",
    },
    FaultEntry {
        fault: Fault::LeaseLoss,
        name: "lease-loss",
        what: "an owner loses contact with the registry when its change of the set has just committed \
                 and no node knows",
        covered_by: "P2, P3, P4",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::DuplicateNotice,
        name: "duplicate-notice",
        what: "the control plane sends a notice to the shard twice",
        covered_by: "P3",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::PolicyChange,
        name: "policy-change",
        what: "an operator requests write-through or write-back+0, +1 or +2 at any time",
        covered_by: "P1, P3, P4",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::BackingError,
        name: "backing-error",
        what: "the backing fails operations for up to 1 s; a failed write may have taken effect",
        covered_by: "P5, P6, P9",
        limits: "it ends: a disk that loses its last path for good only gets errors",
    },
    FaultEntry {
        fault: Fault::BackingFull,
        name: "backing-full",
        what: "the backing accepts no writes for up to 2 s, but flushes and reads",
        covered_by: "P6, P9, P10",
        limits: "it ends",
    },
    FaultEntry {
        fault: Fault::BackingSlow,
        name: "backing-slow",
        what: "every operation, flushes included, takes up to 300 ms for up to 2 s",
        covered_by: "P4, P6, P10",
        limits: "no operation takes longer than the fence grace assumes",
    },
    FaultEntry {
        fault: Fault::BackingPowerCut,
        name: "backing-power-cut",
        what: "any unflushed write may be lost, and operations in flight fail",
        covered_by: "P5, P6, P8",
        limits: "flushed writes stay; only in runs where all acknowledged writes are durable",
    },
    FaultEntry {
        fault: Fault::LateWrite,
        name: "late-write",
        what: "a write lands in the backing after its owner died, released the disk or lost it",
        covered_by: "P4",
        limits: "within the fence grace, or within the longest operation after an observed death",
    },
    FaultEntry {
        fault: Fault::Move,
        name: "move",
        what: "an operator moves the disk to another node at any time",
        covered_by: "P1, P2, P4",
        limits: "none: a move that does not complete within 2 s is abandoned",
    },
    FaultEntry {
        fault: Fault::CleanRestart,
        name: "clean-restart",
        what: "a process is asked to end, waits for the frame in flight, and restarts at once with its flash",
        covered_by: "P1, P2, P8",
        limits: "in seeds whose logs are on flash; as for a crash there",
    },
    FaultEntry {
        fault: Fault::PowerCut,
        name: "power-cut",
        what: "all nodes lose power at the same time, in half of the cases the storage too, and come back one after the \
                 other with the content of their flash",
        covered_by: "P1, P7, P8",
        limits: "of each set that is committed, or may be, at least one copy is complete and durable; with logs in RAM \
                 that would be none",
    },
    FaultEntry {
        fault: Fault::TornFrame,
        name: "torn-frame",
        what: "a crash or power cut writes any number of blocks of the frame in flight, and any number of 512-byte \
                 sectors of the next block",
        covered_by: "P1, P11",
        limits: "none: one frame is in flight at a time, and the next does not touch durable ones",
    },
    FaultEntry {
        fault: Fault::FlashReplaced,
        name: "flash-replaced",
        what: "a crashed node comes back with another flash, or an empty one",
        covered_by: "P1, P2",
        limits: "the copy on it counts as lost: another member of each set that is committed, or may be, has a durable one",
    },
    FaultEntry {
        fault: Fault::FlashBitError,
        name: "flash-bit-error",
        what: "a bit flips in a durable frame: in its header, its table, or its data",
        covered_by: "P11",
        limits: "as for flash-replaced; and only once a newer frame is durable, because damage to the newest one looks \
                 like an unconfirmed frame that a power cut has torn",
    },
    FaultEntry {
        fault: Fault::FlashLostWrite,
        name: "flash-lost-write",
        what: "a frame that the device has reported as written is missing; the older content is still there",
        covered_by: "P11",
        limits: "as for flash-bit-error: a missing newest frame cannot be detected",
    },
    FaultEntry {
        fault: Fault::FlashMisdirected,
        name: "flash-misdirected",
        what: "a frame overwrote another location in the ring",
        covered_by: "P11",
        limits: "as for flash-bit-error; within its slot",
    },
    FaultEntry {
        fault: Fault::FlashFailure,
        name: "flash-failure",
        what: "the flash of a running node accepts no more writes; after a restart it works again, with its durable \
                 content, or is another one",
        covered_by: "P1, P7, P9",
        limits: "as for flash-replaced; after the last fault each node with failed flash restarts with another one",
    },
];

/// Number of injected faults of each kind.
pub type FaultCounts = [u64; KINDS];
