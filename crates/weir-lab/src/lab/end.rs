//! The end of a lab: nodes that are asked to stop destage everything first, and who asks hears what that would lose, or has lost.

mod awaited;

use std::fs;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use weir_block::Nanos;
use weir_node::left_behind;

use self::awaited::Awaited;
use super::{Lab, PATIENCE};
use crate::error::LabError;
use crate::process::ProcessState;

/// A log from which nothing reaches its backing for so long is not going to be empty soon.
const STUCK: Duration = Duration::from_secs(8);

/// Nodes are asked one after the other, and hear of a change one after the other: only what they say for so long is believed.
const CALM: Duration = Duration::from_millis(500);

/// Between two looks at the nodes.
const LOOK: Duration = Duration::from_millis(100);

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
        let (mut awaited, mut empty_since) = (Awaited::default(), None);
        loop {
            let (now, reports) = (Nanos::now(), self.report());
            let waits = awaited.look(&reports, ending, now);
            if waits.is_empty() && now - *empty_since.get_or_insert(now) >= CALM {
                return Ok(());
            }
            empty_since = empty_since.filter(|_| waits.is_empty());
            let stuck = waits.into_iter().filter(|(since, _)| now - *since >= STUCK);
            let stuck: Vec<_> = stuck.map(|(_, what)| what).collect();
            if ending == Ending::Refuse && !stuck.is_empty() {
                return Err(LabError::WouldLose(stuck));
            }
            thread::sleep(LOOK);
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
