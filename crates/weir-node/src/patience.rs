//! Waits that try the same thing again and again, and what the log says of them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::time::Duration;

use weir_block::Nanos;

/// The time for which the node retries an address, a directory or a flash medium that is in use.
const TAKEN_PATIENCE: Duration = Duration::from_secs(10);

/// Pause before it is tried again.
const START_AGAIN: Duration = Duration::from_millis(200);

/// A reason that is still true is logged again after this long.
const REPEAT: Duration = Duration::from_secs(60);

/// Most reasons that are logged within [`REPEAT`]: the text of a reason may change with every attempt (P10).
const MOST: usize = 8;

/// Decides which failed attempts of a wait the log tells: each reason at once, and once a minute while it lasts. Reasons may
/// alternate, as when a registry has several endpoints.
#[derive(Debug, Default)]
pub struct Told(BTreeMap<String, Nanos>);

impl Told {
    /// Whether the log is to tell `reason` now.
    pub fn is_due(&mut self, reason: &str) -> bool {
        let now = Nanos::now();
        self.0.retain(|_, at| now.since(*at) < REPEAT);
        if self.0.contains_key(reason) || self.0.len() >= MOST {
            return false;
        }
        self.0.insert(reason.to_owned(), now);
        true
    }
}

/// Retries for a while as long as `what` is in use: the kernel keeps an address or a flash medium for a process that was killed a
/// moment ago until it has ended the process's I/O, and any connection may use a port.
pub async fn patiently<T, E: Display>(
    what: impl Display,
    open: impl AsyncFn() -> Result<T, E>,
    taken: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let deadline = Nanos::now() + TAKEN_PATIENCE;
    let mut told = Told::default();
    loop {
        match open().await {
            Err(error) if taken(&error) && Nanos::now() < deadline => {
                if told.is_due(&error.to_string()) {
                    let limit = TAKEN_PATIENCE.as_secs();
                    tracing::warn!(
                        %error,
                        "another process, perhaps this node's former one, has {what}: waiting for it, for {limit} s at most"
                    );
                }
                tokio::time::sleep(START_AGAIN).await;
            }
            result => return result,
        }
    }
}

/// Whether an address is in use.
pub fn is_taken(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrInUse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told_once_however_they_alternate() {
        let mut told = Told::default();
        let due = ["a", "b", "a", "b", "c"].map(|reason| told.is_due(reason));
        assert_eq!(due, [true, true, false, false, true]);
        let said = (0..1000).filter(|number| told.is_due(&format!("it is {number} o'clock"))).count();
        assert_eq!(said, MOST - 3);
    }
}
