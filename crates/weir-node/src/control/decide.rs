//! This node's next step for one disk. Pure: records, local state and time come in, one decision comes out.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_accel::Former;
use weir_block::Nanos;
use weir_cluster::ownership::{Gone, OwnerGone};
use weir_cluster::placement::{Live, claimants, successors};
use weir_cluster::records::{DiskRecord, Medium, Mode, NodeRef};

/// The local state of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// Not open.
    Closed,
    /// Open, configured as of this epoch.
    Open {
        /// The epoch that the shard knows.
        epoch: u64,
    },
}

/// The evidence that a former owner's I/O has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// Nothing is known.
    None,
    /// Its process is under `stopped/`. This node cannot see I/O in that machine's kernel.
    Declared,
    /// Its process is under `stopped/`, and the kernel of this machine may still have I/O of it under way.
    UnderWay,
    /// Its process is under `stopped/`, and the kernel of this machine has no I/O of it under way.
    Ended,
    /// Its node was kept from the LUN after its right had ended ([`super::owner_fences`]).
    Fenced,
    /// It has said so itself, under `released/`.
    Released,
}

/// The input of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// This process.
    pub me: &'a NodeRef,
    /// The nodes whose lease stands.
    pub live: &'a Live,
    /// Nodes that take a disk over only if no other can.
    pub barred: &'a BTreeSet<String>,
    /// The local state.
    pub local: Local,
    /// Whether a complete copy of the log is here, in case the record counts on one because of this node's flash.
    pub has_copy: bool,
    /// Whether the owner is under `stopped/`.
    pub owner_stopped: bool,
    /// Since when this node has seen the owner without a lease.
    pub owner_gone_since: Option<Nanos>,
    /// Since when this node has seen that another process has to claim the disk or to take it over, and that none does.
    pub vacant_since: Option<Nanos>,
    /// Now.
    pub now: Nanos,
    /// The time for which a silent owner may still have I/O in flight.
    pub fence_grace: Duration,
}

/// The decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, until something changes.
    Nothing,
    /// No process owns the disk, and it has been moved to this one, or to one that does not claim it: claim it, by
    /// compare-and-swap.
    Claim,
    /// The owner is gone and this node is next: take over on this evidence, by compare-and-swap.
    TakeOver(OwnerGone),
    /// The owner is gone and this node is counted among the replicas, but its flash does not hold that copy: say so, by
    /// compare-and-swap, so that others can take over.
    Disclaim(OwnerGone),
    /// This process owns the disk and does not have it open: open it.
    Open,
    /// It is open and ours, and the record has moved on: tell the shard.
    Configure,
    /// It is open and another's (P2), or has been meanwhile: end all I/O.
    Release {
        /// The record's epoch.
        epoch: u64,
    },
    /// No node can take over without losing acknowledged writes. The reason, for the operator.
    Unavailable(String),
}

/// Whether this very process lives.
#[must_use]
pub fn is_live(live: &Live, node: &NodeRef) -> bool {
    live.get(&node.node).is_some_and(|record| record.incarnation == node.incarnation)
}

/// Decides. `record` is `None` when the disk was deleted.
#[must_use]
pub fn decide(record: Option<&DiskRecord>, situation: &Situation<'_>) -> Decision {
    let Situation { me, live, local, .. } = *situation;
    let Some(record) = record else {
        return match local {
            Local::Open { epoch } => Decision::Release { epoch: epoch + 1 },
            Local::Closed => Decision::Nothing,
        };
    };
    let mine = record.owner.as_ref() == Some(me);
    match (local, mine) {
        // Another node has owned it since, and has handed it back: what is here is not its log (P1).
        (Local::Open { epoch }, true) if record.former.iter().any(|former| former.epoch >= epoch) => {
            Decision::Release { epoch: record.epoch }
        }
        (Local::Open { epoch }, true) if epoch < record.epoch => Decision::Configure,
        (Local::Open { .. }, true) => Decision::Nothing,
        (Local::Open { epoch }, false) if epoch <= record.epoch => Decision::Release { epoch: record.epoch },
        // This view of the registry lags behind this process's own latest commit.
        (Local::Open { .. }, false) => Decision::Nothing,
        (Local::Closed, true) => Decision::Open,
        (Local::Closed, false) => match &record.owner {
            Some(owner) if !is_live(live, owner) => succeed(record, owner, situation),
            None if may_claim(record, situation) => Decision::Claim,
            _ => Decision::Nothing,
        },
    }
}

impl Situation<'_> {
    fn vacant(&self) -> Duration {
        self.vacant_since.map_or(Duration::ZERO, |since| self.now - since)
    }
}

fn may_claim(record: &DiskRecord, situation: &Situation<'_>) -> bool {
    claimants(record, situation.live, situation.barred, situation.vacant()).contains(situation.me)
}

/// The owner is gone. Is it for this node to act, and may it already?
fn succeed(record: &DiskRecord, owner: &NodeRef, situation: &Situation<'_>) -> Decision {
    let Situation { me, live, barred, has_copy, .. } = *situation;
    let next = successors(record, live, barred, situation.vacant());
    if record.mode == Mode::WriteBack && next.is_empty() {
        return Decision::Unavailable(lost_copies(record, owner));
    }
    if !next.contains(me) {
        return Decision::Nothing;
    }
    let evidence = evidence(owner, situation);
    if record.mode == Mode::WriteBack && !record.replicas.contains(me) && !has_copy {
        // Counted because of its flash, on which the copy is not.
        return match record.is_replica(me) {
            true => Decision::Disclaim(evidence),
            // Replicas come first, and one of them is there.
            false if next.len() > 1 => Decision::Nothing,
            false => Decision::Unavailable(lost_copies(record, owner)),
        };
    }
    // In write-back the replicas refuse the old epoch from now on. In write-through the new owner waits, before it answers
    // anything, until the former one's right has ended and the fence grace after that has passed.
    Decision::TakeOver(evidence)
}

/// The best evidence that there is about an owner that is gone.
#[must_use]
pub fn evidence(owner: &NodeRef, situation: &Situation<'_>) -> OwnerGone {
    let silent = situation.owner_gone_since.map(|since| situation.now - since);
    let how = if situation.owner_stopped {
        Gone::Stopped
    } else if silent.is_some_and(|silent| silent >= situation.fence_grace) {
        Gone::FenceGracePassed
    } else {
        Gone::LeaseEnded
    };
    OwnerGone { owner: owner.clone(), how }
}

/// For the operator: the missing copies, and the remedy.
fn lost_copies(record: &DiskRecord, owner: &NodeRef) -> String {
    let mut holders: Vec<&NodeRef> = record.replicas.iter().collect();
    holders.insert(0, owner);
    let lost = match record.medium {
        Medium::Flash => {
            let nodes: Vec<&str> = holders.iter().map(|holder| &*holder.node).collect();
            format!(
                "on the flash of {}, and none of these nodes is there with it; start one of them",
                nodes.join(", ")
            )
        }
        _ => {
            let processes: Vec<String> = holders.iter().map(ToString::to_string).collect();
            format!(
                "in the memory of {}, and none of these processes answers; should one of them still run, bring it back",
                processes.join(", ")
            )
        }
    };
    format!(
        "the write log was {lost}; the backing is as of its last checkpoint; `weir disk export {} --accept-loss` opens it \
         without the writes that are missing",
        record.name
    )
}

/// The certain knowledge about a former owner at `now`, and the time at which there will be more, as far as only time is
/// missing.
///
/// The evidence was first seen at `seen`. Its right to serve ends, or has ended, at `right_over`, if that is known. The end
/// of a process is the end of its right. But its kernel may still have I/O in flight, and if that can be observed, no length
/// of time replaces the observation (P4).
#[must_use]
pub fn former_certainty(
    evidence: Evidence,
    seen: Nanos,
    right_over: Option<Nanos>,
    fence_grace: Duration,
    now: Nanos,
) -> (Former, Option<Nanos>) {
    let ends = match (evidence, right_over) {
        (Evidence::Released | Evidence::Ended | Evidence::Fenced, _) => return (Former::Stopped, None),
        (Evidence::UnderWay, _) => return (Former::Silent, None),
        (Evidence::Declared, over) => over.map_or(seen, |over| over.min(seen)) + fence_grace,
        (Evidence::None, Some(over)) if over <= now => over + fence_grace,
        (Evidence::None, over) => return (Former::Serving, over),
    };
    if ends > now { (Former::Silent, Some(ends)) } else { (Former::Stopped, None) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_cluster::placement::CLAIMED_WITHIN;
    use weir_cluster::records::{FormerOwner, NodeRecord, Policy, Source};

    const GRACE: Duration = Duration::from_secs(10);
    const NOW: Nanos = Nanos(100_000_000_000);

    fn node(name: &str) -> NodeRef {
        NodeRef::new(name, 1)
    }

    fn live(nodes: &[NodeRef]) -> Live {
        let record = |node: &NodeRef| NodeRecord {
            name: node.node.clone(),
            incarnation: node.incarnation,
            peer_address: ([127, 0, 0, 1], 1).into(),
            nbd_tcp: None,
            nbd_tls: None,
            nbd_unix: "/a".into(),
            api: "/b".into(),
            fault_domain: "default".into(),
            flash: node.flash,
            media: Vec::new(),
            load: 0,
            forwards: true,
        };
        nodes.iter().map(|node| (node.node.clone(), record(node))).collect()
    }

    fn disk(owner: Option<&str>, replicas: &[&str], mode: Mode) -> DiskRecord {
        let source = Source::File { name: "d".into() };
        let mut record = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
        record.owner = owner.map(node);
        record.replicas = replicas.iter().map(|name| node(name)).collect();
        (record.mode, record.epoch) = (mode, 5);
        record
    }

    struct Case {
        me: NodeRef,
        live: Live,
        local: Local,
        has_copy: bool,
        stopped: bool,
        gone_since: Option<Nanos>,
        vacant_since: Option<Nanos>,
    }

    impl Case {
        fn of(me: &str, alive: &[&str]) -> Case {
            let live = live(&alive.iter().map(|name| node(name)).collect::<Vec<_>>());
            Case {
                me: node(me),
                live,
                local: Local::Closed,
                has_copy: false,
                stopped: false,
                gone_since: None,
                vacant_since: None,
            }
        }
        fn decide(&self, record: Option<&DiskRecord>) -> Decision {
            let situation = Situation {
                me: &self.me,
                live: &self.live,
                barred: &BTreeSet::new(),
                local: self.local,
                has_copy: self.has_copy,
                owner_stopped: self.stopped,
                owner_gone_since: self.gone_since,
                vacant_since: self.vacant_since,
                now: NOW,
                fence_grace: GRACE,
            };
            decide(record, &situation)
        }
    }

    #[test]
    fn only_the_first_living_replica_takes_over() {
        let record = disk(Some("a"), &["b", "c"], Mode::WriteBack);
        let take_over = Decision::TakeOver(OwnerGone { owner: node("a"), how: Gone::LeaseEnded });
        assert_eq!(
            Case::of("b", &["a", "b", "c"]).decide(Some(&record)),
            Decision::Nothing,
            "the owner lives"
        );
        assert_eq!(Case::of("b", &["b", "c"]).decide(Some(&record)), take_over);
        assert_eq!(Case::of("c", &["b", "c"]).decide(Some(&record)), Decision::Nothing);
        assert_eq!(Case::of("c", &["c"]).decide(Some(&record)), take_over);
        // The first one is up, and does not act.
        let mut other = Case::of("c", &["b", "c"]);
        other.vacant_since = Some(Nanos(NOW.0 - CLAIMED_WITHIN.as_nanos() as u64 + 1));
        assert_eq!(other.decide(Some(&record)), Decision::Nothing);
        other.vacant_since = Some(Nanos(NOW.0 - CLAIMED_WITHIN.as_nanos() as u64));
        assert_eq!(other.decide(Some(&record)), take_over);
    }

    #[test]
    fn a_node_that_started_again_is_not_the_owner_and_not_the_replica() {
        let record = disk(Some("a"), &["b"], Mode::WriteBack);
        let mut case = Case::of("a", &["b"]);
        case.me.incarnation = 2;
        case.live.extend(live(&[NodeRef::new("a", 2)]));
        assert_eq!(case.decide(Some(&record)), Decision::Nothing, "b has the log and takes over");
        case.live.remove("b");
        let Decision::Unavailable(reason) = case.decide(Some(&record)) else { panic!("no copy is left") };
        assert!(reason.contains("a#1, b#1") && reason.contains("--accept-loss"), "{reason}");
        case.live.extend(live(&[NodeRef::new("b", 2)]));
        assert!(
            matches!(case.decide(Some(&record)), Decision::Unavailable(_)),
            "b's copy was in its former memory"
        );
    }

    #[test]
    fn write_back_without_replicas_is_never_taken_over() {
        let mut record = disk(Some("a"), &[], Mode::WriteBack);
        record.policy = Policy::WriteBack(0);
        let mut case = Case::of("b", &["b"]);
        case.stopped = true;
        assert!(matches!(case.decide(Some(&record)), Decision::Unavailable(_)));
    }

    #[test]
    fn a_copy_on_flash_counts_after_a_restart_if_it_is_there() {
        let on_flash =
            |name: &str, incarnation, flash| NodeRef::new(name, incarnation).with_flash(Some(flash));
        let mut record = disk(None, &[], Mode::WriteBack);
        (record.owner, record.replicas) = (Some(on_flash("a", 1, 10)), vec![on_flash("b", 1, 11)]);
        record.medium = Medium::Flash;
        let mut case = Case::of("b", &[]);
        case.me = on_flash("b", 2, 11);
        case.live = live(&[case.me.clone()]);
        let gone = OwnerGone { owner: node("a"), how: Gone::LeaseEnded };
        assert_eq!(
            case.decide(Some(&record)),
            Decision::Disclaim(gone.clone()),
            "its flash does not hold it"
        );
        case.has_copy = true;
        assert_eq!(case.decide(Some(&record)), Decision::TakeOver(gone.clone()));
        // The owner's own node comes after its replicas.
        case.live = live(&[on_flash("a", 2, 10), case.me.clone()]);
        assert_eq!(case.decide(Some(&record)), Decision::TakeOver(gone.clone()));
        case.live = live(&[on_flash("a", 2, 10)]);
        case.me = on_flash("a", 2, 10);
        assert_eq!(case.decide(Some(&record)), Decision::TakeOver(gone));
        case.has_copy = false;
        assert!(matches!(case.decide(Some(&record)), Decision::Unavailable(_)), "and nobody else has one");
        // A replica is there, and does not act.
        let long_ago = Some(Nanos(NOW.0 - 10 * CLAIMED_WITHIN.as_nanos() as u64));
        let mut beside = Case::of("a", &[]);
        (beside.me, beside.vacant_since) = (on_flash("a", 2, 10), long_ago);
        beside.live = live(&[on_flash("a", 2, 10), on_flash("b", 2, 11)]);
        assert_eq!(beside.decide(Some(&record)), Decision::Nothing);
        // Another flash, or a log in memory.
        case.live = live(&[on_flash("a", 2, 99)]);
        let Decision::Unavailable(reason) = case.decide(Some(&record)) else { panic!("no copy") };
        assert!(reason.contains("on the flash of a, b"), "{reason}");
        (record.medium, case.live) = (Medium::Ram, live(&[on_flash("a", 2, 10)]));
        assert!(matches!(case.decide(Some(&record)), Decision::Unavailable(_)));
    }

    #[test]
    fn write_through_is_taken_over_at_once() {
        let record = disk(Some("a"), &[], Mode::WriteThrough);
        let mut case = Case::of("b", &["b"]);
        case.gone_since = Some(Nanos(NOW.0 - 4_000_000_000));
        let ended = Decision::TakeOver(OwnerGone { owner: node("a"), how: Gone::LeaseEnded });
        assert_eq!(case.decide(Some(&record)), ended, "the grace is waited for once, behind the takeover");
        case.gone_since = Some(Nanos(NOW.0 - 10_000_000_000));
        let passed = Decision::TakeOver(OwnerGone { owner: node("a"), how: Gone::FenceGracePassed });
        assert_eq!(case.decide(Some(&record)), passed);
        (case.stopped, case.gone_since) = (true, Some(NOW));
        let stopped = Decision::TakeOver(OwnerGone { owner: node("a"), how: Gone::Stopped });
        assert_eq!(case.decide(Some(&record)), stopped);
    }

    /// A process that still has the disk open from an earlier tenure releases it first: its log is out of date.
    #[test]
    fn a_disk_that_was_passed_on_is_claimed_where_it_is_closed() {
        let record = DiskRecord { heir: Some(node("b")), ..disk(None, &[], Mode::WriteThrough) };
        assert_eq!(Case::of("a", &["a", "b"]).decide(Some(&record)), Decision::Nothing);
        assert_eq!(Case::of("b", &["a", "b"]).decide(Some(&record)), Decision::Claim);
        let mut open = Case::of("b", &["a", "b"]);
        open.local = Local::Open { epoch: 3 };
        assert_eq!(open.decide(Some(&record)), Decision::Release { epoch: 5 });
        // The heir is gone, or has started again: some node claims it, and one only.
        let mut restarted = live(&[node("a"), NodeRef::new("b", 2), node("c")]);
        for _ in 0..2 {
            let claims = |me: NodeRef| {
                let mut case = Case::of("a", &[]);
                (case.live, case.me) = (restarted.clone(), me);
                case.decide(Some(&record)) == Decision::Claim
            };
            let known: Vec<NodeRef> = restarted.values().map(|record| record.node_ref()).collect();
            assert_eq!(known.into_iter().filter(|me| claims(me.clone())).count(), 1);
            restarted.remove("b");
        }
        // The heir is up, and does not claim it.
        let mut other = Case::of("a", &["a", "b"]);
        other.vacant_since = Some(Nanos(NOW.0 - CLAIMED_WITHIN.as_nanos() as u64 + 1));
        assert_eq!(other.decide(Some(&record)), Decision::Nothing);
        other.vacant_since = Some(Nanos(NOW.0 - CLAIMED_WITHIN.as_nanos() as u64));
        assert_eq!(other.decide(Some(&record)), Decision::Claim);
        let free = DiskRecord { heir: None, ..record };
        assert_eq!(Case::of("b", &["a", "b"]).decide(Some(&free)), Decision::Nothing, "closed stays closed");
    }

    #[test]
    fn what_is_open_follows_the_record() {
        let mut case = Case::of("a", &["a", "b"]);
        let mine = disk(Some("a"), &["b"], Mode::WriteBack);
        let other = disk(Some("b"), &["a"], Mode::WriteBack);
        assert_eq!(case.decide(Some(&mine)), Decision::Open);
        for (epoch, decision) in [(4, Decision::Configure), (5, Decision::Nothing), (6, Decision::Nothing)] {
            case.local = Local::Open { epoch };
            assert_eq!(case.decide(Some(&mine)), decision, "own epoch {epoch}");
        }
        case.local = Local::Open { epoch: 4 };
        assert_eq!(case.decide(Some(&other)), Decision::Release { epoch: 5 });
        assert_eq!(case.decide(Some(&disk(None, &[], Mode::WriteThrough))), Decision::Release { epoch: 5 });
        assert_eq!(case.decide(None), Decision::Release { epoch: 5 });
        case.local = Local::Open { epoch: 6 };
        assert_eq!(case.decide(Some(&other)), Decision::Nothing, "an old view never takes a newer disk away");
        case.local = Local::Closed;
        assert_eq!(case.decide(None), Decision::Nothing);
    }

    /// Its node may not have heard that another one has owned it meanwhile, or may have been about to close it.
    #[test]
    fn a_disk_that_has_come_back_is_opened_anew() {
        let mut case = Case::of("a", &["a", "b"]);
        let mut record = disk(Some("a"), &["b"], Mode::WriteBack);
        record.former = vec![FormerOwner::silent(node("a"), 3), FormerOwner::silent(node("b"), 4)];
        case.local = Local::Open { epoch: 3 };
        assert_eq!(case.decide(Some(&record)), Decision::Release { epoch: 5 });
        case.local = Local::Closed;
        assert_eq!(case.decide(Some(&record)), Decision::Open);
        case.local = Local::Open { epoch: 5 };
        assert_eq!(case.decide(Some(&record)), Decision::Nothing);
        (record.epoch, case.local) = (6, Local::Open { epoch: 5 });
        assert_eq!(case.decide(Some(&record)), Decision::Configure, "they came before it");
    }

    #[test]
    fn the_grace_begins_when_the_right_has_ended() {
        let certain = |evidence, right_over| former_certainty(evidence, NOW, right_over, GRACE, NOW);
        assert_eq!(certain(Evidence::Released, None), (Former::Stopped, None));
        assert_eq!(certain(Evidence::None, None), (Former::Serving, None), "too few are sealed");
        let soon = NOW + Duration::from_secs(3);
        assert_eq!(certain(Evidence::None, Some(soon)), (Former::Serving, Some(soon)));
        assert_eq!(certain(Evidence::None, Some(NOW)), (Former::Silent, Some(NOW + GRACE)));
        let long_ago = Nanos(NOW.0 - 10_000_000_000);
        assert_eq!(certain(Evidence::None, Some(long_ago)), (Former::Stopped, None));
    }

    /// The end of a process is not the end of its I/O (P4).
    #[test]
    fn an_ended_process_is_waited_for_as_long_as_its_kernel_is_busy() {
        let certain = |evidence, right_over, now| former_certainty(evidence, NOW, right_over, GRACE, now);
        // No other machine can check: it has the grace of a silent owner, from the end of the process or of its right.
        let second = Duration::from_secs(1);
        for (right_over, from) in
            [(None, NOW), (Some(NOW + second), NOW), (Some(Nanos(NOW.0 - 1)), Nanos(NOW.0 - 1))]
        {
            let over = from + GRACE;
            assert_eq!(certain(Evidence::Declared, right_over, NOW + second), (Former::Silent, Some(over)));
            assert_eq!(certain(Evidence::Declared, right_over, over), (Former::Stopped, None));
        }
        // Here one sees it, and no time stands in for that.
        for now in [NOW, NOW + GRACE + second] {
            assert_eq!(certain(Evidence::UnderWay, Some(NOW), now), (Former::Silent, None));
            assert_eq!(certain(Evidence::Ended, None, now), (Former::Stopped, None));
        }
    }
}
