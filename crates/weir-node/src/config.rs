//! The node's configuration: one TOML file, every key documented in `weir.toml` beside this file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_accel::AccelConfig;
use weir_block::size::{Size, as_text};
use weir_cluster::node_state::Rules;
use weir_cluster::records::check_name;
use weir_etcd::{EtcdConfig, TlsFiles, UserFile};
use weir_export::fuse::Access;
use weir_volume::BackingOptions;

use crate::nbd_address::NbdAddress;
use crate::units::Period;

/// The example file: every key, its meaning and its default.
pub const EXAMPLE: &str = include_str!("weir.toml");

/// Longest permitted busy-poll. A processor wakes within some tens of microseconds; longer polling gains nothing.
const MOST_BUSY_POLL_US: u32 = 1000;

/// The default path of a node's API, for the node and for the command line.
pub const DEFAULT_API: &str = "/run/weir/api.sock";

/// A node's configuration. Documentation of the keys: [`EXAMPLE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of this node, unique in the cluster.
    pub name: String,
    /// The fault domain of this node: nodes that fail together.
    #[serde(default = "default_fault_domain")]
    pub fault_domain: String,
    /// The directory of the node's own state.
    #[serde(default = "default_state_dir")]
    pub state_dir: PathBuf,
    /// The registry, in which the cluster records ownership.
    #[serde(default)]
    pub registry: RegistryConfig,
    /// Time-outs of leases and silent nodes.
    #[serde(default)]
    pub lease: LeaseConfig,
    /// Isolation and quarantine of nodes.
    #[serde(default)]
    pub nodes: NodesConfig,
    /// The proof of who this node is.
    #[serde(default)]
    pub identity: IdentityConfig,
    /// Replication between nodes.
    #[serde(default)]
    pub peers: PeersConfig,
    /// The NBD export.
    #[serde(default)]
    pub nbd: NbdConfig,
    /// The disks as files.
    #[serde(default)]
    pub fuse: FuseConfig,
    /// The HTTP API.
    #[serde(default)]
    pub api: ApiConfig,
    /// Threads and memory.
    #[serde(default)]
    pub resources: ResourcesConfig,
    /// The flash medium.
    #[serde(default)]
    pub flash: FlashConfig,
    /// LUNs that are volumes.
    #[serde(default)]
    pub lun: LunConfig,
    /// Time limits for guests and operators.
    #[serde(default)]
    pub limits: LimitsConfig,
}

/// `[registry]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RegistryConfig {
    /// Unix socket of the registry of one machine.
    pub socket: PathBuf,
    /// Client URLs of etcd's members; empty: the registry at `socket`.
    pub etcd: Vec<String>,
    /// This cluster's keys in etcd begin with it.
    pub prefix: String,
    /// Certificates of the authorities that sign etcd's certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// This node's certificate for etcd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// Its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// A user of etcd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The file of the user's password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
}

impl RegistryConfig {
    /// The settings for etcd; `None` for the registry of one machine.
    ///
    /// # Errors
    /// The key that breaks a rule, its value, and the rule.
    pub fn etcd(&self, lease: &LeaseConfig) -> Result<Option<EtcdConfig>, (&'static str, String, String)> {
        let bad = |key, value: String, reason: &str| Err((key, value, reason.to_owned()));
        let path = |path: &PathBuf| path.display().to_string();
        if self.etcd.is_empty() {
            for (key, value) in [
                ("registry.ca", self.ca.as_ref().map(path)),
                ("registry.certificate", self.certificate.as_ref().map(path)),
                ("registry.key", self.key.as_ref().map(path)),
                ("registry.user", self.user.clone()),
                ("registry.password_file", self.password_file.as_ref().map(path)),
            ] {
                if let Some(value) = value {
                    return bad(key, value, "it is for etcd; set registry.etcd, too, or remove it");
                }
            }
            return Ok(None);
        }
        let identity = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            (None, None) => None,
            (Some(certificate), None) => {
                return bad("registry.certificate", path(certificate), "it needs registry.key, too");
            }
            (None, Some(key)) => return bad("registry.key", path(key), "it needs registry.certificate, too"),
        };
        let tls = match (&self.ca, identity) {
            (Some(ca), identity) => Some(TlsFiles { ca: ca.clone(), identity }),
            (None, Some((certificate, _))) => {
                return bad("registry.certificate", path(&certificate), "it needs registry.ca, too");
            }
            (None, None) => None,
        };
        let user = match (&self.user, &self.password_file) {
            (Some(name), Some(password)) => Some(UserFile { name: name.clone(), password: password.clone() }),
            (None, None) => None,
            (Some(name), None) => {
                return bad("registry.user", name.clone(), "it needs registry.password_file, too");
            }
            (None, Some(password)) => {
                return bad("registry.password_file", path(password), "it needs registry.user, too");
            }
        };
        // A keep-alive is repeated at another endpoint before the next one is due.
        let attempt_timeout =
            (lease.ttl.0 / 5).clamp(Duration::from_millis(200), EtcdConfig::ATTEMPT_TIMEOUT);
        let config = EtcdConfig {
            prefix: self.prefix.clone(),
            tls,
            user,
            attempt_timeout,
            ..EtcdConfig::new(self.etcd.clone())
        };
        match config.check() {
            Ok(()) => Ok(Some(config)),
            Err(weir_etcd::ConfigError::Value { key, value, reason }) => Err((key, value, reason)),
            // The check reads no file.
            Err(error) => bad("registry.etcd", format!("{:?}", self.etcd), &error.to_string()),
        }
    }

    /// Where this cluster's keys are, for messages.
    #[must_use]
    pub fn keys(&self) -> String {
        match self.etcd.is_empty() {
            true => self.place(),
            false => format!("{} (registry.prefix = {:?})", self.place(), self.prefix),
        }
    }

    /// Where it is, for messages.
    #[must_use]
    pub fn place(&self) -> String {
        if self.etcd.is_empty() { self.socket.display().to_string() } else { self.etcd.join(", ") }
    }
}

/// `[lease]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaseConfig {
    /// A node that the registry has not heard from for this long counts as gone.
    pub ttl: Period,
    /// I/O of a silent former owner is taken to have ended after this long (P4).
    pub fence_grace: Period,
}

/// `[nodes]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodesConfig {
    /// Nobody takes the disks of a node that the registry does not hear, and its disks' members do, for this long.
    pub resiliency_period: Period,
    /// So many isolations within an hour quarantine a node.
    pub quarantine_threshold: usize,
    /// The duration of a quarantine.
    pub quarantine_duration: Period,
}

impl NodesConfig {
    /// As the rules of node states.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            resiliency_period: self.resiliency_period.0,
            quarantine_threshold: self.quarantine_threshold,
            quarantine_duration: self.quarantine_duration.0,
            ..Rules::default()
        }
    }
}

impl Default for NodesConfig {
    fn default() -> NodesConfig {
        let rules = Rules::default();
        NodesConfig {
            resiliency_period: Period(rules.resiliency_period),
            quarantine_threshold: rules.quarantine_threshold,
            quarantine_duration: Period(rules.quarantine_duration),
        }
    }
}

/// `[identity]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityConfig {
    /// The directory of this node's key and certificates; absent: it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
}

/// `[peers]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PeersConfig {
    /// Address for other nodes' replication.
    pub listen: SocketAddr,
    /// A replica that has not answered for this long is replaced (P9).
    pub deadline: Period,
    /// A node without an identity speaks to other hosts in plain text.
    pub plaintext: bool,
}

/// `[nbd]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NbdConfig {
    /// Unix socket; absent: `nbd.sock` in the state directory; empty: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix: Option<PathBuf>,
    /// TCP addresses.
    pub tcp: Vec<NbdAddress>,
    /// Requests to a disk of a volume that is an NBD server wait for the server at most this long; then they get an error (P9).
    pub server_wait: Period,
    /// What was under way on a connection to such a server when it broke may land for this long (P4).
    pub fence_grace: Period,
}

impl Default for NbdConfig {
    fn default() -> NbdConfig {
        let backing = BackingOptions::default();
        NbdConfig {
            unix: None,
            tcp: Vec::new(),
            server_wait: Period(backing.server_wait),
            fence_grace: Period(backing.fence_grace),
        }
    }
}

/// `[fuse]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FuseConfig {
    /// The files are `VOLUME/DISK.raw` in this directory; absent: there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// Their mode, in octal digits.
    pub mode: String,
    /// Their user, by number.
    pub uid: u32,
    /// Their group, by number.
    pub gid: u32,
    /// What becomes of files whose disks other nodes own.
    pub elsewhere: FilesElsewhere,
}

/// `fuse.elsewhere`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilesElsewhere {
    /// They are not opened, and this node answers no other's reads.
    #[default]
    Refuse,
    /// They are opened for reading, and this node answers the reads of others.
    Read,
}

impl FuseConfig {
    /// The bits of the mode: to read and to write. `None`: it is none of those.
    fn mode_bits(&self) -> Option<u32> {
        u32::from_str_radix(&self.mode, 8).ok().filter(|bits| bits & !0o666 == 0)
    }

    /// Who may open the files.
    #[must_use]
    pub fn access(&self) -> Access {
        // A mode that is none was refused with the configuration; nobody but root is let in by it.
        Access { mode: self.mode_bits().unwrap_or_default(), uid: self.uid, gid: self.gid }
    }
}

impl Default for FuseConfig {
    fn default() -> FuseConfig {
        FuseConfig {
            directory: None,
            mode: "0600".to_owned(),
            uid: 0,
            gid: 0,
            elsewhere: FilesElsewhere::Refuse,
        }
    }
}

/// `[api]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Unix socket; absent: [`DEFAULT_API`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// TCP address for other hosts, over TLS; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
}

/// `[resources]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResourcesConfig {
    /// Threads for I/O.
    pub shards: usize,
    /// Memory for requests under way, per shard.
    #[serde(with = "as_text")]
    pub buffers: Size,
    /// Memory for one disk's write log.
    #[serde(with = "as_text")]
    pub log: Size,
    /// Memory for all write logs together, of disks owned here and copies of others'.
    #[serde(with = "as_text")]
    pub logs: Size,
    /// Longest busy-poll before a thread blocks, in microseconds; 0: it blocks at once.
    pub busy_poll_us: u32,
}

/// `[flash]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlashConfig {
    /// A block device, or a file that is made if it is not there; absent: this node has no flash medium.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Size of the file when it is made.
    #[serde(with = "as_text")]
    pub size: Size,
}

/// `[lun]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LunConfig {
    /// Block devices that may be LUNs of volumes; empty: all of this host.
    pub devices: Vec<PathBuf>,
    /// Whether the LUN itself keeps nodes from it.
    pub reservations: ReservationsConfig,
    /// What a LUN has accepted from a node before it is fenced has been executed after this long.
    pub preempt_wait: Period,
    /// Keeps nodes from a LUN, and lets them back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence_command: Option<PathBuf>,
    /// Its time.
    pub fence_timeout: Period,
    /// Requests that need the coordinator wait for one at most this long.
    pub coordinator_wait: Period,
}

impl Default for LunConfig {
    fn default() -> LunConfig {
        LunConfig {
            devices: Vec::new(),
            reservations: ReservationsConfig::Auto,
            preempt_wait: Period(Duration::from_secs(10)),
            fence_command: None,
            fence_timeout: Period(Duration::from_secs(60)),
            coordinator_wait: Period(BackingOptions::default().coordinator_wait),
        }
    }
}

/// `lun.reservations`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReservationsConfig {
    /// On LUNs that have persistent reservations.
    Auto,
    /// On none.
    Off,
}

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Writes wait at most this long for room in a log that frees nothing; then they get an error (P9).
    pub full_log_wait: Period,
    /// Writes wait at most this long for space on a full volume; then they get an error. Zero: at once.
    pub full_volume_wait: Period,
    /// A stop waits until what would be lost with this process has not moved for this long.
    pub stop_wait: Period,
}

impl Default for LimitsConfig {
    fn default() -> LimitsConfig {
        LimitsConfig {
            full_log_wait: Period(AccelConfig::FULL_LOG_WAIT),
            full_volume_wait: Period(BackingOptions::default().full_volume_wait),
            stop_wait: Period(Duration::from_secs(25)),
        }
    }
}

impl Default for FlashConfig {
    fn default() -> FlashConfig {
        FlashConfig { path: None, size: Size(1 << 30) }
    }
}

fn default_fault_domain() -> String {
    "default".to_owned()
}

fn default_state_dir() -> PathBuf {
    PathBuf::from("/var/lib/weir")
}

impl Default for RegistryConfig {
    fn default() -> RegistryConfig {
        RegistryConfig {
            socket: PathBuf::from("/run/weir/registry.sock"),
            etcd: Vec::new(),
            prefix: EtcdConfig::PREFIX.to_owned(),
            ca: None,
            certificate: None,
            key: None,
            user: None,
            password_file: None,
        }
    }
}

impl Default for LeaseConfig {
    fn default() -> LeaseConfig {
        LeaseConfig { ttl: Period(Duration::from_secs(5)), fence_grace: Period(Duration::from_secs(120)) }
    }
}

impl Default for PeersConfig {
    fn default() -> PeersConfig {
        PeersConfig {
            listen: SocketAddr::from(([127, 0, 0, 1], 7420)),
            deadline: Period(Duration::from_secs(1)),
            plaintext: false,
        }
    }
}

impl Default for ResourcesConfig {
    fn default() -> ResourcesConfig {
        ResourcesConfig {
            shards: 1,
            buffers: Size(256 << 20),
            log: Size(64 << 20),
            logs: Size(4 << 30),
            busy_poll_us: 50,
        }
    }
}

/// Why a configuration cannot be used. Says where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}; `weir node --print-config` prints an example", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of the wrong form.
    #[error("{path}: {message}\n`weir node --print-config` shows every key", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, key and reason.
        message: String,
    },
    /// A value is outside its range.
    #[error("{path}: {key} = {value}: {reason}", path = path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key, with its table.
        key: &'static str,
        /// Its value.
        value: String,
        /// The permitted values.
        reason: String,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file cannot be read, does not parse, or has a value outside its range.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Config::parse(&text, path)
    }

    /// Checks the text of a file; `path` is for messages.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text)
            .map_err(|error| ConfigError::Parse { path: path.to_owned(), message: error.to_string() })?;
        config.check().map_err(|(key, value, reason)| ConfigError::Value {
            path: path.to_owned(),
            key,
            value,
            reason,
        })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (&'static str, String, String)> {
        let bad = |key, value: &dyn std::fmt::Display, reason: String| Err((key, value.to_string(), reason));
        for (key, name) in [("name", &self.name), ("fault_domain", &self.fault_domain)] {
            if let Err(error) = check_name(name) {
                return bad(key, name, error.to_string());
            }
        }
        let (ms, second, minute) =
            (Duration::from_millis(1), Duration::from_secs(1), Duration::from_secs(60));
        for (key, period, least, most) in [
            ("lease.ttl", self.lease.ttl, 500 * ms, 5 * minute),
            ("lease.fence_grace", self.lease.fence_grace, second, 60 * minute),
            ("nodes.resiliency_period", self.nodes.resiliency_period, Duration::ZERO, 60 * minute),
            ("nodes.quarantine_duration", self.nodes.quarantine_duration, second, 7 * 24 * 60 * minute),
            ("peers.deadline", self.peers.deadline, 50 * ms, minute),
            ("lun.preempt_wait", self.lun.preempt_wait, second, 60 * minute),
            ("lun.fence_timeout", self.lun.fence_timeout, second, 60 * minute),
            ("lun.coordinator_wait", self.lun.coordinator_wait, second, 24 * 60 * minute),
            ("nbd.server_wait", self.nbd.server_wait, second, 24 * 60 * minute),
            ("nbd.fence_grace", self.nbd.fence_grace, second, 60 * minute),
            ("limits.full_log_wait", self.limits.full_log_wait, second, 24 * 60 * minute),
            ("limits.full_volume_wait", self.limits.full_volume_wait, Duration::ZERO, 24 * 60 * minute),
            ("limits.stop_wait", self.limits.stop_wait, second, 24 * 60 * minute),
        ] {
            if !(least..=most).contains(&period.0) {
                return bad(key, &period, format!("it must be {} to {}", Period(least), Period(most)));
            }
        }
        for (key, size, least, most) in [
            ("resources.buffers", self.resources.buffers, 8 << 20, 64 << 30),
            ("resources.log", self.resources.log, AccelConfig::SMALLEST_LOG, 64 << 30),
            ("resources.logs", self.resources.logs, AccelConfig::SMALLEST_LOG, 16 << 40),
        ] {
            if !(least..=most).contains(&size.0) || !size.0.is_multiple_of(4096) {
                let range = format!("it must be a multiple of 4 KiB from {} to {}", Size(least), Size(most));
                return bad(key, &size, range);
            }
        }
        if let Err(reason) = self.nodes.rules().check() {
            return bad("nodes.quarantine_threshold", &self.nodes.quarantine_threshold, reason);
        }
        for (key, path) in [
            ("lun.devices", self.lun.devices.iter().find(|path| !path.is_absolute())),
            ("lun.fence_command", self.lun.fence_command.iter().find(|path| !path.is_absolute())),
        ] {
            if let Some(path) = path {
                return bad(key, &path.display(), "it must be an absolute path".to_owned());
            }
        }
        if self.resources.logs < self.resources.log {
            let reason = format!("it must have room for one log, resources.log = {}", self.resources.log);
            return bad("resources.logs", &self.resources.logs, reason);
        }
        if !(1..=64).contains(&self.resources.shards) {
            return bad("resources.shards", &self.resources.shards, "it must be 1 to 64".to_owned());
        }
        if self.resources.busy_poll_us > MOST_BUSY_POLL_US {
            let reason = format!("it must be 0 to {MOST_BUSY_POLL_US}");
            return bad("resources.busy_poll_us", &self.resources.busy_poll_us, reason);
        }
        self.registry.etcd(&self.lease)?;
        if self.fuse.mode_bits().is_none() {
            let reason = "it must be octal digits that let some read or write, for example 0600 or 0660";
            return bad("fuse.mode", &self.fuse.mode, reason.to_owned());
        }
        let directories = [
            ("state_dir", Some(&self.state_dir)),
            ("identity.directory", self.identity.directory.as_ref()),
            ("fuse.directory", self.fuse.directory.as_ref()),
        ];
        for (key, path) in directories {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                return bad(key, &path.display(), "it must be an absolute path".to_owned());
            }
        }
        if let Some(listen) = &self.api.listen {
            if self.identity.directory.is_none() {
                let reason = "it speaks TLS and needs this node's key: set identity.directory";
                return bad("api.listen", listen, reason.to_owned());
            }
            if listen.ip().is_unspecified() {
                let reason = "hosts that join are sent to this address: write the one that they reach";
                return bad("api.listen", listen, reason.to_owned());
            }
        }
        if let Some(all) = self.nbd.tcp.iter().find(|one| one.address.ip().is_unspecified()) {
            let reason = "clients are sent to this address: write the one that they reach, or several";
            return bad("nbd.tcp", all, reason.to_owned());
        }
        if self.identity.directory.is_none()
            && let Some(address) = self.nbd.tcp.iter().find(|one| !one.plaintext)
        {
            return bad("nbd.tcp", address, address.needs_identity());
        }
        match (&self.identity.directory, self.peers.plaintext) {
            (Some(directory), true) => {
                let reason = format!(
                    "this node has an identity (identity.directory = {}), so it speaks TLS; remove one of the two",
                    directory.display()
                );
                bad("peers.plaintext", &true, reason)
            }
            (None, false) if !self.peers.listen.ip().is_loopback() => bad(
                "peers.listen",
                &self.peers.listen,
                "other hosts reach this address, and whoever reaches it can destroy acknowledged data: join the cluster (`weir \
                 cluster join`) and set identity.directory; or, in a network of trusted hosts only, set peers.plaintext = true"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    /// The API's socket.
    #[must_use]
    pub fn api_socket(&self) -> PathBuf {
        self.api.socket.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_API))
    }

    /// The NBD export's Unix socket, when there is one.
    #[must_use]
    pub fn nbd_socket(&self) -> Option<PathBuf> {
        match &self.nbd.unix {
            None => Some(self.state_dir.join("nbd.sock")),
            Some(path) if path.as_os_str().is_empty() => None,
            Some(path) => Some(path.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("weir.toml"))
    }

    /// The example with every commented key switched on.
    fn everything() -> String {
        let is_key = |line: &str| {
            line.split_once(" = ")
                .is_some_and(|(key, _)| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        };
        EXAMPLE
            .lines()
            .map(|line| line.strip_prefix("# ").filter(|rest| is_key(rest)).unwrap_or(line))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn the_example_shows_the_defaults() {
        let minimal = parse("name = \"n1\"").unwrap();
        assert_eq!(parse(EXAMPLE).unwrap(), minimal);
        let mut full = parse(&everything()).unwrap();
        assert_eq!(full.nbd_socket(), minimal.nbd_socket());
        assert_eq!(full.api_socket(), minimal.api_socket());
        (full.nbd.unix, full.api.socket, full.flash.path) = (None, None, None);
        (full.identity.directory, full.api.listen) = (None, None);
        assert!(full.fuse.directory.is_some());
        full.fuse.directory = None;
        assert!(
            full.registry
                .etcd(&full.lease)
                .unwrap()
                .is_some_and(|etcd| etcd.tls.is_some() && etcd.user.is_some())
        );
        full.registry = RegistryConfig {
            etcd: Vec::new(),
            ca: None,
            certificate: None,
            key: None,
            user: None,
            password_file: None,
            ..full.registry
        };
        assert!(full.lun.fence_command.is_some() && !full.lun.devices.is_empty());
        (full.lun.fence_command, full.lun.devices) = (None, Vec::new());
        assert_eq!(full, minimal);
    }

    #[test]
    fn the_example_has_every_key() {
        let mut config = parse("name = \"n1\"").unwrap();
        (config.nbd.unix, config.api.socket) = (Some("/a".into()), Some("/b".into()));
        (config.flash.path, config.identity.directory) = (Some("/c".into()), Some("/i".into()));
        config.api.listen = Some(([127, 0, 0, 1], 7443).into());
        let registry = &mut config.registry;
        (registry.ca, registry.certificate) = (Some("/d".into()), Some("/e".into()));
        (registry.key, registry.user) = (Some("/f".into()), Some("g".into()));
        registry.password_file = Some("/h".into());
        config.lun.fence_command = Some("/j".into());
        config.fuse.directory = Some("/k".into());
        let all = everything();
        let keys: Vec<_> = toml::to_string(&config)
            .unwrap()
            .lines()
            .filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()))
            .collect();
        assert_eq!(keys.len(), 47, "a new key: extend this test's count and the example");
        for key in keys {
            assert!(
                all.lines().any(|line| line.starts_with(&format!("{key} = "))),
                "{key} is not in the example"
            );
        }
    }

    #[test]
    fn incomplete_settings_for_etcd_are_named() {
        for (lines, words) in [
            ("ca = \"/ca\"", "registry.ca = /ca: it is for etcd; set registry.etcd, too"),
            ("user = \"weir\"", "registry.user = weir: it is for etcd"),
            ("etcd = [\"host:2379\"]", "registry.etcd = host:2379: it must be https://HOST:PORT"),
            ("etcd = [\"https://host:2379\"]", "registry.ca"),
            (
                "etcd = [\"https://host:2379\"]\nca = \"/ca\"\nkey = \"/k\"",
                "registry.key = /k: it needs registry.certificate",
            ),
            (
                "etcd = [\"https://host:2379\"]\ncertificate = \"/c\"\nkey = \"/k\"",
                "registry.certificate = /c: it needs registry.ca",
            ),
            (
                "etcd = [\"https://host:2379\"]\nca = \"/ca\"\nuser = \"u\"",
                "registry.user = u: it needs registry.password_file",
            ),
            (
                "etcd = [\"http://127.0.0.1:2379\"]\nprefix = \"weir\"",
                "registry.prefix = \"weir\": it must begin and end",
            ),
        ] {
            let error = parse(&format!("name = \"n1\"\n[registry]\n{lines}")).unwrap_err().to_string();
            assert!(error.contains(words), "{error:?} says nothing of {words:?}");
        }
        let config =
            parse("name = \"n1\"\n[registry]\netcd = [\"http://127.0.0.1:2379\"]\n[lease]\nttl = \"2 s\"")
                .unwrap();
        let etcd = config.registry.etcd(&config.lease).unwrap().unwrap();
        assert_eq!((&*etcd.prefix, etcd.attempt_timeout), ("/weir/default/", Duration::from_millis(400)));
        assert_eq!(config.registry.place(), "http://127.0.0.1:2379");
    }

    #[test]
    fn other_hosts_are_spoken_to_in_plain_text_only_if_that_is_asked_for() {
        let with = |lines: &str| parse(&format!("name = \"n1\"\n{lines}")).map_err(|error| error.to_string());
        let everywhere = "[peers]\nlisten = \"0.0.0.0:7420\"\n";
        let error = with(everywhere).unwrap_err();
        assert!(
            error.contains("peers.listen = 0.0.0.0:7420") && error.contains("peers.plaintext = true"),
            "{error}"
        );
        assert!(with(&format!("{everywhere}plaintext = true")).is_ok());
        let identity = "[identity]\ndirectory = \"/var/lib/weir/identity\"\n";
        assert!(with(&format!("{everywhere}{identity}")).is_ok());
        let error = with(&format!("{everywhere}plaintext = true\n{identity}")).unwrap_err();
        assert!(error.contains("peers.plaintext = true: this node has an identity"), "{error}");
        let error = with("[identity]\ndirectory = \"keys\"").unwrap_err();
        assert!(error.contains("identity.directory = keys: it must be an absolute path"), "{error}");
    }

    #[test]
    fn nbd_beyond_loopback_is_tls_unless_the_address_says_otherwise() {
        let with = |tcp: &str, more: &str| {
            let text = format!("name = \"n1\"\n[nbd]\ntcp = [{tcp}]\n{more}");
            parse(&text).map(|config| config.nbd.tcp).map_err(|error| error.to_string())
        };
        let identity = "[identity]\ndirectory = \"/i\"\n";
        let address = |text: &str, plaintext| NbdAddress { address: text.parse().unwrap(), plaintext };
        let (near, far) = ("127.0.0.1:10809", "10.0.0.1:10809");
        assert_eq!(with(&format!("\"{near}\""), ""), Ok(vec![address(near, true)]));
        assert_eq!(
            with(&format!("\"{far}\", \"[::1]:1\""), identity),
            Ok(vec![address(far, false), address("[::1]:1", true)])
        );
        let refused = with(&format!("\"{far}\""), "").unwrap_err();
        assert!(
            refused.contains("nbd.tcp = 10.0.0.1:10809: ") && refused.contains("set identity.directory"),
            "{refused}"
        );
        let allowed = "{ address = \"10.0.0.1:10809\", plaintext = true }";
        assert!(refused.contains(allowed), "{refused}");
        assert_eq!(with(allowed, ""), Ok(vec![address(far, true)]));
        assert_eq!(with(allowed, identity), Ok(vec![address(far, true)]));
        let secure = "{ address = \"127.0.0.1:10809\", plaintext = false }";
        assert_eq!(with(secure, identity), Ok(vec![address(near, false)]));
        assert!(with(secure, "").unwrap_err().contains("TLS is required there"));
        for all in ["\"0.0.0.0:10809\"", "{ address = \"[::]:10809\", plaintext = true }"] {
            let refused = with(all, identity).unwrap_err();
            assert!(refused.contains("write the one that they reach"), "{refused}");
        }
        for (bad, words) in [
            ("\"10.0.0.1\"", "ADDRESS:PORT"),
            ("{ address = \"10.0.0.1:1\", plain = true }", "unknown field `plain`"),
            ("{ plaintext = true }", "missing field `address`"),
            ("10809", "ADDRESS:PORT"),
        ] {
            let refused = with(bad, identity).unwrap_err();
            assert!(refused.contains(words) && refused.contains("line 3"), "{refused}");
        }
    }

    #[test]
    fn errors_name_the_line_the_key_and_the_remedy() {
        let error = parse("name = \"n1\"\nshard = 2\n").unwrap_err().to_string();
        assert!(
            error.contains("line 2") && error.contains("shard") && error.contains("--print-config"),
            "{error}"
        );
        let error = parse("name = \"n1\"\n[lease]\nttl = \"5\"").unwrap_err().to_string();
        assert!(error.contains("line 3") && error.contains("5s for seconds"), "{error}");
        let error = parse("name = \"n1\"\n[lease]\nttl = \"1 ms\"").unwrap_err().to_string();
        assert!(error.contains("lease.ttl") && error.contains("500 ms to 5 min"), "{error}");
        let small = "name = \"n1\"\n[resources]\nlog = \"32 MiB\"";
        let error = parse(small).unwrap_err().to_string();
        assert!(error.contains("resources.log = 32MiB") && error.contains("64MiB to 64GiB"), "{error}");
        let none = "name = \"n1\"\n[resources]\nlog = \"256 MiB\"\nlogs = \"128 MiB\"";
        let error = parse(none).unwrap_err().to_string();
        assert!(error.contains("resources.logs") && error.contains("resources.log = 256MiB"), "{error}");
        let error = parse("name = \"n1\"\n[resources]\nbusy_poll_us = 2000").unwrap_err().to_string();
        assert!(error.contains("resources.busy_poll_us = 2000: it must be 0 to 1000"), "{error}");
        for (lines, words) in [
            ("mode = \"0700\"", "fuse.mode = 0700: it must be octal digits"),
            ("mode = \"rw\"", "fuse.mode = rw: "),
            ("directory = \"files\"", "fuse.directory = files: it must be an absolute path"),
            ("elsewhere = \"write\"", "expected `refuse` or `read`"),
        ] {
            let error = parse(&format!("name = \"n1\"\n[fuse]\n{lines}")).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let error = parse("name = \"a b\"").unwrap_err().to_string();
        assert!(error.contains("letters"), "{error}");
        let error = Config::load(Path::new("/nonexistent/weir.toml")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/weir.toml") && error.contains("--print-config"), "{error}");
    }
}
