//! `weir cluster migrate-registry`

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use weir_cluster::Embedded;
use weir_cluster::migration::{Amount, MigrationError, Named, look, migrate, without_sessions};
use weir_cluster::registry::RegistryErrorKind;
use weir_node::config::Config;
use weir_node::units::{about, count};

use crate::failure::{Failure, FailureKind};
use crate::options::Global;
use crate::output::{note, print};

/// The longest wait for the leases of nodes that have stopped. A lease lasts for at most a minute.
const PATIENCE: Duration = Duration::from_secs(90);

/// What was copied, or would be.
#[derive(Debug, Serialize)]
#[serde(tag = "schema", rename = "weir.registry-migrated/1")]
struct Migrated {
    /// The registry of one machine: its file.
    from: PathBuf,
    /// The registry in etcd.
    to: String,
    /// Keys without a lease.
    keys: usize,
    /// Bytes of these keys and their values.
    size_bytes: usize,
    /// Keys of nodes' sessions, which are not copied.
    leased_keys: usize,
    /// False for a dry run.
    done: bool,
}

/// Copies the registry in the file `from` to the etcd that `config` names.
pub fn run(global: &Global, config: &Path, from: &Path, dry_run: bool) -> Result<(), Failure> {
    let settings = Config::load(config)?;
    if settings.registry.etcd.is_empty() {
        return Err(Failure::usage(format!(
            "{}: registry.etcd is not set: it says where the registry goes",
            config.display()
        )));
    }
    // Opening a file that is not there would make an empty registry.
    let from = from.canonicalize().map_err(|error| Failure::unreadable(from, &error))?;
    let to = format!("{} in etcd at {}", settings.registry.prefix, settings.registry.place());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("cannot start the runtime: {error}")))?;
    let amount = runtime.block_on(async {
        let source = Embedded::open(&from).map_err(|error| {
            Failure::refused(error)
                .hint("stop `weir registry` and all nodes first; disks are not served meanwhile")
        })?;
        let target = weir_node::registry(&settings)?;
        let name = from.display().to_string();
        let (source, target) =
            (Named { registry: &source, name: &name }, Named { registry: &*target, name: &to });
        carry_out(source, target, dry_run).await.map_err(failure)
    })?;
    let Amount { keys, bytes, leased } = amount;
    let migrated = Migrated { from, to, keys, size_bytes: bytes, leased_keys: leased, done: !dry_run };
    print(global.output, &migrated, said)
}

async fn carry_out(source: Named<'_>, target: Named<'_>, dry_run: bool) -> Result<Amount, MigrationError> {
    if dry_run {
        return look(source, target).await;
    }
    // Nobody renews the leases of nodes that a killed process has left, so they end.
    without_sessions(source, PATIENCE).await?;
    let mut told = 0;
    migrate(source, target, &mut |copied| {
        if copied >= told + 1000 {
            told = copied;
            note(&format!("{} copied", count(copied as u64, "key")));
        }
    })
    .await
}

fn said(migrated: &Migrated) -> String {
    let Migrated { from, to, keys, size_bytes, done, .. } = migrated;
    let amount = format!(
        "{} ({}) from {} to {to}",
        count(*keys as u64, "key"),
        about(*size_bytes as u64),
        from.display()
    );
    if *done {
        format!(
            "copied and compared: {amount}. Nodes refuse the file from now on: start them with registry.etcd in their \
             configurations"
        )
    } else {
        format!("would copy {amount}; nothing was changed")
    }
}

fn failure(error: MigrationError) -> Failure {
    match &error {
        MigrationError::InUse { .. }
        | MigrationError::NotEmpty { .. }
        | MigrationError::Gone { .. }
        | MigrationError::Arriving { .. } => Failure::refused(error),
        MigrationError::Registry { source, .. } if source.kind() == RegistryErrorKind::Retry => {
            Failure::new(FailureKind::Unavailable, error)
                .hint("repeat the command: it goes on where it was interrupted")
        }
        _ => Failure::failed(error),
    }
}
