//! Connections between an owner and a replica: in order, nothing lost, until they break in both directions.

use std::collections::VecDeque;

use weir_accel::Log;
use weir_accel::owner::{Event, Held};
use weir_accel::planted::Bug;
use weir_accel::replica::{Replica, Verdict};
use weir_accel::wire::{Confirm, Hello, Refuse, WireError};
use weir_block::Nanos;

use crate::world::{LOG, Message, Process, Side, Task, World, name};

pub struct Connection {
    pub owner: Process,
    pub replica: Process,
    pub open: bool,
    /// The replica has taken this owner's Hello.
    pub greeted: bool,
    /// What the owner was told is at rest; nothing before its Hello is answered.
    pub told: Option<Held>,
    to_owner: VecDeque<(Nanos, Message)>,
    to_replica: VecDeque<(Nanos, Message)>,
    /// Nothing moves before this.
    pub stalled: Nanos,
}

impl Connection {
    pub fn new(owner: Process, replica: Process) -> Connection {
        Connection {
            owner,
            replica,
            open: true,
            greeted: false,
            told: None,
            to_owner: VecDeque::new(),
            to_replica: VecDeque::new(),
            stalled: Nanos(0),
        }
    }

    fn queue(&mut self, to: Side) -> &mut VecDeque<(Nanos, Message)> {
        match to {
            Side::Owner => &mut self.to_owner,
            Side::Replica => &mut self.to_replica,
        }
    }
}

impl World {
    pub fn send(&mut self, connection: usize, to: Side, mut message: Message) {
        if !self.connections[connection].open {
            return;
        }
        self.activity += 1;
        if let Message::Batch(_, _, data) = &mut message
            && !data.is_empty()
            && std::mem::take(&mut self.weather.corrupting)
        {
            // Of a block only the beginning tells its version; the rest is the same in all.
            data[self.rng.usize(..8)] ^= 1 << self.rng.u8(..8);
            self.corrupted += 1;
        }
        self.push(connection, to, message);
    }

    fn push(&mut self, connection: usize, to: Side, message: Message) {
        let delay = self.mostly(800, 60_000);
        let connection_ = &mut self.connections[connection];
        let before = connection_.queue(to).back().map_or(Nanos(0), |last| last.0);
        let at = (self.now + delay).max(before);
        connection_.queue(to).push_back((at, message));
        self.at(at, Task::Deliver { connection, to });
    }

    /// Breaks in both directions. What is under way arrives in part; then both ends learn of it, unless one is gone.
    pub fn cut(&mut self, connection: usize) {
        if !std::mem::replace(&mut self.connections[connection].open, false) {
            return;
        }
        for side in [Side::Owner, Side::Replica] {
            let length = self.connections[connection].queue(side).len();
            let rest = self.rng.usize(..=length);
            self.connections[connection].queue(side).truncate(rest);
            self.push(connection, side, Message::End);
        }
    }

    /// What waited for the end of a stall or a partition arrives now.
    pub fn unblock(&mut self, connection: usize) {
        let link = &mut self.connections[connection];
        link.stalled = self.now;
        for (to, waiting) in [(Side::Owner, link.to_owner.len()), (Side::Replica, link.to_replica.len())] {
            for _ in 0..waiting {
                self.after(100, 1_000, Task::Deliver { connection, to });
            }
        }
    }

    pub fn deliver(&mut self, connection: usize, to: Side) {
        let link = &mut self.connections[connection];
        let target = if to == Side::Owner { link.owner } else { link.replica };
        let Some(&(at, _)) = link.queue(to).front() else { return };
        if at > self.now {
            return;
        }
        if link.stalled > self.now {
            let until = link.stalled;
            return self.at(until, Task::Deliver { connection, to });
        }
        let source = if to == Side::Owner { link.replica } else { link.owner };
        if let Some(until) = self.blocked(source.node, target.node) {
            return self.at(until, Task::Deliver { connection, to });
        }
        if !self.is_alive(target) {
            return self.connections[connection].queue(to).clear();
        }
        if self.nodes[target.node].paused {
            return self.nodes[target.node].held.push(Task::Deliver { connection, to });
        }
        let (_, message) = self.connections[connection].queue(to).pop_front().expect("just looked at");
        match to {
            Side::Owner => self.owner_hears(connection, message),
            Side::Replica => self.replica_hears(connection, message),
        }
    }

    fn owner_hears(&mut self, connection: usize, message: Message) {
        let Connection { owner: process, replica, .. } = self.connections[connection];
        let planted = self.planted;
        let Some(owner) = &mut self.nodes[process.node].owner else { return };
        if !owner.channels.iter().any(|channel| channel.connection == connection) {
            return;
        }
        let node = name(replica.node);
        match message {
            Message::Confirm(confirm) => {
                let held = match confirm.held() {
                    Ok(held) => held,
                    Err(error) => return self.fail(|| format!("a replica confirms nonsense: {error}")),
                };
                if owner.join(connection, held, planted) {
                    self.step(process, Event::PeerJoined(node.clone()));
                }
                self.step(process, Event::PeerConfirmed { node, held });
            }
            Message::Refuse(refuse) => {
                self.step(process, Event::Refused { node, epoch: refuse.epoch.get() });
            }
            Message::End => self.step(process, Event::PeerLost(node)),
            Message::Hello(_) | Message::Batch(..) => {
                self.fail(|| "a replica sent an owner's message".into())
            }
        }
        self.turn(process);
    }

    fn replica_hears(&mut self, connection: usize, message: Message) {
        let Connection { replica: process, open, .. } = self.connections[connection];
        self.touched = true;
        if self.nodes[process.node].owner.is_some() && !self.planted.has(Bug::SkipSeal) {
            return self.cut(connection);
        }
        let verdict = match &message {
            Message::End => {
                self.connections[connection].greeted = false;
                return;
            }
            _ if !open && !self.connections[connection].greeted => return,
            Message::Hello(_) if !self.may_attach(process.node) => return self.cut(connection),
            Message::Hello(_) if self.known_epoch(process.node).is_none() => return self.cut(connection),
            Message::Hello(hello) => self.hello(connection, hello),
            Message::Batch(head, headers, data) if self.connections[connection].greeted => {
                let Some(replica) = &mut self.nodes[process.node].replica else { return };
                replica.batch(head, headers, data)
            }
            _ => {
                self.note(|| format!("n{}: nothing before hello", process.node));
                return self.cut(connection);
            }
        };
        match verdict {
            Ok(Verdict::Taken) if self.nodes[process.node].store.is_some() => self.keep_at_rest(process),
            Ok(Verdict::Taken) => {
                let confirm = self.confirm(process);
                self.send(connection, Side::Owner, Message::Confirm(confirm));
            }
            Ok(Verdict::Refused(epoch)) => {
                self.counts.refusals += 1;
                self.note(|| format!("n{} refuses: knows epoch {epoch}", process.node));
                self.send(connection, Side::Owner, Message::Refuse(Refuse { epoch: epoch.into() }));
            }
            Err(error) => {
                self.note(|| format!("n{} gives a connection up: {error}", process.node));
                let injected = match error {
                    WireError::Checksum(_) => self.corrupted > 0,
                    WireError::Outdated { .. } | WireError::UnknownEpoch { .. } => true,
                    WireError::OtherPast => self.nodes[process.node].flash.is_some(),
                    _ => false,
                };
                if !self.is_planted && !injected {
                    self.fail(|| format!("the protocol broke on n{}: {error}", process.node));
                }
                self.connections[connection].greeted = false;
                self.cut(connection);
            }
        }
    }

    fn hello(&mut self, connection: usize, hello: &Hello) -> Result<Verdict, WireError> {
        let process = self.connections[connection].replica;
        let (planted, layout) = (self.planted, self.layout());
        if self.nodes[process.node].replica.is_none() {
            self.take_store(process.node);
            let log = Log::with_layout(layout, LOG + (1 << 20), 1).expect("memory");
            let known_epoch = self.known_epoch(process.node).unwrap_or(u64::MAX);
            let mut replica = Replica::new(log, known_epoch);
            replica.plant(planted);
            self.nodes[process.node].replica = Some(replica);
        }
        let known = self.known_epoch(process.node).unwrap_or(0);
        let Some(replica) = &mut self.nodes[process.node].replica else { return Ok(Verdict::Taken) };
        replica.record_is_in(known);
        let verdict = replica.hello(hello)?;
        if verdict == Verdict::Taken {
            self.connections[connection].greeted = true;
            self.rewound(process.node);
            if !planted.has(Bug::IgnoreEpoch) {
                // One owner at a time.
                let others = self.connections.iter().enumerate().filter(|(number, other)| {
                    *number != connection && other.replica == process && other.greeted
                });
                let others: Vec<usize> = others.map(|(number, _)| number).collect();
                for other in others {
                    self.connections[other].greeted = false;
                    self.cut(other);
                }
            }
        }
        Ok(verdict)
    }

    /// The epoch of the record as this node knows it: one that has heard nothing since it started asks the registry.
    fn known_epoch(&self, node: usize) -> Option<u64> {
        match self.nodes[node].view.epoch {
            0 => self.reaches_registry(node).then_some(self.registry.record.epoch),
            epoch => Some(epoch),
        }
    }

    fn confirm(&self, process: Process) -> Confirm {
        let replica = self.nodes[process.node].replica.as_ref();
        Confirm::new(replica.expect("it has just taken something").held())
    }

    /// The process has ended or closes the connections to its replica.
    pub fn cut_all(&mut self, which: impl Fn(&Connection) -> bool) {
        for connection in 0..self.connections.len() {
            if which(&self.connections[connection]) {
                self.connections[connection].greeted = false;
                self.cut(connection);
            }
        }
    }
}
