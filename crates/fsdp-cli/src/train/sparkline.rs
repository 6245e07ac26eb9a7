//! A curve in a line of text.

use crate::report::series::Series;

/// The characters that a curve is drawn with, the lowest first.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The most characters of a curve.
const WIDTH: usize = 16;

/// Returns an empty curve to be drawn by [`sparkline`].
pub(super) fn empty_curve() -> Series {
    // With one more point, it joins pairs of points and has `WIDTH` of them.
    Series::with_capacity(2 * WIDTH - 1)
}

/// Draws a curve of all values so far. Each character stands for the mean of equally many of them,
/// so values of which there are too few for a character are not shown yet.
pub(super) fn sparkline(curve: &Series) -> String {
    let means: Vec<f64> = curve.whole_points().map(|point| point.mean()).collect();
    let column_means: Vec<f64> = means
        .chunks(means.len().div_ceil(WIDTH).max(1))
        .map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64)
        .collect();
    let min = column_means.iter().copied().fold(f64::INFINITY, f64::min);
    let max = column_means
        .iter()
        .copied()
        .fold(f64::NEG_INFINITY, f64::max);
    let mut line = String::new();
    for mean in column_means {
        // If all values are equal, the curve is in the middle.
        let height = if max > min {
            (mean - min) / (max - min)
        } else {
            0.5
        };
        let level = (height * LEVELS.len() as f64) as usize;
        line.push(LEVELS[level.min(LEVELS.len() - 1)]);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_shows_all_values_in_few_signs() {
        let mut curve = empty_curve();
        assert_eq!(sparkline(&curve), "");
        curve.push(0, Some(1.0));
        assert_eq!(sparkline(&curve), "▅");
        for value in [0.5, 0.0, f64::NAN] {
            curve.push(0, Some(value));
        }
        assert_eq!(sparkline(&curve), "█▅▁");
        let mut curve = empty_curve();
        (0..10_000).for_each(|step| curve.push(step, Some(-(step as f64))));
        let shown = sparkline(&curve);
        assert!((8..=16).contains(&shown.chars().count()), "{shown}");
        assert!(shown.starts_with('█') && shown.ends_with('▁'), "{shown}");
    }
}
