//! The registry's socket.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

use super::connection;
use super::process::Processes;
use crate::embedded::Embedded;
use crate::registry::RegistryError;

/// Maximum number of connections. Further ones wait in the socket's own queue.
pub const MAX_CONNECTIONS: usize = 256;

/// Serves an [`Embedded`] registry on a Unix socket, until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    registry: Embedded,
    task: JoinHandle<()>,
}

impl Server {
    /// Listens at `path` (mode 0600) and serves `registry`. Replaces a former server's socket. Reports processes of a former
    /// server that have ended since as stopped, before it serves the first client.
    ///
    /// # Errors
    /// [`RegistryError::Setup`] when the socket cannot be made, or when another server answers at `path`.
    pub async fn start(path: &Path, registry: Embedded) -> Result<Server, RegistryError> {
        let listener = listen(path).await.map_err(|error| RegistryError::Setup {
            reason: format!("cannot serve the registry at {}: {error}", path.display()),
        })?;
        let processes = Processes::new(registry.clone());
        processes.resume().await?;
        let task = tokio::spawn(accept(listener, registry.clone(), processes));
        Ok(Server { path: path.to_owned(), registry, task })
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The registry.
    #[must_use]
    pub fn registry(&self) -> &Embedded {
        &self.registry
    }

    /// Closes every connection, the socket and the registry's file.
    pub async fn stop(mut self) {
        self.task.abort();
        // Aborted: no other result.
        let _ = (&mut self.task).await;
        self.registry.clone().close().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        // It may already be removed.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Creates the socket under another name, restricts it, and then renames it: other users can never connect.
async fn listen(path: &Path) -> std::io::Result<UnixListener> {
    if UnixStream::connect(path).await.is_ok() {
        return Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, "another server answers there"));
    }
    let mut making = path.as_os_str().to_owned();
    making.push(format!(".{}", std::process::id()));
    let making = PathBuf::from(making);
    // Left by a crash between the steps below; usually absent.
    let _ = std::fs::remove_file(&making);
    let listener = UnixListener::bind(&making)?;
    std::fs::set_permissions(&making, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&making, path)?;
    Ok(listener)
}

async fn accept(listener: UnixListener, registry: Embedded, processes: Processes) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // Dropped with this task; ends every connection.
    let mut connections = JoinSet::new();
    loop {
        let permit = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let serving = connection::serve(stream, registry.clone(), processes.clone());
                connections.spawn(async move {
                    serving.await;
                    drop(permit);
                });
            }
            Err(error) => {
                // Probably out of descriptors: retry when other connections have closed.
                tracing::warn!(%error, "cannot accept a connection to the registry");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}
