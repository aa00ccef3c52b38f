//! Faults planted one at a time, and the finder's verdict on each: the confusion matrix.
//!
//! Every case is a lab of its own with a disk in memory, a fault in one place, and `weir diagnose` run on it as by any user.
//! The named cause is compared with the planted one. Cases of processor time pin processes with taskset(1) and put busy
//! neighbours beside them; on a machine with other load, "nothing" is not nothing. A wrong cause is an error; no cause is
//! honest, and should be rare.

mod case;
mod matrix;
mod plant;

pub use case::{Case, Judged, Programs, Suspicion, run};
pub use matrix::{Kept, is_good, matrix};
pub use plant::Plant;
