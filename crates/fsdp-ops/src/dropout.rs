//! Dropout whose masks do not depend on how a batch is divided, and are the same when a forward is
//! computed again.

use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, WithDType as _,
};

use crate::element::{Element, with_element};
use crate::real::Real;
use crate::rows::map_rows;
use crate::values::{Values, contiguous, elements};

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
/// let masks = DropoutMasks::new(17, 250).at("blocks.3.mlp");
/// let whole = dropout(&x, 0.25, masks)?;
/// // The second of two ranks has the last two rows.
/// let part = dropout(&x.narrow(0, 2, 2)?, 0.25, masks.from_row(2))?;
/// assert_eq!(part.to_vec2::<f32>()?, whole.narrow(0, 2, 2)?.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutMasks {
    key: u64,
    first_row: u64,
}

impl DropoutMasks {
    /// Makes the masks of one step of a run.
    #[must_use]
    pub const fn new(seed: u64, step: u64) -> Self {
        DropoutMasks {
            key: mixed(mixed(seed).wrapping_add(step)),
            first_row: 0,
        }
    }

    /// Returns the masks of a place in the model: a name, or several, one inside the other.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let key = place
            .bytes()
            .fold(self.key, |key, byte| mixed(key ^ u64::from(byte)));
        DropoutMasks {
            key: mixed(key ^ place.len() as u64),
            ..self
        }
    }

    /// Returns the masks for a part of the global batch that begins at row `first_row`.
    #[must_use]
    pub const fn from_row(self, first_row: u64) -> Self {
        DropoutMasks { first_row, ..self }
    }

    /// Returns the random number of a row, from which the random bits of its elements are computed.
    const fn row_key(self, row: usize) -> u64 {
        mixed(self.key ^ mixed(self.first_row.wrapping_add(row as u64)))
    }
}

/// Returns a number whose bits all depend on all bits of `x`: the output function of SplitMix64.
const fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(GOLDEN);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The step of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sets each element to 0 with probability `p`, and multiplies the others by `1 / (1 - p)`: torch's
/// `dropout` with `training=True`. The first dimension of `x` is the rows of the batch.
///
/// # Errors
/// A probability outside of 0 to 1; a tensor without dimensions; a dtype that is not a float.
pub fn dropout(x: &Tensor, p: f64, masks: DropoutMasks) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&p) {
        candle_core::bail!("dropout: the probability {p} is not between 0 and 1");
    }
    let Some(&rows) = x.dims().first() else {
        candle_core::bail!("dropout: a tensor without dimensions has no rows")
    };
    if p == 0.0 {
        return Ok(x.clone());
    }
    let op = Dropout {
        p,
        masks,
        width: x.elem_count().checked_div(rows).unwrap_or(0),
    };
    if x.device().is_cpu() {
        return x.contiguous()?.apply_op1(op);
    }
    // On other devices the mask is computed on the host, and applied with candle's operations.
    let ones = Tensor::ones(x.dims(), DType::F32, &Device::Cpu)?;
    x * ones
        .apply_op1(op)?
        .to_device(x.device())?
        .to_dtype(x.dtype())?
}

#[derive(Clone, Copy)]
struct Dropout {
    p: f64,
    masks: DropoutMasks,
    /// The number of elements of a row.
    width: usize,
}

impl Dropout {
    /// Drops elements and scales the others. The backward does the same to gradients, because the
    /// mask is the same.
    fn apply<T: Element>(&self, x: &[T]) -> Vec<T> {
        let scale = if self.p < 1.0 {
            T::Real::of(1.0 / (1.0 - self.p))
        } else {
            T::Real::ZERO
        };
        // An element is kept if the upper 32 of its random bits, as a number, are at least this.
        let threshold = (self.p * 4_294_967_296.0) as u64;
        map_rows(
            [x],
            self.width,
            #[inline(always)]
            |row, [values]| {
                let key = self.masks.row_key(row);
                for (index, value) in values.iter_mut().enumerate() {
                    let bits = mixed(key.wrapping_add((index as u64).wrapping_mul(GOLDEN))) >> 32;
                    *value = if bits >= threshold {
                        *value * scale
                    } else {
                        T::Real::ZERO
                    };
                }
            },
        )
    }
}

impl CustomOp1 for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let range = contiguous(layout, self.name())?;
        with_element!(x.dtype(), self.name(), T => {
            let y = self.apply(elements::<T>(x, range, self.name())?);
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let grads = Values::of(&grad, self.name())?;
        with_element!(x.dtype(), self.name(), T => {
            crate::element::tensor(self.apply(grads.slice::<T>()?), x.dims()).map(Some)
        })
    }
}
