//! Support for planted bugs that production code lacks.

use weir_accel::lineage::Lineage;
use weir_accel::replica::Replica;
use weir_accel::wire::{Batch, Hello, RecordHeader};
use weir_accel::{AccelConfig, Log};

/// A replica with the same content, not sealed by the takeover ([`weir_accel::planted::Bug::SkipSeal`]).
pub fn unsealed(replica: &Replica, lineage: Lineage) -> Replica {
    let (log, epoch) = (replica.log(), replica.epoch());
    let mut copy = Replica::new(Log::new(AccelConfig::SMALLEST_LOG, 1).expect("memory"), epoch);
    let freed = log.freed();
    copy.hello(&Hello::new(epoch, lineage, freed, false)).expect("valid");
    let records: Vec<_> = log.range(0, log.last()).collect();
    let headers: Vec<_> = records.iter().map(|(_, record)| RecordHeader::of(record)).collect();
    let data: Vec<u8> = records.iter().flat_map(|(_, record)| log.data(record)).copied().collect();
    let (first, count) = ((freed + 1).into(), (headers.len() as u32).into());
    let head = Batch { epoch: epoch.into(), first, freed: freed.into(), count, complete: 1.into() };
    copy.batch(&head, &headers, &data).expect("valid");
    copy
}
