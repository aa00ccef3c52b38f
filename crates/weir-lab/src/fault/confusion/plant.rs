//! The planted faults, their places, and the causes that the finder should name.

use std::fmt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_diagnose::hypothesis::Cause;

use super::super::board::At;
use super::super::orders::Order;
use super::super::relay::LinkFaults;
use super::super::settings::{Faults, Moods, Tier};
use super::super::stack::Stack;
use crate::LabError;

/// Busy neighbours on a processor that is to be short.
const NEIGHBOURS: usize = 3;

/// The processor that is kept for what must not be short, and the one with the neighbours.
const FREE: &str = "0";
const BUSY: &str = "1";

/// The planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Plant {
    /// Nothing at all, over a backing in memory: beside that, a network costs most, and no fault is the cause.
    Nothing,
    /// Nothing, over a backing with a latency like most: beside that, no layer costs anything, and none may be named.
    Healthy,
    /// Two threads lose the order between the accelerator and a simulated disk.
    OrderLost,
    /// A millisecond on the link to the replica.
    LongLink,
    /// 100 Mbit/s on the link to the replica, in network namespaces.
    NarrowLink,
    /// A backing that carries 64 MiB a second.
    Throttled,
    /// A backing with a fast tier of 8 MiB.
    SmallTier,
    /// The node shares its processor with busy neighbours.
    BusyNode,
    /// The export has one request in flight, over a backing that takes a millisecond.
    OneInFlight,
    /// The load generator shares its processor with busy neighbours.
    BusyGenerator,
    /// The replica shares its processor with busy neighbours.
    BusyReplica,
    /// A backing that is now fast, now slow.
    MoodyBacking,
    /// The export makes pieces of 16 KiB of larger requests, over a backing that does 8000 requests a second.
    SplitRequests,
    /// The export writes whole sectors of 16 KiB and reads the rest of one first, over a backing that takes half a millisecond.
    PartialWrites,
}

impl Plant {
    /// Every case.
    pub const ALL: [Plant; 14] = [
        Plant::Nothing,
        Plant::Healthy,
        Plant::OrderLost,
        Plant::LongLink,
        Plant::NarrowLink,
        Plant::Throttled,
        Plant::SmallTier,
        Plant::BusyNode,
        Plant::OneInFlight,
        Plant::BusyGenerator,
        Plant::BusyReplica,
        Plant::MoodyBacking,
        Plant::SplitRequests,
        Plant::PartialWrites,
    ];

    /// The word for the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Plant::Nothing => "nothing",
            Plant::Healthy => "healthy",
            Plant::OrderLost => "order-lost",
            Plant::LongLink => "long-link",
            Plant::NarrowLink => "narrow-link",
            Plant::Throttled => "throttled",
            Plant::SmallTier => "small-tier",
            Plant::BusyNode => "busy-node",
            Plant::OneInFlight => "one-in-flight",
            Plant::BusyGenerator => "busy-generator",
            Plant::BusyReplica => "busy-replica",
            Plant::MoodyBacking => "moody-backing",
            Plant::SplitRequests => "split-requests",
            Plant::PartialWrites => "partial-writes",
        }
    }

    /// The cause that the finder should name.
    #[must_use]
    pub fn cause(self) -> Option<Cause> {
        Some(match self {
            Plant::Nothing | Plant::Healthy => return None,
            Plant::OrderLost => Cause::ArrivalOrder,
            Plant::LongLink => Cause::LinkLatency,
            Plant::NarrowLink => Cause::LinkBandwidth,
            Plant::Throttled => Cause::Throttled,
            Plant::SmallTier => Cause::TierExhausted,
            Plant::BusyNode => Cause::Processor,
            Plant::OneInFlight => Cause::OneInFlight,
            Plant::BusyGenerator => Cause::Generator,
            Plant::BusyReplica => Cause::SlowReplica,
            Plant::MoodyBacking => Cause::DeviceVariance,
            Plant::SplitRequests => Cause::SplitRequests,
            Plant::PartialWrites => Cause::PartialWrites,
        })
    }

    /// The beginning of the name of the layer that the finder should name; absent if nothing is planted, or the fault is a
    /// process's.
    #[must_use]
    pub fn layer(self) -> Option<&'static str> {
        match self {
            Plant::Nothing | Plant::Healthy | Plant::BusyNode | Plant::BusyGenerator | Plant::BusyReplica => {
                None
            }
            Plant::Throttled | Plant::SmallTier | Plant::MoodyBacking => Some("backing"),
            Plant::OrderLost | Plant::LongLink | Plant::NarrowLink => Some("accel"),
            Plant::OneInFlight | Plant::SplitRequests | Plant::PartialWrites => Some("nbd"),
        }
    }

    /// Whether the case needs a replica.
    pub(super) fn replicated(self) -> bool {
        matches!(self, Plant::Nothing | Plant::LongLink | Plant::NarrowLink | Plant::BusyReplica)
    }

    /// Whether the case needs links that can be shaped.
    pub(super) fn needs_network(self) -> bool {
        self == Plant::NarrowLink
    }

    /// Time for each run: enough for a hundred requests of the slowest cell.
    pub(super) fn runtime(self) -> Duration {
        Duration::from_millis(match self {
            Plant::OrderLost | Plant::Throttled => 650,
            Plant::MoodyBacking | Plant::Healthy => 450,
            _ => 200,
        })
    }

    /// Puts it there.
    pub(super) fn plant(self, stack: &Stack) -> Result<Vec<Neighbour>, LabError> {
        match self {
            Plant::Nothing => {}
            Plant::Healthy => {
                let backing =
                    Faults { delay_us: 1500, in_flight: 4, bandwidth: 100 << 20, ..Faults::default() };
                stack.set(At::Backing, backing)?;
            }
            Plant::OrderLost => {
                stack.set(At::Backing, Faults { simulated_disk: true, ..Faults::default() })?;
                stack.set(At::Accel, Faults::order_lost(2))?;
            }
            Plant::LongLink => {
                let faults = LinkFaults { delay_us: 1000, bandwidth: 0 };
                stack.order("n2", &Order::Link(faults))?;
            }
            Plant::NarrowLink => stack.lab().network()?.shape("n1", Some(100_000_000 / 8))?,
            Plant::Throttled => {
                stack.set(At::Backing, Faults { bandwidth: 64 << 20, ..Faults::default() })?
            }
            Plant::SmallTier => {
                let tier = Some(Tier { bytes: 8 << 20, miss_us: 2000 });
                stack.set(At::Backing, Faults { tier, ..Faults::default() })?;
            }
            Plant::OneInFlight => {
                // Over a backing with a latency, as most have; one in memory answers before a second request comes.
                stack.set(At::Backing, Faults::delayed(Duration::from_millis(1)))?;
                stack.set(At::Export, Faults { in_flight: 1, ..Faults::default() })?;
            }
            Plant::MoodyBacking => {
                let moods = Some(Moods { mean_ms: 450, slow_us: 3000 });
                stack.set(At::Backing, Faults { moods, ..Faults::default() })?;
            }
            Plant::SplitRequests => {
                let backing = Faults { delay_us: 500, in_flight: 4, ..Faults::default() };
                stack.set(At::Backing, backing)?;
                stack.set(At::Export, Faults { split: 16 << 10, ..Faults::default() })?;
            }
            Plant::PartialWrites => {
                let backing = Faults { delay_us: 500, in_flight: 4, ..Faults::default() };
                stack.set(At::Backing, backing)?;
                stack.set(At::Export, Faults { sectors: 16 << 10, ..Faults::default() })?;
            }
            Plant::BusyNode => {
                pin(stack, "n1", BUSY)?;
                return neighbours();
            }
            Plant::BusyGenerator => {
                pin(stack, "n1", FREE)?;
                return neighbours();
            }
            Plant::BusyReplica => {
                pin(stack, "n1", FREE)?;
                pin(stack, "n2", BUSY)?;
                return neighbours();
            }
        }
        Ok(Vec::new())
    }

    /// The processors of `weir diagnose`.
    pub(super) fn processors(self) -> Option<&'static str> {
        match self {
            Plant::BusyGenerator => Some(BUSY),
            Plant::BusyNode | Plant::BusyReplica => Some(FREE),
            _ => None,
        }
    }
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// All threads of a node on one processor.
fn pin(stack: &Stack, node: &str, processor: &str) -> Result<(), LabError> {
    let Some(process) = stack.lab().node(node)?.process else { return Ok(()) };
    let mut taskset = Command::new("taskset");
    taskset.args(["-a", "-c", "-p", processor, &process.pid.to_string()]).stdout(Stdio::null());
    let status = taskset.status().map_err(LabError::system("running taskset (package util-linux)"))?;
    if status.success() { Ok(()) } else { Err(LabError::Invalid(format!("taskset cannot pin node {node}"))) }
}

/// A process that does nothing but compute. Ends when dropped.
pub(super) struct Neighbour(Child);

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn neighbours() -> Result<Vec<Neighbour>, LabError> {
    // They end with this process too, should it be killed.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "taskset", "-c", BUSY, "sh", "-c", "while :; do :; done"]);
    let one = |_| command.spawn().map(Neighbour).map_err(LabError::system("starting a busy neighbour"));
    (0..NEIGHBOURS).map(one).collect()
}
