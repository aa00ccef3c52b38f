//! A copy of one kind of record, kept up to date by a watch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use weir_task::JoinHandle;

use crate::records::Record;
use crate::registry::{Change, Entry, Registry, RegistryError, Watch};

/// Pause before listing again after the registry was away.
const RETRY: Duration = Duration::from_millis(200);

/// What a [`View`] shows: each readable record by its key without the prefix.
pub type Records<R> = BTreeMap<String, R>;

/// A copy of all records under a prefix. It lags behind the registry by the way of a message; while the
/// registry is away it shows what was known last. It ends when it is dropped.
#[derive(Debug)]
pub struct View<R> {
    records: watch::Receiver<Arc<Records<R>>>,
    task: JoinHandle<()>,
}

impl<R: Record> View<R> {
    /// Lists `prefix` (one of [`crate::records::keys`]) and follows it from there.
    ///
    /// # Errors
    /// Any error of the registry at the first listing; later ones are waited out.
    pub async fn start(registry: Arc<dyn Registry>, prefix: &str) -> Result<View<R>, RegistryError> {
        let mut follower = Follower { registry, prefix: prefix.to_owned(), records: Records::new() };
        let watch = follower.list().await?;
        let (sender, records) = watch::channel(Arc::new(follower.records.clone()));
        let task = weir_task::spawn(follower.follow(watch, sender));
        Ok(View { records, task })
    }

    /// The records as they are known now.
    #[must_use]
    pub fn now(&self) -> Arc<Records<R>> {
        self.records.borrow().clone()
    }

    /// Tells when the records change. Several changes in a row may be seen as one.
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
        self.records.clear();
        for entry in &listing.entries {
            self.put(entry);
        }
        Ok(watch)
    }

    async fn follow(mut self, mut watch: Watch, sender: watch::Sender<Arc<Records<R>>>) {
        loop {
            match watch.next().await {
                Ok(event) => match event.change {
                    Change::Put(entry) => self.put(&entry),
                    Change::Delete { key } => drop(self.records.remove(self.short(&key))),
                },
                Err(error) => {
                    tracing::debug!(prefix = self.prefix, %error, "listing again");
                    watch = self.list_again().await;
                }
            }
            sender.send_replace(Arc::new(self.records.clone()));
        }
    }

    async fn list_again(&mut self) -> Watch {
        loop {
            match self.list().await {
                Ok(watch) => return watch,
                Err(error) => tracing::debug!(prefix = self.prefix, %error, "cannot list yet"),
            }
            weir_task::sleep(RETRY).await;
        }
    }

    fn put(&mut self, entry: &Entry) {
        let name = self.short(&entry.key).to_owned();
        match R::of(entry) {
            Ok(record) => drop(self.records.insert(name, record)),
            Err(error) => {
                // An outdated record would be worse than none.
                tracing::warn!(key = entry.key, %error, "ignoring a record");
                self.records.remove(&name);
            }
        }
    }

    fn short<'a>(&self, key: &'a str) -> &'a str {
        key.strip_prefix(&*self.prefix).unwrap_or(key)
    }
}
