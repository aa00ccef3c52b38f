//! Placement of the set's members: misplaced ones for a strict policy, and a successor.
//!
//! Only the control plane knows the nodes' places; it names the misplaced members. They count like any other until the set
//! has changed (P1, P3), and are replaced.

use super::Owner;
use crate::config::Configuration;

impl Owner {
    /// Connected, and to stay.
    pub(super) fn placed(&self) -> usize {
        self.members.iter().filter(|member| member.connected && !self.is_to_go(&member.node)).count()
    }

    /// Whether the set, though complete, is not what a strict policy asks for.
    pub(super) fn is_too_loose(&self) -> bool {
        let Configuration { strict, wanted_replicas, misplaced, .. } = &self.configuration;
        let is_misplaced = |node| self.successor.is_none() && misplaced.contains(node);
        let right = self.members.iter().filter(|member| member.connected && !is_misplaced(&member.node));
        *strict && wanted_replicas.is_some_and(|wanted| right.count() < wanted)
    }

    /// A member of the set that is to make room for another. Not while the disk is on its way to a successor: the right
    /// placement is then the one for that node.
    pub(super) fn is_to_go(&self, node: &str) -> bool {
        self.successor.is_none() && self.configuration.to_go().any(|other| other == node)
    }

    /// As [`Owner::is_to_go`], and it keeps its place until another node has the copy.
    pub(super) fn is_leaving(&self, node: &str) -> bool {
        self.successor.is_none() && self.configuration.leaving.iter().any(|other| other == node)
    }

    pub(super) fn is_successor(&self, node: &str) -> bool {
        self.successor.as_deref() == Some(node)
    }

    pub(super) fn lacks_successor(&self) -> bool {
        let here = |node: &String| self.members.iter().any(|member| member.connected && member.node == *node);
        self.successor.as_ref().is_some_and(|node| !here(node))
    }
}
