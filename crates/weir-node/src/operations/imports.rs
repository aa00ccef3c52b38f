//! Disks that an import fills. Until it says that it has written everything, the disk is nobody else's: an import that is cut off, with its client
//! or with the disk's owner, would else leave a disk that looks whole.

use weir_cluster::records::DiskRecord;

use super::{Answer, Operations};
use crate::api::{ApiError, ApiErrorKind, BeginImport, CreateDisk, DiskView, Export, Importing, OfImport};
use crate::control::disk::Request;
use crate::control::node::{blocking, random};
use crate::control::provisioning::{Files, Origin};
use crate::units::about;

impl Operations {
    /// Makes a disk that an import is about to fill.
    ///
    /// # Errors
    /// As [`Operations::create_disk`]; the volume has no space for it.
    pub async fn begin_import(&self, wanted: BeginImport) -> Answer<Importing> {
        self.check_new_disk(&wanted.disk).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&wanted.disk.volume).await? {
            return self.forward(&coordinator, &wanted.disk.name, "import", &wanted).await;
        }
        self.check_coordinated(&wanted.disk.volume).await?;
        let BeginImport { disk, needed_bytes } = wanted;
        self.check_space(&disk, needed_bytes).await?;
        let number = random().max(1);
        Ok(Importing { number, disk: self.make_disk(disk, Origin::Image { number }).await? })
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

    async fn check_space(&self, disk: &CreateDisk, needed: u64) -> Answer<()> {
        let volume = &disk.volume;
        let files = Files::of(&self.node, self.node.volume(volume).await?);
        let space = self.bounded(blocking(move || files.open()?.space())).await?;
        if needed <= space.available {
            return Ok(());
        }
        let message = format!(
            "disk {} does not fit: {} are needed ({needed} bytes), and {} are free on volume {volume} ({} bytes)",
            disk.name,
            about(needed),
            about(space.available),
            space.available
        );
        let hint = format!(
            "`weir volume du {volume}` shows what takes space; delete some of it, or use another volume"
        );
        Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
    }
}

/// Refuses what an import wants of a disk that is another's, or complete.
pub(super) fn check_import(record: &DiskRecord, number: u64) -> Answer<()> {
    if record.importing == number {
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
    let why = format!("disk {disk} is incomplete: its import is under way, or was cut off");
    (why, format!("if no import is under way, `weir disk delete {disk}`, and import it again"))
}
