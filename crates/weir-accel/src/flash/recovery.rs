//! Reading a slot after a restart: its frames, and the log that they form.
//!
//! Only one frame is ever in flight, so only the newest one can be torn: it is dropped, and nothing in it was confirmed. Any
//! other frame with a wrong checksum was durable once and is damaged; a log with a gap must not be taken for a complete one
//! (P11).

use std::collections::BTreeMap;
use std::io;

use super::frame::{Frame, STATE_ROOM, State, data_room};
use super::journal::Journal;
use crate::log::{BLOCK, LARGEST_RECORD, Layout, Log, checksum};
use crate::planted::{Bug, Planted};

/// Bytes read at once while looking for frames.
const CHUNK: u64 = 1 << 20;

/// Reads all of the buffer at an offset from the start of the slot.
pub trait ReadAt {
    /// Reads all of `buffer` at `offset`. Offset and length are multiples of 4096.
    ///
    /// # Errors
    /// The device refuses.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// Why a slot's log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The device refuses.
    #[error("cannot read the flash device: {0}")]
    Read(#[from] io::Error),
    /// A durable frame is not intact any more (P11).
    #[error(
        "frame {number} of the durable log is damaged ({reason}); this copy cannot be used, others of the disk can"
    )]
    Damaged {
        /// The frame's number.
        number: u64,
        /// The part that does not match its checksum.
        reason: &'static str,
    },
}

/// A log as it was read from flash.
pub struct Recovered {
    /// The records.
    pub log: Log,
    /// The state as of the newest frame.
    pub state: State,
    /// The journal to continue with.
    pub journal: Journal,
}

/// Reads the log of `instance` out of a slot of `bytes`. `None` when nothing was ever durable there.
///
/// # Errors
/// The device cannot be read, a frame is damaged, or there is no memory.
pub fn recover(
    device: &impl ReadAt,
    instance: u64,
    bytes: u64,
    log_bytes: u64,
) -> Result<Option<Recovered>, RecoveryError> {
    recover_planted(device, instance, bytes, log_bytes, Planted::default())
}

/// As [`recover`], with a bug that is planted, so that the checks can show that they find it.
///
/// # Errors
/// As [`recover`].
pub fn recover_planted(
    device: &impl ReadAt,
    instance: u64,
    bytes: u64,
    log_bytes: u64,
    planted: Planted,
) -> Result<Option<Recovered>, RecoveryError> {
    let ring = bytes - STATE_ROOM;
    let mut frames = find(device, instance, ring)?;
    // Also of one that is torn: it may stay where it is, and must not be taken for a frame to come.
    let run = frames.last_key_value().map_or(0, |((run, _), _)| *run);
    let mut data = Vec::new();
    let newest = loop {
        let Some((_, newest)) = frames.last_key_value() else { return Ok(None) };
        if read_data(device, ring, newest, &mut data)? {
            break newest.clone();
        }
        // Torn. Were it not the first one that is dropped, the one before it would be damaged.
        let number = newest.location.number;
        // Also what earlier runs dropped for the same reason and left lying elsewhere.
        frames.retain(|_, frame| frame.location.number < number);
        match frames.last_key_value() {
            Some((_, before)) if !read_data(device, ring, before, &mut data)? => {
                return Err(RecoveryError::Damaged { number: before.location.number, reason: "its data" });
            }
            Some((_, before)) if before.location.number + 1 < number => {
                return Err(RecoveryError::Damaged { number: number - 1, reason: "its header" });
            }
            _ => {}
        }
    };
    let needed = match needed(&frames, &newest) {
        Err(_) if planted.has(Bug::TakeDamaged) => Vec::new(),
        needed => needed?,
    };
    let log = match replay(device, ring, log_bytes, &needed, &newest, &mut data) {
        Err(RecoveryError::Damaged { .. }) if planted.has(Bug::TakeDamaged) => {
            Log::with_layout(Layout::Flash, log_bytes, newest.state.freed + 1)?
        }
        log => log?,
    };
    let journal = Journal::continued(instance, bytes, run + 1, &newest, &needed);
    Ok(Some(Recovered { log, state: newest.state, journal }))
}

/// All intact headers, by run and number.
fn find(
    device: &impl ReadAt,
    instance: u64,
    ring: u64,
) -> Result<BTreeMap<(u64, u64), Frame>, RecoveryError> {
    let mut frames = BTreeMap::new();
    let mut chunk = vec![0; CHUNK as usize];
    let bytes = STATE_ROOM + ring;
    for start in (0..bytes).step_by(CHUNK as usize) {
        let length = CHUNK.min(bytes - start) as usize;
        device.read_at(start, &mut chunk[..length])?;
        for (at, block) in (start..).step_by(BLOCK as usize).zip(chunk[..length].chunks(BLOCK as usize)) {
            let Some(frame) = Frame::decode(block) else { continue };
            // A frame that is not where it says was written elsewhere: the device has misdirected it.
            let offset = frame.location.offset(!frame.records.is_empty(), ring);
            let fits = at + frame.location.length <= bytes;
            if frame.location.instance == instance && offset == at && fits {
                frames.insert((frame.location.run, frame.location.number), frame);
            }
        }
    }
    Ok(frames)
}

/// The frames with records from the newest frame's tail on, each behind the other.
fn needed(frames: &BTreeMap<(u64, u64), Frame>, newest: &Frame) -> Result<Vec<Frame>, RecoveryError> {
    let mut needed = Vec::new();
    if !newest.records.is_empty() {
        needed.push(newest.clone());
    }
    let mut at = newest.location;
    while at.position > newest.location.tail {
        let number = at.before;
        let damaged = |reason| RecoveryError::Damaged { number, reason };
        // Of this very run: frames that another run left behind the end, or wrote late, are not part of this one's log.
        let before = frames.get(&(at.before_run, number)).filter(|frame| !frame.records.is_empty());
        let before = before.ok_or(damaged("its header"))?;
        let end = before.location.position + before.location.length;
        // Skipped space is the rest of the ring, less than a frame.
        let longest = LARGEST_RECORD as u64 + 2 * BLOCK;
        if end > at.position || at.position - end > longest {
            return Err(damaged("its location"));
        }
        at = before.location;
        needed.push(before.clone());
    }
    if at.position != newest.location.tail {
        return Err(RecoveryError::Damaged { number: at.number, reason: "its location" });
    }
    needed.reverse();
    Ok(needed)
}

/// Makes the log from its frames.
fn replay(
    device: &impl ReadAt,
    ring: u64,
    log_bytes: u64,
    needed: &[Frame],
    newest: &Frame,
    data: &mut Vec<u8>,
) -> Result<Log, RecoveryError> {
    let freed = newest.state.freed;
    let mut log = Log::with_layout(Layout::Flash, log_bytes, freed + 1)?;
    for frame in needed {
        let number = frame.location.number;
        if !read_data(device, ring, frame, data)? {
            return Err(RecoveryError::Damaged { number, reason: "its data" });
        }
        if frame.first <= log.last() {
            log.truncate_to(frame.first - 1);
        }
        let mut at = 0;
        for (sequence, record) in (frame.first..).zip(&frame.records) {
            let length = record.data_length();
            if sequence > freed
                && (sequence != log.last() + 1 || log.push(*record, &data[at..at + length]).is_none())
            {
                return Err(RecoveryError::Damaged { number, reason: "the numbers of its records" });
            }
            at += data_room(record) as usize;
        }
    }
    if newest.first <= log.last() && newest.records.is_empty() {
        log.truncate_to(newest.first - 1);
    }
    Ok(log)
}

/// Reads a frame's data and checks every record (P11).
fn read_data(
    device: &impl ReadAt,
    ring: u64,
    frame: &Frame,
    data: &mut Vec<u8>,
) -> Result<bool, RecoveryError> {
    data.resize((frame.location.length - BLOCK) as usize, 0);
    if !data.is_empty() {
        device.read_at(frame.location.offset(true, ring) + BLOCK, data)?;
    }
    let mut at = 0;
    for (sequence, record) in (frame.first..).zip(&frame.records) {
        let own = &data[at..at + record.data_length()];
        if checksum(sequence, record.offset, record.length, record.kind, own) != record.checksum {
            return Ok(false);
        }
        at += data_room(record) as usize;
    }
    Ok(true)
}
