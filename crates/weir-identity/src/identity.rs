//! The identity in a certificate: URIs in its subject alternative name.
//!
//! ```text
//! weir://CLUSTER/ca              the cluster's certificate authority
//! weir://CLUSTER/node/NAME       a node
//! weir://CLUSTER/client/NAME     a client of the API or of exports, with either
//! weir://CLUSTER/role/ROLE         its role at the API, or
//! weir://CLUSTER/export/EXPORT     each export that it may see and open
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::name::{ClusterId, ExportName, Name};

/// Most exports in one client certificate.
pub const MOST_EXPORTS: usize = 64;

const SCHEME: &str = "weir://";

/// A client's permissions at the API. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Read.
    Viewer,
    /// Change disks, volumes and nodes.
    Operator,
    /// Change who belongs to the cluster and who may do what.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Admin => "admin",
        })
    }
}

impl FromStr for Role {
    type Err = NotAnIdentity;
    fn from_str(text: &str) -> Result<Role, NotAnIdentity> {
        let all = [Role::Viewer, Role::Operator, Role::Admin];
        let found = all.into_iter().find(|role| role.to_string() == text);
        found.ok_or_else(|| NotAnIdentity::BadUri(shortened(text)))
    }
}

/// The permissions in a client's certificate. A certificate of one kind permits nothing of the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grant {
    /// A role at the API; no exports.
    Role(Role),
    /// Exports to see and open, 1 to [`MOST_EXPORTS`]; nothing at the API.
    Exports(BTreeSet<ExportName>),
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Grant::Role(role) => role.fmt(f),
            Grant::Exports(exports) => {
                let all: Vec<&str> = exports.iter().map(ExportName::name).collect();
                f.write_str(&all.join(", "))
            }
        }
    }
}

/// A node, by its certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its cluster.
    pub cluster: ClusterId,
    /// Its name.
    pub name: Name,
}

/// A client, by its certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Its cluster.
    pub cluster: ClusterId,
    /// Its name, for logs.
    pub name: Name,
    /// Its permissions.
    pub grant: Grant,
}

impl Client {
    /// Whether the client may see and open the export of this name, which is that of the disk with the identity `disk`.
    #[must_use]
    pub fn may_open(&self, export: &str, disk: Option<u64>) -> bool {
        match &self.grant {
            Grant::Role(_) => false,
            Grant::Exports(exports) => exports.iter().any(|one| one.is(export, disk)),
        }
    }

    /// The role at the API.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        match self.grant {
            Grant::Role(role) => Some(role),
            Grant::Exports(_) => None,
        }
    }
}

/// The subject of a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Identity {
    /// The cluster's certificate authority.
    Authority(ClusterId),
    /// A node.
    Node(Node),
    /// A client.
    Client(Client),
}

/// The reason why a list of URIs names nobody.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAnIdentity {
    /// Not one of the forms of this module.
    #[error("{0:?} in the certificate is no identity of a Weir cluster")]
    BadUri(String),
    /// No URI.
    #[error("the certificate names no node and no client of a Weir cluster")]
    Nobody,
    /// URIs that contradict each other.
    #[error("the certificate's identities contradict each other")]
    Contradiction,
    /// Too long a list.
    #[error("the certificate names more than {MOST_EXPORTS} exports")]
    TooManyExports,
}

enum Part {
    Ca,
    Node(Name),
    Client(Name),
    Role(Role),
    Export(ExportName),
}

impl Identity {
    /// Its cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        match self {
            Identity::Authority(cluster) => *cluster,
            Identity::Node(node) => node.cluster,
            Identity::Client(client) => client.cluster,
        }
    }

    /// The name of the node or client.
    #[must_use]
    pub fn name(&self) -> Option<&Name> {
        match self {
            Identity::Authority(_) => None,
            Identity::Node(node) => Some(&node.name),
            Identity::Client(client) => Some(&client.name),
        }
    }

    /// The same with its exports by name alone, for whichever disks.
    #[must_use]
    pub fn by_names(self) -> Identity {
        match self {
            Identity::Client(Client { cluster, name, grant: Grant::Exports(exports) }) => {
                let exports = exports.into_iter().map(ExportName::of_any_disk).collect();
                Identity::Client(Client { cluster, name, grant: Grant::Exports(exports) })
            }
            other => other,
        }
    }

    /// The URIs of a certificate for this identity.
    #[must_use]
    pub fn uris(&self) -> Vec<String> {
        let cluster = self.cluster();
        let uri = |kind: &str, value: &dyn fmt::Display| format!("{SCHEME}{cluster}/{kind}/{value}");
        match self {
            Identity::Authority(_) => vec![format!("{SCHEME}{cluster}/ca")],
            Identity::Node(node) => vec![uri("node", &node.name)],
            Identity::Client(client) => {
                let mut uris = vec![uri("client", &client.name)];
                match &client.grant {
                    Grant::Role(role) => uris.push(uri("role", role)),
                    Grant::Exports(exports) => uris.extend(exports.iter().map(|one| uri("export", one))),
                }
                uris
            }
        }
    }

    /// The identity of a certificate with these URIs, all of which must belong to it.
    ///
    /// # Errors
    /// [`NotAnIdentity`].
    pub fn from_uris<'a>(uris: impl IntoIterator<Item = &'a str>) -> Result<Identity, NotAnIdentity> {
        let mut cluster = None;
        let mut parts = Vec::new();
        for uri in uris {
            if parts.len() > MOST_EXPORTS {
                return Err(NotAnIdentity::TooManyExports);
            }
            let (of, part) = parse(uri).ok_or_else(|| NotAnIdentity::BadUri(shortened(uri)))?;
            if *cluster.get_or_insert(of) != of {
                return Err(NotAnIdentity::Contradiction);
            }
            parts.push(part);
        }
        combine(cluster.ok_or(NotAnIdentity::Nobody)?, parts)
    }
}

/// The identity of `parts`, of which the first decides what the others may be.
fn combine(cluster: ClusterId, parts: Vec<Part>) -> Result<Identity, NotAnIdentity> {
    let mut parts = parts.into_iter();
    let first = parts.next().ok_or(NotAnIdentity::Nobody)?;
    let rest: Vec<Part> = parts.collect();
    match first {
        Part::Ca if rest.is_empty() => Ok(Identity::Authority(cluster)),
        Part::Node(name) if rest.is_empty() => Ok(Identity::Node(Node { cluster, name })),
        Part::Client(name) => Ok(Identity::Client(Client { cluster, name, grant: grant(rest)? })),
        _ => Err(NotAnIdentity::Contradiction),
    }
}

fn grant(parts: Vec<Part>) -> Result<Grant, NotAnIdentity> {
    if let [Part::Role(role)] = parts[..] {
        return Ok(Grant::Role(role));
    }
    let mut exports = BTreeSet::new();
    for part in parts {
        match part {
            Part::Export(export) if exports.insert(export.clone()) => {}
            _ => return Err(NotAnIdentity::Contradiction),
        }
    }
    if exports.is_empty() { Err(NotAnIdentity::Contradiction) } else { Ok(Grant::Exports(exports)) }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::Authority(cluster) => write!(f, "the authority of cluster {cluster}"),
            Identity::Node(node) => write!(f, "node {}", node.name),
            Identity::Client(client) => write!(f, "client {}", client.name),
        }
    }
}

fn parse(uri: &str) -> Option<(ClusterId, Part)> {
    let (cluster, rest) = uri.strip_prefix(SCHEME)?.split_once('/')?;
    // The digits as this crate writes them: one identity has one form.
    let cluster: ClusterId = cluster.parse().ok().filter(|id: &ClusterId| id.to_string() == cluster)?;
    let part = match rest.split_once('/') {
        None if rest == "ca" => Part::Ca,
        Some(("node", name)) => Part::Node(name.parse().ok()?),
        Some(("client", name)) => Part::Client(name.parse().ok()?),
        Some(("role", role)) => Part::Role(role.parse().ok()?),
        Some(("export", export)) => Part::Export(export.parse().ok()?),
        _ => return None,
    };
    Some((cluster, part))
}

/// Truncated, so that a text from outside cannot flood the log.
fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> ClusterId {
        ClusterId([7; 16])
    }

    fn client(grant: Grant) -> Identity {
        Identity::Client(Client { cluster: cluster(), name: "c".parse().unwrap(), grant })
    }

    #[test]
    fn identities_are_read_back() {
        let exports = ["a", "a#0123456789abcdef", "vol/b"].map(|one| one.parse().unwrap()).into();
        let all = [
            Identity::Authority(cluster()),
            Identity::Node(Node { cluster: cluster(), name: "n".parse().unwrap() }),
            client(Grant::Role(Role::Operator)),
            client(Grant::Exports(exports)),
        ];
        for identity in all {
            let uris = identity.uris();
            assert_eq!(Identity::from_uris(uris.iter().map(String::as_str)), Ok(identity));
        }
    }

    #[test]
    fn contradictions_and_other_uris_name_nobody() {
        let (c, other) = (cluster(), ClusterId([8; 16]));
        let refused = |uris: &[String]| Identity::from_uris(uris.iter().map(String::as_str)).unwrap_err();
        let uri = |rest: &str| format!("weir://{c}/{rest}");
        assert_eq!(refused(&[]), NotAnIdentity::Nobody);
        for bad in
            ["", "node", "node/", "node/a/b", "node/.a", "role/root", "CA", "ca/", "disk/a", "export/a#1"]
        {
            assert!(matches!(refused(&[uri(bad)]), NotAnIdentity::BadUri(_)), "{bad}");
        }
        let upper = format!("weir://{}/ca", "AB".repeat(16));
        for bad in ["https://example/node/a".to_owned(), format!("Weir://{c}/ca"), upper] {
            assert!(matches!(refused(std::slice::from_ref(&bad)), NotAnIdentity::BadUri(_)), "{bad}");
        }
        for bad in [
            vec![uri("node/a"), uri("node/b")],
            vec![uri("node/a"), uri("role/admin")],
            vec![uri("client/a")],
            vec![uri("role/admin")],
            vec![uri("export/a")],
            vec![uri("client/a"), uri("role/admin"), uri("role/viewer")],
            vec![uri("client/a"), uri("role/viewer"), uri("export/a")],
            vec![uri("client/a"), uri("export/a"), uri("export/a")],
            vec![uri("client/a"), format!("weir://{other}/role/admin")],
            vec![uri("ca"), uri("node/a")],
        ] {
            assert_eq!(refused(&bad), NotAnIdentity::Contradiction, "{bad:?}");
        }
        let many: Vec<String> = std::iter::once(uri("client/a"))
            .chain((0..=MOST_EXPORTS).map(|i| uri(&format!("export/{i}"))))
            .collect();
        assert_eq!(refused(&many), NotAnIdentity::TooManyExports);
        assert!(Identity::from_uris(many[..=MOST_EXPORTS].iter().map(String::as_str)).is_ok());
    }

    #[test]
    fn a_grant_of_one_kind_permits_nothing_of_the_other() {
        let Identity::Client(admin) = client(Grant::Role(Role::Admin)) else { panic!("a client") };
        assert!(!admin.may_open("a", None) && admin.role() == Some(Role::Admin));
        let Identity::Client(opens) = client(Grant::Exports(["a".parse().unwrap()].into())) else {
            panic!("a client")
        };
        assert!(opens.may_open("a", None) && !opens.may_open("b", None) && opens.role().is_none());
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
    }
}
