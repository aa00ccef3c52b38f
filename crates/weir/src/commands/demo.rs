//! placeholder
use crate::cli::DemoArgs;
use crate::failure::Failure;

/// Demo.
pub fn run(_: &DemoArgs) -> Result<(), Failure> {
    Ok(())
}
