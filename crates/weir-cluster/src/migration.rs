//! Moving the content of one registry to another one, while no node uses either.
//!
//! At every moment at most one of the two is usable: nodes refuse a registry that has a [`MigrationRecord`]. The target has one from
//! before the first key until after the last; the source gets one before the target loses its own. So a migration that is
//! interrupted leaves neither usable, or one, and is repeated. Keys with a lease are not copied: a node's session does not move
//! with its keys. All copied values are compared in the end.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::records::{EpochBaseRecord, MigrationRecord, Record, RecordError, keys};
use crate::registry::{Entry, MAX_TRANSACTION, MAX_TRANSACTION_BYTES, Registry, RegistryError, Transaction};

/// Between two looks at the sessions of nodes that have stopped.
const LOOK: Duration = Duration::from_millis(200);

/// The reason why a registry is not migrated, or not used.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// Nodes have sessions in it.
    #[error(
        "{registry} has sessions of {}: stop these nodes, and try again when their leases have ended",
        .nodes.join(", ")
    )]
    InUse {
        /// The registry.
        registry: String,
        /// The nodes.
        nodes: Vec<String>,
    },
    /// It holds something else.
    #[error(
        "{registry} is not empty: it has {key:?}, which {from} does not have, or has with another value; choose another \
         registry.prefix"
    )]
    NotEmpty {
        /// The target.
        registry: String,
        /// One of its keys.
        key: String,
        /// The source.
        from: String,
    },
    /// Its content is elsewhere by now.
    #[error("{registry} was migrated to {to}, which has its content since; use that one")]
    Gone {
        /// The source.
        registry: String,
        /// The registry that has its content.
        to: String,
    },
    /// A migration to it has not finished.
    #[error(
        "{registry} holds only a part of {from}: a migration was interrupted; run `weir cluster migrate-registry` again"
    )]
    Arriving {
        /// The target.
        registry: String,
        /// The source.
        from: String,
    },
    /// The copy differs from the source.
    #[error(
        "{key:?} differs in {registry} after the copy; neither registry is usable until a migration succeeds"
    )]
    Differs {
        /// The target.
        registry: String,
        /// The key.
        key: String,
    },
    /// A registry does not answer, or refuses.
    #[error("{registry}: {source}")]
    Registry {
        /// Which one.
        registry: String,
        /// Its error.
        source: RegistryError,
    },
    /// One of the records that a migration needs cannot be read.
    #[error("{registry}: {source}")]
    Record {
        /// Where it is.
        registry: String,
        /// The reason.
        source: RecordError,
    },
}

/// A registry and its name for people.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// The registry.
    pub registry: &'a dyn Registry,
    /// For example its file, or its prefix and endpoints.
    pub name: &'a str,
}

/// The amount that a migration copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Keys.
    pub keys: usize,
    /// Bytes of keys and values.
    pub bytes: usize,
    /// Keys with a lease, which are not copied.
    pub leased: usize,
}

/// The content of the source at one revision, checked against the target.
struct Plan {
    amount: Amount,
    /// The copied values, the base of epochs with the target's new value among them.
    content: BTreeMap<String, Vec<u8>>,
    /// Keys that the target has already.
    done: BTreeMap<String, Vec<u8>>,
}

impl Named<'_> {
    fn failed(self) -> impl Fn(RegistryError) -> MigrationError {
        move |source| MigrationError::Registry { registry: self.name.to_owned(), source }
    }

    async fn list(self, prefix: &str) -> Result<(Vec<Entry>, u64), MigrationError> {
        let listing = self.registry.list(prefix).await.map_err(self.failed())?;
        Ok((listing.entries, listing.revision))
    }

    async fn read<R: Record>(self, key: &str) -> Result<Option<(Entry, R)>, MigrationError> {
        let Some(entry) = self.registry.get(key).await.map_err(self.failed())? else { return Ok(None) };
        let record = R::of(&entry)
            .map_err(|source| MigrationError::Record { registry: self.name.to_owned(), source })?;
        Ok(Some((entry, record)))
    }

    /// Refuses a registry that is the source or the target of a migration: before a node uses it.
    ///
    /// # Errors
    /// [`MigrationError::Gone`], [`MigrationError::Arriving`], or the registry's.
    pub async fn check_usable(self) -> Result<(), MigrationError> {
        let registry = self.name.to_owned();
        match self.read(keys::MIGRATION).await? {
            None => Ok(()),
            Some((_, MigrationRecord::Gone { to })) => Err(MigrationError::Gone { registry, to }),
            Some((_, MigrationRecord::Arriving { from })) => Err(MigrationError::Arriving { registry, from }),
        }
    }
}

/// The first epoch of a disk that is created at `revision` of `registry`.
///
/// # Errors
/// Those of [`Registry::get`]; [`RegistryError::Corrupt`] if the base of epochs cannot be read.
pub async fn first_epoch(registry: &dyn Registry, revision: u64) -> Result<u64, RegistryError> {
    let Some(entry) = registry.get(keys::EPOCH_BASE).await? else { return Ok(revision) };
    let base = EpochBaseRecord::of(&entry)
        .map_err(|error| RegistryError::Corrupt { reason: format!("{}: {error}", entry.key) })?;
    let too_high = || RegistryError::Corrupt { reason: format!("{}: no epoch is above it", entry.key) };
    base.revisions.checked_add(revision).ok_or_else(too_high)
}

/// The amount that [`migrate`] would copy now; changes nothing.
///
/// # Errors
/// The reason why it would not: see [`MigrationError`].
pub async fn look(source: Named<'_>, target: Named<'_>) -> Result<Amount, MigrationError> {
    Ok(plan(source, target).await?.amount)
}

/// Waits until no node has a session in `source`, at most for `patience`.
///
/// # Errors
/// [`MigrationError::InUse`] when some still have one; or the registry's error.
pub async fn without_sessions(source: Named<'_>, patience: Duration) -> Result<(), MigrationError> {
    let mut waited = Duration::ZERO;
    loop {
        match check_sessions(source).await {
            Err(MigrationError::InUse { .. }) if waited < patience => {}
            checked => return checked,
        }
        weir_task::sleep(LOOK).await;
        waited += LOOK;
    }
}

/// Copies all keys without a lease from `source` to `target`, which has none or was the target of the same, interrupted migration,
/// and compares them. Then nodes use `target`, and refuse `source`. `progress` gets the number of keys that are copied.
///
/// # Errors
/// See [`MigrationError`]. After any error it may be repeated.
pub async fn migrate(
    source: Named<'_>,
    target: Named<'_>,
    progress: &mut (dyn FnMut(usize) + Send),
) -> Result<Amount, MigrationError> {
    let plan = plan(source, target).await?;
    let guard = begin(source, target).await?;
    progress(plan.done.len());
    let mut copied = plan.done.len();
    for batch in batches(&plan) {
        let keys = batch.len();
        let mut transaction = Transaction::new().unchanged(keys::MIGRATION, guard);
        for (key, value) in batch {
            transaction = transaction.put(key, value.clone());
        }
        target.registry.transact(transaction).await.map_err(target.failed())?;
        copied += keys;
        progress(copied);
    }
    compare(&plan, target).await?;
    end(source, target, guard).await?;
    Ok(plan.amount)
}

async fn check_sessions(of: Named<'_>) -> Result<(), MigrationError> {
    let (sessions, _) = of.list(keys::SESSIONS).await?;
    if sessions.is_empty() {
        return Ok(());
    }
    let nodes = sessions.iter().filter_map(|entry| entry.key.strip_prefix(keys::SESSIONS));
    let nodes = nodes.map(str::to_owned).collect();
    Err(MigrationError::InUse { registry: of.name.to_owned(), nodes })
}

async fn plan(source: Named<'_>, target: Named<'_>) -> Result<Plan, MigrationError> {
    check_sessions(source).await?;
    check_sessions(target).await?;
    let arriving = match target.read(keys::MIGRATION).await? {
        Some((_, MigrationRecord::Gone { to })) => {
            return Err(MigrationError::Gone { registry: target.name.to_owned(), to });
        }
        Some((_, MigrationRecord::Arriving { from })) if from != source.name => {
            return Err(MigrationError::Arriving { registry: target.name.to_owned(), from });
        }
        found => found.is_some(),
    };
    match source.check_usable().await {
        // An interrupted migration goes on where it has closed the source and not opened the target.
        Err(MigrationError::Gone { to, .. }) if arriving && to == target.name => {}
        checked => checked?,
    }
    let base: Option<(Entry, EpochBaseRecord)> = source.read(keys::EPOCH_BASE).await?;
    let (entries, revision) = source.list("").await?;
    let mut amount = Amount::default();
    let mut content = BTreeMap::new();
    for Entry { key, value, lease, .. } in entries {
        if lease.is_some() || key.starts_with(keys::PROCESSES) {
            amount.leased += 1;
        } else if key != keys::MIGRATION {
            content.insert(key, value);
        }
    }
    let revisions = base.map_or(0, |(_, base)| base.revisions).saturating_add(revision);
    let mut done: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let (there, _) = target.list("").await?;
    for Entry { key, value, .. } in there {
        match key.as_str() {
            keys::MIGRATION => {}
            // The source's revision may have grown since the first attempt; see below.
            keys::EPOCH_BASE if arriving => {}
            _ if arriving && content.get(&key) == Some(&value) => drop(done.insert(key, value)),
            _ => {
                let (registry, from) = (target.name.to_owned(), source.name.to_owned());
                return Err(MigrationError::NotEmpty { registry, key, from });
            }
        }
    }
    content.insert(keys::EPOCH_BASE.to_owned(), EpochBaseRecord { revisions }.encode());
    amount.keys = content.len();
    amount.bytes = content.iter().map(|(key, value)| key.len() + value.len()).sum();
    Ok(Plan { amount, content, done })
}

/// Marks the target, if it is not yet. Returns the revision of the mark.
async fn begin(source: Named<'_>, target: Named<'_>) -> Result<u64, MigrationError> {
    let mark = MigrationRecord::Arriving { from: source.name.to_owned() };
    let found = target.read::<MigrationRecord>(keys::MIGRATION).await?;
    if let Some((entry, _)) = found.filter(|(_, found)| *found == mark) {
        return Ok(entry.mod_revision);
    }
    let marked = target.registry.transact(mark.create(keys::MIGRATION)).await.map_err(target.failed())?;
    Ok(marked.revision)
}

/// The keys that the target lacks, in transactions within the limits.
fn batches(plan: &Plan) -> Vec<Vec<(&String, &Vec<u8>)>> {
    // Room for the comparison's key.
    const MOST_BYTES: usize = MAX_TRANSACTION_BYTES / 2;
    let mut batches: Vec<Vec<(&String, &Vec<u8>)>> = Vec::new();
    let mut bytes = 0;
    for (key, value) in plan.content.iter().filter(|(key, _)| !plan.done.contains_key(*key)) {
        let size = key.len() + value.len();
        match batches.last_mut() {
            Some(batch) if batch.len() < MAX_TRANSACTION && bytes + size <= MOST_BYTES => {
                batch.push((key, value));
                bytes += size;
            }
            _ => {
                batches.push(vec![(key, value)]);
                bytes = size;
            }
        }
    }
    batches
}

async fn compare(plan: &Plan, target: Named<'_>) -> Result<(), MigrationError> {
    let differs =
        |key: &str| MigrationError::Differs { registry: target.name.to_owned(), key: key.to_owned() };
    let (there, _) = target.list("").await?;
    let there: BTreeMap<String, Vec<u8>> = there
        .into_iter()
        .map(|entry| (entry.key, entry.value))
        .filter(|(key, _)| key != keys::MIGRATION)
        .collect();
    for (key, value) in &plan.content {
        if there.get(key) != Some(value) {
            return Err(differs(key));
        }
    }
    match there.keys().find(|key| !plan.content.contains_key(*key)) {
        Some(key) => Err(differs(key)),
        None => Ok(()),
    }
}

/// Closes the source, and only then opens the target.
async fn end(source: Named<'_>, target: Named<'_>, guard: u64) -> Result<(), MigrationError> {
    check_sessions(source).await?;
    let gone = MigrationRecord::Gone { to: target.name.to_owned() };
    if source.read::<MigrationRecord>(keys::MIGRATION).await?.is_none() {
        source.registry.transact(gone.create(keys::MIGRATION)).await.map_err(source.failed())?;
    }
    let open = Transaction::new().unchanged(keys::MIGRATION, guard).delete(keys::MIGRATION);
    target.registry.transact(open).await.map_err(target.failed())?;
    Ok(())
}
