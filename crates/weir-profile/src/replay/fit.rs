//! Which distribution of random requests has a given miss-ratio curve and working set.
//!
//! For independent references with known probabilities, Che's approximation tells the hits of an LRU cache: a block is
//! in it if it was used within a *characteristic time* T, where T is such that the blocks used within T fill the cache
//! (Che, Tung and Wang, "Hierarchical Web caching systems: modeling, design and experimental results", 2002). Here it is
//! taken for a stretch of time that begins with an empty cache, so that first uses count as they did when they were
//! watched. Each candidate gets as many positions as it needs for the working set; the one whose curve is closest wins.

use weir_load::pattern::Pattern;
use weir_load::zipf::weight;

/// Exponents that are tried, in thousandths: 50 apart.
const STEEPEST: u32 = 2_500;

/// Percent of the requests and percent of the range that are tried as hot.
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

/// A candidate that is not simpler must be better by so much: a hundredth of a point.
const MARGIN: f64 = 1e-4;

/// Ranks that have a weight of their own; beyond, runs grow by 1/16.
const EXACT: u64 = 64;

/// What is to be reproduced: random requests, each for one of many positions.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    /// Requests.
    pub requests: f64,
    /// Distinct positions that they used.
    pub used: f64,
    /// Positions that there are at most.
    pub most: u64,
    /// Blocks of a position, as far as requests use them.
    pub blocks: f64,
    /// Positions that a request reaches over, at least 1: requests can be longer than positions are apart.
    pub reach: f64,
    /// Other blocks that come into a cache with each request.
    pub others: f64,
    /// (cache in blocks, share of hits), ascending.
    pub curve: Vec<(f64, f64)>,
}

/// How the positions are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    pub pattern: Pattern,
    pub positions: u64,
    /// Mean distance between the curves, 0 to 1.
    pub error: f64,
}

/// The distribution that comes closest; uniform if nothing is better.
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

/// The number of positions of which as many are used as were.
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

/// Positions that are used equally often: how many, and how likely a request uses each. Requests that reach over several
/// positions use `reach` of them.
fn runs(pattern: Pattern, positions: u64, reach: f64) -> Vec<(f64, f64)> {
    let count = positions as f64;
    let mut runs = starts(pattern, positions);
    if !matches!(pattern, Pattern::Zipf { .. }) {
        // Neighbours are equally likely.
        runs.iter_mut().for_each(|run| run.1 *= reach);
        return runs;
    }
    if reach <= 1.0 {
        return runs;
    }
    // Neighbours are not: a position is used with the most likely one of those that reach it, and with the rest evenly.
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

/// Where requests begin: positions that are equally likely, and how likely each is.
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
        hits += width * p * (growing + (demand.requests - time).max(0.0) * within) / demand.requests;
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

    /// What a distribution would have shown.
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
            curve: Vec::new(),
        };
        assert_eq!((fit(&empty).pattern, fit(&empty).positions), (Pattern::Plain, 1));
    }
}
