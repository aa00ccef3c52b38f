//! Random walks over all changes of a disk's configuration, checked against a simple model.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use weir_cluster::ownership::*;
use weir_cluster::records::{DiskRecord, FormerOwner, Limit, Mode, NodeRef, Policy, Record, Source};
use weir_cluster::right::GrantSet;

/// An attempted change. Numbers name nodes; some attempts are valid, most are not.
#[derive(Clone, Debug)]
enum Attempt {
    Claim(u64),
    TakeOver {
        by: u64,
        how: Gone,
        right_evidence: bool,
    },
    AcceptLoss {
        by: u64,
        how: Gone,
    },
    HandOver {
        by: u64,
        lag: u64,
        to: u64,
    },
    Change {
        by: u64,
        lag: u64,
        replicas: Vec<u64>,
        write_back: bool,
        dirty: u64,
    },
    SetPolicy {
        owner: Option<u64>,
        policy: Policy,
    },
    Resize {
        owner: Option<u64>,
        blocks: u64,
        odd: bool,
    },
    SetLimit {
        owner: Option<u64>,
        limit: Option<Limit>,
    },
    Release {
        by: u64,
        lag: u64,
        dirty: u64,
    },
    PassOn {
        by: u64,
        lag: u64,
        dirty: u64,
        to: u64,
    },
    Forget {
        by: u64,
    },
    /// The process of this node restarts.
    Restart(u64),
}

fn attempt() -> impl Strategy<Value = Attempt> {
    let node = || 0_u64..4;
    let lag = || prop_oneof![4 => Just(0_u64), 1 => 1_u64..3];
    let dirty = || prop_oneof![2 => Just(0_u64), 1 => 1_u64..9000];
    let how = || prop::sample::select(vec![Gone::LeaseEnded, Gone::FenceGracePassed, Gone::Stopped]);
    let policy = prop::sample::select(Policy::all().collect::<Vec<_>>());
    prop_oneof![
        3 => node().prop_map(Attempt::Claim),
        4 => (node(), how(), prop::bool::weighted(0.8))
            .prop_map(|(by, how, right_evidence)| Attempt::TakeOver { by, how, right_evidence }),
        1 => (node(), how()).prop_map(|(by, how)| Attempt::AcceptLoss { by, how }),
        4 => (node(), lag(), node()).prop_map(|(by, lag, to)| Attempt::HandOver { by, lag, to }),
        8 => (node(), lag(), prop::collection::vec(node(), 0..4), any::<bool>(), dirty()).prop_map(
            |(by, lag, replicas, write_back, dirty)| Attempt::Change { by, lag, replicas, write_back, dirty }),
        2 => (prop::option::of(node()), policy).prop_map(|(owner, policy)| Attempt::SetPolicy { owner, policy }),
        1 => (prop::option::of(node()), prop_oneof![0_u64..9, 250_u64..300], any::<bool>())
            .prop_map(|(owner, blocks, odd)| Attempt::Resize { owner, blocks, odd }),
        1 => (prop::option::of(node()), prop::option::of(limit()))
            .prop_map(|(owner, limit)| Attempt::SetLimit { owner, limit }),
        2 => (node(), lag(), dirty()).prop_map(|(by, lag, dirty)| Attempt::Release { by, lag, dirty }),
        2 => (node(), lag(), dirty(), node())
            .prop_map(|(by, lag, dirty, to)| Attempt::PassOn { by, lag, dirty, to }),
        2 => node().prop_map(|by| Attempt::Forget { by }),
        2 => node().prop_map(Attempt::Restart),
    ]
}

fn limit() -> impl Strategy<Value = Limit> {
    let rate = || prop::option::of(prop_oneof![1 => Just(0), 3 => 1..=u64::MAX]);
    (rate(), rate(), 0..4_000_000_u64).prop_map(|(iops, bytes_per_second, burst_ms)| Limit {
        iops,
        bytes_per_second,
        burst_ms,
    })
}

fn disk(policy: Policy) -> DiskRecord {
    DiskRecord::new("d", "v", Source::File { name: "d".into() }, 1 << 20, 4096, policy)
}

struct Walk {
    record: DiskRecord,
    incarnations: [u64; 4],
}

impl Walk {
    fn node(&self, number: u64) -> NodeRef {
        NodeRef::new(format!("n{number}"), self.incarnations[number as usize])
    }

    fn evidence(&self, how: Gone, right: bool) -> OwnerGone {
        let owner = self.record.owner.clone().filter(|_| right).unwrap_or_else(|| NodeRef::new("nobody", 1));
        OwnerGone { owner, how }
    }

    fn try_it(&mut self, attempt: &Attempt) -> Result<DiskRecord, Refusal> {
        let record = &self.record;
        let caller_node = |number: &Option<u64>| number.map(|number| self.node(number));
        fn caller(node: Option<&NodeRef>, epoch: u64) -> Caller<'_> {
            node.map_or(Caller::Other, |node| Caller::Owner { node, epoch })
        }
        let epoch = record.epoch;
        match attempt {
            Attempt::Claim(by) => claim_free(record, &self.node(*by)),
            Attempt::TakeOver { by, how, right_evidence } => {
                take_over(record, &self.node(*by), &self.evidence(*how, *right_evidence))
            }
            Attempt::AcceptLoss { by, how } => {
                accept_loss(record, &self.node(*by), &self.evidence(*how, true))
            }
            Attempt::HandOver { by, lag, to } => {
                hand_over(record, &self.node(*by), epoch.saturating_sub(*lag), &self.node(*to))
            }
            Attempt::Change { by, lag, replicas, write_back, dirty } => {
                let replicas: Vec<_> = replicas.iter().map(|number| self.node(*number)).collect();
                let mode = if *write_back { Mode::WriteBack } else { Mode::WriteThrough };
                change_replicas(record, &self.node(*by), epoch.saturating_sub(*lag), &replicas, mode, *dirty)
            }
            Attempt::SetPolicy { owner, policy } => {
                set_policy(record, caller(caller_node(owner).as_ref(), epoch), *policy)
            }
            Attempt::Resize { owner, blocks, odd } => resize(
                record,
                caller(caller_node(owner).as_ref(), epoch),
                blocks * 4096 + u64::from(*odd) * 512,
            ),
            Attempt::SetLimit { owner, limit } => {
                set_limit(record, caller(caller_node(owner).as_ref(), epoch), *limit)
            }
            Attempt::Release { by, lag, dirty } => {
                release(record, &self.node(*by), epoch.saturating_sub(*lag), *dirty)
            }
            Attempt::PassOn { by, lag, dirty, to } => {
                let (by, to) = (self.node(*by), self.node(*to));
                pass_on(record, &by, epoch.saturating_sub(*lag), *dirty, &to)
            }
            Attempt::Forget { by } => {
                let former = record.former.first().cloned();
                let former = former.unwrap_or(FormerOwner::silent(self.node(0), 0));
                forget_former(record, &self.node(*by), epoch, &former)
            }
            Attempt::Restart(number) => {
                self.incarnations[*number as usize] += 1;
                Ok(self.record.clone())
            }
        }
    }

    /// Invariants between a record and its successor, for every attempt.
    fn check(&mut self, attempt: &Attempt, next: &DiskRecord) {
        let old = &self.record;
        next.check().unwrap();
        let owner_before = old.owner.as_ref();
        match attempt {
            Attempt::Restart(_) => return assert_eq!(old, next),
            Attempt::Forget { .. } => {
                let unchanged = DiskRecord { former: old.former.clone(), ..next.clone() };
                return assert_eq!(*old, unchanged, "only the former owners change");
            }
            Attempt::Claim(_) => assert_eq!(owner_before, None, "never over a living owner"),
            Attempt::TakeOver { by, right_evidence, .. } => {
                assert!(right_evidence, "never on wrong evidence");
                assert!(old.effective() != Policy::WriteBack(0), "never loses the only copy by itself");
                if old.mode == Mode::WriteBack {
                    assert!(old.replicas.contains(&self.node(*by)), "only with the whole log");
                }
            }
            Attempt::AcceptLoss { how, .. } => {
                assert_ne!(*how, Gone::LeaseEnded, "never with an active writer")
            }
            Attempt::HandOver { by, lag, to } => {
                assert_eq!((owner_before, *lag), (Some(&self.node(*by)), 0), "only the owner");
                assert!(old.replicas.contains(&self.node(*to)), "only to a holder of the whole log");
                assert_eq!(next.owner, Some(self.node(*to)));
                assert!(next.replicas.contains(&self.node(*by)), "its copy stays one");
                assert_eq!(
                    (old.replicas.len(), old.mode),
                    (next.replicas.len(), next.mode),
                    "as many copies"
                );
            }
            Attempt::Change { by, lag, write_back, dirty, .. } => {
                assert_eq!(
                    (owner_before, *lag),
                    (Some(&self.node(*by)), 0),
                    "only the owner, only in its epoch"
                );
                assert!(*write_back || *dirty == 0, "never leaves dirty data behind");
                if next.effective() == Policy::WriteBack(0) {
                    assert_eq!(next.policy, Policy::WriteBack(0), "never fewer copies silently (P1)");
                }
            }
            Attempt::SetPolicy { owner, .. } | Attempt::Resize { owner, .. } => {
                assert!(next.size >= old.size, "a disk never shrinks");
                assert_eq!(owner_before, owner.map(|number| self.node(number)).as_ref());
            }
            Attempt::SetLimit { owner, limit } => {
                assert_eq!(owner_before, owner.map(|number| self.node(number)).as_ref());
                let unchanged = DiskRecord { limit: old.limit, epoch: old.epoch, ..next.clone() };
                assert_eq!((old, next.limit), (&unchanged, *limit), "only the limit changes");
            }
            Attempt::Release { by, lag, dirty } => {
                assert_eq!((owner_before, *lag, *dirty), (Some(&self.node(*by)), 0, 0));
                assert_eq!((&next.owner, &next.heir), (&None, &None));
            }
            Attempt::PassOn { by, lag, dirty, to } => {
                assert_eq!((owner_before, *lag, *dirty), (Some(&self.node(*by)), 0, 0));
                assert_eq!((&next.owner, &next.heir), (&None, &Some(self.node(*to))));
            }
        }
        if !matches!(attempt, Attempt::SetLimit { .. }) {
            assert_eq!(next.limit, old.limit, "a limit survives whatever happens to the owner");
        }
        assert!(next.owner.is_none() || next.heir.is_none(), "an owner has no heir");
        assert_eq!(next.epoch, old.epoch + 1, "each change raises the epoch by exactly one");
        // An owner that lost the disk without releasing it stays recorded until it is removed (P4).
        if let Some(owner) = owner_before
            && next.owner.as_ref() != Some(owner)
            && !matches!(attempt, Attempt::Release { .. } | Attempt::PassOn { .. })
        {
            let set = Some(old.grant_set()).filter(|set| !set.members().is_empty());
            assert!(next.former.contains(&FormerOwner { node: owner.clone(), epoch: old.epoch, set }));
        }
        let kept = old.former.iter().filter(|former| Some(&former.node) != owner_before);
        assert!(kept.into_iter().all(|former| next.former.contains(former)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_walks_keep_every_rule(count in 0_u8..3, attempts in prop::collection::vec(attempt(), 1..120)) {
        let record = disk(Policy::WriteBack(count));
        let mut walk = Walk { record, incarnations: [1; 4] };
        for attempt in attempts {
            // A refusal returns no record.
            if let Ok(next) = walk.try_it(&attempt) {
                walk.check(&attempt, &next);
                // The record survives encoding.
                prop_assert_eq!(&DiskRecord::decode(&next.encode()).unwrap(), &next);
                walk.record = next;
            }
        }
    }
}

fn gone(node: &NodeRef, how: Gone) -> OwnerGone {
    OwnerGone { owner: node.clone(), how }
}

#[test]
fn the_life_cycle_of_a_write_back_disk() {
    let [a, b, c] = ["a", "b", "c"].map(|name| NodeRef::new(name, 1));
    let owned = claim_free(&disk(Policy::WriteBack(2)), &a).unwrap();
    assert_eq!((owned.effective(), owned.epoch), (Policy::WriteThrough, 1));
    let two = change_replicas(&owned, &a, 1, &[b.clone(), c.clone()], Mode::WriteBack, 0).unwrap();
    assert_eq!(two.effective(), Policy::WriteBack(2));
    // The lease's end is sufficient in write-back: the replicas refuse the owner from now on.
    let taken = take_over(&two, &b, &gone(&a, Gone::LeaseEnded)).unwrap();
    assert_eq!((taken.owner.as_ref(), &*taken.replicas, taken.epoch), (Some(&b), &[c.clone()][..], 3));
    // The takeover keeps the set whose grants may still uphold the former owner's right.
    let set = GrantSet::Replicas(vec!["b".into(), "c".into()]);
    let former = FormerOwner { node: a.clone(), epoch: 2, set: Some(set) };
    assert_eq!(taken.former, std::slice::from_ref(&former));
    let silent = silence_former(&taken, &b, 3, &former).unwrap();
    assert_eq!((&*silent.former, silent.epoch), (&[FormerOwner::silent(a.clone(), 2)][..], 3));
    // Both the old owner and a second taker come too late.
    let fenced = change_replicas(&taken, &a, 2, &[], Mode::WriteThrough, 0).unwrap_err();
    assert_eq!(fenced, Refusal::Fenced { owner: Some(b.clone()), epoch: 3 });
    let late = take_over(&taken, &c, &gone(&a, Gone::Stopped)).unwrap_err();
    assert_eq!(late, Refusal::OtherEvidence { about: a.clone(), owner: b.clone() });
    // The next owner keeps both former owners in the record.
    let again = take_over(&taken, &c, &gone(&b, Gone::LeaseEnded)).unwrap();
    assert_eq!(again.former.len(), 2);
    assert_eq!(again.effective(), Policy::WriteBack(0));
    let alone = take_over(&again, &a, &gone(&c, Gone::Stopped)).unwrap_err();
    assert_eq!(alone, Refusal::OnlyCopyLost { owner: c.clone() });
    assert!(alone.to_string().contains("the only copy of the log was on c#1"), "{alone}");
    let unsure = accept_loss(&again, &a, &gone(&c, Gone::LeaseEnded)).unwrap_err();
    assert_eq!(unsure, Refusal::MayStillWrite { owner: c.clone() });
    let lossy = accept_loss(&again, &a, &gone(&c, Gone::Stopped)).unwrap();
    assert_eq!((lossy.owner.as_ref(), lossy.effective()), (Some(&a), Policy::WriteThrough));
}

/// A node that a drain has emptied long ago does not get disks that have had another life since.
#[test]
fn the_home_of_a_disk_ends_with_the_stay_elsewhere() {
    let [a, b] = ["a", "b"].map(|name| NodeRef::new(name, 1));
    let owned = claim_free(&disk(Policy::WriteBack(1)), &a).unwrap();
    let owned = change_replicas(&owned, &a, 1, std::slice::from_ref(&b), Mode::WriteBack, 0).unwrap();
    let away = DiskRecord { home: Some("c".into()), ..owned };
    let ended = [
        release(&away, &a, 2, 0),
        pass_on(&away, &a, 2, 0, &b),
        take_over(&away, &b, &gone(&a, Gone::Stopped)),
        accept_loss(&away, &b, &gone(&a, Gone::Stopped)),
        hand_over(&away, &a, 2, &b),
        forget_home(&away, &a, 2),
    ];
    assert!(ended.iter().all(|next| next.as_ref().unwrap().home.is_none()), "{ended:?}");
    assert_eq!(forget_home(&away, &a, 2).unwrap(), DiskRecord { home: None, ..away.clone() }, "only that");
    assert!(forget_home(&away, &b, 2).is_err() && forget_home(&away, &a, 1).is_err());
    let kept =
        [set_policy(&away, Caller::Owner { node: &a, epoch: 2 }, Policy::WriteThrough), renew(&away, &a, 2)];
    assert!(kept.iter().all(|next| next.as_ref().unwrap().home.as_deref() == Some("c")), "{kept:?}");
}

#[test]
fn a_restarted_replica_has_no_copy() {
    let [a, b] = ["a", "b"].map(|name| NodeRef::new(name, 1));
    let owned = claim_free(&disk(Policy::WriteBack(1)), &a).unwrap();
    let one = change_replicas(&owned, &a, 1, std::slice::from_ref(&b), Mode::WriteBack, 0).unwrap();
    let refused = take_over(&one, &NodeRef::new("b", 2), &gone(&a, Gone::Stopped)).unwrap_err();
    assert!(matches!(refused, Refusal::NotAReplica { .. }), "{refused}");
}

#[test]
fn a_write_through_disk_is_taken_over_at_once_and_served_later() {
    let [a, b] = ["a", "b"].map(|name| NodeRef::new(name, 1));
    let owned = claim_free(&disk(Policy::WriteThrough), &a).unwrap();
    let guarded = set_guards(&owned, &a, 1, &["b".into(), "c".into()]).unwrap();
    assert_eq!(guarded.epoch, 1);
    for how in [Gone::LeaseEnded, Gone::FenceGracePassed, Gone::Stopped] {
        let taken = take_over(&guarded, &b, &gone(&a, how)).unwrap();
        assert_eq!((taken.owner, taken.guards.len()), (Some(b.clone()), 0), "it chooses its own guards");
        let set = GrantSet::Guards(vec!["b".into(), "c".into()]);
        assert_eq!(taken.former, [FormerOwner { node: a.clone(), epoch: 1, set: Some(set) }]);
    }
    assert_eq!(renew(&guarded, &a, 1).unwrap().epoch, 2);
}

#[test]
fn the_last_epoch_and_broken_records_are_refused() {
    let a = NodeRef::new("a", 1);
    let mut last = disk(Policy::WriteThrough);
    last.epoch = u64::MAX;
    assert!(matches!(claim_free(&last, &a), Err(Refusal::BadRecord { .. })));
    let mut broken = disk(Policy::WriteThrough);
    broken.logical_block = 7;
    assert!(matches!(claim_free(&broken, &a), Err(Refusal::BadRecord { .. })));
}

/// Following ends with the owner that allowed it, and does not change the epoch.
#[test]
fn the_owner_sets_the_follower_and_a_move_clears_it() {
    let (a, b) = (NodeRef::new("a", 1), NodeRef::new("b", 1));
    let owned = claim_free(&disk(Policy::WriteBack(1)), &a).unwrap();
    let owned =
        change_replicas(&owned, &a, owned.epoch, std::slice::from_ref(&b), Mode::WriteBack, 0).unwrap();
    let epoch = owned.epoch;
    let followed = set_follower(&owned, &a, epoch, Some(&b)).unwrap();
    assert_eq!((followed.follower.as_ref(), followed.epoch), (Some(&b), epoch));
    assert_eq!(set_follower(&followed, &a, epoch, None).unwrap(), owned);
    assert!(matches!(set_follower(&owned, &b, epoch, Some(&b)), Err(Refusal::Fenced { .. })));
    assert!(matches!(set_follower(&owned, &a, epoch - 1, Some(&b)), Err(Refusal::Fenced { .. })));
    assert!(matches!(
        set_follower(&owned, &a, epoch, Some(&NodeRef::new("a", 2))),
        Err(Refusal::Owned { .. })
    ));
    let gone = OwnerGone { owner: a.clone(), how: Gone::Stopped };
    let moved = hand_over(&followed, &a, epoch, &b).unwrap();
    let taken = take_over(&followed, &b, &gone).unwrap();
    let released = release(&followed, &a, epoch, 0).unwrap();
    assert!([moved, taken, released].iter().all(|next| next.follower.is_none()));
    // The owner may die and another node take over: the guest still moves to b.
    let c = NodeRef::new("c", 1);
    let elsewhere = [b.clone(), c.clone()];
    let wider = change_replicas(&followed, &a, epoch, &elsewhere, Mode::WriteBack, 0).unwrap();
    assert_eq!(take_over(&wider, &c, &gone).unwrap().follower, Some(b));
    assert_eq!(
        hand_over(&wider, &a, wider.epoch, &c).unwrap().follower,
        None,
        "the disk was moved elsewhere"
    );
}
