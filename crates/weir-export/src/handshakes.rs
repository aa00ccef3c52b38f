//! The handshakes that are under way, and which of them ends when there are too many (P10).
//!
//! A handshake takes a client a few milliseconds, and a silent connection any time. So a new client never waits for one that is
//! silent: of the origin with the most handshakes, the one ends from which nothing has come for the longest time. An origin
//! with few handshakes thus keeps them beside another one with many. For NBD clients, and for the port of the other nodes.
//!
//! Where many genuine clients come at once, as nodes do when one of them has restarted, those that have said something have room
//! of their own ([`Handshakes::with_room`]): to end the one that has waited longest for its turn would end the most advanced ones.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::future::Future;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::task::{AbortHandle, Id, JoinSet};
use weir_block::Nanos;

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A process of this host; `None` if the kernel does not say which.
    Process(Option<i32>),
    /// A host. Of an IPv6 address the network counts, because a host has as many addresses in it as it wants.
    Host(IpAddr),
}

impl Origin {
    /// The origin of a TCP connection.
    #[must_use]
    pub fn of(address: IpAddr) -> Origin {
        const NETWORK: u128 = u128::MAX << 64;
        Origin::Host(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() & NETWORK).into()),
            address => address,
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Process(Some(process)) => write!(f, "process {process}"),
            Origin::Process(None) => f.write_str("a process"),
            Origin::Host(address) => write!(f, "{address}"),
        }
    }
}

/// The last time that a client was heard. Shared by a handshake and [`Handshakes`].
#[derive(Clone, Debug)]
pub struct Heard(Arc<(AtomicU64, AtomicBool)>);

impl Heard {
    fn now() -> Heard {
        Heard(Arc::new((AtomicU64::new(Nanos::now().0), AtomicBool::new(false))))
    }

    /// Bytes have come.
    pub fn note(&self) {
        self.0.0.store(Nanos::now().0, Ordering::Relaxed);
        self.0.1.store(true, Ordering::Relaxed);
    }

    fn at(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed)
    }

    fn is_silent(&self) -> bool {
        !self.0.1.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct UnderWay<O> {
    origin: O,
    heard: Heard,
    abort: AbortHandle,
}

/// A limited number of handshakes under way. `O` identifies their origins. All end when it is dropped.
#[derive(Debug)]
pub struct Handshakes<O = Origin> {
    most_silent: usize,
    most: usize,
    tasks: JoinSet<()>,
    under_way: HashMap<Id, UnderWay<O>>,
}

impl<O: Clone + Debug + Eq + Hash> Handshakes<O> {
    /// At most `most` at once, at least 1.
    #[must_use]
    pub fn new(most: usize) -> Handshakes<O> {
        Handshakes::with_room(most, most)
    }

    /// At most `most` at once, and at most `most_silent` from which nothing has come yet, each at least 1.
    #[must_use]
    pub fn with_room(most_silent: usize, most: usize) -> Handshakes<O> {
        let (most_silent, most) = (most_silent.max(1), most.max(1));
        Handshakes { most_silent, most, tasks: JoinSet::new(), under_way: HashMap::new() }
    }

    /// Starts one for a client that has just connected. Ends another one if there are too many, and returns that one's origin.
    pub fn start<F>(&mut self, origin: O, handshake: impl FnOnce(Heard) -> F) -> Option<O>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.forget_finished();
        let silent = self.under_way.values().filter(|one| one.heard.is_silent()).count();
        let ended = if silent >= self.most_silent {
            self.end_one(&origin, Heard::is_silent)
        } else if self.under_way.len() >= self.most {
            self.end_one(&origin, |_| true)
        } else {
            None
        };
        let heard = Heard::now();
        let abort = self.tasks.spawn(handshake(heard.clone()));
        self.under_way.insert(abort.id(), UnderWay { origin, heard, abort });
        ended
    }

    fn forget_finished(&mut self) {
        while let Some(finished) = self.tasks.try_join_next_with_id() {
            let id = finished.map_or_else(|error| error.id(), |(id, ())| id);
            self.under_way.remove(&id);
        }
    }

    /// One of those that `may_end`. `newcomer` counts as one of its origin: with as many handshakes as another origin, its own ends.
    fn end_one(&mut self, newcomer: &O, may_end: impl Fn(&Heard) -> bool) -> Option<O> {
        let mut counts = HashMap::from([(newcomer.clone(), 1)]);
        let candidates = || self.under_way.iter().filter(|(_, one)| may_end(&one.heard));
        for (_, one) in candidates() {
            *counts.entry(one.origin.clone()).or_default() += 1;
        }
        let ends = candidates().max_by_key(|(_, one)| {
            let count = counts.get(&one.origin).copied().unwrap_or_default();
            (count, one.origin == *newcomer, std::cmp::Reverse(one.heard.at()))
        });
        let id = ends.map(|(&id, _)| id)?;
        let one = self.under_way.remove(&id)?;
        tracing::debug!(origin = ?one.origin, "too many handshakes; the longest silent one of its origin ends");
        one.abort.abort();
        Some(one.origin)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn host(last: u8) -> Origin {
        Origin::of(IpAddr::from([192, 0, 2, last]))
    }

    /// Of each host, how many are under way.
    fn counts(handshakes: &Handshakes) -> Vec<usize> {
        let of = |origin| handshakes.under_way.values().filter(|one| one.origin == origin).count();
        (1..=3).map(|last| of(host(last))).collect()
    }

    #[tokio::test]
    async fn an_origin_with_few_keeps_them_beside_one_with_many() {
        let mut handshakes = Handshakes::new(8);
        for _ in 0..3 {
            handshakes.start(host(1), |_| std::future::pending());
        }
        for _ in 0..100 {
            handshakes.start(host(2), |_| std::future::pending());
        }
        assert_eq!(counts(&handshakes), [3, 5, 0]);
        for _ in 0..100 {
            handshakes.start(host(3), |_| std::future::pending());
        }
        assert_eq!(counts(&handshakes).iter().sum::<usize>(), 8);
        assert!(counts(&handshakes).iter().all(|&count| count >= 2), "{:?}", counts(&handshakes));
        // Ends only when the others have.
        while handshakes.tasks.len() > 8 {
            tokio::task::yield_now().await;
            handshakes.forget_finished();
        }
        assert_eq!(handshakes.tasks.len(), 8);
    }

    #[tokio::test]
    async fn the_longest_silent_one_ends() {
        let mut handshakes = Handshakes::new(3);
        let mut heard = Vec::new();
        for _ in 0..3 {
            handshakes.start(host(1), |of| {
                heard.push(of);
                std::future::pending()
            });
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        heard[0].note();
        handshakes.start(host(1), |_| std::future::pending());
        let left = handshakes.under_way.values().map(|one| one.heard.at()).collect::<Vec<_>>();
        assert!(
            left.contains(&heard[0].at()) && !left.contains(&heard[1].at()),
            "the second was silent longest"
        );
    }

    #[tokio::test]
    async fn those_that_have_said_something_have_room_of_their_own() {
        let mut handshakes = Handshakes::with_room(2, 6);
        let mut spoken = Vec::new();
        for _ in 0..4 {
            assert_eq!(
                handshakes.start(host(1), |of| {
                    of.note();
                    spoken.push(of);
                    std::future::pending()
                }),
                None
            );
        }
        for _ in 0..2 {
            assert_eq!(handshakes.start(host(1), |_| std::future::pending()), None);
        }
        for _ in 0..10 {
            assert!(handshakes.start(host(2), |_| std::future::pending()).is_some(), "one has ended");
        }
        let left = handshakes.under_way.values().filter(|one| !one.heard.is_silent()).count();
        assert_eq!(left, 4, "none of them has ended for a silent one");
        // With no silent one left, the limit of all counts.
        for _ in 0..10 {
            handshakes.start(host(3), |of| {
                of.note();
                std::future::pending()
            });
        }
        assert!(handshakes.under_way.len() <= 6);
    }

    #[tokio::test]
    async fn finished_ones_make_room() {
        let mut handshakes = Handshakes::new(2);
        handshakes.start(host(1), |_| std::future::pending());
        for _ in 0..10 {
            handshakes.start(host(1), |_| async {});
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(handshakes.under_way.len(), 2);
        handshakes.forget_finished();
        assert_eq!(handshakes.under_way.len(), 1, "the one that goes on");
    }

    #[test]
    fn a_network_of_ipv6_is_one_origin() {
        let of = |text: &str| Origin::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), host(1));
        assert_ne!(host(1), host(2));
    }
}
