//! Published numbers, and what must be said of them.
#![allow(clippy::unwrap_used)]

use weir_diagnose::check::Kind;
use weir_diagnose::comparison::Why;
use weir_diagnose::hypothesis::{Cause, Standing};
use weir_diagnose::{Diagnosis, Findings, Grade, Import, Judgement, find, report, table};

const CLUSTER_SHARED_VOLUME: &str = include_str!("golden/cluster-shared-volume.csv");

fn read(table: &str) -> (Diagnosis, Findings) {
    let import = Import::default().csv("cluster-shared-volume.csv", table).unwrap();
    let diagnosis = import.into_diagnosis("cluster shared volume", ["weir", "diagnose"]).unwrap();
    let findings = find(&diagnosis);
    (diagnosis, findings)
}

/// The table with further rows.
fn with(rows: &str) -> (Diagnosis, Findings) {
    read(&format!("{CLUSTER_SHARED_VOLUME}{rows}"))
}

#[test]
fn golden_a_row_that_cannot_be_is_rejected_and_the_number_that_could_be_is_proposed() {
    let (diagnosis, findings) = read(CLUSTER_SHARED_VOLUME);
    assert_eq!((diagnosis.layers.len(), diagnosis.cells.len(), diagnosis.rows.len()), (6, 4, 24));
    let [rejected] = findings.compared.unused.as_slice() else { panic!("{:?}", findings.compared.unused) };
    let row = &diagnosis.rows[rejected.row];
    assert_eq!(
        (row.layer.as_str(), row.cell.to_string()),
        ("direct on another node", "8K sequential write, QD 8".into())
    );
    assert_eq!(rejected.why, Why::Objection(Kind::Rates));
    assert_eq!(rejected.proposed_iops, Some(17_788.0));
    assert_eq!(
        rejected.reason,
        "size × rate: 177,880 IOPS of 8K are 1390 MiB/s, but 138 MiB/s are given; 17,788 IOPS would agree (a digit too many)"
    );
    // Proposed, not used: the layer has no point there.
    assert!(findings.compared.point(5, &row.cell).is_none());
    assert_eq!(findings.compared.points.len(), 23);
}

#[test]
fn golden_sequential_write_is_singled_out_from_the_file_share_upward() {
    let (diagnosis, findings) = read(CLUSTER_SHARED_VOLUME);
    let verdict = &findings.verdict;
    assert_eq!(
        verdict.headline,
        "Inconclusive, from single runs: file share does 5 % of the IOPS of local disk at QD 8 (8K sequential write alone: 17.3k → 810)."
    );
    assert_eq!(verdict.step.map(|step| (step.from, step.to)), Some((0, 1)));
    let upward = "From file share upward every layer's median is below that of local disk: 8K sequential write, QD 8: \
                  810, 5.67k, 835, 820 IOPS against 17.3k.";
    assert!(verdict.evidence.iter().any(|line| line == upward), "{:#?}", verdict.evidence);
    for cell in diagnosis.cells.iter().filter(|cell| cell.to_string() != "8K sequential write, QD 8") {
        assert!(
            findings.compared.steps.iter().filter(|step| step.cell == *cell).all(|step| step.seems_even()),
            "{cell}"
        );
    }
}

#[test]
fn golden_arrival_order_is_inferred_from_depth_and_latency_and_the_two_thread_run_is_asked_for() {
    let (_, findings) = read(CLUSTER_SHARED_VOLUME);
    let [guess] = findings.verdict.hypotheses.as_slice() else { panic!("{:?}", findings.verdict) };
    assert_eq!((guess.cause, guess.standing), (Cause::ArrivalOrder, Standing::Open));
    let grounds = guess.grounds.join("\n");
    assert!(grounds.contains("the queue depth at local disk is unchanged, 8.0 of 8 requests"), "{grounds}");
    assert!(grounds.contains("the latency there rises from 462 µs to 9.87 ms"), "{grounds}");
    assert!(
        grounds.contains("sequential read 19,906 → 19,821 IOPS, random write 273 → 272 IOPS"),
        "{grounds}"
    );
    assert!(
        guess.run.contains("two-thread run: 8K sequential write, QD 8, 2 threads at local disk"),
        "{}",
        guess.run
    );
    assert!(findings.verdict.to_improve.contains(&guess.run));
}

#[test]
fn golden_single_published_numbers_are_a_suspicion_and_what_would_confirm_is_said() {
    let (_, findings) = read(CLUSTER_SHARED_VOLUME);
    assert_eq!(findings.verdict.grade, Grade::Inconclusive);
    assert!(
        findings
            .compared
            .steps
            .iter()
            .all(|step| step.judgement == Judgement::Untested && step.interval.is_none())
    );
    assert!(findings.verdict.to_improve[0].contains("5 repeats on each side would confirm or reject it"));
}

#[test]
fn golden_the_two_thread_run_decides_when_it_is_there() {
    let head = CLUSTER_SHARED_VOLUME.replace("iops,mib_per_s\n", "iops,mib_per_s,threads\n");
    let threads: String = head
        .lines()
        .map(|line| if line.contains(",8,") { format!("{line},1\n") } else { format!("{line}\n") })
        .collect();
    let standing = |iops: u32| {
        let (_, findings) = read(&format!("{threads}local disk,8K,write,8,{iops},,2\n"));
        let guess = &findings.verdict.hypotheses[0];
        (guess.standing, findings.verdict.to_improve.iter().any(|line| line.contains("two-thread")))
    };
    assert_eq!(standing(845), (Standing::Supported, false));
    assert_eq!(standing(16_900), (Standing::Rejected, false));
}

#[test]
fn golden_with_five_repeats_the_same_table_is_confirmed() {
    // The same numbers again, up to a percent and a half off.
    let rows = CLUSTER_SHARED_VOLUME.lines().filter(|line| line.contains(",8,") && !line.contains("177880"));
    let mut more = String::new();
    for (repeat, off) in [0.99, 1.005, 1.015, 0.995].into_iter().enumerate() {
        for (place, row) in rows.clone().enumerate() {
            let (left, iops) = row.trim_end_matches(',').rsplit_once(',').unwrap();
            let sign = if (place + repeat) % 2 == 0 { off } else { 2.0 - off };
            more.push_str(&format!("{left},{:.0},\n", iops.parse::<f64>().unwrap() * sign));
        }
    }
    let (_, findings) = with(&more);
    assert_eq!(findings.verdict.grade, Grade::Confirmed, "{:#?}", findings.verdict);
    let random =
        |judgement| findings.compared.steps.iter().filter(|step| step.judgement == judgement).count();
    // Three steps of sequential write are beyond the margin: two losses, one gain.
    assert_eq!((random(Judgement::Slower), random(Judgement::Faster)), (2, 1));
    assert_eq!(random(Judgement::Same), findings.compared.steps.len() - 3);
}

#[test]
fn golden_table_and_report_show_grade_hypothesis_and_the_rejected_row() {
    let (diagnosis, findings) = read(CLUSTER_SHARED_VOLUME);
    let text = table::render(&diagnosis, &findings);
    assert!(text == include_str!("golden/cluster-shared-volume.txt"), "the text changed:\n{text}");
    let html = report::html(&diagnosis, &findings).unwrap();
    for words in ["inconclusive", "arrival order", "17,788 IOPS would agree", "cluster-shared-volume.csv"] {
        assert!(html.contains(words), "{words}");
    }
    let json = report::json(&diagnosis, &findings).unwrap();
    assert!(json.contains(r#""proposed_iops": 17788.0"#) && json.contains(r#""grade": "inconclusive""#));
    assert_eq!(Diagnosis::from_json(&json).unwrap(), diagnosis);
}
