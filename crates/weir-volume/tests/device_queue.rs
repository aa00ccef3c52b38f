//! Requests on a disk with a mechanism reach it as they were made.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;

use weir_block::{Engine, Layer, Payload, Request};

use common::{LoopDevice, Shard, options, reactor};
use weir_volume::EngineChoice;

const BLOCK: usize = 4096;
const REQUESTS: u64 = 8;

/// Writes that the device has got, when contiguous ones come in one call.
fn writes(rotational: &str) -> Option<u64> {
    let device = LoopDevice::new(16 << 20)?;
    let name = device.device.file_name().unwrap().to_str().unwrap().to_owned();
    for (attribute, value) in [("rotational", rotational), ("write_cache", "write through")] {
        fs::write(format!("/sys/block/{name}/queue/{attribute}"), value).unwrap();
    }
    // Field 5 of Documentation/ABI/stable/sysfs-block: write I/Os.
    let count = || {
        let text = fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        text.split_whitespace().nth(4).unwrap().parse::<u64>().unwrap()
    };
    let mut shard = Shard::new(reactor(Engine::Uring), &device.device, &options(EngineChoice::Reactor));
    let before = count();
    for number in 0..REQUESTS {
        let mut buffer = shard.reactor.buffers().take(BLOCK).unwrap();
        buffer.bytes_mut().fill(number as u8);
        let (tag, offset) = (shard.tag(), number * BLOCK as u64);
        shard.submit(Request::Write { tag, offset, payload: Payload::Given(buffer), fua: false });
    }
    assert_eq!(shard.backing.in_flight(), REQUESTS as usize);
    shard.drain().into_iter().for_each(|one| assert!(one.result.is_ok(), "{one:?}"));
    Some(count() - before)
}

#[test]
fn contiguous_requests_are_not_merged_on_a_disk_that_rotates() {
    let Some(rotating) = writes("1") else { return };
    assert_eq!(rotating, REQUESTS);
    assert!(writes("0").unwrap() < REQUESTS, "the kernel merges others");
}
