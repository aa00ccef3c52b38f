//! `weir disk create --thick`: a disk that has all of its space from the beginning. It is filled as by an import, so that one that is cut off is
//! nobody's.

use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::{BeginImport, CreateDisk, DiskView, Importing};
use weir_node::client::Client;
use weir_node::units::about;

use super::incomplete::give_up;
use super::interrupts::Interrupts;
use crate::failure::Failure;
use crate::output::note;

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
        done = client.fill(import, done)?.end;
        // No step is under way now.
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
