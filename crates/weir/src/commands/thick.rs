//! `weir disk create --thick`: a disk that has all of its space from the beginning. It is filled as by an import, so that one that is cut off is
//! nobody's.

use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::{ApiError, ApiErrorKind, BeginImport, CreateDisk, DiskView, Importing};
use weir_node::client::Client;
use weir_node::units::{Period, about};

use super::incomplete::give_up;
use super::interrupts::Interrupts;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::note;

/// Longest time for one step, and the pause before it is asked for again.
const PATIENCE: Duration = Duration::from_secs(120);
const AGAIN: Duration = Duration::from_secs(1);

/// Shortest time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// # Errors
/// As of `weir disk create`; the volume has too little space, or the command is interrupted: then the disk is removed.
pub fn create(global: &Global, client: Client, wanted: &CreateDisk) -> Result<DiskView, Failure> {
    let mut interrupts = Interrupts::new()?;
    let begin = BeginImport::new(wanted.clone(), wanted.size);
    // A node that is not there at all is not waited for.
    client.status()?;
    let mut filling = Filling { global, client, disk: &wanted.name, waits: false, may_exist: false };
    let filled =
        filling.begin(&mut interrupts, &begin).and_then(|import| filling.fill(&mut interrupts, &import));
    filled.map_err(|failure| match filling.may_exist {
        true => give_up(&filling.client, (&wanted.name, begin.number), failure),
        false => failure,
    })
}

/// A disk that is given its space, and the node that is asked to.
struct Filling<'a> {
    global: &'a Global,
    client: Client,
    disk: &'a str,
    /// The user knows that the present step does not get on.
    waits: bool,
    /// The disk was made, or may have been by a request without an answer.
    may_exist: bool,
}

impl Filling<'_> {
    /// Makes the disk. A node that ends meanwhile may have made it: the same number once more finds it.
    fn begin(&mut self, interrupts: &mut Interrupts, wanted: &BeginImport) -> Result<Importing, Failure> {
        let import = self.patiently(interrupts, |client| client.begin_import(wanted))?;
        self.may_exist = true;
        Ok(import)
    }

    fn fill(&mut self, interrupts: &mut Interrupts, import: &Importing) -> Result<DiskView, Failure> {
        let (name, size) = (self.disk, import.disk.size);
        let (mut done, mut said) = (0, Nanos::now());
        while done < size {
            done = self.patiently(interrupts, |client| Ok(client.fill(import, done)?.end))?;
            if interrupts.is_pending() {
                return Err(Failure::failed("interrupted"));
            }
            if Nanos::now() - said >= LINE_EVERY {
                note(&format!("{name}: {} of {} allocated", about(done), about(size)));
                said = Nanos::now();
            }
        }
        Ok(self.client.end_import(import)?)
    }

    /// One step. Storage that is slow, a coordinator that changes, and a node that ends are waited for: a step that goes on is another's then,
    /// and the same once more does no harm.
    fn patiently<T>(
        &mut self,
        interrupts: &mut Interrupts,
        step: impl Fn(&Client) -> Result<T, ApiError>,
    ) -> Result<T, Failure> {
        let deadline = Nanos::now() + PATIENCE;
        self.waits = false;
        loop {
            match step(&self.client) {
                Ok(done) => return Ok(done),
                Err(error) if error.kind == ApiErrorKind::Unavailable && Nanos::now() < deadline => {
                    self.waits_for(&error);
                }
                Err(error) => return Err(error.into()),
            }
            if interrupts.is_pending() {
                return Err(Failure::failed("interrupted"));
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Goes on with another node, where this command knows one that runs; says at once what it waits for otherwise.
    fn waits_for(&mut self, error: &ApiError) {
        let chosen = self.global.api.is_some() || self.global.node.is_some();
        let other = any_node(self.global).ok().filter(|other| other.socket() != self.client.socket());
        match other.filter(|_| !chosen) {
            Some(other) => {
                note(&format!(
                    "{}: {}\ngoing on with {}",
                    self.disk,
                    error.message,
                    other.socket().display()
                ));
                self.client = other;
            }
            None if !self.waits => note(&waits(self.disk, &error.message)),
            None => {}
        }
        (self.waits, self.may_exist) = (true, true);
    }
}

/// Why the command waits, and how the user goes on without that node. In short lines.
fn waits(disk: &str, why: &str) -> String {
    format!(
        "{disk}: {why}\nThis command knows no other node; it asks again for {}.\nIf that node does not come back: interrupt this, and \
         with --api of another node\n`weir disk delete {disk}`, and make the disk again.",
        Period(PATIENCE)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_says_how_to_go_on_in_short_lines() {
        let text = waits("d1", "no answer from the node at /run/weir/n1/api.sock");
        assert!(text.contains("`weir disk delete d1`") && text.contains("for 2 min"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
}
