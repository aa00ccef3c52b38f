//! Several nodes on one machine, faults at will. Tests, benchmarks and the demo stand on it.
//!
//! ```no_run
//! use weir_lab::{Lab, LabConfig};
//! let mut lab = Lab::up(&LabConfig::new("/tmp/lab", "target/release/weir"))?;
//! lab.kill("n1")?;
//! lab.start("n1")?;
//! # Ok::<(), weir_lab::LabError>(())
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod error;
pub mod fault;
pub mod guest;
pub mod history;
mod lab;
pub mod mechanical_disk;
pub mod network;
mod one_file;
pub mod port;
pub mod process;
mod relay;
pub mod volatile_disk;

pub use error::LabError;
pub use lab::identities;
pub use lab::{Ending, Lab, LabConfig, LabEtcd, LabFlash, LabNode, MOST_NODES, NodeReport};
pub use network::REGISTRY;
