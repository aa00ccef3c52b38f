//! A node of the lab: the product's node, with layers that inject faults on request around each disk's layers.
//!
//! Takes the arguments of `weir node` and `weir registry`, so that a lab can be made of this program alone.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use weir_cluster::{Embedded, Server};
use weir_lab::fault::board::Board;
use weir_lab::fault::orders;
use weir_lab::fault::relay::Relay;
use weir_node::Setup;
use weir_node::config::Config;

type Failure = Box<dyn std::error::Error>;

/// A node whose disks have faults at will. For tests; never for data.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a node. Takes orders at `faults.sock` in its state directory.
    Node {
        /// The node's configuration.
        #[arg(long)]
        config: PathBuf,
    },
    /// Run the registry.
    Registry {
        /// The socket to listen on.
        #[arg(long)]
        socket: PathBuf,
        /// The registry's file.
        #[arg(long)]
        file: PathBuf,
    },
    /// Give a running node an order: the faults at a place of a disk, or of the replication link to the node.
    #[command(after_long_help = ORDERS)]
    Order {
        /// `faults.sock` in the node's state directory.
        #[arg(long)]
        socket: PathBuf,
        /// The order, in JSON.
        order: String,
    },
}

const ORDERS: &str = "\
Places of a disk: export (above the accelerator), accel (between it and the backing), backing; and on the coordinator of a volume on a
LUN: redirected (where it begins what the disk's owner redirects to it). What is not named is without faults; an empty set clears the
place. Times are microseconds, rates bytes per second. See weir_lab::fault::Faults.

Examples:
  weir-lab-node order --socket n1/faults.sock '{\"disk\":{\"disk\":\"db\",\"at\":\"accel\",\"faults\":{\"delay_us\":1000}}}'
  weir-lab-node order --socket n1/faults.sock '{\"disk\":{\"disk\":\"db\",\"at\":\"backing\",\"faults\":{\"simulated_disk\":true}}}'
  weir-lab-node order --socket n1/faults.sock '{\"disk\":{\"disk\":\"db\",\"at\":\"accel\",\"faults\":{}}}'
  weir-lab-node order --socket n1/faults.sock '{\"disk\":{\"disk\":\"db\",\"at\":\"redirected\",\"faults\":{\"dispatchers\":2,\"hold_us\":100}}}'
  weir-lab-node order --socket n2/faults.sock '{\"link\":{\"delay_us\":1000}}'";

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    if let Command::Order { socket, order } = &arguments.command {
        return Ok(orders::send(socket, &serde_json::from_str(order)?)?);
    }
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        match arguments.command {
            Command::Node { config } => node(&config, shutdown).await,
            Command::Registry { socket, file } => registry(&socket, &file, shutdown).await,
            Command::Order { .. } => Ok(()),
        }
    });
    // Work that still waits for storage that does not answer must not delay the exit of a stopped node.
    runtime.shutdown_background();
    result
}

async fn node(config: &std::path::Path, shutdown: impl Future<Output = ()>) -> Result<(), Failure> {
    let config = Config::load(config)?;
    std::fs::create_dir_all(&config.state_dir)?;
    let (board, relay) = (Board::default(), Relay::start(config.peers.listen)?);
    orders::serve(&orders::socket(&config.state_dir), board.clone(), relay.clone())?;
    let setup = Setup { wrap: Arc::new(board), peer_address: Some(relay.address()) };
    Ok(weir_node::run_with(config, setup, shutdown).await?)
}

async fn registry(
    socket: &std::path::Path,
    file: &std::path::Path,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let server = Server::start(socket, Embedded::open(file)?).await?;
    shutdown.await;
    server.stop().await;
    Ok(())
}
