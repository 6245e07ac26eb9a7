//! Models of named parameters with gradients that are small integers, so that any number of ranks
//! gets the same bits; and comparisons of state dicts, bit for bit.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{LocalRanks, ProcessGroup};
use fsdp_flat::storage::HostBytes;
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::{DeviceMesh, PlainValue};
use fsdp_nn::algorithm::{AdagradOptions, AdamOptions, SgdOptions};
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, Optimizer, ParamGroup, Scope,
    ShardedParameters, ShardingStrategy, Unit,
};
use fsdp_state::{GatherOptions, StateDict, StateValue, gather_state_dict};

/// The parts of a model.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spec {
    /// Unit (the root's is empty), name in the unit, shape.
    pub(crate) params: Vec<(&'static str, &'static str, Vec<usize>)>,
    /// Alias and parameter.
    pub(crate) ties: Vec<(&'static str, &'static str)>,
    /// Name, length, persistent.
    pub(crate) buffers: Vec<(&'static str, usize, bool)>,
    /// Units whose parameters the loss does not use.
    pub(crate) unused: Vec<&'static str>,
    /// Parameters that are not trained.
    pub(crate) frozen: Vec<&'static str>,
}

fn spec(params: &[(&'static str, &'static str, &[usize])]) -> Spec {
    let params = params
        .iter()
        .map(|&(unit, name, shape)| (unit, name, shape.to_vec()))
        .collect();
    Spec {
        params,
        ..Spec::default()
    }
}

/// Three blocks in nested units, a bare root parameter.
pub(crate) fn nested() -> Spec {
    spec(&[
        ("", "bias", &[5]),
        ("", "block0.weight", &[5, 3]),
        ("", "block0.bias", &[3]),
        ("block1", "bias", &[7]),
        ("block1", "weight", &[3, 7]),
        ("block1.bias_module0", "bias", &[7]),
        ("block2.1", "weight", &[9, 9]),
        ("block2.1.bias_module0", "bias", &[9]),
        ("block2.1.bias_module1", "bias", &[9]),
        ("block2.2", "weight", &[9, 5]),
        ("block2.2", "bias", &[5]),
        ("", "block2.0.weight", &[7, 9]),
    ])
}

/// The same names in other units.
pub(crate) fn nested_alt() -> Spec {
    let units = [
        "", "block0", "block0", "", "", "", "block2", "block2", "block2", "block2", "block2",
        "block2",
    ];
    let mut alt = nested();
    for ((unit, name, _), new) in alt.params.iter_mut().zip(units) {
        let full = if unit.is_empty() {
            (*name).to_owned()
        } else {
            format!("{unit}.{name}")
        };
        let relative = full
            .strip_prefix(new)
            .unwrap()
            .trim_start_matches('.')
            .to_owned();
        (*unit, *name) = (new, Box::leak(relative.into_boxed_str()));
    }
    alt
}

/// Linear layers, buffers, a bare root parameter.
pub(crate) fn composite() -> Spec {
    let mut spec = spec(&[
        ("", "l1.weight", &[4, 10]),
        ("", "l1.bias", &[4]),
        ("u1", "0.weight", &[10, 4]),
        ("u1", "0.bias", &[10]),
        ("u2", "0.weight", &[4, 10]),
        ("", "p", &[4, 1]),
    ]);
    spec.buffers = vec![
        ("u1.buffer", 3, true),
        ("scratch", 2, false),
        ("mean", 5, true),
    ];
    spec
}

pub(crate) fn dummy() -> Spec {
    spec(&[
        ("net1", "weight", &[16, 8]),
        ("net1", "bias", &[16]),
        ("net2", "weight", &[3, 16]),
        ("net2", "bias", &[3]),
        ("", "net4.weight", &[2, 3]),
    ])
}

pub(crate) fn uneven() -> Spec {
    spec(&[
        ("net1", "weight", &[10, 5]),
        ("net1", "bias", &[10]),
        ("net2", "weight", &[15, 10]),
        ("net3", "weight", &[1, 15]),
        ("net3", "bias", &[1]),
        ("", "net4.bias", &[3]),
    ])
}

/// An embedding whose weight is the decoder's too.
pub(crate) fn tied() -> Spec {
    let mut spec = spec(&[("", "embedding.weight", &[6, 3]), ("decoder", "bias", &[6])]);
    spec.ties = vec![("decoder.weight", "embedding.weight")];
    spec
}

pub(crate) fn mini7() -> Spec {
    spec(&[
        ("", "sc", &[7]),
        ("", "l1.weight", &[5, 3]),
        ("", "l1.bias", &[5]),
        ("", "l2.weight", &[2, 5]),
        ("", "l2.bias", &[2]),
    ])
}

/// A parameter without dimensions among others.
pub(crate) fn with_scalar() -> Spec {
    spec(&[
        ("u", "weight", &[2, 3]),
        ("u", "scale", &[]),
        ("", "bias", &[4]),
    ])
}

pub(crate) fn models() -> Vec<(&'static str, Spec)> {
    vec![
        ("nested", nested()),
        ("composite", composite()),
        ("dummy", dummy()),
        ("uneven", uneven()),
        ("tied", tied()),
        ("mini7", mini7()),
        ("with_scalar", with_scalar()),
    ]
}

type Named = Vec<(String, Tensor)>;

/// A model of a [`Spec`].
pub(crate) struct Net {
    root: Named,
    units: Vec<(String, Unit<Named>)>,
    unused: Vec<&'static str>,
}

impl Net {
    fn new(scope: &Scope, spec: &Spec) -> candle_core::Result<Self> {
        let get = |scope: &Scope, unit: &str, wanted: &str| -> candle_core::Result<Named> {
            let of_unit = spec.params.iter().filter(|(of, ..)| *of == wanted);
            of_unit
                .map(|(_, name, shape)| {
                    let init = candle_nn::Init::Randn {
                        mean: 0.,
                        stdev: 1.,
                    };
                    let full = if unit.is_empty() {
                        (*name).to_owned()
                    } else {
                        format!("{unit}.{name}")
                    };
                    Ok((
                        full,
                        scope.vb().get_with_hints(shape.as_slice(), name, init)?,
                    ))
                })
                .collect()
        };
        for (alias, fqn) in &spec.ties {
            scope.tie(alias, fqn);
        }
        for &(name, len, persistent) in &spec.buffers {
            scope.buffer(
                name,
                Tensor::arange(1f32, 1. + len as f32, &Device::Cpu)?,
                persistent,
            );
        }
        let root = get(scope, "", "")?;
        let mut units = Vec::new();
        for (unit, ..) in &spec.params {
            if !unit.is_empty() && !units.iter().any(|(known, _)| known == unit) {
                let built = scope.pp(unit).unit(|scope| get(scope, unit, unit))?;
                units.push(((*unit).to_owned(), built));
            }
        }
        Ok(Net {
            root,
            units,
            unused: spec.unused.clone(),
        })
    }

    fn loss(&self, step: usize) -> candle_core::Result<Tensor> {
        let zero = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        let sum = |params: &Named| {
            params.iter().try_fold(zero.clone(), |sum, (fqn, param)| {
                let product =
                    (param * coefficients(fqn, param.dims(), step)?.to_dtype(param.dtype())?)?;
                sum + product.sum_all()?.to_dtype(DType::F64)?
            })
        };
        let mut loss = sum(&self.root)?;
        for (name, unit) in &self.units {
            if !self.unused.contains(&name.as_str()) {
                loss = (loss + unit.run(sum)?)?;
            }
        }
        Ok(loss)
    }
}

/// Small integers that depend on the name, the element and the step.
fn coefficients(fqn: &str, shape: &[usize], step: usize) -> candle_core::Result<Tensor> {
    let seed = fqn.bytes().fold(step * 31 + 7, |hash, byte| {
        (hash * 131 + byte as usize) % 65_521
    });
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|i: usize| ((seed + i * 37) % 9) as f32 - 4.0)
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// How a model is laid out over ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Layout {
    pub(crate) world: usize,
    pub(crate) strategy: ShardingStrategy,
    pub(crate) use_orig_params: bool,
}

pub(crate) const PLAIN: Layout = Layout {
    world: 1,
    strategy: ShardingStrategy::NoShard,
    use_orig_params: true,
};

pub(crate) const fn full_shard(world: usize, use_orig_params: bool) -> Layout {
    Layout {
        world,
        strategy: ShardingStrategy::FullShard,
        use_orig_params,
    }
}

/// Layouts over up to five ranks, in both modes.
pub(crate) fn layouts() -> Vec<Layout> {
    let mut layouts = Vec::new();
    for use_orig_params in [true, false] {
        layouts.extend((1..=5).map(|world| full_shard(world, use_orig_params)));
        for (world, strategy) in [
            (2, ShardingStrategy::NoShard),
            (3, ShardingStrategy::ShardGradOp),
            (4, ShardingStrategy::HybridShard),
        ] {
            layouts.push(Layout {
                world,
                strategy,
                use_orig_params,
            });
        }
    }
    layouts
}

pub(crate) type Model = FullyShardedDataParallel<Net>;

pub(crate) fn model_of(
    group: &ProcessGroup,
    spec: &Spec,
    layout: Layout,
    dtype: DType,
    seed: u64,
) -> Model {
    let frozen: Vec<String> = spec.frozen.iter().map(|fqn| (*fqn).to_owned()).collect();
    let mesh = (layout.strategy == ShardingStrategy::HybridShard).then(|| {
        DeviceMesh::new(
            &[2, layout.world / 2],
            &["replicate", "shard"],
            layout.world,
        )
        .unwrap()
    });
    let config = FsdpConfig {
        strategy: layout.strategy,
        use_orig_params: layout.use_orig_params,
        mesh,
        dtype,
        seed,
        requires_grad: Arc::new(move |fqn| !frozen.iter().any(|frozen| frozen == fqn)),
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group.clone(), config, |scope| Net::new(scope, spec)).unwrap()
}

pub(crate) fn model(group: &ProcessGroup, spec: &Spec, layout: Layout) -> Model {
    model_of(group, spec, layout, DType::F32, 1)
}

/// Steps of training that are the same on any number of ranks.
pub(crate) fn train(
    model: &Model,
    optimizers: &mut [&mut Optimizer],
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let loss = model.forward(|net| net.loss(step)).unwrap();
        model.backward(&loss).unwrap();
        for optimizer in optimizers.iter_mut() {
            optimizer.step().unwrap();
        }
        model.parameters().zero_grad();
    }
}

pub(crate) fn adam() -> Algorithm {
    Algorithm::Adam(AdamOptions {
        lr: 0.01,
        ..AdamOptions::default()
    })
}

pub(crate) fn sgd(momentum: f64) -> Algorithm {
    Algorithm::Sgd(SgdOptions {
        lr: 0.01,
        momentum,
        ..SgdOptions::default()
    })
}

pub(crate) fn algorithms() -> Vec<Algorithm> {
    let amsgrad = AdamOptions {
        lr: 0.01,
        amsgrad: true,
        ..AdamOptions::adamw()
    };
    vec![
        adam(),
        Algorithm::AdamW(amsgrad),
        sgd(0.0),
        sgd(0.9),
        Algorithm::Adagrad(AdagradOptions::default()),
    ]
}

/// One group; or two, of alternate units, and an empty one, with keys that no algorithm knows.
pub(crate) fn optimizer(
    parameters: &Arc<ShardedParameters>,
    spec: &Spec,
    algorithm: &Algorithm,
    groups: bool,
) -> Optimizer {
    let fqns: Vec<(String, &str)> = spec
        .params
        .iter()
        .map(|(unit, name, _)| (full_name(unit, name), *unit))
        .collect();
    if !groups {
        return Optimizer::with_groups(
            parameters,
            vec![ParamGroup::new(
                algorithm.clone(),
                fqns.into_iter().map(|(fqn, _)| fqn),
            )],
        )
        .unwrap();
    }
    let (first, second): (Vec<_>, Vec<_>) = fqns.into_iter().partition(|(_, unit)| unit.is_empty());
    let mut slow = algorithm.clone();
    slow.set_lr(0.002).unwrap();
    let mut groups = vec![
        ParamGroup::new(algorithm.clone(), first.into_iter().map(|(fqn, _)| fqn)),
        ParamGroup::new(slow.clone(), second.into_iter().map(|(fqn, _)| fqn)),
        ParamGroup::new(slow, Vec::<String>::new()),
    ];
    groups[1].extra = vec![("initial_lr".to_owned(), PlainValue::Float(0.5))];
    Optimizer::with_groups(parameters, groups).unwrap()
}

pub(crate) fn full_name(unit: &str, name: &str) -> String {
    if unit.is_empty() {
        name.to_owned()
    } else {
        format!("{unit}.{name}")
    }
}

/// Runs one rank a thread; a rank that panics fails the test with its message.
pub(crate) fn ranks<T: Send>(world: usize, f: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let ranks = LocalRanks {
        world_size: world,
        deadline: std::time::Duration::from_secs(20),
        ..LocalRanks::default()
    };
    ranks.run(f).unwrap()
}

/// The state dict of a model and optimizer that were trained without sharding, with whole tensors:
/// (model, optimizer).
pub(crate) fn reference(
    spec: &Spec,
    algorithm: &Algorithm,
    groups: bool,
    dtype: DType,
    steps: usize,
) -> (StateDict, StateDict) {
    ranks(1, |group| {
        let model = model_of(&group, spec, PLAIN, dtype, 1);
        let mut optimizer = optimizer(model.parameters(), spec, algorithm, groups);
        train(&model, &mut [&mut optimizer], 0..steps);
        let parameters = model.parameters();
        let state = fsdp_nn::torch::state_dict(parameters).unwrap();
        (
            state,
            fsdp_nn::torch::optim_state_dict(None, parameters, &optimizer).unwrap(),
        )
    })
    .remove(0)
}

/// Whole tensors on all ranks, whatever they were.
pub(crate) fn whole(group: &ProcessGroup, state: &StateDict) -> StateDict {
    gather_state_dict(state, group, &GatherOptions::default()).unwrap()
}

pub(crate) fn bytes(tensor: &Tensor) -> Vec<u8> {
    HostBytes::read(&tensor.force_contiguous().unwrap())
        .unwrap()
        .to_vec()
}

/// The first place where two state dicts differ, by keys, kinds, shapes, dtypes or bits.
pub(crate) fn difference(a: &StateValue, b: &StateValue, at: &str) -> Option<String> {
    match (a, b) {
        (StateValue::Dict(a), StateValue::Dict(b)) => {
            let keys = |dict: &StateDict| {
                let mut keys: Vec<String> = dict.keys().map(str::to_owned).collect();
                keys.sort();
                keys
            };
            if keys(a) != keys(b) {
                return Some(format!("{at}: keys {:?} and {:?}", keys(a), keys(b)));
            }
            a.iter().find_map(|(key, value)| {
                difference(value, b.get(key).unwrap(), &format!("{at}.{key}"))
            })
        }
        (StateValue::List(a), StateValue::List(b))
        | (StateValue::Tuple(a), StateValue::Tuple(b)) => {
            if a.len() != b.len() {
                return Some(format!("{at}: {} and {} elements", a.len(), b.len()));
            }
            a.iter()
                .zip(b)
                .enumerate()
                .find_map(|(i, (a, b))| difference(a, b, &format!("{at}.{i}")))
        }
        (StateValue::Plain(a), StateValue::Plain(b)) => {
            (!a.same_bits(b)).then(|| format!("{at}: {a:?} and {b:?}"))
        }
        (StateValue::Tensor(a), StateValue::Tensor(b)) => {
            let same = a.dims() == b.dims() && a.dtype() == b.dtype() && bytes(a) == bytes(b);
            (!same).then(|| format!("{at}: {a} and {b}"))
        }
        (StateValue::Sharded(a), StateValue::Sharded(b)) => {
            let same = a.shape() == b.shape()
                && a.dtype() == b.dtype()
                && a.boxes() == b.boxes()
                && a.shards()
                    .iter()
                    .zip(b.shards())
                    .all(|(a, b)| bytes(&a.tensor) == bytes(&b.tensor));
            (!same).then(|| format!("{at}: {a:?} and {b:?}"))
        }
        (a, b) => Some(format!("{at}: a {} and a {}", a.kind(), b.kind())),
    }
}

#[track_caller]
pub(crate) fn assert_same(found: &StateDict, expected: &StateDict, what: &str) {
    let (found, expected) = (
        StateValue::Dict(found.clone()),
        StateValue::Dict(expected.clone()),
    );
    if let Some(difference) = difference(&found, &expected, "") {
        panic!("{what}: {difference}");
    }
}

/// The same dict with other lists of `params`: sets, whose order depends on units.
pub(crate) fn sorted_params(state: &StateDict) -> StateDict {
    let mut state = state.clone();
    if let Some(StateValue::List(groups)) = state.get_mut("param_groups") {
        for group in groups {
            if let StateValue::Dict(group) = group
                && let Some(StateValue::Plain(PlainValue::List(params))) = group.get_mut("params")
            {
                params.sort_by_key(|param| format!("{param:?}"));
            }
        }
    }
    state
}

/// Takes a copy of a dict that can be changed without changing the original: tensors are copied
/// too.
pub(crate) fn edit(state: &StateDict, path: &[&str], value: Option<StateValue>) -> StateDict {
    fn at(dict: &mut StateDict, path: &[&str], value: Option<StateValue>) {
        match path {
            [] => {}
            [last] => match value {
                Some(value) => _ = dict.insert(*last, value),
                None => assert!(dict.remove(last).is_some(), "no `{last}` to remove"),
            },
            [first, rest @ ..] => match dict.get_mut(first) {
                Some(StateValue::Dict(inner)) => at(inner, rest, value),
                _ => panic!("no dict `{first}`"),
            },
        }
    }
    let mut state = state.clone();
    at(&mut state, path, value);
    state
}

pub(crate) fn text(result: Result<impl std::fmt::Debug, fsdp_nn::NnError>) -> String {
    result.unwrap_err().to_string()
}

/// Returns the part that one of `readers` readers brings of what several ranks saved: each box
/// once.
pub(crate) fn redealt(saved: &[StateDict], reader: usize, readers: usize) -> StateDict {
    fn merge(parts: &[&StateValue], mine: &dyn Fn(usize) -> bool) -> StateValue {
        match parts[0] {
            StateValue::Dict(first) => {
                let of_key = |key: &str| {
                    parts
                        .iter()
                        .map(|part| part.as_dict().unwrap().get(key).unwrap())
                        .collect()
                };
                let merged = first.keys().map(|key| {
                    let parts: Vec<&StateValue> = of_key(key);
                    (key.to_owned(), merge(&parts, mine))
                });
                StateValue::Dict(merged.collect())
            }
            StateValue::Sharded(first) => {
                let mut shards: Vec<LocalShard> = Vec::new();
                for (_, part) in parts.iter().enumerate().filter(|(rank, _)| mine(*rank)) {
                    for shard in part.as_sharded().unwrap().shards() {
                        if !shards.iter().any(|known| known.bounds == shard.bounds) {
                            shards.push(shard.clone());
                        }
                    }
                }
                ShardedTensor::new(first.dtype(), first.shape().to_vec(), shards)
                    .unwrap()
                    .into()
            }
            other => other.clone(),
        }
    }
    let parts: Vec<StateValue> = saved.iter().cloned().map(StateValue::Dict).collect();
    match merge(&parts.iter().collect::<Vec<_>>(), &|rank| {
        rank % readers == reader
    }) {
        StateValue::Dict(dict) => dict,
        _ => StateDict::new(),
    }
}
