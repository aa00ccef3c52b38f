//! An operator moves the disk: the owner's control plane prepares a successor, holds destage, and hands the disk over.

use std::time::Duration;

use weir_accel::owner::Event;
use weir_accel::planted::Bug;
use weir_accel::replica::Replica;
use weir_block::Nanos;

use crate::atlas::Fault;
use crate::owner_process::Destage;
use crate::world::{CALM, Control, NODES, Process, Task, World, name};

/// The longest that a move waits for its successor's copy, and for destage to come to a stop.
const PATIENCE: Duration = Duration::from_secs(2);

/// The control plane looks again after this time.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

impl World {
    /// Somebody wants the disk on another node. Whether that is possible shows.
    pub fn want_move(&mut self) -> bool {
        let Some(owner) = self.owner_process() else { return false };
        let to = (owner.node + self.rng.usize(1..NODES)) % NODES;
        let until = (self.now + PATIENCE).min(CALM);
        // A disk's control plane does one thing after the other.
        let Some(process) = self.owner(owner).filter(|owner| !owner.moving) else { return false };
        process.moving = true;
        let serial = process.serial;
        self.ask_control(owner, Control::Move { serial, to, until });
        self.tell(owner, serial, Event::Successor(Some(name(to))));
        true
    }

    /// The next look at whether the disk can move.
    pub fn go_on_moving(&mut self, process: Process, serial: u64, to: usize, until: Nanos) {
        if self.owner(process).is_none_or(|owner| owner.serial != serial) {
            return;
        }
        let successor = self.registry.live(to, self.now);
        let named = successor.filter(|successor| self.registry.is_replica(*successor));
        let mine = self.registry.record.owner == Some(process) && self.registry.record.write_back;
        let (Some(successor), true) = (named, mine && self.reaches_registry(process.node)) else {
            return self.look_again(process, serial, to, until);
        };
        let beside = self.planted.has(Bug::HandOverBesideDestage);
        let Some(owner) = self.owner(process) else { return };
        owner.destage_held = true;
        let quiet = matches!(owner.destage, Destage::Idle | Destage::BackingOff { .. });
        if !owner.owner.is_settled() || !(quiet || beside) {
            return self.look_again(process, serial, to, until);
        }
        let handed_over = self.registry.hand_over(process, successor);
        self.touched = true;
        self.note(|| format!("n{} hands over to {successor:?}: {handed_over:?}", process.node));
        if handed_over.is_err() || self.strikes(Fault::LostAnswer, 4) {
            // Whatever came of it, the control plane takes it for a failure.
            return self.give_up_moving(process, serial);
        }
        self.nodes[process.node].view = self.registry.record.clone();
        self.let_go(process);
    }

    fn look_again(&mut self, process: Process, serial: u64, to: usize, until: Nanos) {
        if self.now >= until {
            return self.give_up_moving(process, serial);
        }
        self.nodes[process.node].control.push_back(Control::Move { serial, to, until });
        self.at(self.now + LOOK_AGAIN, Task::Control { process });
    }

    fn give_up_moving(&mut self, process: Process, serial: u64) {
        if let Some(owner) = self.owner(process) {
            (owner.moving, owner.destage_held) = (false, false);
        }
        self.tell(process, serial, Event::Successor(None));
    }

    /// The disk is another's: the owner's log stays as a replica if the registry says so.
    pub fn let_go(&mut self, process: Process) {
        self.note(|| format!("n{} lets go", process.node));
        let keep = self.registry.is_replica(process);
        self.cut_all(|connection| connection.owner == process);
        self.nodes[process.node].former_since.clear();
        self.nodes[process.node].owes_release = self.registry.epoch_as_former(process);
        let Some(owner) = self.nodes[process.node].owner.take() else { return };
        if !keep {
            self.retire_store(process.node);
        } else {
            let (epoch, lineage) = (owner.owner.configuration().epoch, owner.lineage);
            let mut replica = Replica::of_former_owner(owner.log, epoch, lineage);
            replica.plant(self.planted);
            self.nodes[process.node].replica = Some(replica);
        }
    }
}
