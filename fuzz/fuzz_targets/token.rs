//! Arbitrary text where a token is expected, as it is and with a length and checksum that fit: nothing panics, a token that is read
//! has one text only, and names no more than a token can.

#![cfg_attr(feature = "link", no_main)]

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use libfuzzer_sys::fuzz_target;
use weir_identity::{LONGEST_TOKEN, MOST_ENDPOINTS, MOST_PINS, Token};

// The first byte says what the others are.
fuzz_target!(|input: &[u8]| {
    let Some((&kind, bytes)) = input.split_first() else { return };
    let text = if kind % 2 == 0 { String::from_utf8_lossy(bytes).into_owned() } else { sealed(bytes) };
    let Ok(token) = text.parse::<Token>() else { return };
    assert_eq!(token.text().as_str(), text.trim());
    assert!(text.trim().len() <= LONGEST_TOKEN);
    assert!((1..=MOST_PINS).contains(&token.pins.len()));
    assert!((1..=MOST_ENDPOINTS).contains(&token.endpoints.len()));
});

/// The text of a token with this content, with the right length and checksum.
fn sealed(content: &[u8]) -> String {
    let content = &content[..content.len().min(2048)];
    let mut body = ((content.len() + 4) as u16).to_be_bytes().to_vec();
    body.extend(content);
    let checksum = crc32c::crc32c_append(crc32c::crc32c(b"1"), &body);
    body.extend(checksum.to_be_bytes());
    format!("weir-join-1.{}", URL_SAFE_NO_PAD.encode(body))
}

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
