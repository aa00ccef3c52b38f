//! Faults as layers: put between any two others while requests go through them.
//!
//! - [`settings`]: the settings of all faults, and the switch that sets and clears them from another thread;
//! - [`timing`]: the decisions of a fault: the time and order of requests, and which ones fail;
//! - [`line`](mod@line): delay, jitter, bandwidth, a limit of requests in flight, dispatchers that lose the order, a fast
//!   tier of limited size, moods, errors;
//! - [`disk`]: a *simulated* disk of 15 000 revolutions a minute;
//! - [`layer`]: the layer that holds requests until then;
//! - [`split`]: the layer that makes several of one;
//! - [`sectors`]: the layer that writes whole sectors only, and reads the rest of one first;
//! - [`relay`]: the replication link to a node, with faults;
//! - [`board`], [`orders`]: the places of a node's disks, and orders for them. `weir-lab-node` is the node that has them;
//! - [`stack`], [`confusion`]: faults planted one at a time, and the finder's verdict on each.
//!
//! Decisions are pure: they take the time as an argument and draw from a seed, so their tests run in simulated time. Layers
//! wait by the reactor's deadline; no layer sleeps.

#[cfg(test)]
mod bench;
pub mod board;
pub mod confusion;
pub mod disk;
pub mod layer;
pub mod line;
pub mod orders;
pub mod relay;
pub mod sectors;
pub mod settings;
pub mod split;
pub mod stack;
pub mod timing;

pub use board::{At, Board};
pub use disk::Mechanism;
pub use layer::Held;
pub use line::Line;
pub use orders::Order;
pub use relay::{LinkFaults, Relay};
pub use sectors::Sectors;
pub use settings::{Faults, FaultsError, Moods, Switch, Tier};
pub use split::Split;
pub use timing::{Fate, Request, Timing};
