//! Changes that the owner has proposed to the registry, of which any may have been committed.

/// The changes that were proposed in the present epoch.
///
/// An answer may be lost, and a change that seemed to fail may be committed a moment later. So all of them count as
/// possibly committed until another epoch is known; only one of them can be (P3).
#[derive(Clone, Debug, Default)]
pub(super) struct Proposals {
    /// An answer is due.
    pub waiting: bool,
    /// Something was proposed.
    pub any: bool,
    /// The nodes in any of the proposed sets.
    pub replicas: Vec<String>,
    /// Write-through was proposed.
    pub write_through: bool,
    /// The newest proposal.
    newest: Vec<String>,
}

impl Proposals {
    pub fn add(&mut self, replicas: &[String], write_back: bool) {
        self.waiting = true;
        self.any = true;
        self.write_through |= !write_back;
        self.newest = replicas.to_vec();
        for node in replicas {
            if !self.replicas.contains(node) {
                self.replicas.push(node.clone());
            }
        }
    }

    /// Whether the change that was proposed last, and may have been committed, takes this node out of the set.
    pub fn omits(&self, node: &str) -> bool {
        self.any && !self.newest.iter().any(|proposed| proposed == node)
    }
}
