//! What a disk has to do with its volume: the way of its I/O, the volume's coordinator, and its space.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::sync::oneshot;
use weir_block::{Nanos, Reactor, SharedFile};
use weir_volume::lun::route_status::{Overdue, Reason, Reasons, RouteState, RouteStatus};
use weir_volume::{Backing, BackingKind, CoordinatorWay, SharedDisk};

use super::Disk;
use crate::shard::answer;
use crate::shard::messages::LoadLayer;
use crate::units::{Period, about};

/// A state and its reasons, for an event.
fn in_words(state: RouteState, reasons: Reasons) -> String {
    let reason = |one: Reason| {
        let benign = if one.is_benign() { "benign" } else { "not benign" };
        format!("{} ({benign})", one.name())
    };
    let reasons: Vec<String> = reasons.iter().map(reason).collect();
    let why = if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join(", ")) };
    format!("{}{why}", state.name())
}

/// Requests have begun to fail for lack of a coordinator that answers: why, until when, and what the operator can do.
fn recovery_failed(overdue: Overdue, volume: &str) -> String {
    let fence = format!(
        "If a fence fails, make sure that the node that it is for cannot write to the LUN, for example by switching its host off, and run `weir \
         volume confirm-fenced {volume} NODE`"
    );
    match overdue {
        Overdue::Missing => format!(
            "its volume has had no coordinator for longer than lun.coordinator_wait: requests that need one fail until one answers. `weir \
             volume show {volume}` says which node tries to coordinate it, and what it waits for. {fence}"
        ),
        Overdue::Silent => format!(
            "the coordinator of its volume has answered nothing for longer than lun.coordinator_wait: requests that need one fail until one \
             answers. Its LUN hangs, or its process: `weir volume show {volume}` names the node. If it stays so, end that node, and another \
             one takes over. {fence}"
        ),
    }
}

/// What the log of a disk on a full volume has. Without write-back nobody has got an answer for that.
fn in_log(dirty: u64, write_back: bool) -> String {
    match (dirty, write_back) {
        (0, _) => String::new(),
        (_, true) => format!("; {} of acknowledged writes stay in the log", about(dirty)),
        (_, false) => format!("; {} of them are in the log, and not acknowledged", about(dirty)),
    }
}

impl Disk {
    /// Publishes the way of its I/O, and returns it, in words, if that is another one than at the last call; by itself nothing that the operator
    /// has to know at first.
    pub fn new_route(&mut self, at: Nanos) -> Option<String> {
        let now = self.route_status(at)?;
        self.counters.publish_route(&now);
        // The way of a measurement is no news.
        if self.measures_lun() {
            return None;
        }
        let reasons = now.reasons.lasting();
        if !self.handover.is_news(reasons, at) {
            return None;
        }
        let before = self.route.replace((now.state, reasons));
        if before.is_none_or(|before| before == (now.state, reasons)) {
            return None;
        }
        Some(in_words(now.state, reasons))
    }

    /// Whether its volume has no space for what has been written to it, or is to be.
    pub(super) fn lacks_space(&self, now: Nanos) -> bool {
        let accel = self.look();
        accel.lacks_space() || accel.lower().inner().lacks_space(now)
    }

    /// The way of its I/O, of a disk of a shared volume.
    pub(super) fn route_status(&self, now: Nanos) -> Option<RouteStatus> {
        let route = self.look().lower().inner().route()?;
        let reasons = self.handover.explain(route.reasons, now);
        Some(RouteStatus { reasons: reasons.with(Reason::VolumeFull, self.lacks_space(now)), ..route })
    }

    /// An event, if its volume has become full since the last call, or has space again.
    pub fn new_space(&mut self, now: Nanos) -> Option<(&'static str, String)> {
        let is_full = self.lacks_space(now);
        if std::mem::replace(&mut self.is_full, is_full) == is_full {
            return None;
        }
        Some(match is_full {
            true => ("volume-full", self.full_reason()),
            false => ("volume-has-space", "no write waits for space on its volume any more".to_owned()),
        })
    }

    /// The effect of its full volume on its clients, in words.
    pub(super) fn full_reason(&self) -> String {
        let wait = self.look().config().full_volume_wait;
        let (status, what) = (self.look().status(), "its volume is full");
        let kept = in_log(status.dirty_bytes, status.configuration.write_back);
        match wait.is_zero() {
            true => format!("{what}: writes that need space fail (limits.full_volume_wait = 0 s){kept}"),
            false => format!("{what}: writes that need space wait, each for at most {}{kept}", Period(wait)),
        }
    }

    /// The next event about its backing.
    pub fn news(&mut self) -> Option<(&'static str, String)> {
        self.backing().news()
    }

    /// Whether it needs a way to its volume's coordinator.
    pub fn wants_coordinator(&mut self, now: Nanos) -> bool {
        self.backing().shared().is_some_and(|shared| shared.wants_coordinator(now))
    }

    /// Whether a LUN has refused its I/O since the last call.
    pub fn is_newly_fenced(&mut self) -> bool {
        self.backing().shared().is_some_and(SharedDisk::is_newly_fenced)
    }

    /// An event, if requests have begun to fail since the last call, for lack of a coordinator that answers.
    pub fn new_overdue(&mut self) -> Option<(&'static str, String)> {
        let overdue = self.backing().shared()?.newly_overdue()?;
        let BackingKind::Lun { volume, .. } = &self.kind else { return None };
        Some(("volume-recovery-failed", recovery_failed(overdue, volume)))
    }

    /// Its effect on clients, if the coordinator of its volume owes answers and gives none, in words.
    pub(super) fn silent_reason(&self, now: Nanos) -> Option<String> {
        let reasons = self.route_status(now)?.reasons;
        let is = |wanted| reasons.iter().any(|reason| reason == wanted);
        let effect = if is(Reason::RecoveryFailed) { "fail" } else { "wait" };
        is(Reason::CoordinatorSilent).then(|| {
            format!(
                "the coordinator of its volume does not answer: requests that need it {effect}. Its LUN hangs, or its process, or it makes a \
                 long change, as a clone of a file in many pieces; if it stays so, end that node, and another one takes over"
            )
        })
    }

    /// Gives up what it holds of a LUN; `done` when nothing of it is under way there.
    pub fn drop_leases(&mut self, reactor: &mut Reactor, done: oneshot::Sender<()>) {
        self.last_drop += 1;
        let number = self.last_drop;
        match self.backing().shared() {
            Some(shared) => shared.drop_leases(reactor, number),
            None => return answer(done, ()),
        }
        self.dropping.push((number, done));
    }

    pub(super) fn answer_drops(&mut self) {
        if self.dropping.is_empty() {
            return;
        }
        let dropped = self.backing().shared().map(SharedDisk::dropped).unwrap_or_default();
        for (number, done) in std::mem::take(&mut self.dropping) {
            match dropped.contains(&number) {
                true => answer(done, ()),
                false => self.dropping.push((number, done)),
            }
        }
    }

    /// Another node coordinates its volume now.
    pub fn lose_coordinator(&mut self, reactor: &mut Reactor) {
        if let Some(shared) = self.backing().shared() {
            shared.lose_coordinator(reactor);
        }
    }

    /// The LUN lets this node write again.
    pub fn admitted(&mut self) {
        self.backing().shared().into_iter().for_each(SharedDisk::admitted);
    }

    /// Whether it needs a path to the LUN.
    pub fn wants_path(&mut self, now: Nanos) -> bool {
        self.backing().shared().is_some_and(|shared| shared.wants_path(now))
    }

    /// A path to the LUN.
    pub fn reach(&mut self, lun: SharedFile) {
        if let Some(shared) = self.backing().shared() {
            shared.reach(lun);
        }
    }

    /// All its I/O goes through its volume's coordinator, or not any more.
    pub fn redirect(&mut self, reactor: &mut Reactor, wanted: bool) {
        self.redirected = wanted;
        self.follow_wish(reactor);
    }

    /// Its volume may be moved by operators.
    pub fn follow_handovers(&mut self, until: Arc<AtomicU64>) {
        self.handover.follow(until);
    }

    /// A load that measures the LUN itself goes past the wish.
    pub(super) fn follow_wish(&mut self, reactor: &mut Reactor) {
        let wanted = self.redirected && !self.measures_lun();
        if let Some(shared) = self.backing().shared() {
            shared.go_through_filesystem(reactor, wanted);
        }
    }

    pub(super) fn measures_lun(&self) -> bool {
        self.load.as_ref().is_some_and(|load| load.layer == LoadLayer::Direct)
    }

    /// Whether this node reaches the LUN that the disk is on.
    pub(super) fn has_path(&self) -> bool {
        let no_path = [Reason::NoDiskConnectivity, Reason::Fenced];
        let route = self.look().lower().inner().route();
        route.is_some_and(|route| !route.reasons.iter().any(|reason| no_path.contains(&reason)))
    }

    /// It is closed: its volume's coordinator has nothing more to do with this node.
    pub fn let_go(&mut self, reactor: &mut Reactor) {
        self.abandon(reactor);
    }

    pub(super) fn abandon(&mut self, reactor: &mut Reactor) {
        self.backing().stop_waiting();
        self.backing().end(reactor);
        if let Some(shared) = self.backing().shared() {
            shared.abandon(reactor);
        }
    }

    /// A way to its volume's coordinator.
    pub fn coordinator(&mut self, reactor: &mut Reactor, way: CoordinatorWay) {
        if let Some(shared) = self.backing().shared() {
            shared.coordinator(reactor, way);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_route_says_what_is_benign() {
        let reasons = Reasons::default().with(Reason::UserRequest, true);
        let text = in_words(RouteState::FileRedirected, reasons.with(Reason::CoordinatorSilent, true));
        assert_eq!(text, "file-redirected: user-request (benign), coordinator-silent (not benign)");
        assert_eq!(in_words(RouteState::Direct, Reasons::default()), "direct");
    }

    /// In write-through there is no copy of what waits, and nobody counts on it.
    #[test]
    fn what_waits_in_a_log_is_called_acknowledged_only_in_write_back() {
        assert_eq!(in_log(1 << 20, true), "; 1 MiB of acknowledged writes stay in the log");
        assert_eq!(in_log(1 << 20, false), "; 1 MiB of them are in the log, and not acknowledged");
        assert_eq!(in_log(0, true), "");
    }

    #[test]
    fn a_recovery_that_failed_names_the_commands() {
        for (overdue, remedy) in
            [(Overdue::Missing, "which node tries to coordinate it"), (Overdue::Silent, "end that node")]
        {
            let text = recovery_failed(overdue, "v1");
            for words in ["`weir volume show v1`", "`weir volume confirm-fenced v1 NODE`", remedy] {
                assert!(text.contains(words), "{words} in: {text}");
            }
        }
    }
}
