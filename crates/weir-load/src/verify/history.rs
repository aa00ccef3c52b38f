//! The versions written to every block, and the check of a block's content against them.

use std::fmt;

use weir_block::size::Size;

use super::layout::Layout;
use super::stamp::{SECTOR, Sector, read_sector, stamp, sum_of_bodies};
use super::trail::{Step, Trail};

/// The content of blocks before their first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// Zeroes: a new disk. Anything else in a block that was never written is a fault.
    Zeroes,
    /// Anything: blocks that were never written are not judged.
    Unknown,
}

/// The part of an unanswered write that may be found after a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Atomicity {
    /// All of it or nothing: the guarantee of a write log.
    #[default]
    Block,
    /// Any of its sectors: the guarantee of a bare disk. Each sector must still be an allowed version.
    Sector,
}

/// The kind of incorrect content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An acknowledged write is lost: the block has no data of this run.
    Lost {
        /// Version that was acknowledged or already seen.
        acknowledged: u32,
    },
    /// An older version than the acknowledged one.
    Stale {
        /// Version in the block.
        found: u32,
        /// Version that was acknowledged or already seen.
        acknowledged: u32,
    },
    /// Sectors of different versions.
    Torn {
        /// Version of the first sector (0: never written).
        first: u32,
        /// Version of the sector in question.
        other: u32,
    },
    /// Data of this run that belongs elsewhere.
    Misplaced {
        /// Byte of the disk where it belongs.
        belongs_at: u64,
    },
    /// Data that this run did not write.
    Foreign {
        /// The other run, if the data names it.
        run: Option<u64>,
    },
    /// A stamp with a wrong checksum.
    Corrupt,
    /// A version that this history never issued.
    Unissued {
        /// Version in the block.
        found: u32,
        /// Newest version that was issued.
        issued: u32,
    },
}

impl Fault {
    /// One word for tables: `lost`, `stale`, `torn`, `misplaced`, `foreign`, `corrupt`, `unissued`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Lost { .. } => "lost",
            Fault::Stale { .. } => "stale",
            Fault::Torn { .. } => "torn",
            Fault::Misplaced { .. } => "misplaced",
            Fault::Foreign { .. } => "foreign",
            Fault::Corrupt => "corrupt",
            Fault::Unissued { .. } => "unissued",
        }
    }
}

/// A block with incorrect content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// First byte of the block on the disk.
    pub offset: u64,
    /// Bytes of the block.
    pub length: u64,
    /// First byte, on the disk, of the sector that shows it.
    pub sector: u64,
    /// The fault.
    pub fault: Fault,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { offset, length, sector, fault } = *self;
        write!(f, "{} block at byte {offset} ({}), sector at byte {sector}: ", fault.name(), Size(length))?;
        match fault {
            Fault::Lost { acknowledged } => {
                write!(f, "holds nothing of this run, version {acknowledged} was acknowledged")
            }
            Fault::Stale { found, acknowledged } => {
                write!(f, "holds version {found}, version {acknowledged} was acknowledged")
            }
            Fault::Torn { first, other } => {
                write!(f, "holds version {other}, the first sector holds {first}")
            }
            Fault::Misplaced { belongs_at } => write!(f, "holds data that belongs at byte {belongs_at}"),
            Fault::Foreign { run: Some(run) } => write!(f, "holds data of another run ({run:016x})"),
            Fault::Foreign { run: None } => write!(f, "holds data that no run has written"),
            Fault::Corrupt => write!(f, "its checksum does not match"),
            Fault::Unissued { found, issued } => {
                write!(f, "holds version {found}, only {issued} have been issued")
            }
        }
    }
}

/// Versions of one block. `issued` counts up with each write; `floor` is the newest one that was
/// acknowledged or seen. Allowed are `floor..=issued`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Versions {
    pub floor: u32,
    pub issued: u32,
}

/// The history of all writes to the blocks of a layout. Eight bytes per block.
///
/// The caller never has two writes to one block in flight at once, nor a read concurrent with a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    pub(super) layout: Layout,
    pub(super) run: u64,
    pub(super) initial: Initial,
    pub(super) versions: Vec<Versions>,
    pub(super) trail: Trail,
}

impl History {
    /// Nothing written yet. `run` names this history in the stamps and should be unique.
    #[must_use]
    pub fn new(layout: Layout, run: u64, initial: Initial) -> History {
        let versions = vec![Versions::default(); layout.blocks() as usize];
        History { layout, run, initial, versions, trail: Trail::default() }
    }

    /// The blocks.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This history's run number in the stamps.
    #[must_use]
    pub fn run(&self) -> u64 {
        self.run
    }

    /// Begins a write: a new version of `block` is stamped into `data` (the block's length). Returns it.
    ///
    /// # Panics
    /// When there is no such block, or `data` has not its length.
    pub fn issue(&mut self, block: u64, data: &mut [u8]) -> u32 {
        let span = self.layout.block(block);
        assert_eq!(data.len() as u64, span.length, "the data of a block has the block's length");
        let versions = &mut self.versions[block as usize];
        versions.issued += 1;
        stamp(self.run, span.offset, versions.issued, data);
        versions.issued
    }

    /// The write that [`History::issue`] numbered `version` was acknowledged. A write that is never acknowledged
    /// (an error, a broken connection) needs no call: it may or may not be found.
    pub fn acknowledge(&mut self, block: u64, version: u32) {
        let floor = &mut self.versions[block as usize].floor;
        *floor = version.max(*floor);
    }

    /// Checks data read from a block, and records an unanswered version that was seen (P7).
    ///
    /// # Errors
    /// The fault, at the first sector that shows it.
    pub fn check(&mut self, block: u64, data: &[u8], atomicity: Atomicity) -> Result<(), Mismatch> {
        let oldest = self.judge(block, data, atomicity)?;
        self.acknowledge(block, oldest);
        Ok(())
    }

    /// Notes what has happened to a version of `block`, for [`History::describe`].
    pub(crate) fn note(&mut self, block: u64, step: Step, version: u32) {
        self.trail.note(block, step, version);
    }

    /// The last steps of `block`, in words.
    pub(crate) fn describe(&self, block: u64) -> String {
        self.trail.describe(block)
    }

    /// Whether `block` was ever written, as far as this history knows.
    #[must_use]
    pub fn is_written(&self, block: u64) -> bool {
        self.versions[block as usize].issued > 0
    }

    /// Number of blocks with at least one issued write, and of writes issued to all of them.
    #[must_use]
    pub fn written(&self) -> (u64, u64) {
        let written = self.versions.iter().filter(|versions| versions.issued > 0);
        written.fold((0, 0), |(blocks, writes), versions| (blocks + 1, writes + u64::from(versions.issued)))
    }

    /// Of `block`: the newest version that was acknowledged or seen, and the newest that was issued.
    pub(crate) fn versions_of(&self, block: u64) -> (u32, u32) {
        let Versions { floor, issued } = self.versions[block as usize];
        (floor, issued)
    }

    /// Number of blocks whose newest write was not answered.
    #[must_use]
    pub fn unanswered(&self) -> u64 {
        self.versions.iter().filter(|versions| versions.issued > versions.floor).count() as u64
    }

    /// The oldest version among the sectors, when all of them are allowed.
    fn judge(&self, block: u64, data: &[u8], atomicity: Atomicity) -> Result<u32, Mismatch> {
        let span = self.layout.block(block);
        let versions = self.versions[block as usize];
        let at = |sector: u64, fault| Mismatch { offset: span.offset, length: span.length, sector, fault };
        if data.len() as u64 != span.length {
            return Err(at(span.offset, Fault::Corrupt));
        }
        // Data from before the run, of any kind.
        if self.initial == Initial::Unknown && !self.mentions_this_run(data) {
            return match versions.floor {
                0 => Ok(0),
                acknowledged => Err(at(span.offset, Fault::Lost { acknowledged })),
            };
        }
        let (mut first, mut oldest, mut block_sum) = (None, u32::MAX, 0);
        for (index, sector) in data.as_chunks::<SECTOR>().0.iter().enumerate() {
            let sector_offset = span.offset + (index * SECTOR) as u64;
            let (version, sum) =
                self.version_of(sector, sector_offset, versions).map_err(|fault| at(sector_offset, fault))?;
            let first = *first.get_or_insert(version);
            if version != first && atomicity == Atomicity::Block {
                return Err(at(sector_offset, Fault::Torn { first, other: version }));
            }
            oldest = oldest.min(version);
            block_sum = sum;
        }
        self.allowed(oldest, versions).map_err(|fault| at(span.offset, fault))?;
        if atomicity == Atomicity::Block && oldest > 0 && sum_of_bodies(data) != block_sum {
            return Err(at(span.offset, Fault::Corrupt));
        }
        Ok(oldest)
    }

    fn mentions_this_run(&self, data: &[u8]) -> bool {
        let mut sectors = data.as_chunks::<SECTOR>().0.iter();
        sectors.any(|sector| matches!(read_sector(sector), Sector::Stamped { run, .. } if run == self.run))
    }

    /// Version and block checksum of one sector of this run and offset. This detects a version that is too new; one that is too
    /// old needs all sectors: a mix of old and new is torn, not stale.
    fn version_of(
        &self,
        sector: &[u8; SECTOR],
        sector_offset: u64,
        versions: Versions,
    ) -> Result<(u32, u32), Fault> {
        match read_sector(sector) {
            Sector::Blank => Ok((0, 0)),
            Sector::Stamped { run, .. } if run != self.run => Err(Fault::Foreign { run: Some(run) }),
            Sector::Stamped { offset, .. } if offset != sector_offset => {
                Err(Fault::Misplaced { belongs_at: offset })
            }
            Sector::Stamped { version, .. } if version > versions.issued => {
                Err(Fault::Unissued { found: version, issued: versions.issued })
            }
            Sector::Stamped { version, block_sum, .. } => Ok((version, block_sum)),
            Sector::Corrupt => Err(Fault::Corrupt),
            Sector::Unknown => Err(Fault::Foreign { run: None }),
        }
    }

    fn allowed(&self, oldest: u32, versions: Versions) -> Result<(), Fault> {
        let acknowledged = versions.floor;
        match oldest {
            0 if acknowledged > 0 => Err(Fault::Lost { acknowledged }),
            found if found < acknowledged => Err(Fault::Stale { found, acknowledged }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Span;

    const SIZE: usize = 4096;

    fn history(initial: Initial) -> History {
        let layout =
            Layout::uniform(Span { offset: 1 << 20, length: 16 * SIZE as u64 }, SIZE as u32).unwrap();
        History::new(layout, 42, initial)
    }

    /// Issues a write to `block`, acknowledges it if told, returns its data.
    fn write(history: &mut History, block: u64, acknowledged: bool) -> Vec<u8> {
        let mut data = vec![0; SIZE];
        let version = history.issue(block, &mut data);
        if acknowledged {
            history.acknowledge(block, version);
        }
        data
    }

    fn fault(history: &mut History, block: u64, data: &[u8]) -> Fault {
        history.check(block, data, Atomicity::Block).unwrap_err().fault
    }

    #[test]
    fn what_was_acknowledged_is_right() {
        let mut history = history(Initial::Zeroes);
        let data = write(&mut history, 3, true);
        assert_eq!(history.check(3, &data, Atomicity::Block), Ok(()));
        assert_eq!(history.check(4, &[0; SIZE], Atomicity::Block), Ok(()));
        assert_eq!(history.written(), (1, 1));
    }

    #[test]
    fn planted_faults_are_told_apart() {
        let mut history = history(Initial::Zeroes);
        let first = write(&mut history, 3, true);
        let second = write(&mut history, 3, true);
        let other = write(&mut history, 5, true);
        assert_eq!(fault(&mut history, 3, &[0; SIZE]), Fault::Lost { acknowledged: 2 });
        assert_eq!(fault(&mut history, 3, &first), Fault::Stale { found: 1, acknowledged: 2 });
        let torn = [&second[..1024], &first[1024..]].concat();
        assert_eq!(fault(&mut history, 3, &torn), Fault::Torn { first: 2, other: 1 });
        let hole = [&second[..512], &[0; SIZE - 512]].concat();
        assert_eq!(fault(&mut history, 3, &hole), Fault::Torn { first: 2, other: 0 });
        assert_eq!(fault(&mut history, 3, &other), Fault::Misplaced { belongs_at: (1 << 20) + 5 * 4096 });
        let mut swapped = second.clone();
        swapped.rotate_left(512);
        assert_eq!(
            fault(&mut history, 3, &swapped),
            Fault::Misplaced { belongs_at: (1 << 20) + 3 * 4096 + 512 }
        );
        let mut foreign = vec![0; SIZE];
        stamp(43, (1 << 20) + 3 * 4096, 2, &mut foreign);
        assert_eq!(fault(&mut history, 3, &foreign), Fault::Foreign { run: Some(43) });
        assert_eq!(fault(&mut history, 3, &[9; SIZE]), Fault::Foreign { run: None });
        let mut flipped = second.clone();
        flipped[3000] ^= 1;
        let mismatch = history.check(3, &flipped, Atomicity::Block).unwrap_err();
        assert_eq!((mismatch.fault, mismatch.sector), (Fault::Corrupt, (1 << 20) + 3 * 4096 + 2560));
        let mut future = vec![0; SIZE];
        stamp(42, (1 << 20) + 3 * 4096, 9, &mut future);
        assert_eq!(fault(&mut history, 3, &future), Fault::Unissued { found: 9, issued: 2 });
        assert_eq!(history.check(3, &second, Atomicity::Block), Ok(()));
    }

    #[test]
    fn a_sector_of_an_equal_version_with_other_content_is_corrupt() {
        let mut history = history(Initial::Zeroes);
        let data = write(&mut history, 0, true);
        // A sector with a valid checksum of its own that was not written together with the rest.
        let mut forged = data.clone();
        forged[512..1024].copy_from_slice(&{
            let mut block = vec![0; 1024];
            stamp(42, 1 << 20, 1, &mut block);
            block[600] ^= 1;
            let sum = crc32c::crc32c(&block[520..1024]);
            block[516..520].copy_from_slice(&sum.to_le_bytes());
            block[512..].to_vec()
        });
        assert_eq!(fault(&mut history, 0, &forged), Fault::Corrupt);
    }

    #[test]
    fn unanswered_versions_may_be_found_but_not_unseen() {
        let mut history = history(Initial::Zeroes);
        let acknowledged = write(&mut history, 0, true);
        let unanswered = write(&mut history, 0, false);
        let failed = write(&mut history, 0, false);
        assert_eq!(history.check(0, &acknowledged, Atomicity::Block), Ok(()));
        assert_eq!(history.check(0, &unanswered, Atomicity::Block), Ok(()));
        assert_eq!(history.check(0, &failed, Atomicity::Block), Ok(()));
        // Once seen stays seen (P7).
        assert_eq!(fault(&mut history, 0, &unanswered), Fault::Stale { found: 2, acknowledged: 3 });
        let newest = write(&mut history, 0, true);
        assert_eq!(fault(&mut history, 0, &failed), Fault::Stale { found: 3, acknowledged: 4 });
        assert_eq!(history.check(0, &newest, Atomicity::Block), Ok(()));
    }

    #[test]
    fn a_bare_disk_may_tear_what_was_not_answered_but_nothing_else() {
        let mut history = history(Initial::Zeroes);
        let first = write(&mut history, 0, true);
        let second = write(&mut history, 0, true);
        let third = write(&mut history, 0, false);
        let allowed = [&third[..512], &second[512..]].concat();
        assert!(matches!(fault(&mut history, 0, &allowed), Fault::Torn { .. }));
        assert_eq!(history.check(0, &allowed, Atomicity::Sector), Ok(()));
        let stale = [&third[..512], &first[512..]].concat();
        let mismatch = history.check(0, &stale, Atomicity::Sector).unwrap_err();
        assert_eq!(mismatch.fault, Fault::Stale { found: 1, acknowledged: 2 });
    }

    #[test]
    fn an_old_disk_is_judged_only_where_it_was_written() {
        let mut history = history(Initial::Unknown);
        assert_eq!(history.check(0, &[9; SIZE], Atomicity::Block), Ok(()));
        let unanswered = write(&mut history, 0, false);
        assert_eq!(history.check(0, &[9; SIZE], Atomicity::Block), Ok(()));
        let torn = [&unanswered[..512], &[9; SIZE - 512]].concat();
        assert_eq!(fault(&mut history, 0, &torn), Fault::Foreign { run: None });
        assert_eq!(history.check(0, &unanswered, Atomicity::Block), Ok(()));
        assert_eq!(fault(&mut history, 0, &[9; SIZE]), Fault::Lost { acknowledged: 1 });
    }

    #[test]
    fn mismatches_read_like_sentences() {
        let mut history = history(Initial::Zeroes);
        write(&mut history, 1, true);
        let text = history.check(1, &[0; SIZE], Atomicity::Block).unwrap_err().to_string();
        assert_eq!(
            text,
            "lost block at byte 1052672 (4KiB), sector at byte 1052672: holds nothing of this run, version 1 was acknowledged"
        );
    }
}
