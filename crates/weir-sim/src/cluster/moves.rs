//! An operator moves the disk: its successor gets a copy of the log, destage stops, the owner gives up its right and requests the
//! change. If the outcome is unknown, the owner serves again only in a new epoch of its own.

use std::time::Duration;

use weir_block::Nanos;

use super::control::{Answer, Ask, ShardMessage};
use super::{Cluster, Task};
use crate::atlas::Fault;
use crate::scale::{CALM, NODES, Process, name};

/// Longest wait of a move for its successor's copy, and for destage to stop.
const PATIENCE: Duration = Duration::from_secs(2);

/// Microseconds between an owner's requests for the outcome of its change.
const RETRY: (u64, u64) = (300_000, 1_000_000);

/// The stage of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The successor has no copy yet, or writes to the backing are in flight.
    Prepares,
    /// The change was sent.
    HandsOver,
    /// The outcome is unknown.
    Doubts,
}

/// A move of an open disk.
#[derive(Clone, Copy, Debug)]
pub struct Moving {
    to: usize,
    until: Nanos,
    stage: Stage,
}

impl Moving {
    /// Whether the disk may already belong to another node: the owner serves nothing.
    pub fn may_be_over(&self) -> bool {
        self.stage != Stage::Prepares
    }
}

impl Cluster {
    /// An operator moves the disk to another node. Returns whether an owner exists.
    pub fn request_move(&mut self) -> bool {
        let until = (self.world.now() + PATIENCE).min(CALM);
        let owner = self.registry.record.owner.filter(|owner| self.is_alive(*owner));
        let Some(owner) = owner else { return false };
        let to = (owner.node + self.rng.usize(1..NODES)) % NODES;
        // A disk's control plane runs one operation at a time.
        let Some(disk) = self.nodes[owner.node].disk.as_mut().filter(|disk| disk.moving.is_none()) else {
            return false;
        };
        disk.moving = Some(Moving { to, until, stage: Stage::Prepares });
        let serial = disk.serial;
        self.send_to_shard(owner, serial, ShardMessage::Successor(Some(name(to))));
        self.after(1_000, 10_000, Task::Move { process: owner, serial });
        true
    }

    /// Continues a move.
    pub fn continue_move(&mut self, process: Process, serial: u64) {
        let now = self.world.now();
        let node = &mut self.nodes[process.node];
        let Some(disk) = node.disk.as_mut().filter(|disk| disk.serial == serial) else { return };
        let Some(moving) = &mut disk.moving else { return };
        if moving.stage != Stage::Prepares {
            moving.stage = Stage::Doubts;
            self.ask(process, Ask::EndDoubt { serial });
            return self.after(RETRY.0, RETRY.1, Task::Move { process, serial });
        }
        if now >= moving.until {
            return self.stay(process, serial);
        }
        let view = &node.view;
        let mine = view.owner == Some(process) && view.write_back;
        let successor = view.replicas.iter().copied().find(|replica| replica.node == moving.to && mine);
        let ready = successor.filter(|_| {
            disk.accel.hold_destage();
            disk.accel.may_hand_over()
        });
        let Some(to) = ready else { return self.after(3_000, 10_000, Task::Move { process, serial }) };
        moving.stage = Stage::HandsOver;
        let epoch = view.epoch;
        self.publish(process);
        let answered = !self.should_inject(Fault::LostAnswer, 4);
        self.ask(process, Ask::HandOver { serial, epoch, to, answered });
        self.after(RETRY.0, RETRY.1, Task::Move { process, serial });
    }

    /// The registry gives the disk to a replica.
    pub fn hand_over(&mut self, from: Process, serial: u64, epoch: u64, to: Process, answered: bool) {
        let current = self.registry.record.epoch == epoch;
        let done = current && self.registry.hand_over(from, to).is_ok();
        self.note(|| format!("n{} hands over to {to:?} in epoch {epoch}: {done}", from.node));
        if done {
            self.owner_changed();
            self.crash_soon(from.node, 8, 100_000);
            self.crash_soon(to.node, 6, 400_000);
        }
        if answered {
            let record = done.then(|| Box::new(self.registry.record.clone()));
            self.answer(from, Answer::HandedOver { serial, record });
        }
    }

    /// The outcome of the change.
    pub fn handed_over(&mut self, process: Process, serial: u64, record: Option<crate::registry::Record>) {
        let node = &mut self.nodes[process.node];
        let Some(disk) = node.disk.as_ref().filter(|disk| disk.serial == serial) else { return };
        match record {
            Some(record) => {
                if record.epoch > node.view.epoch {
                    node.view = record;
                    node.tell_copy(self.planted);
                }
                self.release_disk(process);
                self.report_released(process);
            }
            // No other change was sent.
            None if disk.moving.is_some_and(|moving| moving.stage == Stage::HandsOver) => {
                self.stay(process, serial);
            }
            None => {}
        }
    }

    /// The disk stays where it is.
    pub fn stay(&mut self, process: Process, serial: u64) {
        let node = &mut self.nodes[process.node];
        let Some(disk) = node.disk.as_mut().filter(|disk| disk.serial == serial) else { return };
        disk.moving = None;
        disk.accel.resume_destage();
        node.wake();
        self.send_to_shard(process, serial, ShardMessage::Successor(None));
        self.publish(process);
    }
}
