//! `weir`: the command line.

mod cli;
mod cluster;
mod commands;
mod failure;
mod output;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return not_understood(&error),
    };
    match commands::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("weir: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}

/// Prints what clap says. Pipelines tell `diagnose`'s codes apart from a broken threshold, so its usage is 4.
fn not_understood(error: &clap::Error) -> ExitCode {
    let of_diagnose = std::env::args().nth(1).is_some_and(|command| command == "diagnose");
    let _ = error.print();
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if of_diagnose => ExitCode::from(4),
        _ => ExitCode::from(2),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    /// clap's own checks, and that nothing goes without a word of help.
    #[test]
    fn every_command_and_argument_is_explained() {
        fn check(command: &Command) {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for argument in command.get_arguments() {
                assert!(
                    argument.get_help().is_some(),
                    "{} {} has no help",
                    command.get_name(),
                    argument.get_id()
                );
            }
            command.get_subcommands().for_each(check);
        }
        super::cli::Cli::command().debug_assert();
        check(&super::cli::Cli::command());
    }
}
