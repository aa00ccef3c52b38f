//! A local copy of one kind of record, updated by a watch.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use weir_task::JoinHandle;

use crate::records::{Record, RecordError};
use crate::registry::{Change, Entry, Registry, RegistryError, RegistryErrorKind, Watch};

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

    fn put(&mut self, name: String, entry: &Entry) {
        let error = match R::of(entry) {
            Ok(record) => {
                self.readable.insert(name.clone(), record);
                None
            }
            Err(error) => {
                // An outdated record would be worse than none.
                tracing::warn!(key = entry.key, %error, "ignoring a record");
                self.readable.remove(&name);
                Some(error)
            }
        };
        self.puts.insert(name, Put { revision: entry.mod_revision, error });
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
    task: JoinHandle<()>,
}

impl<R: Record> View<R> {
    /// Lists `prefix` (one of [`crate::records::keys`]) and follows it from there.
    ///
    /// # Errors
    /// Any error of the registry at the first listing; later errors are retried.
    pub async fn start(registry: Arc<dyn Registry>, prefix: &str) -> Result<View<R>, RegistryError> {
        let mut follower = Follower { registry, prefix: prefix.to_owned(), records: Records::new() };
        let watch = follower.list().await?;
        let (sender, records) = watch::channel(Arc::new(follower.records.clone()));
        let task = weir_task::spawn(follower.follow(watch, sender));
        Ok(View { records, task })
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
}

impl<R> Drop for View<R> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Follower<R> {
    registry: Arc<dyn Registry>,
    prefix: String,
    records: Records<R>,
}

impl<R: Record> Follower<R> {
    async fn list(&mut self) -> Result<Watch, RegistryError> {
        let listing = self.registry.list(&self.prefix).await?;
        let watch = self.registry.watch(&self.prefix, listing.revision).await?;
        self.records = Records { revision: listing.revision, ..Records::new() };
        for entry in &listing.entries {
            self.records.put(short(&self.prefix, &entry.key).to_owned(), entry);
        }
        Ok(watch)
    }

    async fn follow(mut self, mut watch: Watch, sender: watch::Sender<Arc<Records<R>>>) {
        loop {
            match watch.next().await {
                Ok(event) => {
                    match event.change {
                        Change::Put(entry) => {
                            self.records.put(short(&self.prefix, &entry.key).to_owned(), &entry);
                        }
                        Change::Delete { key } => self.records.delete(short(&self.prefix, &key)),
                    }
                    self.records.revision = event.revision;
                }
                Err(error) => {
                    tracing::debug!(prefix = self.prefix, %error, "listing again");
                    watch = self.list_again().await;
                }
            }
            sender.send_replace(Arc::new(self.records.clone()));
        }
    }

    async fn list_again(&mut self) -> Watch {
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

fn short<'a>(prefix: &str, key: &'a str) -> &'a str {
    key.strip_prefix(prefix).unwrap_or(key)
}
