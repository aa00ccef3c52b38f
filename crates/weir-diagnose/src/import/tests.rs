//! Files as people and programs write them, and files that are broken.

use super::*;
use crate::finding::find;
use proptest::prelude::*;

const FIO: &str = include_str!("../../tests/data/fio-3.33.json");
const DISKSPD: &str = include_str!("../../tests/data/diskspd.xml");

fn table(text: &str) -> Result<Diagnosis, String> {
    let import = Import::default().csv("t.csv", text).map_err(|error| error.to_string())?;
    import.into_diagnosis("test", ["weir"]).map_err(|error| error.to_string())
}

fn measured(row: &Row) -> &Measurement {
    let RunOutcome::Measured(measurement) = &row.outcome else { panic!("{row:?}") };
    measurement
}

#[test]
fn a_hand_typed_table_becomes_rows() {
    let diagnosis = table(
        "# from the lab book\n\
         Layer, block, access, queue_depth, iops, mb_per_s, mean_us, instead_of\n\
         disk, 4K, randread, 8, 359, 1.47, 22300,\n\
         disk, 4096, random read, 8, 361, , ,\n\
         cache, 4KiB, rand-read, 8, 9000, , ,\n\
         no cache, 4k, randread, 8, 300, , , cache\n\
         disk, 64K, randrw:70, 4, 100, , ,\n",
    )
    .unwrap();
    let names: Vec<&str> = diagnosis.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["disk", "cache", "no cache"]);
    assert_eq!(diagnosis.layers[2].position, Position::AlternativeTo("cache".into()));
    let cells: Vec<String> = diagnosis.cells.iter().map(Cell::to_string).collect();
    assert_eq!(cells, ["4K random read, QD 8", "64K random 70/30, QD 4"]);
    assert_eq!((diagnosis.rows[0].repeat, diagnosis.rows[1].repeat, diagnosis.repeats), (1, 2, 2));
    let row = measured(&diagnosis.rows[0]);
    assert!((row.mib_per_s.unwrap() - 1.47 / 1.048_576).abs() < 1e-9);
    assert!((row.mib_per_s_step - 0.01 / 1.048_576).abs() < 1e-9);
    assert_eq!(row.mean_ns, Some(22_300e3));
    assert!(find(&diagnosis).compared.unused.is_empty());
    let text = diagnosis.to_json().unwrap();
    assert_eq!(Diagnosis::from_json(&text).unwrap(), diagnosis);
}

#[test]
fn a_broken_table_is_told_where_and_how() {
    let head = "layer,block,access,queue_depth,iops,mib_per_s,mb_per_s,threads\n";
    let with = |row: &str| table(&format!("{head}{row}\n")).unwrap_err();
    for (row, says) in [
        ("a,8X,read,8,1,,,", "line 2: block"),
        ("a,0,read,8,1,,,", "a block of 0 bytes"),
        ("a,1000,read,8,1,,,", "multiple of 512"),
        ("a,8GiB,read,8,1,,,", "too large"),
        ("a,2GiB,read,8,1,,,", "multiple of 512, at most"),
        ("a,8K,trim,8,1,,,", "line 2: access \"trim\""),
        ("a,8K,randrw:170,8,1,,,", "percentage"),
        ("a,8K,read,0,1,,,", "queue depth 0"),
        ("a,8K,read,4,1,,,8", "queue depth 4 with 8 threads"),
        ("a,8K,read,-8,1,,,", "whole number"),
        ("a,8K,read,8,,,,", "iops is empty"),
        ("a,8K,read,8,fast,,,", "iops is \"fast\""),
        ("a,8K,read,8,NaN,,,", "iops is \"NaN\""),
        ("a,8K,read,8,1,1,1,", "both given"),
        (",8K,read,8,1,,,", "layer is empty"),
        ("a,8K,read,8,1", "line 2"),
        ("", "there are no rows"),
    ] {
        let said = with(row);
        assert!(said.starts_with("t.csv") && said.contains(says), "{row}: {said}");
    }
    assert!(table("layer,block,access,queue_depth\n").unwrap_err().contains("\"iops\" is missing"));
    assert!(table("layer,colour\n").unwrap_err().contains("\"colour\" is not known"));
    assert!(table("layer,layer\n").unwrap_err().contains("there twice"));
    assert!(table("").unwrap_err().contains("missing"));
    let orphan = "layer,block,access,queue_depth,iops,instead_of\na,8K,read,8,1,b\n";
    assert!(table(orphan).unwrap_err().contains("alternative to \"b\""));
}

/// Comparing takes time by the square of the loads: a file of a hundred thousand is refused, and rows of few are not.
#[test]
fn a_table_of_too_many_loads_is_refused() {
    let rows = |loads: usize, repeats: usize| {
        let mut text = "layer,block,access,queue_depth,iops\n".to_owned();
        for row in 0..loads * repeats {
            let (layer, depth) = (row % loads % 4, row % loads / 4 + 1);
            text += &format!("l{layer},4K,read,{depth},{}\n", 1000 + row);
        }
        table(&text)
    };
    let said = rows(20_000, 1).unwrap_err();
    assert!(said.contains("line 10002: more than 10000 different loads of layers"), "{said}");
    let diagnosis = rows(2_000, 40).unwrap();
    assert_eq!((diagnosis.cells.len(), diagnosis.rows.len(), diagnosis.repeats), (500, 80_000, 40));
    assert_eq!(find(&diagnosis).compared.points.len(), 2_000);
}

/// `fio --output-format=json` of three jobs one after the other in /dev/shm: as it was printed.
#[test]
fn fio_json_becomes_rows_that_pass_the_checks() {
    let import = Import::default().layer("ram", "a.json", FIO).unwrap();
    let import = import.layer("ram", "b.json", &format!("fio: a note before\n{FIO}")).unwrap();
    let diagnosis = import.into_diagnosis("test", ["weir"]).unwrap();
    let cells: Vec<String> = diagnosis.cells.iter().map(Cell::to_string).collect();
    assert_eq!(
        cells,
        ["8K random 70/30, QD 8", "64K sequential write, QD 4, 2 threads", "4K random read, QD 1"]
    );
    assert_eq!((diagnosis.rows.len(), diagnosis.repeats), (6, 2));
    let findings = find(&diagnosis);
    assert!(findings.compared.unused.is_empty(), "{:?}", findings.compared.unused);
    let shallow = measured(&diagnosis.rows[2]);
    assert!(shallow.p50_ns.is_some() && shallow.p99_9_ns.is_some() && shallow.bytes.is_some());
    assert_eq!(diagnosis.environment.imported_from, ["a.json", "b.json"]);
}

/// With `--output-format=json+` each latency has its bins.
#[test]
fn fio_json_with_bins_has_distributions() {
    let with_bins = |bins: serde_json::Value| {
        let mut document: serde_json::Value = serde_json::from_str(FIO).unwrap();
        let jobs = document["jobs"].as_array_mut().unwrap();
        for job in jobs {
            for kind in ["read", "write"] {
                for latency in ["lat_ns", "clat_ns"] {
                    job[kind][latency]["bins"] = bins.clone();
                }
            }
        }
        let import = Import::default().layer("ram", "b.json", &document.to_string()).unwrap();
        let diagnosis = import.into_diagnosis("test", ["weir"]).unwrap();
        diagnosis.rows.iter().map(|row| measured(row).buckets_ns.clone()).collect::<Vec<_>>()
    };
    let found = with_bins(serde_json::json!({"10432": 90, "9920": 0, "2048": 10}));
    assert!(found.iter().all(|buckets| [100, 200].contains(&buckets.count())), "{found:?}");
    assert!(
        found.iter().all(|buckets| buckets.percentile(10.0) == 2048 && buckets.percentile(50.0) == 10432)
    );
    // No sum of these is a number.
    let found = with_bins(serde_json::json!({"1": u64::MAX, "2": u64::MAX}));
    assert!(found.iter().all(|buckets| buckets.is_empty()));
}

/// fio gives the number of an error, not how many I/Os had one.
#[test]
fn a_job_of_fio_that_failed_says_why() {
    let mut document: serde_json::Value = serde_json::from_str(FIO).unwrap();
    document["jobs"][0]["error"] = 5.into();
    let import = Import::default().layer("ram", "a.json", &document.to_string()).unwrap();
    let diagnosis = import.into_diagnosis("test", ["weir"]).unwrap();
    assert_eq!(diagnosis.rows[0].outcome, RunOutcome::Failed("fio's job ended with error 5".into()));
    let unused = find(&diagnosis).compared.unused;
    assert_eq!((unused.len(), unused[0].reason.as_str()), (1, "failed: fio's job ended with error 5"));
}

#[test]
fn fio_files_that_say_nothing_about_a_layer_are_refused() {
    let broken = |text: &str| Import::default().layer("a", "a.json", text).unwrap_err().to_string();
    assert!(broken("").contains("neither"));
    assert!(broken("{}").contains("jobs"));
    assert!(broken(&FIO[..FIO.len() / 2]).contains("not fio's JSON"));
    assert!(broken(&FIO.replace("\"groupid\" : 1", "\"groupid\" : 0")).contains("same time"));
    assert!(broken(&FIO.replace("\"randread\"", "\"trim\"")).contains("rw is \"trim\""));
    assert!(broken(&FIO.replace("\"bs\" : \"4k\"", "\"bs\" : \"4k-64k\"")).contains("one block size"));
    assert!(
        broken(&FIO.replace("\"iodepth\" : \"8\"", "\"iodepth\" : \"99999999\"")).contains("queue depth")
    );
    assert!(Import::default().layer("a\nb", "a.json", FIO).unwrap_err().to_string().contains("printable"));
}

#[test]
fn diskspd_xml_becomes_rows_that_pass_the_checks() {
    let diagnosis =
        Import::default().layer("disk", "d.xml", DISKSPD).unwrap().into_diagnosis("test", ["weir"]).unwrap();
    let cells: Vec<String> = diagnosis.cells.iter().map(Cell::to_string).collect();
    assert_eq!(cells, ["8K sequential write, write-through, QD 8, 2 threads", "4K random 70/30, QD 32"]);
    let findings = find(&diagnosis);
    assert!(findings.compared.unused.is_empty(), "{:?}", findings.compared.unused);
    let row = measured(&diagnosis.rows[0]);
    assert_eq!((row.ios, row.bytes), (Some(8_230), Some(8_230 * 8192)));
    assert_eq!((row.mean_ns, row.p99_ns), (Some(9.734e6), Some(19.5e6)));
    assert_eq!(measured(&diagnosis.rows[1]).p50_ns, Some(71.2e6));
}

#[test]
fn diskspd_files_that_say_nothing_about_a_layer_are_refused() {
    let broken = |text: &str| Import::default().layer("a", "d.xml", text).unwrap_err().to_string();
    assert!(broken("<html/>").contains("<html>"));
    assert!(broken("<Results></Results>").contains("<Profile>"));
    assert!(broken(&DISKSPD[..DISKSPD.len() / 2]).contains("not DiskSpd's XML"));
    assert!(broken(&DISKSPD.replace("<TestTimeSeconds>10.01</TestTimeSeconds>", "")).contains("time span 1"));
    assert!(broken(&DISKSPD.replace("<WriteRatio>30<", "<WriteRatio>130<")).contains("above 100"));
    let interrupted = "<Error>The test was interrupted</Error><TestTimeSeconds>10.01";
    assert!(broken(&DISKSPD.replace("<TestTimeSeconds>10.01", interrupted)).contains("DiskSpd says"));
    // The classic entity bomb: refused, not expanded.
    let bomb = format!(
        "<!DOCTYPE r [<!ENTITY a \"{}\"><!ENTITY b \"&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;\">]><Results>&b;</Results>",
        "x".repeat(1000)
    );
    assert!(!broken(&bomb).is_empty());
}

proptest! {
    /// Nothing that a file can hold is a panic.
    #[test]
    fn broken_files_are_errors(at in 0..20_000_usize, len in 0..200_usize, noise in "[ -~\n]{0,40}") {
        for original in [FIO, DISKSPD, "layer,block,access,queue_depth,iops\na,8K,read,8,1\n"] {
            let mut text = original.to_owned();
            let start = (at % text.len()).min(text.len());
            let end = (start + len).min(text.len());
            if text.is_char_boundary(start) && text.is_char_boundary(end) {
                text.replace_range(start..end, &noise);
            }
            for import in [Import::default().layer("a", "f", &text), Import::default().csv("f", &text)] {
                if let Ok(diagnosis) = import.and_then(|import| import.into_diagnosis("t", ["weir"])) {
                    prop_assert!(find(&diagnosis).compared.points.len() + find(&diagnosis).compared.unused.len() > 0);
                }
            }
        }
    }
}
