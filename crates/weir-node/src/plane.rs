//! Puts a node's control plane together, from parts that a simulation can replace: the registry, the way to other nodes, the shards.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use weir_accel::flash::FlashDevice;
use weir_block::{Nanos, Stream};
use weir_cluster::events::Events;
use weir_cluster::membership::{NodeSession, SessionConfig, SessionError};
use weir_cluster::node_state::Rules;
use weir_cluster::records::{DiskRecord, NodeRecord, NodeRef};
use weir_cluster::registry::{Registry, RegistryError};
use weir_cluster::right::GrantTimes;
use weir_export::fuse::reading_session;
use weir_export::nbd::{AcceptedClient, Via};
use weir_nbd::server::{BASE_ALLOCATION_ID, Session};
use weir_task::JoinHandle;

use weir_volume::Mark;

use crate::config::Config;
use crate::control::clocks::Clocks;
use crate::control::coordinators::Coordinators;
use crate::control::decide::is_live;
use crate::control::disk::log_medium;
use crate::control::intents::Intents;
use crate::control::node::{Here, Journal, Node};
use crate::control::owner_fences::OwnerFences;
use crate::control::registry_copy::RegistryCopy;
use crate::control::rights::Rights;
use crate::control::{
    LogCapacity, Shards, Tasks, admission, agreement, capacity, change, copies, flash, forwarding, grants,
    lun_disks, node_states, provisioning, readers, relocation, supervisor, watchdog,
};
use crate::exports;
use crate::identity::NodeIdentity;
use crate::peer::{Greeting, Incoming, Network, Purpose, WELCOME};
use crate::places::{Place, Places};
use crate::refusal::{Refusal, Why};
use crate::registry::check_usable;
use crate::shard::messages::{Command, Notice};

/// Part of a lease or a grant that its holder does not count on: for clocks that run at different speeds.
const MARGIN: u32 = 5;

/// Pause between requests to the registry, or for a name that is still taken, at the start.
const START_AGAIN: Duration = Duration::from_millis(200);

/// Longest time to ask the registry who owns a disk.
const READ: Duration = Duration::from_millis(500);

/// Longest time for telling a node that is turned away.
const PARTING: Duration = Duration::from_millis(100);

/// The parts of a control plane.
pub struct Parts {
    /// The node's configuration.
    pub config: Config,
    /// The limits of node states.
    pub rules: Rules,
    /// The registry.
    pub registry: Arc<dyn Registry>,
    /// The way to the other nodes.
    pub network: Arc<dyn Network>,
    /// Who this node is, if its connections prove that.
    pub identity: Option<Arc<NodeIdentity>>,
    /// The way to the shards.
    pub shards: Shards,
    /// The flash device, if there is one.
    pub flash: Option<Arc<FlashDevice>>,
    /// The start of the process.
    pub started: Nanos,
    /// Unusable copies on the flash, and why.
    pub damaged: Vec<(String, String)>,
    /// The marks of this node's processes before this one.
    pub former: Vec<Mark>,
}

/// A control plane that runs.
pub struct Plane {
    /// The state that its parts share.
    pub node: Arc<Node>,
    /// The tasks of the disks.
    pub tasks: Arc<Tasks>,
    /// Services beside the disks' tasks.
    pub services: Services,
}

/// Tasks that run beside the tasks of the disks.
pub struct Services(Vec<JoinHandle<()>>);

impl Services {
    /// Ends them where they wait.
    pub async fn stop(self) {
        for service in self.0 {
            service.abort();
            // Aborted or ended: there is nothing else to learn from it.
            let _ = service.await;
        }
    }
}

/// Waits for the registry, and for the lease of a former process under the same name to end. `waits` gets the reason.
///
/// # Errors
/// The registry refuses, for a reason that does not pass.
pub async fn join(
    registry: &Arc<dyn Registry>,
    record: NodeRecord,
    config: &Config,
    waits: impl Fn(&str),
) -> Result<NodeSession, SessionError> {
    let ttl = config.lease.ttl.0;
    loop {
        let times = SessionConfig { ttl, margin: ttl / MARGIN };
        let session = match check_usable(&**registry, config).await {
            Ok(()) => NodeSession::start(Arc::clone(registry), record.clone(), times).await,
            Err(error) => Err(error.into()),
        };
        match session {
            Ok(session) => return Ok(session),
            Err(
                error @ (SessionError::NameTaken { .. }
                | SessionError::Registry(RegistryError::Unavailable { .. })),
            ) => {
                waits(&error.to_string());
                weir_task::sleep(START_AGAIN).await;
            }
            Err(error) => return Err(error),
        }
    }
}

impl Plane {
    /// Starts all tasks that carry out the registry's records and the shards' requests (`notices`).
    ///
    /// # Errors
    /// The registry does not answer.
    pub async fn start(
        parts: Parts,
        session: NodeSession,
        notices: mpsc::Receiver<Notice>,
    ) -> Result<Plane, RegistryError> {
        let Parts { config, rules, registry, network, identity, shards, flash, started, damaged, former } =
            parts;
        let me = session.node_ref();
        let times = GrantTimes { length: config.lease.ttl.0, margin: config.lease.ttl.0 / MARGIN };
        let rights = Rights::new(times, *session.leased().borrow(), started);
        let node = Arc::new(Node {
            records: RegistryCopy::start(&registry).await?,
            journal: Journal::start(Events::new(Arc::clone(&registry), me.clone())),
            registry,
            network,
            identity,
            rules,
            rights,
            session,
            shards,
            clocks: Clocks::default(),
            here: Here::default(),
            capacity: LogCapacity::default(),
            intents: Intents::default(),
            coordinators: Coordinators::default(),
            owner_fences: OwnerFences::default(),
            former,
            readers: readers::places(),
            forwarders: Arc::default(),
            forwarded: AtomicUsize::new(0),
            flash,
            config,
        });
        flash::forget_strangers(&node).await;
        let tasks = Arc::new(Tasks::default());
        let joined = format!("{} joined the cluster as incarnation {}", me.node, me.incarnation);
        node.journal.tell("joined", &me.node, joined);
        for (disk, reason) in damaged {
            let text = format!("the copy on the flash of {}: {reason}", me.node);
            node.journal.tell("copy-damaged", &disk, text);
        }
        let services = vec![
            weir_task::spawn(supervisor::run(Arc::clone(&node), Arc::clone(&tasks), notices)),
            weir_task::spawn(admission::advertise(Arc::clone(&node))),
            weir_task::spawn(watchdog::watch(Arc::clone(&node))),
            weir_task::spawn(grants::run(Arc::clone(&node))),
            weir_task::spawn(forwarding::keep(Arc::clone(&node))),
            weir_task::spawn(copies::keep_told(Arc::clone(&node))),
            weir_task::spawn(node_states::keep(Arc::clone(&node))),
            weir_task::spawn(relocation::keep(Arc::clone(&node), Arc::clone(&tasks))),
            weir_task::spawn(provisioning::keep_finished(Arc::clone(&node))),
        ];
        Ok(Plane { node, tasks, services: Services(services) })
    }
}

/// Takes a connection of another node; its greeting has the purpose. `proven` is the name of that node, if it has proven one.
///
/// # Errors
/// The greeting is wrong, meant for another process, or asks for something that the record does not allow; or there is no room.
pub async fn welcome(
    mut stream: impl Incoming,
    node: &Arc<Node>,
    grants: &Arc<Places>,
    proven: Option<&str>,
) -> Result<(), Refusal> {
    let greeting = hear(&mut stream, node, proven).await?;
    admit(stream, greeting, node, grants).await
}

/// Reads the greeting, the first half of [`welcome`].
///
/// # Errors
/// It is wrong, in another's name, or meant for another process.
pub async fn hear(
    stream: &mut impl Incoming,
    node: &Node,
    proven: Option<&str>,
) -> Result<Greeting, Refusal> {
    let misgreeted = |reason: String| Refusal::new(Why::Misgreeted, reason);
    let greeting = Greeting::read(stream).await.map_err(|error| misgreeted(error.to_string()))?;
    let me = node.session.node_ref();
    let reason = match proven {
        Some(proven) if proven != greeting.owner => {
            format!("it greets as {}, and its certificate is that of {proven}", greeting.owner)
        }
        _ if greeting.replica != me => format!("it looks for {}, and this is {me}", greeting.replica),
        _ => return Ok(greeting),
    };
    part(stream).await;
    Err(misgreeted(reason))
}

/// Does what a greeting asks for if the record allows it, the second half of [`welcome`].
///
/// # Errors
/// The record does not allow it, or there is no room.
pub async fn admit(
    mut stream: impl Incoming,
    greeting: Greeting,
    node: &Arc<Node>,
    grants: &Arc<Places>,
) -> Result<(), Refusal> {
    let admission = match Admission::of(greeting, node, grants).await {
        Ok(admission) => admission,
        Err(refusal) => {
            part(&mut stream).await;
            return Err(refusal);
        }
    };
    let unusable = |error: io::Error| Refusal::new(Why::NoRoom, error);
    match admission {
        Admission::Grants { owner, place } => {
            let node = Arc::clone(node);
            weir_task::spawn(async move {
                let _place = place;
                if let Err(error) = grants::serve(&node, &owner, stream).await {
                    tracing::debug!(owner, %error, "a grant connection ended");
                }
            });
        }
        Admission::Client { session, via } => {
            let stream = stream.into_stream().map_err(unusable)?;
            // The shard knows whether a node still follows when it takes the client.
            exports::attach(node, AcceptedClient { stream, leftover: Vec::new(), session, via: Some(via) });
        }
        Admission::Forwarded { session, by } => {
            let welcome = async {
                stream.write_all(&[WELCOME]).await?;
                stream.flush().await
            };
            welcome.await.map_err(unusable)?;
            let stream = stream.into_stream().map_err(unusable)?;
            let socket = socket_of(&stream).map_err(unusable)?;
            let open = node.forwarders.insert(&session.export, by, socket).map_err(unusable)?;
            // Whoever has gone before this was listed is not ended by its going.
            if !is_live(&node.records.nodes.now(), &open.by) {
                return Err(Refusal::new(Why::NotAllowed, format!("{} is gone", open.by)));
            }
            weir_task::spawn(forwarding::keep_one(Arc::clone(node), open.number));
            let via = Some(Via::Forwarder(Arc::new(open)));
            exports::attach(node, AcceptedClient { stream, leftover: Vec::new(), session, via });
        }
        Admission::Opens { record } => {
            agreement::serve(node, &record, &mut stream).await.map_err(unusable)?
        }
        Admission::Redirect { record } => {
            if let Err(reason) = lun_disks::serve(node, &record).await {
                part(&mut stream).await;
                return Err(Refusal::new(Why::NotAllowed, reason));
            }
            let stream = stream.into_stream().map_err(unusable)?;
            let disk = record.name.clone();
            node.shards
                .send(&record.name, Command::OwnerConnected { disk, stream, epoch: record.epoch })
                .await;
        }
        Admission::Owner { disk, owner, record } => {
            let (medium, known_epoch) = (log_medium(&record), record.epoch);
            // Held until the shard has the command, so that no other log gets the same room.
            let reserved = admission::admit(node, &disk, capacity::Role::Replica).await;
            let _reservation = match reserved {
                Ok(reservation) => reservation,
                Err(reason) => {
                    part(&mut stream).await;
                    return Err(Refusal::new(Why::NoRoom, reason));
                }
            };
            let stream = stream.into_stream().map_err(unusable)?;
            let command = Command::Replicate { disk: disk.clone(), medium, known_epoch, owner, stream };
            node.shards.send(&disk, command).await;
            // Between the check and this the disk may have changed hands.
            copies::tell(node, &record).await;
        }
    }
    Ok(())
}

/// Ends a connection in the protocol's own way: the other side learns that it was turned away, and not that something broke.
async fn part(stream: &mut impl Incoming) {
    // Who has gone, or does not read, needs no answer.
    let _ = weir_task::timeout(PARTING, stream.shutdown()).await;
}

/// The socket of a connection of another node's.
fn socket_of(stream: &Stream) -> io::Result<BorrowedFd<'_>> {
    match stream {
        Stream::Kernel(fd) | Stream::Protected(fd, _) => Ok(fd.as_fd()),
        Stream::Simulated(_) => Err(io::Error::other("a simulated connection has no socket")),
    }
}

/// What a greeting asks for, and the record allows.
enum Admission {
    /// Questions about grants, of owners on the node that connects.
    Grants { owner: String, place: Place },
    /// Requests of a client on another node: of a disk that is about to move there, or to read.
    Client { session: Session, via: Via },
    /// Requests of a client that the process `by` forwards.
    Forwarded { session: Session, by: NodeRef },
    /// The owner of a disk, on another node, asks whether this one can open it.
    Opens { record: Box<DiskRecord> },
    /// The owner of a disk, on another node, has its I/O redirected to this one, which coordinates the disk's volume.
    Redirect { record: Box<DiskRecord> },
    /// The owner of a disk, on another node, has its log replicated here.
    Owner { disk: String, owner: String, record: Box<DiskRecord> },
}

impl Admission {
    async fn of(greeting: Greeting, node: &Node, grants: &Arc<Places>) -> Result<Admission, Refusal> {
        let Greeting { disk, owner, purpose, .. } = greeting;
        let not_allowed = |reason: String| Refusal::new(Why::NotAllowed, reason);
        match purpose {
            Purpose::Grants if !is_registered(node, &owner) => {
                Err(not_allowed(format!("no node {owner} is registered, as far as this node knows")))
            }
            Purpose::Grants => match grants.take(&owner) {
                Some(place) => Ok(Admission::Grants { owner, place }),
                None => Err(Refusal::new(Why::NoRoom, format!("{owner} has too many grant connections"))),
            },
            Purpose::Client {
                structured_replies,
                extended_headers,
                block_sizes,
                base_allocation,
                forwarded,
            } => {
                let session = |export| Session {
                    export,
                    structured_replies,
                    extended_headers,
                    block_sizes,
                    base_allocation: base_allocation.then_some(BASE_ALLOCATION_ID),
                    flags: 0,
                };
                if let Some(identity) = forwarded {
                    let by = forwarding::admit(node, &disk, identity, &owner).map_err(not_allowed)?;
                    return Ok(Admission::Forwarded { session: session(disk), by });
                }
                let follower = node.records.disk(&disk).and_then(|record| record.follower);
                if follower.is_none_or(|follower| follower.node != owner) || node.here.get(&disk).is_none() {
                    let reason = format!("{owner} does not follow disk {disk}, or it is not open here");
                    return Err(not_allowed(reason));
                }
                Ok(Admission::Client { session: session(disk), via: Via::Follower(owner) })
            }
            Purpose::Read => match readers::admit(node, &disk, &owner) {
                Ok(place) => {
                    let (session, via) = (reading_session(&disk), Via::Reader(Arc::new(place)));
                    Ok(Admission::Client { session, via })
                }
                Err(reason) => Err(not_allowed(reason)),
            },
            Purpose::Redirect => {
                let record = Box::new(owned_by(node, &disk, &owner).await?);
                Ok(Admission::Redirect { record })
            }
            Purpose::Opens => Ok(Admission::Opens { record: Box::new(owned_by(node, &disk, &owner).await?) }),
            Purpose::Replicate => {
                let record = Box::new(owned_by(node, &disk, &owner).await?);
                Ok(Admission::Owner { disk, owner, record })
            }
        }
    }
}

/// Whether a node of this name lives, has been a member, or owns or keeps a part of a disk. One that has lost its session still
/// asks for grants, to go on with its disks (P12).
fn is_registered(node: &Node, name: &str) -> bool {
    let has_part = |record: &DiskRecord| {
        let mut all = record.owner.iter().chain(&record.replicas);
        all.any(|one| one.node == name) || record.former.iter().any(|former| former.node.node == name)
    };
    node.records.nodes.now().contains_key(name)
        || node.records.members.now().contains_key(name)
        || node.records.disks.now().values().any(has_part)
}

/// The record of the disk, which names `owner`. If the newest record that this node knows does not, the registry is asked.
async fn owned_by(node: &Node, disk: &str, owner: &str) -> Result<DiskRecord, Refusal> {
    let is_owner = |record: &DiskRecord| record.owner.as_ref().is_some_and(|one| one.node == owner);
    if let Some(record) = node.records.disk(disk).filter(is_owner) {
        return Ok(record);
    }
    let read = weir_task::timeout(READ, change::read(&*node.registry, disk)).await;
    let (entry, record) = read
        .map_err(|_| {
            let reason =
                format!("it does not own disk {disk} as far as this node knows, and the registry is away");
            Refusal::new(Why::NoRoom, reason)
        })?
        .map_err(|error| Refusal::new(Why::NotAllowed, error))?;
    node.records.learn(&record, entry.mod_revision);
    if is_owner(&record) {
        Ok(record)
    } else {
        Err(Refusal::new(Why::NotAllowed, format!("{owner} does not own disk {disk}")))
    }
}

#[cfg(test)]
mod hostile;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use weir_cluster::Embedded;
    use weir_cluster::records::{MigrationRecord, Record, keys};

    use super::*;
    use crate::control::disk::tests::record_of;

    #[tokio::test]
    async fn no_node_joins_a_registry_whose_content_is_elsewhere() {
        let directory = tempfile::tempdir().unwrap();
        let config = Config::parse("name = \"a\"", Path::new("weir.toml")).unwrap();
        let registry: Arc<dyn Registry> = Arc::new(Embedded::open(&directory.path().join("r")).unwrap());
        let gone = MigrationRecord::Gone { to: "/weir/a/ at https://e1:2379".into() };
        registry.transact(gone.create(keys::MIGRATION)).await.unwrap();
        let refused = join(&registry, record_of("a"), &config, |_| {}).await.unwrap_err().to_string();
        assert!(refused.contains("was migrated to /weir/a/ at https://e1:2379"), "{refused}");
        assert!(registry.list(keys::SESSIONS).await.unwrap().entries.is_empty());
    }
}
