//! `weir bench` for people and programs: formats, comparisons, and the results of a load that ends early.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use common::{Nbdkit, Place, assert_shape};
use serde_json::Value;

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn every_format_says_the_same() {
    let place = Place::new();
    let line =
        "bench null:64M --rw randrw:50 --bs 4k:60,64k:40 --pattern zipf:1.1 --runtime 100ms --warmup 0s";
    let document = place.parsed(&format!("{line} --format json"));
    assert_eq!(
        (&document["schema"], &document["workload"]["mix"]),
        (&"weir.load/1".into(), &"4KiB:60,64KiB:40".into())
    );
    assert_shape(&document, line);
    let read = &document["kinds"][0];
    let mean = read["bytes"].as_f64().unwrap() / read["ios"].as_f64().unwrap();
    assert!((28_000.0..29_400.0).contains(&mean), "0.6 x 4096 + 0.4 x 65536 is 28672: {mean}");

    let rows = place.ok(&format!("{line} --format csv"));
    assert_eq!((rows.lines().count(), rows.lines().next().unwrap().split(',').next()), (3, Some("version")));
    let metrics = place.ok(&format!("{line} --format prom"));
    assert!(metrics.contains("weir_bench_latency_seconds{") && metrics.contains("quantile=\"0.99999\""));
    let fio = place.parsed(&format!("{line} --format fio"));
    assert!(fio["jobs"][0]["read"]["clat_ns"]["percentile"]["99.900000"].is_u64(), "{fio}");
    let text = place.ok(&format!("{line} --rate 1000 --poisson"));
    assert!(text.contains("from the intended start") && text.contains("from the issue"), "{text}");
    assert!(text.contains("P99.999"));
}

#[test]
fn a_report_is_written_beside_what_is_printed() {
    let place = Place::new();
    let text = place.ok("bench null:64M --rw randrw:50 --runtime 300ms --warmup 100ms --report load.html");
    assert!(text.contains("P99.999"), "{text}");
    let html = std::fs::read_to_string(place.path().join("load.html")).unwrap();
    for words in ["null:64MiB", "randrw:50", "--report load.html", ">measured<", "I/Os per second", "p99.9"] {
        assert!(html.contains(words), "{words}");
    }
    assert!(!html.contains("http:") && !html.contains("https:") && !html.contains("<script"));
    let said = place.fails("bench null --runtime 50ms --warmup 0s --report nowhere/load.html", 1);
    assert!(said.contains("cannot write nowhere/load.html"), "{said}");
}

#[test]
fn jsonl_has_a_line_for_each_second() {
    let place = Place::new();
    let line = "bench null --rate 1000 --runtime 2500ms --warmup 0s --format jsonl";
    let text = place.ok(line);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, intervals) = lines.split_last().unwrap();
    assert!(!intervals.is_empty() && intervals.iter().all(|line| line["type"] == "interval"), "{text}");
    lines.iter().for_each(|json| assert_shape(json, line));
    let iops = intervals[0]["kinds"][0]["iops"].as_f64().unwrap();
    assert!((500.0..1500.0).contains(&iops), "{text}");
    assert!(last["kinds"][0]["ios"].as_u64().unwrap() > 2000 && last["incomplete"].is_null(), "{last}");
}

#[test]
fn a_steady_state_is_waited_for_and_judged() {
    let place = Place::new();
    let line = "bench null --rate 1000 --runtime 100ms --warmup 0s --steady";
    let steady = place.parsed(&format!("{line} --format json"));
    assert_eq!(steady["steady"]["reached"], true, "{}", steady["steady"]);
    assert_shape(&steady, line);
    let text = place.ok(&format!("{line} --max-rounds 2"));
    assert!(text.contains("NOT steady after 2 rounds"), "{text}");
}

#[test]
fn results_are_compared() {
    let place = Place::new();
    for (file, depth) in [("a.json", 1), ("b.json", 32)] {
        let line = format!("bench null --qd {depth} --rate 2000 --runtime 300ms --warmup 0s --format json");
        std::fs::write(place.path().join(file), place.ok(&line)).unwrap();
    }
    let text = place.ok("bench compare a.json b.json");
    assert!(text.contains("p99.999") && text.contains("too few requests"), "{text}");
    assert!(text.contains("not alike: queue_depth: 1 and 32"), "{text}");
    let compared = place.json("bench compare a.json a.json");
    assert_shape(&compared, "bench compare");
    assert_eq!(compared["jobs"][0]["rows"][0]["change"], "same");
    assert_eq!(compared["jobs"][0]["rows"][2]["figure"], "mean_ns");
    std::fs::write(place.path().join("c.json"), "{\"jobs\": []}").unwrap();
    assert!(place.fails("bench compare a.json c.json", 2).contains("c.json: it is not a result"));
    assert!(place.fails("bench compare a.json none.json", 3).contains("none.json"));
}

#[test]
fn an_interrupted_load_keeps_what_it_has_measured() {
    let place = Place::new();
    for sent in ["-INT", "-TERM"] {
        let line = "bench null --rate 1000 --runtime 1h --warmup 0s --format jsonl";
        let mut child = place.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.next().unwrap().unwrap().contains("interval"), "it runs");
        signal(&child, sent);
        let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1));
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("interrupted"), "{said}");
        assert!(last["incomplete"].as_str().unwrap().contains("stopped before its end"), "{last}");
        assert!(last["kinds"][0]["ios"].as_u64().unwrap() > 500, "{last}");
    }
}

#[test]
fn a_target_that_vanishes_or_hangs_does_not_take_the_results_along() {
    let place = Place::new();
    let socket = place.path().join("s");
    for hangs in [false, true] {
        let mut server = Nbdkit::start(&socket, &["memory", "16M"]);
        let line =
            format!("bench nbd+unix:///?socket={} --runtime 1h --warmup 0s --format jsonl", socket.display());
        let mut child = place.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.next().unwrap().unwrap().contains("interval"), "it runs");
        if hangs {
            signal(&server.0, "-STOP");
            signal(&child, "-INT");
        } else {
            server.end();
        }
        let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1));
        let reason = last["incomplete"].as_str().unwrap();
        let expected = if hangs { "did not answer the last requests" } else { "the target failed" };
        assert!(reason.contains(expected), "{reason}");
        assert!(last["kinds"][0]["ios"].as_u64().unwrap() > 100, "{last}");
        server.end();
        std::fs::remove_file(&socket).unwrap();
    }
}

#[test]
fn holes_are_filled_or_said() {
    let place = Place::new();
    let disk = place.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(4 << 20).unwrap();
    let is_full =
        || std::fs::read(&disk).unwrap().chunks(512).all(|sector| sector.iter().any(|&byte| byte != 0));
    let short = "--runtime 100ms --warmup 0s";
    let said = place.ok(&format!("bench disk {short}"));
    assert!(
        said.contains("note:") && said.contains("hole at byte 0") && said.contains("--destroy"),
        "{said}"
    );
    assert!(!is_full(), "a reading load does not write");
    place.ok(&format!("bench disk --rw randwrite --no-prefill --bytes 64k {short}"));
    assert!(!is_full());
    let refused = place.fails(&format!("bench disk --rw randwrite --destroy --prefill-size 1MiB {short}"), 4);
    assert!(refused.contains("4MiB would be filled") && refused.contains("--no-prefill"), "{refused}");
    let output =
        place.weir(&format!("bench disk --rw randwrite --destroy --bytes 64k {short} --format json"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("filling 4MiB of disk before the load (the file has a hole at byte"), "{said}");
    let written: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(written["prefill"]["bytes"], 4 << 20);
    assert!(written["prefill"]["seconds"].as_f64().unwrap() > 0.0, "{written}");
    assert!(is_full(), "the load wrote 64 KiB, the pass before it everything");
    assert_eq!(written["kinds"][0]["bytes"], 64 << 10, "what was filled is not counted");
    assert!(written["notes"].as_array().unwrap().is_empty());
    std::fs::File::options().write(true).open(&disk).unwrap().set_len(8 << 20).unwrap();
    let text = place.ok(&format!("bench disk --rw randwrite --destroy {short}"));
    assert!(text.contains("filled 8MiB in "), "{text}");
    let again = place.ok(&format!("bench disk --rw randwrite --destroy {short}"));
    assert!(!again.contains("filled"), "{again}");
}

#[test]
fn jobs_of_a_group_fill_a_target_once_before_any_of_them_begins() {
    let place = Place::new();
    std::fs::File::create(place.path().join("disk")).unwrap().set_len(8 << 20).unwrap();
    let job = |name: &str| format!("[{name}]\nfilename=disk\nrw=randwrite\nbs=4k\nsize=8m\nio_size=64k\n");
    std::fs::write(place.path().join("two.fio"), format!("{}{}", job("a"), job("b"))).unwrap();
    let report = place.parsed("bench --jobs two.fio --destroy --format json");
    let jobs = report["jobs"].as_array().unwrap();
    let filled: Vec<u64> = jobs.iter().filter_map(|job| job["prefill"]["bytes"].as_u64()).collect();
    assert_eq!((jobs.len(), filled), (2, vec![8 << 20]), "{report}");
}

#[test]
fn a_job_that_would_overwrite_data_is_refused_before_any_job_runs() {
    let place = Place::new();
    let data = vec![1; 1 << 20];
    std::fs::write(place.path().join("data"), &data).unwrap();
    let jobs =
        "[global]\nfilename=data\nbs=4k\nsize=1m\n[look]\nrw=randread\n[spoil]\nstonewall\nrw=randwrite\n";
    std::fs::write(place.path().join("jobs.fio"), jobs).unwrap();
    let output = place.weir("bench --jobs jobs.fio");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(output.stdout.is_empty(), "a job has run");
    for word in ["job spoil", "data from byte 0", "no job has run", "--destroy"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_eq!(std::fs::read(place.path().join("data")).unwrap(), data);
    assert_eq!(place.parsed("bench --jobs jobs.fio --destroy --format json")["jobs"][1]["name"], "spoil");
    // What the jobs themselves have written is no one else's data.
    let jobs = "[global]\nfilename=new\nbs=4k\nsize=1m\n[one]\nrw=write\n[two]\nstonewall\nrw=randwrite\n";
    std::fs::write(place.path().join("own.fio"), jobs).unwrap();
    let report = place.parsed("bench --jobs own.fio --format json");
    assert_eq!(report["jobs"].as_array().unwrap().len(), 2, "{report}");
    assert!(place.fails("bench --jobs own.fio", 4).contains("job one"), "now the file has data");
}

/// Jobs that write one target do not look for data themselves: they would find each other's.
#[test]
fn data_that_comes_to_a_shared_target_while_an_earlier_job_runs_is_not_overwritten() {
    let place = Place::new();
    std::fs::write(place.path().join("other"), vec![1; 1 << 20]).unwrap();
    let jobs = "[global]\nbs=4k\nsize=1m\n[read]\nfilename=other\nrw=randread\nruntime=4s\ntime_based\n\
                [one]\nstonewall\nfilename=late\nrw=write\n[two]\nstonewall\nfilename=late\nrw=randwrite\n";
    std::fs::write(place.path().join("jobs.fio"), jobs).unwrap();
    let data = vec![2; 1 << 20];
    let output = std::thread::scope(|scope| {
        let load = scope.spawn(|| place.weir("bench --jobs jobs.fio"));
        std::thread::sleep(std::time::Duration::from_secs(2));
        std::fs::write(place.path().join("late"), &data).unwrap();
        load.join().unwrap()
    });
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("job one") && said.contains("data from byte 0"), "{said}");
    assert_eq!(std::fs::read(place.path().join("late")).unwrap(), data);
}

/// A program that asked for JSON reads nothing else on standard error.
#[test]
fn notes_are_json_where_errors_are() {
    let place = Place::new();
    std::fs::File::create(place.path().join("disk")).unwrap().set_len(256 << 20).unwrap();
    let output = place.weir("bench disk --rw randwrite --destroy --prefill-time 1ms --output json");
    let said = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let schemas: Vec<&str> = lines.iter().map(|line| line["schema"].as_str().unwrap()).collect();
    assert_eq!(schemas, ["weir.note/1", "weir.error/1"], "{said}");
    assert!(lines[0]["note"].as_str().unwrap().contains("filling 256MiB"), "{said}");
    lines.iter().for_each(|line| assert_shape(line, "bench"));
}

#[test]
fn a_job_file_of_fio_is_run() {
    let place = Place::new();
    let file = "[global]\nioengine=null\nbs=4k\nsize=4m\n[first]\nrw=randread\niodepth=8\nnumjobs=2\n[second]\nrw=write\n\
                [third]\nstonewall\nrw=randrw\nrwmixread=25\nruntime=100ms\ntime_based\n";
    std::fs::write(place.path().join("jobs.fio"), file).unwrap();
    let report = place.parsed("bench --jobs jobs.fio --format json");
    let jobs = report["jobs"].as_array().unwrap();
    let names: Vec<&str> = jobs.iter().map(|job| job["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["first", "second", "third"]);
    assert_eq!(jobs[0]["kinds"][0]["ios"], 2 * 1024, "two threads, 4 MiB each");
    assert_eq!(jobs[1]["kinds"][0]["bytes"], 4 << 20);
    assert_eq!(jobs[2]["kinds"].as_array().unwrap().len(), 2);
    let text = place.ok("bench --jobs jobs.fio");
    assert!(text.contains("third: randrw:25 4KiB depth 1 on null"), "{text}");

    std::fs::write(place.path().join("bad.fio"), "[a]\nfilename=x\nsize=1m\nzonemode=zbd\nsquare=1\n")
        .unwrap();
    let said = place.fails("bench --jobs bad.fio", 2);
    assert!(said.contains("bad.fio") && said.contains("zonemode=zbd (line 4), square=1 (line 5)"), "{said}");
    assert!(place.fails("bench --jobs jobs.fio --rw read", 2).contains("--jobs"));
    assert!(place.fails("bench --jobs none.fio", 3).contains("none.fio"));
}

#[test]
fn engines_are_chosen_and_named() {
    let place = Place::new();
    let disk = place.path().join("disk");
    let short = "--runtime 100ms --warmup 0s --format json";
    let psync =
        place.parsed(&format!("bench disk --size 1M --rw randwrite --engine psync --threads 2 {short}"));
    assert!(psync["engine"].as_str().unwrap().starts_with("psync"), "{psync}");
    assert_eq!((&psync["workload"]["queue_depth"], &psync["first_error"]), (&1.into(), &Value::Null));
    let ring = place.parsed(&format!("bench disk --engine io_uring {short}"));
    assert!(ring["engine"].as_str().unwrap().starts_with("io_uring"), "{ring}");
    let before = std::fs::read(&disk).unwrap();
    let null = place.parsed(&format!("bench disk --engine null --rw randwrite {short}"));
    assert_eq!((&null["engine"], &null["target"]), (&"null".into(), &"null:1MiB".into()));
    assert_eq!(std::fs::read(&disk).unwrap(), before, "nothing was written");
    for (line, hint) in [
        ("bench disk --engine psync --qd 8", "queue depth 1"),
        ("bench disk --engine psync --poll", "needs engine io_uring"),
        ("bench null --engine io_uring", "files and block devices"),
        ("bench disk --engine libaio", "io_uring"),
    ] {
        let said = place.fails(line, 2);
        assert!(said.contains(hint), "{line}: {said}");
    }
    assert!(place.fails("bench null --engine psync", 2).contains("files and block devices"));
    // A file in memory has no device, so there is nothing to poll.
    let memory = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    memory.as_file().set_len(1 << 20).unwrap();
    let said = place.fails(&format!("bench {} --poll", memory.path().display()), 2);
    assert!(said.contains("cannot be polled") && said.contains("leave --poll out"), "{said}");
}

#[test]
fn a_file_that_becomes_smaller_is_an_error_and_said() {
    let place = Place::new();
    let disk = place.path().join("disk");
    for engine in ["io_uring", "psync"] {
        std::fs::write(&disk, vec![1; 4 << 20]).unwrap();
        let line =
            format!("bench disk --engine {engine} --rate 2000 --runtime 2500ms --warmup 0s --format jsonl");
        let mut child = place.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.next().unwrap().unwrap().contains("interval"), "it runs");
        std::fs::File::options().write(true).open(&disk).unwrap().set_len(4096).unwrap();
        let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert!(last["first_error"].as_str().unwrap().contains("was it made smaller?"), "{last}");
        let read = &last["kinds"][0];
        assert!(read["ios"].as_u64().unwrap() > 500 && read["errors"].as_u64().unwrap() > 500, "{last}");
    }
}

#[test]
fn a_terminal_shows_how_it_goes_and_a_pipe_does_not() {
    let place = Place::new();
    let line = "bench null --rate 5000 --runtime 2500ms --warmup 0s";
    let quiet = place.weir(line);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{}", String::from_utf8_lossy(&quiet.stderr));
    let inside = format!("stty cols 200; {} {line}", env!("CARGO_BIN_EXE_weir"));
    let mut terminal = Command::new("script");
    let shown =
        terminal.args(["-qec", &inside, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null()).output();
    let shown = String::from_utf8_lossy(&shown.expect("script is in bsdutils").stdout).into_owned();
    for word in ["null", "IOPS", "MB/s", "p50", "p99", "p99.999"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    let rate = shown.split(" IOPS ").next().and_then(|before| before.rsplit(' ').next()).unwrap_or_default();
    assert!((3_000..7_000).contains(&rate.parse::<u32>().unwrap()), "{rate}: {shown}");
}

#[test]
fn bad_input_is_named() {
    let place = Place::new();
    for (line, hint) in [
        ("bench null --bs 4k:60,64k:41", "add up to 100"),
        ("bench null --bs 1000", "multiple of 512"),
        ("bench null --bs 64M", "at most 32MiB"),
        ("bench null --pattern zipf:-1", "0.001 to 5"),
        ("bench null --pattern shared", "sequential"),
        ("bench null --rw read --align 4k", "random offsets"),
        ("bench null --poisson", "--rate"),
        ("bench null --flush-every 4", "after writes"),
        ("bench null --rw write --compress 101", "0 to 100"),
        ("bench null --rate 0", "rate of zero"),
        ("bench null --format xml", "prom"),
        ("bench null:x", "null:1G"),
    ] {
        let said = place.fails(line, 2);
        assert!(said.contains(hint), "{line}: {said}");
    }
    assert!(place.fails("bench null:1M --size 2M", 2).contains("has only 1MiB"));
    assert!(place.fails("bench none", 3).contains("none"));
    // Not even root may write there.
    let said = place.fails("bench /sys/kernel/notes --rw write --destroy", 1);
    assert!(said.contains("cannot open /sys/kernel/notes") && said.contains("denied"), "{said}");
    assert!(place.fails("bench nbd+unix:///?socket=/nonexistent/s", 5).contains("/nonexistent/s"));
}
