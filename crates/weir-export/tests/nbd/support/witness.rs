//! A client that goes on with its work while others do harm.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use weir_block::Nanos;

use super::raw::RawClient;
use super::server::Server;

/// Writes, reads back and compares until told to stop.
pub struct Witness {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    slowest: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Witness {
    fn start(socket: &Path) -> Witness {
        let socket: PathBuf = socket.to_owned();
        let stop = Arc::new(AtomicBool::new(false));
        let (rounds, slowest) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (until, count, longest) = (stop.clone(), rounds.clone(), slowest.clone());
        let thread = std::thread::spawn(move || {
            let mut client = RawClient::enter(&socket, "disk", true);
            let mut random = fastrand::Rng::with_seed(1);
            while !until.load(Ordering::Relaxed) {
                let start = Nanos::now();
                // The second half of the first MiB is its own.
                client.verify_block(random.u64(128..256) * 4096, random.u8(..));
                longest.fetch_max((Nanos::now() - start).as_millis() as u64, Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Witness { stop, rounds, slowest, thread }
    }

    /// It went on during `harm`, and never waited for long.
    pub fn through(server: &Server, harm: impl FnOnce()) {
        let witness = Witness::start(server.socket());
        while witness.rounds.load(Ordering::Relaxed) < 10 {
            std::thread::yield_now();
        }
        witness.slowest.store(0, Ordering::Relaxed);
        let before = witness.rounds.load(Ordering::Relaxed);
        harm();
        while witness.rounds.load(Ordering::Relaxed) < before + 10 {
            assert!(!witness.thread.is_finished(), "the witness has found a fault");
            std::thread::yield_now();
        }
        witness.stop.store(true, Ordering::Relaxed);
        witness.thread.join().expect("the witness has found no fault");
        let slowest = witness.slowest.load(Ordering::Relaxed);
        assert!(slowest < 3000, "the witness once waited {slowest} ms");
    }
}
