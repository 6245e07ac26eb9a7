//! A model with a tied embedding, two units, buffers and a parameter of one element; and
//! comparisons bit for bit.

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::{DeviceMesh, PlainValue};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::torch::{StateDictOptions, get_state_dict};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, Optimizer, ParamGroup, ShardingStrategy, Unit,
};
use fsdp_state::{GatherOptions, StateDict, StateValue, flatten_containers, gather_state_dict};

pub(crate) struct Net {
    embedding: Tensor,
    a: Unit<Linear>,
    b: Unit<Linear>,
    scale: Tensor,
}

pub(crate) type Model = FullyShardedDataParallel<Net>;

/// A tied embedding and head, two units, a buffer of each kind, a bare parameter that is smaller
/// than any world.
pub(crate) fn model(group: ProcessGroup, config: FsdpConfig) -> Model {
    FullyShardedDataParallel::new(group, config, |scope| {
        scope.tie("head.weight", "embedding.weight");
        let init = candle_nn::Init::Randn {
            mean: 0.0,
            stdev: 0.3,
        };
        let embedding = scope
            .vb()
            .get_with_hints((5, 6), "embedding.weight", init)?;
        let tied = scope.vb().get_with_hints((5, 6), "head.weight", init)?;
        assert_eq!(tied.id(), embedding.id());
        scope.buffer("steps", Tensor::new(7f32, &Device::Cpu)?, true);
        scope.buffer("scratch", Tensor::new(8f32, &Device::Cpu)?, false);
        Ok(Net {
            embedding,
            a: scope.pp("a").unit(|scope| linear(6, 9, scope.vb()))?,
            b: scope.pp("b").unit(|scope| linear(9, 6, scope.vb()))?,
            scale: scope
                .vb()
                .get_with_hints(1, "scale", candle_nn::init::ONE)?,
        })
    })
    .unwrap()
}

pub(crate) fn config(
    world: usize,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    seed: u64,
) -> FsdpConfig {
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    FsdpConfig {
        strategy,
        use_orig_params,
        seed,
        mesh: Some(mesh),
        ..FsdpConfig::default()
    }
}

pub(crate) fn sharded(group: &ProcessGroup, seed: u64) -> Model {
    model(
        group.clone(),
        config(group.world_size(), ShardingStrategy::FullShard, true, seed),
    )
}

/// The same model on one rank: the reference.
pub(crate) fn whole(seed: u64) -> Model {
    let group = run_local(1, |group| group).unwrap().remove(0);
    model(group, config(1, ShardingStrategy::NoShard, true, seed))
}

pub(crate) fn step(model: &Model, optimizers: &mut [&mut Optimizer], seed: usize) {
    let ids = Tensor::new(&[(seed % 5) as u32, ((seed + 2) % 5) as u32], &Device::Cpu).unwrap();
    let loss = model
        .forward(|net| {
            let x = net.embedding.index_select(&ids, 0)?;
            let h = net
                .b
                .forward(&net.a.forward(&x)?.tanh()?)?
                .broadcast_mul(&net.scale)?;
            h.matmul(&net.embedding.t()?)?.sqr()?.mean_all()
        })
        .unwrap();
    model.backward(&loss).unwrap();
    optimizers
        .iter_mut()
        .for_each(|optimizer| optimizer.step().unwrap());
    model.parameters().zero_grad();
}

pub(crate) fn adamw() -> Algorithm {
    Algorithm::AdamW(AdamOptions {
        lr: 0.01,
        ..AdamOptions::adamw()
    })
}

pub(crate) fn options() -> StateDictOptions {
    StateDictOptions::default()
}

pub(crate) fn full(group: &ProcessGroup, state: &StateDict) -> StateDict {
    gather_state_dict(state, group, &GatherOptions::default()).unwrap()
}

/// Every leaf with its bits, sorted by key.
pub(crate) fn bits(state: &StateDict) -> Vec<(String, String)> {
    let mut leaves: Vec<(String, String)> = flatten_containers(state)
        .unwrap()
        .values
        .into_iter()
        .map(|(key, value)| {
            let text = match value {
                StateValue::Tensor(t) => {
                    let bytes = fsdp_flat::storage::HostBytes::read(&t.contiguous().unwrap())
                        .unwrap()
                        .to_vec();
                    format!("{:?} {bytes:?}", t.dims())
                }
                StateValue::Plain(value) => format!("{value:?}"),
                other => panic!("{key} is a {}", other.kind()),
            };
            (key, text)
        })
        .collect();
    leaves.sort();
    leaves
}

pub(crate) fn gathered_bits(model: &Model, optimizers: &[&Optimizer]) -> Vec<(String, String)> {
    let (m, o) = get_state_dict(model.parameters(), optimizers, &options()).unwrap();
    let mut all = bits(&full(model.group(), &m));
    all.extend(bits(&full(model.group(), &o)));
    all
}

pub(crate) fn groups(first: f64, second: f64) -> Vec<ParamGroup> {
    let group = |lr: f64, fqns: &[&str]| {
        let algorithm = Algorithm::AdamW(AdamOptions {
            lr,
            ..AdamOptions::adamw()
        });
        let mut group = ParamGroup::new(algorithm, fqns.iter().copied());
        group
            .extra
            .push(("initial_lr".to_owned(), PlainValue::Float(lr * 2.0)));
        group
    };
    vec![
        group(first, &["embedding.weight", "a.weight", "a.bias"]),
        group(second, &["b.weight", "b.bias", "scale"]),
        group(0.5, &[]),
    ]
}
