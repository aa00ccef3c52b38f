//! Commands and arguments.

use std::num::NonZeroUsize;

use clap::{Parser, Subcommand, ValueEnum};
use weir_sim::{Bug, right};

/// Runs what Weir's nodes run in production in virtual time, with faults decided by a seed, and checks the promises.
///
/// The same seed gives the same run. Ends with status 1 when a promise was broken (or, for `bugs`, when a planted bug was
/// not found).
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    Seeds(SeedCommand),
    /// Whole nodes: the control plane and the shard that run in production, with a registry between them.
    Nodes {
        /// What to do.
        #[command(subcommand)]
        command: SeedCommand,
    },
    /// The right to serve alone: its production cores, between hosts whose clocks drift.
    #[command(subcommand)]
    Right(RightCommand),
    /// Print the fault atlas: what goes wrong, which promise covers it, and what keeps it inside that.
    Atlas,
}

/// What to do with seeds.
#[derive(Debug, Subcommand)]
pub enum SeedCommand {
    /// Replay one seed.
    Run {
        /// The seed.
        #[arg(long, short)]
        seed: u64,
        /// Plant this bug first; `weir-sim bugs` lists their names.
        #[arg(long, value_parser = bug)]
        bug: Option<Bug>,
        /// Print everything that happens, one line each with its virtual time in seconds.
        #[arg(long)]
        trace: bool,
    },
    /// Run many seeds and add up what they have seen.
    Many {
        /// How many.
        #[arg(long, short = 'n', default_value_t = 10_000)]
        seeds: u64,
        /// The first one.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
        /// Plant this bug first.
        #[arg(long, value_parser = bug)]
        bug: Option<Bug>,
        /// How to print the result.
        #[arg(long, short, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Plant one bug after the other and count the seeds that find it: the checker can fail.
    Bugs {
        /// Seeds for each bug.
        #[arg(long, short = 'n', default_value_t = 2_000)]
        seeds: u64,
        /// Seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
        /// How to print the result.
        #[arg(long, short, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
}

/// What to do with the right to serve.
#[derive(Debug, Subcommand)]
pub enum RightCommand {
    /// Replay one seed.
    Run {
        /// The seed.
        #[arg(long, short)]
        seed: u64,
        /// Switch this rule off first; `weir-sim right bugs` lists their names.
        #[arg(long, value_parser = right_bug)]
        bug: Option<right::Bug>,
        /// Print everything that happens, one line each with its virtual time in seconds.
        #[arg(long)]
        trace: bool,
    },
    /// Run many seeds and add up what they have seen.
    Many {
        /// How many.
        #[arg(long, short = 'n', default_value_t = 100_000)]
        seeds: u64,
        /// The first one.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
        /// Switch this rule off first.
        #[arg(long, value_parser = right_bug)]
        bug: Option<right::Bug>,
    },
    /// Switch one rule off after the other and count the seeds that find it.
    Bugs {
        /// Seeds for each.
        #[arg(long, short = 'n', default_value_t = 10_000)]
        seeds: u64,
        /// Seeds that run at the same time.
        #[arg(long, default_value_t = processors())]
        threads: usize,
    },
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
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
    fn bugs_are_known_by_their_names() {
        for expected in Bug::ALL.into_iter() {
            assert_eq!(bug(expected.name()), Ok(expected));
        }
        assert!(bug("none").unwrap_err().contains("skip-seal"));
    }
}
