//! Mixed precision: shards and optimizer state in f32, gathers and computation in bf16, reduction
//! in a dtype of its own.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, Linear, Module, embedding, linear_no_bias};
use fsdp_comm::{ProcessGroup, ReduceOp, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::torch::{StateDictOptions, get_model_state_dict};
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, MixedPrecision, Optimizer, Scope,
    ShardingStrategy, Unit,
};

const VOCABULARY: usize = 48;
const WIDTH: usize = 96;

/// Learns which token follows which.
struct Lm {
    tokens: Embedding,
    layers: Vec<Unit<Linear>>,
    norm: Tensor,
    head: Linear,
}

impl Lm {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let layer = |i: usize| {
            scope
                .pp("layers")
                .pp(i)
                .unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb()))
        };
        Ok(Lm {
            tokens: embedding(VOCABULARY, WIDTH, scope.vb().pp("tokens"))?,
            layers: (0..2).map(layer).collect::<candle_core::Result<_>>()?,
            norm: scope
                .vb()
                .get_with_hints(WIDTH, "norm.weight", candle_nn::init::ONE)?,
            head: linear_no_bias(WIDTH, VOCABULARY, scope.vb().pp("head"))?,
        })
    }

    fn logits(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.tokens.forward(tokens)?;
        for layer in &self.layers {
            x = (&x + layer.forward(&x)?.tanh()?)?;
        }
        self.head
            .forward(&candle_nn::ops::rms_norm_slow(&x, &self.norm, 1e-5)?)
    }
}

type Model = FullyShardedDataParallel<Lm>;

fn bf16() -> MixedPrecision {
    MixedPrecision {
        param: Some(DType::BF16),
        output: Some(DType::F32),
        ..MixedPrecision::default()
    }
}

fn config(dtype: DType, mixed_precision: MixedPrecision) -> FsdpConfig {
    FsdpConfig {
        dtype,
        mixed_precision,
        seed: 6,
        ..FsdpConfig::default()
    }
}

fn loss(model: &Model) -> Tensor {
    let (rank, world) = (model.group().rank(), model.group().world_size());
    let mine: Vec<u32> = (0..VOCABULARY)
        .filter(|token| token % world == rank)
        .map(|token| token as u32)
        .collect();
    let next: Vec<u32> = mine
        .iter()
        .map(|token| (token * 29 + 7) % VOCABULARY as u32)
        .collect();
    let tokens = Tensor::new(mine, &Device::Cpu).unwrap();
    let next = Tensor::new(next, &Device::Cpu).unwrap();
    let logits = model
        .forward(|lm| lm.logits(&tokens))
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    candle_nn::loss::cross_entropy(&logits, &next).unwrap()
}

/// The mean loss of each step over all ranks, and the bytes that the first forward and the first
/// backward move.
fn train(group: &ProcessGroup, config: FsdpConfig, steps: usize) -> (Vec<f32>, [u64; 2]) {
    let model = FullyShardedDataParallel::new(group.clone(), config, Lm::new).unwrap();
    let adamw = AdamOptions {
        lr: 1e-4,
        weight_decay: 0.0,
        ..AdamOptions::adamw()
    };
    let mut optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(adamw)).unwrap();
    let mut losses = Vec::new();
    let mut moved = [0; 2];
    for step in 0..steps {
        let start = group.traffic();
        let loss = loss(&model);
        let forward = group.traffic();
        model.backward(&loss).unwrap();
        if step == 0 {
            moved = [forward.since(&start), group.traffic().since(&forward)]
                .map(|traffic| traffic.tensor_bytes());
        }
        optimizer.step().unwrap();
        model.parameters().zero_grad();
        let mut mean = [loss.to_scalar::<f32>().unwrap()];
        group.all_reduce(&mut mean, ReduceOp::Avg).unwrap();
        losses.push(mean[0]);
    }
    (losses, moved)
}

#[test]
fn small_steps_add_up_in_mixed_precision_as_in_f32_and_not_in_bf16() {
    let mut outcomes = run_local(2, |group| {
        let plain = MixedPrecision::default();
        let full = train(&group, config(DType::F32, plain), 150);
        let pure = train(&group, config(DType::BF16, plain), 150);
        let mixed = train(&group, config(DType::F32, bf16()), 150);
        [full, pure, mixed]
    })
    .unwrap();
    let [
        (full, [gathered_in_f32, _]),
        (pure, _),
        (mixed, [gathered, _]),
    ] = outcomes.remove(0);
    let last = |losses: &[f32]| losses[losses.len() - 1];
    assert!(
        last(&full) < 0.6 * full[0],
        "{} to {}",
        full[0],
        last(&full)
    );
    let difference = (last(&mixed) - last(&full)).abs() / last(&full);
    assert!(difference < 0.02, "{} is not {}", last(&mixed), last(&full));
    assert!(
        last(&pure) > 1.2 * last(&mixed),
        "{} stands still, unlike {}",
        last(&pure),
        last(&mixed)
    );
    assert_eq!(2 * gathered, gathered_in_f32);
}

#[test]
fn every_strategy_on_any_ranks_computes_the_same() {
    let expected = run_local(1, |group| train(&group, config(DType::F32, bf16()), 12).0)
        .unwrap()
        .remove(0);
    for world in [1, 2, 4] {
        for strategy in ShardingStrategy::ALL {
            let found = run_local(world, |group| {
                let replicas = if world > 1 { 2 } else { 1 };
                let mesh = DeviceMesh::new(
                    &[replicas, world / replicas],
                    &["replicate", "shard"],
                    world,
                )
                .unwrap();
                let reduced_in_f32 = MixedPrecision {
                    reduce: Some(DType::F32),
                    ..bf16()
                };
                let config = FsdpConfig {
                    strategy,
                    mesh: Some(mesh),
                    ..config(DType::F32, reduced_in_f32)
                };
                train(&group, config, 12).0
            });
            for (found, expected) in found.unwrap().remove(0).iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 0.01 * expected,
                    "{strategy} on {world}: {found}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn gradients_are_reduced_in_a_dtype_of_their_own() {
    let moved = run_local(2, |group| {
        [None, Some(DType::F32)].map(|reduce| {
            let config = config(DType::F32, MixedPrecision { reduce, ..bf16() });
            // Parameters stay whole, so that the backward moves nothing but gradients.
            train(
                &group,
                FsdpConfig {
                    strategy: ShardingStrategy::ShardGradOp,
                    ..config
                },
                1,
            )
            .1
        })
    })
    .unwrap()
    .remove(0);
    let [
        [gathered, reduced_in_bf16],
        [gathered_again, reduced_in_f32],
    ] = moved;
    assert_eq!(gathered, gathered_again);
    // As many elements are reduced as are gathered.
    assert_eq!(reduced_in_f32 - reduced_in_bf16, gathered);
}

#[test]
fn shards_gradients_and_state_dicts_have_the_dtype_of_shards() {
    run_local(2, |group| {
        let model =
            FullyShardedDataParallel::new(group.clone(), config(DType::F32, bf16()), Lm::new)
                .unwrap();
        let mut optimizer =
            Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw())).unwrap();
        let loss = loss(&model);
        model.backward(&loss).unwrap();
        optimizer.step().unwrap();
        let parameters = model.parameters();
        let full = StateDictOptions {
            full_state_dict: true,
            ..StateDictOptions::default()
        };
        let state = get_model_state_dict(parameters, &full).unwrap();
        for fqn in parameters.fqns() {
            assert_eq!(parameters.dtype(fqn).unwrap(), DType::F32);
            assert_eq!(
                parameters.gradient(fqn).unwrap().unwrap().dtype(),
                DType::F32
            );
            assert_eq!(
                state.get(fqn).unwrap().as_tensor().unwrap().dtype(),
                DType::F32
            );
            let moments = optimizer.state_of(fqn).unwrap().unwrap();
            assert_eq!(moments["exp_avg"].as_sharded().unwrap().dtype(), DType::F32);
        }
    })
    .unwrap();
}

#[test]
fn a_unit_can_have_a_precision_of_its_own() {
    for world in [1, 2] {
        run_local(world, |group| {
            let exact = MixedPrecision {
                output: Some(DType::BF16),
                param: Some(DType::F32),
                ..MixedPrecision::default()
            };
            let model = FullyShardedDataParallel::new(group, config(DType::F32, bf16()), |scope| {
                let layer = |scope: &Scope| linear_no_bias(4, 4, scope.vb());
                Ok((
                    scope.pp("a").unit(layer)?,
                    scope.pp("b").unit_with(exact, layer)?,
                ))
            })
            .unwrap();
            let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
            let dtypes = std::cell::RefCell::new(Vec::new());
            let loss = model
                .forward(|(a, b)| {
                    // Inputs and outputs are converted at the edges of units.
                    let x = a.forward(&x)?;
                    b.run(|b| {
                        dtypes.borrow_mut().extend([x.dtype(), b.weight().dtype()]);
                        Ok(x.clone())
                    })?;
                    let x = b.forward(&x)?;
                    dtypes.borrow_mut().push(x.dtype());
                    x.sqr()?.mean_all()
                })
                .unwrap();
            assert_eq!(loss.dtype(), DType::F32);
            assert_eq!(*dtypes.borrow(), [DType::BF16, DType::F32, DType::BF16]);
            model.backward(&loss).unwrap();
            assert!(model.parameters().grad_norm().unwrap() > 0.0);
        })
        .unwrap();
    }
}

#[test]
fn dtypes_without_arithmetic_are_refused() {
    let f32 = MixedPrecision {
        param: Some(DType::F32),
        ..MixedPrecision::default()
    };
    let reduced = MixedPrecision {
        reduce: Some(DType::F8E4M3),
        ..f32
    };
    for config in [config(DType::F8E4M3, f32), config(DType::F32, reduced)] {
        let built = FullyShardedDataParallel::new(ProcessGroup::alone(), config, Lm::new);
        let error = built.err().expect("there is no arithmetic of 8-bit floats");
        assert!(error.to_string().contains("F8E4M3"), "{error}");
    }
}

#[test]
fn precisions_that_hold_no_floats_to_compute_with_are_refused() {
    run_local(2, |group| {
        let with = |dtype| MixedPrecision {
            output: Some(dtype),
            ..MixedPrecision::default()
        };
        let build = |whole: MixedPrecision, of_unit: MixedPrecision| {
            let config = FsdpConfig {
                mixed_precision: whole,
                ..FsdpConfig::default()
            };
            FullyShardedDataParallel::new(group.clone(), config, |scope| {
                candle_nn::linear(3, 2, scope.vb())?;
                let unit = scope.pp("unit");
                unit.unit_with(of_unit, |scope| candle_nn::linear(3, 2, scope.vb()))
            })
            .map(drop)
        };
        for dtype in [DType::U32, DType::F8E4M3] {
            for (whole, of_unit) in [
                (with(dtype), with(DType::F32)),
                (with(DType::F32), with(dtype)),
            ] {
                let error = build(whole, of_unit).unwrap_err().to_string();
                assert!(error.contains("MixedPrecision::output"), "{error}");
            }
        }
        build(with(DType::BF16), with(DType::F64)).unwrap();
    })
    .unwrap();
}
