//! What `weir bench verify` takes.

use std::path::PathBuf;

use clap::Args;

use super::engine::BenchEngine;

pub(super) const EXAMPLES: &str = "\
What a wrong block is called:
  lost        it holds nothing of this load, though a write was acknowledged
  stale       it holds an older version than the acknowledged one
  torn        its sectors are of different versions
  misplaced   it holds data of this load that belongs elsewhere
  foreign     some of its sectors are of another load, or of none
  corrupt     a stamp in it does not check
  unissued    it holds a version that the load never wrote

Exit codes:
  0  every block is as it must be
  1  at least one is not, or could not be read, or the check was interrupted
  2  the command line, or FILE, is not understood
  3  there is no target or no FILE
  4  a load is still writing FILE
  5  the target does not answer

Examples:
  weir bench nbd://10.0.0.7/db --rw randwrite --verify --history h \\
    --runtime 1h --destroy
  (kill -9 the load or the server, or cut the server's power; start the server)
  weir bench verify --history h nbd://10.0.0.7/db
  weir bench verify --history h /dev/nvme1n1 --torn-in-flight --output json";

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
    /// I/O engine for a file or block device; default: io_uring.
    #[arg(long, value_enum)]
    pub engine: Option<BenchEngine>,
}
