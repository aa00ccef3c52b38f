//! `weir`: the command line.

mod cli;
mod cluster;
mod commands;
mod failure;
mod output;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match commands::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("weir: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}
