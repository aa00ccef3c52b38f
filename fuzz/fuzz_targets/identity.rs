//! Arbitrary bytes where strangers send requests to join, requests for certificates and certificates: nothing panics, and nothing
//! that a stranger makes up is admitted.

#![cfg_attr(feature = "link", no_main)]

use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use libfuzzer_sys::fuzz_target;
use weir_identity::{
    Authority, ClusterId, Facts, Identity, Invitation, IssuedRecord, JoinRequest, Joiner, Key, NODE_LIFETIME,
    Names, Purpose, Records, RenewRequest, Revocations, Seen, TokenRecord, Trust, admit, invite, renew,
};

const NOW: u64 = 1_795_435_200;

struct Cluster {
    authority: Authority,
    node: Facts,
    issued: Vec<IssuedRecord>,
    trust: Trust,
    revoked: Revocations,
    names: Names,
    /// An open invitation, and the request of the host that was invited.
    token: TokenRecord,
    request: JoinRequest,
}

fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    CLUSTER.get_or_init(|| {
        let authority = Authority::create(ClusterId([1; 16]), NOW).expect("random numbers");
        let key = Key::generate().expect("random numbers").public();
        let node = authority.issue_node(&"a".parse().expect("a name"), &[], &key, NOW, NODE_LIFETIME);
        let node = node.expect("a certificate").record;
        let invitation = Invitation {
            only_for: None,
            hosts: vec![],
            pins: vec![authority.certificate().fingerprint()],
            endpoints: vec!["a:1".parse().expect("an endpoint")],
            ttl: 3600,
            readmits: false,
        };
        let (token, record) = invite(invitation, NOW).expect("an invitation");
        let joiner = Joiner::new(Key::generate().expect("random numbers"), "b".parse().expect("a name"), &[]);
        let request = joiner.expect("a request").request(&token, NOW);
        let all = vec![authority.certificate().clone()];
        let trust = Trust::new(authority.certificate().cluster(), all, Revocations::default());
        Cluster {
            node: node.facts.clone(),
            issued: vec![node],
            token: record,
            request,
            names: Names::default(),
            trust: trust.expect("one authority"),
            authority,
            revoked: Revocations::default(),
        }
    })
}

fn records(cluster: &'static Cluster) -> Records<'static> {
    Records {
        token: Some(Seen { record: &cluster.token, revision: Some(1) }),
        issued: &cluster.issued,
        names: Seen { record: &cluster.names, revision: Some(2) },
        revoked: Seen { record: &cluster.revoked, revision: None },
        authorities: Seen { record: cluster.trust.authorities(), revision: Some(3) },
    }
}

// The first byte says what the others are.
fuzz_target!(|input: &[u8]| {
    let Some((&kind, bytes)) = input.split_first() else { return };
    match kind % 3 {
        0 => {
            let cluster = cluster();
            let decide = |request: &JoinRequest| {
                admit(&cluster.authority, records(cluster), request, NOW, NODE_LIFETIME)
            };
            if let Ok(request) = JoinRequest::decode(bytes) {
                assert!(decide(&request).is_err());
            }
            // The invited host's request with anything else in it, as whoever forwards it can make it.
            let text = String::from_utf8_lossy(bytes);
            let [mut csr, mut name, mut clock] = [(); 3].map(|()| cluster.request.clone());
            assert!(decide(&csr).is_ok());
            csr.csr = text.to_string();
            clock.clock = bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
            if let Ok(other) = text.parse() {
                name.name = other;
            }
            for forged in [&csr, &name, &clock] {
                let changed = (&forged.csr, &forged.name, forged.clock)
                    != (&cluster.request.csr, &cluster.request.name, cluster.request.clock);
                assert_eq!(decide(forged).is_err(), changed);
            }
        }
        1 => {
            let cluster = cluster();
            let request = RenewRequest { v: 1, csr: URL_SAFE_NO_PAD.encode(bytes) };
            let decided = renew(
                &cluster.authority,
                records(cluster),
                &cluster.node,
                &[],
                &request,
                (NOW, NODE_LIFETIME),
                false,
            );
            if let Ok(admission) = decided {
                assert_eq!(
                    admission.issued.facts.identity, cluster.node.identity,
                    "whatever the request says"
                );
            }
        }
        _ => {
            if let Ok(facts) = Facts::read(bytes) {
                let uris = facts.identity.uris();
                let again = Identity::from_uris(uris.iter().map(String::as_str));
                assert_eq!(again.as_ref(), Ok(&facts.identity));
            }
            let certificate = bytes.to_vec().into();
            assert!(cluster().trust.check(&certificate, Purpose::Client, NOW).is_err());
        }
    }
});

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
