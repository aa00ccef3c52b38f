//! An owner stands still while it waits for a move, a replica takes over, and the former owner goes on where it stood.

use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::client::NbdClient;

use super::{TTL, connect, others};
use crate::common::{BLOCK, Bench, DISK, alone};

/// Blocks that are written by both owners.
const BLOCKS: u64 = 50;

/// The time for which the former owner is watched after it goes on.
const WATCHED: Duration = Duration::from_secs(8);

/// Longest time for a move to be given up, once the disk has another owner.
const GIVEN_UP: Duration = Duration::from_secs(15);

/// The answers of the former owner.
#[derive(Debug, Default)]
struct Answers {
    /// Connections that it refused, or hung up on.
    refused: u32,
    /// Connections, or reads on them, without an answer.
    silent: u32,
    /// Reads of what the new owner had acknowledged.
    fresh: u32,
    /// Reads of what was there before.
    stale: u32,
    /// The time of the first stale read, since the process went on.
    first_stale: Option<Duration>,
    last_stale: Option<Duration>,
}

fn write_all(client: &mut NbdClient, byte: u8) {
    for block in 0..BLOCKS {
        client.write(block * u64::from(BLOCK), &vec![byte; BLOCK as usize], false).unwrap();
    }
}

impl Answers {
    /// A new connection to the former owner, and a read of each block.
    fn ask(&mut self, bench: &Bench, former: &str, since: Nanos) {
        let timeout = Duration::from_millis(500);
        let Ok(mut client) = connect(bench, former, timeout) else {
            self.refused += 1;
            return;
        };
        self.read(&mut client, since);
    }

    fn read(&mut self, client: &mut NbdClient, since: Nanos) {
        let mut data = vec![0; BLOCK as usize];
        for block in 0..BLOCKS {
            if client.read(block * u64::from(BLOCK), &mut data).is_err() {
                self.silent += 1;
                return;
            }
            if data.iter().all(|byte| *byte == 2) {
                self.fresh += 1;
            } else {
                self.stale += 1;
                let now = Nanos::now() - since;
                self.first_stale.get_or_insert(now);
                self.last_stale = Some(now);
            }
        }
    }
}

/// The move stays pending because the owner cannot reach the node that it is to go to.
#[test]
fn a_former_owner_with_a_pending_move_answers_nobody_with_old_data() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |config| (config.network, config.lease_ttl) = (true, TTL));
    let (former, view) = (bench.owner(), bench.wait_effective());
    let stranger = others(&bench, &former).into_iter().find(|node| !view.replicas.contains(node)).unwrap();
    let mut old = connect(&bench, &former, Duration::from_secs(60)).unwrap();
    write_all(&mut old, 1);

    let network = bench.lab.network().unwrap();
    network.cut(network.between(&former, &stranger)).unwrap();
    let (api, to) = (bench.lab.client(&former).unwrap(), stranger.clone());
    let moving = thread::spawn(move || (api.move_disk(DISK, &to).map(drop), Nanos::now()));
    thread::sleep(Duration::from_millis(500));
    assert!(!moving.is_finished(), "the move was to be pending");
    bench.lab.pause(&former).unwrap();
    let successor = bench.wait(|view| view.owner.as_ref() != Some(&former)).owner.unwrap();
    let mut new = connect(&bench, &successor, Duration::from_secs(60)).unwrap();
    write_all(&mut new, 2);

    let resumed = Nanos::now();
    bench.lab.resume(&former).unwrap();
    let mut answers = Answers::default();
    while Nanos::now() < resumed + WATCHED {
        answers.ask(&bench, &former, resumed);
        thread::sleep(Duration::from_millis(20));
    }
    let mut on_old = Answers::default();
    on_old.read(&mut old, resumed);
    eprintln!("new connections to the former owner: {answers:?}; on the old one: {on_old:?}");
    network.restore().unwrap();
    let (moved, ended) = moving.join().unwrap();
    eprintln!("the move ended {:?} after the former owner went on: {moved:?}", ended - resumed);

    assert_eq!(answers.stale + on_old.stale, 0, "old data{}", bench.logs());
    assert!(ended - resumed < GIVEN_UP, "the move was waited for{}", bench.logs());
    let mut data = vec![0; BLOCK as usize];
    let mut reader = connect(&bench, &bench.owner(), Duration::from_secs(60)).unwrap();
    for block in 0..BLOCKS {
        reader.read(block * u64::from(BLOCK), &mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 2), "block {block} is lost{}", bench.logs());
    }
}
