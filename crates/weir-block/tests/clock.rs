//! The clock of the data path: it includes suspend.
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::time::Duration;

use weir_block::{Nanos, Reactor, ReactorConfig};

const ENABLED: &str = "WEIR_TEST_READS_THE_CLOCK";
const SUSPENDED: Duration = Duration::from_secs(100_000);

/// The test below runs this in its own time namespace.
#[test]
fn reads_the_clock() {
    if std::env::var_os(ENABLED).is_some() {
        let reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let (real, shard) = (Nanos::now(), reactor.now());
        assert!(shard >= real);
        println!("clock {} {}", real.0, shard.0);
    }
}

/// A time namespace moves the clock that counts suspends, and only that one, as a suspend does: a lease must have run out
/// in that time (P2).
#[test]
fn a_suspend_counts() {
    let test = std::env::current_exe().unwrap();
    let offset = SUSPENDED.as_secs().to_string();
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--time", "--fork", "--boottime", &offset])
        .arg(test)
        .args(["--exact", "reads_the_clock", "--nocapture"])
        .env(ENABLED, "1")
        .output()
        .expect("unshare is part of util-linux");
    let printed = String::from_utf8_lossy(&output.stdout);
    let line = printed.lines().find(|line| line.contains("clock ")).unwrap_or_else(|| {
        panic!("no clock in {printed:?}, {:?}", String::from_utf8_lossy(&output.stderr));
    });
    let here = Nanos::now();
    let times: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert_eq!(times.len(), 2, "{line}");
    for time in times {
        let ahead = Nanos(time).since(here);
        assert!(ahead > SUSPENDED - Duration::from_secs(60), "{ahead:?} ahead after {SUSPENDED:?}");
    }
}
