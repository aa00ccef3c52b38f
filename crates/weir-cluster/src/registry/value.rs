//! Values in JSON: text as a string, anything else as `{"hex": "..."}`. Records are JSON text, so that
//! frames stay readable and a value does not grow fourfold as an array of numbers would.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form<'a> {
    Text(std::borrow::Cow<'a, str>),
    Bytes { hex: String },
}

pub(crate) fn serialize<S: Serializer>(value: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    match std::str::from_utf8(value) {
        Ok(text) => serializer.serialize_str(text),
        Err(_) => {
            let hex = value.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
            Form::Bytes { hex }.serialize(serializer)
        }
    }
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    match Form::deserialize(deserializer)? {
        Form::Text(text) => Ok(text.into_owned().into_bytes()),
        Form::Bytes { hex } => {
            parse(hex.as_bytes()).ok_or_else(|| D::Error::custom("not a hexadecimal value"))
        }
    }
}

fn digit(nibble: u8) -> char {
    char::from(b"0123456789abcdef"[usize::from(nibble & 15)])
}

fn parse(hex: &[u8]) -> Option<Vec<u8>> {
    let (pairs, []) = hex.as_chunks::<2>() else { return None };
    let nibble = |digit: u8| char::from(digit).to_digit(16);
    pairs.iter().map(|[high, low]| u8::try_from(nibble(*high)? << 4 | nibble(*low)?).ok()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::super::Entry;

    #[test]
    fn every_value_survives_json() {
        for value in [b"".to_vec(), b"{\"v\":1}".to_vec(), vec![0xff, 0, 0x80, 7], (0..=255).collect()] {
            let entry = Entry { key: "k".into(), value, mod_revision: 1, lease: None };
            let text = serde_json::to_string(&entry).unwrap();
            assert_eq!(serde_json::from_str::<Entry>(&text).unwrap(), entry);
        }
    }

    #[test]
    fn bad_hexadecimal_is_refused() {
        for value in ["{\"hex\":\"f\"}", "{\"hex\":\"zz\"}", "{\"hex\":\"é\"}", "7", "null"] {
            let text = format!("{{\"key\":\"k\",\"value\":{value},\"mod_revision\":1,\"lease\":null}}");
            assert!(serde_json::from_str::<Entry>(&text).is_err(), "{value}");
        }
    }
}
