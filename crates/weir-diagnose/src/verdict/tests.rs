use super::*;
use crate::cell::Direction;
use crate::finding::find;
use crate::reliability::distrust;
use crate::result::{LayerEntry, Position};
use crate::sample::{self, Numbers};

fn conclude_chain(layers: &[(&str, Numbers)]) -> Verdict {
    find(&sample::chain(layers)).verdict
}

/// The measured rows of a sample, to be changed.
fn change(diagnosis: &mut Diagnosis, change: impl Fn(&mut crate::Measurement)) {
    for row in &mut diagnosis.rows {
        let RunOutcome::Measured(measurement) = &mut row.outcome else { panic!("measured") };
        change(measurement);
    }
}

fn two() -> Diagnosis {
    sample::chain(&[("backing", Numbers::steady(40e3)), ("export", Numbers::steady(90e3))])
}

#[test]
fn the_step_that_costs_most_is_named_with_its_numbers() {
    let verdict = find(&sample::write_back()).verdict;
    assert_eq!(verdict.grade, Grade::Confirmed);
    assert_eq!(verdict.step, Some(Step { from: 3, to: 5 }));
    assert_eq!(
        verdict.headline,
        "Confirmed: nbd export adds 54.0 µs to accel write-back+1 at QD 1 (4K random write: 38.0 µs → 92.0 µs)."
    );
    let evidence = verdict.evidence.join("\n");
    assert!(evidence.starts_with("It is the greatest loss in 8 of 8 cells compared."), "{evidence}");
    assert!(evidence.contains("median latency 38.0 µs → 92.0 µs (+54.0 µs, ×2.42 [2.3"), "{evidence}");
    let whole = "The whole path, from backing to nbd export, loses most here: ";
    assert!(evidence.contains(whole) && evidence.contains("(×0.62 ["), "{evidence}");
    assert!(evidence.contains("greatest gain is from backing to accel write-back+1; 8K"), "{evidence}");
    assert!(verdict.cautions.is_empty() && verdict.cause.is_none(), "{verdict:?}");
}

#[test]
fn in_a_cell_the_greatest_addition_counts_and_not_the_greatest_factor() {
    let verdict = conclude_chain(&[
        ("a", Numbers::steady(1e3)),
        ("b", Numbers::steady(5e3)),
        ("c", Numbers::steady(20e3)),
    ]);
    // QD 1: b → c adds more; QD 32: a → b loses the greater share. Four cells each: the factor decides.
    assert_eq!(
        verdict.headline,
        "Confirmed: b does 20 % of the IOPS of a at QD 32 (256K sequential read: 32.0M → 6.40M)."
    );
    assert!(verdict.evidence[0].contains("in 4 of 8 cells"));
    let elsewhere = |line: &String| line.starts_with("The greatest loss elsewhere is from b to c; ");
    assert!(verdict.evidence.iter().any(elsewhere));
}

#[test]
fn cells_in_which_no_loss_shows_are_counted() {
    let mut diagnosis = two();
    let even = diagnosis.cells[..3].to_vec();
    for row in diagnosis.rows.iter_mut().filter(|row| even.contains(&row.cell)) {
        row.outcome = RunOutcome::Measured(sample::measurement(&row.cell, 40e3));
    }
    let verdict = find(&diagnosis).verdict;
    assert_eq!(
        verdict.evidence[0],
        "It is the greatest loss in 5 of 8 cells compared; in 3 no loss is shown."
    );
}

#[test]
fn what_is_missing_to_confirm_makes_it_likely_and_is_said() {
    let likely = |diagnosis: &Diagnosis, what: &str| {
        let verdict = find(diagnosis).verdict;
        assert_eq!((verdict.grade, verdict.step.is_some()), (Grade::Likely, true), "{what}");
        assert!(verdict.headline.starts_with("Likely: export adds "), "{}", verdict.headline);
        assert!(verdict.to_improve.iter().any(|line| line.contains(what)), "{:?}", verdict.to_improve);
    };
    assert_eq!(find(&two()).verdict.grade, Grade::Confirmed);
    let mut few = two();
    few.rows.retain(|row| row.repeat <= 3);
    likely(&few, "5 repeats on each side: every cell");
    let mut interrupted = two();
    interrupted.interrupted = true;
    likely(&interrupted, "--resume");
    let mut rejected = two();
    for row in rejected.rows.iter_mut().filter(|row| row.repeat == 5 && row.layer == "export") {
        row.outcome = RunOutcome::Failed("no".into());
        likely(&few, "5 repeats");
    }
    assert_eq!(find(&rejected).verdict.grade, Grade::Likely);
    let unsteady =
        sample::chain(&[("backing", Numbers::scattered(40e3, 0.3)), ("export", Numbers::steady(200e3))]);
    likely(&unsteady, "A steadier lowest layer");
    assert!(find(&unsteady).verdict.cautions[0].contains("backing, is not steady: in 8 of 8 cells"));
    // If the judged quantity is steady, the scatter of another one is no objection.
    let mut stalls = two();
    for row in stalls.rows.iter_mut().filter(|row| row.cell.queue_depth == 1 && row.layer == "backing") {
        let RunOutcome::Measured(measurement) = &mut row.outcome else { panic!("measured") };
        let slower = 1.0 + f64::from(row.repeat) / 4.0;
        *measurement = crate::Measurement {
            p50_ns: measurement.p50_ns,
            ..sample::measurement(&row.cell, 40e3 * slower)
        };
    }
    assert_eq!(find(&stalls).verdict.grade, Grade::Confirmed);
    assert!(find(&stalls).verdict.cautions.is_empty(), "{:?}", find(&stalls).verdict.cautions);
}

#[test]
fn no_bottleneck_is_a_statement_that_needs_evidence() {
    let even = [("backing", Numbers::steady(40e3)), ("accel", Numbers::steady(40.2e3))];
    let verdict = conclude_chain(&even);
    assert_eq!((verdict.grade, verdict.step), (Grade::NoBottleneckFound, None));
    assert!(verdict.evidence.is_empty());

    let faster = conclude_chain(&[("backing", Numbers::steady(40e3)), ("accel", Numbers::steady(10e3))]);
    assert_eq!(faster.grade, Grade::NoBottleneckFound);
    assert!(faster.evidence[0].starts_with("The greatest gain is from backing to accel; "));

    let scattered = conclude_chain(&[even[0], ("accel", Numbers::scattered(40.2e3, 0.1))]);
    assert_eq!((scattered.grade, scattered.step), (Grade::Inconclusive, None));
    assert!(scattered.evidence[0].contains("Of 8 steps in 8 cells, 0 are shown"), "{:?}", scattered.evidence);
    assert!(scattered.to_improve[0].starts_with("More repeats: about "), "{:?}", scattered.to_improve);

    let wild = conclude_chain(&[even[0], ("accel", Numbers::scattered(40.2e3, 0.9))]);
    assert!(wild.to_improve[0].starts_with("A quieter machine"), "{:?}", wild.to_improve);

    let mut once = sample::chain(&even);
    once.rows.retain(|row| row.repeat == 1);
    let once = find(&once).verdict;
    assert_eq!(once.grade, Grade::Inconclusive);
    assert!(once.evidence[0].ends_with("8 are single runs."), "{:?}", once.evidence);
}

#[test]
fn a_generator_that_is_the_limit_is_named_and_no_layer() {
    let mut idle = two();
    change(&mut idle, |row| row.mean_ns = row.mean_ns.map(|ns| ns * 0.5));
    let findings = find(&idle);
    assert_eq!((findings.verdict.grade, findings.verdict.step), (Grade::GeneratorLimited, None));
    assert!(distrust(&idle, &findings).unwrap().contains("generator"));

    let busy = |layers: &[(&str, Numbers)]| {
        let mut diagnosis = sample::chain(layers);
        change(&mut diagnosis, |row| row.cpu_seconds = Some(9.9));
        find(&diagnosis).verdict.grade
    };
    assert_eq!(busy(&[("a", Numbers::steady(1e3)), ("b", Numbers::steady(1e3))]), Grade::GeneratorLimited);
    // A loss shows all the same: the generator did not hide it.
    assert_eq!(busy(&[("a", Numbers::steady(1e3)), ("b", Numbers::steady(3e3))]), Grade::Confirmed);
}

#[test]
fn where_nothing_can_be_said_nothing_is() {
    let single = conclude_chain(&[("backing", Numbers::steady(40e3))]);
    assert_eq!((single.grade, single.step), (Grade::Inconclusive, None));
    assert!(single.headline.contains("Only one layer"));

    let mut apart = two();
    apart.rows.retain(|row| (row.layer == "backing") == (row.cell.queue_depth == 1));
    assert!(find(&apart).verdict.headline.contains("No cell has usable rows at two layers"));

    let mut empty = two();
    empty.rows.clear();
    let findings = find(&empty);
    assert!(findings.verdict.headline.contains("Nothing was measured"));
    assert!(distrust(&empty, &findings).is_some());
    assert_eq!(distrust(&two(), &find(&two())), None);
}

/// A single run says nothing about the next: whatever its factor, it is a suspicion and not likely.
#[test]
fn single_runs_are_never_likely() {
    let mut once = two();
    once.rows.retain(|row| row.repeat == 1);
    let verdict = find(&once).verdict;
    assert_eq!((verdict.grade, verdict.step), (Grade::Inconclusive, Some(Step { from: 0, to: 1 })));
    assert!(
        verdict.headline.starts_with("Inconclusive, from single runs: export adds 50.0 µs"),
        "{}",
        verdict.headline
    );
    assert!(verdict.to_improve[0].contains("5 repeats on each side would confirm or reject it"));
}

/// A step that leads in many cells by little is not named before one that loses more.
#[test]
fn the_step_in_the_headline_is_the_greatest_loss() {
    let entry = |name: &str| LayerEntry { name: name.into(), position: Position::OnPath };
    let layers = ["backing", "accel", "export"].map(entry).to_vec();
    let diagnosis = sample::measured(layers, |layer, cell| {
        // The accelerator adds a little everywhere, the export much to one shape.
        let export = if cell.shape.block_bytes == 4096 && cell.shape.direction == Direction::Read {
            400e3
        } else {
            62e3
        };
        Numbers::steady([40e3, 60e3, export][layer])
    });
    let verdict = find(&diagnosis).verdict;
    assert_eq!(verdict.step, Some(Step { from: 1, to: 2 }), "{}", verdict.headline);
    assert!(
        verdict.headline.contains("export adds 340 µs to accel at QD 1 (4K random read"),
        "{}",
        verdict.headline
    );
    let losses = find(&diagnosis).compared.steps.into_iter().filter(Difference::is_loss);
    let worst = losses.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor())).unwrap();
    assert_eq!((worst.from, worst.to), (1, 2));
}

/// Makes the rows of a layer in a cell, from one repeat on, `factor` times as slow; with none, they have failed.
fn slower(diagnosis: &mut Diagnosis, layer: &str, cell: crate::Cell, from: u32, factor: Option<f64>) {
    let rows = diagnosis.rows.iter_mut().filter(|row| row.layer == layer && row.cell == cell);
    for row in rows.filter(|row| row.repeat >= from) {
        row.outcome = match factor {
            Some(factor) => RunOutcome::Measured(sample::measurement(&cell, 40e3 * factor)),
            None => RunOutcome::Failed("no".into()),
        };
    }
}

/// The grade and the numbers come from the same cells: a single run may be as slow as it likes.
#[test]
fn the_headline_has_numbers_that_its_grade_rests_on() {
    let layers = [("backing", Numbers::steady(40e3)), ("export", Numbers::steady(40e3 * 1.2))];
    let mut diagnosis = sample::chain(&layers);
    let at_depth = |depth: u32| diagnosis.cells.iter().filter(move |cell| cell.queue_depth == depth).copied();
    let (alone, deep): (Vec<_>, Vec<_>) = (at_depth(1).collect(), at_depth(32).collect());
    slower(&mut diagnosis, "export", alone[0], 1, Some(50.0));
    slower(&mut diagnosis, "export", alone[0], 2, None);
    let verdict = find(&diagnosis).verdict;
    assert_eq!(verdict.grade, Grade::Confirmed, "{verdict:?}");
    assert!(verdict.headline.contains("export adds 8.00 µs"), "{}", verdict.headline);
    // Nor two repeats, when five of other cells confirm.
    slower(&mut diagnosis, "export", alone[0], 1, Some(50.0));
    slower(&mut diagnosis, "export", alone[0], 3, None);
    let verdict = find(&diagnosis).verdict;
    assert!(verdict.headline.starts_with("Confirmed: export adds 8.00 µs"), "{}", verdict.headline);

    // One cell that is steady and has few repeats and one that has all and is unsteady confirm nothing together.
    let mut apart = sample::chain(&layers);
    (apart.cells, apart.rows) =
        (deep[..2].to_vec(), apart.rows.into_iter().filter(|row| deep[..2].contains(&row.cell)).collect());
    for layer in ["backing", "export"] {
        apart.rows.retain(|row| row.cell != deep[0] || row.layer != layer || row.repeat <= 3);
    }
    for row in apart.rows.iter_mut().filter(|row| row.cell == deep[1]) {
        let scatter = 1.0 + 0.2 * (f64::from(row.repeat) - 3.0);
        let base = if row.layer == "backing" { 40e3 * scatter } else { 400e3 };
        row.outcome = RunOutcome::Measured(sample::measurement(&row.cell, base));
    }
    let verdict = find(&apart).verdict;
    assert_eq!(verdict.grade, Grade::Likely, "{verdict:?}");
    assert!(verdict.to_improve[0].starts_with("A steadier lowest layer, or more repeats"), "{verdict:?}");
    assert!(verdict.cautions[0].contains("only to within ±10 % or worse"), "{verdict:?}");
}

/// A step that repeats have shown is named before one that a single run suggests, however great.
#[test]
fn a_suspicion_is_no_leader_beside_a_loss_that_is_shown() {
    let mut diagnosis = sample::chain(&[
        ("backing", Numbers::steady(40e3)),
        ("accel", Numbers::steady(40e3)),
        ("export", Numbers::steady(48e3)),
    ]);
    let cell = diagnosis.cells[0];
    slower(&mut diagnosis, "accel", cell, 1, Some(50.0));
    slower(&mut diagnosis, "accel", cell, 2, None);
    let verdict = find(&diagnosis).verdict;
    assert_eq!(verdict.step, Some(Step { from: 1, to: 2 }), "{verdict:?}");
    let suspicion = |line: &String| line.starts_with("The greatest loss elsewhere is from backing to accel");
    assert!(verdict.evidence.iter().any(suspicion), "{verdict:?}");
}

/// All planned repeats are there when further ones, or the runs of hypotheses, are interrupted.
#[test]
fn an_interruption_says_what_is_missing() {
    let mut diagnosis = two();
    diagnosis.interrupted = true;
    let further = crate::Row { repeat: 6, ..diagnosis.rows[0].clone() };
    diagnosis.rows.push(further);
    let findings = find(&diagnosis);
    assert_eq!(findings.verdict.cautions, ["Interrupted during further runs; all planned runs were done."]);
    let why = distrust(&diagnosis, &findings).unwrap();
    assert_eq!(why, "interrupted during further runs, after all planned ones");
    // A further run does not stand for a planned one.
    diagnosis.rows.remove(3);
    let findings = find(&diagnosis);
    assert!(findings.verdict.cautions[0].starts_with("Interrupted: 79 of 80 runs"), "{findings:?}");
}

#[test]
fn cells_that_could_not_be_compared_are_counted() {
    let mut even = sample::chain(&[("backing", Numbers::steady(40e3)), ("accel", Numbers::steady(40.2e3))]);
    let cell = even.cells[0];
    slower(&mut even, "accel", cell, 1, None);
    let verdict = find(&even).verdict;
    assert_eq!(verdict.grade, Grade::NoBottleneckFound);
    assert_eq!(
        verdict.evidence[0],
        "Layers could be compared in 7 of 8 cells: in the others no two have usable rows."
    );
}
