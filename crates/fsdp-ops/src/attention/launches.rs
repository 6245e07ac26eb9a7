//! The kernels of attention, for heads of up to 128 elements.

use candle_core::{DType, Device, Layout, Result};

use super::head::Attention;
use crate::kernels::{
    self, Argument, AttentionSizes, Grid, Kernel, Module, Operand, Output, Runner, Strides, to_int,
};

/// The widest heads that there are kernels for.
const MAX_WIDTH: usize = 128;

/// Queries, keys and values, each `[batch, heads, time, width]`, and whose elements of a head lie
/// one after the other.
pub(super) type Parts<'a> = [Operand<'a>; 3];

/// Returns `true` if there are kernels on a device for heads of this width, whose blocks have room
/// for them.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
pub(super) fn fit(
    device: &Device,
    dtype: DType,
    widths: [usize; 2],
    attention: Attention,
) -> Result<bool> {
    let [width, value_width] = widths;
    let widest = width.max(value_width);
    // The kernels find the highest score before they scale it.
    if widest > MAX_WIDTH || attention.scale <= 0.0 || !attention.scale.is_finite() {
        return Ok(false);
    }
    Ok(Plan::new(dtype, widest).most_shared_bytes() <= kernels::shared_bytes(device)?)
}

/// How the kernels for a dtype and a width share the work: see the first lines of their files.
struct Plan {
    module: Module,
    dtype: DType,
    is_wide: bool,
    threads: usize,
    /// The queries that a block owns, in the forward and for their gradients.
    queries_of_block: usize,
    /// The keys that a block owns for the gradients of keys and values.
    keys_of_block: usize,
    /// The bytes of shared memory of the kernels: forward, keys and values, queries.
    shared_bytes: [usize; 3],
}

impl Plan {
    /// Returns the plan for heads of up to `width` elements.
    fn new(dtype: DType, width: usize) -> Self {
        let is_wide = width > 64;
        let width = if is_wide { 128 } else { 64 };
        if dtype == DType::F32 {
            let tile = if is_wide { 32 } else { 64 };
            let pitch = width + 4;
            let weights = 64 * (tile + 4);
            let backward = 4 * ((128 + 2 * tile) * pitch + weights + 2 * tile);
            return Plan {
                module: Module::AttentionF32,
                dtype,
                is_wide,
                threads: 256,
                queries_of_block: 64,
                keys_of_block: 64,
                shared_bytes: [4 * ((64 + 2 * tile) * pitch + weights), backward, backward],
            };
        }
        let [keys, tile] = if is_wide { [64, 32] } else { [128, 64] };
        let pitch = 2 * (width + 8);
        Plan {
            module: Module::Attention,
            dtype,
            is_wide,
            threads: 128,
            queries_of_block: 128,
            keys_of_block: keys,
            shared_bytes: [
                (128 + 4 * 64) * pitch,
                (2 * keys + 4 * tile) * pitch + 16 * tile,
                (2 * 128 + 4 * tile) * pitch,
            ],
        }
    }

    /// Returns the most bytes of shared memory that a kernel needs.
    fn most_shared_bytes(&self) -> usize {
        self.shared_bytes.into_iter().fold(0, usize::max)
    }

    /// Returns the kernel of one of two names: for narrow and for wide heads.
    fn kernel(&self, names: [&'static str; 2]) -> Kernel {
        Kernel(
            self.module,
            names[usize::from(self.is_wide)],
            Some(self.dtype),
        )
    }

    /// Returns the shape of a launch of so many blocks.
    const fn grid(&self, blocks: usize, shared_bytes: usize) -> Grid {
        Grid {
            blocks: [blocks, 1],
            threads: [self.threads, 1],
            shared_bytes,
        }
    }
}

/// Launches the forward, whose output has the layout `output` in the returned memory. Returns also
/// the logarithms of the sums of the weights of each query, for the backward.
///
/// # Errors
/// CUDA's; tensors that are larger than the kernels can count.
pub(super) fn launch_forward(
    runner: &Runner,
    attention: Attention,
    parts: &Parts<'_>,
    output: &Layout,
) -> Result<(Output, Output)> {
    let [query, key, value] = parts;
    let sizes = sizes(attention, parts, output)?;
    let (batch, heads, rows, width) = query.layout.shape().dims4()?;
    let plan = Plan::new(query.dtype, width.max(value.layout.dims()[3]));
    let y = runner.allocate(query.dtype, output.shape().elem_count())?;
    let log_sums = runner.allocate(DType::F32, batch * heads * rows)?;
    let blocks = rows.div_ceil(plan.queries_of_block) * heads * batch;
    runner.launch(
        plan.kernel(["attention_forward_64", "attention_forward_128"]),
        plan.grid(blocks, plan.shared_bytes[0]),
        &[
            Argument::Read(query),
            Argument::Read(key),
            Argument::Read(value),
            Argument::Write(&y),
            Argument::Write(&log_sums),
            Argument::Attention(sizes),
        ],
    )?;
    Ok((y, log_sums))
}

/// The output of a forward, its gradient, and what else the forward has kept.
pub(super) struct Results<'a> {
    pub(super) output: Operand<'a>,
    pub(super) grad: Operand<'a>,
    pub(super) log_sums: Operand<'a>,
}

/// Launches the backward, which writes the gradients of queries, keys and values to memory, each in
/// a layout of its own.
///
/// # Errors
/// CUDA's; tensors that are larger than the kernels can count.
pub(super) fn launch_backward(
    runner: &Runner,
    attention: Attention,
    parts: &Parts<'_>,
    results: &Results<'_>,
    gradients: [(&Output, Layout); 3],
) -> Result<()> {
    let [query, key, value] = parts;
    let Results {
        output,
        grad,
        log_sums,
    } = results;
    let sizes = AttentionSizes {
        doutput: Strides::of_layout(&grad.layout)?,
        dquery: Strides::of_layout(&gradients[0].1)?,
        dkey: Strides::of_layout(&gradients[1].1)?,
        dvalue: Strides::of_layout(&gradients[2].1)?,
        ..sizes(attention, parts, &output.layout)?
    };
    let [dquery, dkey, dvalue] = gradients
        .each_ref()
        .map(|(memory, layout)| Argument::WriteFrom(memory, layout.start_offset()));
    let (batch, heads, rows, width) = query.layout.shape().dims4()?;
    let columns = key.layout.dims()[2];
    let plan = Plan::new(query.dtype, width.max(value.layout.dims()[3]));
    // The part of a weight's gradient that is the same for all weights of a query.
    let deltas = runner.allocate(DType::F32, batch * heads * rows)?;
    runner.launch(
        Kernel(plan.module, "attention_delta", Some(query.dtype)),
        Grid::blocks((batch * heads * rows).div_ceil(16), [32, 4]),
        &[
            Argument::Read(output),
            Argument::Read(grad),
            Argument::Write(&deltas),
            Argument::Long(batch),
            Argument::Attention(sizes),
        ],
    )?;
    let deltas = deltas.operand()?;
    let inputs = [query, key, value, grad, log_sums, &deltas].map(Argument::Read);
    runner.launch(
        plan.kernel(["attention_backward_keys_64", "attention_backward_keys_128"]),
        plan.grid(
            columns.div_ceil(plan.keys_of_block) * heads * batch,
            plan.shared_bytes[1],
        ),
        &[&inputs[..], &[dkey, dvalue, Argument::Attention(sizes)]].concat(),
    )?;
    runner.launch(
        plan.kernel([
            "attention_backward_queries_64",
            "attention_backward_queries_128",
        ]),
        plan.grid(
            rows.div_ceil(plan.queries_of_block) * heads * batch,
            plan.shared_bytes[2],
        ),
        &[&inputs[..], &[dquery, Argument::Attention(sizes)]].concat(),
    )
}

/// Returns the sizes of an attention, and the strides of what its forward uses.
fn sizes(attention: Attention, parts: &Parts<'_>, output: &Layout) -> Result<AttentionSizes> {
    let [query, key, value] = parts;
    let (_, heads, rows, width) = query.layout.shape().dims4()?;
    let (_, _, columns, value_width) = value.layout.shape().dims4()?;
    let unused = Strides {
        batch: 0,
        head: 0,
        time: 0,
    };
    Ok(AttentionSizes {
        query: Strides::of_layout(&query.layout)?,
        key: Strides::of_layout(&key.layout)?,
        value: Strides::of_layout(&value.layout)?,
        output: Strides::of_layout(output)?,
        dquery: unused,
        dkey: unused,
        dvalue: unused,
        doutput: unused,
        heads: to_int(heads)?,
        // Each head of queries has keys and values of its own.
        group: 1,
        rows: to_int(rows)?,
        columns: to_int(columns)?,
        width: to_int(width)?,
        value_width: to_int(value_width)?,
        causal: attention.causal.into(),
        scale: attention.scale as f32,
    })
}
