//! Scaled dot-product attention.
//!
//! Heads are computed one by one, and of each head a few queries at a time, so that scores stay in
//! cache, are never kept for the backward, and are not computed where a causal mask hides them.

mod head;
mod launches;

use std::borrow::Cow;
use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};

use self::head::{Attention, Heads, NAME, View, widen_storage};
use self::launches::Results;
use crate::element::Element;
use crate::kernels::{self, Operand, Output, Runner};
use crate::operation::{Operation, apply, is_computed_here, mismatch_error};
use crate::parts::compute_in_chunks;
use crate::real::Real;
use crate::softmax;
use crate::values::{Input, contiguous, cpu_storage, tensor};

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
    if key.dims() != [batch, heads, columns, width] {
        return mismatch_error(query, key, NAME);
    }
    if value.dims() != [batch, heads, columns, value.dim(3)?] {
        return mismatch_error(query, value, NAME);
    }
    // The softmax of no scores would be a division by zero.
    if columns == 0 && query.elem_count() > 0 {
        candle_core::bail!("{NAME}: queries without keys");
    }
    let attention = Attention { causal, scale };
    if !is_fused(query, [width, value.dim(3)?], attention)? {
        return with_candle_ops(query, key, value, causal, scale);
    }
    let mut parts = [query.clone(), key.clone(), value.clone()];
    if kernels::run_on(query.device(), query.dtype())? {
        for part in &mut parts {
            *part = kernels::with_contiguous_rows(part)?;
        }
    }
    let [query, key, value] = parts;
    let operation = HeadAttention {
        attention,
        log_sums: OnceLock::new(),
    };
    apply(operation, [&query, &key, &value])
}

/// Computes attention of the output of one projection to queries, keys and values.
///
/// `qkv` is `[batch, time, 3 * heads * width]`: first all heads of the queries, then those of the
/// keys, then those of the values. The result is `[batch, time, heads * width]`, ready for the
/// projection after it. No tensor is copied to transpose it.
///
/// Scores are scaled by 1 / sqrt(width). With `causal`, a position sees itself and those before it.
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
    let attention = Attention { causal, scale };
    if !is_fused(qkv, [width; 2], attention)? {
        let parts = qkv
            .reshape((batch, time, 3, heads, width))?
            .permute((2, 0, 3, 1, 4))?;
        let mixed = with_candle_ops(
            &parts.get(0)?,
            &parts.get(1)?,
            &parts.get(2)?,
            causal,
            scale,
        )?;
        return mixed.transpose(1, 2)?.reshape((batch, time, heads * width));
    }
    let operation = PackedAttention {
        heads,
        attention,
        log_sums: OnceLock::new(),
    };
    apply(operation, [&qkv.contiguous()?])
}

/// Returns `true` if attention of a tensor's device and dtype, with queries and values of these
/// widths, is computed here.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
fn is_fused(x: &Tensor, widths: [usize; 2], attention: Attention) -> Result<bool> {
    if kernels::run_on(x.device(), x.dtype())? {
        return launches::fit(x.device(), x.dtype(), widths, attention);
    }
    is_computed_here(x)
}

/// Computes [`scaled_dot_product_attention`] with candle's operations.
pub(crate) fn with_candle_ops(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    causal: bool,
    scale: f64,
) -> Result<Tensor> {
    let mut scores = (query.contiguous()? * scale)?.matmul(&key.transpose(2, 3)?)?;
    if causal {
        // Adding minus infinity makes a weight 0.
        let rows = query.dim(2)?;
        let columns = key.dim(2)?;
        let mut mask = vec![0f32; rows * columns];
        for (row, mask_row) in mask.chunks_mut(columns.max(1)).enumerate() {
            mask_row[columns.min(row + 1)..].fill(f32::NEG_INFINITY);
        }
        let mask = Tensor::from_vec(mask, (rows, columns), query.device())?;
        scores = scores.broadcast_add(&mask.to_dtype(query.dtype())?)?;
    }
    softmax::with_candle_ops(&scores)?.matmul(&value.contiguous()?)
}

/// The attention of queries, keys and values that are tensors of their own.
struct HeadAttention {
    attention: Attention,
    /// The logarithms of the sums of the weights of each query, for the kernels of the backward.
    log_sums: OnceLock<Tensor>,
}

impl Operation<3> for HeadAttention {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, [query, key, value]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let (batch, heads, rows, _) = query.1.shape().dims4()?;
        let shape = Shape::from((batch, heads, rows, value.1.dims()[3]));
        let y = Heads::new::<T>(self.attention, [query, key, value])?.forward()?;
        Ok((join_heads(&y), shape))
    }

    fn backward<T: Element>(
        &self,
        [query, key, value]: [&Tensor; 3],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (query_storage, query_layout) = query.storage_and_layout();
        let (key_storage, key_layout) = key.storage_and_layout();
        let (value_storage, value_layout) = value.storage_and_layout();
        let (grad_storage, grad_layout) = grad.storage_and_layout();
        let inputs = [
            (cpu_storage(&query_storage, NAME)?, query_layout),
            (cpu_storage(&key_storage, NAME)?, key_layout),
            (cpu_storage(&value_storage, NAME)?, value_layout),
        ];
        let heads = Heads::new::<T>(self.attention, inputs)?;
        let grad = View::widened::<T>((cpu_storage(&grad_storage, NAME)?, grad_layout))?;
        let [dquery, dkey, dvalue] = heads.backward(&grad)?;
        Ok([
            tensor(join_heads::<T>(&dquery), query.dims())?,
            tensor(join_heads::<T>(&dkey), key.dims())?,
            tensor(join_heads::<T>(&dvalue), value.dims())?,
        ])
    }

    fn launch_forward(&self, runner: &Runner, parts: [Operand<'_>; 3]) -> Result<(Output, Shape)> {
        let (batch, heads, rows, _) = parts[0].layout.shape().dims4()?;
        let shape = Shape::from((batch, heads, rows, parts[2].layout.dims()[3]));
        let layout = Layout::contiguous(&shape);
        let (y, log_sums) = launches::launch_forward(runner, self.attention, &parts, &layout)?;
        keep(runner, &self.log_sums, log_sums, batch * heads * rows)?;
        Ok((y, shape))
    }

    const TAKES_STRIDED_GRADIENT: bool = true;

    fn launch_backward(
        &self,
        runner: &Runner,
        parts: [Operand<'_>; 3],
        output: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; 3]> {
        let (storage, layout) = kept(&self.log_sums).storage_and_layout();
        let results = Results {
            output,
            grad,
            log_sums: Operand::new(&storage, layout, NAME)?,
        };
        let [query, key, value] = parts.each_ref();
        let gradients = [
            runner.allocate(query.dtype, query.len())?,
            runner.allocate(key.dtype, key.len())?,
            runner.allocate(value.dtype, value.len())?,
        ];
        let contiguous = |part: &Operand<'_>| Layout::contiguous(part.layout.shape());
        let [dquery, dkey, dvalue] = &gradients;
        launches::launch_backward(
            runner,
            self.attention,
            &parts,
            &results,
            [
                (dquery, contiguous(query)),
                (dkey, contiguous(key)),
                (dvalue, contiguous(value)),
            ],
        )?;
        Ok(gradients)
    }
}

/// Keeps what the backward needs.
fn keep(runner: &Runner, place: &OnceLock<Tensor>, log_sums: Output, count: usize) -> Result<()> {
    // Each operation runs once, so nothing has been set before.
    let _ = place.set(runner.tensor(log_sums, count)?);
    Ok(())
}

/// Returns what the forward has kept.
fn kept(place: &OnceLock<Tensor>) -> &Tensor {
    place.get().expect("the forward runs before the backward")
}

/// The attention of queries, keys and values in one tensor.
struct PackedAttention {
    heads: usize,
    attention: Attention,
    /// The same as in [`HeadAttention`].
    log_sums: OnceLock<Tensor>,
}

impl Operation<1> for PackedAttention {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, [qkv]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (batch, time, packed) = qkv.1.shape().dims3()?;
        let values = widen_storage::<T>(qkv.0)?;
        let mixed = self.unpack_heads(&values, qkv.1)?.forward()?;
        let y = interleave_heads(&[mixed], self.heads, time, packed / 3 / self.heads);
        Ok((y, (batch, time, packed / 3).into()))
    }

    fn backward<T: Element>(
        &self,
        [qkv]: [&Tensor; 1],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 1]> {
        let (batch, time, packed) = qkv.dims3()?;
        let width = packed / 3 / self.heads;
        let grad_of_heads = grad
            .reshape((batch, time, self.heads, width))?
            .transpose(1, 2)?;
        let (qkv_storage, layout) = qkv.storage_and_layout();
        let (grad_storage, grad_layout) = grad_of_heads.storage_and_layout();
        let values = widen_storage::<T>(cpu_storage(&qkv_storage, NAME)?)?;
        let grad = View::widened::<T>((cpu_storage(&grad_storage, NAME)?, grad_layout))?;
        let parts = self.unpack_heads(&values, layout)?.backward(&grad)?;
        let dqkv = interleave_heads::<T>(&parts, self.heads, time, width);
        Ok([tensor(dqkv, qkv.dims())?])
    }

    fn launch_forward(&self, runner: &Runner, [qkv]: [Operand<'_>; 1]) -> Result<(Output, Shape)> {
        let (batch, time, packed) = qkv.layout.shape().dims3()?;
        let parts = [0, 1, 2].map(|part| qkv.with_layout(self.part(&qkv.layout, 3, part)));
        let output = Layout::contiguous((batch, time, packed / 3));
        let heads_of_output = self.part(&output, 1, 0);
        let (y, log_sums) =
            launches::launch_forward(runner, self.attention, &parts, &heads_of_output)?;
        keep(runner, &self.log_sums, log_sums, batch * self.heads * time)?;
        Ok((y, output.shape().clone()))
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        [qkv]: [Operand<'_>; 1],
        output: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; 1]> {
        let (storage, layout) = kept(&self.log_sums).storage_and_layout();
        let results = Results {
            output: output.with_layout(self.part(&output.layout, 1, 0)),
            grad: grad.with_layout(self.part(&grad.layout, 1, 0)),
            log_sums: Operand::new(&storage, layout, NAME)?,
        };
        let parts = [0, 1, 2].map(|part| qkv.with_layout(self.part(&qkv.layout, 3, part)));
        let dqkv = runner.allocate(qkv.dtype, qkv.len())?;
        let contiguous = Layout::contiguous(qkv.layout.shape());
        let gradients = [0, 1, 2].map(|part| (&dqkv, self.part(&contiguous, 3, part)));
        launches::launch_backward(runner, self.attention, &parts, &results, gradients)?;
        Ok([dqkv])
    }
}

impl PackedAttention {
    /// Returns the heads `[batch, heads, time, width]` of one of `parts` parts of a contiguous
    /// layout `[batch, time, parts * heads * width]`.
    fn part(&self, layout: &Layout, parts: usize, part: usize) -> Layout {
        let dims = layout.dims();
        let (batch, time, packed) = (dims[0], dims[1], dims[2]);
        let width = packed / parts / self.heads;
        Layout::new(
            (batch, self.heads, time, width).into(),
            vec![time * packed, width, packed, 1],
            layout.start_offset() + part * self.heads * width,
        )
    }

    /// Returns the heads of queries, keys and values `[batch, time, 3, heads, width]`.
    fn unpack_heads<'a>(&self, storage: &'a CpuStorage, layout: &Layout) -> Result<Heads<'a>> {
        contiguous(layout, NAME)?;
        // All three are interleaved in the one storage, so each has its own start there.
        let [query, key, value] = [0, 1, 2].map(|part| View {
            storage: Cow::Borrowed(storage),
            layout: self.part(layout, 3, part),
        });
        Ok(Heads {
            query,
            key,
            value,
            attention: self.attention,
        })
    }
}

/// Returns the values of all heads, one head after the other, rounded to `T`.
fn join_heads<T: Element>(heads: &[Vec<T::Real>]) -> Vec<T> {
    heads
        .iter()
        .flatten()
        .map(|&value| T::narrow(value))
        .collect()
}

/// Interleaves parts, such as queries, keys and values, that are lists of heads with `time * width`
/// values each. The result has the shape `[batch, time, parts, heads, width]`.
fn interleave_heads<T: Element>(
    parts: &[Vec<Vec<T::Real>>],
    heads: usize,
    time: usize,
    width: usize,
) -> Vec<T> {
    let batches = parts[0].len() / heads;
    // The number of values of one position in time.
    let stride = parts.len() * heads * width;
    let zero = T::narrow(T::Real::ZERO);
    let (interleaved, _) = compute_in_chunks(
        batches * time * stride,
        stride,
        zero,
        |time_index, output| {
            // A part is one position in time: of each head in turn, the values of that position.
            let batch = time_index / time;
            let position = time_index % time;
            let heads_of_batch = parts
                .iter()
                .flat_map(|part| &part[batch * heads..(batch + 1) * heads]);
            for (output, head) in output.chunks_mut(width).zip(heads_of_batch) {
                let head_values = &head[position * width..(position + 1) * width];
                output
                    .iter_mut()
                    .zip(head_values)
                    .for_each(|(output, &value)| *output = T::narrow(value));
            }
        },
    );
    interleaved
}
