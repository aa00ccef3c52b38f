//! The sampled blocks in the order of their last use: the number of others used since, in logarithmic time.
//!
//! Each use takes the next *position*; a Fenwick tree (Fenwick 1994) counts the positions that are still a block's last use. When
//! positions run out, they are renumbered. All memory is allocated when the stack is created.

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Positions per block of capacity: three of four uses need no renumbering.
const POSITIONS: usize = 4;

/// Fewest positions: below it a smaller tree is no faster.
const FEWEST: usize = 1024;

const NOBODY: u32 = u32::MAX;

/// The keys are already unique hashes of blocks. The table also uses the upper bits, which are all zero in a small sample.
#[derive(Clone, Copy, Debug, Default)]
struct Rotated(u64);

impl Hasher for Rotated {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 ^= value.rotate_left(32);
    }
}

/// The stack. `T` is the state of each block.
#[derive(Debug)]
pub(super) struct Stack<T> {
    slots: HashMap<u64, u32, BuildHasherDefault<Rotated>>,
    /// Entries that the table has room for.
    room: usize,
    blocks: Vec<Block<T>>,
    free: Vec<u32>,
    /// All hashes: the largest is removed first.
    largest: BinaryHeap<u64>,
    /// The slot of the block that was last used at each position.
    used: Box<[u32]>,
    tree: Box<[u32]>,
    next: usize,
    /// Positions until the next renumbering, a power of two.
    limit: usize,
    capacity: usize,
}

#[derive(Clone, Copy, Debug)]
struct Block<T> {
    position: u32,
    memory: T,
}

impl<T: Default + Copy> Stack<T> {
    /// For up to `capacity` blocks at a time, at least 1 and at most 2^24.
    pub fn new(capacity: usize) -> Stack<T> {
        assert!((1..=1 << 24).contains(&capacity), "the number of sampled blocks is 1 to 2^24");
        let positions = (capacity * POSITIONS).next_power_of_two().max(FEWEST);
        // Twice the room, so that removals are cleaned up in place and the table never grows.
        let slots = HashMap::with_capacity_and_hasher(2 * (capacity + 1), BuildHasherDefault::default());
        Stack {
            room: slots.capacity(),
            slots,
            blocks: Vec::with_capacity(capacity + 1),
            free: Vec::with_capacity(capacity + 1),
            largest: BinaryHeap::with_capacity(capacity + 1),
            used: vec![NOBODY; positions].into(),
            tree: vec![0; positions + 1].into(),
            next: 0,
            limit: FEWEST,
            capacity,
        }
    }

    pub fn len(&self) -> usize {
        self.largest.len()
    }

    pub fn is_over(&self) -> bool {
        self.len() > self.capacity
    }

    #[cfg(test)]
    pub fn largest(&self) -> Option<u64> {
        self.largest.peek().copied()
    }

    /// Bytes of memory, constant.
    pub fn memory(&self) -> usize {
        let entry = size_of::<(u64, u32)>() + 1;
        // Removed entries count as neither used nor free until they are cleaned up.
        self.room.max(self.slots.capacity()) * 8 / 7 * entry
            + self.blocks.capacity() * size_of::<Block<T>>()
            + self.free.capacity() * 4
            + self.largest.capacity() * 8
            + (self.used.len() + self.tree.len()) * 4
    }

    /// A block is used. Returns its state and, unless it is new, the number of other blocks used since.
    #[inline]
    pub fn touch(&mut self, hash: u64) -> (&mut T, Option<u32>) {
        if self.next == self.limit {
            self.renumber();
        }
        let position = self.next as u32;
        self.next += 1;
        let (slot, distance) = match self.slots.get(&hash) {
            Some(&slot) => {
                let before = self.blocks[slot as usize].position;
                let since = self.len() as u32 - self.sum(before);
                self.change(before, u32::MAX);
                self.used[before as usize] = NOBODY;
                (slot, Some(since))
            }
            None => (self.insert(hash), None),
        };
        self.blocks[slot as usize].position = position;
        self.used[position as usize] = slot;
        self.change(position, 1);
        (&mut self.blocks[slot as usize].memory, distance)
    }

    fn insert(&mut self, hash: u64) -> u32 {
        let fresh = Block { position: 0, memory: T::default() };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.blocks[slot as usize] = fresh;
                slot
            }
            None => {
                self.blocks.push(fresh);
                (self.blocks.len() - 1) as u32
            }
        };
        self.slots.insert(hash, slot);
        self.largest.push(hash);
        slot
    }

    /// Removes the block with the largest hash.
    pub fn forget_largest(&mut self) -> Option<u64> {
        let hash = self.largest.pop()?;
        let slot = self.slots.remove(&hash)?;
        let position = self.blocks[slot as usize].position;
        self.change(position, u32::MAX);
        self.used[position as usize] = NOBODY;
        self.free.push(slot);
        Some(hash)
    }

    /// Blocks whose last use is at or before `position`.
    #[inline]
    fn sum(&self, position: u32) -> u32 {
        let (mut node, mut sum) = (position as usize + 1, 0u32);
        while node > 0 {
            sum = sum.wrapping_add(self.tree[node]);
            node &= node - 1;
        }
        sum
    }

    /// Adds `by` (modulo 2^32) at a position.
    #[inline]
    fn change(&mut self, position: u32, by: u32) {
        let mut node = position as usize + 1;
        while node <= self.limit {
            self.tree[node] = self.tree[node].wrapping_add(by);
            node += node & node.wrapping_neg();
        }
    }

    /// Moves the blocks to the first positions, in their order. The tree is only as large as the sample needs.
    #[cold]
    fn renumber(&mut self) {
        let mut live = 0;
        for position in 0..self.next {
            let slot = self.used[position];
            if slot != NOBODY {
                self.used[position] = NOBODY;
                self.used[live] = slot;
                self.blocks[slot as usize].position = live as u32;
                live += 1;
            }
        }
        self.next = live;
        self.limit = (live * POSITIONS).next_power_of_two().clamp(FEWEST, self.used.len());
        for node in 1..=self.limit {
            // Ones below `live`: the number of them in a node's range.
            let covers = node & node.wrapping_neg();
            self.tree[node] = live.saturating_sub(node - covers).min(covers) as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compared with a list that is searched from its end.
        #[test]
        fn distances_are_those_of_a_list(
            uses in proptest::collection::vec((0u64..300, any::<bool>()), 1..3_000), capacity in 20usize..200,
        ) {
            let mut stack: Stack<u32> = Stack::new(capacity);
            let memory = stack.memory();
            let mut list: Vec<u64> = Vec::new();
            for (block, forgets) in uses {
                let hash = (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let slow = list.iter().rev().position(|&other| other == hash);
                let (memory, fast) = stack.touch(hash);
                prop_assert_eq!(fast, slow.map(|since| since as u32));
                prop_assert_eq!(*memory > 0, slow.is_some(), "a block that is known is remembered, a new one is not");
                *memory += 1;
                list.retain(|&other| other != hash);
                list.push(hash);
                if stack.is_over() || (forgets && block % 16 == 0) {
                    let largest = list.iter().max().copied();
                    prop_assert_eq!(stack.largest(), largest);
                    prop_assert_eq!(stack.forget_largest(), largest);
                    list.retain(|&other| Some(other) != largest);
                }
                prop_assert_eq!(stack.len(), list.len());
            }
            prop_assert_eq!(stack.memory(), memory, "nothing grows");
        }
    }

    #[test]
    fn it_goes_on_for_ever_in_the_same_memory() {
        let mut stack: Stack<[u64; 3]> = Stack::new(1_000);
        let memory = stack.memory();
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..200_000 {
            stack.touch(random.u64(..));
            while stack.is_over() {
                stack.forget_largest();
            }
        }
        assert_eq!((stack.memory(), stack.len()), (memory, 1_000));
        assert!(memory < 1_000 * 200, "{memory}");
    }
}
