//! The interface by which the program that starts a node may put layers of its own around a disk's.
//!
//! The product adds none: [`Plain`]. The lab adds faults.

use weir_accel::Accel;
use weir_block::{Layer, Metered};
use weir_volume::Backing;
use weir_volume::lun::serving::Dispatch;

pub use super::profile::DiskProfile;

/// An accelerator with its meter, over whatever is below.
pub type DiskAccel = Metered<Accel<Box<dyn Backing>>, DiskProfile>;

/// The highest layers of a disk: its accelerator, and the layers around it.
pub trait Top: Layer {
    /// The accelerator.
    fn accel(&self) -> &DiskAccel;

    /// The accelerator, for what is not a client's request. A request submitted to it directly must carry a tag with the
    /// highest bit set; its answer comes out of the top's [`Layer::advance`].
    fn accel_mut(&mut self) -> &mut DiskAccel;
}

impl Top for DiskAccel {
    fn accel(&self) -> &DiskAccel {
        self
    }

    fn accel_mut(&mut self) -> &mut DiskAccel {
        self
    }
}

/// Puts layers around those of every disk that a node opens. Called on the disk's shard, once each time that it is opened.
pub trait Wrap: Send + Sync {
    /// Around the backing of `disk`.
    fn bottom(&self, disk: &str, backing: Box<dyn Backing>) -> Box<dyn Backing>;

    /// Around its accelerator.
    fn top(&self, disk: &str, accel: DiskAccel) -> Box<dyn Top>;

    /// When this node, as the coordinator of the volume of `disk`, begins the I/O that its owner redirects; `None`: at once.
    fn served(&self, disk: &str) -> Option<Box<dyn Dispatch>>;
}

/// Nothing is put anywhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Wrap for Plain {
    fn bottom(&self, _disk: &str, backing: Box<dyn Backing>) -> Box<dyn Backing> {
        backing
    }

    fn top(&self, _disk: &str, accel: DiskAccel) -> Box<dyn Top> {
        Box::new(accel)
    }

    fn served(&self, _disk: &str) -> Option<Box<dyn Dispatch>> {
        None
    }
}
