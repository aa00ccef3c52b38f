//! Interrupts of a command that cleans up before it ends.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::Failure;

/// Time in which the runtime looks for signals.
const LOOK: Duration = Duration::from_millis(1);

/// From its making on, an interrupt (Ctrl-C, SIGTERM, a terminal that goes) does not end this process: whoever has made it cleans up.
pub struct Interrupts {
    runtime: Runtime,
    signals: Signals,
}

/// For a task on the runtime.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Interrupts {
    /// # Errors
    /// The system's.
    pub fn new() -> Result<Interrupts, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let signals = {
            let _entered = runtime.enter();
            let of = |kind| signal(kind);
            Signals {
                interrupt: of(SignalKind::interrupt())?,
                terminate: of(SignalKind::terminate())?,
                hang_up: of(SignalKind::hangup())?,
            }
        };
        Ok(Interrupts { runtime, signals })
    }

    /// Whether there has been one.
    pub fn is_pending(&mut self) -> bool {
        let Interrupts { runtime, signals } = self;
        runtime.block_on(async { tokio::time::timeout(LOOK, signals.next()).await.is_ok() })
    }

    /// The runtime, and the signals for what runs on it.
    pub fn parts(&mut self) -> (&Runtime, &mut Signals) {
        (&self.runtime, &mut self.signals)
    }
}

impl Signals {
    /// Waits for one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}
