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
const LINE_COUNT: u32 = 4;

/// Returns a curve as a picture, or `None` if it has no points. `format_value` formats a value.
pub(super) fn curve_picture(
    title: &str,
    series: &Series,
    format_value: impl Fn(f64) -> String,
) -> Option<String> {
    let points = series.points();
    // Steps go back where somebody has joined the metrics of two runs, so the first point need not
    // have the lowest step.
    let first_step = points.iter().map(|point| point.step).min()?;
    let last_step = points.iter().map(|point| point.step).max()?;
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
    let lowest = min - margin;
    let span = max + margin - lowest;

    let mut picture = Picture::default();
    for line in 0..LINE_COUNT {
        let fraction = f64::from(line) / f64::from(LINE_COUNT - 1);
        let y = CHART.y_at(fraction);
        picture.line_across(&CHART, y, "class=\"line\"");
        let style = "class=\"soft\" text-anchor=\"end\"";
        let label = format_value(lowest + span * fraction);
        picture.text((CHART.x - 6.0, y + 4.0), style, &label, "");
    }
    let steps = (last_step - first_step).max(1) as f64;
    let point_values: [fn(&Point) -> f64; 3] = [|point| point.max, |point| point.min, Point::mean];
    let [upper_edge, lower_edge, mean_curve] = point_values.map(|point_value| {
        points.iter().map(move |point| {
            let fraction = (point.step - first_step) as f64 / steps;
            (
                CHART.x_at(fraction),
                CHART.y_at((point_value(point) - lowest) / span),
            )
        })
    });
    // The band goes along the largest values, and back along the smallest.
    picture.curve(
        "polygon",
        upper_edge.chain(lower_edge.rev()),
        "class=\"band\"",
    );
    picture.curve("polyline", mean_curve, "class=\"one\"");
    let y = HEIGHT - 8.0;
    picture.text(
        (CHART.x, y),
        "class=\"soft\"",
        &format!("step {first_step}"),
        "",
    );
    let style = "class=\"soft\" text-anchor=\"end\"";
    picture.text(
        (CHART.x_at(1.0), y),
        style,
        &format!("step {last_step}"),
        "",
    );
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
        let drawn = curve_picture("loss", &series, |value| value.to_string()).unwrap();
        assert!(
            !drawn.contains("-inf") && !drawn.contains("NaN") && !drawn.contains("e1"),
            "{drawn}"
        );
    }
}
