//! Several loads that belong together: the jobs of a job file, or of a replayed profile.

use crate::target::Target;
use crate::workload::Workload;

/// One of several loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The name in output. Equal jobs have a number appended.
    pub name: String,
    /// The target.
    pub target: Target,
    /// The workload.
    pub workload: Workload,
    /// Jobs of one group run at once, the groups one after the other; counted from 0.
    pub group: u32,
}
