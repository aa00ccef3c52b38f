//! Clients that mean harm to others on a real node: some never read their replies, some never say a word. The effect on another
//! disk's guest, and on a new client.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_nbd::protocol::{
    ExportSize, Greeting, OPTION_MAGIC, OptionHeader, REQUEST_MAGIC, RequestHeader, client_flag, command,
    option,
};
use weir_node::api::DiskView;
use weir_node::config::ResourcesConfig;
use zerocopy::IntoBytes;

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
    /// Of a round before the others, which does not count: the shard's buffers are used for the first time, and the kernel has to give
    /// it their memory.
    pub first_ratio: f64,
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
/// before and beside them, `rounds` times after a first.
///
/// The log is written once before: the kernel gives its memory in pieces of 2 MiB, and clearing one took 12 ms in a virtual machine
/// with fresh memory. At this guest's rate, that alone is more than one request of a hundred, without any other client.
pub fn unread(lasts: Duration, rounds: u32, seed: u64) -> Unread {
    let bench = Bench::up(2, "write-back+1", |config| {
        defaults(config);
        config.shards = 1;
    });
    bench.create(THEIRS, "write-back+1");
    let node = bench.lab.node(&bench.owner()).unwrap();
    let polite = Uri::unix(&node.nbd_unix, DISK);
    let client = node.client();
    let clients = || client.disk(THEIRS).unwrap().detail.unwrap().clients;
    fill_once(&polite);
    let (mut before, mut beside, mut longest) = (Vec::new(), Vec::new(), Duration::ZERO);
    for round in 0..=rounds {
        let load = GuestLoad::start(&polite, POLITE, seed + u64::from(round));
        thread::sleep(WARM_UP);
        let began = Nanos::now();
        thread::sleep(lasts);
        let came = Nanos::now();
        let connections: Vec<UnixStream> = (0..UNREAD).map(|_| never_reads(&node.nbd_unix)).collect();
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
    let mut ratios: Vec<f64> = before.iter().zip(&beside).map(|(before, beside)| beside / before).collect();
    let first_ratio = ratios.remove(0);
    Unread {
        connections: UNREAD,
        reads_of_each: DEPTH,
        bytes_of_each_read: LENGTH,
        p99_before_us: median(before.split_off(1)),
        p99_beside_us: median(beside.split_off(1)),
        p99_ratio: median(ratios.clone()),
        ratio_of_each_round: ratios,
        first_ratio,
        longest_beside_ms: longest.as_secs_f64() * 1e3,
    }
}

/// The duration of a load before it is measured.
const WARM_UP: Duration = Duration::from_millis(300);

/// Writes as much as the whole log holds.
fn fill_once(uri: &Uri) {
    const PIECE: usize = 1 << 20;
    let mut client = NbdClient::connect(uri).unwrap();
    let (size, log) = (client.export().size, ResourcesConfig::default().log.0);
    for piece in 0..=log / PIECE as u64 {
        client.write(piece * PIECE as u64 % size, &vec![1; PIECE], false).unwrap();
    }
}

/// A client with many reads in flight that takes no answer. By hand: Weir's own client makes buffers for the answers, and a gigabyte
/// of them takes processor time from the measured guest. It negotiates nothing, so the replies are simple ones.
fn never_reads(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.read_exact(&mut [0; size_of::<Greeting>()]).unwrap();
    let flags = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
    let choose = OptionHeader {
        magic: OPTION_MAGIC.into(),
        option: option::EXPORT_NAME.into(),
        length: (THEIRS.len() as u32).into(),
    };
    stream.write_all(&[&flags.to_be_bytes(), choose.as_bytes(), THEIRS.as_bytes()].concat()).unwrap();
    stream.read_exact(&mut [0; size_of::<ExportSize>()]).unwrap();
    let read = |number: u32| RequestHeader {
        magic: REQUEST_MAGIC.into(),
        flags: 0.into(),
        command: command::READ.into(),
        cookie: u64::from(number).into(),
        offset: u64::from(number * LENGTH).into(),
        length: LENGTH.into(),
    };
    stream.write_all((0..DEPTH).map(read).collect::<Vec<_>>().as_bytes()).unwrap();
    stream
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
