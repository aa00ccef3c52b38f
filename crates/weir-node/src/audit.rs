//! The audit log: who has changed what, from where, and the outcome. One line of JSON each, in the node's state directory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::timestamps::rfc3339;

/// The file's name in the state directory.
pub const FILE: &str = "audit.jsonl";
/// Size at which a new file begins; one former file is kept (P10).
const LARGEST: u64 = 32 << 20;

/// One line.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "schema", rename = "weir.audit/1")]
pub struct Line {
    /// RFC 3339, UTC.
    time: String,
    /// The node that was asked.
    node: String,
    /// Who asked.
    pub who: String,
    /// The address, or `unix`.
    pub from: String,
    /// Method and path.
    pub what: String,
    /// `done`; `refused`: it was not allowed, or could not be done; `redirected`: the caller may ask another node, whose log has it.
    pub outcome: &'static str,
    /// The HTTP status; 0 if there was no request.
    pub status: u16,
    /// The reason of a refusal.
    pub reason: String,
}

/// The log of one node.
#[derive(Debug)]
pub struct Audit {
    node: String,
    path: PathBuf,
    file: Mutex<File>,
    /// Why the last line could not be written, if it could not.
    fault: Mutex<Option<String>>,
}

impl Audit {
    /// Opens the log in `directory`, mode 0600.
    ///
    /// # Errors
    /// The system's.
    pub fn open(directory: &Path, node: &str) -> std::io::Result<Arc<Audit>> {
        let path = directory.join(FILE);
        let file = Mutex::new(open(&path)?);
        Ok(Arc::new(Audit { node: node.into(), path, file, fault: Mutex::default() }))
    }

    /// A line for now.
    #[must_use]
    pub fn line(&self, who: String, from: String, what: String) -> Line {
        let time = rfc3339(weir_task::unix_millis());
        let node = self.node.clone();
        Line { time, node, who, from, what, outcome: "done", status: 0, reason: String::new() }
    }

    /// Writes a line. One that cannot be written goes to the node's log: the change has been made.
    pub async fn write(self: &Arc<Audit>, line: Line) {
        let audit = Arc::clone(self);
        let text = serde_json::to_string(&line).unwrap_or_default() + "\n";
        // To its end, also if whoever asked is gone.
        let written = tokio::task::spawn_blocking(move || audit.append_or_report(&text));
        if let Err(error) = written.await {
            tracing::error!(%error, "the audit log cannot be written");
        }
    }

    fn append_or_report(&self, text: &str) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = self.append(&mut file, text).err().map(|error| {
            tracing::error!(%error, line = text.trim_end(), "the audit log cannot be written");
            let path = self.path.display();
            format!(
                "the audit log {path} of node {} could not be written ({error}): the last change is only in the node's own log, and the \
                 next one that is recorded ends this warning",
                self.node
            )
        });
        // Under the file's lock: in the order of the lines.
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    /// Why the last line could not be written, for operators.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn append(&self, file: &mut File, text: &str) -> std::io::Result<()> {
        let mut length = file.metadata()?.len();
        if length >= LARGEST {
            match std::fs::rename(&self.path, self.path.with_extension("jsonl.1")) {
                // An earlier attempt could not make the new file.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
            *file = open(&self.path)?;
            length = 0;
        }
        // One call: lines of two processes do not mix.
        file.write_all(text.as_bytes()).inspect_err(|_| {
            // On a full file system its beginning may be there: the next line must not follow on it.
            let _ = file.set_len(length);
        })
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_that_cannot_be_written_is_reported_until_one_can() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path(), "n1").unwrap();
        let write =
            async || audit.write(audit.line("user 0".into(), "unix".into(), "POST /v1/disks".into())).await;
        let whole = std::mem::replace(
            &mut *audit.file.lock().unwrap(),
            File::options().write(true).open("/dev/full").unwrap(),
        );
        write().await;
        let fault = audit.fault().unwrap();
        assert!(fault.contains("audit.jsonl of node n1") && fault.contains("No space left"), "{fault}");
        *audit.file.lock().unwrap() = whole;
        write().await;
        assert_eq!(audit.fault(), None);
    }

    #[tokio::test]
    async fn a_full_log_begins_anew_and_keeps_the_former_one() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::open(directory.path(), "n1").unwrap();
        let path = directory.path().join(FILE);
        File::options().write(true).open(&path).unwrap().set_len(LARGEST).unwrap();
        audit.write(audit.line("user 0".into(), "unix".into(), "POST /v1/disks".into())).await;
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"schema":"weir.audit/1","time":"2"#), "{text}");
        assert!(text.ends_with("\"outcome\":\"done\",\"status\":0,\"reason\":\"\"}\n"), "{text}");
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(std::fs::metadata(path.with_extension("jsonl.1")).unwrap().len(), LARGEST);
    }
}
