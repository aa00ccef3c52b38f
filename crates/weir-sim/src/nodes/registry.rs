//! The registry: the embedded one's transactions, over connections that are slow, break and lose answers.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef, NodeStatesRecord, Record, keys};
use weir_cluster::registry::{
    Committed, Entry, LeaseId, Listing, Op, Pending, ProcessWatch, Registry, RegistryError, Transaction,
    Watch,
};
use weir_cluster::{Feed, Memory};

use super::{Cluster, Task, Who, WorldRequest, WorldRequests};
use crate::atlas::Fault;
use crate::scale::CALM;

/// The name of the disk.
pub const DISK: &str = "disk";

/// Timeout of a call, as in the production client.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// A call to the registry.
#[derive(Debug)]
pub enum Question {
    Get(String),
    List(String),
    Transact(Transaction),
    Watch(String, u64),
    Grant(Duration),
    KeepAlive(LeaseId),
    Revoke(LeaseId),
    Register(NodeRef, LeaseId),
}

/// The registry's answer.
pub enum Answer {
    Entry(Option<Entry>),
    Listing(Listing),
    Committed(Committed),
    Watch(Watch),
    Lease(LeaseId),
    Length(Duration),
    Done,
    Process(ProcessWatch),
}

pub type Reply = oneshot::Sender<Result<Answer, RegistryError>>;

impl Question {
    /// The disk's proposed record, if the call changes it.
    fn proposes(&self) -> Option<DiskRecord> {
        let Question::Transact(transaction) = self else { return None };
        let key = keys::disk(DISK);
        transaction.ops.iter().find_map(|op| match op {
            Op::Put { key: put, value, .. } if *put == key => {
                let entry = Entry { key: key.clone(), value: value.clone(), mod_revision: 0, lease: None };
                DiskRecord::of(&entry).ok()
            }
            _ => None,
        })
    }
}

/// A process's connection to the registry.
pub struct Line {
    pub who: Who,
    pub requests: WorldRequests,
}

fn unavailable(reason: &str) -> RegistryError {
    RegistryError::Unavailable { reason: reason.to_owned() }
}

impl Line {
    async fn ask(&self, question: Question) -> Result<Answer, RegistryError> {
        let (reply, answer) = oneshot::channel();
        self.requests.push(self.who, WorldRequest::Ask(question, reply));
        match weir_task::timeout(PATIENCE, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(unavailable("the connection broke")),
            Err(_) => Err(unavailable("no answer in time")),
        }
    }
}

/// Makes a call and extracts the matching kind of answer.
macro_rules! ask {
    ($line:expr, $question:expr, $answer:path) => {
        Box::pin(async move {
            match $line.ask($question).await? {
                $answer(answer) => Ok(answer),
                _ => Err(unavailable("an answer of the wrong kind")),
            }
        })
    };
}

impl Registry for Line {
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        ask!(self, Question::Get(key.to_owned()), Answer::Entry)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        ask!(self, Question::List(prefix.to_owned()), Answer::Listing)
    }

    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        ask!(self, Question::Transact(transaction), Answer::Committed)
    }

    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch> {
        ask!(self, Question::Watch(prefix.to_owned(), after_revision), Answer::Watch)
    }

    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId> {
        ask!(self, Question::Grant(ttl), Answer::Lease)
    }

    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration> {
        ask!(self, Question::KeepAlive(lease), Answer::Length)
    }

    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()> {
        Box::pin(async move { self.ask(Question::Revoke(lease)).await.map(|_| ()) })
    }

    fn register_process<'a>(
        &'a self,
        name: &'a str,
        incarnation: u64,
        lease: LeaseId,
    ) -> Pending<'a, ProcessWatch> {
        ask!(self, Question::Register(NodeRef::new(name, incarnation), lease), Answer::Process)
    }
}

/// A watcher of the registry.
struct Follower {
    who: Who,
    prefix: String,
    feed: Feed,
    /// A notification is scheduled.
    due: bool,
}

/// A call in flight, or waiting for a paused registry.
pub struct Asked {
    pub who: Who,
    pub number: u64,
    pub question: Question,
    pub reply: Option<Reply>,
}

/// The registry and the calls in flight.
pub struct Service {
    memory: Memory,
    pub up: bool,
    /// While it is not up: paused, and answers later (true), or unreachable (false).
    pub stands: bool,
    /// Not up before this time.
    pub away_until: Nanos,
    /// Time at which it was back the last time.
    pub back: Nanos,
    waiting: Vec<Asked>,
    followers: BTreeMap<u64, Follower>,
    /// Changes that may still commit, by call number.
    pub proposed: BTreeMap<u64, (Who, DiskRecord)>,
    /// The lease of each process that the registry watches.
    watched: BTreeMap<Who, (NodeRef, LeaseId)>,
    /// Whether it detects the end of a process.
    sees_ends: bool,
    /// The committed record.
    pub disk: DiskRecord,
    number: u64,
}

impl Service {
    pub fn new(disk: DiskRecord, sees_ends: bool) -> Service {
        let mut memory = Memory::new();
        memory.transact(disk.create(keys::disk(DISK))).expect("an empty registry");
        Service {
            memory,
            up: true,
            stands: false,
            away_until: Nanos(0),
            back: Nanos(0),
            waiting: Vec::new(),
            followers: BTreeMap::new(),
            proposed: BTreeMap::new(),
            watched: BTreeMap::new(),
            sees_ends,
            disk,
            number: 0,
        }
    }

    /// End of the next lease to expire.
    pub fn due(&self) -> Nanos {
        if self.up { self.memory.next_deadline() } else { Nanos::NEVER }
    }

    /// Whether the session of the process on a node is valid.
    pub fn has_session(&self, name: &str, incarnation: u64) -> bool {
        let entry = self.memory.get(&keys::session(name)).ok().flatten();
        entry.is_some_and(|entry| entry.value == incarnation.to_string().as_bytes())
    }

    /// Whether any process has a session under this name.
    pub fn has_any_session(&self, name: &str) -> bool {
        self.memory.get(&keys::session(name)).ok().flatten().is_some()
    }

    /// Whether a process is known to have ended.
    pub fn has_stopped(&self, process: &NodeRef) -> bool {
        self.memory.get(&keys::stopped(process)).ok().flatten().is_some()
    }

    /// The committed states of the nodes.
    pub fn node_states(&self) -> Option<NodeStatesRecord> {
        NodeStatesRecord::of(&self.memory.get(keys::NODE_STATES).ok().flatten()?).ok()
    }

    fn perform(
        &mut self,
        who: Who,
        question: Question,
        now: Nanos,
        number: u64,
    ) -> Result<Answer, RegistryError> {
        let memory = &mut self.memory;
        Ok(match question {
            Question::Get(key) => Answer::Entry(memory.get(&key)?),
            Question::List(prefix) => Answer::Listing(memory.list(&prefix)?),
            Question::Transact(transaction) => Answer::Committed(memory.transact(transaction)?),
            Question::Watch(prefix, after) => {
                let (feed, watch) = memory.watch(&prefix, after)?;
                self.followers.insert(number, Follower { who, prefix, feed, due: false });
                Answer::Watch(watch)
            }
            Question::Grant(ttl) => Answer::Lease(memory.grant(ttl, now)?),
            Question::KeepAlive(lease) => Answer::Length(memory.keep_alive(lease, now)?),
            Question::Revoke(lease) => {
                memory.revoke(lease);
                Answer::Done
            }
            Question::Register(node, lease) => {
                memory.keep_alive(lease, now)?;
                self.watched.insert(who, (node, lease));
                let watched = if self.sees_ends { ProcessWatch::Watched } else { ProcessWatch::NotWatched };
                Answer::Process(watched)
            }
        })
    }

    fn read_disk(&mut self) -> Option<DiskRecord> {
        let entry = self.memory.get(&keys::disk(DISK)).ok().flatten()?;
        let next = DiskRecord::of(&entry).ok().filter(|next| *next != self.disk)?;
        Some(std::mem::replace(&mut self.disk, next))
    }
}

impl Cluster {
    fn reaches(&self, node: usize) -> bool {
        self.nodes[node].reaches
    }

    /// A process sends a call at `sent`.
    pub fn asked(&mut self, who: Who, question: Question, reply: Reply, sent: Nanos) {
        self.registry.number += 1;
        let number = self.registry.number;
        let proposes = question.proposes();
        let odds = if proposes.is_some() { 6 } else { 100 };
        let is_lost = !self.reaches(who.node);
        let choice = if self.should_inject(Fault::LostAnswer, odds) { self.rng.u8(1..4) } else { 0 };
        if is_lost || choice == 1 {
            // The call is lost; the caller learns that soon, or by its timeout.
            let late = Duration::from_millis(if self.rng.bool() { self.rng.u64(1..600) } else { 6_000 });
            self.unheard += 1;
            return self.at(sent + late, Task::Lost(reply));
        }
        if let Some(record) = proposes {
            self.registry.proposed.insert(number, (who, record));
        }
        let mut delay = self.mostly(600, 300_000);
        let mut asked = Asked { who, number, question, reply: Some(reply) };
        if choice > 1
            && let Some(reply) = asked.reply.take()
        {
            // The call arrives, its answer does not: the caller may time out before or after the commit.
            let told = Duration::from_micros(self.rng.u64(..900_000));
            delay = Duration::from_micros(self.rng.u64(..800_000));
            match other_answer(number).filter(|_| self.registry.proposed.contains_key(&number)) {
                Some(error) => self.at(sent + told, Task::Answered { to: who, reply, answer: Err(error) }),
                None => {
                    self.unheard += 1;
                    self.at(sent + told, Task::Lost(reply));
                }
            }
        }
        self.at(sent + delay, Task::AtRegistry(asked));
    }

    pub fn at_registry(&mut self, asked: Asked) {
        if !self.registry.up {
            if self.registry.stands {
                self.registry.waiting.push(asked);
            } else {
                self.registry.proposed.remove(&asked.number);
            }
            return;
        }
        let Asked { who, number, question, reply } = asked;
        self.registry.proposed.remove(&number);
        let now = self.world.now();
        let changed: Vec<String> = match &question {
            Question::Transact(transaction) => transaction.ops.iter().map(|op| op.key().to_owned()).collect(),
            Question::Revoke(_) => vec![keys::NODES.to_owned()],
            _ => Vec::new(),
        };
        let said = self.trace.is_some().then(|| describe(&question)).flatten();
        let answer = self.registry.perform(who, question, now, number);
        if let Some(said) = said {
            let came = answer.as_ref().map(|_| "done").map_err(ToString::to_string);
            self.note(|| format!("registry: n{} {said}: {came:?}", who.node));
        }
        if answer.is_ok() {
            self.notify_if_behind(number);
            self.notify_watchers(&changed);
            self.disk_may_have_changed(who);
            if changed.iter().any(|key| key == keys::NODE_STATES) {
                self.check_node_states(who);
            }
        }
        if let Some(reply) = reply
            && self.reaches(who.node)
            && self.nodes[who.node].hears
        {
            let delay = self.mostly(600, 300_000);
            self.at(now + delay, Task::Answered { to: who, reply, answer });
        }
    }

    fn disk_may_have_changed(&mut self, by: Who) {
        let Some(before) = self.registry.read_disk() else { return };
        let disk = &self.registry.disk;
        let taken = before.owner.is_some() && disk.owner != before.owner && disk.owner.is_some();
        let text = if self.trace.is_some() { compact(disk) } else { String::new() };
        self.note(|| text);
        self.check_states(&before, by, taken);
        if taken {
            self.counts.takeovers += 1;
            self.crash_soon(by.node, 6, 400_000);
        } else {
            self.crash_soon(by.node, 16, 5_000);
        }
        self.check_copies();
    }

    fn notify_watchers(&mut self, changed: &[String]) {
        if changed.is_empty() {
            return;
        }
        let mut told = Vec::new();
        for (number, follower) in &mut self.registry.followers {
            let concerns = changed.iter().any(|key| key.starts_with(&follower.prefix));
            if concerns && !std::mem::replace(&mut follower.due, true) {
                told.push(*number);
            }
        }
        for number in told {
            let delay = self.mostly(600, 300_000);
            self.at(self.world.now() + delay, Task::Notify(number));
        }
    }

    /// A new watch from an earlier revision gets the changes since.
    fn notify_if_behind(&mut self, number: u64) {
        let Service { memory, followers, .. } = &mut self.registry;
        let behind = followers.get_mut(&number).filter(|follower| follower.feed.is_behind(memory));
        if let Some(follower) = behind {
            follower.due = true;
            let delay = self.mostly(600, 300_000);
            self.at(self.world.now() + delay, Task::Notify(number));
        }
    }

    /// Sends a watcher the changes so far.
    pub fn notify(&mut self, number: u64) {
        let Some(follower) = self.registry.followers.get_mut(&number) else { return };
        follower.due = false;
        let node = &self.nodes[follower.who.node];
        let alive = node.alive && node.incarnation == follower.who.incarnation;
        if alive && !(self.registry.up && node.reaches && node.hears) {
            // It is notified when the pause is over.
            return;
        }
        let Service { memory, followers, .. } = &mut self.registry;
        let goes_on =
            alive && followers.get_mut(&number).is_some_and(|follower| follower.feed.deliver(memory));
        if !goes_on {
            followers.remove(&number);
        }
    }

    /// Ends expired leases.
    pub fn expire_leases(&mut self, stalled: bool) {
        let over = self.registry.memory.expire(self.world.now(), stalled);
        if !over.is_empty() {
            self.note(|| format!("registry: {} sessions have ended", over.len()));
            self.notify_watchers(&[keys::NODES.to_owned()]);
        }
    }

    /// The registry is reachable again.
    pub fn registry_up(&mut self) {
        if std::mem::replace(&mut self.registry.up, true) {
            return;
        }
        self.registry.back = self.world.now();
        let extended = self.rng.bool();
        self.note(|| "the registry is back".into());
        self.expire_leases(extended);
        for asked in std::mem::take(&mut self.registry.waiting) {
            self.after(0, 2_000, Task::AtRegistry(asked));
        }
        self.notify_all(None);
    }

    /// Watchers (of this node, or all) that missed notifications get them now, or have to list again.
    pub fn notify_all(&mut self, node: Option<usize>) {
        let breaks = self.rng.bool();
        let mut told = Vec::new();
        self.registry.followers.retain(|number, follower| {
            let concerned = node.is_none_or(|node| follower.who.node == node);
            if concerned && breaks {
                return false;
            }
            if concerned && !std::mem::replace(&mut follower.due, true) {
                told.push(*number);
            }
            true
        });
        for number in told {
            self.after(100, 2_000, Task::Notify(number));
        }
    }

    /// A process was killed; the registry may detect it.
    pub fn end_seen(&mut self, who: Who) {
        if !self.registry.sees_ends {
            return;
        }
        if !self.registry.up {
            return self.after(20_000, 50_000, Task::EndSeen(who));
        }
        if let Some((node, lease)) = self.registry.watched.remove(&who) {
            let now = self.world.now();
            self.note(|| format!("registry: {node} has ended"));
            self.registry.memory.end_process(lease, node, now);
            self.notify_watchers(&[keys::NODES.to_owned(), keys::STOPPED.to_owned()]);
        }
    }

    /// Usually up to `short` microseconds, occasionally up to `long`.
    pub fn mostly(&mut self, short: u64, long: u64) -> Duration {
        let calm = self.world.now() >= CALM;
        let most = if self.rng.u8(..) < 8 && !calm { long } else { short };
        Duration::from_micros(self.rng.u64(short / 4..=most))
    }
}

/// The answer instead of the lost one to a change of the disk: none, or an error that says nothing about the commit. By the call's
/// number, so that a seed's other choices do not depend on it.
fn other_answer(number: u64) -> Option<RegistryError> {
    let reason = "by a fault".to_owned();
    match number % 5 {
        0 | 1 => Some(RegistryError::Full { reason }),
        2 => Some(RegistryError::Corrupt { reason }),
        _ => None,
    }
}

fn describe(question: &Question) -> Option<String> {
    match question {
        Question::Transact(transaction) => {
            let keys: Vec<&str> = transaction.ops.iter().map(Op::key).collect();
            if !keys.iter().all(|key| key.starts_with(keys::EVENTS)) {
                return Some(format!("changes {keys:?}"));
            }
            let told = transaction.ops.iter().find_map(|op| match op {
                Op::Put { value, .. } => serde_json::from_slice::<serde_json::Value>(value).ok(),
                Op::Delete { .. } => None,
            })?;
            Some(format!("event {}: {}", told["kind"], told["text"]))
        }
        Question::Grant(_) | Question::Revoke(_) | Question::Register(..) => Some(format!("{question:?}")),
        _ => None,
    }
}

fn compact(disk: &DiskRecord) -> String {
    let owner = disk.owner.as_ref().map_or_else(|| "no owner".to_owned(), ToString::to_string);
    let all = |nodes: &[NodeRef]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let former =
        disk.former.iter().map(|former| format!("{} until {}: {:?}", former.node, former.epoch, former.set));
    format!(
        "registry: epoch {}: {owner}, {:?} on [{}], guards {:?}, {} requested, former [{}]",
        disk.epoch,
        disk.mode,
        all(&disk.replicas),
        disk.guards,
        disk.policy,
        former.collect::<Vec<_>>().join(", ")
    )
}
