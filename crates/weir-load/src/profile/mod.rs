//! What a live disk is asked for, at negligible cost: `weir profile`.
//!
//! A [`Profiler`] is told of every request ([`weir_block::Observe`]) and keeps, in memory of a fixed size, sizes, mix,
//! sequentiality, arrivals, reuse, working set, and what the miss-ratio curve and the coalescing of a write log follow
//! from. It has no clock, no lock and allocates nothing per request. What it knows so far is a [`Profile`]: numbers
//! that merge by addition and are written as JSON with a version.
//!
//! From a profile follow loads that ask for about the same ([`export`]), and the differences between two profiles
//! ([`compare`]). [`import`] makes profiles of traces that others recorded.
//!
//! # Sampling
//! What needs a memory of blocks (reuse, working set, curves) looks at a spatial sample: the blocks of 4 KiB whose
//! hash lies below a threshold, and all references to them (SHARDS; Waldspurger, Park, Garthwaite and Ahmad, "Efficient
//! MRC construction with SHARDS", FAST 2015). The sample is of fixed size: when it overflows, the threshold sinks.
//! It also sinks while more references are sampled than the processor time allows. Counts that need no memory are exact.

mod area;
mod arrivals;
pub mod buckets;
pub mod compare;
pub mod export;
mod fit;
pub mod import;
mod observer;
mod places;
mod record;
mod rehearse;
mod reuse;
mod stack;
mod view;

pub use arrivals::{HOURS, PAUSE, TICK};
pub use observer::{Profiler, Settings};
pub use record::{
    Arrival, Class, Curve, Direction, Hour, KindProfile, Part, Profile, ProfileError, Reuse, Sampling,
    VERSION, WorkingSet, WriteBack,
};
pub use rehearse::rehearse;
pub use view::{COALESCING_BYTES, COALESCING_SECONDS, HIT_TARGETS, Summary};

/// Bytes of a block: the unit of reuse, of the working set and of the curves.
pub const BLOCK: u64 = 4096;
