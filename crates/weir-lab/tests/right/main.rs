//! The right to serve, with real processes (P2, P4, P7, P9, P12): an owner that was deposed while it stood still or was cut
//! off answers no client and writes nothing; and as long as nothing has to change, no node needs the registry.
//!
//! Needs root, for network namespaces and loop mounts. `WEIR_ROUNDS` sets how many rounds the soak makes over all its tests, of which
//! each test of cut-off owners here makes a tenth; it also has the registry stay away for a minute. `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_lab::process::ProcessState;
use weir_nbd::Uri;
use weir_nbd::client::{NbdClient, NbdError, Options};

use common::rounds::soak;
use common::{Bench, DISK, SOON};

#[path = "../common/mod.rs"]
mod common;
mod cut_off;
mod deposed;
mod registry_away;
mod silent_owner;
#[path = "../support/mod.rs"]
mod support;

/// The registry forgets a silent node after this time, unless a test sets another.
const TTL: Duration = Duration::from_secs(1);

/// A new connection to a node's export of the disk, which is given up on after a while.
fn connect(bench: &Bench, node: &str, timeout: Duration) -> Result<NbdClient, NbdError> {
    let options = Options { connect_timeout: timeout, timeout, ..Options::default() };
    NbdClient::connect_with(&Uri::unix(&bench.lab.node(node).unwrap().nbd_unix, DISK), &options)
}

/// All nodes but this one.
fn others(bench: &Bench, node: &str) -> Vec<String> {
    bench.lab.nodes().iter().map(|other| other.name.clone()).filter(|other| other != node).collect()
}

/// Waits until a node's process has ended, and starts it again; one that was asked to end and does not is helped.
fn restart(bench: &mut Bench, node: &str) {
    let deadline = Nanos::now() + SOON;
    while bench.lab.node(node).unwrap().process_state() != ProcessState::Gone && Nanos::now() < deadline {
        thread::sleep(Duration::from_millis(50));
    }
    if bench.lab.node(node).unwrap().process_state() != ProcessState::Gone {
        bench.lab.kill(node).unwrap();
    }
    bench.lab.start(node).unwrap();
}
