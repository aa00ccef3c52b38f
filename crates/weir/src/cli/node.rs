//! `weir node`

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::completion;

pub const EXAMPLES: &str = "Examples:
  weir node --config /etc/weir/weir.toml   run a node
  weir node drain n2    move everything away from n2, and wait
  weir node resume n2   n2 takes disks again; its disks return";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct NodeArgs {
    #[command(subcommand)]
    pub command: Option<NodeCommand>,
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/weir/weir.toml")]
    pub config: PathBuf,
    /// Print an example configuration with every key, and end.
    #[arg(long)]
    pub print_config: bool,
}

#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// One node: its state, the disks that count on it, and those that return to it.
    Show {
        /// The node.
        #[arg(add = completion::nodes())]
        name: String,
    },
    /// Move a node's disks, copies and coordinations to other nodes while they are in use, for maintenance.
    ///
    /// Nothing is placed on the node until it is resumed, also after a restart. Refuses, and changes nothing, if a disk would end
    /// with fewer copies than its policy requests, or cannot go anywhere, or if no other node can coordinate a volume on a LUN that this
    /// one coordinates. Waits until nothing counts on the node and other nodes serve those volumes: it may then be stopped.
    Drain {
        /// The node.
        #[arg(add = completion::nodes())]
        name: String,
        /// Permit fewer copies than the policies request, for the time of the drain. A disk without enough other nodes for its
        /// copies is write-through meanwhile.
        #[arg(long)]
        fewer_copies: bool,
        /// Only show what counts on the node, and what would stay.
        #[arg(long, conflicts_with = "no_wait")]
        dry_run: bool,
        /// Do not wait for the end.
        #[arg(long)]
        no_wait: bool,
    },
    /// End a node's drain: it takes disks again, and those that the drain has moved away return.
    Resume {
        /// The node.
        #[arg(add = completion::nodes())]
        name: String,
        /// Do not wait for the disks.
        #[arg(long)]
        no_wait: bool,
    },
    /// End a node's quarantine, and forget its isolations.
    Clear {
        /// The node.
        #[arg(add = completion::nodes())]
        name: String,
    },
    /// Remove a node that is down and will not come back.
    ///
    /// Refuses while a disk counts on the node.
    Remove {
        /// The node.
        #[arg(add = completion::nodes())]
        name: String,
    },
}
