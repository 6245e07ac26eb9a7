//! The work of a training step on whole gradients, parameters and optimizer state in the memory of
//! an NVIDIA GPU. One launch goes over up to 64 tensors, and over more if they lie one after the
//! other in memory; for others there are as many launches as it takes.
//!
//! All tensors must be contiguous and on one GPU for which [`has_kernels`] is `true`. Work is
//! queued in the GPU's stream; the host waits for nothing.

mod factored;

use candle_core::{DType, Device, Result, Tensor};

use crate::kernels::pieces::{Piece, launches, name_of_write};
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Pieces, Runner, run_on};

pub use factored::Factored;

/// The most blocks of launches that write what they read.
const MOST_BLOCKS: usize = 1 << 16;
/// The most blocks of launches whose results are added up.
const MOST_PARTS: usize = 1 << 10;

/// Returns `true` if there are kernels for tensors of this dtype on this device: for f32, bf16 and
/// f16 on NVIDIA GPUs of compute capability 8.0 or higher.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
pub fn has_kernels(device: &Device, dtype: DType) -> Result<bool> {
    run_on(device, dtype)
}

/// Returns `true` if there is a kernel that writes elements of one dtype as elements of another.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
pub fn can_write(device: &Device, to: DType, from: DType) -> Result<bool> {
    Ok(name_of_write(to, from).is_some() && run_on(device, to)?)
}

/// A part of a tensor that [`join`] makes.
#[derive(Debug, Clone)]
pub enum Part {
    /// The elements of a tensor, rounded to the new tensor's dtype.
    Elements(Tensor),
    /// So many zeros.
    Zeros(usize),
}

impl Part {
    /// Returns the number of elements.
    fn numel(&self) -> usize {
        match self {
            Part::Elements(tensor) => tensor.elem_count(),
            Part::Zeros(numel) => *numel,
        }
    }
}

/// Returns a new tensor of one dimension with the elements of all parts, one after the other.
///
/// # Errors
/// CUDA's; dtypes for which [`can_write`] is `false`.
pub fn join(parts: &[Part], dtype: DType, device: &Device) -> Result<Tensor> {
    let numel = parts.iter().map(Part::numel).sum();
    let runner = Runner::on(device);
    let joined = runner.tensor(runner.allocate(dtype, numel)?, numel)?;
    let mut writes = Vec::with_capacity(parts.len());
    let mut start = 0;
    for part in parts {
        let to = joined.narrow(0, start, part.numel())?;
        start += part.numel();
        writes.push(match part {
            Part::Elements(tensor) => (to, Some(tensor.clone())),
            Part::Zeros(_) => (to, None),
        });
    }
    write(&writes, false)?;
    Ok(joined)
}

/// Writes the elements of tensors to others, rounded to their dtype, or adds them. Where there is
/// no tensor, writes zeros.
///
/// # Errors
/// CUDA's; dtypes for which [`can_write`] is `false`.
pub fn write(pairs: &[(Tensor, Option<Tensor>)], add: bool) -> Result<()> {
    // The pairs of each pair of types.
    let mut kinds: Vec<((DType, DType), Vec<Piece>)> = Vec::new();
    for (to, from) in pairs {
        let mut piece = Piece::new(to.elem_count());
        piece.set(0, to)?;
        let mut kind = (to.dtype(), to.dtype());
        if let Some(from) = from {
            piece.set(1, from)?;
            kind.1 = from.dtype();
        }
        push(&mut kinds, kind, piece);
    }
    for ((to, from), pieces) in kinds {
        let Some(name) = name_of_write(to, from) else {
            candle_core::bail!("no kernel writes {from:?} as {to:?}");
        };
        let kernel = Kernel(Module::Gradients, name, Some(from));
        let device = pairs[0].0.device();
        launch(device, kernel, &pieces, &[Argument::Int(usize::from(add))])?;
    }
    Ok(())
}

/// Adds a value to those of its kind.
fn push<K: PartialEq, V>(kinds: &mut Vec<(K, Vec<V>)>, kind: K, value: V) {
    match kinds.iter_mut().find(|(other, _)| *other == kind) {
        Some((_, values)) => values.push(value),
        None => kinds.push((kind, vec![value])),
    }
}

/// Launches a kernel over pieces, with these arguments after the pieces.
fn launch(
    device: &Device,
    kernel: Kernel,
    pieces: &[Piece],
    arguments: &[Argument<'_>],
) -> Result<()> {
    let runner = Runner::on(device);
    for launch in launches(pieces, MOST_BLOCKS)? {
        let mut all = vec![Argument::Pieces(&launch.pieces)];
        all.extend_from_slice(arguments);
        runner.launch(kernel, launch.grid(), &all)?;
    }
    Ok(())
}

/// Returns a piece for each tensor, by dtype.
fn pieces_by_dtype(tensors: &[Tensor]) -> Result<Vec<(DType, Vec<Piece>)>> {
    let mut kinds = Vec::new();
    for tensor in tensors {
        let mut piece = Piece::new(tensor.elem_count());
        piece.set(0, tensor)?;
        push(&mut kinds, tensor.dtype(), piece);
    }
    Ok(kinds)
}

/// Returns, as a tensor of two `f64` on the GPU, the sum of the squares of all elements, and their
/// largest magnitude, which is NaN if any element is NaN. `tensors` has at least one tensor.
///
/// Sums are `f64` from the first addition on. Their order depends on the lengths of the tensors,
/// and on their places in storages that they share, only.
///
/// # Errors
/// CUDA's.
pub fn statistics(tensors: &[Tensor]) -> Result<Tensor> {
    let kinds = pieces_by_dtype(tensors)?;
    let mut all_launches: Vec<(DType, Box<Pieces>, Grid)> = Vec::new();
    for (dtype, pieces) in kinds {
        for launch in launches(&pieces, MOST_PARTS)? {
            let grid = launch.grid();
            all_launches.push((dtype, launch.pieces, grid));
        }
    }
    let parts: usize = all_launches.iter().map(|(_, _, grid)| grid.blocks[0]).sum();
    let runner = Runner::on(tensors[0].device());
    let partials = runner.allocate(DType::F64, 2 * parts)?;
    let mut part = 0;
    for (dtype, pieces, grid) in &all_launches {
        let kernel = Kernel(Module::Gradients, "statistics", Some(*dtype));
        let arguments = [
            Argument::Pieces(pieces),
            Argument::WriteFrom(&partials, 2 * part),
        ];
        runner.launch(kernel, *grid, &arguments)?;
        part += grid.blocks[0];
    }
    let total = runner.allocate(DType::F64, 2)?;
    let kernel = Kernel(Module::Gradients, "finish_statistics", None);
    let arguments = [
        Argument::Read(&partials.operand()?),
        Argument::Long(parts),
        Argument::Write(&total),
    ];
    runner.launch(kernel, Grid::blocks(1, [256, 1]), &arguments)?;
    runner.tensor(total, 2)
}

/// Returns what a step does with gradients of these [`statistics`], as a tensor on the GPU that
/// [`update`] takes. Its first element is their norm, without the loss scale that `unscale`
/// removes: the largest magnitude if `by_largest` is set, otherwise the square root of the sum of
/// squares. The step clips it to `max_norm`, and changes nothing if a gradient is not finite.
///
/// # Errors
/// CUDA's.
pub fn clipping(
    statistics: &Tensor,
    by_largest: bool,
    max_norm: f64,
    unscale: f64,
) -> Result<Tensor> {
    let runner = Runner::on(statistics.device());
    let clipping = runner.allocate(DType::F64, 2)?;
    let (storage, layout) = statistics.storage_and_layout();
    let arguments = [
        Argument::Read(&Operand::new(&storage, layout, "clip")?),
        Argument::Write(&clipping),
        flag(by_largest),
        Argument::Double(max_norm),
        Argument::Double(unscale),
    ];
    let kernel = Kernel(Module::Gradients, "clip", None);
    runner.launch(kernel, Grid::blocks(1, [1, 1]), &arguments)?;
    runner.tensor(clipping, 2)
}

/// Multiplies all elements of tensors by a factor. Half types are multiplied in `f32`, because they
/// may not hold the factor.
///
/// # Errors
/// CUDA's.
pub fn scale(tensors: &[Tensor], factor: f64) -> Result<()> {
    for (dtype, pieces) in pieces_by_dtype(tensors)? {
        let kernel = Kernel(Module::Gradients, "scale", Some(dtype));
        launch(
            tensors[0].device(),
            kernel,
            &pieces,
            &[Argument::Double(factor)],
        )?;
    }
    Ok(())
}

/// Returns the sum of two contiguous tensors of one shape and dtype, each times a factor. Half
/// types are computed in `f32`, and rounded at the end.
///
/// # Errors
/// CUDA's; dtypes without kernels; tensors of different dtypes or lengths.
pub fn combine(x: &Tensor, x_factor: f64, y: &Tensor, y_factor: f64) -> Result<Tensor> {
    let numel = x.elem_count();
    let runner = Runner::on(x.device());
    let sums = runner.tensor(runner.allocate(x.dtype(), numel)?, x.shape())?;
    let mut piece = Piece::new(numel);
    for (position, tensor) in [&sums, x, y].into_iter().enumerate() {
        if tensor.dtype() != x.dtype() {
            candle_core::bail!("a sum of {:?} and {:?}", x.dtype(), tensor.dtype());
        }
        piece.set(position, tensor)?;
    }
    let kernel = Kernel(Module::Optimizer, "combine", Some(x.dtype()));
    let factors = [x_factor, y_factor].map(Argument::Double);
    launch(x.device(), kernel, &[piece], &factors)?;
    Ok(sums)
}

/// The update rule of an optimizer, with the numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Adam, and AdamW with a `weight_decay` of 0. The state is the averages of gradients and of
    /// their squares and, with amsgrad, the largest averages of squares.
    Adam {
        /// `true` to maximize.
        maximize: bool,
        /// The L2 penalty.
        weight_decay: f64,
        /// The factor of the parameter: `1 - lr * weight_decay` for AdamW.
        keep: f64,
        /// The weights of the averages' past.
        betas: (f64, f64),
        /// The number that is added to the divisor.
        eps: f64,
        /// `lr / (1 - beta1^step)`
        step_size: f64,
        /// `sqrt(1 - beta2^step)`
        correction: f64,
    },
    /// SGD. The state is the momentum, if there is one.
    Sgd {
        /// `true` to maximize.
        maximize: bool,
        /// The L2 penalty.
        weight_decay: f64,
        /// The learning rate.
        lr: f64,
        /// The factor of the momentum.
        momentum: f64,
        /// The part of the gradient that the momentum does not get.
        dampening: f64,
        /// `true` for Nesterov's momentum.
        nesterov: bool,
        /// `true` if the momentum has no values yet.
        is_first: bool,
    },
    /// Adagrad. The state is the sums of squares.
    Adagrad {
        /// `true` to maximize.
        maximize: bool,
        /// The L2 penalty.
        weight_decay: f64,
        /// `lr / (1 + (step - 1) * lr_decay)`
        rate: f64,
        /// The number that is added to the divisor.
        eps: f64,
    },
    /// Schedule-free AdamW. The state is the iterates, and the averages of squares.
    ScheduleFree {
        /// The decay, which is added to the normalized gradient.
        weight_decay: f64,
        /// The weight of the average's past.
        beta2: f64,
        /// `1 - beta2^step`
        correction: f64,
        /// The number that is added to the divisor.
        eps: f64,
        /// The weight of the iterate in the new average.
        iterate_weight: f64,
        /// The factor with which the normalized gradient is added to the parameter.
        gradient_factor: f64,
        /// The learning rate.
        lr: f64,
    },
}

/// The factor of gradients before a step uses them.
#[derive(Debug, Clone)]
pub enum Factor {
    /// This number.
    Known(f64),
    /// The factor of [`clipping`], and its decision to skip the step.
    Clipped(Tensor),
}

/// Parameters, their gradients, and their state in the order of the rule.
#[derive(Debug, Clone)]
pub struct Update {
    /// The parameters.
    pub param: Tensor,
    /// The gradients.
    pub grad: Tensor,
    /// The state.
    pub state: Vec<Tensor>,
}

/// Steps parameters and their state, of one dtype, by a rule. Gradients are multiplied by a factor
/// first, which clips them, or removes a loss scale.
///
/// # Errors
/// CUDA's; tensors of several dtypes.
pub fn update(rule: &Rule, factor: &Factor, updates: &[Update]) -> Result<()> {
    let Some(first) = updates.first() else {
        return Ok(());
    };
    let dtype = first.param.dtype();
    let mut pieces = Vec::with_capacity(updates.len());
    for update in updates {
        let mut piece = Piece::new(update.param.elem_count());
        let tensors = [&update.param, &update.grad]
            .into_iter()
            .chain(&update.state);
        for (position, tensor) in tensors.enumerate() {
            if tensor.dtype() != dtype {
                candle_core::bail!("a step of {dtype:?} and {:?} together", tensor.dtype());
            }
            piece.set(position, tensor)?;
        }
        pieces.push(piece);
    }
    let (name, numbers) = arguments_of(rule);
    let clipped;
    let operand;
    let mut arguments = match factor {
        Factor::Known(factor) => vec![Argument::Word(0), Argument::Double(*factor)],
        Factor::Clipped(clipping) => {
            clipped = clipping.storage_and_layout();
            operand = Operand::new(&clipped.0, clipped.1, "step")?;
            vec![Argument::Read(&operand), Argument::Double(1.0)]
        }
    };
    arguments.extend(numbers);
    let kernel = Kernel(Module::Optimizer, name, Some(dtype));
    launch(first.param.device(), kernel, &pieces, &arguments)
}

/// Returns a switch as the argument of a kernel.
fn flag(is_set: bool) -> Argument<'static> {
    Argument::Int(usize::from(is_set))
}

/// Returns the name of a rule's kernel, and its arguments after the factor.
fn arguments_of(rule: &Rule) -> (&'static str, Vec<Argument<'static>>) {
    match *rule {
        Rule::Adam {
            maximize,
            weight_decay,
            keep,
            betas,
            eps,
            step_size,
            correction,
        } => {
            let numbers = [
                weight_decay,
                keep,
                betas.0,
                betas.1,
                eps,
                step_size,
                correction,
            ];
            let mut arguments = vec![flag(maximize)];
            arguments.extend(numbers.map(Argument::Double));
            ("adam", arguments)
        }
        Rule::Sgd {
            maximize,
            weight_decay,
            lr,
            momentum,
            dampening,
            nesterov,
            is_first,
        } => {
            let mut arguments = vec![flag(maximize)];
            arguments.extend([weight_decay, lr, momentum, dampening].map(Argument::Double));
            arguments.extend([flag(nesterov), flag(is_first)]);
            ("sgd", arguments)
        }
        Rule::Adagrad {
            maximize,
            weight_decay,
            rate,
            eps,
        } => {
            let mut arguments = vec![flag(maximize)];
            arguments.extend([weight_decay, rate, eps].map(Argument::Double));
            ("adagrad", arguments)
        }
        Rule::ScheduleFree {
            weight_decay,
            beta2,
            correction,
            eps,
            iterate_weight,
            gradient_factor,
            lr,
        } => {
            let numbers = [
                weight_decay,
                beta2,
                correction,
                eps,
                iterate_weight,
                gradient_factor,
                lr,
            ];
            ("schedule_free", numbers.map(Argument::Double).to_vec())
        }
    }
}
