//! One model, sharded and plain.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::SgdOptions;
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ShardedParameters,
};

/// A model's forward, from its one input.
pub(crate) type Forward = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor>>;

/// A model of candle-transformers.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) input: fn() -> Tensor,
    pub(crate) build: fn(VarBuilder<'static>) -> candle_core::Result<Forward>,
}

/// The row of a model in the book.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// Tensors.
    pub(crate) parameters: usize,
    /// The tensors that a gradient comes to; `None` where candle's operations have no backward.
    pub(crate) trained: Option<usize>,
}

const LR: f32 = 0.125;

/// Values by name, as bits.
type Bits = BTreeMap<String, Vec<u32>>;

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

/// An output, and the parameters after one step of plain SGD; `None` without a backward.
struct Outcome {
    output: Vec<u32>,
    after: Option<Bits>,
    trained: BTreeSet<String>,
}

fn loss(forward: &Forward, input: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
    let output = forward(input)?;
    let loss = output.to_dtype(DType::F32)?.sqr()?.mean_all()?;
    Ok((output, loss))
}

/// Computes and steps in plain candle, from these values.
fn plain(case: &Case, values: &BTreeMap<String, Tensor>) -> Outcome {
    let vars = VarMap::new();
    let forward = (case.build)(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let vars: Vec<(String, Var)> = vars
        .data()
        .lock()
        .unwrap()
        .iter()
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    for (name, var) in &vars {
        var.set(
            values
                .get(name)
                .unwrap_or_else(|| panic!("{}: no `{name}`", case.name)),
        )
        .unwrap();
    }
    let (output, loss) = loss(&forward, &(case.input)())
        .unwrap_or_else(|error| panic!("{} in plain candle: {error}", case.name));
    let mut outcome = Outcome {
        output: bits(&output),
        after: None,
        trained: BTreeSet::new(),
    };
    let Ok(gradients) = loss.backward() else {
        return outcome;
    };
    let mut after = Bits::new();
    for (name, var) in vars {
        let before = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let Some(gradient) = gradients.get(&var) else {
            after.insert(name, before.into_iter().map(f32::to_bits).collect());
            continue;
        };
        let gradient = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let stepped = before
            .into_iter()
            .zip(gradient)
            .map(|(value, gradient)| gradient.mul_add(-LR, value).to_bits());
        after.insert(name.clone(), stepped.collect());
        outcome.trained.insert(name);
    }
    outcome.after = Some(after);
    outcome
}

/// The whole values of a sharded model.
fn whole(parameters: &ShardedParameters) -> BTreeMap<String, Tensor> {
    let whole = parameters.summon_full_params().unwrap();
    let buffers = parameters
        .buffers()
        .iter()
        .map(|(name, (value, _))| (name.clone(), value.copy().unwrap()));
    whole
        .iter()
        .map(|(fqn, value)| (fqn.to_owned(), value.copy().unwrap()))
        .chain(buffers)
        .collect()
}

/// Compares a sharded model with the plain one, and returns the difference as an error.
pub(crate) fn check(case: &Case) -> Result<Row, String> {
    let ranks = run_local(2, |group| check_on(&group, case));
    ranks
        .map(|mut rows| rows.remove(0))
        .map_err(|error| error.to_string())
}

type Model = FullyShardedDataParallel<Forward>;

fn build(group: &ProcessGroup, case: &Case) -> Result<Model, NnError> {
    let config = FsdpConfig {
        seed: 7,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group.clone(), config, |scope| (case.build)(scope.vb()))
}

fn check_on(group: &ProcessGroup, case: &Case) -> Row {
    let name = case.name;
    let model = build(group, case).unwrap_or_else(|error| panic!("{name}: {error}"));
    let parameters = model.parameters();
    let plain = plain(case, &whole(parameters));
    let shards = parameters.parameter_bytes();
    let whole_bytes: usize = parameters
        .fqns()
        .map(|fqn| 4 * parameters.shape(fqn).unwrap().iter().product::<usize>())
        .sum();

    let input = (case.input)();
    let (output, loss) = model
        .forward(|forward| loss(forward, &input))
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(bits(&output) == plain.output, "{name}: other outputs");
    match (&plain.after, model.backward(&loss)) {
        (Some(after), Ok(_)) => {
            let has_gradient = |fqn: &&str| parameters.has_gradient(fqn).unwrap();
            let trained: BTreeSet<String> = parameters
                .fqns()
                .filter(has_gradient)
                .map(str::to_owned)
                .collect();
            assert_eq!(trained, plain.trained, "{name}: parameters with gradients");
            let sgd = Algorithm::Sgd(SgdOptions {
                lr: LR.into(),
                ..SgdOptions::default()
            });
            Optimizer::new(parameters, sgd).unwrap().step().unwrap();
            for (fqn, value) in whole(parameters) {
                assert!(
                    bits(&value) == after[&fqn],
                    "{name}: `{fqn}` is another one after a step"
                );
            }
        }
        (None, Err(_)) => {}
        (Some(_), Err(error)) => panic!("{name}: {error}"),
        (None, Ok(_)) => panic!("{name}: plain candle has no backward"),
    }
    assert_eq!(
        parameters.parameter_bytes(),
        shards,
        "{name}: only shards stay"
    );
    let peak = parameters.peak_parameter_bytes();
    assert!(
        peak <= shards + whole_bytes,
        "{name}: {peak} bytes, with shards of {shards} of {whole_bytes}"
    );
    Row {
        name,
        parameters: parameters.fqns().count(),
        trained: plain.after.as_ref().map(|_| plain.trained.len()),
    }
}
