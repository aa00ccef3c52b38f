//! Failures of actions: each is told once, and followed by a pause that grows.

use std::thread;
use std::time::Duration;

use super::{Event, Output, Record, Shared, lock};

/// Pause before an action that failed is over, so that it is not begun again at once. It doubles each time, up to the longest: a node
/// without a path to the LUN never stops trying.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// Most attempts of an action in one epoch, before another node gets its turn. The first time it is one, and it doubles: an epoch for each
/// attempt would say nothing to anybody.
const MOST_ATTEMPTS: u32 = 16;

/// Failures in a row.
#[derive(Debug, Default)]
pub(super) struct Failures {
    pub(super) count: u32,
    /// What was told of the last one.
    pub(super) text: String,
    /// The last epoch in which it has failed, and the number of epochs.
    pub(super) epoch: u64,
    pub(super) epochs: u32,
}

impl Shared {
    /// An action has failed: says so once, and pauses.
    pub(super) fn fail(&self, action: &str, text: String) {
        let pause = {
            let mut all = lock(&self.failures);
            let failures = all.entry(action.to_owned()).or_default();
            if failures.text != text {
                failures.text.clone_from(&text);
                self.notice(text);
            }
            failures.count += 1;
            PAUSE.saturating_mul(1 << (failures.count - 1).min(16)).min(LONGEST_PAUSE)
        };
        thread::sleep(pause);
    }

    /// An action has succeeded.
    pub(super) fn succeed(&self, action: &str, event: Event<u64>) {
        self.is_well(action);
        self.answer(event);
    }

    /// The text of the first action that keeps failing; empty if none does.
    pub(super) fn trouble(&self) -> String {
        lock(&self.failures).values().next().map(|one| one.text.clone()).unwrap_or_default()
    }

    /// An action is no trouble any more.
    pub(super) fn is_well(&self, action: &str) {
        let mut all = lock(&self.failures);
        if all.remove(action).is_some() {
            self.notice(all.values().next().map(|other| other.text.clone()).unwrap_or_default());
        }
    }

    /// Shows a text, if it is another one than before.
    pub(super) fn report(&self, action: &str, text: String) {
        if !self.told(action, &text).is_empty() {
            self.notice(text);
        }
    }

    /// Notes a text that is to be shown, if it is another one than before.
    pub(super) fn told(&self, action: &str, text: &str) -> Vec<Output> {
        let mut all = lock(&self.failures);
        let failures = all.entry(action.to_owned()).or_default();
        let is_news = failures.text != text;
        text.clone_into(&mut failures.text);
        is_news.then(|| Output::Notice(text.to_owned())).into_iter().collect()
    }

    /// What has failed on the way to a mount is over where another node has come further, or a former process is off the list.
    pub(super) fn forget(&self, record: &Record<u64>) {
        let me = self.host.me;
        let is_others = record.coordinator.is_some_and(|one| one != me && record.mounts == [one].into());
        let is_over = |action: &str| match action.strip_prefix("fence ") {
            Some(node) => !record.mounts.iter().any(|one| one.node.to_string() == node),
            None => is_others && matches!(action, "beat" | "listen" | "look" | "mount" | "survey"),
        };
        let over: Vec<String> =
            lock(&self.failures).keys().filter(|action| is_over(action)).cloned().collect();
        over.iter().for_each(|action| self.is_well(action));
    }

    /// Whether an action that has failed in an epoch, for the `attempt`th time, is tried again in it: the more often, the more epochs it has
    /// failed in.
    pub(super) fn stays(&self, action: &str, epoch: u64, attempt: u32) -> bool {
        let mut all = lock(&self.failures);
        let failures = all.entry(action.to_owned()).or_default();
        if failures.epoch != epoch {
            failures.epoch = epoch;
            failures.epochs += 1;
        }
        attempt < (1 << (failures.epochs - 1).min(MOST_ATTEMPTS.ilog2()))
    }
}
