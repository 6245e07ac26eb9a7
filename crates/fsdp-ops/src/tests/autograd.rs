//! The backward of registered parameters: its gradients are those of candle's backward.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage as _;
use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, Var,
};

use crate::autograd::{self, Hook, Receiver, Registered};
use crate::{
    add, cross_entropy, embedding, gelu_erf, layer_norm, linear, linear_add, linear_gelu_erf,
};

/// The gradients that parameters have received, by their numbers.
type Received = Arc<Mutex<Vec<(usize, Tensor)>>>;

/// A parameter that notes its gradients.
struct Noted {
    number: usize,
    received: Received,
}

impl Receiver for Noted {
    fn receive(&self, grad: &Tensor) -> Result<()> {
        let mut received = self.received.lock().unwrap();
        received.push((self.number, grad.clone()));
        Ok(())
    }
}

/// The operation that makes a parameter of its anchor.
struct Values(Tensor);

impl CustomOp1 for Values {
    fn name(&self) -> &'static str {
        "values"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let (storage, layout) = self.0.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("a tensor on the CPU");
        };
        let copy = storage.to_dtype(layout, storage.dtype())?;
        Ok((copy, self.0.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, parameter: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        assert!(
            autograd::collect(parameter, grad)?,
            "a backward of candle alone"
        );
        Ok(None)
    }
}

/// Parameters that are registered as long as this lives.
pub(super) struct Parameters {
    pub(super) tensors: Vec<Tensor>,
    received: Received,
    _registered: Vec<(Arc<Noted>, Registered)>,
}

impl Parameters {
    /// Makes parameters of these values.
    pub(super) fn new(values: &[Tensor]) -> Result<Self> {
        let received = Received::default();
        let (mut tensors, mut registered) = (Vec::new(), Vec::new());
        for (number, value) in values.iter().enumerate() {
            let anchor = Var::zeros(1, DType::F32, &Device::Cpu)?;
            let parameter = anchor.as_tensor().apply_op1(Values(value.clone()))?;
            let leaf = Arc::new(Noted {
                number,
                received: Arc::clone(&received),
            });
            let weak = Arc::downgrade(&leaf);
            let registration = Registered::new(&parameter, anchor.as_tensor(), weak);
            registered.push((leaf, registration));
            tensors.push(parameter);
        }
        Ok(Parameters {
            tensors,
            received,
            _registered: registered,
        })
    }

    /// Returns the gradients in the order of the parameters, each of which has received one.
    pub(super) fn gradients(&self) -> Vec<Tensor> {
        let mut received = self.received.lock().unwrap().clone();
        received.sort_by_key(|(number, _)| *number);
        let numbers: Vec<usize> = received.iter().map(|(number, _)| *number).collect();
        let expected: Vec<usize> = (0..self.tensors.len()).collect();
        assert_eq!(numbers, expected, "each parameter receives one gradient");
        received.into_iter().map(|(_, grad)| grad).collect()
    }
}

/// Returns values from -1 to 1 that need no random generator.
fn values(dims: &[usize], seed: usize) -> Tensor {
    let count: usize = dims.iter().product();
    let value = |index: usize| (seed as f64 + 1.3 * index as f64).sin() as f32;
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

const VOCAB: usize = 7;
const WIDTH: usize = 4;

/// The values of the parameters of [`loss`].
fn model() -> Vec<Tensor> {
    let shapes: [&[usize]; 8] = [
        &[VOCAB, WIDTH],
        &[3, WIDTH],
        &[WIDTH],
        &[WIDTH],
        &[WIDTH, WIDTH],
        &[WIDTH],
        &[2 * WIDTH, WIDTH],
        &[2 * WIDTH],
    ];
    let shapes = shapes.iter().enumerate();
    shapes.map(|(seed, dims)| values(dims, seed)).collect()
}

/// Computes a loss by operations of both kinds. The first parameter is used at both ends, also by
/// an operation of candle's, and `scale` is a variable.
fn loss(parameters: &[Tensor], scale: &Tensor) -> Result<Tensor> {
    let [
        table,
        positions,
        weight,
        bias,
        square,
        square_bias,
        wide,
        wide_bias,
    ] = parameters
    else {
        candle_core::bail!("a model of eight parameters");
    };
    let tokens = Tensor::new(&[[1u32, 6, 0], [2, 2, 5]], &Device::Cpu)?;
    let mut x = add(&embedding(&tokens, table)?, positions)?;
    for _ in 0..2 {
        let normalized = layer_norm(&x, weight, bias, 1e-5)?;
        // A tensor of candle's operations that two operations have as an argument.
        let scaled = normalized.broadcast_mul(scale)?.tanh()?;
        let mixed = linear(&scaled, square, Some(square_bias))?;
        x = add(&x, &add(&mixed, &scaled)?)?;
        // candle's sum, of an output that operations of both kinds have as an argument.
        x = (&x + gelu_erf(&x)?)?;
    }
    let hidden = linear_gelu_erf(&x, wide, wide_bias)?;
    let halves = (hidden.narrow(2, 0, WIDTH)? * hidden.narrow(2, WIDTH, WIDTH)?)?;
    let scores = linear(&halves, table, None)?.flatten_to(1)?;
    let regular = (table.sqr()?.mean_all()? * 0.1)?;
    let targets = Tensor::new(&[0u32, 1, 6, 3, 3, 2], &Device::Cpu)?;
    cross_entropy(&scores, &targets)? + regular
}

fn to_vec(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    let largest = to_vec(expected)
        .iter()
        .fold(0f32, |most, x| most.max(x.abs()));
    for (found, expected) in to_vec(found).iter().zip(to_vec(expected)) {
        let close = (found - expected).abs() <= 1e-6 * largest;
        assert!(close, "{what}: {found} is not {expected}");
    }
}

#[test]
fn gradients_through_operations_of_both_kinds_are_those_of_candle() {
    let scale = Var::from_tensor(&values(&[WIDTH], 9)).unwrap();
    let vars: Vec<Var> = model()
        .iter()
        .map(|x| Var::from_tensor(x).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let expected_loss = loss(&tensors, scale.as_tensor()).unwrap();
    let expected = expected_loss.backward().unwrap();

    let parameters = Parameters::new(&model()).unwrap();
    let found_loss = loss(&parameters.tensors, scale.as_tensor()).unwrap();
    assert_eq!(to_vec(&found_loss), to_vec(&expected_loss));
    let variables = autograd::backward(&found_loss).unwrap();
    for (number, (grad, var)) in parameters.gradients().iter().zip(&vars).enumerate() {
        let expected = expected.get(var).unwrap();
        assert_close(&format!("parameter {number}"), grad, expected);
    }
    let of_scale = variables.get(&scale).unwrap();
    assert_close("the variable", of_scale, expected.get(&scale).unwrap());
}

/// A weight that is transposed, an input and a residual whose elements do not lie one after the
/// other, and a residual that is the input.
#[test]
fn views_of_outputs_and_parameters_get_the_gradients_of_candles_backward() {
    let loss = |parameters: &[Tensor]| {
        let first = linear(&values(&[3, 4], 7), &parameters[0], None)?;
        let second = linear_add(&first, &parameters[1].t()?, Some(&parameters[2]), &first)?;
        let turned = second.reshape((3, 2, 2))?.transpose(1, 2)?;
        let third = linear_add(&turned, &parameters[3], None, &turned)?;
        third.sqr()?.sum_all()
    };
    let shapes: [&[usize]; 4] = [&[4, 4], &[4, 4], &[4], &[2, 2]];
    let starts: Vec<Tensor> = shapes.iter().map(|shape| values(shape, 3)).collect();
    let vars: Vec<Var> = starts
        .iter()
        .map(|x| Var::from_tensor(x).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let expected = loss(&tensors).unwrap().backward().unwrap();
    let parameters = Parameters::new(&starts).unwrap();
    autograd::backward(&loss(&parameters.tensors).unwrap()).unwrap();
    for (number, (grad, var)) in parameters.gradients().iter().zip(&vars).enumerate() {
        let expected = expected.get(var).unwrap();
        assert_close(&format!("parameter {number}"), grad, expected);
    }
}

#[test]
fn a_second_backward_of_a_loss_has_the_same_gradients() {
    let scale = Var::from_tensor(&values(&[WIDTH], 9)).unwrap();
    let parameters = Parameters::new(&model()).unwrap();
    let loss = loss(&parameters.tensors, scale.as_tensor()).unwrap();
    autograd::backward(&loss).unwrap();
    let first: Vec<Vec<f32>> = parameters.gradients().iter().map(to_vec).collect();
    parameters.received.lock().unwrap().clear();
    autograd::backward(&loss).unwrap();
    let second: Vec<Vec<f32>> = parameters.gradients().iter().map(to_vec).collect();
    assert_eq!(first, second);
}

/// Returns the outputs of three layers, each computed from the one before.
fn three_layers(parameters: &[Tensor]) -> Result<[Tensor; 3]> {
    let first = linear(&values(&[2, 3], 5), &parameters[0], None)?;
    let second = linear(&first, &parameters[1], None)?;
    let third = linear(&second, &parameters[2], None)?;
    Ok([first, second, third])
}

fn three_weights() -> Vec<Tensor> {
    (0..3).map(|seed| values(&[3, 3], seed)).collect()
}

#[test]
fn a_parameter_gets_its_gradient_as_soon_as_nothing_needs_it() {
    let parameters = Parameters::new(&three_weights()).unwrap();
    let [.., third] = three_layers(&parameters.tensors).unwrap();
    autograd::backward(&third.sum_all().unwrap()).unwrap();
    let received = parameters.received.lock().unwrap();
    let order: Vec<usize> = received.iter().map(|(number, _)| *number).collect();
    assert_eq!(order, [2, 1, 0]);
}

/// A hook that notes how many gradients there were when it ran.
struct Counting {
    received: Received,
    counts: Arc<Mutex<Vec<usize>>>,
}

impl Hook for Counting {
    fn run(&self) -> Result<()> {
        let count = self.received.lock().unwrap().len();
        self.counts.lock().unwrap().push(count);
        Ok(())
    }
}

#[test]
fn a_hook_runs_when_the_backward_comes_to_its_tensor() {
    let parameters = Parameters::new(&three_weights()).unwrap();
    let [first, second, third] = three_layers(&parameters.tensors).unwrap();
    let counts = Arc::new(Mutex::new(Vec::new()));
    let hook = || Counting {
        received: Arc::clone(&parameters.received),
        counts: Arc::clone(&counts),
    };
    for tensor in [&first, &second, &third] {
        assert!(autograd::before_backward(tensor, hook()).is_none());
    }
    // A tensor of candle's, one without a history, and one that has a hook.
    let loss = third.sum_all().unwrap();
    for tensor in [&loss, &third.detach(), &second] {
        assert!(autograd::before_backward(tensor, hook()).is_some());
    }
    autograd::backward(&loss).unwrap();
    assert_eq!(*counts.lock().unwrap(), [0, 1, 2]);
}

#[test]
fn gradients_of_a_part_are_returned_and_not_passed_on() {
    let parameters = Parameters::new(&three_weights()).unwrap();
    let [.., third] = three_layers(&parameters.tensors).unwrap();
    let grad = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
    let (_, by_id) = autograd::gradients(&third, &grad).unwrap();
    assert!(parameters.received.lock().unwrap().is_empty());
    autograd::backward(&third.sum_all().unwrap()).unwrap();
    for (parameter, grad) in parameters.tensors.iter().zip(parameters.gradients()) {
        assert_eq!(to_vec(&by_id[&parameter.id()]), to_vec(&grad));
    }
}

/// candle's operation that copies a tensor, and counts its backwards.
struct CountedCopy(Arc<AtomicUsize>);

impl CustomOp1 for CountedCopy {
    fn name(&self) -> &'static str {
        "counted-copy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let copy = storage.to_dtype(layout, storage.dtype())?;
        Ok((copy, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(Some(grad.clone()))
    }
}

#[test]
fn sums_of_candle_between_layers_are_passed_once_however_many_layers_there_are() {
    let parameters = Parameters::new(&three_weights()).unwrap();
    let backwards = Arc::new(AtomicUsize::new(0));
    let first = linear(&values(&[2, 3], 5), &parameters.tensors[0], None).unwrap();
    let counted = CountedCopy(Arc::clone(&backwards));
    let mut x = first.apply_op1(counted).unwrap();
    for layer in 0..8 {
        let weight = &parameters.tensors[layer % 3];
        x = (&x + linear(&x, weight, None).unwrap()).unwrap();
    }
    autograd::backward(&x.sum_all().unwrap()).unwrap();
    assert_eq!(backwards.load(Ordering::Relaxed), 1);
    assert_eq!(parameters.gradients().len(), 3);
}

#[test]
fn an_operation_is_candles_if_one_of_its_inputs_is_computed_by_candle() {
    let parameters = Parameters::new(&three_weights()).unwrap();
    let [first, second, _] = three_layers(&parameters.tensors).unwrap();
    let variable = Var::from_tensor(&values(&[2, 3], 1)).unwrap();
    let variable = variable.as_tensor();
    let constant = values(&[2, 3], 2);
    let view = first.narrow(1, 1, 2).unwrap().t().unwrap();
    let view_of_parameter = parameters.tensors[0].t().unwrap();
    let sum = (&first + &second).unwrap();
    for (inputs, is_ours) in [
        (&[&first, &second, &constant][..], true),
        (&[&view, &view_of_parameter], true),
        (&[&first, variable], true),
        (&[&sum, &second], false),
        (&[&second, &sum], false),
        (&[variable, &constant], false),
        (&[&first.detach()], false),
    ] {
        assert_eq!(autograd::anchor(inputs).is_some(), is_ours, "{inputs:?}");
    }
}

#[test]
fn candles_own_backward_is_an_error() {
    let parameters = Parameters::new(&three_weights()).unwrap();
    let [.., third] = three_layers(&parameters.tensors).unwrap();
    let error = third.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(
        error.contains("linear") && error.contains("call that of the model"),
        "{error}"
    );
}

#[test]
fn sorted_nodes_has_the_tensors_of_both_graphs() {
    let scale = Var::from_tensor(&values(&[WIDTH], 9)).unwrap();
    let parameters = Parameters::new(&model()).unwrap();
    let loss = loss(&parameters.tensors, scale.as_tensor()).unwrap();
    let nodes = autograd::sorted_nodes(&loss);
    let place = |tensor: &Tensor| nodes.iter().position(|node| node.id() == tensor.id());
    assert_eq!(place(&loss), Some(0));
    for tensor in parameters.tensors.iter().chain([scale.as_tensor()]) {
        assert!(place(tensor).is_some());
    }
    let ids: std::collections::HashSet<_> = nodes.iter().map(Tensor::id).collect();
    assert_eq!(ids.len(), nodes.len());
}

#[test]
fn a_sum_with_a_tensor_that_lacks_dimensions_is_candles() {
    for dims in [&[2, 3, 4][..], &[3, 4], &[4], &[]] {
        let (x, y) = (values(&[2, 3, 4], 1), values(dims, 2));
        let parameters = Parameters::new(&[x.clone(), y.clone()]).unwrap();
        let weight = values(&[2, 3, 4], 3);
        let sum = add(&parameters.tensors[0], &parameters.tensors[1]).unwrap();
        assert_eq!(to_vec(&sum), to_vec(&x.broadcast_add(&y).unwrap()));
        autograd::backward(&(sum * &weight).unwrap().sum_all().unwrap()).unwrap();
        let [dx, dy] = parameters.gradients().try_into().unwrap();
        assert_eq!(to_vec(&dx), to_vec(&weight));
        let rows: Vec<f32> = to_vec(&weight);
        let width = y.elem_count();
        for (column, found) in to_vec(&dy).iter().enumerate() {
            let expected: f32 = rows.iter().skip(column).step_by(width).sum();
            assert!((found - expected).abs() < 1e-5, "{dims:?}");
        }
    }
    assert!(add(&values(&[2, 3], 0), &values(&[2], 0)).is_err());
}

#[test]
fn a_sum_of_different_dtypes_is_an_error() {
    let halves = values(&[3], 0).to_dtype(DType::BF16).unwrap();
    let parameters = Parameters::new(&[values(&[2, 3], 0), halves]).unwrap();
    let [x, y] = parameters.tensors.as_slice() else {
        panic!("two parameters");
    };
    for (x, y) in [(x, y), (&values(&[2, 3], 0), y)] {
        let error = add(x, y).unwrap_err().to_string();
        assert!(error.contains("dtype mismatch in add"), "{error}");
    }
}
