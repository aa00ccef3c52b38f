//! The command line for people and programs: output and exit codes.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

mod common;

use common::{Guest, Place, assert_shape, await_some};

#[test]
fn help_tells_what_there_is() {
    let place = Place::new();
    let help = place.ok("--help");
    for word in ["volume", "disk", "bench", "diagnose", "WEIR_LAB", "Exit codes", "Examples"] {
        assert!(help.contains(word), "{word}");
    }
    assert!(!help.contains("demo"), "hidden");
    for line in ["lab up --help", "disk export --help", "bench --help", "diagnose --help", "node --help"] {
        assert!(place.ok(line).len() > 200, "{line}");
    }
    for (shell, word) in
        [("bash", "-F _clap_complete_weir"), ("zsh", "#compdef weir"), ("fish", "complete --keep-order")]
    {
        let script = place.ok(&format!("completions {shell}"));
        assert!(script.contains(word) && script.contains("COMPLETE"), "{shell}: {script}");
        assert_eq!(script.contains("COMP_WORDBREAKS//@"), shell == "bash", "{script}");
    }
    assert!(place.ok("node --print-config").contains("fence_grace"));
}

#[test]
fn errors_have_codes_and_say_what_to_do() {
    let place = Place::new();
    place.fails("disk create", 2);
    for size in ["1XB", "0", "-1", "-1GiB"] {
        let said = place.fails(&format!("disk create d --volume v --size {size}"), 2);
        assert!(said.contains(&format!("`{size}`")), "{said}");
    }
    for (command, hint) in [
        ("disk create d --volume v --size -1", "such as 4096, 4k, 1.5GiB or 1GB"),
        ("disk create d --volume v --size 1kk", "such as 4096, 4k, 1.5GiB or 1GB"),
        ("disk create d --volume v --size 1.3", "smaller unit"),
        ("disk create d --volume v --size 0", "at least one byte"),
        ("disk resize d -1", "such as 4096, 4k, 1.5GiB or 1GB"),
        ("disk limit d", "--none to end the limit"),
        ("disk limit d --burst 1s", "--burst needs a rate"),
        ("disk limit d --iops 0", "0 is not in"),
        ("disk limit d --iops 5 --none", "cannot be used with"),
        ("disk create d --volume v --size 1MiB --burst 1s", "--burst needs a rate"),
        ("bench null --size 0k", "at least one byte"),
        ("lab up --lun nowhere", "nowhere: No such file"),
        ("lab up --lun /dev/null", "is no block device"),
        ("lab up --nodes 1 --lun a --lun b", "2 LUNs for 1 node:"),
        ("lab up --fence-command /dev/null", "is no program"),
    ] {
        let said = place.fails(command, 2);
        assert!(said.contains(hint), "{command}: {said}");
    }
    assert!(place.fails("lab status", 3).contains("weir lab up"));
    assert!(place.fails("status --lab nowhere", 3).contains("nowhere"));
    assert!(place.fails("status --api ./none.sock", 5).contains("is it running?"));
    assert!(place.fails("node --config none.toml", 3).contains("--print-config"));
    std::fs::write(place.path().join("bad.toml"), "name = \"n1\"\nshard = 1\n").unwrap();
    let said = place.fails("node --config bad.toml", 2);
    assert!(said.contains("line 2") && said.contains("shard"), "{said}");
    assert!(place.fails("bench /nonexistent/file", 3).contains("/nonexistent/file"));
}

/// The codes of `weir --help`, for every command, and errors as JSON with `--output json`.
#[test]
fn every_command_ends_with_the_documented_code() {
    let place = Place::new();
    std::fs::write(place.path().join("data"), vec![1; 1 << 20]).unwrap();
    std::fs::write(place.path().join("word"), "word").unwrap();
    let cases = [
        ("", 2, "subcommand"),
        ("disk", 2, "subcommand"),
        ("disk create", 2, "NAME"),
        ("disk clone d@s a b a --api none.sock", 2, "a is named twice"),
        ("disk clone d@s a/b c .d --api none.sock", 2, "2 of 3 names cannot be used: a/b, .d"),
        ("disk delete a b a --yes --api none.sock", 2, "a is named twice"),
        ("disk clone d a b --api none.sock", 2, "weir snapshot create d@NAME"),
        ("disk clone d@s a b --copy --api none.sock", 2, "one clone"),
        ("status --frob", 2, "--frob"),
        ("status --node n1 --api none.sock", 2, "--node chooses"),
        ("top --every 5 --api none.sock", 2, "no unit"),
        ("top --every -5s", 2, "negative"),
        ("explain d --over x", 2, "2m30s"),
        ("lab up --nodes 99", 2, "16"),
        ("lab kill n1", 3, "weir lab up"),
        ("lab down", 3, "weir lab up"),
        ("disk show d --lab nowhere", 3, "nowhere"),
        ("bench none", 3, "none"),
        ("bench none --rw write", 3, "give a size"),
        ("bench data --rw randwrite", 4, "--destroy"),
        ("bench data --qd 0", 2, "queue"),
        ("bench data --runtime -1s", 2, "negative"),
        ("bench data --prefill-time 0s", 2, "--no-prefill"),
        ("bench .", 2, "neither a file"),
        ("bench nbd://127.0.0.1:1/d", 5, "cannot connect"),
        ("bench --jobs none.fio", 3, "none.fio"),
        ("bench --jobs word", 2, "word"),
        ("bench compare none word", 3, "none"),
        ("bench compare word word", 2, "not a result"),
        ("bench verify data --history none", 3, "none"),
        ("bench verify data --history word", 2, "word"),
        ("profile show --from none", 3, "none"),
        ("profile show --from word", 2, "word"),
        ("profile import none", 3, "none"),
        ("profile replay --from none --target data", 3, "none"),
        ("diagnose --import none.csv", 3, "none.csv"),
        ("diagnose --import word", 2, "word"),
        ("diagnose --stack none.toml", 3, "none.toml"),
        ("diagnose --stack word", 2, "word"),
        ("diagnose --disk d --api none.sock", 5, "none.sock"),
        ("node --config none.toml", 3, "none.toml"),
        ("completions tcsh", 2, "tcsh"),
        ("volume list --api none.sock", 5, "none.sock"),
        ("events --api none.sock", 5, "none.sock"),
    ];
    for (line, code, word) in cases {
        let said = place.fails(line, code);
        assert!(said.contains(word) || line.is_empty() || line == "disk", "weir {line}: {said}");
        let error: Value =
            serde_json::from_str(&place.fails(&format!("{line} --output json"), code)).unwrap();
        assert_eq!(error["schema"], "weir.error/1", "weir {line}: {error}");
        assert_shape(&error, line);
        assert_eq!(error["error"]["exit_code"], code, "weir {line}: {error}");
        let kinds = ["failed", "usage", "not-found", "refused", "unavailable"];
        assert_eq!(error["error"]["kind"], kinds[code as usize - 1], "weir {line}: {error}");
        let message = error["error"]["message"].as_str().unwrap();
        let all = format!("{message} {}", error["error"]["hint"]);
        assert!(all.contains(word) && !message.contains("Usage:"), "weir {line}: {error}");
    }
    for (line, code, word) in [
        ("status --api none.sock", 5, "none.sock"),
        ("status --api none.sock --lab nowhere", 2, "two clusters"),
        ("status --lab nowhere", 3, "nowhere"),
    ] {
        let output = place.command(line).env("WEIR_LAB", "of-the-session").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "weir {line}: {said}");
        assert!(said.contains(word) && !said.contains("of-the-session"), "weir {line}: {said}");
    }
    let asked: Value =
        serde_json::from_str(&place.fails("bench data --rw randwrite --format json", 4)).unwrap();
    assert_eq!(asked["error"]["kind"], "refused");
}

#[test]
fn a_session_with_a_lab() {
    let place = Place::new();
    let up = place.ok("lab up --nodes 2");
    assert!(up.contains("127.0.0.2") && up.contains("weir volume create"), "{up}");
    assert!(place.fails("lab up", 4).contains("running"));
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    assert!(place.fails("volume create pool --path /", 4).contains("already"));
    assert!(place.fails("volume create other --path /nonexistent", 3).contains("/nonexistent"));
    assert!(place.fails("volume set-identity pool naa.1", 4).contains("it has no LUN"));
    place.ok("disk create db --volume pool --size 64MiB --policy write-back+1");
    assert!(
        place
            .fails("disk create x --volume pool --size 1GiB --policy write-back+9", 2)
            .contains("write-back+N")
    );
    assert!(place.fails("disk create x --volume pool --size 1GiB --medium flash", 4).contains("no node"));
    assert!(place.fails("disk create x --volume pool --size 1GiB --medium tape", 2).contains("ram or flash"));
    assert!(place.fails("disk create x --volume none --size 1GiB", 3).contains("weir volume list"));

    let uris = place.ok("disk export db");
    assert!(uris.lines().any(|line| line.starts_with("nbd+unix:///db?socket=")), "{uris}");
    assert!(uris.lines().any(|line| line.starts_with("nbd://127.0.0.1:")), "{uris}");
    let disk = place.json("disk show db");
    assert_eq!((&disk["owner"], &disk["requested"]), (&Value::from("n1"), &Value::from("write-back+1")));
    await_some("write-back+1", || (place.json("disk show db")["effective"] == "write-back+1").then_some(()));
    assert!(place.ok("disk show db").contains("0 in the owner's fault domain, 1 in others"));
    place.fails("disk follow db", 2);
    assert_eq!(place.json("disk follow db --to n2")["follower"], "n2");
    assert_eq!(place.json("disk follow db --stop")["follower"], Value::Null);
    let moved = place.json("disk move db --to n2");
    assert_eq!((&moved["from"], &moved["disk"]["owner"]), (&Value::from("n1"), &Value::from("n2")));
    assert!(place.fails("disk move db --to n9", 3).contains("weir status"));
    assert!(place.ok("disk move db --to n1").contains("moved from n2 to n1"));
    place.ok("disk policy db write-back+1out");
    await_some("write-back+1out", || {
        (place.json("disk show db")["effective"] == "write-back+1out").then_some(())
    });
    let policy = place.json("disk policy db write-through --node n2");
    assert_eq!(policy["requested"], "write-through");
    assert_eq!(place.json("disk resize db 128MiB")["size_bytes"], 128 << 20);
    a_limit_is_set_shown_and_removed(&place);
    assert!(place.fails("disk resize db 64MiB", 4).contains("shrinking it would cut off data"));

    let bench =
        place.json("bench --disk db --layer accel --rw randwrite --destroy --runtime 200ms --warmup 0s");
    assert!(bench["kinds"][0]["ios"].as_u64().unwrap() > 0, "{bench}");
    assert!(place.fails("bench --disk db --layer accel --rw write", 4).contains("--destroy"));
    let status = place.ok("status");
    assert!(status.contains("n2") && status.contains("db"), "{status}");
    assert_eq!(place.json("lab status")["nodes"].as_array().unwrap().len(), 2);
    assert!(place.json("events")["events"].as_array().unwrap().iter().any(|event| event["kind"] == "open"));

    loads_leave_a_disk_in_use_alone(&place);
    names_are_completed(&place);
    tables_fit_80_columns(&place);
    events_are_followed(&place);
    assert!(place.fails("disk delete db", 4).contains("--yes"));
    several_disks_are_deleted_at_once(&place);
    a_delete_is_confirmed_on_a_terminal(&place);
    assert!(place.ok("disk delete db --dry-run").contains("would delete"));
    place.ok("disk delete db --yes");
    assert!(place.fails("disk show db", 3).contains("weir disk list"));
    assert!(place.ok("lab kill n2").contains("was killed; `weir lab start n2`"));
    assert!(place.fails("lab pause n2", 4).contains("weir lab start n2"));
    assert!(place.fails("lab kill n9", 3).contains("n1, n2"));
    assert!(place.ok("lab start n2").contains(", NBD at 127.0.0.2:"));
    the_registry_is_a_process_of_the_lab(&place);
    let down = place.ok("lab down");
    assert!(down.contains("has ended (n1, n2 and the registry)"), "{down}");
    assert!(!place.path().join("weir-lab/lab.json").exists());
    // The only node with a log was killed: the command reports that, although the log's size is unknown.
    place.ok("lab up --nodes 1");
    place.ok("disk create scratch --volume pool --size 1MiB --policy write-back+0");
    place.ok("disk export scratch");
    await_some("write-back+0", || {
        (place.json("disk show scratch")["effective"] == "write-back+0").then_some(())
    });
    place.ok("lab kill n1");
    assert!(place.fails("status", 5).contains("no node of the lab"));
    let said = place.fails("lab down", 1);
    assert!(said.contains("disk scratch: what its log held in the memory of n1, killed before"), "{said}");
}

/// A load that would overwrite a client's data needs force, like delete and diagnose.
fn loads_leave_a_disk_in_use_alone(place: &Place) {
    let uris = place.ok("disk export db");
    let uri = uris.lines().find(|line| line.starts_with("nbd+unix:")).unwrap();
    let _guest = Guest::of(place, "db", uri);
    let load = format!("bench {uri} --rw randwrite --destroy --no-prefill --runtime 100ms --warmup 0s");
    let said = place.fails(&load, 4);
    let forced = place.weir(&format!("{load} --force"));
    let inside =
        "bench --disk db --layer accel --rw randwrite --destroy --no-prefill --runtime 100ms --warmup 0s";
    place.fails(inside, 4);
    place.ok(&format!("{inside} --force"));
    // For every spelling of the address, and for every command that writes.
    let tcp = uris.lines().find(|line| line.starts_with("nbd://127.")).unwrap();
    let tcp = tcp.replace("127.0.0.1", "localhost").replace("127.0.0.2", "localhost");
    let jobs = format!("[j]\nioengine=nbd\nuri={tcp}\nrw=randwrite\nbs=4k\nsize=1m\n");
    std::fs::write(place.path().join("db.fio"), jobs).unwrap();
    std::fs::write(place.path().join("db.toml"), format!("[[layer]]\nname = \"a\"\ntarget = \"{uri}\"\n[[layer]]\nname = \"b\"\ndisk = \"db\"\nat = \"accel\"\n")).unwrap();
    std::fs::write(
        place.path().join("t.log"),
        "fio version 3 iolog\n0 /dev/x add\n1 /dev/x open\n900 /dev/x write 4096 8192\n",
    )
    .unwrap();
    place.ok("profile import t.log");
    for line in [
        &format!("bench {tcp} --rw randwrite --destroy"),
        "bench --jobs db.fio --destroy",
        &format!("profile replay --from t.log.profile.json --target {tcp} --destroy"),
        "diagnose --stack db.toml --destroy --budget 1m",
    ] {
        let said = place.fails(line, 4);
        assert!(said.contains("1 client is connected to disk db"), "weir {line}: {said}");
    }
    assert!(said.contains("1 client is connected to disk db") && said.contains("--force"), "{said}");
    assert!(forced.status.success(), "{}", String::from_utf8_lossy(&forced.stderr));
}

/// The completions that a shell offers after these words.
fn offered(place: &Place, words: &[&str]) -> Vec<String> {
    let mut command = place.command("--");
    command.args(words).env("COMPLETE", "bash").env("_CLAP_IFS", "\n");
    let output = command.env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string()).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn names_are_completed(place: &Place) {
    assert_eq!(offered(place, &["weir", "disk", "show", "d"]), ["db"]);
    assert_eq!(offered(place, &["weir", "volume", "show", "p"]), ["pool"]);
    assert_eq!(offered(place, &["weir", "disk", "move", "db", "--to", "n"]), ["n1", "n2"]);
    assert_eq!(offered(place, &["weir", "lab", "kill", "r"]), ["registry"]);
    assert_eq!(offered(place, &["weir", "--lab", "weir-lab", "explain", "d"]), ["db"]);
    assert!(offered(place, &["weir", "--lab", "none", "explain", "d"]).is_empty());
}

/// No line is wider, except for addresses and paths, which are not wrapped.
fn a_limit_is_set_shown_and_removed(place: &Place) {
    let set = place.json("disk limit db --iops 2000 --bytes-per-second 100MiB --burst 2s --node n2");
    let limit = serde_json::json!({ "iops": 2000, "bytes_per_second": 100 << 20, "burst_ms": 2000 });
    assert_eq!(set["limit"], limit);
    assert!(place.ok("disk show db").contains("2000 requests/s, 100MiB/s, burst of 2000 ms"));
    assert!(place.fails("disk limit db --iops 5 --burst 2h", 2).contains("a burst lasts 1 to 3600000 ms"));
    let replaced = place.json("disk limit db --iops 70000");
    let limit = serde_json::json!({ "iops": 70000, "bytes_per_second": null, "burst_ms": 100 });
    assert_eq!(replaced["limit"], limit);
    assert_eq!(place.json("disk limit db --none")["limit"], Value::Null);
    assert!(place.fails("disk limit nowhere --none", 3).contains("weir disk list"));
    let made = place.json("disk create limited --volume pool --size 1MiB --bytes-per-second 1MiB");
    assert_eq!(made["limit"]["bytes_per_second"], 1 << 20);
    // A disk that no node has open.
    assert_eq!(place.json("disk limit limited --iops 9")["limit"]["iops"], 9);
    place.ok("disk delete limited --yes");
}

fn tables_fit_80_columns(place: &Place) {
    for line in [
        "status",
        "disk list",
        "disk show db",
        "volume list",
        "volume show pool",
        "volume du pool",
        "events",
        "lab status",
        "top --count 1 --every 200ms",
        "explain db --over 200ms",
    ] {
        let output = place.command(line).env("COLUMNS", "80").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        for wide in text.lines().filter(|line| line.chars().count() > 80) {
            let longest = wide.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0);
            assert!(longest > 30, "weir {line}: {wide:?} in\n{text}");
        }
    }
}

fn events_are_followed(place: &Place) {
    let mut child = place.command("events --follow --output json").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert!(next()["kind"].is_string(), "one of those that happened before");
    place.ok("disk create followed --volume pool --size 1MiB --policy write-through");
    place.ok("disk export followed");
    while next()["subject"] != "followed" {}
    child.kill().unwrap();
    child.wait().unwrap();
    place.ok("disk delete followed --yes");
    let text = place.ok("events");
    let at = text.lines().nth(1).unwrap();
    assert!(at.starts_with("20") && at.as_bytes()[10] == b' ' && at.as_bytes()[13] == b':', "{at}");
    // A closed pipe ends it.
    let mut head = place.command("events --follow").stdout(Stdio::piped()).spawn().unwrap();
    drop(head.stdout.take());
    // It may have printed all events before the pipe was closed.
    place.ok("disk create noticed --volume pool --size 1MiB --policy write-through");
    place.ok("disk export noticed");
    let ended = await_some("the end of events", || head.try_wait().unwrap());
    assert!(ended.success());
    place.ok("disk delete noticed --yes");
}

/// None is deleted if one cannot be.
fn several_disks_are_deleted_at_once(place: &Place) {
    for name in ["many1", "many2"] {
        place.ok(&format!("disk create {name} --volume pool --size 1MiB --policy write-through"));
    }
    let said = place.fails("disk delete many1 nowhere many2 elsewhere --yes", 3);
    assert!(said.contains("2 of 4 disks cannot be deleted, so none is: nowhere, elsewhere"), "{said}");
    let would = place.json("disk delete many1 many2 --dry-run");
    assert_shape(&would, "weir.deleted-disks/1");
    assert!(would["deleted"].as_array().unwrap().iter().all(|one| one["done"] == false), "{would}");
    place.ok("disk show many1");
    let said = place.ok("disk delete many2 many1 --yes");
    let disks: Vec<&str> = said.lines().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(disks, ["deleted disk many2", "deleted disk many1"], "{said}");
    assert!(place.fails("disk show many1", 3).contains("many1"));
}

fn a_delete_is_confirmed_on_a_terminal(place: &Place) {
    place.ok("disk create doomed --volume pool --size 1MiB --policy write-through");
    for (typed, code) in [("db", 4), ("doomed", 0)] {
        let weir = place.command("disk delete doomed");
        let line = format!("{} disk delete doomed", weir.get_program().to_string_lossy());
        let mut script = Command::new("script");
        script.args(["-qec", &line, "/dev/null"]).current_dir(place.path());
        let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        writeln!(child.stdin.take().unwrap(), "{typed}").unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("Type doomed to go on"), "{said}");
    }
    place.fails("disk show doomed", 3);
}

/// The commands kill, start, pause and resume it like a node, and each reports the result.
fn the_registry_is_a_process_of_the_lab(place: &Place) {
    let killed = place.json("lab kill registry");
    assert_shape(&killed, "lab kill");
    assert_eq!((&killed["action"], &killed["state"]), (&"kill".into(), &"gone".into()));
    assert_eq!(killed["schema"], "weir.lab-action/1");
    assert!(place.fails("lab kill registry", 4).contains("registry does not run; `weir lab start registry`"));
    let status = place.ok("lab status");
    assert!(
        status.contains("The registry is gone") && status.contains("weir lab start registry"),
        "{status}"
    );
    assert!(place.ok("lab start registry").contains("registry (pid "));
    assert!(place.fails("lab start registry", 4).contains("registry runs"));
    assert!(place.ok("lab pause registry").contains("is paused; `weir lab resume registry`"));
    assert_eq!(place.json("lab status")["registry"], "paused");
    assert!(place.ok("lab resume registry").contains("goes on"));
    assert!(!place.ok("lab status").contains("The registry is"));
}

#[test]
fn layers_are_measured_into_a_report() {
    let place = Place::new();
    place.ok("lab up --nodes 2");
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    place.ok("disk create db --volume pool --size 16MiB --policy write-back+1");
    assert!(place.fails("diagnose --disk db", 4).contains("weir disk export db"));
    assert!(place.fails("diagnose --disk none", 3).contains("none"));
    place.ok("disk export db");
    let planned = place.json("diagnose --disk db --destroy --dry-run --budget 4m");
    assert_shape(&planned, "diagnose --dry-run");
    assert_eq!(
        (&planned["runs"], &planned["bytes_overwritten"]),
        (&Value::from(8 * 6 * 5), &Value::from(16 << 20))
    );
    assert!(planned["seconds_at_most"].as_f64().unwrap() <= 240.0, "{planned}");
    let reads = place.json("diagnose --disk db --dry-run");
    assert_eq!(
        (&reads["cells"].as_array().unwrap().len(), &reads["bytes_overwritten"]),
        (&4, &Value::from(0))
    );
    assert!(place.fails("diagnose --disk db --budget 5s", 2).contains("do not fit"));
    assert!(place.fails("diagnose --disk db --runtime 0s", 2).contains("zero"));
    place.fails("diagnose --disk db --repeats 0", 2);
    assert!(place.fails("diagnose --disk db --report none/db.html", 6).contains("cannot write none/db.html"));

    // The verdict of such short runs depends on the machine and its load; there is always one.
    let output =
        place.weir("diagnose --disk db --destroy --repeats 1 --runtime 150ms --seed 7 --report db.html");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        [Some(0), Some(6)].contains(&output.status.code()),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for word in ["backing", "accel write-back+1", "nbd unix", "db.html", "db.junit.xml"] {
        assert!(said.contains(word), "{word} is not in\n{said}");
    }
    assert!(place.read("db.html").contains("</html>"));
    assert!(place.read("db.junit.xml").contains("<testsuites"));
    let data: Value = serde_json::from_str(&place.read("db.json")).unwrap();
    let rows = data["rows"].as_array().unwrap();
    // The backing, two exports, and the accelerator under each policy that two nodes allow.
    assert!((data["layers"].as_array().unwrap().len(), rows.len()) >= (6, 8 * 6), "{}", rows.len());
    assert!(rows.iter().all(|row| row["outcome"]["measured"].is_object()), "{rows:#?}");
    assert_eq!(data["seed"], 7);
    assert!(data["findings"]["verdict"]["headline"].is_string());
    resumed(&place, data);
    interrupted(&place);
    refused_while_in_use(&place);
}

/// SIGINT after some runs: the result has them and is marked as incomplete, and the exit code warns a pipeline.
fn interrupted(place: &Place) {
    let line = "diagnose --disk db --destroy --runtime 300ms --report cut.html";
    let child = place.command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(4));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("not to be trusted: interrupted after"), "{said}");
    let data: Value = serde_json::from_str(&place.read("cut.json")).unwrap();
    let rows = data["rows"].as_array().unwrap().len();
    assert!(data["interrupted"] == true && (1..8 * 6 * 5).contains(&rows), "{rows}");
    assert!(place.read("cut.html").contains("Interrupted: "));
}

/// A guest's disk must neither be overwritten nor be measured together with the guest's own load.
fn refused_while_in_use(place: &Place) {
    let uris = place.ok("disk export db");
    let uri = uris.lines().find(|line| line.starts_with("nbd+unix:")).unwrap();
    let is_unused = || (place.json("disk show db")["detail"]["clients"] == 0).then_some(());
    // The measurement that was interrupted may be connected still, and would be taken for the guest.
    await_some("no client", is_unused);
    let guest = Guest::of(place, "db", uri);
    let said = place.fails("diagnose --disk db --destroy", 4);
    drop(guest);
    await_some("no client", is_unused);
    assert!(said.contains("1 client is connected"), "{said}");
}

/// Removes most rows, as after an interrupt, and resumes the measurement.
fn resumed(place: &Place, mut data: Value) {
    data["rows"].as_array_mut().unwrap().truncate(43);
    data["interrupted"] = true.into();
    let kept = data["rows"].clone();
    std::fs::write(place.path().join("db.json"), data.to_string()).unwrap();
    let line = "diagnose --disk db --destroy --repeats 1 --resume --report db.html";
    assert!(place.fails(&format!("{line} --runtime 1s"), 2).contains("gone on with"));
    assert!(place.fails(&format!("{line} --runtime 150ms --seed 8"), 2).contains("another seed"));
    place.weir(&format!("{line} --runtime 150ms"));
    let data: Value = serde_json::from_str(&place.read("db.json")).unwrap();
    assert_eq!(data["interrupted"], false);
    let rows = data["rows"].as_array().unwrap();
    assert!(rows.len() >= 48 && rows[..43] == kept.as_array().unwrap()[..], "{}", rows.len());
}

#[test]
fn what_others_measured_is_diagnosed() {
    let place = Place::new();
    let table = "layer,block,access,queue_depth,iops,mib_per_s\n\
                 disk,8K,write,8,17000,\nshare,8K,write,8,800,\nshare,8K,write,8,177880,138\n";
    std::fs::write(place.path().join("t.csv"), table).unwrap();
    let said = place.ok("diagnose --import t.csv --report t.html");
    assert!(
        said.contains("Inconclusive, from single runs: share does 5 % of the IOPS of disk")
            && said.contains("17,788 IOPS would agree"),
        "{said}"
    );
    assert!(
        place
            .fails("diagnose --import t.csv --fail-on confirmed,inconclusive", 1)
            .contains("a threshold failed: Inconclusive, from single runs: share does")
    );
    let summary = place.json("diagnose --import t.csv --fail-on confirmed,likely");
    assert_shape(&summary, "diagnose --import");
    assert_eq!(summary["grade"], "inconclusive");
    assert!(place.fails("diagnose --import t.csv --fail-on loss:0.5", 2).contains("loss:FACTOR"));
    assert!(place.fails("diagnose --import none.csv", 3).contains("none.csv"));
    assert!(place.fails("diagnose --import disk=t.csv", 2).contains("t.csv: neither fio's JSON"));
    assert!(place.fails("diagnose", 2).contains("--disk"));
    assert!(place.fails("diagnose --import t.csv --destroy", 2).contains("--destroy"));
    std::fs::write(place.path().join("bad.csv"), "layer,block,access,queue_depth,iops\na,8K,read,0,1\n")
        .unwrap();
    assert!(place.fails("diagnose --import bad.csv", 2).contains("bad.csv, line 2: queue depth 0"));
    let lone = "layer,block,access,queue_depth,iops,mib_per_s\na,8K,read,8,100,900\n";
    std::fs::write(place.path().join("lone.csv"), lone).unwrap();
    assert!(place.fails("diagnose --import lone.csv", 6).contains("1 of 1 rows cannot be used"));
}

#[test]
fn null_needs_no_cluster() {
    let place = Place::new();
    let said = place.ok("bench null --runtime 100ms --warmup 0s");
    assert!(said.contains("IOPS") && said.contains("read"), "{said}");
    let checked = place.json("bench scratch --size 4MiB --rw randwrite --verify --runtime 100ms --warmup 0s");
    assert_shape(&checked, "bench scratch");
    assert_eq!(checked["verification"]["mismatches"], 0);
}

/// A log file on a full file system, or a log's reader that is gone, must not end a process that has writes in RAM.
#[test]
fn what_cannot_be_written_to_standard_error_ends_nothing() {
    let place = Place::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let code = |line: &str| place.command(line).stderr(full()).status().unwrap().code();
    assert_eq!(code("status --api none.sock"), place.weir("status --api none.sock").status.code());
    assert_eq!(code("cluster join --token x"), Some(2));
    // It logs that it listens, and whom it serves.
    let mut registry = place.command("registry --socket r.sock --file r.db").stderr(full()).spawn().unwrap();
    await_some("the registry listens", || place.path().join("r.sock").exists().then_some(()));
    let root = place.path().display();
    let text = format!(
        "name = \"n1\"\nstate_dir = \"{root}/h1\"\n[registry]\nsocket = \"{root}/r.sock\"\n[api]\nsocket = \"{root}/a.sock\"\n\
         [peers]\nlisten = \"127.0.0.1:0\"\n[resources]\nbuffers = \"64 MiB\"\nlog = \"64 MiB\"\n"
    );
    std::fs::write(place.path().join("n1.toml"), text).unwrap();
    let mut node = place.command("node --config n1.toml").stderr(full()).spawn().unwrap();
    await_some("the node answers", || place.weir("status --api a.sock").status.success().then_some(()));
    assert_eq!((registry.try_wait().unwrap(), node.try_wait().unwrap()), (None, None), "both live");
    for process in [&mut node, &mut registry] {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
