//! A LUN that is to be formatted: whatever is on it is found, wherever it is, and not destroyed without a word. Real loop devices.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::{LoopDevice, run};
use weir_volume::lun::filesystem::{Content, Kind};
use weir_volume::lun::heartbeat::VolumeId;
use weir_volume::lun::setup::{Lun, SetupError, Wish};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 320 * MIB;
/// Read in samples.
const LARGE: u64 = 5 << 30;

fn write(device: &Path, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(device).unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.sync_all().unwrap();
}

fn wish(lun: &Lun, destroy: bool) -> Wish {
    Wish { format: Some(Kind::Xfs), identity: Some(lun.identity.clone()), destroy }
}

fn format(lun: &Lun, destroy: bool) -> Result<(), SetupError> {
    let wish = wish(lun, destroy);
    let plan = lun.plan(&wish).unwrap();
    lun.set_up(&plan, &wish, VolumeId([7; 16]), "v", &|| true).map(drop)
}

/// Data that begins behind the place of every signature that Weir itself knows: it is in the preview, and only a further word destroys it.
#[test]
fn data_anywhere_on_a_lun_is_named_and_not_destroyed_without_a_word() {
    let Some(device) = LoopDevice::new(SIZE) else { return };
    // At VMFS' place; in the middle; a GPT's backup at the end.
    let cases: [(u64, &[u8], &str); 3] = [
        (MIB, &[1], "unrecognised data (not zero at byte 1048576)"),
        (SIZE / 2 + 4097, b"an application's", "unrecognised data"),
        (SIZE - 512, b"EFI PART", "the backup of a gpt partition table"),
    ];
    for (at, bytes, name) in cases {
        write(&device.device, at, bytes);
        let lun = Lun::examine(&device.device).unwrap();
        assert!(!lun.is_blank());
        let preview = lun.plan(&wish(&lun, false)).unwrap().describe(&lun);
        assert!(preview.contains("DESTROYS") && preview.contains(name), "{preview}");
        let refused = format(&lun, false).unwrap_err();
        assert!(matches!(&refused, SetupError::HasData { found, .. } if found.contains(name)), "{refused}");
        write(&device.device, at, &vec![0; bytes.len()]);
        assert!(Lun::examine(&device.device).unwrap().is_blank());
    }
    write(&device.device, MIB, &[1]);
    let lun = Lun::examine(&device.device).unwrap();
    format(&lun, true).unwrap();
    let after = Lun::examine(&device.device).unwrap();
    assert!(matches!(&after.content, Content::Filesystem(found) if found.kind == Kind::Xfs), "{after:?}");
    assert_eq!(after.survey.recognised.len(), 1, "{after:?}");
    // And what is there now is not destroyed without a word, either.
    assert!(matches!(format(&after, false), Err(SetupError::HasData { .. })));
}

/// A tree of hashes, for example, that its filesystem does not know of.
#[test]
fn data_behind_a_filesystem_is_not_destroyed_without_a_word() {
    let Some(device) = LoopDevice::new(SIZE) else { return };
    const FILESYSTEM: u64 = 300 * MIB;
    let size = format!("size={FILESYSTEM}");
    run(Command::new("mkfs.xfs").args(["-q", "-s", "size=4096", "-d", &size]).arg(&device.device));
    let set_up = |destroy| {
        let lun = Lun::examine(&device.device).unwrap();
        let wish = Wish { format: None, ..wish(&lun, destroy) };
        lun.set_up(&lun.plan(&wish).unwrap(), &wish, VolumeId([7; 16]), "v", &|| true).map(drop)
    };
    // In the first block, and in the last one behind zeroes.
    for at in [FILESYSTEM, FILESYSTEM + (256 << 10) - 1] {
        write(&device.device, at, b"#");
        let refused = set_up(false).unwrap_err();
        assert!(matches!(refused, SetupError::DataBehind { at: FILESYSTEM, .. }), "{refused}");
        let mut kept = [0; 1];
        OpenOptions::new().read(true).open(&device.device).unwrap().read_exact_at(&mut kept, at).unwrap();
        assert_eq!(&kept, b"#");
        write(&device.device, at, &[0]);
    }
    set_up(false).unwrap();
    // The area of a volume that was deleted since.
    set_up(false).unwrap();
    write(&device.device, FILESYSTEM, &[b'#'; 4096]);
    set_up(false).unwrap_err();
    set_up(true).unwrap();
}

/// Another node has made it a volume between the look at it and the first write.
#[test]
fn what_has_been_written_since_the_lun_was_examined_is_not_destroyed() {
    let Some(device) = LoopDevice::new(SIZE) else { return };
    let blank = Lun::examine(&device.device).unwrap();
    format(&blank, false).unwrap();
    let made = Lun::examine(&device.device).unwrap();
    let refused = format(&blank, true).unwrap_err();
    assert!(matches!(&refused, SetupError::Changed { now, .. } if now.contains("xfs")), "{refused}");
    assert_eq!(Lun::examine(&device.device).unwrap(), made, "the filesystem is as it was");
    // Nor is anything written by a process that is not the only one any more.
    let wish = wish(&made, true);
    let plan = made.plan(&wish).unwrap();
    let ended = made.set_up(&plan, &wish, VolumeId([8; 16]), "v", &|| false).unwrap_err();
    assert!(matches!(ended, SetupError::Ended(_)), "{ended}");
    assert_eq!(Lun::examine(&device.device).unwrap(), made);
}

#[test]
fn what_was_read_of_a_large_lun_is_said_and_both_ends_are_part_of_it() {
    let Some(device) = LoopDevice::new(LARGE) else { return };
    let lun = Lun::examine(&device.device).unwrap();
    let preview = lun.plan(&wish(&lun, false)).unwrap().describe(&lun);
    let said = "only zeroes (read: the first and the last 64MiB, and 1024 samples of 64KiB between)";
    assert!(preview.contains(said), "{preview}");
    let stride = (LARGE - 128 * MIB) / 1024 / 4096 * 4096;
    for at in [64 * MIB - 1, 64 * MIB + 700 * stride + 65_535, LARGE - 64 * MIB, LARGE - 1] {
        write(&device.device, at, &[1]);
        assert_eq!(Lun::examine(&device.device).unwrap().survey.data_at, Some(at));
        write(&device.device, at, &[0]);
    }
}

#[test]
fn formats_of_others_are_recognised() {
    let Some(device) = LoopDevice::new(SIZE) else { return };
    run(Command::new("mkswap").args(["-q", "-L", "old"]).arg(&device.device));
    let lun = Lun::examine(&device.device).unwrap();
    assert_eq!(lun.describe(), "swap \"old\"");
    let refused = lun.plan(&Wish::default()).unwrap_err().to_string();
    assert!(refused.contains("swap \"old\"") && refused.contains("--format"), "{refused}");
}

/// One half of a mirror has the filesystem at its begin, and the mark of the array at its end. Used by itself, it would differ from the
/// other half.
#[test]
fn a_part_of_an_array_is_not_used_as_the_filesystem_that_it_seems_to_have() {
    let Some(device) = LoopDevice::new(SIZE) else { return };
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096"]).arg(&device.device).arg("65536"));
    let at = SIZE / 65_536 * 65_536 - 65_536;
    // `mdp_super_t` (Linux, `include/uapi/linux/raid/md_p.h`): the magic, version 0.90.0.
    let mut mark = [0; 4096];
    for (field, value) in [(0, 0xA92B_4EFC_u32), (2, 90), (7, 1), (9, 2), (10, 2)] {
        mark[field * 4..][..4].copy_from_slice(&value.to_le_bytes());
    }
    write(&device.device, at, &mark);
    let lun = Lun::examine(&device.device).unwrap();
    let refused = lun.plan(&Wish { identity: Some(lun.identity.clone()), ..Wish::default() }).unwrap_err();
    assert!(refused.to_string().contains("linux_raid_member"), "{refused}");
}
