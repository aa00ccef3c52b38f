//! Revoked certificates and names, as the registry holds them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::certificate::Facts;
use crate::identity::Identity;
use crate::invitation::TokenRecord;
use crate::name::{KeyId, Name, Serial};
use crate::when::MOST_SKEW;

/// Longest reason, in characters.
const LONGEST_REASON: usize = 200;

/// One revocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// When, in seconds since 1970.
    pub at: u64,
    /// Why, for people.
    pub reason: String,
}

/// A revoked certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedSerial {
    /// When and why.
    #[serde(flatten)]
    pub revocation: Revocation,
    /// The name in the certificate.
    pub name: Option<Name>,
    /// Last second of its validity; the entry is needed until then.
    pub not_after: u64,
    /// Revoked only because its holder has a newer one: connections made with it stay open.
    #[serde(default)]
    pub replaced: bool,
}

/// All that is revoked.
///
/// A revoked *name* covers every certificate of it, also one that this list does not know. Its own clock never decides: whether a
/// certificate was made before the revocation is not asked, because the two times come from different hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocations {
    /// Revoked certificates.
    pub serials: BTreeMap<Serial, RevokedSerial>,
    /// Revoked names of nodes.
    pub nodes: BTreeMap<Name, Revocation>,
    /// Revoked names of clients.
    pub clients: BTreeMap<Name, Revocation>,
}

/// The kind of name to revoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A node.
    Node,
    /// A client.
    Client,
}

impl Revocations {
    /// The revocation that covers a certificate.
    #[must_use]
    pub fn covering(&self, facts: &Facts) -> Option<&Revocation> {
        let by_serial = || self.serials.get(&facts.serial).map(|revoked| &revoked.revocation);
        self.by_name(facts).or_else(by_serial)
    }

    fn by_name(&self, facts: &Facts) -> Option<&Revocation> {
        match &facts.identity {
            Identity::Authority(_) => None,
            Identity::Node(node) => find(&self.nodes, &node.name),
            Identity::Client(client) => find(&self.clients, &client.name),
        }
    }

    /// The revocation that ends a connection which was made with a certificate: as [`Revocations::covering`], but a certificate
    /// that was only replaced ends none.
    #[must_use]
    pub fn ending(&self, facts: &Facts) -> Option<&Revocation> {
        self.by_name(facts).or_else(|| {
            let revoked = self.serials.get(&facts.serial).filter(|revoked| !revoked.replaced);
            revoked.map(|revoked| &revoked.revocation)
        })
    }

    /// The list with one certificate more. The first revocation of a certificate stays, with its time and reason; that by a newer
    /// certificate gives way, because it ends no connection.
    #[must_use]
    pub fn with_certificate(&self, facts: &Facts, reason: &str, now: u64) -> Revocations {
        let mut list = self.clone();
        let revoked = list.serials.entry(facts.serial).or_insert_with(|| entry(facts, reason, now, false));
        if revoked.replaced {
            *revoked = entry(facts, reason, now, false);
        }
        list
    }

    /// The name of a node was revoked, in any case of its letters.
    #[must_use]
    pub fn names_node(&self, name: &Name) -> bool {
        find(&self.nodes, name).is_some()
    }

    /// A certificate of this key was revoked, other than by a newer one of the same holder.
    #[must_use]
    pub fn of_key<'a>(&self, key: KeyId, issued: impl IntoIterator<Item = &'a Facts>) -> Option<&Revocation> {
        issued.into_iter().filter(|facts| facts.key == key).find_map(|facts| self.ending(facts))
    }

    /// The certificate was replaced by a newer one of its holder, and nothing else revokes it.
    #[must_use]
    pub fn is_replaced(&self, facts: &Facts) -> bool {
        self.covering(facts).is_some() && self.ending(facts).is_none()
    }

    /// The list with all certificates in `issued` that were made earlier for the node that has presented `facts`. A node that
    /// connects with a new certificate has stored it; nobody but a thief uses the former ones from then on.
    ///
    /// Earlier by the registry's revisions, which `issued` has beside each certificate: the hosts that made two certificates
    /// have different clocks. A certificate that `issued` does not have replaces nothing.
    #[must_use]
    pub fn with_replaced<'a>(
        &self,
        facts: &Facts,
        issued: impl IntoIterator<Item = (&'a Facts, u64)>,
        now: u64,
    ) -> Revocations {
        let mut list = self.clone();
        if !matches!(facts.identity, Identity::Node(_)) {
            return list;
        }
        let same = |(one, _): &(&Facts, u64)| one.identity == facts.identity;
        let of_node: Vec<_> = issued.into_iter().filter(same).collect();
        let Some(own) = of_node.iter().find(|(one, _)| *one == facts).map(|(_, revision)| *revision) else {
            return list;
        };
        for (one, _) in of_node.into_iter().filter(|(one, made)| *made < own && now <= one.not_after) {
            let replaced = entry(one, "replaced by a newer certificate", now, true);
            list.serials.entry(one.serial).or_insert(replaced);
        }
        list
    }

    /// The list with a name, and with all certificates in `issued` that were made for it.
    #[must_use]
    pub fn with_name<'a>(
        &self,
        holder: Holder,
        name: &Name,
        issued: impl IntoIterator<Item = &'a Facts>,
        reason: &str,
        now: u64,
    ) -> Revocations {
        let mut list = self.clone();
        list.names(holder).entry(name.clone()).or_insert_with(|| revocation(reason, now));
        for facts in issued {
            let of = match &facts.identity {
                Identity::Authority(_) => None,
                Identity::Node(node) => Some((Holder::Node, &node.name)),
                Identity::Client(client) => Some((Holder::Client, &client.name)),
            };
            if of.is_some_and(|(kind, other)| kind == holder && other.resembles(name.as_str())) {
                list = list.with_certificate(facts, reason, now);
            }
        }
        list
    }

    /// Revokes a node: the list with its name and certificates, and the tokens that admit nobody any more, to be written in one
    /// transaction. A token for any name stays: it is not known who has it.
    #[must_use]
    pub fn revoking_node<'a>(
        &self,
        name: &Name,
        issued: impl IntoIterator<Item = &'a Facts>,
        tokens: impl IntoIterator<Item = &'a TokenRecord>,
        reason: &str,
        now: u64,
    ) -> (Revocations, Vec<TokenRecord>) {
        let void = tokens.into_iter().filter_map(|token| token.voided_by(name, now)).collect();
        (self.with_name(Holder::Node, name, issued, reason, now), void)
    }

    /// The list without a name, so that a host may join under it again with a new key. All certificates in `issued` that were made
    /// for the name stay revoked, also those that a revocation beside a renewal has missed.
    #[must_use]
    pub fn readmitting<'a>(
        &self,
        holder: Holder,
        name: &Name,
        issued: impl IntoIterator<Item = &'a Facts>,
        now: u64,
    ) -> Revocations {
        let mut list = self.with_name(holder, name, issued, "before the name was readmitted", now);
        list.names(holder).retain(|other, _| !other.resembles(name.as_str()));
        list
    }

    /// The list with the certificates that `known` has, until they have expired on every clock: one that was revoked never counts
    /// again, so a list without it is of earlier, as after the registry was restored from a backup. A *name* may count again.
    #[must_use]
    pub fn with_certificates_of(&self, known: &Revocations, now: u64) -> Revocations {
        let mut list = self.clone();
        for (serial, revoked) in known.pruned(now).serials {
            let one = list.serials.entry(serial).or_insert_with(|| revoked.clone());
            // Of earlier, too: since then it was revoked for another reason than a newer certificate.
            if one.replaced && !revoked.replaced {
                *one = revoked;
            }
        }
        list
    }

    /// The list without certificates that have expired on every clock.
    #[must_use]
    pub fn pruned(&self, now: u64) -> Revocations {
        let mut list = self.clone();
        list.serials.retain(|_, revoked| revoked.not_after.saturating_add(2 * MOST_SKEW) >= now);
        list
    }

    fn names(&mut self, holder: Holder) -> &mut BTreeMap<Name, Revocation> {
        match holder {
            Holder::Node => &mut self.nodes,
            Holder::Client => &mut self.clients,
        }
    }
}

/// The revocation of a name, in any case of its letters: two that differ only there are one.
fn find<'a>(names: &'a BTreeMap<Name, Revocation>, name: &Name) -> Option<&'a Revocation> {
    let resembling = || names.iter().find(|(other, _)| other.resembles(name.as_str())).map(|(_, by)| by);
    names.get(name).or_else(resembling)
}

fn entry(facts: &Facts, reason: &str, now: u64, replaced: bool) -> RevokedSerial {
    RevokedSerial {
        revocation: revocation(reason, now),
        name: facts.identity.name().cloned(),
        not_after: facts.not_after,
        replaced,
    }
}

fn revocation(reason: &str, at: u64) -> Revocation {
    Revocation { at, reason: reason.chars().take(LONGEST_REASON).collect() }
}
