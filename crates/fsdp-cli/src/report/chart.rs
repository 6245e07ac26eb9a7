//! A curve as SVG.

use std::fmt::Write as _;

use super::series::{Point, Series};
use crate::markup::{escape, svg};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 210.0;
/// The space around the axes.
const LEFT: f64 = 86.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 30.0;
/// The lines across, the axes included.
const LINES: u32 = 4;

/// Returns a curve as a picture, or nothing if it has no points. `show` formats a value.
pub(super) fn chart(title: &str, series: &Series, show: impl Fn(f64) -> String) -> Option<String> {
    let points = series.points();
    // Steps go back where somebody has joined the metrics of two runs.
    let steps = || points.iter().map(|point| point.step);
    let (first, last) = (steps().min()?, steps().max()?);
    let least = points
        .iter()
        .map(|point| point.least)
        .fold(f64::INFINITY, f64::min);
    let most = points
        .iter()
        .map(|point| point.most)
        .fold(f64::NEG_INFINITY, f64::max);
    // A flat curve runs through the middle.
    let margin = match most - least {
        0.0 if most == 0.0 => 1.0,
        0.0 => most.abs() / 2.0,
        span => span * 0.05,
    };
    let (low, high) = (least - margin, most + margin);
    let x = |point: &Point| {
        let along = (point.step - first) as f64 / (last - first).max(1) as f64;
        LEFT + along * (WIDTH - LEFT - RIGHT)
    };
    let y = |value: f64| HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    let mut drawn = String::new();
    // Writing to a string cannot fail.
    for line in 0..LINES {
        let value = low + (high - low) * f64::from(line) / f64::from(LINES - 1);
        let at = y(value);
        let _ = writeln!(
            drawn,
            "<line class=\"line\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"soft\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            escape(&show(value))
        );
    }
    let above = points
        .iter()
        .map(|point| format!("{:.1},{:.1}", x(point), y(point.most)));
    let below = points
        .iter()
        .rev()
        .map(|point| format!("{:.1},{:.1}", x(point), y(point.least)));
    let band: Vec<String> = above.chain(below).collect();
    let line: Vec<String> = points
        .iter()
        .map(|point| format!("{:.1},{:.1}", x(point), y(point.mean())))
        .collect();
    let _ = write!(
        drawn,
        "<polygon class=\"band\" points=\"{}\"/>\n<polyline class=\"one\" points=\"{}\"/>\n\
         <text class=\"soft\" x=\"{LEFT}\" y=\"{bottom}\">step {first}</text>\
         <text class=\"soft\" x=\"{}\" y=\"{bottom}\" text-anchor=\"end\">step {last}</text>\n",
        band.join(" "),
        line.join(" "),
        WIDTH - RIGHT,
        bottom = HEIGHT - 8.0
    );
    Some(svg(title, WIDTH, HEIGHT, &drawn))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_go_back_stay_inside_of_the_picture() {
        let mut series = Series::default();
        for step in [500, 510, 3, 4] {
            series.push(step, Some(step as f64));
        }
        let drawn = chart("loss", &series, |value| value.to_string()).unwrap();
        assert!(
            !drawn.contains("-inf") && !drawn.contains("NaN") && !drawn.contains("e1"),
            "{drawn}"
        );
    }
}
