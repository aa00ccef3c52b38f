//! The nodes whose grants uphold an owner's right, and whose seals end it.

use serde::{Deserialize, Serialize};
use weir_block::Nanos;

/// Maximum number of guards of a disk.
pub const MAX_GUARDS: usize = 3;

/// The nodes whose grants uphold an owner's right while the registry is away.
///
/// Nodes and not processes: the start of a process counts as a grant ([`super::Grants`]), so it can replace its predecessor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GrantSet {
    /// The disk's replicas: all of them must grant, so a takeover seals any one of them.
    Replicas(Vec<String>),
    /// The guards of a disk without replicas. Of three, two must grant and a takeover seals two; of fewer, all must grant and a
    /// takeover seals one.
    Guards(Vec<String>),
}

impl GrantSet {
    /// Its nodes.
    #[must_use]
    pub fn members(&self) -> &[String] {
        match self {
            GrantSet::Replicas(nodes) | GrantSet::Guards(nodes) => nodes,
        }
    }

    /// Number of members that must grant.
    #[must_use]
    pub fn grants_needed(&self) -> usize {
        match self {
            GrantSet::Guards(nodes) if nodes.len() >= MAX_GUARDS => nodes.len() - 1,
            set => set.members().len(),
        }
    }

    /// Number of members that a takeover seals, so that too few remain to uphold the right.
    ///
    /// A majority of grants with *one* seal is unsafe: the other two continue to grant.
    #[must_use]
    pub fn seals_needed(&self) -> usize {
        self.members().len() + 1 - self.grants_needed()
    }

    /// The time until which the set upholds the owner's right, given the end of each member's grant. An empty set grants nothing.
    #[must_use]
    pub fn granted_until(&self, grant: impl Fn(&str) -> Nanos) -> Nanos {
        let mut ends: Vec<Nanos> = self.members().iter().map(|member| grant(member)).collect();
        ends.sort_unstable_by(|a, b| b.cmp(a));
        match self.grants_needed() {
            0 => Nanos(0),
            needed => ends.get(needed - 1).copied().unwrap_or(Nanos(0)),
        }
    }

    /// The time at which the former right is certainly over, given the ends of the sealed members' last grants. `None`: too few
    /// are sealed. An empty set never upheld a right.
    #[must_use]
    pub fn over_at(&self, sealed: impl Fn(&str) -> Option<Nanos>) -> Option<Nanos> {
        if self.members().is_empty() {
            return Some(Nanos(0));
        }
        let mut ends: Vec<Nanos> = self.members().iter().filter_map(|member| sealed(member)).collect();
        ends.sort_unstable();
        ends.get(self.seals_needed() - 1).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: usize) -> Vec<String> {
        ["b", "c", "d"][..count].iter().map(|name| (*name).to_owned()).collect()
    }

    /// For each set and all ends of last grants: seals never prove a right over before its grants end.
    #[test]
    fn seals_never_prove_over_what_grants_still_allow() {
        let sets = (0..=3).map(|count| GrantSet::Guards(names(count)));
        for set in sets.chain((1..=2).map(|count| GrantSet::Replicas(names(count)))) {
            let count = set.members().len();
            for ends in 0..4_u64.pow(count as u32) {
                let last = |member: &str| {
                    let index = set.members().iter().position(|name| name == member).expect("a member");
                    Nanos(1 + ends / 4_u64.pow(index as u32) % 4)
                };
                for sealed in 0..1_u32 << count {
                    let is_sealed = |member: &str| {
                        let index = set.members().iter().position(|name| name == member).expect("a member");
                        sealed & 1 << index != 0
                    };
                    // An unsealed member may continue to grant without end.
                    let allowed = set
                        .granted_until(|member| if is_sealed(member) { last(member) } else { Nanos::NEVER });
                    let over = set.over_at(|member| is_sealed(member).then(|| last(member)));
                    assert!(over.is_none_or(|over| over >= allowed), "{set:?} {ends} {sealed}");
                    assert_eq!(over.is_none(), allowed == Nanos::NEVER, "{set:?} {ends} {sealed}");
                }
            }
        }
    }

    #[test]
    fn an_empty_set_grants_nothing() {
        assert_eq!(GrantSet::Guards(Vec::new()).granted_until(|_| Nanos::NEVER), Nanos(0));
        assert_eq!(GrantSet::Guards(names(3)).granted_until(|node| Nanos(u64::from(node != "b"))), Nanos(1));
    }
}
