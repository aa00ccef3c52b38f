//! Checks that layers lead to the same storage: a block written at the lowest one must be readable at each other.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use weir_load::target::Target;
use weir_nbd::client::NbdClient;

/// Size of the marker, in bytes: a block of any device, and the alignment for direct I/O.
pub const MARKER: usize = 4096;

/// A unique block: it identifies itself and its measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker(Vec<u8>);

/// Aligned for direct I/O.
#[repr(C, align(4096))]
struct Aligned([u8; MARKER]);

impl Marker {
    /// The marker of the measurement that began at that time, in this process.
    #[must_use]
    pub fn new(started_unix: u64) -> Marker {
        let line = format!("weir diagnose marker, process {}, second {started_unix}\n", std::process::id());
        Marker(line.bytes().cycle().take(MARKER).collect())
    }

    /// Writes it at `offset` (a multiple of [`MARKER`]), durably.
    pub fn write(&self, target: &Target, offset: u64) -> io::Result<()> {
        match target {
            Target::Null { .. } => Ok(()),
            Target::Path(path) => {
                let mut block = Box::new(Aligned([0; MARKER]));
                block.0.copy_from_slice(&self.0);
                let file = open(path, true)?;
                file.write_all_at(&block.0, offset)?;
                file.sync_all()
            }
            Target::Nbd(uri) => {
                let mut client = NbdClient::connect(uri).map_err(io::Error::other)?;
                client.write(offset, &self.0, false).map_err(io::Error::other)?;
                if client.export().can_flush() {
                    client.flush().map_err(io::Error::other)?;
                }
                Ok(())
            }
        }
    }

    /// Whether a read at `offset` returns it.
    pub fn is_at(&self, target: &Target, offset: u64) -> io::Result<bool> {
        let mut block = Box::new(Aligned([0; MARKER]));
        match target {
            Target::Null { .. } => return Ok(false),
            Target::Path(path) => open(path, false)?.read_exact_at(&mut block.0, offset)?,
            Target::Nbd(uri) => {
                let mut client = NbdClient::connect(uri).map_err(io::Error::other)?;
                client.read(offset, &mut block.0).map_err(io::Error::other)?;
            }
        }
        Ok(block.0[..] == self.0[..])
    }
}

/// Bypasses the page cache, which may have an older block; a filesystem without direct I/O has no other copy.
fn open(path: &Path, write: bool) -> io::Result<File> {
    let options = |flags: OFlags| {
        let mut options = OpenOptions::new();
        options.read(true).write(write).custom_flags(flags.bits() as i32);
        options
    };
    options(OFlags::DIRECT).open(path).or_else(|_| options(OFlags::empty()).open(path))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_found_where_it_was_written_and_nowhere_else() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (directory.path().join("first"), directory.path().join("second"));
        for path in [&first, &second] {
            File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&first, &link).unwrap();
        let marker = Marker::new(7);
        let at = |path: &Path| Target::Path(path.to_owned());
        marker.write(&at(&first), 8192).unwrap();
        assert!(marker.is_at(&at(&link), 8192).unwrap());
        assert!(!marker.is_at(&at(&first), 4096).unwrap());
        assert!(!marker.is_at(&at(&second), 8192).unwrap());
        assert!(!Marker::new(8).is_at(&at(&first), 8192).unwrap());
        assert!(marker.is_at(&at(&directory.path().join("none")), 0).is_err());
    }
}
