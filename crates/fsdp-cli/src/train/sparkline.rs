//! A curve in a line of text.

use std::fmt;

/// The characters that a curve is drawn with, the lowest first.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The most characters of a curve.
const WIDTH: usize = 16;

/// A curve of all values so far. Each character stands for the mean of equally many of them.
#[derive(Debug)]
pub(super) struct Sparkline {
    means: Vec<f64>,
    /// The number of values that each of `means` is of.
    stride: usize,
    /// The values that came after those: fewer than `stride`.
    waiting: Vec<f64>,
}

impl Default for Sparkline {
    fn default() -> Self {
        Sparkline {
            means: Vec::new(),
            stride: 1,
            waiting: Vec::new(),
        }
    }
}

impl Sparkline {
    /// Adds a value. One that is not finite is left out.
    pub(super) fn push(&mut self, value: f64) {
        if !value.is_finite() {
            return;
        }
        self.waiting.push(value);
        if self.waiting.len() < self.stride {
            return;
        }
        self.means.push(mean(&self.waiting));
        self.waiting.clear();
        if self.means.len() == 2 * WIDTH {
            // There is no room for more, so join every two means to one.
            self.means = self.means.chunks(2).map(mean).collect();
            self.stride *= 2;
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl fmt::Display for Sparkline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<f64> = match self.means.len() {
            0..=WIDTH => self.means.clone(),
            length => self
                .means
                .chunks(length.div_ceil(WIDTH))
                .map(mean)
                .collect(),
        };
        let (least, most) = values
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), v| {
                (least.min(*v), most.max(*v))
            });
        for value in values {
            // If all values are equal, the curve is in the middle.
            let along = if most > least {
                (value - least) / (most - least)
            } else {
                0.5
            };
            let level = ((along * LEVELS.len() as f64) as usize).min(LEVELS.len() - 1);
            write!(f, "{}", LEVELS[level])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_shows_all_values_in_few_signs() {
        let mut line = Sparkline::default();
        assert_eq!(line.to_string(), "");
        line.push(1.0);
        assert_eq!(line.to_string(), "▅");
        for value in [0.5, 0.0, f64::NAN] {
            line.push(value);
        }
        assert_eq!(line.to_string(), "█▅▁");
        let mut line = Sparkline::default();
        (0..10_000).for_each(|step| line.push(-f64::from(step)));
        let shown = line.to_string();
        assert!((8..=16).contains(&shown.chars().count()), "{shown}");
        assert!(shown.starts_with('█') && shown.ends_with('▁'), "{shown}");
    }
}
