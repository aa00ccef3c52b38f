//! Weir's keys in etcd: the registry's keys are under `PREFIX/keys/`, and `PREFIX/weir-registry` is the marker.
//!
//! The marker has the format's version and a random identity of the registry. Every transaction compares it, so a process that
//! reaches another etcd than before, or one that was wiped, changes nothing there.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use weir_cluster::RegistryError;

/// The format of the keys that this build reads and writes.
const FORMAT: u32 = 1;
/// The marker's name after the prefix.
const MARKER: &str = "weir-registry";

/// The names of the keys.
#[derive(Debug)]
pub(crate) struct Layout {
    prefix: String,
    /// The log has named a key of others.
    warned: AtomicBool,
}

/// Keys from the first, inclusive, to the second, exclusive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub first: Vec<u8>,
    pub end: Vec<u8>,
}

impl Layout {
    pub fn new(prefix: &str) -> Layout {
        Layout { prefix: prefix.to_owned(), warned: AtomicBool::new(false) }
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn marker(&self) -> String {
        format!("{}{MARKER}", self.prefix)
    }

    /// Markers of registries whose keys would include this one's.
    pub fn outer_markers(&self) -> Vec<String> {
        let inner = &self.prefix[..self.prefix.len() - 1];
        inner.match_indices('/').map(|(at, _)| format!("{}{MARKER}", &inner[..=at])).collect()
    }

    pub fn key(&self, key: &str) -> Vec<u8> {
        format!("{}keys/{key}", self.prefix).into_bytes()
    }

    /// All keys of the registry that start with `prefix`.
    pub fn under(&self, prefix: &str) -> Range {
        range(self.key(prefix))
    }

    /// All keys under the configured prefix.
    pub fn all(&self) -> Range {
        range(self.prefix.clone().into_bytes())
    }

    /// The registry's key of one of etcd's. `None`: Weir cannot have written it, and ignores it. The log names the first one.
    pub fn name(&self, key: &[u8]) -> Option<String> {
        let own = key.strip_prefix(self.key("").as_slice());
        let name = own.and_then(|name| String::from_utf8(name.to_vec()).ok());
        if name.is_none() && !self.warned.swap(true, Ordering::Relaxed) {
            let key = key.escape_ascii().to_string();
            tracing::warn!(key, "ignoring a key in etcd that Weir did not write; remove it");
        }
        name
    }
}

/// All keys that begin with `first`.
fn range(first: Vec<u8>) -> Range {
    let mut end = first.clone();
    // The keys are UTF-8, in which no byte is 0xff.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    Range { first, end }
}

/// The marker's value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Marker {
    format: u32,
    /// Identity of the registry, in hexadecimal.
    registry: String,
}

impl Marker {
    /// The marker of a new registry.
    pub fn new() -> Marker {
        // A RandomState is the standard library's only source of random numbers; 128 bits, so that no two are equal.
        let random = || RandomState::new().build_hasher().finish();
        Marker { format: FORMAT, registry: format!("{:016x}{:016x}", random(), random()) }
    }

    /// The text to store and to compare.
    pub fn value(&self) -> Vec<u8> {
        // No map with keys that are no text: it always has a JSON form.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads the value of the key `key`.
    pub fn parse(key: &str, value: &[u8]) -> Result<Marker, RegistryError> {
        let setup = |reason: String| Err(RegistryError::Setup { reason });
        match serde_json::from_slice::<Marker>(value) {
            Ok(marker) if marker.format == FORMAT && marker.value() == value => Ok(marker),
            Ok(Marker { format, .. }) if format != FORMAT => setup(format!(
                "the registry in etcd has format {format} ({key}), and this version of Weir reads format {FORMAT}; \
                 use the version that wrote it"
            )),
            _ => setup(format!(
                "the key {key} in etcd has a value that Weir did not write; choose another registry.prefix, or remove the key \
                 if nothing needs it"
            )),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_under_the_prefix_and_back() {
        let layout = Layout::new("/weir/a/");
        assert_eq!(layout.key("disks/db"), b"/weir/a/keys/disks/db");
        assert_eq!(layout.name(b"/weir/a/keys/disks/db").unwrap(), "disks/db");
        assert_eq!(layout.name(b"/weir/a/other"), None);
        assert_eq!(layout.name(b"/weir/a/keys/\xff"), None);
        assert_eq!(
            layout.under("d"),
            Range { first: b"/weir/a/keys/d".into(), end: b"/weir/a/keys/e".into() }
        );
        assert_eq!(layout.under("").end, b"/weir/a/keys0");
        assert_eq!(layout.all(), Range { first: b"/weir/a/".into(), end: b"/weir/a0".into() });
        assert_eq!(layout.outer_markers(), ["/weir-registry", "/weir/weir-registry"]);
    }

    #[test]
    fn markers_of_other_formats_and_others_values_are_refused() {
        let marker = Marker::new();
        assert_ne!(marker, Marker::new());
        assert_eq!(Marker::parse("k", &marker.value()).unwrap(), marker);
        let later = Marker { format: 2, ..marker }.value();
        assert!(Marker::parse("k", &later).unwrap_err().to_string().contains("format 2"));
        for other in
            [&b""[..], b"1", b"{}", b"{\"format\":1}", b"{\"format\": 1, \"registry\": \"x\"}", b"\xff"]
        {
            let error = Marker::parse("/weir/a/weir-registry", other).unwrap_err().to_string();
            assert!(error.contains("/weir/a/weir-registry") && error.contains("did not write"), "{error}");
        }
    }
}
