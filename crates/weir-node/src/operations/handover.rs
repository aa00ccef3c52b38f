//! The coordination of a volume on a LUN moves to a node that an operator names, or away from one that is drained.
//!
//! The wish is in the coordinator's record. The coordinator reads it there, unmounts and leaves the record, and the named node is the first to
//! claim ([`crate::coordination`]). So nothing has to be undone when a process ends in the middle.

use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{CoordinatorRecord, Record, VolumeKind, VolumeRecord, keys};
use weir_cluster::registry::RegistryError;

use super::nodes::unknown;
use super::volumes::noun;
use super::{Answer, Operations, check_named};
use crate::api::{
    ApiError, ApiErrorKind, CoordinatedVolume, MoveVolume, MovedVolume, NodeView, Owned, VolumePart,
};
use crate::control::node::unavailable;

/// Longest wait for the new coordinator.
const MOVED: Duration = Duration::from_secs(90);
/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl Operations {
    /// Moves the coordination of a volume, and waits until a node serves the volume again, for a bounded time.
    ///
    /// # Errors
    /// As [`Operations::disks`]; the node cannot coordinate it, or does so already; another node has taken it over instead.
    pub async fn move_volume(&self, name: &str, wanted: MoveVolume) -> Answer<MovedVolume> {
        check_named(name)?;
        check_named(&wanted.to)?;
        let volume = self.node.volume(name).await?;
        if volume.kind != VolumeKind::Lun {
            return Err(refused(format!("volume {name} is {}: nobody coordinates it", noun(volume.kind))));
        }
        self.check_takes(&wanted.to)?;
        let served = self.coordinations().await.remove(name).unwrap_or_default();
        let (Some(from), Some(record)) = (served.coordinator, served.record) else {
            let message = format!("volume {name} is not served: {}", served.trouble);
            let hint = "whichever node can takes its coordination over; move it afterwards";
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(hint));
        };
        if !served.trouble.is_empty() {
            let message = format!("volume {name} is not moved from node {from}: {}", served.trouble);
            let hint = "a coordinator that does not give its volume up would be fenced; see to it first";
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(hint));
        }
        if from == wanted.to {
            return Err(refused(format!("node {from} coordinates volume {name} already")));
        }
        self.check_reaches(&volume, &wanted.to).await?;
        let (id, volume, to) = (volume.id, name.to_owned(), wanted.to);
        let moved = MovedVolume { volume, from, to, epoch: record.epoch, seconds: None, done: false };
        if wanted.dry_run {
            return Ok(moved);
        }
        let key = keys::coordinator(id);
        let epoch = self.wish(&moved, &key).await?;
        self.await_moved(MovedVolume { epoch, ..moved }, &key).await
    }

    /// Only a node that takes disks gets the coordination.
    fn check_takes(&self, name: &str) -> Answer<()> {
        let node = self.nodes().into_iter().find(|node| node.name == name).ok_or_else(|| unknown(name))?;
        let (is, hint) = match node.state.as_str() {
            NodeView::UP => return Ok(()),
            "draining" | NodeView::MAINTENANCE => ("drained", format!("`weir node resume {name}` ends that")),
            state @ "quarantined" => (state, format!("`weir node clear {name}` ends that")),
            state => (state, "name a node that `weir status` shows as up".to_owned()),
        };
        Err(refused(format!("node {name} is {is}: it takes no coordination")).hint(hint))
    }

    async fn check_reaches(&self, volume: &VolumeRecord, name: &str) -> Answer<()> {
        match self.coordination_parts(&volume.name).await.into_iter().find(|(node, _)| node == name) {
            Some((_, Some(part))) if part.has_path => Ok(()),
            Some((_, Some(part))) => {
                let why = if part.notice.is_empty() { String::new() } else { format!(": {}", part.notice) };
                let message = format!("node {name} has no path to the LUN of volume {}{why}", volume.name);
                Err(refused(message).hint(format!("`weir volume show {}` there says more", volume.name)))
            }
            Some((_, None)) | None => {
                let message = format!("node {name} does not answer");
                Err(ApiError::new(ApiErrorKind::Unavailable, message)
                    .hint("name another node, or try again when it answers"))
            }
        }
    }

    /// What each node that is up says of its part in a volume's coordination; `None`: it does not answer.
    async fn coordination_parts(&self, volume: &str) -> Vec<(String, Option<VolumePart>)> {
        let live = self.node.records.nodes.now();
        let own = Owned { volumes: self.volume_parts().await, ..Owned::default() };
        let said = self.ask_owners(live.values().map(|node| node.node_ref()).collect(), own).await;
        let nodes = live.values().map(|node| node.node_ref());
        nodes.map(|node| (node.node.clone(), said.part(&node, volume).cloned())).collect()
    }

    /// Puts the wish into the record. Returns the epoch that it ends.
    async fn wish(&self, moved: &MovedVolume, key: &str) -> Answer<u64> {
        let MovedVolume { volume, from, to, .. } = moved;
        let changed = || {
            let message = format!("the coordinator of volume {volume} has just changed");
            ApiError::new(ApiErrorKind::Unavailable, message).hint("try again")
        };
        let next = self.live_node(to)?;
        let entry = self.node.registry.get(key).await.map_err(unavailable)?.ok_or_else(changed)?;
        let record = CoordinatorRecord::of(&entry)
            .map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?;
        if record.coordinator.as_ref().is_none_or(|now| now.node != *from) {
            return Err(changed());
        }
        let epoch = record.epoch;
        let wish = CoordinatorRecord { next: Some(next), ..record };
        match self.node.registry.transact(wish.replace(&entry)).await {
            Ok(_) => {}
            Err(RegistryError::Conflict { .. }) => return Err(changed()),
            Err(error) => return Err(unavailable(error)),
        }
        let text = format!("an operator moves its coordination from {from} to {to}");
        self.node.journal.tell("coordination-moves", volume, text);
        Ok(epoch)
    }

    async fn await_moved(&self, moved: MovedVolume, key: &str) -> Answer<MovedVolume> {
        let MovedVolume { volume, from, to, epoch, .. } = &moved;
        let (begun, mut notice, mut trouble) = (Nanos::now(), String::new(), String::new());
        while Nanos::now() < begun + MOVED {
            let now = self.coordinations().await.remove(volume).unwrap_or_default();
            let parts = self.coordination_parts(volume).await;
            let said = parts.into_iter().find(|(node, _)| node == to).and_then(|(_, part)| part);
            notice = said.map(|part| part.notice).filter(|said| !said.is_empty()).unwrap_or(notice);
            let (present, is_wished) = now.record.map_or((0, true), |one| (one.epoch, one.next.is_some()));
            let is_over = present > *epoch || !is_wished;
            trouble = now.trouble;
            match now.coordinator {
                Some(node) if is_over && trouble.is_empty() && node == *to => {
                    let seconds = Some((Nanos::now() - begun).as_secs_f64());
                    return Ok(MovedVolume { epoch: present, seconds, done: true, ..moved });
                }
                Some(node) if is_over && trouble.is_empty() => {
                    return Err(self.not_moved(&moved, &notice, &format!("{node} coordinates it now")));
                }
                // The wish names a process that is gone, or that is to take nothing by now: the coordinator has stayed.
                Some(node) if trouble.is_empty() && node == *from && self.check_takes(to).is_err() => {
                    let error = self.not_moved(&moved, &notice, &format!("{node} still coordinates it"));
                    self.take_wish_back(&moved, key).await;
                    return Err(error);
                }
                _ => {}
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        let message = format!(
            "volume {volume} is still on its way from {from} to {to} after {} s: {trouble}",
            MOVED.as_secs()
        );
        let hint = format!("`weir volume show {volume}` and `weir events` show why; try again then");
        self.take_wish_back(&moved, key).await;
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(hint))
    }

    /// Takes a wish back that nobody follows: it would come true when its process is there again, whenever that is.
    async fn take_wish_back(&self, moved: &MovedVolume, key: &str) {
        let Ok(Some(entry)) = self.node.registry.get(key).await else { return };
        let Ok(record) = CoordinatorRecord::of(&entry) else { return };
        if record.epoch == moved.epoch && record.next.as_ref().is_some_and(|next| next.node == moved.to) {
            let without = CoordinatorRecord { next: None, ..record };
            if let Err(error) = self.node.registry.transact(without.replace(&entry)).await {
                tracing::info!(%error, volume = moved.volume, "its coordination may move later");
            }
        }
    }

    fn not_moved(&self, moved: &MovedVolume, notice: &str, instead: &str) -> ApiError {
        let MovedVolume { volume, to, .. } = moved;
        let why = match (notice, self.check_takes(to)) {
            ("", Err(error)) => format!(": {}", error.message),
            ("", Ok(())) => String::new(),
            (notice, _) => format!(": {notice}"),
        };
        let message = format!("node {to} has not taken the coordination of volume {volume}{why}; {instead}");
        ApiError::new(ApiErrorKind::Failed, message)
            .hint(format!("`weir volume show {volume}`, `weir events`"))
    }

    /// The volumes that a node coordinates, as this node knows.
    pub(super) fn coordinated_by(&self, node: &str) -> Vec<CoordinatedVolume> {
        let is_it = |volume: &VolumeRecord| {
            self.node.coordinators.get(&volume.name).coordinator.is_some_and(|one| one.node == node)
        };
        let volumes = self.lun_volumes().into_iter().filter(is_it);
        volumes.map(|volume| CoordinatedVolume { volume: volume.name, stays: String::new() }).collect()
    }

    /// The same, with the reason why no other node would coordinate them.
    pub(super) async fn coordinated_alone_by(&self, node: &str) -> Vec<CoordinatedVolume> {
        let barred = self.node.barred();
        let mut volumes = self.coordinated_by(node);
        for one in &mut volumes {
            let parts = self.coordination_parts(&one.volume).await;
            let takes = |(name, part): &(String, Option<VolumePart>)| {
                name != node && !barred.contains(name) && part.as_ref().is_some_and(|part| part.has_path)
            };
            if !parts.iter().any(takes) {
                one.stays = "no other node that takes disks has a path to its LUN".to_owned();
            }
        }
        volumes
    }
}

fn refused(message: String) -> ApiError {
    ApiError::new(ApiErrorKind::Refused, message)
}
