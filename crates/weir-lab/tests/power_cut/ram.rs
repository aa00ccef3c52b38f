//! A write log in RAM does not outlive the power of all its hosts. The nodes report the loss and serve no old disk by
//! mistake; the state that an operator finally accepts is one that the disk went through (P5).

use std::thread;
use std::time::Duration;

use weir_cluster::records::Medium;
use weir_lab::volatile_disk::Survivors;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiErrorKind, DiskView, Export};

use crate::common::{BLOCK, DISK, SIZE, SOON, alone};
use crate::site::{Plan, Site};
use crate::support::await_some;

/// Blocks that the guest writes in turn.
const BLOCKS: u64 = 64;

/// A guest that writes a number into one block after the other.
#[derive(Debug, Default)]
struct Counter {
    /// The last number that was acknowledged.
    acknowledged: u64,
}

impl Counter {
    /// Writes up to `last`, or until there is no answer any more.
    fn write(&mut self, uri: &Uri, last: u64) {
        let mut client = NbdClient::connect(uri).unwrap();
        while self.acknowledged < last {
            let number = self.acknowledged + 1;
            let block = number.to_le_bytes().repeat(BLOCK as usize / 8);
            if client.write(number % BLOCKS * u64::from(BLOCK), &block, false).is_err() {
                return;
            }
            self.acknowledged = number;
        }
    }

    /// The last number of the state that the disk is in.
    fn read(uri: &Uri) -> u64 {
        let mut client = NbdClient::connect(uri).unwrap();
        let mut block = vec![0; BLOCK as usize];
        let found: Vec<u64> = (0..BLOCKS)
            .map(|number| {
                client.read(number * u64::from(BLOCK), &mut block).unwrap();
                let words = block.as_chunks::<8>().0;
                assert!(words.iter().all(|word| word == &words[0]), "block {number} is torn");
                u64::from_le_bytes(words[0])
            })
            .collect();
        let last = *found.iter().max().unwrap();
        let newest = |block: u64| (0..=last).rev().find(|number| number % BLOCKS == block).unwrap_or(0);
        let expected: Vec<u64> = (0..BLOCKS).map(newest).collect();
        assert_eq!(found, expected, "not a state that the disk went through (P5)");
        last
    }
}

/// The disk as any node shows it, once it is unavailable.
fn unavailable(site: &Site) -> DiskView {
    let client = site.bench.lab.any_client().unwrap();
    let look = || client.disk(DISK).ok().filter(|view| view.state == "unavailable");
    await_some(SOON, look, || format!("{:?}{}", client.disk(DISK), site.bench.logs()))
}

#[test]
fn a_log_in_ram_is_lost_and_people_are_asked() {
    let _turn = alone();
    let mut site = Site::up(&Plan { nodes: 3, policy: "write-back+1", medium: Medium::Ram, size: SIZE });
    let mut counter = Counter::default();
    let (_, uri) = site.wait_served();
    // All blocks have their place in the backing: from now on its flushes are those of checkpoints, whole or not at all.
    counter.write(&uri, BLOCKS);
    site.bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.destaged == detail.appended));
    thread::scope(|scope| {
        scope.spawn(|| counter.write(&uri, u64::MAX));
        thread::sleep(Duration::from_millis(1500));
        site.power_cut(|| {});
    });
    // A checkpoint in progress could leave some of its writes on the medium by chance: P5 is about checkpoints.
    let toll = site.power_on(Survivors::None, &["n1", "n2", "n3"].map(String::from));
    let view = unavailable(&site);
    assert!(view.reason.contains("--accept-loss"), "{}", view.reason);
    // It stays so, on any node and for any time.
    thread::sleep(Duration::from_secs(2));
    for node in ["n1", "n2", "n3"] {
        let client = site.bench.lab.client(node).unwrap();
        let error = client.export(DISK, &Export::default()).unwrap_err();
        assert!(error.kind == ApiErrorKind::Refused && error.message.contains("--accept-loss"), "{error:?}");
        let socket = &site.bench.lab.node(node).unwrap().nbd_unix;
        let error = NbdClient::connect(&Uri::unix(socket, DISK)).unwrap_err().to_string();
        assert!(error.contains("weir disk show d1"), "a client is not told where to ask: {error}");
    }
    unavailable(&site);
    let client = site.bench.lab.client("n2").unwrap();
    client.export(DISK, &Export { on: None, accept_loss: true }).unwrap();
    let (_, uri) = site.wait_served();
    let last = Counter::read(&uri);
    let acknowledged = counter.acknowledged;
    eprintln!("{acknowledged} writes were acknowledged; the disk is as after write {last}; {toll}");
    assert!((BLOCKS..=acknowledged).contains(&last), "{last} of {acknowledged}");
    // From there it goes on.
    counter.acknowledged = last;
    counter.write(&uri, last + 1000);
    assert_eq!(Counter::read(&uri), last + 1000);
}
