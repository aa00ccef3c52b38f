//! Every planned cell against the layer below, step by step: a heat map that is a table, so that it can be read aloud,
//! scrolled on a small screen and copied. Marks and words carry what the colours say.

use weir_report::page::{self, Group, Row, Table};

use super::view::depth_title;
use crate::cell::{Cell, Shape};
use crate::comparison::{Difference, Judgement};
use crate::finding::Findings;
use crate::result::Diagnosis;
use weir_report::format;

use crate::{table, verdict};

/// Factors from which on a tile has a stronger shade, either way.
const SHADES: [f64; 4] = [1.05, 1.25, 2.0, 4.0];

/// Columns of roomy tiles that fit beside each other.
const ROOMY: usize = 12;

/// The heat map; `None` where there is no step.
pub fn matrix(diagnosis: &Diagnosis, findings: &Findings) -> Option<Table> {
    if findings.compared.steps.is_empty() {
        return None;
    }
    let depths = depths(diagnosis);
    let names: Vec<String> = depths.iter().map(depth_title).collect();
    let layers: Vec<(usize, &str)> =
        diagnosis.chain().map(|(place, layer)| (place, layer.name.as_str())).collect();
    let mut steps: Vec<Group> = layers
        .windows(2)
        .map(|pair| Group {
            name: pair[1].1.to_owned(),
            note: format!("against {}", pair[0].1),
            columns: names.clone(),
        })
        .collect();
    let mut wanted: Vec<Wanted> = layers.iter().skip(1).map(|(layer, _)| Wanted::StepTo(*layer)).collect();
    if let ([(_, lowest), .., (_, highest)], false) =
        (layers.as_slice(), findings.compared.whole_path.is_empty())
    {
        let (name, note) = ("the whole path".to_owned(), format!("{highest} against {lowest}"));
        steps.push(Group { name, note, columns: names });
        wanted.push(Wanted::WholeWay);
    }
    let row = |shape: Shape| {
        let places = wanted.iter().flat_map(|wanted| depths.iter().map(move |depth| (wanted, depth)));
        let tiles = places.enumerate().map(|(index, (wanted, depth))| page::Cell {
            begins: index % depths.len() == 0,
            ..tile(diagnosis, findings, wanted, &Cell { shape, ..*depth })
        });
        Row { name: shape.to_string(), cells: tiles.collect(), ..Row::default() }
    };
    let dense = wanted.len() * depths.len() > ROOMY;
    Some(Table {
        class: if dense { "matrix dense" } else { "matrix" },
        first: "load".to_owned(),
        groups: steps,
        rows: table::shapes(diagnosis).into_iter().map(row).collect(),
    })
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

fn tile(diagnosis: &Diagnosis, findings: &Findings, wanted: &Wanted, cell: &Cell) -> page::Cell {
    let difference = match wanted {
        Wanted::StepTo(layer) => {
            findings.compared.steps.iter().find(|step| step.to == *layer && step.cell == *cell)
        }
        Wanted::WholeWay => findings.compared.whole_path.iter().find(|path| path.cell == *cell),
    };
    let Some(difference) = difference else {
        let planned = diagnosis.cells.contains(cell);
        let (class, tip) =
            if planned { ("unknown", "no usable rows on both sides") } else { ("", "not planned") };
        let text = if planned { "–" } else { "" };
        return page::Cell { class: class.into(), mark: Some(""), tip: tip.into(), ..page::Cell::text(text) };
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
    let factor_text = format::factor(factor.max(factor.recip())).replace('×', "") + "×";
    page::Cell {
        class: format!("{}{hatched}", shade(factor)),
        mark: Some(mark),
        tip: format!("{}{below} {}", verdict::describe(difference), judgement(difference)),
        ..page::Cell::text(factor_text)
    }
}

fn judgement(difference: &Difference) -> &'static str {
    match difference.judgement {
        Judgement::Slower => "Slower.",
        Judgement::Faster => "Faster.",
        Judgement::Same => "Shown to be the same.",
        Judgement::Inconclusive => "Inconclusive.",
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
            matrix.groups.iter().map(|step| (step.name.as_str(), step.note.as_str())).collect();
        assert_eq!(
            steps,
            [
                ("accel write-back+1", "against backing"),
                ("nbd export", "against accel write-back+1"),
                ("the whole path", "nbd export against backing")
            ]
        );
        assert_eq!(matrix.rows.len(), 4);
        let writes = &matrix.rows[2];
        assert_eq!((writes.name.as_str(), writes.cells.len()), ("4K random write", 6));
        // 90 µs at the backing, 38 µs at the accelerator, 92 µs at the export.
        let read: Vec<_> = writes
            .cells
            .iter()
            .map(|tile| (tile.class.as_str(), tile.mark.unwrap(), tile.lines[0].as_str()))
            .collect();
        assert_eq!(read[0], ("fast3", "▼", "2.37×"));
        assert_eq!(read[2], ("slow3", "▲", "2.42×"));
        assert!(writes.cells[2].tip.contains("+54.0 µs") && writes.cells[2].begins);
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
        let tiles = &matrix.rows[1].cells;
        assert!(tiles[0].class.contains("hatched") && tiles[0].mark == Some("△"), "{}", tiles[0].class);
        assert_eq!((tiles[1].class.as_str(), tiles[1].lines[0].as_str()), ("unknown", "–"));
        diagnosis.rows.clear();
        assert!(super::matrix(&diagnosis, &find(&diagnosis)).is_none());
    }
}
