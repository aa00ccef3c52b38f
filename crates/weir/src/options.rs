//! Options that every command has.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Options that every command has.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Text for people or JSON for programs.
    #[arg(long, global = true, value_enum, default_value = "text", help_heading = "Global options")]
    pub output: Output,
    /// Ask the lab in this directory.
    #[arg(long, global = true, env = "WEIR_LAB", value_name = "DIR", help_heading = "Global options")]
    pub lab: Option<PathBuf>,
    /// Ask the node whose API is at this Unix socket, or at https://HOST:PORT (with --credentials).
    #[arg(long, global = true, env = "WEIR_API", value_name = "SOCKET", help_heading = "Global options")]
    pub api: Option<PathBuf>,
    /// Directory with the files of `weir cluster client`, for an API at https://, and for what a node of another host has to do.
    #[arg(
        long,
        global = true,
        env = "WEIR_CREDENTIALS",
        value_name = "DIR",
        help_heading = "Global options"
    )]
    pub credentials: Option<PathBuf>,
    /// Ask this node of the lab; default: the first that runs, or the one that owns the disk.
    #[arg(id = "ask", long = "node", global = true, value_name = "NAME", help_heading = "Global options")]
    pub node: Option<String>,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Tables and sentences.
    Text,
    /// One JSON document.
    Json,
}
