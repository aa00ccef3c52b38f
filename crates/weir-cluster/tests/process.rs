//! The registry reports the end of a process at once; a paused process does not count as ended.
//!
//! The tests start this binary again; the children run `be_a_node`.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::wait::eventually;
use common::{Machine, client, node};
use rustix::process::{Pid, Signal, kill_process};
use weir_cluster::membership::{NodeSession, SessionConfig};
use weir_cluster::records::{NodeRef, Record, StoppedHow, StoppedRecord, keys};
use weir_cluster::registry::{ProcessWatch, Registry};

const SOCKET: &str = "WEIR_TEST_SOCKET";
const TTL: &str = "WEIR_TEST_TTL_MS";

/// Not a test: the main function of a child process.
#[test]
#[ignore = "run by the other tests as a child process"]
fn be_a_node() {
    let (Ok(socket), Ok(ttl)) = (std::env::var(SOCKET), std::env::var(TTL)) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ttl = Duration::from_millis(ttl.parse().unwrap());
        let config = SessionConfig { ttl, margin: ttl / 4 };
        let session = NodeSession::start(client(socket.as_ref()), node("child", 5), config).await.unwrap();
        assert_eq!(session.process_watch(), ProcessWatch::Watched);
        // Longer than any test; a child must not outlive its dead parent indefinitely.
        tokio::time::sleep(Duration::from_secs(120)).await;
    });
}

/// A child process; killed and reaped on drop.
struct Node(Child);

impl Node {
    async fn start(machine: &Machine, ttl: Duration) -> Node {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "be_a_node", "--ignored", "--nocapture"])
            .env(SOCKET, machine.socket())
            .env(TTL, ttl.as_millis().to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let registry = machine.embedded();
        eventually("the child joins", || async { registry.get("nodes/child").await.unwrap().is_some() })
            .await;
        Node(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn stopped() -> String {
    keys::stopped(&NodeRef::new("child", 5))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_is_reported_at_once() {
    let machine = Machine::start().await;
    let registry = machine.embedded();
    // A lease so long that only the process's end can be the cause.
    let child = Node::start(&machine, Duration::from_secs(600)).await;
    assert!(registry.get(&stopped()).await.unwrap().is_none());
    let before = registry.list("").await.unwrap().revision;
    child.signal(Signal::KILL);
    let took =
        eventually("it is reported", || async { registry.get(&stopped()).await.unwrap().is_some() }).await;
    assert!(took < Duration::from_secs(2), "{took:?}");
    let note = registry.get(&stopped()).await.unwrap().unwrap();
    let note = StoppedRecord::of(&note).unwrap();
    assert_eq!((note.how, note.machine), (StoppedHow::ProcessEnded, weir_cluster::Machine::here()));
    // Its node was removed at the same revision: no observer sees one without the other.
    let after = registry.list("").await.unwrap();
    assert_eq!((after.revision, after.entries.len()), (before + 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_loses_its_lease_but_is_not_reported() {
    let machine = Machine::start().await;
    let registry = machine.embedded();
    let child = Node::start(&machine, Duration::from_millis(600)).await;
    child.signal(Signal::STOP);
    let gone = || async { registry.get("nodes/child").await.unwrap().is_none() };
    eventually("its lease ends", gone).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(registry.get(&stopped()).await.unwrap().is_none(), "it may resume at any time");
    child.signal(Signal::KILL);
    eventually("its end is reported", || async { registry.get(&stopped()).await.unwrap().is_some() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_connection_is_not_the_end_of_a_process() {
    let machine = Machine::start().await;
    let registry = machine.embedded();
    let first = machine.client();
    let lease = first.grant(Duration::from_millis(500)).await.unwrap();
    assert_eq!(first.register_process("self", 9, lease).await, Ok(ProcessWatch::Watched));
    drop(first);
    let second = machine.client();
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert!(second.keep_alive(lease).await.is_err(), "only the lease shows it");
    assert!(registry.list(keys::STOPPED).await.unwrap().entries.is_empty());
    // The same process may register with a new lease; another one under its name may not.
    let lease = second.grant(Duration::from_secs(9)).await.unwrap();
    assert_eq!(second.register_process("self", 9, lease).await, Ok(ProcessWatch::Watched));
    let _child = Node::start(&machine, Duration::from_secs(9)).await;
    let error = second.register_process("child", 5, lease).await.unwrap_err();
    assert!(error.to_string().contains("incarnation of its own"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_resumes_watches_and_reports_ended_processes() {
    let mut machine = Machine::start().await;
    let child = Node::start(&machine, Duration::from_secs(600)).await;
    machine.restart().await;
    assert!(machine.embedded().get(&stopped()).await.unwrap().is_none());
    child.signal(Signal::KILL);
    let registry = machine.embedded();
    eventually("the new server reports it", || async { registry.get(&stopped()).await.unwrap().is_some() })
        .await;
    drop((child, registry));

    let mut machine = Machine::start().await;
    let child = Node::start(&machine, Duration::from_secs(600)).await;
    machine.stop().await;
    drop(child);
    machine.restart().await;
    assert!(machine.embedded().get(&stopped()).await.unwrap().is_some(), "before any client is served");
    assert!(machine.embedded().get("nodes/child").await.unwrap().is_none());
}
