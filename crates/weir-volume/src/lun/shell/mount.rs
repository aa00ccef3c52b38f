//! Mounting the filesystem, and giving it back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

use super::{Event, Host, Shared, lock};
use crate::lun::filesystem::by_hand::mounts_by_other_paths;
use crate::lun::filesystem::mount::exclusive;
use crate::lun::filesystem::{FilesystemError, Mounted};
use crate::lun::heartbeat::area::in_file;

/// Pause between two looks at something that has to end.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Shared {
    pub(super) fn mount(&self, epoch: u64) {
        match self.try_mount(epoch) {
            Ok(mounted) => {
                *lock(&self.mounted) = Some(Arc::new(mounted));
                self.succeed("mount", Event::Mounted(true));
            }
            Err(text) => {
                self.fail("mount", text);
                self.answer(Event::Mounted(false));
            }
        }
    }

    /// Nothing is mounted, and nothing of an attempt is on its way, if it fails.
    pub(super) fn try_mount(&self, epoch: u64) -> Result<Mounted, String> {
        self.check_not_copy()?;
        let lun = &self.host.lun;
        if let Some(at) = mounts_by_other_paths(lun).first() {
            let (lun, at) = (lun.display(), at.display());
            return Err(format!(
                "{lun} is mounted at {at}, by another path of this host: a second mount would destroy its filesystem; `umount {at}`"
            ));
        }
        // From here on the LUN has been coordinated in this epoch.
        {
            let mut heart = lock(&self.heart);
            heart.epoch = epoch;
            let beat = self.next_beat(&mut heart, true);
            let number = self.beating.load(Ordering::Relaxed);
            let beaten = self.calls.during(number, || self.open_area().and_then(|mut area| area.beat(&beat)));
            beaten.map_err(|error| error.to_string())?;
        }
        let undone = |text: String| {
            self.notice(text.clone());
            self.await_released();
            text
        };
        match Mounted::new(&self.host.lun) {
            Ok(mounted) => match self.check_area(&mounted) {
                Ok(()) => Ok(mounted),
                Err(text) => {
                    drop(mounted);
                    Err(undone(text))
                }
            },
            // Somebody else on this host has it.
            Err(error) if error.is_busy() => Err(error.to_string()),
            Err(error @ (FilesystemError::Mount { .. } | FilesystemError::InThisKernel { .. })) => {
                Err(undone(error.to_string()))
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Whether the heartbeat area is behind the filesystem, or in its file for that.
    pub(super) fn check_area(&self, mounted: &Mounted) -> Result<(), String> {
        let Host { area, lun, .. } = &self.host;
        if *area >= mounted.superblock().size {
            return Ok(());
        }
        match in_file(mounted) {
            Ok(place) if place == *area => Ok(()),
            Ok(place) => Err(format!(
                "the heartbeat area of {} is at byte {area} for this volume, and its file is at byte {place}: something has replaced the file",
                lun.display()
            )),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(super) fn unmount(&self) {
        let mounted = lock(&self.mounted).take();
        while mounted.as_ref().is_some_and(|mounted| Arc::strong_count(mounted) > 1) {
            thread::sleep(LOOK_AGAIN);
        }
        *lock(&self.released_since) = Some(Nanos::now());
        drop(mounted);
        let is_released = self.await_released();
        *lock(&self.released_since) = None;
        if is_released {
            self.answer(Event::Unmounted);
        }
    }

    /// Waits until nothing on this host has the LUN mounted, as an exclusive open proves. A kernel that cannot write to it takes as long as
    /// the LUN's own time-outs. `false`: the shell is gone before.
    pub(super) fn await_released(&self) -> bool {
        while let Err(error) = exclusive(&self.host.lun) {
            if self.is_over() {
                return false;
            }
            if !error.is_busy() {
                self.fail("release", error.to_string());
            }
            thread::sleep(LOOK_AGAIN);
        }
        true
    }
}
