//! The protocol between owners and the members of their sets, on a connection between two nodes that serves all disks of
//! both.
//!
//! A question and its answer are frames, little-endian:
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4 | length of the whole frame, at most 1 MiB |
//! | 4 | 1 | kind: 1 renew, 2 seal, 3 answer, 4 heard |
//! | 5 | 1 | renew: 1 if the set's grants uphold the owner's right to each of the disks; else zero |
//! | 6 | 2 | number of entries, at most 1,024 |
//! | 8 | 8 | number of the question; an answer has that of its question |
//! | 16 | 8 | renew: how long the grants are to last, nanoseconds; else zero |
//! | 24 | … | the entries |
//! | length − 4 | 4 | CRC-32C of everything before |
//!
//! An entry of a question: the epoch (8), the length of the disk's name (1), the name. An entry of an answer, in the order of the
//! question: the verdict (1: 0 done, 1 over, 2 unknown), and a number (8): for a seal that is done how many nanoseconds the last
//! grant still lasts; for *heard*, done means that the member hears the owner in this epoch or a later one; for *over* the lowest epoch that is still answered; for *unknown* the epoch of the record that is known.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use weir_cluster::records::check_name;
use weir_cluster::right::GrantRefusal;

/// Most disks in one question.
pub const MOST_ENTRIES: usize = 1024;

const LONGEST: usize = 1 << 20;
const HEADER: usize = 24;
const CHECKSUM: usize = 4;

/// The request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Grants.
    Renew {
        /// Their length.
        length: Duration,
        /// Whether the set's grants uphold the owner's right to each of the disks at present.
        granted: bool,
    },
    /// Seals.
    Seal,
    /// Whether the member hears the owner, with a right that the set's grants uphold.
    Heard,
}

/// A question about disks, each in an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Distinguishes it from others on the connection.
    pub number: u64,
    /// The request.
    pub ask: Ask,
    /// At most [`MOST_ENTRIES`].
    pub disks: Vec<(String, u64)>,
}

/// A member's verdict on one disk of a question. Done: the time that the last grant still lasts (zero for a renewal).
pub type Verdict = Result<Duration, Refused>;

/// A member does not do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The epoch is over; this one is the lowest that is still answered.
    Over(u64),
    /// The epoch is not known there; the record is known up to this one.
    Unknown(u64),
}

impl From<GrantRefusal> for Refused {
    fn from(refusal: GrantRefusal) -> Refused {
        match refusal {
            GrantRefusal::Over { floor } => Refused::Over(floor),
            GrantRefusal::Unknown { known } => Refused::Unknown(known),
            GrantRefusal::TooLong { .. } => Refused::Unknown(0),
        }
    }
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The question's number.
    pub number: u64,
    /// In the order of the question.
    pub verdicts: Vec<Verdict>,
}

/// Why a frame is not one.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A length, a kind, a name or a count is outside its bounds.
    #[error("malformed frame on a grant connection: {0}")]
    Malformed(&'static str),
    /// The checksum is wrong (P11).
    #[error("wrong checksum on a grant connection")]
    Checksum,
    /// The connection ended.
    #[error("the grant connection ended: {0}")]
    Ended(#[from] std::io::Error),
}

const RENEW: u8 = 1;
const SEAL: u8 = 2;
const ANSWER: u8 = 3;
const HEARD: u8 = 4;

fn frame(kind: u8, flag: u8, count: usize, number: u64, length: u64, entries: &[u8]) -> Vec<u8> {
    let whole = HEADER + entries.len() + CHECKSUM;
    let mut bytes = Vec::with_capacity(whole);
    bytes.extend_from_slice(&(whole as u32).to_le_bytes());
    bytes.extend_from_slice(&[kind, flag]);
    bytes.extend_from_slice(&(count as u16).to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(entries);
    let sum = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// One frame's fixed part and its entries.
struct Frame {
    kind: u8,
    flag: u8,
    count: usize,
    number: u64,
    length: u64,
    entries: Vec<u8>,
}

async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Frame, FrameError> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes).await?;
    let whole = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
    if !(HEADER + CHECKSUM..=LONGEST).contains(&whole) {
        return Err(FrameError::Malformed("its length is impossible"));
    }
    bytes.resize(whole, 0);
    stream.read_exact(&mut bytes[4..]).await?;
    let (content, sum) = bytes.split_at(whole - CHECKSUM);
    if crc32c::crc32c(content).to_le_bytes() != sum {
        return Err(FrameError::Checksum);
    }
    let mut head = Reader(&content[4..]);
    let (kind, flag, count) = (head.byte()?, head.byte()?, head.short()?);
    if usize::from(count) > MOST_ENTRIES {
        return Err(FrameError::Malformed("too many entries"));
    }
    let (number, length) = (head.long()?, head.long()?);
    Ok(Frame { kind, flag, count: count.into(), number, length, entries: head.0.to_vec() })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], FrameError> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or(FrameError::Malformed("it ends in an entry"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, FrameError> {
        Ok(self.take(1)?[0])
    }

    fn short(&mut self) -> Result<u16, FrameError> {
        let bytes = self.take(2)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn long(&mut self) -> Result<u64, FrameError> {
        let mut number = [0; 8];
        number.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(number))
    }

    fn name(&mut self) -> Result<String, FrameError> {
        let length = self.byte()?;
        let name = std::str::from_utf8(self.take(length.into())?).unwrap_or_default();
        check_name(name)
            .map_err(|_| FrameError::Malformed("a disk's name has characters that no name has"))?;
        Ok(name.to_owned())
    }

    fn end(&self) -> Result<(), FrameError> {
        if self.0.is_empty() { Ok(()) } else { Err(FrameError::Malformed("bytes after the last entry")) }
    }
}

impl Question {
    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut entries = Vec::new();
        for (disk, epoch) in &self.disks {
            entries.extend_from_slice(&epoch.to_le_bytes());
            entries.push(disk.len() as u8);
            entries.extend_from_slice(disk.as_bytes());
        }
        let (kind, flag, length) = match self.ask {
            Ask::Renew { length, granted } => {
                (RENEW, u8::from(granted), u64::try_from(length.as_nanos()).unwrap_or(u64::MAX))
            }
            Ask::Seal => (SEAL, 0, 0),
            Ask::Heard => (HEARD, 0, 0),
        };
        frame(kind, flag, self.disks.len(), self.number, length, &entries)
    }

    /// Reads one question and nothing beyond it.
    ///
    /// # Errors
    /// The question is invalid; the connection is then useless.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Question, FrameError> {
        let Frame { kind, flag, count, number, length, entries } = read(stream).await?;
        let ask = match kind {
            RENEW => Ask::Renew { length: Duration::from_nanos(length), granted: flag == 1 },
            SEAL => Ask::Seal,
            HEARD => Ask::Heard,
            _ => return Err(FrameError::Malformed("not a question")),
        };
        let mut reader = Reader(&entries);
        let mut disks = Vec::with_capacity(count);
        for _ in 0..count {
            let epoch = reader.long()?;
            disks.push((reader.name()?, epoch));
        }
        reader.end()?;
        Ok(Question { number, ask, disks })
    }
}

impl Answer {
    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut entries = Vec::new();
        for verdict in &self.verdicts {
            let (byte, number) = match verdict {
                Ok(wait) => (0, u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)),
                Err(Refused::Over(floor)) => (1, *floor),
                Err(Refused::Unknown(known)) => (2, *known),
            };
            entries.push(byte);
            entries.extend_from_slice(&number.to_le_bytes());
        }
        frame(ANSWER, 0, self.verdicts.len(), self.number, 0, &entries)
    }

    /// Reads one answer and nothing beyond it.
    ///
    /// # Errors
    /// The answer is invalid; the connection is then useless.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Answer, FrameError> {
        let Frame { kind, count, number, entries, .. } = read(stream).await?;
        if kind != ANSWER {
            return Err(FrameError::Malformed("not an answer"));
        }
        let mut reader = Reader(&entries);
        let mut verdicts = Vec::with_capacity(count);
        for _ in 0..count {
            let (verdict, number) = (reader.byte()?, reader.long()?);
            verdicts.push(match verdict {
                0 => Ok(Duration::from_nanos(number)),
                1 => Err(Refused::Over(number)),
                2 => Err(Refused::Unknown(number)),
                _ => return Err(FrameError::Malformed("an unknown verdict")),
            });
        }
        reader.end()?;
        Ok(Answer { number, verdicts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn on_its_own<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    fn question() -> Question {
        let ask = Ask::Renew { length: Duration::from_nanos(5), granted: false };
        Question { number: 7, ask, disks: vec![("db".into(), 3), ("vm".into(), 4)] }
    }

    #[test]
    fn golden_layouts() {
        #[rustfmt::skip]
        let golden: &[u8] = &[
            50,0,0,0, 1, 0, 2,0, 7,0,0,0,0,0,0,0, 5,0,0,0,0,0,0,0,
            3,0,0,0,0,0,0,0, 2, b'd',b'b', 4,0,0,0,0,0,0,0, 2, b'v',b'm',
        ];
        let bytes = question().encode();
        assert_eq!(&bytes[..46], golden);
        assert_eq!(bytes[46..], crc32c::crc32c(golden).to_le_bytes());
        let granted = Ask::Renew { length: Duration::from_nanos(5), granted: true };
        for (ask, kind, flag, length) in [(granted, 1, 1, 5), (Ask::Seal, 2, 0, 0), (Ask::Heard, 4, 0, 0)] {
            let asked = Question { ask, ..question() };
            let bytes = asked.encode();
            assert_eq!((bytes[4], bytes[5], bytes[16]), (kind, flag, length));
            assert_eq!((&bytes[6..16], &bytes[24..46]), (&golden[6..16], &golden[24..46]));
            assert_eq!(on_its_own(Question::read(&mut &bytes[..])).unwrap(), asked);
        }
        let answer = Answer { number: 7, verdicts: vec![Ok(Duration::from_nanos(1)), Err(Refused::Over(9))] };
        #[rustfmt::skip]
        let golden: &[u8] = &[
            46,0,0,0, 3, 0, 2,0, 7,0,0,0,0,0,0,0, 0,0,0,0,0,0,0,0,
            0, 1,0,0,0,0,0,0,0, 1, 9,0,0,0,0,0,0,0,
        ];
        let bytes = answer.encode();
        assert_eq!(&bytes[..42], golden);
        assert_eq!(on_its_own(Answer::read(&mut &bytes[..])).unwrap(), answer);
    }

    proptest! {
        #[test]
        fn what_is_not_a_frame_is_refused(at in 0_usize..50, bit in 0_u32..8, cut in 0_usize..50) {
            let mut bytes = question().encode();
            prop_assert_eq!(on_its_own(Question::read(&mut &bytes[..])).unwrap(), question());
            prop_assert!(on_its_own(Question::read(&mut &bytes[..cut])).is_err());
            bytes[at] ^= 1 << bit;
            prop_assert!(on_its_own(Question::read(&mut &bytes[..])).is_err());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = on_its_own(Question::read(&mut &bytes[..]));
            let _ = on_its_own(Answer::read(&mut &bytes[..]));
            let whole = frame(bytes.first().copied().unwrap_or(1), 0, 3, 1, 1, &bytes);
            let _ = on_its_own(Question::read(&mut &whole[..]));
            let _ = on_its_own(Answer::read(&mut &whole[..]));
        }
    }
}
