//! The registry is away for a while: stopped, or killed and started again. All that needs no change goes on as before (P12).

use std::path::Path;
use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::{LabFlash, REGISTRY};
use weir_load::verify::{Atomicity, History};
use weir_load::verifying::{Settings, VerifyingLoad};
use weir_nbd::Uri;
use weir_node::api::{CreateDisk, DiskView, Export, Medium};

use super::{TTL, soak};
use crate::common::{Bench, SIZE, SOON, alone, new_history, seed};

/// Longest stall of a disk that needs nothing from the registry. A machine that does much else has longer ones by itself, so outside
/// the soak only an outage counts.
fn longest_stall() -> Duration {
    Duration::from_millis(if soak().is_some() { 100 } else { 1000 })
}

/// The time for which the registry is away.
fn away() -> Duration {
    Duration::from_secs(if soak().is_some() { 60 } else { 10 })
}

/// A disk to be taken over is served again this soon after the registry is back.
const TAKEN_OVER: Duration = Duration::from_secs(10);

/// A disk under load.
struct Disk {
    name: String,
    policy: &'static str,
    medium: Medium,
    owner: &'static str,
}

fn disk(number: usize, policy: &'static str, medium: Medium, owner: &'static str) -> Disk {
    Disk { name: format!("away{number}"), policy, medium, owner }
}

/// A lab whose media are memory, so that stalls are Weir's and not the machine's disk's.
fn lab(memory: &Path, nodes: usize) -> Bench {
    let flash: Vec<_> = (1..=nodes).map(|number| memory.join(format!("flash{number}"))).collect();
    for path in &flash {
        std::fs::File::create(path).unwrap().set_len(512 << 20).unwrap();
    }
    let pool = memory.join("pool");
    std::fs::create_dir(&pool).unwrap();
    Bench::up_on(&pool, nodes, "write-back+1", |config| {
        config.lease_ttl = TTL;
        config.flash = LabFlash::Devices(flash);
        config.log = Size(64 << 20);
    })
}

impl Disk {
    fn create(&self, bench: &Bench) {
        let client = bench.lab.client(self.owner).unwrap();
        let wanted = CreateDisk {
            name: self.name.clone(),
            volume: "pool".into(),
            size: SIZE,
            logical_block: 512,
            policy: self.policy.into(),
            medium: self.medium,
            limit: None,
        };
        client.create_disk(&wanted).unwrap();
        client.export(&self.name, &Export::default()).unwrap();
        self.wait(bench, SOON, |view| view.requested == view.effective && view.state == "serving");
    }

    /// The disk as its owner shows it.
    fn view(&self, bench: &Bench) -> Option<DiskView> {
        let clients = bench.lab.nodes().iter().map(|node| node.client().patience(Duration::from_secs(1)));
        let views = clients.filter_map(|client| client.disk(&self.name).ok());
        views.filter(|view| view.detail.is_some()).max_by_key(|view| view.epoch)
    }

    /// Waits until its owner shows it in a certain way; how long that took.
    fn wait(&self, bench: &Bench, patience: Duration, wanted: impl Fn(&DiskView) -> bool) -> Duration {
        let start = Nanos::now();
        loop {
            let view = self.view(bench);
            if view.as_ref().is_some_and(&wanted) {
                return Nanos::now() - start;
            }
            let waited = Nanos::now() - start;
            assert!(
                waited < patience,
                "{} is not as wanted after {waited:?}: {view:#?}{}",
                self.name,
                bench.logs()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// A load that leaves the machine time for the others, and gives no connection up: a guest would not.
    fn load(&self, bench: &Bench, history: History) -> VerifyingLoad {
        let settings = Settings {
            depth: 4,
            rate: Some(200),
            seed: history.run(),
            reconnect_for: away() + SOON,
            timeout: away() + SOON,
            atomicity: Atomicity::Block,
            ..Settings::default()
        };
        let nodes = bench.lab.nodes().to_vec();
        let name = self.name.clone();
        let locate = move |_| {
            let open = |node: &weir_lab::LabNode| {
                let view = node.client().patience(Duration::from_millis(300)).disk(&name).ok()?;
                // Any node knows where it is open.
                let here = view.detail.is_some() && view.owner.as_ref() == Some(&node.name);
                here.then_some(view.epoch)
            };
            let found = nodes.iter().filter_map(|node| Some((open(node)?, &node.nbd_unix)));
            found.max_by_key(|(epoch, _)| *epoch).map(|(_, socket)| Uri::unix(socket, &name))
        };
        VerifyingLoad::new(history, settings, Box::new(locate))
    }
}

/// Histories of new disks.
fn new_histories(disks: &[Disk], seed: u64) -> Vec<History> {
    (seed..).take(disks.len()).map(new_history).collect()
}

/// Runs a load on each disk while `work` goes on; returns the loads.
fn under_load<T>(
    bench: &mut Bench,
    disks: &[Disk],
    histories: Vec<History>,
    work: impl FnOnce(&mut Bench) -> T,
) -> (Vec<VerifyingLoad>, T) {
    let loads: Vec<_> =
        disks.iter().zip(histories).map(|(disk, history)| disk.load(bench, history)).collect();
    let progress: Vec<_> = loads.iter().map(VerifyingLoad::progress).collect();
    let run = |mut load: VerifyingLoad| {
        thread::spawn(move || {
            let result = load.run(Duration::from_secs(3600));
            (load, result)
        })
    };
    let threads: Vec<_> = loads.into_iter().map(run).collect();
    thread::sleep(Duration::from_secs(3));
    let outcome = work(bench);
    progress.iter().for_each(|progress| progress.stop());
    let ended = threads.into_iter().map(|thread| {
        let (load, result) = thread.join().unwrap();
        result.unwrap();
        load
    });
    (ended.collect(), outcome)
}

/// The outcome of the requests on one disk.
#[derive(Debug)]
struct Outcome {
    stall: Duration,
    acknowledged: u64,
    failed: u64,
    wrong: u64,
    first: Vec<String>,
}

/// The outcomes of the requests, disk by disk, printed for all disks before any is judged: nothing lost, no error.
fn judge(bench: &Bench, disks: &[Disk], loads: Vec<VerifyingLoad>) -> Vec<Outcome> {
    let outcome = |(disk, mut load): (&Disk, VerifyingLoad)| {
        let progress = load.progress();
        let (stall, acknowledged) = (progress.longest_stall(), progress.acknowledged());
        let mixed = load.found().clone();
        let all = load.check_all().unwrap();
        let wrong = mixed.mismatches + all.mismatches;
        let Disk { name, policy, medium, owner } = disk;
        eprintln!(
            "{name} {policy} {medium} on {owner}: longest stall {stall:?}, {acknowledged} writes, {} failed, {wrong} wrong",
            progress.failed()
        );
        Outcome {
            stall,
            acknowledged,
            failed: progress.failed(),
            wrong,
            first: [mixed.first, all.first].concat(),
        }
    };
    let outcomes: Vec<_> = disks.iter().zip(loads).map(outcome).collect();
    for outcome in &outcomes {
        assert_eq!(outcome.wrong, 0, "{:#?}{}", outcome.first, bench.logs());
        assert_eq!(outcome.failed, 0, "a guest saw an error (P9){}", bench.logs());
        assert!(outcome.acknowledged > 100, "the load did nothing to speak of{}", bench.logs());
    }
    outcomes
}

/// The stalls without a fault.
fn quiet(bench: &mut Bench, disks: &[Disk], seed: u64) -> Vec<History> {
    let histories = new_histories(disks, seed);
    let (loads, ()) = under_load(bench, disks, histories, |_| thread::sleep(Duration::from_secs(3)));
    let stalls: Vec<_> = loads.iter().map(|load| load.progress().longest_stall()).collect();
    eprintln!("with the registry there: longest stalls {stalls:?}");
    loads.into_iter().map(VerifyingLoad::into_history).collect()
}

/// Every policy and both media.
fn every_kind() -> Vec<Disk> {
    vec![
        disk(1, "write-back+1", Medium::Ram, "n1"),
        disk(2, "write-back+1", Medium::Flash, "n2"),
        disk(3, "write-back+2", Medium::Ram, "n3"),
        disk(4, "write-back+2", Medium::Flash, "n1"),
        disk(5, "write-back+0", Medium::Ram, "n2"),
        disk(6, "write-through", Medium::Ram, "n3"),
    ]
}

fn nobody_notices(leave: impl FnOnce(&mut Bench), back: impl FnOnce(&mut Bench)) {
    let _turn = alone();
    let seed = seed();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut bench = lab(memory.path(), 3);
    let disks = every_kind();
    disks.iter().for_each(|disk| disk.create(&bench));
    let histories = quiet(&mut bench, &disks, seed);
    let (loads, ()) = under_load(&mut bench, &disks, histories, |bench| {
        leave(bench);
        thread::sleep(away());
        back(bench);
        thread::sleep(Duration::from_secs(4));
    });
    let outcomes = judge(&bench, &disks, loads);
    for disk in &disks {
        let view = disk.view(&bench).unwrap();
        assert_eq!((view.owner.as_deref(), &view.effective), (Some(disk.owner), &view.requested));
    }
    let stalls: Vec<_> = outcomes.iter().map(|outcome| outcome.stall).collect();
    assert!(stalls.iter().all(|stall| *stall < longest_stall()), "{stalls:?}{}", bench.logs());
}

#[test]
fn the_registry_stands_still_and_nobody_notices() {
    nobody_notices(|bench| bench.lab.pause(REGISTRY).unwrap(), |bench| bench.lab.resume(REGISTRY).unwrap());
}

#[test]
fn the_registry_is_killed_and_started_and_nobody_notices() {
    nobody_notices(|bench| bench.lab.kill(REGISTRY).unwrap(), |bench| bench.lab.start(REGISTRY).unwrap());
}

/// A node dies while the registry is away. Its disks wait for the registry, those that it is a member of pause (the set does
/// not shrink without the registry), and no other disk is affected. There are four nodes, so that a disk without replicas has
/// three guards, of which one may die.
#[test]
fn a_node_dies_while_the_registry_is_away() {
    const VICTIM: &str = "n4";
    let _turn = alone();
    let seed = seed();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut bench = lab(memory.path(), 4);
    let mut disks = vec![
        disk(1, "write-back+1", Medium::Ram, VICTIM),
        disk(2, "write-through", Medium::Ram, VICTIM),
        disk(3, "write-through", Medium::Ram, "n1"),
        disk(4, "write-back+0", Medium::Ram, "n2"),
    ];
    disks.iter().for_each(|disk| disk.create(&bench));
    // Enough disks with a replica that the victim is a member of some and not of others.
    let is_member = |bench: &Bench, disk: &Disk| {
        disk.view(bench).unwrap().replicas.iter().any(|replica| replica == VICTIM)
    };
    let (mut with, mut without) = (0, 0);
    for number in 5..13 {
        let disk = disk(number, "write-back+1", Medium::Ram, ["n1", "n2", "n3"][number % 3]);
        disk.create(&bench);
        *(if is_member(&bench, &disk) { &mut with } else { &mut without }) += 1;
        disks.push(disk);
        if with > 0 && without > 0 {
            break;
        }
    }
    assert!(with > 0 && without > 0, "placement puts all replicas in one place: {with}, {without}");
    let members: Vec<bool> = disks.iter().map(|disk| is_member(&bench, disk)).collect();

    let (loads, taken_over) = under_load(&mut bench, &disks, new_histories(&disks, seed), |bench| {
        bench.lab.pause(REGISTRY).unwrap();
        thread::sleep(away() / 2);
        bench.lab.kill(VICTIM).unwrap();
        thread::sleep(away() / 2);
        bench.lab.resume(REGISTRY).unwrap();
        let served = |view: &DiskView| view.owner.as_deref() != Some(VICTIM) && view.state == "serving";
        let waits = disks[..2].iter().map(|disk| disk.wait(bench, TAKEN_OVER, served)).collect::<Vec<_>>();
        // Paused nodes go on.
        for (disk, _) in disks.iter().zip(&members).filter(|(_, member)| **member) {
            disk.wait(bench, SOON, |view| view.effective == view.requested && view.state == "serving");
        }
        thread::sleep(Duration::from_secs(4));
        waits
    });
    eprintln!(
        "the dead node's disks were served again {taken_over:?} after the registry's return, one after the other"
    );
    for ((disk, outcome), member) in disks.iter().zip(judge(&bench, &disks, loads)).zip(members) {
        let (stall, harmed) = (outcome.stall, disk.owner == VICTIM || member);
        assert!(harmed || stall < longest_stall(), "{}: {stall:?}{}", disk.name, bench.logs());
        let longest = away() / 2 + TAKEN_OVER + Duration::from_secs(5);
        assert!(stall < longest, "{} waited for {stall:?}{}", disk.name, bench.logs());
    }
}
