//! `weir cluster rotate`

use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::ApiErrorKind;
use weir_node::client::Client;
use weir_node::cluster::views::{ClusterView, Rotate, RotationView, WaitView};

use crate::failure::{Failure, FailureKind};
use crate::output::{list, note};

/// Pause between two looks at the progress.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Without any progress for so long, waiting ends: the rotation goes on by itself.
const STUCK: Duration = Duration::from_secs(30);

/// As [`STUCK`], where an operator leaves nodes behind: those are not waited for.
const STUCK_BY_FORCE: Duration = Duration::from_secs(5);

/// The former copy has no key that signs.
const BACK_UP: &str = "the directory of keys now: the new key is in it, and on no other host";

/// What removing the former authority does not reach.
const TRUST_FORMER: &str = "these clients' files, made during the rotation, still trust the former authority: `weir cluster trust --directory DIR` removes \
                            it from them; needed if its key was stolen";

/// Takes the step, and waits until the nodes that run have followed.
pub fn run(client: &Client, rotate: Rotate, no_wait: bool) -> Result<RotationView, Failure> {
    let mut view = client.rotate(&rotate)?;
    if no_wait || rotate.dry_run {
        return Ok(view);
    }
    let stuck = if rotate.force { STUCK_BY_FORCE } else { STUCK };
    let mut progress = (Nanos::now(), String::new());
    while follows(&view, rotate.force) {
        let line = progress_of(&view);
        if line != progress.1 {
            note(&line);
            progress = (Nanos::now(), line);
        }
        if Nanos::now() - progress.0 >= stuck {
            // The new authority signs, and whom the operator leaves behind is not waited for.
            if rotate.force && view.phase == RotationView::RENEWING {
                break;
            }
            let message = format!("no progress for {} s ({})", stuck.as_secs(), progress.1);
            return Err(Failure::new(FailureKind::Refused, message)
                .hint("it goes on by itself when it can; `weir cluster list` shows who is left"));
        }
        std::thread::sleep(LOOK_AGAIN);
        view = match client.cluster() {
            // The asked node itself may have been busy; the next look tells.
            Err(error) if error.kind == ApiErrorKind::Unavailable => view,
            // Ended or taken back meanwhile.
            Ok(ClusterView { rotation: None, authorities, .. }) => {
                RotationView::settled(authorities.into_iter().next().unwrap_or_default())
            }
            Ok(ClusterView { rotation: Some(rotation), .. }) => rotation,
            Err(error) => return Err(error.into()),
        };
        if rotate.force && view.phase == RotationView::INTRODUCING {
            view = match client.rotate(&Rotate { no_begin: true, ..rotate }) {
                // A node that runs has not followed yet.
                Err(error) if error.kind == ApiErrorKind::Refused => view,
                taken => taken?,
            };
        }
    }
    Ok(view)
}

/// Nodes are about to follow; nothing else ends soon by itself.
fn follows(view: &RotationView, force: bool) -> bool {
    match &*view.phase {
        RotationView::INTRODUCING => force || view.waits_for.iter().all(is_node),
        RotationView::RENEWING => view.waits_for.iter().any(is_node),
        _ => false,
    }
}

fn is_node(wait: &WaitView) -> bool {
    wait.kind == "node"
}

fn progress_of(view: &RotationView) -> String {
    let nodes: Vec<&str> = view.waits_for.iter().filter(|one| is_node(one)).map(|one| &*one.name).collect();
    let nodes = if nodes.is_empty() { String::new() } else { format!(": {}", nodes.join(", ")) };
    match &*view.phase {
        RotationView::INTRODUCING => format!("the nodes hear of the new authority{nodes}"),
        _ => format!("the nodes renew their certificates{nodes}"),
    }
}

/// For people.
pub fn text(view: &RotationView) -> String {
    let RotationView { phase, authority, other, since, waits_for, trust_former, done } = view;
    let wait = |one: &WaitView| {
        let until = one.ends.as_ref().map_or_else(String::new, |ends| format!(", until {ends}"));
        format!("{} {}: {}{until}", one.kind, one.name, one.reason)
    };
    let waits: Vec<String> = waits_for.iter().map(wait).collect();
    let other_name = if phase == RotationView::RENEWING { "former" } else { "next" };
    let next = match (&**phase, waits.is_empty()) {
        (RotationView::SETTLED, _) if !done => "`weir cluster rotate` makes a new authority",
        (RotationView::INTRODUCING, _) => {
            "the new authority signs as soon as nobody is left; then the nodes renew"
        }
        (RotationView::RENEWING, true) => "`weir cluster rotate --finish` removes the former authority",
        (RotationView::RENEWING, false) => {
            "new certificates for these clients (`weir cluster client`); then `weir cluster rotate --finish`"
        }
        _ => "",
    };
    let trust_former = match trust_former.is_empty() {
        true => String::new(),
        false => format!("{}: {TRUST_FORMER}", trust_former.join(", ")),
    };
    let back_up = if phase == RotationView::RENEWING && *done { BACK_UP } else { "" };
    list(&[
        ("phase", phase.clone()),
        ("authority", authority.clone()),
        (other_name, other.clone().unwrap_or_default()),
        ("since", since.clone().unwrap_or_default()),
        (if *done { "waits for" } else { "would wait for" }, waits.join("; ")),
        ("next step", next.to_owned()),
        ("back up", back_up.to_owned()),
        ("trust", trust_former),
    ])
}
