//! Units hand their memory out and take it back: forwards, backwards and loads in any order compute
//! with the live values.

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::HostSliceMut;
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::SgdOptions;
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ShardingStrategy, Unit,
};

const SHARDED: [ShardingStrategy; 2] = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp];
const ALL: [ShardingStrategy; 3] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::NoShard,
];

struct Net {
    a: Unit<Linear>,
    b: Unit<Linear>,
    head: Linear,
}

type Model = FullyShardedDataParallel<Net>;

fn config(strategy: ShardingStrategy) -> FsdpConfig {
    FsdpConfig {
        strategy,
        seed: 5,
        ..FsdpConfig::default()
    }
}

fn model(group: &ProcessGroup, config: FsdpConfig) -> Model {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        Ok(Net {
            a: scope.pp("a").unit(|scope| linear(4, 4, scope.vb()))?,
            b: scope.pp("b").unit(|scope| linear(4, 4, scope.vb()))?,
            head: linear(4, 1, scope.pp("head").vb())?,
        })
    })
    .unwrap()
}

fn input(k: usize) -> Tensor {
    let values: Vec<f32> = (0..8)
        .map(|i| ((i * 7 + k * 13) % 11) as f32 / 11.0 - 0.4)
        .collect();
    Tensor::from_vec(values, (2, 4), &Device::Cpu).unwrap()
}

/// The loss of both units, or without `b`.
fn loss(model: &Model, k: usize, with_b: bool) -> Result<Tensor, NnError> {
    let x = input(k);
    model.forward(|net| {
        let mut h = net.a.forward(&x)?.tanh()?;
        if with_b {
            h = net.b.forward(&h)?.tanh()?;
        }
        net.head.forward(&h)?.sqr()?.sum_all()
    })
}

fn value(loss: &Tensor) -> f32 {
    loss.to_scalar().unwrap()
}

/// This rank's pieces of all gradients.
fn gradients(model: &Model) -> Vec<Vec<f32>> {
    let parameters = model.parameters();
    let pieces = |gradient: Option<ShardedTensor>| {
        let shards = gradient.map_or_else(Vec::new, |gradient| gradient.shards().to_vec());
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
    parameters
        .fqns()
        .map(|fqn| pieces(parameters.gradient(fqn).unwrap()))
        .collect()
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    assert!(
        expected.iter().flatten().any(|x| x.abs() > 1e-3),
        "{what}: gradients that say something"
    );
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{what}: {found} is not {expected}"
            );
        }
    }
}

fn fill(views: &[ShardedTensor], value: f32) {
    for shard in views.iter().flat_map(ShardedTensor::shards) {
        HostSliceMut::<f32>::write(&shard.tensor)
            .unwrap()
            .fill(value);
    }
}

fn views(model: &Model) -> Vec<ShardedTensor> {
    model
        .parameters()
        .fqns()
        .map(|fqn| model.parameters().parameter(fqn).unwrap())
        .collect()
}

#[test]
fn a_forward_computes_with_values_that_were_written_into_lent_memory() {
    for strategy in ALL {
        run_local(2, |group| {
            let model = model(&group, config(strategy));
            assert!(value(&loss(&model, 0, true).unwrap()) > 1e-4);
            model.parameters().lend().unwrap();
            let views = views(&model);
            fill(&views, 0.0);
            assert_eq!(value(&loss(&model, 0, true).unwrap()), 0.0, "{strategy}");
            // The views are still there, and the forward has gathered again.
            fill(&views, 0.1);
            assert!(value(&loss(&model, 0, true).unwrap()) > 1e-4, "{strategy}");
            fill(&views, 0.0);
            assert_eq!(value(&loss(&model, 0, true).unwrap()), 0.0, "{strategy}");
        })
        .unwrap();
    }
}

#[test]
fn a_value_that_is_set_reaches_every_forward_after_it() {
    for strategy in ALL {
        run_local(2, |group| {
            let model = model(&group, config(strategy));
            // The graph of this evaluation lives on, and is never run backward.
            let evaluated = loss(&model, 0, true).unwrap();
            for fqn in ["a.weight", "a.bias", "head.bias"] {
                let shape = model.parameters().shape(fqn).unwrap();
                let zeros = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
                model
                    .parameters()
                    .set_parameter(fqn, &ShardedTensor::from_whole(&zeros))
                    .unwrap();
            }
            let without_b = loss(&model, 0, false).unwrap();
            assert_eq!(value(&without_b), 0.0, "{strategy}");
            assert!(value(&evaluated) > 1e-4);
            // A forward after the change can be run backward.
            model.backward(&without_b).unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_backward_through_values_that_have_changed_since_its_forward_names_the_unit() {
    for strategy in SHARDED {
        let errors = run_local(2, |group| {
            let model = model(&group, config(strategy));
            let computed = loss(&model, 0, true).unwrap();
            let shape = model.parameters().shape("b.weight").unwrap();
            let zeros = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            model
                .parameters()
                .set_parameter("b.weight", &ShardedTensor::from_whole(&zeros))
                .unwrap();
            let error = model.backward(&computed).unwrap_err().to_string();
            // Nothing is left behind: the next step is as any other.
            let again = loss(&model, 0, true).unwrap();
            model.backward(&again).unwrap();
            error
        })
        .unwrap();
        for error in errors {
            assert!(
                error.contains("`b`") && error.contains("changed"),
                "{strategy}: {error}"
            );
        }
    }
}

#[test]
fn values_cannot_be_set_while_their_unit_computes() {
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::FullShard));
        let zeros =
            ShardedTensor::from_whole(&Tensor::zeros((4, 4), DType::F32, &Device::Cpu).unwrap());
        let error = model
            .forward(|net| {
                net.a.run(|_| {
                    let set = model.parameters().set_parameter("a.weight", &zeros);
                    Ok(input(0).affine(set.is_err().into(), 0.0)?).and_then(|x| {
                        set.map_err(candle_core::Error::from)?;
                        Ok(x)
                    })
                })
            })
            .unwrap_err()
            .to_string();
        assert!(error.contains("`a`"), "{error}");
    })
    .unwrap();
}

#[test]
fn gradients_of_a_unit_that_only_the_first_micro_batch_uses_are_reduced() {
    for world in [1, 2] {
        for strategy in ALL {
            run_local(world, |group| {
                let expected = {
                    let model = model(&group, config(strategy));
                    model
                        .backward(&loss(&model, group.rank(), true).unwrap())
                        .unwrap();
                    model
                        .backward(&loss(&model, 7 + group.rank(), false).unwrap())
                        .unwrap();
                    gradients(&model)
                };
                let model = model(&group, config(strategy));
                let first = loss(&model, group.rank(), true).unwrap();
                model
                    .no_sync(|model| model.backward(&first).map(drop))
                    .unwrap();
                model
                    .backward(&loss(&model, 7 + group.rank(), false).unwrap())
                    .unwrap();
                assert_close(
                    &gradients(&model),
                    &expected,
                    &format!("{strategy} on {world}"),
                );
            })
            .unwrap();
        }
    }
}

#[test]
fn two_forwards_and_then_their_backwards_add_up() {
    for strategy in ALL {
        for in_order in [true, false] {
            run_local(2, |group| {
                let expected = {
                    let model = model(&group, config(strategy));
                    for k in [group.rank(), 5 + group.rank()] {
                        model.backward(&loss(&model, k, true).unwrap()).unwrap();
                    }
                    gradients(&model)
                };
                let model = model(&group, config(strategy));
                let mut losses =
                    [group.rank(), 5 + group.rank()].map(|k| loss(&model, k, true).unwrap());
                if !in_order {
                    losses.reverse();
                }
                for loss in losses {
                    model.backward(&loss).unwrap();
                }
                assert_close(&gradients(&model), &expected, &strategy.to_string());
            })
            .unwrap();
        }
    }
}

#[test]
fn shard_grad_op_still_gathers_once_a_step() {
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::ShardGradOp));
        let before = group.traffic();
        model.backward(&loss(&model, 0, true).unwrap()).unwrap();
        let after = group.traffic();
        assert_eq!(after.since(&before).count(Operation::AllGather), 3);
    })
    .unwrap();
}

/// The identity, with a backward that fails.
struct NoWayBack;

impl CustomOp1 for NoWayBack {
    fn name(&self) -> &'static str {
        "no-way-back"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((
            storage.to_dtype(layout, storage.dtype())?,
            layout.shape().clone(),
        ))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Err(candle_core::Error::Msg("there is no way back".into()))
    }
}

#[test]
fn a_backward_that_fails_in_the_middle_of_a_unit_leaves_nothing_behind() {
    for strategy in ALL {
        run_local(2, |group| {
            let build = || {
                FullyShardedDataParallel::new(group.clone(), config(strategy), |scope| {
                    scope.pp("unit").unit(|scope| {
                        let layer = |name: &str| linear(4, 4, scope.pp(name).vb());
                        Ok((layer("below")?, layer("above")?))
                    })
                })
                .unwrap()
            };
            let run = |model: &FullyShardedDataParallel<Unit<(Linear, Linear)>>, fails: bool| {
                let loss = model.forward(|unit| {
                    unit.run(|(below, above)| {
                        let h = below.forward(&input(0))?;
                        let h = if fails { h.apply_op1(NoWayBack)? } else { h };
                        above.forward(&h)?.sqr()?.sum_all()
                    })
                });
                model.backward(&loss.unwrap())
            };
            let norm =
                |model: &FullyShardedDataParallel<_>| model.parameters().grad_norm().unwrap();
            let expected = build();
            run(&expected, false).unwrap();
            let model = build();
            let between = model.parameters().parameter_bytes();
            let error = run(&model, true).unwrap_err().to_string();
            assert!(error.contains("no way back"), "{error}");
            assert_eq!(model.parameters().parameter_bytes(), between);
            run(&model, false).unwrap();
            assert!((norm(&model) - norm(&expected)).abs() < 1e-5 && norm(&model) > 1e-3);
        })
        .unwrap();
    }
}

#[test]
fn a_model_computes_after_a_forward_that_fails_or_panics() {
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::FullShard));
        let x = input(0);
        let shards = model.parameters().parameter_bytes();
        let expected = value(&loss(&model, 0, true).unwrap());
        let failed = model.forward(|net| {
            net.a.forward(&x)?;
            Err::<Tensor, _>(candle_core::Error::Msg("the model fails".to_owned()))
        });
        assert!(failed.unwrap_err().to_string().contains("the model fails"));
        assert_eq!(value(&loss(&model, 0, true).unwrap()), expected);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            model.forward(|net| {
                net.a
                    .run(|_| -> candle_core::Result<Tensor> { panic!("the model panics") })
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(value(&loss(&model, 0, true).unwrap()), expected);
        model.parameters().reshard().unwrap();
        assert_eq!(model.parameters().parameter_bytes(), shards);
    })
    .unwrap();
}

#[test]
fn a_backward_inside_a_forward_leaves_the_forward_its_parameters() {
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::FullShard));
        let x = input(0);
        let before = loss(&model, 0, true).unwrap();
        let after = model
            .forward(|net| {
                let inner = net.head.forward(&net.a.forward(&x)?)?.sqr()?.sum_all()?;
                model.backward(&inner)?;
                net.head
                    .forward(&net.b.forward(&net.a.forward(&x)?.tanh()?)?.tanh()?)?
                    .sqr()?
                    .sum_all()
            })
            .unwrap();
        assert_eq!(value(&before), value(&after));
    })
    .unwrap();
}

/// The unit of an adapter: a frozen matrix that gradients pass through, and a trained one beside
/// it.
#[test]
fn frozen_weights_that_gradients_pass_through_stay_until_they_have() {
    for strategy in ALL {
        for world in [1, 2, 3] {
            run_local(world, |group| {
                let frozen = |config: FsdpConfig| FsdpConfig {
                    requires_grad: std::sync::Arc::new(|fqn: &str| !fqn.ends_with("weight")),
                    ..config
                };
                let whole = model(&group, config(strategy));
                whole
                    .backward(&loss(&whole, group.rank(), true).unwrap())
                    .unwrap();
                let model = model(&group, frozen(config(strategy)));
                let between = model.parameters().parameter_bytes();
                let computed = loss(&model, group.rank(), true).unwrap();
                model.backward(&computed).unwrap();
                assert_eq!(model.parameters().parameter_bytes(), between);
                let names: Vec<String> = model.parameters().fqns().map(str::to_owned).collect();
                for ((fqn, found), expected) in
                    names.iter().zip(gradients(&model)).zip(gradients(&whole))
                {
                    if fqn.ends_with("bias") {
                        assert_close(&[found, vec![1.0]], &[expected, vec![1.0]], fqn);
                    } else {
                        assert!(found.iter().all(|x| *x == 0.0), "{fqn}");
                    }
                }
                let mut optimizer = Optimizer::new(
                    model.parameters(),
                    Algorithm::Sgd(SgdOptions {
                        lr: 0.1,
                        ..Default::default()
                    }),
                )
                .unwrap();
                optimizer.step().unwrap();
                let next = loss(&model, group.rank(), true).unwrap();
                assert_ne!(value(&next), value(&computed));
            })
            .unwrap();
        }
    }
}

#[test]
fn ranks_that_come_to_different_parameters_of_the_root_reduce_in_one_order() {
    for strategy in ALL {
        run_local(2, |group| {
            let rank = group.rank();
            let model = FullyShardedDataParallel::new(group, config(strategy), |scope| {
                let layer = |i: usize| {
                    scope
                        .pp("layers")
                        .pp(i)
                        .unit(|scope| linear(4, 4, scope.vb()))
                };
                let layers = (0..2)
                    .map(layer)
                    .collect::<candle_core::Result<Vec<Unit<Linear>>>>()?;
                let head = |name: &str| candle_nn::linear_no_bias(4, 1, scope.vb().pp(name));
                Ok((layers, [head("head_a")?, head("head_b")?]))
            })
            .unwrap();
            let loss = model.forward(|(layers, heads)| {
                let h = layers
                    .iter()
                    .try_fold(input(rank), |h, layer| layer.forward(&h)?.tanh())?;
                let y = heads[0].forward(&h)?;
                if rank == 0 {
                    (y + heads[1].forward(&h)?)?.sum_all()
                } else {
                    y.sum_all()
                }
            });
            model.backward(&loss.unwrap()).unwrap();
            for fqn in ["head_a.weight", "head_b.weight", "layers.0.weight"] {
                assert!(
                    model.parameters().has_gradient(fqn).unwrap(),
                    "{strategy}: {fqn}"
                );
            }
        })
        .unwrap();
    }
}

/// The times at which gradients of two backwards are reduced.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reduced {
    EachTime,
    Together,
    OverReplicasTogether,
}

#[test]
fn ranks_that_do_not_come_to_the_root_take_part_in_its_reduction_with_zeros() {
    /// Adds what one backward with the head and one without it leave in the gradients.
    fn accumulate(
        group: &ProcessGroup,
        strategy: ShardingStrategy,
        reduced: Reduced,
        all_use_it: bool,
    ) -> Vec<Vec<f32>> {
        let mesh = DeviceMesh::new(&[2, 2], &["replicate", "shard"], 4).unwrap();
        let config = FsdpConfig {
            mesh: Some(mesh),
            ..config(strategy)
        };
        let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
            let layer = |i: usize| {
                scope
                    .pp("layers")
                    .pp(i)
                    .unit(|scope| linear(4, 4, scope.vb()))
            };
            let layers = (0..2)
                .map(layer)
                .collect::<candle_core::Result<Vec<Unit<Linear>>>>()?;
            Ok((
                layers,
                candle_nn::linear_no_bias(4, 4, scope.vb().pp("head"))?,
            ))
        });
        let model = model.unwrap();
        let backward = |of_head: Option<f32>| {
            let loss = model.forward(|(layers, head)| {
                let h = layers
                    .iter()
                    .try_fold(input(group.rank()), |h, layer| layer.forward(&h)?.tanh())?;
                let Some(factor) = of_head else {
                    return h.sum_all();
                };
                let factor = Tensor::full(factor, (2, 4), &Device::Cpu)?;
                h.sum_all()? + (head.forward(&h)? * factor)?.sum_all()?
            });
            model.backward(&loss.unwrap()).unwrap();
        };
        model.set_requires_gradient_sync(reduced != Reduced::Together);
        model.set_requires_all_reduce(reduced != Reduced::OverReplicasTogether);
        // Rank 0 alone has a use for the head.
        let without = if all_use_it { Some(0.0) } else { None };
        backward(if group.rank() == 0 {
            Some(1.0)
        } else {
            without
        });
        model.set_requires_gradient_sync(true);
        model.set_requires_all_reduce(true);
        backward(None);
        assert!(model.parameters().has_gradient("head.weight").unwrap());
        let parameters = model.parameters();
        let pieces = parameters
            .fqns()
            .map(|fqn| parameters.gradient(fqn).unwrap().unwrap());
        let values = pieces.map(|piece| {
            let shards = piece.shards().iter().map(|shard| {
                shard
                    .tensor
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
            });
            shards.collect::<Vec<_>>().concat()
        });
        values.collect()
    }
    for strategy in ShardingStrategy::ALL {
        for reduced in [
            Reduced::EachTime,
            Reduced::Together,
            Reduced::OverReplicasTogether,
        ] {
            run_local(4, |group| {
                let expected = accumulate(&group, strategy, reduced, true);
                assert_eq!(
                    accumulate(&group, strategy, reduced, false),
                    expected,
                    "{strategy}, {reduced:?}"
                );
            })
            .unwrap();
        }
    }
}

#[test]
fn an_error_of_one_rank_after_its_last_reduction_leaves_no_gradients_on_any() {
    run_local(2, |group| {
        let build =
            |scope: &fsdp_nn::Scope| scope.pp("unit").unit(|scope| linear(4, 1, scope.vb()));
        let model = FullyShardedDataParallel::new(
            group.clone(),
            config(ShardingStrategy::FullShard),
            build,
        )
        .unwrap();
        // The backward comes to the input after it has finished with the unit.
        let x = Var::from_tensor(&input(0)).unwrap();
        let is_bad = group.rank() == 1;
        let x = if is_bad {
            x.as_tensor().apply_op1(NoWayBack).unwrap()
        } else {
            x.as_tensor().clone()
        };
        let loss = model.forward(|unit| unit.forward(&x)?.sum_all()).unwrap();
        let error = model.backward(&loss).unwrap_err().to_string();
        if is_bad {
            assert!(error.contains("no way back"), "{error}");
            // The program goes on with something else.
            group.barrier().unwrap_err();
        }
        assert!(
            model
                .parameters()
                .gradient("unit.weight")
                .unwrap()
                .is_none()
        );
    })
    .unwrap();
}

#[test]
fn an_operation_that_may_not_support_a_dtype_is_named_with_the_dtype() {
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::FullShard));
        let error = model.forward(|_| -> candle_core::Result<Tensor> {
            Err(candle_core::Error::UnsupportedDTypeForOp(
                DType::F64,
                "conv2d",
            ))
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("conv2d") && error.contains("f64"), "{error}");
    })
    .unwrap();
}
