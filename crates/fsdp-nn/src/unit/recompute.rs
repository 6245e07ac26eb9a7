//! Activation checkpointing: parts of a model whose activations are not kept, and whose forward is
//! computed again in the backward.
//!
//! A [`recompute`]d part is one operation. Its backward runs the forward again, recording a graph
//! this time, and then a backward of that graph inside the outer backward. Its inputs are the
//! tensors that get gradients: the inputs of the part, and the parameters and variables that it
//! uses.
//!
//! If all of them belong to the graph of `fsdp_ops::autograd`, or are variables beside at least one
//! that does, the part is an operation of that graph. Otherwise it is one of candle's graph.
//! candle's operations have three inputs at most, so there the part depends on the tensors through
//! a chain of [`Link`] nodes.

use std::sync::{Arc, Mutex};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, DType, Layout, Module, Result, Shape, Storage, Tensor, Var,
};

use fsdp_flat::storage::HostBytes;
use fsdp_ops::autograd::{self, Recorded};

use super::hooks::{ParameterSlot, copy_contiguous, is_anchor, parameter_of};
use crate::error::NnError;
use crate::guards::lock;

const NAME: &str = "recompute";

/// A module whose activations are not kept: torch's `checkpoint_wrapper`. Its forward is computed
/// again in the backward, from the same input. Between the two only the input takes memory.
///
/// Put it inside of a unit, as in torch: then the unit is gathered once for the backward. Around
/// units it works too, but each of them is gathered twice, and all units of the part and their
/// gradients are in memory together in the backward. Gradients are bit for bit those of the module
/// itself. It adds no communication.
///
/// Both forwards must compute the same. A dropout, for example, must use the same mask:
/// `fsdp_ops::dropout` does, if it gets the same masks, and `candle_nn::Dropout` does not. If the
/// outputs differ, the backward is an error on CPUs; on a GPU nobody compares them, and gradients
/// would be wrong. State that a forward changes, such as batch norm's running statistics, is
/// changed twice.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, linear};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError, Recomputed, Unit};
///
/// fsdp_comm::run_local(2, |group| {
///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
///         let layer = |i: usize| scope.pp(i).unit(|scope| Ok(Recomputed::new(linear(4, 4, scope.vb())?)));
///         (0..3).map(layer).collect::<candle_core::Result<Vec<Unit<Recomputed<Linear>>>>>()
///     })?;
///     let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
///     let loss = model.forward(|layers| {
///         layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?.mean_all()
///     })?;
///     model.backward(&loss)?;
///     assert!(model.parameters().has_gradient("0.weight")?);
///     Ok::<(), NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Recomputed<M> {
    module: Arc<M>,
    is_recomputed: bool,
}

impl<M> Recomputed<M> {
    /// Makes a module whose activations are not kept.
    #[must_use]
    pub fn new(module: M) -> Self {
        Self::when(true, module)
    }

    /// Makes a module whose activations are kept unless `is_recomputed`: for a model with an
    /// option.
    #[must_use]
    pub fn when(is_recomputed: bool, module: M) -> Self {
        Recomputed {
            module: Arc::new(module),
            is_recomputed,
        }
    }

    /// Returns the module itself, whose activations are kept.
    #[must_use]
    pub fn module(&self) -> &M {
        &self.module
    }
}

impl<M: Send + Sync + 'static> Recomputed<M> {
    /// Runs `f`, a forward of the module, and recomputes it in the backward, as [`recompute`] does.
    /// Runs it without recomputation if the module was made with [`Self::when`] and `false`.
    ///
    /// # Errors
    /// The errors of [`recompute`].
    pub fn run(
        &self,
        inputs: &[&Tensor],
        f: impl Fn(&M, &[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        if !self.is_recomputed {
            let inputs: Vec<Tensor> = inputs.iter().map(|&input| input.clone()).collect();
            return f(&self.module, &inputs);
        }
        let module = Arc::clone(&self.module);
        recompute(inputs, move |inputs| f(&module, inputs))
    }
}

impl<M: Module + Send + Sync + 'static> Module for Recomputed<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.run(&[xs], |module, inputs| module.forward(&inputs[0]))
    }
}

/// Computes `f` of some tensors without keeping its activations, which the backward computes again:
/// torch's `checkpoint` with `use_reentrant=False`. Gradients go to the inputs, to the parameters
/// of sharded models that `f` uses, and to candle's variables, and are bit for bit those of a call
/// of `f`.
///
/// `f` must compute the same both times, which only CPUs check: see [`Recomputed`]. Tensors with
/// gradients that depend on earlier parts of the model should be among `inputs`: if `f` holds one
/// itself, the backward of what it comes from is computed twice. `f` may recompute parts of its
/// own. No communication but that of `f`.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// let weight = Var::from_tensor(&Tensor::ones((2, 2), DType::F32, &Device::Cpu)?)?;
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let held = weight.as_tensor().clone();
/// let y = fsdp_nn::recompute(&[&x], move |inputs| inputs[0].matmul(&held)?.sqr())?;
/// let gradients = y.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&weight).unwrap().to_vec2::<f32>()?, [[6., 6.], [12., 12.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// The errors of `f`, and an output that holds no floats. In the backward, those of `f` again;
/// [`NnError::ChangedSinceForward`]; an `f` that computes something else the second time.
pub fn recompute(
    inputs: &[&Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    // Step 1: compute the output from stand-ins for the inputs: variables without a history, so
    // that the graph ends there.
    let part_inputs: Vec<Input> = inputs.iter().map(|input| Input::new(input)).collect();
    let stand_ins = make_stand_ins(&part_inputs)?;
    let output = f(&stand_ins)?;
    // Step 2: find the tensors that gradients go to.
    // A backward comes to them in the reverse order.
    let nodes = autograd::sorted_nodes(&output);
    let mut targets: Vec<Target> = nodes
        .iter()
        .rev()
        .filter_map(|node| find_target(node, &stand_ins))
        .collect();
    if targets.is_empty() {
        return Ok(output.detach());
    }
    if !output.dtype().is_float() {
        return Err(candle_core::Error::UnsupportedDTypeForOp(
            output.dtype(),
            NAME,
        ));
    }
    // Inputs come first: candle's backward passes the links of step 4 from last to first, so that
    // parameters and variables get their gradients before the layers in front of this part do.
    targets.sort_by_key(|target| !matches!(target, Target::Input(_)));
    let tensors: Vec<Tensor> = targets.iter().map(|target| target.tensor(inputs)).collect();
    let part = Arc::new(Part {
        f: Box::new(f),
        inputs: part_inputs,
        targets,
        gradients: Mutex::default(),
    });
    // Step 3: return the output of step 1 without its graph, as that of one operation.
    let device = output.device().clone();
    let output = Mutex::new(Some(output.detach()));
    let references: Vec<&Tensor> = tensors.iter().collect();
    if let Some(anchor) = autograd::anchor(&references) {
        let operation = RecordedPart {
            part,
            output,
            tensors,
        };
        return autograd::record(Box::new(operation), anchor);
    }
    // Step 4: in candle's graph, make a chain of links, one for each target, on which the output
    // depends.
    let mut token = Tensor::zeros(1, DType::F32, &device)?;
    for (index, tensor) in tensors.iter().enumerate() {
        token = token.apply_op2(
            tensor,
            Link {
                part: Arc::clone(&part),
                index,
            },
        )?;
    }
    token.apply_op1(Node { part, output })
}

/// An input of a part.
struct Input {
    /// The value, without the graph that it comes from.
    value: Tensor,
    /// `true` if a gradient may go to it.
    is_tracked: bool,
}

impl Input {
    fn new(input: &Tensor) -> Self {
        Input {
            value: input.detach(),
            is_tracked: input.track_op() && input.dtype().is_float(),
        }
    }

    /// Makes the tensor that the part computes with: a variable if a gradient may go to the
    /// input.
    fn make_stand_in(&self) -> Result<Tensor> {
        if self.is_tracked {
            Ok(Var::from_tensor(&self.value)?.into_inner())
        } else {
            Ok(self.value.clone())
        }
    }
}

/// Makes the tensors that a part computes with in place of its inputs: variables where gradients
/// may go to them.
fn make_stand_ins(inputs: &[Input]) -> Result<Vec<Tensor>> {
    inputs.iter().map(Input::make_stand_in).collect()
}

/// A tensor that a gradient goes to.
enum Target {
    /// An input, by its number.
    Input(usize),
    /// A parameter of a sharded model, and the last change of values before the forward.
    Parameter {
        tensor: Tensor,
        slot: Arc<ParameterSlot>,
        version_at_forward: u64,
    },
    /// A variable of candle's.
    Variable(Tensor),
}

impl Target {
    /// Returns the tensor in the graph around the part.
    fn tensor(&self, inputs: &[&Tensor]) -> Tensor {
        match self {
            Target::Input(index) => inputs[*index].clone(),
            Target::Parameter { tensor, .. } | Target::Variable(tensor) => tensor.clone(),
        }
    }
}

/// Returns the target that a node of the graph is; `None` for a node in the middle of it.
fn find_target(node: &Tensor, stand_ins: &[Tensor]) -> Option<Target> {
    if let Some(input) = stand_ins
        .iter()
        .position(|stand_in| stand_in.id() == node.id())
    {
        return Some(Target::Input(input));
    }
    if let Some(slot) = parameter_of(node) {
        let version_at_forward = slot.version();
        return Some(Target::Parameter {
            tensor: node.clone(),
            slot,
            version_at_forward,
        });
    }
    (node.is_variable() && !is_anchor(node)).then(|| Target::Variable(node.clone()))
}

/// The computation of a part from its inputs.
type Compute = dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync;

/// A part of a model that is computed twice.
struct Part {
    f: Box<Compute>,
    inputs: Vec<Input>,
    targets: Vec<Target>,
    /// The gradients that the backward has computed and the links have not yet passed on, in the
    /// order of `targets`.
    gradients: Mutex<Vec<Option<Tensor>>>,
}

impl Part {
    /// Computes the part again, and from the gradient of its output the gradients of all targets,
    /// in their order. A target that the part does not use this time has none.
    ///
    /// # Errors
    /// Values that have changed since the forward; a part that computes something else this time.
    fn compute_gradients(&self, node: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        for target in &self.targets {
            if let Target::Parameter {
                slot,
                version_at_forward,
                ..
            } = target
            {
                slot.check_unchanged(*version_at_forward)?;
            }
        }
        let stand_ins = make_stand_ins(&self.inputs)?;
        let output = (self.f)(&stand_ins)?;
        // A function that depends on anything but its inputs may show here.
        if output.shape() != node.shape() || output.dtype() != node.dtype() {
            return Err(recompute_mismatch_error());
        }
        // On a GPU the host would have to wait for both.
        if node.device().is_cpu() && !have_same_bytes(node, &output)? {
            return Err(recompute_mismatch_error());
        }
        // The outer backward passes the gradients of parameters on.
        let (mut store, mut parameters) = autograd::gradients(&output, grad)?;
        let gradients = self.targets.iter().map(|target| match target {
            Target::Input(index) => store.remove(&stand_ins[*index]),
            Target::Parameter { tensor, .. } => parameters.remove(&tensor.id()),
            Target::Variable(tensor) => store.remove(tensor),
        });
        let gradients = gradients.collect();
        // The remaining gradients are of parameters that the first forward did not use.
        if parameters.is_empty() {
            Ok(gradients)
        } else {
            Err(recompute_mismatch_error())
        }
    }
}

/// Returns `true` if two tensors of one shape and dtype have the same bytes.
fn have_same_bytes(first: &Tensor, second: &Tensor) -> Result<bool> {
    let (first, second) = (first.contiguous()?, second.contiguous()?);
    let first = HostBytes::read(&first).map_err(NnError::from)?;
    let second = HostBytes::read(&second).map_err(NnError::from)?;
    Ok(*first == *second)
}

/// Returns the error of a part that computes something else the second time.
fn recompute_mismatch_error() -> candle_core::Error {
    candle_core::Error::Msg(
        "a recomputed part of the model computes something else in the backward than in the \
         forward: a dropout in it must use the same mask, as that of `fsdp_ops::dropout` does"
            .to_owned(),
    )
}

/// Takes the output of a part, and returns a copy of its elements with their shape.
///
/// # Errors
/// The output has been taken already, or cannot be copied.
fn take_output(output: &Mutex<Option<Tensor>>) -> Result<(Storage, Shape)> {
    let output = lock(output).take().ok_or_else(|| {
        candle_core::Error::Msg("the output of a recomputed part is taken twice".to_owned())
    })?;
    let (storage, layout) = output.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => {
            let (copy, shape) = copy_contiguous(storage, layout)?;
            Ok((Storage::Cpu(copy), shape))
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            let (copy, shape) = copy_contiguous(storage, layout)?;
            Ok((Storage::Cuda(copy), shape))
        }
        _ => Err(recompute_mismatch_error()),
    }
}

/// A part as an operation of `fsdp_ops::autograd`.
struct RecordedPart {
    part: Arc<Part>,
    /// The output, until the forward takes it.
    output: Mutex<Option<Tensor>>,
    /// The tensors of the targets.
    tensors: Vec<Tensor>,
}

impl Recorded for RecordedPart {
    fn name(&self) -> &'static str {
        NAME
    }

    fn inputs(&self) -> &[Tensor] {
        &self.tensors
    }

    fn forward(&self) -> Result<(Storage, Shape)> {
        take_output(&self.output)
    }

    fn backward(&self, output: &Tensor, grad: &Tensor) -> Result<Vec<Tensor>> {
        let gradients = self.part.compute_gradients(output, grad)?.into_iter();
        gradients
            .map(|gradient| gradient.ok_or_else(recompute_mismatch_error))
            .collect()
    }
}

/// The op whose output is that of a part. Its argument is the last link of the chain, and its
/// backward computes the part again.
struct Node {
    part: Arc<Part>,
    /// The output, until the forward takes it.
    output: Mutex<Option<Tensor>>,
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match take_output(&self.output)? {
            (Storage::Cpu(output), shape) => Ok((output, shape)),
            _ => Err(recompute_mismatch_error()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        match take_output(&self.output)? {
            (Storage::Cuda(output), shape) => Ok((output, shape)),
            _ => Err(recompute_mismatch_error()),
        }
    }

    fn bwd(&self, token: &Tensor, node: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        *lock(&self.part.gradients) = self.part.compute_gradients(node, grad)?;
        Ok(Some(token.detach()))
    }
}

/// The op by which a part depends on a tensor. Its first argument is the link before it in the
/// chain, or a constant.
struct Link {
    part: Arc<Part>,
    /// The number of the tensor among the targets.
    index: usize,
}

impl CustomOp2 for Link {
    fn name(&self) -> &'static str {
        "fsdp-recompute-link"
    }

    fn cpu_fwd(
        &self,
        token: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        copy_contiguous(token, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        token: &candle_core::CudaStorage,
        layout: &Layout,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        copy_contiguous(token, layout)
    }

    fn bwd(
        &self,
        token: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        // candle's backward continues at an argument only if it has a gradient. So the next token
        // of the chain gets a gradient, whose value has no meaning.
        let gradient = lock(&self.part.gradients)
            .get_mut(self.index)
            .and_then(Option::take)
            .ok_or_else(recompute_mismatch_error)?;
        Ok((token.track_op().then(|| grad.clone()), Some(gradient)))
    }
}
