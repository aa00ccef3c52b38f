//! Looks at the LUN that nobody asks for: whether the filesystem that this node has mounted as the coordinator still works, and whether
//! somebody has mounted it by hand. Otherwise only a request would find that out, and the first one may come hours later.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weir_block::Nanos;

use super::{CHECK_EVERY, Event, Phase, Shared, Shell, lock};
use crate::lun::filesystem::Mounted;
use crate::lun::filesystem::by_hand::mounts_of;

/// A look that lasts for longer is reported.
const LONG: Duration = Duration::from_secs(15);

/// Pause before a second look where the first has failed.
const AGAIN: Duration = Duration::from_secs(1);

impl Shell {
    /// Begins a look if one is due, or if something has failed, and reports one that does not end. That ends no coordination: [`Shell::is_stuck`] decides about it.
    pub(super) fn look_at_lun(&mut self) {
        let now = Nanos::now();
        if self.shared.is_looking.load(Ordering::Relaxed) {
            if now >= self.looked + LONG {
                let lun = self.shared.host.lun.display();
                self.shared.report("look", format!("{lun} has not answered for more than {LONG:?}"));
            }
            return;
        }
        let serves = self.phase() == Phase::Serving;
        let mounted = lock(&self.shared.mounted).clone().filter(|_| serves);
        let is_suspect = mounted.as_ref().is_some_and(|mounted| mounted.take_suspicion());
        if now < self.looked + CHECK_EVERY && !is_suspect {
            return;
        }
        self.looked = now;
        self.shared.is_looking.store(true, Ordering::Relaxed);
        let admission = self.admission;
        self.begin(move |shared| shared.look(mounted, admission));
    }
}

impl Shared {
    fn look(&self, mounted: Option<Arc<Mounted>>, admission: u64) {
        if let Some(mounted) = mounted {
            // A path that is made anew is away for a moment, and nobody has asked for anything.
            let found = mounted.check().or_else(|_| {
                std::thread::sleep(AGAIN);
                mounted.check()
            });
            // The unmount waits for it.
            drop(mounted);
            match found {
                Ok(()) => self.is_well("look"),
                // Another node has taken the volume over meanwhile.
                Err(_) if !lock(&self.record).mounts.contains(&self.host.me) => self.is_well("look"),
                // As when an owner hears of an error.
                Err(error) => {
                    self.report("look", format!("this node gives the volume back: {error}"));
                    self.answer(Event::Lost { admission });
                }
            }
        }
        self.look_for_mounts();
        self.is_looking.store(false, Ordering::Relaxed);
    }

    /// Only reports them: what such a mount has changed is changed, and its end is up to whoever made it.
    fn look_for_mounts(&self) {
        let lun = &self.host.lun;
        match mounts_of(lun).first() {
            None => self.is_well("mounts"),
            Some(at) => self.report(
                "mounts",
                format!(
                    "{lun} is mounted at {at}, and not by Weir: a program that writes there, or a defragmenter, destroys data of disks; end that \
                     with `umount {at}`",
                    lun = lun.display(),
                    at = at.display()
                ),
            ),
        }
    }
}
