//! `weir disk clone` of one snapshot into several disks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::{CloneDisk, DiskView, LookAtLayout, Sharing};
use weir_node::units::count;

use super::compact;
use super::several::{all_or_why, ask_each, check_names};
use crate::cli::CloneSource;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{note, print};

/// Clones that are being made at a time. The filesystem shares the blocks of one after the other; meanwhile the registry and the storage
/// take what belongs to those before and after it.
const AT_ONCE: usize = 4;

/// Shortest time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Refuses names that stand twice or are none, and clones of a disk at several points in time.
///
/// # Errors
/// A usage error.
pub fn check(source: &CloneSource, names: &[String]) -> Result<(), Failure> {
    check_names(names)?;
    if names.len() > 1 && source.snapshot.is_none() {
        let message = format!("several clones begin as one snapshot, and {} is a disk", source.disk);
        let hint = format!("`weir snapshot create {0}@NAME`, and clone {0}@NAME", source.disk);
        return Err(Failure::usage(message).hint(hint));
    }
    Ok(())
}

/// Says whether a clone can be made for each name, and how long they would take.
///
/// # Errors
/// Some cannot be made: all of them are named.
pub fn plan(
    global: &Global,
    source: &CloneSource,
    names: &[String],
    wanted: &CloneDisk,
) -> Result<(), Failure> {
    let client = any_node(global)?;
    let look = |name: &str| {
        let clone = CloneDisk { name: name.to_owned(), ..wanted.clone() };
        let look = LookAtLayout { snapshot: source.snapshot.clone(), before: Some(Sharing::Clone(clone)) };
        client.layout(&source.disk, &look).map_err(Failure::from)
    };
    let (layouts, all) = all_or_why(names, "clone", "cannot be made", ask_each(names, look)?);
    all?;
    let Some(mut layout) = layouts.into_iter().next() else { return Ok(()) };
    layout.share_seconds = layout.share_seconds.map(|seconds| seconds * names.len() as f64);
    let from = source.snapshot.iter().fold(source.disk.clone(), |disk, one| format!("{disk}@{one}"));
    let to = match names {
        [name] => name.clone(),
        names => format!("each of {}", count(names.len() as u64, "disk")),
    };
    print(global.output, &layout, |layout| compact::planned(layout, &format!("clone {from} as {to}")))
}

/// Makes a clone for each name. Returns those that were made, and an error that says how many were not, and why the first of them was not.
///
/// # Errors
/// No node can be asked.
pub fn make(
    global: &Global,
    source: &CloneSource,
    names: &[String],
    wanted: &CloneDisk,
) -> Result<(Vec<DiskView>, Result<(), Failure>), Failure> {
    compact::tell(&any_node(global)?, &source.disk, source.snapshot.as_deref());
    let made = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(names.len()) {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let wanted = CloneDisk { name: name.clone(), ..wanted.clone() };
                    let one = any_node(global)
                        .and_then(|client| client.clone_disk(&source.disk, &wanted).map_err(Failure::from));
                    made.lock().unwrap_or_else(PoisonError::into_inner).push((name, one));
                }
            });
        }
        scope.spawn(|| {
            let mut said = Nanos::now();
            loop {
                let done = made.lock().unwrap_or_else(PoisonError::into_inner).len();
                if done == names.len() {
                    return;
                }
                if Nanos::now() - said >= LINE_EVERY {
                    note(&format!("{done} of {} done", count(names.len() as u64, "clone")));
                    said = Nanos::now();
                }
                thread::sleep(LINE_EVERY / 20);
            }
        });
    });
    Ok(all_or_why(names, "clone", "not made", made.into_inner().unwrap_or_else(PoisonError::into_inner)))
}
