//! The load that records every write, on a disk whose owner is killed meanwhile.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use weir_block::Nanos;
use weir_lab::Lab;
use weir_load::error::LoadError;
use weir_load::summary::Verification;
use weir_load::verify::{History, Initial, Layout};
use weir_load::verifying::{Locate, Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_node::client::Client;

use super::LOAD;
use super::steps::until;
use crate::failure::Failure;

/// Size of the load's disk, in bytes.
pub const SIZE: u64 = 256 << 20;

/// Size of the load's blocks, in bytes.
const BLOCK: u32 = 4096;

/// Maximum reads and writes per second: a busy guest, with capacity left for the rest of the demonstration on a slow disk.
const RATE: u64 = 4000;

/// A running load.
pub struct Load {
    thread: JoinHandle<(VerifyingLoad, Result<(), LoadError>)>,
    progress: Arc<Progress>,
}

/// The result of a load that has ended.
pub struct Verdict {
    progress: Arc<Progress>,
    found: Verification,
}

impl Load {
    pub fn start(lab: &Lab, duration: Duration) -> Result<Load, Failure> {
        let layout = Layout::uniform(Span { offset: 0, length: SIZE }, BLOCK).map_err(Failure::failed)?;
        let history = History::new(layout, u64::from(std::process::id()), Initial::Zeroes);
        let settings = Settings { rate: Some(RATE), ..Settings::default() };
        let mut load = VerifyingLoad::new(history, settings, locate(lab));
        let progress = load.progress();
        let thread = std::thread::spawn(move || {
            let result = load.run(duration);
            (load, result)
        });
        Ok(Load { thread, progress })
    }

    /// Waits until the load is answered again after its connection broke at `since`. Returns the duration.
    pub fn answered_again(&self, since: Nanos) -> Result<Duration, Failure> {
        until(|| Ok(self.progress.reconnects()), |&reconnects| reconnects > 0)?;
        let before = self.progress.acknowledged();
        until(|| Ok(self.progress.acknowledged()), |&now| now > before)?;
        Ok(Nanos::now().since(since))
    }

    /// Waits for the load's end.
    pub fn finish(self) -> Result<VerifyingLoad, Failure> {
        let (load, result) = self.thread.join().map_err(|_| Failure::failed("the load's thread panicked"))?;
        result.map_err(Failure::failed)?;
        if load.progress().reconnects() == 0 {
            return Err(Failure::failed(
                "the load never lost its connection: the owner was not killed under it",
            ));
        }
        Ok(load)
    }
}

impl Verdict {
    /// Reads and verifies every block once. The load's connection then ends.
    pub fn of(mut load: VerifyingLoad) -> Result<Verdict, Failure> {
        load.check_all().map_err(Failure::failed)?;
        Ok(Verdict { progress: load.progress(), found: load.found().clone() })
    }

    /// Writes that were answered.
    pub fn acknowledged(&self) -> u64 {
        self.progress.acknowledged()
    }

    /// Blocks without the content of their answered writes.
    pub fn lost(&self) -> u64 {
        self.found.mismatches
    }

    pub fn describe(&self) -> String {
        format!(
            "{} writes acknowledged, {} unanswered when n1 died, {} blocks checked, longest stall {:.2} s",
            self.acknowledged(),
            self.progress.unknown(),
            self.found.checked,
            self.progress.longest_stall().as_secs_f64()
        )
    }

    pub fn into_result(self) -> Result<(), Failure> {
        match (self.lost(), self.progress.failed()) {
            (0, 0) => Ok(()),
            (0, failed) => Err(Failure::failed(format!("{failed} requests got an error instead of a pause"))),
            (lost, _) => {
                Err(Failure::failed(format!("{lost} blocks are wrong:\n  {}", self.found.first.join("\n  "))))
            }
        }
    }
}

/// The present owner's export.
fn locate(lab: &Lab) -> Locate {
    let clients: Vec<Client> =
        lab.nodes().iter().map(|node| node.client().patience(Duration::from_millis(500))).collect();
    Box::new(move |_| {
        let mut views = clients.iter().filter_map(|client| client.disk(LOAD).ok());
        views.find(|view| view.detail.is_some()).and_then(|view| view.uris.first()?.parse().ok())
    })
}
