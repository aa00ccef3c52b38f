//! The rig of the power-cut tests is itself on trial: a volatile disk loses what was not flushed and nothing else, also
//! through the block layer and under filesystems. Without this, a test in which nothing is lost would prove nothing.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::{IoSlice, ReadWriteFlags};
use weir_lab::volatile_disk::{Survivors, Toll, VolatileDisk};

use crate::mounted::{Kind, Mounted};

const BLOCK: usize = 4096;

/// Memory that direct I/O takes.
#[repr(align(4096))]
struct Page([u8; BLOCK]);

fn disk(size: u64) -> (tempfile::TempDir, VolatileDisk) {
    let directory = tempfile::tempdir().unwrap();
    let disk = VolatileDisk::create(&directory.path().join("disk"), size).unwrap();
    (directory, disk)
}

/// A device or file without the page cache, as databases and Weir open it.
fn open_direct(path: &Path) -> File {
    let direct = OFlags::DIRECT.bits() as i32;
    File::options().read(true).write(true).custom_flags(direct).open(path).unwrap()
}

/// The first byte of a block, after all of it was seen to be the same.
fn read(device: &File, block: u64) -> u8 {
    let mut page = Box::new(Page([0; BLOCK]));
    device.read_exact_at(&mut page.0, block * BLOCK as u64).unwrap();
    assert!(page.0.iter().all(|byte| *byte == page.0[0]), "block {block} is torn");
    page.0[0]
}

fn write(device: &File, block: u64, byte: u8) {
    device.write_all_at(&Box::new(Page([byte; BLOCK])).0, block * BLOCK as u64).unwrap();
}

fn write_synced(device: &File, block: u64, byte: u8) {
    let page = Box::new(Page([byte; BLOCK]));
    let at = block * BLOCK as u64;
    let written = rustix::io::pwritev2(device, &[IoSlice::new(&page.0)], at, ReadWriteFlags::DSYNC).unwrap();
    assert_eq!(written, BLOCK);
}

fn cut(disk: &mut VolatileDisk, survivors: Survivors) -> Toll {
    disk.fail_power();
    disk.power_on(survivors).unwrap()
}

#[test]
fn what_was_not_flushed_is_lost_and_what_was_is_not() {
    let (_directory, mut disk) = disk(4 << 20);
    let device = open_direct(&disk.path());
    for block in 0..4 {
        write(&device, block, 1);
    }
    device.sync_data().unwrap();
    for block in 0..2 {
        write(&device, block, 2);
    }
    write(&device, 9, 3);
    assert_eq!((read(&device, 0), read(&device, 9)), (2, 3), "readers see the cache");
    drop(device);
    assert_eq!(cut(&mut disk, Survivors::None), Toll { lost: 3, kept: 0, torn: 0 });
    let device = open_direct(&disk.path());
    let found: Vec<u8> = (0..10).map(|block| read(&device, block)).collect();
    assert_eq!(found, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
}

/// A write with `RWF_DSYNC` reaches the disk as a write and a flush, which makes everything before it durable too.
#[test]
fn a_synced_write_is_durable_when_it_is_answered() {
    let (_directory, mut disk) = disk(4 << 20);
    let device = open_direct(&disk.path());
    write(&device, 1, 1);
    let before = disk.flushes();
    write_synced(&device, 2, 2);
    assert!(disk.flushes() > before, "no flush has come");
    write(&device, 3, 3);
    drop(device);
    cut(&mut disk, Survivors::None);
    let device = open_direct(&disk.path());
    let found: Vec<u8> = (1..4).map(|block| read(&device, block)).collect();
    assert_eq!(found, [1, 2, 0]);
}

/// From the moment of the cut no request is answered, so that no process can act on an answer; afterwards there are errors.
#[test]
fn whoever_asks_during_the_cut_gets_no_answer_and_then_an_error() {
    let (_directory, mut disk) = disk(4 << 20);
    let device = open_direct(&disk.path());
    disk.fail_power();
    let asking = std::thread::spawn(move || {
        let page = Box::new(Page([7; BLOCK]));
        device.write_all_at(&page.0, 0).and_then(|()| device.sync_data())
    });
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!asking.is_finished(), "there was an answer");
    disk.power_off();
    assert!(asking.join().unwrap().is_err());
    disk.power_on(Survivors::None).unwrap();
    assert_eq!(read(&open_direct(&disk.path()), 0), 0);
}

/// A filesystem finds its way back after a cut: what was fsynced is there, what was only written is not, and the check
/// finds nothing wrong.
fn a_filesystem_recovers(kind: Kind, size: u64) {
    let (directory, mut disk) = disk(size);
    kind.make(&disk.path());
    let mounted = Mounted::mount(kind, &disk.path(), &directory.path().join("mount"));
    let loose = mounted.path().join("loose");
    fs::write(&loose, [0; 4 * BLOCK]).unwrap();
    File::open(&loose).unwrap().sync_all().unwrap();
    let mut mounted = Some(mounted);
    for round in 1..=4u8 {
        let directory = mounted.take().unwrap();
        let kept = |round| directory.path().join(format!("kept{round}"));
        fs::write(kept(round), [round; 10_000]).unwrap();
        File::open(kept(round)).unwrap().sync_all().unwrap();
        let file = open_direct(&loose);
        (0..4).for_each(|block| write(&file, block, round));
        drop(file);
        disk.fail_power();
        disk.power_off();
        let at = directory.path().to_owned();
        directory.unmount();
        let chance = round % 2 == 0;
        let survivors = if chance { Survivors::Some { seed: round.into() } } else { Survivors::None };
        let toll = cut(&mut disk, survivors);
        assert!(toll.lost + toll.kept + toll.torn >= 4, "nothing was at stake: {toll:?}");
        // Only after a mount, which replays the journal, does a check mean something.
        Mounted::mount(kind, &disk.path(), &at).unmount();
        kind.check(&disk.path());
        let directory = mounted.insert(Mounted::mount(kind, &disk.path(), &at));
        for earlier in 1..=round {
            let data = fs::read(directory.path().join(format!("kept{earlier}"))).unwrap();
            assert!(data == [earlier; 10_000], "kept{earlier} after cut {round}");
        }
        let data = fs::read(&loose).unwrap();
        assert!(chance || !data.contains(&round), "written without a flush, and not lost");
    }
}

#[test]
fn ext4_recovers() {
    a_filesystem_recovers(Kind::Ext4, 64 << 20);
}

#[test]
fn xfs_recovers() {
    a_filesystem_recovers(Kind::Xfs, 320 << 20);
}
