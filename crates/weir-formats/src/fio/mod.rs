//! fio: its job files, and its results.

mod json;
mod read_jobs;
mod size;
mod write_jobs;

pub use json::to_json;
pub use read_jobs::{JobFileError, read_jobs};
pub use size::{FioSizeError, parse_fio_size};
pub use write_jobs::{UnwritableTarget, write_jobs};
