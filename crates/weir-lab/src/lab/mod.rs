//! The lab: one registry and several nodes, each a process of its own.

mod config;
mod end;
pub mod identities;
mod start;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use weir_block::Nanos;
use weir_node::api::{ApiErrorKind, NodeStatus};
use weir_node::client::Client;

use self::config::prepare;
pub use self::config::{LabConfig, LabEtcd, LabFlash};
pub use self::end::Ending;
use self::start::{make_network, start_registry, wait_until};
use crate::error::LabError;
use crate::network::{Network, REGISTRY};
use crate::process::{ProcessId, ProcessState, spawn};

/// Most nodes of one lab.
pub const MOST_NODES: usize = 16;

/// Time limit of a process to get ready, and to end on request.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time limit of a node's status request.
const ANSWER: Duration = Duration::from_secs(15);

/// One node of a lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabNode {
    /// Its name.
    pub name: String,
    /// Its configuration file.
    pub config: PathBuf,
    /// Everything that it said.
    pub log: PathBuf,
    /// Its API.
    pub api: PathBuf,
    /// Its NBD export.
    pub nbd_unix: PathBuf,
    /// Its NBD export on TCP.
    pub nbd_tcp: SocketAddr,
    /// Its process; absent after `kill`.
    pub process: Option<ProcessId>,
}

impl LabNode {
    /// The state of its process.
    #[must_use]
    pub fn process_state(&self) -> ProcessState {
        self.process.map_or(ProcessState::Gone, |process| process.state())
    }

    /// A client of its API.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(&self.api)
    }
}

/// The content of `lab.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    program: PathBuf,
    /// Absent when the registry is an etcd.
    registry: Option<ProcessId>,
    nodes: Vec<LabNode>,
}

/// The state of a node of the lab, from outside and by its own report.
#[derive(Debug, Serialize, Deserialize)]
pub struct NodeReport {
    /// The node.
    #[serde(flatten)]
    pub node: LabNode,
    /// Its process.
    pub state: ProcessState,
    /// Its own report; absent if it does not answer.
    pub status: Option<NodeStatus>,
}

/// A running lab. Ends it when dropped, unless [`Lab::detach`]ed.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    state: State,
    /// Those that this process started: they must be waited for, or they stay as zombies.
    children: HashMap<u32, Child>,
    network: Option<Network>,
    ends_with_us: bool,
}

impl Lab {
    /// Starts a lab and waits until every node answers. It ends when the value is dropped.
    ///
    /// # Errors
    /// One is running there, or a process does not start; its log's end is in the message.
    pub fn up(config: &LabConfig) -> Result<Lab, LabError> {
        if !(1..=MOST_NODES).contains(&config.nodes) {
            return Err(LabError::Invalid(format!(
                "a lab has 1 to {MOST_NODES} nodes, not {}",
                config.nodes
            )));
        }
        let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let made: Vec<&Path> = config.dir.ancestors().take_while(is_missing).collect();
        fs::create_dir_all(&config.dir)
            .map_err(LabError::system(format!("creating {}", config.dir.display())))?;
        let dir = fs::canonicalize(&config.dir).map_err(LabError::system("finding the lab's directory"))?;
        let former = Lab::open(&dir);
        if former.is_ok_and(|lab| lab.processes().any(|process| process.state() != ProcessState::Gone)) {
            return Err(LabError::Running(dir));
        }
        let nodes: Result<Vec<LabNode>, LabError> =
            (1..=config.nodes).map(|number| prepare(config, &dir, number)).collect();
        let nodes = nodes.inspect_err(|_| {
            // No process has seen it. Another lab may be in a directory above it by now.
            let [own, above @ ..] = &made[..] else { return };
            let _ = fs::remove_dir_all(own).and_then(|()| above.iter().try_for_each(fs::remove_dir));
        })?;
        let members = config.etcd.as_ref().map(|etcd| etcd.members.as_slice());
        let network = config.network.then(|| make_network(&dir, &nodes, members)).transpose()?;
        let registry = match config.etcd {
            Some(_) => None,
            None => Some(start_registry(&config.program, &dir)?),
        };
        let process = registry.as_ref().map(|(_, process)| *process);
        let state = State { program: config.program.clone(), registry: process, nodes };
        let children = registry.into_iter().map(|(child, process)| (process.pid, child)).collect();
        let mut lab = Lab { dir, state, children, network, ends_with_us: true };
        lab.save()?;
        if config.identities {
            identities::announce(&lab.dir, &lab.state.nodes[0].config, config.etcd.is_none())?;
        }
        for index in 0..lab.state.nodes.len() {
            lab.spawn_node(index)?;
        }
        for index in 0..lab.state.nodes.len() {
            lab.wait_ready(index)?;
        }
        Ok(lab)
    }

    /// The lab in `dir`, running or not. It goes on when the value is dropped.
    ///
    /// # Errors
    /// There is none, or its state is not understood.
    pub fn open(dir: &Path) -> Result<Lab, LabError> {
        let Ok(text) = fs::read_to_string(dir.join("lab.json")) else {
            return Err(LabError::NoLab(dir.to_owned()));
        };
        let state = serde_json::from_str(&text).map_err(|error| {
            LabError::Invalid(format!(
                "{} is not understood: {error}; remove the directory",
                dir.join("lab.json").display()
            ))
        })?;
        let children = HashMap::new();
        Ok(Lab { dir: dir.to_owned(), state, children, network: None, ends_with_us: false })
    }

    /// Lets the lab go on after this process. One with a network ends now: its network is this process's.
    pub fn detach(mut self) {
        self.ends_with_us = self.network.is_some();
    }

    /// The network between its nodes.
    ///
    /// # Errors
    /// It was not configured, or the lab was made by another process.
    pub fn network(&self) -> Result<&Network, LabError> {
        self.network.as_ref().ok_or_else(|| {
            LabError::Invalid("this lab has no network of its own; set LabConfig::network".into())
        })
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its nodes, by number.
    #[must_use]
    pub fn nodes(&self) -> &[LabNode] {
        &self.state.nodes
    }

    /// One node.
    ///
    /// # Errors
    /// There is no such node.
    pub fn node(&self, name: &str) -> Result<&LabNode, LabError> {
        self.index(name).map(|index| &self.state.nodes[index])
    }

    /// A client of one node's API.
    ///
    /// # Errors
    /// There is no such node.
    pub fn client(&self, name: &str) -> Result<Client, LabError> {
        self.node(name).map(LabNode::client)
    }

    /// A client of the first node that runs.
    ///
    /// # Errors
    /// None does.
    pub fn any_client(&self) -> Result<Client, LabError> {
        let running = self.nodes().iter().find(|node| node.process_state() == ProcessState::Running);
        running.map(LabNode::client).ok_or_else(|| LabError::NoneRuns(self.dir.clone()))
    }

    /// The reports of all nodes.
    #[must_use]
    pub fn report(&self) -> Vec<NodeReport> {
        let report = |node: &LabNode| {
            let state = node.process_state();
            // A paused node would let us wait for nothing.
            let ask = || node.client().patience(ANSWER).status().ok();
            let status = (state == ProcessState::Running).then(ask).flatten();
            NodeReport { node: node.clone(), state, status }
        };
        self.nodes().iter().map(report).collect()
    }

    /// The state of the registry's process; [`ProcessState::Gone`] when the registry is an etcd.
    #[must_use]
    pub fn registry_state(&self) -> ProcessState {
        self.state.registry.map_or(ProcessState::Gone, |registry| registry.state())
    }

    /// The process of a node or of the [`REGISTRY`]; `None` when it was killed, or when the registry is an etcd.
    ///
    /// # Errors
    /// There is no such node.
    pub fn process(&self, name: &str) -> Result<Option<ProcessId>, LabError> {
        match name {
            REGISTRY => Ok(self.state.registry),
            name => Ok(self.node(name)?.process),
        }
    }

    /// The state of the process of a node or of the [`REGISTRY`].
    ///
    /// # Errors
    /// There is no such node.
    pub fn state_of(&self, name: &str) -> Result<ProcessState, LabError> {
        Ok(self.process(name)?.map_or(ProcessState::Gone, |process| process.state()))
    }

    /// SIGKILL: the node, or the [`REGISTRY`], is gone at once and does nothing more.
    ///
    /// # Errors
    /// There is no such node, or it has ended before.
    pub fn kill(&mut self, name: &str) -> Result<(), LabError> {
        let process = self.running(name)?;
        process.signal(Signal::KILL).map_err(LabError::system(format!("killing {name}")))?;
        self.reap(process)?;
        if name != REGISTRY {
            let index = self.index(name)?;
            self.state.nodes[index].process = None;
        }
        self.save()
    }

    /// SIGKILL to all processes at once, as a power cut ends them, the registry among them. `after` runs after the signals
    /// and before the wait for the processes' ends: a process that is stuck in a storage call must be freed there.
    ///
    /// `lab.json` stays as it is, as its filesystem may have lost its power too.
    ///
    /// # Errors
    /// A process cannot be ended.
    pub fn kill_all(&mut self, after: impl FnOnce()) -> Result<(), LabError> {
        let processes: Vec<_> = self.processes().collect();
        for process in &processes {
            process.signal(Signal::KILL).map_err(LabError::system("killing all processes of the lab"))?;
        }
        after();
        for process in processes {
            self.reap(process)?;
        }
        for node in &mut self.state.nodes {
            node.process = None;
        }
        Ok(())
    }

    /// SIGSTOP: the node, or the [`REGISTRY`], stands still when this returns, without notice.
    ///
    /// # Errors
    /// There is no such node, or it has ended.
    pub fn pause(&self, name: &str) -> Result<(), LabError> {
        let process = self.running(name)?;
        process.signal(Signal::STOP).map_err(LabError::system(format!("pausing {name}")))?;
        // The signal is on its way until the process stands.
        let deadline = Nanos::now() + PATIENCE;
        while process.state() == ProcessState::Running && Nanos::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// SIGCONT: the node, or the [`REGISTRY`], goes on where it stood.
    ///
    /// # Errors
    /// There is no such node, or it has ended.
    pub fn resume(&self, name: &str) -> Result<(), LabError> {
        let process = self.running(name)?;
        process.signal(Signal::CONT).map_err(LabError::system(format!("resuming {name}")))
    }

    /// Starts a node, or the [`REGISTRY`], that was killed, with the same configuration, and waits until it answers.
    ///
    /// # Errors
    /// It runs, or does not start.
    pub fn start(&mut self, name: &str) -> Result<(), LabError> {
        if self.state_of(name)? != ProcessState::Gone {
            let state =
                format!("runs; `weir lab kill {name}` first, or `weir lab resume {name}` if it is paused");
            return Err(LabError::State { node: name.to_owned(), state });
        }
        if name == REGISTRY {
            self.has_registry()?;
            let (child, process) = start_registry(&self.state.program, &self.dir)?;
            self.state.registry = Some(process);
            self.children.insert(process.pid, child);
            return self.save();
        }
        let index = self.index(name)?;
        self.spawn_node(index)?;
        self.wait_ready(index)
    }

    /// Waits for the end of a process and, when it is our child, for its exit status.
    fn reap(&mut self, process: ProcessId) -> Result<(), LabError> {
        let lost = || LabError::system(format!("waiting for process {}", process.pid));
        if !process.wait(PATIENCE).map_err(lost())? {
            let stuck = format!("process {} does not end; see `ps {0}`", process.pid);
            return Err(LabError::system(stuck)(std::io::ErrorKind::TimedOut.into()));
        }
        match self.children.remove(&process.pid) {
            Some(mut child) => child.wait().map(|_| ()).map_err(lost()),
            None => Ok(()),
        }
    }

    fn processes(&self) -> impl Iterator<Item = ProcessId> {
        self.state.nodes.iter().filter_map(|node| node.process).chain(self.state.registry)
    }

    /// An error when the registry is an etcd, whose processes are not the lab's.
    fn has_registry(&self) -> Result<(), LabError> {
        match self.state.registry {
            Some(_) => Ok(()),
            None => Err(LabError::Invalid(
                "the registry of this lab is an etcd, which the lab did not start".into(),
            )),
        }
    }

    fn index(&self, name: &str) -> Result<usize, LabError> {
        self.state.nodes.iter().position(|node| node.name == name).ok_or_else(|| LabError::NoNode {
            name: name.to_owned(),
            known: self.state.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// The process of a node or of the registry, when it has not ended.
    fn running(&self, name: &str) -> Result<ProcessId, LabError> {
        if name == REGISTRY {
            self.has_registry()?;
        }
        let process = self.process(name)?;
        process.filter(|process| process.state() != ProcessState::Gone).ok_or_else(|| {
            let state = format!("does not run; `weir lab start {name}` starts it");
            LabError::State { node: name.to_owned(), state }
        })
    }

    fn spawn_node(&mut self, index: usize) -> Result<(), LabError> {
        let node = &mut self.state.nodes[index];
        let arguments = [OsStr::new("node"), OsStr::new("--config"), node.config.as_os_str()];
        let start = || spawn(&self.state.program, &arguments, &node.log);
        let started = match &self.network {
            Some(network) => network.inside(&node.name, start),
            None => start(),
        };
        let (child, process) =
            started.map_err(LabError::system(format!("starting {}", self.state.program.display())))?;
        node.process = Some(process);
        self.children.insert(process.pid, child);
        let pid_file = self.dir.join(&self.state.nodes[index].name).join("pid");
        fs::write(&pid_file, format!("{}\n", process.pid))
            .map_err(LabError::system(format!("writing {}", pid_file.display())))?;
        self.save()
    }

    fn wait_ready(&mut self, index: usize) -> Result<(), LabError> {
        let node = &self.state.nodes[index];
        let Some(process) = node.process else { return Ok(()) };
        let client = node.client();
        let ready = || match client.status() {
            Err(error) if error.kind == ApiErrorKind::Unavailable => false,
            Ok(status) => status.pid == process.pid,
            Err(_) => true,
        };
        wait_until(process, &format!("node {}", node.name), &node.log, ready)
    }

    fn save(&self) -> Result<(), LabError> {
        let path = self.dir.join("lab.json");
        let fresh = self.dir.join("lab.json.new");
        let text =
            serde_json::to_string_pretty(&self.state).expect("the state holds nothing that JSON cannot");
        fs::write(&fresh, text)
            .and_then(|()| fs::rename(&fresh, &path))
            .map_err(LabError::system(format!("writing {}", path.display())))
    }
}

impl Lab {
    /// Removes the mounts that killed nodes have left: nobody else would, and the lab's directory could not be deleted.
    fn unmount(&self) {
        for node in self.nodes() {
            let Some(files) = node.config.parent().map(config::files).filter(|files| files.exists()) else {
                continue;
            };
            if let Err(error) = weir_export::fuse::remove_leftovers(&files) {
                tracing::warn!(node = node.name, %error, "mounts of the lab's node may be left");
            }
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.ends_with_us {
            // Nothing in a lab is worth waiting for once its test has ended.
            let processes: Vec<_> = self.processes().collect();
            for process in &processes {
                let _ = process.signal(Signal::KILL);
            }
            for process in processes {
                let _ = self.reap(process);
            }
            self.unmount();
            let _ = fs::remove_file(self.dir.join("lab.json"));
        }
    }
}
