//! Test helpers.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

pub mod wait;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use weir_cluster::records::NodeRecord;
use weir_cluster::registry::Registry;
use weir_cluster::{Client, ClientConfig, Embedded, Server};

/// A machine with a registry that can be stopped and started.
pub struct Machine {
    directory: tempfile::TempDir,
    pub server: Option<Server>,
}

impl Machine {
    pub async fn start() -> Machine {
        let mut machine = Machine { directory: tempfile::tempdir().unwrap(), server: None };
        machine.restart().await;
        machine
    }

    pub fn file(&self) -> PathBuf {
        self.directory.path().join("registry.redb")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("registry.sock")
    }

    pub async fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop().await;
        }
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        let registry = Embedded::open(&self.file()).unwrap();
        self.server = Some(Server::start(&self.socket(), registry).await.unwrap());
    }

    pub fn embedded(&self) -> Embedded {
        self.server.as_ref().unwrap().registry().clone()
    }

    pub fn client(&self) -> Arc<dyn Registry> {
        client(&self.socket())
    }
}

pub fn client(socket: &Path) -> Arc<dyn Registry> {
    Arc::new(Client::new(socket, ClientConfig::default()).unwrap())
}

pub fn node(name: &str, incarnation: u64) -> NodeRecord {
    NodeRecord {
        flash: None,
        name: name.into(),
        incarnation,
        peer_address: ([127, 0, 0, 1], 7000).into(),
        nbd_tcp: None,
        nbd_tls: None,
        nbd_unix: "/run/nbd".into(),
        api: "/run/api".into(),
        fault_domain: "rack-1".into(),
        media: Vec::new(),
        load: 0,
        forwards: true,
    }
}
