//! The callers of the API and their rights.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::http::Method;
use weir_block::Nanos;
use weir_identity::{Identity, OtherEnd, Role};

use crate::error::{ApiError, ApiErrorKind};

/// The path that is open to all: a host that joins has no certificate yet.
const JOIN: &str = "/v1/cluster/join";
/// The path by which a node renews its own certificate.
const RENEW: &str = "/v1/cluster/renew";
/// All changes of who belongs to the cluster.
const CLUSTER: &str = "/v1/cluster";

/// The maker of a request.
#[derive(Clone, Debug)]
pub enum Caller {
    /// A process of this host, at the Unix socket, which only its owner and root may open.
    Local {
        /// The user; `None` if the kernel does not say.
        user: Option<u32>,
        /// The process.
        process: Option<i32>,
    },
    /// Someone at the TLS address.
    Remote {
        /// The certificate; `None`: nobody.
        other: Option<OtherEnd>,
        /// The address.
        from: SocketAddr,
    },
}

impl Caller {
    /// The address, or the Unix socket.
    #[must_use]
    pub fn from(&self) -> String {
        match self {
            Caller::Local { .. } => "unix".into(),
            Caller::Remote { from, .. } => from.to_string(),
        }
    }

    /// The certificate of a node.
    #[must_use]
    pub fn node(&self) -> Option<&OtherEnd> {
        match self {
            Caller::Remote { other: Some(other), .. } if matches!(other.identity, Identity::Node(_)) => {
                Some(other)
            }
            _ => None,
        }
    }

    /// The address of someone without a certificate.
    #[must_use]
    pub fn nobody(&self) -> Option<IpAddr> {
        match self {
            Caller::Remote { other: None, from } => Some(from.ip()),
            _ => None,
        }
    }

    /// The highest role that the caller has.
    fn role(&self) -> Option<Role> {
        let Caller::Remote { other, .. } = self else { return Some(Role::Admin) };
        match &other.as_ref()?.identity {
            Identity::Client(client) => client.role(),
            // A node makes its changes in the registry; here it only reads.
            Identity::Node(_) => Some(Role::Viewer),
            Identity::Authority(_) => None,
        }
    }

    /// Decides on a request.
    ///
    /// # Errors
    /// [`ApiErrorKind::Forbidden`], with the role that it needs.
    pub fn may(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        let needed = match path {
            JOIN => return Ok(()),
            RENEW if self.node().is_some() => return Ok(()),
            RENEW => return Err(forbidden(format!("only a node renews its certificate; this is {self}"))),
            _ if is_read(method) => Role::Viewer,
            _ if self.node().is_some() && is_for_nodes(path) => return Ok(()),
            _ if path.starts_with(CLUSTER) => Role::Admin,
            _ => Role::Operator,
        };
        match self.role() {
            Some(role) if role >= needed => Ok(()),
            Some(_) => Err(forbidden(format!("{self} may not do this: it needs the role {needed}"))
                .hint("an administrator makes certificates: `weir cluster client NAME --role ROLE`")),
            None => Err(forbidden(format!(
                "{self} may not use the API: it needs a client certificate with a role"
            ))
            .hint("an administrator makes one: `weir cluster client NAME --role ROLE`")),
        }
    }
}

impl fmt::Display for Caller {
    /// `user 0`, `client eve (viewer)`, `node n2`, `nobody`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Caller::Local { user: Some(user), process: Some(process) } => {
                write!(f, "user {user} (process {process})")
            }
            Caller::Local { user: Some(user), process: None } => write!(f, "user {user}"),
            Caller::Local { user: None, .. } => f.write_str("a local user"),
            Caller::Remote { other: None, .. } => f.write_str("a client without a certificate"),
            Caller::Remote { other: Some(other), .. } => match (&other.identity, self.role()) {
                (Identity::Client(client), Some(role)) => write!(f, "client {} ({role})", client.name),
                (identity, _) => identity.fmt(f),
            },
        }
    }
}

/// Another node may ask this one to export a disk, which opens it here or waits until it is open, and to move a disk that it follows
/// to it; see [`crate::operations::Operations::move_disk`]. The node that makes a snapshot asks the disk's owner for a barrier, which ends by
/// itself. A disk's owner has the disk's file made longer.
fn is_for_nodes(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    matches!(parts[..], ["", "v1", "disks", _, "export" | "move" | "barrier" | "lengthen"])
}

/// A request that changes nothing.
#[must_use]
pub fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

fn forbidden(message: String) -> ApiError {
    ApiError::new(ApiErrorKind::Forbidden, message)
}

/// Requests of one address at once.
const BURST: f64 = 5.0;
/// Requests of one address per second, in the long run.
const RATE: f64 = 2.0;
/// Addresses that are remembered (P10).
const MOST_ADDRESSES: usize = 4096;

/// A limit for each address: a token is guessed nowhere, and a signature costs processor time.
#[derive(Debug, Default)]
pub struct Limit(Mutex<BTreeMap<IpAddr, (f64, Nanos)>>);

impl Limit {
    /// Whether one more request of this address is answered at `now`.
    pub fn pass(&self, address: IpAddr, now: Nanos) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = |&(left, at): &(f64, Nanos)| (left + (now - at).as_secs_f64() * RATE).min(BURST);
        if all.len() >= MOST_ADDRESSES {
            all.retain(|_, seen| left(seen) < BURST);
        }
        let address = group(address);
        if all.len() >= MOST_ADDRESSES && !all.contains_key(&address) {
            return false;
        }
        let left = all.get(&address).map_or(BURST, left);
        let pass = left >= 1.0;
        all.insert(address, (if pass { left - 1.0 } else { left }, now));
        pass
    }

    /// The time after which one more request passes.
    pub const PAUSE: Duration = Duration::from_secs(1);
}

/// A host has all addresses of its IPv6 network, which is 64 bits long.
pub fn group(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) if address.to_ipv4_mapped().is_none() => {
            Ipv6Addr::from(u128::from(address) & !u128::from(u64::MAX)).into()
        }
        other => other.to_canonical(),
    }
}

#[cfg(test)]
mod tests {
    use weir_identity::{Authority, ClusterId, Grant, Key, NODE_LIFETIME};

    use super::*;

    fn remote(grant: Option<Grant>) -> Caller {
        let now = 1_795_435_200;
        let authority = Authority::create(ClusterId([1; 16]), now).unwrap();
        let (key, name) = (Key::generate().unwrap().public(), "eve".parse().unwrap());
        let issued = match grant {
            Some(grant) => authority.issue_client(&name, &grant, &key, now, NODE_LIFETIME),
            None => authority.issue_node(&name, &[], &key, now, NODE_LIFETIME),
        };
        let other = OtherEnd::read(&issued.unwrap().chain[0]).unwrap();
        Caller::Remote { other: Some(other), from: "10.0.0.9:5000".parse().unwrap() }
    }

    #[test]
    fn each_role_may_what_it_is_for() {
        let local = Caller::Local { user: Some(0), process: Some(1) };
        let nobody = Caller::Remote { other: None, from: "10.0.0.9:5000".parse().unwrap() };
        let [viewer, operator, admin] =
            [Role::Viewer, Role::Operator, Role::Admin].map(|role| remote(Some(Grant::Role(role))));
        let exports = remote(Some(Grant::Exports(["db".parse().unwrap()].into())));
        let node = remote(None);
        let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
        for (method, path, may) in [
            (&get, "/v1/status", [true, false, true, true, true, false, true]),
            (&get, "/v1/cluster", [true, false, true, true, true, false, true]),
            (&post, "/v1/disks", [true, false, false, true, true, false, false]),
            (&delete, "/v1/disks/db", [true, false, false, true, true, false, false]),
            (&post, "/v1/disks/db/delete", [true, false, false, true, true, false, false]),
            (&post, "/v1/disks/db/export", [true, false, false, true, true, false, true]),
            (&post, "/v1/disks/db/move", [true, false, false, true, true, false, true]),
            (&post, "/v1/disks/db/follow", [true, false, false, true, true, false, false]),
            (&post, "/v1/disks/x/y/export", [true, false, false, true, true, false, false]),
            (&post, "/v1/nodes/n1/drain", [true, false, false, true, true, false, false]),
            (&post, "/v1/nodes/n1/remove", [true, false, false, true, true, false, false]),
            (&post, "/v1/cluster/invite", [true, false, false, false, true, false, false]),
            (&post, "/v1/cluster/revoke", [true, false, false, false, true, false, false]),
            (&post, "/v1/cluster/rotate", [true, false, false, false, true, false, false]),
            (&post, "/v1/cluster/withdraw", [true, false, false, false, true, false, false]),
            (&post, "/v1/cluster/clients", [true, false, false, false, true, false, false]),
            (&post, "/v1/cluster/join", [true; 7]),
            (&post, "/v1/cluster/renew", [false, false, false, false, false, false, true]),
        ] {
            let callers = [&local, &nobody, &viewer, &operator, &admin, &exports, &node];
            let found = callers.map(|caller| caller.may(method, path).is_ok());
            assert_eq!(found, may, "{method} {path}");
        }
        let word = viewer.may(&post, "/v1/disks").unwrap_err();
        assert_eq!(word.message, "client eve (viewer) may not do this: it needs the role operator");
        let word = nobody.may(&get, "/v1/status").unwrap_err();
        assert!(word.message.starts_with("a client without a certificate may not use the API"), "{word}");
    }

    #[test]
    fn an_address_has_a_few_requests_a_second_and_others_have_theirs() {
        let limit = Limit::default();
        let at = |ms: u64| Nanos(0) + Duration::from_millis(ms);
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let one = address("10.0.0.1");
        let passed = (0..20).filter(|_| limit.pass(one, at(0))).count();
        assert_eq!(passed, 5);
        assert!(limit.pass(address("10.0.0.2"), at(0)));
        assert!(!limit.pass(one, at(400)) && limit.pass(one, at(1000)));
        assert!(limit.pass(one, at(1000)) && !limit.pass(one, at(1000)));
        // A host with a network of addresses is one host.
        let passed = (0..20).filter(|i| limit.pass(address(&format!("fd00::{i:x}")), at(0))).count();
        assert_eq!(passed, 5);
        // Bounded, and it works again when those of before have been silent.
        let many = |i: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0b00_0000 + i));
        let passed = (0..10_000).filter(|i| limit.pass(many(*i), at(2000))).count();
        assert!((4000..=4096).contains(&passed), "{passed}");
        assert!(limit.pass(many(9_999), at(9000)));
    }
}
