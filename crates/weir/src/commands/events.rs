//! `weir events`

use std::collections::HashSet;
use std::time::Duration;

use weir_node::api::{ApiError, EventList, EventView};
use weir_report::text::wrap;

use crate::cluster::any_node;
use crate::failure::{Failure, FailureKind};
use crate::options::{Global, Output};
use crate::output::{goes_on, note, print, table, width};

/// Polling interval of `--follow`.
const LOOK: Duration = Duration::from_millis(500);

/// Prints recent events; with `follow`, also new ones, until interrupted.
pub fn run(global: &Global, follow: bool) -> Result<(), Failure> {
    let events = look(global)?;
    if !follow {
        return print(global.output, &EventList { events }, |EventList { events }| {
            table(&["TIME (UTC)", "NODE", "SUBJECT", "KIND", "WHAT"], &[], events.iter().map(cells))
        });
    }
    let mut new = News::default();
    let (mut fresh, mut silent) = (new.of(events), false);
    loop {
        for event in &fresh {
            let line = match global.output {
                Output::Json => serde_json::to_string(event).map_err(Failure::failed)?,
                Output::Text => line(event),
            };
            if !goes_on(&line)? {
                return Ok(());
            }
        }
        std::thread::sleep(LOOK);
        fresh = match look(global) {
            Ok(events) => {
                silent = false;
                new.of(events)
            }
            // The asked node may be the subject of an event.
            Err(failure) if failure.kind == FailureKind::Unavailable => {
                if !std::mem::replace(&mut silent, true) {
                    note(&format!("{}; still trying", failure.message));
                }
                Vec::new()
            }
            Err(failure) => return Err(failure),
        };
    }
}

fn look(global: &Global) -> Result<Vec<EventView>, Failure> {
    let events: Result<_, ApiError> = any_node(global)?.events();
    Ok(events?)
}

/// One line, or several on a terminal that is too narrow for it, the text in a column of its own.
fn line(event: &EventView) -> String {
    let mut cells = cells(event);
    let text = cells.pop().unwrap_or_default();
    match width() {
        Some(width) => wrap(&format!("{}  ", cells.join("  ")), &text, width),
        None => format!("{}  {text}", cells.join("  ")),
    }
}

fn cells(event: &EventView) -> Vec<String> {
    let EventView { at, node, subject, kind, text, .. } = event;
    // The head of the column says UTC.
    let time = at.trim_end_matches('Z').replace('T', " ");
    vec![time, node.clone(), subject.clone(), kind.clone(), text.clone()]
}

/// Distinguishes new events from those already seen. Events of several nodes may arrive in a different order from that of their
/// times.
#[derive(Default)]
struct News {
    seen: HashSet<(String, String, String, String, String)>,
}

impl News {
    /// The events that were not among those of the last call.
    fn of(&mut self, events: Vec<EventView>) -> Vec<EventView> {
        let key = |event: &EventView| {
            let EventView { at, node, subject, kind, text, .. } = event.clone();
            (at, node, subject, kind, text)
        };
        let before = std::mem::replace(&mut self.seen, events.iter().map(key).collect());
        events.into_iter().filter(|event| !before.contains(&key(event))).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn event(second: u64, text: &str) -> EventView {
        let at = format!("2026-11-23T10:45:{second:02}.000Z");
        let view =
            serde_json::json!({ "at": at, "node": "n1", "subject": "d", "kind": "open", "text": text });
        serde_json::from_value(view).unwrap()
    }

    #[test]
    fn an_event_is_new_once() {
        let mut news = News::default();
        let texts = |events: Vec<EventView>| events.into_iter().map(|event| event.text).collect::<Vec<_>>();
        assert_eq!(texts(news.of(vec![event(1, "a"), event(3, "c")])), ["a", "c"]);
        assert_eq!(
            texts(news.of(vec![event(1, "a"), event(2, "b"), event(3, "c")])),
            ["b"],
            "late and before another"
        );
        assert!(news.of(vec![event(2, "b"), event(3, "c")]).is_empty(), "old ones go");
        assert_eq!(texts(news.of(vec![event(3, "c"), event(3, "d")])), ["d"]);
    }
}
