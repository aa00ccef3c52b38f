//! Faults planted one at a time, and what the finder says of each: the confusion matrix.
//!
//! Every case is a lab of its own with a disk in memory, a fault in one place, and `weir diagnose` run on it as anybody
//! would. What it names is held against what was planted. Cases of processor time pin processes with taskset(1) and
//! put busy neighbours beside them; on a machine that others keep busy, "nothing" is not nothing. To name the wrong
//! cause is the sin; to name none is honest, and should be rare.

mod case;
mod matrix;
mod plant;

pub use case::{Case, Judged, Programs, Suspicion, run};
pub use matrix::{Kept, is_good, matrix};
pub use plant::Plant;
