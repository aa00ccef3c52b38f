//! Whom an event of the reactor is for.

use std::collections::BTreeMap;

use weir_block::OwnerId;

/// An object on the shard that gets events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The clients of the disk in this slot.
    Clients(usize),
    /// The layers of the disk in this slot.
    Layers(usize),
    /// The replica in this slot.
    Replica(usize),
    /// The disk in this slot, which is served to its owner.
    Served(usize),
    /// The flash store in this slot, which is not needed any more.
    Retired(usize),
}

/// Targets by owner number. Numbers are never reused, so a late event finds nothing; cleared entries take no room.
#[derive(Debug, Default)]
pub struct Dispatch {
    by_owner: BTreeMap<OwnerId, Target>,
}

impl Dispatch {
    /// Events of `owner` go to `target`.
    pub fn set(&mut self, owner: OwnerId, target: Target) {
        self.by_owner.insert(owner, target);
    }

    /// Events of `owner` go nowhere.
    pub fn clear(&mut self, owner: OwnerId) {
        self.by_owner.remove(&owner);
    }

    /// The target of events of `owner`.
    pub fn get(&self, owner: OwnerId) -> Option<Target> {
        self.by_owner.get(&owner).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_disks_that_are_gone_take_no_room() {
        let mut dispatch = Dispatch::default();
        for number in 1..=100_000 {
            let owner = OwnerId(number);
            dispatch.set(owner, Target::Clients(3));
            assert_eq!(dispatch.get(owner), Some(Target::Clients(3)));
            dispatch.clear(owner);
            assert_eq!(dispatch.get(owner), None, "a late event finds nothing");
        }
        assert!(dispatch.by_owner.is_empty());
    }
}
