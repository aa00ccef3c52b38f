//! What went wrong, and the exit code that says so.

use weir_lab::LabError;
use weir_node::api::{ApiError, ApiErrorKind};

/// An error for the terminal, with its exit code.
#[derive(Debug)]
pub struct Failure {
    /// 1 to 5; see `weir --help`.
    pub code: u8,
    /// What is wrong, and what to do.
    pub message: String,
}

impl Failure {
    /// Storage, system, or wrong data.
    pub fn failed(message: impl std::fmt::Display) -> Failure {
        Failure { code: 1, message: message.to_string() }
    }

    /// The command line.
    pub fn usage(message: impl std::fmt::Display) -> Failure {
        Failure { code: 2, message: message.to_string() }
    }

    /// Something has to happen first.
    pub fn refused(message: impl std::fmt::Display) -> Failure {
        Failure { code: 4, message: message.to_string() }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        let code = match error.kind {
            ApiErrorKind::Failed => 1,
            ApiErrorKind::Invalid => 2,
            ApiErrorKind::NotFound => 3,
            ApiErrorKind::Exists | ApiErrorKind::Refused => 4,
            ApiErrorKind::Unavailable => 5,
        };
        let hint = if error.hint.is_empty() { String::new() } else { format!("\n  {}", error.hint) };
        Failure { code, message: format!("{}{hint}", error.message) }
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Failure {
        match error {
            LabError::Api(error) => error.into(),
            LabError::NoLab(_) | LabError::NoNode { .. } => Failure { code: 3, message: error.to_string() },
            LabError::Running(_) | LabError::State { .. } | LabError::WouldLose(_) => Failure::refused(error),
            LabError::Invalid(_) | LabError::Start { .. } | LabError::System { .. } | LabError::Lost(_) => {
                Failure::failed(error)
            }
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::failed(error)
    }
}
