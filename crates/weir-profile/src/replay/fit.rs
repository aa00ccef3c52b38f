//! Fits the distribution of random requests to a given miss-ratio curve and working set.
//!
//! For independent references with known probabilities, Che's approximation gives the hits of an LRU cache: the cache has a block
//! if it was used within the *characteristic time* T, in which the blocks used fill the cache (Che, Tung and Wang, "Hierarchical
//! Web caching systems: modeling, design and experimental results", 2002). Here it applies to a period that begins with an empty
//! cache, so that first uses count as in the profile. Each candidate gets as many positions as it needs for the working set; the
//! one with the closest curve wins.

use weir_load::pattern::Pattern;
use weir_load::zipf::weight;

/// Largest exponent to try, in thousandths; steps of 50.
const STEEPEST: u32 = 2_500;

/// Candidates for the hot part: percent of the requests and percent of the range.
const HOT: [(u8, [u8; 7]); 12] = [
    (10, [1, 2, 3, 4, 5, 6, 8]),
    (20, [1, 2, 3, 5, 7, 10, 15]),
    (30, [1, 2, 3, 5, 10, 15, 20]),
    (40, [1, 2, 5, 10, 15, 20, 30]),
    (50, [1, 2, 5, 10, 20, 30, 40]),
    (60, [1, 2, 5, 10, 20, 30, 40]),
    (70, [1, 2, 5, 10, 20, 30, 50]),
    (80, [1, 2, 5, 10, 20, 30, 50]),
    (90, [1, 2, 5, 10, 20, 30, 50]),
    (95, [1, 2, 5, 10, 20, 30, 50]),
    (98, [1, 2, 5, 10, 20, 30, 50]),
    (99, [1, 2, 5, 10, 20, 30, 50]),
];

/// Required improvement of a candidate that is not simpler: a hundredth of a point.
const MARGIN: f64 = 1e-4;

/// Number of ranks with a weight of their own; beyond, runs grow by 1/16.
const EXACT: u64 = 64;

/// The demand to reproduce: random requests, each for one of many positions.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    /// Requests.
    pub requests: f64,
    /// Number of distinct positions used.
    pub used: f64,
    /// Maximum number of positions.
    pub most: u64,
    /// Blocks of a position that requests use.
    pub blocks: f64,
    /// Number of positions that a request spans, at least 1: requests can be longer than the distance of positions.
    pub reach: f64,
    /// Number of other blocks that enter a cache with each request.
    pub others: f64,
    /// The share of the used positions, 0 to 1, that other requests had used before: a cache has them from the beginning.
    pub warm: f64,
    /// (cache in blocks, share of hits), ascending.
    pub curve: Vec<(f64, f64)>,
}

/// The fitted distribution of requests over positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    pub pattern: Pattern,
    pub positions: u64,
    /// Mean distance between the curves, 0 to 1.
    pub error: f64,
}

/// The closest distribution; uniform if none is better.
pub(super) fn fit(demand: &Demand) -> Fit {
    let zipf = (1..=STEEPEST / 50).map(|step| Pattern::Zipf { theta_milli: step * 50 });
    let hot = HOT.iter().flat_map(|&(requests, ranges)| {
        ranges.into_iter().map(move |range| Pattern::Hot { requests, range })
    });
    let mut best = try_one(Pattern::Plain, demand);
    for pattern in zipf.chain(hot) {
        let other = try_one(pattern, demand);
        if other.error < best.error - MARGIN {
            best = other;
        }
    }
    best
}

fn try_one(pattern: Pattern, demand: &Demand) -> Fit {
    let positions = positions_for(pattern, demand);
    let runs = runs(pattern, positions, demand.reach);
    let points = characteristic(demand.requests).map(|time| point(&runs, time, demand));
    let points: Vec<(f64, f64)> = points.collect();
    let off: f64 = demand.curve.iter().map(|&(cache, hits)| (at(&points, cache) - hits).abs()).sum();
    Fit { pattern, positions, error: off / demand.curve.len().max(1) as f64 }
}

/// The number of positions for which the expected number of used ones equals the demand's.
fn positions_for(pattern: Pattern, demand: &Demand) -> u64 {
    let used = |positions: u64| {
        let runs = runs(pattern, positions, demand.reach);
        runs.iter().map(|&(width, p)| width * -(-p * demand.requests).exp_m1()).sum::<f64>()
    };
    let (mut low, mut high) = ((demand.used as u64).clamp(1, demand.most), demand.most.max(1));
    while high - low > low / 500 {
        let middle = low + (high - low) / 2;
        if used(middle) < demand.used { low = middle + 1 } else { high = middle }
    }
    low
}

/// Groups of positions with equal frequency: their number, and the probability that a request uses each. Requests that span
/// several positions use `reach` of them.
fn runs(pattern: Pattern, positions: u64, reach: f64) -> Vec<(f64, f64)> {
    let count = positions as f64;
    let mut runs = starts(pattern, positions);
    if !matches!(pattern, Pattern::Zipf { .. }) {
        // Adjacent positions are equally likely.
        runs.iter_mut().for_each(|run| run.1 *= reach);
        return runs;
    }
    if reach <= 1.0 {
        return runs;
    }
    // Adjacent positions are not equally likely: a position is used with the most likely start that reaches it, and with the
    // others evenly.
    let (mut room, mut rest) = (count / reach, 1.0);
    for run in &mut runs {
        let width = run.0.min(room);
        room -= width;
        rest -= width * run.1;
        run.0 = width * reach;
    }
    runs.retain(|run| run.0 > 0.0);
    runs.iter_mut().for_each(|run| run.1 += reach * rest.max(0.0) / count);
    runs
}

/// Start positions of requests: groups of equally likely positions, and the probability of each.
fn starts(pattern: Pattern, positions: u64) -> Vec<(f64, f64)> {
    let count = positions as f64;
    match pattern {
        Pattern::Zipf { theta_milli } => {
            let theta = f64::from(theta_milli) / 1000.0;
            let (mut runs, mut first, mut total) = (Vec::new(), 0, 0.0);
            while first < positions {
                let width = if first < EXACT { 1 } else { (first / 16).min(positions - first) };
                let all = weight(first, width, theta);
                total += all;
                runs.push((width as f64, all / width as f64));
                first += width;
            }
            runs.iter_mut().for_each(|run| run.1 /= total);
            runs
        }
        Pattern::Hot { requests, range } if positions > 1 => {
            let hot = (count * f64::from(range) / 100.0).floor().max(1.0);
            let share = f64::from(requests) / 100.0;
            vec![(hot, share / hot), (count - hot, (1.0 - share) / (count - hot))]
        }
        _ => vec![(count, 1.0 / count)],
    }
}

/// Times, in requests, from one to all of them, evenly on a logarithmic scale.
fn characteristic(requests: f64) -> impl Iterator<Item = f64> {
    let steps = 48;
    (0..=steps).map(move |step| requests.max(1.0).powf(f64::from(step) / f64::from(steps)))
}

/// Cache in blocks and share of hits for one characteristic time. A request at time t after the beginning finds a position
/// that was used within the last min(T, t).
fn point(runs: &[(f64, f64)], time: f64, demand: &Demand) -> (f64, f64) {
    let (mut cache, mut hits) = (0.0, 0.0);
    for &(width, p) in runs {
        let within = -(-p * time).exp_m1();
        cache += width * within;
        // The mean over t: up to T from the integral of 1 - exp(-p t), after it constant.
        let growing = (time - within / p).max(0.0);
        let from_empty = growing + (demand.requests - time).max(0.0) * within;
        let share = from_empty * (1.0 - demand.warm) / demand.requests + within * demand.warm;
        hits += width * p * share;
    }
    hits /= demand.reach;
    (cache * demand.blocks + time * demand.others, hits)
}

/// The hits at a size of cache, between the points before and after it.
fn at(points: &[(f64, f64)], cache: f64) -> f64 {
    let after = points.partition_point(|&(size, _)| size < cache);
    match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
        (Some((low, from)), Some(&(high, to))) if high > low => {
            from + (to - from) * (cache - low) / (high - low)
        }
        (_, Some(&(high, to))) => to * cache / high.max(cache),
        (before, None) => before.map_or(0.0, |(_, hits)| hits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The demand that a distribution would produce.
    fn demand(pattern: Pattern, positions: u64, requests: f64, reach: f64) -> Demand {
        let runs = runs(pattern, positions, reach);
        let used = runs.iter().map(|&(width, p)| width * -(-p * requests).exp_m1()).sum();
        let mut demand = Demand {
            requests,
            used,
            most: positions * 4,
            blocks: 2.0,
            reach,
            others: 0.1,
            warm: 0.0,
            curve: Vec::new(),
        };
        demand.curve = characteristic(requests).skip(8).map(|time| point(&runs, time, &demand)).collect();
        demand
    }

    #[test]
    fn a_distribution_is_found_again() {
        for text in ["plain", "zipf:0.5", "zipf:0.95", "zipf:1.4", "hot:90/10", "hot:80/20"] {
            let pattern: Pattern = text.parse().unwrap();
            for (positions, requests, reach) in
                [(5_000, 200_000.0, 1.0), (200_000, 300_000.0, 1.0), (50_000, 60_000.0, 5.0)]
            {
                let found = fit(&demand(pattern, positions, requests, reach));
                assert_eq!(found.pattern.to_string(), text, "{found:?}");
                let off = (found.positions as f64 / positions as f64 - 1.0).abs();
                assert!(
                    off < 0.02 || (requests > 30.0 * positions as f64 && off < 0.05),
                    "{text}: {found:?}"
                );
            }
        }
    }

    #[test]
    fn hits_are_those_of_a_played_cache() {
        // 2,000 positions, 30,000 requests, a cache of 200 positions: by chance and by formula.
        let (positions, requests, cache) = (2_000u64, 30_000u64, 200usize);
        let pattern = Pattern::Zipf { theta_milli: 900 };
        let table = weir_load::zipf::Zipf::new(positions, 900);
        let mut random = fastrand::Rng::with_seed(6);
        let (mut list, mut hits) = (Vec::new(), 0u64);
        for _ in 0..requests {
            let position = table.draw(&mut random);
            if let Some(at) = list.iter().position(|&other| other == position) {
                list.remove(at);
                hits += 1;
            }
            list.push(position);
            if list.len() > cache {
                list.remove(0);
            }
        }
        let mut demand = demand(pattern, positions, requests as f64, 1.0);
        (demand.blocks, demand.others) = (1.0, 0.0);
        let runs = runs(pattern, positions, 1.0);
        let points: Vec<_> =
            characteristic(demand.requests).map(|time| point(&runs, time, &demand)).collect();
        let (is, should) = (at(&points, cache as f64), hits as f64 / requests as f64);
        assert!((is - should).abs() < 0.01, "{is} {should}");
    }

    #[test]
    fn nothing_to_fit_is_uniform() {
        let empty = Demand {
            requests: 1.0,
            used: 1.0,
            most: 1,
            blocks: 1.0,
            reach: 1.0,
            others: 0.0,
            warm: 0.0,
            curve: Vec::new(),
        };
        assert_eq!((fit(&empty).pattern, fit(&empty).positions), (Pattern::Plain, 1));
    }
}
