//! Dropout whose masks do not depend on how a batch is divided, and are the same when a forward is
//! computed again.

use candle_core::{DType, Device, Result, Tensor};

use crate::element::Element;
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Output, Runner};
use crate::operation::{Unary, apply, check_float, is_computed_here};
use crate::real::Real;
use crate::rows::map_rows;

const NAME: &str = "dropout";

/// The source of a dropout's masks: whether an element is dropped depends on the seed, the step,
/// the place in the model, the row's number in the global batch and the element's place in the row,
/// and on nothing else. So a batch that is cut over ranks or micro-batches gets the masks that it
/// would get as a whole, a run that is resumed continues with the masks that it would have had, and
/// a part of a model that is computed again in the backward drops the same elements again.
///
/// It is a value without state: pass it to the model's forward, and choose a different place
/// ([`Self::at`]) for each dropout.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_ops::{DropoutMasks, dropout};
/// let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
/// let whole = dropout(&x, 0.25, DropoutMasks::new(17, 250, 0).at("blocks.3.mlp"))?;
/// // The second of two ranks has the last two rows.
/// let masks = DropoutMasks::new(17, 250, 2).at("blocks.3.mlp");
/// let part = dropout(&x.narrow(0, 2, 2)?, 0.25, masks)?;
/// assert_eq!(part.to_vec2::<f32>()?, whole.narrow(0, 2, 2)?.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutMasks {
    key: u64,
    first_row: u64,
}

impl DropoutMasks {
    /// Makes the masks of one step of a run, for the part of its global batch that begins at row
    /// `first_row`; 0 for the whole batch.
    #[must_use]
    pub const fn new(seed: u64, step: u64, first_row: u64) -> Self {
        DropoutMasks {
            key: mix(mix(seed).wrapping_add(step)),
            first_row,
        }
    }

    /// Returns the masks of a place in the model: a name, or several, one inside the other.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let key = place
            .bytes()
            .fold(self.key, |key, byte| mix(key ^ u64::from(byte)));
        // With the length, `a` inside `b` is another place than `ba`.
        DropoutMasks {
            key: mix(key ^ place.len() as u64),
            ..self
        }
    }

    /// Returns the random number of a row, from which the random bits of its elements are computed.
    const fn row_key(self, row: usize) -> u64 {
        mix(self.key ^ mix(self.first_row.wrapping_add(row as u64)))
    }
}

/// Returns a number whose bits all depend on all bits of `x`: the output function of SplitMix64.
const fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The increment of SplitMix64: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sets each element of `x` to 0 with probability `p`, and multiplies the others by `1 / (1 - p)`:
/// torch's `dropout` with `training=True`. The first dimension of `x` is the rows of the batch.
///
/// # Errors
/// A probability outside of 0 to 1; a tensor without dimensions; a dtype that is not a float.
pub fn dropout(x: &Tensor, p: f64, masks: DropoutMasks) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&p) {
        candle_core::bail!("{NAME}: the probability {p} is not between 0 and 1");
    }
    let Some(&rows) = x.dims().first() else {
        candle_core::bail!("{NAME}: a tensor without dimensions has no rows")
    };
    // Neither the copy below nor candle's operations check the dtype.
    check_float(x.dtype(), NAME)?;
    if p == 0.0 {
        return Ok(x.clone());
    }
    let op = Dropout {
        p,
        masks,
        // A batch of no rows has no elements.
        width: x.elem_count() / rows.max(1),
    };
    if !is_computed_here(x)? {
        return with_candle_ops(x, op);
    }
    apply(op, [&x.contiguous()?])
}

/// Computes the mask on the host, and applies it with candle's operations.
fn with_candle_ops(x: &Tensor, op: Dropout) -> Result<Tensor> {
    let ones = Tensor::ones(x.dims(), DType::F32, &Device::Cpu)?;
    x * apply(op, [&ones])?
        .to_device(x.device())?
        .to_dtype(x.dtype())?
}

struct Dropout {
    p: f64,
    masks: DropoutMasks,
    /// The number of elements of a row.
    width: usize,
}

impl Unary for Dropout {
    const NAME: &'static str = NAME;

    /// Drops elements and scales the others.
    fn forward<T: Element>(&self, x: &[T]) -> Result<Vec<T>> {
        // With a probability of 1 all elements are dropped, and there is nothing to scale.
        let scale = if self.p < 1.0 {
            T::Real::nearest(1.0 / (1.0 - self.p))
        } else {
            T::Real::ZERO
        };
        // An element stays if the upper 32 of its random bits, as a number, are at least this.
        let threshold = (self.p * 4_294_967_296.0) as u64;
        Ok(map_rows(
            [x],
            self.width,
            #[inline(always)]
            |row, [values]| {
                let key = self.masks.row_key(row);
                // Each element's bits are computed from its index alone, not from those before it,
                // so that several are computed at once.
                for (index, value) in values.iter_mut().enumerate() {
                    let bits = mix(key.wrapping_add((index as u64).wrapping_mul(GOLDEN))) >> 32;
                    *value = if bits >= threshold {
                        *value * scale
                    } else {
                        T::Real::ZERO
                    };
                }
            },
        ))
    }

    /// Drops the same gradients as elements, because the mask is the same.
    fn backward<T: Element>(&self, _: &Tensor, _: &Tensor, grads: &[T]) -> Result<Vec<T>> {
        self.forward(grads)
    }

    fn launch_forward(&self, runner: &Runner, x: &Operand<'_>) -> Result<Output> {
        let y = runner.allocate(x.dtype, x.len())?;
        runner.launch(
            Kernel(Module::Dropout, "dropout", Some(x.dtype)),
            Grid::elements(x.len(), x.dtype),
            &[
                Argument::Read(x),
                Argument::Write(&y),
                Argument::Long(x.len().checked_div(self.width).unwrap_or(0)),
                Argument::Long(self.width),
                Argument::Double(self.p),
                Argument::Word(self.masks.key),
                Argument::Word(self.masks.first_row),
            ],
        )?;
        Ok(y)
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        _: &Operand<'_>,
        _: &Operand<'_>,
        grad: &Operand<'_>,
    ) -> Result<Output> {
        self.launch_forward(runner, grad)
    }
}
