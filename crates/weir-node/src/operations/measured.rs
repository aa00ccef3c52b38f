//! Meters and profiles of a disk, and loads on its layers: from the node that has it open.

use std::time::Duration;

use weir_cluster::records::NodeRef;
use weir_profile::Profile;

use super::imports::check_imported;
use super::{Answer, Operations};
use crate::api::{ApiError, ApiErrorKind, MeterView, Meters, RecordProfile, RunLoad};
use crate::client;
use crate::shard::messages::Command;

/// The permitted duration of a recording.
const RECORDING: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(7 * 86_400);

/// Longest wait for a coordinator's part of a disk's meters: the rest is shown without it.
const AT_COORDINATOR: Duration = Duration::from_secs(1);

/// The body of a request without one.
pub(super) const NOTHING: Option<&()> = None;

impl Operations {
    /// The other node that has a disk open. A disk that is open here is measured here, whether or not the registry answers (P12).
    async fn open_elsewhere(&self, name: &str) -> Answer<Option<NodeRef>> {
        if self.node.here.get(name).is_some() {
            return Ok(None);
        }
        Ok(self.lives_elsewhere(&self.known_record(name).await?.0))
    }

    /// The meters of a disk.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn meters(&self, name: &str) -> Answer<Vec<MeterView>> {
        if let Some(owner) = self.open_elsewhere(name).await? {
            let asked = self.forward_within(client::LOOK, &owner, name, "meters", NOTHING);
            return asked.await.map(|Meters { meters }| meters);
        }
        let disk = name.to_owned();
        let meters = self.node.shards.ask(name, |answer| Command::Meters { disk, answer }).await?;
        let mut meters: Vec<MeterView> =
            meters.ok_or_else(|| closed(name))?.iter().map(MeterView::from).collect();
        // Without it, the way there and the work there are one figure.
        meters.extend(self.at_coordinator(name).await);
        Ok(meters)
    }

    /// The meter of a disk that is open here, at the coordinator of its volume. `None`: there is none, or it does not answer.
    async fn at_coordinator(&self, name: &str) -> Option<MeterView> {
        let volume = self.node.records.disk(name)?.volume;
        let coordinator = self.node.coordinators.get(&volume).coordinator?;
        if coordinator == self.node.session.node_ref() {
            return self.served_meters(name).await.ok()?.pop();
        }
        let asked = self.forward_within(AT_COORDINATOR, &coordinator, name, "served-meters", NOTHING);
        let answered = tokio::time::timeout(AT_COORDINATOR, asked).await;
        answered.ok()?.ok().and_then(|Meters { mut meters }| meters.pop())
    }

    /// The meter of a disk's requests to this node, if it coordinates the volume.
    ///
    /// # Errors
    /// The shard has ended.
    pub async fn served_meters(&self, name: &str) -> Answer<Vec<MeterView>> {
        let disk = name.to_owned();
        let meter = self.node.shards.ask(name, |answer| Command::ServedMeter { disk, answer }).await?;
        Ok(meter.iter().map(MeterView::from).collect())
    }

    /// The profile of a disk, since it was opened.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn profile(&self, name: &str) -> Answer<Profile> {
        if let Some(owner) = self.open_elsewhere(name).await? {
            return self.forward_within(client::LOOK, &owner, name, "profile", NOTHING).await;
        }
        let disk = name.to_owned();
        let profile = self.node.shards.ask(name, |answer| Command::Profile { disk, answer }).await?;
        profile.map(|profile| *profile).ok_or_else(|| closed(name))
    }

    /// Records for some time the profile of a disk.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn record_profile(&self, name: &str, wanted: RecordProfile) -> Answer<Profile> {
        let length = Duration::from_millis(wanted.length_ms);
        if !RECORDING.contains(&length) {
            let message = "a profile is recorded for 100 ms to 7 days".to_owned();
            return Err(ApiError::new(ApiErrorKind::Invalid, message));
        }
        if let Some(owner) = self.open_elsewhere(name).await? {
            let patience = client::PATIENCE + length;
            return self.forward_within(patience, &owner, name, "profile", Some(&wanted)).await;
        }
        let disk = name.to_owned();
        let record = |answer| Command::RecordProfile { disk, length, answer };
        let recorded = self.node.shards.ask(name, record).await?;
        recorded.map(|profile| *profile).map_err(|reason| ApiError::new(ApiErrorKind::Refused, reason))
    }

    /// Runs a load on a layer of a disk.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn load(&self, name: &str, wanted: RunLoad) -> Answer<weir_load::Summary> {
        wanted
            .workload
            .validate()
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        check_imported(&self.record(name).await?)?;
        if let Some(owner) = self.open_elsewhere(name).await? {
            let patience = client::PATIENCE + client::length_of(&wanted);
            return self.forward_within(patience, &owner, name, "load", Some(&wanted)).await;
        }
        let (disk, layer, workload) = (name.to_owned(), wanted.layer, Box::new(wanted.workload));
        let force = wanted.force;
        let load = |answer| Command::Load { disk, layer, workload, force, answer };
        let result = self.node.shards.ask(name, load).await?;
        result.map_err(|reason| ApiError::new(ApiErrorKind::Refused, format!("disk {name}: {reason}")))
    }
}

fn closed(name: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Refused, format!("disk {name} is closed")).hint("export it first")
}
