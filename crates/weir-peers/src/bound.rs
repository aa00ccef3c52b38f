//! An upper bound of a figure that Weir must keep, where a ratio to a peer would not show it.

use serde::Serialize;

use crate::row::{Cell, Metric};

/// One line of the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// What is bounded: `processor time that TLS adds to a frame sent`.
    pub name: String,
    /// The figure, in microseconds. A difference of two medians, so noise can make it negative.
    pub value_us: f64,
    /// The most that is allowed, in microseconds.
    pub limit_us: f64,
    /// Whether the figure keeps the limit.
    pub target_met: bool,
    /// The cell.
    pub cell: String,
}

impl Bound {
    /// The processor time that a request costs under `with`, beyond its cost under `without`. `metric` counts requests per
    /// processor second. `None` when a figure is missing.
    pub fn added(
        cell: &Cell,
        name: &str,
        metric: Metric,
        (with, without): (&str, &str),
        limit_us: f64,
    ) -> Option<Bound> {
        let cost_us = |subject: &str| {
            let row = cell.rows.iter().find(|row| row.subject == subject)?;
            Some(1e6 / row.median(metric)?)
        };
        let value_us = cost_us(with)? - cost_us(without)?;
        let target_met = value_us <= limit_us;
        Some(Bound { name: name.into(), value_us, limit_us, target_met, cell: cell.name.clone() })
    }

    /// Its text in the last line of the output if it exceeds its limit.
    pub fn miss(&self) -> Option<String> {
        let Bound { name, value_us, limit_us, cell, .. } = self;
        (!self.target_met).then(|| format!("{cell}, {name}: {value_us:.2} us of {limit_us:.2}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::row_of;

    #[test]
    fn what_is_added_is_a_difference_of_costs() {
        // The server uses half a processor, so 500,000 requests a second cost 1 us each, and 200,000 cost 2.5 us.
        let rows = vec![row_of("without", "-", &[(5e5, 1.0)]), row_of("with", "-", &[(2e5, 1.0)])];
        let cell = Cell { name: "cell".into(), rows };
        let added =
            |limit| Bound::added(&cell, "added", Metric::PerServerCpu, ("with", "without"), limit).unwrap();
        assert!((added(2.0).value_us - 1.5).abs() < 1e-9);
        assert_eq!(added(1.5).miss(), None);
        assert_eq!(added(1.0).miss().unwrap(), "cell, added: 1.50 us of 1.00");
        assert!(Bound::added(&cell, "x", Metric::PerServerCpu, ("with", "none"), 1.0).is_none());
    }
}
