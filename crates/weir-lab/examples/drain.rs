//! A node with many disks under load is drained, stays empty, and is resumed: `make drain`. Prints the times and the longest stall of
//! every guest, and fails when a guest got an error, lost a write, or waited too long.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;
mod output;

use std::process::ExitCode;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use clap::Parser;
use common::{Bench, seed};
use output::Output;
use serde::Serialize;
use weir_block::Nanos;
use weir_block::size::Size;
use weir_load::error::LoadError;
use weir_load::verify::{History, Initial, Layout};
use weir_load::verifying::{Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_nbd::Uri;
use weir_node::api::{DrainNode, NodeView, NodeWork};

/// The drained node. A new disk is open where it was created: there.
const DRAINED: &str = "n1";
const NODES: usize = 4;
const BLOCK: u32 = 4096;
/// What each guest uses of its disk, in bytes.
const USED: u64 = 4 << 20;
/// Longest wait for an end of the drain or of the resumption.
const LONGEST: Duration = Duration::from_secs(600);

/// Drain a node with many disks under load. Example: `drain --disks 200 --output json`.
#[derive(Parser)]
struct Arguments {
    /// Number of disks on the drained node.
    #[arg(long, default_value_t = 200)]
    disks: usize,
    /// Reads and writes of each guest per second.
    #[arg(long, default_value_t = 10)]
    rate: u64,
    /// Seconds for which the drained node is watched before it is resumed: nothing may be placed on it.
    #[arg(long, default_value_t = 30)]
    empty: u64,
    /// Longest stall that a guest may see, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    limit_ms: u64,
    /// The format of the figures.
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
}

/// What one phase cost the guests.
#[derive(Serialize)]
struct Phase {
    name: &'static str,
    seconds: f64,
    /// Of all guests.
    longest_stall_ms: f64,
    /// The median of the guests' longest stalls.
    median_stall_ms: f64,
    /// Disks whose guest waited for more than the limit.
    over_limit: Vec<String>,
    /// The longest stall of each disk's guest, in the order of the disks.
    stalls_ms: Vec<f64>,
}

#[derive(Serialize)]
struct Report {
    disks: usize,
    phases: Vec<Phase>,
    /// Most disks and copies that were seen on the drained node before it was resumed.
    placed_back: usize,
    acknowledged: u64,
    reconnects: u64,
    errors: u64,
    checked: u64,
    lost: u64,
}

struct Guest {
    disk: String,
    progress: Arc<Progress>,
    thread: JoinHandle<(VerifyingLoad, Result<(), LoadError>)>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let report = run(&arguments);
    arguments.output.print(&report, print);
    let kept = report.errors + report.lost == 0
        && report.placed_back == 0
        && report.phases.iter().all(|phase| phase.over_limit.is_empty());
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(arguments: &Arguments) -> Report {
    let seed = seed();
    let bench = Bench::up(NODES, "write-back+1", |config| {
        config.logs = Size((arguments.disks as u64 + 16) * config.log.0);
        config.lease_ttl = Duration::from_secs(2);
    });
    let names: Vec<String> = (0..arguments.disks).map(|number| format!("v{number:03}")).collect();
    for name in &names {
        bench.create(name, "write-back+1");
    }
    eprintln!("{} disks are created", names.len());
    wait(&bench, "all disks are open with a replica", |bench, _| {
        let disks = bench.lab.any_client().unwrap().disks().unwrap();
        let is_ready = |disk: &weir_node::api::DiskView| {
            disk.owner.as_deref() == Some(DRAINED) && disk.effective == disk.requested
        };
        disks.iter().filter(|disk| is_ready(disk)).count() > arguments.disks
    });
    let guests: Vec<Guest> = names.iter().map(|name| guest(&bench, name, arguments.rate, seed)).collect();
    // The first answers take the time of two hundred handshakes.
    wait(&bench, "every guest has had an answer", |_, _| {
        guests.iter().all(|guest| guest.progress.acknowledged() > 0)
    });
    let mut phases = Vec::new();
    let mut measure = |name, action: &mut dyn FnMut()| {
        for guest in &guests {
            let _before = guest.progress.take_longest_stall();
        }
        let start = Nanos::now();
        action();
        let seconds = (Nanos::now() - start).as_secs_f64();
        // A stall counts when it ends.
        thread::sleep(Duration::from_secs(2));
        phases.push(phase(name, seconds, &guests, arguments.limit_ms));
    };
    measure("before", &mut || thread::sleep(Duration::from_secs(5)));
    measure("drain", &mut || {
        bench
            .lab
            .any_client()
            .unwrap()
            .drain_node(DRAINED, &DrainNode { fewer_copies: false, dry_run: false })
            .unwrap();
        wait(&bench, "the node is empty", |_, work| work.node.state == NodeView::MAINTENANCE);
    });
    let mut placed_back = 0;
    measure("empty", &mut || {
        for _ in 0..arguments.empty {
            thread::sleep(Duration::from_secs(1));
            let work = bench.lab.any_client().unwrap().node(DRAINED).unwrap();
            placed_back = placed_back.max(work.disks.len() + work.copies.len());
        }
    });
    measure("resume", &mut || {
        bench.lab.any_client().unwrap().resume_node(DRAINED).unwrap();
        wait(&bench, "its disks are back", |_, work| work.away.is_empty());
    });
    judge(guests, phases, placed_back, arguments.limit_ms)
}

/// Waits until the node is in a certain state, and prints what is left meanwhile.
fn wait(bench: &Bench, what: &str, is_done: impl Fn(&Bench, &NodeWork) -> bool) {
    let start = Nanos::now();
    for look in 0.. {
        let work = bench.lab.any_client().unwrap().node(DRAINED).unwrap();
        if is_done(bench, &work) {
            return;
        }
        assert!(Nanos::now() - start < LONGEST, "not within {LONGEST:?}: {what}{}", bench.logs());
        if look % 10 == 0 {
            let NodeWork { disks, copies, away, .. } = &work;
            eprintln!("waiting: {what}; {} disks, {} copies, {} away", disks.len(), copies.len(), away.len());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// A guest that goes to whichever node serves its disk.
fn guest(bench: &Bench, disk: &str, rate: u64, seed: u64) -> Guest {
    let layout = Layout::uniform(Span { offset: 0, length: USED }, BLOCK).unwrap();
    let uris: Vec<Uri> = bench.lab.nodes().iter().map(|node| Uri::unix(&node.nbd_unix, disk)).collect();
    let settings = Settings {
        depth: 4,
        rate: Some(rate),
        seed,
        reconnect_for: Duration::from_secs(60),
        timeout: Duration::from_secs(30),
        ..Settings::default()
    };
    let locate = move |attempt: u64| uris.get(attempt as usize % uris.len()).cloned();
    let mut load =
        VerifyingLoad::new(History::new(layout, seed, Initial::Zeroes), settings, Box::new(locate));
    let progress = load.progress();
    let thread = thread::spawn(move || {
        let result = load.run(Duration::MAX);
        (load, result)
    });
    Guest { disk: disk.into(), progress, thread }
}

fn phase(name: &'static str, seconds: f64, guests: &[Guest], limit_ms: u64) -> Phase {
    let stall = |guest: &Guest| (guest.disk.clone(), guest.progress.take_longest_stall());
    phase_of(name, seconds, guests.iter().map(stall).collect(), limit_ms)
}

/// By disk, the longest stall of its guest.
fn phase_of(name: &'static str, seconds: f64, stalls: Vec<(String, Duration)>, limit_ms: u64) -> Phase {
    let over = stalls.iter().filter(|(_, stall)| *stall > Duration::from_millis(limit_ms));
    let over_limit = over.map(|(disk, _)| disk.clone()).collect();
    let stalls_ms: Vec<f64> = stalls.iter().map(|(_, stall)| stall.as_secs_f64() * 1e3).collect();
    let mut sorted = stalls_ms.clone();
    sorted.sort_by(f64::total_cmp);
    Phase {
        name,
        seconds,
        longest_stall_ms: sorted[sorted.len() - 1],
        median_stall_ms: sorted[sorted.len() / 2],
        over_limit,
        stalls_ms,
    }
}

/// Ends the guests, and reads every block of every disk.
fn judge(guests: Vec<Guest>, phases: Vec<Phase>, placed_back: usize, limit_ms: u64) -> Report {
    let mut report = Report {
        disks: guests.len(),
        phases,
        placed_back,
        acknowledged: 0,
        reconnects: 0,
        errors: 0,
        checked: 0,
        lost: 0,
    };
    let (start, mut stalls) = (Nanos::now(), Vec::new());
    guests.iter().for_each(|guest| guest.progress.stop());
    for Guest { disk, progress, thread } in guests {
        let (mut load, result) = thread.join().unwrap();
        result.unwrap_or_else(|error| panic!("the load on {disk}: {error}"));
        // One that has lasted since the last phase ends only with the guest.
        stalls.push((disk, progress.take_longest_stall()));
        report.checked += load.check_all().unwrap().checked;
        report.lost += load.found().mismatches;
        report.acknowledged += progress.acknowledged();
        report.reconnects += progress.reconnects();
        report.errors += progress.failed();
    }
    let seconds = (Nanos::now() - start).as_secs_f64();
    report.phases.push(phase_of("end", seconds, stalls, limit_ms));
    report
}

fn print(report: &Report) {
    println!("{} disks with write-back+1 on {DRAINED}, each with a guest", report.disks);
    println!(
        "{:8} {:>10} {:>18} {:>18} {:>12}",
        "", "time, s", "longest stall, ms", "median of them", "over limit"
    );
    for Phase { name, seconds, longest_stall_ms, median_stall_ms, over_limit, .. } in &report.phases {
        let over = over_limit.len();
        println!("{name:8} {seconds:>10.2} {longest_stall_ms:>18.1} {median_stall_ms:>18.1} {over:>12}");
    }
    println!("placed back before the resumption: {}", report.placed_back);
    let Report { acknowledged, reconnects, errors, checked, lost, .. } = report;
    println!(
        "{acknowledged} writes acknowledged, {reconnects} reconnects, {errors} errors, {checked} blocks checked, {lost} lost"
    );
}
