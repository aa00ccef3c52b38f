//! Several loads that belong together: the jobs of a job file, or of a replayed profile.

use crate::target::Target;
use crate::workload::Workload;

/// One of several loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// For people. Of several equal jobs with a number.
    pub name: String,
    /// What it is aimed at.
    pub target: Target,
    /// What it asks for.
    pub workload: Workload,
    /// Jobs of one group run at once, the groups one after the other; counted from 0.
    pub group: u32,
}
