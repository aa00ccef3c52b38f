//! The right to serve, carried out: this node keeps its owners' rights alive with the registry and with the members of their sets,
//! and answers other nodes' owners as a member.
//!
//! One connection between two nodes serves all disks, so that a renewal costs two small frames however many there are. None of this
//! is on a shard's thread: a shard compares the published end of a right with the clock.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef};
use weir_cluster::right::EPOCH_LEAD;
use weir_cluster::view::Seen;
use weir_task::JoinHandle;

use super::change::ChangeError;
use super::rights::answers::Place;
use super::rights::key;
use super::rights::wire::{Answer, Ask, FrameError, MOST_ENTRIES, Question, Refused, Verdict};
use super::{Node, change};

use crate::peer::{Duplex, Greeting, Purpose};
use crate::places::Places;

/// Longest time to ask the registry for the records that one question is about.
const READ: Duration = Duration::from_millis(500);

/// Most records that are read from the registry for one question. An owner's question is ahead of this node's view for moments
/// only, and it asks again; the next question's reads begin where these have ended.
const MOST_READS: usize = 16;

/// Connections of one node at once. It has at most half as many open (one for renewals, one of [`super::hearing`], and those of
/// [`Rights::place_to_ask`](super::rights::Rights::place_to_ask)), and those that it has given up may not have been found ended
/// yet (P10).
const MOST_FROM_ONE: usize = 10;

/// Places for the grant connections of other nodes: none can block another's seals.
#[must_use]
pub fn places() -> Arc<Places> {
    Places::new(MOST_FROM_ONE)
}

/// Keeps the rights of the disks that this node owns alive, and ends those of disks that the registry gives to others.
pub async fn run(node: Arc<Node>) {
    let mut session = node.session.leased();
    let (mut disks, mut learned) = (node.records.disks.changes(), node.records.learned());
    let mut nodes = node.records.nodes.changes();
    let mut askers: BTreeMap<String, JoinHandle<()>> = BTreeMap::new();
    loop {
        node.rights.answers.learn(&nodes.borrow_and_update());
        node.rights.on_session(*session.borrow_and_update());
        end_taken(&node);
        askers.retain(|_, asker| !asker.is_finished());
        for member in node.rights.members() {
            askers
                .entry(member.clone())
                .or_insert_with(|| weir_task::spawn(ask_for_grants(Arc::clone(&node), member)));
        }
        tokio::select! {
            biased;
            changed = session.changed() => if changed.is_err() { return },
            changed = disks.changed() => if changed.is_err() { return },
            changed = learned.changed() => if changed.is_err() { return },
            changed = nodes.changed() => if changed.is_err() { return },
            () = node.rights.hurry.notified() => {}
            () = weir_task::sleep(node.rights.renewal()) => forget(&node),
        }
    }
}

/// Forgets the grants of disks that are gone, and the places of nodes that are gone and have no part in any disk.
fn forget(node: &Node) {
    let known = node.records.disks.now();
    let kept: BTreeSet<String> = known.values().map(key).collect();
    let is_unreadable = |key: &str| known.is_unreadable(key.rsplit_once('/').unwrap_or((key, "")).0);
    node.rights.forget(|key| kept.contains(key) || is_unreadable(key));
    let mut members = node.rights.members();
    members.extend(known.values().flat_map(|record| record.grant_set().members().to_vec()));
    let live = node.records.nodes.now();
    node.rights.answers.forget(|name| live.exists(name) || members.contains(name));
}

/// A disk that the registry gives to another process ends here at once, whatever its task is waiting for (P2).
fn end_taken(node: &Node) {
    let me = node.session.node_ref();
    for (disk, since) in node.rights.tenures() {
        // A record from before this node's tenure names the owner of that time.
        let taken = node.records.disk(&disk).filter(|record| record.epoch >= since);
        if taken.is_some_and(|record| record.owner.as_ref() != Some(&me)) {
            node.rights.end_tenure(&disk, since);
        }
    }
}

/// Asks one member for as long as any disk of this node needs it.
async fn ask_for_grants(node: Arc<Node>, member: String) {
    let pause = node.rights.renewal();
    let mut connection = None;
    loop {
        let [granted, others] = node.rights.asked_of(&member);
        if granted.is_empty() && others.is_empty() {
            // Its unanswered questions say nothing once it is not asked any more.
            return node.rights.answers.start_over(&member);
        }
        let granted = granted.chunks(MOST_ENTRIES).map(|some| (some, true));
        for (some, granted) in granted.chain(others.chunks(MOST_ENTRIES).map(|some| (some, false))) {
            if let Err(error) = renew(&node, &member, &mut connection, some, granted).await {
                tracing::debug!(member, %error, "no grants");
                connection = None;
                break;
            }
        }
        let paused = Nanos::now();
        tokio::select! {
            biased;
            () = weir_task::sleep(pause) => {}
            () = node.rights.hurry.notified() => {}
        }
        if was_away(paused, pause, pause) {
            node.rights.answers.start_over(&member);
        }
    }
}

/// Whether this node itself did not run for longer than `slack` in a wait that began at `since` and was to last `length` at most.
/// A question that was not answered meanwhile says nothing of the others.
fn was_away(since: Nanos, length: Duration, slack: Duration) -> bool {
    Nanos::now() - since > length + slack
}

async fn renew(
    node: &Node,
    member: &str,
    connection: &mut Option<Connection>,
    asked: &[(String, u64)],
    granted: bool,
) -> Result<(), FrameError> {
    let (length, limit) = (node.rights.times().length, node.rights.answer_limit());
    // The registry may not hear the member, and the member this node all the same.
    let place = live(node, member).or_else(|| node.rights.answers.place(member)).ok_or_else(unknown)?;
    let sent = Nanos::now();
    let ask = async {
        let open = match connection.take().filter(|open| open.process == place.process) {
            Some(open) => open,
            None => Connection::to(node, &place).await?,
        };
        connection.insert(open).ask(Ask::Renew { length, granted }, asked).await
    };
    let answer = weir_task::timeout(limit, ask).await.map_err(io::Error::from);
    match answer.map_err(FrameError::from).flatten() {
        Ok(verdicts) => {
            node.rights.answered(member, asked, &verdicts, sent);
            Ok(())
        }
        Err(error) => {
            match was_away(sent, limit, node.rights.renewal()) {
                true => node.rights.answers.start_over(member),
                false if is_the_members(&error) => node.rights.answers.not_answered(&place.process, sent),
                false => {}
            }
            Err(error)
        }
    }
}

/// Whether the other side, or the way to it, is the reason for no answer. A node that is out of descriptors, or without its
/// certificate, learns nothing of the others.
fn is_the_members(error: &FrameError) -> bool {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable,
        NetworkUnreachable, TimedOut, UnexpectedEof,
    };
    let FrameError::Ended(error) = error else { return true };
    matches!(
        error.kind(),
        BrokenPipe
            | ConnectionAborted
            | ConnectionRefused
            | ConnectionReset
            | HostUnreachable
            | NetworkUnreachable
            | TimedOut
            | UnexpectedEof
    )
}

/// Has `member` seal `disk` for its owner in `epoch`. Returns the end of the member's last grant to a former owner.
///
/// # Errors
/// The member cannot be reached, or refuses; in words.
pub async fn seal(node: &Node, member: &str, disk: &str, epoch: u64) -> Result<Nanos, String> {
    let ask = async {
        let _place = node.rights.place_to_ask(member).await;
        let mut connection = Connection::open(node, member).await?;
        connection.ask(Ask::Seal, &[(disk.to_owned(), epoch)]).await
    };
    let answer = weir_task::timeout(node.rights.times().length, ask).await;
    let verdicts = answer.map_err(|_| "no answer in time".to_owned())?.map_err(|error| error.to_string())?;
    match verdicts.first() {
        // No grant lasts longer; a member with another answer is mistaken, and this node would wait for it.
        Some(Ok(wait)) if *wait > node.rights.times().length * 2 => {
            Err(format!("it names a wait of {wait:?}"))
        }
        Some(Ok(wait)) => Ok(Nanos::now() + *wait),
        Some(Err(Refused::Over(floor))) => Err(format!("it refuses all epochs below {floor}")),
        Some(Err(Refused::Unknown(known))) => {
            Err(format!("it knows the record up to epoch {known} and cannot ask the registry"))
        }
        None => Err("an empty answer".into()),
    }
}

/// Whether this node is a member of the disk's set and hears the owner, with a right that the set's grants uphold.
pub fn hears(node: &Node, record: &DiskRecord) -> bool {
    let is_member = record.grant_set().members().contains(&node.config.name);
    is_member && node.rights.hears(&key(record), record.epoch)
}

/// The place of a member that the registry hears.
fn live(node: &Node, member: &str) -> Option<Place> {
    node.records.nodes.now().get(member).map(Place::from)
}

fn unknown() -> io::Error {
    io::Error::other("the member is not in the cluster")
}

/// A connection to a member.
pub(super) struct Connection {
    process: NodeRef,
    stream: Box<dyn Duplex>,
    number: u64,
}

impl Connection {
    /// To a member that the registry hears.
    pub(super) async fn open(node: &Node, member: &str) -> Result<Connection, FrameError> {
        Connection::to(node, &live(node, member).ok_or_else(unknown)?).await
    }

    async fn to(node: &Node, place: &Place) -> Result<Connection, FrameError> {
        let process = place.process.clone();
        let greeting = Greeting {
            disk: String::new(),
            owner: node.config.name.clone(),
            replica: process.clone(),
            purpose: Purpose::Grants,
        };
        Ok(Connection { process, stream: node.network.open(place.address, &greeting).await?, number: 0 })
    }

    pub(super) async fn ask(
        &mut self,
        ask: Ask,
        disks: &[(String, u64)],
    ) -> Result<Vec<Verdict>, FrameError> {
        self.number += 1;
        let question = Question { number: self.number, ask, disks: disks.to_vec() };
        self.stream.write_all(&question.encode()).await?;
        self.stream.flush().await?;
        let answer = Answer::read(&mut self.stream).await?;
        if answer.number != self.number || answer.verdicts.len() != disks.len() {
            return Err(FrameError::Malformed("an answer to another question"));
        }
        Ok(answer.verdicts)
    }
}

/// Answers another node's questions for as long as the connection stands.
///
/// # Errors
/// The connection's end.
pub async fn serve(node: &Node, from: &str, mut stream: impl Duplex) -> Result<(), FrameError> {
    // A node that asks nothing for so long has no disk that needs this member; it connects again when it has.
    let idle = node.rights.times().length * 4;
    let mut asked = Asked { node, from, read_last: String::new() };
    loop {
        let Ok(question) = weir_task::timeout(idle, Question::read(&mut stream)).await else {
            return Ok(());
        };
        let Question { number, ask, disks } = question?;
        let verdicts = asked.verdicts(ask, &disks).await;
        let answer = Answer { number, verdicts }.encode();
        let send = async {
            stream.write_all(&answer).await?;
            stream.flush().await
        };
        weir_task::timeout(idle, send).await.map_err(io::Error::from)??;
    }
}

/// The disk's grants by their key, and the epoch of its record.
type Known = (String, u64);

/// This member's knowledge of a disk that it is asked about, without a read.
enum Knows {
    /// Enough: the sender owns the disk, or its epoch is over.
    Record(Known),
    /// The question is ahead of the record.
    Less,
    /// The record cannot be read.
    Unreadable,
}

/// The questions of one connection.
struct Asked<'a> {
    node: &'a Node,
    from: &'a str,
    /// The disk whose record was read last: the next question's reads begin behind it, so that each disk gets its turn.
    read_last: String,
}

impl Asked<'_> {
    async fn verdicts(&mut self, ask: Ask, disks: &[(String, u64)]) -> Vec<Verdict> {
        let mut verdicts = vec![Err(Refused::Unknown(0)); disks.len()];
        if ask == Ask::Heard {
            for ((disk, epoch), verdict) in disks.iter().zip(&mut verdicts) {
                let known = self.node.records.disk(disk);
                if known.is_some_and(|record| self.node.rights.hears(&key(&record), *epoch)) {
                    *verdict = Ok(Duration::ZERO);
                }
            }
            return verdicts;
        }
        let mut unknown = Vec::new();
        for (index, (disk, epoch)) in disks.iter().enumerate() {
            match self.knows(ask, disk, *epoch) {
                Knows::Record(known) => verdicts[index] = self.answer(ask, *epoch, &known),
                Knows::Less => unknown.push(index),
                Knows::Unreadable => {}
            }
        }
        unknown.sort_by_key(|&index| (disks[index].0 <= self.read_last, &disks[index].0));
        // A registry that is away, or slow, is waited for once.
        let until = Nanos::now() + READ;
        for index in unknown.into_iter().take(MOST_READS) {
            let (disk, epoch) = &disks[index];
            self.read_last.clone_from(disk);
            match self.read(disk, *epoch, until).await {
                Ok(Some(known)) => verdicts[index] = self.answer(ask, *epoch, &known),
                Ok(None) => {}
                Err(RegistryIsAway) => break,
            }
        }
        verdicts
    }

    fn answer(&self, ask: Ask, epoch: u64, (key, known): &Known) -> Verdict {
        let known = Some(*known);
        match ask {
            Ask::Renew { length, granted } => {
                self.node.rights.grant(key, epoch, length, known)?;
                if granted {
                    self.node.rights.hear(key, self.from, epoch);
                }
                Ok(Duration::ZERO)
            }
            // Answered without the record's epoch.
            Ask::Heard => Err(Refused::Unknown(0)),
            Ask::Seal => self.node.rights.seal(key, epoch, known).map_err(Refused::from),
        }
    }

    fn names_owner(&self, record: &DiskRecord) -> bool {
        record.owner.as_ref().is_some_and(|owner| owner.node == self.from)
    }

    /// The newest record that this node has read since it started: the view begins with a listing.
    fn knows(&self, ask: Ask, disk: &str, epoch: u64) -> Knows {
        match self.node.records.seen(disk) {
            Seen::Record { record: seen, .. } => {
                let lead = if ask == Ask::Seal { 0 } else { EPOCH_LEAD };
                let near = self.names_owner(&seen) && epoch <= seen.epoch.saturating_add(lead);
                if near || epoch < seen.epoch { Knows::Record((key(&seen), seen.epoch)) } else { Knows::Less }
            }
            Seen::Unreadable { .. } => Knows::Unreadable,
            Seen::Nothing => Knows::Less,
        }
    }

    /// Asks the registry, until the time is over. `None`: the sender is not certain to be the owner.
    async fn read(&self, disk: &str, epoch: u64, until: Nanos) -> Result<Option<Known>, RegistryIsAway> {
        match weir_task::timeout(until - Nanos::now(), change::read(&*self.node.registry, disk)).await {
            Ok(Ok((entry, record))) => {
                self.node.records.learn(&record, entry.mod_revision);
                let answers = epoch < record.epoch || self.names_owner(&record);
                Ok(answers.then(|| (key(&record), record.epoch)))
            }
            Ok(Err(ChangeError::Registry(_))) | Err(_) => Err(RegistryIsAway),
            Ok(Err(_)) => Ok(None),
        }
    }
}

/// It does not answer, or not in time.
struct RegistryIsAway;
