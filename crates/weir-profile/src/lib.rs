//! The workload of a live disk, observed at negligible cost: `weir profile`.
//!
//! A [`Profiler`] sees every request ([`weir_block::Observe`]). In memory of a fixed size it keeps sizes, mix, sequentiality,
//! arrivals, reuse, working set, and the counts from which the miss-ratio curve and the coalescing of a write log
//! follow. It has no clock and no lock, and allocates nothing per request. Its result is a [`Profile`]: numbers that merge
//! by addition and are written as JSON with a version.
//!
//! [`replay`] makes loads that resemble a profile; [`compare`] lists the differences between two profiles.
//!
//! # Sampling
//! Figures that need the history of blocks (reuse, working set, curves) come from a spatial sample: the blocks of 4 KiB whose
//! hash lies below a threshold, and all references to them (SHARDS; Waldspurger, Park, Garthwaite and Ahmad, "Efficient
//! MRC construction with SHARDS", FAST 2015). The sample is of fixed size: when it overflows, the threshold falls. It also falls
//! while more references are sampled than the processor time allows. Counts that need no memory are exact.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod arrivals;
pub mod buckets;
mod classifier;
pub mod compare;
mod observer;
mod record;
pub mod replay;
mod reuse;
mod stack;
mod view;

pub use arrivals::{HOURS, PAUSE, TICK};
pub use observer::{Profiler, Settings};
pub use record::{
    Arrival, BLOCK, Class, Curve, Direction, Hour, KindProfile, Part, Profile, ProfileError, Reuse, Sampling,
    VERSION, WorkingSet, WriteBack,
};
pub use view::{COALESCING_BYTES, COALESCING_SECONDS, HIT_TARGETS, ProfileSummary};
