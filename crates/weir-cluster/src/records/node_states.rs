//! The record of the nodes' states: what must survive restarts. One record for all nodes, so that a compare-and-swap sees all
//! quarantines at once and never exceeds their limit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Record, RecordError, check_name};

/// Most isolations that are kept for a node; the quarantine's threshold is at most this.
pub const MAX_ISOLATIONS: usize = 32;

/// `node-states/all`: the nodes of the cluster, up or down, until they are removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatesRecord {
    /// By the node's name.
    pub nodes: BTreeMap<String, NodeStateRecord>,
}

/// One node of a [`NodeStatesRecord`]. All times are milliseconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStateRecord {
    /// The present isolation, until the node is back in the registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<Isolation>,
    /// Starts of the latest isolations, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub isolations_unix_ms: Vec<u64>,
    /// The latest quarantine, which may have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// An operator has drained the node and not resumed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
}

/// A node lost the registry, and members of its disks' sets heard it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    /// The isolated process.
    pub incarnation: u64,
    /// Its start.
    pub since_unix_ms: u64,
}

/// A node was isolated too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// Its start.
    pub since_unix_ms: u64,
    /// Its end.
    pub until_unix_ms: u64,
}

/// A drain that an operator has requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Time of the request.
    pub since_unix_ms: u64,
    /// Whether disks may end with fewer copies than their policies request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fewer_copies: bool,
}

impl Record for NodeStatesRecord {
    const KIND: &'static str = "node states";

    fn check(&self) -> Result<(), RecordError> {
        let contradiction = |reason: String| Err(RecordError::Contradiction { kind: Self::KIND, reason });
        for (name, node) in &self.nodes {
            check_name(name)?;
            if node.isolations_unix_ms.len() > MAX_ISOLATIONS {
                return contradiction(format!("it has more than {MAX_ISOLATIONS} isolations of {name}"));
            }
            if node.quarantine.is_some_and(|quarantine| quarantine.until_unix_ms < quarantine.since_unix_ms) {
                return contradiction(format!("the quarantine of {name} ends before it begins"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;

    /// As the first version with node states writes it. Fields are omitted at their defaults.
    const FIRST: &str = r#"{"v":1,"nodes":{"a":{},"b":{"isolation":{"incarnation":7,"since_unix_ms":5},"isolations_unix_ms":[3,5],"quarantine":{"since_unix_ms":5,"until_unix_ms":9},"drain":{"since_unix_ms":6,"fewer_copies":true}}}}"#;

    #[test]
    fn records_of_the_first_version_are_read_and_written() {
        let record = NodeStatesRecord::decode(FIRST.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(record.encode()).unwrap(), FIRST);
        let node = &record.nodes["b"];
        assert_eq!(node.isolation, Some(Isolation { incarnation: 7, since_unix_ms: 5 }));
        assert_eq!(node.quarantine, Some(Quarantine { since_unix_ms: 5, until_unix_ms: 9 }));
        assert_eq!(node.drain, Some(Drain { since_unix_ms: 6, fewer_copies: true }));
        assert_eq!(record.nodes["a"], NodeStateRecord::default());
    }

    #[test]
    fn contradictions_are_refused() {
        let ends_early = FIRST.replace("\"until_unix_ms\":9", "\"until_unix_ms\":4");
        let bad_name = FIRST.replace("\"a\":{}", "\"/a\":{}");
        let many = format!("[{}]", vec!["1"; MAX_ISOLATIONS + 1].join(","));
        for bad in [ends_early, bad_name, FIRST.replace("[3,5]", &many), FIRST.replace("\"v\":1", "\"v\":2")]
        {
            assert!(NodeStatesRecord::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
