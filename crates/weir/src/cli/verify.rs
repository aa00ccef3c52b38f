//! What `weir bench verify` takes.

use std::path::PathBuf;

use clap::Args;

use super::BenchEngine;

pub(super) const EXAMPLES: &str = "\
Examples:
  weir bench nbd+unix:///db?socket=/run/db --rw randwrite --verify --history db.history --runtime '1 h' --destroy &
  kill -9 $!                                                  or cut the power of the server
  weir bench verify --history db.history nbd+unix:///db?socket=/run/db
  weir bench verify --history disk.history /dev/nvme1n1 --torn-in-flight --output json";

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// A file, a block device or an NBD URI: where the load's data is now.
    pub target: String,
    /// The record that the load has kept.
    #[arg(long, value_name = "FILE")]
    pub history: PathBuf,
    /// A write that was not answered may be there in part, sector by sector: a bare disk promises no more. Default: all of it
    /// or nothing.
    #[arg(long)]
    pub torn_in_flight: bool,
    /// Who reads a file or block device; default: io_uring.
    #[arg(long, value_enum)]
    pub engine: Option<BenchEngine>,
}
