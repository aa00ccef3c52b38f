use weir_cluster::Embedded;
use weir_cluster::records::Record;
use weir_identity::{Endpoint, Invitation, Key, NODE_LIFETIME, invite};

use super::*;
use crate::cluster::records::{Announced, announced};
use crate::cluster::setup;
use crate::config::Config;

const NOW: u64 = 1_795_435_200;

/// A cluster whose only node `n1` has the key.
struct Cluster {
    directory: tempfile::TempDir,
    registry: Embedded,
    store: Store,
    turns: Mutex<()>,
}

impl Cluster {
    async fn new() -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        let registry = Embedded::open(&directory.path().join("registry")).unwrap();
        let text = format!(
            "name = \"n1\"\nstate_dir = \"/nonexistent\"\n[registry]\nsocket = \"/nonexistent/r\"\n[identity]\ndirectory = \"{}\"\n\
             [peers]\nlisten = \"127.0.0.1:0\"\n",
            directory.path().join("keys").display()
        );
        let config = Config::parse(&text, std::path::Path::new("weir.toml")).unwrap();
        setup::init(&config, &registry, &[], NOW, |_| {}).await.unwrap();
        let store = Store::open(&directory.path().join("keys")).unwrap();
        let cluster = Cluster { directory, registry, store, turns: Mutex::default() };
        cluster.announces("n1").await;
        cluster
    }

    async fn snapshot(&self) -> Snapshot {
        Snapshot::read(&self.registry).await.unwrap()
    }

    async fn put(&self, op: weir_cluster::registry::Op) {
        let put = Transaction { compares: Vec::new(), ops: vec![op] };
        self.registry.transact(put).await.unwrap();
    }

    /// The node trusts whom the record says.
    async fn announces(&self, name: &str) {
        let node: Name = name.parse().unwrap();
        let trusts = self.snapshot().await.trusted().iter().map(CaCertificate::fingerprint).collect();
        let own = Announced { node: node.clone(), trusts, api: None, signs: name == "n1" };
        self.put(own.put(announced(&node))).await;
    }

    /// A node with a certificate of the authority that signs.
    async fn joins(&self, name: &str) {
        let authority = self.store.authority().unwrap();
        let (name, key) = (name.parse().unwrap(), Key::generate().unwrap().public());
        let issued = authority.issue_node(&name, &[], &key, NOW, NODE_LIFETIME).unwrap();
        self.put(put(RecordId::Issued(issued.record.facts.serial), issued.record)).await;
    }

    async fn invites(&self) -> TokenRecord {
        let pins = self.snapshot().await.trusted().iter().map(CaCertificate::fingerprint).collect();
        let endpoints: Vec<Endpoint> = vec!["n1:1".parse().unwrap()];
        let invitation =
            Invitation { only_for: None, hosts: vec![], pins, endpoints, ttl: 3600, readmits: false };
        let token = invite(invitation, NOW).unwrap().1;
        self.put(put(RecordId::Token(token.id), token.clone())).await;
        token
    }

    async fn rotate(&self, wanted: Rotate, running: &[&str]) -> Result<RotationView, ApiError> {
        rotate(&self.registry, (&self.store, &self.turns), wanted, |name| running.contains(&name), NOW).await
    }

    async fn advance(&self) -> Option<Fingerprint> {
        advance(&self.registry, (&self.store, &self.turns), NOW).await.unwrap().signs
    }

    fn signing(&self) -> Fingerprint {
        self.store.authority().unwrap().certificate().fingerprint()
    }
}

const BEGIN: Rotate = Rotate { finish: false, abandon: false, force: false, dry_run: false, no_begin: false };
const FINISH: Rotate = Rotate { finish: true, ..BEGIN };
const FORCE: Rotate = Rotate { force: true, ..BEGIN };
const ABANDON: Rotate = Rotate { abandon: true, ..BEGIN };

fn waits(view: &RotationView) -> Vec<String> {
    view.waits_for.iter().map(|one| format!("{} {}", one.kind, one.name)).collect()
}

/// The process ends after each single write, to the registry or to a file, and is started again.
#[tokio::test]
async fn a_crash_between_two_writes_is_made_up_for() {
    let cluster = Cluster::new().await;
    let former = cluster.signing();
    // After the new key was stored.
    let cluster_id = cluster.snapshot().await.signer().unwrap().cluster();
    let next = Authority::create(cluster_id, NOW).unwrap();
    cluster.store.create_next_authority(&next).unwrap();
    let next = next.certificate().fingerprint();
    let begun = cluster.rotate(BEGIN, &["n1"]).await.unwrap();
    assert_eq!((&*begun.phase, begun.other), (RotationView::INTRODUCING, Some(next.to_string())));
    // After it was taken back in the registry.
    let snapshot = cluster.snapshot().await;
    let (authorities, _) = snapshot.authorities.clone().unwrap();
    let none = weir_identity::Revocations::default();
    let back = authorities.abandon(Use { issued: &[], tokens: &[], revoked: &none }, NOW).unwrap();
    cluster.registry.transact(transaction(&snapshot, &back, Vec::new(), NOW)).await.unwrap();
    assert!(cluster.advance().await.is_none() && cluster.signing() == former);
    let begun = cluster.rotate(BEGIN, &["n1"]).await.unwrap();
    assert_eq!(begun.other, Some(next.to_string()));
    // After the registry says that the new one signs.
    assert_eq!(cluster.advance().await, None, "n1 does not trust it yet");
    cluster.announces("n1").await;
    let snapshot = cluster.snapshot().await;
    let seen = Seen::of(&snapshot, NOW).unwrap();
    let renewing = seen.authorities.renew(&seen.members, &seen.tokens, NOW).unwrap();
    cluster.registry.transact(transaction(&snapshot, &renewing, Vec::new(), NOW)).await.unwrap();
    let signs = admission::authority(&cluster.store, &cluster.snapshot().await).unwrap();
    assert_eq!(
        signs.unwrap().certificate().fingerprint(),
        next,
        "with the key that is beside the former one"
    );
    assert_eq!(cluster.signing(), former);
    assert_eq!(cluster.advance().await, None, "the step was taken before");
    assert_eq!(cluster.signing(), next);
    assert!(matches!(cluster.store.next_authority(), Err(StoreError::Missing { .. })));
}

#[tokio::test]
async fn the_new_authority_signs_when_everyone_can_believe_it() {
    let cluster = Cluster::new().await;
    cluster.joins("n2").await;
    let token = cluster.invites().await;
    let would = cluster.rotate(Rotate { dry_run: true, ..BEGIN }, &["n1"]).await.unwrap();
    assert_eq!(waits(&would), ["node n2".to_owned(), format!("token {}", token.id)]);
    assert!(matches!(cluster.store.next_authority(), Err(StoreError::Missing { .. })), "only said");
    let begun = cluster.rotate(BEGIN, &["n1", "n2"]).await.unwrap();
    assert_eq!(waits(&begun), ["node n1".to_owned(), "node n2".into(), format!("token {}", token.id)]);
    cluster.announces("n1").await;
    assert_eq!(cluster.advance().await, None);
    // A node that runs is never left behind; one that is down is, and the token is withdrawn.
    let error = cluster.rotate(FORCE, &["n1", "n2"]).await.unwrap_err();
    assert!(error.message.contains("a node that runs is not left behind: node n2"), "{error}");
    assert!(cluster.snapshot().await.tokens[&token.id].0.is_open(NOW), "nothing was changed");
    let forced = cluster.rotate(FORCE, &["n1"]).await.unwrap();
    assert_eq!(forced.phase, RotationView::RENEWING);
    assert!(!cluster.snapshot().await.tokens[&token.id].0.is_open(NOW));
    assert_eq!(waits(&forced), ["node n1", "node n2"]);
    let error = cluster.rotate(FINISH, &["n1"]).await.unwrap_err();
    assert!(error.message.contains("node n1") && error.message.contains("node n2"), "{error}");
    let error = cluster.rotate(Rotate { force: true, ..FINISH }, &["n1"]).await.unwrap_err();
    assert!(error.message.contains("node n1") && !error.message.contains("node n2"), "{error}");
    let error = cluster.rotate(ABANDON, &["n1"]).await.unwrap_err();
    assert!(error.message.contains("signs already"), "{error}");
    let end = cluster.rotate(Rotate { force: true, ..FINISH }, &[]).await.unwrap();
    assert_eq!((&*end.phase, end.authority), (RotationView::SETTLED, cluster.signing().to_string()));
    // Whoever was left behind has to join again, and holds no other rotation back.
    let certificates = crate::cluster::changes::list(&cluster.registry, NOW).await.unwrap().certificates;
    assert!(certificates.iter().all(|one| one.state == "its authority was removed"), "{certificates:?}");
    assert_eq!(waits(&cluster.rotate(BEGIN, &[]).await.unwrap()), Vec::<String>::new());
}

/// A node that was down during a rotation has the former key, and says still that it signs.
#[tokio::test]
async fn the_last_node_that_signs_now_is_not_revoked() {
    let cluster = Cluster::new().await;
    cluster.joins("n1").await;
    let node: Name = "n2".parse().unwrap();
    let trusts = cluster.snapshot().await.trusted().iter().map(CaCertificate::fingerprint).collect();
    let stale = Announced { node: node.clone(), trusts, api: None, signs: true };
    cluster.put(stale.put(announced(&node))).await;
    let snapshot = cluster.snapshot().await;
    assert!(snapshot.nodes.iter().all(|one| snapshot.can_sign(one)));
    cluster.rotate(BEGIN, &["n1"]).await.unwrap();
    cluster.announces("n1").await;
    assert!(cluster.advance().await.is_some());
    cluster.announces("n1").await;
    let revoke = crate::cluster::views::Revoke {
        name: "n1".parse().unwrap(),
        client: false,
        reason: String::new(),
        dry_run: false,
        lose_authority: false,
    };
    let refused = crate::cluster::changes::revoke(&cluster.registry, &revoke, NOW).await.unwrap_err();
    assert!(refused.message.contains("only node n1 has the key"), "{refused}");
    let no_key = no_key(&cluster.snapshot().await);
    assert!(no_key.hint.contains("n1") && !no_key.hint.contains("n2"), "{no_key:?}");
}

/// Files that were made meanwhile name both authorities for ever.
#[tokio::test]
async fn the_end_names_the_clients_whose_files_trust_the_former_authority() {
    let cluster = Cluster::new().await;
    cluster.rotate(BEGIN, &["n1"]).await.unwrap();
    cluster.announces("n1").await;
    assert!(cluster.advance().await.is_some());
    let key = Key::generate().unwrap().public();
    let grant = weir_identity::Grant::Exports(["d".parse().unwrap()].into());
    let authority = cluster.store.authority().unwrap();
    let issued = authority.issue_client(&"guest".parse().unwrap(), &grant, &key, NOW, 3600).unwrap();
    cluster.put(put(RecordId::Issued(issued.record.facts.serial), issued.record)).await;
    let end = cluster.rotate(Rotate { force: true, ..FINISH }, &[]).await.unwrap();
    assert_eq!((&*end.phase, end.trust_former), (RotationView::SETTLED, vec!["guest".to_owned()]));
    let refused = cluster.rotate(Rotate { no_begin: true, ..FORCE }, &["n1"]).await.unwrap_err();
    assert!(refused.message.contains("no rotation"), "{refused}");
    assert!(cluster.advance().await.is_none() && cluster.snapshot().await.trusted().len() == 1);
}

/// Two operators at once: whichever comes first, a rotation that is under way has its key.
#[tokio::test]
async fn steps_that_cross_leave_every_rotation_its_key() {
    let cluster = Cluster::new().await;
    for _ in 0..50 {
        cluster.rotate(BEGIN, &["n1"]).await.unwrap();
        let (taken_back, begun, again) = tokio::join!(
            cluster.rotate(ABANDON, &["n1"]),
            cluster.rotate(BEGIN, &["n1"]),
            cluster.rotate(BEGIN, &["n1"])
        );
        assert!(taken_back.is_ok() && begun.is_ok() && again.is_ok(), "{taken_back:?} {begun:?} {again:?}");
        let (authorities, _) = cluster.snapshot().await.authorities.unwrap();
        match &authorities {
            Authorities::Introducing { next, .. } => {
                assert!(is_next_here(&cluster.store, next.certificate()).unwrap());
                cluster.rotate(ABANDON, &["n1"]).await.unwrap();
            }
            _ => assert!(matches!(cluster.store.next_authority(), Err(StoreError::Missing { .. }))),
        }
    }
}

/// With the key of a former authority, or without any, a node takes no step.
#[tokio::test]
async fn only_the_node_with_the_key_rotates() {
    let cluster = Cluster::new().await;
    cluster.rotate(BEGIN, &["n1"]).await.unwrap();
    cluster.announces("n1").await;
    let other = Store::open(&cluster.directory.path().join("other")).unwrap();
    other.create_authority(&cluster.store.authority().unwrap()).unwrap();
    let turns = Mutex::default();
    let at = |store| rotate(&cluster.registry, (store, &turns), BEGIN, |_| true, NOW);
    let error = at(&other).await.unwrap_err();
    assert!(error.message.contains("the key of the new certificate authority"), "{error}");
    assert_eq!(advance(&cluster.registry, (&other, &turns), NOW).await.unwrap().signs, None);
    assert!(cluster.advance().await.is_some());
    // A node says that it signs when it has heard of the step.
    cluster.announces("n1").await;
    assert!(admission::authority(&other, &cluster.snapshot().await).unwrap().is_none());
    let error = at(&other).await.unwrap_err();
    assert!(error.message.contains("does not have the key") && error.hint.contains("n1"), "{error:?}");
    other.create_next_authority(&cluster.store.authority().unwrap()).unwrap();
    assert_eq!(at(&other).await.unwrap().phase, RotationView::RENEWING, "restored from a copy");
}
