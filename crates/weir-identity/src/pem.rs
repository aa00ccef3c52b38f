//! The text form of certificates and keys (RFC 7468).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Characters of a line (RFC 7468 §2).
const LINE: usize = 64;

/// One block.
pub(crate) fn encode(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut pem = format!("-----BEGIN {label}-----\n");
    for line in text.as_bytes().chunks(LINE) {
        // Base64 is ASCII.
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem + "-----END " + label + "-----\n"
}

/// The blocks of several certificates.
pub(crate) fn encode_certificates<'a>(certificates: impl IntoIterator<Item = &'a [u8]>) -> String {
    certificates.into_iter().map(|der| encode("CERTIFICATE", der)).collect()
}

/// All certificates of a text, in their order. Other blocks are skipped.
pub(crate) fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    all.map_err(|error| format!("not PEM: {error}"))
}
