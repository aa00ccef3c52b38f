//! Wishes to coordinate, on a LUN that takes its time.

use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::lun::fence_command::FenceCommand;
use crate::lun::heartbeat::Area;
use crate::lun::reservations::{Key, Reservations};

const VOLUME: VolumeId = VolumeId([7; 16]);
const SOON: Duration = Duration::from_secs(60);

/// On the build's own filesystem: the LUN is read past the page cache.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
}

/// A shell, and its LUN in the directory: a file with a heartbeat area.
fn shell(directory: &std::path::Path) -> (Shell, Receiver<Answer>) {
    let lun = directory.join("lun");
    std::fs::File::create(&lun).unwrap().set_len(8 << 20).unwrap();
    Area::create(&lun, 0, VOLUME).unwrap();
    let me = Process { node: 1, incarnation: 1 };
    let command = FenceCommand {
        program: None,
        limit: SOON,
        volume: "v".into(),
        lun: lun.clone(),
        lock: directory.join("lock"),
    };
    let reservations = Reservations { is_on: false, lun: lun.clone(), key: Key::new(VOLUME, me), wait: SOON };
    let fencing = Fencing::new(VOLUME, me, reservations, command);
    let (name, identity, former) = ("n1".into(), "naa.1".into(), Vec::new());
    let devices = vec![lun.clone()];
    let answer_timeout = Duration::from_secs(2);
    let host =
        Host { me, name, volume: VOLUME, lun, identity, area: 0, fencing, former, devices, answer_timeout };
    let (answers, heard) = channel();
    (Shell::new(host, answers), heard)
}

fn wish(shell: &mut Shell, revision: u64) {
    assert!(shell.step(Event::Wanted { wanted: true, revision }).is_empty());
    shell.tick();
}

/// Whoever wishes repeats it every second.
#[test]
fn a_survey_that_takes_longer_than_a_wish_is_the_only_one_and_its_answer_counts() {
    let directory = scratch();
    let (mut shell, answers) = shell(directory.path());
    let shared = Arc::clone(&shell.shared);
    // As while a heartbeat is on its way to a LUN that does not answer.
    let hangs = lock(&shared.heart);
    (0..20).for_each(|_| wish(&mut shell, 1));
    assert_eq!(Arc::strong_count(&shared), 3, "one thread, beside the shell and this test");
    drop(hangs);
    let answer = answers.recv_timeout(SOON).unwrap();
    assert!(matches!(answer, Answer::Permitted { revision: 1, .. }), "{answer:?}");
    let _proposals = shell.take(answer);
    assert_eq!(shell.phase(), Phase::Claiming);
    // What is wished goes on.
    let deadline = Nanos::now() + SOON;
    while shared.is_surveying.load(Ordering::Relaxed) {
        assert!(Nanos::now() < deadline, "the survey does not end");
    }
    (0..20).for_each(|_| wish(&mut shell, 1));
    assert!(!shared.is_surveying.load(Ordering::Relaxed), "nothing is looked at for it");
}

#[test]
fn a_survey_for_another_revision_does_not_count_and_the_next_one_follows() {
    let directory = scratch();
    let (mut shell, answers) = shell(directory.path());
    let shared = Arc::clone(&shell.shared);
    let hangs = lock(&shared.heart);
    wish(&mut shell, 1);
    wish(&mut shell, 2);
    drop(hangs);
    let first = answers.recv_timeout(SOON).unwrap();
    assert!(matches!(first, Answer::Permitted { revision: 1, .. }), "{first:?}");
    assert!(shell.take(first).is_empty());
    assert_eq!(shell.phase(), Phase::Absent);
    let deadline = Nanos::now() + SOON;
    let second = loop {
        shell.tick();
        match answers.recv_timeout(Duration::from_millis(5)) {
            Ok(answer) => break answer,
            Err(_) => assert!(Nanos::now() < deadline, "no second survey"),
        }
    };
    assert!(matches!(second, Answer::Permitted { revision: 2, .. }), "{second:?}");
    let _proposals = shell.take(second);
    assert_eq!(shell.phase(), Phase::Claiming);
}

/// A former process has used the LUN by a path that this one does not use.
#[test]
fn requests_of_a_former_process_by_another_path_are_awaited() {
    let directory = scratch();
    let path = directory.path().join("other");
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(&path).unwrap();
    let former = [Mark::of("n1#1"), Mark::of("n1#2")];
    is_unused(&path, &former).unwrap();
    former[1].set(&file).unwrap();
    let said = is_unused(&path, &former).unwrap_err();
    assert!(said.contains("other, another path to it, has requests of a former process"), "{said}");
    is_unused(&path, &former[..1]).unwrap();
    drop(file);
    let deadline = Nanos::now() + SOON;
    // A process that another test has just started holds every open file until it calls exec.
    while is_unused(&path, &former).is_err() {
        assert!(Nanos::now() < deadline);
        thread::sleep(Duration::from_millis(1));
    }
    std::fs::remove_file(&path).unwrap();
    is_unused(&path, &former).unwrap();
}

/// Lets the threads answer, and the registry take every proposal, until `is_there`.
fn go_on_until(
    shell: &mut Shell,
    answers: &Receiver<Answer>,
    registry: &mut (u64, Record<u64>),
    mut is_there: impl FnMut(&mut Shell, &Record<u64>) -> bool,
) {
    let deadline = Nanos::now() + SOON;
    let mut outputs = shell.step(Event::Seen { revision: registry.0, record: registry.1.clone() });
    while !is_there(shell, &registry.1) {
        assert!(Nanos::now() < deadline, "{:?}, {registry:?}", shell.phase());
        for output in std::mem::take(&mut outputs) {
            match output {
                Output::Propose { revision, to, .. } if revision == registry.0 => {
                    *registry = (revision + 1, to);
                    let (revision, record) = registry.clone();
                    outputs.extend(shell.step(Event::Seen { revision, record }));
                }
                Output::DropLeases => outputs.extend(shell.step(Event::LeasesDropped)),
                _ => {}
            }
        }
        shell.tick();
        if let Ok(answer) = answers.recv_timeout(Duration::from_millis(5)) {
            outputs.extend(shell.take(answer));
        }
    }
}

#[test]
fn a_node_that_the_lun_does_not_answer_gives_its_claim_up() {
    let directory = scratch();
    let (mut shell, answers) = shell(directory.path());
    let me = shell.shared.host.me;
    let mut registry = (1, Record::default());
    go_on_until(&mut shell, &answers, &mut registry, |shell, _| shell.is_admitted());
    let shared = Arc::clone(&shell.shared);
    let (begun, permitted) = (Nanos::now(), registry.0);
    let mut hangs = None;
    go_on_until(&mut shell, &answers, &mut registry, |shell, record| {
        if !shell.is_wanted() && hangs.is_none() {
            wish(shell, permitted);
        } else if shell.is_wanted() && hangs.is_none() {
            // The survey is over: from here on the heartbeat is the first that has no answer.
            hangs = Some(lock(&shared.heart));
        }
        record.coordinator == Some(me)
    });
    assert!(!shell.is_stuck(), "not yet");
    while !shell.is_stuck() {
        assert!(Nanos::now() < begun + SOON);
        thread::sleep(Duration::from_millis(5));
    }
    assert!(Nanos::now() >= begun + shared.host.answer_timeout);
    assert!(shell.trouble().contains("has not answered this node"), "{}", shell.trouble());
    let outputs = shell.step(Event::Stuck);
    let left = |output: &Output| matches!(output, Output::Propose { to, .. } if *to == Record { epoch: 1, ..Record::default() });
    assert!(!shell.is_wanted() && outputs.iter().any(left), "{outputs:?}");
    drop(hangs);
    while shell.is_stuck() {
        assert!(Nanos::now() < begun + SOON);
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(shell.trouble(), "");
}
