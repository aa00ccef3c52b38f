//! The counters of the device under a target, before and after a load. The device should move as many bytes as the load
//! requests. If it does not, the load measured something else as well: a page cache, a filesystem, another process.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use weir_block::size::format_size;

use crate::target::Target;

/// Unit of the kernel's counters, regardless of the device's sector size (Documentation/block/stat.rst).
const SECTOR: u64 = 512;

/// Differences up to this share, or up to [`SMALL`] bytes, are not reported.
const MARGIN_PERCENT: u64 = 5;
const SMALL: u64 = 1 << 20;

/// Bytes that a device moved during a load's measured time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceBytes {
    /// Its name in `/sys/block`, or of a partition.
    pub device: String,
    /// Bytes read from it, by all users.
    pub read: u64,
    /// Bytes written to it, by all users.
    pub written: u64,
    /// Differences from the bytes that the load requested, as sentences; empty when there are none.
    pub differences: Vec<String>,
}

/// The counters of the device that a target lies on.
#[derive(Clone, Debug)]
pub(crate) struct Counters {
    /// `/sys/dev/block/MAJOR:MINOR`
    path: PathBuf,
    read: u64,
    written: u64,
}

impl Counters {
    /// The counters of a device, or of the one under a file's filesystem; `None` when there is no such device (the null
    /// target, NBD, a filesystem in memory or over the network).
    pub fn of(target: &Target) -> Option<Counters> {
        let Target::Path(path) = target else { return None };
        let metadata = fs::metadata(path).ok()?;
        let is_device = metadata.file_type().is_block_device();
        let number = if is_device { metadata.rdev() } else { metadata.dev() };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        Counters::at(Path::new(&format!("/sys/dev/block/{major}:{minor}")))
    }

    fn at(path: &Path) -> Option<Counters> {
        let (read, written) = parse(&fs::read_to_string(path.join("stat")).ok()?)?;
        Some(Counters { path: path.into(), read, written })
    }

    /// The device's name, and the bytes read and written since.
    pub fn moved(&self) -> Option<(String, u64, u64)> {
        let now = Counters::at(&self.path)?;
        let name = fs::canonicalize(&self.path).ok()?;
        let device = name.file_name()?.to_string_lossy().into_owned();
        Some((device, now.read.wrapping_sub(self.read), now.written.wrapping_sub(self.written)))
    }
}

impl DeviceBytes {
    /// For reads and writes: the bytes that the device moved, and those that the load requested.
    pub(crate) fn new(device: &str, read: (u64, u64), written: (u64, u64)) -> DeviceBytes {
        let differences = [difference("read", read.1, read.0), difference("written", written.1, written.0)];
        DeviceBytes {
            device: device.into(),
            read: read.0,
            written: written.0,
            differences: differences.into_iter().flatten().collect(),
        }
    }
}

/// Bytes read and written, of the third and the seventh figure of a `stat` file.
fn parse(text: &str) -> Option<(u64, u64)> {
    let figures: Vec<u64> = text.split_whitespace().map_while(|figure| figure.parse().ok()).collect();
    Some((figures.get(2)? * SECTOR, figures.get(6)? * SECTOR))
}

fn difference(what: &str, asked: u64, moved: u64) -> Option<String> {
    let off = asked.abs_diff(moved);
    if off <= SMALL || off.saturating_mul(100) <= asked.saturating_mul(MARGIN_PERCENT) {
        return None;
    }
    let why = match moved < asked {
        true if what == "read" => "a cache answered, or holes that are not on the device",
        true => "the writes are still in a cache",
        false => "others use it too, or a filesystem adds to it",
    };
    let round = |bytes: u64| format_size(bytes >> 20 << 20);
    Some(format!("the load has {what} {} and the device {}: {why}", round(asked), round(moved)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let text = " 6029 2112 1167338 2811 1054 2219 26244 1033 0 1760 3844 0 0 0 0 0 0\n";
        assert_eq!(parse(text), Some((1_167_338 * 512, 26_244 * 512)));
        assert_eq!(parse("1 2 x"), None);
        assert!(Counters::of(&Target::Null { size: 1 }).is_none());
        let devices =
            fs::read_dir("/sys/dev/block").map(|entries| entries.flatten().map(|entry| entry.path()));
        for path in devices.into_iter().flatten() {
            let counters = Counters::at(&path).expect("every device has a stat file");
            let (device, ..) = counters.moved().unwrap();
            assert!(!device.is_empty() && !device.contains(':'), "{device}");
        }
    }

    #[test]
    fn only_what_matters_is_said() {
        let mib = |count: u64| count << 20;
        assert_eq!(difference("read", mib(100), mib(104)), None);
        assert_eq!(difference("written", 0, mib(1)), None, "a journal");
        let cached = difference("read", mib(100), mib(3)).unwrap();
        assert!(cached.contains("100MiB") && cached.contains("3MiB") && cached.contains("cache"), "{cached}");
        assert!(difference("written", mib(100), mib(300)).unwrap().contains("others"));
        assert!(difference("read", 0, mib(2)).unwrap().contains("others"));
        let both = DeviceBytes::new("vda", (mib(3), mib(100)), (mib(50), mib(50)));
        assert_eq!((both.differences.len(), both.read, both.written), (1, mib(3), mib(50)));
    }
}
