//! The subject of a measurement: a disk or a described stack, as layers.

use weir_diagnose::Target;
use weir_diagnose::load::LoadOptions;
use weir_load::run::Monitor;

use crate::failure::Failure;

/// A measured subject: layers that lead to the same storage.
pub trait Subject {
    /// The disk's name, or the stack's.
    fn name(&self) -> &str;

    /// The node that measures, or has the disk.
    fn node(&self) -> String;

    /// Size, in bytes.
    fn size(&self) -> u64;

    /// The layers, those on the path from the bottom up.
    fn layers<'a>(
        &'a self,
        options: &LoadOptions,
        monitor: &'a Monitor,
    ) -> Result<Vec<Box<dyn Target + 'a>>, Failure>;

    /// Writes the whole range once, so that nothing measures holes.
    fn fill(&self, options: &LoadOptions, monitor: &Monitor) -> Result<(), Failure>;

    /// An unverified assumption of the measurement.
    fn caution(&self, _destroy: bool) -> Option<String> {
        None
    }
}
