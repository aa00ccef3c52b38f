//! The part of a file's layout that the owner of the disk may use on the LUN itself.

use std::collections::BTreeMap;

/// The owner's lease of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lease {
    /// None: the coordinator does the I/O.
    Nothing,
    /// The file has no blocks there, and reads as zeroes without I/O.
    Hole,
    /// Written blocks that only this file has, from this byte of the LUN: for reading and writing.
    ReadWrite(u64),
    /// Written blocks that other files share, from this byte of the LUN: for reading.
    ReadOnly(u64),
}

impl Lease {
    /// The lease of the rest of a range, `by` bytes further.
    fn advanced(self, by: u64) -> Lease {
        match self {
            Lease::ReadWrite(at) => Lease::ReadWrite(at + by),
            Lease::ReadOnly(at) => Lease::ReadOnly(at + by),
            other => other,
        }
    }
}

/// A range of a file, in bytes, and its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub start: u64,
    /// The byte behind the last one.
    pub end: u64,
    /// Its lease.
    pub lease: Lease,
}

impl Piece {
    /// The part of it within a range, if there is one.
    #[must_use]
    pub fn within(self, (start, end): (u64, u64)) -> Option<Piece> {
        let from = self.start.max(start);
        let piece = Piece { start: from, end: self.end.min(end), lease: self.lease };
        (piece.start < piece.end).then(|| Piece { lease: self.lease.advanced(from - self.start), ..piece })
    }

    fn continues(self, before: Piece) -> bool {
        before.end == self.start && before.lease.advanced(before.end - before.start) == self.lease
    }
}

/// The leases of one file. What it does not mention is [`Lease::Nothing`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    /// By their starts; adjacent ones that continue each other are one.
    pieces: BTreeMap<u64, Piece>,
}

impl Leases {
    /// The pieces of a range, without gaps, in order.
    pub fn of(&self, (start, end): (u64, u64)) -> impl Iterator<Item = Piece> {
        let end = end.max(start);
        let first = self.pieces.range(..=start).next_back().and_then(|(_, piece)| piece.within((start, end)));
        // One piece mostly has the whole range: then one descent of the tree is enough.
        let behind = first.map_or(start, |piece| piece.end);
        let rest = (behind < end).then(|| self.pieces.range(behind..end)).into_iter().flatten();
        let rest = rest.filter_map(move |(_, piece)| piece.within((start, end)));
        let mut known = first.into_iter().chain(rest);
        let (mut at, mut next) = (start, known.next());
        std::iter::from_fn(move || {
            let piece = match next {
                Some(piece) if piece.start == at => {
                    next = known.next();
                    piece
                }
                Some(piece) => Piece { start: at, end: piece.start, lease: Lease::Nothing },
                None if at < end => Piece { start: at, end, lease: Lease::Nothing },
                None => return None,
            };
            at = piece.end;
            Some(piece)
        })
    }

    /// The lease of a range that is not empty, if one piece has all of it.
    #[must_use]
    pub fn whole(&self, (start, end): (u64, u64)) -> Option<Lease> {
        let (_, piece) = self.pieces.range(..=start).next_back()?;
        (start < end && piece.end >= end).then(|| piece.lease.advanced(start - piece.start))
    }

    /// Replaces what is known of a piece's range.
    pub fn set(&mut self, piece: Piece) {
        if piece.start >= piece.end {
            return;
        }
        self.clear((piece.start, piece.end));
        if piece.lease == Lease::Nothing {
            return;
        }
        let mut piece = piece;
        if let Some((_, before)) = self.pieces.range(..piece.start).next_back()
            && piece.continues(*before)
        {
            piece = Piece { start: before.start, lease: before.lease, ..piece };
        }
        if let Some(after) = self.pieces.get(&piece.end).copied()
            && after.continues(piece)
        {
            self.pieces.remove(&after.start);
            piece.end = after.end;
        }
        self.pieces.insert(piece.start, piece);
    }

    /// Gives a range up.
    pub fn clear(&mut self, (start, end): (u64, u64)) {
        if start >= end {
            return;
        }
        let first = self.pieces.range(..start).next_back().map(|(_, piece)| *piece);
        let rest = self.pieces.range(start..end).map(|(_, piece)| *piece);
        let touched: Vec<Piece> = first.into_iter().filter(|piece| piece.end > start).chain(rest).collect();
        for piece in touched {
            self.pieces.remove(&piece.start);
            for kept in [piece.within((0, start)), piece.within((end, u64::MAX))].into_iter().flatten() {
                self.pieces.insert(kept.start, kept);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 40;

    /// The same, a byte at a time.
    #[derive(Clone)]
    struct Slow([Lease; SIZE as usize]);

    impl Slow {
        fn set(&mut self, piece: Piece) {
            for at in piece.start..piece.end {
                self.0[at as usize] = piece.lease.advanced(at - piece.start);
            }
        }
    }

    #[test]
    fn ranges_are_what_their_bytes_are() {
        for seed in 0..2_000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut leases, mut slow) = (Leases::default(), Slow([Lease::Nothing; SIZE as usize]));
            for _ in 0..20 {
                let start = rng.u64(0..SIZE);
                let end = rng.u64(start..=SIZE);
                let lease = match rng.u8(0..5) {
                    0 => Lease::Nothing,
                    1 => Lease::Hole,
                    2 => Lease::ReadOnly(100 + start),
                    // Often the continuation of its neighbours.
                    3 => Lease::ReadWrite(1_000 + start),
                    _ => Lease::ReadWrite(rng.u64(0..SIZE)),
                };
                let piece = Piece { start, end, lease };
                match rng.bool() {
                    true => leases.set(piece),
                    false => {
                        leases.clear((start, end));
                        leases.set(piece);
                    }
                }
                slow.set(piece);
                leases.clear((start, start));
                leases.clear((end, start));
                let from = rng.u64(0..SIZE);
                let to = rng.u64(from..=SIZE);
                let all: Vec<Piece> = leases.of((from, to)).collect();
                let whole = match all[..] {
                    [Piece { lease, .. }] if lease != Lease::Nothing => Some(lease),
                    _ => None,
                };
                assert_eq!(leases.whole((from, to)), whole, "seed {seed}");
                let mut at = from;
                for piece in all {
                    assert_eq!(piece.start, at, "seed {seed}: a gap, or nothing in it");
                    assert!(piece.end > piece.start, "seed {seed}");
                    for byte in piece.start..piece.end {
                        let lease = piece.lease.advanced(byte - piece.start);
                        assert_eq!(lease, slow.0[byte as usize], "seed {seed}: byte {byte} of {leases:?}");
                    }
                    at = piece.end;
                }
                assert_eq!(at, to, "seed {seed}");
            }
            let pieces: Vec<&Piece> = leases.pieces.values().collect();
            assert!(pieces.windows(2).all(|two| !two[1].continues(*two[0])), "seed {seed}: {leases:?}");
        }
    }
}
