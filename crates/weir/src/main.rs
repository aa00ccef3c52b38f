//! `weir`: the command line.

mod cli;
mod cluster;
mod commands;
mod completion;
mod failure;
mod options;
mod output;

use std::ffi::OsString;
use std::process::ExitCode;

use clap_complete::CompleteEnv;

use failure::{Failure, FailureKind};

fn main() -> ExitCode {
    // With COMPLETE set, a shell requests completions.
    CompleteEnv::with_factory(cli::command).complete();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let as_json = asks_for_json(&arguments);
    if as_json {
        output::notes_as_json();
    }
    let failure = match cli::parse(&arguments) {
        Ok(cli) => match commands::run(cli) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(failure) => failure,
        },
        // Help and version.
        Err(error) if error.exit_code() == 0 => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) if as_json => Failure::usage(first_paragraph(&error)),
        Err(error) => {
            // With its colours.
            let _ = error.print();
            return ExitCode::from(FailureKind::Usage.exit_code());
        }
    };
    match as_json {
        true => output::to_stderr(&failure.to_json()),
        false => output::to_stderr(&failure.to_text()),
    }
    ExitCode::from(failure.kind.exit_code())
}

/// Whether the command line asks for results, and so errors, as JSON. Reads the words as they are: it counts also if the rest
/// of the command line is invalid.
fn asks_for_json(arguments: &[OsString]) -> bool {
    let is_json = |flag: &str, value: &str| match flag {
        "--output" => value == "json",
        "--format" => matches!(value, "json" | "jsonl"),
        _ => false,
    };
    let mut words =
        arguments.iter().map(|word| word.to_string_lossy()).take_while(|word| word != "--").peekable();
    while let Some(word) = words.next() {
        let found = match word.split_once('=') {
            Some((flag, value)) => is_json(flag, value),
            None => words.peek().is_some_and(|value| is_json(&word, value)),
        };
        if found {
            return true;
        }
    }
    false
}

/// clap's complaint, without the usage that follows.
fn first_paragraph(error: &clap::Error) -> String {
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "a subcommand is missing; --help lists them".to_owned();
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let paragraph = text.split("\n\n").next().unwrap_or(text);
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::Command;

    #[test]
    fn json_is_asked_for_in_several_ways() {
        let asks = |line: &str| {
            super::asks_for_json(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
        };
        assert!(asks("weir status --output json") && asks("weir --output=json status"));
        assert!(asks("weir bench null --format jsonl") && asks("weir bench null --format=json"));
        assert!(!asks("weir status --output text") && !asks("weir bench json --format fio"));
        assert!(!asks("weir disk show -- --output json") && !asks("weir status --output"));
    }

    /// Help is wrapped as text at the terminal's width: below it only lists and examples have lines of their own, which fit 80 columns.
    #[test]
    fn help_is_wrapped_as_text() {
        fn check(command: &mut Command, path: &str, width: usize) {
            for line in command.render_long_help().to_string().lines() {
                assert!(line.chars().count() <= width, "{path} at {width}: {line:?}");
            }
            let after = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            for pair in after.lines().collect::<Vec<_>>().windows(2) {
                let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
                assert!(
                    !(is_text(pair[0]) && is_text(pair[1])),
                    "{path}: a paragraph is broken after {:?}",
                    pair[0]
                );
            }
            for line in after.lines().filter(|line| line.starts_with(' ')) {
                assert!(line.chars().count() <= 80, "{path}: {line:?} does not fit 80 columns");
            }
            for subcommand in command.get_subcommands_mut() {
                let path = format!("{path} {}", subcommand.get_name());
                check(subcommand, &path, width);
            }
        }
        for width in [80, 100] {
            let mut command = super::cli::command().term_width(width);
            command.build();
            check(&mut command, "weir", width);
        }
    }

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
        super::cli::command().debug_assert();
        check(&super::cli::command());
    }
}
