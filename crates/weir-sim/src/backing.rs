//! The backing: per block the newest version, and what a loss of power would leave of it.

use weir_block::Nanos;

use crate::world::{BLOCKS, FENCE_GRACE, LONGEST_OPERATION, Process};

/// One operation on its way to the backing.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Who started it.
    pub process: Process,
    /// Which opening of the disk by that process.
    pub serial: u64,
    pub kind: OperationKind,
    /// When its process looked at the lease and decided on it.
    begun: Nanos,
    /// It was started before so many losses of power.
    pub generation: u64,
    /// Its process stands still before it has handed it to the kernel, until then; 0 if it has.
    pub not_before: Nanos,
}

#[derive(Clone, Copy, Debug)]
pub enum OperationKind {
    /// Part of a checkpoint.
    Destage { block: usize, version: u64 },
    /// Past the log, durable when it ends.
    Bypass { block: usize, version: u64 },
    /// Makes durable what had landed when it was started.
    Flush { covers: u64 },
}

#[derive(Clone, Debug, Default)]
pub struct Block {
    durable: u64,
    /// Landed and not yet flushed: when, and which version.
    volatile: Vec<(u64, u64)>,
}

impl Block {
    /// What a read brings.
    pub fn current(&self) -> u64 {
        self.volatile.last().map_or(self.durable, |newest| newest.1)
    }

    pub fn is_durable(&self) -> bool {
        self.volatile.is_empty()
    }

    /// The oldest version that may be here after a loss of power.
    pub fn worst(&self) -> u64 {
        self.volatile
            .iter()
            .map(|entry| entry.1)
            .chain([self.durable])
            .min()
            .expect("at least the durable one")
    }
}

#[derive(Default)]
pub struct Backing {
    pub blocks: [Block; BLOCKS],
    pub in_flight: Vec<Option<Operation>>,
    landed: u64,
    /// Losses of power so far.
    pub generation: u64,
}

impl Backing {
    pub fn start(&mut self, now: Nanos, process: Process, serial: u64, kind: OperationKind) -> usize {
        let generation = self.generation;
        let operation = Operation { process, serial, kind, begun: now, generation, not_before: Nanos(0) };
        self.in_flight.push(Some(operation));
        self.in_flight.len() - 1
    }

    /// What a flush that is started now makes durable.
    pub fn landed(&self) -> u64 {
        self.landed
    }

    pub fn is_quiet_for(&self, process: Process) -> bool {
        !self.in_flight.iter().flatten().any(|operation| operation.process == process)
    }

    /// What this process has begun is not handed to the kernel before `until`; but nothing takes longer, from the look at the
    /// lease on, than the fence grace was made for: a successor that was given the disk counts from then.
    pub fn delay(&mut self, process: Process, until: Nanos) {
        let own = self.in_flight.iter_mut().flatten().filter(|operation| operation.process == process);
        for operation in own.filter(|operation| until <= operation.begun + (FENCE_GRACE - LONGEST_OPERATION))
        {
            operation.not_before = until;
        }
    }

    /// The operation reaches the medium. Whether it succeeded.
    pub fn land(&mut self, operation: Operation) -> bool {
        if operation.generation != self.generation {
            return false;
        }
        self.landed += 1;
        match operation.kind {
            OperationKind::Destage { block, version } => {
                self.blocks[block].volatile.push((self.landed, version));
            }
            OperationKind::Bypass { block, version } => {
                self.blocks[block] = Block { durable: version, volatile: Vec::new() };
            }
            OperationKind::Flush { covers } => {
                for block in &mut self.blocks {
                    while block.volatile.first().is_some_and(|entry| entry.0 <= covers) {
                        block.durable = block.volatile.remove(0).1;
                    }
                }
            }
        }
        true
    }

    /// Of what was not flushed anything may be lost. What is under way fails.
    pub fn lose_power(&mut self, rng: &mut fastrand::Rng) {
        self.generation += 1;
        for block in &mut self.blocks {
            let kept = rng.usize(..=block.volatile.len());
            if let Some(entry) = kept.checked_sub(1).map(|last| block.volatile[last]) {
                block.durable = entry.1;
            }
            block.volatile.clear();
        }
    }
}
