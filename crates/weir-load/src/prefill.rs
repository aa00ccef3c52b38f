//! Writes ranges that were never written, so that a load does not measure holes: a filesystem reads holes and unwritten
//! extents as zeroes without the device, and the first write to one has to allocate.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use weir_block::Nanos;

use weir_block::size::{Size, format_size};
use weir_block::zeroes::is_zero;
use weir_nbd::client::NbdClient;

use crate::error::LoadError;
use crate::run::{Monitor, run};
use crate::summary::Filled;
use crate::target::Target;
use crate::workload::{Access, SECTOR, Span, Workload};

/// Largest request of the pass.
const BLOCK: u64 = 1 << 20;

/// Requests in flight.
const DEPTH: u32 = 8;

/// Number of sampled pieces of a device or export, and bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 4096;

/// The step required before a load so that it does not measure holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// None: the whole range is written.
    Full,
    /// The range must be written once.
    Needed(Fill),
    /// There are holes, and the load may not write: a description of the holes.
    Hollow(String),
}

/// A range of a target to write once, since parts of it were never written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fill {
    range: Span,
    /// The evidence of unwritten parts, as text.
    pub found: String,
}

/// Limits of a [`Fill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes.
    pub bytes: u64,
    /// Time.
    pub time: Duration,
}

/// Checks whether the range of `workload` has parts that were never written, and whether the load may write (it is a writing one,
/// or `destroy` is set).
///
/// The filesystem reports a file's holes. Devices and exports cannot; of those it reads some pieces, and a piece of zeroes counts
/// as never written.
///
/// # Errors
/// The target cannot be read, or as [`Target::prepare`].
pub fn look(target: &Target, workload: &Workload, destroy: bool) -> Result<Prefill, LoadError> {
    let size = target.prepare(workload, destroy)?;
    let start = workload.offset.0;
    let length = workload.size.map_or(size.saturating_sub(start), |size| size.0);
    // The load validates the range; here it is only clamped to the target.
    let length = length.min(size.saturating_sub(start)) / u64::from(SECTOR) * u64::from(SECTOR);
    let range = Span { offset: start.min(size), length };
    Ok(match hollow(target, range)? {
        None => Prefill::Full,
        Some(found) if workload.access.writes() || destroy => Prefill::Needed(Fill { range, found }),
        Some(found) => Prefill::Hollow(found),
    })
}

impl Fill {
    /// Bytes of the range.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.length
    }

    /// Checks that the range may be written.
    ///
    /// # Errors
    /// It is larger than the limit.
    pub fn check(&self, target: &Target, limits: Limits) -> Result<(), LoadError> {
        if self.bytes() <= limits.bytes {
            return Ok(());
        }
        let (bytes, most) = (format_size(self.bytes()), format_size(limits.bytes));
        let what = format!("{bytes} would be filled before the load, and {most} are allowed");
        Err(LoadError::PrefillLimit { target: target.to_string(), what })
    }

    /// Writes the range once with data of the `seed`. Stopping `monitor` ends it early, with the bytes written until then.
    ///
    /// # Errors
    /// The range is larger than the limit, or was not written within its time; as [`run`]; or a request failed.
    pub fn run(
        &self,
        target: &Target,
        seed: u64,
        destroy: bool,
        limits: Limits,
        monitor: &Monitor,
    ) -> Result<Filled, LoadError> {
        self.check(target, limits)?;
        let pass = Workload {
            access: Access::Write,
            block_size: Size(block(self.range)),
            queue_depth: DEPTH,
            runtime: Some(limits.time),
            bytes: Some(Size(self.range.length)),
            offset: Size(self.range.offset),
            size: Some(Size(self.range.length)),
            seed,
            ..Workload::default()
        };
        let start = Nanos::now();
        let summary = run(target, &pass, destroy, monitor)?;
        if let Some(error) = summary.first_error {
            return Err(LoadError::Prefill { target: target.to_string(), error });
        }
        let written: u64 = summary.kinds.iter().map(|kind| kind.bytes).sum();
        if written < self.bytes() && !monitor.is_stopped() {
            let (written, bytes) = (format_size(written), format_size(self.bytes()));
            let time = limits.time;
            let what = format!(
                "only {written} of {bytes} were filled before the load in {time:?}, the time allowed"
            );
            return Err(LoadError::PrefillLimit { target: target.to_string(), what });
        }
        if let Target::Path(path) = target {
            let synced = File::open(path).and_then(|file| file.sync_all());
            synced.map_err(|source| LoadError::File { path: path.clone(), what: "cannot sync", source })?;
        }
        Ok(Filled { bytes: written, seconds: (Nanos::now() - start).as_secs_f64() })
    }
}

/// The largest request size that divides the range, so that the pass omits nothing.
fn block(range: Span) -> u64 {
    let common = (range.offset | range.length | BLOCK).trailing_zeros();
    1 << common
}

fn hollow(target: &Target, range: Span) -> Result<Option<String>, LoadError> {
    if range.length == 0 {
        return Ok(None);
    }
    match target {
        Target::Null { .. } => Ok(None),
        Target::Path(path) => {
            let failed = |source| LoadError::File { path: path.clone(), what: "cannot examine", source };
            let file = File::open(path).map_err(failed)?;
            if file.metadata().map_err(failed)?.is_file() {
                return hole(&file, range).map_err(failed);
            }
            zeroes(range, |offset, piece| file.read_exact_at(piece, offset)).map_err(failed)
        }
        Target::Nbd(uri) => {
            let mut client = NbdClient::connect(uri)?;
            let found = zeroes(range, |offset, piece| client.read(offset, piece))?;
            client.disconnect();
            Ok(found)
        }
    }
}

/// The first hole of a file within the range; extents that are reserved and unwritten count as such.
fn hole(file: &File, range: Span) -> io::Result<Option<String>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(range.offset)) {
        Ok(at) if at < range.offset + range.length => Ok(Some(format!(
            "the file has a hole at byte {at}, in the range of {}",
            format_size(range.length)
        ))),
        Ok(_) => Ok(None),
        Err(rustix::io::Errno::NXIO | rustix::io::Errno::INVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The first of the samples, spread over the range, that is all zeroes.
fn zeroes<E>(
    range: Span,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<Option<String>, E> {
    let mut piece = vec![0; SAMPLE.min(range.length) as usize];
    let pieces = range.length / piece.len() as u64;
    let samples = SAMPLES.min(pieces);
    for sample in 0..samples {
        let index = (u128::from(pieces) * u128::from(sample) / u128::from(samples)) as u64;
        let at = range.offset + index * piece.len() as u64;
        read(at, &mut piece)?;
        if is_zero(&piece) {
            return Ok(Some(format!("all zeroes at byte {at}, as if it was never written")));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn writes(size: u64) -> Workload {
        Workload { access: Access::RandWrite, size: Some(Size(size)), ..Workload::default() }
    }

    #[test]
    fn holes_are_filled_once_and_only_when_that_is_allowed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let target = Target::Path(path.clone());
        let monitor = Monitor::new();
        let size = (3 << 20) + 4096;
        File::create(&path).unwrap().set_len(size).unwrap();
        let reading = look(&target, &Workload::default(), false).unwrap();
        assert!(
            matches!(&reading, Prefill::Hollow(found) if found.contains("hole at byte 0")),
            "{reading:?}"
        );
        let limits = Limits { bytes: size, time: Duration::from_secs(60) };
        let Prefill::Needed(fill) = look(&target, &writes(size), false).unwrap() else { panic!() };
        assert!(fill.bytes() == size && fill.found.contains("hole at byte 0"), "{fill:?}");
        let small = Limits { bytes: size - 1, ..limits };
        let refused = fill.run(&target, 1, false, small, &monitor).unwrap_err().to_string();
        assert!(refused.contains("would be filled") && refused.contains("--prefill-size"), "{refused}");
        let short = Limits { time: Duration::from_nanos(1), ..limits };
        let late = fill.run(&target, 1, true, short, &monitor).unwrap_err().to_string();
        assert!(late.contains("the time allowed") && late.contains("--prefill-time"), "{late}");
        let filled = fill.run(&target, 1, true, limits, &monitor).unwrap();
        assert!(filled.bytes == size && filled.seconds > 0.0, "{filled:?}");
        let data = std::fs::read(&path).unwrap();
        assert!(data.chunks(512).all(|sector| sector.iter().any(|&byte| byte != 0)), "to the last sector");
        assert_eq!(look(&target, &writes(size), true).unwrap(), Prefill::Full);
        assert_eq!(look(&target, &Workload::default(), false).unwrap(), Prefill::Full);
        // A hole outside the range is irrelevant.
        File::options().write(true).open(&path).unwrap().set_len(8 << 20).unwrap();
        assert_eq!(look(&target, &writes(size), true).unwrap(), Prefill::Full);
    }

    #[test]
    fn samples_find_what_is_zero() {
        let range = Span { offset: 4096, length: 1 << 20 };
        let read = |zero_from: u64| {
            move |at: u64, piece: &mut [u8]| {
                assert!(at >= range.offset && at + piece.len() as u64 <= range.offset + range.length);
                piece.fill(u8::from(at < zero_from));
                Ok::<_, io::Error>(())
            }
        };
        assert_eq!(zeroes(range, read(u64::MAX)).unwrap(), None);
        assert!(zeroes(range, read(1 << 19)).unwrap().unwrap().contains("all zeroes at byte 528384"));
    }

    proptest! {
        #[test]
        fn the_pass_leaves_nothing_out(offset in 0u64..10_000, length in 1u64..1_000_000) {
            let range = Span { offset: offset * 512, length: length * 512 };
            let block = block(range);
            prop_assert!((512..=BLOCK).contains(&block));
            prop_assert!(range.offset.is_multiple_of(block) && range.length.is_multiple_of(block));
        }
    }
}
