//! Results as text and JSON.

use std::io::Write;

use serde_json::{Value, json};
use weir_sim::{Bug, Counts, FAULTS, FaultEntry, Finding, Run, Summary};

use crate::cli::Output;

/// Most violations in a text report; JSON has all.
const MOST_SHOWN: usize = 10;

/// One replayed seed.
pub fn run(out: &mut impl Write, seed: u64, run: &Run) {
    let verdict = match &run.violation {
        None => "all promises held".to_owned(),
        Some(violation) => format!("VIOLATION {violation}"),
    };
    // The reader may close the pipe.
    let _ = writeln!(out, "seed {seed}, {:.1} s virtual: {verdict}", seconds(&run.counts));
}

fn seconds(counts: &Counts) -> f64 {
    counts.virtual_time.as_secs_f64()
}

/// Many seeds.
pub fn summary(replay: &str, summary: &Summary, bug: Option<Bug>, output: Output) {
    match output {
        Output::Json => println!("{:#}", summary_json(summary)),
        Output::Text => summary_text(replay, summary, bug),
    }
}

fn summary_json(summary: &Summary) -> Value {
    let counts = &summary.counts;
    let faults: serde_json::Map<String, Value> =
        FAULTS.iter().map(|entry| (entry.name.into(), counts.faults[entry.fault as usize].into())).collect();
    let violations: Vec<Value> = summary
        .violations
        .iter()
        .map(|(seed, violation)| json!({ "seed": seed, "violation": violation }))
        .collect();
    json!({
        "seeds": summary.seeds,
        "virtual_hours": seconds(counts) / 3600.0,
        "steps": counts.steps,
        "checks": counts.checks,
        "answers": counts.answers,
        "reads_checked": counts.reads,
        "takeovers": counts.takeovers,
        "checkpoints": counts.checkpoints,
        "refusals": counts.refusals,
        "recoveries": counts.recoveries,
        "damaged_logs": counts.damaged,
        "longest_convergence_seconds": counts.longest_convergence.as_secs_f64(),
        "faults": faults,
        "violations": violations,
    })
}

fn summary_text(replay: &str, summary: &Summary, bug: Option<Bug>) {
    let counts = &summary.counts;
    println!("seeds                {:>14}", summary.seeds);
    println!("virtual hours        {:>14.1}", seconds(counts) / 3600.0);
    for (what, number) in [
        ("steps", counts.steps),
        ("checks", counts.checks),
        ("answers to guests", counts.answers),
        ("reads in histories", counts.reads),
        ("takeovers", counts.takeovers),
        ("checkpoints", counts.checkpoints),
        ("refused messages and connections", counts.refusals),
        ("logs recovered", counts.recoveries),
        ("logs found damaged", counts.damaged),
    ]
    .into_iter()
    .chain(counts.states.named().into_iter().filter(|(_, number)| *number > 0))
    {
        println!("{what:<21}{number:>14}");
    }
    println!("longest convergence  {:>12.2} s", counts.longest_convergence.as_secs_f64());
    println!("faults");
    for entry in &FAULTS {
        println!("  {:<19}{:>14}", entry.name, counts.faults[entry.fault as usize]);
    }
    println!("violations           {:>14}", summary.violations.len());
    let planted = bug.map(|bug| format!(" --bug {}", bug.name())).unwrap_or_default();
    for (seed, violation) in summary.violations.iter().take(MOST_SHOWN) {
        println!("  {replay} --seed {seed}{planted}: {violation}");
    }
}

/// The header before the planted bugs.
pub fn findings_head(seeds: u64, output: Output) {
    if output == Output::Text {
        println!("{seeds} seeds for each bug");
        println!("{:<28} {:>8} {:>10}  first violation", "planted bug", "found by", "first seed");
    }
}

/// One planted bug and the seeds that found it.
pub fn finding(finding: &Finding, output: Output) {
    if output == Output::Json {
        return;
    }
    let Finding { bug, found, first } = finding;
    let (seed, violation) = match first {
        Some((seed, violation)) => (seed.to_string(), violation.as_str()),
        None => ("-".into(), "NOT FOUND"),
    };
    println!("{:<28} {found:>8} {seed:>10}  {violation}", bug.name());
}

/// The summary after them.
pub fn findings_foot(findings: &[Finding], seeds: u64, output: Output) {
    if output == Output::Text {
        let found = findings.iter().filter(|finding| finding.found > 0).count();
        return println!("{found} of {} found", findings.len());
    }
    let entry = |finding: &Finding| {
        json!({
            "bug": finding.bug.name(),
            "seeds": seeds,
            "found_by": finding.found,
            "first_seed": finding.first.as_ref().map(|first| first.0),
            "violation": finding.first.as_ref().map(|first| &first.1),
        })
    };
    println!("{:#}", Value::from(findings.iter().map(entry).collect::<Vec<_>>()));
}

/// The fault atlas.
pub fn atlas(atlas: &[FaultEntry]) {
    for FaultEntry { name, what, covered_by, limits, .. } in atlas {
        println!("{name}\n  what     {what}\n  covered  {covered_by}\n  limits   {limits}\n");
    }
}
