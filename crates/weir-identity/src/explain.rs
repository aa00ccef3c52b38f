//! TLS errors in words: what was wrong, at which end, what to do.

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

use crate::certificate::Facts;
use crate::trust::Mistrust;
use crate::when;

/// The text of a failed handshake or connection for logs, events and commands. An alert is the word of the other side; all else
/// was found here.
#[must_use]
pub fn explain(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(wrong) => certificate(wrong),
        Error::AlertReceived(alert) => received(*alert),
        Error::NoCertificatesPresented => Mistrust::Nobody.to_string(),
        Error::PeerIncompatible(what) => format!(
            "the two ends have no version or algorithm of TLS in common ({what:?}); Weir speaks TLS 1.3 only"
        ),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the other side does not speak TLS; if it should, switch TLS on there".into()
        }
        Error::NoApplicationProtocol => {
            "the other side wants another protocol than this port's; is it the right port?".into()
        }
        other => format!("TLS failed: {other}"),
    }
}

fn certificate(wrong: &CertificateError) -> String {
    match wrong {
        CertificateError::ExpiredContext { time, not_after } => {
            let (now, not_after) = (time.as_secs(), not_after.as_secs());
            Mistrust::Expired { who: "the other side".into(), not_after, now }.to_string()
        }
        CertificateError::NotValidYetContext { time, not_before } => {
            let (now, not_before) = (time.as_secs(), not_before.as_secs());
            Mistrust::NotYet { who: "the other side".into(), not_before, now }.to_string()
        }
        CertificateError::Revoked => "the other side's certificate is revoked".into(),
        CertificateError::UnknownIssuer => {
            "the other side's certificate is not signed by a certificate authority of this cluster".into()
        }
        CertificateError::Other(other) => match other.0.downcast_ref::<Mistrust>() {
            Some(why) => why.to_string(),
            None => format!("the other side's certificate is not accepted: {other}"),
        },
        other => format!("the other side's certificate is not accepted: {other}"),
    }
}

fn received(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateExpired => {
            "this host's certificate is not valid at this time by its clock; compare the clocks, then renew the certificate"
        }
        AlertDescription::CertificateRevoked => {
            "this host's certificate is revoked; an administrator must readmit it, then it joins with a new token"
        }
        AlertDescription::UnknownCA => {
            "this host's certificate is of another cluster, or of an authority that is no longer trusted; join with a new token"
        }
        AlertDescription::CertificateRequired => {
            "this host presented no certificate; it must join the cluster, or the client be given one"
        }
        AlertDescription::CertificateUnknown => {
            "this host's certificate may not be used there; the log of the other side has the reason"
        }
        AlertDescription::ProtocolVersion => "it speaks only TLS 1.3",
        AlertDescription::NoApplicationProtocol => "it expects another protocol; is it the right port?",
        other => return format!("the other side refused the connection ({other:?}); its log has the reason"),
    };
    format!("the other side refused the connection: {why}")
}

/// How long a certificate lasts, for lists: `valid for 3 d 2 h`, `renewal due`, `ended 5 min ago`.
#[must_use]
pub fn lasts(facts: &Facts, now: u64) -> String {
    if now > facts.not_after {
        format!("ended {} ago", when::span(now - facts.not_after))
    } else if now >= facts.renew_at() {
        format!("renewal due, valid for {}", when::span(facts.not_after - now))
    } else {
        format!("valid for {}", when::span(facts.not_after - now))
    }
}
