//! The core alone, event by event: each case is a way in which a write was once lost, or a guest kept waiting.

use super::*;

const DEADLINE: Duration = Duration::from_secs(1);
const NOW: Nanos = Nanos(1_000_000_000_000);

struct Case {
    owner: Owner,
    effects: Vec<Effect>,
}

fn configuration(epoch: u64, replicas: &[&str], write_back: bool, wanted: Option<usize>) -> Configuration {
    let replicas = replicas.iter().map(|name| (*name).to_owned()).collect();
    Configuration {
        epoch,
        replicas,
        write_back,
        wanted_replicas: wanted,
        strict: false,
        misplaced: Vec::new(),
        leaving: Vec::new(),
    }
}

fn want(node: Option<&str>, connected: &[&str], exclude: &[&str]) -> Effect {
    Effect::WantPeer { node: node.map(Into::into), connected: set(connected), exclude: set(exclude) }
}

/// `write-back+1out` or the like: `b` is in the set, and where it may not be.
fn misplaced(epoch: u64) -> Configuration {
    let misplaced = set(&["b"]);
    Configuration { strict: true, misplaced, ..configuration(epoch, &["b"], true, Some(1)) }
}

impl Case {
    fn new(configuration: Configuration, freed: u64, last: u64, former_stopped: bool) -> Case {
        let former = if former_stopped { Former::Stopped } else { Former::Silent };
        let owner = Owner::new(configuration, freed, last, former, DEADLINE);
        Case { owner, effects: Vec::new() }
    }

    /// An owner in `write-back+1` with a replica on `b`, everything acknowledged up to `last`.
    fn replicated(last: u64) -> Case {
        let mut case = Case::new(configuration(1, &[], false, Some(1)), 0, 0, true);
        case.fill("b", 0);
        case.step(Event::Configured(configuration(2, &["b"], true, Some(1))));
        case.step(Event::Appended(last));
        case.confirm("b", last);
        assert_eq!(case.owner.marks().acknowledged, last);
        case.effects.clear();
        case
    }

    fn step(&mut self, event: Event) {
        self.at(NOW, event);
    }

    fn at(&mut self, now: Nanos, event: Event) {
        self.owner.step(now, event, &mut self.effects);
    }

    fn confirm(&mut self, node: &str, last: u64) {
        let epoch = self.owner.configuration().epoch;
        let freed = self.owner.marks().freed;
        let held = Held { epoch, last, freed, gap: freed, complete: true };
        self.step(Event::PeerConfirmed { node: node.into(), held });
    }

    /// A peer comes and gets everything up to `last`.
    fn fill(&mut self, node: &str, last: u64) {
        self.step(Event::PeerJoined(node.into()));
        self.confirm(node, last);
    }

    fn proposals(&mut self) -> Vec<(Vec<String>, bool)> {
        let proposal = |effect| match effect {
            Effect::Propose { replicas, write_back, .. } => Some((replicas, write_back)),
            _ => None,
        };
        std::mem::take(&mut self.effects).into_iter().filter_map(proposal).collect()
    }

    fn acknowledged(&self) -> u64 {
        self.owner.marks().acknowledged
    }
}

fn set(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn what_was_inherited_is_drained_before_write_through_is_asked_for() {
    let mut case = Case::new(configuration(3, &[], true, None), 5, 9, false);
    case.step(Event::Tick);
    assert_eq!(case.proposals(), [], "the log is the only copy");
    case.step(Event::Former(Former::Stopped));
    assert_eq!(case.owner.destage_limit(), 9);
    case.step(Event::Destaged(9));
    assert_eq!(case.proposals(), [(vec![], false)]);
}

/// P1: a backing that takes nothing must not cost a copy.
#[test]
fn a_replica_stays_until_what_was_acknowledged_is_drained() {
    let mut case = Case::replicated(4);
    assert_eq!(case.acknowledged(), 4);
    case.step(Event::PolicyRequested(None));
    case.step(Event::Destaged(3));
    for _ in 0..3 {
        case.step(Event::Tick);
    }
    assert_eq!(case.proposals(), [], "4 is only in the logs");
    case.step(Event::Destaged(4));
    assert_eq!(case.proposals(), [(vec![], false)]);
}

#[test]
fn what_a_replica_may_lack_is_not_seen_before_the_replica_is_out_of_the_set() {
    let mut case = Case::new(configuration(3, &["c"], true, Some(2)), 5, 9, true);
    case.step(Event::Tick);
    case.step(Event::PeerUnavailable);
    assert_eq!(case.owner.destage_limit(), 9, "c cannot be reached: draining");
    case.step(Event::Destaged(9));
    assert_eq!((case.acknowledged(), case.owner.marks().freed, case.owner.in_backing()), (5, 5, 9));
    assert_eq!(case.proposals(), [(vec![], false)]);
    case.step(Event::Configured(configuration(4, &[], false, Some(2))));
    assert_eq!((case.acknowledged(), case.owner.marks().freed), (9, 9));
}

#[test]
fn a_change_that_seemed_to_fail_still_counts() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerLost("b".into()));
    case.fill("c", 4);
    assert_eq!(case.proposals(), [(set(&["c"]), true)]);
    case.step(Event::NotConfigured);
    case.step(Event::Appended(5));
    case.step(Event::PeerLost("c".into()));
    case.fill("b", 5);
    assert_eq!(case.acknowledged(), 4, "c may be the set by now, and lacks record 5");
    case.at(NOW + RETRY, Event::Tick);
    assert_eq!(
        case.proposals(),
        [(set(&["b"]), true)],
        "asks again although b is the set as far as is known"
    );
    case.step(Event::Configured(configuration(3, &["b"], true, Some(1))));
    assert_eq!(case.acknowledged(), 5);
}

#[test]
fn a_late_refusal_of_an_old_change_does_not_end_a_new_one() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerLost("b".into()));
    case.fill("c", 4);
    case.step(Event::Configured(configuration(3, &["b"], true, Some(1))));
    case.confirm("c", 4);
    assert_eq!(case.proposals(), [(set(&["c"]), true), (set(&["c"]), true)], "once for each epoch");
    case.step(Event::NotConfigured);
    case.fill("b", 4);
    case.step(Event::Appended(5));
    case.confirm("b", 5);
    assert_eq!(case.acknowledged(), 4);
    case.confirm("c", 5);
    assert_eq!(case.acknowledged(), 5);
}

#[test]
fn while_write_through_may_be_committed_the_replicas_alone_are_not_enough() {
    let mut case = Case::replicated(4);
    case.step(Event::PolicyRequested(None));
    case.step(Event::Destaged(4));
    assert_eq!(case.proposals(), [(vec![], false)]);
    case.step(Event::PolicyRequested(Some(1)));
    case.step(Event::Appended(5));
    case.confirm("b", 5);
    assert_eq!(case.acknowledged(), 4);
    case.step(Event::Destaged(5));
    assert_eq!(case.acknowledged(), 5);
}

#[test]
fn only_what_a_peer_has_said_makes_it_ready() {
    let mut case = Case::new(configuration(1, &[], false, Some(1)), 0, 0, true);
    case.step(Event::Appended(5));
    case.step(Event::PeerJoined("b".into()));
    case.step(Event::Appended(8));
    case.step(Event::Destaged(8));
    case.confirm("b", 5);
    assert_eq!(case.acknowledged(), 8);
    assert_eq!(case.proposals(), [], "b's record 5 would cover record 8 in the backing");
    case.confirm("b", 8);
    assert_eq!(case.proposals(), [(set(&["b"]), true)]);
    case.step(Event::Appended(9));
    case.step(Event::Destaged(9));
    assert_eq!(case.acknowledged(), 8, "b may be in the set by now");
}

#[test]
fn who_keeps_records_older_than_a_bypassing_write_is_not_ready() {
    let mut case = Case::new(configuration(1, &[], false, Some(1)), 0, 0, true);
    case.step(Event::Appended(5));
    case.step(Event::Destaged(5));
    assert!(case.owner.bypasses());
    case.owner.bypassed();
    case.step(Event::PeerJoined("b".into()));
    for (freed, proposals) in [(0, vec![]), (5, vec![(set(&["b"]), true)])] {
        let held = Held { epoch: 1, last: 5, freed, gap: freed, complete: true };
        case.step(Event::PeerConfirmed { node: "b".into(), held });
        assert_eq!(case.proposals(), proposals);
    }
    assert!(!case.owner.bypasses());
}

#[test]
fn a_copy_from_an_older_set_is_not_taken_for_what_was_inherited() {
    let mut case = Case::new(configuration(7, &["d"], true, Some(1)), 5, 10, false);
    case.fill("c", 9);
    assert_eq!(case.proposals(), [], "record 10 may have been acknowledged");
    case.confirm("c", 10);
    assert_eq!(case.proposals(), [(set(&["c"]), true)]);
}

#[test]
fn a_peer_that_hangs_while_it_is_filled_is_given_up_and_another_one_asked() {
    let mut case = Case::new(configuration(1, &[], false, Some(1)), 0, 0, true);
    case.step(Event::Tick);
    case.step(Event::PeerJoined("b".into()));
    assert_eq!(case.owner.deadline(), NOW + DEADLINE);
    case.effects.clear();
    case.at(NOW + DEADLINE, Event::Tick);
    assert!(case.effects.contains(&Effect::DropPeer("b".into())));
    case.effects.clear();
    let again = case.owner.deadline();
    assert_eq!(again, NOW + DEADLINE + RETRY);
    case.at(again, Event::Tick);
    assert_eq!(case.effects, [want(None, &[], &["b"])]);
    assert_eq!(case.owner.deadline(), Nanos::NEVER);
}

#[test]
fn a_deadline_that_has_passed_is_over_after_a_tick() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerLost("b".into()));
    case.step(Event::PeerUnavailable);
    case.step(Event::Destaged(4));
    assert_eq!(case.proposals(), [(vec![], false)], "the registry takes its time");
    let retry = case.owner.deadline();
    case.at(retry, Event::Tick);
    assert!(case.owner.deadline() > retry);
    case.step(Event::Refused { node: "b".into(), epoch: 9 });
    assert_eq!(case.owner.deadline(), Nanos::NEVER);
}

#[test]
fn a_connection_in_the_making_survives_the_change_that_drops_its_node_from_the_set() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerLost("b".into()));
    case.step(Event::PeerUnavailable);
    case.at(NOW + RETRY, Event::Tick);
    assert!(case.effects.contains(&want(Some("b"), &[], &["b"])));
    case.effects.clear();
    case.step(Event::Configured(configuration(3, &[], false, Some(1))));
    assert!(!case.effects.contains(&Effect::DropPeer("b".into())), "nobody would be asked for again");
}

#[test]
fn a_doubtful_change_whose_members_are_gone_ends_in_write_through() {
    let mut case = Case::new(configuration(5, &[], true, Some(0)), 0, 0, true);
    case.step(Event::PolicyRequested(Some(1)));
    case.fill("b", 0);
    assert_eq!(case.proposals(), [(set(&["b"]), true)]);
    case.step(Event::NotConfigured);
    case.step(Event::PeerLost("b".into()));
    case.step(Event::Appended(1));
    assert_eq!(case.acknowledged(), 0);
    case.step(Event::PeerUnavailable);
    case.at(NOW + RETRY, Event::Tick);
    assert_eq!(case.proposals(), [(vec![], false)]);
}

#[test]
fn a_successor_gets_a_place_in_the_set_and_keeps_it() {
    let mut case = Case::replicated(10);
    case.step(Event::Successor(Some("c".into())));
    assert_eq!(case.effects, [want(Some("c"), &["b"], &["b"])]);
    case.effects.clear();
    case.step(Event::PeerJoined("c".into()));
    assert!(case.proposals().is_empty(), "not before its copy is complete");
    case.confirm("c", 10);
    assert_eq!(case.proposals(), [(vec!["c".to_owned()], true)]);
    case.step(Event::Appended(11));
    case.confirm("c", 11);
    assert_eq!(
        case.owner.marks().acknowledged,
        10,
        "the old set counts until the new one has committed (P3)"
    );
    case.step(Event::Configured(configuration(3, &["c"], true, Some(1))));
    case.confirm("c", 11);
    assert_eq!(case.owner.marks().acknowledged, 11);
    assert!(case.effects.contains(&Effect::DropPeer("b".into())), "{:?}", case.effects);
}

#[test]
fn a_successor_that_cannot_be_had_does_not_touch_the_set() {
    let mut case = Case::replicated(10);
    case.step(Event::Successor(Some("c".into())));
    case.effects.clear();
    case.step(Event::PeerLost("c".into()));
    assert!(case.proposals().is_empty());
    case.step(Event::Appended(11));
    case.confirm("b", 11);
    assert_eq!(case.owner.marks().acknowledged, 11);
    case.effects.clear();
    case.at(NOW + RETRY, Event::Tick);
    assert_eq!(case.effects, [want(Some("c"), &["b"], &["b", "c"])]);
    case.step(Event::Successor(None));
    case.step(Event::Tick);
    assert!(!case.owner.configuration().replicas.contains(&"c".to_owned()));
}

#[test]
fn a_member_of_the_set_keeps_its_place_though_another_confirms_the_new_epoch_first() {
    let mut case = Case::replicated(10);
    case.step(Event::Successor(Some("c".into())));
    case.fill("c", 10);
    case.effects.clear();
    case.step(Event::Configured(configuration(3, &["c"], true, Some(1))));
    case.confirm("b", 10);
    assert!(case.proposals().is_empty(), "b is on its way out");
    case.confirm("c", 10);
    assert!(case.proposals().is_empty());
    assert!(case.owner.is_settled());
}

#[test]
fn what_a_set_that_may_be_committed_lacks_is_not_destaged() {
    let mut case = Case::new(configuration(1, &[], false, Some(1)), 0, 0, true);
    case.fill("b", 0);
    assert_eq!(case.proposals(), [(set(&["b"]), true)]);
    case.step(Event::NotConfigured);
    case.step(Event::Appended(3));
    assert_eq!(case.owner.destage_limit(), 0, "b may take over, and has none of them");
    case.confirm("b", 2);
    assert_eq!(case.owner.destage_limit(), 2);
    case.step(Event::Configured(configuration(2, &[], false, Some(1))));
    assert_eq!(case.owner.destage_limit(), 3, "b is in no set");
}

#[test]
fn a_misplaced_replica_counts_until_another_has_its_place() {
    let mut case = Case::replicated(10);
    case.step(Event::Configured(misplaced(3)));
    assert_eq!(case.effects, [want(None, &["b"], &["b"])]);
    case.step(Event::Appended(11));
    assert_eq!(case.owner.marks().acknowledged, 10, "all of the set, b as well (P1)");
    case.confirm("b", 11);
    assert_eq!(case.owner.marks().acknowledged, 11, "the guest does not wait for the exchange");
    assert!(!case.owner.is_settled());
    case.effects.clear();
    case.fill("c", 11);
    assert_eq!(case.proposals(), [(set(&["c"]), true)]);
    let strict = Configuration { strict: true, ..configuration(4, &["c"], true, Some(1)) };
    case.step(Event::Configured(strict));
    case.confirm("c", 11);
    assert!(case.effects.contains(&Effect::DropPeer("b".into())), "{:?}", case.effects);
    assert!(case.owner.is_settled());
}

#[test]
fn a_strict_policy_that_cannot_be_had_ends_in_write_through_and_comes_back() {
    let mut case = Case::replicated(10);
    case.step(Event::Configured(misplaced(3)));
    case.confirm("b", 10);
    case.step(Event::PeerUnavailable);
    assert!(case.owner.drains(), "{:?}", case.owner.reason());
    assert!(case.proposals().is_empty(), "not before the log is drained");
    // Other changes meanwhile (the size) do not make the set any better.
    case.step(Event::Configured(misplaced(4)));
    case.confirm("b", 10);
    assert!(case.owner.drains());
    case.step(Event::Destaged(10));
    assert_eq!(case.proposals(), [(vec![], false)]);
    let strict = |epoch, replicas: &[&str], write_back| Configuration {
        strict: true,
        ..configuration(epoch, replicas, write_back, Some(1))
    };
    case.step(Event::Configured(strict(5, &[], false)));
    assert!(case.effects.contains(&Effect::DropPeer("b".into())), "it would be the first to come back");
    assert!(case.proposals().is_empty());
    case.at(NOW + RETRY, Event::Tick);
    assert_eq!(case.effects, [want(None, &[], &[])]);
    case.fill("c", 10);
    assert_eq!(case.proposals(), [(set(&["c"]), true)]);
}

/// A node that is drained keeps its copy until another node has one, also under a strict policy.
#[test]
fn a_replica_that_is_to_leave_stays_until_another_has_its_place() {
    for strict in [false, true] {
        let mut case = Case::replicated(10);
        let leaving =
            Configuration { strict, leaving: set(&["b"]), ..configuration(3, &["b"], true, Some(1)) };
        case.step(Event::Configured(leaving));
        assert_eq!(case.effects, [want(None, &["b"], &["b"])]);
        case.confirm("b", 10);
        case.step(Event::PeerUnavailable);
        assert!(!case.owner.drains() && !case.owner.is_settled(), "{}", case.owner.reason());
        case.step(Event::Appended(11));
        case.confirm("b", 11);
        assert_eq!(case.owner.marks().acknowledged, 11);
        case.at(NOW + RETRY, Event::Tick);
        case.fill("c", 11);
        assert_eq!(case.proposals(), [(set(&["c"]), true)]);
        case.step(Event::Configured(Configuration { strict, ..configuration(4, &["c"], true, Some(1)) }));
        case.confirm("c", 11);
        assert!(case.effects.contains(&Effect::DropPeer("b".into())), "{:?}", case.effects);
        assert!(case.owner.is_settled());
    }
}

/// A node that is about to be drained, its successor and one other node are all that there are: the disk stays in write-back.
#[test]
fn a_new_owner_asks_for_its_members_before_other_nodes() {
    for dirty in [0, 5] {
        let mut case = Case::new(configuration(3, &["a", "c"], true, Some(2)), 5, 5 + dirty, true);
        case.step(Event::Tick);
        assert_eq!(case.effects, [want(Some("a"), &[], &["a", "c"])]);
        case.effects.clear();
        case.fill("a", 5 + dirty);
        assert!(case.effects.contains(&want(Some("c"), &["a"], &["c", "a"])), "{:?}", case.effects);
        case.fill("c", 5 + dirty);
        assert!(!case.owner.drains() && !case.owner.is_stuck(), "{}", case.owner.reason());
        assert_eq!(case.proposals(), []);
    }
}

/// After a move away from a drained node, guests do not wait for the copy that replaces its copy.
#[test]
fn a_new_owner_goes_on_with_the_copy_of_a_node_that_is_to_leave() {
    let leaving =
        |epoch| Configuration { leaving: set(&["a"]), ..configuration(epoch, &["a"], true, Some(1)) };
    let mut case = Case::new(leaving(3), 5, 10, true);
    case.step(Event::Tick);
    case.fill("a", 10);
    assert!(!case.owner.is_stuck(), "{}", case.owner.reason());
    case.step(Event::PeerJoined("c".into()));
    case.step(Event::Appended(11));
    case.confirm("a", 11);
    assert_eq!(case.acknowledged(), 11);
    assert!(!case.effects.contains(&Effect::DropPeer("c".into())), "it is being filled");
    case.confirm("c", 11);
    assert_eq!(case.proposals(), [(set(&["c"]), true)]);
}

#[test]
fn more_copies_under_a_strict_policy_are_had_or_none_is() {
    for strict in [false, true] {
        let mut case = Case::replicated(10);
        case.step(Event::Configured(Configuration { strict, ..configuration(3, &["b"], true, Some(2)) }));
        case.step(Event::PolicyRequested(Some(2)));
        case.confirm("b", 10);
        case.step(Event::PeerUnavailable);
        assert_eq!(case.owner.drains(), strict, "write-back+2 goes on with the one copy that it has");
    }
}

/// From the node that the disk moves to, the set may look quite different: it is put right there.
#[test]
fn a_disk_on_its_way_to_a_successor_has_nothing_misplaced() {
    let mut case = Case::replicated(10);
    case.step(Event::Successor(Some("c".into())));
    case.fill("c", 10);
    case.step(Event::Configured(Configuration {
        strict: true,
        misplaced: set(&["c"]),
        ..configuration(3, &["c"], true, Some(1))
    }));
    case.confirm("c", 10);
    assert!(case.owner.is_settled(), "{}", case.owner.reason());
    case.effects.clear();
    case.step(Event::Successor(None));
    assert_eq!(case.effects, [want(None, &["c"], &["c"])], "it did not come to that");
}

/// It has lost its copy, and gets the newest records first: those are nothing to count on.
#[test]
fn a_member_that_is_filled_anew_counts_for_nothing_before_it_is_complete() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerJoined("b".into()));
    case.step(Event::Appended(6));
    let filling = |gap| Held { epoch: 2, last: 6, freed: 0, gap, complete: false };
    let confirmed = |gap| Event::PeerConfirmed { node: "b".into(), held: filling(gap) };
    case.step(confirmed(4));
    assert_eq!(case.acknowledged(), 4);
    assert!(case.owner.hurries(), "the guest waits for it");
    let before = case.owner.deadline();
    case.at(NOW + RETRY, confirmed(2));
    assert_eq!(case.owner.deadline(), before + RETRY, "a smaller gap is progress");
    case.step(Event::PeerConfirmed { node: "b".into(), held: Held { complete: true, ..filling(0) } });
    assert_eq!(case.acknowledged(), 6);
    assert!(!case.owner.hurries());
}

/// A copy on flash says what is in memory while it is filled, and then what is durable.
#[test]
fn what_a_copy_said_while_it_was_filled_is_not_what_it_holds() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerJoined("b".into()));
    case.step(Event::Appended(9));
    let held = Held { epoch: 2, last: 9, freed: 0, gap: 4, complete: false };
    case.step(Event::PeerConfirmed { node: "b".into(), held });
    case.confirm("b", 6);
    assert_eq!(case.acknowledged(), 6);
}

/// The registry committed the proposal, and the control plane says so only once.
#[test]
fn a_change_that_commits_while_the_owner_is_fenced_counts_once_it_is_not() {
    let mut case = Case::replicated(4);
    case.step(Event::PolicyRequested(Some(2)));
    case.fill("c", 4);
    assert_eq!(case.proposals(), [(set(&["b", "c"]), true)]);
    case.step(Event::Refused { node: "b".into(), epoch: 9 });
    case.step(Event::Configured(configuration(3, &["b", "c"], true, Some(2))));
    case.step(Event::Appended(5));
    assert_eq!(case.proposals(), [], "who is fenced asks for nothing");
    case.step(Event::StillOwner);
    assert_eq!(case.owner.configuration().epoch, 3);
    for node in ["b", "c"] {
        case.fill(node, 5);
    }
    assert_eq!(case.acknowledged(), 5);
}

#[test]
fn a_change_that_fails_while_the_owner_is_fenced_is_asked_for_again() {
    let mut case = Case::replicated(4);
    case.step(Event::PolicyRequested(None));
    case.step(Event::Destaged(4));
    assert_eq!(case.proposals(), [(vec![], false)]);
    case.step(Event::Refused { node: "b".into(), epoch: 9 });
    case.step(Event::NotConfigured);
    case.step(Event::StillOwner);
    case.at(NOW + RETRY, Event::Tick);
    assert_eq!(case.proposals(), [(vec![], false)]);
}

#[test]
fn a_former_owner_that_ends_while_its_successor_is_fenced_has_ended() {
    let mut case = Case::new(configuration(3, &["b"], true, Some(1)), 5, 9, false);
    case.fill("b", 9);
    assert_eq!((case.acknowledged(), case.owner.destage_limit()), (9, 5), "it may still write");
    case.step(Event::Refused { node: "b".into(), epoch: 9 });
    case.step(Event::Former(Former::Stopped));
    assert_eq!(case.owner.destage_limit(), 5, "nothing while another may own the disk");
    case.step(Event::StillOwner);
    assert_eq!(case.owner.destage_limit(), 9, "{}", case.owner.reason());
}

/// The requested peer is gone, or came in vain: a fenced owner takes no connection.
#[test]
fn an_owner_that_is_fenced_no_more_asks_again_for_the_peer_that_it_wanted() {
    let wants = |case: &Case| case.effects.iter().any(|effect| matches!(effect, Effect::WantPeer { .. }));
    for lost in [false, true] {
        let mut case = Case::replicated(4);
        case.step(Event::PeerLost("b".into()));
        case.at(NOW + RETRY, Event::Tick);
        assert!(wants(&case));
        case.effects.clear();
        case.at(NOW + RETRY, Event::Refused { node: "b".into(), epoch: 9 });
        if lost {
            case.at(NOW + RETRY * 4, Event::PeerLost("b".into()));
        }
        assert!(!wants(&case));
        case.at(NOW + RETRY * 4, Event::StillOwner);
        case.at(NOW + RETRY * 5, Event::Tick);
        assert!(wants(&case), "{:?}", case.effects);
        assert!(case.effects.contains(&Effect::DropPeer("b".into())), "its refusal was its last word");
    }
}

#[test]
fn flash_that_fails_while_the_owner_is_fenced_has_failed() {
    let mut case = Case::replicated(4);
    case.owner = case.owner.on_flash();
    case.step(Event::Refused { node: "b".into(), epoch: 9 });
    case.step(Event::StoreFailed("a write has not come back".into()));
    case.step(Event::StillOwner);
    assert!(case.owner.drains(), "{}", case.owner.reason());
}

#[test]
fn a_member_that_others_find_silent_is_replaced_before_the_next_write() {
    let mut case = Case::replicated(4);
    case.step(Event::PeerSilent("c".into()));
    assert_eq!(case.effects, [], "it is no member");
    case.step(Event::PeerSilent("b".into()));
    assert!(case.effects.contains(&want(None, &[], &["b"])), "{:?}", case.effects);
    assert_eq!(case.owner.reason(), "a replica is lost");
    case.effects.clear();
    case.step(Event::PeerSilent("b".into()));
    assert_eq!(case.effects, [], "the next word of it is about a connection that is gone");
    case.fill("c", 4);
    assert_eq!(case.proposals(), [(set(&["c"]), true)]);
}

#[test]
fn a_replica_that_a_change_takes_out_of_the_set_is_not_reported_as_lost() {
    let told =
        |case: &Case| case.effects.iter().any(|effect| matches!(effect, Effect::Tell("replica-lost", _)));
    let mut case = Case::replicated(0);
    case.step(Event::PolicyRequested(None));
    assert_eq!(case.proposals(), [(vec![], false)]);
    case.step(Event::PeerLost("b".into()));
    assert!(!told(&case), "its node has heard of the change first: {:?}", case.effects);
    let mut case = Case::replicated(0);
    case.step(Event::PeerLost("b".into()));
    assert!(told(&case));
}

/// Simulated, `states` 28,028: the owner after this one took records that it had appended meanwhile for acknowledged ones, and covered
/// newer writes of a former owner by them.
#[test]
fn nothing_is_appended_while_a_former_owner_serves() {
    let mut owner = Owner::new(configuration(2, &["b"], true, Some(1)), 5, 9, Former::Serving, DEADLINE);
    assert!(!owner.appends());
    owner.step(NOW, Event::Former(Former::Silent), &mut Vec::new());
    assert!(owner.appends(), "its writes have ended");
}

/// The owner after this one would find a log, and answer reads beside a former owner that writes to the backing.
#[test]
fn an_owner_without_a_log_stays_at_write_through_until_its_former_has_stopped() {
    let owner = Owner::new(configuration(2, &[], false, Some(1)), 0, 0, Former::Serving, DEADLINE);
    let mut case = Case { owner, effects: Vec::new() };
    case.fill("b", 0);
    assert_eq!(case.proposals(), []);
    case.step(Event::Former(Former::Silent));
    assert_eq!(case.proposals(), [], "its I/O may be in flight");
    case.step(Event::Former(Former::Stopped));
    assert_eq!(case.proposals(), [(set(&["b"]), true)]);
}
