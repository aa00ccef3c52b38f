//! A new owner whose former one may still be in its right (P2, P7).

use std::time::Duration;

use weir_accel::Former;
use weir_block::{Code, Layer, RequestKind};

use crate::{Disk, SIZE, alone, write_through};

#[test]
fn writes_wait_before_the_log_until_the_former_owners_right_has_ended() {
    let mut disk = Disk::adapted(alone(), Former::Serving, 16 << 20, |_| {});
    disk.settle();
    disk.write(1, 0, 7);
    disk.read(2, 0, 512);
    disk.settle();
    assert_eq!(
        disk.tags(),
        [2],
        "the former owner's acknowledged writes are all in the log that was inherited"
    );
    let status = disk.accel.status();
    assert_eq!(
        (status.marks.appended, status.log_used, disk.accel.in_flight()),
        (0, 0, 1),
        "nobody inherits it"
    );
    assert!(!disk.accel.is_drained());
    disk.accel.former(Former::Silent);
    disk.settle();
    assert_eq!(disk.tags(), [1, 2]);
    assert!(disk.script.borrow().bytes.iter().all(|byte| *byte == 0), "its I/O may be in flight (P4)");
    disk.accel.former(Former::Stopped);
    disk.destages(|bytes| bytes[..512] == [7; 512]);
}

/// P10: and the order stays.
#[test]
fn only_so_many_writes_wait() {
    let mut disk = Disk::adapted(alone(), Former::Serving, 64 << 20, |_| {});
    disk.settle();
    let mut count = 0;
    while disk.accel.has_room(RequestKind::Write, 512) {
        disk.write(count, 0, count as u8);
        count += 1;
        assert!(count < 10_000, "no end of room");
    }
    assert!(count > 100 && disk.accel.has_room(RequestKind::Read, 512), "{count}");
    disk.accel.former(Former::Stopped);
    disk.destages(|bytes| bytes[0] == (count - 1) as u8);
    assert_eq!(disk.tags(), (0..count).collect::<Vec<_>>());
    assert!(disk.accel.has_room(RequestKind::Write, 512));
}

#[test]
fn writes_that_wait_are_refused_once_the_disk_is_anothers() {
    let mut disk = Disk::adapted(alone(), Former::Serving, 16 << 20, |_| {});
    disk.settle();
    disk.write(1, 0, 7);
    disk.settle();
    drop(disk.accel.release(&mut disk.reactor));
    disk.settle();
    let answers: Vec<_> = disk
        .done
        .iter()
        .map(|done| (done.tag.0, done.result.as_ref().err().map(|error| error.code)))
        .collect();
    assert_eq!(answers, [(1, Some(Code::NotOwner))]);
}

#[test]
fn nothing_is_answered_without_a_log_until_the_former_owners_io_has_ended() {
    let mut disk = Disk::adapted(write_through(), Former::Serving, 16 << 20, |_| {});
    disk.read(1, 0, 512);
    disk.write(2, 8, 7);
    disk.settle();
    disk.accel.former(Former::Silent);
    disk.settle();
    assert!(disk.tags().is_empty() && disk.accel.has_room(RequestKind::Write, SIZE as u64));
    disk.accel.former(Former::Stopped);
    disk.run(Duration::from_millis(50));
    assert_eq!(disk.tags(), [1, 2]);
}
