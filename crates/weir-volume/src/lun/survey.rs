//! Looks for data on a LUN before it is formatted: what `blkid` (util-linux) recognises, and bytes that are not zero.
//!
//! Many formats begin late: btrfs and GFS2 at 64 KiB, VMFS at 1 MiB; some are at the end only (MD RAID 1.0, a GPT's backup); and an
//! application's data has no signature at all. So both ends are read, and samples between them. A LUN of up to [`WHOLE`] bytes is read
//! altogether. What was read is part of the answer: zeroes in samples do not prove that there is nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use weir_block::size::Size;
use weir_block::zeroes::first_nonzero;

use super::children::inherits_nothing;
use super::filesystem::FilesystemError;
use super::filesystem::pages::{PAGE, Pages};

/// Up to this many bytes, all of a LUN is read.
pub const WHOLE: u64 = 1 << 30;
/// Of a larger one: the bytes at each end, and the samples between.
const END: u64 = 64 << 20;
const SAMPLES: u64 = 1024;
const SAMPLE: u64 = 64 << 10;
/// Bytes that are read at once.
const STEP: u64 = 1 << 20;
/// The header of a GPT, in its first sector and in the last one of the device.
const GPT: &[u8] = b"EFI PART";

/// What was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// All bytes.
    Everywhere,
    /// As many bytes at each end, and samples between.
    InSamples {
        /// Bytes at each end.
        end: u64,
        /// Number of samples.
        samples: u64,
        /// Bytes of each.
        sample: u64,
    },
}

/// What there is beside the filesystems that [`super::filesystem::superblock`] knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The names of the formats that are recognised, as `blkid` has them: `LVM2_member`, `btrfs`, `gpt partition table`.
    pub recognised: Vec<String>,
    /// The first byte that is not zero, of those that were read.
    pub data_at: Option<u64>,
    /// What was read for that.
    pub looked: Looked,
}

impl Survey {
    /// Looks at a LUN that is open for direct I/O. Blocks, for seconds.
    ///
    /// # Errors
    /// It cannot be read, or `blkid` cannot be executed.
    pub fn new(lun: &File, path: &Path, size: u64) -> Result<Survey, FilesystemError> {
        let failed = FilesystemError::system("read", path);
        let (data_at, looked) = data(lun, size).map_err(failed)?;
        let mut recognised =
            blkid(path).map_err(FilesystemError::system("run blkid (util-linux) on", path))?;
        let is_gpt = recognised.iter().any(|name| name.contains("partition table"));
        if !is_gpt && ends_with_gpt(lun, size).map_err(FilesystemError::system("read", path))? {
            recognised.push("the backup of a gpt partition table".into());
        }
        Ok(Survey { recognised, data_at, looked })
    }

    /// Whether nothing was found. Where [`Survey::looked`] is not everywhere, something may be there all the same.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        self.recognised.is_empty() && self.data_at.is_none()
    }

    /// In words.
    #[must_use]
    pub fn describe(&self) -> String {
        let looked = match self.looked {
            Looked::Everywhere => "all of it was read".to_owned(),
            Looked::InSamples { end, samples, sample } => format!(
                "read: the first and the last {}, and {samples} samples of {} between",
                Size(end),
                Size(sample)
            ),
        };
        match (self.recognised.is_empty(), self.data_at) {
            (false, _) => self.recognised.join(", "),
            (true, Some(at)) => format!("unrecognised data (not zero at byte {at})"),
            (true, None) => format!("only zeroes ({looked})"),
        }
    }
}

/// The first byte that is not zero, and what was read to find it.
fn data(lun: &File, size: u64) -> io::Result<(Option<u64>, Looked)> {
    let mut pages = Pages::new(STEP as usize);
    if size <= WHOLE {
        return Ok((not_zero(lun, &mut pages, 0, size)?, Looked::Everywhere));
    }
    let looked = Looked::InSamples { end: END, samples: SAMPLES, sample: SAMPLE };
    let stride = (size - 2 * END) / SAMPLES / PAGE as u64 * PAGE as u64;
    let samples = (0..SAMPLES).map(|sample| (END + sample * stride, SAMPLE));
    let last = (size - END) / PAGE as u64 * PAGE as u64;
    for (at, length) in std::iter::once((0, END)).chain(samples).chain([(last, size - last)]) {
        if let Some(found) = not_zero(lun, &mut pages, at, length)? {
            return Ok((Some(found), looked));
        }
    }
    Ok((None, looked))
}

fn not_zero(lun: &File, pages: &mut Pages, from: u64, length: u64) -> io::Result<Option<u64>> {
    let until = from + length;
    let mut at = from;
    while at < until {
        let bytes = &mut pages.bytes_mut()[..(until - at).min(STEP) as usize];
        match lun.read_at(bytes, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                if let Some(found) = first_nonzero(&bytes[..count]) {
                    return Ok(Some(at + found as u64));
                }
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// `blkid` looks for the backup only where the first sector has a protective MBR.
fn ends_with_gpt(lun: &File, size: u64) -> io::Result<bool> {
    let mut pages = Pages::new(PAGE);
    let Some(at) = size.checked_sub(PAGE as u64).map(|at| at / PAGE as u64 * PAGE as u64) else {
        return Ok(false);
    };
    let bytes = &mut pages.bytes_mut()[..(size - at).min(PAGE as u64) as usize];
    let count = lun.read_at(bytes, at)?;
    Ok(bytes[..count].chunks(512).any(|sector| sector.starts_with(GPT)))
}

/// What `blkid` recognises.
fn blkid(path: &Path) -> io::Result<Vec<String>> {
    let mut command = Command::new("blkid");
    let output = inherits_nothing(command.args(["-p", "-o", "export"]).arg(path)).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => Ok(formats(&said)),
        // Nothing is recognised.
        Some(2) => Ok(Vec::new()),
        Some(8) => {
            Ok(vec![format!("signatures of several formats (`wipefs {}` lists them)", path.display())])
        }
        _ => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(io::Error::other(format!("{}: {said}", output.status)))
        }
    }
}

fn formats(export: &str) -> Vec<String> {
    let of = |wanted: &str| {
        let mut fields = export.lines().filter_map(|line| line.split_once('='));
        fields.find(|(name, _)| *name == wanted).map(|(_, value)| value.replace("\\ ", " "))
    };
    let mut formats = Vec::new();
    if let Some(name) = of("TYPE") {
        formats.push(match of("LABEL") {
            Some(label) => format!("{name} {label:?}"),
            None => name,
        });
    }
    formats.extend(of("PTTYPE").map(|name| format!("a {name} partition table")));
    formats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_named_with_their_labels() {
        assert_eq!(formats("DEVNAME=/dev/a\nUUID=1\nTYPE=LVM2_member\nUSAGE=raid\n"), ["LVM2_member"]);
        assert_eq!(formats("LABEL=my\\ data\nTYPE=btrfs\n"), ["btrfs \"my data\""]);
        assert_eq!(formats("PTUUID=1\nPTTYPE=gpt\n"), ["a gpt partition table"]);
        assert!(formats("DEVNAME=/dev/a\n").is_empty());
    }
}
