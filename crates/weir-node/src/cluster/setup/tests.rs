use std::path::PathBuf;

use weir_cluster::Embedded;
use weir_cluster::records::keys;

use super::*;

const NOW: u64 = 1_795_435_200;

/// A host, and the registries that its configuration may name.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn keys(&self) -> PathBuf {
        self.0.path().join("keys")
    }

    fn registry(&self, name: &str) -> Embedded {
        Embedded::open(&self.0.path().join(name)).unwrap()
    }

    fn store(&self) -> Store {
        Store::open(&self.keys()).unwrap()
    }

    async fn init(&self, registry: &Embedded) -> Result<Made, ApiError> {
        self.init_with(registry, |_| {}).await
    }

    async fn init_with(&self, registry: &Embedded, warn: impl Fn(&str)) -> Result<Made, ApiError> {
        let text = format!(
            "name = \"n1\"\nstate_dir = \"/nonexistent\"\n[registry]\nsocket = \"/nonexistent/r\"\n[identity]\ndirectory = \"{}\"\n\
             [peers]\nlisten = \"127.0.0.1:0\"\n",
            self.keys().display()
        );
        let config = Config::parse(&text, std::path::Path::new("weir.toml")).unwrap();
        init(&config, registry, &[], NOW, warn).await
    }

    /// All files with their contents.
    fn files(&self) -> Vec<(String, Vec<u8>)> {
        let all = std::fs::read_dir(self.keys()).unwrap().map(|one| one.unwrap());
        let mut all: Vec<_> = all
            .map(|one| (one.file_name().into_string().unwrap(), std::fs::read(one.path()).unwrap()))
            .collect();
        all.sort();
        all
    }
}

async fn snapshot(registry: &Embedded) -> Snapshot {
    Snapshot::read(registry).await.unwrap()
}

#[tokio::test]
async fn nodes_without_identity_are_named() {
    let place = Place::new();
    let registry = place.registry("registry");
    let session = |name: &str| Transaction::new().put(keys::session(name), "1");
    registry.transact(session("n1")).await.unwrap();
    registry.transact(session("n9")).await.unwrap();
    let told = std::cell::RefCell::new(Vec::new());
    place.init_with(&registry, |text| told.borrow_mut().push(text.to_owned())).await.unwrap();
    let told = told.into_inner();
    assert!(matches!(&told[..], [one] if one.contains("this cluster: n9. Nodes with one")), "{told:?}");
}

#[tokio::test]
async fn a_member_is_refused_whatever_its_registry_says() {
    let (place, keys) = (Place::new(), ["ca.pem", "join.pem", "node.pem", "revoked.json", "trust.pem"]);
    let (own, other) = (place.registry("own"), place.registry("other"));
    let made = place.init(&own).await.unwrap();
    let before = place.files();
    let names: Vec<&str> = before.iter().map(|(name, _)| &**name).filter(|name| *name != ".lock").collect();
    assert_eq!(names, [keys[0], keys[2], keys[3], keys[4]]);
    // An empty registry (a wrong prefix), the right one, and one that has lost the authority's record.
    for round in 0..3 {
        if round == 2 {
            let delete = Transaction::new().delete(keys::AUTHORITIES);
            own.transact(delete).await.unwrap();
        }
        let refused = place.init(if round == 0 { &other } else { &own }).await.unwrap_err();
        assert_eq!(refused.kind, ApiErrorKind::Exists);
        let words = format!("this host is node n1 of cluster {} already", made.cluster);
        assert!(refused.message.contains(&words) && refused.hint.contains("registry.prefix"), "{refused:?}");
        assert_eq!(place.files(), before);
    }
    assert!(snapshot(&other).await.is_blank());
    // Neither with a key that cannot be used, nor without it.
    std::fs::write(place.keys().join("node.pem"), "").unwrap();
    let refused = place.init(&other).await.unwrap_err();
    assert!(refused.message.contains("node.pem is damaged"), "{refused:?}");
    std::fs::remove_file(place.keys().join("node.pem")).unwrap();
    let refused = place.init(&other).await.unwrap_err();
    assert!(refused.message.contains("trust.pem exists"), "{refused:?}");
    assert!(snapshot(&other).await.is_blank());
}

/// The process ends after each write, and the command is run again.
#[tokio::test]
async fn an_interrupted_attempt_goes_on() {
    let place = Place::new();
    let registry = place.registry("registry");
    let authority = Authority::create(ClusterId::random().unwrap(), NOW).unwrap();
    place.store().create_authority(&authority).unwrap();
    let fingerprint = authority.certificate().fingerprint().to_string();
    place.store().note_setup("/nonexistent/r").unwrap();
    let key = place.store().joining_key().unwrap().public();
    // A file that cannot be written, once the registry has the records.
    std::fs::create_dir(place.keys().join("revoked.json")).unwrap();
    let refused = place.init(&registry).await.unwrap_err();
    assert!(refused.hint.contains("run the same command again"), "{refused:?}");
    std::fs::remove_dir(place.keys().join("revoked.json")).unwrap();
    let made = place.init(&registry).await.unwrap();
    assert_eq!(made.authority, fingerprint);
    // After the registry has the records, and after each of the files that follow.
    let name = |name: &str| place.keys().join(name);
    for kept in [&[][..], &["trust.pem"], &["trust.pem", "revoked.json"]] {
        // The key comes first in the file.
        std::fs::rename(name("node.pem"), name("join.pem")).unwrap();
        for lost in ["trust.pem", "revoked.json"].iter().filter(|one| !kept.contains(one)) {
            std::fs::remove_file(name(lost)).unwrap();
        }
        assert_eq!(place.init(&registry).await.unwrap(), made);
        assert!(!name("join.pem").exists());
        let (own, snapshot) = (place.store().node().unwrap(), snapshot(&registry).await);
        assert_eq!(own.facts().key, key.id());
        assert!(snapshot.issued.iter().any(|one| one.facts == *own.facts()), "it has a record");
        place.store().trust().unwrap();
    }
    // That of another host is none of its own.
    let other = Place::new();
    let refused = other.init(&registry).await.unwrap_err();
    assert!(refused.message.contains(&fingerprint), "{refused:?}");
    assert!(!other.keys().exists());
    std::fs::remove_file(name("node.pem")).unwrap();
    assert_eq!(place.init(&registry).await.unwrap_err().kind, ApiErrorKind::Exists);
    assert!(!name("join.pem").exists() && !name("node.pem").exists());
}

#[tokio::test]
async fn a_registry_without_its_authority_gets_no_other_one() {
    let (first, place) = (Place::new(), Place::new());
    let registry = first.registry("registry");
    first.init(&registry).await.unwrap();
    registry.transact(Transaction::new().delete(keys::AUTHORITIES)).await.unwrap();
    let refused = place.init(&registry).await.unwrap_err();
    let words = ["the key identity/authorities is missing", "from a backup of the registry"];
    assert!(words.iter().all(|word| refused.message.contains(word)), "{refused:?}");
    registry.transact(Transaction::new().put(keys::AUTHORITIES, "{}")).await.unwrap();
    let refused = place.init(&registry).await.unwrap_err().message;
    assert!(refused.contains("identity/authorities in the registry: it is damaged"), "{refused}");
    assert!(refused.contains("restore this key") && !refused.contains("delete"), "{refused}");
    assert!(!place.keys().exists());
}

#[tokio::test]
async fn an_authority_that_lies_there_is_not_taken_for_this_clusters() {
    let place = Place::new();
    let (own, other) = (place.registry("own"), place.registry("other"));
    let other_cluster = Authority::create(ClusterId::random().unwrap(), NOW).unwrap();
    place.store().create_authority(&other_cluster).unwrap();
    let before = place.files();
    for _ in 0..2 {
        let refused = place.init(&own).await.unwrap_err();
        assert_eq!(refused.kind, ApiErrorKind::Exists);
        assert!(refused.message.contains("ca.pem is the authority of another cluster"), "{refused:?}");
        assert_eq!(place.files(), before);
    }
    assert!(snapshot(&own).await.is_blank());
    // The key of a host that was refused when it joined says nothing of it.
    place.store().joining_key().unwrap();
    place.init(&own).await.unwrap_err();
    // An interrupted attempt has left a note, and not for another registry.
    place.store().note_setup("127.0.0.1:2379 (registry.prefix = \"weir/a\")").unwrap();
    let refused = place.init(&other).await.unwrap_err();
    assert!(refused.message.contains("weir/a") && refused.message.contains("/nonexistent/r"), "{refused:?}");
    assert!(snapshot(&other).await.is_blank());
    place.store().note_setup("/nonexistent/r").unwrap();
    let made = place.init(&other).await.unwrap();
    assert_eq!(made.cluster, other_cluster.certificate().cluster().to_string());
}
