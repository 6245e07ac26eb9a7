//! A curve over steps, in bounded memory however many steps there are.

/// A point of a curve: the values of a range of steps, as their smallest, their largest and their
/// mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// The first step.
    pub(super) step: u64,
    pub(super) min: f64,
    pub(super) max: f64,
    sum: f64,
    count: u64,
}

/// A curve over steps.
#[derive(Debug)]
pub(crate) struct Series {
    points: Vec<Point>,
    /// The number of values in a point. The last point may have fewer.
    stride: u64,
    /// The most points that are kept.
    capacity: usize,
}

impl Point {
    /// Returns the mean of the values.
    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// Returns the point of the values of both, where `later` has the higher steps.
    fn join(&self, later: &Point) -> Point {
        Point {
            step: self.step,
            min: self.min.min(later.min),
            max: self.max.max(later.max),
            sum: self.sum + later.sum,
            count: self.count + later.count,
        }
    }
}

impl Default for Series {
    fn default() -> Self {
        Series::with_capacity(1024)
    }
}

impl Series {
    /// Creates a curve that keeps at most `capacity` points.
    pub(crate) const fn with_capacity(capacity: usize) -> Self {
        Series {
            points: Vec::new(),
            stride: 1,
            capacity,
        }
    }

    /// Adds the value of a step. A value that is not finite is left out, and so is a step without a
    /// value.
    pub(crate) fn push(&mut self, step: u64, value: Option<f64>) {
        let Some(value) = value.filter(|value| value.is_finite()) else {
            return;
        };
        let point = Point {
            step,
            min: value,
            max: value,
            sum: value,
            count: 1,
        };
        match self.points.last_mut() {
            Some(last_point) if last_point.count < self.stride => {
                *last_point = last_point.join(&point)
            }
            _ => self.points.push(point),
        }
        if self.points.len() > self.capacity {
            // Join pairs of points, and from now on collect twice as many values in each point.
            let pairs = self.points.chunks(2).map(|pair| match pair {
                [first, second] => first.join(second),
                _ => pair[0],
            });
            self.points = pairs.collect();
            self.stride *= 2;
        }
    }

    pub(super) fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns the points without the last one, if it has fewer values than the others.
    #[cfg(feature = "train")]
    pub(crate) fn whole_points(&self) -> impl Iterator<Item = &Point> {
        self.points
            .iter()
            .filter(|point| point.count == self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_shape_and_its_extremes() {
        let mut series = Series::default();
        for step in 0..100_000u64 {
            let spike = if step == 777 { 50.0 } else { 0.0 };
            series.push(step, Some(step as f64 / 1e5 + spike));
        }
        series.push(100_000, Some(f64::NAN));
        series.push(100_000, None);
        let points = series.points();
        let capacity = series.capacity;
        assert!(points.len() <= capacity && points.len() > capacity / 4);
        assert!(points.iter().any(|point| point.max > 50.0));
        assert!((points.last().unwrap().mean() - 1.0).abs() < 0.01);
        assert!(points.windows(2).all(|pair| pair[0].step < pair[1].step));
    }

    #[test]
    fn joined_points_count_each_value_once() {
        let mut series = Series::default();
        let capacity = series.capacity as u64;
        (0..=capacity).for_each(|step| series.push(step, Some(1.0)));
        let count: u64 = series.points().iter().map(|point| point.count).sum();
        assert_eq!(count, capacity + 1);
        assert!(series.points().iter().all(|point| point.mean() == 1.0));
    }
}
