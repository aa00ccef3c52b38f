//! The owner's side, rule by rule.

use super::*;

const TIMES: GrantTimes = GrantTimes { length: Duration::from_secs(5), margin: Duration::from_secs(1) };

fn at(seconds: u64) -> Nanos {
    Nanos(seconds * 1_000_000_000)
}

fn lease(number: u64, until: u64) -> SessionLease {
    SessionLease { number, until: at(until) }
}

fn replicas(names: &[&str]) -> GrantSet {
    GrantSet::Replicas(names.iter().map(|name| (*name).to_owned()).collect())
}

fn right(set: GrantSet) -> Right {
    Right::new(3, set, lease(1, 10), TIMES)
}

fn granted(member: &str, sent: u64) -> Event {
    Event::Granted { member: member.into(), epoch: 3, sent: at(sent), received: at(sent + 2) }
}

#[test]
fn either_leg_keeps_the_right() {
    let mut right = right(replicas(&["b", "c"]));
    assert_eq!(right.until(), at(10));
    assert_eq!(right.step(granted("b", 20)), at(10), "all members are needed");
    assert_eq!(right.step(granted("c", 21)), at(24), "counted from sending, less the margin");
    assert_eq!(right.step(Event::Session(lease(1, 30))), at(30));
    assert_eq!(right.step(Event::Session(lease(1, 0))), at(24));
}

#[test]
fn a_new_session_counts_once_the_record_was_read_since() {
    let mut right = right(replicas(&["b"]));
    assert_eq!(right.step(Event::Session(lease(2, 40))), Nanos(0));
    assert!(right.lacks_confirmation());
    assert_eq!(right.step(granted("b", 20)), at(24), "alive by a grant");
    assert_eq!(
        right.step(Event::Confirmed { session: 1, epoch: 3 }),
        at(24),
        "a read from before the session"
    );
    assert_eq!(right.step(Event::Confirmed { session: 2, epoch: 2 }), at(24), "a read of another tenure");
    assert_eq!(right.step(Event::Confirmed { session: 2, epoch: 3 }), at(40));
    assert!(!right.lacks_confirmation());
}

#[test]
fn a_set_in_doubt_must_also_grant() {
    let mut right = right(replicas(&["b"]));
    right.step(granted("b", 20));
    assert_eq!(right.step(Event::Proposed(replicas(&["c"]))), at(10));
    assert_eq!(right.step(granted("c", 19)), at(23));
    let committed = Event::Committed { epoch: 4, set: replicas(&["c"]) };
    assert_eq!(right.step(committed), at(23));
    assert_eq!(right.asks().collect::<Vec<_>>(), ["c"]);
    right.step(Event::Proposed(replicas(&["b"])));
    assert_eq!(right.step(Event::NotCommitted), at(23));
}

/// The change of guards may still commit: a takeover would then seal the new set.
#[test]
fn an_unchanged_record_does_not_resolve_a_doubt() {
    let mut right = right(replicas(&["b"]));
    right.step(granted("b", 20));
    right.step(Event::Proposed(replicas(&["c"])));
    assert_eq!(right.step(Event::Committed { epoch: 3, set: replicas(&["b"]) }), at(10));
    assert_eq!(right.asks().collect::<Vec<_>>(), ["b", "c"]);
    right.step(Event::Committed { epoch: 3, set: replicas(&["c"]) });
    assert_eq!(right.asks().collect::<Vec<_>>(), ["c"]);
}

#[test]
fn nothing_is_served_while_the_disk_is_handed_over_or_after_its_end() {
    let mut right = right(replicas(&["b"]));
    assert_eq!(right.step(Event::HandingOver), Nanos(0));
    assert_eq!(right.step(granted("b", 20)), Nanos(0));
    assert_eq!(right.step(Event::Kept), at(24));
    assert_eq!(right.step(Event::Ended), Nanos(0));
    assert_eq!(right.step(Event::Kept), Nanos(0));
    assert_eq!(right.step(Event::Session(lease(1, 90))), Nanos(0));
    assert!(!right.lacks_confirmation());
}

#[test]
fn a_grant_of_an_earlier_tenure_does_not_count() {
    let mut right = Right::new(7, replicas(&["b"]), lease(1, 10), TIMES);
    assert_eq!(right.step(granted("b", 20)), at(10));
    let now = Event::Granted { member: "x".into(), epoch: 7, sent: at(20), received: at(20) };
    assert_eq!(right.step(now), at(10), "nor does a non-member's");
}
