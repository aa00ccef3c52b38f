//! Orders to a node of the lab: one JSON line to its socket, one back.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, thread};

use serde::{Deserialize, Serialize};

use super::board::{At, Board};
use super::relay::{LinkFaults, Relay};
use super::settings::Faults;
use crate::error::LabError;

/// Longest order, in bytes.
const LONGEST: u64 = 4096;

/// Time limit of an order.
const PATIENCE: Duration = Duration::from_secs(5);

/// An order. Settings that it does not name are as without faults: an empty set clears a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// The faults at a place of a disk, also one that is not open yet.
    Disk {
        /// The disk.
        disk: String,
        /// The place.
        at: At,
        /// The faults there from now on.
        faults: Faults,
    },
    /// The replication link to this node.
    Link(LinkFaults),
}

/// The socket of a node whose state is in `state_dir`.
#[must_use]
pub fn socket(state_dir: &Path) -> PathBuf {
    state_dir.join("faults.sock")
}

/// Has a node of the lab carry out an order; it is in effect when this returns.
///
/// # Errors
/// The node does not take orders, or refuses this one.
pub fn send(socket: &Path, order: &Order) -> Result<(), LabError> {
    let failed = || LabError::system(format!("giving an order at {}", socket.display()));
    let mut stream = UnixStream::connect(socket).map_err(failed())?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed())?;
    let line = serde_json::to_string(order).expect("an order holds nothing that JSON cannot");
    writeln!(stream, "{line}").map_err(failed())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).map_err(failed())?;
    match answer.trim() {
        "done" => Ok(()),
        refusal => Err(LabError::Invalid(format!("the node refuses the order: {refusal}"))),
    }
}

/// Takes orders at `socket` (mode of the directory that it is in) until the process ends.
///
/// # Errors
/// No socket, or no thread, is available.
pub fn serve(socket: &Path, board: Board, relay: Relay) -> io::Result<()> {
    if socket.exists() {
        // Of a former process: the lab runs one node in a directory.
        fs::remove_file(socket)?;
    }
    let listener = UnixListener::bind(socket)?;
    thread::Builder::new().name("lab-orders".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            if let Err(error) = take(stream, &board, &relay) {
                tracing::warn!(%error, "an order was lost");
            }
        }
    })?;
    Ok(())
}

fn take(stream: UnixStream, board: &Board, relay: &Relay) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(io::Read::take(&stream, LONGEST)).read_line(&mut line)?;
    let answer = match carry_out(&line, board, relay) {
        Ok(()) => "done".to_owned(),
        Err(reason) => reason,
    };
    writeln!(&stream, "{answer}")
}

fn carry_out(line: &str, board: &Board, relay: &Relay) -> Result<(), String> {
    let order: Order = serde_json::from_str(line).map_err(|error| error.to_string())?;
    tracing::info!(?order, "an order of the lab");
    match order {
        Order::Disk { disk, at, faults } => {
            faults.check().map_err(|error| error.to_string())?;
            if faults.simulated_disk && at != At::Backing {
                return Err("a simulated disk can only be the backing".to_owned());
            }
            if (faults.split > 0 || faults.sectors > 0) && at != At::Export {
                return Err("requests can only be split, and sectors be made, at the export".to_owned());
            }
            if at == At::Redirected && (faults.errors_per_million > 0 || faults.in_flight > 0) {
                return Err("redirected requests can neither fail nor be limited in flight".to_owned());
            }
            if faults.sectors % 512 != 0 {
                return Err(format!("sectors of {} bytes: they must be a multiple of 512", faults.sectors));
            }
            board.switch(&disk, at).set(faults);
        }
        Order::Link(faults) => relay.set(faults),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_carried_out_or_refused_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, board) = (socket(directory.path()), Board::default());
        let relay = Relay::start("127.0.0.1:9".parse().unwrap()).unwrap();
        serve(&socket, board.clone(), relay).unwrap();
        let order = |at, faults| Order::Disk { disk: "d1".into(), at, faults };
        let delay = Faults::delayed(Duration::from_millis(1));
        send(&socket, &order(At::Accel, delay)).unwrap();
        assert_eq!(board.switch("d1", At::Accel).get(), delay);
        assert_eq!(board.switch("d1", At::Export).get(), Faults::default());
        assert_eq!(board.switch("d2", At::Accel).get(), Faults::default());
        send(&socket, &order(At::Accel, Faults::default())).unwrap();
        assert_eq!(board.switch("d1", At::Accel).get(), Faults::default());
        send(&socket, &Order::Link(LinkFaults { delay_us: 5, bandwidth: 0 })).unwrap();
        let disk = Faults { simulated_disk: true, ..Faults::default() };
        let refused = send(&socket, &order(At::Export, disk)).unwrap_err().to_string();
        assert!(refused.contains("only be the backing"), "{refused}");
        let split = Faults { split: 4096, ..Faults::default() };
        assert!(send(&socket, &order(At::Backing, split)).unwrap_err().to_string().contains("at the export"));
        let failing = order(At::Redirected, Faults { errors_per_million: 1, ..Faults::default() });
        assert!(send(&socket, &failing).unwrap_err().to_string().contains("can neither fail"));
        let odd = Faults { sectors: 1000, ..Faults::default() };
        assert!(send(&socket, &order(At::Export, odd)).unwrap_err().to_string().contains("multiple of 512"));
        let much = Faults { dispatchers: 1000, ..Faults::default() };
        let refused = send(&socket, &order(At::Accel, much)).unwrap_err().to_string();
        assert!(refused.contains("dispatchers is 1000"), "{refused}");
    }

    #[test]
    fn orders_are_written_as_the_help_shows_them() {
        let read = |text: &str| serde_json::from_str::<Order>(text).unwrap();
        let order = read(r#"{"disk":{"disk":"db","at":"accel","faults":{"delay_us":1000}}}"#);
        let faults = Faults::delayed(Duration::from_millis(1));
        assert_eq!(order, Order::Disk { disk: "db".into(), at: At::Accel, faults });
        let order = read(r#"{"link":{"delay_us":1000}}"#);
        assert_eq!(order, Order::Link(LinkFaults { delay_us: 1000, bandwidth: 0 }));
    }
}
