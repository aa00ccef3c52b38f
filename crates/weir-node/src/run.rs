//! Puts a node together and runs it.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use weir_accel::AccelConfig;
use weir_accel::flash::{FlashDevice, FlashError};
use weir_accel::planted::Planted;
use weir_block::{Engine, Nanos};
use weir_cluster::events::Events;
use weir_cluster::membership::SessionError;
use weir_cluster::records::NodeRecord;
use weir_cluster::registry::RegistryError;
use weir_etcd::ConfigError as SettingError;
use weir_export::nbd::ListenError;
use weir_identity::Mistrust;

use crate::accept;
use crate::audit::Audit;
use crate::backings::Backings;
use crate::clock_check;
use crate::cluster::{follow, renewal, rotation};
use crate::config::Config;
use crate::control::node::{Node, random};
use crate::control::{Shards, capacity, flash};
use crate::coordination::Coordination;
use crate::exports::{self, Door, Exports};
use crate::files::Files;
use crate::former_processes::{self, FormerProcessesError};
use crate::gate::Gate;
use crate::http;
use crate::https;
use crate::identity::{IdentityError, NodeIdentity};
use crate::members;
use crate::network::{Tcp, avoid_pacing, keep_checking};
use crate::operations::Operations;
use crate::patience::{Told, is_taken, patiently};
use crate::plane::{self, Parts, Plane};
use crate::registry::{RegistryUnusable, registry};
use crate::shard::opener::Threads;
use crate::shard::stack::{Plain, Wrap};
use crate::shard::{Shard, ShardConfig};
use crate::state_lock::{LockError, StateLock};
use crate::stop::{self, Left};

/// Notices of the shards that wait for the control plane.
const NOTICES: usize = 4096;

/// Longest wait for the shards of a node that stops, once its disks are closed. They may still have a write to the flash in
/// flight, and a flash that hangs answers late or never.
const SHARDS_END: Duration = Duration::from_secs(5);

/// Why a node does not run.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A directory, socket or thread is not available.
    #[error("{what}: {source}")]
    System {
        /// The failed operation.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// An address that another process has.
    #[error(
        "{what} at {address}: {source}; another process has this address: stop that process, or set {key}"
    )]
    Taken {
        /// Who was to listen there.
        what: &'static str,
        /// The address.
        address: SocketAddr,
        /// Its key in the configuration.
        key: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The state directory is another node's, or cannot be locked.
    #[error(transparent)]
    State(#[from] LockError),
    /// The state directory does not take this process's name.
    #[error(transparent)]
    Former(#[from] FormerProcessesError),
    /// Another process answers at the API's socket.
    #[error("another process answers at {}; stop it, or set api.socket", .0.display())]
    Running(PathBuf),
    /// An NBD address is not available.
    #[error("the NBD export: {0}")]
    Export(#[from] ListenError),
    /// The node's identity cannot be used.
    #[error("the node's identity: {0}")]
    Identity(#[from] IdentityError),
    /// The registry refuses, or this node's name is taken.
    #[error("cannot join the cluster: {0}")]
    Join(#[from] SessionError),
    /// The flash medium cannot be used.
    #[error("the flash medium: {0}")]
    Flash(#[from] FlashError),
    /// The settings for etcd, or the files that they name, cannot be used.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The registry refuses.
    #[error("the registry: {0}")]
    Registry(#[from] RegistryError),
    /// It was revoked while it ran, and has closed its disks.
    #[error("{0}; the other nodes turn this one away, so it has destaged and closed its disks and stopped")]
    Revoked(Mistrust),
    /// It has stopped as it was asked to, and acknowledged writes are lost with it.
    #[error(
        "stopped, and what only this node had is lost: {}; the backings hold their last checkpoints, `weir disk export --accept-loss` \
         opens them",
        .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    LeftBehind(Vec<Left>),
}

impl From<RegistryUnusable> for NodeError {
    fn from(error: RegistryUnusable) -> NodeError {
        match error {
            RegistryUnusable::Setting(error) => NodeError::Setting(error),
            RegistryUnusable::Refused(error) => NodeError::Registry(error),
        }
    }
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> NodeError {
    let what = what.into();
    move |source| NodeError::System { what, source }
}

/// Each disk, peer and client costs descriptors, and the usual soft limit is for programs that use `select`.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// Runs a node until `shutdown` completes, then destages and closes its disks, and leaves the cluster.
///
/// # Errors
/// The node cannot start; or [`NodeError::LeftBehind`]. Once it runs, it copes.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), NodeError> {
    run_with(config, Setup::default(), shutdown).await
}

/// Settings of the starting program beyond the configuration.
#[derive(Clone)]
pub struct Setup {
    /// Layers around those of every disk.
    pub wrap: Arc<dyn Wrap>,
    /// The replication address for other nodes, if not the one where this node listens.
    pub peer_address: Option<SocketAddr>,
}

impl Default for Setup {
    /// No layers around any; peers come to where the node listens.
    fn default() -> Setup {
        Setup { wrap: Arc::new(Plain), peer_address: None }
    }
}

/// As [`run`], with the settings of the program that starts the node.
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    config: Config,
    setup: Setup,
    shutdown: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    raise_descriptor_limit();
    let started = Nanos::now();
    let identity = load_identity(&config)?;
    make_dir("state_dir", &config.state_dir)?;
    let _state = lock_state(&config).await?;
    // A socket's directory, where it is not the state directory.
    for (key, socket) in [("api.socket", Some(config.api_socket())), ("nbd.unix", config.nbd_socket())] {
        if let Some(directory) = socket.as_deref().and_then(Path::parent) {
            make_dir(key, directory)?;
        }
    }
    let _ = std::fs::remove_file(stop::left_behind(&config.state_dir));
    let peers = listen("listening for peers", "peers.listen", config.peers.listen).await?;
    avoid_pacing(&peers);
    let taken = |error: &NodeError| match error {
        NodeError::Export(ListenError::Io { source, .. }) => is_taken(source),
        error => matches!(error, NodeError::Running(_) | NodeError::Export(ListenError::InUse(_))),
    };
    let nbd = identity.as_deref().map(NodeIdentity::nbd_server).transpose()?;
    let open = async || exports::listen(&config, nbd.as_ref()).await.map_err(NodeError::from);
    let (listeners, [nbd_tcp, nbd_tls]) = patiently("an address of the NBD export", open, taken).await?;
    let api = patiently("the API's socket", async || bind_api(&config.api_socket()).await, taken).await?;
    let mut services = JoinSet::new();
    let stage = http::Stage::new(http::not_joined("it is starting"));
    let audit = Audit::open(&config.state_dir, &config.name)
        .map_err(system(format!("opening the audit log in {}", config.state_dir.display())))?;
    let gate = Gate::new(stage.subscribe(), Some(Arc::clone(&audit)));
    services.spawn(http::serve(api, gate.clone()));
    let tls_address = match (&identity, config.api.listen) {
        (Some(identity), Some(address)) => {
            let (address, listener) = bind_tls(address).await?;
            let tls = identity.tls().api_server(identity.credentials()).map_err(IdentityError::from)?;
            services.spawn(https::serve(listener, Arc::clone(identity), Arc::new(tls), gate));
            Some(address)
        }
        _ => None,
    };

    let in_use = |error: &NodeError| matches!(error, NodeError::Flash(FlashError::InUse(_)));
    let flash = patiently("the flash medium", async || open_flash(&config).await, in_use).await?;
    let (notices, wanted) = mpsc::channel(NOTICES);
    let shards = start_shards(&config, flash.clone(), &setup.wrap, &notices)?;
    drop(notices);
    let queues = Shards::new(shards.iter().map(|shard| shard.queue.clone()).collect());

    tokio::pin!(shutdown);
    // Before other nodes can see this one: they will count on the copies on its flash. This may take long, but must not delay
    // a stop.
    let damaged = tokio::select! {
        damaged = flash::recover(flash.as_deref(), &queues) => damaged,
        () = &mut shutdown => return Ok(()),
    };
    let registry = registry(&config)?;
    let record = NodeRecord {
        name: config.name.clone(),
        // Grows with each start, unless the clock is set back by more than the node was down.
        incarnation: weir_task::unix_millis(),
        flash: flash.as_ref().map(|flash| flash.medium()),
        peer_address: match setup.peer_address {
            Some(address) => address,
            None => peers.local_addr().map_err(system("asking for the peers' address"))?,
        },
        nbd_tcp,
        nbd_tls,
        nbd_unix: config.nbd_socket().unwrap_or_default(),
        api: config.api_socket(),
        fault_domain: config.fault_domain.clone(),
        media: capacity::media(&config.resources, flash.as_deref(), &[]),
        load: 0,
        forwards: config.nbd.forward,
    };
    let former = former_processes::enter(&config.state_dir, &record.node_ref())?;
    let told = Mutex::new(Told::default());
    let waits = |reason: &str| {
        drop(stage.send_replace(http::not_joined(reason)));
        if told.lock().unwrap_or_else(PoisonError::into_inner).is_due(reason) {
            tracing::warn!(reason, "waiting to join the cluster");
        }
    };
    let place = config.registry.place();
    drop(stage.send_replace(http::not_joined(&format!("the registry at {place} has not answered yet"))));
    tracing::info!(registry = place, "joining the cluster");
    tokio::select! {
        checked = follow::check(&config, &*registry, identity.as_deref(), &waits) => checked?,
        () = &mut shutdown => return Ok(()),
    }
    let session = tokio::select! {
        session = plane::join(&registry, record, &config, &waits) => session?,
        () = &mut shutdown => return Ok(()),
    };
    tracing::info!(registry = place, "in the cluster");
    let rules = config.nodes.rules();
    let network = Arc::new(Tcp::new(identity.clone(), config.peers.plaintext));
    let parts =
        Parts { config, rules, registry, network, identity, shards: queues, flash, started, damaged, former };
    let Plane { node, tasks, services: ours } = Plane::start(parts, session, wanted).await?;
    services.spawn(accept::peers(peers, Arc::clone(&node)));
    services.spawn(members::keep(Arc::clone(&node)));
    services.spawn(clock_check::keep(Arc::clone(&node)));
    services.spawn(keep_checking(Arc::clone(&node)));
    let (expel, expelled) = oneshot::channel();
    services.spawn(follow::keep(Arc::clone(&node), tls_address, expel));
    services.spawn(renewal::keep(Arc::clone(&node)));
    services.spawn(rotation::keep(Arc::clone(&node)));
    let backings = Arc::new(Backings::default());
    services.spawn(Arc::clone(&backings).watch(Arc::clone(&node)));
    let coordination = Coordination::start(Arc::clone(&node));
    let operations = Operations::new(Arc::clone(&node), Arc::clone(&tasks), backings).with_audit(Some(audit));
    let exports = Exports::new(Arc::clone(&node), operations.clone())
        .map_err(system("starting the thread that forwards clients"))?;
    let exports = Arc::new(exports);
    let files = Files::start(&node, &exports).map_err(system("the disks' files"))?;
    for listener in listeners {
        let door = Door::new(&exports, listener.local_address().is_none());
        services.spawn(listener.run(door, exports.clone()));
    }
    drop(stage.send_replace(http::router(operations)));

    let revoked = tokio::select! {
        () = &mut shutdown => None,
        Ok(why) = expelled => Some(why),
    };
    tracing::info!("stopping: destaging and closing all disks");
    node.here.stop();
    exports.stop();
    let stop_wait = Some(node.config.limits.stop_wait.0);
    let left = match &revoked {
        Some(why) => {
            let text = format!("{why}: it destages and closes its disks, however long that takes, and stops");
            tracing::error!("{text}");
            node.journal.tell("expelled", &node.config.name, text);
            // Its peers take no copies from it, and nobody waits for its end: what it alone has must not go with it (P1).
            tokio::select! {
                left = stop::drain(&node, &tasks, None) => left,
                () = &mut shutdown => stop::drain(&node, &tasks, stop_wait).await,
            }
        }
        None => stop::drain(&node, &tasks, stop_wait).await,
    };
    coordination.stop().await;
    if let Some(files) = files {
        files.stop().await;
    }
    // Before its listener is closed: from then on another process may make its own there.
    let _ = std::fs::remove_file(node.config.api_socket());
    services.shutdown().await;
    ours.stop().await;
    members::leave(&node).await;
    if !left.is_empty() {
        return Err(leave_behind(&node, left).await);
    }
    if stop::is_open(&node).await {
        tracing::warn!(
            "not all disks could be closed in time; their logs are on flash, or others take them over"
        );
        return ended(revoked);
    }
    if tokio::time::timeout(SHARDS_END, end(&node.shards, shards)).await.is_err() {
        // Nothing of it is needed: the disks are closed, and the logs on flash stay.
        tracing::warn!(
            "a shard does not end: the flash, or a backing, does not answer; the process ends all the same"
        );
    }
    // The end of this process ends the lease in any case.
    let _ = node.registry.revoke(node.session.lease()).await;
    ended(revoked)
}

/// A revocation is an error: what restarts the process must not do so in vain.
fn ended(revoked: Option<Mistrust>) -> Result<(), NodeError> {
    revoked.map_or(Ok(()), |why| Err(NodeError::Revoked(why)))
}

/// The listener of the API over TLS, and its address.
async fn bind_tls(address: SocketAddr) -> Result<(SocketAddr, TcpListener), NodeError> {
    let what = "listening for the API";
    let listener = listen(what, "api.listen", address).await?;
    Ok((listener.local_addr().map_err(system(format!("{what} at {address}")))?, listener))
}

/// A listener at the address of `key`.
async fn listen(
    what: &'static str,
    key: &'static str,
    address: SocketAddr,
) -> Result<TcpListener, NodeError> {
    let bound = patiently(address, async || TcpListener::bind(address).await, is_taken).await;
    bound.map_err(|source| match is_taken(&source) {
        true => NodeError::Taken { what, address, key, source },
        false => NodeError::System { what: format!("{what} at {address}"), source },
    })
}

/// The state directory for this node alone, until the lock is dropped.
async fn lock_state(config: &Config) -> Result<StateLock, NodeError> {
    let take = async || StateLock::take(&config.state_dir, &config.name);
    let taken = |error: &LockError| matches!(error, LockError::Taken { .. });
    Ok(patiently(format!("the directory {}", config.state_dir.display()), take, taken).await?)
}

/// The identity of the node, if it is to have one.
fn load_identity(config: &Config) -> Result<Option<Arc<NodeIdentity>>, NodeError> {
    let Some(directory) = &config.identity.directory else { return Ok(None) };
    let identity = NodeIdentity::load(directory, &config.name)?;
    if let Err(why) = identity.own_certificate() {
        tracing::error!(%why, "other nodes will refuse this one");
    }
    Ok(Some(identity))
}

/// Ends the shards, and waits for their threads.
async fn end(queues: &Shards, shards: Vec<Shard>) {
    queues.stop().await;
    for shard in shards {
        let _ = tokio::task::spawn_blocking(|| shard.join()).await;
    }
}

/// Reports the loss with this process, in its directory.
async fn leave_behind(node: &Node, left: Vec<Left>) -> NodeError {
    let lost = NodeError::LeftBehind(left.clone());
    tracing::error!("{lost}");
    let lines: String = left.iter().map(|left| format!("{left}\n")).collect();
    if let Err(error) = std::fs::write(stop::left_behind(&node.config.state_dir), lines) {
        tracing::warn!(%error, "cannot leave word of it in the state directory");
    }
    let events = Events::new(Arc::clone(&node.registry), node.session.node_ref());
    for left in left {
        let text = format!("{} stopped, and this is lost: {left}", node.session.node_ref().node);
        let _ = tokio::time::timeout(Duration::from_secs(1), events.record("left-behind", &left.disk, &text))
            .await;
    }
    lost
}

/// Makes a directory that is not there, for this user alone.
fn make_dir(key: &str, path: &Path) -> Result<(), NodeError> {
    weir_cluster::remote::make_private_dir(path)
        .map_err(system(format!("creating {}, for {key}", path.display())))
}

/// Opens the flash device, if there is to be one. Making the file takes as long as writing it.
async fn open_flash(config: &Config) -> Result<Option<Arc<FlashDevice>>, NodeError> {
    let Some(path) = config.flash.path.clone() else { return Ok(None) };
    let (size, log) = (config.flash.size.0, config.resources.log.0);
    let open = move || FlashDevice::open(&path, size, log, random());
    let opened = tokio::task::spawn_blocking(open).await.map_err(io::Error::other);
    Ok(Some(opened.map_err(system("opening the flash medium"))??))
}

fn start_shards(
    config: &Config,
    flash: Option<Arc<FlashDevice>>,
    wrap: &Arc<dyn Wrap>,
    notices: &mpsc::Sender<crate::shard::messages::Notice>,
) -> Result<Vec<Shard>, NodeError> {
    let shard = ShardConfig {
        buffer_bytes: usize::try_from(config.resources.buffers.0).unwrap_or(usize::MAX),
        busy_poll: Duration::from_micros(config.resources.busy_poll_us.into()),
        log_bytes: config.resources.log.0,
        peer_deadline: config.peers.deadline.0,
        full_log_wait: config.limits.full_log_wait.0,
        full_volume_wait: config.limits.full_volume_wait.0,
        coordinator_wait: config.lun.coordinator_wait.0,
        server_wait: config.nbd.server_wait.0,
        nbd_fence_grace: config.nbd.fence_grace(&config.lease),
        destage_delay: AccelConfig::DESTAGE_DELAY,
        io_flusher: config.fuse.directory.is_some(),
        engine: Engine::Auto,
        storage: Arc::new(Threads),
        flash,
        wrap: Arc::clone(wrap),
        planted: Planted::default(),
    };
    (0..config.resources.shards)
        .map(|number| Shard::start(number, shard.clone(), notices.clone()))
        .collect::<Result<_, _>>()
        .map_err(system("starting the shards"))
}

/// The API's socket: mode 0600 before any client can connect. One that a former process left is replaced.
async fn bind_api(path: &Path) -> Result<UnixListener, NodeError> {
    if UnixStream::connect(path).await.is_ok() {
        return Err(NodeError::Running(path.to_owned()));
    }
    let mut making = path.as_os_str().to_owned();
    making.push(".new");
    let making = PathBuf::from(making);
    let _ = std::fs::remove_file(&making);
    let bind = || {
        let listener = UnixListener::bind(&making)?;
        std::fs::set_permissions(&making, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&making, path)?;
        Ok(listener)
    };
    bind().map_err(system(format!("making the API's socket {}", path.display())))
}
