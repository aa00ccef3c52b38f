//! All exports of one disk, as its shard drives them.

use std::io;

use weir_block::{Completion, Event, Layer, LayerMeter, Nanos, OwnerId, Reactor};

use crate::export::{Export, TAG_BITS};
use crate::limit::{Delays, Rate};
use crate::nbd::{self, Limits, NbdDisk};
use crate::workspace::Workspace;

/// NBD is number 0, and the upper half of its tags is a connection's index.
const _: () = assert!(Limits::CONNECTIONS < 1 << (TAG_BITS - 32));

/// A client that has chosen a disk, by whichever protocol.
#[derive(Debug)]
pub enum Client {
    /// After an NBD handshake.
    Nbd(nbd::AcceptedClient),
}

impl Client {
    /// The other node that it comes by as one that follows the disk.
    #[must_use]
    pub fn follows_on(&self) -> Option<&str> {
        match self {
            Client::Nbd(nbd::AcceptedClient { via: Some(nbd::Via::Follower(node)), .. }) => Some(node),
            Client::Nbd(_) => None,
        }
    }
}

impl From<nbd::AcceptedClient> for Client {
    fn from(client: nbd::AcceptedClient) -> Client {
        Client::Nbd(client)
    }
}

/// The exports of one disk. Another protocol is another field, another [`Client`], and nothing on the shard; the exclusion around
/// changes of parts of blocks, and the limit of the disk, which belong to the NBD connections, then belong here.
pub struct Exports {
    nbd: NbdDisk,
}

impl Exports {
    /// Exports without clients.
    pub fn new(reactor: &mut Reactor) -> Exports {
        Exports { nbd: NbdDisk::new(reactor, Limits::default()) }
    }

    fn all(&self) -> [&dyn Export; 1] {
        [&self.nbd]
    }

    fn all_mut(&mut self) -> [&mut dyn Export; 1] {
        [&mut self.nbd]
    }

    /// The owners of the events of all clients.
    pub fn owners(&self) -> impl Iterator<Item = OwnerId> + use<> {
        self.all().map(Export::owner).into_iter()
    }

    /// Takes a client. Its requests are served from the next [`Exports::pump`] on.
    ///
    /// # Errors
    /// The disk is being closed or has as many clients as it may, or the connection is unusable; the client is
    /// disconnected.
    pub fn attach(&mut self, client: Client, workspace: &mut Workspace) -> io::Result<()> {
        match client {
            Client::Nbd(client) => self.nbd.attach(client, workspace),
        }
    }

    /// Brings an event to the export that it is for.
    pub fn on_event(&mut self, event: &Event) {
        let owner = event.token.owner;
        self.all_mut()
            .into_iter()
            .filter(|export| export.owner() == owner)
            .for_each(|export| export.on_event(event));
    }

    /// As [`Export::pump`], for all.
    pub fn pump(&mut self, reactor: &mut Reactor, layer: &mut dyn Layer, workspace: &mut Workspace) {
        for export in self.all_mut() {
            export.pump(reactor, layer, workspace);
        }
    }

    /// Brings the layer's answers to the exports whose requests they answer.
    pub fn complete(&mut self, done: &mut Vec<Completion>) {
        let all = self.all_mut();
        for completion in done.drain(..) {
            all[(completion.tag.0 >> TAG_BITS) as usize].complete(completion);
        }
    }

    /// As [`Export::flush`], for all.
    pub fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        for export in self.all_mut() {
            export.flush(reactor, workspace);
        }
    }

    /// Whether a client stopped only to give others their turn.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.all().into_iter().any(Export::has_more)
    }

    /// Whether a client waits for room, in the layer or in the shard's memory, which other disks give back.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.all().into_iter().any(Export::is_waiting)
    }

    /// The time at which [`Exports::pump`] is due even without events.
    #[must_use]
    pub fn deadline(&self, layer: &dyn Layer, reactor: &Reactor, workspace: &Workspace) -> Nanos {
        let deadlines = self.all().map(|export| export.deadline(layer, reactor, workspace));
        deadlines.into_iter().min().unwrap_or(Nanos::NEVER)
    }

    /// As [`Export::set_rate`].
    pub fn set_rate(&mut self, rate: Option<Rate>, now: Nanos) {
        self.nbd.set_rate(rate, now);
    }

    /// As [`Export::delays`].
    #[must_use]
    pub fn delays(&self) -> Delays {
        self.nbd.delays()
    }

    /// As [`Export::hold`], for all.
    pub fn hold(&mut self) {
        for export in self.all_mut() {
            export.hold();
        }
    }

    /// Whether the clients of all are held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.all().into_iter().all(Export::is_held)
    }

    /// As [`Export::resume`], for all.
    pub fn resume(&mut self) {
        for export in self.all_mut() {
            export.resume();
        }
    }

    /// As [`Export::dismiss`], for all.
    pub fn dismiss(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        for export in self.all_mut() {
            export.dismiss(reactor, workspace);
        }
    }

    /// As [`Export::close`], for all.
    pub fn close(&mut self) {
        for export in self.all_mut() {
            export.close();
        }
    }

    /// As [`Export::keep_via`], for all.
    pub fn keep_via(&mut self, node: Option<&str>, reactor: &mut Reactor, workspace: &mut Workspace) {
        for export in self.all_mut() {
            export.keep_via(node, reactor, workspace);
        }
    }

    /// As [`Export::abort`], for all.
    pub fn abort(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        for export in self.all_mut() {
            export.abort(reactor, workspace);
        }
    }

    /// Clients, those that are being disconnected included.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.all().map(Export::clients).iter().sum()
    }

    /// The meters of all exports.
    pub fn meters(&self, out: &mut Vec<LayerMeter>) {
        out.extend(self.all().map(Export::meter));
    }
}
