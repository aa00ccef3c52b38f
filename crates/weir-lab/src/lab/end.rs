//! The end of a lab: nodes destage everything before they stop. It reports a possible loss before, and the actual one
//! afterwards.

mod awaited;
mod lost;

use std::fs;
use std::io;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use weir_block::Nanos;

use self::awaited::{Awaited, CleanCopy, Waits};
use self::lost::Lost;
use super::{Lab, PATIENCE, REGISTRY};
use crate::error::LabError;
use crate::process::{ProcessId, ProcessState};

/// A log from which nothing reaches its backing for so long is not going to be empty soon.
const STUCK: Duration = Duration::from_secs(8);

/// Nodes are asked one after the other, and learn of a change one after the other: only a report that is stable for so long
/// counts.
const CALM: Duration = Duration::from_millis(500);

/// Between two looks at the nodes.
const LOOK: Duration = Duration::from_millis(100);

/// Longest time for a node to end when the lab's end is forced.
const DRAINS: Duration = Duration::from_secs(120);

/// The first word of progress comes after this time, the next ones at this distance.
const FIRST_WORD: Duration = Duration::from_secs(1);
const NEXT_WORD: Duration = Duration::from_secs(5);

/// The treatment of acknowledged writes that only the lab's memory holds while their backing takes nothing.
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

impl Lab {
    /// Ends all processes when everything that was acknowledged is in the backings.
    ///
    /// # Errors
    /// [`LabError::WouldLose`], and the lab goes on; otherwise as [`Lab::down_as`].
    pub fn down(self) -> Result<(), LabError> {
        self.down_as(Ending::Refuse, |_| {})
    }

    /// As [`Lab::down`], with orders for a backing that takes nothing. `tell` gets the reasons of waits, a line at a time.
    /// Without [`Ending::Force`] no node is killed: this waits for one that still destages.
    ///
    /// # Errors
    /// [`LabError::Lost`]: the lab has ended, and not all acknowledged data is in its backings. Or a process cannot be ended.
    pub fn down_as(mut self, ending: Ending, mut tell: impl FnMut(&str)) -> Result<(), LabError> {
        // A refusal leaves the lab running, so that its user can end it another way.
        self.ends_with_us = false;
        let paused = self.resume_paused(&mut tell)?;
        let (mut clean, mut gone) = (Vec::new(), Vec::new());
        if ending == Ending::Force {
            gone = awaited::gone(&self.report());
        } else {
            clean = self.await_destage(ending, &mut tell).inspect_err(|_| {
                for process in paused {
                    // As it was found.
                    let _ = process.signal(Signal::STOP);
                }
            })?;
        }
        let killed = self.end(ending, &mut tell)?;
        self.unmount();
        let mut lost = Lost::default();
        for node in self.nodes() {
            lost.left_behind(node.config.parent().unwrap_or(&self.dir), &node.name);
        }
        if self.state.registry.is_none() {
            tell("the registry is an etcd: whether logs of killed nodes are lost is not looked up there");
        } else if let Err(reason) = lost.recorded(&self.dir, &clean) {
            tell(&format!("cannot tell whether logs of killed nodes are lost: {reason}"));
        }
        let state = self.dir.join("lab.json");
        match fs::remove_file(&state) {
            // Another `lab down` was faster.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(LabError::system(format!("removing {}", state.display()))(error));
            }
            _ => {}
        }
        let lost: Vec<String> = killed.into_iter().chain(gone).chain(lost.sentences()).collect();
        if lost.is_empty() { Ok(()) } else { Err(LabError::Lost(lost)) }
    }

    /// Resumes the paused processes: a paused process can neither report its data nor destage it.
    fn resume_paused(&self, tell: &mut impl FnMut(&str)) -> Result<Vec<ProcessId>, LabError> {
        let nodes = self.nodes().iter().filter_map(|node| Some((&*node.name, node.process?)));
        let paused: Vec<_> = nodes
            .chain(self.state.registry.map(|registry| (REGISTRY, registry)))
            .filter(|(_, process)| process.state() == ProcessState::Paused)
            .collect();
        for (name, process) in &paused {
            tell(&format!("{name} is paused; resuming it, so that it reports and destages its log"));
            process.signal(Signal::CONT).map_err(LabError::system(format!("resuming {name}")))?;
        }
        Ok(paused.into_iter().map(|(_, process)| process).collect())
    }

    /// With [`Ending::Wait`], waits until every log in memory is empty; otherwise until the backings have the logs' initial
    /// records, because guests that go on writing would delay it without end. Returns the copies that are clean
    /// then.
    fn await_destage(&self, ending: Ending, tell: &mut impl FnMut(&str)) -> Result<Vec<CleanCopy>, LabError> {
        let (mut awaited, mut empty_since) = (Awaited::default(), None);
        let mut progress = Progress::new(Nanos::now());
        loop {
            let (now, reports) = (Nanos::now(), self.report());
            let gone = awaited::gone(&reports);
            if ending == Ending::Refuse && !gone.is_empty() {
                return Err(LabError::WouldLose(gone));
            }
            let mut waits = awaited.look(&reports, ending, now);
            waits.extend(gone.into_iter().map(|gone| (now, gone)));
            if waits.is_empty() && now - *empty_since.get_or_insert(now) >= CALM {
                return Ok(awaited::clean(&reports));
            }
            empty_since = empty_since.filter(|_| waits.is_empty());
            progress.tell(now, &waits, tell);
            let stuck = waits.into_iter().filter(|(since, _)| now - *since >= STUCK);
            let stuck: Vec<_> = stuck.map(|(_, what)| what).collect();
            if ending == Ending::Refuse && !stuck.is_empty() {
                return Err(LabError::WouldLose(stuck));
            }
            thread::sleep(LOOK);
        }
    }

    /// Ends all processes. Returns the nodes that had to be killed, in words; only a forced end kills.
    fn end(&mut self, ending: Ending, tell: &mut impl FnMut(&str)) -> Result<Vec<String>, LabError> {
        let nodes: Vec<_> =
            self.nodes().iter().filter_map(|node| Some((node.name.clone(), node.process?))).collect();
        let refused = || LabError::system("ending a process of the lab");
        for (_, process) in &nodes {
            process.signal(Signal::TERM).map_err(refused())?;
            process.signal(Signal::CONT).map_err(refused())?;
        }
        let limit = (ending == Ending::Force).then(|| Nanos::now() + DRAINS);
        let mut killed = Vec::new();
        for (name, process) in nodes {
            if !await_end(&name, process, limit, tell).map_err(refused())? {
                process.signal(Signal::KILL).map_err(refused())?;
                killed.push(format!(
                    "{name} did not end within {} s and was killed; what it had not destaged",
                    DRAINS.as_secs()
                ));
            }
            self.reap(process)?;
        }
        // The registry goes last: the nodes write to it while they end.
        let Some(registry) = self.state.registry else { return Ok(killed) };
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

/// Waits for the end of a node that was asked to stop, until `limit` if there is one. Whether it has ended.
fn await_end(
    name: &str,
    process: ProcessId,
    limit: Option<Nanos>,
    tell: &mut impl FnMut(&str),
) -> io::Result<bool> {
    let mut next = NEXT_WORD;
    loop {
        let left = limit.map_or(next, |limit| limit - Nanos::now());
        if process.wait(next.min(left))? {
            return Ok(true);
        }
        if limit.is_some_and(|limit| Nanos::now() >= limit) {
            return Ok(false);
        }
        match limit {
            Some(_) => tell(&format!("{name} still destages")),
            None => tell(&format!(
                "{name} still destages; `weir lab down --force` from another terminal ends it and loses the rest"
            )),
        }
        next = NEXT_WORD;
    }
}

/// Says from time to time what is waited for.
struct Progress {
    next: Nanos,
}

impl Progress {
    fn new(now: Nanos) -> Progress {
        Progress { next: now + FIRST_WORD }
    }

    fn tell(&mut self, now: Nanos, waits: &Waits, tell: &mut impl FnMut(&str)) {
        if waits.is_empty() || now < self.next {
            return;
        }
        self.next = now + NEXT_WORD;
        let waits: Vec<&str> = waits.iter().map(|(_, what)| &**what).collect();
        tell(&format!("waiting for the storage: {}", waits.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::process::spawn;

    /// A node that is slow to end.
    #[test]
    fn only_a_forced_end_gives_up_on_a_node() {
        let directory = tempfile::tempdir().unwrap();
        let arguments = ["-c", "trap '' TERM; sleep 60"].map(AsRef::as_ref);
        let (mut child, process) =
            spawn(Path::new("/bin/sh"), &arguments, &directory.path().join("log")).unwrap();
        let mut told = Vec::new();
        let soon = Nanos::now() + Duration::from_millis(300);
        assert!(!await_end("n1", process, Some(soon), &mut |line: &str| told.push(line.to_owned())).unwrap());
        assert!(told.is_empty(), "{told:?}");
        let tell = |line: &str| {
            told.push(line.to_owned());
            process.signal(Signal::KILL).unwrap();
        };
        assert!(await_end("n1", process, None, &mut { tell }).unwrap());
        assert!(told.len() == 1 && told[0].contains("n1 still destages"), "{told:?}");
        child.wait().unwrap();
    }

    #[test]
    fn progress_is_told_now_and_then() {
        let (begin, mut told) = (Nanos(1), Vec::new());
        let waits: Waits = vec![(begin, "disk d".into())];
        let mut progress = Progress::new(begin);
        for ms in (0..12_000).step_by(100) {
            progress.tell(begin + Duration::from_millis(ms), &waits, &mut |line: &str| {
                told.push((ms, line.to_owned()))
            });
        }
        let times: Vec<u64> = told.iter().map(|(ms, _)| *ms).collect();
        assert_eq!(times, [1000, 6000, 11_000]);
        assert_eq!(told[0].1, "waiting for the storage: disk d");
        progress.tell(begin + Duration::from_secs(60), &Waits::new(), &mut |_: &str| {
            panic!("nothing is waited for")
        });
    }
}
