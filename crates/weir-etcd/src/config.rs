//! The connection's settings and their checks.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::transport::Uri;

/// Maximum number of endpoints.
const MAX_ENDPOINTS: usize = 16;
/// Longest prefix, in bytes.
const MAX_PREFIX: usize = 256;
/// Largest certificate, key or password file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// How to reach etcd, and which of its keys are this cluster's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdConfig {
    /// Client URLs of etcd's members, 1 to 16: all `https://HOST:PORT`, or all `http://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// All keys of this cluster begin with it. Begins and ends with `/`; at most 256 bytes.
    pub prefix: String,
    /// Required for `https`.
    pub tls: Option<TlsFiles>,
    /// For an etcd with authentication by password.
    pub user: Option<UserFile>,
    /// After this long without an answer a call fails with
    /// [`Unavailable`](weir_cluster::RegistryError::Unavailable) (P9).
    pub request_timeout: Duration,
    /// After this long without an answer a read is tried at the next endpoint, too, while the first attempt goes on; after twice as
    /// long a change fails with [`Unavailable`](weir_cluster::RegistryError::Unavailable), because etcd loses changes with a
    /// leader. Well below a third of a lease's time to live, so that a keep-alive survives one silent endpoint.
    pub attempt_timeout: Duration,
}

/// Files in PEM format. Read again for each new connection, so that renewed certificates need no restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities that sign etcd's certificates.
    pub ca: PathBuf,
    /// This client's certificate and key, for an etcd that asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserFile {
    /// The user's name.
    pub name: String,
    /// The password's file: its first line.
    pub password: PathBuf,
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value breaks a rule.
    #[error("{key} = {value}: {reason}")]
    Value {
        /// The key in the configuration.
        key: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        reason: String,
    },
    /// A file cannot be used.
    #[error("{key} = {path}: {reason}", path = path.display())]
    File {
        /// The key in the configuration.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error, or what is wrong with the content.
        reason: String,
        /// The kind of the system's error; `None` if the content is wrong.
        kind: Option<std::io::ErrorKind>,
    },
    /// The endpoints and files together are not usable.
    #[error("{0}")]
    Tls(String),
}

/// The content of all files.
#[derive(Clone)]
pub(crate) struct Secrets {
    pub ca: Option<String>,
    pub identity: Option<(String, String)>,
    pub user: Option<(String, String)>,
}

impl EtcdConfig {
    /// Time limit of a call.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
    /// Time limit of an attempt.
    pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);
    /// The prefix if none is configured.
    pub const PREFIX: &str = "/weir/default/";

    /// Endpoints without TLS or user, under [`EtcdConfig::PREFIX`], with the default time limits.
    #[must_use]
    pub fn new<E: Into<String>>(endpoints: impl IntoIterator<Item = E>) -> EtcdConfig {
        EtcdConfig {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            prefix: Self::PREFIX.to_owned(),
            tls: None,
            user: None,
            request_timeout: Self::REQUEST_TIMEOUT,
            attempt_timeout: Self::ATTEMPT_TIMEOUT,
        }
    }

    /// Checks all values, without reading a file or connecting.
    ///
    /// # Errors
    /// The first key that breaks a rule, and the rule.
    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |key, value: &str, reason: &str| {
            Err(ConfigError::Value { key, value: value.to_owned(), reason: reason.to_owned() })
        };
        if self.endpoints.is_empty() || self.endpoints.len() > MAX_ENDPOINTS {
            let reason = format!("it needs 1 to {MAX_ENDPOINTS} endpoints, as \"https://host:2379\"");
            return bad("registry.etcd", &format!("{:?}", self.endpoints), &reason);
        }
        let mut encrypted = None;
        for (number, endpoint) in self.endpoints.iter().enumerate() {
            let (tls, local) = match scheme(endpoint) {
                Ok(found) => found,
                Err(reason) => return bad("registry.etcd", endpoint, reason),
            };
            if self.endpoints[..number].contains(endpoint) {
                return bad("registry.etcd", endpoint, "it is there twice");
            }
            if encrypted.is_some_and(|others| others != tls) {
                return bad(
                    "registry.etcd",
                    endpoint,
                    "the endpoints mix http:// and https://; use https:// for all",
                );
            }
            if self.user.is_some() && !tls && !local {
                return bad(
                    "registry.etcd",
                    endpoint,
                    "it would send the password unencrypted; use https://",
                );
            }
            encrypted = Some(tls);
        }
        match (&self.tls, encrypted == Some(true)) {
            (None, true) => {
                return bad(
                    "registry.ca",
                    "\"\"",
                    "https:// needs the file of the CA that signed etcd's certificates",
                );
            }
            (Some(tls), false) => {
                let path = tls.ca.display().to_string();
                return bad("registry.ca", &path, "the endpoints are http://, without TLS; use https://");
            }
            _ => {}
        }
        if let Err(reason) = check_prefix(&self.prefix) {
            return bad("registry.prefix", &format!("{:?}", self.prefix), reason);
        }
        if let Some(user) = &self.user
            && user.name.is_empty()
        {
            return bad("registry.user", "\"\"", "a user has a name");
        }
        let times = Duration::from_millis(50)..=Duration::from_secs(60);
        if !times.contains(&self.attempt_timeout) || !times.contains(&self.request_timeout) {
            let value = format!("{:?}, {:?}", self.request_timeout, self.attempt_timeout);
            return bad("time limits", &value, "each must be 50 ms to 1 min");
        }
        Ok(())
    }

    /// Reads all files.
    pub(crate) fn read(&self) -> Result<Secrets, ConfigError> {
        let tls = self.tls.as_ref();
        let ca = tls.map(|tls| pem("registry.ca", &tls.ca, "CERTIFICATE")).transpose()?;
        let identity = match tls.and_then(|tls| tls.identity.as_ref()) {
            Some((certificate, key)) => Some((
                pem("registry.certificate", certificate, "CERTIFICATE")?,
                pem("registry.key", key, "PRIVATE KEY")?,
            )),
            None => None,
        };
        let user = self.user.as_ref().map(|user| {
            let key = "registry.password_file";
            let password = file(key, &user.password)?.lines().next().unwrap_or_default().to_owned();
            if password.is_empty() {
                let reason = "its first line is empty; it must be the password".to_owned();
                return Err(ConfigError::File { key, path: user.password.clone(), reason, kind: None });
            }
            Ok((user.name.clone(), password))
        });
        Ok(Secrets { ca, identity, user: user.transpose()? })
    }
}

/// Whether a URL asks for TLS, and whether it names this machine.
fn scheme(endpoint: &str) -> Result<(bool, bool), &'static str> {
    const FORM: &str = "it must be https://HOST:PORT or http://HOST:PORT";
    let uri: Uri = endpoint.parse().map_err(|_| FORM)?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or(FORM)?;
    if uri.port_u16().is_none() || uri.path() != "/" || uri.query().is_some() || endpoint.contains('@') {
        return Err(FORM);
    }
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let local = bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    match uri.scheme_str() {
        Some("https") => Ok((true, local)),
        Some("http") => Ok((false, local)),
        _ => Err(FORM),
    }
}

fn check_prefix(prefix: &str) -> Result<(), &'static str> {
    if prefix == "/" || prefix == "//" {
        return Err("a name is missing between its slashes, as \"/weir/production/\"");
    }
    if !prefix.starts_with('/') || !prefix.ends_with('/') {
        return Err("it must begin and end with '/', as \"/weir/production/\"");
    }
    if prefix.len() > MAX_PREFIX {
        return Err("it takes at most 256 bytes");
    }
    if prefix.contains("//") || !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("between its slashes are visible ASCII characters, at least one");
    }
    Ok(())
}

fn file(key: &'static str, path: &Path) -> Result<String, ConfigError> {
    let bad = |reason, kind| ConfigError::File { key, path: path.to_owned(), reason, kind };
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::InvalidData => bad(error.to_string(), None),
        kind => bad(error.to_string(), Some(kind)),
    };
    let size = std::fs::metadata(path).map_err(failed)?.len();
    if size > MAX_FILE {
        return Err(bad(format!("it has {size} bytes; at most {MAX_FILE} make sense"), None));
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn pem(key: &'static str, path: &Path, kind: &str) -> Result<String, ConfigError> {
    let text = file(key, path)?;
    let begins =
        |line: &str| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(&format!("{kind}-----"));
    if text.lines().any(begins) {
        return Ok(text);
    }
    let reason = format!("it has no \"-----BEGIN {kind}-----\"; it must be in PEM format");
    Err(ConfigError::File { key, path: path.to_owned(), reason, kind: None })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn secure() -> EtcdConfig {
        let tls = Some(TlsFiles { ca: "/ca".into(), identity: None });
        EtcdConfig {
            tls,
            ..EtcdConfig::new(["https://a:2379", "https://10.0.0.2:2379", "https://[fd00::1]:2379"])
        }
    }

    #[test]
    fn good_settings_pass() {
        secure().check().unwrap();
        EtcdConfig::new(["http://127.0.0.1:2379"]).check().unwrap();
        let user = Some(UserFile { name: "weir".into(), password: "/p".into() });
        EtcdConfig { user: user.clone(), ..EtcdConfig::new(["http://[::1]:2379"]) }.check().unwrap();
        EtcdConfig { user, prefix: "/a/".into(), ..secure() }.check().unwrap();
    }

    #[test]
    fn bad_settings_are_named_with_the_rule() {
        let plain = |endpoint: &str| EtcdConfig::new([endpoint]);
        let user = |name: &str| Some(UserFile { name: name.into(), password: "/p".into() });
        let prefix = |prefix: &str| EtcdConfig { prefix: prefix.into(), ..secure() };
        for (config, words) in [
            (EtcdConfig::new(Vec::<String>::new()), "registry.etcd = []: it needs 1 to 16"),
            (EtcdConfig::new((0..17).map(|n| format!("http://h{n}:1"))), "it needs 1 to 16"),
            (plain("127.0.0.1:2379"), "registry.etcd = 127.0.0.1:2379: it must be https://HOST:PORT"),
            (plain("http://127.0.0.1"), "it must be https://HOST:PORT"),
            (plain("http://user:secret@host:1"), "it must be https://HOST:PORT"),
            (plain("http://host:1/path"), "it must be https://HOST:PORT"),
            (plain("ftp://host:1"), "it must be https://HOST:PORT"),
            (plain("http://host:99999"), "it must be https://HOST:PORT"),
            (plain("https://host:1"), "registry.ca = \"\": https:// needs the file of the CA"),
            (EtcdConfig::new(["http://a:1", "http://a:1"]), "it is there twice"),
            (
                EtcdConfig { endpoints: vec!["https://a:1".into(), "http://b:1".into()], ..secure() },
                "mix http://",
            ),
            (
                EtcdConfig { endpoints: vec!["http://a:1".into()], ..secure() },
                "registry.ca = /ca: the endpoints are http://",
            ),
            (
                EtcdConfig { user: user("weir"), ..plain("http://10.0.0.1:1") },
                "would send the password unencrypted",
            ),
            (EtcdConfig { user: user(""), ..secure() }, "registry.user"),
            (prefix("weir/"), "registry.prefix = \"weir/\": it must begin and end with '/'"),
            (prefix("/weir"), "it must begin and end with '/'"),
            (prefix(""), "registry.prefix = \"\": it must begin and end with '/'"),
            (prefix("/"), "registry.prefix = \"/\": a name is missing between its slashes"),
            (prefix("//"), "a name is missing between its slashes"),
            (prefix("/a//b/"), "visible ASCII"),
            (prefix("/a b/"), "visible ASCII"),
            (prefix("/é/"), "visible ASCII"),
            (prefix(&format!("/{}/", "x".repeat(255))), "at most 256 bytes"),
            (EtcdConfig { attempt_timeout: Duration::ZERO, ..secure() }, "50 ms to 1 min"),
        ] {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error:?} says nothing of {words:?}");
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_named_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("pem"), "-----BEGIN CERTIFICATE-----\nx\n").unwrap();
        std::fs::write(path("key"), "-----BEGIN EC PRIVATE KEY-----\nx\n").unwrap();
        std::fs::write(path("text"), "text").unwrap();
        std::fs::write(path("password"), "secret\nsecond line\n").unwrap();
        std::fs::write(path("empty"), "\n").unwrap();
        let with = |ca: &str, certificate: &str, key: &str, password: &str| EtcdConfig {
            tls: Some(TlsFiles { ca: path(ca), identity: Some((path(certificate), path(key))) }),
            user: Some(UserFile { name: "weir".into(), password: path(password) }),
            ..secure()
        };
        let secrets = with("pem", "pem", "key", "password").read().unwrap();
        assert_eq!(secrets.user, Some(("weir".into(), "secret".into())));
        for (config, words) in [
            (with("missing", "pem", "key", "password"), "registry.ca = "),
            (with("missing", "pem", "key", "password"), "No such file"),
            (with("text", "pem", "key", "password"), "no \"-----BEGIN CERTIFICATE-----\""),
            (with("pem", "key", "key", "password"), "registry.certificate = "),
            (with("pem", "pem", "pem", "password"), "registry.key = "),
            (with("pem", "pem", "key", "empty"), "its first line is empty"),
        ] {
            let error = config.read().err().unwrap().to_string();
            assert!(error.contains(words), "{error:?} says nothing of {words:?}");
        }
    }
}
