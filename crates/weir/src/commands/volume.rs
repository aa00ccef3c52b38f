//! `weir volume`

use std::time::Duration;

use weir_block::size::Size;
use weir_node::api::{
    ApiError, ApiErrorKind, ChangedIdentity, ConfirmFenced, ConfirmedFenced, CreateVolume, DeleteVolume,
    DeletedVolume, DiskView, LunView, MoveVolume, MovedVolume, NodeNotice, ServerExport, SetIdentity,
    UsageItem, VolumePlan, VolumeUsage, VolumeView, Volumes,
};

use weir_node::units::about;

use super::confirm::confirm;
use super::disk;
use crate::cli::VolumeCommand;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{list, print, table};

/// Longest wait for a volume on a LUN to be made.
const FORMAT: Duration = Duration::from_secs(600);

/// A volume and its disks.
#[derive(serde::Serialize)]
#[serde(tag = "schema", rename = "weir.volume-with-disks/1")]
struct Shown {
    volume: VolumeView,
    disks: Vec<DiskView>,
    /// What its server lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    exports: Option<Vec<ServerExport>>,
    /// Why that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    exports_unknown: Option<String>,
}

/// Executes a `weir volume` command.
pub fn run(global: &Global, command: VolumeCommand) -> Result<(), Failure> {
    let client = any_node(global)?;
    match command {
        VolumeCommand::Create { name, path, server, kind, format, identity, destroy, dry_run } => {
            let kind = check_place(kind, path.is_some(), server.is_some())?;
            // Nodes have working directories of their own.
            let path = path.map(std::path::absolute).transpose()?.unwrap_or_default();
            let wanted = CreateVolume { name, kind, path, server, format, identity, destroy };
            if dry_run {
                return print(global.output, &client.plan_volume(&wanted)?, planned);
            }
            // A format of a large LUN takes a while.
            let client = if wanted.kind == "lun" { client.patience(FORMAT) } else { client };
            print(global.output, &client.create_volume(&wanted)?, show)
        }
        VolumeCommand::ConfirmFenced { volume, node, dry_run, yes } => {
            if !dry_run && !yes {
                let wanted = ConfirmFenced { node: node.clone(), dry_run: true };
                let would = client.confirm_fenced(&volume, &wanted)?;
                let warning = "If it still reaches the LUN, the volume's filesystem is destroyed.";
                confirm(&format!("{}\n{warning}", confirmed(&would)), &node)?;
            }
            let done = client.confirm_fenced(&volume, &ConfirmFenced { node, dry_run })?;
            print(global.output, &done, confirmed)
        }
        VolumeCommand::Move { volume, to, dry_run } => {
            print(global.output, &client.move_volume(&volume, &MoveVolume { to, dry_run })?, moved)
        }
        VolumeCommand::Redirect { volume, redirected } => {
            print(global.output, &client.set_redirected(&volume, redirected == "on")?, show)
        }
        VolumeCommand::SetIdentity { volume, identity, dry_run } => {
            let wanted = SetIdentity { identity, dry_run };
            print(global.output, &client.set_identity(&volume, &wanted)?, identity_changed)
        }
        VolumeCommand::List => {
            print(global.output, &Volumes { volumes: client.volumes()? }, |Volumes { volumes }| {
                let row = |volume: &VolumeView| {
                    vec![volume.name.clone(), volume.kind.clone(), volume.disks.to_string(), place(volume)]
                };
                table(&["VOLUME", "KIND", "DISKS", "PATH OR SERVER"], &[2], volumes.iter().map(row))
            })
        }
        VolumeCommand::Show { name } => {
            let volumes = client.volumes()?;
            let Some(volume) = volumes.into_iter().find(|volume| volume.name == name) else {
                let error = ApiError::new(ApiErrorKind::NotFound, format!("there is no volume {name}"));
                return Err(error.hint("`weir volume list` shows those that there are").into());
            };
            let disks: Vec<_> = client.disks()?.into_iter().filter(|disk| disk.volume == name).collect();
            // A server that does not answer keeps nobody from the rest.
            let exports = volume.server.is_some().then(|| client.server_exports(&name));
            let (exports, exports_unknown) = match exports {
                Some(Ok(answer)) => (answer.exports, None),
                Some(Err(error)) => (None, Some(error.message)),
                None => (None, None),
            };
            let shown = Shown { volume, disks, exports, exports_unknown };
            print(global.output, &shown, |shown| {
                let mut rows = rows(&shown.volume);
                if shown.volume.server.is_some() {
                    rows.push(("exports listed", listed(shown)));
                }
                format!("{}\n\n{}", list(&rows), disk_rows(shown))
            })
        }
        VolumeCommand::Du { name } => print(global.output, &client.volume_usage(&name)?, usage),
        VolumeCommand::Delete { name, dry_run, yes } => {
            if !dry_run && !yes {
                let would = client.delete_volume(&name, &DeleteVolume { dry_run: true })?;
                confirm(&deleted(&would), &name)?;
            }
            print(global.output, &client.delete_volume(&name, &DeleteVolume { dry_run })?, deleted)
        }
    }
}

/// The kind of a new volume, which has a path, or is a server.
fn check_place(kind: Option<String>, has_path: bool, has_server: bool) -> Result<String, Failure> {
    let is_server = kind.as_ref().map_or(has_server, |kind| kind == "nbd");
    let kind = kind.unwrap_or_else(|| if is_server { "nbd" } else { "dir" }.to_owned());
    match (kind.as_str(), has_path, has_server) {
        ("nbd", false, true) => Ok(kind),
        ("nbd", _, false) => {
            Err(Failure::usage("a volume of the kind nbd is a server: add --server nbd://HOST:PORT"))
        }
        ("nbd", true, _) => Err(Failure::usage("an NBD server has no path: leave --path out")),
        (kind, _, true) => Err(Failure::usage(format!(
            "a volume of the kind {kind} is no server: give --path and no --server, or --kind nbd"
        ))),
        ("lun", false, _) => Err(Failure::usage("a LUN has a path: add --path DEVICE")),
        (_, false, _) => Err(Failure::usage(
            "add --path DIRECTORY; or --kind lun --path DEVICE; or --server nbd://HOST:PORT",
        )),
        _ => Ok(kind),
    }
}

/// Its path, or its server.
fn place(volume: &VolumeView) -> String {
    volume.server.clone().unwrap_or_else(|| volume.path.display().to_string())
}

fn planned(plan: &VolumePlan) -> String {
    let destroy = if plan.destroys { " --destroy" } else { "" };
    let options =
        plan.identity.as_ref().map(|identity| format!("\nto do that, add --identity {identity}{destroy}"));
    format!("would {}{}", plan.action, options.unwrap_or_default())
}

fn confirmed(done: &ConfirmedFenced) -> String {
    let verb = if done.done { "took" } else { "would take" };
    let processes: Vec<String> =
        done.processes.iter().map(|process| format!("{}/{process}", done.node)).collect();
    format!("{verb} {} for cut off from the LUN of volume {}", processes.join(", "), done.volume)
}

fn moved(moved: &MovedVolume) -> String {
    let MovedVolume { volume, from, to, epoch, seconds, .. } = moved;
    match seconds {
        Some(seconds) => format!(
            "{to} coordinates volume {volume} (epoch {epoch}), {seconds:.1} s after the request; before: {from}"
        ),
        None => format!("would move the coordination of volume {volume} from {from} to {to}"),
    }
}

fn identity_changed(changed: &ChangedIdentity) -> String {
    let verb = if changed.done { "is" } else { "would be" };
    let luns = list(&[("LUN before", changed.from.clone()), ("LUN", changed.to.clone())]);
    format!("volume {} {verb} on another LUN\n{luns}", changed.volume)
}

fn deleted(volume: &DeletedVolume) -> String {
    let verb = if volume.done { "deleted" } else { "would delete" };
    format!("{verb} volume {}; what is at {} stays", volume.volume, volume.path.display())
}

fn usage(volume: &VolumeUsage) -> String {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), about);
    let row = |item: &UsageItem| {
        let name =
            if item.kind == "unfinished" { format!("{} (unfinished)", item.name) } else { item.name.clone() };
        let extents = item.extents.map_or_else(|| "?".to_owned(), |count| count.to_string());
        vec![
            name,
            about(item.size),
            about(item.allocated),
            known(item.exclusive),
            known(item.shared),
            extents,
        ]
    };
    let header = ["DISK OR SNAPSHOT", "SIZE", "BLOCKS", "EXCLUSIVE", "SHARED", "EXTENTS"];
    let items = table(&header, &[1, 2, 3, 4, 5], volume.items.iter().map(row));
    let rest =
        if volume.filesystem_is_its_own { "the filesystem itself" } else { "other files and the filesystem" };
    let rows = [
        ("exclusive", about(volume.exclusive)),
        ("shared, counted once", known(volume.shared)),
        (rest, known(volume.other)),
        (
            "used",
            format!(
                "{} of {}, {} available",
                about(volume.used),
                about(volume.size),
                about(volume.available)
            ),
        ),
    ];
    let mut text = format!("{items}\n\n{}", list(&rows));
    if let Some(seconds) = volume.deleted_seconds_ago {
        text += &format!("\n\nsomething was deleted {seconds} s ago: it may count as used for some seconds");
    }
    if volume.items.iter().any(|item| item.exclusive.is_none()) {
        text += "\n\n?: not known, because it is in too many pieces to look at all of them in time, or the filesystem cannot tell";
    }
    text
}

/// The disks of a volume. On a LUN, their routes have the room of their replicas, which `weir disk list` has.
fn disk_rows(shown: &Shown) -> String {
    if shown.volume.lun.is_none() {
        return disk::rows(&shown.disks);
    }
    let row = |one: &DiskView| {
        let route = one.detail.as_ref().and_then(|detail| detail.route.as_ref());
        vec![
            one.name.clone(),
            Size(one.size).to_string(),
            disk::policy(one),
            one.owner.clone().unwrap_or_default(),
            one.state.clone(),
            one.dirty_bytes().map_or_else(String::new, about),
            route.map(disk::way).unwrap_or_default(),
        ]
    };
    let header = ["DISK", "SIZE", "POLICY", "OWNER", "STATE", "DIRTY", "ROUTE"];
    table(&header, &[1, 5], shown.disks.iter().map(row))
}

/// The exports that the volume's server lists now, and which of them are disks.
fn listed(shown: &Shown) -> String {
    match (&shown.exports, &shown.exports_unknown) {
        (_, Some(reason)) => format!("not known: {reason}"),
        (None, None) => "the server lists none".to_owned(),
        (Some(exports), None) => named(exports.iter().map(|export| match &export.disk {
            Some(disk) => format!("{} (disk {disk})", quoted(&export.name)),
            None => quoted(&export.name),
        })),
    }
}

fn show(volume: &VolumeView) -> String {
    list(&rows(volume))
}

fn rows(volume: &VolumeView) -> Vec<(&'static str, String)> {
    let is_server = volume.server.is_some();
    let du = format!("; `weir volume du {}` shows what they take", volume.name);
    let mut rows = vec![
        ("volume", volume.name.clone()),
        ("kind", volume.kind.clone()),
        (if is_server { "server" } else { "path" }, place(volume)),
        ("disks", format!("{}{}", volume.disks, if is_server { "" } else { &du })),
    ];
    if let Some(exports) = &volume.exports {
        rows.push(("exports listed", named(exports.iter().map(|name| quoted(name)))));
    }
    if !volume.full_for.is_empty() {
        rows.push(("full", full(volume)));
    }
    if let Some(files) = &volume.files {
        rows.push((
            "files here",
            format!("{}/DISK.raw (FUSE over {})", files.path.display(), files.transport),
        ));
    }
    if let Some(lun) = &volume.lun {
        rows.extend(of_lun(lun));
    }
    rows
}

/// A server's name for an export may hold anything, also what a terminal obeys.
fn quoted(name: &str) -> String {
    format!("`{}`", name.escape_debug())
}

fn named(exports: impl ExactSizeIterator<Item = String>) -> String {
    const MOST: usize = 20;
    let (all, more) = (exports.len(), exports.len().saturating_sub(MOST));
    let first: Vec<String> = exports.take(MOST).collect();
    match (all, more) {
        (0, _) => "none".to_owned(),
        (_, 0) => first.join(", "),
        _ => format!("{} and {more} more", first.join(", ")),
    }
}

fn full(volume: &VolumeView) -> String {
    const MOST: usize = 5;
    let (named, others) = volume.full_for.split_at(volume.full_for.len().min(MOST));
    let others = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    format!(
        "volume-full: no space for disk {}{others}; delete a disk or a snapshot (`weir volume du {}`), or add space",
        named.join(", "),
        volume.name
    )
}

/// The asked node's part in the coordination of a volume, in words.
fn part(phase: &str) -> String {
    match phase {
        "absent" => "does not coordinate it".to_owned(),
        phase => phase.to_owned(),
    }
}

fn of_lun(lun: &LunView) -> Vec<(&'static str, String)> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    let coordinator = match (&lun.coordinator, lun.trouble.as_str()) {
        (Some(node), "") => format!("{node} (epoch {})", lun.epoch),
        (Some(node), trouble) => format!("{node} (epoch {}): {trouble}", lun.epoch),
        (None, trouble) => format!("none (epoch {}): {trouble}", lun.epoch),
    };
    let here = lun.path.as_ref().map(|path| path.display().to_string());
    let mut rows = vec![
        ("LUN", lun.identity.clone()),
        ("path here", here.unwrap_or_else(|| "not found".to_owned())),
        ("filesystem", format!("{} {}", lun.filesystem, lun.uuid)),
        ("coordinator", coordinator),
        ("may have it mounted", or_none(Some(lun.mounts.join(", ")).filter(|mounts| !mounts.is_empty()))),
        ("this node", part(&lun.phase)),
        ("fencing", lun.fencing.clone()),
        ("redirected", if lun.redirected { "on, all I/O of all nodes".into() } else { "off".to_owned() }),
    ];
    if let (Some(size), Some(free)) = (lun.size_bytes, lun.free_bytes) {
        rows.insert(3, ("size", format!("{}, {} free", about(size), about(free))));
    }
    if let Some(next) = &lun.moves_to {
        rows.push(("moves to", next.clone()));
    }
    if !lun.notice.is_empty() {
        rows.push(("notice", lun.notice.clone()));
    }
    let others = lun.notices.iter().filter(|one| one.notice != lun.notice);
    rows.extend(others.map(|NodeNotice { node, notice, .. }| ("notice", format!("{node}: {notice}"))));
    rows
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;
    use weir_node::shard::messages::{DiskStatus, RouteReason, RouteView};

    use super::*;

    #[test]
    fn a_volume_has_a_path_or_is_a_server() {
        let of = |kind: Option<&str>, has_path, has_server| {
            check_place(kind.map(str::to_owned), has_path, has_server).map_err(|failure| failure.message)
        };
        let taken = [
            (None, true, false, "dir"),
            (None, false, true, "nbd"),
            (Some("nbd"), false, true, "nbd"),
            (Some("lun"), true, false, "lun"),
        ];
        for (kind, has_path, has_server, expected) in taken {
            assert_eq!(of(kind, has_path, has_server).as_deref(), Ok(expected));
        }
        let refused = [
            (None, false, false, "--path DIRECTORY"),
            (None, true, true, "no path"),
            (Some("nbd"), false, false, "--server"),
            (Some("nbd"), true, false, "--server"),
            (Some("lun"), false, true, "kind lun is no server"),
            (Some("lun"), false, false, "--path DEVICE"),
        ];
        for (kind, has_path, has_server, expected) in refused {
            let message = of(kind, has_path, has_server).expect_err("it is refused");
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_node_that_does_not_coordinate_is_not_called_absent() {
        let of = |phase: &str| of_lun(&LunView { phase: phase.into(), ..LunView::default() });
        assert!(of("absent").contains(&("this node", "does not coordinate it".to_owned())));
        assert!(of("listening").contains(&("this node", "listening".to_owned())));
    }

    #[test]
    fn the_disks_on_a_lun_have_routes_with_reasons() {
        let disk = |name: &str, owner: Option<&str>, route: Option<(&str, &[(&str, bool)])>| {
            let view = json!({
                "name": name, "volume": "v", "size_bytes": 1 << 30, "logical_block_bytes": 4096, "requested": "write-back+1",
                "effective": "write-back+1", "owner": owner, "epoch": 7, "replicas": ["n3"], "state": "serving", "reason": "", "uris": [],
            });
            let detail = route.map(|(state, reasons)| {
                let reason =
                    |(flag, benign): &(&str, bool)| RouteReason { flag: (*flag).into(), benign: *benign };
                let reasons = reasons.iter().map(reason).collect();
                let route = Some(RouteView { state: state.into(), reasons, ..RouteView::default() });
                DiskStatus { route, ..DiskStatus::default() }
            });
            DiskView { detail, ..serde_json::from_value(view).unwrap() }
        };
        let reasons = [("no-disk-connectivity", false), ("unallocated-extent", true)];
        let all = vec![
            disk("a", Some("n1"), Some(("direct", &[]))),
            disk("b", Some("n2"), Some(("block-redirected", &reasons))),
            disk("c", None, None),
        ];
        let lun = VolumeView { lun: Some(LunView::default()), ..VolumeView::default() };
        let shown = |volume| Shown { volume, disks: all.clone(), exports: None, exports_unknown: None };
        let text = disk_rows(&shown(lun));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["DISK", "SIZE", "POLICY", "OWNER", "STATE", "DIRTY", "ROUTE"], "{text}");
        assert!(words[1].ends_with(&["direct"]) && words[3].ends_with(&["serving"]), "{text}");
        let why = "block-redirected: no-disk-connectivity (not benign), unallocated-extent";
        assert!(words[2].join(" ").ends_with(why), "{text}");
        assert!(!disk_rows(&shown(VolumeView::default())).contains("direct"), "elsewhere there is one route");
    }
}
