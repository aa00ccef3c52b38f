//! Operators' requests about nodes: drain, resume, clear, remove.

use weir_cluster::node_state::{Event, UnknownNode, counts_on};
use weir_cluster::records::{DiskRecord, NodeRef, NodeStateRecord};

use super::{Answer, Operations, VIEW_LAG, check_named};
use crate::api::{ApiError, ApiErrorKind, DrainNode, NodeView, NodeWork, StayingDisk};
use crate::control::node::unavailable;
use crate::control::node_states::{self, StateError};
use crate::control::relocation;
use crate::members;

impl Operations {
    /// A node, the disks that count on it, and those that return to it, as this node knows them.
    ///
    /// # Errors
    /// There is no such node.
    pub fn node(&self, name: &str) -> Answer<NodeWork> {
        check_named(name)?;
        let node = self.nodes().into_iter().find(|node| node.name == name).ok_or_else(|| unknown(name))?;
        let disks = self.node.records.disks.now();
        let owner = |disk: &DiskRecord| disk.owner.as_ref().map(|owner: &NodeRef| owner.node.clone());
        let names = |is_meant: &dyn Fn(&DiskRecord) -> bool| -> Vec<String> {
            disks.values().filter(|disk| is_meant(disk)).map(|disk| disk.name.clone()).collect()
        };
        let is_owned = |disk: &DiskRecord| owner(disk).as_deref() == Some(name);
        let returns = |disk: &DiskRecord| disk.home.as_deref() == Some(name) && !is_owned(disk);
        let refused = relocation::plan(&self.node, name).refused;
        let stays = refused.into_iter();
        let stays = stays.map(|it| StayingDisk { disk: it.disk, reason: it.reason.to_string() }).collect();
        Ok(NodeWork {
            node,
            disks: names(&is_owned),
            copies: names(&|disk| counts_on(disk, name) && !is_owned(disk)),
            away: names(&returns),
            stays,
            volumes: self.coordinated_by(name),
        })
    }

    /// Has all disks moved away from a node, and their copies on it replaced. Returns when that begins.
    ///
    /// # Errors
    /// There is no such node; a disk would have fewer copies than its policy requests, and the request does not permit that; a disk
    /// cannot go anywhere; a volume that it coordinates has no other coordinator.
    pub async fn drain_node(&self, name: &str, wanted: DrainNode) -> Answer<NodeWork> {
        let DrainNode { fewer_copies, dry_run } = wanted;
        let before = self.node(name)?;
        let plan = relocation::plan_with(&self.node, name, fewer_copies);
        let volumes = self.coordinated_alone_by(name).await;
        if dry_run {
            let stays = plan.refused.into_iter();
            let stays =
                stays.map(|it| StayingDisk { disk: it.disk, reason: it.reason.to_string() }).collect();
            return Ok(NodeWork { stays, volumes, ..before });
        }
        if let Some(first) = plan.refused.first() {
            let others = match plan.refused.len() - 1 {
                0 => String::new(),
                others => format!(" (and {others} more)"),
            };
            let message =
                format!("node {name} is not drained: disk {}: {}{others}", first.disk, first.reason);
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(
                "`--dry-run` lists all; `--fewer-copies` permits fewer copies for the time of the drain, but never none",
            ));
        }
        if let Some(first) = volumes.iter().find(|one| !one.stays.is_empty()) {
            let message = format!(
                "node {name} is not drained: it coordinates volume {}, and {}",
                first.volume, first.stays
            );
            let hint = "without a coordinator, writes to new space would wait; `weir volume show` there names a node's path";
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
        }
        let event = Event::Drain { node: name.to_owned(), fewer_copies };
        self.change_state(name, event, |state| state.drain.is_some()).await
    }

    /// Ends a node's drain: it takes disks again, and those that the drain has moved away return. Returns when that begins.
    ///
    /// # Errors
    /// There is no such node.
    pub async fn resume_node(&self, name: &str) -> Answer<NodeWork> {
        self.node(name)?;
        let event = Event::Resume { node: name.to_owned() };
        self.change_state(name, event, |state| state.drain.is_none()).await
    }

    /// Ends a node's quarantine, and forgets its isolations.
    ///
    /// # Errors
    /// There is no such node.
    pub async fn clear_node(&self, name: &str) -> Answer<NodeWork> {
        self.node(name)?;
        let event = Event::Clear { node: name.to_owned() };
        self.change_state(name, event, |state| state.quarantine.is_none()).await
    }

    /// Removes a node that is down and will not come back.
    ///
    /// # Errors
    /// There is no such node, it is up, or a disk counts on it.
    pub async fn remove_node(&self, name: &str) -> Answer<NodeWork> {
        let before = self.node(name)?;
        match node_states::remove(&self.node, name).await {
            // A node of a version without node states.
            Ok(()) | Err(StateError::Unknown(_)) => {}
            Err(error) => return Err(refusal(error)),
        }
        members::remove(&self.node, name).await.map_err(unavailable)?;
        self.node.journal.tell(
            "removed",
            name,
            format!("node {name} does not belong to the cluster any more"),
        );
        Ok(NodeWork { node: NodeView { state: NodeView::DOWN.to_owned(), ..before.node }, ..before })
    }

    /// Changes a node's state, and answers with what has become of it as soon as this node's view shows that.
    async fn change_state(
        &self,
        name: &str,
        event: Event,
        is_done: impl Fn(&NodeStateRecord) -> bool,
    ) -> Answer<NodeWork> {
        let mut changes = self.node.records.changes();
        node_states::change(&self.node, &event, self.node.session.guard()).await.map_err(refusal)?;
        let shown = async {
            while !self.node.records.node_states().nodes.get(name).is_some_and(&is_done) {
                changes.next().await;
            }
        };
        // A slow view shows it later.
        let _ = tokio::time::timeout(VIEW_LAG, shown).await;
        self.node(name)
    }
}

pub(super) fn unknown(name: &str) -> ApiError {
    ApiError::new(ApiErrorKind::NotFound, UnknownNode(name.to_owned()).to_string())
        .hint("`weir status` shows the nodes")
}

fn refusal(error: StateError) -> ApiError {
    match error {
        StateError::Unknown(node) => unknown(&node.0),
        StateError::Stays(reason) => ApiError::new(ApiErrorKind::Refused, reason.to_string()),
        StateError::Record(error) => ApiError::new(ApiErrorKind::Failed, error.to_string()),
        StateError::Registry(error) => unavailable(error).hint("try again; `weir status` shows the registry"),
    }
}
