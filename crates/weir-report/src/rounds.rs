//! The rounds of a load that runs until a steady state, and the steady window.

use crate::axis::Axis;
use crate::format;
use crate::panel::{Panel, tick_count};
use crate::svg::{Anchor, Drawing, WIDTH};

const LEFT: f64 = 46.0;
const RIGHT: f64 = WIDTH - 8.0;
const TOP: f64 = 22.0;
const HEIGHT: f64 = 150.0;

/// Width of a bar, as a fraction of a round's room.
const BAR: f64 = 0.7;

/// Rounds, and the criterion for the last of them.
#[derive(Debug)]
pub struct Rounds<'a> {
    /// I/Os per second of each round.
    pub rates: &'a [f64],
    /// Number of rounds of the window, at the end.
    pub window: usize,
    /// The band around the window's average that its rounds may not leave: its whole height, as a share of the average.
    pub band: f64,
    /// Whether the window is steady.
    pub reached: bool,
}

/// A bar for each round, those of the window in colour, with the band that they may not leave; `None` without a round.
#[must_use]
pub fn panel(title: &str, state: &Rounds<'_>) -> Option<Panel> {
    let rounds = state.rates;
    let most = rounds.iter().copied().filter(|rate| rate.is_finite()).fold(0.0, f64::max);
    if rounds.is_empty() || most <= 0.0 {
        return None;
    }
    let (bottom, mut drawing) = (TOP + HEIGHT, Drawing::default());
    let y = Axis::linear(bottom, TOP, most * 1.05);
    for &tick in y.ticks() {
        let place = y.at(tick);
        drawing.line("grid", (LEFT, place), (RIGHT, place));
        drawing.text("tick", LEFT - 6.0, place + 3.5, Anchor::End, &tick_count(tick));
    }
    let room = (RIGHT - LEFT) / rounds.len() as f64;
    let window = rounds.len().saturating_sub(state.window);
    for (round, &rate) in rounds.iter().enumerate() {
        let (x, top) = (LEFT + room * (round as f64 + (1.0 - BAR) / 2.0), y.at(rate));
        let class = if round >= window { "base" } else { "beside" };
        drawing.begin_group(&format!("round {}: {} I/Os per second", round + 1, format::whole(rate)));
        drawing.rect(class, x, top, room * BAR, bottom - top);
        drawing.end_group();
        if rounds.len() <= 12 || (round + 1) % 5 == 0 {
            let label = (round + 1).to_string();
            drawing.text("tick", LEFT + room * (round as f64 + 0.5), bottom + 14.0, Anchor::Middle, &label);
        }
    }
    mark_window(&mut drawing, &y, LEFT + room * window as f64, state);
    let svg = drawing.close(&format!("I/Os per second by round: {title}"));
    Some(Panel { title: title.to_owned(), svg })
}

/// The window's bracket, and the band of the greatest excursion around its average.
fn mark_window(drawing: &mut Drawing, y: &Axis, left: f64, state: &Rounds<'_>) {
    let window = &state.rates[state.rates.len().saturating_sub(state.window)..];
    let average = window.iter().sum::<f64>() / window.len().max(1) as f64;
    for side in [-0.5, 0.5] {
        let edge = y.at(average * (1.0 + side * state.band));
        drawing.line("link", (left, edge), (RIGHT, edge));
    }
    let above = TOP - 6.0;
    drawing.line("bracket", (left, above), (RIGHT, above));
    for x in [left, RIGHT] {
        drawing.line("bracket", (x, above - 3.0), (x, above + 3.0));
    }
    let words = if state.reached { "steady window" } else { "last window: not steady" };
    // Right-aligned: with few rounds the bracket is wide, with many it is short and at the right.
    drawing.text("aside", RIGHT, above - 5.0, Anchor::End, words);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(rates: &[f64], reached: bool) -> Rounds<'_> {
        Rounds { rates, window: 5, band: 0.2, reached }
    }

    #[test]
    fn the_window_is_the_last_rounds() {
        let svg = panel("disk", &of(&[500.0, 400.0, 100.0, 101.0, 99.0, 100.0, 100.0], true)).unwrap().svg;
        assert_eq!(
            (svg.matches(r#"class="base""#).count(), svg.matches(r#"class="beside""#).count()),
            (5, 2)
        );
        assert!(svg.contains(">steady window<") && svg.contains("round 1: 500 I/Os per second"), "{svg}");
        assert!(panel("disk", &of(&[500.0, 100.0, 300.0], false)).unwrap().svg.contains("not steady"));
        assert!(panel("disk", &of(&[], false)).is_none());
        assert!(panel("disk", &of(&[0.0; 5], true)).is_none());
    }

    proptest! {
        #[test]
        fn any_rounds_can_be_drawn(rounds in prop::collection::vec(any::<f64>(), 0..40)) {
            if let Some(panel) = panel("x", &of(&rounds, true)) {
                prop_assert!(crate::svg::is_drawable(&panel.svg), "{}", panel.svg);
            }
        }
    }
}
