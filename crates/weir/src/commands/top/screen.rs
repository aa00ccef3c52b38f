//! The screen of `weir top`.

use std::io::IsTerminal;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, Wrap};
use ratatui::{DefaultTerminal, Frame as Canvas};
use weir_block::Nanos;
use weir_report::text::wrap;

use super::{Frame, GAP, HEADER, RIGHT, Watcher, fitting, widths};
use crate::failure::Failure;

/// Whether the output is a terminal.
pub fn is_terminal() -> bool {
    std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Updates the screen until q, Esc or Ctrl-C.
pub fn run(watcher: &mut Watcher<'_>, every: Duration) -> Result<(), Failure> {
    let mut terminal = ratatui::try_init()?;
    let outcome = watch(&mut terminal, watcher, every);
    // The terminal first: the error must be readable.
    ratatui::try_restore()?;
    outcome
}

fn watch(terminal: &mut DefaultTerminal, watcher: &mut Watcher<'_>, every: Duration) -> Result<(), Failure> {
    let mut shown = Ok(Frame { at: String::new(), rows: Vec::new() });
    let mut next = Nanos::now() + every;
    loop {
        terminal.draw(|canvas| draw(canvas, &shown, every))?;
        while Nanos::now() < next {
            if event::poll(next - Nanos::now())? && is_farewell(&event::read()?) {
                return Ok(());
            }
        }
        next = Nanos::now() + every;
        // The asked node may be the one that fails; the screen continues nevertheless.
        shown = watcher.frame();
    }
}

fn is_farewell(event: &Event) -> bool {
    let Event::Key(KeyEvent { code, modifiers, .. }) = event else { return false };
    let interrupted = *code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
    interrupted || matches!(code, KeyCode::Char('q') | KeyCode::Esc)
}

fn draw(canvas: &mut Canvas<'_>, shown: &Result<Frame, Failure>, every: Duration) {
    let area = canvas.area();
    let width = usize::from(area.width);
    let reasons = shown.as_ref().map_or_else(|_| Vec::new(), |frame| reasons(frame, width));
    // The table comes first.
    let height = (reasons.len() as u16).min(area.height / 3);
    let [title, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(height)]).areas(area);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let reversed = Style::new().add_modifier(Modifier::REVERSED);
    let frame = match shown {
        Ok(frame) => frame,
        Err(failure) => {
            canvas.render_widget(Paragraph::new(Line::styled(heading(every, 0), bold)), title);
            let words = format!("no node answers: {}", failure.message);
            return canvas.render_widget(Paragraph::new(words).wrap(Wrap { trim: true }), body);
        }
    };
    let lines: Vec<Vec<String>> = frame.rows.iter().map(super::Row::cells).collect();
    let widths = widths(&lines);
    let columns = fitting(&widths, width);
    let left_out = HEADER.len() - columns.len();
    canvas.render_widget(Paragraph::new(Line::styled(heading(every, left_out), bold)), title);
    let align = |column: usize, text: &str| {
        let width = widths[column];
        Cell::new(if RIGHT.contains(&column) { format!("{text:>width$}") } else { text.to_owned() })
    };
    let header = columns.iter().map(|&column| align(column, HEADER[column]));
    let rows = lines.iter().zip(&frame.rows).map(|(line, row)| {
        let cells = columns.iter().map(|&column| align(column, &line[column]));
        let style = if row.is_in_trouble() { bold } else { Style::new() };
        Row::new(cells.collect::<Vec<_>>()).style(style)
    });
    let widths = columns.iter().map(|&column| Constraint::Length(widths[column] as u16));
    let table = Table::new(rows, widths).header(Row::new(header).style(reversed)).column_spacing(GAP as u16);
    canvas.render_widget(table, body);
    canvas.render_widget(Paragraph::new(reasons.join("\n")), foot);
}

fn heading(every: Duration, left_out: usize) -> String {
    let wider = match left_out {
        0 => String::new(),
        1 => "   1 column has no room".to_owned(),
        _ => format!("   {left_out} columns have no room"),
    };
    format!("weir top   every {} ms   q ends{wider}", every.as_millis())
}

/// The reasons why disks differ from their requested state, in lines that fit.
fn reasons(frame: &Frame, width: usize) -> Vec<String> {
    let disks = frame.rows.iter().map(|row| &row.disk).filter(|disk| !disk.reason.is_empty());
    let lines = disks.map(|disk| wrap("", &format!("{}: {}", disk.name, disk.reason), width));
    lines.flat_map(|lines| lines.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;
    use weir_diagnose::live::{Acknowledged, Look, Totals, explain};

    use super::*;

    /// A disk under load, as long in all columns as disks usually are.
    fn busy(name: &str, reason: &str) -> super::super::Row {
        let view = json!({
            "name": name, "volume": "pool", "size_bytes": 1 << 30, "logical_block_bytes": 512, "requested": "write-back+1",
            "effective": "write-through", "owner": "host-17", "epoch": 3, "replicas": [], "state": "serving",
            "reason": reason, "uris": [],
        });
        let look = |requests: u64| -> Look {
            let kind = |name: &str| {
                let latency = vec![(1_000_000, requests)];
                (
                    name.to_owned(),
                    Totals {
                        requests,
                        bytes: requests * 4096,
                        errors: 0,
                        latency: latency.into_iter().collect(),
                    },
                )
            };
            let layer = |name: &str| (name.to_owned(), ["read", "write"].map(kind).into_iter().collect());
            ["export", "accel", "backing"].map(layer).into_iter().collect()
        };
        let second = Duration::from_secs(1);
        let explanation = explain(&look(0), &look(123_456), second, Acknowledged::FromBacking);
        super::super::Row { disk: serde_json::from_value(view).unwrap(), explanation, held_back: 0.0 }
    }

    fn screen(width: u16, frame: Frame) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 12)).unwrap();
        let shown = Ok(frame);
        terminal.draw(|canvas| draw(canvas, &shown, Duration::from_secs(1))).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..12).map(line).collect()
    }

    #[test]
    fn nothing_is_cut_at_80_and_100_columns() {
        let reason = "the backing takes nothing: No space left on device (os error 28); the log fills up, and writes wait";
        for (width, absent) in [(80, 4), (100, 2), (200, 0)] {
            let lines = screen(
                width,
                Frame { at: String::new(), rows: vec![busy("database", ""), busy("db2", reason)] },
            );
            let header: Vec<&str> =
                lines[1].split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
            assert!(header.iter().all(|cell| HEADER.contains(cell)), "cut at {width}: {lines:#?}");
            assert!(HEADER.len() - header.len() <= absent, "{width}: {lines:#?}");
            for column in ["DISK", "STATE", "READS", "WRITES", "P99", "DIRTY"] {
                assert!(header.contains(&column), "{column} at {width}: {lines:#?}");
            }
            assert!(lines[2].starts_with("database") && lines[2].contains("123456/s"), "{lines:#?}");
            let text = lines.join(" ");
            let words: Vec<&str> = text.split_whitespace().collect();
            assert!(words.join(" ").contains(reason), "{width}: {lines:#?}");
            assert_eq!(lines[0].contains("no room"), header.len() < HEADER.len(), "{lines:#?}");
        }
    }

    #[test]
    fn a_long_name_is_whole_at_80_columns() {
        let name = "d".repeat(64);
        let lines = screen(80, Frame { at: String::new(), rows: vec![busy(&name, "")] });
        assert!(lines[2].starts_with(&format!("{name}  serving")), "{lines:#?}");
    }

    #[test]
    fn an_error_is_wrapped() {
        let mut terminal = Terminal::new(TestBackend::new(80, 12)).unwrap();
        let shown = Err(Failure::failed(format!("no answer from the node at {}", "/run/weir/".repeat(12))));
        terminal.draw(|canvas| draw(canvas, &shown, Duration::from_secs(1))).unwrap();
        let text: String = terminal.backend().buffer().content().iter().map(|cell| cell.symbol()).collect();
        assert_eq!(text.matches("/run/weir/").count(), 12, "{text}");
    }
}
