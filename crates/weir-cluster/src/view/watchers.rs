//! Wakes the tasks that depend on one record of a view: with thousands of records, every change would otherwise wake all their tasks.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Names below which no sweep is worth its time.
const FEW: usize = 64;

/// The channels through which tasks wait for single records.
#[derive(Debug, Default)]
pub(super) struct Watchers(Mutex<Watched>);

#[derive(Debug, Default)]
struct Watched {
    by_name: BTreeMap<String, Channels>,
    /// The number of names at which those that nobody waits for any more are removed.
    sweep_at: usize,
}

/// Of one name: wakes at each put and deletion, and at those that change the record.
#[derive(Debug, Default)]
struct Channels {
    puts: watch::Sender<()>,
    contents: watch::Sender<()>,
}

impl Watchers {
    /// Wakes at each put and deletion of records of this name.
    pub fn puts(&self, name: &str) -> watch::Receiver<()> {
        self.subscribe(name, |channels| &channels.puts)
    }

    /// Wakes when records of this name change.
    pub fn contents(&self, name: &str) -> watch::Receiver<()> {
        self.subscribe(name, |channels| &channels.contents)
    }

    fn subscribe(&self, name: &str, of: impl FnOnce(&Channels) -> &watch::Sender<()>) -> watch::Receiver<()> {
        let mut watched = self.watched();
        let Watched { by_name, sweep_at } = &mut *watched;
        if by_name.len() >= *sweep_at {
            by_name.retain(|_, channels| channels.is_watched());
            *sweep_at = FEW.max(2 * by_name.len());
        }
        of(by_name.entry(first_part(name).to_owned()).or_default()).subscribe()
    }

    /// There was a put or a deletion under `key`, a view's key without its prefix.
    pub fn tell(&self, key: &str, is_new: bool) {
        if let Some(channels) = self.watched().by_name.get(first_part(key)) {
            channels.tell(is_new);
        }
    }

    /// Anything may be another one.
    pub fn tell_all(&self) {
        self.watched().by_name.values().for_each(|channels| channels.tell(true));
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channels {
    fn is_watched(&self) -> bool {
        self.puts.receiver_count() > 0 || self.contents.receiver_count() > 0
    }

    fn tell(&self, is_new: bool) {
        self.puts.send_replace(());
        if is_new {
            self.contents.send_replace(());
        }
    }
}

/// The part of a key that names the thing whose record it is: up to the first slash.
fn first_part(key: &str) -> &str {
    key.split_once('/').map_or(key, |(first, _)| first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_wakes_those_who_wait_for_it_and_nobody_else() {
        let watchers = Watchers::default();
        let (mut put, mut content, mut other) =
            (watchers.puts("d"), watchers.contents("d"), watchers.puts("e"));
        let mut woken = || {
            let seen = |one: &mut watch::Receiver<()>| {
                let is_woken = one.has_changed().expect("the sender is there");
                one.mark_unchanged();
                is_woken
            };
            [seen(&mut put), seen(&mut content), seen(&mut other)]
        };
        assert_eq!(woken(), [false; 3]);
        watchers.tell("d", false);
        assert_eq!(woken(), [true, false, false], "written once more as it was");
        watchers.tell("d/7/n1", true);
        assert_eq!(woken(), [true, true, false]);
        watchers.tell("nobody", true);
        assert_eq!(woken(), [false; 3]);
        watchers.tell_all();
        assert_eq!(woken(), [true; 3]);
    }

    #[test]
    fn names_that_nobody_waits_for_are_forgotten() {
        let watchers = Watchers::default();
        let kept = watchers.contents("kept");
        for number in 0..100 * FEW {
            drop(watchers.puts(&format!("d{number}")));
        }
        assert!(watchers.watched().by_name.len() <= FEW);
        watchers.tell("kept", true);
        assert_eq!(kept.has_changed().ok(), Some(true));
    }
}
