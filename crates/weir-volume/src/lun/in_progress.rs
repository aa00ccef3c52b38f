//! The requests that a [`Router`](super::router::Router) has begun.
//!
//! The router looks a request up when it ends, and compares it with each one that begins. So the list is unordered (a removal moves one entry),
//! the requests' numbers are side by side, and counters of changes and redirected requests save most comparisons.

use std::slice;

use super::request::{Lacks, Range, Request, Route};

/// A request that is being done.
#[derive(Clone, Copy, Debug)]
pub struct UnderWay {
    /// The request.
    pub request: Request,
    /// Its way.
    pub route: Route,
    /// The range that no change by another route may touch meanwhile.
    pub locks: Range,
    /// Parts without an answer.
    pub(super) parts: usize,
    /// Of a change through the coordinator's filesystem.
    pub(super) lacks: Lacks,
    /// A part has failed: the request is done again.
    pub(super) failed: bool,
    /// Its client has been told that it failed. It may still be done by the former coordinator, so nothing that overlaps it begins (P4).
    pub(super) given_up: bool,
    /// Grows with each request that begins.
    number: u64,
}

impl UnderWay {
    /// A request that begins.
    pub(super) fn new(request: Request, route: Route, locks: Range, parts: usize, lacks: Lacks) -> UnderWay {
        UnderWay { request, route, locks, parts, lacks, failed: false, given_up: false, number: 0 }
    }
}

/// All of them, in any order.
#[derive(Debug, Default)]
pub(super) struct InProgress {
    all: Vec<UnderWay>,
    /// The requests' numbers, in the same order.
    ids: Vec<u64>,
    begun: u64,
    changes: usize,
    redirected: usize,
}

impl InProgress {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn iter(&self) -> slice::Iter<'_, UnderWay> {
        self.all.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut UnderWay> {
        self.all.iter_mut()
    }

    /// In the order of their start.
    pub fn in_order(&self) -> Vec<UnderWay> {
        let mut all = self.all.clone();
        all.sort_unstable_by_key(|one| one.number);
        all
    }

    /// Whether any of them may change the file.
    pub fn has_changes(&self) -> bool {
        self.changes > 0
    }

    /// Whether any of them is with the coordinator.
    pub fn has_redirected(&self) -> bool {
        self.redirected > 0
    }

    pub fn push(&mut self, one: UnderWay) {
        self.begun += 1;
        self.changes += usize::from(one.request.kind.changes());
        self.redirected += usize::from(one.route != Route::Direct);
        self.ids.push(one.request.id);
        self.all.push(UnderWay { number: self.begun, ..one });
    }

    /// Where a request is, if `which` is true of it.
    pub fn find(&self, id: u64, which: impl Fn(&UnderWay) -> bool) -> Option<usize> {
        let index = self.ids.iter().position(|other| *other == id)?;
        which(&self.all[index]).then_some(index)
    }

    /// The request at an index of [`InProgress::find`].
    pub fn at(&mut self, index: usize) -> &mut UnderWay {
        &mut self.all[index]
    }

    /// Removes the request at an index of [`InProgress::find`].
    pub fn remove(&mut self, index: usize) -> UnderWay {
        self.ids.swap_remove(index);
        let one = self.all.swap_remove(index);
        self.changes -= usize::from(one.request.kind.changes());
        self.redirected -= usize::from(one.route != Route::Direct);
        one
    }

    /// Removes all that are with the coordinator, and returns them in the order of their start.
    pub fn take_redirected(&mut self) -> Vec<UnderWay> {
        let (direct, redirected) =
            self.in_order().into_iter().partition(|one: &UnderWay| one.route == Route::Direct);
        self.replace(direct);
        redirected
    }

    /// Forgets those that were given up.
    pub fn forget_given_up(&mut self) {
        let kept = self.in_order().into_iter().filter(|one| !one.given_up).collect();
        self.replace(kept);
    }

    fn replace(&mut self, all: Vec<UnderWay>) {
        *self = InProgress { begun: self.begun, ..InProgress::default() };
        for one in all {
            self.push(one);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lun::request::Kind;

    fn one(id: u64, kind: Kind, route: Route) -> UnderWay {
        UnderWay::new(Request { id, kind, range: (0, 1) }, route, (0, 1), 1, Lacks::default())
    }

    #[test]
    fn it_keeps_count_and_the_order_of_the_start() {
        let mut list = InProgress::default();
        let all =
            [(1, Kind::Read, Route::Direct), (2, Kind::Write, Route::File), (3, Kind::Write, Route::Direct)];
        all.into_iter().for_each(|(id, kind, route)| list.push(one(id, kind, route)));
        list.push(one(4, Kind::Flush, Route::Block));
        let ids = |all: Vec<UnderWay>| all.iter().map(|one| one.request.id).collect::<Vec<_>>();
        assert!(list.find(2, |one| one.route == Route::Direct).is_none() && list.find(9, |_| true).is_none());
        let first = list.find(1, |_| true).expect("it is there");
        assert_eq!(list.remove(first).request.id, 1);
        assert_eq!(ids(list.in_order()), [2, 3, 4]);
        assert_eq!(ids(list.take_redirected()), [2, 4]);
        assert!(list.has_changes() && !list.has_redirected());
        list.at(0).given_up = true;
        list.forget_given_up();
        assert!(!list.has_changes() && list.len() == 0);
    }
}
