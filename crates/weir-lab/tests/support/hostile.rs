//! Clients that mean harm to others on a real node: some never read their replies, some never say a word. The effect on another
//! disk's guest, and on a new client.

use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::{Connection, NbdClient, NbdCommand, Options};
use weir_node::api::DiskView;

use super::behaviour::defaults;
use super::guest_load::{GuestLoad, Shape};
use crate::common::{Bench, DISK};

/// Connections that never read their replies.
const UNREAD: usize = 200;

/// Requests that each of them has in flight, and their size.
const DEPTH: u32 = 128;
const LENGTH: u32 = 64 << 10;

/// The disk that they use.
const THEIRS: &str = "d2";

/// A guest that asks for little.
const POLITE: Shape = Shape { depth: 4, read_percent: 50, rate: Some(500) };

/// The effect of clients that never read on the guest of another disk of their shard.
#[derive(Debug, Serialize)]
pub struct Unread {
    pub connections: usize,
    pub reads_of_each: u32,
    pub bytes_of_each_read: u32,
    /// The other guest's latencies without them and with them, in rounds one after the other: medians of the rounds' percentiles.
    pub p99_before_us: f64,
    pub p99_beside_us: f64,
    /// Median of the rounds' ratios.
    pub p99_ratio: f64,
    pub ratio_of_each_round: Vec<f64>,
    pub longest_beside_ms: f64,
}

/// How long a new client waits beside connections that say nothing.
#[derive(Debug, Serialize)]
pub struct Silent {
    pub connections: usize,
    /// From its connection to the answer to its first read.
    pub served_after_ms: f64,
}

/// Two disks on one node with one shard: clients of the one never read their replies, the other one's guest is measured for `lasts`
/// before and beside them, `rounds` times.
pub fn unread(lasts: Duration, rounds: u32, seed: u64) -> Unread {
    let bench = Bench::up(2, "write-back+1", |config| {
        defaults(config);
        config.shards = 1;
    });
    bench.create(THEIRS, "write-back+1");
    let node = bench.lab.node(&bench.owner()).unwrap();
    let (polite, hostile) = (Uri::unix(&node.nbd_unix, DISK), Uri::unix(&node.nbd_unix, THEIRS));
    let client = node.client();
    let clients = || client.disk(THEIRS).unwrap().detail.unwrap().clients;
    let (mut before, mut beside, mut longest) = (Vec::new(), Vec::new(), Duration::ZERO);
    for round in 0..rounds {
        let load = GuestLoad::start(&polite, POLITE, seed + u64::from(round));
        thread::sleep(WARM_UP);
        let began = Nanos::now();
        thread::sleep(lasts);
        let came = Nanos::now();
        let connections: Vec<Connection> = (0..UNREAD).map(|_| never_reads(&hostile)).collect();
        thread::sleep(lasts);
        assert_eq!(clients(), UNREAD, "nobody else waits for what they hold, so they stay");
        let ended = Nanos::now();
        let timeline = load.finish();
        before.push(timeline.percentile(began, came, 99.0).as_secs_f64() * 1e6);
        beside.push(timeline.percentile(came, ended, 99.0).as_secs_f64() * 1e6);
        longest = longest.max(timeline.percentile(came, ended, 100.0));
        drop(connections);
        let gone = |view: DiskView| view.detail.is_some_and(|detail| detail.clients == 0);
        super::await_some(
            crate::common::SOON,
            || client.disk(THEIRS).ok().map(gone).filter(|gone| *gone),
            || bench.logs(),
        );
    }
    let ratios: Vec<f64> = before.iter().zip(&beside).map(|(before, beside)| beside / before).collect();
    Unread {
        connections: UNREAD,
        reads_of_each: DEPTH,
        bytes_of_each_read: LENGTH,
        p99_before_us: median(before),
        p99_beside_us: median(beside),
        p99_ratio: median(ratios.clone()),
        ratio_of_each_round: ratios,
        longest_beside_ms: longest.as_secs_f64() * 1e3,
    }
}

/// The duration of a load before it is measured.
const WARM_UP: Duration = Duration::from_millis(300);

/// A client with many reads in flight that takes no answer.
fn never_reads(uri: &Uri) -> Connection {
    let options = Options { depth: DEPTH, ..Options::default() };
    let mut connection = Connection::open(uri, &options).unwrap();
    for slot in 0..DEPTH {
        connection.start(slot, NbdCommand::Read { offset: u64::from(slot * LENGTH), length: LENGTH });
    }
    // Sends them, and waits for nothing.
    connection.pump(Nanos(0), &mut Vec::new()).unwrap();
    connection
}

/// A new client comes to a node to which so many connections have been made that say nothing.
pub fn silent(connections: usize) -> Silent {
    let bench = Bench::up(1, "write-back+0", defaults);
    let address = bench.lab.node(&bench.owner()).unwrap().nbd_tcp;
    let silent: Vec<TcpStream> = (0..connections).map(|_| TcpStream::connect(address).unwrap()).collect();
    let asked = Nanos::now();
    let uri = Uri::tcp(address, DISK);
    NbdClient::connect(&uri).unwrap().read(0, &mut [0; 4096]).unwrap();
    let served_after_ms = (Nanos::now() - asked).as_secs_f64() * 1e3;
    drop(silent);
    Silent { connections, served_after_ms }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
