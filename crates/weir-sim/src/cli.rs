//! Commands and arguments.

use std::num::NonZeroUsize;

use clap::{Parser, Subcommand, ValueEnum};
use weir_sim::nodes::StateBug;
use weir_sim::{Bug, right};

/// Runs the production code of Weir's nodes in virtual time, with faults from a seed, and checks the promises.
///
/// The same seed gives the same run. Exits with status 1 when a promise was broken (or, for `bugs`, when no seed found a planted
/// bug).
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    Seeds(SeedCommand),
    /// Simulate whole nodes: the production control plane and shard, with a registry between them.
    Nodes {
        /// The command.
        #[command(subcommand)]
        command: SeedCommand,
    },
    /// Simulate whole nodes and the states of nodes: one loses the registry for long and again and again, operators drain, resume
    /// and clear.
    #[command(subcommand)]
    States(StatesCommand),
    /// Simulate the right to serve alone: its production cores, between hosts with clock drift.
    #[command(subcommand)]
    Right(RightCommand),
    /// Simulate the protocol of a volume on a shared LUN alone: its production cores, over a filesystem that moves blocks.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Simulate a disk of a volume on a shared LUN: the production shells of its owner and of the coordinator, with their connections and I/O,
    /// between nodes that are killed.
    #[command(subcommand)]
    Shells(VolumeCommand),
    /// Simulate who coordinates a volume on a shared LUN: the production core of claim, fences and mount, between nodes that die, beside
    /// kernels that write without being asked.
    #[command(subcommand)]
    Claims(VolumeCommand),
    /// Print the fault atlas: each kind of fault, the promises that cover it, and its limits.
    Atlas,
}

/// Commands for seeds.
#[derive(Debug, Subcommand)]
pub enum SeedCommand {
    /// Replay one seed.
    Run {
        /// The seed.
        #[arg(long, short)]
        seed: u64,
        /// Plant this bug first; `weir-sim bugs` lists the names.
        #[arg(long, value_parser = bug)]
        bug: Option<Bug>,
        /// Print every event, one line each with its virtual time in seconds.
        #[arg(long)]
        trace: bool,
    },
    /// Run many seeds and print totals.
    Many {
        /// Number of seeds.
        #[arg(long, short = 'n', default_value_t = 10_000)]
        seeds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
        /// Plant this bug first.
        #[arg(long, value_parser = bug)]
        bug: Option<Bug>,
        /// Output format.
        #[arg(long, short, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Plant each bug in turn and count the seeds that find it: shows that the checks can fail.
    Bugs {
        /// Seeds per bug.
        #[arg(long, short = 'n', default_value_t = 2_000)]
        seeds: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
        /// Output format.
        #[arg(long, short, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
}

/// Commands for the states of nodes.
#[derive(Debug, Subcommand)]
pub enum StatesCommand {
    /// Replay one seed.
    Run {
        /// The seed.
        #[arg(long, short)]
        seed: u64,
        /// Disable this rule first; `weir-sim states bugs` lists the names.
        #[arg(long, value_parser = state_bug)]
        bug: Option<StateBug>,
        /// Print every event, one line each with its virtual time in seconds.
        #[arg(long)]
        trace: bool,
    },
    /// Run many seeds and print totals.
    Many {
        /// Number of seeds.
        #[arg(long, short = 'n', default_value_t = 10_000)]
        seeds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
    },
    /// Disable each rule in turn and count the seeds that find it.
    Bugs {
        /// Seeds per rule.
        #[arg(long, short = 'n', default_value_t = 2_000)]
        seeds: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
    },
}

/// Commands for the protocol of a shared volume.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Replay one seed.
    Run {
        /// The seed.
        #[arg(long, short)]
        seed: u64,
        /// Plant this bug first; `weir-sim volume bugs` lists the names.
        #[arg(long, value_parser = volume_bug)]
        bug: Option<weir_volume::planted::Bug>,
        /// Print every event.
        #[arg(long)]
        trace: bool,
    },
    /// Run many seeds and print the first violations.
    Many {
        /// Number of seeds.
        #[arg(long, short = 'n', default_value_t = 100_000)]
        seeds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
    },
    /// Plant each bug in turn and count the seeds that find it.
    Bugs {
        /// Seeds per bug.
        #[arg(long, short = 'n', default_value_t = 2_000)]
        seeds: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
    },
}

fn volume_bug(name: &str) -> Result<weir_volume::planted::Bug, String> {
    let mut all = weir_volume::planted::Bug::all();
    all.find(|bug| bug.name() == name).ok_or_else(|| {
        "not a planted bug; `weir-sim volume bugs`, `claims bugs` and `shells bugs` list them".into()
    })
}

/// Commands for the right to serve.
#[derive(Debug, Subcommand)]
pub enum RightCommand {
    /// Replay one seed.
    Run {
        /// The seed.
        #[arg(long, short)]
        seed: u64,
        /// Disable this rule first; `weir-sim right bugs` lists the names.
        #[arg(long, value_parser = right_bug)]
        bug: Option<right::Bug>,
        /// Print every event, one line each with its virtual time in seconds.
        #[arg(long)]
        trace: bool,
    },
    /// Run many seeds and print totals.
    Many {
        /// Number of seeds.
        #[arg(long, short = 'n', default_value_t = 100_000)]
        seeds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
        /// Disable this rule first.
        #[arg(long, value_parser = right_bug)]
        bug: Option<right::Bug>,
    },
    /// Disable each rule in turn and count the seeds that find it.
    Bugs {
        /// Seeds per rule.
        #[arg(long, short = 'n', default_value_t = 10_000)]
        seeds: u64,
        /// Number of seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
    },
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text.
    Text,
    /// JSON.
    Json,
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn bug(name: &str) -> Result<Bug, String> {
    let found = Bug::ALL.into_iter().find(|bug| bug.name() == name);
    found.ok_or_else(|| {
        let names: Vec<&str> = Bug::ALL.into_iter().map(Bug::name).collect();
        format!("no such bug; there are {}", names.join(", "))
    })
}

fn state_bug(name: &str) -> Result<StateBug, String> {
    StateBug::ALL.into_iter().find(|bug| bug.name() == name).ok_or_else(|| {
        let names: Vec<&str> = StateBug::ALL.into_iter().map(StateBug::name).collect();
        format!("no such bug; there are {}", names.join(", "))
    })
}

fn right_bug(name: &str) -> Result<right::Bug, String> {
    right::Bug::all().find(|bug| bug.name() == name).ok_or_else(|| {
        let names: Vec<&str> = right::Bug::all().map(right::Bug::name).collect();
        format!("no such bug; there are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_command_and_argument_is_explained() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands() {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn bugs_parse_by_name() {
        for expected in Bug::ALL.into_iter() {
            assert_eq!(bug(expected.name()), Ok(expected));
        }
        assert!(bug("none").unwrap_err().contains("skip-seal"));
    }
}
