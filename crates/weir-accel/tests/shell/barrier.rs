//! Barriers of destage: the backing is the disk at one point in time, and clients go on.

use std::time::Duration;

use weir_accel::Configuration;
use weir_block::{Layer, Nanos, RequestKind};

use crate::{Disk, alone, write_through};

#[test]
fn the_backing_gets_what_was_acknowledged_before_a_barrier_and_nothing_from_behind_it() {
    let mut disk = Disk::new(alone());
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    disk.write(1, 0, 1);
    disk.write(2, 1, 1);
    disk.settle();
    disk.accel.raise_barrier();
    disk.write(3, 0, 2);
    disk.write(4, 9, 2);
    disk.run(Duration::from_millis(50));
    assert_eq!(disk.tags(), [1, 2, 3, 4], "clients go on");
    assert!(!disk.accel.is_at_barrier(), "the checkpoint is not flushed");
    disk.script.borrow_mut().hold_flushes = false;
    disk.run(Duration::from_millis(50));
    let at = |disk: &Disk, sector: usize| disk.script.borrow().bytes[sector * 512];
    assert!(disk.accel.is_at_barrier());
    assert_eq!((at(&disk, 0), at(&disk, 1), at(&disk, 9)), (1, 1, 0));
    assert!(disk.run(Duration::from_millis(100)) < 20, "it does not spin");
    assert!(!disk.accel.is_drained());
    disk.accel.lower_barrier();
    disk.run(Duration::from_millis(50));
    assert_eq!((at(&disk, 0), at(&disk, 9), disk.accel.is_clean()), (2, 2, true));
    assert!(!disk.accel.is_at_barrier());
}

#[test]
fn writes_past_the_log_wait_for_the_end_of_a_barrier() {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.script.borrow_mut().hold_writes = true;
    // The second waits for the first.
    disk.write(1, 4, 1);
    disk.write(2, 4, 2);
    disk.accel.raise_barrier();
    disk.settle();
    assert!(!disk.accel.is_at_barrier(), "one is on its way");
    disk.script.borrow_mut().hold_writes = false;
    disk.settle();
    assert!(disk.accel.is_at_barrier() && !disk.accel.has_room(RequestKind::Write, 512));
    assert_eq!((disk.tags(), disk.script.borrow().bytes[4 * 512]), (vec![1], 1));
    // The mode changes meanwhile: writes go into the log now, and stay there.
    disk.accel.configured(Configuration { epoch: 2, ..alone() });
    disk.run(Duration::from_millis(50));
    assert_eq!((disk.tags(), disk.script.borrow().bytes[4 * 512]), (vec![1, 2], 1));
    assert!(disk.accel.is_at_barrier());
    disk.accel.lower_barrier();
    disk.run(Duration::from_millis(50));
    assert_eq!((disk.script.borrow().bytes[4 * 512], disk.accel.is_clean()), (2, true));
}

/// Another node may destage by then.
#[test]
fn who_has_no_right_to_serve_is_not_at_its_barrier() {
    let mut disk = Disk::new(alone());
    disk.accel.raise_barrier();
    disk.settle();
    assert!(disk.accel.is_at_barrier());
    disk.set_lease(0);
    assert!(!disk.accel.is_at_barrier());
    disk.set_lease(Nanos::NEVER.0);
    assert!(disk.accel.is_at_barrier());
    disk.accel.release(&mut disk.reactor);
    assert!(!disk.accel.is_at_barrier());
}

#[test]
fn a_disk_that_closes_waits_for_no_barrier() {
    let mut disk = Disk::new(alone());
    disk.settle();
    disk.accel.raise_barrier();
    disk.write(1, 0, 1);
    disk.accel.close();
    disk.run(Duration::from_millis(50));
    assert!(disk.accel.is_drained() && !disk.accel.is_at_barrier());
}
