//! The seam where whoever starts a node may put layers of its own around a disk's.
//!
//! The product puts none: [`Plain`]. The lab puts faults there.

use weir_accel::Accel;
use weir_block::{Destage, Layer, Metered};
use weir_volume::{FileBacking, VolumeError};

pub use crate::shard::profile::DiskProfile;

/// The lowest layers of a disk: its backing, and what was put around it.
pub trait Bottom: Destage {
    /// The disk has another size from now on, in bytes.
    ///
    /// # Errors
    /// As for [`FileBacking::resize`].
    fn resize(&mut self, size: u64) -> Result<(), VolumeError>;
}

impl Bottom for FileBacking {
    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        FileBacking::resize(self, size)
    }
}

impl<B: Bottom + ?Sized> Bottom for Box<B> {
    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        (**self).resize(size)
    }
}

/// An accelerator with its meter, over whatever is below.
pub type DiskAccel = Metered<Accel<Box<dyn Bottom>>, DiskProfile>;

/// The highest layers of a disk: its accelerator, and what was put around it.
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
    fn bottom(&self, disk: &str, backing: FileBacking) -> Box<dyn Bottom>;

    /// Around its accelerator.
    fn top(&self, disk: &str, accel: DiskAccel) -> Box<dyn Top>;
}

/// Nothing is put anywhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Wrap for Plain {
    fn bottom(&self, _disk: &str, backing: FileBacking) -> Box<dyn Bottom> {
        Box::new(backing)
    }

    fn top(&self, _disk: &str, accel: DiskAccel) -> Box<dyn Top> {
        Box::new(accel)
    }
}
