//! The shard's loop around the export, as a node would have it, and no more.

use std::any::Any;
use std::collections::HashMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use weir_block::{Completion, Layer, LayerInfo, Meter, Nanos, Reactor, ReactorConfig, Waker};
use weir_export::nbd::{
    AcceptedClient, Attach, Limits, ListenAddress, Listener, ListenerConfig, NbdDisk, Refused,
};
use weir_export::{Delays, Rate, Workspace};
use weir_identity::{Identity, OtherEnd};
use weir_nbd::server::{Directory, ExportInfo, Listed, NotServed};

use super::layer::{FileLayer, Knobs};

/// The server's exports and limits.
pub struct ServerConfig {
    pub disks: Vec<(String, File, LayerInfo)>,
    pub reactor: ReactorConfig,
    pub limits: Limits,
    pub listener: ListenerConfig,
    /// Serves on a second port, with TLS required.
    pub tls: Option<Arc<rustls::ServerConfig>>,
}

impl ServerConfig {
    /// One writable disk `disk` of `size` bytes in memory.
    pub fn one(size: u64) -> ServerConfig {
        ServerConfig {
            disks: vec![("disk".into(), memory_file(), writable(size))],
            reactor: ReactorConfig::default(),
            limits: Limits::default(),
            listener: ListenerConfig::default(),
            tls: None,
        }
    }
}

pub fn writable(size: u64) -> LayerInfo {
    LayerInfo {
        size,
        logical_block: 512,
        preferred_block: 4096,
        max_transfer: 32 << 20,
        writable: true,
        fast_zeroes: true,
        discards: true,
    }
}

pub fn memory_file() -> File {
    let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).expect("a file in memory");
    File::from(fd)
}

/// The shard's internal state.
#[derive(Debug)]
pub struct State {
    pub connections: usize,
    pub in_flight: usize,
    /// Bytes of buffers lent out, and the most there ever were.
    pub lent: usize,
    pub most_lent: usize,
    pub meter: Meter,
    /// Whether a hold of all clients is complete, or there is none.
    pub held: bool,
    /// What the first disk's limit has delayed.
    pub delays: Delays,
    /// Turns of the shard.
    pub turns: u64,
}

enum Order {
    Attach(usize, AcceptedClient),
    Look(Sender<State>),
    Rate(Option<Rate>),
    Hold,
    Resume,
    Dismiss,
    Close,
    Abort,
}

/// The control plane's handle to the shard.
struct Shard {
    orders: Sender<Order>,
    waker: Arc<Waker>,
}

impl Shard {
    fn give(&self, order: Order) {
        // A shard that is gone drops the client, which disconnects it.
        let _ = self.orders.send(order);
        self.waker.wake();
    }
}

/// The exports' names, and the way to the shard.
struct Exports {
    infos: Vec<ExportInfo>,
    by_name: HashMap<String, usize>,
    shard: Mutex<Shard>,
    admitted: Mutex<Vec<Weak<Admitted>>>,
    refused: Mutex<Vec<String>>,
}

/// An open connection by TLS.
struct Admitted(OwnedFd);

impl Directory for Exports {
    fn list(&self) -> Vec<Listed> {
        let listed =
            |info: &ExportInfo| Listed { name: info.name.clone(), description: info.description.clone() };
        self.infos.iter().map(listed).collect()
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        let index = if name.is_empty() { Some(&0) } else { self.by_name.get(name) };
        let index =
            index.ok_or_else(|| NotServed::Unknown(format!("no disk {name:?} here; it is on node b")))?;
        Ok(self.infos[*index].clone())
    }
}

impl Attach for Exports {
    fn attach(&self, client: AcceptedClient) {
        let index = self.by_name[&client.session.export];
        self.shard.lock().unwrap().give(Order::Attach(index, client));
    }

    fn admit(&self, _: OtherEnd, socket: BorrowedFd<'_>) -> Result<Arc<dyn Any + Send + Sync>, String> {
        let admitted = Arc::new(Admitted(socket.try_clone_to_owned().unwrap()));
        self.admitted.lock().unwrap().push(Arc::downgrade(&admitted));
        Ok(admitted)
    }

    fn may_open(&self, client: &Identity, export: &str) -> bool {
        matches!(client, Identity::Client(client) if client.may_open(export, None))
    }

    fn refused(&self, from: SocketAddr, _: Refused, reason: &str) {
        assert!(from.ip().is_loopback());
        self.refused.lock().unwrap().push(reason.to_owned());
    }
}

/// A running server. Stops when dropped.
pub struct Server {
    shard: Arc<Exports>,
    thread: Option<JoinHandle<()>>,
    _runtime: tokio::runtime::Runtime,
    _directory: tempfile::TempDir,
    socket: PathBuf,
    tcp: SocketAddr,
    tls: Option<SocketAddr>,
    knobs: Vec<Arc<Knobs>>,
}

impl Server {
    /// Serves on a Unix socket in a fresh directory and on a free TCP port.
    pub fn start(config: ServerConfig) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd.sock");
        let knobs: Vec<_> = config.disks.iter().map(|_| Arc::new(Knobs::default())).collect();
        let infos: Vec<_> = config
            .disks
            .iter()
            .map(|(name, _, layer)| ExportInfo {
                name: name.clone(),
                description: format!("test disk {name}"),
                layer: *layer,
            })
            .collect();
        let by_name = infos.iter().enumerate().map(|(index, info)| (info.name.clone(), index)).collect();
        let (listener, tls) = (config.listener, config.tls.clone());
        let (thread, orders, waker) = start_shard(config, &knobs);
        let shard = Mutex::new(Shard { orders, waker });
        let (admitted, refused) = (Mutex::default(), Mutex::default());
        let shard = Arc::new(Exports { infos, by_name, shard, admitted, refused });
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let unix = ListenAddress::Unix(socket.clone());
        let tcp = ListenAddress::Tcp { address: "127.0.0.1:0".parse().unwrap(), beyond_loopback: false };
        let unix = runtime.block_on(Listener::bind(&unix, listener)).unwrap();
        let tcp = runtime.block_on(Listener::bind(&tcp, listener)).unwrap();
        let port = tcp.local_address().unwrap();
        runtime.spawn(unix.run(shard.clone(), shard.clone()));
        runtime.spawn(tcp.run(shard.clone(), shard.clone()));
        let tls = tls.map(|config| {
            let address = ListenAddress::Tls { address: "127.0.0.1:0".parse().unwrap(), config };
            let listener = runtime.block_on(Listener::bind(&address, listener)).unwrap();
            let port = listener.local_address().unwrap();
            runtime.spawn(listener.run(shard.clone(), shard.clone()));
            port
        });
        Server {
            shard,
            thread: Some(thread),
            _runtime: runtime,
            _directory: directory,
            socket,
            tcp: port,
            tls,
            knobs,
        }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn unix_uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    pub fn tcp(&self) -> SocketAddr {
        self.tcp
    }

    pub fn tcp_uri(&self, export: &str) -> String {
        format!("nbd://{}/{export}", self.tcp)
    }

    /// The port with TLS.
    pub fn tls(&self) -> SocketAddr {
        self.tls.expect("the server was configured with TLS")
    }

    /// The reasons for which clients were refused there since the last call.
    pub fn refused(&self) -> Vec<String> {
        std::mem::take(&mut self.shard.refused.lock().unwrap())
    }

    /// Connections by TLS that are open.
    pub fn admitted(&self) -> usize {
        self.shard.admitted.lock().unwrap().iter().filter(|one| one.strong_count() > 0).count()
    }

    /// Ends all of them, as a node does with those of a revoked client.
    pub fn end_admitted(&self) {
        for one in self.shard.admitted.lock().unwrap().iter().filter_map(Weak::upgrade) {
            rustix::net::shutdown(&one.0, rustix::net::Shutdown::Both).unwrap();
        }
    }

    pub fn knobs(&self) -> &Knobs {
        &self.knobs[0]
    }

    /// Makes the shard look at the knobs again.
    pub fn nudge(&self) {
        self.shard.shard.lock().unwrap().waker.wake();
    }

    pub fn look(&self) -> State {
        let (sender, receiver) = channel();
        self.shard.shard.lock().unwrap().give(Order::Look(sender));
        receiver.recv().expect("the shard answers")
    }

    /// Polls the state until the condition holds.
    pub fn wait_until(&self, what: &str, condition: impl Fn(&State) -> bool) {
        let start = Nanos::now();
        loop {
            let state = self.look();
            if condition(&state) {
                return;
            }
            assert!((Nanos::now() - start).as_secs() < 20, "not within 20 s: {what}; now {state:?}");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// Limits the first disk, or ends that.
    pub fn limit(&self, rate: Option<Rate>) {
        self.shard.shard.lock().unwrap().give(Order::Rate(rate));
        self.look();
    }

    /// Begins to hold all clients.
    pub fn hold(&self) {
        self.shard.shard.lock().unwrap().give(Order::Hold);
    }

    /// Begins to hold all clients and waits until they are. Returns how long that took.
    pub fn hold_all(&self) -> std::time::Duration {
        let start = Nanos::now();
        self.hold();
        self.wait_until("the clients are held", |state| state.held);
        Nanos::now() - start
    }

    /// Serves the clients again.
    pub fn resume(&self) {
        self.shard.shard.lock().unwrap().give(Order::Resume);
    }

    /// Another node has all disks.
    pub fn dismiss(&mut self) {
        self.begin_to_dismiss();
        self.join();
    }

    /// As [`Server::dismiss`]; the end is to be waited for with [`Server::join`].
    pub fn begin_to_dismiss(&self) {
        self.shard.shard.lock().unwrap().give(Order::Dismiss);
    }

    /// Closes all disks: what is in flight is answered first.
    pub fn close(&mut self) {
        self.shard.shard.lock().unwrap().give(Order::Close);
        self.join();
    }

    /// Closes all disks; answers that are kept back come after this time.
    pub fn close_and_thaw(&mut self, after: std::time::Duration) {
        self.shard.shard.lock().unwrap().give(Order::Close);
        std::thread::sleep(after);
        self.knobs().frozen.store(false, std::sync::atomic::Ordering::Relaxed);
        self.nudge();
        self.join();
    }

    /// Waits until all disks have come to their end.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the shard does not panic");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shard.shard.lock().unwrap().give(Order::Abort);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the shard panicked");
        }
    }
}

fn start_shard(config: ServerConfig, knobs: &[Arc<Knobs>]) -> (JoinHandle<()>, Sender<Order>, Arc<Waker>) {
    let (orders, inbox) = channel();
    let (sender, waker) = channel();
    let knobs = knobs.to_vec();
    let thread = std::thread::Builder::new()
        .name("shard".into())
        .spawn(move || {
            let reactor = Reactor::new(config.reactor).unwrap();
            sender.send(reactor.waker()).unwrap();
            let disks = config.disks.into_iter().zip(knobs);
            let disks = disks.map(|((_, file, info), knobs)| FileLayer::new(file, info, knobs)).collect();
            run_shard(reactor, disks, config.limits, &inbox);
        })
        .unwrap();
    (thread, orders, waker.recv().unwrap())
}

fn run_shard(mut reactor: Reactor, layers: Vec<FileLayer>, limits: Limits, inbox: &Receiver<Order>) {
    let mut workspace = Workspace::new();
    let mut disks: Vec<(NbdDisk, FileLayer)> =
        layers.into_iter().map(|layer| (NbdDisk::new(&mut reactor, limits), layer)).collect();
    let mut events = Vec::new();
    let mut done: Vec<Completion> = Vec::new();
    let (mut most_lent, mut turns) = (0, 0);
    let (mut closing, mut aborting) = (false, false);
    loop {
        let deadline = disks.iter().map(|(nbd, layer)| nbd.deadline(layer, &reactor, &workspace)).min();
        reactor.wait(deadline.unwrap_or(Nanos::NEVER), &mut events).unwrap();
        turns += 1;
        for event in events.drain(..) {
            for (nbd, _) in disks.iter_mut().filter(|(nbd, _)| nbd.owner() == event.token.owner) {
                nbd.on_event(&event);
            }
        }
        for order in inbox.try_iter() {
            match order {
                Order::Attach(index, client) => {
                    if let Err(error) = disks[index].0.attach(client, &mut workspace) {
                        eprintln!("attach: {error}");
                    }
                }
                Order::Look(answer) => {
                    let mut meter = Meter::new();
                    disks.iter().for_each(|(nbd, _)| meter.add(&nbd.meter().meter));
                    let state = State {
                        connections: disks.iter().map(|(nbd, _)| nbd.connections()).sum(),
                        in_flight: disks.iter().map(|(nbd, _)| nbd.in_flight()).sum(),
                        lent: reactor.buffers().lent(),
                        most_lent,
                        meter,
                        held: disks.iter().all(|(nbd, _)| nbd.is_held()),
                        delays: disks[0].0.delays(),
                        turns,
                    };
                    let _ = answer.send(state);
                }
                Order::Rate(rate) => disks[0].0.set_rate(rate, reactor.now()),
                Order::Hold => disks.iter_mut().for_each(|(nbd, _)| nbd.hold()),
                Order::Resume => disks.iter_mut().for_each(|(nbd, _)| nbd.resume()),
                Order::Dismiss => {
                    closing = true;
                    disks.iter_mut().for_each(|(nbd, _)| nbd.dismiss(&mut reactor, &mut workspace));
                }
                Order::Close => {
                    closing = true;
                    disks.iter_mut().for_each(|(nbd, _)| nbd.close());
                }
                Order::Abort => {
                    (closing, aborting) = (true, true);
                    disks.iter_mut().for_each(|(nbd, _)| nbd.abort(&mut reactor, &mut workspace));
                }
            }
        }
        for (nbd, layer) in &mut disks {
            nbd.pump(&mut reactor, layer, &mut workspace);
            layer.advance(&mut reactor, &mut done);
            most_lent = most_lent.max(reactor.buffers().lent());
            done.drain(..).for_each(|completion| nbd.complete(completion));
            nbd.flush(&mut reactor, &mut workspace);
        }
        let over = |(nbd, layer): &(NbdDisk, FileLayer)| nbd.is_empty() || aborting && layer.in_flight() > 0;
        if closing && disks.iter().all(over) {
            return;
        }
    }
}
