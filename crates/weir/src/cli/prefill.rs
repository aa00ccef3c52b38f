//! Options of commands that fill a target before they load it.

use clap::Args;
use weir_block::size::Size;
use weir_load::prefill::Limits;
use weir_node::units::Period;

/// Whether, and how much, a command may fill before the load.
#[derive(Debug, Args)]
pub struct PrefillArgs {
    /// Do not fill blocks that were never written. Otherwise a load that may write (a writing one, or with --destroy) first fills the
    /// range when it finds a hole, so that holes are not measured as speed; it says so, and the result counts that apart. A disk's
    /// layer is filled when less of the disk is allocated than its size.
    #[arg(long)]
    no_prefill: bool,
    /// Refuse to fill more than this.
    #[arg(long, value_name = "SIZE", default_value = "64GiB", conflicts_with = "no_prefill")]
    prefill_size: Size,
    /// Longest time for filling.
    #[arg(long, value_name = "TIME", default_value = "10m", conflicts_with = "no_prefill", value_parser = above_zero)]
    prefill_time: Period,
}

impl PrefillArgs {
    /// The limits; `None` when nothing may be filled.
    pub fn limits(&self) -> Option<Limits> {
        let limits = Limits { bytes: self.prefill_size.0, time: self.prefill_time.0 };
        (!self.no_prefill).then_some(limits)
    }
}

/// A time in which something can be filled.
fn above_zero(text: &str) -> Result<Period, String> {
    match text.parse::<Period>().map_err(|error| error.to_string())? {
        Period(time) if time.is_zero() => {
            Err("nothing is filled in no time: give more, or leave filling out with --no-prefill".to_owned())
        }
        period => Ok(period),
    }
}
