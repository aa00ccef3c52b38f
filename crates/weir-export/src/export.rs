//! The interface by which a shard drives an export, whatever its protocol.

use weir_block::{Completion, Event, Layer, LayerMeter, Nanos, OwnerId, Reactor};

use crate::limit::{Delays, Rate};
use crate::workspace::Workspace;

/// Bits of a tag that an export chooses. The bits above are the export's number ([`crate::Exports`]); the highest bit marks requests
/// that come from no export.
pub(crate) const TAG_BITS: u32 = 56;

/// One protocol by which clients reach a disk, on the disk's shard.
///
/// The shard's loop calls, in this order: [`on_event`](Export::on_event) for each event of [`owner`](Export::owner);
/// [`pump`](Export::pump); [`Layer::advance`]; [`complete`](Export::complete) for each answer to a request of this export;
/// [`flush`](Export::flush); and waits until [`deadline`](Export::deadline) at most. Nothing here blocks.
pub trait Export {
    /// The owner of the events of this export's clients.
    fn owner(&self) -> OwnerId;

    /// Notes that a client can be read from or written to.
    fn on_event(&mut self, event: &Event);

    /// Takes what clients have sent and submits it to `layer`, with tags of this export ([`crate::Exports`]).
    fn pump(&mut self, reactor: &mut Reactor, layer: &mut dyn Layer, workspace: &mut Workspace);

    /// Takes the layer's answer to a request of this export.
    fn complete(&mut self, completion: Completion);

    /// Sends the replies that are ready.
    fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace);

    /// Whether a client stopped only to give others their turn.
    fn has_more(&self) -> bool;

    /// Whether a client waits for room, in the layer or in the shard's memory, which other disks give back.
    fn is_waiting(&self) -> bool;

    /// The time at which [`pump`](Export::pump) is due even without events.
    fn deadline(&self, layer: &dyn Layer, reactor: &Reactor, workspace: &Workspace) -> Nanos;

    /// Sets or removes the highest rate at which clients are served.
    fn set_rate(&mut self, rate: Option<Rate>, now: Nanos);

    /// The requests that the rate has delayed, and for how long.
    fn delays(&self) -> Delays;

    /// Begins to hold the clients, because the disk is about to move to another node: answers all received requests and keeps the
    /// replies, so that clients send no more; then takes no new requests. Done when [`is_held`](Export::is_held). Ends with
    /// [`resume`](Export::resume), [`dismiss`](Export::dismiss) or [`close`](Export::close).
    fn hold(&mut self);

    /// Whether the hold is complete: all requests taken are answered, or the time for that has passed. True without a hold.
    fn is_held(&self) -> bool;

    /// The disk stays here: sends the kept replies and serves the clients again.
    fn resume(&mut self);

    /// Another node serves the disk: sends the kept replies and disconnects the clients. As [`abort`](Export::abort) without a
    /// hold. Done when there are no [`clients`](Export::clients).
    fn dismiss(&mut self, reactor: &mut Reactor, workspace: &mut Workspace);

    /// Begins to close: takes no new requests, answers those in flight, then disconnects the clients. Done when there are no
    /// [`clients`](Export::clients).
    fn close(&mut self);

    /// Disconnects the clients that follow the disk on other nodes than `node` now, also with replies outstanding. Clients of this
    /// node stay, those that others forward, and those that only read.
    fn keep_via(&mut self, node: Option<&str>, reactor: &mut Reactor, workspace: &mut Workspace);

    /// Disconnects all clients now, also with replies outstanding. The layer's answers are still to be taken; done when there
    /// are no [`clients`](Export::clients).
    fn abort(&mut self, reactor: &mut Reactor, workspace: &mut Workspace);

    /// Clients, those that are being disconnected included.
    fn clients(&self) -> usize;

    /// The export's meter.
    fn meter(&self) -> LayerMeter;
}
