//! The text form of certificates and keys (RFC 7468).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{Error, PemObject};
use zeroize::Zeroizing;

/// Characters of a line (RFC 7468 §2).
const LINE: usize = 64;

/// One block.
pub(crate) fn encode(label: &str, der: &[u8]) -> String {
    let mut pem = String::new();
    write(&mut pem, label, der);
    pem
}

/// One block of a secret. No copy of it stays in memory.
pub(crate) fn encode_secret(label: &str, der: &[u8]) -> Zeroizing<String> {
    // Room for all of it: a text that grows leaves copies of its beginning.
    let mut pem = Zeroizing::new(String::with_capacity(2 * der.len() + 4 * (label.len() + LINE)));
    write(&mut pem, label, der);
    pem
}

/// Parts of a text in a row, where one may be secret.
pub(crate) fn concat(parts: &[&str]) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(parts.iter().map(|part| part.len()).sum()));
    parts.iter().for_each(|part| text.push_str(part));
    text
}

fn write(pem: &mut String, label: &str, der: &[u8]) {
    let text = Zeroizing::new(STANDARD.encode(der));
    pem.extend(["-----BEGIN ", label, "-----\n"]);
    for line in text.as_bytes().chunks(LINE) {
        // Base64 is ASCII.
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem.extend(["-----END ", label, "-----\n"]);
}

/// The blocks of several certificates.
pub(crate) fn encode_certificates<'a>(certificates: impl IntoIterator<Item = &'a [u8]>) -> String {
    certificates.into_iter().map(|der| encode("CERTIFICATE", der)).collect()
}

/// All certificates of a text, in their order. Other blocks are skipped.
pub(crate) fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    all.map_err(|error| format!("not PEM: {}", words(&error)))
}

/// The error as text: the library shows lines as lists of numbers.
fn words(error: &Error) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match error {
        Error::MissingSectionEnd { end_marker } => {
            let label = text(end_marker);
            let label = label.trim_start_matches("-----END ").trim_end_matches('-');
            format!("the line \"-----END {label}-----\" is missing, so the file is truncated")
        }
        Error::IllegalSectionStart { line } => format!("the line {:?} begins no section", text(line)),
        other => other.to_string(),
    }
}
