//! The backward of sharded models, which launches little on a GPU.
//!
//! candle's backward makes a tensor of zeros for the gradient of each argument of each operation,
//! and adds the gradient to it: an allocation, a memset, a launch and another allocation, and three
//! more passes over the memory. So the operations of this crate have a graph of their own, beside
//! candle's, where they compute with parameters that are [`Registered`]. There a gradient is kept
//! as it is, and only a second one is added to it.
//!
//! To candle the output of such an operation is computed from one small variable, the *anchor* of a
//! parameter, and from nothing else. [`backward`] goes through both graphs: where it comes to a
//! tensor that candle's operations have computed, it runs candle's backward of that tensor, which
//! ends at outputs and parameters. candle's own `backward` is an error for such outputs.
//!
//! candle's backward cannot end at a tensor of its own graph, and goes on to all that it was
//! computed from. If each operation behind a sum of candle's began one, the layers of a model would
//! be passed again and again. So an operation is in our graph only if all its inputs are: outputs,
//! parameters, views of them, and variables. Behind one of candle's operations that is no view, all
//! operations are candle's, and gradients are the same.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::backend::{BackendDevice as _, BackendStorage as _};
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Device, Error, Layout, Result, Shape, Storage, Tensor,
    TensorId,
};

use crate::kernels::Runner;
use crate::values::devices_error;

/// A parameter, which receives its gradient: a leaf of the graph.
pub trait Receiver: Send + Sync {
    /// Receives the whole gradient of a backward, which no longer needs the parameter.
    ///
    /// # Errors
    /// Any: they end the backward.
    fn receive(&self, grad: &Tensor) -> Result<()>;
}

/// The registration of a parameter, which ends when it is dropped.
#[derive(Debug)]
pub struct Registered {
    parameter: TensorId,
    /// The address of its storage.
    address: usize,
}

impl Registered {
    /// Registers a parameter: a tensor that candle has computed by an operation on a variable,
    /// `anchor`. That operation has to pass each gradient to [`collect`].
    #[must_use]
    pub fn new(parameter: &Tensor, anchor: &Tensor, leaf: Weak<dyn Receiver>) -> Self {
        let anchor = anchor.clone();
        let address = storage_address(parameter);
        lock_entries().insert(parameter.id(), address, Entry::Leaf { leaf, anchor });
        Registered {
            parameter: parameter.id(),
            address,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        lock_entries().remove(self.parameter, self.address);
    }
}

/// A tensor of the graph that is not candle's.
enum Entry {
    Leaf {
        leaf: Weak<dyn Receiver>,
        anchor: Tensor,
    },
    Output(Weak<Node>),
}

/// The tensors of the graph.
#[derive(Default)]
struct Entries {
    /// By their ids: a tensor does not reveal the operation that made it.
    by_id: HashMap<TensorId, Entry>,
    /// The ids by the addresses of the storages, which views share.
    ids: HashMap<usize, TensorId>,
}

impl Entries {
    fn insert(&mut self, id: TensorId, address: usize, entry: Entry) {
        self.by_id.insert(id, entry);
        self.ids.insert(address, id);
    }

    fn remove(&mut self, id: TensorId, address: usize) {
        self.by_id.remove(&id);
        // A new tensor may have got the address already.
        if self.ids.get(&address) == Some(&id) {
            self.ids.remove(&address);
        }
    }

    /// Returns the anchor of a tensor whose storage has this address, or of the tensor in the graph
    /// that it is a view of; `None` if neither is in the graph.
    fn anchor(&self, tensor: &Tensor, address: usize) -> Option<Tensor> {
        let viewed = || self.by_id.get(self.ids.get(&address)?);
        match self.by_id.get(&tensor.id()).or_else(viewed)? {
            Entry::Leaf { anchor, .. } => Some(anchor.clone()),
            Entry::Output(node) => Some(node.upgrade()?.anchor.clone()),
        }
    }
}

static ENTRIES: LazyLock<Mutex<Entries>> = LazyLock::new(Mutex::default);

fn lock_entries() -> MutexGuard<'static, Entries> {
    // Each entry is whole, so a panic of another thread leaves nothing half done.
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the address of a tensor's storage, which is that of its views, too.
fn storage_address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

/// An operation with its inputs, for [`record`].
pub trait Recorded: Send + Sync {
    /// The name, for messages.
    fn name(&self) -> &'static str;

    /// The tensors that the output depends on. Inputs without a history get no gradient.
    fn inputs(&self) -> &[Tensor];

    /// Computes the output, and returns it with its shape.
    ///
    /// # Errors
    /// Any: they are those of [`record`].
    fn forward(&self) -> Result<(Storage, Shape)>;

    /// Computes the gradient of each input from that of the output.
    ///
    /// # Errors
    /// Any: they end the backward.
    fn backward(&self, output: &Tensor, grad: &Tensor) -> Result<Vec<Tensor>>;
}

/// An operation in the graph.
struct Node {
    operation: Box<dyn Recorded>,
    /// The variable that candle takes for what the output is computed from.
    anchor: Tensor,
    /// The id of the output, and the address of its storage.
    output: OnceLock<(TensorId, usize)>,
    hook: OnceLock<Box<dyn Hook>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some((id, address)) = self.output.get() {
            lock_entries().remove(*id, *address);
        }
    }
}

/// Code that a backward runs when it comes to a tensor: see [`before_backward`].
pub trait Hook: Send + Sync {
    /// Runs the code.
    ///
    /// # Errors
    /// Any: they end the backward.
    fn run(&self) -> Result<()>;
}

/// Has a hook run when a backward comes to a tensor: before the backward of the operation that made
/// it. Returns the hook, and does nothing, if the tensor is no output in this graph, or has a hook
/// already. A tensor that a unit only passes on has one if another unit made it; a second hook
/// there would run too early or too late for this unit.
pub fn before_backward<H: Hook + 'static>(tensor: &Tensor, hook: H) -> Option<H> {
    let Kind::Output(node) = kind_of(tensor) else {
        return Some(hook);
    };
    let mut hook = Some(hook);
    node.hook
        .get_or_init(|| Box::new(hook.take().expect("a place is filled once")));
    hook
}

/// Returns the anchor for an operation with these inputs; `None` if it belongs to candle's graph:
/// because no input is in ours, or one is computed by candle's operations.
#[must_use]
pub fn anchor(inputs: &[&Tensor]) -> Option<Tensor> {
    let inputs = inputs.iter().filter(|input| input.track_op());
    let addressed: Vec<(&Tensor, usize)> = inputs
        .map(|&input| (input, storage_address(input)))
        .collect();
    let entries = lock_entries();
    let mut found = None;
    for (input, address) in addressed {
        match entries.anchor(input, address) {
            Some(anchor) => found = found.or(Some(anchor)),
            // A variable is computed from nothing.
            None if input.is_variable() => (),
            None => return None,
        }
    }
    found
}

/// Runs an operation, which may have any number of inputs, and adds it to the graph. `anchor` is
/// what [`anchor`] returns for its inputs.
///
/// # Errors
/// The operation's forward fails.
pub fn record(operation: Box<dyn Recorded>, anchor: Tensor) -> Result<Tensor> {
    let node = Arc::new(Node {
        operation,
        anchor: anchor.clone(),
        output: OnceLock::new(),
        hook: OnceLock::new(),
    });
    let output = anchor.apply_op1(ForCandle(Arc::clone(&node)))?;
    let entry = Entry::Output(Arc::downgrade(&node));
    let address = storage_address(&output);
    // Nobody else has the new node.
    let _ = node.output.set((output.id(), address));
    lock_entries().insert(output.id(), address, entry);
    Ok(output)
}

/// A node as candle's operation on its anchor.
struct ForCandle(Arc<Node>);

impl CustomOp1 for ForCandle {
    fn name(&self) -> &'static str {
        self.0.operation.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.0.operation.forward()? {
            (Storage::Cpu(output), shape) => Ok((output, shape)),
            _ => devices_error(self.name()),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.0.operation.forward()? {
            (Storage::Cuda(output), shape) => Ok((output, shape)),
            _ => devices_error(self.name()),
        }
    }

    fn bwd(&self, _: &Tensor, output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if collect(output, grad)? {
            return Ok(None);
        }
        candle_core::bail!(
            "{}: candle's own `backward` does not come to the parameters of a sharded model: call \
             that of the model",
            self.name()
        )
    }
}

/// The role of a tensor in a backward.
enum Kind {
    Leaf(Arc<dyn Receiver>),
    Output(Arc<Node>),
    /// Computed by candle's operations, or a variable.
    Candle,
}

/// Returns the role of a tensor in a backward.
fn kind_of(tensor: &Tensor) -> Kind {
    match lock_entries().by_id.get(&tensor.id()) {
        Some(Entry::Leaf { leaf, .. }) => leaf.upgrade().map_or(Kind::Candle, Kind::Leaf),
        Some(Entry::Output(node)) => node.upgrade().map_or(Kind::Candle, Kind::Output),
        None => Kind::Candle,
    }
}

/// Returns the tensors that a tensor of this kind passes a gradient to: each as often as it does.
fn arguments(tensor: &Tensor, kind: &Kind) -> Vec<Tensor> {
    match kind {
        Kind::Leaf(_) => Vec::new(),
        Kind::Output(node) => {
            let inputs = node.operation.inputs().iter();
            inputs.filter(|input| input.track_op()).cloned().collect()
        }
        // candle's backward of the tensor ends at these, and comes to each once.
        Kind::Candle => {
            let nodes = tensor.sorted_nodes().into_iter().rev();
            let ends = nodes.filter(|node| !matches!(kind_of(node), Kind::Candle));
            ends.cloned().collect()
        }
    }
}

/// The graph that a backward goes through.
struct Graph {
    /// The tensors, each before those that it was computed from.
    tensors: Vec<(Tensor, Kind)>,
    /// The number of gradients that each tensor gets.
    uses: HashMap<TensorId, usize>,
}

impl Graph {
    /// Returns the graph below a tensor.
    fn below(root: &Tensor) -> Self {
        let mut uses = HashMap::from([(root.id(), 1)]);
        let mut tensors = Vec::new();
        let mut entered = HashSet::new();
        // The kind says that all arguments of a tensor have been passed. A function that calls
        // itself would need much of the stack for a deep model.
        let mut stack: Vec<(Tensor, Option<Kind>)> = vec![(root.clone(), None)];
        while let Some((tensor, passed)) = stack.pop() {
            if let Some(kind) = passed {
                tensors.push((tensor, kind));
                continue;
            }
            if !entered.insert(tensor.id()) {
                continue;
            }
            let kind = kind_of(&tensor);
            let arguments = arguments(&tensor, &kind);
            for argument in &arguments {
                *uses.entry(argument.id()).or_default() += 1;
            }
            stack.push((tensor, Some(kind)));
            stack.extend(arguments.into_iter().rev().map(|argument| (argument, None)));
        }
        tensors.reverse();
        Graph { tensors, uses }
    }
}

/// Returns all tensors that a tensor has been computed from, in candle's graph and in ours, and
/// itself. Tensors that get no gradient are left out.
#[must_use]
pub fn sorted_nodes(tensor: &Tensor) -> Vec<Tensor> {
    let mut nodes = Vec::new();
    let mut seen = HashSet::new();
    for (tensor, kind) in &Graph::below(tensor).tensors {
        match kind {
            Kind::Candle => {
                let candle_nodes = tensor.sorted_nodes().into_iter();
                // Outputs and parameters below it are in the list by themselves.
                let own_nodes = candle_nodes.filter(|node| matches!(kind_of(node), Kind::Candle));
                nodes.extend(own_nodes.filter(|node| seen.insert(node.id())).cloned());
            }
            _ => nodes.push(tensor.clone()),
        }
    }
    nodes
}

/// The gradients of a backward that runs.
struct Progress {
    /// The gradients of tensors that the backward has not come to yet.
    grads: HashMap<TensorId, Tensor>,
    /// The number of gradients that each tensor has yet to get.
    uses: HashMap<TensorId, usize>,
    /// The gradients of parameters, if they are not passed to their leaves.
    of_leaves: Option<HashMap<TensorId, Tensor>>,
}

thread_local! {
    /// The backwards that run on this thread, the innermost last.
    static RUNNING: RefCell<Vec<Progress>> = const { RefCell::new(Vec::new()) };
}

/// Collects a gradient of a registered parameter that candle's backward has come to, and passes the
/// sum of all to its leaf once it is complete. Returns `false`, and does nothing, if no backward of
/// ours comes to it.
///
/// # Errors
/// Those of the leaf.
pub fn collect(tensor: &Tensor, grad: &Tensor) -> Result<bool> {
    let complete = RUNNING.with_borrow_mut(|running| {
        let Some(progress) = running.last_mut() else {
            return Ok(None);
        };
        let Some(uses) = progress.uses.get_mut(&tensor.id()) else {
            return Ok(None);
        };
        *uses = uses.saturating_sub(1);
        let is_complete = *uses == 0;
        let sum = add_up(progress.grads.remove(&tensor.id()), grad.detach())?;
        progress.grads.insert(tensor.id(), sum);
        Ok::<_, Error>(Some(is_complete))
    })?;
    match complete {
        Some(true) => pass_to_leaf(tensor).map(|()| true),
        Some(false) => Ok(true),
        None => Ok(false),
    }
}

/// Returns a gradient plus the sum of earlier ones, if there are any.
fn add_up(sum: Option<Tensor>, grad: Tensor) -> Result<Tensor> {
    match sum {
        Some(sum) => sum + grad,
        None => Ok(grad),
    }
}

/// Removes the gradient that a tensor has got so far, and returns it.
fn take_grad(tensor: &Tensor) -> Option<Tensor> {
    RUNNING.with_borrow_mut(|running| running.last_mut()?.grads.remove(&tensor.id()))
}

/// Passes a parameter's gradient to its leaf, if the tensor is one and there is a gradient.
///
/// # Errors
/// Those of the leaf.
fn pass_to_leaf(tensor: &Tensor) -> Result<()> {
    let Kind::Leaf(leaf) = kind_of(tensor) else {
        return Ok(());
    };
    let Some(grad) = take_grad(tensor) else {
        return Ok(());
    };
    let is_kept = RUNNING.with_borrow_mut(|running| {
        let of_leaves = running.last_mut().and_then(|last| last.of_leaves.as_mut());
        of_leaves.map(|grads| grads.insert(tensor.id(), grad.clone()))
    });
    match is_kept {
        Some(_) => Ok(()),
        // The leaf may do anything, so nothing is borrowed here.
        None => leaf.receive(&grad),
    }
}

/// Keeps a backward among those of [`RUNNING`] until it is dropped.
struct Running;

impl Running {
    fn begin(progress: Progress) -> Self {
        RUNNING.with_borrow_mut(|running| running.push(progress));
        Running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.with_borrow_mut(|running| running.pop());
    }
}

/// Computes the gradients of a loss, in place of candle's `loss.backward()`, and passes those of
/// registered parameters to their leaves, each as soon as the rest no longer needs the parameter.
/// Returns the gradients of variables.
///
/// # Errors
/// candle's, those of operations, of hooks and of leaves.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    Ok(run(loss, None)?.0)
}

/// Computes the gradients of a tensor from that of the loss by it. Returns those of variables, and
/// those of registered parameters, which are not passed to their leaves.
///
/// # Errors
/// candle's, those of operations and of hooks.
pub fn gradients(output: &Tensor, grad: &Tensor) -> Result<(GradStore, HashMap<TensorId, Tensor>)> {
    run(output, Some(grad))
}

/// Runs a backward from a tensor: a loss, or a tensor of which a gradient is given. Returns the
/// gradients of variables, and if one was given, those of parameters.
///
/// # Errors
/// candle's, those of operations, of hooks and of leaves.
fn run(root: &Tensor, grad: Option<&Tensor>) -> Result<(GradStore, HashMap<TensorId, Tensor>)> {
    let Graph { tensors, uses } = Graph::below(root);
    let _running = Running::begin(Progress {
        grads: HashMap::new(),
        uses,
        of_leaves: grad.map(|_| HashMap::new()),
    });
    // candle's backward passes the gradient on, also if the root is in our graph.
    let mut variables = candle_backward(root, grad)?;
    for (tensor, kind) in &tensors {
        match kind {
            Kind::Output(node) => node.run_backward(tensor)?,
            Kind::Candle if tensor.id() != root.id() => {
                if let Some(grad) = take_grad(tensor) {
                    add_to_variables(&mut variables, tensor, &grad)?;
                }
            }
            Kind::Candle | Kind::Leaf(_) => (),
        }
    }
    // A parameter may be the argument of something that passes no gradient on.
    for (tensor, _) in &tensors {
        pass_to_leaf(tensor)?;
    }
    let of_leaves = RUNNING.with_borrow_mut(|running| running.last_mut()?.of_leaves.take());
    Ok((variables, of_leaves.unwrap_or_default()))
}

impl Node {
    /// Passes the gradient of the output on to the inputs, if there is one.
    ///
    /// # Errors
    /// Those of the operation, of hooks and of leaves.
    fn run_backward(&self, output: &Tensor) -> Result<()> {
        let Some(grad) = take_grad(output) else {
            return Ok(());
        };
        if let Some(hook) = self.hook.get() {
            hook.run()?;
        }
        let grads = self.operation.backward(output, &grad)?;
        drop(grad);
        for (input, grad) in self.operation.inputs().iter().zip(grads) {
            if input.track_op() {
                collect(input, &grad)?;
            }
        }
        Ok(())
    }
}

/// Runs candle's backward of a tensor, from a gradient of it, and adds the gradients of variables
/// to those that there are.
///
/// # Errors
/// candle's, and those of leaves.
fn add_to_variables(variables: &mut GradStore, tensor: &Tensor, grad: &Tensor) -> Result<()> {
    if tensor.is_variable() {
        let sum = add_up(variables.remove(tensor), grad.clone())?;
        variables.insert(tensor, sum);
        return Ok(());
    }
    let mut found = candle_backward(tensor, Some(grad))?;
    let nodes = tensor.sorted_nodes().into_iter();
    for variable in nodes.filter(|node| node.is_variable()) {
        if let Some(grad) = found.remove(variable) {
            let sum = add_up(variables.remove(variable), grad)?;
            variables.insert(variable, sum);
        }
    }
    Ok(())
}

/// Runs candle's backward of a tensor, from a gradient of it if one is given.
///
/// # Errors
/// candle's, and those of leaves.
fn candle_backward(tensor: &Tensor, grad: Option<&Tensor>) -> Result<GradStore> {
    match grad {
        Some(grad) => tensor.apply_op1(Seed(grad.clone()))?.backward(),
        None => tensor.backward(),
    }
}

/// An operation whose output is one number of no meaning, where candle's backward begins, and whose
/// backward passes a given gradient on.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, x: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let one = Shape::from(1);
        Ok((x.device().zeros_impl(&one, x.dtype())?, one))
    }

    fn cuda_fwd(&self, x: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let runner = Runner::on(&Device::Cuda(x.device().clone()));
        match runner.storage(runner.allocate(x.dtype(), 1)?)? {
            Storage::Cuda(number) => Ok((number, Shape::from(1))),
            _ => devices_error(self.name()),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
