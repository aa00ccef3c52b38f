//! Volumes that are NBD servers, and their disks: exports that are there already.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use weir_block::hash::{FNV_BASIS, fnv1a};
use weir_cluster::migration::first_epoch;
use weir_cluster::records::{DiskRecord, Limit, Record, Source, VolumeKind, VolumeRecord, check_name, keys};
use weir_nbd::client::{Place, places};
use weir_nbd::{Address, Uri, UriError};
use weir_volume::nbd;

use super::setups::Setup;
use super::volumes::exists;
use super::{Answer, Operations, check_named, parse_policy};
use crate::api::{
    AdoptExport, ApiError, ApiErrorKind, CreateVolume, DiskView, ServerExport, ServerExports, VolumePlan,
    VolumeView,
};
use crate::control::node::{blocking, random, server_of, unavailable};
use crate::control::provisioning::{self, to_its_end};

/// Longest wait for the addresses of a server's name.
const RESOLVES: Duration = Duration::from_secs(2);

/// Servers that are asked for their exports at once, for whoever only looks (P10).
static SURVEYS: Semaphore = Semaphore::const_new(4);

impl Operations {
    /// What would be done to make a volume of a server: it is asked for its exports.
    pub(super) async fn plan_nbd(&self, wanted: CreateVolume) -> Answer<VolumePlan> {
        let (record, exports) = self.look_at_server(wanted).await?;
        let action =
            format!("use the NBD server {}, which lists {}", record.place(), listed(exports.as_deref()));
        Ok(VolumePlan { volume: record.name, action, identity: None, destroys: false })
    }

    /// Makes a volume of a server that can be reached from here.
    pub(super) async fn create_nbd(&self, wanted: CreateVolume) -> Answer<VolumeView> {
        let this = self.clone();
        // The setup ends also if its waiter goes away.
        to_its_end(async move { this.make_nbd(wanted).await }).await
    }

    async fn make_nbd(&self, wanted: CreateVolume) -> Answer<VolumeView> {
        let keys = setup_keys(&check_server(&wanted)?).await;
        let setup = Setup::begin(&self.node, &wanted.name, keys).await?;
        let make = async {
            let (record, exports) = self.look_at_server(wanted).await?;
            Ok(VolumeView { exports, ..self.register(record, Some(&setup)).await? })
        };
        let made = make.await;
        if made.is_err() {
            setup.end().await;
        }
        made
    }

    async fn look_at_server(&self, wanted: CreateVolume) -> Answer<(VolumeRecord, Option<Vec<String>>)> {
        check_named(&wanted.name)?;
        let server = check_server(&wanted)?;
        // The same for everybody who writes it so.
        let place = server.to_string();
        let record = VolumeRecord::nbd(wanted.name, place.clone(), fnv1a(FNV_BASIS, place.bytes()));
        record.check().map_err(|error| invalid(error.to_string()))?;
        let known = self.volume_records().await?;
        if known.iter().any(|other| other.name == record.name) {
            return Err(exists(&record.name));
        }
        if let Some(other) = known.iter().find(|other| other.nbd == record.nbd) {
            return Err(super::volumes::same_volume(&record, &other.name));
        }
        self.check_server_is_new(&known, &record, &server).await?;
        let exports = self.bounded(blocking(move || Ok(nbd::survey(&server)?))).await.map_err(|error| {
            let me = self.me().node;
            error.hint(format!(
                "node {me} has tried; every node that is to open its disks has to reach it by this URI"
            ))
        })?;
        Ok((record, exports))
    }

    /// Refuses a server that is another volume by another name, as far as this node can tell: an export of both would be two disks, which
    /// overwrite each other.
    async fn check_server_is_new(
        &self,
        known: &[VolumeRecord],
        record: &VolumeRecord,
        server: &Uri,
    ) -> Answer<()> {
        let Some(places) = places_of(server.address.clone()).await else { return Ok(()) };
        let mut others = JoinSet::new();
        for other in known.iter().filter(|other| other.name != record.name) {
            let Ok(Uri { address, .. }) = server_of(other) else { continue };
            let name = other.name.clone();
            others.spawn(async move { Some((name, address.clone(), places_of(address).await?)) });
        }
        while let Some(other) = others.join_next().await {
            let Ok(Some((other, address, found))) = other else { continue };
            if found.iter().any(|place| places.contains(place)) {
                let place = record.place();
                let message =
                    format!("{place} is the server of volume {other} already, which names it {address}");
                return Err(ApiError::new(ApiErrorKind::Exists, message)
                    .hint("make its exports disks of that volume"));
            }
        }
        Ok(())
    }

    /// Asks the server of a volume for its exports; those that are disks come first.
    ///
    /// # Errors
    /// As [`Operations::volumes`]; the volume is no server, or the server cannot be reached.
    pub async fn server_exports(&self, volume: &str) -> Answer<ServerExports> {
        check_named(volume)?;
        let at = self.node.volume(volume).await?;
        let refused = |reason| ApiError::new(ApiErrorKind::Refused, reason);
        let server = server_of(&at).map_err(refused)?;
        let look = async {
            // Each holds a thread for as long as the server lets it.
            let _turn = SURVEYS.acquire().await;
            blocking(move || Ok(nbd::survey(&server)?)).await
        };
        let listed = self.bounded(look).await?;
        let disks = self.node.records.disks.now();
        let of_volume = disks.values().filter(|record| record.volume == volume);
        let adopted: BTreeMap<&str, &str> = of_volume
            .filter_map(|record| match &record.source {
                Source::Export { name } => Some((name.as_str(), record.name.as_str())),
                _ => None,
            })
            .collect();
        let exports = listed.map(|names| {
            let disk_of = |name: &str| adopted.get(name).map(|disk| (*disk).to_owned());
            let export = |name: String| ServerExport { disk: disk_of(&name), name };
            let mut exports: Vec<ServerExport> = names.into_iter().map(export).collect();
            exports.sort_by_cached_key(|export| (export.disk.is_none(), export.name.clone()));
            exports
        });
        Ok(ServerExports { volume: volume.to_owned(), exports })
    }

    /// Makes a disk of an export of its volume's server. Nothing is written there.
    ///
    /// # Errors
    /// As [`Operations::disks`]; the server cannot be reached; there is no such export, or another disk has it, or a disk cannot be on it.
    pub async fn adopt_export(&self, wanted: AdoptExport) -> Answer<DiskView> {
        let AdoptExport { name, volume, export, size, logical_block, policy, medium, limit } = wanted;
        check_name(&name).map_err(|error| invalid(error.to_string()))?;
        self.check_cluster()?;
        let at = self.node.volume(&volume).await?;
        if at.kind != VolumeKind::Nbd {
            let message = format!("volume {volume} is no NBD server: its disks are made, with a size");
            return Err(ApiError::new(ApiErrorKind::Invalid, message).hint("give --size, and no --export"));
        }
        let export = export.unwrap_or_else(|| name.clone());
        if export.chars().any(char::is_control) {
            let message =
                format!("the export `{}` has control characters in its name", export.escape_debug());
            return Err(invalid(message).hint("rename it at the server"));
        }
        let server = server_of(&at).map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
        self.check_server_is_new(&self.volume_records().await?, &at, &server).await?;
        let of = export.clone();
        let look = blocking(move || Ok(nbd::describe(&server, &of, logical_block)?));
        let (found, block) = self.bounded(look).await?;
        if let Some(size) = size.filter(|&size| size != found) {
            let message =
                format!("the export `{export}` of {} has {found} bytes, and not {size}", at.place());
            return Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("leave the size out, or resize the export at the server first"));
        }
        let policy = parse_policy(&policy)?;
        let source = Source::Export { name: export.clone() };
        let mut record = DiskRecord::new(&name, &volume, source, found, block, policy);
        record.id = random();
        record.medium = medium;
        record.limit = limit.map(Limit::from);
        record.check().map_err(|error| invalid(error.to_string()))?;
        self.check_medium(medium)?;
        // Above every epoch of an earlier disk of this name (P2).
        let known = self.node.registry.list(&keys::disk(&name)).await;
        let revision = known.map_err(unavailable)?.revision;
        record.epoch = first_epoch(&*self.node.registry, revision).await.map_err(unavailable)?;
        provisioning::adopt_export(&self.node, &record).await?;
        let text = format!(
            "of the export `{export}` in volume {volume}, with what that holds, {found} bytes, {policy}, {medium}"
        );
        self.node.journal.tell("disk-created", &name, text);
        let view = self.views([&record], Vec::new(), None).await.into_iter().next();
        view.ok_or_else(|| ApiError::new(ApiErrorKind::Unavailable, "the disk has just been made"))
    }
}

/// Where an address leads to; `None`: this node cannot tell, or not in time.
async fn places_of(address: Address) -> Option<Vec<Place>> {
    let resolving = tokio::task::spawn_blocking(move || places(&address));
    tokio::time::timeout(RESOLVES, resolving).await.ok()?.ok()?.ok()
}

/// The keys under which a server is made a volume: the same for each of its names, as far as this node can tell.
async fn setup_keys(server: &Uri) -> Vec<String> {
    let places = places_of(server.address.clone()).await.unwrap_or_default();
    let key = |place: &Place| match place {
        Place::Tcp(address) => keys::nbd_setup(&address.to_string()),
        Place::Unix(filesystem, number) => keys::nbd_setup(&format!("unix-{filesystem:x}-{number:x}")),
    };
    let mut all: BTreeSet<String> = places.iter().map(key).collect();
    if all.is_empty() {
        all.insert(keys::nbd_setup(&server.to_string()));
    }
    all.into_iter().collect()
}

fn invalid(message: String) -> ApiError {
    ApiError::new(ApiErrorKind::Invalid, message)
}

/// A wish for a volume that is a server has nothing that only a path has.
fn check_server(wanted: &CreateVolume) -> Answer<Uri> {
    let CreateVolume { path, server, format, identity, destroy, .. } = wanted;
    if !path.as_os_str().is_empty() || format.is_some() || identity.is_some() || *destroy {
        return Err(invalid(
            "an NBD server has no path, no format, no identity and nothing to destroy".into(),
        ));
    }
    let Some(server) = server else {
        return Err(invalid("a volume of the kind nbd is a server: add --server nbd://HOST:PORT".into()));
    };
    let uri: Uri = server.parse().map_err(|error: UriError| invalid(error.to_string()))?;
    if let Address::Unix(socket) = &uri.address
        && !socket.is_absolute()
    {
        let message =
            format!("{server}: the path of the socket is relative, and each node has a directory of its own");
        return Err(invalid(message).hint("give an absolute path"));
    }
    if !uri.export.is_empty() {
        let message = format!("{server} names the export `{}`, and a volume is a whole server", uri.export);
        return Err(
            invalid(message).hint("leave the export out here, and give it with `weir disk create --export`")
        );
    }
    Ok(uri)
}

fn listed(exports: Option<&[String]>) -> String {
    match exports {
        Some(exports) => format!("these exports: {}", nbd::named(exports)),
        None => "no exports".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::control::disk::tests::node_in;
    use crate::control::faulty_registry::FaultyRegistry;

    /// Neither finds the other's volume among those that there are.
    #[tokio::test]
    async fn of_two_nodes_that_use_one_server_by_two_names_at_once_one_does() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Arc::new(FaultyRegistry::open(directory.path(), Arc::default()));
        let (a, _) = node_in(registry.clone(), "a").await;
        let (b, _) = node_in(registry, "b").await;
        let wanted = |name: &str, server: &str| CreateVolume {
            kind: "nbd".into(),
            server: Some(server.into()),
            ..CreateVolume::dir(name, PathBuf::new())
        };
        let theirs = setup_keys(&check_server(&wanted("w", "nbd://127.0.0.1:1")).unwrap()).await;
        let begun = Setup::begin(&b, "w", theirs).await.unwrap();
        let operations = Operations::new(Arc::clone(&a), Arc::default(), Arc::default());
        let refused = operations.create_nbd(wanted("v", "nbd://localhost:1")).await.unwrap_err();
        assert!(refused.message.contains("node b is making volume w"), "{refused}");
        begun.end().await;
        let unreachable = operations.create_nbd(wanted("v", "nbd://localhost:1")).await.unwrap_err();
        assert!(unreachable.hint.contains("node a has tried"), "{unreachable:?}");
        assert!(a.registry.list(keys::NBD_SETUPS).await.unwrap().entries.is_empty());
    }

    #[test]
    fn a_volume_is_a_whole_server_and_nothing_else() {
        let wanted = |server: Option<&str>| CreateVolume {
            kind: "nbd".into(),
            server: server.map(str::to_owned),
            ..CreateVolume::dir("v", PathBuf::new())
        };
        let refused = |wanted: &CreateVolume| check_server(wanted).unwrap_err().message;
        assert!(refused(&wanted(None)).contains("--server"));
        assert!(refused(&wanted(Some("nbds://h/"))).contains("TLS"));
        assert!(refused(&wanted(Some("nbd://h/e"))).contains("names the export `e`"));
        assert!(refused(&wanted(Some("nbd+unix:///?socket=here"))).contains("relative"));
        let both = CreateVolume { path: "/srv".into(), ..wanted(Some("nbd://h/")) };
        assert!(refused(&both).contains("no path"));
        let same = ["nbd://h", "nbd://h:10809", "nbd://h:10809/"];
        let same = same.map(|text| check_server(&wanted(Some(text))).unwrap().to_string());
        assert_eq!(same, ["nbd://h:10809/"; 3].map(str::to_owned));
    }
}
