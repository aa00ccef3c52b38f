//! The journal and recovery against a device that tears writes, and against a list.

use std::cell::RefCell;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;

use super::device::{FlashDevice, SlotLease};
use super::error::FlashError;
use super::format::{device_bytes, ring_bytes};
use super::frame::{STATE_ROOM, State};
use super::journal::Journal;
use super::recovery::{ReadAt, Recovered, RecoveryError, recover};
use crate::lineage::Lineage;
use crate::log::{BLOCK, Layout, Log, RecordKind};
use crate::owner::Held;

const INSTANCE: u64 = 0xFEED;
const LOG: u64 = 2 << 20;

/// A ring in memory.
struct Device(RefCell<Vec<u8>>);

impl ReadAt for Device {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let offset = offset as usize;
        buffer.copy_from_slice(&self.0.borrow()[offset..offset + buffer.len()]);
        Ok(())
    }
}

/// A log, its journal and the device, and beside them what ought to be in the log.
struct Rig {
    device: Device,
    /// Bytes of the slot.
    room: u64,
    log: Log,
    journal: Journal,
    state: State,
    /// Number and fill of every record held.
    model: Vec<(u64, u8)>,
    /// The model as of the last durable frame.
    at_rest: Option<(State, Vec<(u64, u8)>)>,
    fill: u8,
}

impl Rig {
    fn new() -> Rig {
        Rig::with_room(ring_bytes(LOG))
    }

    fn with_room(room: u64) -> Rig {
        Rig {
            device: Device(RefCell::new(vec![0; room as usize])),
            room,
            log: Log::with_layout(Layout::Flash, LOG, 1).unwrap(),
            journal: Journal::new(INSTANCE, room),
            state: State { epoch: 1, lineage: Lineage::new(1), freed: 0, complete: true },
            model: Vec::new(),
            at_rest: None,
            fill: 0,
        }
    }

    fn append(&mut self, sectors: usize) {
        self.fill = self.fill.wrapping_add(1);
        let data = vec![self.fill; sectors * 512];
        if self.log.has_room(data.len() as u64, 1) {
            let number = self.log.append(RecordKind::Write, 0, data.len() as u32, &data).unwrap();
            self.model.push((number, self.fill));
        }
    }

    fn free(&mut self, count: usize) {
        let to = self.log.freed() + count.min(self.model.len()) as u64;
        self.log.free_to(to);
        self.state.freed = self.log.freed();
        self.model.retain(|(number, _)| *number > to);
    }

    fn truncate(&mut self, count: usize) {
        let to = self.log.last() - count.min(self.model.len()) as u64;
        self.log.truncate_to(to);
        self.journal.rewound(&self.log);
        self.model.retain(|(number, _)| *number <= to);
    }

    fn reset(&mut self, first: u64) {
        self.log.reset(first);
        self.state.freed = first - 1;
        self.journal.rewound(&self.log);
        self.model.clear();
    }

    /// Writes the next frame; a torn one reaches the device with its first `blocks` only.
    fn write(&mut self, torn: Option<usize>) -> bool {
        let mut block = vec![0; BLOCK as usize];
        let mut pieces = Vec::new();
        let Some(write) = self.journal.next(&self.log, self.state, &mut block, &mut pieces) else {
            return false;
        };
        self.log.pin(write.pins);
        let mut bytes = block;
        for (start, length) in pieces {
            bytes.extend_from_slice(self.log.region().bytes(start, length));
        }
        assert_eq!(bytes.len() as u64, write.length);
        let kept = torn.map_or(bytes.len(), |blocks| (blocks * BLOCK as usize).min(bytes.len()));
        let whole = kept == bytes.len();
        let offset = write.offset as usize;
        self.device.0.borrow_mut()[offset..offset + kept].copy_from_slice(&bytes[..kept]);
        if torn.is_none() {
            self.journal.written();
        }
        if whole {
            // The last record of the frame is the last in the log, or as many as a frame holds.
            let last = self.journal.stored().last.max(self.framed());
            let held = self.model.iter().copied().filter(|(number, _)| *number <= last).collect();
            self.at_rest = Some((self.state, held));
        }
        true
    }

    fn framed(&self) -> u64 {
        let Some(Recovered { log, .. }) = self.recover().unwrap() else { return 0 };
        log.last()
    }

    fn recover(&self) -> Result<Option<Recovered>, RecoveryError> {
        recover(&self.device, INSTANCE, self.room, LOG)
    }

    /// Power fails. Recovery finds what the model expects, and the test continues from there.
    fn crash(&mut self) {
        let recovered = self.recover().unwrap();
        let Some((state, held)) = self.at_rest.clone() else {
            assert!(recovered.is_none());
            // The slot is given to a new instance.
            *self = Rig::with_room(self.room);
            return;
        };
        let Recovered { log, state: found, journal } = recovered.expect("a frame is durable");
        assert_eq!(found, state);
        assert_eq!(log.freed(), state.freed);
        let numbers: Vec<(u64, u8)> =
            log.range(0, log.last()).map(|(number, record)| (number, log.data(record)[0])).collect();
        assert_eq!(numbers, held);
        for (_, record) in log.range(0, log.last()) {
            let data = log.data(record);
            assert!(data.iter().all(|byte| *byte == data[0]));
        }
        (self.log, self.journal, self.state, self.model) = (log, journal, state, held);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    Free(usize),
    Truncate(usize),
    Reset(u64),
    Epoch,
    Write,
    Crash(Option<usize>),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1usize..64).prop_map(Step::Append),
        1 => (1024usize..2048).prop_map(Step::Append),
        3 => (0usize..8).prop_map(Step::Free),
        1 => (0usize..4).prop_map(Step::Truncate),
        1 => (1u64..200).prop_map(Step::Reset),
        1 => Just(Step::Epoch),
        6 => Just(Step::Write),
        1 => (0usize..6).prop_map(|blocks| Step::Crash(Some(blocks))),
        1 => Just(Step::Crash(None)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// With any records appended, freed, truncated or begun anew, and power failing at any time: recovery finds the durable
    /// records and nothing else.
    #[test]
    fn what_was_at_rest_comes_back(steps in prop::collection::vec(step(), 1..300)) {
        let mut rig = Rig::new();
        for step in steps {
            match step {
                Step::Append(sectors) => rig.append(sectors),
                Step::Free(count) => rig.free(count),
                Step::Truncate(count) => rig.truncate(count),
                Step::Reset(first) => rig.reset(first),
                Step::Epoch => rig.state.epoch += 1,
                Step::Write => {
                    rig.write(None);
                }
                Step::Crash(torn) => {
                    if torn.is_some() {
                        rig.write(torn);
                    }
                    rig.crash();
                }
            }
        }
        // The rest fits, however full the ring was.
        while rig.write(None) {}
        prop_assert!(rig.journal.has_caught_up(&rig.log, &rig.state));
        let State { epoch, freed, .. } = rig.state;
        let held = Held { epoch, last: rig.log.last(), freed, gap: freed, complete: true };
        prop_assert_eq!(rig.journal.stored(), held);
        rig.crash();
    }
}

/// Three frames of two records each.
fn filled() -> Rig {
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.append(8);
        rig.append(8);
        rig.write(None);
    }
    rig
}

#[test]
fn what_was_at_rest_and_is_damaged_is_not_taken() {
    let frame = 3 * BLOCK as usize;
    for (block, torn_only) in
        [(0, false), (1, false), (frame, false), (frame + 9000, false), (2 * frame, true)]
    {
        let rig = filled();
        rig.device.0.borrow_mut()[STATE_ROOM as usize + block + 100] ^= 1;
        match rig.recover() {
            Ok(Some(recovered)) => assert!(torn_only && recovered.log.last() == 4, "at {block}"),
            Ok(None) => panic!("the others are there, at {block}"),
            Err(RecoveryError::Damaged { .. }) => assert!(!torn_only, "at {block}"),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_lost_and_a_misdirected_write_are_found() {
    let frame = 3 * BLOCK as usize;
    let second = STATE_ROOM as usize + frame;
    let rig = filled();
    // The device said that it wrote the second frame and did not.
    rig.device.0.borrow_mut()[second..second + frame].fill(0);
    assert!(matches!(rig.recover(), Err(RecoveryError::Damaged { number: 2, .. })));
    let rig = filled();
    // It wrote it elsewhere.
    let elsewhere = 100 * BLOCK as usize;
    rig.device.0.borrow_mut().copy_within(second..second + frame, elsewhere);
    rig.device.0.borrow_mut()[second..second + frame].fill(0);
    assert!(matches!(rig.recover(), Err(RecoveryError::Damaged { number: 2, .. })));
}

/// A process is killed while its third frame is under way; the next one writes two frames, the first of them at the same location.
#[test]
fn a_frame_of_a_process_that_was_killed_is_not_taken_for_that_of_the_next_one() {
    let rig = filled();
    let frame = 3 * BLOCK as usize;
    let third = STATE_ROOM as usize + 2 * frame;
    let late = rig.device.0.borrow()[third..third + frame].to_vec();
    rig.device.0.borrow_mut()[third..third + frame].fill(0);
    let Recovered { log, state, journal } = rig.recover().unwrap().unwrap();
    let mut next = Rig { log, state, journal, fill: 100, ..rig };
    for _ in 0..2 {
        next.append(8);
        next.append(8);
        next.write(None);
    }
    assert_eq!(next.recover().unwrap().unwrap().log.last(), 8);
    next.device.0.borrow_mut()[third..third + frame].copy_from_slice(&late);
    assert!(matches!(next.recover(), Err(RecoveryError::Damaged { number: 3, .. })), "it came late");
}

#[test]
fn frames_of_another_disk_do_not_count() {
    let rig = filled();
    let other = recover(&rig.device, INSTANCE + 1, ring_bytes(LOG), LOG).unwrap();
    assert!(other.is_none());
}

/// A change of the state takes no room from the records, however often it comes while the oldest record stays.
#[test]
fn changes_of_the_state_do_not_fill_a_slot() {
    let mut rig = Rig::with_room(64 * BLOCK);
    rig.append(8);
    assert!(rig.write(None));
    for round in 0..1_000 {
        rig.state.epoch += 1;
        assert!(rig.write(None), "round {round}: nothing can be written any more");
        if round % 50 == 0 {
            rig.crash();
        }
    }
    let mut rig = Rig::new();
    while rig.log.has_room(1 << 18, 1) {
        rig.append(512);
        rig.state.epoch += 1;
        while rig.write(None) {}
    }
    assert!(rig.model.len() > 1 && rig.journal.has_caught_up(&rig.log, &rig.state));
    rig.crash();
}

/// Any frame torn at any place: recovery finds the state before it, or the frame's own.
#[test]
fn a_torn_frame_takes_nothing_of_what_was_at_rest() {
    for steps in 0u32..1 << 7 {
        let mut rig = Rig::with_room(64 * BLOCK);
        for step in 0..7 {
            if steps >> step & 1 == 0 {
                rig.state.epoch += 1;
            } else {
                rig.append(9);
            }
            let device = rig.device.0.borrow().clone();
            let before = rig.at_rest.clone();
            rig.write(None);
            let whole = rig.device.0.replace(device.clone());
            let changed = whole.chunks(512).zip(device.chunks(512)).enumerate().filter(|(_, (a, b))| a != b);
            let sectors: Vec<usize> = changed.map(|(sector, _)| sector).collect();
            for count in 0..sectors.len() {
                // Any part of it, from either end.
                for part in [&sectors[..count], &sectors[count..]] {
                    let mut torn = device.clone();
                    for sector in part {
                        let bytes = sector * 512..(sector + 1) * 512;
                        torn[bytes.clone()].copy_from_slice(&whole[bytes]);
                    }
                    rig.device.0.replace(torn);
                    let found = rig.recover().unwrap().map(|found| (found.state, found.log.last()));
                    let known = |at_rest: &Option<(State, Vec<(u64, u8)>)>| {
                        let at_rest = at_rest.as_ref();
                        at_rest.map(|(state, held)| (*state, held.last().map_or(0, |(number, _)| *number)))
                    };
                    assert!(
                        found == known(&before) || found == known(&rig.at_rest),
                        "{steps:b}, {step}: {found:?}"
                    );
                }
            }
            rig.device.0.replace(whole);
        }
    }
}

/// Data in flight to flash stays unchanged, though the log is freed, truncated or begun anew meanwhile and fills again.
#[test]
fn a_frame_under_way_does_not_change() {
    let changes: [fn(&mut Rig); 3] = [|rig| rig.free(4), |rig| rig.truncate(4), |rig| rig.reset(50)];
    for change in changes {
        let mut rig = Rig::new();
        for _ in 0..4 {
            rig.append(8);
        }
        let (mut block, mut pieces) = (vec![0; BLOCK as usize], Vec::new());
        let write = rig.journal.next(&rig.log, rig.state, &mut block, &mut pieces).expect("records are new");
        rig.log.pin(write.pins);
        let read = |rig: &Rig| -> Vec<u8> {
            let bytes = pieces.iter().flat_map(|(start, length)| rig.log.region().bytes(*start, *length));
            bytes.copied().collect()
        };
        let before = read(&rig);
        change(&mut rig);
        for _ in 0..4096 {
            rig.append(8);
        }
        assert!(rig.log.used() > LOG / 4, "the log is full again");
        assert!(read(&rig) == before, "the arena was written over");
        rig.journal.written();
        rig.log.pin(None);
    }
}

/// Writes what is to be entered in the table, as a shard's ring does.
fn enter(path: &Path, lease: &mut SlotLease) {
    let (offset, entry) = lease.entry().unwrap();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(&entry, offset).unwrap();
    lease.entered();
}

/// The kernel has a write of a process that was killed, and with it the description that the write goes through.
#[test]
fn a_device_is_in_use_until_the_last_write_to_it_has_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flash");
    let open = || FlashDevice::open(&path, device_bytes(1, LOG), LOG, 7);
    let device = open().unwrap();
    let under_way = device.take("disk", 1).unwrap().file().unwrap();
    assert!(matches!(open(), Err(FlashError::InUse(_))));
    drop(device);
    assert!(matches!(open(), Err(FlashError::InUse(_))), "a write would land on what comes next");
    drop(under_way);
    open().unwrap();
}

/// The process ends before it could enter that the old log of a disk was given up, or in the middle of that; the disk has got
/// another slot. The next process to open the device finds only the younger log.
#[test]
fn a_log_that_is_given_up_is_not_found_beside_a_younger_one() {
    for given_up in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("flash");
        let open = || FlashDevice::open(&path, device_bytes(2, LOG), LOG, 7).unwrap();
        let device = open();
        let mut old = device.take("disk", 1).unwrap();
        enter(&path, &mut old);
        old.give_up();
        let mut young = device.take("disk", 1).unwrap();
        assert_ne!(old.start(), young.start(), "a write may be under way there");
        assert!(device.take("other", 2).is_err(), "and nobody else gets it either");
        enter(&path, &mut young);
        if given_up {
            enter(&path, &mut old);
        }
        let instance = young.instance();
        drop((old, young, device));
        let device = open();
        assert_eq!(device.disks(), [("disk".to_owned(), 1)]);
        assert_eq!(device.find("disk").unwrap().instance(), instance);
        assert_eq!(device.slots(), (2, 1), "the other one is free");
    }
}

/// The power goes when the young log is entered and the elder one's end is not. Then the young one is given up too.
#[test]
fn an_elder_log_does_not_come_back_when_the_younger_one_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flash");
    let open = || FlashDevice::open(&path, device_bytes(3, LOG), LOG, 7).unwrap();
    let device = open();
    let mut logs: Vec<SlotLease> = Vec::new();
    for _ in 0..3 {
        let mut log = device.take("disk", 1).unwrap();
        enter(&path, &mut log);
        log.give_up();
        logs.push(log);
    }
    drop((logs, device));
    let device = open();
    assert_eq!(device.disks(), [("disk".to_owned(), 1)]);
    let mut young = device.find("disk").unwrap();
    young.give_up();
    enter(&path, &mut young);
    drop((young, device));
    assert_eq!(open().disks(), [], "nothing of this disk is needed any more");
}

/// Wherever the power goes while slots change hands, each is one disk's, before or after the change. Headers are torn at will.
#[test]
fn a_torn_entry_leaves_the_one_before() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flash");
    let open = |path: &Path| FlashDevice::open(path, device_bytes(1, LOG), LOG, 7).unwrap();
    let device = open(&path);
    let copy = directory.path().join("copy");
    let found = |offset: u64, part: &[u8]| {
        std::fs::copy(&path, &copy).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&copy).unwrap();
        file.write_all_at(part, offset).unwrap();
        open(&copy).disks()
    };
    let mut before = Vec::new();
    for round in 0..6 {
        let name = format!("disk{round}");
        let mut lease = device.take(&name, round).unwrap();
        for after in [vec![(name.clone(), round)], Vec::new()] {
            let (offset, entry) = lease.entry().unwrap();
            for end in [1, 16, 40, 100, 255, 304] {
                let disks = found(offset, &entry[..end]);
                assert!(disks == before || disks == after, "{disks:?} after {end} bytes in round {round}");
            }
            std::fs::OpenOptions::new()
                .write(true)
                .open(&path)
                .unwrap()
                .write_all_at(&entry, offset)
                .unwrap();
            assert_eq!(found(0, &[]), after);
            lease.entered();
            before = after;
            lease.give_up();
        }
    }
}

/// A loss of power in the middle of filling a new file leaves a short one, full of zeroes.
#[test]
fn a_file_that_was_not_filled_to_its_end_is_filled_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flash");
    let size = device_bytes(3, LOG);
    for left in [BLOCK, device_bytes(1, LOG) + 5] {
        std::fs::write(&path, vec![0; left as usize]).unwrap();
        let device = FlashDevice::open(&path, size, LOG, 7).unwrap();
        assert_eq!(device.slots(), (3, 3), "{left} bytes were left");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
        drop(device);
        std::fs::remove_file(&path).unwrap();
    }
}

/// A file whose first block was erased to have it formatted, or that is larger than requested, keeps its size.
#[test]
fn only_zeroes_are_filled_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flash");
    let mut bytes = vec![0; device_bytes(1, LOG) as usize];
    let last = bytes.len() - 1;
    bytes[last] = 1;
    std::fs::write(&path, &bytes).unwrap();
    let device = FlashDevice::open(&path, device_bytes(3, LOG), LOG, 7).unwrap();
    assert_eq!(device.slots(), (1, 1), "taken as large as it is");
    drop(device);
    std::fs::write(&path, vec![0; device_bytes(2, LOG) as usize]).unwrap();
    assert_eq!(FlashDevice::open(&path, device_bytes(1, LOG), LOG, 7).unwrap().slots(), (2, 2));
}

#[test]
fn a_file_that_was_cut_off_after_it_was_formatted_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flash");
    let size = device_bytes(2, LOG);
    FlashDevice::open(&path, size, LOG, 7).unwrap().take("disk", 1).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(size - BLOCK).unwrap();
    let error = FlashDevice::open(&path, size, LOG, 7).unwrap_err();
    let refused = matches!(error, FlashError::Short { size: left, needed, .. } if (left, needed) == (size - BLOCK, size));
    assert!(refused, "{error}");
}
