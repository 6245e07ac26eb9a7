//! Collectives beside the computation: the same bits as without, in bounded memory, and nothing
//! waits that need not.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor};
use candle_nn::{Linear, linear};
use fsdp_comm::{CommError, LocalRanks, Operation, ProcessGroup, SimulatedLink, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, BackwardPrefetch, CommHook, FsdpConfig, FullyShardedDataParallel, MixedPrecision,
    NnError, Optimizer, Recomputed, Scope, ShardingStrategy, Unit,
};

const LAYERS: usize = 4;
const WIDTH: usize = 6;

struct Layer {
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let up = linear(WIDTH, 10, scope.vb().pp("up"))?;
        Ok(Layer {
            up,
            down: linear(10, WIDTH, scope.vb().pp("down"))?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.tanh()?)?
    }
}

/// The way in which the layers are units.
#[derive(Debug, Clone, Copy)]
enum Units {
    Explicit,
    /// Recomputed, inside of units.
    Recomputed,
    /// Recomputed, with the unit inside.
    RecomputedAround,
}

enum Block {
    Unit(Unit<Recomputed<Layer>>),
    Around(Recomputed<Unit<Layer>>),
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Block::Unit(unit) => unit.forward(x),
            Block::Around(unit) => unit.forward(x),
        }
    }
}

struct Net {
    embed: Linear,
    blocks: Vec<Block>,
    head: Linear,
}

impl Net {
    fn new(scope: &Scope, units: Units) -> candle_core::Result<Self> {
        let block = |index: usize| {
            let scope = scope.pp("layers").pp(index);
            Ok(match units {
                Units::Explicit => Block::Unit(
                    scope.unit(|scope| Ok(Recomputed::when(false, Layer::new(scope)?)))?,
                ),
                Units::Recomputed => {
                    Block::Unit(scope.unit(|scope| Ok(Recomputed::new(Layer::new(scope)?)))?)
                }
                Units::RecomputedAround => Block::Around(Recomputed::new(scope.unit(Layer::new)?)),
            })
        };
        Ok(Net {
            embed: linear(3, WIDTH, scope.vb().pp("embed"))?,
            blocks: (0..LAYERS).map(block).collect::<candle_core::Result<_>>()?,
            head: linear(WIDTH, 2, scope.vb().pp("head"))?,
        })
    }

    /// The loss of the layers that are not left out.
    fn loss(&self, x: &Tensor, left_out: &[usize]) -> candle_core::Result<Tensor> {
        let mut h = self
            .embed
            .forward(&x.to_dtype(self.embed.weight().dtype())?)?;
        for (_, block) in self
            .blocks
            .iter()
            .enumerate()
            .filter(|(index, _)| !left_out.contains(index))
        {
            h = block.forward(&h)?;
        }
        self.head
            .forward(&h)?
            .to_dtype(DType::F32)?
            .sqr()?
            .mean_all()
    }
}

fn input(rank: usize, step: usize) -> Tensor {
    let values: Vec<f32> = (0..12)
        .map(|i| ((i * 7 + rank * 5 + step * 13) % 11) as f32 / 11.0 - 0.4)
        .collect();
    Tensor::from_vec(values, (4, 3), &Device::Cpu).unwrap()
}

fn model(group: &ProcessGroup, config: FsdpConfig, units: Units) -> FullyShardedDataParallel<Net> {
    FullyShardedDataParallel::new(group.clone(), config, |scope| Net::new(scope, units)).unwrap()
}

/// The rest of what a run does.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    /// Micro-batches of a step, of which all but the last are inside `no_sync`.
    micro_batches: usize,
    /// `true` if steps leave out layers, each step others.
    leaves_out: bool,
    hook: Option<CommHook>,
}

/// Losses of some steps, and the bits of this rank's part of each parameter after them.
fn train(
    model: &FullyShardedDataParallel<Net>,
    run: Run,
) -> Result<(Vec<u32>, Vec<Vec<u32>>), NnError> {
    if let Some(hook) = run.hook {
        model.register_comm_hook(hook)?;
    }
    let adamw = Algorithm::AdamW(AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    });
    let mut optimizer = Optimizer::new(model.parameters(), adamw)?;
    let mut losses = Vec::new();
    for step in 0..5 {
        let left_out: &[usize] = if run.leaves_out {
            [&[][..], &[1], &[1], &[0, 3], &[]][step]
        } else {
            &[]
        };
        for micro_batch in 0..=run.micro_batches {
            model.set_requires_gradient_sync(micro_batch == run.micro_batches);
            let x = input(model.group().rank(), step * 7 + micro_batch);
            let loss = model.forward(|net| net.loss(&x, left_out))?;
            model.backward(&loss)?;
            losses.push(loss.to_scalar::<f32>()?.to_bits());
        }
        optimizer.step()?;
        model.parameters().zero_grad();
    }
    let parameters = model.parameters();
    let piece = |fqn: &str| {
        let shards = parameters.parameter(fqn).unwrap().shards().to_vec();
        let values = shards.iter().map(|shard| {
            shard
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        });
        values
            .collect::<Vec<_>>()
            .concat()
            .into_iter()
            .map(f32::to_bits)
            .collect()
    };
    Ok((losses, parameters.fqns().map(piece).collect()))
}

fn config(world: usize, strategy: ShardingStrategy) -> FsdpConfig {
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    FsdpConfig {
        strategy,
        mesh: Some(mesh),
        seed: 4,
        ..FsdpConfig::default()
    }
}

/// The ways to have collectives beside the computation.
fn prefetching() -> Vec<FsdpConfig> {
    let with = |backward_prefetch, forward_prefetch, limit_all_gathers| FsdpConfig {
        backward_prefetch,
        forward_prefetch,
        limit_all_gathers,
        ..FsdpConfig::default()
    };
    let (pre, post) = (Some(BackwardPrefetch::Pre), Some(BackwardPrefetch::Post));
    vec![
        with(pre, true, true),
        with(post, false, true),
        with(None, true, false),
        with(pre, true, false),
    ]
}

/// Compares runs with collectives beside the computation with one without.
fn check(
    worlds: &[usize],
    strategies: &[ShardingStrategy],
    units: Units,
    run: Run,
    adjust: fn(FsdpConfig) -> FsdpConfig,
) {
    for &world in worlds {
        for &strategy in strategies {
            run_local(world, |group| {
                let config = adjust(config(world, strategy));
                let plain = model(&group, config.clone(), units);
                let between = plain.parameters().parameter_bytes();
                let expected = train(&plain, run).unwrap();
                assert_ne!(expected.0[0], expected.0[1], "losses say something");
                for prefetching in prefetching() {
                    let FsdpConfig {
                        backward_prefetch,
                        forward_prefetch,
                        limit_all_gathers,
                        ..
                    } = prefetching;
                    let config = FsdpConfig {
                        backward_prefetch,
                        forward_prefetch,
                        limit_all_gathers,
                        ..config.clone()
                    };
                    let what = format!("{units:?} {run:?} {config:?} on {world}");
                    let model = model(&group, config, units);
                    assert!(
                        train(&model, run).unwrap() == expected,
                        "{what}: other bits"
                    );
                    let bytes = model.parameters().parameter_bytes();
                    let kept = if strategy == ShardingStrategy::FullShard {
                        between
                    } else {
                        bytes
                    };
                    assert_eq!(bytes, kept, "{what}: nothing stays whole");
                }
            })
            .unwrap();
        }
    }
}

const WORLDS: [usize; 4] = [1, 2, 3, 4];

#[test]
fn losses_have_the_same_bits_with_every_strategy() {
    check(
        &WORLDS,
        &ShardingStrategy::ALL,
        Units::Explicit,
        Run::default(),
        |config| config,
    );
}

#[test]
fn losses_have_the_same_bits_with_recomputed_parts() {
    for units in [Units::Recomputed, Units::RecomputedAround] {
        check(
            &[2, 4],
            &ShardingStrategy::ALL,
            units,
            Run::default(),
            |config| config,
        );
    }
}

#[test]
fn losses_have_the_same_bits_with_accumulated_gradients_and_compressed_reductions() {
    let run = Run {
        micro_batches: 2,
        hook: Some(CommHook::Bf16Compress),
        ..Run::default()
    };
    check(
        &[2, 4],
        &ShardingStrategy::ALL,
        Units::Explicit,
        run,
        |config| config,
    );
}

#[test]
fn losses_have_the_same_bits_in_mixed_precision_with_frozen_weights_and_offload() {
    check(
        &[1, 2, 4],
        &ShardingStrategy::ALL,
        Units::Explicit,
        Run::default(),
        |config| FsdpConfig {
            mixed_precision: MixedPrecision {
                param: Some(DType::BF16),
                ..MixedPrecision::default()
            },
            requires_grad: Arc::new(|fqn| !fqn.contains("down")),
            cpu_offload: true,
            ..config
        },
    );
}

#[test]
fn steps_that_leave_the_order_gather_on_demand_and_have_the_same_bits() {
    let run = Run {
        leaves_out: true,
        micro_batches: 1,
        ..Run::default()
    };
    for units in [Units::Explicit, Units::RecomputedAround] {
        check(&[2, 3, 4], &ShardingStrategy::ALL, units, run, |config| {
            config
        });
    }
}

#[test]
fn a_slow_link_changes_no_bits() {
    let link = SimulatedLink {
        latency: Duration::from_micros(300),
        bytes_per_second: 10_000_000,
    };
    let train = |config: FsdpConfig| {
        let ranks = LocalRanks {
            world_size: 2,
            link: Some(link),
            ..LocalRanks::default()
        };
        let losses = ranks.run(|group| {
            train(
                &model(&group, config.clone(), Units::Explicit),
                Run::default(),
            )
            .unwrap()
        });
        losses.unwrap()
    };
    let config = config(2, ShardingStrategy::FullShard);
    let ahead = FsdpConfig {
        backward_prefetch: Some(BackwardPrefetch::Pre),
        forward_prefetch: true,
        ..config.clone()
    };
    assert!(train(config) == train(ahead));
}

/// Places that ranks have come to, for others to wait for.
#[derive(Default)]
struct Places {
    come_to: Mutex<HashSet<String>>,
    changed: Condvar,
}

impl Places {
    fn come_to(&self, place: String) {
        self.come_to.lock().unwrap().insert(place);
        self.changed.notify_all();
    }

    /// Waits until some rank has come to a place.
    fn wait_for(&self, place: &str) {
        let come_to = self.come_to.lock().unwrap();
        let wait = self
            .changed
            .wait_timeout_while(come_to, Duration::from_secs(20), |places| {
                !places.contains(place)
            });
        assert!(!wait.unwrap().1.timed_out(), "nobody has come to {place}");
    }
}

/// The identity, which tells when backward comes to it.
struct Tells<F>(F);

impl<F: Fn() + Send + Sync> CustomOp1 for Tells<F> {
    fn name(&self) -> &'static str {
        "tells"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        Ok((
            storage.to_dtype(layout, storage.dtype())?,
            layout.shape().clone(),
        ))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        (self.0)();
        Ok(Some(grad.clone()))
    }
}

/// Runs three steps on two ranks, of which the second waits in each layer, in the last step, until
/// the first is in the next one.
fn run_apart(config: &FsdpConfig, waits_in_forward: bool, waits_in_backward: bool) {
    let places = Arc::new(Places::default());
    let ranks = run_local(2, |group| {
        let rank = group.rank();
        let model = FullyShardedDataParallel::new(group, config.clone(), |scope| {
            let layer = |index: usize| {
                scope
                    .pp(index)
                    .unit(|scope| linear(WIDTH, WIDTH, scope.vb()))
            };
            (0..LAYERS)
                .map(layer)
                .collect::<candle_core::Result<Vec<Unit<Linear>>>>()
        })
        .unwrap();
        for step in 0..3 {
            let mut x = Tensor::ones((2, WIDTH), DType::F32, &Device::Cpu).unwrap();
            let loss = model.forward(|layers| {
                for (index, layer) in layers.iter().enumerate() {
                    let forward = |index: usize| format!("forward {index}");
                    let backward = |index: usize| format!("backward {index}");
                    let tells = {
                        let places = Arc::clone(&places);
                        Tells(move || {
                            if step == 2 && rank == 0 {
                                places.come_to(backward(index));
                            } else if step == 2 && waits_in_backward && index > 0 {
                                places.wait_for(&backward(index - 1));
                            }
                        })
                    };
                    x = layer.run(|layer| {
                        if step == 2 && rank == 0 {
                            places.come_to(forward(index));
                        } else if step == 2 && waits_in_forward && index + 1 < LAYERS {
                            places.wait_for(&forward(index + 1));
                        }
                        layer.forward(&x)?.tanh()?.apply_op1(tells)
                    })?;
                }
                x.sqr()?.mean_all()
            });
            model.backward(&loss.unwrap()).unwrap();
        }
    });
    ranks.unwrap();
}

#[test]
fn a_forward_begins_to_gather_the_next_unit_before_it_computes() {
    let config = FsdpConfig {
        forward_prefetch: true,
        ..config(2, ShardingStrategy::FullShard)
    };
    run_apart(&config, true, false);
}

#[test]
fn a_backward_goes_on_while_the_next_unit_is_gathered_and_the_last_one_reduced() {
    let pre = Some(BackwardPrefetch::Pre);
    let config = FsdpConfig {
        backward_prefetch: pre,
        ..config(2, ShardingStrategy::FullShard)
    };
    run_apart(&config, false, true);
}

#[test]
fn reductions_run_beside_a_backward_that_gathers_nothing() {
    for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        let post = Some(BackwardPrefetch::Post);
        run_apart(
            &FsdpConfig {
                backward_prefetch: post,
                ..config(2, strategy)
            },
            false,
            true,
        );
    }
}

#[test]
fn memory_is_that_of_one_more_unit_or_of_three() {
    run_local(2, |group| {
        let peak = |config: FsdpConfig| {
            let model = model(&group, config, Units::Explicit);
            train(&model, Run::default()).unwrap();
            model.parameters().peak_parameter_bytes()
        };
        let config = config(2, ShardingStrategy::FullShard);
        let plain = peak(config.clone());
        let unit = 4 * (WIDTH * 10 + 10 + 10 * WIDTH + WIDTH);
        let ahead = |limit_all_gathers| FsdpConfig {
            backward_prefetch: Some(BackwardPrefetch::Pre),
            forward_prefetch: true,
            limit_all_gathers,
            ..config.clone()
        };
        assert!(
            peak(ahead(true)) <= plain + unit,
            "{} after {plain}",
            peak(ahead(true))
        );
        assert_eq!(
            peak(ahead(true)),
            plain + unit,
            "one unit is gathered ahead"
        );
        assert!(
            peak(ahead(false)) <= plain + 3 * unit,
            "{} after {plain}",
            peak(ahead(false))
        );
        assert!(
            peak(ahead(false)) > plain + unit,
            "more than one unit is gathered ahead"
        );
    })
    .unwrap();
}

#[test]
fn as_many_gathers_and_reductions_as_without() {
    run_local(2, |group| {
        let count = |config: FsdpConfig| {
            let model = model(&group, config, Units::Explicit);
            let before = group.traffic();
            train(&model, Run::default()).unwrap();
            let traffic = group.traffic().since(&before);
            (
                traffic.count(Operation::AllGather),
                traffic.count(Operation::ReduceScatter),
                traffic.tensor_bytes(),
            )
        };
        let config = config(2, ShardingStrategy::FullShard);
        let expected = count(config.clone());
        for prefetching in prefetching() {
            let FsdpConfig {
                backward_prefetch,
                forward_prefetch,
                limit_all_gathers,
                ..
            } = prefetching;
            let config = FsdpConfig {
                backward_prefetch,
                forward_prefetch,
                limit_all_gathers,
                ..config.clone()
            };
            assert_eq!(count(config), expected);
        }
    })
    .unwrap();
}

#[test]
fn a_users_own_collectives_do_not_mix_with_those_beside_the_computation() {
    let (pre, config) = (
        Some(BackwardPrefetch::Pre),
        config(2, ShardingStrategy::FullShard),
    );
    let config = FsdpConfig {
        backward_prefetch: pre,
        forward_prefetch: true,
        ..config
    };
    run_local(2, |group| {
        let model = model(&group, config.clone(), Units::Explicit);
        for step in 0..4 {
            let x = input(group.rank(), step);
            let loss = model.forward(|net| {
                let mut h = net.embed.forward(&x)?;
                for block in &net.blocks {
                    h = block.forward(&h)?;
                    let sum = group
                        .all_gather_object(&step)
                        .map_err(candle_core::Error::wrap)?;
                    assert_eq!(sum, [step, step]);
                }
                net.head.forward(&h)?.sqr()?.mean_all()
            });
            model.backward(&loss.unwrap()).unwrap();
        }
    })
    .unwrap();
}

#[test]
fn a_failed_gather_ahead_names_its_unit_and_changes_nothing() {
    let (pre, config) = (
        Some(BackwardPrefetch::Pre),
        config(2, ShardingStrategy::FullShard),
    );
    let config = FsdpConfig {
        backward_prefetch: pre,
        forward_prefetch: true,
        ..config
    };
    let errors = run_local(2, |group| {
        let model = model(&group, config.clone(), Units::Explicit);
        let values = |fqn: &str| -> Vec<f32> {
            let shards = model.parameters().parameter(fqn).unwrap().shards().to_vec();
            shards
                .iter()
                .flat_map(|shard| {
                    shard
                        .tensor
                        .flatten_all()
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap()
                })
                .collect()
        };
        for step in 0..2 {
            let loss = model.forward(|net| net.loss(&input(0, step), &[])).unwrap();
            model.backward(&loss).unwrap();
        }
        model.parameters().zero_grad();
        let before = values("layers.2.up.weight");
        let rank = group.rank();
        let forward = model.forward(|net| {
            let mut h = net.embed.forward(&input(0, 3))?;
            for (index, block) in net.blocks.iter().enumerate() {
                if rank == 1 && index == 1 {
                    candle_core::bail!("this rank has had enough");
                }
                h = block.forward(&h)?;
            }
            h.mean_all()
        });
        let error = forward.unwrap_err();
        assert_eq!(values("layers.2.up.weight"), before);
        assert!(
            model
                .parameters()
                .gradient("layers.2.up.weight")
                .unwrap()
                .is_none()
        );
        error
    })
    .unwrap();
    let NnError::BackgroundCollective { unit, error, .. } = &errors[0] else {
        panic!("{}", errors[0])
    };
    assert!(unit.starts_with("layers."), "{unit}");
    assert!(
        matches!(**error, NnError::Comm(CommError::RankLeft { rank: 1, .. })),
        "{error}"
    );
    assert!(errors[1].to_string().contains("had enough"));
}

#[test]
fn ranks_with_other_options_are_refused() {
    let errors = run_local(2, |group| {
        let forward_prefetch = group.rank() == 0;
        let config = FsdpConfig {
            forward_prefetch,
            ..config(2, ShardingStrategy::FullShard)
        };
        let built =
            FullyShardedDataParallel::new(group, config, |scope| Net::new(scope, Units::Explicit));
        built.err().unwrap().to_string()
    })
    .unwrap();
    assert!(
        errors
            .iter()
            .all(|error| error.contains("forward_prefetch true")),
        "{errors:?}"
    );
}
