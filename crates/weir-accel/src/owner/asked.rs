//! What was asked of the registry, and what may have come of it.

/// The changes that were asked for in the present epoch.
///
/// An answer may be lost, and a change that seemed to fail may be committed a moment later. So all of them count as
/// possibly committed until another epoch is known; only one of them can be (P3).
#[derive(Clone, Debug, Default)]
pub(super) struct Asked {
    /// An answer is due.
    pub waiting: bool,
    /// Something was asked for.
    pub any: bool,
    /// Who is in one of the sets that were asked for.
    pub replicas: Vec<String>,
    /// Write-through was asked for.
    pub write_through: bool,
}

impl Asked {
    pub fn add(&mut self, replicas: &[String], write_back: bool) {
        self.waiting = true;
        self.any = true;
        self.write_through |= !write_back;
        for node in replicas {
            if !self.replicas.contains(node) {
                self.replicas.push(node.clone());
            }
        }
    }
}
