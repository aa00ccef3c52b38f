//! Keys and certificates in a directory.
//!
//! | file | content | mode |
//! |---|---|---|
//! | `ca.pem` | the authority's key and certificate | 0600 |
//! | `ca-next.pem` | the same of the authority that follows, during a rotation | 0600 |
//! | `node.pem` | the node's key and certificate, the authority's certificate | 0600 |
//! | `node-former.pem` | the node's former key and certificate, during a rotation | 0600 |
//! | `join.pem` | the key of a host that has asked to join, or sets up a cluster, and is no node yet | 0600 |
//! | `init.txt` | the registry in which this host is setting up a cluster, until it has done so | 0600 |
//! | `trust.pem` | certificates of all trusted authorities | 0644 |
//! | `revoked.json` | what the cluster has revoked, as this node has heard last | 0644 |
//! | `.lock` | nothing; whoever writes locks it | 0600 |
//!
//! A key and its certificate share one file, so that a crash never leaves one without the other. A file appears whole and durable
//! or not at all, and only a renewal replaces one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use zeroize::Zeroizing;

use crate::authority::{Authority, AuthorityError};
use crate::certificate::{CaCertificate, NotACertificate};
use crate::credentials::{BadCredentials, Credentials};
use crate::key::{Key, NotAKey};
use crate::name::Fingerprint;
use crate::pem;
use crate::revocation::Revocations;
use crate::store_error::{LOCK_PATIENCE, StoreError};

const CA: &str = "ca.pem";
const NEXT: &str = "ca-next.pem";
const NODE: &str = "node.pem";
const FORMER: &str = "node-former.pem";
const JOIN: &str = "join.pem";
const INIT: &str = "init.txt";
const TRUST: &str = "trust.pem";
const REVOKED: &str = "revoked.json";
/// Only this user can open it, and so hold its lock. The directory itself may be open to others, who could lock that for ever.
const LOCK: &str = ".lock";
/// Attempts to lock. A writer syncs a few kilobytes.
const LOCK_ATTEMPTS: u32 = LOCK_PATIENCE.as_millis().div_ceil(LOCK_PAUSE.as_millis()) as u32;
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// A client's files, as libnbd, nbdkit and QEMU name them.
const CLIENT: [&str; 3] = ["client-key.pem", "client-cert.pem", "ca-cert.pem"];

/// The fault of a file without content.
const EMPTY: &str = "it is empty";

const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;
/// Largest file that is read, in bytes. Ours have some kilobytes.
const LARGEST_FILE: u64 = 1 << 20;
/// Largest list of revocations that is read, in bytes: the largest value of the registry, and more.
const LARGEST_LIST: u64 = 4 << 20;

/// A directory of keys.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    /// The directories that [`Store::open`] has made, the innermost first.
    made: Vec<PathBuf>,
}

/// Removes a directory that this store has made and in which nothing was stored.
impl Drop for Store {
    fn drop(&mut self) {
        let is_in_use = |error: &std::io::Error| error.kind() != std::io::ErrorKind::NotFound;
        let _ = self.made.iter().map(fs::remove_dir).find(|removed| removed.as_ref().is_err_and(is_in_use));
    }
}

impl Store {
    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Opens the directory; makes it (mode 0700) if it does not exist. Nobody but its owner may write to it.
    ///
    /// # Errors
    /// [`StoreError::TooOpen`], [`StoreError::OtherOwner`], or the system's error.
    pub fn open(directory: &Path) -> Result<Store, StoreError> {
        let failed = |action| move |source| StoreError::system(directory, action, source);
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let made = directory.ancestors().take_while(missing).map(Path::to_path_buf).collect();
        let store = Store { directory: directory.to_path_buf(), made };
        let mut builder = fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(directory).map_err(failed("make"))?;
        let metadata = fs::metadata(directory).map_err(failed("look at"))?;
        let mode = metadata.mode() & 0o7777;
        if mode & 0o022 != 0 {
            let what = "replace the keys in it";
            return Err(StoreError::TooOpen { path: directory.into(), mode, what, wanted: mode & !0o022 });
        }
        owned(directory, &metadata)?;
        Ok(store)
    }

    /// Stores a new authority.
    ///
    /// # Errors
    /// [`StoreError::Exists`] and others.
    pub fn create_authority(&self, authority: &Authority) -> Result<(), StoreError> {
        self.write_authority(CA, authority)
    }

    /// Loads the authority.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn authority(&self) -> Result<Authority, StoreError> {
        self.read_authority(
            CA,
            "only the nodes that sign certificates have one; `weir cluster init` makes it",
        )
    }

    /// Stores the authority that follows in a rotation, beside the present one.
    ///
    /// # Errors
    /// [`StoreError::Exists`] and others.
    pub fn create_next_authority(&self, authority: &Authority) -> Result<(), StoreError> {
        self.write_authority(NEXT, authority)
    }

    /// Loads the authority that follows.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn next_authority(&self) -> Result<Authority, StoreError> {
        self.read_authority(NEXT, "no rotation is under way on this node; `weir cluster rotate` begins one")
    }

    /// Puts the authority that follows in place of the present one, whose key is lost. Call it when the registry says that
    /// `expected` signs. Repeated, it does nothing.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::OtherAuthority`] if neither is `expected`. Both stay.
    pub fn promote_next_authority(&self, expected: Fingerprint) -> Result<(), StoreError> {
        let path = self.directory.join(CA);
        let _lock = self.lock(&path)?;
        // Read first: a damaged one, or another one, must not replace a good one.
        let found = match self.next_authority() {
            Ok(next) => next.certificate().fingerprint(),
            Err(StoreError::Missing { .. }) if self.is_authority(expected) => return Ok(()),
            Err(error) => return Err(error),
        };
        if found != expected {
            let path = self.directory.join(NEXT);
            return Err(StoreError::OtherAuthority { path, found, expected });
        }
        let moved = fs::rename(self.directory.join(NEXT), &path);
        moved.map_err(|source| StoreError::system(&path, "replace", source))?;
        self.sync()
    }

    fn is_authority(&self, expected: Fingerprint) -> bool {
        self.authority().is_ok_and(|present| present.certificate().fingerprint() == expected)
    }

    /// Removes the authority that was to follow, after the rotation to `abandoned` was taken back. That of another rotation stays.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget_next_authority(&self, abandoned: Fingerprint) -> Result<(), StoreError> {
        let _lock = self.lock(&self.directory.join(NEXT))?;
        match self.next_authority() {
            Ok(next) if next.certificate().fingerprint() != abandoned => Ok(()),
            // A damaged one can sign nothing, and would be in the way of every other rotation.
            Ok(_) | Err(StoreError::Damaged { .. }) => self.remove(NEXT),
            Err(StoreError::Missing { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Stores the credentials of a node that had none.
    ///
    /// # Errors
    /// [`StoreError::Exists`] and others.
    pub fn create_node(&self, credentials: &Credentials) -> Result<(), StoreError> {
        self.write(NODE, SECRET, credentials.pem().as_bytes(), false)
    }

    /// Replaces the node's credentials after a renewal.
    ///
    /// # Errors
    /// [`StoreError`]; the former credentials stay.
    pub fn replace_node(&self, credentials: &Credentials) -> Result<(), StoreError> {
        self.write(NODE, SECRET, credentials.pem().as_bytes(), true)
    }

    /// Keeps the node's credentials beside those that will replace them: for clients that do not know the new authority.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn keep_former_node(&self, credentials: &Credentials) -> Result<(), StoreError> {
        self.write(FORMER, SECRET, credentials.pem().as_bytes(), true)
    }

    /// Removes the credentials of [`Store::keep_former_node`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget_former_node(&self) -> Result<(), StoreError> {
        self.remove(FORMER)
    }

    /// Loads the credentials of [`Store::keep_former_node`]; `None` if there are none.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn former_node(&self) -> Result<Option<Credentials>, StoreError> {
        match self.read_node(FORMER, "") {
            Ok(credentials) => Ok(Some(credentials)),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Loads the node's credentials.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn node(&self) -> Result<Credentials, StoreError> {
        self.read_node(NODE, "this host has not joined a cluster; see `weir cluster join`")
    }

    fn read_node(&self, name: &str, hint: &'static str) -> Result<Credentials, StoreError> {
        let text = self.read(name, hint)?;
        let damaged = |reason: String| self.damaged(name, reason);
        let key = key(&text).map_err(|error| damaged(error.to_string()))?;
        let chain = pem::certificates(&text).map_err(damaged)?;
        Credentials::new(key, chain).map_err(|error: BadCredentials| damaged(error.to_string()))
    }

    /// The key with which this host asks to join: the stored one, or a new one, which is stored. A repeated request is thus
    /// recognised as the same host's.
    ///
    /// # Errors
    /// [`StoreError`]. [`StoreError::Exists`] if the host has joined already.
    pub fn joining_key(&self) -> Result<Key, StoreError> {
        let joined = self.directory.join(NODE);
        if joined.try_exists().map_err(|source| StoreError::system(&joined, "look at", source))? {
            return Err(StoreError::Exists { path: joined });
        }
        if let Some(stored) = self.stored_joining_key()? {
            return Ok(stored);
        }
        let no_randomness =
            |error| StoreError::system(&self.directory, "make a key in", io::Error::other(error));
        let key = Key::generate().map_err(no_randomness)?;
        self.write(JOIN, SECRET, key.pem().as_bytes(), false)?;
        Ok(key)
    }

    /// The key of [`Store::joining_key`], if this host has asked to join, or has begun to set up a cluster, and is no node yet.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn stored_joining_key(&self) -> Result<Option<Key>, StoreError> {
        match self.read(JOIN, "") {
            Ok(text) => key(&text).map(Some).map_err(|error| self.damaged(JOIN, error.to_string())),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Notes that a cluster is being set up in a registry, before its authority is stored: an authority that lies there without this
    /// note is another cluster's.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn note_setup(&self, registry: &str) -> Result<(), StoreError> {
        self.write(INIT, SECRET, registry.as_bytes(), true)
    }

    /// The registry of [`Store::note_setup`], if a setup was begun and has not come to its end.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn noted_setup(&self) -> Result<Option<String>, StoreError> {
        match self.read(INIT, "") {
            Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Forgets the note of [`Store::note_setup`], once the node's credentials are stored.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget_setup(&self) -> Result<(), StoreError> {
        self.remove(INIT)
    }

    /// Forgets the key of [`Store::joining_key`], once the node's credentials are stored.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget_joining_key(&self) -> Result<(), StoreError> {
        self.remove(JOIN)
    }

    /// Stores the trusted authorities, in place of the former ones.
    ///
    /// # Errors
    /// [`StoreError`]; the former ones stay.
    pub fn replace_trust(&self, authorities: &[CaCertificate]) -> Result<(), StoreError> {
        let text: String = authorities.iter().map(CaCertificate::pem).collect();
        self.write(TRUST, PUBLIC, text.as_bytes(), true)
    }

    /// Loads the trusted authorities.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn trust(&self) -> Result<Vec<CaCertificate>, StoreError> {
        let path = self.directory.join(TRUST);
        let hint = match self.directory.join(NODE).exists() {
            true => "copy it from another node of the cluster: it is the same on every node",
            false => "this host has not joined a cluster; see `weir cluster join`",
        };
        let text = read(&path, hint, 0o022, LARGEST_FILE)?;
        let damaged = |error: NotACertificate| self.damaged(TRUST, error.to_string());
        let all = CaCertificate::all_from_pem(&text).map_err(damaged)?;
        if all.is_empty() { Err(self.damaged(TRUST, "it has no certificate".into())) } else { Ok(all) }
    }

    /// Stores what the cluster has revoked, in place of the former list.
    ///
    /// # Errors
    /// [`StoreError`]; the former list stays.
    pub fn replace_revocations(&self, revoked: &Revocations) -> Result<(), StoreError> {
        let text = serde_json::to_vec(revoked)
            .map_err(|error| StoreError::system(&self.directory.join(REVOKED), "encode", error.into()))?;
        self.write(REVOKED, PUBLIC, &text, true)
    }

    /// Loads what the cluster had revoked when this node last heard of it; nothing if it never has. The registry may be away when
    /// a node starts, and a revoked node must not be let in for that.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn revocations(&self) -> Result<Revocations, StoreError> {
        match read(&self.directory.join(REVOKED), "", 0o022, LARGEST_LIST) {
            Ok(text) => {
                serde_json::from_slice(&text).map_err(|error| self.damaged(REVOKED, error.to_string()))
            }
            Err(StoreError::Missing { .. }) => Ok(Revocations::default()),
            Err(error) => Err(error),
        }
    }

    /// Stores a client's key, its certificate and the authorities, under the names that libnbd, nbdkit and QEMU expect in a
    /// directory of certificates.
    ///
    /// # Errors
    /// [`StoreError::Exists`] and others.
    pub fn create_client(
        &self,
        credentials: &Credentials,
        authorities: &[CaCertificate],
    ) -> Result<(), StoreError> {
        let [key, certificate, ca] = CLIENT;
        let authorities: String = authorities.iter().map(CaCertificate::pem).collect();
        let (secret, chain) = (credentials.key().pem(), credentials.certificates_pem());
        // The key last: where it is, the others are, too.
        self.write_all(&[
            (ca, PUBLIC, authorities.as_bytes()),
            (certificate, PUBLIC, chain.as_bytes()),
            (key, SECRET, secret.as_bytes()),
        ])
    }

    /// Stores the authorities of a client that has files, in place of the former ones.
    ///
    /// # Errors
    /// [`StoreError`]; the former ones stay.
    pub fn replace_client_trust(&self, authorities: &[CaCertificate]) -> Result<(), StoreError> {
        let [_, _, ca] = CLIENT;
        let text: String = authorities.iter().map(CaCertificate::pem).collect();
        self.write(ca, PUBLIC, text.as_bytes(), true)
    }

    /// Checks that [`Store::create_client`] would overwrite nothing, before a certificate is issued.
    ///
    /// # Errors
    /// [`StoreError::Exists`] and others.
    pub fn check_no_client(&self) -> Result<(), StoreError> {
        for name in CLIENT {
            let path = self.directory.join(name);
            if path.try_exists().map_err(|source| StoreError::system(&path, "look at", source))? {
                return Err(StoreError::Exists { path });
            }
        }
        Ok(())
    }

    /// Loads a client's key, its certificate and the authorities from the files of [`Store::create_client`] in `directory`, which
    /// is not made.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open_client(directory: &Path) -> Result<(Credentials, Vec<CaCertificate>), StoreError> {
        const HINT: &str = "`weir cluster client` makes the files of a client";
        let store = Store { directory: directory.to_path_buf(), made: Vec::new() };
        let [key_file, certificate, ca] = CLIENT;
        let damaged = |name: &str, reason: &dyn std::fmt::Display| store.damaged(name, reason.to_string());
        let text = store.read(key_file, HINT)?;
        let key = key(&text).map_err(|error| damaged(key_file, &error))?;
        let public = |name: &str| read(&directory.join(name), HINT, 0o022, LARGEST_FILE);
        let chain = pem::certificates(&public(certificate)?).map_err(|error| damaged(certificate, &error))?;
        let credentials = Credentials::new(key, chain).map_err(|error| damaged(certificate, &error))?;
        let authorities = CaCertificate::all_from_pem(&public(ca)?).map_err(|error| damaged(ca, &error))?;
        Ok((credentials, authorities))
    }

    fn write_authority(&self, name: &str, authority: &Authority) -> Result<(), StoreError> {
        let text = pem::concat(&[authority.key_pem(), &authority.certificate().pem()]);
        self.write(name, SECRET, text.as_bytes(), false)
    }

    fn read_authority(&self, name: &str, hint: &'static str) -> Result<Authority, StoreError> {
        let text = self.read(name, hint)?;
        let damaged = |reason: String| self.damaged(name, reason);
        let mut all = CaCertificate::all_from_pem(&text).map_err(|error| damaged(error.to_string()))?;
        let (Some(certificate), true) = (all.pop(), all.is_empty()) else {
            return Err(damaged("it must have one certificate".into()));
        };
        let key = key(&text).map_err(|error| damaged(error.to_string()))?;
        Authority::from_parts(certificate, key).map_err(|error: AuthorityError| damaged(error.to_string()))
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        let path = self.directory.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(StoreError::system(&path, "remove", error))
            }
            _ => self.sync(),
        }
    }

    fn damaged(&self, name: &str, reason: String) -> StoreError {
        StoreError::Damaged { path: self.directory.join(name), reason, remedy: remedy(name) }
    }

    fn read(&self, name: &str, hint: &'static str) -> Result<Zeroizing<Vec<u8>>, StoreError> {
        let text = read(&self.directory.join(name), hint, 0o077, LARGEST_FILE)?;
        if text.is_empty() { Err(self.damaged(name, EMPTY.into())) } else { Ok(text) }
    }

    /// Writes a file whole and durably, or not at all.
    fn write(&self, name: &str, mode: u32, content: &[u8], replace: bool) -> Result<(), StoreError> {
        let path = self.directory.join(name);
        let fresh = self.directory.join(format!(".{name}.new"));
        // One writer at a time, so that what a crashed one has left behind can be overwritten.
        let _lock = self.lock(&path)?;
        let written = write_durably(&fresh, mode, content);
        let done = written.map_err(|source| StoreError::system(&path, "write", source)).and_then(|()| {
            // A link fails if the name exists; a rename would replace the file.
            let moved = if replace { fs::rename(&fresh, &path) } else { fs::hard_link(&fresh, &path) };
            moved.map_err(|source| StoreError::system(&path, "write", source))
        });
        // After a rename there is nothing to remove.
        let _ = fs::remove_file(&fresh);
        done?;
        self.sync()
    }

    /// Writes several new files, all or none; those of a crash are named when it is repeated.
    fn write_all(&self, files: &[(&str, u32, &[u8])]) -> Result<(), StoreError> {
        let path = |name: &str| self.directory.join(name);
        let fresh = |name: &str| path(&format!(".{name}.new"));
        let _lock = self.lock(&self.directory)?;
        let failed = |name: &str| {
            let path = path(name);
            move |source| StoreError::system(&path, "write", source)
        };
        let write = || {
            for &(name, mode, content) in files {
                write_durably(&fresh(name), mode, content).map_err(failed(name))?;
            }
            for (done, &(name, ..)) in files.iter().enumerate() {
                if let Err(source) = fs::hard_link(fresh(name), path(name)) {
                    // They did not exist before; the error counts, not a second one.
                    files[..done].iter().for_each(|(name, ..)| drop(fs::remove_file(path(name))));
                    return Err(failed(name)(source));
                }
            }
            Ok(())
        };
        let written = write();
        files.iter().for_each(|(name, ..)| drop(fs::remove_file(fresh(name))));
        written?;
        self.sync()
    }

    /// Waits for another writer, but not for ever. `path`: the file that is to be written, for messages.
    fn lock(&self, path: &Path) -> Result<File, StoreError> {
        let failed = |source| StoreError::system(path, "write", source);
        let lock = self.directory.join(LOCK);
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(SECRET).open(&lock);
        let file = file.map_err(failed)?;
        for attempt in 0..LOCK_ATTEMPTS {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK) if attempt + 1 < LOCK_ATTEMPTS => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => break,
                Err(error) => return Err(failed(error.into())),
            }
        }
        Err(StoreError::Busy { path: lock })
    }

    fn sync(&self) -> Result<(), StoreError> {
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(|source| StoreError::system(&self.directory, "flush", source))
    }
}

fn write_durably(path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    // Whatever the process's umask is.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()
}

/// Reads a file that only its owner may write, and of whose mode none of the bits `forbidden` is set.
fn read(
    path: &Path,
    hint: &'static str,
    forbidden: u32,
    largest: u64,
) -> Result<Zeroizing<Vec<u8>>, StoreError> {
    let failed = |source| StoreError::system(path, "read", source);
    let mut file = File::open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => StoreError::Missing { path: path.to_path_buf(), hint },
        _ => failed(source),
    })?;
    // Of the open file: another one may take the name at any time.
    let metadata = file.metadata().map_err(failed)?;
    // Before its mode, which would be advice for a file.
    if metadata.is_dir() {
        return Err(StoreError::Directory { path: path.into() });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & forbidden != 0 {
        let what = if mode & forbidden & 0o044 != 0 { "read it" } else { "change it" };
        return Err(StoreError::TooOpen { path: path.into(), mode, what, wanted: mode & !forbidden });
    }
    owned(path, &metadata)?;
    let mut content = Zeroizing::new(Vec::with_capacity(metadata.len().min(largest) as usize + 1));
    Read::by_ref(&mut file).take(largest).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}

/// The remedy for a damaged file.
fn remedy(name: &str) -> &'static str {
    match name {
        NODE => {
            "restore it from a backup; without one: `weir cluster revoke NAME` and `weir cluster invite --readmit --for NAME` on \
             another node, move this file away, and `weir cluster join` with that token"
        }
        JOIN => "delete it, and join with a new token",
        TRUST | REVOKED => "copy it from another node of the cluster",
        CA | NEXT => "restore it from a backup, or copy it from another node that signs",
        _ if CLIENT.contains(&name) => "make new files with `weir cluster client`, in another directory",
        _ => "move it away",
    }
}

/// The file belongs to this process's user, or to root.
fn owned(path: &Path, metadata: &fs::Metadata) -> Result<(), StoreError> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner == user || owner == 0 {
        return Ok(());
    }
    Err(StoreError::OtherOwner { path: path.to_path_buf(), owner, user })
}

fn key(text: &[u8]) -> Result<Key, NotAKey> {
    let der = PrivatePkcs8KeyDer::from_pem_slice(text).map_err(|_| NotAKey)?;
    Key::from_pkcs8(der.secret_pkcs8_der())
}
