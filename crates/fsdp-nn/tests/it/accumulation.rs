//! Gradients of several backwards are added up, and reduced as often as the program says.

use candle_core::{Device, Tensor, Var};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::{
    BackwardPrefetch, FsdpConfig, FullyShardedDataParallel, NnError, Scope, ShardingStrategy, Unit,
};

type Model = FullyShardedDataParallel<(Unit<Linear>, Linear)>;

const PARTS: usize = 3;

fn model(group: &ProcessGroup, strategy: ShardingStrategy) -> Model {
    let world = group.world_size();
    let mesh = DeviceMesh::new(&[world / 2, 2], &["replicate", "shard"], world).unwrap();
    let config = FsdpConfig {
        strategy,
        mesh: Some(mesh),
        seed: 2,
        ..FsdpConfig::default()
    };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        Ok((
            scope.pp("a").unit(|scope| linear(3, 5, scope.vb()))?,
            linear(5, 2, scope.vb().pp("b"))?,
        ))
    });
    model.unwrap()
}

/// Backward of a part. The second part does not use the unit.
fn backward(model: &Model, part: usize) {
    let seed = model.group().rank() * PARTS + part;
    let x: Vec<f32> = (0..15)
        .map(|i| ((i * 7 + seed * 4) % 13) as f32 / 6.0 - 1.0)
        .collect();
    let x = Tensor::from_vec(x, (3, 5), &Device::Cpu).unwrap();
    let loss = model.forward(|(unit, head)| match part {
        1 => head.forward(&x)?.sqr()?.mean_all(),
        _ => head
            .forward(&unit.forward(&x.narrow(1, 0, 3)?.contiguous()?)?.tanh()?)?
            .sqr()?
            .mean_all(),
    });
    model.backward(&loss.unwrap()).unwrap();
}

fn gradients(model: &Model) -> Option<Vec<f32>> {
    let parameters = model.parameters();
    let mut all = Vec::new();
    for fqn in parameters.fqns() {
        for shard in parameters.gradient(fqn).unwrap()?.shards() {
            all.extend(
                shard
                    .tensor
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap(),
            );
        }
    }
    Some(all)
}

#[test]
fn no_sync_and_its_switch_are_one_thing() {
    for strategy in ShardingStrategy::ALL {
        run_local(4, |group| {
            let inside = model(&group, strategy);
            inside
                .no_sync(|_| {
                    backward(&inside, 0);
                    backward(&inside, 1);
                    Ok::<(), NnError>(())
                })
                .unwrap();
            let switched = model(&group, strategy);
            switched.set_requires_gradient_sync(false);
            backward(&switched, 0);
            // A closure in between leaves the switch as it was.
            switched
                .no_sync(|_| {
                    backward(&switched, 1);
                    Ok::<(), NnError>(())
                })
                .unwrap();
            assert_eq!(gradients(&switched), None);
            switched.set_requires_gradient_sync(true);
            for model in [&inside, &switched] {
                backward(model, 2);
            }
            assert!(gradients(&inside).is_some());
            assert_eq!(gradients(&inside), gradients(&switched), "{strategy}");
        })
        .unwrap();
    }
}

#[test]
fn replicas_reduce_once_for_several_backwards() {
    for strategy in [
        ShardingStrategy::HybridShard,
        ShardingStrategy::NoShard,
        ShardingStrategy::FullShard,
    ] {
        run_local(4, |group| {
            let each = model(&group, strategy);
            (0..PARTS).for_each(|part| backward(&each, part));
            let last = model(&group, strategy);
            let reductions = || group.traffic().count(Operation::AllReduce);
            last.set_requires_all_reduce(false);
            let before = reductions();
            backward(&last, 0);
            backward(&last, 1);
            if strategy != ShardingStrategy::FullShard {
                assert_eq!(gradients(&last), None);
                assert_eq!(reductions(), before);
            }
            last.set_requires_all_reduce(true);
            backward(&last, 2);
            let (found, expected) = (gradients(&last).unwrap(), gradients(&each).unwrap());
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 1e-6,
                    "{strategy}: {found} is not {expected}"
                );
            }
            for fqn in last.parameters().fqns() {
                assert!(last.parameters().has_gradient(fqn).unwrap(), "{fqn}");
            }
        })
        .unwrap();
    }
}

#[test]
fn gradients_that_wait_for_their_replicas_are_forgotten_with_the_others() {
    run_local(4, |group| {
        let model = model(&group, ShardingStrategy::HybridShard);
        model.set_requires_all_reduce(false);
        backward(&model, 0);
        model.parameters().zero_grad();
        model.set_requires_all_reduce(true);
        backward(&model, 2);
        let found = gradients(&model);
        model.parameters().zero_grad();
        backward(&model, 2);
        assert_eq!(found, gradients(&model));
    })
    .unwrap();
}

#[test]
fn a_unit_that_ranks_come_to_in_different_backwards_is_reduced_once() {
    run_local(2, |group| {
        let config = FsdpConfig {
            strategy: ShardingStrategy::NoShard,
            backward_prefetch: Some(BackwardPrefetch::Pre),
            ..FsdpConfig::default()
        };
        let build = |scope: &Scope| scope.pp("a").unit(|scope| linear(3, 2, scope.vb()));
        let model = FullyShardedDataParallel::new(group.clone(), config, build).unwrap();
        let backward = |uses_unit: bool, scale: f64| {
            let x = Var::from_tensor(&Tensor::full(scale as f32, (2, 3), &Device::Cpu).unwrap())
                .unwrap();
            let loss = model.forward(|unit| {
                if uses_unit {
                    unit.forward(&x)?.sum_all()
                } else {
                    x.sum_all()
                }
            });
            model.backward(&loss.unwrap()).unwrap();
        };
        // The gradient of each element of the weight is twice the scale, over two ranks.
        let found = |expected: f32| {
            let gradient = model.parameters().gradient("a.weight").unwrap().unwrap();
            let values = gradient.shards()[0]
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap();
            assert_eq!(values, [expected; 6]);
        };
        let is_first = group.rank() == 0;
        model.set_requires_gradient_sync(false);
        backward(!is_first, 1.0);
        model.set_requires_gradient_sync(true);
        backward(is_first, 2.0);
        found(3.0);
        // Nothing of it is left for the next reduction.
        model.parameters().zero_grad();
        backward(true, if is_first { 4.0 } else { 8.0 });
        found(12.0);
    })
    .unwrap();
}
