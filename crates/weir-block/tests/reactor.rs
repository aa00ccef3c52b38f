//! Both engines of the reactor against the kernel: files, sockets, wake-ups, deadlines, the end.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use weir_block::{
    Action, Buffer, Engine, Event, Interest, Nanos, Reactor, ReactorConfig, Region, SharedFile, Token,
    WriteSource,
};

const ENGINES: [Engine; 2] = [Engine::Uring, Engine::Epoll];

fn small_reactor(engine: Engine) -> Reactor {
    let reactor = Reactor::new(ReactorConfig {
        entries: 8,
        buffer_limit: 64 << 20,
        engine,
        ..ReactorConfig::default()
    })
    .unwrap();
    assert_eq!(reactor.engine_name(), if engine == Engine::Uring { "io_uring" } else { "epoll" });
    reactor
}

fn token(reactor: &mut Reactor, slot: u32) -> Token {
    Token { owner: reactor.new_owner(), slot }
}

fn temporary() -> (tempfile::NamedTempFile, SharedFile) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let shared = SharedFile::new(file.reopen().unwrap());
    (file, shared)
}

fn filled(reactor: &Reactor, length: usize, byte: u8) -> Buffer {
    let mut buffer = reactor.buffers().take(length).unwrap();
    buffer.bytes_mut().fill(byte);
    buffer
}

/// Waits until `count` events have come, or panics after ten seconds.
fn events(reactor: &mut Reactor, count: usize) -> Vec<Event> {
    let mut events = Vec::new();
    let late = Nanos::now() + Duration::from_secs(10);
    while events.len() < count {
        assert!(Nanos::now() < late, "{} of {count} events within ten seconds", events.len());
        reactor.wait(late, &mut events).unwrap();
    }
    assert_eq!(events.len(), count);
    events
}

fn file_result(event: Event) -> (Result<u64, i32>, Option<Buffer>) {
    match event.action {
        Action::File { result, buffer } => (result, buffer),
        Action::Ready(interest) => panic!("a file operation, not {interest:?}"),
    }
}

fn one_result(reactor: &mut Reactor) -> (Result<u64, i32>, Option<Buffer>) {
    file_result(events(reactor, 1).remove(0))
}

#[test]
fn files_are_written_synced_and_read() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (named, file) = temporary();
        let token = token(&mut reactor, 7);
        let buffer = filled(&reactor, 10_000, 5);
        reactor.write(&file, 1_000, WriteSource::Buffer(buffer), token);
        let event = events(&mut reactor, 1).remove(0);
        assert_eq!(event.token, token);
        let (result, buffer) = file_result(event);
        assert_eq!((result, buffer.unwrap().len()), (Ok(10_000), 10_000), "the buffer comes back");
        reactor.sync(&file, token);
        assert_eq!(one_result(&mut reactor).0, Ok(0));
        let buffer = filled(&reactor, 512, 6);
        reactor.write_durable(&file, 0, WriteSource::Buffer(buffer), token);
        assert_eq!(one_result(&mut reactor).0, Ok(512));
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        reactor.allocate(&file, mode, 4096, 4096, token);
        assert_eq!(one_result(&mut reactor).0, Ok(0));
        let mut expected = vec![0; 11_000];
        expected[1_000..].fill(5);
        expected[..512].fill(6);
        expected[4096..8192].fill(0);
        assert!(std::fs::read(named.path()).unwrap() == expected);
        let buffer = filled(&reactor, 4_000, 9);
        reactor.read(&file, 500, buffer, token);
        let (result, buffer) = one_result(&mut reactor);
        assert_eq!(result, Ok(4_000));
        assert!(buffer.unwrap().bytes() == &expected[500..4_500]);
        assert_eq!(reactor.files_in_flight(), 0);
    }
}

#[test]
fn a_read_is_short_at_the_end_of_the_file_and_only_there() {
    for engine in ENGINES {
        for flags in [0, libc::O_DIRECT] {
            let mut reactor = small_reactor(engine);
            let (named, _) = temporary();
            let length = 100_700;
            std::fs::write(named.path(), vec![3; length]).unwrap();
            let opened = OpenOptions::new().read(true).custom_flags(flags).open(named.path()).unwrap();
            let file = SharedFile::new(opened);
            let token = token(&mut reactor, 0);
            for (offset, expected) in
                [(0, 65_536), (65_536, length - 65_536), (98_304, length - 98_304), (102_400, 0)]
            {
                let buffer = filled(&reactor, 65_536, 0);
                reactor.read(&file, offset as u64, buffer, token);
                let (result, buffer) = one_result(&mut reactor);
                assert_eq!(result, Ok(expected as u64), "{engine:?} flags {flags:o} offset {offset}");
                assert!(buffer.unwrap().bytes()[..expected].iter().all(|&byte| byte == 3));
            }
        }
    }
}

/// The ring keeps the memory of buffers mapped: also of those whose memory is released, and allocated again for others.
#[test]
fn the_kernel_uses_the_memory_that_a_buffer_has_now() {
    const SIZES: [usize; 3] = [4096, 9_000, 60_000];
    for engine in ENGINES {
        let config = ReactorConfig { entries: 8, buffer_limit: 64 << 10, engine, ..ReactorConfig::default() };
        let mut reactor = Reactor::new(config).unwrap();
        let (_named, file) = temporary();
        let token = token(&mut reactor, 0);
        for round in 0..200_u8 {
            // The limit has no room for the idle memory of all sizes.
            let length = SIZES[usize::from(round) % SIZES.len()];
            let offset = u64::from(round) * 512;
            let buffer = filled(&reactor, length, round);
            let skip = [0, 0, 100, 4095][usize::from(round) % 4];
            let written = length - skip;
            let source = match round % 4 {
                0 => WriteSource::Buffer(buffer),
                _ => WriteSource::Shared(Rc::new(buffer), skip, written),
            };
            reactor.write(&file, offset, source, token);
            assert_eq!(one_result(&mut reactor).0, Ok(written as u64));
            reactor.read(&file, offset, filled(&reactor, written, 0), token);
            let (result, buffer) = one_result(&mut reactor);
            assert_eq!(result, Ok(written as u64));
            assert!(buffer.unwrap().bytes().iter().all(|byte| *byte == round), "{engine:?}, round {round}");
        }
    }
}

#[test]
fn errors_come_back_with_the_buffer() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (named, _) = temporary();
        let token = token(&mut reactor, 0);
        let read_only = SharedFile::new(File::open(named.path()).unwrap());
        let buffer = filled(&reactor, 4096, 1);
        reactor.write(&read_only, 0, WriteSource::Buffer(buffer), token);
        let (result, buffer) = one_result(&mut reactor);
        assert_eq!(result, Err(libc::EBADF));
        assert!(buffer.is_some());
        drop(buffer);
        let directory = SharedFile::new(File::open(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let buffer = filled(&reactor, 4096, 1);
        reactor.read(&directory, 0, buffer, token);
        assert_eq!(one_result(&mut reactor).0, Err(libc::EISDIR));
        let full = SharedFile::new(OpenOptions::new().write(true).open("/dev/full").unwrap());
        let buffer = filled(&reactor, 4096, 1);
        reactor.write(&full, 0, WriteSource::Buffer(buffer), token);
        assert_eq!(one_result(&mut reactor).0, Err(libc::ENOSPC));
        assert_eq!(reactor.buffers().lent(), 0);
    }
}

#[test]
fn many_more_operations_than_the_ring_has_entries() {
    const COUNT: u32 = 3_000;
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (_named, file) = temporary();
        let owner = reactor.new_owner();
        for slot in 0..COUNT {
            let buffer = filled(&reactor, 512, (slot % 251) as u8);
            reactor.write(&file, u64::from(slot) * 512, WriteSource::Buffer(buffer), Token { owner, slot });
        }
        assert_eq!(reactor.files_in_flight(), COUNT as usize);
        let mut answered = HashSet::new();
        for event in events(&mut reactor, COUNT as usize) {
            assert!(answered.insert(event.token.slot), "answered once");
            assert_eq!(file_result(event).0, Ok(512));
        }
        for slot in 0..COUNT {
            let buffer = filled(&reactor, 512, 255);
            reactor.read(&file, u64::from(slot) * 512, buffer, Token { owner, slot });
        }
        for event in events(&mut reactor, COUNT as usize) {
            let slot = event.token.slot;
            let (result, buffer) = file_result(event);
            assert_eq!(result, Ok(512));
            assert!(
                buffer.unwrap().bytes().iter().all(|&byte| byte == (slot % 251) as u8),
                "operation {slot}"
            );
        }
        assert_eq!(reactor.buffers().lent(), 0);
    }
}

#[test]
fn more_pieces_than_one_system_call_takes() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (named, file) = temporary();
        let region = Rc::new(Region::new(1 << 20).unwrap());
        let mut expected = Vec::new();
        let mut pieces = Vec::new();
        for i in 0..3_000usize {
            let (start, length) = (i * 300, 1 + i % 299);
            let piece = vec![(i % 253) as u8; length];
            region.copy_in(start, &piece);
            expected.extend(piece);
            pieces.push((start, length));
        }
        let token = token(&mut reactor, 0);
        reactor.write(&file, 11, WriteSource::Gather(Rc::clone(&region), pieces), token);
        assert_eq!(one_result(&mut reactor).0, Ok(expected.len() as u64));
        assert!(std::fs::read(named.path()).unwrap()[11..] == expected);
        assert_eq!(Rc::strong_count(&region), 1, "the region is released");
    }
}

#[test]
fn a_file_stays_open_while_an_operation_needs_it() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let token = token(&mut reactor, 0);
        let (named, file) = temporary();
        let buffer = filled(&reactor, 4096, 8);
        reactor.write(&file, 0, WriteSource::Buffer(buffer), token);
        drop(file);
        assert_eq!(one_result(&mut reactor).0, Ok(4096));
        assert_eq!(std::fs::read(named.path()).unwrap(), [8; 4096]);
    }
}

#[test]
fn sockets_become_ready() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (near, mut far) = UnixStream::pair().unwrap();
        let (reading, writing) = (token(&mut reactor, 1), token(&mut reactor, 2));
        reactor.watch(near.as_raw_fd(), Interest::Read, reading);
        reactor.watch(near.as_raw_fd(), Interest::Write, writing);
        let event = events(&mut reactor, 1).remove(0);
        assert_eq!(event.token, writing, "there is room to send, and nothing to read");
        assert!(matches!(event.action, Action::Ready(Interest::Write)));
        far.write_all(b"x").unwrap();
        let event = events(&mut reactor, 1).remove(0);
        assert_eq!(event.token, reading, "{engine:?}");
        // A watch fires once.
        let mut none = Vec::new();
        reactor.wait(Nanos::now() + Duration::from_millis(20), &mut none).unwrap();
        assert!(none.is_empty());
        // The peer's close makes the socket readable.
        (&near).read_exact(&mut [0]).unwrap();
        reactor.watch(near.as_raw_fd(), Interest::Read, reading);
        drop(far);
        assert_eq!(events(&mut reactor, 1).remove(0).token, reading);
    }
}

#[test]
fn a_cancelled_watch_does_not_fire() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (near, mut far) = UnixStream::pair().unwrap();
        let token = token(&mut reactor, 1);
        let watch = reactor.watch(near.as_raw_fd(), Interest::Read, token);
        reactor.unwatch(watch);
        far.write_all(b"x").unwrap();
        let mut none = Vec::new();
        reactor.wait(Nanos::now() + Duration::from_millis(20), &mut none).unwrap();
        reactor.wait(Nanos(0), &mut none).unwrap();
        assert!(none.is_empty(), "{engine:?}: {none:?}");
        reactor.watch(near.as_raw_fd(), Interest::Read, token);
        assert_eq!(events(&mut reactor, 1).remove(0).token, token, "and can be set again");
    }
}

#[test]
fn an_old_watch_does_not_cancel_a_new_one_in_its_slot() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let (first, mut first_far) = UnixStream::pair().unwrap();
        let (second, mut second_far) = UnixStream::pair().unwrap();
        let (one, two) = (token(&mut reactor, 1), token(&mut reactor, 2));
        let used_up = reactor.watch(first.as_raw_fd(), Interest::Read, one);
        first_far.write_all(b"x").unwrap();
        assert_eq!(events(&mut reactor, 1).remove(0).token, one);
        reactor.watch(second.as_raw_fd(), Interest::Read, two);
        reactor.unwatch(used_up);
        second_far.write_all(b"x").unwrap();
        assert_eq!(events(&mut reactor, 1).remove(0).token, two);
    }
}

#[test]
fn a_reused_descriptor_number_is_watched_anew() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let token = token(&mut reactor, 1);
        for _ in 0..50 {
            let (near, mut far) = UnixStream::pair().unwrap();
            // SAFETY: no pointers; nothing else in this process uses the number.
            let fd = unsafe { libc::dup3(near.as_raw_fd(), 700, libc::O_CLOEXEC) };
            assert_eq!(fd, 700);
            let watch = reactor.watch(fd, Interest::Read, token);
            far.write_all(b"x").unwrap();
            events(&mut reactor, 1);
            reactor.unwatch(watch);
            let left_behind = reactor.watch(fd, Interest::Read, token);
            (&near).read_exact(&mut [0]).unwrap();
            reactor.unwatch(left_behind);
            // The next round's `dup3` closes it; between the two nothing waits for it.
        }
        assert!(reactor.wait(Nanos(0), &mut Vec::new()).is_ok());
    }
}

#[test]
fn deadlines_poll_or_wait() {
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let mut none = Vec::new();
        let start = Nanos::now();
        for _ in 0..100 {
            reactor.wait(Nanos(0), &mut none).unwrap();
        }
        assert!(Nanos::now() - start < Duration::from_secs(1), "a past deadline polls");
        let deadline = Nanos::now() + Duration::from_millis(30);
        while Nanos::now() < deadline {
            reactor.wait(deadline, &mut none).unwrap();
        }
        let late = Nanos::now() - deadline;
        assert!(late < Duration::from_secs(2), "{engine:?} woke {late:?} late");
        assert!(none.is_empty());
    }
}

/// A shard's deadlines change with every turn: a later one after an earlier one and the other way round, with and without events before.
#[test]
fn a_wait_ends_at_its_deadline_whatever_was_waited_for_before() {
    const LATE: Duration = Duration::from_millis(500);
    for engine in ENGINES {
        let mut reactor = small_reactor(engine);
        let mut random = fastrand::Rng::with_seed(7);
        let mut events = Vec::new();
        let mut for_nothing = 0;
        for _ in 0..200 {
            // A wait that something else ends leaves its deadline behind, mostly a later one.
            let elsewhere = Nanos::now() + Duration::from_micros(random.u64(0..3_000_000));
            reactor.waker().wake();
            reactor.wait(elsewhere, &mut events).unwrap();
            let wanted = Duration::from_micros(random.u64(0..4_000));
            let deadline = Nanos::now() + wanted;
            while Nanos::now() < deadline {
                reactor.wait(deadline, &mut events).unwrap();
                for_nothing += usize::from(Nanos::now() < deadline);
            }
            let over = Nanos::now() - deadline;
            assert!(over < LATE, "{engine:?}: a wait of {wanted:?} ended {over:?} late");
        }
        assert!(events.is_empty());
        // One turn for nothing for each deadline that was left behind, and one for the wake-up.
        assert!(for_nothing <= 600, "{engine:?}: {for_nothing} turns for nothing");
    }
}

/// Fails the whole test run instead of hanging it when a wake-up is lost.
struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    fn new(seconds: u64) -> Watchdog {
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        std::thread::spawn(move || {
            for _ in 0..seconds * 10 {
                std::thread::sleep(Duration::from_millis(100));
                if seen.load(Ordering::Relaxed) {
                    return;
                }
            }
            eprintln!("no progress for {seconds} seconds: a wake-up was lost");
            std::process::abort();
        });
        Watchdog(over)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_wake_up_is_lost() {
    const THREADS: u64 = 3;
    const MESSAGES: u64 = 30_000;
    for engine in ENGINES {
        let _watchdog = Watchdog::new(60);
        let mut reactor = small_reactor(engine);
        let (sender, queue) = mpsc::channel();
        let taken = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (sender, waker, taken) = (sender.clone(), reactor.waker(), Arc::clone(&taken));
                std::thread::spawn(move || {
                    for message in 0..MESSAGES {
                        sender.send(message).unwrap();
                        waker.wake();
                        // Sometimes wait until the queue is empty, so that the next message meets a sleeping shard.
                        while thread == 0 && message % 16 == 0 && taken.load(Ordering::SeqCst) < message {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut count = 0;
        let mut none = Vec::new();
        while count < THREADS * MESSAGES {
            reactor.wait(Nanos::NEVER, &mut none).unwrap();
            count += queue.try_iter().count() as u64;
            taken.store(count, Ordering::SeqCst);
        }
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(none.is_empty(), "wake-ups are no events");
    }
}

#[test]
fn a_wake_up_before_the_wait_is_not_lost() {
    for engine in ENGINES {
        let _watchdog = Watchdog::new(20);
        let mut reactor = small_reactor(engine);
        let waker = reactor.waker();
        waker.wake();
        waker.wake();
        reactor.wait(Nanos::NEVER, &mut Vec::new()).unwrap();
    }
}

#[test]
fn drop_waits_for_operations_in_flight() {
    for engine in ENGINES {
        let _watchdog = Watchdog::new(30);
        let (named, file) = temporary();
        let mut reactor = small_reactor(engine);
        let pool = reactor.buffers().clone();
        let token = token(&mut reactor, 0);
        let (near, _far) = UnixStream::pair().unwrap();
        reactor.watch(near.as_raw_fd(), Interest::Read, token);
        for i in 0..500u64 {
            let buffer = filled(&reactor, 4096, 1);
            reactor.write(&file, i * 4096, WriteSource::Buffer(buffer), token);
        }
        reactor.sync(&file, token);
        assert_eq!(pool.lent(), 500 * 4096);
        drop(reactor);
        assert_eq!(pool.lent(), 0, "every buffer came back");
        assert_eq!(std::fs::read(named.path()).unwrap(), vec![1; 500 * 4096], "and every write was done");
    }
}
