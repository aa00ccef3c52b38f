//! Looks at devices of which any may not answer: a multipath device all of whose paths are gone answers neither an open nor a read, and
//! nothing ends the thread that waits. Each look has a thread of its own, is waited for no longer than a limit, and is not repeated before it
//! has returned: a device keeps one thread at most, and holds up nobody but those who want this device.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

/// Looks that are under way at once, without those that have taken too long: a host may have hundreds of devices.
const AT_ONCE: usize = 32;

/// Pause between two attempts at a device that somebody else looks at.
const OTHERS: Duration = Duration::from_millis(20);

/// This process's.
pub static LOOKS: Looks = Looks::new(Duration::from_secs(3));

/// The looks that are under way.
#[derive(Debug)]
pub struct Looks {
    limit: Duration,
    /// By device, since when.
    under_way: Mutex<BTreeMap<PathBuf, Nanos>>,
}

/// The result of looks at several devices.
#[derive(Debug)]
pub struct Looked<T> {
    /// Of the devices that have answered, in their order.
    pub answers: Vec<T>,
    /// Those that have not.
    pub silent: Vec<PathBuf>,
}

/// One attempt at some devices.
struct Round<T> {
    answer: Sender<(PathBuf, T)>,
    answers: Receiver<(PathBuf, T)>,
    seen: BTreeMap<PathBuf, T>,
    /// Somebody else looks at them.
    busy: BTreeSet<PathBuf>,
    /// Those that this one looks at, and since when.
    awaited: BTreeMap<PathBuf, Nanos>,
}

impl Looks {
    /// None so far. `limit`: the longest wait for one.
    #[must_use]
    pub const fn new(limit: Duration) -> Looks {
        Looks { limit, under_way: Mutex::new(BTreeMap::new()) }
    }

    /// Looks at one device; `None`: it does not answer. Blocks, up to the limit.
    pub fn at<T: Send + 'static>(
        &'static self,
        device: &Path,
        look: impl Fn(&Path) -> T + Clone + Send + 'static,
    ) -> Option<T> {
        self.at_all(&[device.to_path_buf()], look).answers.pop()
    }

    /// Looks at devices. Blocks: for each [`AT_ONCE`] of them up to the limit, if some do not answer that have answered before, and as long as
    /// others look at them that do.
    pub fn at_all<T: Send + 'static>(
        &'static self,
        devices: &[PathBuf],
        look: impl Fn(&Path) -> T + Clone + Send + 'static,
    ) -> Looked<T> {
        let mut seen = BTreeMap::new();
        for some in devices.chunks(AT_ONCE) {
            seen.append(&mut self.round(some, &look));
        }
        let (mut answers, mut silent) = (Vec::new(), Vec::new());
        for device in devices {
            match seen.remove(device) {
                Some(answer) => answers.push(answer),
                None => silent.push(device.clone()),
            }
        }
        Looked { answers, silent }
    }

    /// The answers of some devices.
    fn round<T: Send + 'static>(
        &'static self,
        devices: &[PathBuf],
        look: &(impl Fn(&Path) -> T + Clone + Send + 'static),
    ) -> BTreeMap<PathBuf, T> {
        let (answer, answers) = channel();
        let (busy, awaited) = (devices.iter().cloned().collect(), BTreeMap::new());
        let mut round = Round { answer, answers, seen: BTreeMap::new(), busy, awaited };
        loop {
            self.begin(&mut round, look);
            let now = Nanos::now();
            round.awaited.retain(|device, since| {
                let waits = now - *since < self.limit;
                if !waits {
                    tracing::warn!(device = %device.display(), "a block device does not answer: nobody looks at it again before it does");
                }
                waits
            });
            let left = round.awaited.values().map(|since| *since + self.limit - now).min();
            let wait = match (left, round.busy.is_empty()) {
                (None, true) => return round.seen,
                (Some(left), true) => left,
                (left, false) => left.unwrap_or(OTHERS).min(OTHERS),
            };
            if let Ok((device, answer)) = round.answers.recv_timeout(wait) {
                round.awaited.remove(&device);
                round.seen.insert(device, answer);
            }
        }
    }

    /// Begins what looks can be begun. A device that has not answered somebody in time is not waited for.
    fn begin<T: Send + 'static>(
        &'static self,
        round: &mut Round<T>,
        look: &(impl Fn(&Path) -> T + Clone + Send + 'static),
    ) {
        let now = Nanos::now();
        for device in std::mem::take(&mut round.busy) {
            let mut under_way = self.lock();
            match under_way.get(&device) {
                Some(since) if now - *since >= self.limit => {}
                Some(_) => drop(round.busy.insert(device)),
                None => {
                    under_way.insert(device.clone(), now);
                    drop(under_way);
                    round.awaited.insert(device.clone(), now);
                    self.start(device, look.clone(), round.answer.clone());
                }
            }
        }
    }

    fn start<T: Send + 'static>(
        &'static self,
        device: PathBuf,
        look: impl Fn(&Path) -> T + Send + 'static,
        answer: Sender<(PathBuf, T)>,
    ) {
        let looked_at = UnderWay(self, device);
        let started = thread::Builder::new().name("weir-look".into()).spawn(move || {
            let seen = look(&looked_at.1);
            let device = looked_at.1.clone();
            // Before the answer: its receiver may look at the device again at once.
            drop(looked_at);
            // Nobody waits for it any more.
            let _ = answer.send((device, seen));
        });
        if let Err(error) = started {
            tracing::error!(%error, "no thread for a look at a block device: it counts as one that does not answer");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Nanos>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look, until it has returned, also by a panic.
struct UnderWay(&'static Looks, PathBuf);

impl Drop for UnderWay {
    fn drop(&mut self) {
        let UnderWay(looks, device) = self;
        let since = looks.lock().remove(device);
        if since.is_some_and(|since| Nanos::now() - since >= looks.limit) {
            tracing::info!(device = %device.display(), "a block device answers again");
        }
    }
}

/// Words for devices that do not answer, with a separator before them; empty if there are none.
#[must_use]
pub fn silence(devices: &[PathBuf]) -> String {
    let named: Vec<String> = devices.iter().map(|device| device.display().to_string()).collect();
    match named.as_slice() {
        [] => String::new(),
        [one] => format!("; {one} does not answer"),
        some => format!("; {} do not answer", some.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    /// It kept a node from all of its LUNs, for ever.
    #[test]
    fn a_device_that_hangs_delays_the_others_once_and_keeps_one_thread() {
        static LOOKS: Looks = Looks::new(Duration::from_secs(1));
        static HANGS: Mutex<()> = Mutex::new(());
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        let look = |device: &Path| {
            if device == Path::new("hung") {
                BEGUN.fetch_add(1, Ordering::Relaxed);
                drop(HANGS.lock());
            }
            device.to_path_buf()
        };
        let hangs = HANGS.lock().unwrap();
        let devices = paths(&["c", "hung", "a"]);
        let seen = LOOKS.at_all(&devices, look);
        assert_eq!((seen.answers, seen.silent), (paths(&["c", "a"]), paths(&["hung"])));
        let again = Nanos::now();
        for _ in 0..20 {
            let seen = LOOKS.at_all(&devices, look);
            assert_eq!((seen.answers, seen.silent), (paths(&["c", "a"]), paths(&["hung"])));
            assert_eq!(LOOKS.at(Path::new("hung"), look), None);
        }
        assert!(Nanos::now() - again < Duration::from_secs(10), "it is waited for once, not twenty times");
        assert_eq!(BEGUN.load(Ordering::Relaxed), 1);
        drop(hangs);
        let until = Nanos::now() + Duration::from_secs(10);
        while LOOKS.at(Path::new("hung"), look).is_none() {
            assert!(Nanos::now() < until, "it answers, and is not looked at");
            thread::sleep(OTHERS);
        }
    }

    /// Each volume has a task that looks at all devices.
    #[test]
    fn two_who_look_at_one_device_at_once_both_see_it() {
        static LOOKS: Looks = Looks::new(Duration::from_secs(10));
        let slow = |device: &Path| {
            thread::sleep(Duration::from_millis(100));
            device.to_path_buf()
        };
        let both = [(); 2].map(|()| thread::spawn(move || LOOKS.at(Path::new("a"), slow)));
        for one in both {
            assert_eq!(one.join().unwrap(), Some("a".into()));
        }
        assert!(LOOKS.lock().is_empty());
    }

    /// As at the start of a node with many volumes: each gets its turn, however long all of them take.
    #[test]
    fn many_who_look_at_a_slow_device_all_see_it() {
        static LOOKS: Looks = Looks::new(Duration::from_secs(3));
        let slow = |_: &Path| thread::sleep(Duration::from_millis(300));
        let all: Vec<_> = (0..14).map(|_| thread::spawn(move || LOOKS.at(Path::new("a"), slow))).collect();
        for one in all {
            assert_eq!(one.join().unwrap(), Some(()));
        }
    }

    #[test]
    fn a_look_that_panics_is_over() {
        static LOOKS: Looks = Looks::new(Duration::from_millis(50));
        assert_eq!(LOOKS.at::<()>(Path::new("a"), |_| panic!("in a look")), None);
        let until = Nanos::now() + Duration::from_secs(60);
        while LOOKS.at(Path::new("a"), |_| 1).is_none() {
            assert!(Nanos::now() < until, "it counts as under way");
            thread::sleep(OTHERS);
        }
    }
}
