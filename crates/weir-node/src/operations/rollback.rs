//! Disks that go back to a snapshot: closed, and then given its content by the node that keeps the volume's files.

use weir_cluster::records::DiskRecord;

use super::snapshots::{SNAPSHOT_IT, check_snapshot, is_file, no_snapshot};
use super::{Answer, Operations, is_busy};
use crate::api::{ApiError, ApiErrorKind, RollBack, RolledBack};
use crate::client::ROLLBACK;
use crate::control::disk::{NewContent, Request};
use crate::control::provisioning::to_its_end;
use crate::control::readers;
use crate::timestamps::rfc3339;

impl Operations {
    /// Gives a disk without clients the content of one of its snapshots, or says what would be done. The disk is closed then. Its present
    /// content becomes another snapshot first, unless that is not wanted.
    ///
    /// # Errors
    /// As [`Operations::disks`]; there is no such snapshot; clients are connected to the disk; its owner is gone.
    pub async fn roll_back(&self, disk: &str, wanted: RollBack) -> Answer<RolledBack> {
        let record = self.record(disk).await?;
        is_file(&record, SNAPSHOT_IT)?;
        let wanted = named(disk, wanted)?;
        let snapshots = self.snapshots(disk).await?.snapshots;
        let Some(found) = snapshots.iter().find(|one| one.name == wanted.snapshot) else {
            return Err(no_snapshot(disk, &wanted.snapshot));
        };
        if let Some(kept) =
            wanted.keep_as.as_ref().filter(|kept| snapshots.iter().any(|one| one.name == **kept))
        {
            let message = format!("there is a snapshot {disk}@{kept} already");
            return Err(ApiError::new(ApiErrorKind::Exists, message)
                .hint("give another name with --keep-as; nothing has changed"));
        }
        if let Some(owner) = self.lives_elsewhere(&record) {
            return self.forward_within(ROLLBACK, &owner, disk, "rollback", Some(&wanted)).await;
        }
        let was_open = self.check_not_used(&record).await?;
        self.check_no_former(&record)?;
        let answer = RolledBack {
            disk: disk.to_owned(),
            snapshot: wanted.snapshot.clone(),
            made: found.made.clone(),
            kept: wanted.keep_as.clone(),
            was_open,
            done: !wanted.dry_run,
        };
        if wanted.dry_run {
            return Ok(answer);
        }
        let record = self.close_to_replace(disk, was_open).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
            let there: RolledBack =
                self.forward_within(ROLLBACK, &coordinator, disk, "rollback", Some(&wanted)).await?;
            return Ok(RolledBack { was_open: was_open || there.was_open, ..there });
        }
        self.check_coordinated(&record.volume).await?;
        let operations = self.clone();
        to_its_end(async move { operations.roll_back_here(&record, wanted).await }).await?;
        Ok(answer)
    }

    async fn roll_back_here(&self, record: &DiskRecord, wanted: RollBack) -> Answer<()> {
        let (disk, RollBack { snapshot, keep_as, .. }) = (&record.name, wanted);
        let Some(_step) = self.node.intents.begin(disk) else { return Err(is_busy(disk)) };
        let text = match &keep_as {
            Some(kept) => format!("to {disk}@{snapshot}; its content until then is {disk}@{kept}"),
            None => format!("to {disk}@{snapshot}; its content until then is discarded"),
        };
        let content = NewContent::Snapshot { snapshot, keep_as };
        self.ask(disk, |done| Request::Replace { content, done }).await?;
        self.node.journal.tell("disk-rolled-back", disk, text);
        Ok(())
    }

    /// Whether this process owns a disk, which nobody uses then.
    pub(super) async fn check_not_used(&self, record: &DiskRecord) -> Answer<bool> {
        let disk = &record.name;
        let Some(owner) = &record.owner else { return Ok(false) };
        if *owner != self.me() {
            let message = format!(
                "disk {disk}: its owner {owner} is gone, and its log may have writes that the disk's file lacks"
            );
            let hint = format!("`weir disk export {disk}` opens it; then try again");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
        }
        let clients = self.open_here(record).await.map_or(0, |status| status.clients);
        if clients > 0 {
            let are = readers::connected(&self.node, disk, clients);
            let message = format!("disk {disk}: {are}; its file would be replaced under them");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(
                "shut the guest down, or disconnect the disk from it; end the programs that read its file",
            ));
        }
        Ok(true)
    }

    /// Before the disk is closed for nothing: it does not go back while another may write to it, and only an owner finds out.
    pub(super) fn check_no_former(&self, record: &DiskRecord) -> Answer<()> {
        let Some(former) = record.former.first() else { return Ok(()) };
        let (disk, grace) = (&record.name, self.node.config.lease.fence_grace);
        let message = format!("disk {disk}: its former owner {} may still write to it", former.node);
        let hint = match record.owner {
            Some(_) => format!("nothing has changed; it is certain within {grace}: try again then"),
            None => format!(
                "`weir disk export {disk}` opens it, and its owner finds out within {grace}: try again then"
            ),
        };
        Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
    }

    /// Closes a disk whose file is to be replaced. Returns its record then.
    pub(super) async fn close_to_replace(&self, disk: &str, is_open: bool) -> Answer<DiskRecord> {
        if is_open {
            self.release(disk, true, "try again later").await?;
        }
        let record = self.record(disk).await?;
        self.check_closed(&record).await?;
        Ok(record)
    }

    async fn check_closed(&self, record: &DiskRecord) -> Answer<()> {
        let disk = &record.name;
        if let Some(owner) = &record.owner {
            let message = format!("disk {disk} is not closed: {owner} owns it");
            let hint = format!("`weir disk show {disk}` tells why; try again");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
        }
        if self.is_closed(record).await? {
            return Ok(());
        }
        let message = format!("disk {disk} has just been opened");
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"))
    }
}

/// The request with a name for the present content, unless that is to be discarded.
fn named(disk: &str, wanted: RollBack) -> Answer<RollBack> {
    check_snapshot(disk, &wanted.snapshot)?;
    match &wanted.keep_as {
        Some(_) if wanted.discard_current => {
            let message = "the present content is to be kept and to be discarded";
            Err(ApiError::new(ApiErrorKind::Invalid, message))
        }
        Some(kept) => check_snapshot(disk, kept).map(|()| wanted),
        None if wanted.discard_current => Ok(wanted),
        None => Ok(RollBack { keep_as: Some(kept_name(weir_task::unix_millis())), ..wanted }),
    }
}

/// As in `before-rollback-20261126T134512Z`.
fn kept_name(now_unix_ms: u64) -> String {
    let time = rfc3339(now_unix_ms);
    let second = time.split('.').next().unwrap_or_default();
    format!("before-rollback-{}Z", second.replace(['-', ':'], ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_content_gets_a_name_unless_it_is_discarded() {
        assert_eq!(kept_name(1_795_430_701_250), "before-rollback-20261123T104501Z");
        let wanted = RollBack { snapshot: "s".into(), ..RollBack::default() };
        let kept = named("d", wanted.clone()).unwrap().keep_as.unwrap();
        assert!(kept.starts_with("before-rollback-2"), "{kept}");
        let discarded = RollBack { discard_current: true, ..wanted.clone() };
        assert_eq!(named("d", discarded.clone()).unwrap().keep_as, None);
        let both = RollBack { keep_as: Some("k".into()), ..discarded };
        assert_eq!(named("d", both).unwrap_err().kind, ApiErrorKind::Invalid);
        let wrong = RollBack { keep_as: Some("a/b".into()), ..wanted };
        assert_eq!(named("d", wrong).unwrap_err().kind, ApiErrorKind::Invalid);
    }
}
