//! What a live disk is asked for, at negligible cost: `weir profile`.
//!
//! A [`Profiler`] is told of every request ([`weir_block::Observe`]) and keeps, in memory of a fixed size, sizes, mix,
//! sequentiality, arrivals, reuse, working set, and what the miss-ratio curve and the coalescing of a write log follow
//! from. It has no clock, no lock and allocates nothing per request. What it knows so far is a [`Profile`]: numbers
//! that merge by addition and are written as JSON with a version.
//!
//! From a profile follow loads that ask for about the same ([`replay`]), and the differences between two profiles
//! ([`compare`]).
//!
//! # Sampling
//! What needs a memory of blocks (reuse, working set, curves) looks at a spatial sample: the blocks of 4 KiB whose
//! hash lies below a threshold, and all references to them (SHARDS; Waldspurger, Park, Garthwaite and Ahmad, "Efficient
//! MRC construction with SHARDS", FAST 2015). The sample is of fixed size: when it overflows, the threshold sinks.
//! It also sinks while more references are sampled than the processor time allows. Counts that need no memory are exact.

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
