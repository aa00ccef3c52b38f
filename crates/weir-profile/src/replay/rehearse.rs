//! Loads in simulated time: their profile on a target that answers at once.

use std::time::Duration;

use weir_block::{Nanos, Observe};

use weir_load::generator::Generator;
use weir_load::job::Job;
use weir_load::workload::WorkloadError;

use crate::observer::{Profiler, Settings};
use crate::record::Profile;

/// Time between requests of a load without a rate.
const STEP: Duration = Duration::from_micros(1);

/// Runs `jobs` at once on a simulated target of `size` bytes, and profiles their requests.
///
/// # Errors
/// A job is not possible on such a target.
pub fn rehearse(jobs: &[Job], size: u64, settings: Settings) -> Result<Profile, WorkloadError> {
    let mut generators = Vec::new();
    for job in jobs {
        for (thread, span) in (0..).zip(job.workload.spans(size)?) {
            generators.push(Generator::new(&job.workload, span, thread, Nanos(0))?);
        }
    }
    let settings = Settings { sampled_per_second: u32::MAX, ..settings };
    let mut profiler = Profiler::new(settings, Nanos(0), Duration::ZERO);
    let mut now = Nanos(0);
    loop {
        let mut wake = Nanos::NEVER;
        for generator in &mut generators {
            if let Some(io) = generator.next(now) {
                profiler.observe(now, io.kind.request(), io.offset, io.length.into());
                generator.complete(io.slot, now, true);
            }
            if !generator.exhausted(now) {
                // Without a rate it always has a next request.
                wake = wake.min(match generator.wake(now) {
                    Nanos::NEVER => now + STEP,
                    paced => paced.max(now),
                });
            }
        }
        if wake == Nanos::NEVER {
            break;
        }
        now = wake;
    }
    Ok(profiler.profile(now, "rehearsal"))
}
