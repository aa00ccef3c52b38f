//! Flushes: the writes that they cover, and the clients that get the error of a failed one (P6, P8).

use std::time::Duration;

use weir_accel::{AccelNotice, Configuration};
use weir_block::Code;

use crate::backing::Operation;
use crate::{Disk, alone, configuration, write_through};

#[test]
fn a_flush_covers_only_what_ended_before_it_began() {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    disk.flush(1);
    disk.settle();
    disk.write(2, 0, 7);
    disk.settle();
    assert_eq!(disk.tags(), [2]);
    disk.script.borrow_mut().hold_flushes = false;
    disk.settle();
    disk.accel.configured(configuration(2, &[], true, Some(0)));
    disk.settle();
    let before = disk.script.borrow().flushes;
    disk.flush(3);
    disk.settle();
    assert_eq!(disk.script.borrow().flushes, before + 1, "write 2 may be in a volatile cache only");
    disk.flush(4);
    disk.settle();
    assert_eq!(disk.script.borrow().flushes, before + 1, "and now it is not");
    assert_eq!(disk.tags(), [1, 2, 3, 4]);
}

/// Write 1 has gone past the log; write 2 is in it, and the flush of its checkpoint is in flight.
fn checkpoint_is_flushed() -> Disk {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.write(1, 0, 7);
    disk.settle();
    disk.accel.configured(Configuration { epoch: 2, ..alone() });
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    disk.write(2, 8, 8);
    disk.settle();
    disk.run(Duration::from_millis(50));
    assert_eq!((disk.tags(), flushes_under_way(&disk)), (vec![1, 2], 1));
    disk
}

fn flushes_under_way(disk: &Disk) -> usize {
    crate::under_way(disk, |it| matches!(it, Operation::Flush(_)))
}

/// The result of the flush with this tag, which has exactly one.
fn answer(disk: &Disk, tag: u64) -> Result<(), Code> {
    let mut answers = disk.done.iter().filter(|done| done.tag.0 == tag);
    let answer = answers.next().expect("an answer").result.as_ref().map(drop).map_err(|error| error.code);
    assert!(answers.next().is_none());
    answer
}

/// The storage reports a loss once, here to the flush of a checkpoint; write 1 may be part of it.
#[test]
fn whoever_flushes_next_hears_that_a_checkpoints_flush_has_failed() {
    for asked_before in [false, true] {
        let mut disk = checkpoint_is_flushed();
        if asked_before {
            disk.flush(3);
            disk.settle();
        }
        (disk.script.borrow_mut().fails, disk.script.borrow_mut().hold_flushes) = (true, false);
        disk.turn();
        disk.script.borrow_mut().fails = false;
        if !asked_before {
            disk.flush(3);
        }
        disk.settle();
        assert_eq!(answer(&disk, 3), Err(Code::Io), "write 1 may be lost");
        disk.flush(4);
        disk.settle();
        assert_eq!(answer(&disk, 4), Ok(()), "it is said once");
    }
}

/// Nothing that only a client's flush makes durable has been written: its checkpoint alone is written again.
#[test]
fn a_checkpoint_whose_flush_fails_is_written_again_and_nobody_hears_of_it() {
    let mut disk = Disk::new(alone());
    disk.settle();
    disk.flush(1);
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    disk.write(2, 8, 8);
    disk.settle();
    disk.run(Duration::from_millis(50));
    (disk.script.borrow_mut().fails, disk.script.borrow_mut().hold_flushes) = (true, false);
    disk.turn();
    disk.script.borrow_mut().fails = false;
    disk.flush(3);
    disk.run(Duration::from_millis(1_100));
    assert_eq!((answer(&disk, 3), disk.accel.is_clean()), (Ok(()), true));
}

/// An NBD server has ended between a checkpoint's writes and its flush: that is no trouble of the storage, and no loss of a client's.
#[test]
fn a_checkpoint_that_the_backing_has_lost_is_written_again_and_is_no_trouble() {
    let mut disk = checkpoint_is_flushed();
    let before = disk.script.borrow().writes;
    (disk.script.borrow_mut().loses, disk.script.borrow_mut().hold_flushes) = (true, false);
    disk.turn();
    disk.script.borrow_mut().loses = false;
    disk.flush(3);
    disk.run(Duration::from_millis(100));
    assert_eq!((answer(&disk, 3), disk.accel.is_clean()), (Ok(()), true));
    assert_eq!(disk.script.borrow().writes, before + 1, "the checkpoint's one write");
    assert!(!disk.notices.iter().any(|notice| matches!(notice, AccelNotice::Tell("backing-error", _))));
}

#[test]
fn a_clients_flush_waits_for_that_of_a_checkpoint_and_the_other_way_round() {
    let mut disk = checkpoint_is_flushed();
    disk.flush(3);
    disk.settle();
    assert_eq!((flushes_under_way(&disk), disk.tags()), (1, vec![1, 2]));
    assert!(!disk.accel.is_drained());
    disk.script.borrow_mut().hold_flushes = false;
    disk.settle();
    assert_eq!(answer(&disk, 3), Ok(()));

    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    disk.flush(1);
    disk.accel.configured(configuration(2, &[], true, Some(0)));
    disk.settle();
    disk.write(2, 8, 8);
    disk.settle();
    disk.run(Duration::from_millis(50));
    assert_eq!((flushes_under_way(&disk), disk.script.borrow().writes), (1, 1));
    disk.script.borrow_mut().hold_flushes = false;
    disk.run(Duration::from_millis(50));
    assert_eq!((answer(&disk, 1), disk.accel.is_clean(), disk.script.borrow().flushes), (Ok(()), true, 2));
}

#[test]
fn whoever_asks_during_a_flush_is_answered_by_the_next_one_together() {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    for tags in [1..=3, 4..=7] {
        tags.for_each(|tag| disk.flush(tag));
        disk.settle();
    }
    assert_eq!((flushes_under_way(&disk), disk.done.len()), (1, 0));
    disk.script.borrow_mut().hold_flushes = false;
    disk.settle();
    assert_eq!((disk.tags(), disk.script.borrow().flushes), (vec![1, 2, 3, 4, 5, 6, 7], 2));
}

#[test]
fn flushes_that_wait_are_refused_once_the_disk_is_anothers() {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.script.borrow_mut().hold_flushes = true;
    disk.flush(1);
    disk.settle();
    disk.flush(2);
    disk.accel.release(&mut disk.reactor);
    disk.settle();
    assert_eq!((disk.tags(), answer(&disk, 2)), (vec![2], Err(Code::NotOwner)));
    disk.script.borrow_mut().hold_flushes = false;
    disk.settle();
    assert_eq!(answer(&disk, 1), Err(Code::NotOwner));
}
