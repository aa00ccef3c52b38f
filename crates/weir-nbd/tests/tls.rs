//! STARTTLS: the bytes of both ends, the ways to attack it, and handshakes with TLS between this crate, libnbd and nbdkit.

#![allow(clippy::unwrap_used)]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};
use weir_block::LayerInfo;
use weir_identity::{ClientCertificate, Identity, Store, other_end};
use weir_nbd::client::{Negotiation, NegotiationError};
use weir_nbd::protocol::{OPTION_MAGIC, OPTION_REPLY_MAGIC, TlsMode, option, option_reply};
use weir_nbd::server::{
    Directory, ExportInfo, HandshakeError, Listed, MOST_OPTION_BYTES, NotServed, Step, TlsHandshake, TlsStep,
};

#[path = "common/cluster.rs"]
mod cluster;

use cluster::Cluster;

const SIZE: u64 = 1 << 20;
/// The flags of a client: fixed newstyle, no zeroes.
const FLAGS: [u8; 4] = [0, 0, 0, 3];

struct OneDisk;

impl Directory for OneDisk {
    fn list(&self) -> Vec<Listed> {
        vec![Listed { name: "disk".into(), description: String::new() }]
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        if name != "disk" {
            return Err(NotServed::Unknown("no such disk".into()));
        }
        let layer = LayerInfo {
            size: SIZE,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: u32::MAX,
            writable: true,
            fast_zeroes: true,
            discards: true,
        };
        Ok(ExportInfo { name: "disk".into(), description: String::new(), layer })
    }
}

fn option(number: u32, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length, body].concat()
}

fn go() -> Vec<u8> {
    option(option::GO, b"\0\0\0\x04disk\0\0")
}

/// Option and kind of each reply.
fn replies(mut bytes: &[u8]) -> Vec<(u32, u32)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(bytes[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        found.push((word(8), word(12)));
        bytes = &bytes[20 + word(16) as usize..];
    }
    found
}

/// A server that has answered the bytes of the client, and its last step that was not `Continue`.
struct Served {
    handshake: TlsHandshake,
    out: Vec<u8>,
    step: TlsStep,
}

fn serve(mode: TlsMode, bytes: &[u8]) -> Served {
    let mut out = Vec::new();
    let handshake = TlsHandshake::new(mode, &mut out);
    assert_eq!(out.len(), 18, "the greeting is the same with TLS and without");
    let mut served = Served { handshake, out, step: TlsStep::Negotiation(Step::Continue) };
    served.receive(&[&FLAGS, bytes].concat());
    served
}

impl Served {
    fn receive(&mut self, bytes: &[u8]) {
        self.out.clear();
        self.handshake.receive(bytes);
        loop {
            self.step = self.handshake.step(&OneDisk, &mut self.out);
            if self.step != TlsStep::Negotiation(Step::Continue) {
                return;
            }
        }
    }
}

const NEED_MORE: TlsStep = TlsStep::Negotiation(Step::NeedMore);

#[test]
fn without_tls_a_server_answers_as_ever() {
    let served = serve(TlsMode::Off, &[option(option::STARTTLS, &[]), go()].concat());
    assert_eq!(replies(&served.out)[0], (option::STARTTLS, option_reply::ERR_UNSUP));
    assert!(matches!(served.step, TlsStep::Negotiation(Step::Attach(_))) && !served.handshake.is_secure());
}

#[test]
fn optional_tls_is_the_clients_choice() {
    let served = serve(TlsMode::Optional, &go());
    assert!(matches!(served.step, TlsStep::Negotiation(Step::Attach(_))), "{:?}", served.step);
    let mut served = serve(TlsMode::Optional, &option(option::STARTTLS, &[]));
    assert_eq!(served.step, TlsStep::StartTls);
    // The whole answer, byte by byte: magic, option, ACK, no data.
    assert_eq!(served.out, [0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0]);
    served.handshake.secured().unwrap();
    served.receive(&go());
    let TlsStep::Negotiation(Step::Attach(session)) = &served.step else { panic!("{:?}", served.step) };
    assert!(session.export == "disk" && served.handshake.is_secure());
}

#[test]
fn required_tls_comes_before_all_else() {
    let early = [
        option(option::LIST, &[]),
        go(),
        option(option::STRUCTURED_REPLY, &[]),
        option(option::EXTENDED_HEADERS, &[]),
        option(option::INFO, b"nonsense"),
        option(4711, &[]),
        option(option::STARTTLS, b"data"),
    ]
    .concat();
    let mut served = serve(TlsMode::Required, &early);
    let needed = option_reply::ERR_TLS_REQD;
    assert_eq!(
        replies(&served.out),
        [
            (option::LIST, needed),
            (option::GO, needed),
            (option::STRUCTURED_REPLY, needed),
            (option::EXTENDED_HEADERS, needed),
            (option::INFO, needed),
            (4711, needed),
            (option::STARTTLS, option_reply::ERR_INVALID),
        ]
    );
    assert_eq!(served.step, NEED_MORE);
    assert!(served.handshake.has_insisted_on_plain_text());
    served.receive(&option(option::STARTTLS, &[]));
    assert_eq!(served.step, TlsStep::StartTls);
    served.handshake.secured().unwrap();
    served.receive(&[option(option::STARTTLS, &[]), option(option::LIST, &[]), go()].concat());
    let all = replies(&served.out);
    assert_eq!(all[0], (option::STARTTLS, option_reply::ERR_INVALID), "TLS is in use already");
    assert!(all[1..].iter().all(|(_, kind)| kind & option_reply::ERROR == 0), "{all:?}");
    assert!(matches!(served.step, TlsStep::Negotiation(Step::Attach(_))));
}

#[test]
fn a_client_without_tls_can_only_leave() {
    let served = serve(TlsMode::Required, &option(option::ABORT, &[]));
    assert_eq!(replies(&served.out), [(option::ABORT, option_reply::ACK)]);
    assert!(!served.handshake.has_insisted_on_plain_text());
    assert_eq!(served.step, TlsStep::Negotiation(Step::Aborted));
    let served = serve(TlsMode::Required, &option(option::EXPORT_NAME, b"disk"));
    assert_eq!(served.step, TlsStep::Negotiation(Step::Refused(HandshakeError::TlsRequired)));
    assert!(served.out.is_empty(), "EXPORT_NAME has no error reply");
    assert!(served.handshake.has_insisted_on_plain_text());
    let mut long = option(option::LIST, &[]);
    long[12..].copy_from_slice(&(MOST_OPTION_BYTES + 1).to_be_bytes());
    assert_eq!(replies(&serve(TlsMode::Required, &long).out), [(option::LIST, option_reply::ERR_TLS_REQD)]);
}

/// CVE-2021-3716 and its like: what is injected before TLS must not have an effect after it.
#[test]
fn nothing_of_before_tls_counts_after_it() {
    for agreed in [option::STRUCTURED_REPLY, option::EXTENDED_HEADERS] {
        let context = option(option::SET_META_CONTEXT, b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation");
        let injected = [option(agreed, &[]), context, option(option::STARTTLS, &[])].concat();
        let mut served = serve(TlsMode::Optional, &injected);
        assert!(replies(&served.out).iter().all(|(_, kind)| kind & option_reply::ERROR == 0));
        assert_eq!(served.step, TlsStep::StartTls);
        served.handshake.secured().unwrap();
        served.receive(&go());
        let TlsStep::Negotiation(Step::Attach(session)) = served.step else { panic!("{:?}", served.step) };
        assert!(
            !session.structured_replies && !session.extended_headers && session.base_allocation.is_none()
        );
    }
}

#[test]
fn bytes_injected_behind_starttls_end_the_session() {
    let refused = TlsStep::Negotiation(Step::Refused(HandshakeError::BytesBeforeTls));
    for mode in [TlsMode::Optional, TlsMode::Required] {
        for injected in [go(), vec![0]] {
            let together = [option(option::STARTTLS, &[]), injected.clone()].concat();
            let served = serve(mode, &together);
            assert!(served.step == refused && served.out.is_empty(), "{:?}", served.step);
            // In a packet of its own, before or after the caller has run the TLS handshake.
            let mut served = serve(mode, &option(option::STARTTLS, &[]));
            served.receive(&injected);
            assert_eq!(served.step, refused);
            let mut served = serve(mode, &option(option::STARTTLS, &[]));
            served.handshake.receive(&injected);
            assert_eq!(served.handshake.secured(), Err(HandshakeError::BytesBeforeTls));
            assert_eq!(served.handshake.step(&OneDisk, &mut Vec::new()), NEED_MORE, "it is over");
        }
    }
    assert!(serve(TlsMode::Optional, &[]).handshake.secured().is_err(), "nobody has asked for TLS");
}

/// The client's outcome, and what it sent, against a server that says `replies` after its greeting.
fn client(mode: TlsMode, replies: &[u8]) -> (Result<bool, NegotiationError>, Vec<u8>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    theirs.write_all(replies).unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    let outcome = Negotiation::begin(ours).and_then(|mut negotiation| negotiation.start_tls(mode));
    let mut sent = Vec::new();
    theirs.read_to_end(&mut sent).unwrap();
    (outcome, sent)
}

fn reply(kind: u32, body: &[u8]) -> Vec<u8> {
    let words = [option::STARTTLS, kind, body.len() as u32].map(u32::to_be_bytes).concat();
    [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &words, body].concat()
}

#[test]
fn a_client_asks_for_tls_first() {
    let asked = [&FLAGS[..], b"IHAVEOPT\0\0\0\x05\0\0\0\0"].concat();
    for mode in [TlsMode::Optional, TlsMode::Required] {
        let (outcome, sent) = client(mode, &reply(option_reply::ACK, &[]));
        assert!(outcome.unwrap());
        assert_eq!(sent, asked, "and sends nothing more before TLS");
    }
    let (outcome, sent) = client(TlsMode::Off, &[]);
    assert!(!outcome.unwrap());
    assert_eq!(sent, FLAGS);
}

#[test]
fn a_client_that_requires_tls_does_not_go_on_without() {
    let refusals = [option_reply::ERR_UNSUP, option_reply::ERR_POLICY, option_reply::ERR_INVALID];
    for refusal in refusals {
        let (outcome, _) = client(TlsMode::Required, &reply(refusal, b"no"));
        let error = outcome.unwrap_err();
        assert!(matches!(error, NegotiationError::NoTls { .. }), "{error}");
        assert!(error.to_string().starts_with("the server speaks no TLS, which is required here"), "{error}");
        assert!(!client(TlsMode::Optional, &reply(refusal, b"no")).0.unwrap(), "plain text, as allowed");
    }
    for mode in [TlsMode::Optional, TlsMode::Required] {
        for bad in [reply(option_reply::ACK, b"x"), reply(option_reply::SERVER, &[])] {
            assert!(matches!(client(mode, &bad).0, Err(NegotiationError::Protocol(_))));
        }
        assert!(matches!(client(mode, &[]).0, Err(NegotiationError::Io(_))));
    }
}

/// Serves the handshake of one client up to its choice of an export; returns who it was.
fn serve_one(stream: TcpStream, mode: TlsMode, config: ServerConfig) -> io::Result<Option<Identity>> {
    let mut out = Vec::new();
    let mut handshake = TlsHandshake::new(mode, &mut out);
    let mut plain = stream;
    if !negotiate(&mut plain, &mut handshake, &mut out)? {
        return Ok(None);
    }
    let connection = ServerConnection::new(Arc::new(config)).unwrap();
    let mut stream = StreamOwned::new(connection, plain);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    handshake.secured().unwrap();
    let who = other_end(&stream.conn).unwrap().map(|other| other.identity.clone());
    negotiate(&mut stream, &mut handshake, &mut out)?;
    // What the client asks in the transmission phase is not this test's business; it says goodbye with a request.
    let _ = stream.read(&mut [0; 64]);
    Ok(who)
}

/// True when TLS begins, false at the end of the handshake.
fn negotiate(
    stream: &mut (impl Read + Write),
    handshake: &mut TlsHandshake,
    out: &mut Vec<u8>,
) -> io::Result<bool> {
    loop {
        stream.write_all(out)?;
        out.clear();
        match handshake.step(&OneDisk, out) {
            TlsStep::Negotiation(Step::Continue) => {}
            TlsStep::Negotiation(Step::NeedMore) => {
                let mut buffer = [0; 512];
                let length = stream.read(&mut buffer)?;
                if length == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                handshake.receive(&buffer[..length]);
            }
            end => {
                stream.write_all(out)?;
                stream.flush()?;
                out.clear();
                return match end {
                    TlsStep::StartTls => Ok(true),
                    TlsStep::Negotiation(Step::Refused(error)) => Err(io::Error::other(error)),
                    TlsStep::Negotiation(_) => Ok(false),
                };
            }
        }
    }
}

/// Serves one client in a thread; `connect` gets the port.
fn with_server<T>(
    cluster: &Cluster,
    mode: TlsMode,
    certificate: ClientCertificate,
    connect: impl FnOnce(u16) -> T,
) -> (io::Result<Option<Identity>>, T) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let config = cluster.server_config(certificate);
    let serving = thread::spawn(move || serve_one(listener.accept().unwrap().0, mode, config));
    let found = connect(port);
    (serving.join().unwrap(), found)
}

/// Connects this crate's client with TLS; the size of the export.
fn open(port: u16, config: ClientConfig) -> Result<u64, String> {
    let word = |error: &dyn std::fmt::Display| error.to_string();
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut negotiation = Negotiation::begin(stream).map_err(|error| word(&error))?;
    assert!(negotiation.start_tls(TlsMode::Required).map_err(|error| word(&error))?);
    let name = ServerName::try_from("weir.invalid").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let secure = negotiation.over(|stream| Ok::<_, NegotiationError>(StreamOwned::new(connection, stream)));
    let chosen = secure.and_then(|negotiation| negotiation.choose("disk", true, true));
    chosen.map(|(_, export)| export.size).map_err(|error| word(&error))
}

#[test]
fn both_ends_of_this_crate_meet_over_tls() {
    let cluster = Cluster::new();
    let guest = cluster.client("disk");
    for mode in [TlsMode::Optional, TlsMode::Required] {
        let config = cluster.client_config(Some(&guest));
        let (who, size) = with_server(&cluster, mode, ClientCertificate::Required, |port| open(port, config));
        assert_eq!(size, Ok(SIZE));
        let Some(Identity::Client(client)) = who.unwrap() else { panic!("a client") };
        assert!(client.may_open("disk", None) && !client.may_open("other", None));
    }
    let anonymous = cluster.client_config(None);
    let (who, size) =
        with_server(&cluster, TlsMode::Required, ClientCertificate::Required, |port| open(port, anonymous));
    assert!(who.is_err() && size.is_err(), "without a certificate");
}

fn nbdinfo(port: u16, scheme: &str, files: &Path) -> Output {
    let uri = format!("{scheme}://127.0.0.1:{port}/disk?tls-certificates={}", files.display());
    Command::new("nbdinfo").args(["--size", &uri]).output().expect("nbdinfo is installed (make setup)")
}

#[test]
fn libnbd_opens_an_export_over_tls() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let run = |scheme: &str, files: &tempfile::TempDir, certificate| {
        with_server(&cluster, TlsMode::Required, certificate, |port| nbdinfo(port, scheme, files.path()))
    };
    let (who, output) = run("nbds", &cluster.client_files(&cluster), ClientCertificate::Required);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), SIZE.to_string(), "{text}");
    assert!(matches!(who.unwrap(), Some(Identity::Client(_))));

    let (_, output) = run("nbd", &cluster.client_files(&cluster), ClientCertificate::Required);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("TLS"), "plain text is refused: {text}");
    // A certificate of another cluster: the server refuses it.
    let (who, output) = run("nbds", &other.client_files(&cluster), ClientCertificate::Optional);
    assert!(!output.status.success() && who.is_err());
    // A client that trusts another cluster: it refuses the server.
    let (who, output) = run("nbds", &cluster.client_files(&other), ClientCertificate::Optional);
    assert!(!output.status.success() && who.is_err());
}

/// nbdkit over a directory of its own, ended with the test.
struct Nbdkit(Child);

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_client_opens_an_export_of_nbdkit_over_tls() {
    let cluster = Cluster::new();
    let files = tempfile::tempdir().unwrap();
    let store = Store::open(files.path()).unwrap();
    store.create_node(&cluster.node).unwrap();
    store.replace_trust(&[cluster.authority.certificate().clone()]).unwrap();
    // One file has key and certificates; nbdkit takes each from it.
    for (ours, theirs) in
        [("node.pem", "server-key.pem"), ("node.pem", "server-cert.pem"), ("trust.pem", "ca-cert.pem")]
    {
        std::fs::copy(files.path().join(ours), files.path().join(theirs)).unwrap();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = Command::new("nbdkit");
    command.args([
        "--foreground",
        "--exit-with-parent",
        "--tls=require",
        "--tls-verify-peer",
        "--ipaddr=127.0.0.1",
    ]);
    command.args([format!("--port={port}"), format!("--tls-certificates={}", files.path().display())]);
    let child = command
        .args(["memory", "1M"])
        .stderr(Stdio::null())
        .spawn()
        .expect("nbdkit is installed (make setup)");
    let _nbdkit = Nbdkit(child);
    let up = (0..200).any(|_| {
        thread::sleep(std::time::Duration::from_millis(50));
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    assert!(up, "nbdkit listens");
    assert_eq!(open(port, cluster.client_config(Some(&cluster.client("disk")))), Ok(SIZE));
    assert!(open(port, cluster.client_config(None)).is_err(), "nbdkit asks for a certificate");
    // With a certificate that nbdkit accepts: what fails is this client's check of nbdkit.
    let mistrusts = Cluster::new().client_config(Some(&cluster.client("disk")));
    assert!(open(port, mistrusts).is_err(), "nbdkit is of another cluster");
}
