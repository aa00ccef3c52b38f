//! A routed disk as the node that owns it sees it: its way, its volume's coordinator, its right to the LUN.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use weir_block::{Completion, IoError, Nanos, OwnerId, Reactor, SharedFile, Tag};

use super::{ASK_AGAIN, PATH_AGAIN, RoutedBacking};
use crate::backing::engine_uring::UringEngine;
use crate::error::VolumeError;
use crate::interface::{Backing, CoordinatorWay, SharedDisk};
use crate::lun::route_status::{Overdue, Reason, Reasons, RouteState, RouteStatus};
use crate::lun::router;

impl Backing for RoutedBacking {
    fn owner(&self) -> OwnerId {
        self.id
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        self.info.size = size;
        Ok(())
    }

    fn lacks_space(&self, now: Nanos) -> bool {
        self.space.lacks_space(now)
    }

    fn stop_waiting(&mut self) {
        let tags: Vec<Tag> = self.space.give_up().map(|pending| pending.tag).collect();
        let error = self.space.reason(IoError::from_errno(libc::ENOSPC, "writing to a full volume"));
        self.ready.extend(tags.into_iter().map(|tag| Completion { tag, result: Err(error) }));
    }

    fn shared(&mut self) -> Option<&mut dyn SharedDisk> {
        Some(self)
    }

    fn route(&self) -> Option<RouteStatus> {
        let (path, coordinator) = (self.core.has_path(), self.core.has_coordinator());
        let by_wish = self.core.goes_through_filesystem();
        let lacks = self.core.lacks();
        let state = match (path, coordinator) {
            (_, true) if by_wish => RouteState::FileRedirected,
            (true, _) => RouteState::Direct,
            (false, true) => RouteState::BlockRedirected,
            (false, false) => RouteState::Paused,
        };
        let reasons = Reasons::default()
            .with(Reason::UserRequest, by_wish)
            .with(Reason::UnallocatedExtent, lacks.blocks)
            .with(Reason::SharedExtent, lacks.own_blocks)
            .with(Reason::NoDiskConnectivity, !path && !self.fenced)
            .with(Reason::Fenced, self.fenced)
            .with(Reason::CoordinatorMoving, !coordinator)
            .with(Reason::CoordinatorSilent, self.patience.is_silent())
            .with(Reason::RecoveryFailed, self.core.is_overdue());
        Some(RouteStatus { state, reasons, counts: self.counts })
    }
}

impl SharedDisk for RoutedBacking {
    fn own(&mut self, epoch: u64, until: &Arc<AtomicU64>) {
        self.epoch = epoch;
        self.serves_until = Some(Arc::clone(until));
    }

    fn wants_coordinator(&mut self, now: Nanos) -> bool {
        let wants = !self.link.is_there() && now >= self.ask_at && !self.abandoned;
        if wants {
            self.ask_at = now + ASK_AGAIN;
        }
        wants
    }

    fn coordinator(&mut self, reactor: &mut Reactor, way: CoordinatorWay) {
        match way {
            CoordinatorWay::Here(served) => self.connect_here(reactor, &served),
            CoordinatorWay::Remote(stream) => {
                if let Err(error) = self.connect(reactor, stream) {
                    tracing::warn!(%error, "a connection to a volume's coordinator cannot be used");
                }
            }
        }
    }

    fn lose_coordinator(&mut self, reactor: &mut Reactor) {
        self.disconnect(reactor, None);
        self.ask_at = Nanos(0);
    }

    fn is_newly_fenced(&mut self) -> bool {
        std::mem::take(&mut self.newly_fenced)
    }

    fn newly_overdue(&mut self) -> Option<Overdue> {
        self.newly_overdue.take()
    }

    fn drop_leases(&mut self, reactor: &mut Reactor, number: u64) {
        // Nor is what it gets from now on used directly before the LUN lets this node write: who fences the node meanwhile counts on that.
        self.fenced = true;
        self.disconnect(reactor, None);
        self.step(reactor, router::Event::Drop(number));
        self.refuse_held(reactor);
    }

    fn dropped(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.dropped)
    }

    fn admitted(&mut self) {
        (self.fenced, self.newly_fenced) = (false, false);
        self.probe_at = Nanos(0);
    }

    fn wants_path(&mut self, now: Nanos) -> bool {
        let wants = now >= self.path_deadline();
        if wants {
            self.path_at = now + PATH_AGAIN;
        }
        wants
    }

    fn reach(&mut self, lun: SharedFile) {
        if self.lun.is_none() || self.may_replace_path() {
            self.lun = Some(UringEngine::new(lun, self.id));
            self.is_away = false;
            // A read of it confirms it.
            self.probe_at = Nanos(0);
        }
    }

    fn go_through_filesystem(&mut self, reactor: &mut Reactor, wanted: bool) {
        if wanted != self.core.goes_through_filesystem() {
            self.step(reactor, router::Event::ThroughFilesystem(wanted));
        }
    }

    fn abandon(&mut self, reactor: &mut Reactor) {
        self.abandoned = true;
        self.give_up(reactor);
    }
}
