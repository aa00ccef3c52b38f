//! The base of every layer: requests, buffers, the `Layer` trait, meters, and the reactor, the only loop that calls the kernel.
//!
//! A *shard* is one thread with one [`Reactor`]. That thread alone owns everything on the shard (layers, sockets, buffers), so
//! types here are not `Send` unless documented.

pub mod buffer;
pub mod clock;
pub mod error;
pub mod group;
pub mod hash;
pub mod layer;
pub mod meter;
pub mod metered;
pub mod mounts;
mod operation;
pub mod planted;
mod random;
pub mod reactor;
pub mod region;
pub mod request;
pub mod sim;
pub mod size;
pub mod socket;
pub mod throttle;
pub mod wire;
pub mod zeroes;

pub use buffer::{Buffer, BufferPool};
pub use clock::{Clock, Nanos};
pub use error::{Code, ErrorKind, IoError};
pub use group::Group;
pub use layer::{Destage, Layer, LayerInfo};
pub use meter::{KindMeter, LayerMeter, Meter};
pub use metered::{Metered, Observe};
pub use reactor::{
    Action, Descriptor, Engine, Event, Interest, OwnerId, Reactor, ReactorConfig, SharedFile, Token, Waker,
    WatchId, WriteSource,
};
pub use region::Region;
pub use request::{Completion, Extent, ExtentState, Outcome, Payload, Request, RequestKind, Tag};
pub use socket::{Protection, Received, Sent, Socket, Stream};
pub use throttle::Throttle;
