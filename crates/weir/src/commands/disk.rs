//! `weir disk`

use std::time::Duration;

use weir_block::size::Size;
use weir_node::api::{
    AdoptExport, CloneDisk, CreateDisk, Delete, DiskView, Disks, Export, Moved, VolumeView,
};
use weir_node::shard::messages::{DiskStatus, LimitDelays, RouteReason, RouteView};
use weir_node::units::{Period, about, count};
use weir_report::format;

use super::{clones, compact, delete, thick};
use crate::cli::DiskCommand;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{list, print, table};

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
        DiskCommand::Delete { names, dry_run, yes, force, discard } => {
            let wanted = Delete { force, discard, dry_run, ..Delete::default() };
            delete::run(global, &names, &wanted, yes)
        }
    }
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

/// The disk's size, and its allocated space if known: less for a thin disk that is not full.
fn sizes(disk: &DiskView) -> String {
    let allocated = match disk.allocated {
        Some(bytes) if bytes >= disk.size => ", all allocated".to_owned(),
        Some(bytes) => format!(", thin: {} allocated", about(bytes)),
        None => String::new(),
    };
    format!("{} ({} bytes{allocated})", about(disk.size), disk.size)
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

/// The time until everything is destaged, or why that is unknown.
pub fn clean_in(detail: &DiskStatus) -> Result<Period, &'static str> {
    match detail.destage.time_to_clean_ms {
        Some(ms) => Ok(Period(Duration::from_millis(ms))),
        // The rate is that of whole checkpoints: an import fills a new disk before the first one is complete.
        None if detail.reason.is_empty() && detail.destage.checkpoint_age_ms.is_none() => {
            Err("its first checkpoint is not complete")
        }
        None => Err("the storage accepts no writes"),
    }
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
        (
            "time to clean",
            clean_in(detail).map_or_else(|why| format!("unknown: {why}"), |time| time.to_string()),
        ),
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_thin_disk_is_told_from_one_with_all_of_its_space() {
        let sized = |allocated: Option<u64>| {
            let view = json!({
                "name": "d", "volume": "v", "size_bytes": 2 << 20, "allocated_bytes": allocated, "logical_block_bytes": 512,
                "requested": "write-through", "effective": "", "epoch": 1, "replicas": [], "state": "closed", "reason": "", "uris": [],
            });
            sizes(&serde_json::from_value(view).unwrap())
        };
        assert_eq!(sized(None), "2 MiB (2097152 bytes)");
        assert_eq!(sized(Some(1 << 20)), "2 MiB (2097152 bytes, thin: 1 MiB allocated)");
        assert_eq!(sized(Some(3 << 20)), "2 MiB (2097152 bytes, all allocated)");
    }

    /// An import has filled it, and its storage is in order.
    #[test]
    fn a_disk_before_its_first_checkpoint_is_not_called_stuck() {
        let mut detail = DiskStatus { dirty_bytes: 1 << 20, ..DiskStatus::default() };
        let why = |detail: &DiskStatus| clean_in(detail).map(|time| time.to_string());
        assert_eq!(why(&detail), Err("its first checkpoint is not complete"));
        detail.reason = "the backing refuses destage: input/output error".into();
        assert_eq!(why(&detail), Err("the storage accepts no writes"));
        detail.destage.time_to_clean_ms = Some(1500);
        assert_eq!(why(&detail).as_deref(), Ok("1500 ms"));
    }
}
