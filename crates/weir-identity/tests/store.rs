//! Keys on disk: what is stored is loaded again, nothing is overwritten, and each failure is said in words.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use weir_identity::{Grant, Holder, Revocations, Role, Store, StoreError};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn files(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = names.map(|one| one.unwrap().file_name().into_string().unwrap()).collect();
    // Every writer makes it.
    names.retain(|one| one != ".lock");
    names.sort();
    names
}

#[test]
fn what_is_stored_is_loaded_again() {
    let root = directory();
    let path = root.path().join("state/keys");
    let store = Store::open(&path).unwrap();
    assert_eq!(mode(&path), 0o700);
    let ca = authority(1);
    let own = node(&ca, "a");
    store.create_authority(&ca).unwrap();
    store.create_node(&own).unwrap();
    store.replace_trust(&[ca.certificate().clone(), authority(1).certificate().clone()]).unwrap();
    assert_eq!(files(&path), ["ca.pem", "node.pem", "trust.pem"]);
    assert_eq!(["ca.pem", "node.pem", "trust.pem"].map(|one| mode(&path.join(one))), [0o600, 0o600, 0o644]);

    let store = Store::open(&path).unwrap();
    let loaded = store.authority().unwrap();
    assert_eq!(loaded.certificate(), ca.certificate());
    assert_eq!(store.node().unwrap().facts(), own.facts());
    assert_eq!(store.trust().unwrap().len(), 2);
    // The loaded key signs for the stored certificate.
    let (_, issued) = node_at(&loaded, "b", NOW);
    let checked = trust(&[&ca], weir_identity::Revocations::default());
    checked.check(&issued.chain[0], weir_identity::Purpose::Server, NOW).unwrap();
}

#[test]
fn nothing_is_overwritten_but_by_a_renewal() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let (ca, other) = (authority(1), authority(2));
    let (first, second) = (node(&ca, "a"), node(&ca, "a"));
    store.create_authority(&ca).unwrap();
    store.create_node(&first).unwrap();
    for refused in [store.create_authority(&other), store.create_node(&second)] {
        let word = refused.unwrap_err().to_string();
        assert!(word.contains(".pem exists; it was not overwritten"), "{word}");
    }
    assert_eq!(store.authority().unwrap().certificate(), ca.certificate());
    assert_eq!(store.node().unwrap().facts(), first.facts());
    store.replace_node(&second).unwrap();
    assert_eq!(store.node().unwrap().facts(), second.facts());
    assert_eq!(files(root.path()), ["ca.pem", "node.pem"]);
}

#[test]
fn the_authority_that_follows_waits_beside_the_present_one() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let (ca, next) = (authority(1), authority(1));
    store.create_authority(&ca).unwrap();
    let expected = next.certificate().fingerprint();
    assert!(matches!(store.promote_next_authority(expected), Err(StoreError::Missing { .. })));
    store.create_next_authority(&next).unwrap();
    assert!(matches!(store.create_next_authority(&ca), Err(StoreError::Exists { .. })));
    assert_eq!(store.authority().unwrap().certificate(), ca.certificate());
    assert_eq!(store.next_authority().unwrap().certificate(), next.certificate());
    assert_eq!(mode(&root.path().join("ca-next.pem")), 0o600);
    let whole = fs::read(root.path().join("ca-next.pem")).unwrap();
    fs::write(root.path().join("ca-next.pem"), &whole[..whole.len() / 2]).unwrap();
    assert!(matches!(store.promote_next_authority(expected), Err(StoreError::Damaged { .. })));
    assert_eq!(store.authority().unwrap().certificate(), ca.certificate());
    fs::write(root.path().join("ca-next.pem"), &whole).unwrap();
    let other = authority(1).certificate().fingerprint();
    let refused = store.promote_next_authority(other).unwrap_err().to_string();
    assert!(
        refused.contains(&format!("the authority {expected}, and the registry says that {other} signs")),
        "{refused}"
    );
    assert_eq!(store.authority().unwrap().certificate(), ca.certificate());
    // The first one may have been interrupted after it was done.
    for _ in 0..2 {
        store.promote_next_authority(expected).unwrap();
    }
    assert!(matches!(store.promote_next_authority(other), Err(StoreError::Missing { .. })));
    assert_eq!(store.authority().unwrap().certificate(), next.certificate());
    assert_eq!(files(root.path()), ["ca.pem"]);
    store.create_next_authority(&ca).unwrap();
    store.forget_next_authority(expected).unwrap();
    assert_eq!(files(root.path()), ["ca-next.pem", "ca.pem"], "it is that of another rotation");
    store.forget_next_authority(ca.certificate().fingerprint()).unwrap();
    assert_eq!(files(root.path()), ["ca.pem"]);
    fs::write(root.path().join("ca-next.pem"), &whole[..whole.len() / 2]).unwrap();
    chmod(&root.path().join("ca-next.pem"), 0o600);
    for _ in 0..2 {
        store.forget_next_authority(expected).unwrap();
        assert_eq!(files(root.path()), ["ca.pem"]);
    }
}

#[test]
fn what_a_crash_leaves_behind_is_in_nobodys_way() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    fs::write(root.path().join(".node.pem.new"), "half a ke").unwrap();
    store.create_node(&node(&authority(1), "a")).unwrap();
    assert_eq!(files(root.path()), ["node.pem"]);
    assert_eq!(mode(&root.path().join("node.pem")), 0o600);
}

#[test]
fn what_is_revoked_survives_a_restart() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let nothing = Revocations::default();
    assert_eq!(store.revocations().unwrap(), nothing, "a node that has heard of none");
    let (_, issued) = node_at(&authority(1), "b", NOW);
    let revoked = nothing.with_name(Holder::Node, &name("b"), [&issued.record.facts], "stolen", NOW);
    store.replace_revocations(&revoked).unwrap();
    assert_eq!(Store::open(root.path()).unwrap().revocations().unwrap(), revoked);
    let path = root.path().join("revoked.json");
    assert_eq!(mode(&path), 0o644);
    fs::write(&path, "{").unwrap();
    assert!(matches!(store.revocations(), Err(StoreError::Damaged { .. })), "it is not taken for nothing");
    fs::write(&path, "{}").unwrap();
    chmod(&path, 0o666);
    assert!(matches!(store.revocations(), Err(StoreError::TooOpen { .. })));
}

/// Any user may open a directory of mode 0755, and lock it for ever.
#[test]
fn only_the_owner_of_the_directory_can_lock_it() {
    let root = directory();
    chmod(root.path(), 0o755);
    let store = Store::open(root.path()).unwrap();
    let theirs = fs::File::open(root.path()).unwrap();
    rustix::fs::flock(&theirs, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let ca = authority(1);
    store.create_node(&node(&ca, "a")).unwrap();
    let lock = root.path().join(".lock");
    assert_eq!(mode(&lock), 0o600);
    // A process of the same user that hangs: an error, and not a wait without end.
    let hangs = fs::File::open(&lock).unwrap();
    rustix::fs::flock(&hangs, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let refused = store.replace_node(&node(&ca, "a")).unwrap_err();
    assert!(matches!(refused, StoreError::Busy { .. }), "{refused}");
    assert!(
        refused.to_string().contains("/.lock is locked by another process for more than 5 s"),
        "{refused}"
    );
    drop(hangs);
    store.replace_node(&node(&ca, "a")).unwrap();
}

#[test]
fn a_joining_host_keeps_its_key_until_it_has_joined() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let key = store.joining_key().unwrap().public();
    assert_eq!(store.joining_key().unwrap().public(), key, "a repeated request is the same host's");
    assert_eq!(mode(&root.path().join("join.pem")), 0o600);
    store.create_node(&node(&authority(1), "a")).unwrap();
    store.forget_joining_key().unwrap();
    store.forget_joining_key().unwrap();
    assert_eq!(files(root.path()), ["node.pem"]);
    assert!(matches!(store.joining_key(), Err(StoreError::Exists { .. })), "it has joined already");
}

#[test]
fn keys_that_others_can_read_are_not_used() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let ca = authority(1);
    store.create_authority(&ca).unwrap();
    store.create_node(&node(&ca, "a")).unwrap();
    store.replace_trust(&[ca.certificate().clone()]).unwrap();
    let path = |name: &str| root.path().join(name);
    for (name, mode, word) in [
        ("ca.pem", 0o640, "has mode 0640, so others than its owner can read it; run: chmod 0600"),
        ("node.pem", 0o602, "has mode 0602, so others than its owner can change it; run: chmod 0600"),
        ("trust.pem", 0o664, "has mode 0664, so others than its owner can change it; run: chmod 0644"),
    ] {
        chmod(&path(name), mode);
        let refused = match name {
            "ca.pem" => store.authority().map(drop),
            "node.pem" => store.node().map(drop),
            _ => store.trust().map(drop),
        };
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(word), "{refused}");
    }
    chmod(&path("ca.pem"), 0o400);
    store.authority().unwrap();
    chmod(root.path(), 0o777);
    let refused = Store::open(root.path()).unwrap_err().to_string();
    assert!(
        refused.contains("others than its owner can replace the keys in it; run: chmod 0755"),
        "{refused}"
    );
}

#[test]
fn missing_and_damaged_files_are_called_that() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let word = |refused: Result<(), StoreError>| refused.unwrap_err().to_string();
    assert!(
        word(store.node().map(drop)).ends_with("this host has not joined a cluster; see `weir cluster join`")
    );
    assert!(word(store.authority().map(drop)).contains("`weir cluster init` makes it"));
    assert!(word(store.trust().map(drop)).contains("does not exist"));

    let (ca, other) = (authority(1), authority(1));
    store.create_authority(&ca).unwrap();
    store.create_node(&node(&ca, "a")).unwrap();
    store.replace_trust(&[ca.certificate().clone()]).unwrap();
    let path = |name: &str| root.path().join(name);
    let whole = |name: &str| fs::read_to_string(path(name)).unwrap();
    let (node_pem, ca_pem) = (whole("node.pem"), whole("ca.pem"));
    let key_end = node_pem.find("-----BEGIN CERT").unwrap();
    let (other_key, other_node) = (other_files(&other, "ca.pem"), other_files(&other, "node.pem"));
    for (text, why) in [
        (String::new(), "it is empty; restore it from a backup; without one: `weir cluster revoke NAME`"),
        (node_pem[..key_end].to_owned(), "there is no certificate with the key"),
        (node_pem[key_end..].to_owned(), "not an ECDSA key"),
        (node_pem[..node_pem.len() / 2].to_owned(), "the line \"-----END CERTIFICATE-----\" is missing"),
        (
            other_node[..other_node.find("-----BEGIN CERT").unwrap()].to_owned() + &node_pem[key_end..],
            "for another key",
        ),
        ("\u{1}".repeat(100), "not an ECDSA key"),
    ] {
        fs::write(path("node.pem"), &text).unwrap();
        let word = word(store.node().map(drop));
        assert!(word.contains("node.pem is damaged") && word.contains(why), "{word}");
    }
    let key_end = ca_pem.find("-----BEGIN CERT").unwrap();
    let mixed = other_key[..other_key.find("-----BEGIN CERT").unwrap()].to_owned() + &ca_pem[key_end..];
    for (text, why) in [
        (mixed, "does not belong to the certificate"),
        (ca_pem[..key_end].to_owned(), "must have one certificate"),
        (node_pem, "not that of a certificate authority"),
    ] {
        fs::write(path("ca.pem"), &text).unwrap();
        let word = word(store.authority().map(drop));
        assert!(word.contains("ca.pem is damaged") && word.contains(why), "{word}");
    }
    fs::write(path("trust.pem"), "").unwrap();
    assert!(word(store.trust().map(drop)).contains("it has no certificate; copy it from another node"));
    // A host with a key has joined: it is not sent to `weir cluster join` for what is missing beside it.
    fs::remove_file(path("trust.pem")).unwrap();
    let missing = word(store.trust().map(drop));
    assert!(missing.contains("copy it from another node") && !missing.contains("join"), "{missing}");
    fs::write(path("join.pem"), "").unwrap();
    chmod(&path("join.pem"), 0o600);
    assert!(word(store.stored_joining_key().map(drop)).contains("it is empty; delete it, and join"));
    for name in ["node.pem", "ca.pem"] {
        fs::remove_file(path(name)).unwrap();
        fs::create_dir(path(name)).unwrap();
    }
    let ours = node(&ca, "a");
    for refused in [store.node().map(drop), store.authority().map(drop), store.replace_node(&ours)] {
        let word = word(refused);
        assert!(word.contains(".pem is a directory, and a file is expected there"), "{word}");
    }
}

fn other_files(authority: &weir_identity::Authority, name: &str) -> String {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    store.create_authority(authority).unwrap();
    store.create_node(&node(authority, "a")).unwrap();
    fs::read_to_string(root.path().join(name)).unwrap()
}

#[test]
fn a_client_gets_files_as_nbd_clients_name_them() {
    let root = directory();
    let store = Store::open(root.path()).unwrap();
    let ca = authority(1);
    let viewer = client(&ca, "eve", &Grant::Role(Role::Viewer));
    store.create_client(&viewer, &[ca.certificate().clone()]).unwrap();
    let all = ["ca-cert.pem", "client-cert.pem", "client-key.pem"];
    assert_eq!(files(root.path()), all);
    assert_eq!(all.map(|one| mode(&root.path().join(one))), [0o644, 0o644, 0o600]);
    let (loaded, authorities) = Store::open_client(root.path()).unwrap();
    assert_eq!((loaded.facts(), &authorities[..]), (viewer.facts(), &[ca.certificate().clone()][..]));
    let missing = Store::open_client(&root.path().join("none")).unwrap_err().to_string();
    assert!(missing.contains("`weir cluster client` makes the files of a client"), "{missing}");
    let before = all.map(|one| fs::read(root.path().join(one)).unwrap());
    let again = client(&ca, "eve", &Grant::Role(Role::Viewer));
    let refused = store.create_client(&again, &[ca.certificate().clone()]).unwrap_err();
    assert!(matches!(refused, StoreError::Exists { .. }), "{refused}");
    assert_eq!(all.map(|one| fs::read(root.path().join(one)).unwrap()), before);
    // Whichever of them is in the way: nothing else is made.
    for one in all {
        let root = directory();
        let store = Store::open(root.path()).unwrap();
        fs::write(root.path().join(one), "someone else's").unwrap();
        assert!(matches!(store.create_client(&viewer, &[]), Err(StoreError::Exists { .. })), "{one}");
        assert_eq!(files(root.path()), [one]);
        assert_eq!(fs::read(root.path().join(one)).unwrap(), b"someone else's");
    }
}

/// Set for this program when it runs itself in a full directory or as another user.
const INNER: &str = "WEIR_IDENTITY_INNER";

/// Runs the test `inner` of this program once more, with the directory, by way of `command`.
fn run_inner(mut command: Command, directory: &Path) -> String {
    command.args(["--exact", "inner", "--ignored", "--nocapture"]).env(INNER, directory);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// What the tests below do where they cannot do it themselves; reports what it sees.
#[test]
#[ignore = "run by the tests below"]
fn inner() {
    let directory = PathBuf::from(std::env::var_os(INNER).expect("the directory"));
    let ca = authority(1);
    let attempt = |store: &Store| {
        let load = store.node().map(|own| own.facts().identity.to_string());
        let create = store.create_authority(&ca);
        let replace = store.replace_node(&node(&ca, "b"));
        (
            load.map_err(|e| e.to_string()),
            create.map_err(|e| e.to_string()),
            replace.map_err(|e| e.to_string()),
        )
    };
    match Store::open(&directory) {
        Ok(store) => println!("{:?}\nfiles {:?}", attempt(&store), files(&directory)),
        Err(error) => println!("open: {error}"),
    }
}

#[test]
fn a_full_directory_stays_as_it_was() {
    let root = directory();
    let full = root.path().join("full");
    fs::create_dir(&full).unwrap();
    let source = directory();
    Store::open(source.path()).unwrap().create_node(&node(&authority(1), "a")).unwrap();
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    // A filesystem of few pages in a mount namespace of its own; `dd` takes what is left.
    let script = "mount -t tmpfs -o size=16k,mode=700 tmpfs \"$1\" && cp -p \"$2\"/node.pem \"$1\"/ \
                  && { dd if=/dev/zero of=\"$1\"/filler bs=4k 2>/dev/null; shift 2; exec \"$@\"; }";
    command.args(["-rm", "sh", "-c", script, "sh"]).args([&full, source.path(), &program]);
    let seen = run_inner(command, &full);
    assert!(seen.contains("Ok(\"node a\")"), "{seen}");
    assert_eq!(seen.matches("is full").count(), 2, "{seen}");
    assert_eq!(
        seen.matches("a former file of this name stays. Free some space and repeat").count(),
        2,
        "{seen}"
    );
    assert!(seen.contains("files [\"filler\", \"node.pem\"]"), "{seen}");
}

#[test]
fn another_users_keys_are_not_touched() {
    let root = directory();
    // The other user reaches the directory, but not what is in it.
    chmod(root.path(), 0o755);
    let keys = root.path().join("keys");
    let store = Store::open(&keys).unwrap();
    store.create_node(&node(&authority(1), "a")).unwrap();
    if !rustix::process::geteuid().is_root() {
        // Only root can become another user; whoever else runs this is refused by mode 0000 in the same way.
        chmod(&keys.join("node.pem"), 0);
        let refused = store.node().unwrap_err();
        assert!(matches!(refused, StoreError::Forbidden { .. }), "{refused}");
        return;
    }
    let program = root.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let as_nobody = |directory: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
        run_inner(command, directory)
    };
    chmod(&keys, 0o755);
    let seen = as_nobody(&keys);
    assert!(seen.contains("node.pem: no permission to read it (Permission denied"), "{seen}");
    assert!(seen.contains("ca.pem: no permission to write it"), "{seen}");
    assert!(seen.contains("files [\"node.pem\"]"), "{seen}");
    // Readable, and of a third user.
    std::os::unix::fs::chown(&keys, Some(12_345), None).unwrap();
    let seen = as_nobody(&keys);
    assert!(seen.contains("belongs to user 12345, this process runs as user 65534"), "{seen}");
    assert!(seen.contains("as root: chown 65534 /"), "{seen}");
}

/// A command that fails before there is anything to store leaves nothing behind.
#[test]
fn a_directory_in_which_nothing_was_stored_is_removed() {
    let root = directory();
    let path = root.path().join("state/keys");
    let store = Store::open(&path).unwrap();
    store.node().unwrap_err();
    assert!(path.exists());
    drop(store);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    Store::open(&path).unwrap().create_authority(&authority(1)).unwrap();
    assert_eq!(files(&path), ["ca.pem"]);
    let own = root.path().join("own");
    fs::create_dir(&own).unwrap();
    drop(Store::open(&own).unwrap());
    assert!(own.exists(), "it was there before");
}
