//! Whom an event of the reactor is for.

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

/// Places by owner number. Owner numbers are small and never given out twice, so a late event finds nothing.
#[derive(Debug, Default)]
pub struct Places {
    by_owner: Vec<Option<Place>>,
}

impl Places {
    /// Events of `owner` go to `place`.
    pub fn set(&mut self, owner: OwnerId, place: Place) {
        let index = owner.0 as usize;
        if self.by_owner.len() <= index {
            self.by_owner.resize(index + 1, None);
        }
        self.by_owner[index] = Some(place);
    }

    /// Events of `owner` go nowhere.
    pub fn clear(&mut self, owner: OwnerId) {
        if let Some(place) = self.by_owner.get_mut(owner.0 as usize) {
            *place = None;
        }
    }

    /// Where events of `owner` go.
    pub fn get(&self, owner: OwnerId) -> Option<Place> {
        self.by_owner.get(owner.0 as usize).copied().flatten()
    }
}
