//! The screen of `weir top`.

use std::io::IsTerminal;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table};
use ratatui::{DefaultTerminal, Frame as Canvas};
use weir_block::Nanos;

use super::{Frame, HEADER, RIGHT, Watcher};
use crate::failure::Failure;

/// Whether somebody looks.
pub fn is_terminal() -> bool {
    std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Renews the screen until q, Esc or Ctrl-C.
pub fn run(watcher: &mut Watcher<'_>, every: Duration) -> Result<(), Failure> {
    let mut terminal = ratatui::try_init()?;
    let outcome = watch(&mut terminal, watcher, every);
    // The terminal first: whatever went wrong is to be read.
    ratatui::try_restore()?;
    outcome
}

fn watch(terminal: &mut DefaultTerminal, watcher: &mut Watcher<'_>, every: Duration) -> Result<(), Failure> {
    let mut shown = Ok(Frame { rows: Vec::new() });
    let mut next = Nanos::now() + every;
    loop {
        terminal.draw(|canvas| draw(canvas, &shown, every))?;
        while Nanos::now() < next {
            if event::poll(next - Nanos::now())? && is_farewell(&event::read()?) {
                return Ok(());
            }
        }
        next = Nanos::now() + every;
        // A node that is asked may be the one that dies: that is worth watching on.
        shown = watcher.frame();
    }
}

fn is_farewell(event: &Event) -> bool {
    let Event::Key(KeyEvent { code, modifiers, .. }) = event else { return false };
    let interrupted = *code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
    interrupted || matches!(code, KeyCode::Char('q') | KeyCode::Esc)
}

fn draw(canvas: &mut Canvas<'_>, shown: &Result<Frame, Failure>, every: Duration) {
    let [title, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)])
            .areas(canvas.area());
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let reversed = Style::new().add_modifier(Modifier::REVERSED);
    let heading = format!("weir top   every {} ms   q ends", every.as_millis());
    canvas.render_widget(Paragraph::new(Line::styled(heading, bold)), title);
    let frame = match shown {
        Ok(frame) => frame,
        Err(error) => {
            let words = format!("nobody answers at present: {}", error.message);
            return canvas.render_widget(Paragraph::new(words), body);
        }
    };
    let lines: Vec<Vec<String>> = frame.rows.iter().map(super::Row::cells).collect();
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        cells.chain([HEADER[column].len()]).max().unwrap_or(0) as u16
    };
    let widths = (0..HEADER.len()).map(|column| Constraint::Length(width(column)));
    let align = |column: usize, text: &str| {
        let width = width(column) as usize;
        Cell::new(if RIGHT.contains(&column) { format!("{text:>width$}") } else { text.to_owned() })
    };
    let header = HEADER.iter().enumerate().map(|(column, text)| align(column, text));
    let rows = lines.iter().zip(&frame.rows).map(|(line, row)| {
        let cells = line.iter().enumerate().map(|(column, text)| align(column, text));
        let style = if row.is_in_trouble() { bold } else { Style::new() };
        Row::new(cells.collect::<Vec<_>>()).style(style)
    });
    let table = Table::new(rows, widths).header(Row::new(header).style(reversed)).column_spacing(2);
    canvas.render_widget(table, body);
    let reasons = frame.rows.iter().filter(|row| !row.disk.reason.is_empty());
    let reasons: Vec<String> = reasons.map(|row| format!("{}: {}", row.disk.name, row.disk.reason)).collect();
    canvas.render_widget(Paragraph::new(reasons.join("   ")), foot);
}
