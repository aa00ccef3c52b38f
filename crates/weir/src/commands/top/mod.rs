//! `weir top`: live figures of every disk.
//!
//! On a terminal a screen that updates itself; in a pipe a table (or a line of JSON) for each interval.

mod screen;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use weir_block::Nanos;
use weir_diagnose::live::{Explanation, Look, Window, explain};
use weir_node::api::DiskView;
use weir_node::timestamps::rfc3339;
use weir_node::units::{Period, about};
use weir_report::format;

use super::explain::{acknowledged, held_back, limit, look};
use crate::cluster::{any_node, owner_of};
use crate::failure::Failure;
use crate::options::{Global, Output};
use crate::output::{goes_on, table, to_line, width};

const HEADER: [&str; 11] = [
    "DISK",
    "OWNER",
    "EFFECTIVE",
    "STATE",
    "READS",
    "P99",
    "WRITES",
    "P99",
    "SLOWEST LAYER",
    "DIRTY",
    "CLEAN IN",
];

/// Columns that are flush right.
const RIGHT: [usize; 6] = [4, 5, 6, 7, 9, 10];

/// Columns in order of importance: without room for all, the last ones are omitted.
const PRIORITY: [usize; 11] = [0, 3, 4, 6, 7, 5, 9, 1, 8, 2, 10];

/// Space between columns.
const GAP: usize = 2;

/// One disk in one sample.
struct Seen {
    disk: DiskView,
    /// Empty when its owner is unreachable.
    look: Look,
}

/// One disk between two samples.
#[derive(Serialize)]
struct Row {
    disk: DiskView,
    #[serde(flatten)]
    explanation: Explanation,
    /// Seconds that its requests have waited for its limit.
    #[serde(skip)]
    held_back: f64,
}

/// All disks between two samples.
#[derive(Serialize)]
struct Frame {
    /// The end of the interval: RFC 3339, UTC.
    at: String,
    #[serde(rename = "disks")]
    rows: Vec<Row>,
}

/// Samples the cluster repeatedly.
struct Watcher<'a> {
    global: &'a Global,
    last: Vec<Seen>,
    at: Nanos,
}

impl<'a> Watcher<'a> {
    fn new(global: &'a Global) -> Result<Watcher<'a>, Failure> {
        Ok(Watcher { global, last: see(global)?, at: Nanos::now() })
    }

    /// The figures since the last call.
    fn frame(&mut self) -> Result<Frame, Failure> {
        let now = see(self.global)?;
        let between = Nanos::now() - self.at;
        self.at = Nanos::now();
        let before = std::mem::replace(&mut self.last, now);
        let row = |seen: &Seen| {
            // The counters of a moved disk restart.
            let same =
                |other: &&Seen| other.disk.name == seen.disk.name && other.disk.owner == seen.disk.owner;
            let nothing = Look::new();
            let earlier = before.iter().find(same);
            // Without an earlier sample, everything since the disk was opened would count as this interval.
            let (from, to) = earlier.map_or((&nothing, &nothing), |earlier| (&earlier.look, &seen.look));
            let mut explanation = explain(from, to, between, acknowledged(&seen.disk));
            let so_far = held_back(&seen.disk);
            let held = so_far.since(earlier.map_or(so_far, |earlier| held_back(&earlier.disk)));
            explanation.findings.extend(held.finding(&limit(&seen.disk)));
            Row { disk: seen.disk.clone(), explanation, held_back: held.seconds }
        };
        Ok(Frame { at: time_of_day(), rows: self.last.iter().map(row).collect() })
    }
}

#[expect(clippy::disallowed_methods, reason = "only what people and their programs read carries it")]
fn time_of_day() -> String {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    rfc3339(since_1970.as_millis() as u64)
}

/// All disks with their meters, each asked of its owner.
fn see(global: &Global) -> Result<Vec<Seen>, Failure> {
    let disks = any_node(global)?.disks()?;
    let seen = disks.into_iter().map(|disk| {
        let asked = owner_of(global, &disk.name).ok().filter(|_| disk.owner.is_some());
        let look = asked.as_ref().and_then(|node| node.meters(&disk.name).ok());
        let detailed = asked.and_then(|node| node.disk(&disk.name).ok()).unwrap_or(disk);
        Seen { disk: detailed, look: look.map_or_else(Look::new, |meters| self::look(&meters)) }
    });
    Ok(seen.collect())
}

impl Row {
    fn window(&self, kind: &str) -> Option<&Window> {
        self.explanation.windows.iter().find(|window| window.kind == kind)
    }

    /// The layer in which requests, reads and writes together, spend most of their time, or the limit for which they wait longer.
    fn slowest(&self) -> String {
        let rate = |kind: &str| self.window(kind).map_or(0.0, |top| top.rate);
        let mut times: Vec<(&str, f64)> = Vec::new();
        for window in &self.explanation.windows {
            let Some(own) = window.own_us else { continue };
            let time = own * rate(&window.kind);
            match times.iter_mut().find(|(layer, _)| *layer == window.layer) {
                Some((_, sum)) => *sum += time,
                None => times.push((&window.layer, time)),
            }
        }
        if self.held_back > 0.0 {
            times.push(("limit", self.held_back * 1e6 / self.explanation.seconds));
        }
        let whole: f64 = times.iter().map(|(_, time)| time).sum();
        let most = times.into_iter().max_by(|left, right| left.1.total_cmp(&right.1));
        most.filter(|_| whole > 0.0)
            .map_or_else(String::new, |(layer, time)| format!("{layer} ({:.0} %)", time / whole * 100.0))
    }

    fn cells(&self) -> Vec<String> {
        let disk = &self.disk;
        let rate = |kind| self.window(kind).map_or_else(|| "-".into(), |top| format!("{:.0}/s", top.rate));
        let p99 =
            |kind| self.window(kind).map_or_else(|| "-".into(), |top| format::duration(top.p99_us * 1e3));
        let detail = disk.detail.as_ref();
        let dirty = disk.dirty_bytes().unwrap_or_default();
        let clean = detail.filter(|_| dirty > 0).map(|detail| match detail.destage.time_to_clean_ms {
            Some(ms) => Period(Duration::from_millis(ms)).to_string(),
            None => "?".to_owned(),
        });
        vec![
            disk.name.clone(),
            disk.owner.clone().unwrap_or_else(|| "-".into()),
            disk.effective.clone(),
            disk.state.clone(),
            rate("read"),
            p99("read"),
            rate("write"),
            p99("write"),
            self.slowest(),
            if dirty > 0 { about(dirty) } else { "-".into() },
            clean.unwrap_or_else(|| "-".into()),
        ]
    }

    /// Whether an operator should look at it.
    fn is_in_trouble(&self) -> bool {
        !self.disk.reason.is_empty()
            || self.disk.requested != self.disk.effective && self.disk.owner.is_some()
    }
}

/// Widths of all columns, header included.
fn widths(lines: &[Vec<String>]) -> Vec<usize> {
    let cells = |column: usize| lines.iter().map(move |line| line[column].chars().count());
    (0..HEADER.len()).map(|column| cells(column).chain([HEADER[column].len()]).max().unwrap_or(0)).collect()
}

/// The columns that fit into `width`, in their order.
fn fitting(widths: &[usize], width: usize) -> Vec<usize> {
    let mut columns: Vec<usize> = PRIORITY.to_vec();
    let taken = |columns: &[usize]| {
        columns.iter().map(|&column| widths[column]).sum::<usize>() + GAP * columns.len().saturating_sub(1)
    };
    while columns.len() > 1 && taken(&columns) > width {
        columns.pop();
    }
    columns.sort_unstable();
    columns
}

/// The output for a pipe, or for a terminal without screen updates.
fn plain(frame: &Frame) -> String {
    let lines: Vec<Vec<String>> = frame.rows.iter().map(Row::cells).collect();
    let columns = fitting(&widths(&lines), width().unwrap_or(usize::MAX));
    let header: Vec<&str> = columns.iter().map(|&column| HEADER[column]).collect();
    let right: Vec<usize> = (0..columns.len()).filter(|&index| RIGHT.contains(&columns[index])).collect();
    let rows = lines.iter().map(|line| columns.iter().map(|&column| line[column].clone()).collect());
    table(&header, &right, rows)
}

/// Shows live figures of every disk, until interrupted or for `count` intervals.
pub fn run(global: &Global, every: Period, count: Option<u64>) -> Result<(), Failure> {
    let every = every.0.max(Duration::from_millis(200));
    let mut watcher = Watcher::new(global)?;
    if global.output == Output::Text && count.is_none() && screen::is_terminal() {
        return screen::run(&mut watcher, every);
    }
    for _ in 0..count.unwrap_or(u64::MAX) {
        std::thread::sleep(every);
        let frame = watcher.frame()?;
        let text = match global.output {
            Output::Json => to_line("weir.top/1", &frame)?,
            Output::Text => format!("{}\n", plain(&frame)),
        };
        if !goes_on(&text)? {
            return Ok(());
        }
    }
    Ok(())
}
