//! `weir bench verify`

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use weir_load::judge::{Judgement, judge};
use weir_load::run::Monitor;
use weir_load::target::Target;
use weir_load::verify::{Atomicity, Record};
use weir_load::{IoEngine, LoadError};

use super::watch::heed_interrupts;
use crate::cli::{BenchEngine, VerifyArgs};
use crate::failure::Failure;
use crate::options::Global;
use crate::output::print_as;

/// Interval between updates of the progress.
const TICK: Duration = Duration::from_millis(100);

/// Verifies a target by the record of a load.
pub fn run(global: &Global, arguments: &VerifyArgs) -> Result<(), Failure> {
    let target: Target = arguments.target.parse().map_err(Failure::usage)?;
    let engine = match arguments.engine {
        Some(BenchEngine::Null) => {
            return Err(Failure::usage("engine null reads nothing that could be judged"));
        }
        Some(BenchEngine::Psync) => IoEngine::Psync,
        Some(BenchEngine::IoUring) | None => IoEngine::IoUring,
    };
    let atomicity = if arguments.torn_in_flight { Atomicity::Sector } else { Atomicity::Block };
    let history = Record::load(&arguments.history).map_err(LoadError::from)?;
    let (interrupted, monitor, ended) = (heed_interrupts()?, Monitor::new(), AtomicBool::new(false));
    let bar = bar(history.layout().blocks());
    let judgement = std::thread::scope(|scope| {
        let ticker = scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                bar.set_position(monitor.ios());
                if interrupted.load(Ordering::Relaxed) {
                    monitor.stop();
                }
                std::thread::park_timeout(TICK);
            }
        });
        let judgement = judge(&target, history, atomicity, engine, &monitor);
        ended.store(true, Ordering::Relaxed);
        ticker.thread().unpark();
        judgement
    });
    bar.finish_and_clear();
    let judgement = judgement?;
    print_as(global.output, "weir.load-judgement/1", &judgement, text)?;
    if judgement.incomplete {
        return Err(Failure::failed("interrupted: only a part of the blocks was judged"));
    }
    match judgement.is_clean() {
        true => Ok(()),
        false => Err(Failure::failed("some blocks are wrong, or could not be read; see above")),
    }
}

fn bar(blocks: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:20} {pos} of {len} blocks  {eta}");
    ProgressBar::new(blocks).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn text(judgement: &Judgement) -> String {
    let found = &judgement.verification;
    let mut text = format!(
        "{}: checked {} blocks; the load issued {} writes to {} of them, and {} had one in flight when it ended",
        judgement.target,
        found.checked,
        judgement.writes,
        judgement.written_blocks,
        judgement.unanswered_blocks
    );
    if judgement.unreadable > 0 {
        let error = judgement.first_error.as_deref().unwrap_or_default();
        text.push_str(&format!("\n{} blocks could not be read, first error: {error}", judgement.unreadable));
    }
    if found.mismatches == 0 {
        text.push_str("\nevery block is right");
        return text;
    }
    let counts: Vec<String> = found.faults.iter().map(|(fault, count)| format!("{count} {fault}")).collect();
    text.push_str(&format!("\n{} blocks are wrong: {}", found.mismatches, counts.join(", ")));
    for line in &found.first {
        text.push_str(&format!("\n  {line}"));
    }
    let more = found.mismatches.saturating_sub(found.first.len() as u64);
    if more > 0 {
        text.push_str(&format!("\n  and {more} more"));
    }
    text
}
