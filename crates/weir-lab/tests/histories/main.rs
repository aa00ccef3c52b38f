//! Histories of several clients on a lab with faults at random are linearizable (P1, P2, P4, P7): what each client was
//! answered, sector by sector, can be explained by one disk. Needs root, for network namespaces.
//!
//! `WEIR_HISTORIES` sets how many there are (1), `WEIR_OPERATIONS` how many requests each has at least (4000), and `WEIR_SEED` replays
//! the faults and the requests of the first; the times at which they meet are each run's own.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use common::{Bench, DISK, alone, seed};
use support::clients::{Clients, Habit, Recorded, Recorder};
use weather::Weather;
use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::LabFlash;
use weir_lab::history::{Action, History, Judgement, Operation};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;

#[path = "../common/mod.rs"]
mod common;
#[path = "../support/mod.rs"]
mod support;
mod weather;

/// Faults that a history has at least.
const FAULTS: usize = 6;

/// The clients of the disk.
const CLIENTS: [Habit; 7] =
    [Habit::Follows, Habit::Follows, Habit::Stays, Habit::Stays, Habit::Roams, Habit::Roams, Habit::Roams];

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// The operations of all clients, those of a last one that reads the whole disk, and the content of the backing in the end.
fn complete(bench: &Bench, mut recorded: Recorded) -> (History, Recorded) {
    bench.wait_effective();
    let mut history = std::mem::take(&mut recorded.history);
    let owner = bench.lab.node(&bench.owner()).unwrap().nbd_unix.clone();
    let mut client = NbdClient::connect(&Uri::unix(&owner, DISK)).unwrap();
    let last = Recorder::last(bench, CLIENTS.len() as u16 + 1);
    history.append(&mut last.read_all(|offset, data| client.read(offset, data).unwrap()));
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
    let file = File::open(bench.directory.path().join("pool").join(format!("{DISK}.raw"))).unwrap();
    let backing = Recorder::last(bench, CLIENTS.len() as u16 + 2);
    history.append(&mut backing.read_all(|offset, data| file.read_exact_at(data, offset).unwrap()));
    (history, recorded)
}

/// All operations on the sectors of the violations, to be analysed.
fn keep(history: &History, judgement: &Judgement, seed: u64) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("history-{seed}.txt"));
    let registers: Vec<u64> = judgement.first.iter().map(|violation| violation.register()).collect();
    let mut operations: Vec<_> =
        history.operations().iter().filter(|operation| registers.contains(&operation.register)).collect();
    operations.sort_by_key(|operation| (operation.register, operation.invoked));
    let mut text = String::new();
    for operation in operations {
        writeln!(text, "sector {}: {operation}", operation.register).unwrap();
    }
    std::fs::write(&path, text).unwrap();
    path
}

/// The same history, but the last read of a sector brings what was overwritten long before: what the check is for.
fn with_a_stale_read(history: &History) -> History {
    let mut operations = history.operations().to_vec();
    operations.sort_by_key(|operation| operation.invoked);
    let answered =
        |operation: &Operation, action| operation.action == action && operation.completed.is_some();
    let read = operations.iter().rposition(|operation| answered(operation, Action::Read)).unwrap();
    let register = operations[read].register;
    let overwritten = operations.iter().find(|one| one.register == register && answered(one, Action::Write));
    operations[read].value = overwritten.unwrap().value;
    History::new(operations)
}

fn one_history(seed: u64, policy: &str, flash: bool, operations: u64) {
    let mut bench = Bench::up(4, policy, |config| {
        weather::tune(config);
        if flash {
            config.flash = LabFlash::Files(Size(96 << 20));
        }
    });
    let (mut weather, began) = (Weather::new(seed), Nanos::now());
    let clients = Clients::start(&bench, &CLIENTS, Duration::from_millis(2), seed);
    while clients.requests() < operations || weather.told.len() < FAULTS {
        weather.strike(&mut bench);
        assert!(Nanos::now() - began < Duration::from_secs(900), "{:#?}{}", weather.told, bench.logs());
    }
    bench.wait_effective();
    let (history, recorded) = complete(&bench, clients.stop());
    let judgement = history.judge();
    let Recorded { requests, connections, failed, .. } = recorded;
    eprintln!(
        "seed {seed}, {policy} at first, {}: {requests} requests, {connections} connections, {failed} failed, {} faults in {:.0?}: {}",
        bench.medium,
        weather.told.len(),
        Nanos::now() - began,
        judgement,
    );
    if !judgement.is_linearizable() {
        let path = keep(&history, &judgement, seed);
        panic!("not linearizable; see {}\n{:#?}{}", path.display(), weather.told, bench.logs());
    }
    let planted = with_a_stale_read(&history).judge();
    assert!(planted.stale > 0 && !planted.is_linearizable(), "a planted stale read is not found: {planted}");
    assert_eq!(failed, 0, "a guest saw an error (P9){}", bench.logs());
}

#[test]
fn histories_under_faults_are_linearizable() {
    let _turn = alone();
    let (histories, operations) = (number("WEIR_HISTORIES", 1), number("WEIR_OPERATIONS", 4000));
    let first = seed();
    for history in 0..histories {
        let policy = ["write-back+1", "write-back+2", "write-through"][(history % 3) as usize];
        one_history(first + history, policy, history % 2 == 1, operations);
    }
}
