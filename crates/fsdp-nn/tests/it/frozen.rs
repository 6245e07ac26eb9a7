//! Frozen parameters inside units: adapters and biases train the same at any number of ranks, under
//! every strategy.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Embedding, Linear, Module, embedding, linear};
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_layout::{DeviceMesh, TensorBox};
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, Scope, ShardingStrategy,
    Unit,
};

const STEPS: usize = 4;
const ROWS: usize = 24;

/// A layer with a low-rank adapter beside its matrix.
struct Lora {
    base: Linear,
    a: Tensor,
    b: Tensor,
}

impl Lora {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let small = candle_nn::Init::Randn {
            mean: 0.0,
            stdev: 0.3,
        };
        Ok(Lora {
            base: linear(6, 6, scope.vb().pp("base"))?,
            a: scope.vb().get_with_hints((2, 6), "lora_a", small)?,
            b: scope.vb().get_with_hints((6, 2), "lora_b", small)?,
        })
    }
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.base.forward(x)? + x.matmul(&self.a.t()?)?.matmul(&self.b.t()?)?
    }
}

struct Net {
    tokens: Embedding,
    layers: Vec<Unit<Lora>>,
    head: Linear,
}

impl Net {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let layer = |index: usize| scope.pp("layers").pp(index).unit(Lora::new);
        Ok(Net {
            tokens: embedding(5, 6, scope.vb().pp("tokens"))?,
            layers: (0..3).map(layer).collect::<candle_core::Result<_>>()?,
            head: linear(6, 2, scope.vb().pp("head"))?,
        })
    }

    /// The loss of some tokens. The first layer is used twice.
    fn loss(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.tokens.forward(tokens)?;
        for layer in self.layers.iter().chain(&self.layers[..1]) {
            x = (&x + layer.forward(&x)?.tanh()?)?;
        }
        (self.head.forward(&x)? - 0.3)?.sqr()?.mean_all()
    }
}

type Model = FullyShardedDataParallel<Net>;
type RequiresGrad = fn(&str) -> bool;

/// Trains the adapters only, as LoRA does.
fn lora(fqn: &str) -> bool {
    fqn.contains("lora_")
}

fn biases(fqn: &str) -> bool {
    fqn.ends_with("bias")
}

fn all_but_one_matrix(fqn: &str) -> bool {
    fqn != "layers.1.base.weight"
}

fn all_but_the_first_unit(fqn: &str) -> bool {
    !fqn.starts_with("layers.0") && !fqn.starts_with("tokens")
}

const CASES: [(&str, RequiresGrad); 4] = [
    ("LoRA", lora),
    ("BitFit", biases),
    ("one frozen matrix", all_but_one_matrix),
    ("a frozen unit below trained ones", all_but_the_first_unit),
];

fn model(group: &ProcessGroup, strategy: ShardingStrategy, requires_grad: RequiresGrad) -> Model {
    let world = group.world_size();
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    let requires_grad = Arc::new(requires_grad);
    let config = FsdpConfig {
        strategy,
        mesh: Some(mesh),
        seed: 11,
        requires_grad,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group.clone(), config, Net::new).unwrap()
}

fn optimizer(model: &Model) -> Optimizer {
    let adamw = AdamOptions {
        lr: 1e-2,
        eps: 1e-3,
        ..AdamOptions::adamw()
    };
    Optimizer::new(model.parameters(), Algorithm::AdamW(adamw)).unwrap()
}

/// One step on this rank's rows of a batch, as two micro-batches, of which the first does not
/// communicate.
fn step(model: &Model, optimizer: &mut Optimizer, step: usize) {
    let rows = ROWS / model.group().world_size();
    let micro_batch = |index: usize| {
        let first = model.group().rank() * rows + index * rows / 2;
        let tokens: Vec<u32> = (first..first + rows / 2)
            .map(|row| ((row * 7 + step * 3) % 5) as u32)
            .collect();
        Tensor::new(tokens, &Device::Cpu).unwrap()
    };
    let backward = |index: usize| {
        let loss = model.forward(|net| net.loss(&micro_batch(index))).unwrap();
        model.backward(&(loss * 0.5).unwrap()).unwrap();
    };
    let between = model.parameters().parameter_bytes();
    model
        .no_sync(|_| {
            backward(0);
            Ok::<_, NnError>(())
        })
        .unwrap();
    backward(1);
    assert_eq!(
        model.parameters().parameter_bytes(),
        between,
        "all units are released"
    );
    optimizer.step().unwrap();
    model.parameters().zero_grad();
}

/// All parameters, gathered, in order.
fn values(model: &Model) -> Vec<(String, Vec<f32>)> {
    let parameters = model.parameters();
    let whole = |fqn: &str| {
        let mine = parameters.parameter(fqn).unwrap();
        let shards = mine.shards().iter();
        let shards: Vec<(TensorBox, Vec<f32>)> = shards
            .map(|s| {
                (
                    s.bounds.clone(),
                    s.tensor.flatten_all().unwrap().to_vec1().unwrap(),
                )
            })
            .collect();
        let bounds = TensorBox::whole(mine.shape());
        let mut values = vec![f32::NAN; bounds.numel()];
        for (part, data) in model
            .group()
            .all_gather_object(&shards)
            .unwrap()
            .into_iter()
            .flatten()
        {
            for run in fsdp_layout::boxes::copy_runs(&part, &part, &bounds) {
                values[run.dst..run.dst + run.len]
                    .copy_from_slice(&data[run.src..run.src + run.len]);
            }
        }
        (fqn.to_owned(), values)
    };
    parameters.fqns().map(whole).collect()
}

/// The parameters that `run` ends with on one rank, which those on several ranks are compared with,
/// under every strategy.
fn check_equal_to_one_rank(
    what: &str,
    run: impl Fn(&ProcessGroup, ShardingStrategy) -> Vec<(String, Vec<f32>)> + Sync,
) -> Vec<(String, Vec<f32>)> {
    let on_one = run_local(1, |group| run(&group, ShardingStrategy::NoShard))
        .unwrap()
        .remove(0);
    for world in 1..=4 {
        for strategy in ShardingStrategy::ALL {
            let found = run_local(world, |group| run(&group, strategy))
                .unwrap()
                .remove(0);
            for ((fqn, found), (_, expected)) in found.iter().zip(&on_one) {
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (found - expected).abs() < 1e-6,
                        "{what}, {strategy} on {world}: `{fqn}` has {found}, and {expected} on one rank"
                    );
                }
            }
        }
    }
    on_one
}

#[test]
fn adapters_and_biases_train_the_same_at_any_number_of_ranks() {
    for (what, requires_grad) in CASES {
        let trained = check_equal_to_one_rank(what, |group, strategy| {
            let model = model(group, strategy, requires_grad);
            let mut optimizer = optimizer(&model);
            (0..STEPS).for_each(|k| step(&model, &mut optimizer, k));
            values(&model)
        });
        let initial = run_local(1, |group| {
            values(&model(&group, ShardingStrategy::NoShard, requires_grad))
        })
        .unwrap();
        for ((fqn, trained), (_, initial)) in trained.iter().zip(&initial[0]) {
            assert_eq!(
                trained != initial,
                requires_grad(fqn),
                "{what}: `{fqn}` changes if it is trained"
            );
        }
    }
}

#[test]
fn requires_grad_can_change_between_steps() {
    let trained = check_equal_to_one_rank("gradual unfreezing", |group, strategy| {
        let model = model(group, strategy, |_| true);
        let mut optimizer = optimizer(&model);
        let parameters = model.parameters();
        let initial = values(&model);
        // From the head down to the first layer.
        parameters
            .set_requires_grad(|fqn| fqn.starts_with("head"))
            .unwrap();
        step(&model, &mut optimizer, 0);
        for ((fqn, now), (_, before)) in values(&model).iter().zip(&initial) {
            assert_eq!(now != before, fqn.starts_with("head"), "`{fqn}`");
            assert_eq!(
                parameters.requires_grad(fqn).unwrap(),
                fqn.starts_with("head")
            );
        }
        parameters
            .set_requires_grad(|fqn| fqn.starts_with("head") || fqn.starts_with("layers.2"))
            .unwrap();
        step(&model, &mut optimizer, 1);
        parameters
            .set_requires_grad(|fqn| !fqn.starts_with("head"))
            .unwrap();
        step(&model, &mut optimizer, 2);
        values(&model)
    });
    let initial = run_local(1, |group| {
        values(&model(&group, ShardingStrategy::NoShard, |_| true))
    })
    .unwrap();
    for ((fqn, trained), (_, initial)) in trained.iter().zip(&initial[0]) {
        assert_ne!(trained, initial, "`{fqn}`");
    }
}

#[test]
fn a_parameter_that_was_built_frozen_cannot_be_trained_later() {
    let errors = run_local(2, |group| {
        let model = model(&group, ShardingStrategy::FullShard, lora);
        let error = model
            .parameters()
            .set_requires_grad(|_| true)
            .unwrap_err()
            .to_string();
        assert!(
            !model.parameters().requires_grad("tokens.weight").unwrap(),
            "nothing has changed"
        );
        error
    })
    .unwrap();
    for error in errors {
        assert!(
            error.contains("`tokens.weight`") && error.contains("FsdpConfig::requires_grad"),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_train_different_parameters_are_told_which() {
    let errors = run_local(3, |group| {
        let model = model(&group, ShardingStrategy::FullShard, |_| true);
        let rank = group.rank();
        model
            .parameters()
            .set_requires_grad(|fqn| rank != 1 || fqn != "head.bias")
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for error in errors {
        assert!(
            error.contains("`head.bias`") && error.contains("rank 1"),
            "{error}"
        );
    }
}

#[test]
fn a_flat_parameter_is_trained_as_a_whole() {
    run_local(2, |group| {
        let config = FsdpConfig {
            use_orig_params: false,
            ..FsdpConfig::default()
        };
        let model = FullyShardedDataParallel::new(group, config, Net::new).unwrap();
        let parameters = model.parameters();
        let error = parameters.set_requires_grad(lora).unwrap_err().to_string();
        assert!(error.contains("use_orig_params"), "{error}");
        parameters
            .set_requires_grad(|fqn| fqn.starts_with("layers"))
            .unwrap();
        assert!(!parameters.requires_grad("head.weight").unwrap());
        assert_eq!(parameters.dtype("head.weight").unwrap(), DType::F32);
    })
    .unwrap();
}

#[test]
fn a_backward_keeps_no_gradients_of_frozen_matrices_in_units() {
    for world in [1, 2] {
        for strategy in ShardingStrategy::ALL {
            run_local(world, |group| {
                let model = model(&group, strategy, lora);
                let tokens = Tensor::new(vec![1u32, 2, 3], &Device::Cpu).unwrap();
                let loss = model.forward(|net| net.loss(&tokens)).unwrap();
                let kept = model.backward(&loss).unwrap();
                let shapes: Vec<&[usize]> = kept
                    .get_ids()
                    .map(|id| kept.get_id(*id).unwrap().dims())
                    .collect();
                assert!(
                    !shapes.contains(&&[6, 6][..]),
                    "{strategy} on {world}: {shapes:?}"
                );
                assert!(model.parameters().has_gradient("layers.0.lora_a").unwrap());
            })
            .unwrap();
        }
    }
}

/// Builds three blocks, of which the last one is trained, without a root.
fn blocks(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
) -> FullyShardedDataParallel<Vec<Unit<Linear>>> {
    let requires_grad = Arc::new(|fqn: &str| fqn.starts_with('2'));
    let config = FsdpConfig {
        strategy,
        requires_grad,
        ..FsdpConfig::default()
    };
    let block =
        |scope: &Scope, index: usize| scope.pp(index).unit(|scope| linear(4, 4, scope.vb()));
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..3).map(|index| block(scope, index)).collect()
    })
    .unwrap()
}

#[test]
fn frozen_units_before_the_first_trained_one_leave_no_graph_where_nothing_is_sharded() {
    for world in [1, 2] {
        run_local(world, |group| {
            let model = blocks(&group, ShardingStrategy::NoShard);
            let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
            // A trained variable before them needs their gradients.
            let var = Var::from_tensor(&x).unwrap();
            for (x, is_kept) in [(&x, false), (var.as_tensor(), true)] {
                let loss = model.forward(|blocks| {
                    let first = blocks[0].forward(x)?.tanh()?;
                    assert_eq!(first.track_op(), is_kept);
                    let second = blocks[1].forward(&first)?;
                    assert_eq!(second.track_op(), is_kept);
                    blocks[2].forward(&second)?.sqr()?.sum_all()
                });
                let grads = model.backward(&loss.unwrap()).unwrap();
                assert_eq!(grads.get(&var).is_some(), is_kept);
                assert!(model.parameters().has_gradient("2.weight").unwrap());
            }
        })
        .unwrap();
    }
}

#[test]
fn a_backward_does_not_gather_frozen_units_whose_output_the_model_detaches() {
    run_local(2, |group| {
        let model = blocks(&group, ShardingStrategy::FullShard);
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let loss = model.forward(|blocks| {
            let x = blocks[1].forward(&blocks[0].forward(&x)?.tanh()?)?.detach();
            blocks[2].forward(&x)?.sqr()?.sum_all()
        });
        let loss = loss.unwrap();
        let before = group.traffic();
        model.backward(&loss).unwrap();
        assert_eq!(
            group.traffic().since(&before).count(Operation::AllGather),
            1
        );
        assert!(model.parameters().has_gradient("2.weight").unwrap());
    })
    .unwrap();
}
