//! A TLS connection over a loopback socket, both ends in threads of their own.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use rustls::pki_types::ServerName;
use rustls::{CipherSuite, ProtocolVersion};
use rustls::{
    ClientConfig, ClientConnection, CommonState, ConnectionCommon, Error, HandshakeKind, ServerConfig,
    ServerConnection, SideData,
};
use weir_identity::{Mistrust, OtherEnd, other_end, peer};

/// What one end knows after the handshake and an exchange of one message.
#[derive(Debug)]
pub struct Met {
    pub other: Option<OtherEnd>,
    pub as_peer: Result<OtherEnd, Mistrust>,
    pub version: ProtocolVersion,
    pub suite: CipherSuite,
    pub kind: HandshakeKind,
}

pub type Outcome = Result<Met, Error>;

/// The outcome at the server, and at the client.
pub fn connect(server: ServerConfig, client: ClientConfig) -> (Outcome, Outcome) {
    connect_shared(&Arc::new(server), &Arc::new(client))
}

pub fn connect_shared(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>) -> (Outcome, Outcome) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = ServerConnection::new(Arc::clone(server)).unwrap();
    let serving = thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        exchange(server, socket, b"pong")
    });
    let there = ServerName::try_from("weir.invalid").unwrap();
    let client = ClientConnection::new(Arc::clone(client), there).unwrap();
    let found = exchange(client, TcpStream::connect(address).unwrap(), b"ping");
    (serving.join().unwrap(), found)
}

/// Shakes hands and exchanges four bytes each way.
fn exchange<C, S>(mut connection: C, mut socket: TcpStream, message: &[u8; 4]) -> Outcome
where
    C: std::ops::DerefMut<Target = ConnectionCommon<S>>,
    S: SideData,
{
    let mut converse = || -> io::Result<()> {
        connection.writer().write_all(message)?;
        let mut received = [0; 4];
        let mut count = 0;
        while count < received.len() || connection.wants_write() {
            connection.complete_io(&mut socket)?;
            match connection.reader().read(&mut received[count..]) {
                Ok(0) if count < received.len() => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(more) => count += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    let outcome = converse();
    // The alert reaches the other side only if nothing unread makes the kernel reset the connection.
    let _ = socket.shutdown(Shutdown::Write);
    let _ = io::copy(&mut socket, &mut io::sink());
    match outcome {
        Ok(()) => Ok(met(&connection)),
        Err(error) => Err(cause(error)),
    }
}

fn met(connection: &CommonState) -> Met {
    Met {
        other: other_end(connection).unwrap(),
        as_peer: peer(connection),
        version: connection.protocol_version().unwrap(),
        suite: connection.negotiated_cipher_suite().unwrap().suite(),
        kind: connection.handshake_kind().unwrap(),
    }
}

fn cause(error: io::Error) -> Error {
    let text = error.to_string();
    let inner = error.into_inner().and_then(|inner| inner.downcast::<Error>().ok());
    inner.map_or(Error::General(text), |inner| *inner)
}
