//! `weir disk`

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use weir_block::size::Size;
use weir_node::api::{
    AdoptExport, CloneDisk, CreateDisk, Delete, Deleted, DiskView, Disks, Export, Moved, VolumeView,
};
use weir_node::shard::messages::{DiskStatus, LimitDelays, RouteReason, RouteView};
use weir_node::units::{Period, about, count};
use weir_report::format;

use super::confirm::confirm;
use super::{clones, compact, thick};
use crate::cli::DiskCommand;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{list, note, print, table};

/// After so long, a deletion says what it waits for.
const SAYS_WHY: Duration = Duration::from_secs(3);

/// Executes a `weir disk` command.
pub fn run(global: &Global, command: DiskCommand) -> Result<(), Failure> {
    match command {
        DiskCommand::Create { name, volume, size, export, thick, policy, medium, block, limit } => {
            let limit = limit.limit().map_err(Failure::usage)?;
            let (client, size) = (any_node(global)?, size.map(|size| size.0));
            let volumes = client.volumes()?;
            let is_server = export.is_some() || of_kind(&volumes, &volume, "nbd");
            match size.filter(|_| !is_server) {
                Some(size) => {
                    let default = if of_kind(&volumes, &volume, "lun") { 4096 } else { 512 };
                    let logical_block = block.unwrap_or(default);
                    let wanted = CreateDisk { name, volume, size, logical_block, policy, medium, limit };
                    let made = match thick {
                        true => thick::create(global, client, &wanted)?,
                        false => client.create_disk(&wanted)?,
                    };
                    print(global.output, &made, show)
                }
                None if is_server && thick => {
                    let message =
                        format!("volume {volume} is an NBD server, which alone gives its exports space");
                    Err(Failure::usage(message).hint("leave --thick out"))
                }
                None if is_server => {
                    let logical_block = block;
                    let wanted =
                        AdoptExport { name, volume, export, size, logical_block, policy, medium, limit };
                    print(global.output, &client.adopt_export(&wanted)?, |disk| {
                        format!("{}\nIt holds what its export holds; nothing was written there.", show(disk))
                    })
                }
                None => {
                    let message = "a disk has a size: add --size, for example --size 20GiB";
                    Err(Failure::usage(message))
                }
            }
        }
        // One that is copied is made from an image: see `image::copy`.
        DiskCommand::Clone { source, names, policy, medium, limit, dry_run, .. } => {
            let limit = limit.limit().map_err(Failure::usage)?;
            let snapshot = source.snapshot.clone();
            clones::check(&source, &names)?;
            let wanted = CloneDisk { name: String::new(), snapshot, policy, medium, limit };
            match (&names[..], dry_run) {
                (_, true) => clones::plan(global, &source, &names, &wanted),
                ([name], false) => {
                    let wanted = CloneDisk { name: name.clone(), ..wanted };
                    compact::tell(&any_node(global)?, &source.disk, source.snapshot.as_deref());
                    print(global.output, &any_node(global)?.clone_disk(&source.disk, &wanted)?, show)
                }
                (_, false) => {
                    let (disks, all_made) = clones::make(global, &source, &names, &wanted)?;
                    if !disks.is_empty() {
                        print(global.output, &Disks { disks }, |made| rows(&made.disks))?;
                    }
                    all_made
                }
            }
        }
        DiskCommand::List => {
            print(global.output, &Disks { disks: any_node(global)?.disks()? }, |all| rows(&all.disks))
        }
        DiskCommand::Show { name } => print(global.output, &any_node(global)?.disk(&name)?, show),
        DiskCommand::Policy { name, policy } => {
            print(global.output, &any_node(global)?.set_policy(&name, &policy)?, |disk| {
                format!(
                    "{}\nThe effective policy follows when it can; `weir disk show {name}` tells.",
                    policies(disk)
                )
            })
        }
        DiskCommand::Limit { name, limit, none } => {
            let limit = limit.limit().map_err(Failure::usage)?;
            if limit.is_none() && !none {
                let message =
                    "no rate is given: add --iops N or --bytes-per-second SIZE, or --none to end the limit";
                return Err(Failure::usage(message));
            }
            print(global.output, &any_node(global)?.set_limit(&name, limit)?, show)
        }
        DiskCommand::Export { name, on, accept_loss } => {
            let disk = any_node(global)?.export(&name, &Export { on, accept_loss })?;
            print(global.output, &disk, |disk| disk.uris.join("\n"))
        }
        DiskCommand::Move { name, to } => {
            print(global.output, &any_node(global)?.move_disk(&name, &to)?, moved)
        }
        DiskCommand::Follow { name, to, stop: _ } => {
            print(global.output, &any_node(global)?.follow(&name, to.as_deref())?, show)
        }
        DiskCommand::Resize { name, size } => {
            print(global.output, &any_node(global)?.resize(&name, size.0)?, show)
        }
        DiskCommand::Compact { name, dry_run } => compact::run(global, &name, dry_run),
        DiskCommand::Delete { name, dry_run, yes, force, discard } => {
            let wanted = Delete { force, discard, dry_run, ..Delete::default() };
            delete(global, &name, &wanted, yes)
        }
    }
}

fn delete(global: &Global, name: &str, wanted: &Delete, yes: bool) -> Result<(), Failure> {
    let client = any_node(global)?;
    if !wanted.dry_run && !yes {
        let would = client.delete(name, &Delete { dry_run: true, ..wanted.clone() })?;
        confirm(&sentence(&would), name)?;
    }
    print(global.output, &patiently(name, wanted, || client.delete(name, wanted))?, sentence)
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

fn moved(moved: &Moved) -> String {
    if moved.from.as_ref() == Some(&moved.to) {
        let uris = moved.disk.uris.join("\n");
        return format!("disk {} is on {} already; it is exported at\n{uris}", moved.disk.name, moved.to);
    }
    let from = moved.from.as_deref().unwrap_or("no owner");
    format!(
        "disk {} moved from {from} to {}, {} dirty; it is exported at\n{}",
        moved.disk.name,
        moved.to,
        about(moved.dirty_bytes),
        moved.disk.uris.join("\n")
    )
}

fn of_kind(volumes: &[VolumeView], name: &str, kind: &str) -> bool {
    volumes.iter().any(|volume| volume.name == name && volume.kind == kind)
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

fn clients(detail: &DiskStatus) -> String {
    let mut text = detail.clients.to_string();
    if !detail.forwarders.is_empty() {
        text += &format!("; some by way of {}", detail.forwarders.join(", "));
    }
    if !detail.readers.is_empty() {
        text += &format!("; programs on {} read its file", detail.readers.join(", "));
    }
    text
}

/// One line for each disk.
pub fn rows(disks: &[DiskView]) -> String {
    let row = |disk: &DiskView| {
        vec![
            disk.name.clone(),
            disk.volume.clone(),
            Size(disk.size).to_string(),
            policy(disk),
            disk.owner.clone().unwrap_or_default(),
            disk.replicas.join(" "),
            disk.state.clone(),
            disk.dirty_bytes().map_or_else(String::new, about),
        ]
    };
    let header = ["DISK", "VOLUME", "SIZE", "POLICY", "OWNER", "REPLICAS", "STATE", "DIRTY"];
    table(&header, &[2, 7], disks.iter().map(row))
}

/// The policy in effect; of a disk that is closed, the requested one.
pub fn policy(disk: &DiskView) -> String {
    let DiskView { requested, effective, .. } = disk;
    match effective.as_str() {
        "" => requested.clone(),
        effective if effective == requested => requested.clone(),
        effective => format!("{effective} (requested {requested})"),
    }
}

/// `n2 n4 (1 in the owner's fault domain, 1 in others)`
fn replicas(disk: &DiskView) -> String {
    let DiskView { inside, outside, .. } = disk;
    match disk.replicas.as_slice() {
        [] => "none".to_owned(),
        some => format!("{} ({inside} in the owner's fault domain, {outside} in others)", some.join(" ")),
    }
}

fn policies(disk: &DiskView) -> String {
    let effective = if disk.effective.is_empty() { "none: the disk is closed" } else { &disk.effective };
    let warning = disk.warnings.join("; ");
    list(&[("requested", disk.requested.clone()), ("effective", effective.to_owned()), ("warning", warning)])
}

/// The disk's size, and its allocated space if known.
fn sizes(disk: &DiskView) -> String {
    let allocated = disk.allocated.map(|bytes| format!(", {} allocated", about(bytes)));
    format!("{} ({} bytes{})", about(disk.size), disk.size, allocated.unwrap_or_default())
}

/// Everything about one disk.
pub fn show(disk: &DiskView) -> String {
    let mut pairs = vec![
        ("disk", disk.name.clone()),
        ("volume", disk.volume.clone()),
        ("size", sizes(disk)),
        ("logical block", disk.logical_block.to_string()),
        ("requested", disk.requested.clone()),
        ("effective", disk.effective.clone()),
        ("medium", disk.medium.to_string()),
        ("limit", disk.limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string())),
        ("owner", disk.owner.clone().unwrap_or_else(|| "none".to_owned())),
        ("replicas", replicas(disk)),
        ("follower", disk.follower.clone().unwrap_or_else(|| "none".to_owned())),
        ("epoch", disk.epoch.to_string()),
        ("state", disk.state.clone()),
        ("reason", disk.reason.clone()),
        ("warning", disk.warnings.join("; ")),
    ];
    if let Some(export) = &disk.export {
        pairs.insert(2, ("export", format!("`{export}` of the volume's server")));
    }
    if let Some(bytes) = disk.undestaged_bytes {
        pairs.push(("dirty", about(bytes)));
    }
    if let Some(detail) = &disk.detail {
        pairs.extend(detail.route.iter().flat_map(route));
        pairs.extend(delays(&detail.limit_delays));
        pairs.extend(watermarks(detail));
    }
    pairs.extend(disk.uris.iter().map(|uri| ("exported at", uri.clone())));
    list(&pairs)
}

/// Requests that the limit has delayed, if there are any.
fn delays(delays: &LimitDelays) -> Option<(&'static str, String)> {
    let LimitDelays { requests, seconds, waiting } = *delays;
    (requests > 0 || waiting > 0).then(|| {
        let mean = format::duration(seconds * 1e9 / (requests as f64).max(1.0));
        ("limit delays", {
            let wait = if waiting == 1 { "waits" } else { "wait" };
            let clients = count(waiting as u64, "client");
            format!("{}, {mean} on average; {clients} {wait} now", count(requests, "request"))
        })
    })
}

/// By which way the I/O of a disk on a LUN goes, and why.
pub fn way(route: &RouteView) -> String {
    let reason = |one: &RouteReason| match one.benign {
        true => one.flag.clone(),
        false => format!("{} (not benign)", one.flag),
    };
    let reasons: Vec<String> = route.reasons.iter().map(reason).collect();
    let why = if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join(", ")) };
    format!("{}{why}", route.state)
}

fn route(route: &RouteView) -> Vec<(&'static str, String)> {
    let counts = format!(
        "{} direct, {} block-redirected, {} file-redirected, {} in holes, {} split",
        count(route.direct, "part"),
        route.block,
        route.file,
        route.zeroes,
        route.splits
    );
    vec![("route", way(route)), ("by route", counts)]
}

fn watermarks(detail: &DiskStatus) -> Vec<(&'static str, String)> {
    let DiskStatus { appended, replicated, acknowledged, destaged, freed, .. } = detail;
    let destage = &detail.destage;
    let time = |ms: Option<u64>, otherwise: &str| {
        ms.map_or_else(|| otherwise.to_owned(), |ms| Period(Duration::from_millis(ms)).to_string())
    };
    let rate = format!(
        "{}/s, at most {} at a time; {} so far, {} of it coalesced",
        about(destage.rate),
        count(destage.depth as u64, "request"),
        about(destage.destaged_bytes),
        about(destage.coalesced_bytes)
    );
    // The backing's bytes per byte that guests wrote are the inverse of the coalescing ratio.
    let amplification = |flash: Option<f64>| {
        let backing = destage.coalescing_ratio().map(|ratio| format!("{:.2} to the storage", 1.0 / ratio));
        let flash = flash.map(|ratio| format!("{ratio:.2} to this node's flash"));
        let known: Vec<String> = backing.into_iter().chain(flash).collect();
        if known.is_empty() { "nothing written yet".to_owned() } else { known.join(", ") }
    };
    let of = |used: u64, all: u64| format!("{} of {}", about(used), about(all));
    vec![
        (
            "watermarks",
            format!(
                "appended {appended}, replicated {replicated}, acknowledged {acknowledged}, destaged {destaged}, freed {freed}"
            ),
        ),
        ("dirty", about(detail.dirty_bytes)),
        ("write log", of(detail.log_used_bytes, detail.log_bytes)),
        ("oldest dirty", time(destage.oldest_dirty_ms, "nothing is dirty")),
        ("time to clean", time(destage.time_to_clean_ms, "unknown: the storage accepts no writes")),
        ("last checkpoint", time(destage.checkpoint_age_ms, "none yet")),
        ("destage", rate),
        (
            "coalescing",
            destage
                .coalescing_ratio()
                .map_or_else(|| "nothing written yet".to_owned(), |ratio| format!("{ratio:.2} : 1")),
        ),
        ("write amplification", amplification(destage.flash_write_amplification(detail.dirty_bytes))),
        ("clients", clients(detail)),
        ("in flight", detail.in_flight.to_string()),
    ]
}
