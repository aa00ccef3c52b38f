//! A local copy of one kind of record, updated by a watch.

mod watchers;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use weir_task::JoinHandle;

use crate::records::{Record, RecordError};
use crate::registry::{Change, Entry, Registry, RegistryError, RegistryErrorKind, Watch, WatchEvent};
use watchers::Watchers;

/// Pause before listing again after the registry was away.
const RETRY: Duration = Duration::from_millis(200);

/// The content of a [`View`]: each readable record by its key without the prefix.
#[derive(Clone, Debug)]
pub struct Records<R> {
    readable: BTreeMap<String, R>,
    /// The revision of each key, readable or not.
    puts: BTreeMap<String, Put>,
    /// The registry's revision up to which this is complete.
    revision: u64,
}

#[derive(Clone, Debug)]
struct Put {
    revision: u64,
    error: Option<RecordError>,
}

/// A put, as far as it can be read, and its revision.
type PutRecord<R> = (u64, Result<R, RecordError>);

/// A record under its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<R> {
    /// No record.
    Nothing,
    /// A record that this build cannot read.
    Unreadable {
        /// Its revision.
        revision: u64,
        /// The error.
        error: RecordError,
    },
    /// A readable record.
    Record {
        /// Its revision.
        revision: u64,
        /// The record.
        record: R,
    },
}

impl<R> Seen<R> {
    /// Its revision.
    #[must_use]
    pub fn revision(&self) -> Option<u64> {
        match self {
            Seen::Nothing => None,
            Seen::Unreadable { revision, .. } | Seen::Record { revision, .. } => Some(*revision),
        }
    }
}

impl<R> Deref for Records<R> {
    type Target = BTreeMap<String, R>;

    fn deref(&self) -> &BTreeMap<String, R> {
        &self.readable
    }
}

impl<R: Record> Records<R> {
    fn new() -> Records<R> {
        Records { readable: BTreeMap::new(), puts: BTreeMap::new(), revision: 0 }
    }

    /// Whether the state of a key without the prefix, as it was at `revision` of the registry, is in here, or a later one.
    #[must_use]
    pub fn has_caught_up(&self, name: &str, revision: u64) -> bool {
        self.puts.get(name).map_or(self.revision, |put| put.revision) >= revision
    }

    /// The record under a key without the prefix.
    #[must_use]
    pub fn seen(&self, name: &str) -> Seen<R> {
        match (self.puts.get(name), self.readable.get(name)) {
            (Some(Put { revision, error: None }), Some(record)) => {
                Seen::Record { revision: *revision, record: record.clone() }
            }
            (Some(Put { revision, error: Some(error) }), _) => {
                Seen::Unreadable { revision: *revision, error: error.clone() }
            }
            _ => Seen::Nothing,
        }
    }

    /// The revision of the record under a key without the prefix, readable or not.
    #[must_use]
    pub fn revision_of(&self, name: &str) -> Option<u64> {
        self.puts.get(name).map(|put| put.revision)
    }

    /// Whether a key without the prefix exists, readable or not.
    #[must_use]
    pub fn exists(&self, name: &str) -> bool {
        self.puts.contains_key(name)
    }

    /// Whether the record is unreadable for this build.
    #[must_use]
    pub fn is_unreadable(&self, name: &str) -> bool {
        self.puts.get(name).is_some_and(|put| put.error.is_some())
    }

    /// All keys, without the prefix, readable or not.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.puts.keys()
    }

    /// `change`: what was put under `name`, and when; `None` if it was deleted. Returns whether there is another record now.
    fn apply(&mut self, name: &str, revision: u64, change: Option<PutRecord<R>>) -> bool {
        self.revision = revision;
        match change {
            Some((revision, record)) => self.put(name, revision, record),
            None => {
                self.delete(name);
                true
            }
        }
    }

    /// Returns whether there is another record now.
    fn put(&mut self, name: &str, revision: u64, record: Result<R, RecordError>) -> bool {
        let error = record.as_ref().err().cloned();
        let is_new = match record {
            // Also one that is equal: that does not mean that all of it is the same (`NodeRef`).
            Ok(record) => match self.readable.get_mut(name) {
                Some(known) => {
                    let before = std::mem::replace(known, record);
                    before != *known
                }
                None => self.readable.insert(name.to_owned(), record).is_none(),
            },
            Err(_) => {
                // An outdated record would be worse than none.
                self.readable.remove(name);
                true
            }
        };
        self.puts.insert(name.to_owned(), Put { revision, error });
        is_new
    }

    fn delete(&mut self, name: &str) {
        self.readable.remove(name);
        self.puts.remove(name);
    }
}

/// A copy of all records under a prefix. It lags behind the registry by one message; while the registry is away it shows the last
/// known state. Dropping it ends the watch.
#[derive(Debug)]
pub struct View<R> {
    records: watch::Receiver<Arc<Records<R>>>,
    watchers: Arc<Watchers>,
    task: JoinHandle<()>,
}

impl<R: Record> View<R> {
    /// Lists `prefix` (one of [`crate::records::keys`]) and follows it from there.
    ///
    /// # Errors
    /// Any error of the registry at the first listing; later errors are retried.
    pub async fn start(registry: Arc<dyn Registry>, prefix: &str) -> Result<View<R>, RegistryError> {
        let watchers = Arc::new(Watchers::default());
        let (sender, mut records) = watch::channel(Arc::new(Records::new()));
        let follower = Follower {
            registry,
            prefix: prefix.to_owned(),
            records: sender,
            watchers: Arc::clone(&watchers),
        };
        let watch = follower.list().await?;
        // The first listing is not a change.
        records.mark_unchanged();
        let task = weir_task::spawn(follower.follow(watch));
        Ok(View { records, watchers, task })
    }

    /// The current records.
    #[must_use]
    pub fn now(&self) -> Arc<Records<R>> {
        self.records.borrow().clone()
    }

    /// Notifies of changes. Several changes may be merged into one notification.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Arc<Records<R>>> {
        self.records.clone()
    }

    /// Notifies of each put and deletion of the record of this name, or of records below it: those whose keys without the prefix are the
    /// same up to the first slash. Several changes may be merged into one notification.
    #[must_use]
    pub fn puts_of(&self, name: &str) -> watch::Receiver<()> {
        self.watchers.puts(name)
    }

    /// As [`View::puts_of`], unless the record stays the same.
    #[must_use]
    pub fn changes_of(&self, name: &str) -> watch::Receiver<()> {
        self.watchers.contents(name)
    }
}

impl<R> Drop for View<R> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Follower<R> {
    registry: Arc<dyn Registry>,
    prefix: String,
    records: watch::Sender<Arc<Records<R>>>,
    watchers: Arc<Watchers>,
}

impl<R: Record> Follower<R> {
    async fn list(&self) -> Result<Watch, RegistryError> {
        let listing = self.registry.list(&self.prefix).await?;
        let watch = self.registry.watch(&self.prefix, listing.revision).await?;
        let mut records = Records { revision: listing.revision, ..Records::new() };
        for entry in &listing.entries {
            records.put(short(&self.prefix, &entry.key), entry.mod_revision, read(entry));
        }
        self.records.send_replace(Arc::new(records));
        self.watchers.tell_all();
        Ok(watch)
    }

    async fn follow(self, mut watch: Watch) {
        loop {
            match watch.next().await {
                Ok(event) => self.apply(event),
                Err(error) => {
                    tracing::debug!(prefix = self.prefix, %error, "listing again");
                    watch = self.list_again().await;
                }
            }
        }
    }

    fn apply(&self, WatchEvent { revision, change }: WatchEvent) {
        let (key, put) = match &change {
            Change::Put(entry) => (&entry.key, Some((entry.mod_revision, read(entry)))),
            Change::Delete { key } => (key, None),
        };
        let name = short(&self.prefix, key);
        self.watchers.tell(name, self.publish(name, revision, put));
    }

    /// Changes the records in place: there may be thousands. A reader that holds them keeps them as they were; the change is made to a copy
    /// then. Returns whether there is another record now.
    fn publish(&self, name: &str, revision: u64, put: Option<PutRecord<R>>) -> bool {
        let (mut put, mut is_new) = (Some(put), false);
        let is_done = self.records.send_if_modified(|records| match Arc::get_mut(records) {
            Some(records) => {
                is_new = records.apply(name, revision, put.take().flatten());
                true
            }
            None => false,
        });
        if is_done {
            return is_new;
        }
        // Not under the lock of the channel, which all readers need. Nobody else writes.
        let shown = Arc::clone(&self.records.borrow());
        let mut records = Records::clone(&shown);
        let is_new = records.apply(name, revision, put.take().flatten());
        self.records.send_replace(Arc::new(records));
        is_new
    }

    async fn list_again(&self) -> Watch {
        let mut is_reported = false;
        loop {
            match self.list().await {
                Ok(watch) => return watch,
                // It does not pass by itself, and until then this node decides by old records.
                Err(error) if error.kind() == RegistryErrorKind::Operator && !is_reported => {
                    is_reported = true;
                    tracing::error!(prefix = self.prefix, %error, "the registry cannot be read");
                }
                Err(error) => tracing::debug!(prefix = self.prefix, %error, "cannot list yet"),
            }
            weir_task::sleep(RETRY).await;
        }
    }
}

fn read<R: Record>(entry: &Entry) -> Result<R, RecordError> {
    let record = R::of(entry);
    if let Err(error) = &record {
        tracing::warn!(key = entry.key, %error, "ignoring a record");
    }
    record
}

fn short<'a>(prefix: &str, key: &'a str) -> &'a str {
    key.strip_prefix(prefix).unwrap_or(key)
}
