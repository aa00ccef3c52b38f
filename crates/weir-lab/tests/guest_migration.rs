//! A real guest migrates from one node to another while it writes, and its disk follows (P1, P2, P9).
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone};
use serde_json::{Value, json};
use support::await_some;
use support::writing::{FILL, GO_ON, KEEP_WRITING, SOON, VERIFY};
use weir_block::Nanos;
use weir_lab::guest::{Guest, GuestConfig, GuestImage};
use weir_nbd::Uri;
use weir_node::api::MeterView;
use weir_node::client::Client;

/// Longest time without an answered write around the switch-over, of an emulated guest on a machine that does much else; or as many times
/// what the guest has paused by itself before, on a machine that does more.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const TIMES_USUAL: u32 = 4;
/// Bytes a second of the guest's memory that are copied while the source runs: next to none.
const COPIED_BEFORE: u64 = 64 << 10;

/// QEMU's machine protocol (QMP) on a Unix socket: one command, one answer; events between them are of no interest.
struct Machine {
    lines: BufReader<UnixStream>,
}

impl Machine {
    fn connect(socket: &Path) -> Machine {
        // QEMU binds the socket, and listens a little later.
        let stream = await_some(SOON, || UnixStream::connect(socket).ok(), || "QEMU does not listen".into());
        let mut machine = Machine { lines: BufReader::new(stream) };
        assert!(machine.line().get("QMP").is_some());
        machine.ask("qmp_capabilities", &json!({}));
        machine
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> Value {
        let message = json!({ "execute": command, "arguments": arguments });
        writeln!(self.lines.get_mut(), "{message}").unwrap();
        loop {
            let answer = self.line();
            if let Some(result) = answer.get("return") {
                return result.clone();
            }
            assert!(answer.get("error").is_none(), "{command}: {answer}");
        }
    }

    /// The guest's memory is copied after the guest has gone over (post-copy), while it does not run on the source.
    ///
    /// Without KVM, QEMU may miss that a guest writes to a page while it is copied (qemu-devel, 3 September 2015, "Page dirtying and
    /// migration in pure-QEMU VM mode"): on a busy machine the guest then goes on with old pages, and its kernel stumbles.
    fn copy_afterwards(&mut self) {
        let capability = json!({ "capability": "postcopy-ram", "state": true });
        self.ask("migrate-set-capabilities", &json!({ "capabilities": [capability] }));
    }
}

fn config(bench: &Bench, node: &str) -> GuestConfig {
    let image = GuestImage::cached(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest")).unwrap();
    let uri = Uri::unix(&bench.lab.node(node).unwrap().nbd_unix, DISK).to_string();
    let mut config = GuestConfig::new(image, [uri]);
    config.boot_timeout = Duration::from_secs(180);
    config.qmp = Some(bench.directory.path().join(format!("{node}.qmp")));
    config
}

/// Writes that the owner's export of the disk has answered since the owner opened it, whichever node is asked.
fn written(client: &Client) -> Option<u64> {
    let meters: Vec<MeterView> = client.meters(DISK).ok()?;
    let export = meters.iter().find(|meter| meter.layer == "export");
    let kinds = export.into_iter().flat_map(|meter| &meter.kinds);
    Some(kinds.filter(|kind| kind.kind.changes_data()).map(|kind| kind.completions).sum())
}

/// The longest times without an answered write, sampled every few milliseconds.
#[derive(Debug)]
struct Pauses {
    /// The longest on the source: how the guest pauses by itself.
    usual: Duration,
    /// From the last write that the source's export answered to the first of the target's.
    switch: Option<Duration>,
}

fn watch(target: &Client, ends: &AtomicBool) -> Pauses {
    let (mut before, mut last, mut usual) = (written(target).unwrap(), Nanos::now(), Duration::ZERO);
    while !ends.load(Ordering::Relaxed) {
        match (written(target), Nanos::now()) {
            (Some(count), now) if count > before => {
                usual = usual.max(now - last);
                (before, last) = (count, now);
            }
            // The new owner counts from zero.
            (Some(count), now) if 0 < count && count < before => {
                return Pauses { usual, switch: Some(now - last) };
            }
            _ => {}
        }
        thread::sleep(Duration::from_millis(2));
    }
    Pauses { usual, switch: None }
}

/// A guest on `n1` that has files and goes on writing.
fn boot_writing(bench: &Bench) -> Guest {
    assert_eq!(bench.owner(), "n1");
    let mut guest = Guest::boot(&config(bench, "n1")).unwrap();
    let prepare = format!("{FILL} mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt && fill before");
    guest.run(&prepare, SOON).unwrap();
    guest.run(&format!("{FILL}{KEEP_WRITING}"), SOON).unwrap();
    guest
}

/// QEMU on another node, with the disk at that node's export, waiting for the guest. Also: where it waits.
fn await_guest(bench: &Bench, node: &str) -> (Guest, Value) {
    let address = format!("unix:{}", bench.directory.path().join(format!("to-{node}")).display());
    let mut there = config(bench, node);
    there.incoming = Some(address.clone());
    let target = Guest::boot(&there).unwrap();
    let mut machine = await_some(
        SOON,
        || there.qmp.as_ref().filter(|socket| socket.exists()).map(|socket| Machine::connect(socket)),
        || format!("the target's QEMU is not ready{}", bench.logs()),
    );
    assert_eq!(machine.ask("query-status", &json!({}))["status"], "inmigrate");
    machine.copy_afterwards();
    (target, json!({ "uri": address }))
}

/// The guest has seen no error and finds all its files; then it unmounts them.
fn judge(guest: &mut Guest) {
    let errors = guest.run("dmesg | grep -ciE 'i/o error|ext4-fs (error|warning)' || true", SOON).unwrap();
    assert_eq!(errors, "0\n", "the guest saw an error (P9): {}", guest.console());
    guest.run(&format!("{FILL} fill after && echo 3 >/proc/sys/vm/drop_caches"), SOON).unwrap();
    assert_eq!(guest.run(VERIFY, SOON).unwrap(), "5\n", "before, three in turn, after");
    guest.run("umount /mnt && fsck.ext4 -fn /dev/vda", SOON).unwrap();
}

#[test]
fn a_guest_migrates_while_it_writes_and_its_disk_follows() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let mut source = boot_writing(&bench);
    bench.lab.any_client().unwrap().follow(DISK, Some("n2")).unwrap();
    let (mut target, there) = await_guest(&bench, "n2");
    assert_eq!(bench.owner(), "n1", "a target that waits takes nothing away");

    let ends = Arc::new(AtomicBool::new(false));
    let (to, watching) = (bench.lab.client("n2").unwrap(), Arc::clone(&ends));
    let watcher = thread::spawn(move || watch(&to, &watching));
    thread::sleep(Duration::from_secs(2));
    let mut machine = Machine::connect(&bench.directory.path().join("n1.qmp"));
    machine.copy_afterwards();
    machine.ask("migrate-set-parameters", &json!({ "max-bandwidth": COPIED_BEFORE }));
    machine.ask("migrate", &there);
    await_some(
        SOON,
        || (machine.ask("query-migrate", &json!({}))["status"] == "active").then_some(()),
        || format!("the migration does not begin{}", bench.logs()),
    );
    machine.ask("migrate-start-postcopy", &json!({}));
    let done = await_some(
        SOON,
        || {
            let state = machine.ask("query-migrate", &json!({}));
            assert_ne!(state["status"], "failed", "{state}");
            (state["status"] == "completed").then_some(state)
        },
        || format!("no end of the migration{}", bench.logs()),
    );
    // The source is gone at once, as management tools do it.
    source.kill();
    let goes_on = target.run(GO_ON, SOON);
    ends.store(true, Ordering::Relaxed);
    let pauses = watcher.join().unwrap();
    goes_on.unwrap_or_else(|error| panic!("{error}\n{:#?}{}", bench.disk(), bench.logs()));
    assert_eq!(bench.owner(), "n2");
    judge(&mut target);
    eprintln!(
        "migrated in {} ms, QEMU's downtime {} ms; no write was answered for {:?} around it, and for up to {:?} before",
        done["total-time"], done["downtime"], pauses.switch, pauses.usual
    );
    let longest = LONGEST_PAUSE.max(pauses.usual * TIMES_USUAL).min(4 * LONGEST_PAUSE);
    assert!(pauses.switch.is_some_and(|pause| pause < longest), "{pauses:?}{}", bench.logs());
    bench.wait_effective();
}

#[test]
fn a_migration_that_is_given_up_leaves_guest_and_disk_where_they_are() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let mut source = boot_writing(&bench);
    let client = bench.lab.any_client().unwrap();
    client.follow(DISK, Some("n2")).unwrap();
    let (mut target, there) = await_guest(&bench, "n2");
    let mut machine = Machine::connect(&bench.directory.path().join("n1.qmp"));
    // So slow that it cannot be over before it is cancelled.
    machine.ask("migrate-set-parameters", &json!({ "max-bandwidth": 1 << 20 }));
    machine.ask("migrate", &there);
    thread::sleep(Duration::from_secs(1));
    assert_eq!(machine.ask("query-migrate", &json!({}))["status"], "active");
    machine.ask("migrate_cancel", &json!({}));
    target.kill();
    assert_eq!(client.follow(DISK, None).unwrap().follower, None);
    source.run(GO_ON, SOON).unwrap_or_else(|error| panic!("{error}\n{:#?}{}", bench.disk(), bench.logs()));
    assert_eq!(bench.owner(), "n1");
    judge(&mut source);
    bench.wait_effective();
}
