//! Suspicions: the number that each one predicted, and the number that its run measured.

use crate::finding::Findings;
use weir_report::format;
use weir_report::page::{Cell, Group, Row, Table};

use crate::hypothesis::{Hypothesis, Predicted, Standing};

/// One suspicion.
struct Suspicion {
    /// `✓ confirmed`, `✗ rejected`, `… open`.
    standing: &'static str,
    /// Its colour.
    class: &'static str,
    /// The guess.
    cause: String,
    /// Its grounds, and the prediction.
    grounds: Vec<String>,
    /// The run that decides.
    run: String,
    /// The number that must be seen.
    predicted: String,
    /// The numbers that count as that.
    range: String,
    /// The measurement.
    measured: String,
}

/// All of them: the confirmed ones, the rejected ones, those that are open.
fn suspicions(findings: &Findings) -> Vec<Suspicion> {
    let mut guesses: Vec<&Hypothesis> = findings.verdict.hypotheses.iter().collect();
    guesses.sort_by_key(|guess| match guess.standing {
        Standing::Supported => 0,
        Standing::Rejected => 1,
        Standing::Open => 2,
    });
    guesses.into_iter().map(suspicion).collect()
}

/// The same as a table.
pub fn table(findings: &Findings) -> Table {
    let row = |one: Suspicion| Row {
        name: one.cause,
        note: one.standing.to_owned(),
        note_class: one.class,
        cells: vec![
            Cell { lines: one.grounds, ..Cell::default() },
            Cell { remark: one.range, class: "figure".to_owned(), ..Cell::text(one.predicted) },
            Cell { class: "figure".to_owned(), ..Cell::text(one.measured) },
            Cell::text(one.run),
        ],
        ..Row::default()
    };
    Table {
        class: "suspicions",
        first: "hypothesis".to_owned(),
        groups: vec![Group::of(["grounds", "predicted", "measured", "the run that decides"])],
        rows: suspicions(findings).into_iter().map(row).collect(),
    }
}

fn suspicion(guess: &Hypothesis) -> Suspicion {
    let (standing, class) = match guess.standing {
        Standing::Supported => ("✓ confirmed", "cost-text"),
        Standing::Rejected => ("✗ rejected", "flat-text"),
        Standing::Open => ("… open", "open-text"),
    };
    let number = |value: fn(&Predicted) -> Option<f64>| {
        let number = guess.predicted.as_ref().and_then(|it| Some(with_unit(value(it)?, it.unit)));
        number.unwrap_or_else(|| "–".to_owned())
    };
    Suspicion {
        standing,
        class,
        cause: guess.cause.to_string(),
        grounds: guess.grounds.iter().chain([&guess.prediction]).cloned().collect(),
        run: guess.run.clone(),
        predicted: number(|it| Some(it.value)),
        range: guess.predicted.as_ref().map_or_else(String::new, range),
        measured: number(|it| it.measured),
    }
}

/// The accepted numbers.
fn range(predicted: &Predicted) -> String {
    let end = |value: f64| with_unit(value, predicted.unit);
    match (predicted.least, predicted.most) {
        (least, None) => format!("at least {}", end(least)),
        (least, Some(most)) if least > 0.0 => format!("{} to {}", end(least), end(most)),
        (_, Some(most)) => format!("at most {}", end(most)),
    }
}

fn with_unit(value: f64, unit: &str) -> String {
    match (unit, unit.strip_prefix("share ")) {
        ("ns", _) => format::duration(value),
        (_, Some(of)) => format!("{} {of}", format::percent(value)),
        _ => format!("{} {unit}", format::count(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::hypothesis::Cause;
    use crate::result::{LayerEntry, Position};
    use crate::sample::{self, Numbers};

    /// A layer that gains nothing from a queue gives grounds for one suspicion.
    fn guess(cause: Cause, standing: Standing, measured: Option<f64>) -> Hypothesis {
        let entry = |name: &str| LayerEntry { name: name.into(), position: Position::OnPath };
        let diagnosis = sample::measured(vec![entry("backing"), entry("export")], |layer, cell| {
            let depth = if layer == 1 { f64::from(cell.queue_depth) } else { 1.0 };
            Numbers::steady(100e3 * depth)
        });
        let guesses = find(&diagnosis).verdict.hypotheses;
        let found = guesses.into_iter().find(|guess| guess.cause == Cause::OneInFlight).unwrap();
        let predicted = Predicted { value: 90e3, least: 70e3, most: None, unit: "ns", measured };
        Hypothesis { cause, standing, predicted: Some(predicted), ..found }
    }

    #[test]
    fn confirmed_ones_come_first_and_each_has_both_numbers() {
        let mut findings = find(&sample::write_back());
        findings.verdict.hypotheses = vec![
            guess(Cause::Generator, Standing::Open, None),
            guess(Cause::LinkLatency, Standing::Rejected, Some(12e3)),
            guess(Cause::ArrivalOrder, Standing::Supported, Some(95e3)),
        ];
        let all = suspicions(&findings);
        let words: Vec<_> = all.iter().map(|one| (one.standing, one.measured.as_str())).collect();
        assert_eq!(words, [("✓ confirmed", "95.0 µs"), ("✗ rejected", "12.0 µs"), ("… open", "–")]);
        assert_eq!((all[0].predicted.as_str(), all[0].range.as_str()), ("90.0 µs", "at least 70.0 µs"));
        assert_eq!(all[0].grounds.len(), 2);
    }

    #[test]
    fn numbers_have_the_unit_that_they_were_predicted_in() {
        assert_eq!(with_unit(0.5, "share of the time"), "50 % of the time");
        assert_eq!(with_unit(25_000.0, "IOPS"), "25.0k IOPS");
        let both = Predicted { value: 2.0, least: 1000.0, most: Some(4000.0), unit: "ns", measured: None };
        assert_eq!(range(&both), "1.00 µs to 4.00 µs");
        assert_eq!(range(&Predicted { least: 0.0, ..both }), "at most 4.00 µs");
    }
}
