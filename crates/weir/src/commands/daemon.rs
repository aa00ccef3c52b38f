//! `weir node` and `weir registry`: processes that run until a signal stops them.

use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use weir_cluster::remote::make_private_dir;
use weir_cluster::{Embedded, Server};
use weir_node::config::{Config, EXAMPLE};
use weir_node::vector_copies;

use crate::cli::{NodeArgs, RegistryArgs};
use crate::failure::Failure;

/// Runs a node.
pub fn node(arguments: &NodeArgs) -> Result<(), Failure> {
    if arguments.print_config {
        return crate::output::say(EXAMPLE.trim_end());
    }
    // Before the configuration is read: it may come from a pipe.
    let copies = vector_copies::restart_if_slow();
    let config = Config::load(&arguments.config)?;
    log();
    if let Err(error) = copies {
        tracing::warn!(%error, "cannot start again with faster copies in memory; TLS takes more processor time");
    }
    let runtime = runtime()?;
    let result = runtime.block_on(async {
        let shutdown = shutdown()?;
        Ok(weir_node::run(config, shutdown).await?)
    });
    // Work that waits for unresponsive storage must not delay the exit of a stopped node.
    runtime.shutdown_background();
    result
}

/// Runs the registry.
pub fn registry(arguments: &RegistryArgs) -> Result<(), Failure> {
    log();
    runtime()?.block_on(async {
        let shutdown = shutdown()?;
        for path in [&arguments.file, &arguments.socket] {
            make_room(path)?;
        }
        let registry = Embedded::open(&arguments.file).map_err(Failure::failed)?;
        let server = Server::start(&arguments.socket, registry).await.map_err(Failure::failed)?;
        tracing::info!(socket = %arguments.socket.display(), file = %arguments.file.display(), "serving the registry");
        shutdown.await;
        server.stop().await;
        Ok(())
    })
}

/// Creates the directory of a file or a socket, for this user alone.
fn make_room(path: &std::path::Path) -> Result<(), Failure> {
    let Some(directory) = path.parent() else { return Ok(()) };
    make_private_dir(directory)
        .map_err(|error| Failure::failed(format!("cannot make the directory of {}: {error}", path.display())))
}

/// Logs to standard error; `WEIR_LOG` sets the level.
fn log() {
    let filter = EnvFilter::try_from_env("WEIR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // A line that cannot be written is lost: told on standard error, as tracing does by itself, it would end the process, and with it
    // the logs that it has in RAM.
    let lines = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    lines.with_writer(std::io::stderr).with_ansi(false).init();
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.map_err(|error| Failure::failed(format!("cannot start the runtime: {error}")))
}

/// Completes at SIGTERM or SIGINT.
fn shutdown() -> Result<impl Future<Output = ()>, Failure> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
