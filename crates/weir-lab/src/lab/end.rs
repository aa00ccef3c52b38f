//! The end of a lab: nodes that are asked to stop destage everything first, and who asks hears what that would lose, or has lost.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use weir_block::Nanos;
use weir_node::api::{DiskView, Medium};
use weir_node::left_behind;
use weir_node::shard::messages::DiskStatus;

use super::{Lab, NodeReport, PATIENCE};
use crate::error::LabError;
use crate::process::ProcessState;

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
    /// Logs, and whole nodes, of which it is unknown how much there is to destage, since when.
    unknown: HashMap<String, Nanos>,
}

/// What is waited for, and since when nothing of it has moved.
type Waits = Vec<(Nanos, String)>;

/// The log of a disk that is waited for.
struct Watched {
    /// What can have been acknowledged when it was first seen.
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
            waits.extend(awaited.unknown(&reports, now));
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
        for disk in disks_in_memory(reports) {
            let Some((node, detail)) = open_on(reports, disk) else { continue };
            let (promised, destaged) = (detail.promised, detail.destaged);
            let watched = self.logs.entry((disk.name.clone(), node.into()));
            let watched = watched.or_insert(Watched { until: promised, destaged, since: now });
            watched.look(destaged, now);
            if destaged < if ending == Ending::Wait { promised } else { watched.until } {
                let what = format!("disk {} ({} bytes; {})", disk.name, detail.dirty_bytes, detail.reason);
                waits.push((watched.since, what));
            }
        }
        waits
    }

    /// Nodes that do not answer, and copies of the logs of disks that no owner has open.
    fn unknown(&mut self, reports: &[NodeReport], now: Nanos) -> Waits {
        let silent =
            reports.iter().filter(|report| report.state != ProcessState::Gone && report.status.is_none());
        let nodes = silent.map(|report| format!("node {} does not answer", report.node.name));
        let disks = disks_in_memory(reports).filter(|disk| open_on(reports, disk).is_none());
        let copies = disks.filter_map(|disk| {
            let owner = disk.owner.as_deref()?;
            let holders: Vec<&str> = reports.iter().filter_map(|report| copy_on(report, disk)).collect();
            let holders = (!holders.is_empty()).then(|| holders.join(" and "))?;
            Some(format!(
                "disk {} (not open on its owner {owner}; its log is in the memory of {holders})",
                disk.name
            ))
        });
        let waits: Waits =
            nodes.chain(copies).map(|what| (*self.unknown.get(&what).unwrap_or(&now), what)).collect();
        self.unknown = waits.iter().map(|(since, what)| (what.clone(), *since)).collect();
        waits
    }
}

/// The disks that may have a log in memory, each as a node shows it that knows the latest of it.
fn disks_in_memory(reports: &[NodeReport]) -> impl Iterator<Item = &DiskView> {
    let mut latest: BTreeMap<&str, &DiskView> = BTreeMap::new();
    for disk in reports.iter().filter_map(|report| report.status.as_ref()).flat_map(|status| &status.disks) {
        let known = latest.entry(&disk.name).or_insert(disk);
        if disk.epoch > known.epoch {
            *known = disk;
        }
    }
    latest.into_values().filter(|disk| disk.medium == Medium::Ram && disk.effective != "write-through")
}

/// The node that has the disk open, and what it says of its log. A former owner that does not know its successor is none.
fn open_on<'a>(reports: &'a [NodeReport], disk: &DiskView) -> Option<(&'a str, &'a DiskStatus)> {
    reports.iter().filter_map(|report| report.status.as_ref()).find_map(|status| {
        let is_same = |other: &&DiskView| other.name == disk.name && other.epoch == disk.epoch;
        let own = status.disks.iter().find(is_same)?;
        let detail = own.detail.as_ref().filter(|detail| detail.is_current())?;
        (own.owner.as_ref() == Some(&status.node)).then_some((&*status.node, detail))
    })
}

/// The node, if it keeps a copy of the disk's log that counts and may hold something.
fn copy_on<'a>(report: &'a NodeReport, disk: &DiskView) -> Option<&'a str> {
    let status = report.status.as_ref()?;
    let counts = disk.owner.as_ref() == Some(&status.node) || disk.replicas.contains(&status.node);
    let mut copies = status.replicas.iter().filter(|copy| copy.disk == disk.name);
    let holds = copies.any(|copy| copy.dirty_bytes > 0 || !copy.is_current());
    (counts && holds).then_some(&status.node)
}
