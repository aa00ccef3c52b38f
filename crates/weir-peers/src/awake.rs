//! Processors that do not halt while the suite measures.
//!
//! Where a guest's halt leaves to a busy hypervisor, waking takes tens of microseconds, and each hop of a request pays for it: what differs
//! from server to server then is the number of hops, and nothing else. Hosts of storage run with the latency profiles of tuned, which ask
//! for the same through the same interface.

use std::fs::File;
use std::io::{self, Write};

/// The kernel's interface (`Documentation/power/pm_qos_interface.rst`): the request lasts as long as the file is open.
const INTERFACE: &str = "/dev/cpu_dma_latency";

/// While it lives, idle processors poll, if the kernel allows it.
pub struct Awake(#[expect(dead_code, reason = "the open file is the request")] File);

impl Awake {
    /// Asks for a latency of zero. Needs root.
    pub fn ask() -> io::Result<Awake> {
        let mut file = File::options().write(true).open(INTERFACE)?;
        file.write_all(&0_i32.to_ne_bytes())?;
        Ok(Awake(file))
    }
}
