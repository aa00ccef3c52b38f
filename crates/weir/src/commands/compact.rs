//! `weir disk compact`, and what snapshots and clones of a disk in many extents cost.

use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::{
    ApiErrorKind, COMPACTION_INTERRUPTED, CompactionView, LayoutView, LookAtLayout, compaction_interrupted,
};
use weir_node::client::Client;
use weir_node::units::{about, count};

use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{note, print};

/// Pause between two looks at the progress, and the shortest time between two lines of it.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Longest time without an answer about it.
const SILENT: Duration = Duration::from_secs(60);

/// Copies a disk to fewer extents, and shows the progress.
pub fn run(global: &Global, disk: &str, dry_run: bool) -> Result<(), Failure> {
    let mut client = any_node(global)?;
    let begun = client.compact(disk, dry_run)?;
    if dry_run {
        return print(global.output, &begun, would);
    }
    note(&format!(
        "{disk} is copied; if this command ends, that goes on, and `weir disk show {disk}` tells how far it is"
    ));
    let (was_open, mut now, mut said) = (begun.was_open, begun, Nanos::now());
    let mut heard = Nanos::now();
    while now.state != "done" {
        std::thread::sleep(LOOK_AGAIN);
        now = match client.compaction(disk) {
            Ok(view) => {
                heard = Nanos::now();
                view
            }
            // The asked node was busy, or the volume is about to have another coordinator, which says more.
            Err(error)
                if error.kind == ApiErrorKind::Unavailable
                    && error.code != COMPACTION_INTERRUPTED
                    && Nanos::now() - heard < SILENT =>
            {
                client = any_node(global).unwrap_or(client);
                now
            }
            // A coordinator that knows nothing of it is another one.
            Err(error) if error.kind == ApiErrorKind::NotFound => {
                return Err(compaction_interrupted(disk).into());
            }
            Err(error) => return Err(error.into()),
        };
        if Nanos::now() - said >= LINE_EVERY {
            note(&format!("{disk}: {} of {} copied", about(now.copied), about(now.bytes)));
            said = Nanos::now();
        }
    }
    print(global.output, &CompactionView { was_open, ..now }, done)
}

fn would(plan: &CompactionView) -> String {
    let CompactionView { disk, extents, bytes, .. } = plan;
    let closed = if plan.was_open { "; it would be closed" } else { "" };
    format!(
        "would copy {} of disk {disk}, which is in {}, to few extents{closed}{}",
        about(*bytes),
        count(*extents, "extent"),
        unshared(plan, "would take")
    )
}

fn done(view: &CompactionView) -> String {
    let CompactionView { disk, extents, bytes, extents_after, .. } = view;
    let mut text = format!(
        "disk {disk} is in {} now, before in {extents}; {} copied{}",
        count(extents_after.unwrap_or_default(), "extent"),
        about(*bytes),
        unshared(view, "take")
    );
    if view.was_open {
        text += &format!("\nit is closed now: `weir disk export {disk}` opens it again");
    }
    text
}

/// What is shared with snapshots is there twice afterwards.
fn unshared(view: &CompactionView, take: &str) -> String {
    match view.shared {
        0 => String::new(),
        shared => format!(
            "\n{} that it shared with snapshots or clones {take} space of their own, until those are deleted",
            about(shared)
        ),
    }
}

/// Says beside the result what a snapshot or a clone of a disk in many extents costs.
pub fn tell(client: &Client, disk: &str, snapshot: Option<&str>) {
    // Whatever is wrong, the command itself says.
    let wanted = LookAtLayout { snapshot: snapshot.map(str::to_owned), before: None };
    if let Ok(layout) = client.layout(disk, &wanted)
        && layout.is_many
    {
        note(&layout.advice);
    }
}

/// What a dry run of a snapshot or a clone says.
pub fn planned(layout: &LayoutView, what: &str) -> String {
    let extents =
        layout.extents.map_or_else(|| "very many extents".to_owned(), |known| count(known, "extent"));
    let takes = layout.share_seconds.map_or_else(String::new, |takes| format!(", about {takes:.3} s"));
    match layout.advice.as_str() {
        "" => format!("would {what}: {extents}{takes}"),
        advice => format!("would {what}: {extents}{takes}\n{advice}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_shared_any_more_is_said() {
        let view = CompactionView {
            disk: "d".into(),
            state: "done".into(),
            extents: 16_384,
            extents_after: Some(3),
            bytes: 64 << 20,
            copied: 64 << 20,
            shared: 1 << 20,
            was_open: true,
        };
        assert_eq!(
            done(&view),
            "disk d is in 3 extents now, before in 16384; 64 MiB copied\n1 MiB that it shared with snapshots or clones take space of their own, \
             until those are deleted\nit is closed now: `weir disk export d` opens it again"
        );
        let plan = CompactionView { shared: 0, extents_after: None, was_open: false, ..view };
        assert_eq!(would(&plan), "would copy 64 MiB of disk d, which is in 16384 extents, to few extents");
    }
}
