//! A new owner whose former one may still be in its right (P2, P7).

use weir_accel::Former;
use weir_block::{Layer, RequestKind};

use crate::{Disk, SIZE, alone, write_through};

#[test]
fn writes_wait_before_the_log_until_the_former_owners_right_has_ended() {
    let mut disk = Disk::adapted(alone(), Former::Serving, 16 << 20, |_| {});
    disk.settle();
    assert!(!disk.accel.has_room(RequestKind::Write, 512) && disk.accel.has_room(RequestKind::Read, 512));
    disk.read(1, 0, 512);
    disk.settle();
    assert_eq!(disk.tags(), [1], "its acknowledged writes are all in the log that was inherited");
    disk.accel.former(Former::Silent);
    disk.settle();
    assert!(disk.accel.has_room(RequestKind::Write, 512));
    disk.write(2, 0, 7);
    disk.settle();
    assert_eq!(disk.tags(), [1, 2]);
    assert!(disk.script.borrow().bytes.iter().all(|byte| *byte == 0), "its I/O may be in flight (P4)");
}

#[test]
fn nothing_is_answered_without_a_log_until_the_former_owners_io_has_ended() {
    let mut disk = Disk::adapted(write_through(), Former::Serving, 16 << 20, |_| {});
    disk.read(1, 0, 512);
    disk.settle();
    disk.accel.former(Former::Silent);
    disk.settle();
    assert!(disk.tags().is_empty() && disk.accel.has_room(RequestKind::Write, SIZE as u64));
    disk.accel.former(Former::Stopped);
    disk.settle();
    assert_eq!(disk.tags(), [1]);
}
