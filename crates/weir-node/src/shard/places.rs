//! Whom an event of the reactor is for.

use std::collections::BTreeMap;

use weir_block::OwnerId;

/// An object on the shard that gets events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The NBD connections of the disk in this slot.
    Clients(usize),
    /// The layers of the disk in this slot.
    Layers(usize),
    /// The replica in this slot.
    Replica(usize),
    /// The flash store in this slot, which is not needed any more.
    Retired(usize),
}

/// Places by owner number. Numbers are never given out twice, so a late event finds nothing; what is cleared takes no room.
#[derive(Debug, Default)]
pub struct Places {
    by_owner: BTreeMap<OwnerId, Place>,
}

impl Places {
    /// Events of `owner` go to `place`.
    pub fn set(&mut self, owner: OwnerId, place: Place) {
        self.by_owner.insert(owner, place);
    }

    /// Events of `owner` go nowhere.
    pub fn clear(&mut self, owner: OwnerId) {
        self.by_owner.remove(&owner);
    }

    /// Where events of `owner` go.
    pub fn get(&self, owner: OwnerId) -> Option<Place> {
        self.by_owner.get(&owner).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_disks_that_are_gone_take_no_room() {
        let mut places = Places::default();
        for number in 1..=100_000 {
            let owner = OwnerId(number);
            places.set(owner, Place::Clients(3));
            assert_eq!(places.get(owner), Some(Place::Clients(3)));
            places.clear(owner);
            assert_eq!(places.get(owner), None, "a late event finds nothing");
        }
        assert!(places.by_owner.is_empty());
    }
}
