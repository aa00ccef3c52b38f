#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_block::Nanos;

use super::*;

const START: Nanos = Nanos(1_000_000_000);

fn at(ms: u64) -> Nanos {
    START + Duration::from_millis(ms)
}

/// The log of `steps`, run until nothing is scheduled.
fn log_of(seed: u64, steps: impl FnOnce(Arc<Mutex<Vec<String>>>)) -> Vec<String> {
    let log = Arc::new(Mutex::new(Vec::new()));
    let process = Process::new(seed);
    let handle = Arc::clone(&log);
    process.enter(START, || steps(handle));
    let mut now = START;
    while process.due() != Nanos::NEVER {
        now = now.max(process.due());
        assert!(process.run(now), "all tasks wait at the end");
    }
    drop(process);
    std::mem::take(&mut log.lock().unwrap())
}

fn record(log: &Arc<Mutex<Vec<String>>>, text: &str) {
    let at = (Nanos::now() - START).as_millis();
    log.lock().unwrap().push(format!("{at} {text}"));
}

#[test]
fn time_follows_the_simulation() {
    let lines = log_of(1, |log| {
        spawn(async move {
            sleep(Duration::from_millis(30)).await;
            record(&log, "slept");
            let late = timeout(Duration::from_millis(20), std::future::pending::<()>()).await;
            record(&log, &format!("{late:?}"));
            let soon = timeout(Duration::from_millis(20), async { 7 }).await;
            record(&log, &format!("{soon:?}"));
            let mut ticks = interval(Duration::from_millis(100));
            ticks.tick().await;
            ticks.tick().await;
            record(&log, "ticked");
        });
    });
    assert_eq!(lines, ["30 slept", "50 Err(Elapsed)", "50 Ok(7)", "150 ticked"]);
    assert!(Nanos::now() > Nanos(0), "the machine's clock is back");
}

#[test]
fn tasks_wake_each_other_and_are_joined() {
    let lines = log_of(1, |log| {
        let (sender, mut queue) = mpsc::channel(1);
        spawn(async move {
            let joined = spawn(async move {
                for number in 0..3 {
                    sender.send(number).await.unwrap();
                    sleep(Duration::from_millis(10)).await;
                }
                "done"
            });
            while let Some(number) = queue.recv().await {
                record(&log, &number.to_string());
            }
            record(&log, joined.await.unwrap());
        });
    });
    assert_eq!(lines, ["0 0", "10 1", "20 2", "30 done"]);
}

#[test]
fn an_aborted_task_is_dropped_at_its_await() {
    let lines = log_of(1, |log| {
        let (held, released) = oneshot::channel::<()>();
        let task = spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        spawn(async move {
            sleep(Duration::from_millis(5)).await;
            assert!(!task.is_finished());
            task.abort();
            record(&log, &format!("{:?} {:?}", released.await.is_err(), task.await));
        });
    });
    assert_eq!(lines, ["5 true Err(Aborted)"]);
}

#[test]
fn the_end_of_a_process_ends_its_tasks() {
    let process = Process::new(3);
    let (held, mut released) = oneshot::channel::<()>();
    process.enter(START, || {
        spawn(async move {
            let _held = held;
            sleep(Duration::from_secs(1)).await;
        })
    });
    assert!(process.run(at(1)));
    assert_eq!(process.due(), at(0) + Duration::from_millis(1001));
    drop(process);
    assert!(released.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
}

#[test]
fn the_seed_decides_the_order() {
    let order = |seed| {
        log_of(seed, |log| {
            for number in 0..6 {
                let log = Arc::clone(&log);
                spawn(async move { record(&log, &number.to_string()) });
            }
        })
    };
    assert_eq!(order(5), order(5));
    let mut orders: Vec<_> = (0..20).map(order).collect();
    orders.sort();
    orders.dedup();
    assert!(orders.len() > 5, "{orders:?}");
}

#[tokio::test]
async fn outside_a_simulation_tasks_are_tokios() {
    let before = Nanos::now();
    assert_eq!(spawn(async { 3 }).await, Ok(3));
    sleep(Duration::from_millis(5)).await;
    assert_eq!(timeout(Duration::from_millis(5), std::future::pending::<()>()).await, Err(Elapsed));
    assert!(Nanos::now() - before >= Duration::from_millis(10));
    let endless = spawn(std::future::pending::<()>());
    endless.abort();
    assert_eq!(endless.await, Err(Aborted));
}

#[test]
fn spinning_tasks_are_detected() {
    let process = Process::new(1);
    process.enter(START, || {
        spawn(async {
            loop {
                timeout(Duration::ZERO, std::future::pending::<()>()).await.unwrap_err();
                tokio::task::yield_now().await;
            }
        })
    });
    assert!(!process.run(at(0)));
}
