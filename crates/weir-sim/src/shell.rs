//! What the shell around an owner's core does: carry out effects, send, destage, answer.

use std::time::Duration;

use weir_accel::owner::{Effect, Event};
use weir_accel::planted::Bug;
use weir_block::Nanos;

use crate::atlas::Fault;
use crate::backing::{Operation, OperationKind};
use crate::owner_process::{Answer, Destage, OwnerProcess, newest};
use crate::world::{Control, LONGEST_OPERATION, PEER_DEADLINE, Process, Side, Task, World, name, node_of};

/// An owner without a lease looks for it again after this time.
const LEASE_POLL: Duration = Duration::from_millis(10);

/// After the backing refused a checkpoint, wait so long before trying again.
const BACK_OFF: Duration = Duration::from_millis(100);

impl World {
    pub fn owner(&mut self, process: Process) -> Option<&mut OwnerProcess> {
        let node = &mut self.nodes[process.node];
        node.owner.as_mut().filter(|_| node.incarnation == process.incarnation)
    }

    pub fn holds_lease(&self, process: Process) -> bool {
        self.now < self.nodes[process.node].lease
    }

    /// One step of the core, and what follows from it.
    pub fn step(&mut self, process: Process, event: Event) {
        let (now, traced) = (self.now, self.is_traced());
        let Some(owner) = self.owner(process) else { return };
        let before = owner.owner.marks();
        let mut effects = Vec::new();
        let text = if traced { format!("{event:?}") } else { String::new() };
        owner.owner.step(now, event, &mut effects);
        let after = owner.owner.marks();
        self.note(|| format!("n{} {text} -> {after:?} {effects:?}", process.node));
        let back = [
            (before.appended, after.appended),
            (before.replicated, after.replicated),
            (before.acknowledged, after.acknowledged),
            (before.destaged, after.destaged),
            (before.freed, after.freed),
        ];
        if back.iter().any(|(before, after)| before > after) {
            self.fail(|| format!("a watermark went back: {before:?}, then {after:?}"));
        }
        for effect in effects {
            self.carry_out(process, effect);
        }
    }

    fn carry_out(&mut self, process: Process, effect: Effect) {
        let Some(owner) = self.owner(process) else { return };
        let serial = owner.serial;
        match effect {
            Effect::WantPeer { node, connected, exclude } => {
                self.ask_control(process, Control::WantPeer { serial, node, connected, exclude });
            }
            Effect::Propose { epoch, replicas, write_back } => {
                self.ask_control(process, Control::Propose { serial, epoch, replicas, write_back });
            }
            Effect::DropPeer(node) => self.drop_channel(process, node_of(&node)),
            Effect::FreeTo(to) => {
                owner.log.free_to(to);
                self.touched = true;
            }
            Effect::Fenced(_) | Effect::Tell(..) => {}
        }
    }

    fn drop_channel(&mut self, process: Process, node: usize) {
        let Some(owner) = self.owner(process) else { return };
        let gone = owner.channels.iter().filter(|channel| channel.node == node);
        let gone: Vec<usize> = gone.map(|channel| channel.connection).collect();
        owner.channels.retain(|channel| channel.node != node);
        for connection in gone {
            self.cut(connection);
        }
    }

    /// The control plane has a connection, or none.
    pub fn connected(&mut self, process: Process, serial: u64, peer: Option<Process>) {
        let now = self.now;
        self.note(|| format!("n{} is connected to {peer:?}", process.node));
        if self.owner(process).is_none_or(|owner| owner.serial != serial || owner.owner.is_fenced()) {
            return;
        }
        match peer.filter(|peer| self.is_alive(*peer)) {
            Some(peer) => {
                self.nodes[process.node].connected[peer.node] = Some(peer);
                self.drop_channel(process, peer.node);
                self.connections.push(crate::network::Connection::new(process, peer));
                let connection = self.connections.len() - 1;
                let Some(owner) = self.owner(process) else { return };
                let hello = owner.connect(peer.node, connection, now);
                self.send(connection, Side::Replica, hello);
                if self.nodes[peer.node].owner.is_some() {
                    self.cut(connection);
                }
            }
            None => self.step(process, Event::PeerUnavailable),
        }
        self.turn(process);
    }

    pub fn told(&mut self, process: Process, serial: u64, event: Event) {
        if self.owner(process).is_some_and(|owner| owner.serial == serial) {
            self.step(process, event);
            self.turn(process);
        }
    }

    /// Everything that can be done now.
    pub fn turn(&mut self, process: Process) {
        let now = self.now;
        let Some(owner) = self.owner(process) else { return };
        if owner.wake <= now {
            owner.wake = Nanos::NEVER;
        }
        let last = owner.log.last();
        if last > owner.owner.marks().appended {
            self.step(process, Event::Appended(last));
        }
        self.expire(process);
        self.hear_of_flash(process);
        if self.owner(process).is_some_and(|owner| now >= owner.owner.deadline()) {
            self.step(process, Event::Tick);
        }
        let Some(owner) = self.owner(process) else { return };
        if !owner.owner.is_fenced() && owner.deadline() <= now {
            return self.fail(|| format!("n{} would spin: its deadline has passed", process.node));
        }
        if owner.owner.is_fenced() {
            return;
        }
        self.send_batches(process);
        self.put_to_rest(process);
        if let Some(owner) = self.owner(process)
            && let Destage::BackingOff { until } = owner.destage
            && until <= now
        {
            owner.destage = Destage::Idle;
        }
        if self.holds_lease(process) {
            self.begin_checkpoint(process);
        }
        self.release(process);
        self.plan_turn(process);
    }

    fn plan_turn(&mut self, process: Process) {
        let poll = if self.holds_lease(process) { Nanos::NEVER } else { self.now + LEASE_POLL };
        let now = self.now;
        let Some(owner) = self.owner(process) else { return };
        let again = match owner.destage {
            Destage::BackingOff { until } => until,
            _ => Nanos::NEVER,
        };
        let at = owner.deadline().min(poll).min(again.max(now));
        if at < owner.wake {
            owner.wake = at;
            self.at(at, Task::Turn { process });
        }
    }

    fn expire(&mut self, process: Process) {
        let now = self.now;
        let Some(owner) = self.owner(process) else { return };
        let silent = owner
            .channels
            .iter()
            .filter(|channel| channel.feed.is_none() && now >= channel.since + PEER_DEADLINE);
        let silent: Vec<usize> = silent.map(|channel| channel.node).collect();
        for node in silent {
            self.step(process, Event::PeerLost(name(node)));
        }
    }

    fn send_batches(&mut self, process: Process) {
        // A channel that is backed up is sent nothing for a while.
        let most = self.rng.usize(..4);
        for place in 0.. {
            let Some(owner) = self.owner(process) else { return };
            if place >= owner.channels.len() {
                break;
            }
            // The backlog rests now and then.
            let rests = self.rng.bool();
            for _ in 0..=most {
                let backlog = !rests && self.rng.bool();
                let batch = |owner: &mut OwnerProcess, backlog| owner.batch(place, backlog);
                let Some(owner) = self.owner(process) else { return };
                let next = batch(owner, backlog).or_else(|| batch(owner, !backlog && !rests));
                let Some((connection, batch)) = next else { break };
                self.send(connection, Side::Replica, batch);
            }
        }
        let more = self.owner(process).is_some_and(|owner| owner.has_unsent());
        if more {
            self.after(100, 1_000, Task::Turn { process });
        }
    }

    fn begin_checkpoint(&mut self, process: Process) {
        let planted = self.planted;
        let Some(owner) = self.owner(process) else { return };
        let serial = owner.serial;
        for (block, version) in owner.begin_checkpoint(planted) {
            self.start_operation(process, serial, OperationKind::Destage { block, version });
        }
    }

    pub fn start_operation(&mut self, process: Process, serial: u64, kind: OperationKind) {
        self.activity += 1;
        let longest = LONGEST_OPERATION.as_micros() as u64;
        let delay = if self.now < self.weather.backing_slow {
            Duration::from_micros(self.rng.u64(..longest))
        } else {
            self.mostly(3_000, longest)
        };
        let operation = self.backing.start(self.now, process, serial, kind);
        self.at(self.now + delay, Task::Land { operation });
    }

    pub fn land(&mut self, number: usize) {
        let Some(operation) = self.backing.in_flight[number] else { return };
        let process = operation.process;
        if operation.not_before > self.now && self.nodes[process.node].paused && self.is_alive(process) {
            // Not handed to the kernel yet.
            return self.at(operation.not_before, Task::Land { operation: number });
        }
        self.backing.in_flight[number] = None;
        if operation.not_before > Nanos(0) && !self.is_alive(process) {
            return;
        }
        self.note_late(operation);
        let writes = !matches!(operation.kind, OperationKind::Flush { .. });
        let fails = self.now < self.weather.backing_failing && self.rng.bool();
        let full = self.now < self.weather.backing_full && writes;
        // What fails may have been done.
        let done = !full && (!fails || self.rng.bool());
        let succeeded = done && self.backing.land(operation) && !fails;
        self.touched = true;
        self.note(|| format!("lands: {operation:?}, succeeded: {succeeded}"));
        self.after(50, 300, Task::Complete { process, operation, succeeded });
    }

    /// A write of somebody who is not the owner any more.
    fn note_late(&mut self, operation: Operation) {
        let writes = !matches!(operation.kind, OperationKind::Flush { .. });
        if writes && self.registry.record.owner != Some(operation.process) {
            self.count(Fault::LateWrite);
        }
    }

    pub fn complete(&mut self, process: Process, operation: Operation, succeeded: bool) {
        let generation = self.backing.generation;
        let without_flush = self.planted.has(Bug::FreeBeforeFlush);
        let covers = self.backing.landed();
        let back_off = Destage::BackingOff { until: self.now + BACK_OFF };
        let Some(owner) = self.owner(process).filter(|owner| owner.serial == operation.serial) else {
            return;
        };
        // What was written before a loss of power may be gone although the flush after it succeeds.
        let succeeded = succeeded && operation.generation == generation;
        match (operation.kind, &mut owner.destage) {
            (OperationKind::Bypass { block, .. }, _) => {
                let place = owner.bypassing.iter().position(|other| *other == block);
                owner.bypassing.swap_remove(place.expect("it was noted when it was started"));
                if succeeded && let Some(id) = self.guest.bypassed(operation) {
                    let Some(owner) = self.owner(process) else { return };
                    owner.finished.push(Answer::Write { id, sequence: 0 });
                }
            }
            (OperationKind::Destage { .. }, Destage::Writing { to, in_flight, failed }) => {
                *in_flight -= 1;
                *failed |= !succeeded;
                let (to, failed) = (*to, *failed);
                if *in_flight == 0 {
                    owner.destage = if failed { back_off } else { Destage::Flushing { to } };
                    if !failed && without_flush {
                        owner.destage = Destage::Idle;
                        self.step(process, Event::Destaged(to));
                    } else if !failed {
                        self.start_operation(process, operation.serial, OperationKind::Flush { covers });
                    }
                }
            }
            (OperationKind::Flush { .. }, Destage::Flushing { to }) => {
                let to = *to;
                owner.destage = if succeeded { Destage::Idle } else { back_off };
                if succeeded {
                    self.counts.checkpoints += 1;
                    self.check_checkpoint(process, to);
                    self.step(process, Event::Destaged(to));
                }
            }
            _ => self.fail(|| "an operation came back that nobody waits for".into()),
        }
        self.turn(process);
    }

    /// Answers what may be answered, if the lease allows it.
    fn release(&mut self, process: Process) {
        let (holds, guarded) = (self.holds_lease(process), self.lease_guards_answers);
        let Some(owner) = self.owner(process) else { return };
        owner.acknowledge();
        if owner.owner.waits_for_former() {
            return;
        }
        let epoch = owner.owner.configuration().epoch;
        let replicas_vouch = owner.owner.configuration().write_back && !guarded;
        let finished = std::mem::take(&mut owner.finished);
        let (answers, kept) = finished
            .into_iter()
            .partition(|answer| holds || (replicas_vouch && matches!(answer, Answer::Write { .. })));
        owner.finished = kept;
        let _: &Vec<Answer> = &answers;
        for answer in answers {
            self.answered(process, epoch, answer);
        }
    }

    /// A read or a write arrives at the owner.
    pub fn read(&mut self, process: Process, serial: u64, id: u64, block: usize) {
        let at_once = self.planted.has(Bug::AnswerUnacknowledgedReads);
        let Some(owner) = self.owner(process) else { return };
        if let Some((sequence, version)) = newest(&owner.log, block) {
            let sequence = if at_once { 0 } else { sequence };
            owner.held.push((sequence, Answer::Read { id, block, version, durable: true }));
            return self.turn(process);
        }
        let delay = self.mostly(500, 20_000);
        self.at(self.now + delay, Task::ReadBacking { process, serial, id, block });
    }

    pub fn read_backing(&mut self, process: Process, serial: u64, id: u64, block: usize) {
        let here = &self.backing.blocks[block];
        let (version, durable) = (here.current(), here.is_durable());
        if let Some(owner) = self.owner(process).filter(|owner| owner.serial == serial) {
            // It may have seen a record that was destaged and is not acknowledged.
            let seen = newest(&owner.log, block).map_or(0, |(sequence, _)| sequence);
            owner.held.push((seen, Answer::Read { id, block, version, durable }));
            self.turn(process);
        }
    }

    pub fn write(&mut self, process: Process, serial: u64, id: u64, block: usize) {
        let unguarded = self.planted.has(Bug::BypassWithoutLease);
        let may_bypass = self.holds_lease(process) || unguarded;
        let Some(owner) = self.owner(process) else { return };
        let bypasses = owner.owner.bypasses() && owner.log.last() == owner.owner.marks().appended;
        if bypasses && !owner.bypassing.contains(&block) {
            // Without a lease the request waits at the export; the guest gives up and connects again.
            if may_bypass {
                owner.owner.bypassed();
                owner.bypassing.push(block);
                self.start_operation(process, serial, OperationKind::Bypass { block, version: id });
            }
        } else if let Some(sequence) = owner.append(block, id) {
            owner.waiting.push_back((sequence, id));
            // Several writes go into one turn.
            self.after(0, 200, Task::Turn { process });
        }
    }
}
