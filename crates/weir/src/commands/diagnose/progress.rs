//! Progress of a measurement: a bar on a terminal, lines in a pipe.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use weir_block::Nanos;

use crate::output::note;

/// An approximate duration, for people.
pub fn minutes(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 300.0 {
        format!("about {seconds:.0} s")
    } else if seconds < 5400.0 {
        format!("about {:.0} min", seconds / 60.0)
    } else {
        format!("about {:.1} h", seconds / 3600.0)
    }
}

/// Progress display: a bar on a terminal, occasional lines in a pipe or a file.
pub enum Shown {
    Bar(ProgressBar),
    Lines { began: Nanos, last: Option<Nanos> },
}

/// Longest interval between lines in a pipe, as long as runs end.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Shown {
    pub fn new() -> Shown {
        if !std::io::stderr().is_terminal() {
            return Shown::Lines { began: Nanos::now(), last: None };
        }
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
        Shown::Bar(ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// So many runs are done; `now` is the next run, or empty.
    pub fn step(&mut self, done: usize, total: usize, now: &str) {
        match self {
            Shown::Bar(bar) => {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
                bar.set_message(now.to_owned());
            }
            Shown::Lines { began, last } => {
                let time = Nanos::now();
                let first_or_last = last.is_none() || done == total;
                if first_or_last || last.is_some_and(|last| time.since(last) >= LINE_EVERY) {
                    *last = Some(time);
                    note(&line(done, total, time.since(*began), now));
                }
            }
        }
    }

    pub fn say(&self, text: &str) {
        match self {
            Shown::Bar(bar) => bar.suspend(|| note(text)),
            Shown::Lines { .. } => note(text),
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// `48 of 240 runs, 80s elapsed; nbd unix: 4K random read, QD 32`.
fn line(done: usize, total: usize, elapsed: Duration, now: &str) -> String {
    let now = if now.is_empty() { String::new() } else { format!("; {now}") };
    format!("{done} of {total} runs, {} s elapsed{now}", elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_in_a_pipe_is_plain_lines() {
        let text = line(48, 240, Duration::from_millis(80_500), "nbd unix: 4K random read, QD 32");
        assert_eq!(text, "48 of 240 runs, 80 s elapsed; nbd unix: 4K random read, QD 32");
        assert_eq!(line(240, 240, Duration::from_secs(1), ""), "240 of 240 runs, 1 s elapsed");
    }
}
