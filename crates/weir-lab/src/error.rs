//! Errors of a lab.

use std::io;
use std::path::PathBuf;

use weir_node::api::ApiError;

/// Why a lab did not execute an order, with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// There is no lab in this directory.
    #[error("there is no lab in {path}; `weir lab up --dir {path}` starts one", path = .0.display())]
    NoLab(PathBuf),
    /// There is one already.
    #[error("a lab is running in {path}; `weir lab status` shows it, `weir lab down` ends it", path = .0.display())]
    Running(PathBuf),
    /// No node of this name.
    #[error("the lab has no node {name:?}; it has {known} and registry")]
    NoNode {
        /// The name.
        name: String,
        /// Those that there are.
        known: String,
    },
    /// There are nodes, and none runs.
    #[error("no node of the lab in {path} runs; `weir lab start NODE` starts one", path = .0.display())]
    NoneRuns(PathBuf),
    /// The node is not in a state for this.
    #[error("{node} {state}")]
    State {
        /// The node, or `registry`.
        node: String,
        /// Its actual state, and the remedy.
        state: String,
    },
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// A process ended, or did not get ready, right after its start.
    #[error("{what} did not start: {reason}\nits log {log} ends with:\n{tail}", log = log.display())]
    Start {
        /// The process.
        what: String,
        /// The reason.
        reason: String,
        /// The process's log.
        log: PathBuf,
        /// The last lines.
        tail: String,
    },
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// The failed operation.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// To end now would lose acknowledged writes.
    #[error(
        "the lab goes on: acknowledged writes would be lost, because they do not reach the storage: {}; repair the storage, wait \
         for it with --wait, or lose them with --force",
        .0.join(", ")
    )]
    WouldLose(Vec<String>),
    /// It has ended, and acknowledged writes are lost.
    #[error("the lab has ended, and acknowledged writes are lost: {}", .0.join(", "))]
    Lost(Vec<String>),
    /// A node refused.
    #[error("{error}{hint}", error = .0.message, hint = if .0.hint.is_empty() { String::new() } else { format!(" ({})", .0.hint) })]
    Api(#[from] ApiError),
}

impl LabError {
    /// For `map_err`: names what was tried.
    pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> LabError {
        let what = what.into();
        move |source| LabError::System { what, source }
    }
}
