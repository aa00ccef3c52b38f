//! Listeners: permissions, and existing files at a socket's path.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use weir_export::nbd::{ListenAddress, ListenError, Listener, ListenerConfig};

async fn bind(address: ListenAddress) -> Result<Listener, ListenError> {
    Listener::bind(&address, ListenerConfig::default()).await
}

#[tokio::test]
async fn the_socket_is_its_owners_and_goes_with_the_listener() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let listener = bind(ListenAddress::Unix(path.clone())).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let error = bind(ListenAddress::Unix(path.clone())).await.unwrap_err();
    assert!(matches!(error, ListenError::InUse(_)), "{error}");
    drop(listener);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_socket_left_behind_is_replaced_but_nothing_else_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind");
    drop(bind(ListenAddress::Unix(path.clone())).await.unwrap());
    std::fs::write(&path, "precious").unwrap();
    let error = bind(ListenAddress::Unix(path.clone())).await.unwrap_err();
    assert!(matches!(error, ListenError::NotASocket(_)), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let error = bind(ListenAddress::Unix(directory.path().join("no/such/directory"))).await.unwrap_err();
    assert!(matches!(error, ListenError::Io { .. }), "{error}");
}

#[tokio::test]
async fn beyond_this_host_only_when_told() {
    let address = "0.0.0.0:0".parse().unwrap();
    let error = bind(ListenAddress::Tcp { address, beyond_loopback: false }).await.unwrap_err();
    assert!(matches!(error, ListenError::BeyondLoopback(_)), "{error}");
    let loopback = "127.0.0.1:0".parse().unwrap();
    let listener = bind(ListenAddress::Tcp { address: loopback, beyond_loopback: false }).await.unwrap();
    assert_ne!(listener.local_address().unwrap().port(), 0);
}
