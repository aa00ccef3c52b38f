//! Plants faults one at a time and prints what the finder takes each for: `make confusion`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use weir_lab::LabError;
use weir_lab::fault::confusion::{Case, Judged, Kept, Plant, Programs, Suspicion, is_good, matrix, run};

type Failure = Box<dyn std::error::Error>;

/// Faults planted one at a time, and what `weir diagnose` names: the confusion matrix.
///
/// A case is right when cause and layer are those that were planted, inconclusive when none is named, wrong when it is something
/// else; `healthy` is right when no bottleneck is found. Exit code 0: none is wrong, and each fault is found in more than half of its cases; 1: not so; 2: it could not be run.
#[derive(Parser)]
#[command(after_long_help = EXAMPLES)]
struct Arguments {
    /// The `weir` program; default: beside this one.
    #[arg(long)]
    weir: Option<PathBuf>,
    /// The `weir-lab-node` program; default: beside this one.
    #[arg(long)]
    node: Option<PathBuf>,
    /// Only these, with commas; default: all. nothing, healthy, order-lost, long-link, narrow-link, throttled, small-tier,
    /// busy-node, one-in-flight, busy-generator, busy-replica, moody-backing, split-requests, partial-writes.
    #[arg(long, value_delimiter = ',', value_parser = plant)]
    only: Vec<Plant>,
    /// Runs of each case: seeds 1 to this. About a minute for each.
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// Keep each case in this file as soon as it is done, one JSON object a line. Cases that are there already (the same fault
    /// and seed) are not run again, so that the same command goes on with what was interrupted; the matrix has all of them.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Keep each case's report in this directory, as FAULT-SEED.html and .json.
    #[arg(long, value_name = "DIR")]
    reports: Option<PathBuf>,
    /// The cases as JSON instead of the matrix.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  weir-lab-confusion --only long-link,nothing --rounds 3
  weir-lab-confusion --rounds 5 --output cases.jsonl                  the whole matrix
  weir-lab-confusion --only nothing --rounds 20 --output cases.jsonl  and 15 healthy stacks more";

fn plant(text: &str) -> Result<Plant, String> {
    let found = Plant::ALL.into_iter().find(|plant| plant.word() == text);
    found.ok_or_else(|| format!("there is no fault {text:?}; --help lists them"))
}

fn main() -> ExitCode {
    match all(Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            eprintln!("weir-lab-confusion: {failure}");
            ExitCode::from(2)
        }
    }
}

/// Whether the finder did well.
fn all(arguments: Arguments) -> Result<bool, Failure> {
    let beside = std::env::current_exe()?.with_file_name("");
    let programs = Programs {
        weir: arguments.weir.unwrap_or_else(|| beside.join("weir")),
        node: arguments.node.unwrap_or_else(|| beside.join("weir-lab-node")),
        reports: arguments.reports,
    };
    let plants = if arguments.only.is_empty() { Plant::ALL.to_vec() } else { arguments.only };
    let (mut kept, mut cases) = match &arguments.output {
        Some(path) => Kept::open(path).map(|(kept, cases)| (Some(kept), cases))?,
        None => (None, Vec::new()),
    };
    for seed in 1..=arguments.rounds {
        for &plant in &plants {
            if !cases.iter().any(|case| (case.planted, case.seed) == (plant, seed)) {
                cases.push(one(plant, &programs, seed, kept.as_mut())?);
            }
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&cases)?);
    } else {
        println!("{}", matrix(&cases));
    }
    Ok(is_good(&cases))
}

fn one(plant: Plant, programs: &Programs, seed: u64, kept: Option<&mut Kept>) -> Result<Case, LabError> {
    let case = run(plant, programs, seed)?;
    kept.map_or(Ok(()), |kept| kept.keep(&case))?;
    let mark = match case.judged {
        Judged::Right => "right",
        Judged::Inconclusive => "none ",
        Judged::Wrong => "WRONG",
    };
    let at = case.layer.as_ref().map_or(String::new(), |layer| format!(" at {layer}"));
    eprintln!(
        "{mark}  {plant:<15} named {}{at}  {:.0} s, load {:.1}  {} ({})",
        case.named, case.seconds, case.load_average, case.headline, case.grade
    );
    for Suspicion { cause, standing, grounds, .. } in &case.suspicions {
        eprintln!("         {cause} {standing}: {}", grounds.join(" "));
    }
    Ok(case)
}
