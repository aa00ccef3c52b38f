//! Loads and their verification against real servers that keep or lose data.

#![allow(clippy::unwrap_used)]

#[path = "../../weir-nbd/tests/common/mod.rs"]
mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::TestDir;
use weir_block::size::Size;
use weir_load::run::{Monitor, run};
use weir_load::tally::IoKind;
use weir_load::target::Target;
use weir_load::verify::{Atomicity, Fault, History, Initial, Layout};
use weir_load::verifying::{Settings, VerifyingLoad};
use weir_load::workload::{Access, Span, Workload};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;

const MIB: u64 = 1 << 20;

fn history(run: u64) -> History {
    let span = Span { offset: 0, length: 16 * MIB };
    History::new(Layout::mixed(span, &[512, 4096, 65536], run).unwrap(), run, Initial::Zeroes)
}

/// The export's location, which the test can change.
fn located(at: &Arc<Mutex<Option<Uri>>>) -> Box<dyn FnMut(u64) -> Option<Uri> + Send> {
    let at = Arc::clone(at);
    Box::new(move |_| at.lock().unwrap().clone())
}

#[test]
fn a_bench_over_nbd_counts_and_verifies() {
    let dir = TestDir::new();
    let server = dir.nbdkit("memory", &["memory", "16M"]);
    let target = Target::Nbd(server.uri.clone());
    for (access, block_size, threads) in [
        (Access::RandRw { read_percent: 50 }, 4096, 2),
        (Access::Write, 256 << 10, 1),
        (Access::RandWrite, 512, 1),
    ] {
        let workload = Workload {
            access,
            block_size: Size(block_size),
            threads,
            runtime: Some(Duration::from_millis(300)),
            verify: true,
            fua: true,
            ..Workload::default()
        };
        let summary = run(&target, &workload, true, &Monitor::new()).unwrap();
        let found = summary.verification.as_ref().unwrap();
        assert!(summary.is_clean() && found.checked >= 16 && summary.iops() > 100.0, "{summary:?}");
        let refused = run(&target, &workload, false, &Monitor::new()).unwrap_err().to_string();
        assert!(refused.contains("holds data") && refused.contains("--destroy"), "{refused}");
    }
    let large = Workload { block_size: Size(32 << 20), size: Some(Size(32 << 20)), ..Workload::default() };
    let error = run(&target, &large, false, &Monitor::new()).unwrap_err().to_string();
    assert!(error.contains("only 16MiB"), "{error}");
}

#[test]
fn failing_requests_are_counted_and_named() {
    let dir = TestDir::new();
    let server =
        dir.nbdkit("errors", &["--filter=error", "memory", "16M", "error-pread=ENOSPC", "error-rate=50%"]);
    let workload = Workload { runtime: Some(Duration::from_millis(200)), ..Workload::default() };
    let summary = run(&Target::Nbd(server.uri.clone()), &workload, false, &Monitor::new()).unwrap();
    let read = summary.kind(IoKind::Read).unwrap();
    let share = read.errors as f64 / (read.ios + read.errors) as f64;
    assert!((0.4..0.6).contains(&share), "{share}");
    assert!(summary.first_error.as_ref().unwrap().contains("ENOSPC"), "{summary:?}");
}

#[test]
fn acknowledged_writes_survive_crashes_of_an_honest_server() {
    let dir = TestDir::new();
    let file = dir.file("disk", 16 * MIB);
    let arguments = ["file", file.to_str().unwrap()];
    let server = dir.nbdkit("socket", &arguments);
    let at = Arc::new(Mutex::new(Some(server.uri.clone())));
    // The page cache survives the process; the kernel may cut a killed process's write between pages.
    let settings = Settings { atomicity: Atomicity::Sector, ..Settings::default() };
    let mut load = VerifyingLoad::new(history(1), settings.clone(), located(&at));
    let progress = load.progress();
    let worker = std::thread::spawn(move || {
        load.run(Duration::from_secs(60)).unwrap();
        load
    });
    let mut server = Some(server);
    for _ in 0..3 {
        let before = progress.acknowledged();
        while progress.acknowledged() < before + 2000 {
            std::thread::sleep(Duration::from_millis(5));
        }
        *at.lock().unwrap() = None;
        server.take().unwrap().kill();
        std::thread::sleep(Duration::from_millis(100));
        let next = dir.nbdkit("socket", &arguments);
        *at.lock().unwrap() = Some(next.uri.clone());
        server = Some(next);
    }
    progress.stop();
    let mut load = worker.join().unwrap();
    assert!(
        progress.reconnects() >= 3 && progress.unknown() > 0 && progress.longest_stall().as_millis() >= 100
    );
    assert_eq!((progress.mismatches(), progress.failed()), (0, 0), "{:?}", load.found());
    let pass = load.check_all().unwrap();
    assert_eq!((pass.checked, pass.mismatches), (load.history().layout().blocks(), 0), "{pass:?}");
    let (_, writes) = load.history().written();
    assert!(writes >= progress.acknowledged() + progress.unknown());

    // Another process checks: it has only the file of the history.
    let saved = dir.path("history");
    load.into_history().save(&saved).unwrap();
    let mut checker = VerifyingLoad::new(History::load(&saved).unwrap(), settings, located(&at));
    assert_eq!(checker.check_all().unwrap().mismatches, 0);
}

#[test]
fn a_server_that_forgets_is_caught() {
    let dir = TestDir::new();
    let server = dir.nbdkit("memory", &["memory", "16M"]);
    let at = Arc::new(Mutex::new(Some(server.uri.clone())));
    let mut load = VerifyingLoad::new(history(2), Settings::default(), located(&at));
    load.run(Duration::from_millis(300)).unwrap();
    assert_eq!(load.check_all().unwrap().mismatches, 0);
    server.kill();
    let amnesiac = dir.nbdkit("memory", &["memory", "16M"]);
    *at.lock().unwrap() = Some(amnesiac.uri.clone());
    let (written, _) = load.history().written();
    let pass = load.check_all().unwrap();
    assert!(pass.mismatches > 0 && pass.mismatches <= written);
    assert!(pass.first[0].starts_with("lost block"), "{}", pass.first[0]);
}

#[test]
fn one_stale_sector_among_many_blocks_is_found() {
    let dir = TestDir::new();
    let server = dir.nbdkit("memory", &["memory", "16M"]);
    let at = Arc::new(Mutex::new(Some(server.uri.clone())));
    let settings = Settings { read_percent: 0, ..Settings::default() };
    let mut load = VerifyingLoad::new(history(3), settings, located(&at));
    load.run(Duration::from_millis(200)).unwrap();
    let mut client = NbdClient::connect(&server.uri).unwrap();
    let layout = load.history().layout().clone();
    let block = (0..layout.blocks())
        .find(|&block| load.history().is_written(block) && layout.block(block).length > 512);
    let span = layout.block(block.unwrap());
    let mut old = vec![0; span.length as usize];
    client.read(span.offset, &mut old).unwrap();
    load.run(Duration::from_secs(2)).unwrap();
    let mut new = old.clone();
    client.read(span.offset, &mut new).unwrap();
    assert_ne!(old, new, "written again meanwhile");
    assert_eq!(load.check_all().unwrap().mismatches, 0);
    client.write(span.offset + 512, &old[512..1024], false).unwrap();
    let mut history = load.history().clone();
    client.read(span.offset, &mut new).unwrap();
    let mismatch = history.check(block.unwrap(), &new, Atomicity::Block).unwrap_err();
    assert!(
        matches!(mismatch.fault, Fault::Torn { .. }) && mismatch.sector == span.offset + 512,
        "{mismatch}"
    );
    assert_eq!(load.check_all().unwrap().mismatches, 1);
}

#[test]
fn an_export_that_stays_away_ends_the_load() {
    let settings = Settings { reconnect_for: Duration::from_millis(200), ..Settings::default() };
    let mut load = VerifyingLoad::new(history(4), settings, Box::new(|_| None));
    let error = load.run(Duration::from_secs(5)).unwrap_err().to_string();
    assert!(error.contains("no export could be reached") && error.contains("nobody knows"), "{error}");
}

#[test]
fn a_load_that_waits_for_answers_leaves_the_processor_to_others() {
    let dir = TestDir::new();
    let server = dir.nbdkit("slow", &["--filter=delay", "memory", "16M", "rdelay=200ms", "wdelay=200ms"]);
    let at = Arc::new(Mutex::new(Some(server.uri.clone())));
    let settings = Settings { rate: Some(1000), depth: 1, ..Settings::default() };
    let mut load = VerifyingLoad::new(history(5), settings, located(&at));
    let before = weir_load::cpu::of_this_thread();
    load.run(Duration::from_secs(2)).unwrap();
    let used = weir_load::cpu::of_this_thread() - before;
    assert!(load.progress().acknowledged() + load.progress().reads() >= 2, "it has waited for answers");
    assert!(used < Duration::from_millis(300), "{used:?} of 2 s");
}

#[test]
fn flushes_reach_the_server_as_often_as_counted() {
    let dir = TestDir::new();
    let log = dir.path("log");
    let file = format!("logfile={}", log.display());
    let server = dir.nbdkit("logged", &["--filter=log", "memory", "16M", &file]);
    let workload = Workload {
        access: Access::Write,
        runtime: None,
        flush_every: Some(7),
        queue_depth: 4,
        ..Workload::default()
    };
    let summary = run(&Target::Nbd(server.uri.clone()), &workload, true, &Monitor::new()).unwrap();
    let flushes = summary.kind(IoKind::Flush).unwrap();
    assert_eq!(summary.kind(IoKind::Write).unwrap().ios, 4096);
    assert_eq!((flushes.ios, flushes.bytes, flushes.errors), (4096 / 7, 0, 0));
    let log = std::fs::read_to_string(log).unwrap();
    let seen = log.lines().filter(|line| line.contains(" Flush ") && !line.contains("...Flush")).count();
    assert_eq!(seen as u64, flushes.ios, "by the server's own log");
}

#[test]
fn a_file_gets_unique_data_as_compressible_as_asked() {
    let dir = TestDir::new();
    let path = dir.file("disk", 4 * MIB);
    let workload = Workload {
        access: Access::Write,
        block_size: Size(64 << 10),
        runtime: None,
        flush_every: Some(16),
        compress_percent: 50,
        ..Workload::default()
    };
    let summary = run(&Target::Path(path.clone()), &workload, true, &Monitor::new()).unwrap();
    assert!(summary.is_clean() && summary.kind(IoKind::Flush).unwrap().ios == 3, "{summary:?}");
    let data = std::fs::read(path).unwrap();
    let pieces: std::collections::HashSet<&[u8]> = data.chunks(4096).collect();
    assert_eq!(pieces.len(), 1024, "every 4 KiB is unique");
    let zeroes = data.iter().filter(|&&byte| byte == 0).count() * 100 / data.len();
    assert!((50..=51).contains(&zeroes), "{zeroes} %");
}
