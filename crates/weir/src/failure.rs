//! Failures of a command, and their exit codes.

use std::path::Path;

use serde::Serialize;
use weir_cluster::RegistryError;
use weir_lab::LabError;
use weir_load::LoadError;
use weir_load::verify::HistoryError;
use weir_nbd::client::NbdError;
use weir_node::api::{ApiError, ApiErrorKind};
use weir_node::config::ConfigError;
use weir_node::identity::IdentityError;
use weir_node::{NodeError, RegistryUnusable, SettingError};

/// Name and version of the JSON that [`Failure::to_json`] writes.
const SCHEMA: &str = "weir.error/1";

/// The kind of a failure, by the caller's remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// Storage, the system, a threshold, or data that is wrong.
    Failed,
    /// The command line, or a file that it names, is not understood.
    Usage,
    /// There is no such thing.
    NotFound,
    /// Something has to happen first.
    Refused,
    /// No answer.
    Unavailable,
    /// A measurement that nothing should be concluded from.
    NotTrusted,
}

impl FailureKind {
    /// The exit code, the same for every command; `weir --help` has this table.
    pub const fn exit_code(self) -> u8 {
        match self {
            FailureKind::Failed => 1,
            FailureKind::Usage => 2,
            FailureKind::NotFound => 3,
            FailureKind::Refused => 4,
            FailureKind::Unavailable => 5,
            FailureKind::NotTrusted => 6,
        }
    }
}

/// An error for the terminal or, as JSON, for a program.
#[derive(Debug)]
pub struct Failure {
    /// Decides the exit code.
    pub kind: FailureKind,
    /// The problem.
    pub message: String,
    /// The remedy; empty if the message has it.
    pub hint: String,
}

/// As `--output json` prints a failure.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    error: Fields<'a>,
}

#[derive(Serialize)]
struct Fields<'a> {
    kind: FailureKind,
    message: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    hint: &'a str,
    exit_code: u8,
}

impl Failure {
    /// A failure of a kind, without a hint.
    pub fn new(kind: FailureKind, message: impl std::fmt::Display) -> Failure {
        Failure { kind, message: message.to_string(), hint: String::new() }
    }

    /// Storage, system, or wrong data.
    pub fn failed(message: impl std::fmt::Display) -> Failure {
        Failure::new(FailureKind::Failed, message)
    }

    /// The command line.
    pub fn usage(message: impl std::fmt::Display) -> Failure {
        Failure::new(FailureKind::Usage, message)
    }

    /// Something has to happen first.
    pub fn refused(message: impl std::fmt::Display) -> Failure {
        Failure::new(FailureKind::Refused, message)
    }

    /// A file that a command needs and cannot read.
    pub fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
        Failure::of_system(error, format!("{}: {error}", path.display()))
    }

    /// An error of the system, in the words of `message`.
    fn of_system(error: &std::io::Error, message: impl std::fmt::Display) -> Failure {
        let is_root = rustix::process::geteuid().is_root();
        Failure::new(kind_of(error), message).hint(hint_of(error, is_root))
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Failure {
        Failure { hint: hint.into(), ..self }
    }

    /// The same kind of failure, in other words.
    #[must_use]
    pub fn said(self, message: impl std::fmt::Display) -> Failure {
        Failure { message: message.to_string(), ..self }
    }

    /// For people: the message, and the hint on a line of its own.
    pub fn to_text(&self) -> String {
        let hint = if self.hint.is_empty() { String::new() } else { format!("\n  {}", self.hint) };
        format!("weir: {}{hint}", self.message)
    }

    /// For programs: one line, `{"schema":"weir.error/1","error":{"kind":…,"message":…,"exit_code":…}}`.
    pub fn to_json(&self) -> String {
        let Failure { kind, message, hint } = self;
        let error = Fields { kind: *kind, message, hint, exit_code: kind.exit_code() };
        serde_json::to_string(&Document { schema: SCHEMA, error }).expect("strings and a number are JSON")
    }
}

/// Distinguishes a missing file from an unreadable one.
fn kind_of(error: &std::io::Error) -> FailureKind {
    match error.kind() {
        std::io::ErrorKind::NotFound => FailureKind::NotFound,
        std::io::ErrorKind::ResourceBusy | std::io::ErrorKind::AlreadyExists => FailureKind::Refused,
        _ => FailureKind::Failed,
    }
}

/// A remedy for an error of the system.
fn hint_of(error: &std::io::Error, is_root: bool) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied if !is_root => {
            "this user may not do that; run the command as root (sudo), or as the user who owns the file, device or process"
        }
        _ => "",
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        let kind = match error.kind {
            ApiErrorKind::Failed => FailureKind::Failed,
            ApiErrorKind::Invalid => FailureKind::Usage,
            ApiErrorKind::NotFound => FailureKind::NotFound,
            ApiErrorKind::Exists | ApiErrorKind::Refused | ApiErrorKind::Forbidden => FailureKind::Refused,
            ApiErrorKind::Unavailable => FailureKind::Unavailable,
        };
        Failure::new(kind, error.message).hint(error.hint)
    }
}

impl From<RegistryUnusable> for Failure {
    fn from(error: RegistryUnusable) -> Failure {
        NodeError::from(error).into()
    }
}

impl From<NodeError> for Failure {
    fn from(error: NodeError) -> Failure {
        match error {
            NodeError::Identity(IdentityError::Store(error)) => ApiError::from(error).into(),
            NodeError::Revoked(_)
            | NodeError::Running(_)
            | NodeError::Identity(
                IdentityError::OtherName { .. }
                | IdentityError::Mistrusted { .. }
                | IdentityError::OtherAuthority { .. }
                | IdentityError::OtherRegistry { .. }
                | IdentityError::Lacking { .. },
            ) => Failure::refused(error),
            NodeError::Setting(SettingError::File { kind: Some(kind), .. }) => {
                Failure::of_system(&kind.into(), &error)
            }
            // A value, a file's content, or both together.
            NodeError::Setting(_) => Failure::usage(error),
            NodeError::Registry(RegistryError::Unavailable { .. }) => {
                Failure::new(FailureKind::Unavailable, error)
            }
            // Also an address or a directory that another process has: a service manager tries again, and the process may be a former
            // one of this node that takes long to end.
            error => Failure::failed(error),
        }
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Failure {
        let kind = match error {
            LabError::System { ref source, .. } => return Failure::of_system(source, &error),
            LabError::Api(error) => return error.into(),
            LabError::NoLab(_) | LabError::NoNode { .. } => FailureKind::NotFound,
            LabError::Running(_) | LabError::State { .. } | LabError::WouldLose(_) => FailureKind::Refused,
            LabError::NoneRuns(_) => FailureKind::Unavailable,
            LabError::Invalid(_) => FailureKind::Usage,
            LabError::Start { .. } | LabError::Lost(_) => FailureKind::Failed,
        };
        Failure::new(kind, error)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Failure {
        let kind = match &error {
            LoadError::Workload(_)
            | LoadError::Uri(_)
            | LoadError::Layout(_)
            | LoadError::NoPolling { .. }
            | LoadError::NotAFile { .. }
            | LoadError::NothingThere(_)
            | LoadError::NotATarget(_)
            | LoadError::Null(_)
            | LoadError::NoFua(_)
            | LoadError::NoFlush(_)
            | LoadError::BlockSize { .. }
            | LoadError::History(HistoryError::Content { .. }) => FailureKind::Usage,
            LoadError::NoSize(_) => FailureKind::NotFound,
            LoadError::NotEmpty { .. }
            | LoadError::ReadOnly(_)
            | LoadError::PrefillLimit { .. }
            | LoadError::History(HistoryError::Taken { .. }) => FailureKind::Refused,
            LoadError::Nbd(NbdError::Connect { .. } | NbdError::Timeout { .. })
            | LoadError::Unreachable { .. } => FailureKind::Unavailable,
            LoadError::Nbd(NbdError::Refused { is_unknown: true, .. }) => FailureKind::NotFound,
            LoadError::Nbd(NbdError::Refused { is_unknown: false, .. }) => FailureKind::Refused,
            LoadError::File { source, .. } | LoadError::History(HistoryError::Io { source, .. }) => {
                return Failure::of_system(source, &error);
            }
            LoadError::Nbd(_)
            | LoadError::Ring(_)
            | LoadError::Thread(_)
            | LoadError::Prefill { .. }
            | LoadError::NotJudged { .. } => FailureKind::Failed,
        };
        Failure::new(kind, error)
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        match &error {
            ConfigError::Read { source, .. } => Failure::of_system(source, &error),
            ConfigError::Parse { .. } | ConfigError::Value { .. } => Failure::usage(error),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::of_system(&error, &error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_root_hears_what_to_do() {
        let denied = std::io::Error::from_raw_os_error(13);
        assert!(hint_of(&denied, false).contains("as root"));
        assert!(hint_of(&denied, true).is_empty());
        assert!(hint_of(&std::io::Error::from_raw_os_error(2), false).is_empty());
    }

    #[test]
    fn kinds_of_system_errors_have_codes_of_their_own() {
        for (number, code) in [(2, 3), (16, 4), (17, 4), (5, 1), (13, 1)] {
            assert_eq!(
                kind_of(&std::io::Error::from_raw_os_error(number)).exit_code(),
                code,
                "errno {number}"
            );
        }
    }

    #[test]
    fn a_failure_is_one_line_of_json() {
        let failure = Failure::refused("a \"b\"\nc").hint("do d");
        let json = r#"{"schema":"weir.error/1","error":{"kind":"refused","message":"a \"b\"\nc","hint":"do d","exit_code":4}}"#;
        assert_eq!(failure.to_json(), json);
        assert_eq!(failure.to_text(), "weir: a \"b\"\nc\n  do d");
        assert!(!Failure::failed("x").to_json().contains("hint"));
    }
}
