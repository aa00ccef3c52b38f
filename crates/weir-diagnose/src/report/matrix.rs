//! Every planned cell against the layer below, step by step: a heat map that is a table, so that it can be read aloud,
//! scrolled on a small screen and copied. Marks and words carry what the colours say.

use super::view::depth_title;
use crate::cell::{Cell, Shape};
use crate::finding::{Difference, Findings, Judgement};
use crate::result::Diagnosis;
use crate::{format, table, verdict};

/// Factors from which on a tile has a stronger shade, either way.
const SHADES: [f64; 4] = [1.05, 1.25, 2.0, 4.0];

/// The whole heat map.
pub struct Matrix {
    /// From the bottom.
    pub steps: Vec<Step>,
    /// One for each shape of load.
    pub rows: Vec<Line>,
    /// Many columns: small tiles.
    pub dense: bool,
}

/// Columns of roomy tiles that fit beside each other.
const ROOMY: usize = 12;

/// The columns of one step.
pub struct Step {
    /// The upper layer.
    pub to: String,
    /// `against backing`.
    pub against: String,
    /// `QD 1`, `QD 32`.
    pub depths: Vec<String>,
}

/// The tiles of one shape.
pub struct Line {
    /// `4K random read`.
    pub shape: String,
    /// One for each depth of each step.
    pub tiles: Vec<Tile>,
}

/// One cell in one step.
pub struct Tile {
    /// Colour, and hatching where nothing is shown.
    pub class: String,
    /// `▲`, `▼`, `=`; `△` and `▽` where it cannot be told.
    pub mark: &'static str,
    /// How many times slower or faster.
    pub text: String,
    /// The step in numbers, for a pointer.
    pub tip: String,
    /// The first of its step, set off from the step before.
    pub begins: bool,
}

/// The heat map; `None` where there is no step.
pub fn matrix(diagnosis: &Diagnosis, findings: &Findings) -> Option<Matrix> {
    if findings.steps.is_empty() {
        return None;
    }
    let depths = depths(diagnosis);
    let names: Vec<String> = depths.iter().map(depth_title).collect();
    let layers: Vec<(usize, &str)> =
        diagnosis.chain().map(|(place, layer)| (place, layer.name.as_str())).collect();
    let mut steps: Vec<Step> = layers
        .windows(2)
        .map(|pair| Step {
            to: pair[1].1.to_owned(),
            against: format!("against {}", pair[0].1),
            depths: names.clone(),
        })
        .collect();
    let mut wanted: Vec<Wanted> = layers.iter().skip(1).map(|(layer, _)| Wanted::StepTo(*layer)).collect();
    if let ([(_, lowest), .., (_, highest)], false) = (layers.as_slice(), findings.whole_way.is_empty()) {
        let (to, against) = ("the whole way".to_owned(), format!("{highest} against {lowest}"));
        steps.push(Step { to, against, depths: names });
        wanted.push(Wanted::WholeWay);
    }
    let row = |shape: Shape| {
        let places = wanted.iter().flat_map(|wanted| depths.iter().map(move |depth| (wanted, depth)));
        let tiles = places.enumerate().map(|(place, (wanted, depth))| Tile {
            begins: place % depths.len() == 0,
            ..tile(diagnosis, findings, wanted, &Cell { shape, ..*depth })
        });
        Line { shape: shape.to_string(), tiles: tiles.collect() }
    };
    let dense = wanted.len() * depths.len() > ROOMY;
    Some(Matrix { rows: table::shapes(diagnosis).into_iter().map(row).collect(), dense, steps })
}

enum Wanted {
    StepTo(usize),
    WholeWay,
}

/// The loads of the plan without their shapes, the shallowest first.
fn depths(diagnosis: &Diagnosis) -> Vec<Cell> {
    let mut depths: Vec<Cell> = Vec::new();
    for cell in &diagnosis.cells {
        let bare = Cell { shape: diagnosis.cells[0].shape, ..*cell };
        if !depths.contains(&bare) {
            depths.push(bare);
        }
    }
    depths.sort_by_key(|cell| (cell.queue_depth, cell.threads, cell.footprint));
    depths
}

fn tile(diagnosis: &Diagnosis, findings: &Findings, wanted: &Wanted, cell: &Cell) -> Tile {
    let difference = match wanted {
        Wanted::StepTo(layer) => findings.steps.iter().find(|step| step.to == *layer && step.cell == *cell),
        Wanted::WholeWay => findings.whole_way.iter().find(|way| way.cell == *cell),
    };
    let Some(difference) = difference else {
        let planned = diagnosis.cells.contains(cell);
        let (class, tip) =
            if planned { ("unknown", "no usable rows on both sides") } else { ("", "not planned") };
        let text = if planned { "–" } else { "" };
        return Tile { class: class.into(), mark: "", text: text.into(), tip: tip.into(), begins: false };
    };
    let factor = difference.loss_factor();
    let (mark, shown) = match difference.judgement {
        Judgement::Slower => ("▲", true),
        Judgement::Faster => ("▼", true),
        Judgement::Same => ("=", true),
        Judgement::Inconclusive | Judgement::Untested if factor >= 1.0 => ("△", false),
        Judgement::Inconclusive | Judgement::Untested => ("▽", false),
    };
    let hatched = if shown { "" } else { " hatched" };
    let below = match difference.skipped.len() {
        0 => String::new(),
        _ => format!(" (against {})", diagnosis.layers[difference.from].name),
    };
    Tile {
        class: format!("{}{hatched}", shade(factor)),
        mark,
        text: format::factor(factor.max(factor.recip())).replace('×', "") + "×",
        tip: format!("{}{below} {}", verdict::describe(difference), judgement(difference)),
        begins: false,
    }
}

fn judgement(difference: &Difference) -> &'static str {
    match difference.judgement {
        Judgement::Slower => "Slower.",
        Judgement::Faster => "Faster.",
        Judgement::Same => "Shown to be the same.",
        Judgement::Inconclusive => "Cannot be told.",
        Judgement::Untested => "A single run on a side.",
    }
}

/// `slow1` to `slow4`, `fast1` to `fast4`, or `even`.
fn shade(factor: f64) -> String {
    let strength = |factor: f64| SHADES.iter().filter(|least| factor >= **least).count();
    match (strength(factor), strength(factor.recip())) {
        (0, 0) => "even".to_owned(),
        (0, faster) => format!("fast{faster}"),
        (slower, _) => format!("slow{slower}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::sample;

    #[test]
    fn every_planned_cell_has_a_tile_with_a_mark() {
        let diagnosis = sample::write_back();
        let matrix = matrix(&diagnosis, &find(&diagnosis)).unwrap();
        let steps: Vec<_> =
            matrix.steps.iter().map(|step| (step.to.as_str(), step.against.as_str())).collect();
        assert_eq!(
            steps,
            [
                ("accel write-back+1", "against backing"),
                ("nbd export", "against accel write-back+1"),
                ("the whole way", "nbd export against backing")
            ]
        );
        assert_eq!(matrix.rows.len(), 4);
        let writes = &matrix.rows[2];
        assert_eq!((writes.shape.as_str(), writes.tiles.len()), ("4K random write", 6));
        // 90 µs at the backing, 38 µs at the accelerator, 92 µs at the export.
        let read: Vec<_> =
            writes.tiles.iter().map(|tile| (tile.class.as_str(), tile.mark, tile.text.as_str())).collect();
        assert_eq!(read[0], ("fast3", "▼", "2.37×"));
        assert_eq!(read[2], ("slow3", "▲", "2.42×"));
        assert!(writes.tiles[2].tip.contains("+54.0 µs") && writes.tiles[2].begins);
    }

    #[test]
    fn shades_are_the_same_both_ways() {
        for (factor, class) in [
            (1.0, "even"),
            (1.06, "slow1"),
            (0.94, "fast1"),
            (1.3, "slow2"),
            (2.5, "slow3"),
            (0.4, "fast3"),
            (4.0, "slow4"),
            (0.01, "fast4"),
            (f64::NAN, "even"),
        ] {
            assert_eq!(shade(factor), class, "{factor}");
        }
    }

    #[test]
    fn single_runs_are_hatched_and_missing_ones_blank() {
        let mut diagnosis = sample::write_back();
        diagnosis.rows.retain(|row| row.repeat == 1 && (row.layer != "backing" || row.cell.queue_depth == 1));
        let matrix = matrix(&diagnosis, &find(&diagnosis)).unwrap();
        let tiles = &matrix.rows[1].tiles;
        assert!(tiles[0].class.contains("hatched") && tiles[0].mark == "△", "{}", tiles[0].class);
        assert_eq!((tiles[1].class.as_str(), tiles[1].text.as_str()), ("unknown", "–"));
        diagnosis.rows.clear();
        assert!(super::matrix(&diagnosis, &find(&diagnosis)).is_none());
    }
}
