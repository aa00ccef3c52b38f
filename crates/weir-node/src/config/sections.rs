//! The tables of the configuration, and their defaults.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_accel::AccelConfig;
use weir_block::size::{Size, as_text};
use weir_cluster::node_state::Rules;
use weir_etcd::{EtcdConfig, TlsFiles, UserFile};
use weir_export::fuse::Access;
use weir_volume::BackingOptions;

#[cfg(doc)]
use super::DEFAULT_API;
use crate::nbd_address::NbdAddress;
use crate::units::Period;

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
    /// Clients here may use disks that other nodes own, and those of other nodes the disks that this one owns.
    pub forward: bool,
    /// Requests to a disk of a volume that is an NBD server wait for the server at most this long; then they get an error (P9).
    pub server_wait: Period,
    /// The server may still carry out requests of a broken connection for this long (P4). Absent: see [`NbdConfig::fence_grace`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence_grace: Option<Period>,
}

impl NbdConfig {
    /// How long the server may still carry out requests of a broken connection. A node that takes a disk over waits for
    /// `lease.fence_grace`, so this is never longer.
    #[must_use]
    pub fn fence_grace(&self, lease: &LeaseConfig) -> Duration {
        self.fence_grace.map_or(BackingOptions::default().fence_grace.min(lease.fence_grace.0), |set| set.0)
    }
}

impl Default for NbdConfig {
    fn default() -> NbdConfig {
        let server_wait = Period(BackingOptions::default().server_wait);
        NbdConfig { unix: None, tcp: Vec::new(), forward: true, server_wait, fence_grace: None }
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
    /// Handling of files whose disks other nodes own.
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
    pub(super) fn mode_bits(&self) -> Option<u32> {
        u32::from_str_radix(&self.mode, 8).ok().filter(|bits| bits & !0o666 == 0)
    }

    /// Permissions of the files.
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
    /// Time after a fence within which a LUN has executed all requests that it accepted before.
    pub preempt_wait: Period,
    /// Keeps nodes from a LUN, and lets them back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence_command: Option<PathBuf>,
    /// Its time.
    pub fence_timeout: Period,
    /// A coordinator that the LUN has not answered for this long gives the volume up.
    pub answer_timeout: Period,
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
            answer_timeout: Period(Duration::from_secs(60)),
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
