//! `weir disk delete`, of one disk or several.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use weir_node::api::{Delete, Deleted, DeletedDisks};
use weir_node::client::Client;
use weir_node::units::{about, count};

use super::confirm::confirm;
use super::several::{all_or_why, ask_each, check_names};
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{note, print};

/// After so long, a deletion says what it waits for.
const SAYS_WHY: Duration = Duration::from_secs(3);

/// # Errors
/// Some cannot be deleted: none is then, as far as that is known before; or it is not confirmed.
pub fn run(global: &Global, names: &[String], wanted: &Delete, yes: bool) -> Result<(), Failure> {
    check_names(names)?;
    let client = any_node(global)?;
    let asks = !wanted.dry_run && !yes;
    // All of them before the first is gone.
    if asks || names.len() > 1 {
        let would = all_that_would(&client, names, wanted)?;
        if wanted.dry_run {
            return print_all(global, would);
        }
        if asks {
            let typed = match names {
                [name] => name.clone(),
                names => count(names.len() as u64, "disk"),
            };
            confirm(&sentences(&would), &typed)?;
        }
    }
    let delete = |name: &str| Ok(patiently(name, wanted, || client.delete(name, wanted))?);
    let each = names.iter().map(|name| (name, delete(name))).collect();
    let (deleted, all) = all_or_why(names, "disk", "not deleted", each);
    if !deleted.is_empty() {
        print_all(global, deleted)?;
    }
    all
}

fn all_that_would(client: &Client, names: &[String], wanted: &Delete) -> Result<Vec<Deleted>, Failure> {
    let wanted = Delete { dry_run: true, ..wanted.clone() };
    let asked = ask_each(names, |name| Ok(client.delete(name, &wanted)?))?;
    let (would, all) = all_or_why(names, "disk", "cannot be deleted, so none is", asked);
    all.map(|()| would)
}

/// One is a document of its own.
fn print_all(global: &Global, mut deleted: Vec<Deleted>) -> Result<(), Failure> {
    match (deleted.pop(), deleted.is_empty()) {
        (Some(only), true) => print(global.output, &only, sentence),
        (last, _) => {
            deleted.extend(last);
            print(global.output, &DeletedDisks { deleted }, |all| sentences(&all.deleted))
        }
    }
}

/// Says what a deletion waits for, if it takes long.
fn patiently<T>(name: &str, wanted: &Delete, work: impl FnOnce() -> T) -> T {
    let (done, waiting) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if waiting.recv_timeout(SAYS_WHY) == Err(RecvTimeoutError::Timeout) {
                let why = match (wanted.discard, wanted.force) {
                    (true, _) => "it waits for requests that its storage has not answered",
                    (_, true) => {
                        "its storage is slow to answer. An export or a block device is destaged first, if the disk is open, unless --discard is \
                         given"
                    }
                    _ => "it is destaged first, as far as its storage takes that",
                };
                note(&format!("disk {name} is not deleted yet: {why} (`weir disk show {name}`)"));
            }
        });
        let result = work();
        drop(done);
        result
    })
}

fn sentences(all: &[Deleted]) -> String {
    let all: Vec<String> = all.iter().map(sentence).collect();
    all.join("\n")
}

fn sentence(deleted: &Deleted) -> String {
    let verb = if deleted.done { "deleted" } else { "would delete" };
    let lost = match (deleted.lost.as_str(), deleted.done) {
        ("", _) => String::new(),
        (lost, true) => format!("\nlost: {lost}"),
        (lost, false) => format!("\nthis would lose {lost}"),
    };
    let connected = match (deleted.connected.as_str(), deleted.done) {
        ("", _) | (_, true) => String::new(),
        (connected, false) => format!("\n{connected}"),
    };
    let lost = lost + &connected;
    let path = deleted.path.display();
    if deleted.stays {
        return format!("{verb} disk {}; {path} stays as it is{lost}", deleted.disk);
    }
    let size = match deleted.allocated {
        Some(bytes) => format!("{} in use", about(bytes)),
        None => "which is not there, or does not answer".to_owned(),
    };
    format!("{verb} disk {}: {path}, {size}{lost}", deleted.disk)
}
