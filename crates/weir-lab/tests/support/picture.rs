//! Latency against time as an SVG picture, and the same as CSV.

use std::fmt::Write;

use super::behaviour::{Filling, Step};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 50.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 40.0;

/// Lowest and highest latency of the picture, in powers of ten of a millisecond.
const DECADES: (i32, i32) = (-2, 4);

/// Median, 99th percentile and longest latency on a logarithmic axis, the log's fill on a linear one.
pub fn svg(filling: &Filling) -> String {
    let steps = &filling.steps;
    let seconds = steps.last().map_or(1.0, |step| step.start_ms / 1e3).max(1.0);
    let x = |step: &Step| LEFT + step.start_ms / 1e3 / seconds * (WIDTH - LEFT - RIGHT);
    let share = |share: f64| HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
    let latency = |ms: f64| {
        let (low, high) = DECADES;
        share(((ms.max(1e-9).log10() - f64::from(low)) / f64::from(high - low)).clamp(0.0, 1.0))
    };
    let mut out = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>\n\
         <text x='{LEFT}' y='20'>Latency while the write log fills; the backing takes {} MiB/s</text>\n",
        filling.backing >> 20
    );
    for decade in DECADES.0..=DECADES.1 {
        let (at, ms) = (latency(10f64.powi(decade)), 10f64.powi(decade));
        let label = if ms < 1.0 { format!("{} µs", ms * 1e3) } else { format!("{ms} ms") };
        let _ = writeln!(out, "<path d='M{LEFT} {at:.1}H{}' stroke='#ddd'/>", WIDTH - RIGHT);
        let _ =
            writeln!(out, "<text x='{}' y='{:.1}' text-anchor='end'>{label}</text>", LEFT - 6.0, at + 4.0);
    }
    for percent in [0, 50, 100] {
        let at = share(f64::from(percent) / 100.0) + 4.0;
        let _ = writeln!(out, "<text x='{}' y='{at:.1}' fill='#888'>{percent} %</text>", WIDTH - RIGHT + 6.0);
    }
    for second in 0..=seconds as u32 {
        let at = LEFT + f64::from(second) / seconds * (WIDTH - LEFT - RIGHT);
        let _ =
            writeln!(out, "<text x='{at:.1}' y='{}' text-anchor='middle'>{second} s</text>", HEIGHT - 20.0);
    }
    let mut line = |name: &str, colour: &str, row: f64, y: &dyn Fn(&Step) -> f64| {
        let points: Vec<_> = steps.iter().map(|step| format!("{:.1},{:.1}", x(step), y(step))).collect();
        let points = points.join(" ");
        let _ =
            writeln!(out, "<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>");
        let _ = writeln!(
            out,
            "<text x='{}' y='{}' fill='{colour}'>{name}</text>",
            LEFT + 110.0 * row,
            HEIGHT - 4.0
        );
    };
    line("log in use", "#888", 0.0, &|step| share(step.log_used));
    line("longest", "#e0a030", 1.0, &|step| latency(step.longest_ms));
    line("99 %", "#c03030", 2.0, &|step| latency(step.p99_ms));
    line("median", "#2060c0", 3.0, &|step| latency(step.median_ms));
    out.push_str("</svg>\n");
    out
}

/// One line for each window.
pub fn csv(filling: &Filling) -> String {
    let mut out = String::from("start_ms,iops,median_ms,p99_ms,longest_ms,log_used\n");
    for Step { start_ms, iops, median_ms, p99_ms, longest_ms, log_used } in &filling.steps {
        let _ =
            writeln!(out, "{start_ms:.0},{iops:.0},{median_ms:.3},{p99_ms:.3},{longest_ms:.3},{log_used:.3}");
    }
    out
}
