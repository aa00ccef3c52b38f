//! The end of a lab: nodes that are asked to stop destage everything first, and who asks hears what that would lose, or has lost.

use std::collections::HashMap;
use std::fs;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use weir_block::Nanos;
use weir_node::api::Medium;
use weir_node::left_behind;
use weir_node::shard::messages::DiskStatus;

use super::{Lab, NodeReport, PATIENCE};
use crate::error::LabError;
use crate::process::ProcessState;

/// The state of a disk whose copies are all gone already.
const LOST: &str = "unavailable";

/// A log from which nothing reaches its backing for so long is not going to be empty soon.
const STUCK: Duration = Duration::from_secs(8);

/// Longest time for a node that drains a log to end.
const DRAINS: Duration = Duration::from_secs(120);

/// What to do about acknowledged writes that only the lab's memory holds while their backing takes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// Leave the lab as it is and say so.
    #[default]
    Refuse,
    /// Wait for the backing, however long that is.
    Wait,
    /// End the lab all the same, and say what is lost.
    Force,
}

/// What the end of a lab waits for.
#[derive(Default)]
struct Awaited {
    /// By disk and owner: another owner's log has numbers of its own.
    logs: HashMap<(String, String), Watched>,
    /// Disks without an owner that answers, since when.
    ownerless: HashMap<String, Nanos>,
}

/// What is waited for, and since when nothing of it has moved.
type Waits = Vec<(Nanos, String)>;

/// The log of a disk that is waited for.
struct Watched {
    /// What was acknowledged when it was first seen.
    until: u64,
    /// How far it is destaged, and since when.
    destaged: u64,
    since: Nanos,
}

impl Watched {
    fn look(&mut self, destaged: u64, now: Nanos) {
        if destaged != self.destaged {
            (self.destaged, self.since) = (destaged, now);
        }
    }
}

impl Lab {
    /// Ends all processes: first by asking (the nodes destage what is dirty), then by SIGKILL.
    ///
    /// # Errors
    /// [`LabError::WouldLose`], and the lab goes on; otherwise as [`Lab::down_as`].
    pub fn down(self) -> Result<(), LabError> {
        self.down_as(Ending::Refuse)
    }

    /// As [`Lab::down`], told what to do about a backing that takes nothing.
    ///
    /// # Errors
    /// [`LabError::Lost`]: the lab has ended, and not all that was acknowledged is in its backings. Or a process cannot be ended.
    pub fn down_as(mut self, ending: Ending) -> Result<(), LabError> {
        // A refusal leaves it to whoever has the lab to end it another way.
        self.ends_with_us = false;
        self.resume_all()?;
        if ending != Ending::Force {
            self.await_destage(ending)?;
        }
        let mut lost = self.end()?;
        for node in self.nodes() {
            let home = node.config.parent().unwrap_or(&self.dir);
            let left = fs::read_to_string(left_behind(home)).unwrap_or_default();
            lost.extend(left.lines().map(|line| format!("{line} on {}", node.name)));
        }
        let state = self.dir.join("lab.json");
        fs::remove_file(&state).map_err(LabError::system(format!("removing {}", state.display())))?;
        if lost.is_empty() { Ok(()) } else { Err(LabError::Lost(lost)) }
    }

    /// A process that stands still can neither say what it holds nor destage it.
    fn resume_all(&self) -> Result<(), LabError> {
        for process in self.processes().filter(|process| process.state() == ProcessState::Paused) {
            process.signal(Signal::CONT).map_err(LabError::system("resuming a process of the lab"))?;
        }
        Ok(())
    }

    /// Waits until every log in memory is empty; unless told to wait for that, until the backings have what the logs held at first.
    /// Guests that go on writing would hold it up without end.
    fn await_destage(&self, ending: Ending) -> Result<(), LabError> {
        let mut awaited = Awaited::default();
        loop {
            let (now, reports) = (Nanos::now(), self.report());
            let mut waits = awaited.logs(&reports, ending, now);
            waits.extend(awaited.ownerless(&reports, now));
            let Some(since) = waits.iter().map(|(since, _)| *since).min() else { return Ok(()) };
            if ending == Ending::Refuse && now - since >= STUCK {
                let stuck = waits.into_iter().filter(|(since, _)| now - *since >= STUCK);
                return Err(LabError::WouldLose(stuck.map(|(_, what)| what).collect()));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Ends all processes. Which nodes had to be killed.
    fn end(&mut self) -> Result<Vec<String>, LabError> {
        let nodes: Vec<_> =
            self.nodes().iter().filter_map(|node| Some((node.name.clone(), node.process?))).collect();
        let refused = || LabError::system("ending a process of the lab");
        for (_, process) in &nodes {
            process.signal(Signal::TERM).map_err(refused())?;
            process.signal(Signal::CONT).map_err(refused())?;
        }
        let (mut killed, deadline) = (Vec::new(), Nanos::now() + DRAINS);
        for (name, process) in nodes {
            if !process.wait(deadline - Nanos::now()).map_err(refused())? {
                process.signal(Signal::KILL).map_err(refused())?;
                killed.push(format!("{name} did not end and was killed; what it had not destaged"));
            }
            self.reap(process)?;
        }
        // The registry goes last: the nodes write to it while they end.
        let registry = self.state.registry;
        if registry.state() != ProcessState::Gone {
            registry.signal(Signal::TERM).map_err(refused())?;
            registry.signal(Signal::CONT).map_err(refused())?;
            if !registry.wait(PATIENCE).map_err(refused())? {
                registry.signal(Signal::KILL).map_err(refused())?;
            }
        }
        self.reap(registry)?;
        Ok(killed)
    }
}

impl Awaited {
    /// Logs that are not empty yet, as their owners say.
    fn logs(&mut self, reports: &[NodeReport], ending: Ending, now: Nanos) -> Waits {
        let mut waits = Waits::new();
        for status in reports.iter().filter_map(|report| report.status.as_ref()) {
            let own = status.disks.iter().filter(|disk| disk.owner.as_ref() == Some(&status.node));
            for disk in own.filter(|disk| disk.medium == Medium::Ram) {
                let Some(detail) = disk.detail.as_ref().filter(|detail| detail.is_current()) else {
                    continue;
                };
                let (acknowledged, destaged) = (detail.acknowledged, detail.destaged);
                let watched = self.logs.entry((disk.name.clone(), status.node.clone()));
                let watched = watched.or_insert(Watched { until: acknowledged, destaged, since: now });
                watched.look(destaged, now);
                if destaged < if ending == Ending::Wait { acknowledged } else { watched.until } {
                    let what = format!("{} ({} bytes; {})", disk.name, detail.dirty_bytes, disk.reason);
                    waits.push((watched.since, what));
                }
            }
        }
        waits
    }

    /// Disks whose owner is gone, does not answer, or has not opened them yet, while it, or a node with a copy, still has their logs in
    /// memory. Nobody can say how much there is before an owner has them open.
    fn ownerless(&mut self, reports: &[NodeReport], now: Nanos) -> Waits {
        let statuses = || reports.iter().filter_map(|report| report.status.as_ref());
        let runs = |name: &String| {
            reports.iter().any(|report| report.node.name == *name && report.state == ProcessState::Running)
        };
        let is_open = |disk: &String| {
            statuses().any(|status| {
                let mut own = status.disks.iter().filter(|other| other.owner.as_ref() == Some(&status.node));
                own.any(|own| own.name == *disk && own.detail.as_ref().is_some_and(DiskStatus::is_current))
            })
        };
        let mut found = HashMap::new();
        for disk in statuses()
            .flat_map(|status| &status.disks)
            .filter(|disk| disk.medium == Medium::Ram && disk.state != LOST)
        {
            let Some(owner) = &disk.owner else { continue };
            let held = runs(owner) || disk.replicas.iter().any(runs);
            if held && !is_open(&disk.name) && disk.effective != "write-through" {
                let since = *self.ownerless.get(&disk.name).unwrap_or(&now);
                found.insert(disk.name.clone(), (since, owner.clone()));
            }
        }
        self.ownerless = found.iter().map(|(disk, (since, _))| (disk.clone(), *since)).collect();
        let what = |disk, owner| {
            format!(
                "{disk} (its owner {owner} does not answer or is still opening it, and the memory of the nodes may hold writes to it)"
            )
        };
        found.into_iter().map(|(disk, (since, owner))| (since, what(disk, owner))).collect()
    }
}
