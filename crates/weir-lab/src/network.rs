//! A network of its own for a lab: each node in a network namespace, joined by a bridge in one more. Any link from one node
//! to another can be cut, one direction at a time.
//!
//! The nodes' Unix sockets (API, NBD, registry) do not belong to a network and work as ever, so tests reach every node
//! whatever is cut. The link to the registry leads through a relay (`relay.rs`) and is cut there; to each member of etcd leads one of
//! its own, which listens in the node's namespace at the member's address. Through it the registry cannot see the end of a node's
//! process: it learns of it by the lease, as in a cluster of several machines.
//!
//! Needs root, iproute2 and nftables. A namespace is named after the process that made it (`weir-PID-START-…`); the next
//! process to make some removes those whose process has ended.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::LabError;
use crate::process::{ProcessId, ProcessState};
use crate::relay::{Direction, Relay};

/// The directory of named namespaces, as `ip netns` keeps them.
const NAMESPACES: &str = "/run/netns";

/// The common prefix of all our namespaces' names.
const PREFIX: &str = "weir";

/// A node's interface in its namespace.
const INTERFACE: &str = "peers0";

/// The bridge in the switch's namespace.
const BRIDGE: &str = "switch0";

/// The registry's name among those of nodes.
pub const REGISTRY: &str = "registry";

/// A way, from one node (or [`REGISTRY`]) to another.
type Way = (String, String);

/// The place of the registry, from where the lab is.
pub(crate) enum Registry<'a> {
    /// A socket, and for each node the socket where the node looks for it.
    Socket(&'a Path, Vec<PathBuf>),
    /// The addresses of etcd's members, the same for all nodes. They are loopback addresses.
    Etcd(&'a [SocketAddr]),
}

/// The network of one lab, removed when dropped.
#[derive(Debug)]
pub struct Network {
    /// The prefix of this lab's namespaces' names, up to the name of the node.
    prefix: String,
    nodes: Vec<String>,
    /// Those of each node, in the nodes' order.
    relays: Vec<Vec<Relay>>,
    cuts: Mutex<BTreeSet<Way>>,
}

impl Network {
    /// A network for these nodes, with links to the registry.
    pub(crate) fn up(nodes: Vec<String>, registry: &Registry<'_>) -> Result<Network, LabError> {
        if !rustix::process::geteuid().is_root() {
            let reason = "network namespaces need root; run this as root, or the lab without a network";
            return Err(LabError::Invalid(reason.into()));
        }
        remove_stale();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let me = ProcessId::of(std::process::id()).map_err(LabError::system("looking at /proc/self"))?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("{PREFIX}-{}-{}-{number}", me.pid, me.start_time);
        // From here on it is cleaned up, also on failure.
        let mut network = Network { prefix, nodes, relays: Vec::new(), cuts: Mutex::default() };
        network.make_switch()?;
        for (index, node) in network.nodes.iter().enumerate() {
            network.join(node, address(index + 1))?;
        }
        network.link(registry)?;
        Ok(network)
    }

    /// The relays to the registry.
    fn link(&mut self, registry: &Registry<'_>) -> Result<(), LabError> {
        match registry {
            Registry::Socket(registry, sockets) => {
                for socket in sockets {
                    let relay = Relay::listen(socket, registry)
                        .map_err(LabError::system(format!("listening at {}", socket.display())))?;
                    self.relays.push(vec![relay]);
                }
            }
            Registry::Etcd(members) => {
                for node in &self.nodes {
                    let relay = |member: &SocketAddr| self.relay_to(node, *member);
                    self.relays.push(members.iter().map(relay).collect::<Result<_, _>>()?);
                }
            }
        }
        Ok(())
    }

    /// Listens in the node's namespace at the address that the member has in ours.
    fn relay_to(&self, node: &str, member: SocketAddr) -> Result<Relay, LabError> {
        let listener = self
            .inside(node, || TcpListener::bind(member))
            .map_err(LabError::system(format!("listening at {member} for {node}")))?;
        let namespace = self.namespace(node);
        let wake = move || inside(&namespace, || TcpStream::connect(member)).is_ok();
        Ok(Relay::listen_tcp(listener, member, wake))
    }

    fn make_switch(&self) -> Result<(), LabError> {
        let switch = self.namespace("switch");
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", BRIDGE, "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", BRIDGE, "up"])
    }

    /// A namespace for the node, with a cable to the switch whose other end has the node's name.
    fn join(&self, node: &str, address: IpAddr) -> Result<(), LabError> {
        let (here, switch) = (self.namespace(node), self.namespace("switch"));
        ip(&["netns", "add", &here])?;
        ip(&["-n", &switch, "link", "add", node, "type", "veth", "peer", "name", INTERFACE, "netns", &here])?;
        ip(&["-n", &switch, "link", "set", node, "master", BRIDGE, "up"])?;
        ip(&["-n", &here, "address", "add", &format!("{address}/24"), "dev", INTERFACE])?;
        ip(&["-n", &here, "link", "set", INTERFACE, "up"])?;
        ip(&["-n", &here, "link", "set", "lo", "up"])
    }

    /// Cuts these links, each from the first to the second, beside those that are cut already. Packets are lost silently, as
    /// by a switch that fails. One of the two may be [`REGISTRY`].
    ///
    /// # Errors
    /// There is no such node, or the system refuses.
    pub fn cut(&self, ways: impl IntoIterator<Item = Way>) -> Result<(), LabError> {
        let mut cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        for (from, to) in ways {
            for name in [&from, &to] {
                if name != REGISTRY && !self.nodes.contains(name) {
                    return Err(LabError::NoNode { name: name.clone(), known: self.nodes.join(", ") });
                }
            }
            cuts.insert((from, to));
        }
        self.apply(&cuts)
    }

    /// Restores every way.
    ///
    /// # Errors
    /// The system refuses.
    pub fn restore(&self) -> Result<(), LabError> {
        let mut cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        cuts.clear();
        self.apply(&cuts)
    }

    /// Both ways between two.
    #[must_use]
    pub fn between(&self, one: &str, other: &str) -> Vec<Way> {
        vec![(one.into(), other.into()), (other.into(), one.into())]
    }

    /// All ways from a node to the other nodes.
    #[must_use]
    pub fn from_node(&self, node: &str) -> Vec<Way> {
        self.nodes.iter().filter(|other| *other != node).map(|other| (node.into(), other.clone())).collect()
    }

    /// All ways from the other nodes to a node.
    #[must_use]
    pub fn to_node(&self, node: &str) -> Vec<Way> {
        self.from_node(node).into_iter().map(|(node, other)| (other, node)).collect()
    }

    /// All ways from and to a node, those from and to the registry too.
    #[must_use]
    pub fn everything(&self, node: &str) -> Vec<Way> {
        [self.from_node(node), self.to_node(node), self.between(node, REGISTRY)].concat()
    }

    /// Lets a node send at most so many bytes in a second (token bucket, tc-tbf(8)); `None` lifts the limit.
    ///
    /// # Errors
    /// There is no such node, the rate is below 1000 bytes per second, or the system refuses.
    pub fn shape(&self, node: &str, rate: Option<u64>) -> Result<(), LabError> {
        let namespace = self.namespace(node);
        let tc = |rest: &[&str]| run("tc", &[&["-n", &namespace, "qdisc"], rest].concat(), "");
        let Some(rate) = rate else { return tc(&["delete", "dev", INTERFACE, "root"]) };
        if rate < 1000 {
            return Err(LabError::Invalid(format!("{rate} bytes per second are too few; give 1000 or more")));
        }
        // A burst lasts 10 ms and takes at least one packet as large as the kernel makes them.
        let burst = (rate / 100).max(64 << 10);
        let (rate, burst) = (format!("{rate}bps"), format!("{burst}b"));
        tc(&["replace", "dev", INTERFACE, "root", "tbf", "rate", &rate, "burst", &burst, "latency", "100ms"])
    }

    /// Does something in a node's namespace: sockets that are made there, and processes that are started there, stay in it.
    pub(crate) fn inside<T: Send>(
        &self,
        node: &str,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        inside(&self.namespace(node), work)
    }

    /// Ends a node's connections to the registry, which it makes again.
    ///
    /// # Errors
    /// There is no such node.
    pub fn hang_up(&self, node: &str) -> Result<(), LabError> {
        let known = self.nodes.iter().zip(&self.relays).find(|(name, _)| *name == node);
        let (_, relays) =
            known.ok_or_else(|| LabError::NoNode { name: node.to_owned(), known: self.nodes.join(", ") })?;
        relays.iter().for_each(Relay::hang_up);
        Ok(())
    }

    fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    fn apply(&self, cuts: &BTreeSet<Way>) -> Result<(), LabError> {
        let relays = self.nodes.iter().zip(&self.relays);
        for (node, relay) in relays.flat_map(|(node, relays)| relays.iter().map(move |relay| (node, relay))) {
            let is_cut = |from: &str, to: &str| cuts.contains(&(from.to_owned(), to.to_owned()));
            relay.cut(Direction::ToRegistry, is_cut(node, REGISTRY));
            relay.cut(Direction::FromRegistry, is_cut(REGISTRY, node));
        }
        let between_nodes = cuts.iter().filter(|(from, to)| from != REGISTRY && to != REGISTRY);
        // One transaction: first the table is there, then gone, then as wanted.
        let mut rules = String::from("table bridge cuts\ndelete table bridge cuts\ntable bridge cuts {\n");
        rules.push_str("chain forward {\ntype filter hook forward priority 0\n");
        for (from, to) in between_nodes {
            rules.push_str(&format!("iifname \"{from}\" oifname \"{to}\" drop\n"));
        }
        rules.push_str("}\n}\n");
        run("ip", &["netns", "exec", &self.namespace("switch"), "nft", "-f", "-"], &rules)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // They wake their threads through the namespaces.
        self.relays.clear();
        for name in self.nodes.iter().map(String::as_str).chain(["switch"]) {
            remove(&self.namespace(name));
        }
    }
}

/// Does something in a namespace.
fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let namespace = File::open(Path::new(NAMESPACES).join(namespace))?;
    // A namespace is a thread's; this one ends afterwards.
    let enter = move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        work()
    };
    let done = thread::scope(|scope| scope.spawn(enter).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The address of node number `number`, from 1.
pub(crate) fn address(number: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 89, 0, number as u8))
}

/// Removes a namespace that may not be there.
fn remove(namespace: &str) {
    if Path::new(NAMESPACES).join(namespace).exists()
        && let Err(error) = ip(&["netns", "delete", namespace])
    {
        tracing::warn!(%error, "a network namespace stays; `ip netns delete {namespace}`");
    }
}

/// Removes the namespaces of processes that have ended without doing so.
fn remove_stale() {
    let names = fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        if maker(&name).is_some_and(|maker| maker.state() == ProcessState::Gone) {
            remove(&name);
        }
    }
}

/// The process that made a namespace; `None` when it is none of ours.
fn maker(namespace: &str) -> Option<ProcessId> {
    let mut parts = namespace.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-');
    Some(ProcessId { pid: parts.next()?.parse().ok()?, start_time: parts.next()?.parse().ok()? })
}

fn ip(arguments: &[&str]) -> Result<(), LabError> {
    run("ip", arguments, "")
}

/// Runs a tool with `input`; the error contains its complaint.
fn run(program: &str, arguments: &[&str], input: &str) -> Result<(), LabError> {
    let what = || LabError::system(format!("running `{program} {}`", arguments.join(" ")));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    // The directories of these tools are not in every user's PATH.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let mut child = command.spawn().map_err(what())?;
    let Some(mut stdin) = child.stdin.take() else { unreachable!("it was asked for") };
    // A tool that ends before it has read everything says why itself.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().map_err(what())?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(what()(io::Error::other(if complaint.is_empty() { output.status.to_string() } else { complaint })))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::*;

    fn network(directory: &Path, nodes: usize) -> Network {
        let registry = directory.join("registry");
        drop(UnixListener::bind(&registry).unwrap());
        let names: Vec<_> = (1..=nodes).map(|number| format!("n{number}")).collect();
        let sockets = names.iter().map(|name| directory.join(name)).collect();
        Network::up(names, &Registry::Socket(&registry, sockets)).unwrap()
    }

    /// Whether a datagram gets from one socket to another within a while.
    fn reaches(from: &UdpSocket, to: &UdpSocket) -> bool {
        let mut buffer = [0; 16];
        from.send_to(b"hello", to.local_addr().unwrap()).unwrap();
        to.recv_from(&mut buffer).is_ok()
    }

    #[test]
    fn each_way_is_cut_by_itself() {
        let directory = tempfile::tempdir().unwrap();
        let network = network(directory.path(), 3);
        let socket = |number: usize| {
            let bind = || UdpSocket::bind((address(number), 4000));
            let socket = network.inside(&format!("n{number}"), bind).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            socket
        };
        let (one, two, three) = (socket(1), socket(2), socket(3));
        let all = [(&one, &two), (&two, &one), (&one, &three), (&three, &one), (&two, &three)];
        assert!(all.iter().all(|(from, to)| reaches(from, to)));
        network.cut([("n1".into(), "n2".into())]).unwrap();
        assert_eq!(all.map(|(from, to)| reaches(from, to)), [false, true, true, true, true]);
        network.cut(network.from_node("n3")).unwrap();
        assert_eq!(all.map(|(from, to)| reaches(from, to)), [false, true, true, false, true]);
        network.restore().unwrap();
        assert!(all.iter().all(|(from, to)| reaches(from, to)));
        assert!(network.cut(network.between("n1", "n9")).is_err());
    }

    #[test]
    fn a_link_is_shaped() {
        let directory = tempfile::tempdir().unwrap();
        let network = network(directory.path(), 2);
        network.shape("n1", Some(1 << 20)).unwrap();
        let there = network.inside("n2", || std::net::TcpListener::bind((address(2), 4000))).unwrap();
        let address = there.local_addr().unwrap();
        let mut from = network.inside("n1", move || std::net::TcpStream::connect(address)).unwrap();
        let reader =
            thread::spawn(move || io::copy(&mut there.accept().unwrap().0, &mut io::sink()).unwrap());
        let start = weir_block::Nanos::now();
        from.write_all(&vec![0; 1 << 20]).unwrap();
        drop(from);
        assert_eq!(reader.join().unwrap(), 1 << 20);
        let took = weir_block::Nanos::now() - start;
        assert!((Duration::from_millis(500)..Duration::from_secs(10)).contains(&took), "{took:?}");
        network.shape("n1", None).unwrap();
        assert!(network.shape("n1", Some(10)).is_err());
    }

    #[test]
    fn what_an_ended_process_left_behind_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        // There is a process 1, and it did not start then.
        let left = format!("{PREFIX}-1-0-0-n1");
        ip(&["netns", "add", &left]).unwrap();
        let network = network(directory.path(), 1);
        assert!(!Path::new(NAMESPACES).join(&left).exists());
        let mine = network.namespace("n1");
        assert!(Path::new(NAMESPACES).join(&mine).exists());
        drop(network);
        assert!(!Path::new(NAMESPACES).join(&mine).exists());
    }

    #[test]
    fn each_node_has_a_link_to_each_member_of_etcd() {
        let members: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<_> = members.iter().map(|member| member.local_addr().unwrap()).collect();
        let names = ["n1", "n2"].map(String::from).to_vec();
        let network = Network::up(names.clone(), &Registry::Etcd(&addresses)).unwrap();
        let mut byte = [0];
        for (node, (member, address)) in
            names.iter().flat_map(|node| members.iter().zip(&addresses).map(move |member| (node, member)))
        {
            let mut there = network.inside(node, || TcpStream::connect(address)).unwrap();
            let (mut here, _) = member.accept().unwrap();
            network.cut(network.between(node, REGISTRY)).unwrap();
            there.write_all(b"a").unwrap();
            here.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            assert!(io::Read::read(&mut here, &mut byte).is_err(), "nothing passes");
            network.restore().unwrap();
            here.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(io::Read::read(&mut here, &mut byte).unwrap(), 1);
            network.hang_up(node).unwrap();
            assert_eq!(io::Read::read(&mut there, &mut byte).unwrap(), 0);
        }
        assert!(network.hang_up("n9").is_err());
    }
}
