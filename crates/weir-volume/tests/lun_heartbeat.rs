//! The heartbeat area of a shared LUN: real loop devices that are two paths to one image.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::{LoopDevice, run};
use weir_block::Nanos;
use weir_volume::lun::filesystem::superblock::Content;
use weir_volume::lun::filesystem::{Mounted, content};
use weir_volume::lun::heartbeat::area::{FILE, behind, in_file};
use weir_volume::lun::heartbeat::listener::SILENCE;
use weir_volume::lun::heartbeat::{Area, Beat, Heard, HeartbeatError, Listener, Slot, VolumeId};

const MIB: u64 = 1 << 20;
/// mkfs.xfs makes nothing smaller.
const SIZE: u64 = 310 * MIB;
const VOLUME: VolumeId = VolumeId(*b"a volume's own i");

fn format(target: &Path, command: &str) {
    let mut words = command.split(' ');
    run(Command::new(words.next().unwrap()).args(words).arg(target));
}

fn beat(node: u64, epoch: u64, count: u64) -> Beat {
    Beat { node, incarnation: 1, epoch, count, goes_on: true, name: format!("n{node}") }
}

fn beats(slots: &[Slot]) -> Vec<Beat> {
    slots
        .iter()
        .filter_map(|slot| match slot {
            Slot::Beat(beat) => Some(beat.clone()),
            Slot::Empty => None,
            Slot::Other(_) => panic!("{slots:?}"),
        })
        .collect()
}

/// The place behind the filesystem.
fn place(lun: &Path) -> Option<u64> {
    let file = std::fs::File::open(lun).unwrap();
    let Content::Filesystem(found) = content(&file, lun).unwrap() else { panic!("no filesystem") };
    behind(&found, SIZE)
}

#[test]
fn a_heartbeat_is_seen_on_every_path_and_leaves_the_filesystem_alone() {
    for command in ["mkfs.ext4 -q -b 4096 DEVICE 300M", "mkfs.xfs -q -f -d size=300m DEVICE"] {
        let Some(lun) = LoopDevice::new(SIZE) else { return };
        let command = command.replace("DEVICE", lun.device.to_str().unwrap());
        let mut words = command.split(' ');
        run(Command::new(words.next().unwrap()).args(words));
        let second = lun.second_path();
        let at = place(&second.device).unwrap();
        assert!(matches!(Area::open(&second.device, at, VOLUME), Err(HeartbeatError::NoArea { .. })));
        let mut near = Area::create(&lun.device, at, VOLUME).unwrap();
        let mut far = Area::open(&second.device, at, VOLUME).unwrap();
        assert!(beats(&far.slots().unwrap()).is_empty());
        // While it is mounted.
        let mounted = Mounted::new(&lun.device).unwrap();
        let file = mounted.create("disk").unwrap();
        file.set_len(MIB).unwrap();
        for count in 1..=3 {
            near.beat(&beat(7, 1, count)).unwrap();
            assert_eq!(beats(&far.slots().unwrap()), [beat(7, 1, count)]);
        }
        far.beat(&beat(8, 2, 1)).unwrap();
        let mut both = beats(&near.slots().unwrap());
        both.sort_by_key(|beat| beat.node);
        assert_eq!(both, [beat(7, 1, 3), beat(8, 2, 1)]);
        drop((file, mounted));
        Mounted::new(&second.device).unwrap().open("disk").unwrap();
        // What is there stays: it names the last epoch.
        drop(Area::create(&lun.device, at, VOLUME).unwrap());
        assert_eq!(beats(&near.slots().unwrap()).len(), 2);
    }
}

#[test]
fn a_filesystem_without_space_behind_it_has_the_area_in_a_file() {
    for command in ["mkfs.ext4 -q -b 4096", "mkfs.xfs -q -f"] {
        let Some(lun) = LoopDevice::new(SIZE) else { return };
        format(&lun.device, command);
        let second = lun.second_path();
        assert_eq!(place(&lun.device), None, "{command}");
        let mounted = Mounted::new(&lun.device).unwrap();
        // What a crash has left.
        mounted.create(FILE).unwrap().set_len(MIB).unwrap();
        let at = in_file(&mounted).unwrap();
        let mut near = Area::create(&lun.device, at, VOLUME).unwrap();
        near.beat(&beat(7, 1, 1)).unwrap();
        assert_eq!(in_file(&mounted).unwrap(), at, "it is found again, and not written over");
        assert_eq!(beats(&near.slots().unwrap()), [beat(7, 1, 1)]);
        // A node that has not mounted finds it where the volume's record says.
        drop(mounted);
        let mut far = Area::open(&second.device, at, VOLUME).unwrap();
        assert_eq!(beats(&far.slots().unwrap()), [beat(7, 1, 1)]);
        drop((near, far));
        assert_eq!(in_file(&Mounted::new(&second.device).unwrap()).unwrap(), at);
    }
}

#[test]
fn nothing_is_written_over_that_is_not_an_area_of_this_volume() {
    let Some(lun) = LoopDevice::new(SIZE) else { return };
    let said = |result: Result<Area, HeartbeatError>| result.unwrap_err().to_string();
    drop(Area::create(&lun.device, 0, VOLUME).unwrap());
    let other = VolumeId([7; 16]);
    let words = said(Area::create(&lun.device, 0, other));
    assert!(words.contains(&format!("that of volume {VOLUME}")), "{words}");
    // One byte in the middle of what would be the area.
    let file = OpenOptions::new().write(true).open(&lun.device).unwrap();
    file.write_all_at(b"x", 2 * MIB + 100_000).unwrap();
    file.sync_all().unwrap();
    let words = said(Area::create(&lun.device, 2 * MIB, VOLUME));
    assert!(words.contains("something else is there"), "{words}");
    file.write_all_at(b"x", 100).unwrap();
    file.sync_all().unwrap();
    let words = said(Area::open(&lun.device, 0, VOLUME));
    assert!(words.contains("damaged"), "{words}");
    // Behind the LUN's end.
    let words = said(Area::create(&lun.device, SIZE, VOLUME));
    assert!(words.contains("cannot read"), "{words}");
    let words = said(Area::create(Path::new("/nothing/here"), 0, VOLUME));
    assert!(words.contains("cannot open"), "{words}");
}

/// A node that is fenced learns it from its heartbeat (in the lab, a fence sets the device of a path read-only).
#[test]
fn a_fenced_node_cannot_beat() {
    let Some(lun) = LoopDevice::new(SIZE) else { return };
    let second = lun.second_path();
    let mut near = Area::create(&lun.device, 0, VOLUME).unwrap();
    let mut far = Area::open(&second.device, 0, VOLUME).unwrap();
    near.beat(&beat(7, 1, 1)).unwrap();
    run(Command::new("blockdev").arg("--setro").arg(&lun.device));
    assert!(near.beat(&beat(7, 1, 2)).unwrap_err().is_refusal());
    far.beat(&beat(8, 2, 1)).unwrap();
    assert!(beats(&far.slots().unwrap()).contains(&beat(7, 1, 1)));
    run(Command::new("blockdev").arg("--setrw").arg(&lun.device));
    near.beat(&beat(7, 3, 3)).unwrap();
}

/// Two clusters have one LUN, and begin at once: at least one of them finds out.
#[test]
fn of_two_that_begin_at_once_one_sees_the_other() {
    let Some(lun) = LoopDevice::new(SIZE) else { return };
    drop(Area::create(&lun.device, 0, VOLUME).unwrap());
    let second = lun.second_path();
    // One slot, and two slots.
    for (here, there) in [(7, 7), (7, 8)] {
        let claim = |path: &Path, node: u64, incarnation: u64| {
            let mut area = Area::open(path, 0, VOLUME).unwrap();
            let me = |count| Beat { incarnation, ..beat(node, 1, count) };
            area.beat(&me(1)).unwrap();
            let mut listener = Listener::new(Nanos::now(), area.slots().unwrap());
            for count in 2.. {
                let began = Nanos::now();
                let slots = area.slots().unwrap();
                let heard = listener.look((began, Nanos::now()), slots, &me(count), |_| false);
                if heard != Heard::NothingYet {
                    return heard;
                }
                area.beat(&me(count)).unwrap();
                std::thread::sleep(SILENCE / 10);
            }
            unreachable!("silence takes a while, and not for ever")
        };
        let heard = std::thread::scope(|scope| {
            let one = scope.spawn(|| claim(&lun.device, here, 1));
            let other = scope.spawn(|| claim(&second.device, there, 2));
            [one.join().unwrap(), other.join().unwrap()]
        });
        assert!(heard.iter().any(|heard| matches!(heard, Heard::Stranger(_) | Heard::Later(_))), "{heard:?}");
    }
}
