//! The delay for a guest when the owner of a disk without a log does not answer.

use std::thread;
use std::time::Duration;

use weir_block::Nanos;

use super::{TTL, connect, others};
use crate::common::{BLOCK, Bench, SOON, alone};

/// Long enough to tell one grace from two.
const GRACE: Duration = Duration::from_secs(6);

/// The end of the right (a lease, and a grant that was given at its end), looking for it, a busy machine.
const BESIDES: Duration = Duration::from_secs(4);

/// Time from `start` until an operation succeeds on some node but the former owner.
fn until(
    bench: &Bench,
    former: &str,
    start: Nanos,
    what: &str,
    mut works: impl FnMut(&str) -> bool,
) -> Duration {
    loop {
        for node in others(bench, former) {
            if works(&node) {
                return Nanos::now() - start;
            }
        }
        assert!(Nanos::now() < start + SOON, "no {what}{}", bench.logs());
        thread::sleep(Duration::from_millis(20));
    }
}

/// The former owner's last writes may be on their way to the backing for one grace after its right has ended (P4), and no longer.
#[test]
fn a_disk_without_a_log_is_back_after_one_grace() {
    let _turn = alone();
    let bench = Bench::up(3, "write-through", |config| (config.lease_ttl, config.fence_grace) = (TTL, GRACE));
    let former = bench.owner();
    let block = vec![1; BLOCK as usize];
    connect(&bench, &former, SOON).unwrap().write(0, &block, false).unwrap();

    let stopped = Nanos::now();
    bench.lab.pause(&former).unwrap();
    let mut data = vec![0; BLOCK as usize];
    let read = until(&bench, &former, stopped, "read", |node| {
        connect(&bench, node, SOON).is_ok_and(|mut client| client.read(0, &mut data).is_ok())
    });
    assert_eq!(data, block);
    let written = until(&bench, &former, stopped, "write", |node| {
        connect(&bench, node, SOON)
            .is_ok_and(|mut client| client.write(0, &[2; BLOCK as usize], true).is_ok())
    });
    eprintln!("after the owner fell silent: first read {read:?}, first write {written:?}, grace {GRACE:?}");

    bench.lab.resume(&former).unwrap();
    thread::sleep(TTL);
    connect(&bench, &bench.owner(), SOON).unwrap().read(0, &mut data).unwrap();
    assert_eq!(data, [2; BLOCK as usize], "the write of the new owner is gone{}", bench.logs());
    assert!(read >= GRACE, "the former owner's writes may be under way, {read:?}{}", bench.logs());
    assert!(written < GRACE + BESIDES, "the grace was waited for twice: {written:?}{}", bench.logs());
}
