//! `weir-lab-greeting`: writes the greeting by which a node opens a connection to another one, for tests of hosts that forge it.

use std::io::Write;

use clap::Parser;
use weir_cluster::records::NodeRef;
use weir_node::peer::{Greeting, Purpose};

/// Write the greeting of an owner that wants its log replicated to standard output, as bytes.
#[derive(Debug, Parser)]
struct Arguments {
    /// The disk.
    #[arg(long)]
    disk: String,
    /// The node in whose name it is.
    #[arg(long)]
    from: String,
    /// The node that it is for.
    #[arg(long)]
    to: String,
    /// The process that it is for.
    #[arg(long)]
    incarnation: u64,
}

fn main() -> std::io::Result<()> {
    let Arguments { disk, from, to, incarnation } = Arguments::parse();
    let replica = NodeRef::new(to, incarnation);
    let greeting = Greeting { disk, owner: from, replica, purpose: Purpose::Replicate };
    std::io::stdout().write_all(&greeting.encode())
}
