//! The faults.

use std::thread;

use serde::Serialize;
use weir_block::Nanos;
use weir_lab::REGISTRY;
use weir_lab::process::ProcessState;
use weir_node::api::Delete;

use super::{Members, Rig, becomes, disk, some_time};

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// etcd's leader is killed.
    LeaderKilled,
    /// A member of etcd, often the leader, stands still for a while.
    MemberPaused,
    /// Two or three members are killed or stand still.
    QuorumLost,
    /// So they are, and meanwhile the owner of a disk is killed.
    QuorumLostOwnerKilled,
    /// A node's watches are cut off, the registry changes, and the history of the changes is compacted.
    Compaction,
    /// etcd's leader and the owner of a disk are killed at once.
    LeaderAndOwnerKilled,
}

/// What was done, and how it ended.
pub(super) struct Strike {
    pub told: String,
    /// When etcd had a quorum again, as an acknowledged change tells; without a loss of the quorum, the end of the fault.
    pub back: Nanos,
    /// Every node has seen every change.
    pub seen: bool,
}

impl Fault {
    /// All of them.
    pub const ALL: [Fault; 6] = [
        Fault::LeaderKilled,
        Fault::MemberPaused,
        Fault::QuorumLost,
        Fault::QuorumLostOwnerKilled,
        Fault::Compaction,
        Fault::LeaderAndOwnerKilled,
    ];

    /// For a table.
    pub fn name(self) -> &'static str {
        match self {
            Fault::LeaderKilled => "leader killed",
            Fault::MemberPaused => "member paused",
            Fault::QuorumLost => "quorum lost",
            Fault::QuorumLostOwnerKilled => "quorum lost, owner killed",
            Fault::Compaction => "compaction during a watch",
            Fault::LeaderAndOwnerKilled => "leader and owner killed",
        }
    }

    pub(super) fn strike(self, rig: &mut Rig) -> Strike {
        match self {
            Fault::LeaderKilled => leader_killed(rig),
            Fault::MemberPaused => member_paused(rig),
            Fault::QuorumLost => quorum_lost(rig, false),
            Fault::QuorumLostOwnerKilled => quorum_lost(rig, true),
            Fault::Compaction => compaction(rig),
            Fault::LeaderAndOwnerKilled => leader_and_owner_killed(rig),
        }
    }
}

fn struck(told: String, back: Nanos) -> Strike {
    Strike { told, back, seen: true }
}

fn leader_killed(rig: &mut Rig) -> Strike {
    let leader = rig.etcd().leader();
    rig.etcd().kill(leader);
    let back = rig.etcd().await_quorum();
    thread::sleep(some_time(&mut rig.random, 300, 3000));
    rig.etcd().start(leader);
    struck(format!("m{leader}"), back)
}

fn member_paused(rig: &mut Rig) -> Strike {
    let leader = rig.etcd().leader();
    let member = if rig.random.bool() { leader } else { rig.random.usize(..Members::COUNT) };
    let lasts = some_time(&mut rig.random, 500, 5000);
    rig.etcd().pause(member);
    let over = Nanos::now() + lasts;
    let back = rig.etcd().await_quorum();
    thread::sleep(over - Nanos::now());
    rig.etcd().resume(member);
    let leads = if member == leader { ", the leader" } else { "" };
    struck(format!("m{member}{leads}, for {lasts:.1?}"), back)
}

fn quorum_lost(rig: &mut Rig, owner_killed: bool) -> Strike {
    let mut members: Vec<_> = (0..Members::COUNT).collect();
    rig.random.shuffle(&mut members);
    // Sometimes all three.
    members.truncate(if rig.random.u8(..4) == 0 { 3 } else { 2 });
    let (killed, lasts) = (rig.random.bool(), some_time(&mut rig.random, 1000, 7000));
    let victim = owner_killed.then(|| (rig.some_owner(), lasts.mul_f64(rig.random.f64())));
    for &member in &members {
        if killed { rig.etcd().kill(member) } else { rig.etcd().pause(member) }
    }
    let mut told = format!("{members:?} {} for {lasts:.1?}", if killed { "killed" } else { "paused" });
    let over = Nanos::now() + lasts;
    if let Some((victim, after)) = victim {
        thread::sleep(after);
        rig.bench.lab.kill(&victim).unwrap();
        told += &format!(", {victim} killed after {after:.1?}");
    }
    thread::sleep(over - Nanos::now());
    for &member in &members {
        if killed { rig.etcd().start(member) } else { rig.etcd().resume(member) }
    }
    struck(told, rig.etcd().await_quorum())
}

fn leader_and_owner_killed(rig: &mut Rig) -> Strike {
    let (leader, victim) = (rig.etcd().leader(), rig.some_owner());
    let node_first = rig.random.bool();
    if node_first {
        rig.bench.lab.kill(&victim).unwrap();
    }
    rig.etcd().kill(leader);
    if !node_first {
        rig.bench.lab.kill(&victim).unwrap();
    }
    let back = rig.etcd().await_quorum();
    let mut told = format!("m{leader} and {victim}");
    // A node that is back at once, as by its service, finds its former session in the registry.
    if rig.random.bool() {
        rig.bench.lab.start(&victim).unwrap();
        told += ", which starts at once";
    }
    thread::sleep(some_time(&mut rig.random, 0, 1000));
    rig.etcd().start(leader);
    struck(told, back)
}

/// The registry gets another disk, and loses the last such one, while a node's watches are cut off. The node comes back to a history
/// that was compacted over both changes: nothing but a new list tells of the deletion.
fn compaction(rig: &mut Rig) -> Strike {
    // Sometimes longer than the lease, so that the node's session ends, too.
    let lasts = if rig.random.u8(..3) == 0 {
        some_time(&mut rig.random, 5500, 8000)
    } else {
        some_time(&mut rig.random, 0, 1500)
    };
    let names = rig.names();
    let node = names[rig.random.usize(..names.len())].clone();
    let other = names.iter().find(|name| **name != node).expect("there are several").clone();
    let network = rig.bench.lab.network().unwrap();
    network.cut(network.between(&node, REGISTRY)).unwrap();
    network.hang_up(&node).unwrap();
    let client = rig.bench.lab.client(&other).unwrap();
    let former = (rig.changes > 0).then(|| format!("c{}", rig.changes));
    rig.changes += 1;
    let fresh = format!("c{}", rig.changes);
    client.create_disk(&disk(&rig.bench, &fresh, "write-through", 1 << 20)).unwrap();
    if let Some(former) = &former {
        client.delete(former, &Delete { name: former.clone(), ..Delete::default() }).unwrap();
    }
    let revision = rig.etcd().compact();
    thread::sleep(lasts);
    rig.bench.lab.network().unwrap().restore().unwrap();
    let back = Nanos::now();
    let seen = becomes(super::SOON, || {
        rig.bench.lab.nodes().iter().filter(|node| node.process_state() == ProcessState::Running).all(
            |node| {
                let disks = node.client().disks().unwrap_or_default();
                let has = |name: &String| disks.iter().any(|disk| disk.name == *name);
                has(&fresh) && !former.as_ref().is_some_and(has)
            },
        )
    });
    Strike { told: format!("at {revision} while {node} is cut off for {lasts:.1?}"), back, seen }
}
