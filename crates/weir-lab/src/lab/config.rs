//! The configuration of a lab, and the derived one of each node.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use weir_block::size::Size;
use weir_node::config::{
    ApiConfig, Config, FilesElsewhere, FlashConfig, FuseConfig, IdentityConfig, LeaseConfig, LimitsConfig,
    LunConfig, NbdConfig, NodesConfig, PeersConfig, RegistryConfig, ResourcesConfig,
};
use weir_node::nbd_address::NbdAddress;
use weir_node::units::Period;

use super::LabNode;
use super::identities;
use super::start::{registry_socket, relay_socket};
use crate::error::LabError;
use crate::{network, port};

/// Longest path of a Unix socket, in bytes, with the zero at its end (unix(7)).
const LONGEST_SOCKET_PATH: usize = 108;

/// Ports of nodes that have an address of their own.
const PEERS_PORT: u16 = 7420;
const NBD_PORT: u16 = 10809;

/// The configuration of a lab.
#[derive(Clone, Debug)]
pub struct LabConfig {
    /// The directory of its state, sockets and logs. Created if missing.
    pub dir: PathBuf,
    /// The `weir` program.
    pub program: PathBuf,
    /// Nodes, 1 to [`super::MOST_NODES`]. They are called `n1`, `n2`, … and listen on 127.0.0.1, 127.0.0.2, ….
    pub nodes: usize,
    /// A network of its own for the lab, whose links can be cut ([`super::Lab::network`]). Needs root.
    pub network: bool,
    /// A node that the registry has not heard from for this long counts as gone.
    pub lease_ttl: Duration,
    /// I/O of a silent former owner is taken to have ended after this long.
    pub fence_grace: Duration,
    /// A replica that has not answered for this long is replaced.
    pub peer_deadline: Duration,
    /// Writes wait at most this long for room in a log that frees nothing.
    pub full_log_wait: Duration,
    /// Writes wait at most this long for space on a full volume; zero: not at all.
    pub full_volume_wait: Duration,
    /// A node's stop waits until what would be lost has not moved for this long.
    pub stop_wait: Duration,
    /// Threads for I/O, per node.
    pub shards: usize,
    /// Memory for requests in flight, per shard.
    pub buffers: Size,
    /// Memory for each write log; not less than 64 MiB.
    pub log: Size,
    /// Memory for all write logs of a node together.
    pub logs: Size,
    /// Longest busy-poll of a thread for I/O before it blocks, in microseconds; 0: it blocks at once.
    pub busy_poll_us: u32,
    /// The nodes' flash media.
    pub flash: LabFlash,
    /// The nodes' fault domains, by number; further nodes are each in a domain of its own.
    pub fault_domains: Vec<String>,
    /// The nodes prove to each other who they are ([`super::identities`]); otherwise they speak in plain text.
    pub identities: bool,
    /// The nodes' registry, if it is an etcd; otherwise the lab starts one of its own.
    pub etcd: Option<LabEtcd>,
    /// Each node's own path to a LUN, by number: block devices of one image. A node beyond them has none.
    pub luns: Vec<PathBuf>,
    /// Keeps nodes from the LUN.
    pub fence_command: Option<PathBuf>,
    /// Requests that need a volume's coordinator wait for one at most this long.
    pub coordinator_wait: Duration,
    /// Requests wait for an NBD server that is away at most this long.
    pub server_wait: Duration,
    /// What was under way on a connection to an NBD server may land for this long.
    pub nbd_fence_grace: Duration,
    /// The nodes have the disks as files, in `files` in their directories. Needs root.
    pub fuse: bool,
    /// What becomes of files whose disks other nodes own.
    pub fuse_elsewhere: FilesElsewhere,
}

/// An etcd with TLS that runs beside the lab and is not the lab's to end.
#[derive(Clone, Debug)]
pub struct LabEtcd {
    /// Where its members listen for clients: loopback addresses. In a lab with a network a relay for each node listens at the same
    /// addresses, so that the nodes' links to etcd can be cut.
    pub members: Vec<SocketAddr>,
    /// The prefix of the lab's keys.
    pub prefix: String,
    /// Certificate of the authority that signed etcd's certificates.
    pub ca: PathBuf,
    /// The nodes' certificate for etcd.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

impl LabEtcd {
    fn registry(&self) -> RegistryConfig {
        RegistryConfig {
            etcd: self.members.iter().map(|member| format!("https://{member}")).collect(),
            prefix: self.prefix.clone(),
            ca: Some(self.ca.clone()),
            certificate: Some(self.certificate.clone()),
            key: Some(self.key.clone()),
            ..RegistryConfig::default()
        }
    }
}

impl LabConfig {
    /// Three nodes with short time-outs.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, program: impl Into<PathBuf>) -> LabConfig {
        LabConfig {
            dir: dir.into(),
            program: program.into(),
            nodes: 3,
            network: false,
            lease_ttl: Duration::from_secs(2),
            fence_grace: Duration::from_secs(10),
            peer_deadline: Duration::from_secs(1),
            full_log_wait: LimitsConfig::default().full_log_wait.0,
            full_volume_wait: LimitsConfig::default().full_volume_wait.0,
            stop_wait: Duration::from_secs(10),
            shards: 1,
            buffers: Size(64 << 20),
            log: Size(64 << 20),
            logs: Size(4 << 30),
            busy_poll_us: ResourcesConfig::default().busy_poll_us,
            flash: LabFlash::None,
            fault_domains: Vec::new(),
            identities: false,
            etcd: None,
            luns: Vec::new(),
            fence_command: None,
            coordinator_wait: LunConfig::default().coordinator_wait.0,
            server_wait: NbdConfig::default().server_wait.0,
            nbd_fence_grace: Duration::from_secs(3),
            fuse: false,
            fuse_elsewhere: FilesElsewhere::default(),
        }
    }
}

/// The flash media of a lab's nodes.
#[derive(Clone, Debug, Default)]
pub enum LabFlash {
    /// They have none.
    #[default]
    None,
    /// A file of this size in each node's directory.
    Files(Size),
    /// These files or devices, by the nodes' numbers; further nodes have none.
    Devices(Vec<PathBuf>),
}

impl LabFlash {
    fn of(&self, number: usize, home: &Path) -> FlashConfig {
        let none = FlashConfig::default();
        match self {
            LabFlash::None => none,
            LabFlash::Files(size) => FlashConfig { path: Some(home.join("flash")), size: *size },
            LabFlash::Devices(paths) => FlashConfig { path: paths.get(number - 1).cloned(), ..none },
        }
    }
}

/// The directory of the disks as files of the node whose directory is `home`.
pub(super) fn files(home: &Path) -> PathBuf {
    home.join("files")
}

/// Directory, free ports and configuration file of one node.
pub(super) fn prepare(config: &LabConfig, dir: &Path, number: usize) -> Result<LabNode, LabError> {
    let name = format!("n{number}");
    let home = dir.join(&name);
    fs::create_dir_all(&home).map_err(LabError::system(format!("creating {}", home.display())))?;
    let (peers, nbd_tcp) = if config.network {
        let address = network::address(number);
        (SocketAddr::new(address, PEERS_PORT), SocketAddr::new(address, NBD_PORT))
    } else {
        free_ports(IpAddr::V4(Ipv4Addr::new(127, 0, 0, number as u8)))?
    };
    let node = LabNode {
        config: home.join("weir.toml"),
        log: home.join("log"),
        api: home.join("api.sock"),
        nbd_unix: home.join("nbd.sock"),
        nbd_tcp,
        process: None,
        name: name.clone(),
    };
    if node.api.as_os_str().len() >= LONGEST_SOCKET_PATH {
        let reason = format!(
            "{} is too long for the path of a socket; choose a shorter directory",
            node.api.display()
        );
        return Err(LabError::Invalid(reason));
    }
    let identity = match config.identities {
        true => IdentityConfig { directory: Some(identities::of(dir, &home, &name)?) },
        false => IdentityConfig::default(),
    };
    let fuse = FuseConfig {
        directory: config.fuse.then(|| files(&home)),
        elsewhere: config.fuse_elsewhere,
        ..FuseConfig::default()
    };
    let settings = Config {
        name: name.clone(),
        fault_domain: config
            .fault_domains
            .get(number - 1)
            .cloned()
            .unwrap_or_else(|| format!("rack-{number}")),
        flash: config.flash.of(number, &home),
        state_dir: home,
        registry: match &config.etcd {
            Some(etcd) => etcd.registry(),
            None => RegistryConfig {
                socket: if config.network { relay_socket(&node) } else { registry_socket(dir) },
                ..RegistryConfig::default()
            },
        },
        nodes: at_once(),
        lease: LeaseConfig { ttl: Period(config.lease_ttl), fence_grace: Period(config.fence_grace) },
        peers: PeersConfig {
            listen: peers,
            deadline: Period(config.peer_deadline),
            plaintext: identity.directory.is_none(),
        },
        identity,
        lun: LunConfig {
            devices: lun_of(config, number),
            fence_command: config.fence_command.clone(),
            coordinator_wait: Period(config.coordinator_wait),
            // One machine's storage.
            preempt_wait: Period(Duration::from_secs(1)),
            ..LunConfig::default()
        },
        nbd: NbdConfig {
            unix: Some(node.nbd_unix.clone()),
            tcp: vec![NbdAddress::plaintext(nbd_tcp)],
            forward: NbdConfig::default().forward,
            server_wait: Period(config.server_wait),
            fence_grace: Some(Period(config.nbd_fence_grace.min(config.fence_grace))),
        },
        fuse,
        api: ApiConfig { socket: Some(node.api.clone()), listen: None },
        limits: LimitsConfig {
            full_log_wait: Period(config.full_log_wait),
            full_volume_wait: Period(config.full_volume_wait),
            stop_wait: Period(config.stop_wait),
        },
        resources: ResourcesConfig {
            shards: config.shards,
            buffers: config.buffers,
            log: config.log,
            logs: config.logs,
            busy_poll_us: config.busy_poll_us,
        },
    };
    let text = toml::to_string(&settings).map_err(|error| LabError::Invalid(error.to_string()))?;
    Config::parse(&text, &node.config).map_err(|error| LabError::Invalid(error.to_string()))?;
    fs::write(&node.config, text).map_err(LabError::system(format!("writing {}", node.config.display())))?;
    Ok(node)
}

/// The devices of a node that may be LUNs. Others' paths to the one image are none of its own.
fn lun_of(config: &LabConfig, number: usize) -> Vec<PathBuf> {
    match config.luns.get(number - 1) {
        Some(path) => vec![path.clone()],
        None if config.luns.is_empty() => Vec::new(),
        None => vec![PathBuf::from("/dev/null")],
    }
}

/// Two ports of `address`, held together while they are chosen, so that they differ.
fn free_ports(address: IpAddr) -> Result<(SocketAddr, SocketAddr), LabError> {
    let none = || LabError::system(format!("finding a free port on {address}"));
    let held = [port::free(address).map_err(none())?, port::free(address).map_err(none())?];
    let [first, second] = held.each_ref().map(|one| one.local_addr().map_err(none()));
    Ok((first?, second?))
}

/// A lab shows takeovers: nobody waits for an owner that only the registry does not hear, and a quarantine is over at once.
fn at_once() -> NodesConfig {
    NodesConfig {
        resiliency_period: Period(Duration::ZERO),
        quarantine_duration: Period(Duration::from_secs(1)),
        ..NodesConfig::default()
    }
}
