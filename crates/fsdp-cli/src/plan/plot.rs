//! A picture of the effective time against the interval between saves, as SVG.

use std::fmt::Write as _;

use super::interval::{best, effective};
use super::report::{Report, duration};
use crate::markup::escape;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
/// The space around the axes.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;
/// The intervals that are shown: from the best divided by this to the best multiplied by it.
const SPAN: f64 = 32.0;
const POINTS: u32 = 200;

/// Returns the picture of a plan.
pub(super) fn svg(report: &Report) -> String {
    let job = report.job();
    // An interval of 0, where a save takes no time, has no place on a logarithmic axis.
    let best = best(&job).max(1e-3);
    let top = effective(&job, best);
    let x = |interval: f64| {
        let along = (interval / best * SPAN).ln() / (SPAN * SPAN).ln();
        LEFT + along * (WIDTH - LEFT - RIGHT)
    };
    let y = |effective: f64| HEIGHT - BOTTOM - effective * (HEIGHT - TOP - BOTTOM);

    let mut svg = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"28\" font-size=\"16\">{}: effective time by interval</text>\n",
        escape(&report.title())
    );
    for percent in [0u32, 20, 40, 60, 80, 100] {
        let at = y(f64::from(percent) / 100.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{percent} %</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            at + 4.0
        );
    }
    for power in [-5i32, -3, -1, 0, 1, 3, 5] {
        let interval = best * 2f64.powi(power);
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x(interval),
            HEIGHT - BOTTOM + 20.0,
            duration(interval)
        );
    }
    let points: Vec<String> = (0..=POINTS)
        .map(|point| {
            let interval = best / SPAN * (SPAN * SPAN).powf(f64::from(point) / f64::from(POINTS));
            format!("{:.1},{:.1}", x(interval), y(effective(&job, interval)))
        })
        .collect();
    let _ = write!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"2\"/>\n\
         <circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"#c03030\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}: {:.1} %</text>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">training time between saves</text>\n</svg>\n",
        points.join(" "),
        x(best),
        y(top),
        x(best),
        y(top) - 12.0,
        duration(best),
        100.0 * top,
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 12.0
    );
    svg
}
