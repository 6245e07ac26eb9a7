//! A curve over the steps of a run, as a picture.

use super::series::{Point, Series};
use crate::svg::{Area, Picture};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 210.0;
const CHART: Area = Area {
    x: 86.0,
    y: 12.0,
    width: 622.0,
    height: 168.0,
};
/// The lines across, the axes included.
const LINES: u32 = 4;

/// Returns a curve as a picture, or nothing if it has no points. `show` formats a value.
pub(super) fn chart(title: &str, series: &Series, show: impl Fn(f64) -> String) -> Option<String> {
    let points = series.points();
    // Steps go back where somebody has joined the metrics of two runs, so the first point need not
    // have the lowest step.
    let first = points.iter().map(|point| point.step).min()?;
    let last = points.iter().map(|point| point.step).max()?;
    let min = points
        .iter()
        .map(|point| point.min)
        .fold(f64::INFINITY, f64::min);
    let max = points
        .iter()
        .map(|point| point.max)
        .fold(f64::NEG_INFINITY, f64::max);
    // A flat curve runs through the middle.
    let margin = match max - min {
        0.0 if max == 0.0 => 1.0,
        0.0 => max.abs() / 2.0,
        span => span * 0.05,
    };
    let low = min - margin;
    let span = max + margin - low;

    let mut picture = Picture::default();
    for line in 0..LINES {
        let up = f64::from(line) / f64::from(LINES - 1);
        let y = CHART.y_at(up);
        picture.line_across(&CHART, y, "class=\"line\"");
        let style = "class=\"soft\" text-anchor=\"end\"";
        let label = show(low + span * up);
        picture.text((CHART.x - 6.0, y + 4.0), style, &label, "");
    }
    let steps = (last - first).max(1) as f64;
    let values: [fn(&Point) -> f64; 3] = [|point| point.max, |point| point.min, Point::mean];
    let [above, below, means] = values.map(|value| {
        points.iter().map(move |point| {
            let along = (point.step - first) as f64 / steps;
            (CHART.x_at(along), CHART.y_at((value(point) - low) / span))
        })
    });
    // The band goes along the largest values, and back along the smallest.
    picture.curve("polygon", above.chain(below.rev()), "class=\"band\"");
    picture.curve("polyline", means, "class=\"one\"");
    let y = HEIGHT - 8.0;
    picture.text((CHART.x, y), "class=\"soft\"", &format!("step {first}"), "");
    let style = "class=\"soft\" text-anchor=\"end\"";
    picture.text((CHART.x_at(1.0), y), style, &format!("step {last}"), "");
    Some(picture.for_page(title, WIDTH, HEIGHT))
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
