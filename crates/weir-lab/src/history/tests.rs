//! The fast check against the slow search, and against histories of which it is known what is wrong with them.

use std::time::Duration;

use fastrand::Rng;
use proptest::prelude::*;
use weir_block::Nanos;

use super::*;

fn operation(action: Action, value: u64, invoked: u64, completed: Option<u64>) -> Operation {
    Operation {
        client: 1,
        node: 1,
        connection: 1,
        register: 0,
        action,
        value,
        invoked: Nanos(invoked),
        completed: completed.map(Nanos),
    }
}

fn write(value: u64, invoked: u64, completed: u64) -> Operation {
    operation(Action::Write, value, invoked, Some(completed))
}

fn read(value: u64, invoked: u64, completed: u64) -> Operation {
    operation(Action::Read, value, invoked, Some(completed))
}

fn lost(value: u64, invoked: u64) -> Operation {
    operation(Action::Write, value, invoked, None)
}

fn judge(operations: &[Operation]) -> Judgement {
    History::new(operations.to_vec()).judge()
}

#[test]
fn what_may_happen_is_accepted() {
    for history in [
        &[][..],
        &[read(INITIAL, 1, 2), write(1, 3, 4), read(1, 5, 6)],
        // At the same time as a write, either value.
        &[write(1, 1, 10), read(INITIAL, 2, 3), read(1, 4, 5)],
        // Two writes at once, in either order.
        &[write(1, 1, 10), write(2, 1, 10), read(1, 11, 12)],
        &[write(1, 1, 10), write(2, 1, 10), read(2, 11, 12)],
        // One without an answer: never, late, and after another one.
        &[lost(1, 1), read(INITIAL, 50, 60)],
        &[lost(1, 1), read(INITIAL, 50, 60), read(1, 70, 80)],
        &[lost(1, 1), write(2, 5, 6), read(2, 7, 8), read(1, 9, 10)],
        // A read that was sent in time may be answered late.
        &[write(1, 1, 2), read(1, 3, 90), write(2, 4, 5), read(2, 6, 7)],
    ] {
        let judgement = judge(history);
        assert!(judgement.is_linearizable() && judgement.stale == 0, "{judgement}");
    }
}

#[test]
fn what_must_not_happen_is_explained() {
    let stale = [write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)];
    let never = [write(1, 1, 2), read(7, 3, 4)];
    let foreign = [read(FOREIGN, 3, 4)];
    let early = [read(1, 1, 2), write(1, 3, 4)];
    let back = [write(1, 1, 9), read(1, 2, 3), read(INITIAL, 4, 5)];
    let undone = [lost(1, 1), read(1, 2, 3), read(INITIAL, 4, 5)];
    let flips = [write(1, 1, 9), write(2, 1, 9), read(1, 10, 11), read(2, 12, 13), read(1, 14, 15)];
    for (history, says) in [
        (&stale[..], "0x1 was seen again although 0x2 had been there"),
        (&never, "nobody has written what was read"),
        (&foreign, "something that is no write's value"),
        (&early, "read before its write began"),
        (&back, "zeroes was seen again although 0x1"),
        (&undone, "zeroes was seen again although 0x1"),
        (&flips, "0x1"),
    ] {
        let judgement = judge(history);
        assert_eq!(judgement.violations, 1, "{judgement}");
        assert!(judgement.to_string().contains(says), "{judgement}");
    }
    assert_eq!([&stale[..], &back, &undone].map(|history| judge(history).stale), [1; 3]);
    let told = judge(&stale).to_string();
    assert!(told.contains("read of 0x1 by client 1 on n1 (connection 1), 0.000000 to 0.000000 s"), "{told}");
    let twice = judge(&[write(1, 1, 2), write(1, 3, 4)]);
    assert!(matches!(twice.first[..], [Violation::WrittenTwice(_)]));
}

/// A few operations within a short time, so that most of them touch: writes of 1, 2, 3 … and reads of some value.
fn few_operations() -> impl Strategy<Value = Vec<Operation>> {
    let one = (0..5_u8, 0..5_u64, 1..14_u64, 0..6_u64);
    prop::collection::vec(one, 0..9).prop_map(|drawn| {
        let mut written = 0;
        let draw = |(kind, value, invoked, takes)| match kind {
            0 | 1 => {
                written += 1;
                operation(Action::Write, written, invoked, (kind == 0).then_some(invoked + takes))
            }
            _ => read(value, invoked, invoked + takes),
        };
        drawn.into_iter().map(draw).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn the_fast_check_agrees_with_the_search(operations in few_operations()) {
        let judgement = judge(&operations);
        prop_assert_eq!(judgement.is_linearizable(), oracle::is_linearizable(&operations), "{}", judgement);
        prop_assert!(judgement.stale == 0 || !judgement.is_linearizable(), "a stale read is a violation");
    }
}

/// A history as a right disk would have it: each operation takes effect at some moment between sending and answer, or
/// later, or never, when there is no answer.
fn right_history(seed: u64, operations: u64) -> Vec<Operation> {
    const CLIENTS: u64 = 8;
    let mut random = Rng::with_seed(seed);
    let mut free_at = [1_u64; CLIENTS as usize];
    // Moment of effect and operation.
    let mut effects: Vec<(u64, Operation)> = (0..operations)
        .map(|number| {
            let client = number % CLIENTS;
            let invoked = free_at[client as usize] + random.u64(1..100);
            let completed = invoked + random.u64(2..1000);
            free_at[client as usize] = completed;
            let (action, value) = match random.bool() {
                true => (Action::Write, number + 1),
                false => (Action::Read, INITIAL),
            };
            let unanswered = action == Action::Write && random.u8(0..20) == 0;
            let late = if unanswered { random.u64(0..100_000) } else { 0 };
            let effect = random.u64(invoked + 1..completed) + late;
            let mut operation = operation(action, value, invoked, (!unanswered).then_some(completed));
            (operation.client, operation.register) = (client as u16, random.u64(0..64));
            (if unanswered && random.bool() { u64::MAX } else { effect }, operation)
        })
        .collect();
    effects.sort_unstable_by_key(|(effect, operation)| (*effect, operation.invoked));
    let mut disk = [INITIAL; 64];
    for (effect, operation) in &mut effects {
        let sector = &mut disk[operation.register as usize];
        match operation.action {
            Action::Write if *effect == u64::MAX => {}
            Action::Write => *sector = operation.value,
            Action::Read => operation.value = *sector,
        }
    }
    effects.into_iter().map(|(_, operation)| operation).collect()
}

#[test]
fn right_histories_are_accepted() {
    for seed in 0..50 {
        let judgement = judge(&right_history(seed, 2000));
        assert!(judgement.is_linearizable(), "seed {seed}: {judgement}");
    }
}

/// A read that returns what was overwritten long before it began, in a history as long as those of the soak.
#[test]
fn one_planted_stale_read_is_found_among_many_operations() {
    let mut operations = right_history(1, 200_000);
    let began = Nanos::now();
    assert!(judge(&operations).is_linearizable());
    let took = Nanos::now() - began;
    assert!(took < Duration::from_secs(5), "{took:?}");
    let fresh = operations.iter().rposition(|operation| operation.action == Action::Read).unwrap();
    let written = |operation: &&Operation| {
        operation.action == Action::Write
            && operation.completed.is_some()
            && operation.register == operations[fresh].register
    };
    operations[fresh].value = operations.iter().find(written).unwrap().value;
    let judgement = judge(&operations);
    assert_eq!((judgement.stale, judgement.first.len()), (1, 1), "{judgement}");
    let told = format!("{:#x} was used last by: read", operations[fresh].value);
    assert!(judgement.to_string().contains(&told), "{judgement}");
}
