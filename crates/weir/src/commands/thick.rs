//! `weir disk create --thick`: a disk that has all of its space from the beginning. It is filled as by an import, so that one that is cut off is
//! nobody's.

use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::{ApiErrorKind, BeginImport, CreateDisk, DiskView, Importing};
use weir_node::client::Client;
use weir_node::units::about;

use super::incomplete::give_up;
use super::interrupts::Interrupts;
use crate::failure::Failure;
use crate::output::note;

/// Longest time for one step, and the pause before it is asked for again.
const PATIENCE: Duration = Duration::from_secs(120);
const AGAIN: Duration = Duration::from_secs(1);

/// Shortest time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// # Errors
/// As of `weir disk create`; the volume has too little space, or the command is interrupted: then the disk is removed.
pub fn create(client: &Client, wanted: &CreateDisk) -> Result<DiskView, Failure> {
    let mut interrupts = Interrupts::new()?;
    let import = client.begin_import(&BeginImport { disk: wanted.clone(), needed_bytes: wanted.size })?;
    let filled = fill(client, &import, &mut interrupts);
    filled.map_err(|failure| give_up(client, &import, failure))
}

fn fill(client: &Client, import: &Importing, interrupts: &mut Interrupts) -> Result<DiskView, Failure> {
    let DiskView { name, size, .. } = &import.disk;
    let (mut done, mut said) = (0, Nanos::now());
    while done < *size {
        done = step(client, import, done)?;
        if interrupts.is_pending() {
            return Err(Failure::failed("interrupted"));
        }
        if Nanos::now() - said >= LINE_EVERY {
            note(&format!("{name}: {} of {} allocated", about(done), about(*size)));
            said = Nanos::now();
        }
    }
    Ok(client.end_import(import)?)
}

/// One step, from a byte on. Storage that is slow, and a coordinator that changes, are waited for: a step that goes on is another's then, and
/// the same once more does no harm.
fn step(client: &Client, import: &Importing, done: u64) -> Result<u64, Failure> {
    let deadline = Nanos::now() + PATIENCE;
    loop {
        match client.fill(import, done) {
            Ok(filled) => return Ok(filled.end),
            Err(error) if error.kind == ApiErrorKind::Unavailable && Nanos::now() < deadline => {
                std::thread::sleep(AGAIN);
            }
            Err(error) => return Err(error.into()),
        }
    }
}
