use super::*;
use crate::sample;
use crate::tier::Tier;

fn quick(seed: u64) -> Plan {
    Plan { repeats: 3, follow_ups: 0, ..Plan::of(Tier::Quick.cells(), seed) }
}

struct Steady {
    name: String,
    position: Position,
    latency_ns: f64,
    fails: Option<TargetError>,
    refuses_depth: Option<u32>,
}

impl Target for Steady {
    fn name(&self) -> &str {
        &self.name
    }
    fn position(&self) -> Position {
        self.position.clone()
    }
    fn can_run(&self, cell: &Cell) -> Result<(), String> {
        match self.refuses_depth {
            Some(depth) if depth == cell.queue_depth => Err(format!("no depth {depth} here")),
            _ => Ok(()),
        }
    }
    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        match &self.fails {
            Some(error) => Err(error.clone()),
            None => Ok(sample::measurement(cell, self.latency_ns)),
        }
    }
}

fn steady(name: &str) -> Steady {
    let position = Position::OnPath;
    Steady { name: name.to_owned(), position, latency_ns: 50e3, fails: None, refuses_depth: None }
}

fn go(plan: &Plan, targets: Vec<Steady>, stop: &AtomicBool) -> Result<Diagnosis, PlanError> {
    let mut targets: Vec<Box<dyn Target>> =
        targets.into_iter().map(|target| Box::new(target) as Box<dyn Target>).collect();
    measure(plan, &mut targets, Start::Fresh(sample::environment()), stop, &mut |_| {})
}

#[test]
fn the_seed_decides_the_order_and_every_run_comes_once() {
    let plan = quick(7);
    let runs = plan.order(4);
    assert_eq!(runs, plan.order(4));
    assert_ne!(runs, quick(8).order(4));
    assert_eq!(runs.len(), 3 * 8 * 4);
    for (index, group) in runs.chunks(4).enumerate() {
        assert!(group.iter().all(|run| run.repeat as usize == index / 8 + 1));
        assert!(group.iter().all(|run| run.cell == group[0].cell));
        let mut layers: Vec<usize> = group.iter().map(|run| run.layer).collect();
        layers.sort_unstable();
        assert_eq!(layers, [0, 1, 2, 3], "each layer once per cell and repeat");
    }
    for repeat in runs.chunks(4 * 8) {
        let mut cells: Vec<Cell> = repeat.chunks(4).map(|group| group[0].cell).collect();
        assert_ne!(cells, plan.cells, "cells are shuffled");
        cells.sort();
        cells.dedup();
        assert_eq!(cells.len(), 8, "each cell once per repeat");
    }
    let first_of_each: std::collections::HashSet<usize> = runs.chunks(4).map(|g| g[0].layer).collect();
    assert!(first_of_each.len() > 1, "not always the same layer first");
}

#[test]
fn rows_come_in_the_order_of_the_plan_with_progress() {
    let plan = quick(3);
    let mut targets: Vec<Box<dyn Target>> = vec![Box::new(steady("backing")), Box::new(steady("export"))];
    let mut finished = Vec::new();
    let diagnosis = measure(
        &plan,
        &mut targets,
        Start::Fresh(sample::environment()),
        &AtomicBool::new(false),
        &mut |progress| {
            if let Progress::Finished { done, total, row, so_far } = progress {
                assert!(so_far.interrupted && so_far.rows.last() == Some(row));
                finished.push((done, total, row.layer.clone()));
            }
        },
    )
    .unwrap();
    assert!(!diagnosis.interrupted);
    assert_eq!(diagnosis.rows.len(), diagnosis.planned_runs());
    assert_eq!(finished.len(), 48);
    assert_eq!(finished[47].0, 48);
    for (row, run) in diagnosis.rows.iter().zip(plan.order(2)) {
        assert_eq!(row.layer, ["backing", "export"][run.layer]);
        assert_eq!((row.cell, row.repeat), (run.cell, run.repeat));
    }
}

#[test]
fn failures_and_refusals_are_rows_and_the_rest_goes_on() {
    let broken = Steady { fails: Some(TargetError::Failed("refused".into())), ..steady("export") };
    let shallow = Steady { refuses_depth: Some(32), ..steady("backing") };
    let nan = Steady { latency_ns: f64::NAN, ..steady("accel") };
    let diagnosis = go(&quick(1), vec![shallow, nan, broken], &AtomicBool::new(false)).unwrap();
    assert_eq!(diagnosis.rows.len(), 72);
    for row in &diagnosis.rows {
        match (row.layer.as_str(), row.cell.queue_depth) {
            ("backing", 1) => assert!(matches!(row.outcome, RunOutcome::Measured(_))),
            ("backing", _) => assert_eq!(row.outcome, RunOutcome::Skipped("no depth 32 here".into())),
            ("export", _) => assert_eq!(row.outcome, RunOutcome::Failed("refused".into())),
            _ => assert!(matches!(&row.outcome, RunOutcome::Failed(why) if why.contains("not finite"))),
        }
    }
    let text = diagnosis.to_json().unwrap();
    assert_eq!(Diagnosis::from_json(&text).unwrap(), diagnosis);
}

#[test]
fn an_interruption_leaves_a_marked_partial_result() {
    let stopped = go(&quick(1), vec![steady("backing")], &AtomicBool::new(true)).unwrap();
    assert!(stopped.interrupted && stopped.rows.is_empty());

    let stop = AtomicBool::new(false);
    let mut targets: Vec<Box<dyn Target>> = vec![Box::new(steady("backing"))];
    let partial =
        measure(&quick(1), &mut targets, Start::Fresh(sample::environment()), &stop, &mut |progress| {
            if matches!(progress, Progress::Finished { done: 5, .. }) {
                stop.store(true, Ordering::Relaxed);
            }
        })
        .unwrap();
    assert!(partial.interrupted);
    assert_eq!(partial.rows.len(), 5);

    let ended = Steady { fails: Some(TargetError::Interrupted), ..steady("backing") };
    let diagnosis = go(&quick(1), vec![ended], &AtomicBool::new(false)).unwrap();
    assert!(diagnosis.interrupted && diagnosis.rows.is_empty());
}

#[test]
fn plans_that_make_no_sense_are_refused() {
    let never = AtomicBool::new(false);
    let refused = |plan: Plan, targets| go(&plan, targets, &never).unwrap_err();
    let plan = quick(1);
    assert_eq!(refused(plan.clone(), vec![]), PlanError::Empty("layers"));
    assert_eq!(refused(Plan { cells: vec![], ..plan.clone() }, vec![steady("a")]), PlanError::Empty("cells"));
    assert_eq!(refused(Plan { repeats: 0, ..plan.clone() }, vec![steady("a")]), PlanError::Repeats(0));
    let twice = Plan { cells: vec![plan.cells[0]; 2], ..plan.clone() };
    assert!(matches!(refused(twice, vec![steady("a")]), PlanError::Cell { .. }));
    let idle = Plan { cells: vec![Cell { queue_depth: 0, ..plan.cells[0] }], ..plan.clone() };
    assert!(matches!(refused(idle, vec![steady("a")]), PlanError::Cell { .. }));
    assert!(matches!(refused(plan.clone(), vec![steady("a"), steady("a")]), PlanError::Layers(_)));
    let orphan = Steady { position: Position::AlternativeTo("b".into()), ..steady("a") };
    assert!(matches!(refused(plan, vec![orphan]), PlanError::Layers(_)));
}

/// A layer whose latency is drawn anew each time, up to so much off.
struct Scattered {
    name: &'static str,
    latency_ns: f64,
    share: f64,
    random: Rng,
    runs: usize,
}

impl Target for Scattered {
    fn name(&self) -> &str {
        self.name
    }
    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        self.runs += 1;
        let off = self.share * (2.0 * self.random.f64() - 1.0);
        // Far from the other layer at depth 1, near it at greater depth.
        let far = if cell.queue_depth == 1 && self.name == "export" { 2.0 } else { 1.0 };
        Ok(sample::measurement(cell, far * self.latency_ns * (1.0 + off)))
    }
}

fn scattered(share: f64, extra_runs: usize) -> Diagnosis {
    let layer = |name, latency_ns, share, seed| {
        let random = Rng::with_seed(seed);
        Box::new(Scattered { name, latency_ns, share, random, runs: 0 }) as Box<dyn Target>
    };
    let mut targets = vec![layer("backing", 50e3, 0.002, 1), layer("export", 56e3, share, 2)];
    let plan = Plan { extra_runs, follow_ups: 0, ..Plan::of(Tier::Quick.cells(), 9) };
    let start = Start::Fresh(sample::environment());
    measure(&plan, &mut targets, start, &AtomicBool::new(false), &mut |_| {}).unwrap()
}

#[test]
fn steps_that_cannot_be_told_get_more_repeats_and_others_do_not() {
    assert_eq!(scattered(0.002, usize::MAX).rows.len(), 80);
    let open = |diagnosis: &Diagnosis| {
        let steps = find(diagnosis).compared.steps;
        steps.iter().filter(|step| step.judgement == Judgement::Inconclusive).count()
    };
    let (without, with) = (scattered(0.08, 0), scattered(0.08, usize::MAX));
    assert_eq!(without.rows.len(), 80);
    assert!((81..=160).contains(&with.rows.len()), "{}", with.rows.len());
    assert!(open(&with) < open(&without), "{} of {}", open(&with), open(&without));
    let shallow = with.rows.iter().filter(|row| row.cell.queue_depth == 1);
    assert_eq!(shallow.count(), 40, "nothing to gain there");
    assert!(scattered(0.08, 3).rows.len() <= 83);
}

#[test]
fn an_interrupted_measurement_is_gone_on_with() {
    let whole = go(&quick(1), vec![steady("backing"), steady("export")], &AtomicBool::new(false)).unwrap();
    let mut partial = whole.clone();
    partial.rows.truncate(11);
    partial.interrupted = true;
    partial.rows[4].outcome = RunOutcome::Failed("connection refused".into());
    let resume = |earlier: &Diagnosis, plan: &Plan| {
        let mut targets: Vec<Box<dyn Target>> = vec![Box::new(steady("backing")), Box::new(steady("export"))];
        let start = Start::Resume(earlier.clone());
        let mut runs = 0;
        measure(plan, &mut targets, start, &AtomicBool::new(false), &mut |progress| {
            runs += usize::from(matches!(progress, Progress::Finished { .. }));
        })
        .map(|diagnosis| (diagnosis, runs))
    };
    let (resumed, runs) = resume(&partial, &quick(1)).unwrap();
    assert_eq!((resumed.interrupted, resumed.rows.len(), runs), (false, 48, 48 - 10));
    let sorted = |diagnosis: &Diagnosis| {
        let mut rows: Vec<String> = diagnosis.rows.iter().map(|row| format!("{row:?}")).collect();
        rows.sort();
        rows
    };
    assert_eq!(sorted(&resumed), sorted(&whole));
    assert_eq!(resume(&partial, &quick(2)).unwrap_err(), PlanError::Resume("it has another seed"));
    let other = Plan { cells: Tier::Quick.cells()[..2].to_vec(), ..quick(1) };
    assert!(matches!(resume(&partial, &other), Err(PlanError::Resume(_))));
    let mut layers = partial;
    layers.layers[0].name = "other".into();
    assert!(matches!(resume(&layers, &quick(1)), Err(PlanError::Resume(_))));
}
