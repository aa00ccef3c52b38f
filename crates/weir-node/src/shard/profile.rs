//! A disk's profile: always on, and recorded anew for a time on request.

use std::time::Duration;

use tokio::sync::oneshot;
use weir_block::{Nanos, Observe, RequestKind};
use weir_profile::{Profile, Profiler, Settings};

use super::answer;

/// Shortest interval of the working set over time in a recording.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// Intervals of the working set over time in a recording, if they are not too short.
const INTERVALS: u32 = 120;

/// Watches the requests at the top of a disk's layers (1 MiB of memory; 2 MiB while recording).
#[derive(Debug)]
pub struct DiskProfile {
    always: Profiler,
    recording: Option<Recording>,
}

/// A stretch of time that is watched from its beginning.
#[derive(Debug)]
struct Recording {
    profiler: Profiler,
    until: Nanos,
    asked: oneshot::Sender<Result<Box<Profile>, String>>,
}

impl Default for DiskProfile {
    fn default() -> DiskProfile {
        DiskProfile::new()
    }
}

impl DiskProfile {
    /// Watches from now on.
    pub fn new() -> DiskProfile {
        let always = Profiler::new(Settings::default(), Nanos::now(), time_of_day());
        DiskProfile { always, recording: None }
    }

    /// The profile since the disk was opened here.
    pub fn profile(&self, disk: &str, size: u64) -> Box<Profile> {
        named(&self.always, Nanos::now(), disk, size)
    }

    /// Records anew for `length`, then answers. One recording at a time, unless its client has gone.
    pub fn record(&mut self, length: Duration, asked: oneshot::Sender<Result<Box<Profile>, String>>) {
        if self.recording.as_ref().is_some_and(|recording| !recording.asked.is_closed()) {
            return answer(asked, Err("a profile of this disk is being recorded; wait for its end".into()));
        }
        let interval = (length / INTERVALS).max(SHORTEST_INTERVAL);
        let now = Nanos::now();
        let profiler = Profiler::new(Settings { interval, ..Settings::default() }, now, time_of_day());
        self.recording = Some(Recording { profiler, until: now + length, asked });
    }

    /// The time of the next call of [`DiskProfile::turn`].
    pub fn deadline(&self) -> Nanos {
        self.recording.as_ref().map_or(Nanos::NEVER, |recording| recording.until)
    }

    /// Hands in a recording whose time is over.
    pub fn turn(&mut self, disk: &str, size: u64) {
        if self.recording.is_none() {
            return;
        }
        let now = Nanos::now();
        if let Some(Recording { profiler, until, asked }) =
            self.recording.take_if(|recording| now >= recording.until)
        {
            answer(asked, Ok(named(&profiler, until, disk, size)));
        }
    }

    /// The disk is closed here: a recording cannot go on.
    pub fn end(&mut self) {
        if let Some(recording) = self.recording.take() {
            answer(recording.asked, Err("the disk was closed or moved to another node meanwhile".into()));
        }
    }
}

impl Observe for DiskProfile {
    #[inline]
    fn observe(&mut self, now: Nanos, kind: RequestKind, offset: u64, length: u64) {
        self.always.observe(now, kind, offset, length);
        if let Some(recording) = &mut self.recording
            && now < recording.until
        {
            recording.profiler.observe(now, kind, offset, length);
        }
    }
}

fn named(profiler: &Profiler, now: Nanos, disk: &str, size: u64) -> Box<Profile> {
    let profile = profiler.profile(now, &format!("disk {disk}"));
    Box::new(Profile { disk_bytes: Some(size), ..profile })
}

/// Since 1970.
#[expect(clippy::disallowed_methods, reason = "people read which hours of the day are busy")]
fn time_of_day() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_sees_its_own_time_only() {
        let mut profile = DiskProfile::new();
        profile.observe(Nanos::now(), RequestKind::Write, 0, 4096);
        let (asked, mut answered) = oneshot::channel();
        profile.record(Duration::from_millis(20), asked);
        profile.observe(Nanos::now(), RequestKind::Read, 0, 4096);
        let (second, mut refused) = oneshot::channel();
        profile.record(Duration::from_millis(20), second);
        assert!(refused.try_recv().unwrap().unwrap_err().contains("wait for its end"));
        profile.turn("d", 1 << 20);
        assert!(answered.try_recv().is_err(), "not yet");
        while Nanos::now() < profile.deadline() {
            std::thread::sleep(Duration::from_millis(1));
        }
        profile.observe(Nanos::now(), RequestKind::Read, 0, 4096);
        profile.turn("d", 1 << 20);
        let recorded = answered.try_recv().unwrap().unwrap();
        assert_eq!((recorded.read.requests(), recorded.write.requests()), (1, 0));
        assert_eq!((recorded.source.as_str(), recorded.disk_bytes), ("disk d", Some(1 << 20)));
        assert_eq!(recorded.seconds, 0.02);
        let all = profile.profile("d", 1 << 20);
        assert_eq!((all.read.requests(), all.write.requests()), (2, 1));
        assert_eq!(profile.deadline(), Nanos::NEVER);
    }

    #[test]
    fn whoever_waits_hears_of_the_end_of_the_disk() {
        let mut profile = DiskProfile::new();
        let (asked, left) = oneshot::channel();
        profile.record(Duration::from_secs(3600), asked);
        drop(left);
        let (asked, mut answered) = oneshot::channel();
        profile.record(Duration::from_secs(3600), asked);
        profile.end();
        assert!(answered.try_recv().unwrap().unwrap_err().contains("closed or moved"));
    }
}
