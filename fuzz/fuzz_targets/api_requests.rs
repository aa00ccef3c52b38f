//! Arbitrary bytes as the body of every request that changes something at the API, read and checked as the API does: nothing panics,
//! a request that is read and sent on to another node is read there as the same one, and what passes the checks can be read back
//! from the registry.

#![cfg_attr(feature = "link", no_main)]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use weir_cluster::records::{DiskRecord, Limit, Policy, Record, Source, VolumeRecord, check_name};
use weir_identity::{Fingerprint, Invitation, JoinRequest, RenewRequest, invite};
use weir_node::api::{
    CreateDisk, CreateVolume, Delete, DeleteVolume, DrainNode, Export, Follow, Move, RecordProfile, Resize,
    RunLoad, SetLimit, SetPolicy,
};
use weir_node::cluster::views::{Invite, NewClient, Revoke, Rotate, Withdraw};

const NOW: u64 = 1_795_435_200;

// The first byte says which request the others are.
fuzz_target!(|input: &[u8]| {
    let Some((&kind, body)) = input.split_first() else { return };
    match kind % 20 {
        0 => read(body).into_iter().for_each(create_disk),
        1 => read(body).into_iter().for_each(create_volume),
        2 => read(body).into_iter().for_each(set_limit),
        3 => read(body).into_iter().for_each(|it: SetPolicy| drop(it.policy.parse::<Policy>())),
        4 => read(body).into_iter().for_each(run_load),
        5 => read(body).into_iter().for_each(|it: Invite| make_token(&it)),
        6 => read(body).into_iter().for_each(|it: NewClient| drop(it.grant())),
        7 => drop(read::<Move>(body).map(|it| check_name(&it.to))),
        8 => drop(read::<Export>(body).and_then(|it| it.on).map(|node| check_name(&node))),
        9 => drop(read::<Follow>(body).and_then(|it| it.to).map(|node| check_name(&node))),
        10 => drop(read::<Delete>(body).map(|it| check_name(&it.name))),
        11 => drop(read::<Resize>(body)),
        12 => drop(read::<RecordProfile>(body)),
        13 => drop(read::<DrainNode>(body)),
        14 => drop(read::<DeleteVolume>(body)),
        15 => drop(read::<Revoke>(body)),
        16 => drop(read::<Rotate>(body)),
        17 => drop(read::<Withdraw>(body)),
        // Messages with a version and limits of their own.
        18 => drop(JoinRequest::decode(body)),
        _ => drop(RenewRequest::decode(body)),
    }
});

/// The request, which a node that forwards it writes as another one reads it.
fn read<T: DeserializeOwned + Serialize>(body: &[u8]) -> Option<T> {
    let request: T = serde_json::from_slice(body).ok()?;
    let sent = serde_json::to_vec(&request).expect("a request can be sent on");
    let again: T = serde_json::from_slice(&sent).expect("what one node sends another one reads");
    let sent_again = serde_json::to_vec(&again).expect("a request can be sent on");
    assert_eq!(String::from_utf8_lossy(&sent), String::from_utf8_lossy(&sent_again));
    Some(request)
}

fn create_disk(wanted: CreateDisk) {
    let Ok(policy) = wanted.policy.parse::<Policy>() else { return };
    let CreateDisk { name, volume, size, logical_block, medium, limit, .. } = wanted;
    let source = Source::File { name: name.clone() };
    let mut record = DiskRecord::new(&name, &volume, source, size, logical_block, policy);
    record.medium = medium;
    record.limit = limit.map(Limit::from);
    kept(&record);
}

fn create_volume(wanted: CreateVolume) {
    kept(&VolumeRecord::dir(wanted.name, wanted.path, 1));
}

/// A record that passes the checks is read back as it was.
fn kept<T: Record + PartialEq + Debug>(record: &T) {
    if record.check().is_ok() {
        assert_eq!(&T::decode(&record.encode()).expect("it passed the checks"), record);
    }
}

fn set_limit(wanted: SetLimit) {
    if let Some(limit) = wanted.limit.map(Limit::from)
        && limit.contradiction().is_none()
    {
        assert!(limit.iops.is_some() || limit.bytes_per_second.is_some());
        assert!(!limit.to_string().is_empty());
    }
}

fn run_load(wanted: RunLoad) {
    let _ = wanted.workload.validate();
}

fn make_token(wanted: &Invite) {
    let invitation = Invitation {
        only_for: wanted.only_for.clone(),
        hosts: wanted.hosts.clone(),
        pins: vec![Fingerprint([7; 32])],
        endpoints: vec!["a:1".parse().expect("an endpoint")],
        ttl: wanted.ttl_seconds,
        readmits: wanted.readmit,
    };
    if let Ok((token, _)) = invite(invitation, NOW) {
        assert_eq!(token.text().parse().as_ref(), Ok(&token), "whoever gets it can read it");
    }
}

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
