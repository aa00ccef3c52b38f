//! The lock of a node's state directory: two nodes with one directory would mix their audit logs, and take each other's sockets.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

/// The file's name in the state directory.
const FILE: &str = "node.lock";

/// Most bytes of the file that are read: a name and a process number.
const LONGEST: u64 = 200;

/// The lock. The kernel ends it with the process, however that ends.
#[derive(Debug)]
pub struct StateLock {
    _file: File,
}

/// Why the directory is not this node's.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another node has it.
    #[error(
        "state_dir = {directory}: {holder} uses this directory; stop it, or give each node of this host a state_dir of its own",
        directory = directory.display()
    )]
    Taken {
        /// The directory.
        directory: PathBuf,
        /// The node that has it, and its process, as it wrote them.
        holder: String,
    },
    /// The file cannot be locked.
    #[error("state_dir: locking {path}: {source}", path = path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl StateLock {
    /// Locks `directory` for this process, as the node `name`.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn take(directory: &Path, name: &str) -> Result<StateLock, LockError> {
        let path = directory.join(FILE);
        let failed = |source| LockError::System { path: path.clone(), source };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(&path).map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(LockError::Taken { directory: directory.to_owned(), holder: holder(&file) });
            }
            Err(error) => return Err(failed(error.into())),
        }
        // For the message of the next one: without it the lock is as good.
        let text = format!("node {name}, process {}", std::process::id());
        let written =
            file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(text.as_bytes()));
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write this process's name in {}", path.display());
        }
        Ok(StateLock { _file: file })
    }
}

/// Who has the lock.
fn holder(file: &File) -> String {
    let mut text = String::new();
    match file.take(LONGEST).read_to_string(&mut text) {
        Ok(_) if !text.is_empty() => text,
        _ => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_node_of_a_directory_is_refused_and_hears_of_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let first = StateLock::take(directory.path(), "n1").unwrap();
        let said = StateLock::take(directory.path(), "n2").unwrap_err().to_string();
        let holder = format!("node n1, process {} uses this directory", std::process::id());
        assert!(said.contains(&holder) && said.contains(&*directory.path().to_string_lossy()), "{said}");
        drop(first);
        let second = StateLock::take(directory.path(), "another-name").unwrap();
        let said = StateLock::take(directory.path(), "n2").unwrap_err().to_string();
        assert!(said.contains("node another-name"), "{said}");
        drop(second);
    }
}
