//! URIs of exports: `nbd://host:port/export`, `nbd+unix:///export?socket=/path`.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The protocol's registered port.
const PORT: u16 = 10809;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// An export on a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Uri {
    /// The server.
    pub address: Address,
    /// The export's name; empty means the server's default.
    pub export: String,
}

/// The reason why a text is not the URI of an export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an NBD URI: {what}; expected nbd://host:port/export or nbd+unix:///export?socket=/path"
)]
pub struct UriError {
    text: String,
    what: &'static str,
}

impl Uri {
    /// An export behind a Unix socket.
    #[must_use]
    pub fn unix(socket: &Path, export: &str) -> Uri {
        Uri { address: Address::Unix(socket.into()), export: export.into() }
    }

    /// An export behind a TCP address.
    #[must_use]
    pub fn tcp(address: SocketAddr, export: &str) -> Uri {
        Uri {
            address: Address::Tcp { host: address.ip().to_string(), port: address.port() },
            export: export.into(),
        }
    }

    fn parse(text: &str) -> Result<Uri, &'static str> {
        let (scheme, rest) = text.split_once("://").ok_or("it has no scheme")?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(export)?;
        match scheme {
            "nbd" => Ok(Uri { address: tcp(authority)?, export }),
            "nbd+unix" => {
                if !authority.is_empty() {
                    return Err("a Unix socket has no host: write three slashes, nbd+unix:///export");
                }
                let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket="));
                let socket = decode(socket.ok_or("it lacks ?socket=/path")?)?;
                if socket.is_empty() {
                    return Err("the socket's path is empty");
                }
                Ok(Uri { address: Address::Unix(socket.into()), export })
            }
            "nbds" | "nbds+unix" => Err(
                "Weir's own client does not speak TLS: use nbd:// in a network that you trust, or a Unix socket (nbd+unix)",
            ),
            _ => Err("unknown scheme"),
        }
    }
}

fn tcp(authority: &str) -> Result<Address, &'static str> {
    if authority.contains('@') {
        return Err("NBD knows no users and no passwords: leave out the @ and what is before it");
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("the bracket around the address is not closed")?;
            (host, rest.strip_prefix(':'))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = port.map_or(Ok(PORT), str::parse).map_err(|_| "the port is not a number from 0 to 65535")?;
    let host = if host.is_empty() { "localhost" } else { host };
    Ok(Address::Tcp { host: host.into(), port })
}

/// Undoes percent-encoding (RFC 3986 §2.1).
fn decode(text: &str) -> Result<String, &'static str> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        let (high, low) = (digit(), digit());
        let (Some(high), Some(low)) = (high, low) else {
            return Err("a % is not followed by two hex digits");
        };
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8")
}

fn encode(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    text.bytes().try_for_each(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
            write!(f, "{}", char::from(byte))
        }
        _ => write!(f, "%{byte:02X}"),
    })
}

impl FromStr for Uri {
    type Err = UriError;
    fn from_str(text: &str) -> Result<Uri, UriError> {
        Uri::parse(text).map_err(|what| UriError { text: text.into(), what })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            tcp @ Address::Tcp { .. } => {
                write!(f, "nbd://{tcp}/")?;
                encode(&self.export, f)
            }
            Address::Unix(path) => {
                f.write_str("nbd+unix:///")?;
                encode(&self.export, f)?;
                f.write_str("?socket=")?;
                encode(&path.to_string_lossy(), f)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read_and_printed() {
        for (text, address, export) in [
            ("nbd://localhost:10809/", Address::Tcp { host: "localhost".into(), port: 10809 }, ""),
            ("nbd://[::1]:7/a%20b", Address::Tcp { host: "::1".into(), port: 7 }, "a b"),
            ("nbd+unix:///vol/disk?socket=/tmp/a.sock", Address::Unix("/tmp/a.sock".into()), "vol/disk"),
        ] {
            let uri: Uri = text.parse().unwrap();
            assert_eq!(uri, Uri { address, export: export.into() });
            assert_eq!(uri.to_string(), text);
        }
        let short: Uri = "nbd://example".parse().unwrap();
        assert_eq!(short.address, Address::Tcp { host: "example".into(), port: PORT });
    }

    #[test]
    fn errors_say_what_is_expected() {
        for (text, hint) in [
            ("/dev/sda", "no scheme"),
            ("http://x/", "unknown scheme"),
            ("nbds://x/", "TLS"),
            ("nbd://user:secret@x/", "no users"),
            ("nbd://x:99999/", "port"),
            ("nbd://[::1/", "bracket"),
            ("nbd+unix:///x", "?socket="),
            ("nbd+unix:///x?socket=", "empty"),
            ("nbd+unix://host/x?socket=/s", "three slashes"),
            ("nbd://x/%4", "hex"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains("expected nbd://"), "{text}: {error}");
        }
    }
}
