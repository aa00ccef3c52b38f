//! The node's configuration: one TOML file, every key documented in `weir.toml` beside this file.

mod sections;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_accel::AccelConfig;
use weir_block::size::Size;
use weir_cluster::records::check_name;

use crate::units::Period;
pub use sections::{
    ApiConfig, FilesElsewhere, FlashConfig, FuseConfig, IdentityConfig, LeaseConfig, LimitsConfig, LunConfig,
    NbdConfig, NodesConfig, PeersConfig, RegistryConfig, ReservationsConfig, ResourcesConfig,
};

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

fn default_fault_domain() -> String {
    "default".to_owned()
}

fn default_state_dir() -> PathBuf {
    PathBuf::from("/var/lib/weir")
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
            ("lun.answer_timeout", self.lun.answer_timeout, second, 60 * minute),
            ("lun.coordinator_wait", self.lun.coordinator_wait, second, 24 * 60 * minute),
            ("nbd.server_wait", self.nbd.server_wait, second, 24 * 60 * minute),
            ("nbd.fence_grace", self.nbd.fence_grace.unwrap_or(Period(second)), second, 60 * minute),
            ("limits.full_log_wait", self.limits.full_log_wait, second, 24 * 60 * minute),
            ("limits.full_volume_wait", self.limits.full_volume_wait, Duration::ZERO, 24 * 60 * minute),
            ("limits.stop_wait", self.limits.stop_wait, second, 24 * 60 * minute),
        ] {
            if !(least..=most).contains(&period.0) {
                return bad(key, &period, format!("it must be {} to {}", Period(least), Period(most)));
            }
        }
        if let Some(grace) = self.nbd.fence_grace.filter(|grace| *grace > self.lease.fence_grace) {
            let reason = format!(
                "it must not be longer than lease.fence_grace = {}, which is what a node waits for before it takes a disk over",
                self.lease.fence_grace
            );
            return bad("nbd.fence_grace", &grace, reason);
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
