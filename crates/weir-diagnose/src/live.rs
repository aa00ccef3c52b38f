//! The time of a live disk's requests by layer: two samples of its meters, without any load of our own.
//!
//! The findings rest on differences of counters and histograms alone: the time of requests in each layer, and their number at
//! once (Little's law). These numbers do not show why a layer takes its time; `weir diagnose` can find that out.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// Fewer requests than this in the time between say nothing.
pub const FEWEST: u64 = 100;

/// A layer is named when its share of the time is at least this.
const NAMED: f64 = 0.5;

/// One look at one layer's meter for one kind of request, since the meter began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Answered with success.
    pub requests: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Answered with an error.
    pub errors: u64,
    /// Nanoseconds, and how many requests took about that long.
    pub latency: BTreeMap<u64, u64>,
}

/// One sample of a disk: layers from the top, and their totals by kind (`read`, `write`, …).
pub type Look = Vec<(String, BTreeMap<String, Totals>)>;

/// The point of acknowledgement of writes; it decides for which layers they wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledged {
    /// From the log, once the replicas have them.
    FromLog,
    /// From the backing.
    FromBacking,
}

/// The figures of one layer between two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Window {
    /// The layer.
    pub layer: String,
    /// `read` or `write`.
    pub kind: String,
    /// Requests answered.
    pub requests: u64,
    /// Requests per second.
    #[serde(rename = "requests_per_second")]
    pub rate: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Mean latency, microseconds.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99 of 100 were faster.
    pub p99_us: f64,
    /// Mean number of these requests in the layer (rate × mean latency).
    pub in_flight: f64,
    /// Of each request at the top, the microseconds that it spends here and not below; absent if the answer does not wait for
    /// the layer.
    pub own_us: Option<f64>,
    /// The same as a share of the latency at the top, 0 to 1.
    pub share: Option<f64>,
}

/// Requests that the disk's limit has made wait, since its meters began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeldBack {
    /// Requests that have waited.
    pub requests: u64,
    /// The sum of their waits, in seconds.
    pub seconds: f64,
    /// Clients that wait now.
    pub waiting: usize,
}

impl HeldBack {
    /// The difference since `before`. Counters of a disk that was opened anew in between have begun at zero.
    #[must_use]
    pub fn since(self, before: HeldBack) -> HeldBack {
        if self.requests < before.requests {
            return self;
        }
        let (requests, seconds) = (self.requests - before.requests, self.seconds - before.seconds);
        HeldBack { requests, seconds: seconds.max(0.0), ..self }
    }

    /// The sentence about it, if there is anything to say; `limit` is the disk's.
    #[must_use]
    pub fn finding(self, limit: &str) -> Option<String> {
        let HeldBack { requests, seconds, waiting } = self;
        let clients =
            if waiting == 1 { "1 client waits".to_owned() } else { format!("{waiting} clients wait") };
        match (requests, waiting) {
            (0, 0) => None,
            (0, _) => Some(format!("limit: {clients} for the disk's limit ({limit})")),
            _ => {
                let mean = seconds * 1e3 / requests as f64;
                Some(format!(
                    "limit: {requests} requests were held back by the disk's limit ({limit}), for {mean:.1} ms on average; {clients} now"
                ))
            }
        }
    }
}

/// The result of two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Seconds between the looks.
    pub seconds: f64,
    /// From the top; only layers that did something.
    pub windows: Vec<Window>,
    /// One sentence for each direction that says where the time goes, or why that cannot be said.
    pub findings: Vec<String>,
}

/// Explains what happened between two looks.
#[must_use]
pub fn explain(before: &Look, after: &Look, between: Duration, writes: Acknowledged) -> Explanation {
    let seconds = between.as_secs_f64().max(1e-9);
    let mut explanation = Explanation { seconds, windows: Vec::new(), findings: Vec::new() };
    for kind in ["read", "write"] {
        let mut windows: Vec<Window> = after
            .iter()
            .filter_map(|(layer, kinds)| {
                let earlier = before.iter().find(|(name, _)| name == layer);
                let earlier = earlier.and_then(|(_, kinds)| kinds.get(kind));
                window(layer, kind, earlier, kinds.get(kind)?, seconds)
            })
            .collect();
        attribute(&mut windows, kind, writes);
        explanation.findings.push(finding(&windows, kind));
        explanation.windows.append(&mut windows);
    }
    explanation
}

fn window(layer: &str, kind: &str, earlier: Option<&Totals>, later: &Totals, seconds: f64) -> Option<Window> {
    let nothing = Totals::default();
    let earlier = earlier.unwrap_or(&nothing);
    let fresh =
        |(&at, &count): (&u64, &u64)| (at, count - earlier.latency.get(&at).copied().unwrap_or(0).min(count));
    let latency: Vec<(u64, u64)> = later.latency.iter().map(fresh).filter(|(_, count)| *count > 0).collect();
    let requests: u64 = latency.iter().map(|(_, count)| count).sum();
    let errors = later.errors.saturating_sub(earlier.errors);
    if requests + errors == 0 {
        return None;
    }
    let total: f64 = latency.iter().map(|&(at, count)| at as f64 * count as f64).sum();
    let quantile = |share: f64| {
        let mut left = (requests as f64 * share).ceil() as u64;
        let found = latency.iter().find(|(_, count)| {
            left = left.saturating_sub(*count);
            left == 0
        });
        found.map_or(0.0, |&(at, _)| at as f64 / 1e3)
    };
    Some(Window {
        layer: layer.to_owned(),
        kind: kind.to_owned(),
        requests,
        rate: requests as f64 / seconds,
        bytes_per_second: later.bytes.saturating_sub(earlier.bytes) as f64 / seconds,
        errors,
        mean_us: total / (requests as f64).max(1.0) / 1e3,
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        in_flight: total / 1e9 / seconds,
        own_us: None,
        share: None,
    })
}

/// Divides the latency at the top among the layers that the answer waits for: each has its latency less that of the next one
/// below.
fn attribute(windows: &mut [Window], kind: &str, writes: Acknowledged) {
    let waits_for_replicas = kind == "write" && writes == Acknowledged::FromLog;
    let on_the_way = |layer: &str| match layer {
        "replicas" => waits_for_replicas,
        "backing" | "redirected" | "coordinator" => !waits_for_replicas,
        _ => true,
    };
    let path: Vec<usize> = (0..windows.len()).filter(|place| on_the_way(&windows[*place].layer)).collect();
    let Some(&top) = path.first() else { return };
    let requests = windows[top].requests as f64;
    let latency = windows[top].mean_us;
    if requests == 0.0 || latency == 0.0 {
        return;
    }
    // Per request at the top: not every one goes further down. A batch to the replicas carries many writes, and each of
    // them waits for it as long as the batch takes.
    let each = |place: usize| {
        let window = &windows[place];
        if window.layer == "replicas" {
            window.mean_us
        } else {
            window.mean_us * window.requests as f64 / requests
        }
    };
    let times: Vec<f64> = path.iter().map(|&place| each(place)).collect();
    let mut above = latency;
    for (step, &place) in path.iter().enumerate() {
        let here = times[step].min(above);
        let below = times.get(step + 1).map_or(0.0, |below| below.min(here));
        windows[place].own_us = Some(here - below);
        windows[place].share = Some((here - below) / latency);
        above = here;
    }
}

fn finding(windows: &[Window], kind: &str) -> String {
    let Some(top) = windows.first() else { return format!("{kind}s: there were none") };
    if top.requests < FEWEST {
        return format!("{kind}s: only {} in that time, too few to say anything", top.requests);
    }
    let errors: u64 = windows.iter().map(|window| window.errors).sum();
    let failed = if errors > 0 { format!("; {errors} ended in errors") } else { String::new() };
    let shares = windows.iter().filter_map(|window| Some((window, window.share?)));
    let Some((slowest, share)) = shares.max_by(|left, right| left.1.total_cmp(&right.1)) else {
        return format!("{kind}s: no layer's time is known{failed}");
    };
    let own = slowest.own_us.unwrap_or_default();
    let of_it = format!("{own:.0} of {:.0} µs on average ({:.0} %)", top.mean_us, share * 100.0);
    let queue = format!("{:.1} {kind}s were in it at once", slowest.in_flight);
    if share >= NAMED {
        format!("{kind}s spend most of their time in the {}: {of_it}; {queue}{failed}", slowest.layer)
    } else {
        format!(
            "{kind}s: no layer takes most of the time; the {} has the largest part, {of_it}{failed}",
            slowest.layer
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(latencies: &[(u64, u64)]) -> Totals {
        let requests = latencies.iter().map(|(_, count)| count).sum();
        Totals {
            requests,
            bytes: requests * 4096,
            errors: 0,
            latency: latencies.iter().map(|&(us, count)| (us * 1000, count)).collect(),
        }
    }

    fn look(layers: &[(&str, &str, Totals)]) -> Look {
        let mut look = Look::new();
        for (layer, kind, totals) in layers {
            if look.last().is_none_or(|(name, _)| name != layer) {
                look.push(((*layer).to_owned(), BTreeMap::new()));
            }
            look.last_mut().unwrap().1.insert((*kind).to_owned(), totals.clone());
        }
        look
    }

    fn own(explanation: &Explanation, layer: &str, kind: &str) -> Option<f64> {
        explanation.windows.iter().find(|window| window.layer == layer && window.kind == kind)?.own_us
    }

    #[test]
    fn only_what_happened_between_the_looks_counts() {
        let before = look(&[("export", "read", totals(&[(10, 1_000_000)]))]);
        let after = look(&[("export", "read", totals(&[(10, 1_000_000), (500, 200), (900, 2)]))]);
        let found = explain(&before, &after, Duration::from_secs(2), Acknowledged::FromLog);
        let window = &found.windows[0];
        assert_eq!((window.requests, window.rate, window.p50_us, window.p99_us), (202, 101.0, 500.0, 500.0));
        let expected = (500.0 * 200.0 + 900.0 * 2.0) / 202.0;
        assert!((window.mean_us - expected).abs() < 1e-6, "{window:?}");
        assert!((window.in_flight - window.rate * window.mean_us / 1e6).abs() < 1e-9, "Little's law");
    }

    #[test]
    fn reads_that_the_log_answers_do_not_count_for_the_backing() {
        let after = look(&[
            ("export", "read", totals(&[(110, 1000)])),
            ("accel", "read", totals(&[(100, 1000)])),
            ("backing", "read", totals(&[(400, 200)])),
        ]);
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromLog);
        assert_eq!(own(&found, "export", "read"), Some(10.0));
        assert_eq!(own(&found, "accel", "read"), Some(20.0));
        assert_eq!(own(&found, "backing", "read"), Some(80.0));
        assert!(found.findings[0].contains("most of their time in the backing: 80 of 110 µs"), "{found:#?}");
        assert_eq!(found.findings[1], "writes: there were none");
    }

    #[test]
    fn writes_wait_for_the_replicas_or_for_the_backing_as_the_policy_says() {
        let after = look(&[
            ("export", "write", totals(&[(100, 1000)])),
            ("accel", "write", totals(&[(90, 1000)])),
            ("replicas", "write", totals(&[(70, 50)])),
            ("backing", "write", totals(&[(5000, 10)])),
        ]);
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromLog);
        assert_eq!(own(&found, "replicas", "write"), Some(70.0));
        assert_eq!(own(&found, "backing", "write"), None, "destage is nobody's wait");
        assert!(found.findings[1].contains("in the replicas: 70 of 100 µs on average (70 %)"), "{found:#?}");
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromBacking);
        assert_eq!(own(&found, "backing", "write"), Some(50.0));
        assert_eq!(own(&found, "replicas", "write"), None);
    }

    /// Half of the reads go through the coordinator: the time there and on the way counts for half of them.
    #[test]
    fn the_way_to_the_coordinator_and_its_work_are_two_figures() {
        let after = look(&[
            ("export", "read", totals(&[(110, 1000)])),
            ("accel", "read", totals(&[(105, 1000)])),
            ("backing", "read", totals(&[(100, 1000)])),
            ("redirected", "read", totals(&[(150, 500)])),
            ("coordinator", "read", totals(&[(90, 500)])),
        ]);
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromLog);
        let owns = ["backing", "redirected", "coordinator"].map(|layer| own(&found, layer, "read"));
        assert_eq!(owns, [Some(25.0), Some(30.0), Some(45.0)]);
    }

    #[test]
    fn shares_add_up_and_never_exceed_the_whole() {
        // Meters are read one after the other, so a layer below may show more than the one above.
        let after = look(&[
            ("export", "read", totals(&[(100, 500)])),
            ("accel", "read", totals(&[(120, 500)])),
            ("backing", "read", totals(&[(60, 510)])),
        ]);
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromLog);
        let shares: f64 = found.windows.iter().filter_map(|window| window.share).sum();
        assert!((shares - 1.0).abs() < 1e-9, "{found:#?}");
        assert!(found.windows.iter().all(|window| window.own_us.is_none_or(|own| own >= 0.0)));
    }

    #[test]
    fn what_a_limit_holds_back_is_said() {
        let before = HeldBack { requests: 100, seconds: 3.0, waiting: 4 };
        let after = HeldBack { requests: 300, seconds: 5.0, waiting: 1 };
        let said = after.since(before).finding("500 requests/s, burst of 100 ms").unwrap();
        let expected = "limit: 200 requests were held back by the disk's limit (500 requests/s, burst of 100 ms), for 10.0 ms on \
                        average; 1 client waits now";
        assert_eq!(said, expected);
        assert_eq!(before.since(after), before, "opened anew");
        assert_eq!(HeldBack { waiting: 0, ..after }.since(after).finding(""), None);
        let none_yet = after.since(after).finding("l").unwrap();
        assert_eq!(none_yet, "limit: 1 client waits for the disk's limit (l)");
    }

    #[test]
    fn little_says_nothing() {
        let after = look(&[("export", "read", totals(&[(110, 99)]))]);
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromLog);
        assert!(found.findings[0].contains("only 99 in that time"), "{found:#?}");
    }

    #[test]
    fn an_even_split_names_nobody() {
        let after = look(&[
            ("export", "read", totals(&[(120, 1000)])),
            ("accel", "read", totals(&[(80, 1000)])),
            ("backing", "read", totals(&[(40, 1000)])),
        ]);
        let found = explain(&Look::new(), &after, Duration::from_secs(1), Acknowledged::FromLog);
        assert!(found.findings[0].contains("no layer takes most of the time"), "{found:#?}");
    }
}
