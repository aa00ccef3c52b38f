//! A load on a layer of a disk, inside its node: prefilled, and observed through the layer's meter.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};

use weir_block::size::{Size, format_size};
use weir_block::{Nanos, RequestKind};
use weir_load::LoadError;
use weir_load::prefill::Limits;
use weir_load::report::Interval;
use weir_load::summary::Filled;
use weir_load::summary::Summary;
use weir_load::tally::{IoKind, Tally};
use weir_load::{Access, Workload};
use weir_node::api::{DiskView, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

use super::output::Outcome;
use super::watch::{INTERVAL, TICK, heed_interrupts, line, styled_bar};
use crate::cli::{BenchArgs, BenchFormat};
use crate::failure::Failure;
use crate::output::{note, say};

/// Largest request of the prefill, and its requests in flight.
const BLOCK: u64 = 256 << 10;
const DEPTH: u32 = 8;

/// A load on a layer.
#[derive(Clone, Copy)]
pub struct Load<'a> {
    /// The disk's owner.
    pub client: &'a Client,
    pub disk: &'a str,
    pub layer: LoadLayer,
    pub workload: &'a Workload,
    /// Run also while clients are connected to the disk.
    pub force: bool,
}

impl Load<'_> {
    /// Fills the range if that is allowed and needed, runs the load, and shows its progress. After an interrupt, the result is
    /// the count of the layer's meter.
    pub fn run(self, arguments: &BenchArgs, format: BenchFormat) -> Result<Outcome, Failure> {
        let interrupted = heed_interrupts()?;
        let (mut hollow, mut filled) = (None, None);
        if let Some(limits) = arguments.prefill.limits() {
            hollow = self.hollow()?;
            if hollow.is_some() && arguments.destroy {
                filled = Some(self.fill(limits, &interrupted)?);
                hollow = None;
            }
        }
        let (mut summary, failure) = self.watched(format, &interrupted)?;
        summary.prefill = filled;
        summary.notes.extend(hollow);
        Ok((vec![summary], failure))
    }

    /// The evidence, as a sentence, that parts of the disk may never have been written.
    fn hollow(self) -> Result<Option<String>, Failure> {
        let DiskView { size, allocated, .. } = self.client.disk(self.disk)?;
        Ok(allocated.filter(|allocated| *allocated < size).map(|allocated| {
            format!(
                "not all of the disk has ever been written ({} of {} are allocated); reads of the rest may not \
                 reach the storage. --destroy lets the load write its range first",
                Size(allocated),
                Size(size)
            )
        }))
    }

    /// Writes the range once through the same layer, and waits until a write log has destaged it to the backing.
    fn fill(self, limits: Limits, interrupted: &AtomicBool) -> Result<Filled, Failure> {
        let (offset, size) = (self.workload.offset, self.client.disk(self.disk)?.size);
        let length = self.workload.size.map_or(size.saturating_sub(offset.0), |size| size.0);
        let (name, bytes) = (format!("disk {}", self.disk), format_size(length));
        let limit = |what: String| Failure::from(LoadError::PrefillLimit { target: name.clone(), what });
        if length > limits.bytes {
            let most = format_size(limits.bytes);
            return Err(limit(format!("{bytes} would be filled before the load, and {most} are allowed")));
        }
        note(&format!(
            "filling {bytes} of {name} before the load (not all of it was ever written); --no-prefill leaves that out"
        ));
        // The largest block size that divides the range, so that nothing is omitted.
        let block = 1 << (offset.0 | length | BLOCK).trailing_zeros();
        let pass = Workload {
            access: Access::Write,
            block_size: Size(block),
            queue_depth: DEPTH,
            runtime: Some(limits.time),
            bytes: Some(Size(length)),
            offset,
            size: Some(Size(length)),
            flush_every: Some((length / block).max(1)),
            seed: self.workload.seed,
            ..Workload::default()
        };
        let start = Nanos::now();
        let (summary, failure) = Load { workload: &pass, ..self }.watched(BenchFormat::Text, interrupted)?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let Some(error) = &summary.first_error {
            return Err(Failure::failed(format!("filling {name} before the load failed: {error}")));
        }
        let written =
            summary.kinds.iter().filter(|kind| kind.kind == IoKind::Write).map(|kind| kind.bytes).sum();
        if written < length {
            let (written, time) = (format_size(written), limits.time);
            return Err(limit(format!(
                "only {written} of {bytes} were filled before the load in {time:?}, the time allowed"
            )));
        }
        let deadline = start + limits.time;
        while self.client.disk(self.disk)?.detail.is_some_and(|detail| detail.dirty_bytes > 0) {
            if interrupted.load(Ordering::Relaxed) {
                return Err(Failure::failed("interrupted while the disk was filled"));
            }
            if Nanos::now() > deadline {
                let time = limits.time;
                return Err(limit(format!(
                    "{bytes} were filled before the load, and the write log has not reached the backing in {time:?}, the time \
                     allowed"
                )));
            }
            std::thread::sleep(TICK);
        }
        Ok(Filled { bytes: written, seconds: (Nanos::now() - start).as_secs_f64() })
    }

    /// Runs the load in the node and observes its layer's meter.
    fn watched(
        self,
        format: BenchFormat,
        interrupted: &AtomicBool,
    ) -> Result<(Summary, Option<Failure>), Failure> {
        let Load { client, disk, layer, workload, force } = self;
        let name = format!("{disk} {}", name_of(layer));
        let total = workload.runtime.unwrap_or_default() + workload.warmup;
        let (bar, from, started) =
            (styled_bar(total).with_message(name.clone()), self.counted()?, Nanos::now());
        let (sender, end) = channel();
        let (asked, of, load) =
            (client.clone(), disk.to_owned(), RunLoad { layer, workload: workload.clone(), force });
        std::thread::Builder::new().name("load".into()).spawn(move || {
            // The receiver is gone if the load was interrupted.
            let _ = sender.send(asked.load(&of, &load));
        })?;
        let (mut before, mut last) = (from.clone(), started);
        loop {
            match end.recv_timeout(TICK) {
                Ok(result) => {
                    bar.finish_and_clear();
                    return Ok((result?, None));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Failure::failed("the load has no result")),
                Err(RecvTimeoutError::Timeout) => {}
            }
            bar.set_position(bar.elapsed().as_millis() as u64);
            let is_interrupted = interrupted.load(Ordering::Relaxed);
            let length = Nanos::now() - last;
            let is_shown = format == BenchFormat::Jsonl || !bar.is_hidden();
            if !is_interrupted && (length < INTERVAL || !is_shown) {
                continue;
            }
            let (now, at) = (self.counted()?, Nanos::now() - started);
            let (all, latest) = (now.since(&from), now.since(&before));
            if is_interrupted {
                bar.finish_and_clear();
                let mut summary = Summary::new(name_of(layer), "layer", workload, &all, at);
                summary.incomplete =
                    Some("interrupted; the layer's meter counted this, the warm-up included".into());
                let failure = Failure::failed("interrupted: the results cover the time until then");
                return Ok((summary, Some(failure)));
            }
            if format == BenchFormat::Jsonl {
                let interval = Interval::new(workload, &latest, at, length);
                say(&serde_json::to_string(&interval).map_err(Failure::failed)?)?;
            }
            bar.set_message(line(&name, &all, &latest, length));
            (before, last) = (now, Nanos::now());
        }
    }

    /// The counts of the layer's meter since the disk was opened.
    fn counted(self) -> Result<Tally, Failure> {
        let mut tally = Tally::default();
        let meters = self.client.meters(self.disk)?;
        let kinds =
            meters.iter().filter(|meter| meter.layer == name_of(self.layer)).flat_map(|meter| &meter.kinds);
        for seen in kinds {
            let kind = match seen.kind {
                RequestKind::Read => IoKind::Read,
                RequestKind::Write => IoKind::Write,
                RequestKind::Flush => IoKind::Flush,
                _ => continue,
            };
            tally.count_all(kind, &seen.latency_ns, seen.bytes, seen.errors);
        }
        Ok(tally)
    }
}

/// The layer's name in its meter.
fn name_of(layer: LoadLayer) -> &'static str {
    match layer {
        LoadLayer::Accel => "accel",
        LoadLayer::Backing | LoadLayer::Direct => "backing",
    }
}
