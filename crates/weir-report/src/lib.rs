//! Reports from rows: HTML pages that need no network, SVG charts, text tables and JUnit.
//!
//! - [`mod@format`]: numbers for people.
//! - [`page`]: an HTML page of sections: sentences, figures, tables, charts.
//! - [`svg`], [`axis`]: drawing primitives of charts.
//! - [`bars`], [`percentiles`], [`distribution`], [`over_time`], [`rounds`]: the charts.
//! - [`text`]: tables for a terminal.
//! - [`junit`]: test suites for pipelines.
//!
//! Nothing here depends on the source of rows: the caller passes names, numbers and words.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod axis;
pub mod bars;
pub mod distribution;
pub mod format;
pub mod junit;
pub mod over_time;
pub mod page;
pub mod panel;
pub mod percentiles;
pub mod rounds;
pub mod svg;
pub mod text;

pub use panel::Panel;

/// The reason why a page could not be rendered; never in practice, because it is rendered to memory.
pub type RenderError = askama::Error;
