//! Many cases together: planted faults, named causes, and counts; and the file that keeps them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;

use super::case::{Case, Judged, word_of};
use super::plant::Plant;
use crate::LabError;

/// The number of times that each cause was named, by planted fault, and a summary.
#[must_use]
pub fn matrix(cases: &[Case]) -> String {
    let mut rows: BTreeMap<Plant, BTreeMap<&str, usize>> = BTreeMap::new();
    for case in cases {
        *rows.entry(case.planted).or_default().entry(&case.named).or_default() += 1;
    }
    let mut columns: Vec<String> = Plant::ALL.iter().map(|plant| word_of(plant.cause())).collect();
    // Two plants have none.
    columns.dedup();
    for case in cases {
        // Causes that are never planted can be named, too.
        if !columns.contains(&case.named) {
            columns.push(case.named.clone());
        }
    }
    columns.retain(|name| cases.iter().any(|case| case.named == *name));
    let mut text = format!("{:<15}", "planted");
    columns.iter().for_each(|name| text.push_str(&format!("  {name}")));
    text.push_str("  right  inconclusive  wrong");
    for (plant, named) in &rows {
        text.push_str(&format!("\n{plant:<15}"));
        for name in &columns {
            let right = if *name == word_of(plant.cause()) { "*" } else { "" };
            let count = named.get(name.as_str()).map_or("·".to_owned(), |count| format!("{count}{right}"));
            text.push_str(&format!("  {count:>width$}", width = name.len()));
        }
        let count = |judged| count(cases, *plant, judged);
        let (right, open, wrong) = (count(Judged::Right), count(Judged::Inconclusive), count(Judged::Wrong));
        text.push_str(&format!("  {right:>5}  {open:>12}  {wrong:>5}"));
    }
    text.push('\n');
    text.push_str(&summary(cases));
    text
}

fn count(cases: &[Case], plant: Plant, judged: Judged) -> usize {
    cases.iter().filter(|case| case.planted == plant && case.judged == judged).count()
}

fn summary(cases: &[Case]) -> String {
    let of = |judged| cases.iter().filter(|case| case.judged == judged).count();
    let healthy = |case: &&Case| case.planted.cause().is_none();
    let accused = |case: &&Case| case.judged == Judged::Wrong;
    format!(
        "{} cases: {} right (cause * and layer), {} inconclusive, {} wrong; healthy stacks falsely accused: {} of {}",
        cases.len(),
        of(Judged::Right),
        of(Judged::Inconclusive),
        of(Judged::Wrong),
        cases.iter().filter(healthy).filter(accused).count(),
        cases.iter().filter(healthy).count()
    )
}

/// Nothing is taken for something else, and each fault is found in more than half of its cases.
#[must_use]
pub fn is_good(cases: &[Case]) -> bool {
    let planted = |plant: Plant| cases.iter().filter(move |case| case.planted == plant).count();
    cases.iter().all(|case| case.judged != Judged::Wrong)
        && Plant::ALL
            .iter()
            .all(|plant| planted(*plant) == 0 || 2 * count(cases, *plant, Judged::Right) > planted(*plant))
}

/// A file of cases, one JSON object a line, so that an interrupted run keeps its results.
#[derive(Debug)]
pub struct Kept {
    file: File,
}

impl Kept {
    /// Opens it, or makes it; with the cases that are in it. A last line that was cut short is cut off.
    ///
    /// # Errors
    /// It cannot be read or written, or holds something else.
    pub fn open(path: &Path) -> Result<(Kept, Vec<Case>), LabError> {
        let failed = || LabError::system(format!("keeping cases in {}", path.display()));
        let mut options = OpenOptions::new();
        let file = options.create(true).append(true).open(path).map_err(failed())?;
        let text = fs::read_to_string(path).map_err(failed())?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).map_err(failed())?;
        let case = |(number, line)| {
            serde_json::from_str(line).map_err(|error: serde_json::Error| {
                LabError::Invalid(format!("{}, line {}: not a case: {error}", path.display(), number + 1))
            })
        };
        let cases = text[..whole].lines().enumerate().map(case).collect::<Result<_, _>>()?;
        Ok((Kept { file }, cases))
    }

    /// Adds a case; it is with the operating system when this returns.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&mut self, case: &Case) -> Result<(), LabError> {
        let mut line = serde_json::to_string(case).expect("a case holds nothing that JSON cannot");
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(LabError::system("keeping a case"))
    }
}

#[cfg(test)]
mod tests {
    use weir_diagnose::hypothesis::Cause;

    use super::*;

    fn case(planted: Plant, named: Option<Cause>, layer: Option<&str>) -> Case {
        let (named, layer) = (word_of(named), layer.map(str::to_owned));
        Case {
            judged: Judged::of(planted, &named, layer.as_deref(), "likely"),
            planted,
            seed: 1,
            named,
            layer,
            grade: "likely".into(),
            headline: String::new(),
            suspicions: Vec::new(),
            seconds: 1.0,
            load_average: 0.0,
        }
    }

    #[test]
    fn the_matrix_shows_what_was_taken_for_what() {
        let cases = [
            case(Plant::Nothing, None, None),
            case(Plant::OrderLost, Some(Cause::ArrivalOrder), Some("accel write-through")),
            case(Plant::OrderLost, None, None),
            case(Plant::LongLink, Some(Cause::LinkBandwidth), Some("accel write-back+1")),
        ];
        let expected = "planted          none  arrival_order  link_bandwidth  right  inconclusive  wrong\n\
                        nothing            1*              ·               ·      1             0      0\n\
                        order-lost          1             1*               ·      1             1      0\n\
                        long-link           ·              ·               1      0             0      1\n\
                        4 cases: 2 right (cause * and layer), 1 inconclusive, 1 wrong; healthy stacks falsely accused: 0 of 1";
        assert_eq!(matrix(&cases), expected);
    }

    #[test]
    fn the_right_cause_at_the_wrong_layer_is_wrong() {
        let judged = |layer| case(Plant::Throttled, Some(Cause::Throttled), layer).judged;
        assert_eq!(judged(Some("backing")), Judged::Right);
        assert_eq!(judged(Some("nbd unix")), Judged::Wrong);
        assert_eq!(judged(None), Judged::Wrong);
        assert_eq!(case(Plant::BusyNode, Some(Cause::Processor), None).judged, Judged::Right);
        assert_eq!(case(Plant::Nothing, Some(Cause::Processor), None).judged, Judged::Wrong);
    }

    #[test]
    fn over_slow_storage_no_step_may_be_named_either() {
        let judged = |named, grade| Judged::of(Plant::Healthy, &word_of(named), None, grade);
        assert_eq!(judged(None, "no_bottleneck_found"), Judged::Right);
        assert_eq!(judged(None, "inconclusive"), Judged::Inconclusive);
        assert_eq!(judged(None, "likely"), Judged::Wrong);
        assert_eq!(judged(Some(Cause::Throttled), "inconclusive"), Judged::Wrong);
    }

    #[test]
    fn good_is_no_wrong_one_and_each_fault_found_more_often_than_not() {
        let right = || case(Plant::SmallTier, Some(Cause::TierExhausted), Some("backing"));
        let open = || case(Plant::SmallTier, None, None);
        assert!(is_good(&[right(), right(), open()]));
        assert!(!is_good(&[right(), open()]));
        assert!(!is_good(&[right(), right(), case(Plant::Nothing, Some(Cause::Generator), None)]));
    }

    #[test]
    fn cases_are_kept_and_a_torn_line_is_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cases.jsonl");
        let (mut kept, none) = Kept::open(&path).unwrap();
        assert_eq!(none, []);
        let cases = [case(Plant::Nothing, None, None), case(Plant::LongLink, None, None)];
        cases.iter().for_each(|case| kept.keep(case).unwrap());
        kept.file.write_all(b"{\"planted\":").unwrap();
        let (mut kept, found) = Kept::open(&path).unwrap();
        assert_eq!(found, cases);
        kept.keep(&cases[0]).unwrap();
        assert_eq!(Kept::open(&path).unwrap().1.len(), 3);
        fs::write(&path, "{}\n").unwrap();
        assert!(Kept::open(&path).unwrap_err().to_string().contains("line 1"));
    }
}
