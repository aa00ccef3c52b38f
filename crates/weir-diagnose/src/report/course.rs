//! A run's timeline as `weir-report` draws it: its moments in seconds from the beginning of the measured time.

use weir_load::timeline::{Slot, Timeline, bucket_start};
use weir_report::over_time::{Bucket, Moment, Run};

/// A slot of which less than this was within the load says nothing about the rate.
const LEAST_COVERED: f64 = 0.5;

/// The run over time; without moments where nothing was answered.
pub fn of(timeline: &Timeline) -> Run {
    if timeline.slot_ns == 0 || timeline.end_ns == 0 || timeline.slots.iter().all(|slot| slot.ios() == 0) {
        return Run::default();
    }
    let measured = timeline.measured_from_ns.min(timeline.end_ns) as f64;
    let seconds = |nanoseconds: u64| (nanoseconds as f64 - measured) / 1e9;
    let moment = |(number, slot): (usize, &Slot)| {
        let (from, to) = timeline.span(number);
        let length = to.saturating_sub(from) as f64;
        let covered = length >= LEAST_COVERED * timeline.slot_ns as f64 && length > 0.0;
        let ios = slot.ios() as f64;
        let bucket = |(bucket, count)| Bucket {
            from_ns: bucket_start(bucket) as f64,
            to_ns: bucket_start(bucket + 1) as f64,
            share: count as f64 / ios,
        };
        Moment {
            from: seconds(from),
            to: seconds(to),
            rate: covered.then(|| ios * 1e9 / length),
            buckets: slot.buckets().map(bucket).collect(),
        }
    };
    let moments = timeline.slots.iter().enumerate().map(moment).collect();
    Run { begin: -measured / 1e9, end: seconds(timeline.end_ns), moments }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_report::over_time::{Course, panels};
    use weir_report::svg::is_drawable;

    fn steady(slots: usize) -> Timeline {
        Timeline {
            slot_ns: 100_000_000,
            lead_ns: 0,
            measured_from_ns: 200_000_000,
            end_ns: 100_000_000 * slots as u64,
            slots: vec![Slot(40, vec![900, 99, 1]); slots],
        }
    }

    #[test]
    fn warm_up_is_before_zero_and_shares_are_of_each_moment() {
        let run = of(&steady(10));
        assert!((run.begin + 0.2).abs() < 1e-9 && (run.end - 0.8).abs() < 1e-9, "{run:?}");
        assert_eq!(run.moments.len(), 10);
        let shares: Vec<f64> = run.moments[0].buckets.iter().map(|bucket| bucket.share).collect();
        assert_eq!(shares, [0.9, 0.099, 0.001]);
        assert!(run.moments[0].buckets[0].to_ns > run.moments[0].buckets[0].from_ns);
    }

    #[test]
    fn a_slot_that_is_mostly_outside_has_no_rate() {
        let run = of(&Timeline { lead_ns: 90_000_000, ..steady(3) });
        let known: Vec<bool> = run.moments.iter().map(|moment| moment.rate.is_some()).collect();
        assert_eq!(known, [false, true, true]);
        assert!((run.moments[1].rate.unwrap() - 10_000.0).abs() < 1e-6);
    }

    #[test]
    fn nothing_answered_is_nothing_to_draw() {
        assert!(of(&Timeline::default()).moments.is_empty());
        assert!(of(&Timeline { slots: vec![Slot::default(); 4], ..steady(4) }).moments.is_empty());
    }

    proptest! {
        #[test]
        fn any_timeline_can_be_drawn(
            numbers in prop::array::uniform4(any::<u64>()),
            slots in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u64>(), 0..9)), 0..40),
            near in any::<bool>(),
        ) {
            let [slot_ns, lead_ns, measured_from_ns, end_ns] = numbers;
            let slots = slots.into_iter().map(|(first, counts)| Slot(if near { first % 120 } else { first }, counts));
            let run = of(&Timeline { slot_ns, lead_ns, measured_from_ns, end_ns, slots: slots.collect() });
            let course = Course { title: "backing".into(), run: run.clone(), others: vec![run], window: "measured" };
            for panel in panels(&[course], 340.0) {
                prop_assert!(is_drawable(&panel.svg), "{}", panel.svg);
            }
        }
    }
}
