//! The meaning of etcd's errors for a call.

use std::error::Error;

use tonic::{Code, Status};
use weir_cluster::RegistryError;

/// Why an attempt failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No other attempt would fare better.
    Refused(Refusal),
    /// Another attempt may succeed.
    Again(Again),
}

/// A final answer, for which nothing was changed.
#[derive(Debug)]
pub(crate) enum Refusal {
    Error(RegistryError),
    /// The lease of the call has ended.
    LeaseEnded,
    /// The asked revision is no longer known.
    Compacted,
}

impl Refusal {
    /// The error for a caller without a lease or a revision in its request.
    pub fn error(self) -> RegistryError {
        match self {
            Refusal::Error(error) => error,
            Refusal::LeaseEnded => {
                RegistryError::unavailable("etcd names an ended lease in a call without one")
            }
            Refusal::Compacted => RegistryError::unavailable("etcd's history was compacted during the call"),
        }
    }
}

/// An attempt that may be repeated.
#[derive(Debug)]
pub(crate) struct Again {
    pub reason: String,
    /// Whether etcd may have carried out the request, or may still do so.
    pub in_doubt: bool,
    /// Whether one side does not accept the other's identity. It passes only when an operator acts.
    pub identity: bool,
    /// Whether the connection must be made anew.
    pub reconnect: bool,
}

impl Again {
    /// The request was certainly not carried out.
    pub fn not_done(reason: impl Into<String>) -> Again {
        Again { reason: reason.into(), in_doubt: false, identity: false, reconnect: false }
    }

    /// The request may have been carried out.
    pub fn in_doubt(reason: impl Into<String>) -> Again {
        Again { in_doubt: true, ..Again::not_done(reason) }
    }
}

impl From<Again> for Failure {
    fn from(again: Again) -> Failure {
        Failure::Again(again)
    }
}

impl From<RegistryError> for Failure {
    fn from(error: RegistryError) -> Failure {
        Failure::Refused(Refusal::Error(error))
    }
}

impl From<etcd_client::Error> for Failure {
    fn from(error: etcd_client::Error) -> Failure {
        match error {
            etcd_client::Error::GRpcStatus(status) => of_status(&status),
            // The client's own word for a time to live of zero.
            etcd_client::Error::LeaseKeepAliveError(reason) if reason == "lease not found" => {
                Failure::Refused(Refusal::LeaseEnded)
            }
            error => Again { reconnect: true, ..Again::in_doubt(error.to_string()) }.into(),
        }
    }
}

/// Failure to make a connection: nothing was sent.
pub(crate) fn of_connecting(error: &tonic::transport::Error) -> Failure {
    let reason = chain(error);
    Again { identity: is_identity(&reason), reconnect: true, ..Again::not_done(reason) }.into()
}

fn of_status(status: &Status) -> Failure {
    let text = status.message();
    let says = |words: &str| text.contains(words);
    let setup = |reason: String| Failure::from(RegistryError::Setup { reason });
    if says("requested lease not found") {
        return Failure::Refused(Refusal::LeaseEnded);
    }
    if says("required revision has been compacted") {
        return Failure::Refused(Refusal::Compacted);
    }
    if says("database space exceeded") {
        let reason =
            "etcd's space quota is exceeded; compact and defragment it, then disarm its alarm".to_owned();
        return RegistryError::Full { reason }.into();
    }
    if says("request is too large") || says("too many operations") || says("duplicate key") {
        return RegistryError::malformed(format!("etcd refused the request: {text}")).into();
    }
    if says("authentication failed") {
        return setup(
            "etcd refused the user or the password; see registry.user and registry.password_file".to_owned(),
        );
    }
    if says("authentication is not enabled") {
        return setup("etcd's authentication is not enabled; enable it, or remove registry.user".to_owned());
    }
    if says("user name is empty") {
        return setup("etcd requires a user; set registry.user and registry.password_file".to_owned());
    }
    if status.code() == Code::PermissionDenied {
        return setup(format!(
            "etcd refused the access ({text}); grant registry.user a role that may read and write registry.prefix"
        ));
    }
    if status.code() == Code::Unauthenticated || says("revision of auth store is old") {
        return Again { reconnect: true, ..Again::not_done(text) }.into();
    }
    if says("etcdserver: no leader")
        || says("etcdserver: too many requests")
        || says("etcdserver: not capable")
    {
        return Again::not_done(text).into();
    }
    if text.starts_with("etcdserver: ") {
        return Again::in_doubt(text).into();
    }
    let reason = chain(status);
    let connected = !is_connecting(status);
    Again { in_doubt: connected, identity: is_identity(&reason), reconnect: true, reason }.into()
}

/// Whether no connection could be made. The channel connects again when a connection has ended.
fn is_connecting(status: &Status) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(status);
    while let Some(error) = next {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// TLS alerts and failed verifications.
fn is_identity(reason: &str) -> bool {
    reason.contains("invalid peer certificate") || reason.contains("received fatal alert")
}

/// The remedy for a connection that failed, or an identity that was refused, for the end of a message.
pub(crate) fn advice(reason: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    if says(&["UnknownIssuer", "UnknownCA"]) && says(&["invalid peer certificate"]) {
        "registry.ca did not sign etcd's certificate: name the CA of etcd's own certificate (its --cert-file) there"
    } else if says(&["not valid for name"]) {
        "etcd's certificate does not name the host in registry.etcd: use a host that it names, or give etcd another certificate"
    } else if says(&["invalid peer certificate"]) {
        "etcd's certificate is not accepted: check it, this host's clock, and registry.ca"
    } else if says(&["received fatal alert"]) {
        "etcd refuses this host's certificate: registry.certificate and registry.key must be there, valid now, and signed by a CA of \
         etcd's --trusted-ca-file"
    } else if says(&[
        "broken pipe",
        "connection closed",
        "handshake eof",
        "invalid size",
        "corrupt message",
        "connection reset",
        // As the system says it.
        "Connection reset",
        "connection was not ready",
    ]) {
        "the scheme (http:// or https://) or the port in registry.etcd may be wrong"
    } else if says(&["Connection refused", "dns error", "unreachable", "No route to host", NO_CONNECTION]) {
        "does etcd run there, and is registry.etcd right?"
    } else {
        ""
    }
}

/// The reason of an attempt without a connection.
pub(crate) const NO_CONNECTION: &str = "no connection within";

/// An error with its sources: a transport's error alone says only "transport error".
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = match error.downcast_ref::<Status>() {
            Some(status) => status.message().to_owned(),
            None => error.to_string(),
        };
        if !text.is_empty() && !parts.iter().any(|part| part.contains(&text)) {
            parts.push(text);
        }
        next = error.source();
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcds_words_have_their_meaning() {
        let of = |code, text: &str| of_status(&Status::new(code, text));
        assert!(matches!(
            of(Code::NotFound, "etcdserver: requested lease not found"),
            Failure::Refused(Refusal::LeaseEnded)
        ));
        let compacted = "etcdserver: mvcc: required revision has been compacted";
        assert!(matches!(of(Code::OutOfRange, compacted), Failure::Refused(Refusal::Compacted)));
        let full = of(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        assert!(matches!(full, Failure::Refused(Refusal::Error(RegistryError::Full { .. }))));
        let large = of(Code::InvalidArgument, "etcdserver: request is too large");
        assert!(matches!(large, Failure::Refused(Refusal::Error(RegistryError::Malformed { .. }))));
        for (code, text) in [
            (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password"),
            (Code::InvalidArgument, "etcdserver: user name is empty"),
            (Code::FailedPrecondition, "etcdserver: authentication is not enabled"),
            (Code::PermissionDenied, "etcdserver: permission denied"),
        ] {
            assert!(
                matches!(of(code, text), Failure::Refused(Refusal::Error(RegistryError::Setup { .. }))),
                "{text}"
            );
        }
    }

    #[test]
    fn only_requests_that_etcd_did_not_begin_are_not_in_doubt() {
        let of = |code, text: &str| of_status(&Status::new(code, text));
        for (code, text, in_doubt) in [
            (Code::Unavailable, "etcdserver: no leader", false),
            (Code::ResourceExhausted, "etcdserver: too many requests", false),
            (Code::Unauthenticated, "etcdserver: invalid auth token", false),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old", false),
            (Code::Unavailable, "etcdserver: leader changed", true),
            (Code::Unavailable, "etcdserver: request timed out", true),
            (
                Code::Unavailable,
                "etcdserver: request timed out, possibly due to previous leader failure",
                true,
            ),
            (Code::Unavailable, "connection reset", true),
            (Code::Unknown, "transport error", true),
            (Code::Cancelled, "", true),
        ] {
            let Failure::Again(again) = of(code, text) else { panic!("{text}") };
            assert_eq!(again.in_doubt, in_doubt, "{text}");
        }
    }
}
