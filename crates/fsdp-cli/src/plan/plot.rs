//! A picture of the effective time against the interval between saves.

use super::interval::{JobTimes, best_interval, effective_fraction};
use super::report::{PlanReport, duration_text};
use crate::svg::{Area, Picture};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const CHART: Area = Area {
    x: 70.0,
    y: 50.0,
    width: 630.0,
    height: 310.0,
};
/// The intervals that are shown: from the best divided by this to the best multiplied by it.
const SPAN: f64 = 32.0;
const POINTS: u32 = 200;

/// Returns the picture of a plan.
pub(super) fn plan_picture(report: &PlanReport<'_>) -> String {
    let times = &report.times;
    // An interval of 0, where a save takes no time, has no place on a logarithmic axis.
    let best = best_interval(times).max(1e-3);
    let mut picture = Picture::default();
    let page_size = [("width", WIDTH), ("height", HEIGHT)];
    picture.shape("rect", &page_size, "fill=\"white\"", "");
    let heading = format!("{}: effective time by interval", report.title());
    picture.text((CHART.x, 28.0), "font-size=\"16\"", &heading, "");

    // The vertical axis is the effective time, from 0 to 100 %.
    for percent in [0u32, 20, 40, 60, 80, 100] {
        let y = CHART.y_at(f64::from(percent) / 100.0);
        picture.line_across(&CHART, y, "stroke=\"#ddd\"");
        let label = format!("{percent} %");
        picture.text((CHART.x - 8.0, y + 4.0), "text-anchor=\"end\"", &label, "");
    }
    // The horizontal axis is the interval, with the best one in the middle.
    for power in [-5i32, -3, -1, 0, 1, 3, 5] {
        let interval = best * 2f64.powi(power);
        let position = (interval_x(interval, best), CHART.y_at(0.0) + 20.0);
        picture.text(
            position,
            "text-anchor=\"middle\"",
            &duration_text(interval),
            "",
        );
    }
    let curve = (0..=POINTS).map(|point| {
        let fraction = f64::from(point) / f64::from(POINTS);
        curve_point(best / SPAN * (SPAN * SPAN).powf(fraction), best, times)
    });
    picture.curve(
        "polyline",
        curve,
        "fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"2\"",
    );
    let (x, y) = curve_point(best, best, times);
    let dot = [("cx", x), ("cy", y), ("r", 4.0)];
    picture.shape("circle", &dot, "fill=\"#c03030\"", "");
    let label = format!(
        "{}: {:.1} %",
        duration_text(best),
        100.0 * effective_fraction(times, best)
    );
    picture.text((x, y - 12.0), "text-anchor=\"middle\"", &label, "");
    let axis_position = (CHART.x_at(0.5), HEIGHT - 12.0);
    let axis = "training time between saves";
    picture.text(axis_position, "text-anchor=\"middle\"", axis, "");
    let attributes = "font-family=\"sans-serif\" font-size=\"13\"";
    picture.document(WIDTH, HEIGHT, attributes, "\n")
}

/// Returns the position of an interval on the logarithmic horizontal axis.
fn interval_x(interval: f64, best: f64) -> f64 {
    CHART.x_at((interval / best * SPAN).ln() / (SPAN * SPAN).ln())
}

/// Returns the point of the curve at an interval.
fn curve_point(interval: f64, best: f64, times: &JobTimes) -> (f64, f64) {
    let fraction = effective_fraction(times, interval);
    (interval_x(interval, best), CHART.y_at(fraction))
}
