//! The fault atlas: what goes wrong here, which promise covers it, and what keeps it inside that promise.
//!
//! A fault that no promise covers would only show that the impossible was asked for: two of the two copies of a log lost,
//! a clock that runs at double speed. So each kind has its limits, and the code that injects it keeps them.
//!
//! The logs of half of the seeds are in RAM, where the first crash takes them, and of the others on flash, where a copy survives
//! the end of its process and of the power. There a copy counts as lost when its flash is, or what is at rest is damaged.

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is described in FAULTS")]
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
    BackingPowerLoss,
    LateWrite,
    Move,
    CleanRestart,
    PowerLoss,
    TornFrame,
    FlashLost,
    FlashRot,
    FlashLostWrite,
    FlashMisdirected,
    FlashFailure,
}

/// How many kinds there are.
pub const KINDS: usize = FAULTS.len();

/// What the atlas says about one kind.
#[derive(Clone, Copy, Debug)]
pub struct FaultEntry {
    /// The kind.
    pub fault: Fault,
    /// Its name in reports.
    pub name: &'static str,
    /// What happens.
    pub what: &'static str,
    /// The promises that cover it.
    pub covered_by: &'static str,
    /// What keeps it inside them.
    pub limits: &'static str,
}

/// The atlas.
pub const FAULTS: [FaultEntry; 30] = [
    FaultEntry {
        fault: Fault::Crash,
        name: "crash",
        what: "a process ends at once, at any time or right after a takeover or a change of the set, and starts again later \
               without its RAM: owner, log, replica; its connections break, or stay silent until it is back",
        covered_by: "P1, P2, P7; P5 for the backing",
        limits: "with logs in RAM, a process that holds the last living complete copy of a set that is committed, or may be, \
                 does not crash; so at most N under write-back+N, and none under write-back+0. On flash the copy stays",
    },
    FaultEntry {
        fault: Fault::Pause,
        name: "pause",
        what: "a process stands still for 10 ms to 4 s and goes on as if nothing had happened; what reached it meanwhile is \
               handled in any order",
        covered_by: "P2, P4, P9",
        limits: "one that stands still may be given up, but it lives: its copy does not count as lost",
    },
    FaultEntry {
        fault: Fault::ClockDrift,
        name: "clock-drift",
        what: "a process's clock runs up to 4 % fast or slow: its lease and its fence grace are measured with it",
        covered_by: "P2, P4",
        limits: "less than the margin between the lease in the registry and what the process believes (10 %)",
    },
    FaultEntry {
        fault: Fault::ConnectionCut,
        name: "connection-cut",
        what: "a connection between owner and replica breaks; of what is under way a part still arrives, in order; both ends \
               connect again and send again what was not confirmed",
        covered_by: "P1, P9",
        limits: "none: a connection loses and duplicates nothing while it stands (TCP)",
    },
    FaultEntry {
        fault: Fault::ConnectionStall,
        name: "connection-stall",
        what: "nothing moves between two nodes for 10 to 900 ms, around the peer deadline of 300 ms",
        covered_by: "P9, P10",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::PartitionOneWay,
        name: "partition-one-way",
        what: "what one node sends to another does not arrive for 50 ms to 3 s; the other direction works",
        covered_by: "P1, P2, P9",
        limits: "none: nodes that do not reach each other reach the registry or not",
    },
    FaultEntry {
        fault: Fault::PartitionFull,
        name: "partition-full",
        what: "a node and all the others do not reach each other for 50 ms to 3 s",
        covered_by: "P1, P2, P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::ConnectFailure,
        name: "connect-failure",
        what: "a peer that lives cannot be connected to, this once",
        covered_by: "P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::CorruptRecord,
        name: "corrupt-record",
        what: "a bit of a batch flips between the owner's arena and the replica",
        covered_by: "P11",
        limits: "one bit, which CRC-32C always detects; the copy at its source stays whole",
    },
    FaultEntry {
        fault: Fault::RegistryAway,
        name: "registry-away",
        what: "nobody reaches the registry for 50 ms to 1.5 s; leases go on running out",
        covered_by: "P3, P9",
        limits: "it keeps what it has committed (consensus is somebody else's)",
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
        what: "one node does not reach the registry for 100 ms to 3 s; its peers and the storage it does reach",
        covered_by: "P2, P4, P9",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::LostAnswer,
        name: "lost-answer",
        what: "a change is asked for and no answer comes; it is committed before, afterwards, twice, or never",
        covered_by: "P3",
        limits: "a compare-and-swap is committed at most once: the second finds another epoch",
    },
    FaultEntry {
        fault: Fault::LeaseLoss,
        name: "lease-loss",
        what: "an owner loses touch with the registry at the worst moment, when its change of the set has just been \
               committed and nobody knows",
        covered_by: "P2, P3, P4",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::DuplicateNotice,
        name: "duplicate-notice",
        what: "what the control plane tells the shard it tells twice",
        covered_by: "P3",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::PolicyChange,
        name: "policy-change",
        what: "an operator asks for write-through or write-back+0, +1 or +2 at any moment",
        covered_by: "P1, P3, P4",
        limits: "none",
    },
    FaultEntry {
        fault: Fault::BackingError,
        name: "backing-error",
        what: "the backing fails what reaches it for up to 1 s; a write that failed may have been done or not",
        covered_by: "P5, P6, P9",
        limits: "it ends: a disk whose last path is gone for good has no promise but an error",
    },
    FaultEntry {
        fault: Fault::BackingFull,
        name: "backing-full",
        what: "the backing takes no write for up to 2 s, but flushes and reads",
        covered_by: "P6, P9, P10",
        limits: "it ends",
    },
    FaultEntry {
        fault: Fault::BackingSlow,
        name: "backing-slow",
        what: "every operation, flushes included, takes up to 300 ms for up to 2 s",
        covered_by: "P4, P6, P10",
        limits: "no operation takes longer than the longest operation on which the fence grace rests",
    },
    FaultEntry {
        fault: Fault::BackingPowerLoss,
        name: "backing-power-loss",
        what: "of what was not flushed anything may be gone, and what is under way fails",
        covered_by: "P5, P6, P8",
        limits: "what was flushed stays; in runs where all writes are to be durable when they are acknowledged",
    },
    FaultEntry {
        fault: Fault::LateWrite,
        name: "late-write",
        what: "a write lands in the backing when its owner is dead, has let go or is no owner any more",
        covered_by: "P4",
        limits: "within the fence grace, or within the longest operation after a death that was seen",
    },
    FaultEntry {
        fault: Fault::Move,
        name: "move",
        what: "an operator moves the disk to another node at any moment, whatever else goes on",
        covered_by: "P1, P2, P4",
        limits: "none: a move that cannot be had within 2 s is given up",
    },
    FaultEntry {
        fault: Fault::CleanRestart,
        name: "clean-restart",
        what: "a process is told to end, waits for the frame that is under way, and starts again at once with its flash",
        covered_by: "P1, P2, P8",
        limits: "in seeds whose logs are on flash; as for a crash there",
    },
    FaultEntry {
        fault: Fault::PowerLoss,
        name: "power-loss",
        what: "all nodes lose their power at the same moment, half of the time the storage too, and come back one after the \
               other with what is on their flash",
        covered_by: "P1, P7, P8",
        limits: "of each set that is committed, or may be, at least one copy is whole at rest; with logs in RAM that would be \
                 none",
    },
    FaultEntry {
        fault: Fault::TornFrame,
        name: "torn-frame",
        what: "a crash or loss of power leaves any number of the blocks of the frame under way, and of the next block any \
               number of its 512-byte sectors",
        covered_by: "P1, P11",
        limits: "none: one frame is under way at a time, and what is at rest is not touched by the next",
    },
    FaultEntry {
        fault: Fault::FlashLost,
        name: "flash-lost",
        what: "a node that has crashed comes back with another flash, or an empty one",
        covered_by: "P1, P2",
        limits: "the copy on it counts as lost: somebody else of each set that is committed, or may be, keeps one at rest",
    },
    FaultEntry {
        fault: Fault::FlashRot,
        name: "flash-rot",
        what: "a bit flips in a frame at rest: in its header, its table, or its data",
        covered_by: "P11",
        limits: "as for flash-lost; and only once a younger frame is at rest, because what rots in the newest one cannot be \
                 told from a frame that a loss of power has torn, and was not confirmed",
    },
    FaultEntry {
        fault: Fault::FlashLostWrite,
        name: "flash-lost-write",
        what: "a frame that the device has reported as written is not there; what was there before is",
        covered_by: "P11",
        limits: "as for flash-rot: nobody could tell that the newest one was ever written",
    },
    FaultEntry {
        fault: Fault::FlashMisdirected,
        name: "flash-misdirected",
        what: "a frame was written to another place in the ring, over what was there",
        covered_by: "P11",
        limits: "as for flash-rot; within its slot",
    },
    FaultEntry {
        fault: Fault::FlashFailure,
        name: "flash-failure",
        what: "the flash of a running node takes no write any more; when the node starts again it works again, with what was \
               at rest, or is another one",
        covered_by: "P1, P7, P9",
        limits: "as for flash-lost; after the last fault each node whose flash has failed starts again with another one",
    },
];

/// How often each kind was injected.
pub type FaultCounts = [u64; KINDS];
