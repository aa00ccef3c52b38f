//! Fills what was never written, so that holes and unwritten extents are not measured as speed: a filesystem answers them
//! with zeroes and asks no device, and a first write has to allocate where later ones do not.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use weir_block::size::{Size, format_size};
use weir_nbd::client::NbdClient;

use crate::error::LoadError;
use crate::run::{Monitor, run};
use crate::target::Target;
use crate::workload::{Access, SECTOR, Span, Workload};

/// Largest request of the pass.
const BLOCK: u64 = 1 << 20;

/// Requests in flight.
const DEPTH: u32 = 8;

/// Pieces of a device or export that are looked at, and bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 4096;

/// What was found and done before a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// Everything had been written already.
    Full,
    /// The range was written once.
    Done,
    /// There are holes, and the load may not write: what they are, in words.
    Hollow(String),
}

/// Looks whether the range of `workload` has parts that were never written, and when the load may write (it is a
/// writing one, or `destroy` is set) writes all of it once.
///
/// Files are asked for their holes. Devices and exports cannot tell; of those some pieces are read, and one that is
/// all zeroes counts as never written.
///
/// # Errors
/// As [`run`], and a pass that failed.
pub fn prefill(
    target: &Target,
    workload: &Workload,
    destroy: bool,
    monitor: &Monitor,
) -> Result<Prefill, LoadError> {
    let size = target.prepare(workload, destroy)?;
    let start = workload.offset.0;
    let length = workload.size.map_or(size.saturating_sub(start), |size| size.0);
    // Whether the range is possible is the load's to say; here it must only not be exceeded.
    let length = length.min(size.saturating_sub(start)) / u64::from(SECTOR) * u64::from(SECTOR);
    let range = Span { offset: start.min(size), length };
    let Some(found) = hollow(target, range)? else { return Ok(Prefill::Full) };
    if !(workload.access.writes() || destroy) {
        return Ok(Prefill::Hollow(found));
    }
    let pass = Workload {
        access: Access::Write,
        block_size: Size(block(range)),
        queue_depth: DEPTH,
        runtime: None,
        offset: Size(range.offset),
        size: Some(Size(range.length)),
        seed: workload.seed,
        ..Workload::default()
    };
    let summary = run(target, &pass, destroy, monitor)?;
    match summary.first_error {
        Some(error) => Err(LoadError::Prefill { target: target.to_string(), error }),
        None => {
            if let Target::Path(path) = target {
                let synced = File::open(path).and_then(|file| file.sync_all());
                synced.map_err(|source| LoadError::File {
                    path: path.clone(),
                    what: "cannot sync",
                    source,
                })?;
            }
            Ok(Prefill::Done)
        }
    }
}

/// The largest request of which the range is made, so that the pass leaves nothing out.
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
        if piece.iter().all(|&byte| byte == 0) {
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
        let reading = prefill(&target, &Workload::default(), false, &monitor).unwrap();
        assert!(
            matches!(&reading, Prefill::Hollow(found) if found.contains("hole at byte 0")),
            "{reading:?}"
        );
        assert_eq!(prefill(&target, &writes(size), false, &monitor).unwrap(), Prefill::Done);
        let data = std::fs::read(&path).unwrap();
        assert!(data.chunks(512).all(|sector| sector.iter().any(|&byte| byte != 0)), "to the last sector");
        assert_eq!(prefill(&target, &writes(size), true, &monitor).unwrap(), Prefill::Full);
        assert_eq!(prefill(&target, &Workload::default(), false, &monitor).unwrap(), Prefill::Full);
        // A hole outside the range is nobody's business.
        File::options().write(true).open(&path).unwrap().set_len(8 << 20).unwrap();
        assert_eq!(prefill(&target, &writes(size), true, &monitor).unwrap(), Prefill::Full);
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
