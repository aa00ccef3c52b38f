//! A guest of a cluster of several hosts: a verifying load on one disk that goes to whichever host serves it, as a hypervisor does
//! whose NBD client reconnects. Prints a line of JSON each second; SIGTERM ends the load, and every block is then read and held
//! against all acknowledged writes.

use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use clap::Parser;
use serde::Serialize;
use weir_block::size::Size;
use weir_load::error::LoadError;
use weir_load::summary::Verification;
use weir_load::verify::{History, Initial, Layout};
use weir_load::verifying::{Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_nbd::Uri;

/// Size of the blocks, in bytes.
const BLOCK: u32 = 4096;

/// Longest time without a host that serves the disk. Longer than any fault that the demonstration makes.
const PATIENCE: Duration = Duration::from_secs(180);

/// The time between two lines.
const LINE: Duration = Duration::from_secs(1);

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A verifying load on one disk, at any of several exports.
#[derive(Parser)]
struct Arguments {
    /// An export of the disk; the load tries all in turn.
    #[arg(long = "uri", required = true)]
    uris: Vec<Uri>,
    /// Bytes of the disk that are used; nothing else may write to them, and they must be zeroes.
    #[arg(long)]
    size: Size,
    /// Reads and writes per second.
    #[arg(long)]
    rate: u64,
    /// Requests in flight.
    #[arg(long, default_value_t = 8)]
    depth: u32,
}

/// A line of progress.
#[derive(Serialize)]
struct Line {
    acknowledged: u64,
    reads: u64,
    /// Requests that got an error.
    failed: u64,
    reconnects: u64,
    mismatches: u64,
    /// The longest time without any answer, of those that ended since the last line.
    longest_stall_ms: f64,
}

/// The last line.
#[derive(Serialize)]
struct Verdict {
    acknowledged: u64,
    failed: u64,
    reconnects: u64,
    checked: u64,
    /// Blocks without the content of their acknowledged writes, and reads that returned other data.
    lost: u64,
    first: Vec<String>,
}

fn main() -> Result<(), Failure> {
    let Arguments { uris, size, rate, depth } = Arguments::parse();
    let layout = Layout::uniform(Span { offset: 0, length: size.0 }, BLOCK)?;
    let history = History::new(layout, u64::from(std::process::id()), Initial::Zeroes);
    let settings = Settings { rate: Some(rate), depth, reconnect_for: PATIENCE, ..Settings::default() };
    let locate = move |attempt: u64| uris.get(attempt as usize % uris.len()).cloned();
    let mut load = VerifyingLoad::new(history, settings, Box::new(locate));
    let progress = load.progress();
    end_on_signal(Arc::clone(&progress))?;
    let (done, ended) = channel();
    let thread = std::thread::spawn(move || {
        let result = load.run(Duration::MAX);
        let _ = done.send(());
        (load, result)
    });
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LINE) {
        say(&line(&progress))?;
    }
    let (mut load, result): (VerifyingLoad, Result<(), LoadError>) =
        thread.join().map_err(|_| "the load's thread panicked")?;
    say(&line(&progress))?;
    result?;
    let Verification { checked, .. } = load.check_all()?;
    let found = load.found();
    say(&Verdict {
        acknowledged: progress.acknowledged(),
        failed: progress.failed(),
        reconnects: progress.reconnects(),
        checked,
        lost: found.mismatches,
        first: found.first.clone(),
    })?;
    Ok(())
}

fn line(progress: &Progress) -> Line {
    Line {
        acknowledged: progress.acknowledged(),
        reads: progress.reads(),
        failed: progress.failed(),
        reconnects: progress.reconnects(),
        mismatches: progress.mismatches(),
        longest_stall_ms: progress.take_longest_stall().as_secs_f64() * 1e3,
    }
}

fn say(line: &impl Serialize) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// SIGTERM stops the load, not the process.
fn end_on_signal(progress: Arc<Progress>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut terminate = {
        let _inside = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?
    };
    std::thread::spawn(move || {
        runtime.block_on(terminate.recv());
        progress.stop();
    });
    Ok(())
}
