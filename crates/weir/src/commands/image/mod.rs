//! `weir image`: disks from image files and image files from disks, through qemu-img and the disks' NBD exports.

mod leftover;
mod pieces;
mod program;
mod source;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::Serialize;
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{
    ApiErrorKind, BeginImport, CloneDisk, CreateDisk, Delete, DiskLimit, DiskView, Export, Importing, Medium,
};
use weir_node::client::Client;
use weir_node::units::about;

use self::program::Programs;
use self::source::{Image, text};
use super::disk;
use super::incomplete::give_up;
use crate::cli::{CloneSource, Format, ImageCommand};
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::print;

/// Disks have whole units of this many bytes.
const UNIT: u64 = 4096;

/// Longest time until a disk knows that a program has disconnected, and the pause between two looks.
const PARTED: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Longest wait for an owner that does not answer: what was read would be thrown away.
const ANSWERED: Duration = Duration::from_secs(30);

/// Executes a `weir image` command.
pub fn run(global: &Global, command: ImageCommand) -> Result<(), Failure> {
    match command {
        ImageCommand::Import { file, name, volume, format, policy, medium, block, limit } => {
            let source = source::examine(&file, format)?;
            let limit = limit.limit().map_err(Failure::usage)?;
            let size = source.size.checked_next_multiple_of(UNIT).unwrap_or(source.size);
            let wanted = CreateDisk { name, volume, size, logical_block: block, policy, medium, limit };
            let mut programs = Programs::new(global.output)?;
            let image = Image::of_file(&source.path, source.format)?;
            if source.format == Format::Qcow2 {
                programs.check(&image, text(&source.path)?)?;
            }
            let disk = made(&any_node(global)?, &mut programs, &wanted, &image, &|| Ok(()))?;
            print(global.output, &disk, disk::show)
        }
        ImageCommand::Export { source, file, format } => {
            let mut programs = Programs::new(global.output)?;
            let written = export(&any_node(global)?, &mut programs, &source, &file, format)?;
            print(global.output, &written, |written| {
                format!(
                    "wrote {} to {}, {}, {} of {}",
                    written.source,
                    written.file.display(),
                    written.format,
                    about(written.allocated),
                    about(written.size)
                )
            })
        }
    }
}

/// Makes a disk with a content, which counts if `is_still` says so when all of it is read.
fn made(
    client: &Client,
    programs: &mut Programs,
    wanted: &CreateDisk,
    from: &Image,
    is_still: &dyn Fn() -> Result<(), Failure>,
) -> Result<DiskView, Failure> {
    let needed_bytes = programs.allocated(from)?;
    let import = client.begin_import(&BeginImport::new(wanted.clone(), needed_bytes))?;
    fill(client, programs, &import, from, is_still)
        .map_err(|failure| give_up(client, (&wanted.name, import.number), failure))
}

fn fill(
    client: &Client,
    programs: &mut Programs,
    import: &Importing,
    from: &Image,
    is_still: &dyn Fn() -> Result<(), Failure>,
) -> Result<DiskView, Failure> {
    let view = client.open_import(import)?;
    let address: Uri = reachable(&view)?.parse().map_err(Failure::failed)?;
    let address = Uri { export: import.export(), ..address };
    let uri = &address.to_string();
    // The disk is new: what is zero in the image need not be written. And flushes count, which by default they do not.
    let how = ["-n", "--target-is-zero", "-t", "writeback", "-O", "raw"];
    programs.convert(&[&how[..], &from.arguments(), &[uri]].concat())?;
    let mut check = NbdClient::connect(&address).map_err(Failure::failed)?;
    check.flush().map_err(Failure::failed)?;
    check.disconnect();
    is_still()?;
    Ok(client.end_import(import)?)
}

fn remove(client: &Client, disk: &str) -> Result<(), Failure> {
    client.delete(disk, &Delete { force: true, ..Delete::default() })?;
    Ok(())
}

/// An image that was written.
#[derive(Serialize)]
#[serde(tag = "schema", rename = "weir.image/1")]
struct Written {
    /// `DISK` or `DISK@SNAPSHOT`.
    source: String,
    file: PathBuf,
    format: &'static str,
    /// Bytes of the disk.
    #[serde(rename = "size_bytes")]
    size: u64,
    /// Bytes that the file takes.
    #[serde(rename = "allocated_bytes")]
    allocated: u64,
}

fn export(
    client: &Client,
    programs: &mut Programs,
    source: &CloneSource,
    file: &Path,
    format: Option<Format>,
) -> Result<Written, Failure> {
    let file = std::path::absolute(file)?;
    if file.symlink_metadata().is_ok() {
        return Err(taken(&file));
    }
    let is_qcow2 = file.extension().is_some_and(|extension| extension == "qcow2");
    let format = format.unwrap_or(if is_qcow2 { Format::Qcow2 } else { Format::Raw });
    let (size, allocated) =
        with_still(client, source, |view, is_still| write(programs, view, (&file, format), is_still))?;
    let named = |snapshot: &String| format!("{}@{snapshot}", source.disk);
    let source = source.snapshot.as_ref().map_or_else(|| source.disk.clone(), named);
    Ok(Written { source, file, format: format.name(), size, allocated })
}

/// Makes a disk in the same volume that has the content of another one, or of its snapshot, and shares no blocks with it.
///
/// # Errors
/// As of `weir disk clone --copy`.
pub fn copy(
    global: &Global,
    source: &CloneSource,
    (name, policy, medium, limit): (String, String, Medium, Option<DiskLimit>),
) -> Result<(), Failure> {
    let (client, mut programs) = (any_node(global)?, Programs::new(global.output)?);
    let DiskView { volume, logical_block, .. } = client.disk(&source.disk)?;
    let copy = with_still(&client, source, |from, is_still| {
        let size = from.size;
        let wanted = CreateDisk { name, volume, size, logical_block, policy, medium, limit };
        made(&client, &mut programs, &wanted, &Image::raw(reachable(from)?), is_still)
    })?;
    print(global.output, &copy, disk::show)
}

/// Does `work` with what has the content of a disk or a snapshot, and is open. It does not change, or the check that `work` gets fails
/// once everything is read.
fn with_still<T>(
    client: &Client,
    source: &CloneSource,
    work: impl FnOnce(&DiskView, &dyn Fn() -> Result<(), Failure>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (disk, clone) = stands_still(client, source)?;
    let opened = client.export(&disk, &Export::default()).map_err(Failure::from);
    let done = opened.and_then(|view| {
        let is_still = || if clone.is_some() { Ok(()) } else { check_still(client, &view) };
        work(&view, &is_still)
    });
    if let Some(name) = clone
        && let Err(left) = remove(client, &name)
    {
        let hint = format!("`weir disk delete {name} --force` removes it");
        let failure = left.said(format!("disk {name}, a temporary clone of {}, is left", source.disk));
        return Err(done.err().unwrap_or(failure).hint(hint));
    }
    done
}

/// Fails if a disk that is read itself has clients after that, or another owner: a guest that was started meanwhile may have written. The
/// connection of a program that has ended counts for a moment still. A client that has come and gone is not seen.
fn check_still(client: &Client, before: &DiskView) -> Result<(), Failure> {
    let began = Nanos::now();
    loop {
        let asked = client.disk(&before.name);
        let is_late = |limit: Duration| Nanos::now() - began >= limit;
        match &asked {
            Ok(now) if now.owner != before.owner => return Err(was_used(before)),
            Ok(now) if now.detail.as_ref().is_some_and(|detail| detail.clients == 0) => {
                return Ok(());
            }
            Ok(now) if now.detail.is_some() && is_late(PARTED) => return Err(was_used(before)),
            Ok(_) if is_late(ANSWERED) => {
                let message = format!("whether disk {} was used while it was read is not known", before.name);
                return Err(Failure::refused(message).hint("its owner does not answer: try again"));
            }
            Err(_) if is_late(ANSWERED) => return asked.map(drop).map_err(Failure::from),
            Ok(_) | Err(_) => thread::sleep(LOOK_AGAIN),
        }
    }
}

fn was_used(disk: &DiskView) -> Failure {
    let message =
        format!("disk {} has been used while it was read: what was read is of no one time", disk.name);
    Failure::refused(message).hint("shut its guest down, and try again")
}

/// The disk to read: a clone, also by its name if it is to be removed afterwards, or the disk itself if it cannot be cloned and nobody
/// uses it.
fn stands_still(client: &Client, source: &CloneSource) -> Result<(String, Option<String>), Failure> {
    leftover::remove(client)?;
    let name = leftover::name();
    let wanted = CloneDisk {
        name: name.clone(),
        snapshot: source.snapshot.clone(),
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    let refused = match client.clone_disk(&source.disk, &wanted) {
        Ok(_) => return Ok((name.clone(), Some(name))),
        // Another node may be able to make a clone.
        Err(error)
            if error.kind == ApiErrorKind::Refused
                && error.elsewhere.is_none()
                && source.snapshot.is_none() =>
        {
            error
        }
        Err(error) => return Err(error.into()),
    };
    let view = client.disk(&source.disk)?;
    // An owner that does not answer may have clients.
    let disk = &source.disk;
    let (state, hint) = match (&view.owner, &view.detail) {
        (None, _) => return Ok((disk.clone(), None)),
        (Some(_), Some(detail)) if detail.clients == 0 => return Ok((disk.clone(), None)),
        (Some(_), Some(_)) => ("in use".to_owned(), "shut its guest down, and try again".to_owned()),
        (Some(_), None) => {
            (view.state.clone(), format!("`weir disk show {disk}` tells why; try again when it is open"))
        }
    };
    let message = format!("disk {disk} is {state}, and cannot be cloned: {}", refused.message);
    Err(Failure::refused(message).hint(hint))
}

/// Returns the disk's bytes, and those that the file takes.
fn write(
    programs: &mut Programs,
    view: &DiskView,
    (file, format): (&Path, Format),
    is_still: &dyn Fn() -> Result<(), Failure>,
) -> Result<(u64, u64), Failure> {
    // In a directory that nobody else can enter: a guest's data is its owner's, and nobody plants a link there.
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = tempfile::Builder::new().prefix(".weir-export-").tempdir_in(parent);
    let directory = directory.map_err(|error| Failure::unreadable(parent, &error))?;
    let part = directory.path().join("image");
    let mut written = || -> Result<u64, Failure> {
        let how = ["-f", "raw", "-t", "writeback", "-O", format.name()];
        programs.convert(&[&how[..], &[reachable(view)?, text(&part)?]].concat())?;
        is_still()?;
        let unwritten = |error: io::Error| Failure::unreadable(file, &error);
        let opened = File::open(&part).map_err(unwritten)?;
        opened.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600)).map_err(unwritten)?;
        opened.sync_all().map_err(unwritten)?;
        let allocated = std::os::unix::fs::MetadataExt::blocks(&opened.metadata().map_err(unwritten)?) * 512;
        match renameat_with(CWD, &part, CWD, file, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(allocated),
            Err(rustix::io::Errno::EXIST) => Err(taken(file)),
            Err(error) => Err(unwritten(error.into())),
        }
    };
    Ok((view.size, written()?))
}

fn taken(file: &Path) -> Failure {
    Failure::refused(format!("{} exists already", file.display()))
        .hint("name another file, or remove it first")
}

/// The URI of an open disk that qemu-img on this host can use.
fn reachable(view: &DiskView) -> Result<&str, Failure> {
    let is_there = |uri: &&String| match uri.parse::<Uri>() {
        Ok(Uri { address: weir_nbd::Address::Unix(socket), .. }) => socket.exists(),
        Ok(_) => true,
        Err(_) => false,
    };
    let found = view.uris.iter().find(is_there);
    found.map(String::as_str).ok_or_else(|| {
        let message = format!(
            "disk {} is open at {}, which qemu-img here does not reach",
            view.name,
            view.uris.join(", ")
        );
        let owner = view.owner.as_deref().unwrap_or("the disk's owner");
        Failure::refused(message).hint(format!("repeat the command on the host of node {owner}"))
    })
}
