//! Busy-polling on a processor that another thread also uses.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use weir_block::{Engine, Interest, Nanos, Reactor, ReactorConfig, Token};

/// The processors that this thread may use.
fn processors() -> Vec<usize> {
    // SAFETY: all-zero is an empty set, which the call fills in.
    let (result, set) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), set)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the numbers are those of the set's bits.
    (0..libc::CPU_SETSIZE as usize).filter(|&number| unsafe { libc::CPU_ISSET(number, &set) }).collect()
}

/// Pins this thread to one processor.
fn stay_on(processor: usize) {
    // SAFETY: all-zero is an empty set, and the call reads that set alone.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Number of requests that another processor answers, one at a time, in half a second beside a thread that computes.
fn round_trips(poll: Duration, own: usize, other: usize) -> usize {
    let config = ReactorConfig { engine: Engine::Uring, poll, ..ReactorConfig::default() };
    let mut reactor = Reactor::new(config).unwrap();
    let token = Token { owner: reactor.new_owner(), slot: 0 };
    let (mut near, mut far) = UnixStream::pair().unwrap();
    let answers = std::thread::spawn(move || {
        stay_on(other);
        let mut byte = [0];
        while far.read(&mut byte).unwrap() > 0 {
            far.write_all(&byte).unwrap();
        }
    });
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_over);
    let computes = std::thread::spawn(move || {
        stay_on(own);
        while !seen.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    });
    let (end, mut events, mut rounds) = (Nanos::now() + Duration::from_millis(500), Vec::new(), 0);
    while Nanos::now() < end {
        near.write_all(&[1]).unwrap();
        reactor.watch(near.as_raw_fd(), Interest::Read, token);
        while events.is_empty() {
            reactor.wait(Nanos::now() + Duration::from_secs(10), &mut events).unwrap();
        }
        events.clear();
        near.read_exact(&mut [0]).unwrap();
        rounds += 1;
    }
    is_over.store(true, Ordering::Relaxed);
    drop(near);
    computes.join().unwrap();
    answers.join().unwrap();
    rounds
}

/// A poll yields the processor, and a thread that computes keeps it for its time slice: that cost each request milliseconds. The
/// scheduler prefers a thread that wakes.
#[test]
fn a_neighbour_that_computes_does_not_stop_a_reactor_that_polls() {
    let processors = processors();
    let (own, other) = (processors[0], *processors.last().unwrap());
    stay_on(own);
    let blocking = round_trips(Duration::ZERO, own, other);
    let polling = round_trips(Duration::from_micros(50), own, other);
    println!("round trips in half a second: {blocking} blocking, {polling} polling");
    assert!(polling * 4 > blocking, "{polling} with polling, {blocking} without");
}
