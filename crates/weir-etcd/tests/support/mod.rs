//! Real etcd members as child processes.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

pub mod history;
pub mod relay;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use weir_cluster::Registry;
use weir_etcd::{Etcd, EtcdConfig, TlsFiles};

/// An etcd of one member without TLS, or of several with mutual TLS. The end of this value ends the members.
pub struct Cluster {
    pub address: Ipv4Addr,
    pub members: Vec<Member>,
    directory: tempfile::TempDir,
    authority: Option<Authority>,
    extra: Vec<String>,
    /// Tests share the processors with other tests, so the defaults of etcd's times are kept for several members.
    quick: bool,
}

pub struct Member {
    name: String,
    client_port: u16,
    peer_port: u16,
    child: Option<Child>,
}

/// A certificate authority with its certificate, and an identity that it signed, as files.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: PathBuf,
}

impl Authority {
    pub fn new(directory: &Path) -> Authority {
        std::fs::create_dir_all(directory).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, directory.display().to_string());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(directory.join("ca.pem"), issuer.pem()).unwrap();
        let authority = Authority { issuer, directory: directory.to_owned() };
        authority.sign("client", &["weir"]);
        authority
    }

    fn sign(&self, name: &str, hosts: &[&str]) {
        let key = KeyPair::generate().unwrap();
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        // A member is a client of its peers.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.file(&format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// What a client needs.
    pub fn files(&self) -> TlsFiles {
        let identity = Some((self.file("client.pem"), self.file("client.key")));
        TlsFiles { ca: self.file("ca.pem"), identity }
    }
}

impl Cluster {
    /// One member without TLS.
    pub async fn one() -> Cluster {
        Cluster::with(1, false, &[]).await
    }

    /// Three members with mutual TLS, between them and for clients.
    pub async fn three() -> Cluster {
        Cluster::with(3, true, &[]).await
    }

    pub async fn with(count: usize, tls: bool, extra: &[&str]) -> Cluster {
        // In memory where possible: etcd syncs each change, and a shared disk is slow.
        let memory = Path::new("/dev/shm");
        let directory = tempfile::tempdir_in(memory).unwrap_or_else(|_| tempfile::tempdir().unwrap());
        let address = own_address();
        let authority = tls.then(|| Authority::new(&directory.path().join("tls")));
        if let Some(authority) = &authority {
            authority.sign("server", &[&address.to_string()]);
            // Members compare it with the address from which a peer connects.
            authority.sign("peer", &[&address.to_string(), "127.0.0.1"]);
        }
        let ports = free_ports(address, 2 * count);
        let members = ports.chunks(2).enumerate().map(|(number, ports)| Member {
            name: format!("m{number}"),
            client_port: ports[0],
            peer_port: ports[1],
            child: None,
        });
        let members = members.collect();
        let extra = extra.iter().map(|argument| (*argument).to_owned()).collect();
        let mut cluster = Cluster { address, members, directory, authority, extra, quick: count == 1 };
        cluster.start().await;
        cluster
    }

    fn scheme(&self) -> &'static str {
        if self.authority.is_some() { "https" } else { "http" }
    }

    pub fn endpoint(&self, member: usize) -> String {
        format!("{}://{}:{}", self.scheme(), self.address, self.members[member].client_port)
    }

    pub fn tls(&self) -> Option<TlsFiles> {
        self.authority.as_ref().map(Authority::files)
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// For a registry of its own under `/NAME/`.
    pub fn config(&self, name: &str) -> EtcdConfig {
        let endpoints = (0..self.members.len()).map(|member| self.endpoint(member));
        EtcdConfig { prefix: format!("/{name}/"), tls: self.tls(), ..EtcdConfig::new(endpoints) }
    }

    pub fn registry(&self, name: &str) -> Etcd {
        Etcd::new(self.config(name)).unwrap()
    }

    /// Starts all members that do not run, and waits until the cluster answers.
    pub async fn start(&mut self) {
        for member in 0..self.members.len() {
            self.start_member(member);
        }
        self.ready().await;
    }

    /// Waits until every running member answers linearizable reads.
    pub async fn ready(&self) {
        let start = Instant::now();
        for member in (0..self.members.len()).filter(|member| self.members[*member].child.is_some()) {
            let config = EtcdConfig { endpoints: vec![self.endpoint(member)], ..self.config("ready") };
            let registry = Etcd::new(config).unwrap();
            while let Err(error) = registry.list("").await {
                assert!(
                    start.elapsed() < Duration::from_secs(40),
                    "etcd does not start: {error}\n{}",
                    self.log(member)
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    fn log(&self, member: usize) -> String {
        let text =
            std::fs::read_to_string(self.directory.path().join(format!("m{member}.log"))).unwrap_or_default();
        text.lines().rev().take(20).collect::<Vec<_>>().join("\n")
    }

    pub fn start_member(&mut self, number: usize) {
        if self.members[number].child.is_some() {
            return;
        }
        let (scheme, address) = (self.scheme(), self.address);
        let url = |port: u16| format!("{scheme}://{address}:{port}");
        let peers = self.members.iter().map(|member| format!("{}={}", member.name, url(member.peer_port)));
        let peers = peers.collect::<Vec<_>>().join(",");
        let member = &self.members[number];
        let data = self.directory.path().join(&member.name);
        let log = self.directory.path().join(format!("{}.log", member.name));
        let mut command = Command::new("etcd");
        command.args(["--name", &member.name, "--data-dir"]).arg(&data);
        for (key, port) in [
            ("--listen-client-urls", member.client_port),
            ("--advertise-client-urls", member.client_port),
            ("--listen-peer-urls", member.peer_port),
            ("--initial-advertise-peer-urls", member.peer_port),
        ] {
            command.args([key, &url(port)]);
        }
        command.args(["--initial-cluster", &peers, "--logger", "zap", "--log-level", "warn"]);
        if self.quick {
            command.args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
        }
        if let Some(authority) = &self.authority {
            for (side, identity) in [("", "server"), ("peer-", "peer")] {
                command.arg(format!("--{side}trusted-ca-file")).arg(authority.file("ca.pem"));
                command.arg(format!("--{side}cert-file")).arg(authority.file(&format!("{identity}.pem")));
                command.arg(format!("--{side}key-file")).arg(authority.file(&format!("{identity}.key")));
                command.arg(format!("--{side}client-cert-auth"));
            }
        }
        command.args(&self.extra);
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        // SAFETY: prctl is async-signal-safe, and nothing else runs between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // A test that is killed leaves no etcd behind.
                match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let child = command.spawn().unwrap_or_else(|error| panic!("etcd ({error}): run scripts/setup"));
        self.members[number].child = Some(child);
    }

    /// A connection to one member, for what a registry does not do.
    pub async fn admin(&self, member: usize) -> etcd_client::Client {
        let mut options = etcd_client::ConnectOptions::new().with_timeout(Duration::from_secs(5));
        if let Some(files) = self.tls() {
            let read = |path: &Path| std::fs::read_to_string(path).unwrap();
            let (certificate, key) = files.identity.unwrap();
            let tls = etcd_client::TlsOptions::new()
                .ca_certificate(etcd_client::Certificate::from_pem(read(&files.ca)))
                .identity(etcd_client::Identity::from_pem(read(&certificate), read(&key)));
            options = options.with_tls(tls);
        }
        etcd_client::Client::connect([self.endpoint(member)], Some(options)).await.unwrap()
    }

    /// The member that leads.
    pub async fn leader(&self) -> usize {
        let start = Instant::now();
        loop {
            for member in (0..self.members.len()).filter(|member| self.members[*member].child.is_some()) {
                let status = self.admin(member).await.status().await;
                if status.is_ok_and(|status| status.leader() == status.header().unwrap().member_id()) {
                    return member;
                }
            }
            assert!(start.elapsed() < Duration::from_secs(20), "no member leads");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Where a member listens for clients.
    pub fn socket(&self, member: usize) -> SocketAddr {
        (self.address, self.members[member].client_port).into()
    }

    /// Removes the data of a member that does not run.
    pub fn wipe(&self, member: usize) {
        std::fs::remove_dir_all(self.directory.path().join(&self.members[member].name)).unwrap();
    }

    pub fn kill(&mut self, member: usize) {
        self.members[member].kill();
    }

    pub fn kill_all(&mut self) {
        self.members.iter_mut().for_each(Member::kill);
    }

    pub fn pause(&self, member: usize) {
        self.members[member].signal(Signal::STOP);
    }

    pub fn resume(&self, member: usize) {
        self.members[member].signal(Signal::CONT);
    }
}

impl Member {
    fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().unwrap().id();
        kill_process(Pid::from_raw(id.try_into().unwrap()).unwrap(), signal).unwrap();
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A loopback address that no other cluster uses. At 127.0.0.1 any connection of another test could take a member's port, in
/// particular while the member does not run.
fn own_address() -> Ipv4Addr {
    static CLUSTERS: AtomicU8 = AtomicU8::new(1);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | high << 5 | middle >> 3, low, CLUSTERS.fetch_add(1, Ordering::Relaxed))
}

/// Ports that nobody listens on now.
fn free_ports(address: Ipv4Addr, count: usize) -> Vec<u16> {
    let held: Vec<_> = (0..count).map(|_| TcpListener::bind((address, 0)).unwrap()).collect();
    held.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}
