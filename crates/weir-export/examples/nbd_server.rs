//! Serves one file over NBD, to measure the export by itself: `nbd_server FILE MIB`, then connect to what it prints.

#![allow(clippy::unwrap_used)]

#[path = "../tests/nbd/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "made for the tests")]
mod support;

use std::fs::File;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("nbd_server FILE MIB");
    let size: u64 = arguments.next().and_then(|text| text.parse().ok()).expect("nbd_server FILE MIB");
    let mut config = support::ServerConfig::one(size << 20);
    config.disks[0].1 =
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    let server = support::Server::start(config);
    println!("{}", server.unix_uri("disk"));
    println!("{}", server.tcp_uri("disk"));
    loop {
        std::thread::park();
    }
}
