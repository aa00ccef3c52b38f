//! Meters and profiles of a disk that is open here, and loads on its layers.

use std::time::Duration;

use weir_cluster::records::NodeRef;
use weir_profile::Profile;

use super::{Answer, Operations};
use crate::api::{ApiError, ApiErrorKind, MeterView, RecordProfile, RunLoad};
use crate::shard::messages::Command;

/// The permitted duration of a recording.
const RECORDING: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(7 * 86_400);

impl Operations {
    /// The meters of a disk that is open here.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn meters(&self, name: &str) -> Answer<Vec<MeterView>> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return Err(elsewhere(name, &owner));
        }
        let disk = name.to_owned();
        let meters = self.node.shards.ask(name, |answer| Command::Meters { disk, answer }).await?;
        Ok(meters.ok_or_else(|| closed(name))?.iter().map(MeterView::from).collect())
    }

    /// The profile of a disk that is open here, since it was opened.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn profile(&self, name: &str) -> Answer<Profile> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return Err(elsewhere(name, &owner));
        }
        let disk = name.to_owned();
        let profile = self.node.shards.ask(name, |answer| Command::Profile { disk, answer }).await?;
        profile.map(|profile| *profile).ok_or_else(|| closed(name))
    }

    /// Records for some time the profile of a disk that is open here.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn record_profile(&self, name: &str, wanted: RecordProfile) -> Answer<Profile> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return Err(elsewhere(name, &owner));
        }
        let length = Duration::from_millis(wanted.length_ms);
        if !RECORDING.contains(&length) {
            let message = "a profile is recorded for 100 ms to 7 days".to_owned();
            return Err(ApiError::new(ApiErrorKind::Invalid, message));
        }
        let disk = name.to_owned();
        let record = |answer| Command::RecordProfile { disk, length, answer };
        let recorded = self.node.shards.ask(name, record).await?;
        recorded.map(|profile| *profile).map_err(|reason| ApiError::new(ApiErrorKind::Refused, reason))
    }

    /// Runs a load on a layer of a disk that is open here.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn load(&self, name: &str, wanted: RunLoad) -> Answer<weir_load::Summary> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return Err(elsewhere(name, &owner));
        }
        wanted
            .workload
            .validate()
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        let (disk, layer, workload) = (name.to_owned(), wanted.layer, Box::new(wanted.workload));
        let force = wanted.force;
        let load = |answer| Command::Load { disk, layer, workload, force, answer };
        let result = self.node.shards.ask(name, load).await?;
        result.map_err(|reason| {
            ApiError::new(ApiErrorKind::Refused, format!("disk {name}: {reason}"))
                .hint("disconnect them; --force runs the load beside theirs, above the write log")
        })
    }
}

fn closed(name: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Refused, format!("disk {name} is closed")).hint("export it first")
}

fn elsewhere(name: &str, owner: &NodeRef) -> ApiError {
    ApiError::new(ApiErrorKind::Refused, format!("disk {name} is open on node {}", owner.node))
        .hint(format!("ask that node: --node {}", owner.node))
}
