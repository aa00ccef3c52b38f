//! A real filesystem, made of this machine's own files, and a check of its integrity afterwards.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::Failure;

/// Sources of files, in order of preference.
const SOURCES: [&str; 5] = ["/usr/share/doc", "/usr/share/man", "/usr/share/zoneinfo", "/usr/share", "/etc"];

/// Minimum and maximum total size of the files, in bytes.
const FEWEST: u64 = 4 << 20;
const MOST: u64 = 600 << 20;

/// An ext4 image and its originals.
pub struct Image {
    source: PathBuf,
    bytes: u64,
    /// The image as created.
    original: PathBuf,
    /// The image as read back.
    back: PathBuf,
    /// The files of `back`.
    files: PathBuf,
}

impl Image {
    /// Makes the image; the files are copied first, so that nothing changes under the comparison.
    pub fn make(dir: &Path) -> Result<Image, Failure> {
        let sources = SOURCES.iter().map(Path::new).map(|source| (source, bytes_under(source)));
        let Some((from, bytes)) = sources.into_iter().find(|(_, bytes)| (FEWEST..MOST).contains(bytes))
        else {
            return Err(Failure::failed(format!("none of {} has 4 to 600 MiB of files", SOURCES.join(", "))));
        };
        let source = dir.join("originals");
        let _ = fs::remove_dir_all(&source);
        tool(Command::new("cp").args(["-a", "--no-preserve=links"]).arg(from).arg(&source))?;
        let original = dir.join("filesystem.img");
        let _ = fs::remove_file(&original);
        tool(
            Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&source).arg(&original).arg("900M"),
        )?;
        let image =
            Image { source, bytes, original, back: dir.join("read-back.img"), files: dir.join("files") };
        Ok(image)
    }

    pub fn describe(&self) -> String {
        format!("{} of files, 900 MiB of ext4", weir_node::units::about(self.bytes))
    }

    /// Copies the image onto a disk and flushes it.
    pub fn copy_in(&self, uri: &str) -> Result<(), Failure> {
        tool(Command::new("nbdcopy").args(["--flush", "--connections=1"]).arg(&self.original).arg(uri))
    }

    /// Copies it back, and checks it with e2fsck.
    pub fn read_back(&self, uri: &str) -> Result<(), Failure> {
        let _ = fs::remove_file(&self.back);
        tool(Command::new("nbdcopy").args(["--connections=1"]).arg(uri).arg(&self.back))?;
        tool(Command::new("e2fsck").args(["-f", "-n"]).arg(&self.back))
    }

    /// Extracts the files from the image read back and compares each with its original. Returns their number.
    pub fn compare(&self) -> Result<u64, Failure> {
        let _ = fs::remove_dir_all(&self.files);
        fs::create_dir(&self.files)?;
        // debugfs takes a command line of its own: quotes, no escapes.
        let dump = format!("rdump / \"{}\"", self.files.display());
        tool(Command::new("debugfs").arg("-R").arg(dump).arg(&self.back))?;
        let lost_and_found = self.files.join("lost+found");
        fs::remove_dir(&lost_and_found).map_err(|error| {
            Failure::failed(format!("{} is not empty: {error}", lost_and_found.display()))
        })?;
        same(&self.source, &self.files)
    }

    /// Removes the files that only the comparison needs.
    pub fn remove(&self) {
        for file in [&self.original, &self.back] {
            let _ = fs::remove_file(file);
        }
        for directory in [&self.source, &self.files] {
            let _ = fs::remove_dir_all(directory);
        }
    }
}

/// Runs a tool; prints its output only if it fails.
fn tool(command: &mut Command) -> Result<(), Failure> {
    // e2fsprogs are not in every user's PATH.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.env("PATH", path).output().map_err(|error| {
        Failure::failed(format!(
            "{name} does not start ({error}); `make setup` installs what the demonstration needs"
        ))
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(Failure::failed(format!("{name} failed ({}):\n{}", output.status, String::from_utf8_lossy(&said))))
}

fn bytes_under(path: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => 0,
    };
    entries.flatten().map(bytes).sum()
}

/// Checks that two trees are equal; returns the number of their entries.
fn same(left: &Path, right: &Path) -> Result<u64, Failure> {
    let differs = |what: &str| {
        Err(Failure::failed(format!("{}: {what} is not as in {}", right.display(), left.display())))
    };
    let (a, b) = (fs::symlink_metadata(left)?, fs::symlink_metadata(right)?);
    if a.file_type() != b.file_type() {
        return differs("the kind of file");
    }
    if a.is_symlink() {
        return if fs::read_link(left)? == fs::read_link(right)? { Ok(1) } else { differs("the link") };
    }
    if a.is_file() {
        return if a.len() == b.len() && same_bytes(left, right)? { Ok(1) } else { differs("the content") };
    }
    if a.file_type().is_fifo() || a.file_type().is_socket() || !a.is_dir() {
        return Ok(1);
    }
    let names = |path: &Path| {
        let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name()));
        names.collect::<std::io::Result<std::collections::BTreeSet<_>>>()
    };
    let (names, other) = (names(left)?, names(right)?);
    if names != other {
        return differs("the list of files");
    }
    names.iter().try_fold(1, |sum, name| Ok(sum + same(&left.join(name), &right.join(name))?))
}

fn same_bytes(left: &Path, right: &Path) -> Result<bool, Failure> {
    let (mut left, mut right) = (File::open(left)?, File::open(right)?);
    let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let n = left.read(&mut a)?;
        right.read_exact(&mut b[..n])?;
        if a[..n] != b[..n] {
            return Ok(false);
        }
        if n == 0 {
            return Ok(true);
        }
    }
}
