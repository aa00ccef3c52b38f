//! Disks that an import fills. Until it says that it has written everything, the disk is nobody else's: an import that is cut off, with its client
//! or with the disk's owner, would else leave a disk that looks whole.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::{DiskRecord, keys};
use weir_volume::{DirVolume, VolumeError};

use super::{Answer, Operations, is_busy};
use crate::api::{
    ApiError, ApiErrorKind, BeginImport, CreateDisk, DiskView, Export, FillDisk, Filled, Importing, OfImport,
};
use crate::control::disk::Request;
use crate::control::lun_disks;
use crate::control::node::{blocking, unavailable, volume_error};
use crate::control::provisioning::{Files, Origin, to_its_end};
use crate::units::about;

/// Space that a disk with all of its space leaves to the others of its volume: a part of it, and so many bytes at least.
const LEFT_FREE: (u64, u64) = (64, 64 << 20);

/// Time for one step of giving a disk its space.
const FILL: Duration = Duration::from_secs(1);

impl Operations {
    /// Makes a disk that an import is about to fill, or finds the one that an earlier request of the same import has made.
    ///
    /// # Errors
    /// As [`Operations::create_disk`]; the volume has no space for it.
    pub async fn begin_import(&self, wanted: BeginImport) -> Answer<Importing> {
        if wanted.number == 0 {
            return Err(ApiError::new(ApiErrorKind::Invalid, "number is 0; an import has another one"));
        }
        self.check_new_disk(&wanted.disk).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&wanted.disk.volume).await? {
            return self.forward(&coordinator, &wanted.disk.name, "import", &wanted).await;
        }
        self.check_coordinated(&wanted.disk.volume).await?;
        let BeginImport { number, disk, needed_bytes } = wanted;
        let name = disk.name.clone();
        // An earlier request whose answer was lost may have made it, also while this one is at work.
        if let Some(disk) = self.begun(&name, number).await? {
            return Ok(Importing { number, disk });
        }
        self.check_space(&disk, needed_bytes).await?;
        let disk = match self.make_disk(disk, Origin::Image { number }).await {
            Err(error) if error.kind == ApiErrorKind::Exists => {
                self.begun_meanwhile(&name, number).await?.ok_or(error)?
            }
            made => made?,
        };
        Ok(Importing { number, disk })
    }

    /// The disk that this import has made already.
    async fn begun(&self, name: &str, number: u64) -> Answer<Option<DiskView>> {
        match self.record(name).await {
            Ok(record) if record.importing == number => self.disk(name).await.map(Some),
            Err(error) if error.kind != ApiErrorKind::NotFound => Err(error),
            _ => Ok(None),
        }
    }

    /// As [`Operations::begun`], where something has the name. While that is unfinished, it may be an earlier request's: the client asks again.
    async fn begun_meanwhile(&self, name: &str, number: u64) -> Answer<Option<DiskView>> {
        let unfinished = self.node.registry.get(&keys::unfinished(name)).await.map_err(unavailable)?;
        if unfinished.is_some() || self.node.intents.begin(name).is_none() {
            return Err(is_busy(name));
        }
        self.begun(name, number).await
    }

    /// Opens a disk for the import that fills it.
    ///
    /// # Errors
    /// As [`Operations::export`]; it is not this import's.
    pub async fn open_import(&self, name: &str, wanted: OfImport) -> Answer<DiskView> {
        check_import(&self.record(name).await?, wanted.number)?;
        self.open(name, Export::default()).await
    }

    /// The import has written everything, and the disk is like any other.
    ///
    /// # Errors
    /// As [`Operations::disks`]; it is not this import's.
    pub async fn end_import(&self, name: &str, wanted: OfImport) -> Answer<DiskView> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "end-import", &wanted).await;
        }
        let number = wanted.number;
        self.ask(name, |done| Request::EndImport { number, done }).await?;
        self.disk(name).await
    }

    /// Gives the disk of an import space of its own, with zeroes, from a byte on.
    ///
    /// # Errors
    /// As [`Operations::disks`]; it is not this import's, or open; the volume has too little space, or cannot do that.
    pub async fn fill(&self, name: &str, wanted: FillDisk) -> Answer<Filled> {
        let record = self.record(name).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
            return self.forward(&coordinator, name, "fill", &wanted).await;
        }
        self.check_coordinated(&record.volume).await?;
        let operations = self.clone();
        self.bounded(to_its_end(async move { operations.fill_here(&record, wanted).await })).await
    }

    async fn fill_here(&self, record: &DiskRecord, wanted: FillDisk) -> Answer<Filled> {
        let (DiskRecord { name, volume, .. }, FillDisk { number, from }) = (record, wanted);
        // The disk is not deleted meanwhile.
        let Some(_step) = self.node.intents.begin(name) else { return Err(is_busy(name)) };
        // Nor written to on a LUN: whoever does not wait for this any more may complete and open it.
        let Some(_fill) = self.node.intents.begin_unserved(name) else { return Err(is_busy(name)) };
        lun_disks::stop_serving(&self.node, volume, Some(name)).await;
        let file = DirVolume::file_of(name).map_err(volume_error)?;
        if from == 0 {
            self.leaves_room(record).await?;
        }
        let of = self.node.volume(volume).await?;
        let files = Files::of(&self.node, of);
        let opened = files.with(move |files| {
            let (path, file) = (files.path(&file), files.open(&file)?);
            Ok((Arc::clone(files), path, file))
        });
        let (files, path, file) = opened.await?;
        // Only now: another node may have deleted the disk in a directory, and somebody have made another one. This file is not that one's.
        let now = self.record(name).await?;
        check_import(&now, number)?;
        check_fill(&now, from)?;
        let (size, name) = (now.size, name.clone());
        let filled = blocking(move || {
            let fill = || {
                let end = match files.fill(&file, &path, from..size, FILL) {
                    Err(VolumeError::NoSpace(_)) => None,
                    end => Some(end?),
                };
                Ok((end, files.allocated(&name)?, files.space()?.available))
            };
            fill().map_err(|error| files.judge(error))
        });
        let (end, allocated, available) = filled.await?;
        let needed = size.saturating_sub(allocated);
        end.map(|end| Filled { end }).ok_or_else(|| does_not_fit((&record.name, volume), needed, available))
    }

    /// Other disks of the volume shall not have to wait for space because of this one.
    async fn leaves_room(&self, record: &DiskRecord) -> Answer<()> {
        let (files, name) =
            (Files::of(&self.node, self.node.volume(&record.volume).await?), record.name.clone());
        let look = files.with(move |files| Ok((files.space()?, files.allocated(&name)?)));
        let (space, allocated) = self.bounded(look).await?;
        let left_free = LEFT_FREE.1.max(space.size / LEFT_FREE.0);
        let needed = record.size.saturating_sub(allocated) + left_free;
        match needed <= space.available {
            true => Ok(()),
            false => Err(does_not_fit((&record.name, &record.volume), needed, space.available)),
        }
    }

    async fn check_space(&self, disk: &CreateDisk, needed: u64) -> Answer<()> {
        let files = Files::of(&self.node, self.node.volume(&disk.volume).await?);
        let space = self.bounded(files.with(|files| files.space())).await?;
        if needed <= space.available {
            return Ok(());
        }
        Err(does_not_fit((&disk.name, &disk.volume), needed, space.available))
    }
}

fn does_not_fit((disk, volume): (&str, &str), needed: u64, available: u64) -> ApiError {
    let message = format!(
        "disk {disk} does not fit: {} are needed ({needed} bytes), and {} are free on volume {volume} ({available} bytes)",
        about(needed),
        about(available),
    );
    let hint =
        format!("`weir volume du {volume}` shows what takes space; delete some of it, or use another volume");
    ApiError::new(ApiErrorKind::Refused, message).hint(hint)
}

/// Refuses to write zeroes to a disk that is open, or elsewhere than in whole blocks of it.
fn check_fill(record: &DiskRecord, from: u64) -> Answer<()> {
    let DiskRecord { name, size, owner, .. } = record;
    if let Some(owner) = owner {
        let message = format!("disk {name} is open on node {}, so it is not filled with zeroes", owner.node);
        return Err(ApiError::new(ApiErrorKind::Refused, message).hint("begin the import anew"));
    }
    if from > *size || !from.is_multiple_of(4096) {
        let message =
            format!("{from} is not the first byte of a block of disk {name}, which has {size} bytes");
        return Err(ApiError::new(ApiErrorKind::Invalid, message).hint("blocks have 4096 bytes"));
    }
    Ok(())
}

/// Refuses what an import wants of a disk that is another's, or complete.
pub(super) fn check_import(record: &DiskRecord, number: u64) -> Answer<()> {
    // 0 is nobody's, also where the request says so.
    if number != 0 && record.importing == number {
        return Ok(());
    }
    let name = &record.name;
    let (message, hint) = match record.importing {
        0 => (
            format!("disk {name} is complete, or another one than this import has filled"),
            format!("`weir disk show {name}` tells what it is"),
        ),
        _ => (format!("another import fills disk {name}"), "import it again, under another name".to_owned()),
    };
    Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
}

/// Refuses the use of a disk whose import is not complete.
pub(super) fn check_imported(record: &DiskRecord) -> Answer<()> {
    match record.importing {
        0 => Ok(()),
        _ => {
            let (why, hint) = not_imported(&record.name);
            Err(ApiError::new(ApiErrorKind::Refused, why).hint(hint))
        }
    }
}

/// Why nobody may use a disk whose import is not complete, and what to do.
pub(crate) fn not_imported(disk: &str) -> (String, String) {
    let why = format!(
        "disk {disk} is incomplete: it is being filled (an import, a copy, or `--thick`), or that was cut off"
    );
    (why, format!("if nothing fills it, `weir disk delete {disk}`, and make it again"))
}

#[cfg(test)]
mod tests {
    use weir_cluster::records::{NodeRef, Policy, Source};

    use super::*;

    fn record(importing: u64) -> DiskRecord {
        let source = Source::File { name: "d".into() };
        let record = DiskRecord::new("d", "v", source, 1 << 20, 4096, Policy::WriteThrough);
        DiskRecord { importing, ..record }
    }

    /// A disk that is complete would else be filled with zeroes.
    #[test]
    fn only_the_import_of_a_disk_has_a_say() {
        assert!(check_import(&record(7), 7).is_ok());
        for (importing, number) in [(7, 8), (7, 0), (0, 7), (0, 0)] {
            assert!(check_import(&record(importing), number).is_err(), "{importing} {number}");
        }
    }

    #[test]
    fn an_open_disk_is_not_filled_nor_a_part_of_a_block() {
        let closed = record(7);
        for from in [0, 4096, 1 << 20] {
            assert!(check_fill(&closed, from).is_ok(), "{from}");
        }
        for from in [1, 512, (1 << 20) + 4096] {
            assert_eq!(check_fill(&closed, from).unwrap_err().kind, ApiErrorKind::Invalid, "{from}");
        }
        let open = DiskRecord { owner: Some(NodeRef::new("n1", 1)), ..closed };
        assert_eq!(check_fill(&open, 0).unwrap_err().kind, ApiErrorKind::Refused);
    }
}
