//! Three nodes with identities on one machine, as real processes.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Stdio};

use serde_json::Value;
use weir_lab::port;

use crate::common::{Place, await_some};

/// A process of this test; its end ends the process.
pub struct Process(pub Child);

impl Process {
    pub fn start(place: &Place, line: &str, log: &str) -> Process {
        Process::start_in(place, ".", line, log)
    }

    /// In a directory of the place, relative to which `line` is.
    pub fn start_in(place: &Place, directory: &str, line: &str, log: &str) -> Process {
        let log = File::options().create(true).append(true).open(place.path().join(log)).unwrap();
        let mut command = place.command(line);
        let directory = place.path().join(directory);
        std::fs::create_dir_all(&directory).unwrap();
        command.current_dir(directory);
        Process(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Three hosts on one machine: the directories are their own, the registry's socket is shared.
pub struct Hosts {
    pub place: Place,
    ports: [u16; 3],
    /// The sockets of the nodes' APIs have one name, as on hosts that share no directory.
    apart: bool,
    pub nodes: Vec<Process>,
    _registry: Process,
}

impl Hosts {
    pub fn new() -> Hosts {
        Hosts::with(false)
    }

    /// Hosts that reach each other only over TLS.
    pub fn apart() -> Hosts {
        Hosts::with(true)
    }

    fn with(apart: bool) -> Hosts {
        let place = Place::new();
        let registry = Process::start(&place, "registry --socket r.sock --file r.db", "registry.log");
        await_some("the registry answers", || place.path().join("r.sock").exists().then_some(()));
        let free = [1, 2, 3].map(|n| port::free(IpAddr::V4(Ipv4Addr::new(127, 0, 0, n))).unwrap());
        let ports = free.each_ref().map(|one| one.local_addr().unwrap().port());
        let hosts = Hosts { place, ports, apart, nodes: Vec::new(), _registry: registry };
        (1..=3).for_each(|n| hosts.configure(n, &format!("n{n}"), "keys"));
        hosts
    }

    /// Writes the configuration of host `n`: `nN.toml`.
    pub fn configure(&self, n: usize, name: &str, keys: &str) {
        let (root, port) = (self.place.path().display(), self.ports[n - 1]);
        let socket = if self.apart { "api.sock".to_owned() } else { format!("{root}/h{n}/api.sock") };
        let text = format!(
            "name = \"{name}\"\nstate_dir = \"{root}/h{n}\"\n[registry]\nsocket = \"{root}/r.sock\"\n\
             [lease]\nttl = \"2 s\"\nfence_grace = \"3 s\"\n\
             [identity]\ndirectory = \"{root}/h{n}/{keys}\"\n[peers]\nlisten = \"127.0.0.{n}:0\"\n\
             [api]\nsocket = \"{socket}\"\nlisten = \"127.0.0.{n}:{port}\"\n\
             [nbd]\ntcp = [{{ address = \"127.0.0.{n}:0\", plaintext = false }}]\n\
             [resources]\nbuffers = \"64 MiB\"\nlog = \"64 MiB\"\n"
        );
        std::fs::write(self.place.path().join(format!("n{n}.toml")), text).unwrap();
    }

    pub fn start(&mut self, n: usize) {
        let (config, log) = (format!("node --config ../n{n}.toml"), format!("n{n}.log"));
        self.nodes.push(Process::start_in(&self.place, &format!("h{n}"), &config, &log));
        await_some("the node has joined", || {
            let ended = self.nodes.last_mut().unwrap().0.try_wait().unwrap();
            assert_eq!(ended, None, "the node of host {n} has ended");
            self.on(n, "status").then_some(())
        });
        // Connections are not refused because a shell's limit is low.
        let pid = self.nodes.last().unwrap().0.id();
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let numbers: Vec<&str> = files.split_whitespace().skip(3).take(2).collect();
        assert_eq!(numbers[0], numbers[1], "{files}");
    }

    pub fn on(&self, n: usize, line: &str) -> bool {
        self.place.weir(&format!("{line} --api h{n}/api.sock")).status.success()
    }

    pub fn token(&self, options: &str) -> String {
        let token = self.place.ok(&format!("cluster invite {options} --api h1/api.sock"));
        token.trim().to_owned()
    }

    /// The address of the API of host `n` for other hosts.
    pub fn address(&self, n: usize) -> String {
        format!("127.0.0.{n}:{}", self.ports[n - 1])
    }

    /// The port of host `n`'s export with this scheme.
    pub fn export_port(&self, n: usize, scheme: &str) -> String {
        let status = self.place.json(&format!("status --api h{n}/api.sock"));
        let uris = status["exports"].as_array().unwrap().iter().map(|uri| uri.as_str().unwrap());
        let uri = uris.clone().find(|uri| uri.starts_with(scheme)).unwrap_or_else(|| panic!("{status}"));
        uri.strip_suffix('/').unwrap().rsplit(':').next().unwrap().to_owned()
    }

    /// What the audit log of host `n` has.
    pub fn audit(&self, n: usize) -> Vec<Value> {
        let text = self.place.read(&format!("h{n}/audit.jsonl"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn has_audit(&self, n: usize, who: &str, what: &str, outcome: &str, reason: &str) {
        await_some(&format!("{who}, {what}, {outcome}, {reason} in the audit log"), || {
            let has = |line: &Value, key: &str, text: &str| line[key].as_str().unwrap().contains(text);
            let found = |line: &Value| {
                has(line, "who", who)
                    && has(line, "what", what)
                    && line["outcome"] == outcome
                    && has(line, "reason", reason)
            };
            self.audit(n).iter().any(found).then_some(())
        });
    }
}
