//! Detects the end of processes on the server's machine.
//!
//! A closed connection proves nothing (the client may reconnect), and neither does a silent one (the process may be stopped and
//! resume later, with pending writes). A readable pidfd is proof: no thread of that process will run again. Requests that it
//! submitted to the kernel may still reach the storage; a successor must order its I/O after them (P4), and the `stopped/` note
//! names the machine to check.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::embedded::Embedded;
use crate::machine::{Machine, boot_id};
use crate::records::{self, NodeRef, Record, StoppedHow, StoppedRecord, keys};
use crate::registry::{LeaseId, Op, ProcessWatch, Registry, RegistryError, Transaction};

/// Maximum number of watched processes.
pub const MAX_PROCESSES: usize = 1024;

/// The process at the other end of a connection.
pub(super) struct Peer {
    pid: Pid,
    /// Opened when the connection arrived, so that reuse of the pid by another process is detected.
    pidfd: std::os::fd::OwnedFd,
}

impl Peer {
    /// `None` when the process is not visible (another machine or namespace) or has ended.
    pub fn of(stream: &UnixStream) -> Option<Peer> {
        let pid = Pid::from_raw(stream.peer_cred().ok()?.pid()?)?;
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
        Some(Peer { pid, pidfd })
    }
}

/// The registry's record of a watched process, for the next server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ProcessRecord {
    name: String,
    incarnation: u64,
    lease: LeaseId,
    pid: i32,
    /// Clock ticks from boot to the process's start: with the pid and the boot id it identifies a process uniquely.
    start_ticks: u64,
    boot: String,
    /// The filesystem at the process's `/dev`. Absent in records of an earlier version of Weir.
    #[serde(default)]
    devices: Option<u64>,
}

impl Record for ProcessRecord {
    const KIND: &'static str = "process";
}

impl ProcessRecord {
    fn key(&self) -> String {
        keys::process(&self.name, self.incarnation)
    }

    fn is_same_process(&self, other: &ProcessRecord) -> bool {
        (self.pid, self.start_ticks, &self.boot) == (other.pid, other.start_ticks, &other.boot)
    }

    fn machine(&self) -> Option<Machine> {
        self.devices.map(|devices| Machine { boot: self.boot.clone(), devices })
    }
}

struct Watched {
    record: ProcessRecord,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Table(HashMap<(String, u64), Watched>);

impl Drop for Table {
    fn drop(&mut self) {
        for watched in self.0.values() {
            watched.task.abort();
        }
    }
}

/// The processes that this server watches.
#[derive(Clone)]
pub(super) struct Processes {
    registry: Embedded,
    table: Arc<Mutex<Table>>,
}

impl Processes {
    pub fn new(registry: Embedded) -> Processes {
        Processes { registry, table: Arc::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Resumes the watches of a former server, and reports processes that ended meanwhile.
    pub async fn resume(&self) -> Result<(), RegistryError> {
        let boot = boot_id();
        for entry in self.registry.list(keys::PROCESSES).await?.entries {
            let record = match ProcessRecord::decode(&entry.value) {
                Ok(record) => record,
                Err(error) => {
                    tracing::warn!(key = entry.key, %error, "ignoring what is not a process");
                    continue;
                }
            };
            // Open the descriptor first, then check its process: the result then stays valid.
            let pidfd = Pid::from_raw(record.pid).map(|pid| pidfd_open(pid, PidfdFlags::NONBLOCK));
            let alive =
                boot.as_ref() == Some(&record.boot) && start_ticks(record.pid) == Some(record.start_ticks);
            match pidfd {
                Some(Ok(pidfd)) if alive => self.watch(record, pidfd)?,
                // Without a boot id only the lease shows the process's state.
                _ if boot.is_none() => {}
                _ => self.ended(&record).await?,
            }
        }
        Ok(())
    }

    /// Watches the peer from now on. Call again with a new lease when the old one was lost.
    pub async fn register(
        &self,
        peer: Option<&Peer>,
        name: String,
        incarnation: u64,
        lease: LeaseId,
    ) -> Result<ProcessWatch, RegistryError> {
        records::check_name(&name).map_err(|error| RegistryError::malformed(error.to_string()))?;
        let Some(peer) = peer else { return Ok(ProcessWatch::NotWatched) };
        let pid = peer.pid.as_raw_nonzero().get();
        let (Some(start_ticks), Some(boot)) = (start_ticks(pid), boot_id()) else {
            return Ok(ProcessWatch::NotWatched);
        };
        let devices = Machine::of_process(pid).map(|machine| machine.devices);
        let record = ProcessRecord { name, incarnation, lease, pid, start_ticks, boot, devices };
        self.check(&record)?;
        // Recorded first: if the server dies in between, its successor checks the record.
        let remember = Transaction::new().put(record.key(), record.encode());
        self.registry.transact(remember).await?;
        let pidfd = peer.pidfd.try_clone().map_err(|error| RegistryError::unavailable(error.to_string()))?;
        self.watch(record, pidfd)?;
        Ok(ProcessWatch::Watched)
    }

    fn check(&self, record: &ProcessRecord) -> Result<(), RegistryError> {
        let table = self.table();
        match table.0.get(&(record.name.clone(), record.incarnation)) {
            Some(known) if !known.record.is_same_process(record) => Err(RegistryError::malformed(format!(
                "incarnation {} of {} is process {} already; each start needs an incarnation of its own",
                record.incarnation, record.name, known.record.pid
            ))),
            None if table.0.len() >= MAX_PROCESSES => {
                let reason = format!("it watches at most {MAX_PROCESSES} processes; end some");
                Err(RegistryError::Full { reason })
            }
            _ => Ok(()),
        }
    }

    fn watch(&self, record: ProcessRecord, pidfd: std::os::fd::OwnedFd) -> Result<(), RegistryError> {
        // SAFETY: an `OwnedFd` is always the same open descriptor, and the `AsyncFd` owns it until its end.
        let pidfd =
            unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.map_err(|error| {
                RegistryError::unavailable(format!("cannot watch process {}: {error}", record.pid))
            })?;
        let (registry, table, watched) = (self.registry.clone(), Arc::downgrade(&self.table), record.clone());
        let task = tokio::spawn(async move {
            let readable = pidfd.readable().await.map(drop);
            // A task does not keep the table alive: all watches end with the server's last handle.
            let Some(table) = table.upgrade() else { return };
            match readable {
                Ok(()) => Processes { registry, table }.report(&watched).await,
                // Only when the runtime shuts down.
                Err(error) => tracing::debug!(%error, "no longer watching process {}", watched.pid),
            }
        });
        let mut table = self.table();
        let id = (record.name.clone(), record.incarnation);
        if let Some(before) = table.0.insert(id, Watched { record, task }) {
            before.task.abort();
        }
        Ok(())
    }

    async fn report(&self, record: &ProcessRecord) {
        if let Err(error) = self.ended(record).await {
            // The record of the process stays, and the next server checks it.
            tracing::error!(%error, node = record.name, "cannot record the end of process {}", record.pid);
        }
        self.table().0.remove(&(record.name.clone(), record.incarnation));
    }

    /// Records the end of the process and ends its lease, at one revision.
    async fn ended(&self, record: &ProcessRecord) -> Result<(), RegistryError> {
        tracing::info!(
            node = record.name,
            incarnation = record.incarnation,
            pid = record.pid,
            "process ended"
        );
        let node = NodeRef::new(&*record.name, record.incarnation);
        let key = keys::stopped(&node);
        let stopped = StoppedRecord {
            node,
            how: StoppedHow::ProcessEnded,
            time_unix_ms: weir_task::unix_millis(),
            machine: record.machine(),
        };
        let ops =
            vec![Op::Put { key, value: stopped.encode(), lease: None }, Op::Delete { key: record.key() }];
        self.registry.end_process(record.lease, ops).await?;
        Ok(())
    }
}

/// The start time of the process (field 22 of its `stat`; the name before it may contain anything but is in parentheses).
fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}
