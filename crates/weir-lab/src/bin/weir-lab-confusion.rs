//! Plants faults one at a time and prints what the finder takes each for: `make confusion`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use weir_lab::fault::confusion::{Case, Plant, Programs, matrix, run};

type Failure = Box<dyn std::error::Error>;

/// Faults planted one at a time, and what `weir diagnose` names: the confusion matrix.
#[derive(Parser)]
#[command(after_long_help = "Example:\n  weir-lab-confusion --only long-link,nothing --rounds 3")]
struct Arguments {
    /// The `weir` program; default: beside this one.
    #[arg(long)]
    weir: Option<PathBuf>,
    /// The `weir-lab-node` program; default: beside this one.
    #[arg(long)]
    node: Option<PathBuf>,
    /// Only these, with commas; default: all. nothing, order-lost, long-link, narrow-link, throttled, small-tier,
    /// busy-node, one-in-flight, busy-generator, busy-replica.
    #[arg(long, value_delimiter = ',', value_parser = plant)]
    only: Vec<Plant>,
    /// How often each is planted, with another seed each time.
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// The cases as JSON instead of the matrix.
    #[arg(long)]
    json: bool,
}

fn plant(text: &str) -> Result<Plant, String> {
    let found = Plant::ALL.into_iter().find(|plant| plant.word() == text);
    found.ok_or_else(|| format!("there is no fault {text:?}; --help lists them"))
}

fn main() -> Result<ExitCode, Failure> {
    let arguments = Arguments::parse();
    let beside = std::env::current_exe()?.with_file_name("");
    let programs = Programs {
        weir: arguments.weir.unwrap_or_else(|| beside.join("weir")),
        node: arguments.node.unwrap_or_else(|| beside.join("weir-lab-node")),
    };
    let plants = if arguments.only.is_empty() { Plant::ALL.to_vec() } else { arguments.only };
    let mut cases: Vec<Case> = Vec::new();
    for seed in 1..=arguments.rounds {
        for &plant in &plants {
            let case = run(plant, &programs, seed)?;
            let mark = if case.right { "right" } else { "WRONG" };
            eprintln!(
                "{mark}  {plant:<15} named {:<15} {:.0} s, load {:.1}  {} ({})",
                case.named, case.seconds, case.load_average, case.headline, case.grade
            );
            cases.push(case);
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&cases)?);
    } else {
        println!("{}", matrix(&cases));
    }
    Ok(if cases.iter().all(|case| case.right) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
