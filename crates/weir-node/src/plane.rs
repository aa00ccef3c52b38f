//! Puts a node's control plane together, from parts that a simulation can replace: the registry, the way to other nodes, the shards.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use weir_accel::flash::FlashDevice;
use weir_block::{Nanos, Stream};
use weir_cluster::events::Events;
use weir_cluster::membership::{NodeSession, SessionConfig, SessionError};
use weir_cluster::migration::{MigrationError, Named};
use weir_cluster::node_state::Rules;
use weir_cluster::records::{DiskRecord, NodeRecord};
use weir_cluster::registry::{Registry, RegistryError};
use weir_cluster::right::GrantTimes;
use weir_export::nbd::AcceptedClient;
use weir_nbd::server::{BASE_ALLOCATION_ID, Session};
use weir_task::JoinHandle;

use crate::config::Config;
use crate::control::disk::log_medium;
use crate::control::intents::Intents;
use crate::control::node::{Here, Journal, Node};
use crate::control::registry_copy::RegistryCopy;
use crate::control::rights::Rights;
use crate::control::{
    LogCapacity, Shards, Tasks, admission, capacity, change, flash, grants, node_states, provisioning,
    supervisor, watchdog,
};
use crate::exports;
use crate::identity::NodeIdentity;
use crate::peer::{Greeting, Incoming, Network, Purpose};
use crate::shard::messages::{Command, Notice};

/// Part of a lease or a grant that its holder does not count on: for clocks that run at different speeds.
const MARGIN: u32 = 5;

/// Pause between requests to the registry, or for a name that is still taken, at the start.
const START_AGAIN: Duration = Duration::from_millis(200);

/// Longest time to ask the registry who owns a disk.
const READ: Duration = Duration::from_millis(500);

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
    waits(&format!("the registry at {} has not answered yet", config.registry.place()));
    let mut told = String::new();
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
                let reason = error.to_string();
                waits(&reason);
                // Once for each reason, not five times a second.
                if told != reason {
                    tracing::info!(reason, "waiting to join the cluster");
                    told = reason;
                }
                weir_task::sleep(START_AGAIN).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// A registry whose content is, or will be, in another one has no nodes.
async fn check_usable(registry: &dyn Registry, config: &Config) -> Result<(), RegistryError> {
    let name = format!("the registry at {}", config.registry.place());
    match (Named { registry, name: &name }).check_usable().await {
        Err(MigrationError::Registry { source, .. }) => Err(source),
        checked => checked.map_err(|error| RegistryError::Setup { reason: error.to_string() }),
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
        let Parts { config, rules, registry, network, identity, shards, flash, started, damaged } = parts;
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
            here: Here::default(),
            capacity: LogCapacity::default(),
            intents: Intents::default(),
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
            weir_task::spawn(node_states::keep(Arc::clone(&node))),
            weir_task::spawn(provisioning::keep_finished(Arc::clone(&node))),
        ];
        Ok(Plane { node, tasks, services: Services(services) })
    }
}

/// Takes a connection of another node; its greeting has the purpose. `proven` is the name of that node, if it has proven one.
///
/// # Errors
/// In words: the greeting is wrong, meant for another process, or asks for something that the record does not allow; or there is
/// no room.
pub async fn welcome(
    mut stream: impl Incoming,
    node: &Arc<Node>,
    members: Arc<Semaphore>,
    proven: Option<&str>,
) -> Result<(), String> {
    let greeting = Greeting::read(&mut stream).await.map_err(|error| error.to_string())?;
    if let Some(proven) = proven.filter(|proven| *proven != greeting.owner) {
        return Err(format!("it greets as {}, and its certificate is that of {proven}", greeting.owner));
    }
    let me = node.session.node_ref();
    if greeting.replica != me {
        return Err(format!("it looks for {}, and this is {me}", greeting.replica));
    }
    let Greeting { disk, owner, purpose, .. } = greeting;
    if purpose == Purpose::Grants {
        let place = members.try_acquire_owned().map_err(|_| "too many grant connections".to_owned())?;
        let node = Arc::clone(node);
        weir_task::spawn(async move {
            let _place = place;
            if let Err(error) = grants::serve(&node, &owner, stream).await {
                tracing::debug!(owner, %error, "a grant connection ended");
            }
        });
        return Ok(());
    }
    let stream = stream.into_stream().map_err(|error| error.to_string())?;
    if let Purpose::Client { structured_replies, extended_headers, block_sizes, base_allocation } = purpose {
        let session = Session {
            export: disk,
            structured_replies,
            extended_headers,
            block_sizes,
            base_allocation: base_allocation.then_some(BASE_ALLOCATION_ID),
            flags: 0,
        };
        return serve_follower(node, &owner, AcceptedClient { stream, leftover: Vec::new(), session });
    }
    replicate(node, disk, owner, stream).await
}

/// Takes requests that clients on another node make of a disk which is about to move there.
fn serve_follower(node: &Node, from: &str, client: AcceptedClient) -> Result<(), String> {
    let disk = &client.session.export;
    let follower = node.records.disk(disk).and_then(|record| record.follower);
    if follower.is_none_or(|follower| follower.node != from) || node.here.get(disk).is_none() {
        return Err(format!("{from} does not follow disk {disk}, or it is not open here"));
    }
    exports::attach(node, client);
    Ok(())
}

/// The owner of a disk, on another node, has connected to have its log replicated here.
async fn replicate(node: &Arc<Node>, disk: String, owner: String, stream: Stream) -> Result<(), String> {
    let record = owned_by(node, &disk, &owner).await?;
    let (medium, known_epoch) = (log_medium(&record), record.epoch);
    // Held until the shard has the command, so that no other log gets the same room.
    let _reservation = admission::admit(node, &disk, capacity::Role::Replica).await?;
    let command = Command::Replicate { disk: disk.clone(), medium, known_epoch, owner, stream };
    node.shards.send(&disk, command).await;
    Ok(())
}

/// The record of the disk, which names `owner`. A view of the registry that does not yet show that it does is checked.
async fn owned_by(node: &Node, disk: &str, owner: &str) -> Result<DiskRecord, String> {
    let is_owner = |record: &DiskRecord| record.owner.as_ref().is_some_and(|one| one.node == owner);
    if let Some(record) = node.records.disk(disk).filter(is_owner) {
        return Ok(record);
    }
    let read = weir_task::timeout(READ, change::read(&*node.registry, disk)).await;
    let (_, record) = read
        .map_err(|_| {
            format!("it does not own disk {disk} as far as this node knows, and the registry is away")
        })?
        .map_err(|error| error.to_string())?;
    if is_owner(&record) { Ok(record) } else { Err(format!("{owner} does not own disk {disk}")) }
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
