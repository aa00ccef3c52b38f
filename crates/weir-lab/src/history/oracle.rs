//! The slow search: tries every order of the operations on one register (Wing and Gong 1993). For tests of the fast check.

use super::{Action, INITIAL, Operation};

/// Whether some order of these operations on one register respects time and reads.
pub fn is_linearizable(operations: &[Operation]) -> bool {
    let relevant =
        |operation: &&Operation| operation.action == Action::Write || operation.completed.is_some();
    let operations: Vec<Operation> = operations.iter().filter(relevant).copied().collect();
    assert!(operations.len() <= 16, "the search would take for ever");
    search(&operations, 0, INITIAL)
}

/// Goes on after the operations in `done` (bit by bit), which have left `value`.
fn search(operations: &[Operation], done: u32, value: u64) -> bool {
    let left = || (0..operations.len()).filter(|index| done & (1 << index) == 0);
    // A write without an answer need not ever take effect.
    if left().all(|index| operations[index].completed.is_none()) {
        return true;
    }
    // An operation that was sent after the answer of another remaining one cannot be next.
    let first_answer = left().filter_map(|index| operations[index].completed).min();
    left().any(|index| {
        let next = &operations[index];
        if first_answer.is_some_and(|answer| answer < next.invoked) {
            return false;
        }
        let fits = next.action == Action::Write || next.value == value;
        fits && search(operations, done | 1 << index, next.value)
    })
}
