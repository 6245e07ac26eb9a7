//! `torch.optim.Adafactor`: an Adam without momentum, whose averages of squares are kept by row and
//! by column.

use fsdp_layout::{DType, PlainValue};

use super::error::{AlgorithmError, check_at_least_zero, check_range};
use super::group::{Reader, make_group, optional_bool, tuple_items};
use super::state::{StateEntries, StateEntry};

/// Hyperparameters of Adafactor; the defaults are torch's.
///
/// For a parameter of two or more dimensions it keeps one average for each row and one for each
/// column (`row_var`, `col_var`), whole on every rank. For one of one dimension it keeps
/// `variance`, sharded like the parameter. Its optimizer must see the model's own parameters
/// (`use_orig_params`).
#[derive(Debug, Clone, PartialEq)]
pub struct AdafactorOptions {
    /// The largest relative learning rate; 0.01 by default.
    pub lr: f64,
    /// The power of the step in the weight of new squares; -0.8 by default.
    pub beta2_decay: f64,
    /// Two lower bounds: of the root of an average of squares, and of the root mean square of a
    /// parameter; (`None`, 1e-3) by default. `None` stands for the distance from 1 to the next
    /// larger number of the parameter's dtype.
    pub eps: (Option<f64>, f64),
    /// The clipping threshold: an update whose root mean square is larger is scaled down to it; 1
    /// by default.
    pub d: f64,
    /// The weight decay: the parameter shrinks by `lr` times this at each step; 0 by default.
    pub weight_decay: f64,
    /// A switch of torch's implementations. It is saved and loaded, and has no effect.
    pub foreach: Option<bool>,
    /// `true` to maximize the objective instead of minimizing it; `false` by default.
    pub maximize: bool,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            beta2_decay: -0.8,
            eps: (None, 1e-3),
            d: 1.0,
            weight_decay: 0.0,
            foreach: None,
            maximize: false,
        }
    }
}

/// Returns torch's keys of the averages of a parameter of this shape, each with its shape. Each
/// matrix of the parameter has a mean for each row (`row_var`) and for each column (`col_var`). A
/// parameter of fewer than two dimensions has an average for each element (`variance`).
pub(crate) fn average_shapes(shape: &[usize]) -> Vec<(&'static str, Vec<usize>)> {
    match shape {
        [batch @ .., rows, columns] => vec![
            ("row_var", [batch, &[*rows, 1]].concat()),
            ("col_var", [batch, &[1, *columns]].concat()),
        ],
        _ => vec![("variance", shape.to_vec())],
    }
}

/// Moves the running averages towards the squares of the gradient `grad` of a parameter of this
/// `shape`, by `weight` of the way.
fn update_averages(averages: &mut [Vec<f64>], grad: &[f64], shape: &[usize], weight: f64) {
    match (averages, shape) {
        ([rows, columns], [.., height, width]) if height * width > 0 => {
            // A parameter of more dimensions is a row of matrices, each with averages of its own.
            for (index, matrix) in grad.chunks_exact(height * width).enumerate() {
                let mut column_sums = vec![0.0; *width];
                for (row, values) in matrix.chunks_exact(*width).enumerate() {
                    let sum: f64 = values.iter().map(|g| g * g).sum();
                    column_sums
                        .iter_mut()
                        .zip(values)
                        .for_each(|(sum, g)| *sum += g * g);
                    move_towards(&mut rows[index * height + row], sum / *width as f64, weight);
                }
                for (column, sum) in column_sums.into_iter().enumerate() {
                    move_towards(
                        &mut columns[index * width + column],
                        sum / *height as f64,
                        weight,
                    );
                }
            }
        }
        ([values], _) => {
            values
                .iter_mut()
                .zip(grad)
                .for_each(|(value, g)| move_towards(value, g * g, weight));
        }
        _ => {}
    }
}

/// Returns the average of squares of each element.
fn estimate_squares(averages: &[Vec<f64>], shape: &[usize], eps: f64) -> Vec<f64> {
    match (averages, shape) {
        ([rows, columns], [.., height, width]) if height * width > 0 => {
            let matrices = rows.chunks_exact(*height).zip(columns.chunks_exact(*width));
            let estimate = matrices.flat_map(|(rows, columns)| {
                let mean = at_least(rows.iter().sum::<f64>() / rows.len() as f64, eps);
                rows.iter()
                    .flat_map(move |row| columns.iter().map(move |column| row * column / mean))
            });
            estimate.collect()
        }
        ([values], _) => values.clone(),
        _ => Vec::new(),
    }
}

/// Moves a value towards `end` by a weight: torch's `lerp_`.
fn move_towards(value: &mut f64, end: f64, weight: f64) {
    *value += weight * (end - *value);
}

/// Returns the larger of two numbers, or NaN if the first is NaN, as torch's `clamp` does.
fn at_least(value: f64, least: f64) -> f64 {
    if value < least { least } else { value }
}

fn root_mean_square(values: &[f64]) -> f64 {
    (values.iter().map(|x| x * x).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// One update of a whole parameter.
pub(crate) struct WholeUpdate<'a> {
    /// The number of the update, from 1.
    pub(crate) step: f32,
    /// The dtype that the parameter is stored in.
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [usize],
    pub(crate) grad: &'a [f64],
}

impl AdafactorOptions {
    /// Checks the hyperparameters, and refuses those that are out of range.
    pub(super) fn validate(&self, algorithm: &'static str) -> Result<(), AlgorithmError> {
        let eps1 = self.eps.0.unwrap_or(0.0);
        let values = [
            ("lr", self.lr),
            ("eps[0]", eps1),
            ("eps[1]", self.eps.1),
            ("weight_decay", self.weight_decay),
        ];
        check_at_least_zero(algorithm, &values)?;
        check_range(
            algorithm,
            "beta2_decay",
            self.beta2_decay,
            self.beta2_decay.is_finite() && self.beta2_decay <= 0.0,
            "finite and at most 0",
        )?;
        check_range(
            algorithm,
            "d",
            self.d,
            self.d.is_finite() && self.d >= 1.0,
            "finite and at least 1",
        )
    }

    /// Returns the hyperparameters under torch's keys, in torch's order and types.
    pub(super) fn to_group(&self) -> Vec<(String, PlainValue)> {
        let eps1 = self.eps.0.map_or(PlainValue::None, PlainValue::from);
        make_group([
            ("lr", self.lr.into()),
            ("beta2_decay", self.beta2_decay.into()),
            ("eps", PlainValue::Tuple(vec![eps1, self.eps.1.into()])),
            ("d", self.d.into()),
            ("weight_decay", self.weight_decay.into()),
            ("foreach", optional_bool(self.foreach)),
            ("maximize", self.maximize.into()),
        ])
    }

    /// Returns these options with the hyperparameters that a group has in their place.
    pub(super) fn read(&self, reader: &mut Reader<'_>) -> Result<Self, AlgorithmError> {
        Ok(Self {
            lr: reader.read_float("lr", self.lr)?,
            beta2_decay: reader.read_float("beta2_decay", self.beta2_decay)?,
            eps: reader.read(
                "eps",
                self.eps,
                "a tuple of None or a float, and a float",
                read_eps,
            )?,
            d: reader.read_float("d", self.d)?,
            weight_decay: reader.read_float("weight_decay", self.weight_decay)?,
            foreach: reader.read_optional_switch("foreach", None)?,
            maximize: reader.read_bool("maximize", self.maximize)?,
        })
    }

    /// Returns the entries that all parameters have; the averages depend on the shape, and are
    /// whole on every rank.
    pub(super) const fn state_entries(&self) -> StateEntries {
        [Some(StateEntry::STEP), None, None, None]
    }

    /// Returns the first `eps` for parameters of a dtype.
    pub(crate) fn first_eps(&self, dtype: DType) -> f64 {
        // torch takes the distance from 1 to the next number of the parameter's dtype.
        self.eps.0.unwrap_or(match dtype {
            DType::F64 => f64::EPSILON,
            DType::BF16 => half::bf16::EPSILON.to_f64(),
            DType::F16 => half::f16::EPSILON.to_f64(),
            _ => f64::from(f32::EPSILON),
        })
    }

    /// Returns the rate of a step, relative to the size of the parameter.
    pub(crate) fn rate(&self, step: f64) -> f64 {
        self.lr.min(step.powf(-0.5))
    }

    /// Updates a whole parameter and its averages once.
    pub(crate) fn update(
        &self,
        update: &WholeUpdate<'_>,
        param: &mut [f64],
        averages: &mut [Vec<f64>],
    ) {
        let step = f64::from(update.step);
        let eps1 = self.first_eps(update.dtype);
        // The rate falls with the steps, and follows the size of the parameter.
        let alpha = at_least(root_mean_square(param), self.eps.1) * self.rate(step);
        if self.weight_decay != 0.0 {
            param
                .iter_mut()
                .for_each(|p| *p *= 1.0 - self.lr * self.weight_decay);
        }
        update_averages(
            averages,
            update.grad,
            update.shape,
            step.powf(self.beta2_decay),
        );
        let sign = if self.maximize { -1.0 } else { 1.0 };
        let update: Vec<f64> = estimate_squares(averages, update.shape, eps1)
            .into_iter()
            .zip(update.grad)
            .map(|(v, g)| sign * g / at_least(v, eps1 * eps1).sqrt())
            .collect();
        // An update that is larger than `d` on the average is scaled down.
        let factor = alpha / at_least(root_mean_square(&update) / self.d, 1.0);
        param
            .iter_mut()
            .zip(update)
            .for_each(|(p, u)| *p -= factor * u);
    }
}

/// Reads torch's pair `eps`, whose first element may be `None`. Returns `None` for anything else.
fn read_eps(value: &PlainValue) -> Option<(Option<f64>, f64)> {
    let [first, second] = tuple_items(value)?;
    let first = match first {
        PlainValue::None => None,
        first => Some(first.as_float()?),
    };
    Some((first, second.as_float()?))
}
