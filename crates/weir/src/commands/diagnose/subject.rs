//! What a measurement is of: a disk or a described stack, as layers.

use weir_diagnose::Target;
use weir_diagnose::load::LoadOptions;
use weir_load::run::Monitor;

use crate::failure::Failure;

/// What is measured: layers that lead to the same storage.
pub trait Subject {
    /// The disk's name, or the stack's.
    fn name(&self) -> &str;

    /// The node that measures, or has the disk.
    fn node(&self) -> String;

    /// Bytes.
    fn size(&self) -> u64;

    /// The layers, those on the way from the bottom up.
    fn layers<'a>(
        &'a self,
        options: &LoadOptions,
        monitor: &'a Monitor,
    ) -> Result<Vec<Box<dyn Target + 'a>>, Failure>;

    /// Writes the whole range once, so that nothing measures holes.
    fn fill(&self, options: &LoadOptions, monitor: &Monitor) -> Result<(), Failure>;

    /// What is taken on trust.
    fn caution(&self, _destroy: bool) -> Option<&'static str> {
        None
    }
}
