//! Scaled dot-product attention.
//!
//! Heads are computed one by one, and of each head a few queries at a time, so that scores stay in
//! cache, are never kept for the backward, and are not computed where a causal mask hides them.

mod head;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, WithDType as _,
};

use self::head::{Heads, View, wide};
use crate::composed;
use crate::element::{Element, tensor, with_element};
use crate::parts::in_parts;
use crate::real::Real;
use crate::values::{contiguous, cpu};

/// Computes `softmax(query * key^T * scale) * value` for each batch and head: torch's
/// `scaled_dot_product_attention`.
///
/// `query` is `[batch, heads, rows, width]`, `key` `[batch, heads, columns, width]` and `value`
/// `[batch, heads, columns, width of values]`, in any memory layout. With `causal`, row `i` sees
/// columns 0 to `i` only. `scale` is usually `1 / sqrt(width)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::randn(0f32, 1., (2, 3, 5, 8), &Device::Cpu)?;
/// let y = fsdp_ops::scaled_dot_product_attention(&x, &x, &x, true, 8f64.powf(-0.5))?;
/// // The first position sees nothing but itself.
/// let first = |x: &Tensor| x.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>();
/// assert_eq!(first(&y)?, first(&x)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not fit each other; queries without keys; a dtype that is not a float.
pub fn scaled_dot_product_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    causal: bool,
    scale: f64,
) -> Result<Tensor> {
    let (batch, heads, _, width) = query.dims4()?;
    let columns = key.dim(2)?;
    for (other, expected) in [
        (key, [batch, heads, columns, width]),
        (value, [batch, heads, columns, value.dim(3)?]),
    ] {
        if other.dims() != expected {
            let (lhs, rhs) = (query.shape().clone(), other.shape().clone());
            return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: NAME }.bt());
        }
    }
    check_columns(query, columns)?;
    if !query.device().is_cpu() {
        return composed::attention(query, key, value, causal, scale);
    }
    query.apply_op3(key, value, Attention { causal, scale })
}

/// Computes attention of the output of one projection to queries, keys and values.
///
/// `qkv` is `[batch, time, 3 * heads * width]`: first all heads of the queries, then those of the
/// keys, then those of the values. The result is `[batch, time, heads * width]`, ready for the
/// projection after it: nothing is transposed, neither here nor in the backward.
///
/// `scale` is 1 / sqrt(width).
///
/// # Errors
/// A last dimension that is not three times a multiple of `heads`; a dtype that is not a float.
pub fn packed_attention(qkv: &Tensor, heads: usize, causal: bool) -> Result<Tensor> {
    let (batch, time, packed) = qkv.dims3()?;
    if heads == 0 || !packed.is_multiple_of(3 * heads) {
        candle_core::bail!(
            "{NAME}: {packed} values cannot be queries, keys and values of {heads} heads"
        );
    }
    let width = packed / 3 / heads;
    let scale = (width.max(1) as f64).powf(-0.5);
    if !qkv.device().is_cpu() {
        let parts = qkv
            .reshape((batch, time, 3, heads, width))?
            .permute((2, 0, 3, 1, 4))?;
        let [query, key, value] = [parts.get(0)?, parts.get(1)?, parts.get(2)?];
        let mixed = composed::attention(&query, &key, &value, causal, scale)?;
        return mixed.transpose(1, 2)?.reshape((batch, time, heads * width));
    }
    qkv.contiguous()?.apply_op1(PackedAttention {
        heads,
        causal,
        scale,
    })
}

const NAME: &str = "attention";

/// Refuses queries that have no key: their softmax would be a division by zero.
fn check_columns(query: &Tensor, columns: usize) -> Result<()> {
    if columns == 0 && query.elem_count() > 0 {
        candle_core::bail!("{NAME}: queries without keys");
    }
    Ok(())
}

struct Attention {
    causal: bool,
    scale: f64,
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        query: &CpuStorage,
        query_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
        value: &CpuStorage,
        value_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let (batch, heads, rows, _) = query_layout.shape().dims4()?;
        let shape = Shape::from((batch, heads, rows, value_layout.dims()[3]));
        with_element!(query.dtype(), NAME, T => {
            let [query, key, value] = [wide::<T>(query, NAME)?, wide::<T>(key, NAME)?, wide::<T>(value, NAME)?];
            let heads = Heads {
                query: View::new(&query, query_layout),
                key: View::new(&key, key_layout),
                value: View::new(&value, value_layout),
                causal: self.causal,
                scale: self.scale,
            };
            Ok((T::to_cpu_storage_owned(joined::<T>(&heads.forward()?)), shape))
        })
    }

    fn bwd(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (of_query, query_layout) = query.storage_and_layout();
        let (of_key, key_layout) = key.storage_and_layout();
        let (of_value, value_layout) = value.storage_and_layout();
        let (of_grad, grad_layout) = grad.storage_and_layout();
        with_element!(query.dtype(), NAME, T => {
            let (of_query, of_key) = (wide::<T>(cpu(&of_query, NAME)?, NAME)?, wide::<T>(cpu(&of_key, NAME)?, NAME)?);
            let (of_value, of_grad) = (wide::<T>(cpu(&of_value, NAME)?, NAME)?, wide::<T>(cpu(&of_grad, NAME)?, NAME)?);
            let heads = Heads {
                query: View::new(&of_query, query_layout),
                key: View::new(&of_key, key_layout),
                value: View::new(&of_value, value_layout),
                causal: self.causal,
                scale: self.scale,
            };
            let [dquery, dkey, dvalue] = heads.backward(&View::new(&of_grad, grad_layout))?;
            let gradient = |heads: &[Vec<_>], of: &Tensor| tensor(joined::<T>(heads), of.dims()).map(Some);
            Ok((gradient(&dquery, query)?, gradient(&dkey, key)?, gradient(&dvalue, value)?))
        })
    }
}

struct PackedAttention {
    heads: usize,
    causal: bool,
    scale: f64,
}

impl PackedAttention {
    /// Returns the heads of queries, keys and values `[batch, time, 3, heads, width]`.
    fn heads<'a>(&self, storage: &'a CpuStorage, layout: &Layout) -> Result<Heads<'a>> {
        let (batch, time, packed) = layout.shape().dims3()?;
        let (start, width) = (contiguous(layout, NAME)?.start, packed / 3 / self.heads);
        let part = |part: usize| {
            let strides = vec![time * packed, width, packed, 1];
            let layout = Layout::new(
                (batch, self.heads, time, width).into(),
                strides,
                start + part * self.heads * width,
            );
            View::new(storage, &layout)
        };
        Ok(Heads {
            query: part(0),
            key: part(1),
            value: part(2),
            causal: self.causal,
            scale: self.scale,
        })
    }
}

impl CustomOp1 for PackedAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let (batch, time, packed) = layout.shape().dims3()?;
        with_element!(qkv.dtype(), NAME, T => {
            let qkv = wide::<T>(qkv, NAME)?;
            let mixed = self.heads(&qkv, layout)?.forward()?;
            let mixed = interleaved::<T>(&[mixed], self.heads, time, packed / 3 / self.heads);
            Ok((T::to_cpu_storage_owned(mixed), (batch, time, packed / 3).into()))
        })
    }

    fn bwd(&self, qkv: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (batch, time, packed) = qkv.dims3()?;
        let width = packed / 3 / self.heads;
        let grad = grad
            .reshape((batch, time, self.heads, width))?
            .transpose(1, 2)?;
        let ((of_qkv, layout), (of_grad, grad_layout)) =
            (qkv.storage_and_layout(), grad.storage_and_layout());
        with_element!(qkv.dtype(), NAME, T => {
            let (of_qkv, of_grad) = (wide::<T>(cpu(&of_qkv, NAME)?, NAME)?, wide::<T>(cpu(&of_grad, NAME)?, NAME)?);
            let parts = self.heads(&of_qkv, layout)?.backward(&View::new(&of_grad, grad_layout))?;
            tensor(interleaved::<T>(&parts, self.heads, time, width), qkv.dims()).map(Some)
        })
    }
}

/// Returns the values of all heads, one head after the other, rounded to `T`.
fn joined<T: Element>(heads: &[Vec<T::Real>]) -> Vec<T> {
    heads
        .iter()
        .flatten()
        .map(|&value| T::narrow(value))
        .collect()
}

/// Interleaves parts, such as queries, keys and values, that are lists of heads with `time * width`
/// values each. The result has the shape `[batch, time, parts, heads, width]`.
fn interleaved<T: Element>(
    parts: &[Vec<Vec<T::Real>>],
    heads: usize,
    time: usize,
    width: usize,
) -> Vec<T> {
    let batches = parts.first().map_or(0, |part| part.len() / heads);
    // The number of values of one position in time.
    let stride = parts.len() * heads * width;
    let zero = T::narrow(<T::Real as Real>::ZERO);
    in_parts(batches * time * stride, stride, zero, |number, output| {
        let (batch, position) = (number / time, number % time);
        let heads = parts
            .iter()
            .flat_map(|part| &part[batch * heads..(batch + 1) * heads]);
        for (output, head) in output.chunks_mut(width).zip(heads) {
            let values = &head[position * width..(position + 1) * width];
            output
                .iter_mut()
                .zip(values)
                .for_each(|(output, &value)| *output = T::narrow(value));
        }
    })
    .0
}
