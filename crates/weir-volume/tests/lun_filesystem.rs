//! The filesystem on a shared LUN: real ext4 and XFS, on loop devices that are two paths to one image.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::{LoopDevice, run, scratch};
use weir_block::Nanos;
use weir_volume::lun::filesystem::mount::exclusive;
use weir_volume::lun::filesystem::pages::Pages;
use weir_volume::lun::filesystem::space::{Zeroes, allocate};
use weir_volume::lun::filesystem::superblock::{Content, Kind, Unsuitable, parse};
use weir_volume::lun::filesystem::{Mounted, Superblock, content, layout, open_lun};
use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::serving::{FileWork, OpenedDisk, WorkFile};
use weir_volume::snapshot::Files;
use weir_volume::{DiskFiles, LunVolume, Mark, Trace};

const MIB: u64 = 1 << 20;
/// mkfs.xfs makes nothing smaller.
const SIZE: u64 = 300 * MIB;

fn format(target: &Path, command: &str) {
    let mut words = command.split(' ');
    run(Command::new(words.next().unwrap()).args(words).arg(target));
}

/// Formats an image.
fn image(directory: &Path, command: &str) -> std::path::PathBuf {
    let path = directory.join("lun");
    let _ = std::fs::remove_file(&path);
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    format(&path, command);
    path
}

fn superblock(path: &Path) -> Superblock {
    match content(&File::open(path).unwrap(), path).unwrap() {
        Content::Filesystem(found) => found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn filesystems_are_identified_without_a_mount() {
    let directory = scratch();
    for (command, kind, sector) in [
        ("mkfs.ext4 -q -F -b 4096 -L gold", Kind::Ext4, 4096),
        ("mkfs.ext4 -q -F -b 1024 -L gold", Kind::Ext4, 1024),
        ("mkfs.xfs -q -f -L gold", Kind::Xfs, 512),
        ("mkfs.xfs -q -f -s size=4096 -L gold", Kind::Xfs, 4096),
    ] {
        let path = image(directory.path(), command);
        let found = superblock(&path);
        assert_eq!((found.kind, found.unsuitable.clone()), (kind, None), "{command}");
        assert_eq!((found.label.as_str(), found.sector, found.reflink), ("gold", sector, kind == Kind::Xfs));
        assert!(found.size <= SIZE && found.size > SIZE - 16 * MIB, "{}", found.size);
        let output = Command::new("blkid").args(["-s", "UUID", "-o", "value"]).arg(&path).output().unwrap();
        let uuid: String = found.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim().replace('-', ""), uuid);
    }
}

#[test]
fn features_that_break_the_protocol_are_refused_by_name() {
    let directory = scratch();
    let refused = |command: &str, after: Option<&str>, words: &str| {
        let path = image(directory.path(), command);
        if let Some(after) = after {
            format(&path, after);
        }
        let why = superblock(&path).unsuitable.map(|why| why.to_string());
        assert!(why.as_ref().is_some_and(|why| why.contains(words)), "{command}: {why:?} has no {words:?}");
    };
    refused("mkfs.ext4 -q -F -O ^has_journal", None, "has_journal");
    refused("mkfs.ext4 -q -F -O inline_data", None, "inline_data");
    refused("mkfs.ext4 -q -F -O encrypt", None, "encrypt");
    refused("mkfs.ext4 -q -F -O mmp", None, "mmp");
    refused("mkfs.ext4 -q -F -O ^extent,^64bit", None, "extent");
    refused("mkfs.ext4 -q -F", Some("tune2fs -o journal_data"), "data=journal");
    refused("mkfs.ext4 -q -F", Some("tune2fs -E mount_opts=data=journal"), "data=journal");
    refused("mkfs.xfs -q -f -m crc=0,finobt=0,reflink=0", None, "version 4");
}

#[test]
fn a_damaged_superblock_is_told_from_a_good_one() {
    let directory = scratch();
    for (command, at) in [("mkfs.ext4 -q -F", 1024 + 0x78), ("mkfs.xfs -q -f", 110)] {
        let path = image(directory.path(), command);
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        file.write_all_at(b"!", at).unwrap();
        assert_eq!(superblock(&path).unsuitable, Some(Unsuitable::Damaged), "{command}");
        file.write_all_at(&[0; 4096], 0).unwrap();
        let mut rest = vec![0; 4096];
        file.read_exact_at(&mut rest, 0).unwrap();
        assert_eq!(parse(&rest), Content::Other);
    }
}

/// A buffer for direct I/O.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

fn direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn mounted(command: &str) -> Option<(LoopDevice, LoopDevice, Mounted)> {
    let first = LoopDevice::new(SIZE)?;
    format(&first.device, command);
    let second = first.second_path();
    let mounted = Mounted::new(&first.device).unwrap();
    Some((first, second, mounted))
}

#[test]
fn nobody_else_reaches_a_detached_mount() {
    for command in ["mkfs.ext4 -q -b 4096", "mkfs.xfs -q -f"] {
        let Some((lun, _second, mounted)) = mounted(command) else { return };
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!table.contains(lun.device.to_str().unwrap()), "{table}");
        mounted.create("disk").unwrap();
        assert!(mounted.create("disk").is_err(), "it exists");
        for name in ["", "..", "../disk", "a/b", "/etc/passwd", "none"] {
            assert!(mounted.open(name).is_err(), "{name:?}");
        }
        // Its end is the proof for a successor on this host.
        assert!(exclusive(&lun.device).unwrap_err().is_busy());
        assert!(Mounted::new(&lun.device).unwrap_err().is_busy(), "mounted twice");
        drop(mounted);
        exclusive(&lun.device).unwrap();
        Mounted::new(&lun.device).unwrap().open("disk").unwrap();
    }
}

#[test]
fn what_another_node_writes_to_granted_blocks_is_in_the_file() {
    for command in ["mkfs.ext4 -q -b 4096", "mkfs.xfs -q -f"] {
        let Some((_first, second, mounted)) = mounted(command) else { return };
        let file = mounted.create("disk").unwrap();
        file.set_len(64 * MIB).unwrap();
        let whole = |lease| vec![Piece { start: 0, end: 64 * MIB, lease }];
        assert_eq!(layout(&file, 0..64 * MIB).unwrap(), whole(Lease::Hole), "{command}");
        let granted = allocate(&file, Path::new("disk"), 8 * MIB..24 * MIB, &Zeroes::default()).unwrap();
        let pieces = layout(&file, 0..64 * MIB).unwrap();
        assert_eq!(pieces.first().unwrap().lease, Lease::Hole);
        assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start), "{pieces:?}");
        assert_eq!(pieces.last().unwrap().end, 64 * MIB);
        let written = |piece: &Piece| matches!(piece.lease, Lease::ReadWrite(_));
        assert!(
            pieces.iter().filter(|piece| written(piece)).map(|piece| piece.end - piece.start).sum::<u64>()
                == 16 * MIB
        );
        // Each extent's first and last page, on the other path.
        let path = direct(&second.device);
        let mut page = Box::new(Page([0; 4096]));
        for (number, extent) in granted.iter().enumerate() {
            for (at, byte) in [(0, 1), (extent.length - 4096, 2)] {
                page.0.fill(number as u8 * 2 + byte);
                path.write_all_at(&page.0, extent.physical + at).unwrap();
                page.0.fill(0);
                file.read_exact_at(&mut page.0, extent.start + at).unwrap();
                assert!(
                    page.0.iter().all(|found| *found == number as u8 * 2 + byte),
                    "{command}, {extent:?} + {at}"
                );
            }
        }
        // A part of a granted extent is a lease further on in the LUN.
        let part = layout(&file, 12 * MIB..12 * MIB + 4096).unwrap();
        let whole = granted.iter().find(|one| one.start <= 12 * MIB && one.end() > 12 * MIB).unwrap();
        assert_eq!(part[0].lease, Lease::ReadWrite(whole.physical + 12 * MIB - whole.start));
        assert_eq!((part.len(), part[0].start, part[0].end), (1, 12 * MIB, 12 * MIB + 4096));
        mounted.sync().unwrap();
    }
}

#[test]
fn space_that_is_only_reserved_is_not_granted() {
    for command in ["mkfs.ext4 -q -b 4096", "mkfs.xfs -q -f"] {
        let Some((_first, _second, mounted)) = mounted(command) else { return };
        let file = mounted.create("disk").unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 4 * MIB).unwrap();
        let reserved = layout(&file, 0..4 * MIB).unwrap();
        assert!(reserved.iter().all(|piece| piece.lease == Lease::Nothing), "{command}: {reserved:?}");
        // Written, it is.
        allocate(&file, Path::new("disk"), 0..4 * MIB, &Zeroes::default()).unwrap();
    }
}

#[test]
fn shared_blocks_are_for_reading() {
    let Some((_first, _second, mounted)) = mounted("mkfs.xfs -q -f") else { return };
    let (gold, clone) = (mounted.create("gold").unwrap(), mounted.create("clone").unwrap());
    allocate(&gold, Path::new("gold"), 0..MIB, &Zeroes::default()).unwrap();
    rustix::fs::ioctl_ficlone(&clone, &gold).unwrap();
    for file in [&gold, &clone] {
        let pieces = layout(file, 0..MIB).unwrap();
        assert!(pieces.iter().all(|piece| matches!(piece.lease, Lease::ReadOnly(_))), "{pieces:?}");
    }
    // Zeroes that replace shared blocks get blocks of their own.
    allocate(&clone, Path::new("clone"), 0..MIB, &Zeroes::default()).unwrap();
}

/// io_uring leaves a write that has a time to change to another thread, and later writes come before it.
#[test]
fn writes_change_no_times_on_xfs() {
    let Some((_first, _second, mounted)) = mounted("mkfs.xfs -q -f") else { return };
    let plain = mounted.create("d.raw").unwrap();
    plain.write_all_at(&Page([1; 4096]).0, 0).unwrap();
    let times = || {
        let found = plain.metadata().unwrap();
        (found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec())
    };
    let file = mounted.open_without_times(&plain).unwrap();
    // Longer than a tick of the kernel's clock.
    let tick = || std::thread::sleep(std::time::Duration::from_millis(30));
    let before = times();
    tick();
    file.write_all_at(&Page([2; 4096]).0, 0).unwrap();
    assert_eq!(times(), before);
    let mut found = Page([0; 4096]);
    plain.read_exact_at(&mut found.0, 0).unwrap();
    assert!(found.0 == [2; 4096], "it is the same file");
    assert!(file.write_all_at(&[3; 100], 0).is_err(), "and direct I/O");
    let flags = rustix::io::fcntl_getfd(&file).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    tick();
    plain.write_all_at(&Page([4; 4096]).0, 0).unwrap();
    assert_ne!(times(), before, "the filesystem keeps times");
}

#[test]
fn a_full_filesystem_is_told_from_other_failures() {
    for command in ["mkfs.ext4 -q -b 4096", "mkfs.xfs -q -f"] {
        let Some((_first, _second, mounted)) = mounted(command) else { return };
        let file = mounted.create("disk").unwrap();
        let full = allocate(&file, Path::new("disk"), 0..SIZE, &Zeroes::default()).unwrap_err();
        assert!(full.is_full(), "{command}: {full}");
    }
}

/// Fills what is left of a filesystem by a file, with single blocks free between others.
fn all_but_single_blocks(mounted: &Mounted, free: u64) {
    let file = mounted.create("filler").unwrap();
    let (zeroes, mut at) = (Zeroes::default(), 0);
    for step in [MIB, 64 << 10, 4096] {
        while allocate(&file, Path::new("filler"), at..at + step, &zeroes).is_ok() {
            at += step;
        }
    }
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    for number in 0..free {
        rustix::fs::fallocate(&file, flags, (100 + 2 * number) * 4096, 4096).unwrap();
    }
    file.sync_all().unwrap();
}

/// The filesystem keeps the blocks of a copy that a failed write has begun. A later write would move the file to them, while the owner holds the
/// blocks that the file showed (I1, I3).
#[test]
fn a_write_that_fails_half_way_leaves_no_blocks_for_a_copy() {
    let Some((_first, _second, mounted)) = mounted("mkfs.xfs -q -f -m reflink=1") else { return };
    let (file, between) = (mounted.create("disk").unwrap(), mounted.create("between").unwrap());
    // Block by block, so that a write over them is several steps of the filesystem.
    for number in 0..256 {
        file.write_all_at(&Page([1; 4096]).0, number * 4096).unwrap();
        between.write_all_at(&Page([2; 4096]).0, number * 4096).unwrap();
    }
    let snapshot = mounted.create("snapshot").unwrap();
    let mounted = Arc::new(mounted);
    // As each disk's file is, for copies of single blocks.
    OpenedDisk::open(&mounted, "disk", Mark::of("n1#1")).unwrap();
    rustix::fs::ioctl_ficlone(&snapshot, &file).unwrap();
    all_but_single_blocks(&mounted, 24);
    let range = (0, 64 * 4096);
    let full = file.write_all_at(Pages::new(64 * 4096).bytes(), 0).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let work = WorkFile {
        file: mounted.open("disk").unwrap(),
        path: "disk".into(),
        zeroes: Zeroes::default(),
        mounted: Arc::clone(&mounted),
        grants: true.into(),
    };
    let settled = work.settle(range, range).unwrap();
    assert_eq!(settled, layout(&file, range.0..range.1).unwrap());
    let mut page = Page([0; 4096]);
    for number in 0..64 {
        file.read_exact_at(&mut page.0, number * 4096).unwrap();
        assert!(page.0 == [1; 4096], "block {number}");
    }
    // Nothing is shared any more, and the owner may write to every block.
    drop(snapshot);
    mounted.remove("snapshot").unwrap();
    mounted.sync().unwrap();
    let is_own = |pieces: &[Piece]| pieces.iter().all(|piece| matches!(piece.lease, Lease::ReadWrite(_)));
    let deadline = Nanos::now() + Duration::from_secs(10);
    let mut granted = work.look(range).unwrap();
    while !is_own(&granted) && Nanos::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        granted = work.look(range).unwrap();
    }
    assert!(is_own(&granted), "{granted:?}");
    for number in 0..64 {
        file.write_all_at(&Page([3; 4096]).0, number * 4096).unwrap();
    }
    file.sync_all().unwrap();
    assert_eq!(work.look(range).unwrap(), granted, "a write to blocks that are granted has moved them");
}

/// What is left of the second step is more than what is free then, and has its blocks already.
#[test]
fn a_thick_disk_takes_most_of_a_volume_in_several_steps() {
    for command in ["mkfs.ext4 -q -b 4096", "mkfs.xfs -q -f"] {
        let Some((_first, _second, mounted)) = mounted(command) else { return };
        let (volume, size) = (LunVolume(Arc::new(mounted)), 200 * MIB);
        volume.create_disk("d", size).unwrap();
        let file = Files::open(&volume, "d.raw").unwrap();
        let (mut at, mut steps) = (0, 0);
        while at < size {
            at = volume.fill(&file, Path::new("d.raw"), at..size, Duration::ZERO).unwrap();
            steps += 1;
        }
        assert!(steps > 2 && volume.space().unwrap().available < size / 2, "{command}: {steps} steps");
        assert!(volume.allocated("d").unwrap() >= size);
    }
}

/// The kernel would say "invalid argument", or nothing.
#[test]
fn a_path_with_larger_sectors_is_refused() {
    for (command, sector) in [("mkfs.xfs -q -f", 512), ("mkfs.ext4 -q -b 1024", 1024)] {
        let Some(lun) = LoopDevice::new(SIZE) else { return };
        format(&lun.device, command);
        let path = lun.path_with_sectors(4096);
        let text = Mounted::new(&path.device).unwrap_err().to_string();
        assert!(text.contains(&format!("with sectors of {sector} bytes")), "{text}");
        assert!(text.contains("reaches it in sectors of 4096 bytes"), "{text}");
        drop(path);
        Mounted::new(&lun.device).unwrap();
    }
}

#[test]
fn what_cannot_be_mounted_says_why() {
    let Some(lun) = LoopDevice::new(SIZE) else { return };
    let said = |lun: &LoopDevice| Mounted::new(&lun.device).unwrap_err().to_string();
    assert!(said(&lun).contains("neither ext4 nor XFS"), "{}", said(&lun));
    format(&lun.device, "mkfs.ext4 -q -O ^has_journal");
    assert!(said(&lun).contains("no journal"), "{}", said(&lun));
    // Its root directory is damaged, which only the kernel finds: inode 128, of 512 bytes.
    format(&lun.device, "mkfs.xfs -q -f");
    direct(&lun.device).write_all_at(&Page([0xA5; 4096]).0, 128 * 512).unwrap();
    let text = said(&lun);
    assert!(text.contains("cannot be mounted as xfs"), "{text}");
}

/// A host gives the name of a device that is gone to the next one.
#[test]
fn a_path_that_leads_to_another_lun_is_not_used() {
    let (Some(first), Some(second)) = (LoopDevice::new(SIZE), LoopDevice::new(SIZE)) else { return };
    for device in [&first.device, &second.device] {
        format(device, "mkfs.xfs -q -f");
    }
    let uuid = superblock(&first.device).uuid;
    let mark = Mark::of("n1#1");
    let lun = open_lun(&first.device, uuid, None, true, Some(mark)).unwrap();
    assert_eq!(
        mark.probe(&first.device).unwrap(),
        Trace::InFlight,
        "a later process of this node waits for its end"
    );
    drop(lun);
    assert_eq!(mark.probe(&first.device).unwrap(), Trace::Gone);
    open_lun(&first.second_path().device, uuid, None, false, None).unwrap();
    let refused = open_lun(&second.device, uuid, None, true, None).unwrap_err().to_string();
    let words = "does not lead to the LUN of this volume any more";
    assert!(refused.starts_with(second.device.to_str().unwrap()) && refused.contains(words), "{refused}");
    // Nor one that leads to nothing that a volume has.
    run(Command::new("wipefs").args(["-aq"]).arg(&first.device));
    assert!(open_lun(&first.device, uuid, None, false, None).unwrap_err().to_string().contains(words));
}

/// The kernel goes on with it, and says so nowhere.
#[test]
fn a_filesystem_that_has_become_read_only_does_not_pass_for_a_good_one() {
    let Some(device) = LoopDevice::new(SIZE) else { return };
    format(&device.device, "mkfs.ext4 -q -F -b 4096");
    let mounted = Mounted::new(&device.device).unwrap();
    mounted.check().unwrap();
    let name = device.device.file_name().unwrap().to_str().unwrap().to_owned();
    // As when the filesystem finds an error in itself.
    std::fs::write(format!("/sys/fs/ext4/{name}/trigger_fs_error"), "a test").unwrap();
    assert!(mounted.check().is_err());
}

/// What `xfs_io` does with a file that no path leads to, and says of it.
fn xfs_io(file: &File, command: &str) -> String {
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let output = Command::new("xfs_io").args(["-c", command, &path]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// With a larger hint, XFS keeps blocks that it has allocated for the neighbours of a copied one, and moves them later.
#[test]
fn xfs_allocates_no_more_around_a_write_than_is_written() {
    // 128 KiB, in blocks.
    let Some((_lun, _second, mounted)) = mounted("mkfs.xfs -q -f -d extszinherit=32") else { return };
    let mounted = Arc::new(mounted);
    let new = mounted.create("new").unwrap();
    assert!(xfs_io(&new, "extsize").starts_with("[0]"), "a file inherits nothing");
    // A file of before that, or that somebody has given a hint.
    let given = mounted.create("given").unwrap();
    xfs_io(&given, "extsize 128k");
    assert!(xfs_io(&given, "extsize").starts_with("[131072]"));
    for (name, file) in [("new", &new), ("given", &given)] {
        file.set_len(MIB).unwrap();
        OpenedDisk::open(&mounted, name, Mark::of("n1#1")).unwrap();
        assert!(xfs_io(file, "extsize").starts_with("[0]"), "{name}");
        assert!(xfs_io(file, "cowextsize").starts_with("[4096]"), "{name}");
    }
    // The kernel takes the hint from no file that has extents.
    let written = mounted.create("written").unwrap();
    xfs_io(&written, "extsize 128k");
    written.write_all_at(&Page([1; 4096]).0, 0).unwrap();
    // It is served, and its blocks are granted to nobody.
    OpenedDisk::open(&mounted, "written", Mark::of("n1#1")).unwrap();
    assert!(xfs_io(&written, "extsize").starts_with("[131072]"));
    let work = WorkFile {
        file: written,
        path: "written".into(),
        zeroes: Zeroes::default(),
        mounted,
        grants: false.into(),
    };
    assert_eq!(work.look((0, MIB)).unwrap(), []);
}
