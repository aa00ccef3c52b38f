//! The names of the keys. Prefixes end with `/`, so that no name is the beginning of another.

use super::NodeRef;

/// All [`super::NodeRecord`]s of nodes with a valid lease.
pub const NODES: &str = "nodes/";
/// One key for each node with a valid lease, written when it joined and never changed. See [`session`].
pub const SESSIONS: &str = "sessions/";
/// All [`super::VolumeRecord`]s.
pub const VOLUMES: &str = "volumes/";
/// One key for each volume's identity, with the volume's name: no two volumes have the same. See [`volume_id`].
pub const VOLUME_IDS: &str = "volume-ids/";
/// The [`super::SetupRecord`]s of LUNs that are being made volumes. See [`lun_setup`].
pub const LUN_SETUPS: &str = "lun-setup/";
/// The [`super::SetupRecord`]s of NBD servers that are being made volumes. See [`nbd_setup`].
pub const NBD_SETUPS: &str = "nbd-setup/";
/// All [`super::CoordinatorRecord`]s. See [`coordinator`].
pub const COORDINATORS: &str = "coordinators/";
/// All [`super::DiskRecord`]s.
pub const DISKS: &str = "disks/";
/// All [`super::StoppedRecord`]s.
pub const STOPPED: &str = "stopped/";
/// All [`super::ReleasedRecord`]s.
pub const RELEASED: &str = "released/";
/// All [`super::EventRecord`]s, in chronological order.
pub const EVENTS: &str = "events/";
/// All [`super::UnfinishedRecord`]s.
pub const UNFINISHED: &str = "unfinished/";
/// One key for each node that has been asked to stop, under its lease. See [`stopping`].
pub const STOPPING: &str = "stopping/";
/// All [`super::MemberRecord`]s.
pub const MEMBERS: &str = "members/";
/// All [`super::ClockRecord`]s of nodes with a valid lease.
pub const CLOCKS: &str = "clocks/";
/// The prefix of [`NODE_STATES`].
pub const NODE_STATES_PREFIX: &str = "node-states/";
/// The [`super::NodeStatesRecord`] of all nodes.
pub const NODE_STATES: &str = "node-states/all";
/// The [`super::MigrationRecord`] of a registry that nodes must not use.
pub const MIGRATION: &str = "migration";
/// The [`super::EpochBaseRecord`].
pub const EPOCH_BASE: &str = "epoch-base";
/// All records of identities: authorities, certificates, tokens, revocations.
pub const IDENTITY: &str = "identity/";
/// The cluster's certificate authorities.
pub const AUTHORITIES: &str = "identity/authorities";
/// Revoked certificates and names.
pub const REVOCATIONS: &str = "identity/revocations";
/// The names that nodes have, and the key of each.
pub const NAMES: &str = "identity/names";
/// One record for each join token, by its id.
pub const TOKENS: &str = "identity/tokens/";
/// One record for each certificate, by its serial number.
pub const ISSUED: &str = "identity/issued/";
/// One record for each node with an identity, by its name: the authorities that it trusts, the address of its API.
pub const ANNOUNCED: &str = "identity/nodes/";
/// The processes that the registry's server watches; private to it.
pub const PROCESSES: &str = "processes/";

/// `nodes/<name>`.
#[must_use]
pub fn node(name: &str) -> String {
    format!("{NODES}{name}")
}

/// `clocks/<name>`.
#[must_use]
pub fn clock(name: &str) -> String {
    format!("{CLOCKS}{name}")
}

/// `members/<name>`: stays when the node is down.
#[must_use]
pub fn member(name: &str) -> String {
    format!("{MEMBERS}{name}")
}

/// `sessions/<name>`: exists as long as the node's session. Separate from `nodes/<name>`, because a node updates that with its
/// load, and a claim must depend on the session alone.
#[must_use]
pub fn session(name: &str) -> String {
    format!("{SESSIONS}{name}")
}

/// `volumes/<name>`.
#[must_use]
pub fn volume(name: &str) -> String {
    format!("{VOLUMES}{name}")
}

/// `volume-ids/<identity>`: put and removed together with the volume's record.
#[must_use]
pub fn volume_id(id: u64) -> String {
    format!("{VOLUME_IDS}{id:016x}")
}

/// `lun-setup/<identity>`, under the lease of the process that makes a volume of this LUN: no other process begins to. The volume's
/// record replaces it.
#[must_use]
pub fn lun_setup(identity: &str) -> String {
    format!("{LUN_SETUPS}{identity}")
}

/// `nbd-setup/<place>`: as [`lun_setup`], for each address that a server's name leads to.
#[must_use]
pub fn nbd_setup(place: &str) -> String {
    format!("{NBD_SETUPS}{place}")
}

/// `coordinators/<identity>`: of a volume, whatever its name.
#[must_use]
pub fn coordinator(volume: u64) -> String {
    format!("{COORDINATORS}{volume:016x}")
}

/// `disks/<name>`.
#[must_use]
pub fn disk(name: &str) -> String {
    format!("{DISKS}{name}")
}

/// `stopped/<node>/<incarnation>`.
#[must_use]
pub fn stopped(node: &NodeRef) -> String {
    format!("{STOPPED}{}/{}", node.node, node.incarnation)
}

/// `unfinished/<disk>`.
#[must_use]
pub fn unfinished(disk: &str) -> String {
    format!("{UNFINISHED}{disk}")
}

/// `stopping/<node>/<incarnation>`: no node may rely on this process's data.
#[must_use]
pub fn stopping(node: &NodeRef) -> String {
    format!("{STOPPING}{}/{}", node.node, node.incarnation)
}

/// `released/<disk>/<epoch>/<node>`, with the epoch of [`super::FormerOwner::epoch`].
#[must_use]
pub fn released(disk: &str, epoch: u64, node: &str) -> String {
    format!("{RELEASED}{disk}/{epoch}/{node}")
}

/// `processes/<name>/<incarnation>`.
#[must_use]
pub fn process(name: &str, incarnation: u64) -> String {
    format!("{PROCESSES}{name}/{incarnation}")
}

/// `events/<time>-<node>-<incarnation>-<number>`: in chronological order over all nodes, and unique because each process numbers
/// its own.
#[must_use]
pub fn event(time_unix_ms: u64, node: &NodeRef, number: u64) -> String {
    format!("{EVENTS}{time_unix_ms:013x}-{}-{:x}-{number:08x}", node.node, node.incarnation)
}
