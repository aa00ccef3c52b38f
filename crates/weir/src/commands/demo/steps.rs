//! The output of the demonstration while it works.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use weir_block::Nanos;

use crate::failure::Failure;

/// Time limit of every wait.
const SOON: Duration = Duration::from_secs(30);

/// Numbered steps: a spinner while one runs, a line with its time when it is done.
pub struct Steps {
    number: usize,
}

impl Steps {
    pub fn new() -> Steps {
        Steps { number: 0 }
    }

    /// Runs a step.
    pub fn run<T>(&mut self, what: &str, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        self.number += 1;
        let spinner = ProgressBar::new_spinner().with_message(format!("{}. {what}", self.number));
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}");
        spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        spinner.enable_steady_tick(Duration::from_millis(100));
        let started = Nanos::now();
        let result = work();
        spinner.finish_and_clear();
        let mark = if result.is_ok() { "ok" } else { "FAILED" };
        let line = format!("{:2}. {what} ", self.number);
        shown(&format!("{line:.<72} {mark} ({:.1} s)", Nanos::now().since(started).as_secs_f64()));
        result
    }

    /// A line about the previous step.
    pub fn note(&self, text: &str) {
        shown(&format!("    {text}"));
    }

    /// A step that shows its own progress.
    pub fn say(&mut self, what: &str) {
        self.number += 1;
        shown(&format!("{:2}. {what}", self.number));
    }
}

/// Polls until the answer satisfies the condition.
pub fn until<T>(
    mut ask: impl FnMut() -> Result<T, Failure>,
    wanted: impl Fn(&T) -> bool,
) -> Result<T, Failure> {
    let deadline = Nanos::now() + SOON;
    loop {
        let answer = ask()?;
        if wanted(&answer) {
            return Ok(answer);
        }
        if Nanos::now() > deadline {
            return Err(Failure::failed(format!("not within {} s; the nodes' logs say why", SOON.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The demonstration goes on when nobody reads it any more, and cleans up.
fn shown(line: &str) {
    let _ = crate::output::say(line);
}
