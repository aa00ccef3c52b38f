//! Room for write logs: this node's offer to the others, and the limit of logs that it takes (P10).
//!
//! It asks the shards for the occupied room each time and keeps no account of its own, which would one day differ. It keeps
//! only reservations, until their logs exist.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_accel::flash::FlashDevice;
use weir_block::size::Size;
use weir_cluster::records::{Medium, MediumSpace};

use crate::config::ResourcesConfig;
use crate::shard::messages::DiskStatus;
use crate::units::about;

/// The capacity that a node with these logs on its shards offers, by medium.
#[must_use]
pub fn media(config: &ResourcesConfig, flash: Option<&FlashDevice>, logs: &[DiskStatus]) -> Vec<MediumSpace> {
    offered(config, flash, logs, 0)
}

/// As [`media`], less room for as many logs as are reserved and not there yet. On which medium they will be is not known of
/// all of them, so they count on each.
pub(super) fn offered(
    config: &ResourcesConfig,
    flash: Option<&FlashDevice>,
    logs: &[DiskStatus],
    reserved: usize,
) -> Vec<MediumSpace> {
    let used = logs.iter().map(|log| log.log_bytes).sum::<u64>() + reserved as u64 * config.log.0;
    let (bytes, log) = (config.logs.0, config.log.0);
    let ram = MediumSpace { medium: Medium::Ram, bytes, free: bytes.saturating_sub(used), log };
    let flash = flash.filter(|flash| !flash.has_failed()).map(|flash| {
        let (slots, free) = flash.slots();
        // A log on flash is in memory as well.
        let free = (free.saturating_sub(reserved) as u64 * log).min(ram.free);
        MediumSpace { medium: Medium::Flash, bytes: slots as u64 * log, free, log }
    });
    [ram].into_iter().chain(flash).collect()
}

/// Logs, however small: a disk that is being released has none any more.
pub(super) fn load(logs: &[DiskStatus]) -> u64 {
    logs.iter().filter(|log| log.log_bytes > 0).count() as u64
}

/// Reserves room for logs. No request waits for another one: each counts the reservations that were made before it.
#[derive(Debug, Default)]
pub struct LogCapacity {
    reserved: Arc<Mutex<Reservations>>,
}

/// Disks for whose logs room is reserved, by number.
#[derive(Debug, Default)]
struct Reservations {
    made: Vec<(u64, String)>,
    last: u64,
}

/// Room for a disk's log, reserved until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    reserved: Arc<Mutex<Reservations>>,
    number: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.reserved).made.retain(|(number, _)| *number != self.number);
    }
}

fn lock(reserved: &Mutex<Reservations>) -> MutexGuard<'_, Reservations> {
    reserved.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The purpose of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// To serve the disk.
    Owner,
    /// To keep a copy for another node.
    Replica,
}

/// The medium whose room decides. Where the flash has failed, a disk can still be served in write-through, from memory; a copy
/// cannot be kept.
pub(super) fn needed(medium: Medium, role: Role, flash: Option<&FlashDevice>) -> Medium {
    let has_failed = flash.is_some_and(FlashDevice::has_failed);
    if medium == Medium::Flash && role == Role::Owner && has_failed { Medium::Ram } else { medium }
}

impl LogCapacity {
    /// Reserves room, and returns the earlier reservations. Before the shards are asked: a reservation that has become a log
    /// by then is among their logs, and one that has not is counted here.
    pub(super) fn reserve(&self, disk: &str) -> (Reservation, Vec<String>) {
        let mut reservations = lock(&self.reserved);
        let before = reservations.made.iter().map(|(_, disk)| disk.clone()).collect();
        reservations.last += 1;
        let number = reservations.last;
        reservations.made.push((number, disk.to_owned()));
        (Reservation { reserved: Arc::clone(&self.reserved), number }, before)
    }
}

pub(super) fn fits(node: &str, medium: Medium, media: &[MediumSpace]) -> Result<(), String> {
    let Some(space) = media.iter().find(|space| space.medium == medium) else {
        return Err(format!("{node} keeps no write logs on {medium}"));
    };
    if space.free < space.log {
        return Err(format!(
            "{node} has no room for another write log on {medium}: {} of {} are free, and a log takes {}; raise \
             resources.logs (for flash, also enlarge that), or open it on another node",
            about(space.free),
            Size(space.bytes),
            Size(space.log)
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_flash_keeps_an_owner_from_nothing_but_keeping_its_log() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = 2 << 20;
        let size = weir_accel::flash::device_bytes(1, log);
        let flash = FlashDevice::open(&directory.path().join("flash"), size, log, 1).expect("made");
        assert_eq!(needed(Medium::Flash, Role::Owner, Some(&flash)), Medium::Flash);
        flash.take("disk", 1).expect("free").report_failure();
        assert_eq!(needed(Medium::Flash, Role::Owner, Some(&flash)), Medium::Ram, "it is write-through here");
        assert_eq!(needed(Medium::Flash, Role::Replica, Some(&flash)), Medium::Flash, "which is not offered");
        assert_eq!(needed(Medium::Flash, Role::Owner, None), Medium::Flash, "there never was one");
    }

    #[test]
    fn the_last_log_that_fits_is_taken_and_the_next_one_refused() {
        let config = ResourcesConfig { logs: Size(200 << 20), ..ResourcesConfig::default() };
        let log = DiskStatus { log_bytes: 64 << 20, ..DiskStatus::default() };
        let offers = |logs: usize| media(&config, None, &vec![log.clone(); logs]);
        assert_eq!(offers(2)[0].free, 72 << 20);
        assert_eq!(fits("n1", Medium::Ram, &offers(2)), Ok(()));
        let full = fits("n1", Medium::Ram, &offers(3)).unwrap_err();
        assert!(full.contains("8 MiB of 200MiB") && full.contains("resources.logs"), "{full}");
        assert!(fits("n1", Medium::Ram, &offered(&config, None, &[log.clone(), log.clone()], 1)).is_err());
        assert_eq!(offers(4)[0].free, 0, "more than there should be is not less than none");
        let flash = fits("n1", Medium::Flash, &offers(0)).unwrap_err();
        assert!(flash.contains("no write logs on flash"), "{flash}");
        assert_eq!((load(&[]), load(&[log.clone(), DiskStatus::default()])), (0, 1));
    }

    #[test]
    fn reservations_count_for_those_who_come_later_until_they_end() {
        let capacity = LogCapacity::default();
        let (first, before) = capacity.reserve("a");
        assert!(before.is_empty());
        let (second, before) = capacity.reserve("b");
        assert_eq!(before, ["a"]);
        drop(first);
        assert_eq!(capacity.reserve("c").1, ["b"]);
        drop(second);
        assert!(capacity.reserve("d").1.is_empty());
    }
}
