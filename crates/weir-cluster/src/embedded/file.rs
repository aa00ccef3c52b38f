//! The registry's file: a redb database whose every value carries a checksum (P11).

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::state::{Lease, State};
use crate::registry::{Batch, Change, Entry, LeaseId, RegistryError};

/// key → checksummed [`Entry`].
const ENTRIES: TableDefinition<&str, &[u8]> = TableDefinition::new("entries");
/// revision → checksummed [`Batch`].
const CHANGES: TableDefinition<u64, &[u8]> = TableDefinition::new("changes");
/// lease → its time to live in milliseconds.
const LEASES: TableDefinition<u64, u64> = TableDefinition::new("leases");
/// The counters, by name.
const COUNTERS: TableDefinition<&str, u64> = TableDefinition::new("counters");
/// Added to a lease's full time when the file is opened: clients need time to reconnect.
const REOPEN_GRACE: Duration = Duration::from_secs(2);
/// The format version of this file. A newer one is refused.
const FORMAT: u64 = 1;

pub(super) struct File {
    database: Database,
    /// History up to here has been removed from the file.
    floor: u64,
}

impl File {
    /// Opens or creates the file and reads all of it.
    pub fn open(path: &Path) -> Result<(File, State), RegistryError> {
        let setup = |error: &dyn std::fmt::Display| RegistryError::Setup {
            reason: format!("cannot open the registry's file {}: {error}", path.display()),
        };
        // Create the file here and not by redb, so that other users can never read it. Its content describes the cluster.
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        drop(open.map_err(|error| setup(&error))?);
        let database = Database::create(path).map_err(|error| match error {
            redb::DatabaseError::DatabaseAlreadyOpen => {
                setup(&"another process has it open; stop that one first")
            }
            error => setup(&error),
        })?;
        let mut file = File { database, floor: 0 };
        file.make_tables().map_err(|error| setup(&error))?;
        let state = file.load()?;
        file.floor = state.floor;
        Ok((file, state))
    }

    fn make_tables(&self) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        {
            write.open_table(ENTRIES)?;
            write.open_table(CHANGES)?;
            write.open_table(LEASES)?;
            let mut counters = write.open_table(COUNTERS)?;
            if counters.get("format")?.is_none() {
                counters.insert("format", FORMAT)?;
            }
        }
        write.commit()?;
        Ok(())
    }

    fn load(&self) -> Result<State, RegistryError> {
        let mut state = State::default();
        self.load_into(&mut state).map_err(|failure| match failure {
            Failure::Store(error) => corrupt(error.to_string()),
            Failure::Registry(error) => error,
        })?;
        Ok(state)
    }

    #[expect(clippy::disallowed_methods, reason = "leases count from the opening of the file")]
    fn load_into(&self, state: &mut State) -> Result<(), Failure> {
        let read = self.database.begin_read()?;
        let counters = read.open_table(COUNTERS)?;
        let counter =
            |name: &str| Ok::<u64, redb::Error>(counters.get(name)?.map_or(0, |value| value.value()));
        let format = counter("format")?;
        if format != FORMAT {
            let reason =
                format!("the registry's file has format {format}, this version of Weir supports {FORMAT}");
            return Err(Failure::Registry(RegistryError::Setup { reason }));
        }
        state.revision = counter("revision")?;
        state.last_lease = counter("last_lease")?;
        state.floor = counter("floor")?;
        let now = Instant::now();
        for row in read.open_table(LEASES)?.iter()? {
            let (id, ttl) = row?;
            let ttl = Duration::from_millis(ttl.value());
            state.leases.insert(
                LeaseId(id.value()),
                Lease { ttl, deadline: now + ttl + REOPEN_GRACE, keys: Default::default() },
            );
        }
        for row in read.open_table(ENTRIES)?.iter()? {
            let (key, value) = row?;
            state.restore_entry(unpack_entry(key.value(), value.value()).map_err(Failure::Registry)?);
        }
        for row in read.open_table(CHANGES)?.iter()? {
            let (revision, value) = row?;
            state.restore_history(unpack_batch(revision.value(), value.value()).map_err(Failure::Registry)?);
        }
        Ok(())
    }

    /// Makes all unsaved changes durable, in one commit.
    pub fn save(&mut self, state: &mut State) -> Result<(), RegistryError> {
        if state.unsaved.is_empty() {
            return Ok(());
        }
        self.write(state).map_err(|error| {
            RegistryError::unavailable(format!(
                "its file failed: {error}; free space or replace the disk, then restart it"
            ))
        })?;
        self.floor = state.floor;
        Ok(())
    }

    fn write(&self, state: &State) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        {
            let mut entries = write.open_table(ENTRIES)?;
            let mut changes = write.open_table(CHANGES)?;
            for batch in &state.unsaved.batches {
                for change in &batch.changes {
                    match change {
                        Change::Put(entry) => entries.insert(&*entry.key, &*pack_entry(entry))?,
                        Change::Delete { key } => entries.remove(&**key)?,
                    };
                }
                changes.insert(batch.revision, &*pack_batch(batch))?;
            }
            if state.floor > self.floor {
                changes.retain_in(..=state.floor, |_, _| false)?;
            }
            let mut leases = write.open_table(LEASES)?;
            for (id, ttl) in &state.unsaved.leases {
                match ttl {
                    Some(ttl) => leases.insert(id.0, u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))?,
                    None => leases.remove(id.0)?,
                };
            }
            let mut counters = write.open_table(COUNTERS)?;
            counters.insert("revision", state.revision)?;
            counters.insert("last_lease", state.last_lease)?;
            counters.insert("floor", state.floor)?;
        }
        write.commit()?;
        Ok(())
    }
}

/// The reason why loading failed.
enum Failure {
    Store(redb::Error),
    Registry(RegistryError),
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Store(error.into())
    }
}

fn corrupt(reason: String) -> RegistryError {
    RegistryError::Corrupt { reason }
}

/// `checksum ‖ body`; the checksum also covers the key, so that a value under another key is detected.
fn seal(key: &[u8], body: &[u8]) -> Vec<u8> {
    let checksum = crc32c::crc32c_append(crc32c::crc32c(key), body);
    [&checksum.to_le_bytes()[..], body].concat()
}

fn unseal<'a>(key: &[u8], sealed: &'a [u8]) -> Option<&'a [u8]> {
    let (checksum, body) = sealed.split_first_chunk::<4>()?;
    (u32::from_le_bytes(*checksum) == crc32c::crc32c_append(crc32c::crc32c(key), body)).then_some(body)
}

/// Body of an entry: revision, lease (0: none), value.
fn pack_entry(entry: &Entry) -> Vec<u8> {
    let lease = entry.lease.map_or(0, |lease| lease.0);
    let body = [&entry.mod_revision.to_le_bytes()[..], &lease.to_le_bytes(), &entry.value].concat();
    seal(entry.key.as_bytes(), &body)
}

fn unpack_entry(key: &str, sealed: &[u8]) -> Result<Entry, RegistryError> {
    let unpack = || {
        let (revision, rest) = unseal(key.as_bytes(), sealed)?.split_first_chunk::<8>()?;
        let (lease, value) = rest.split_first_chunk::<8>()?;
        let lease = Some(u64::from_le_bytes(*lease)).filter(|id| *id != 0).map(LeaseId);
        let mod_revision = u64::from_le_bytes(*revision);
        Some(Entry { key: key.to_owned(), value: value.to_vec(), mod_revision, lease })
    };
    unpack().ok_or_else(|| corrupt(format!("the checksum of key {key:?} is wrong")))
}

fn pack_batch(batch: &Batch) -> Vec<u8> {
    let body = serde_json::to_vec(batch).expect("strings and numbers always serialise");
    seal(&batch.revision.to_le_bytes(), &body)
}

fn unpack_batch(revision: u64, sealed: &[u8]) -> Result<Batch, RegistryError> {
    unseal(&revision.to_le_bytes(), sealed)
        .and_then(|body| serde_json::from_slice(body).ok())
        .ok_or_else(|| corrupt(format!("the checksum of change {revision} is wrong")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_is_found() {
        let entry =
            Entry { key: "k".into(), value: b"value".to_vec(), mod_revision: 7, lease: Some(LeaseId(3)) };
        let sealed = pack_entry(&entry);
        assert_eq!(unpack_entry("k", &sealed).unwrap(), entry);
        assert!(unpack_entry("other", &sealed).is_err(), "a value under the wrong key");
        for bit in 0..sealed.len() * 8 {
            let mut damaged = sealed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(unpack_entry("k", &damaged).is_err(), "bit {bit}");
        }
        assert!(unpack_entry("k", &[]).is_err());
    }
}
