//! The export over TLS: programs of others, what a certificate permits, who is refused, and what attackers try.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use weir_block::Nanos;
use weir_identity::{ClientCertificate, Credentials, Grant, Role};
use weir_nbd::client::{Negotiation, NegotiationError};
use weir_nbd::protocol::{OPTION_MAGIC, TlsMode, command, option, option_reply};

use crate::cluster::{Cluster, files};
use crate::support::{RawClient, Server, ServerConfig, memory_file, run, run_ok, scratch, writable};

const MIB: usize = 1 << 20;

/// Two disks, `disk` and `secret`, on a port where TLS is required.
fn serve(cluster: &Cluster) -> Server {
    Server::start(config(cluster, ClientCertificate::Required))
}

fn config(cluster: &Cluster, certificate: ClientCertificate) -> ServerConfig {
    let mut config = ServerConfig::one(64 * MIB as u64);
    config.disks.push(("secret".into(), memory_file(), writable(MIB as u64)));
    config.tls = Some(Arc::new(cluster.server_config(certificate)));
    config
}

fn uri(server: &Server, export: &str, files: &Path) -> String {
    format!("nbds://{}/{export}?tls-certificates={}", server.tls(), files.display())
}

/// QEMU's arguments for the export `disk`: an object with the files, and the image.
fn qemu(server: &Server, files: &Path) -> [String; 4] {
    let (host, port) = (server.tls().ip(), server.tls().port());
    let object = format!("tls-creds-x509,id=tls0,dir={},endpoint=client,verify-peer=on", files.display());
    let image = format!(
        "driver=raw,file.driver=nbd,file.server.type=inet,file.server.host={host},file.server.port={port},file.export=disk,\
         file.tls-creds=tls0"
    );
    ["--object".into(), object, "--image-opts".into(), image]
}

fn texts(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

#[test]
fn programs_of_others_read_and_write() {
    let cluster = Cluster::new();
    let server = serve(&cluster);
    let client = cluster.client_files(&cluster);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let (source, source_name) = scratch(&directory, "in");
    let (target, target_name) = scratch(&directory, "out");
    let mut content = vec![0; 64 * MIB];
    fastrand::Rng::with_seed(3).fill(&mut content[MIB..40 * MIB]);
    std::fs::write(&source, &content).unwrap();

    let uri = uri(&server, "disk", client.path());
    run_ok("nbdcopy", &["--flush", &source_name, &uri]);
    run_ok("nbdcopy", &[&uri, &target_name]);
    assert!(std::fs::read(&target).unwrap() == content, "bytes differ after nbdcopy");
    std::fs::remove_file(&target).unwrap();

    let [object, credentials, opts, image] = qemu(&server, client.path());
    let info = run_ok("qemu-img", &["info", &object, &credentials, &opts, &image]);
    assert!(info.contains("64 MiB"), "{info}");
    run_ok("qemu-img", &["convert", &object, &credentials, &opts, "-O", "raw", &image, &target_name]);
    assert!(std::fs::read(&target).unwrap() == content, "bytes differ after qemu-img");
    let script = ["write -P 0xab 3M 4M", "read -P 0xab 3M 4M", "write -z 4M 1M", "read -P 0 4M 1M", "flush"];
    let mut arguments = vec![&*object, &credentials, &opts];
    script.iter().for_each(|line| arguments.extend(["-c", *line]));
    arguments.push(&image);
    let printed = run_ok("qemu-io", &arguments);
    assert!(!printed.contains("verification failed"), "{printed}");

    let nbdkit = Nbdkit::start(&directory.path().join("nbdkit.sock"), &server, client.path());
    let through = format!("nbd+unix:///?socket={}", directory.path().join("nbdkit.sock").display());
    let map =
        run_ok("qemu-io", &["-f", "raw", "-c", "read -P 0xab 3M 1M", "-c", "write -P 7 0 1M", &through]);
    assert!(!map.contains("verification failed"), "{map}");
    drop(nbdkit);
    let printed = run_ok("nbdinfo", &["--map", &uri]);
    assert!(printed.contains("data"), "{printed}");
    assert_eq!(server.refused(), Vec::<String>::new());
    server.wait_until("all have gone", |state| state.connections == 0 && state.lent == 0);
    assert_eq!(server.admitted(), 0, "nothing is kept of a connection that has ended");
}

/// nbdkit's nbd plugin: a server on `socket` that is a client of `disk`. Ended with the test.
struct Nbdkit(Child);

impl Nbdkit {
    fn start(socket: &Path, server: &Server, files: &Path) -> Nbdkit {
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(socket);
        command.args(["nbd", "export=disk", "tls=require", "tls-verify=true"]);
        command.arg(format!("tls-certificates={}", files.display()));
        command.args([format!("hostname={}", server.tls().ip()), format!("port={}", server.tls().port())]);
        let child = command.spawn().expect("nbdkit is installed (make setup)");
        let nbdkit = Nbdkit(child);
        let up = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(25));
            socket.exists()
        });
        assert!(up, "nbdkit listens");
        nbdkit
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// That no program opens `disk` with these files, and the reason that the server has. QEMU checks a client's own certificate, and
/// may say no before the server does.
fn refused_everywhere(server: &Server, files: &Path, words: &str) {
    let output = run("nbdinfo", &["--size", &uri(server, "disk", files)]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "nbdinfo was let in");
    println!("{}\n  nbdinfo: {}", refusal(server, words), told.trim());
    let mut arguments = vec!["info".to_owned()];
    arguments.extend(qemu(server, files));
    let output = run("qemu-img", &texts(&arguments));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "qemu-img was let in");
    if !told.contains("client-cert.pem") {
        refusal(server, words);
    }
    println!("  qemu-img: {}", told.trim());
}

/// Waits for the server's word of a refusal: the client may have had its alert before. It must be the only one.
fn refusal(server: &Server, words: &str) -> String {
    for _ in 0..500 {
        match &server.refused()[..] {
            [] => std::thread::sleep(Duration::from_millis(10)),
            [reason] if reason.contains(words) => return reason.clone(),
            other => panic!("{other:?} where {words:?} was expected"),
        }
    }
    panic!("the server has refused nobody for {words:?}");
}

#[test]
fn who_has_no_right_certificate_is_refused_with_the_reason() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let server = serve(&cluster);
    let of = |credentials: &Credentials| files(credentials, &cluster);
    // It is the server that refuses: all of these trust it.
    refused_everywhere(
        &server,
        of(&other.client("disk")).path(),
        "not signed by a certificate authority of this cluster",
    );
    refused_everywhere(&server, of(&cluster.expired("disk")).path(), "ended");
    let nobody = cluster.client_files(&cluster);
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(nobody.path().join(name)).unwrap();
    }
    refused_everywhere(&server, nobody.path(), "it showed no client certificate");
    let viewer = of(&cluster.issue("eve", &Grant::Role(Role::Viewer), cluster_now()));
    refused_everywhere(
        &server,
        viewer.path(),
        "client eve has a certificate for the API (viewer), which opens no export",
    );
    let elsewhere = of(&cluster.client("elsewhere"));
    refused_everywhere(
        &server,
        elsewhere.path(),
        "client guest may not open \"disk\": its certificate names other exports",
    );
    // One that does not trust this cluster leaves by itself.
    let mistrusts = cluster.client_files(&other);
    let output = run("nbdinfo", &["--size", &uri(&server, "disk", mistrusts.path())]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("certificate verification"), "{told}");

    let plain = run("nbdinfo", &["--size", &format!("nbd://{}/disk", server.tls())]);
    let told = String::from_utf8_lossy(&plain.stderr);
    assert!(!plain.status.success() && told.contains("TLS"), "{told}");
    refusal(&server, "it asked for an export without TLS");
    let plain = run("qemu-img", &["info", "-f", "raw", &format!("nbd://{}/disk", server.tls())]);
    let told = String::from_utf8_lossy(&plain.stderr);
    assert!(!plain.status.success() && told.contains("requires TLS"), "{told}");
    refusal(&server, "it asked for an export without TLS");

    let good = cluster.client_files(&cluster);
    assert_eq!(
        run_ok("nbdinfo", &["--size", &uri(&server, "disk", good.path())]).trim(),
        (64 * MIB).to_string()
    );
    cluster.revoke("guest");
    refused_everywhere(&server, good.path(), "revoked");
}

fn cluster_now() -> u64 {
    rustls::pki_types::UnixTime::now().as_secs()
}

#[test]
fn a_client_sees_only_what_its_certificate_names() {
    let cluster = Cluster::new();
    let server = serve(&cluster);
    // Its list, the size of the export without a name, and the reason if there is none.
    let listed = |grant: &[&str]| {
        let grant = Grant::Exports(grant.iter().map(|name| name.parse().unwrap()).collect());
        let guest = cluster.issue("guest", &grant, cluster_now());
        let client = files(&guest, &cluster);
        let uri = uri(&server, "", client.path());
        let list = run_ok("nbdinfo", &["--list", "--json", &uri]);
        let list: serde_json::Value = serde_json::from_str(&list).unwrap();
        let names = list["exports"].as_array().unwrap().iter();
        let names = names.map(|one| one["export-name"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
        let size = run("nbdinfo", &["--size", &uri]);
        let refused = enter(&server, &cluster, &guest, "").err();
        let told = refused.map_or_else(String::new, |error| error.to_string());
        (names, String::from_utf8_lossy(&size.stdout).trim().to_owned(), told)
    };
    let (names, size, _) = listed(&["secret", "unknown"]);
    assert_eq!(
        (names, size),
        (vec!["secret".to_owned()], MIB.to_string()),
        "without a name, the one it may open"
    );
    assert_eq!(server.refused(), Vec::<String>::new());
    let (names, size, told) = listed(&["disk", "secret"]);
    assert_eq!((names.len(), &*size), (2, ""));
    assert!(told.contains("2 disks are exported here to client guest"), "{told}");
    let (names, _, told) = listed(&["unknown"]);
    assert!(names.is_empty() && told.contains("its certificate names other exports"), "{told}");

    // The server refuses existing and absent exports in the same words.
    let words = |export: &str| {
        let error = enter(&server, &cluster, &cluster.client("disk"), export).unwrap_err();
        assert!(
            matches!(&error, NegotiationError::Refused { reply: option_reply::ERR_POLICY, .. }),
            "{error}"
        );
        error.to_string().replace(export, "EXPORT")
    };
    assert_eq!(words("secret"), words("absent"));
}

type Secure = StreamOwned<ClientConnection, TcpStream>;

/// A client that tries names learns which of them exist from nobody, and is noticed although it does not end its handshake.
#[test]
fn each_name_that_is_tried_is_told_at_once() {
    let cluster = Cluster::new();
    let server = serve(&cluster);
    let mut stream = TcpStream::connect(server.tls()).unwrap();
    let option = |number: u32, data: &[u8]| {
        let length = (data.len() as u32).to_be_bytes();
        [b"IHAVEOPT", &number.to_be_bytes()[..], &length, data].concat()
    };
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[&3_u32.to_be_bytes()[..], &option(5, &[])].concat()).unwrap();
    stream.read_exact(&mut [0; 20]).unwrap();
    let name = ServerName::try_from("weir.invalid").unwrap();
    let config = Arc::new(cluster.client_config(Some(&cluster.client("disk"))));
    let mut secure = StreamOwned::new(ClientConnection::new(config, name).unwrap(), stream);
    for tried in ["secret", "absent"] {
        let length = (tried.len() as u32).to_be_bytes();
        secure.write_all(&option(6, &[&length[..], tried.as_bytes(), &[0; 2]].concat())).unwrap();
        secure.flush().unwrap();
        let told = (0..200).find_map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            server.refused().pop()
        });
        let told = told.expect("nobody is told");
        assert!(told.contains(tried), "{told}");
    }
}

/// Enters the transmission phase with simple replies.
fn enter(
    server: &Server,
    cluster: &Cluster,
    own: &Credentials,
    export: &str,
) -> Result<Secure, NegotiationError> {
    let stream = TcpStream::connect(server.tls())?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.set_write_timeout(Some(Duration::from_secs(20)))?;
    let mut negotiation = Negotiation::begin(stream)?;
    assert!(negotiation.start_tls(TlsMode::Required)?);
    let name = ServerName::try_from("weir.invalid").unwrap();
    let config = Arc::new(cluster.client_config(Some(own)));
    let connection = ClientConnection::new(config, name).unwrap();
    let negotiation =
        negotiation.over(|stream| Ok::<_, NegotiationError>(StreamOwned::new(connection, stream)))?;
    Ok(negotiation.choose(export, false, false)?.0)
}

/// The cookie of the next simple reply, which must be a success, and its data.
fn answer(client: &mut Secure, length: usize) -> (u64, Vec<u8>) {
    let mut head = [0; 16];
    client.read_exact(&mut head).unwrap();
    assert_eq!(head[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "a simple reply without an error");
    let mut data = vec![0; length];
    client.read_exact(&mut data).unwrap();
    (u64::from_be_bytes(head[8..].try_into().unwrap()), data)
}

#[test]
fn deep_queues_large_requests_and_records_of_one_byte() {
    let cluster = Cluster::new();
    let mut server = serve(&cluster);
    let mut client = enter(&server, &cluster, &cluster.client("disk"), "disk").unwrap();
    const LENGTH: usize = 64 << 10;
    let pattern = |cookie: u64| vec![cookie as u8 ^ 0x5a; LENGTH];
    for cookie in 0..100 {
        let mut bytes = RawClient::request(command::WRITE, 0, cookie, cookie * LENGTH as u64, LENGTH as u32);
        bytes.extend(pattern(cookie));
        client.write_all(&bytes).unwrap();
    }
    let mut written: Vec<u64> = (0..100).map(|_| answer(&mut client, 0).0).collect();
    written.sort_unstable();
    assert_eq!(written, (0..100).collect::<Vec<_>>());
    // All replies wait for a client that does not read yet: far more than the socket and the records ahead take.
    for cookie in 0..100 {
        let read = RawClient::request(command::READ, 0, cookie, cookie * LENGTH as u64, LENGTH as u32);
        client.write_all(&read).unwrap();
    }
    std::thread::sleep(Duration::from_millis(100));
    for _ in 0..100 {
        let (cookie, data) = answer(&mut client, LENGTH);
        assert!(data == pattern(cookie), "the data of request {cookie}");
    }
    // The largest request, in one go.
    let mut bytes = RawClient::request(command::WRITE, 0, 7, 0, 32 << 20);
    bytes.resize(28 + (32 << 20), 0x77);
    client.write_all(&bytes).unwrap();
    assert_eq!(answer(&mut client, 0).0, 7);
    client.write_all(&RawClient::request(command::READ, 0, 8, 0, 32 << 20)).unwrap();
    assert!(answer(&mut client, 32 << 20).1.iter().all(|byte| *byte == 0x77));
    // One record for each byte.
    let mut bytes = RawClient::request(command::WRITE, 0, 9, 512, 512);
    bytes.extend([9; 512]);
    bytes.extend(RawClient::request(command::READ, 0, 10, 0, 1024));
    for byte in &bytes[..540] {
        client.write_all(&[*byte]).unwrap();
    }
    assert_eq!(answer(&mut client, 0).0, 9);
    bytes[540..].iter().for_each(|byte| client.write_all(&[*byte]).unwrap());
    let (_, data) = answer(&mut client, 1024);
    assert!(data[..512] == [0x77; 512] && data[512..] == [9; 512]);

    // A hold keeps the answers of a move for later; the end is no truncation.
    server.hold_all();
    client.write_all(&RawClient::request(command::READ, 0, 11, 0, 512)).unwrap();
    server.resume();
    assert_eq!(answer(&mut client, 512).0, 11);
    server.begin_to_dismiss();
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "close_notify");
    drop(client);
    server.join();
}

#[test]
fn a_connection_ends_with_the_trust_in_its_certificate() {
    let cluster = Cluster::new();
    let server = serve(&cluster);
    let mut client = enter(&server, &cluster, &cluster.client("disk"), "disk").unwrap();
    client.write_all(&RawClient::request(command::READ, 0, 1, 0, 512)).unwrap();
    assert_eq!(answer(&mut client, 512).0, 1);
    assert_eq!(server.admitted(), 1);
    server.end_admitted();
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    server.wait_until("the shard has let go of it", |state| state.connections == 0);
    assert_eq!(server.admitted(), 0);
}

/// A listener whose configuration accepts clients without a certificate opens nothing to them.
#[test]
fn no_configuration_lets_nobody_in() {
    let cluster = Cluster::new();
    let server = Server::start(config(&cluster, ClientCertificate::Optional));
    let nobody = cluster.client_files(&cluster);
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(nobody.path().join(name)).unwrap();
    }
    let output = run("nbdinfo", &["--size", &uri(&server, "disk", nobody.path())]);
    assert!(!output.status.success());
    refusal(&server, "it showed no client certificate");
    // Nor a node: it reaches disks as a peer, if the record says so.
    let node = files(&cluster.node, &cluster);
    refused_everywhere(&server, node.path(), "the certificate of node a opens no export");
}

fn option(number: u32, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length, body].concat()
}

/// The server neither executes nor answers bytes injected behind STARTTLS, in whichever packet they come.
#[test]
fn plain_bytes_behind_starttls_end_the_connection() {
    let cluster = Cluster::new();
    let server = serve(&cluster);
    let go = option(option::GO, b"\0\0\0\x04disk\0\0");
    for apart in [false, true] {
        let mut stream = TcpStream::connect(server.tls()).unwrap();
        if apart {
            begin_tls(&mut stream, &go).unwrap();
        } else {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.read_exact(&mut [0; 18]).unwrap();
            stream.write_all(&[&[0, 0, 0, 3][..], &option(option::STARTTLS, &[]), &go].concat()).unwrap();
        }
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        let agreed =
            [&[0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0][..]].concat();
        let rest = rest.strip_prefix(&agreed[..]).unwrap_or(&rest);
        // At most an alert of TLS.
        assert!(
            rest.len() < 16 && !rest.windows(4).any(|bytes| bytes == [0x3e, 0x88, 0x90, 0x45]),
            "{rest:?}"
        );
        let reason = refusal(&server, "");
        let words = ["unencrypted bytes followed STARTTLS", "does not speak TLS"];
        assert!(words.iter().any(|words| reason.contains(words)), "{reason}");
    }
    server.wait_until("nobody was let in", |state| state.connections == 0);
}

/// The beginning of a TLS record.
const HALF_A_HELLO: [u8; 11] = [22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];

/// Agrees with the server on TLS, and sends `bytes`.
fn begin_tls(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.read_exact(&mut [0; 18])?;
    stream.write_all(&[&[0, 0, 0, 3][..], &option(option::STARTTLS, &[])].concat())?;
    stream.read_exact(&mut [0; 20])?;
    stream.write_all(bytes)
}

/// The limits of handshakes hold within TLS, too: the one that is silent longest ends when a new client needs its place.
#[test]
fn stalled_tls_handshakes_do_not_delay_a_new_client() {
    let cluster = Cluster::new();
    let mut config = config(&cluster, ClientCertificate::Required);
    config.listener.handshakes = 64;
    let server = Server::start(config);
    // Connected, asked for TLS, or in the middle of its handshake: the beginning of a record that is never complete.
    let silent: Vec<TcpStream> = (0..300)
        .map(|i| {
            let mut stream = TcpStream::connect(server.tls()).unwrap();
            // It may have lost its place already.
            let _ = if i % 3 > 0 {
                begin_tls(&mut stream, if i % 3 > 1 { &HALF_A_HELLO } else { &[] })
            } else {
                Ok(())
            };
            stream
        })
        .collect();
    let asked = Nanos::now();
    let mut client = enter(&server, &cluster, &cluster.client("disk"), "disk").unwrap();
    client.write_all(&RawClient::request(command::READ, 0, 1, 0, 512)).unwrap();
    assert_eq!(answer(&mut client, 512).0, 1);
    let waited = Nanos::now() - asked;
    println!("300 stalled TLS handshakes: a new client is served after {waited:?}");
    assert!(waited < Duration::from_secs(3), "{waited:?}");
    drop(silent);
}

#[test]
fn a_tls_handshake_has_a_deadline() {
    let cluster = Cluster::new();
    let mut config = config(&cluster, ClientCertificate::Required);
    config.listener.deadline = Duration::from_millis(300);
    let server = Server::start(config);
    let mut stream = TcpStream::connect(server.tls()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let asked = Nanos::now();
    begin_tls(&mut stream, &HALF_A_HELLO).unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    let waited = Nanos::now() - asked;
    assert!((Duration::from_millis(250)..Duration::from_secs(5)).contains(&waited), "{waited:?}");
}
