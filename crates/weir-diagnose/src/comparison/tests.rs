use super::*;
use crate::sample::{self, Numbers};

fn judged(compared: &Comparisons, layer: usize, cell: &Cell) -> Judgement {
    compared.difference_to(layer, cell).unwrap().judgement
}

#[test]
fn the_median_and_the_range_are_those_of_the_values() {
    let odd = Spread::of([3.0, 1.0, 2.0].into_iter()).unwrap();
    assert_eq!((odd.least, odd.median, odd.most), (1.0, 2.0, 3.0));
    let even = Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()).unwrap();
    assert_eq!(even.median, 2.5);
    assert_eq!(Spread { median: 10.0, least: 8.0, most: 11.0 }.relative(), 0.2);
    assert!(Spread::of([].into_iter()).is_none());
}

#[test]
fn slower_faster_same_and_what_cannot_be_told() {
    let diagnosis = sample::chain(&[
        ("backing", Numbers::steady(40e3)),
        ("faster", Numbers::steady(10e3)),
        ("same", Numbers::steady(10.1e3)),
        ("scattered", Numbers::scattered(10.3e3, 0.2)),
        ("slower", Numbers::steady(50e3)),
    ]);
    let compared = compare(&diagnosis);
    assert!(compared.unused.is_empty(), "{:?}", compared.unused);
    for cell in &diagnosis.cells {
        assert_eq!(judged(&compared, 1, cell), Judgement::Faster, "{cell}");
        assert_eq!(judged(&compared, 2, cell), Judgement::Same, "{cell}");
        assert_eq!(judged(&compared, 3, cell), Judgement::Inconclusive, "{cell}");
        assert_eq!(judged(&compared, 4, cell), Judgement::Slower, "{cell}");
        assert!(compared.difference_to(3, cell).unwrap().repeats_needed.unwrap() > 5);
    }
    let step = compared.difference_to(1, &diagnosis.cells[0]).unwrap();
    assert_eq!(step.quantity, Quantity::Latency);
    assert!((step.change() + 30e3).abs() < 1.0);
    let interval = step.interval.unwrap();
    assert!(interval.low < 0.25 && 0.25 < interval.high && interval.high < 0.26, "{interval:?}");
    let step = compared.difference_to(2, &diagnosis.cells[1]).unwrap();
    assert_eq!(step.quantity, Quantity::Iops);
    assert!((step.loss_factor() - 1.01).abs() < 1e-3);
    assert!(step.assured_loss_factor().unwrap() < step.loss_factor());
    let path = compared.whole_path.iter().find(|path| path.cell == diagnosis.cells[0]).unwrap();
    assert_eq!((path.from, path.to, path.judgement), (0, 4, Judgement::Slower));
}

#[test]
fn a_clear_difference_within_the_margin_is_the_same() {
    let diagnosis =
        sample::chain(&[("a", Numbers::scattered(100e3, 0.002)), ("b", Numbers::scattered(103e3, 0.002))]);
    let compared = compare(&diagnosis);
    assert!(compared.steps.iter().all(|step| step.judgement == Judgement::Same));
    assert!(compared.steps.iter().all(|step| step.interval.unwrap().low != 1.0));
}

#[test]
fn without_median_latencies_depth_one_is_judged_by_iops() {
    let mut diagnosis = sample::chain(&[("a", Numbers::steady(40e3)), ("b", Numbers::steady(80e3))]);
    for row in diagnosis.rows.iter_mut().filter(|row| row.layer == "b") {
        let RunOutcome::Measured(row) = &mut row.outcome else { panic!("measured") };
        (row.p50_ns, row.p99_ns, row.mean_ns, row.mib_per_s) = (None, None, None, None);
    }
    let compared = compare(&diagnosis);
    assert!(compared.steps.iter().all(|step| step.quantity == Quantity::Iops && step.is_loss()));
    assert!(compared.point(1, &diagnosis.cells[0]).unwrap().mib_per_s.median > 0.0);
}

#[test]
fn a_single_layer_has_no_step() {
    let compared = compare(&sample::chain(&[("backing", Numbers::steady(40e3))]));
    assert_eq!(compared.points.len(), 8);
    assert!(compared.steps.is_empty() && compared.whole_path.is_empty());
}

#[test]
fn a_missing_layer_is_stepped_over_and_named() {
    let mut diagnosis = sample::chain(&[
        ("backing", Numbers::steady(40e3)),
        ("accel", Numbers::steady(50e3)),
        ("export", Numbers::steady(90e3)),
    ]);
    let missing = diagnosis.cells[2];
    diagnosis.rows.retain(|row| !(row.layer == "accel" && row.cell == missing));
    let compared = compare(&diagnosis);
    let steps: Vec<&Difference> = compared.steps.iter().filter(|step| step.cell == missing).collect();
    assert_eq!(steps.len(), 1);
    assert_eq!((steps[0].from, steps[0].to, steps[0].skipped.as_slice()), (0, 2, &[1][..]));
    assert_eq!(compared.steps.len(), 15);
    assert_eq!(compared.whole_path.len(), 7);
}

#[test]
fn rows_that_break_littles_law_are_listed_and_left_out() {
    let mut diagnosis = sample::chain(&[("backing", Numbers::steady(40e3))]);
    let place = diagnosis.rows.iter().position(|row| row.repeat == 2).unwrap();
    let RunOutcome::Measured(row) = &mut diagnosis.rows[place].outcome else { panic!("measured") };
    row.mean_ns = row.mean_ns.map(|ns| ns * 3.0);
    let cell = diagnosis.rows[place].cell;
    let compared = compare(&diagnosis);
    assert_eq!(compared.unused.len(), 1);
    assert_eq!(compared.unused[0].row, place);
    assert_eq!(compared.unused[0].why, Why::Objection(Kind::TooManyInFlight));
    assert_eq!(compared.point(0, &cell).unwrap().repeats, 4);
    assert!(compared.point(0, &cell).unwrap().mean_ns.unwrap().most < 50e3);
}

#[test]
fn one_repeat_is_never_judged_and_only_a_great_factor_raises_a_suspicion() {
    let once = |upper: f64| {
        let mut diagnosis =
            sample::chain(&[("backing", Numbers::steady(40e3)), ("export", Numbers::steady(upper))]);
        diagnosis.rows.retain(|row| row.repeat == 1);
        compare(&diagnosis).steps
    };
    for (upper, loss, even) in [(400e3, true, false), (60e3, false, false), (41e3, false, true)] {
        for step in once(upper) {
            assert_eq!((step.judgement, step.interval), (Judgement::Untested, None));
            assert_eq!((step.is_loss(), step.seems_even()), (loss, even), "{upper}");
        }
    }
}

#[test]
fn alternatives_are_compared_with_the_layer_in_whose_place_they_stand() {
    let diagnosis = sample::write_back();
    let compared = compare(&diagnosis);
    let names = |difference: &Difference| {
        (diagnosis.layers[difference.from].name.as_str(), diagnosis.layers[difference.to].name.as_str())
    };
    assert!(compared.alternatives.iter().all(|other| names(other).0 == "accel write-back+1"));
    let steps: std::collections::BTreeSet<_> = compared.steps.iter().map(names).collect();
    let expected = [("accel write-back+1", "nbd export"), ("backing", "accel write-back+1")];
    assert_eq!(steps.into_iter().collect::<Vec<_>>(), expected);
}
