//! Models at the edges: units without parameters, tied ones counted once, mixed dtypes; and state
//! for other units, groups and orders than those that saved it.

use candle_core::{DType, Tensor};
use candle_nn::Init;
use fsdp_comm::Operation;
use fsdp_flat::FlatError;
use fsdp_flat::storage::HostSliceMut;
use fsdp_layout::PlainValue;
use fsdp_nn::torch::{
    OptimLoadOptions, StateDictSettings, StateDictType, broadcast_processed_state,
    optim_state_dict, optim_state_dict_to_load, scatter_full_optim_state_dict,
    shard_full_optim_state_dict, state_dict,
};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ParamGroup, Scope, Unit};
use fsdp_state::{StateDict, StateValue};

use crate::state_dicts::common::*;

#[test]
fn a_unit_without_parameters_has_no_flat_parameter_no_keys_and_no_collectives() {
    ranks(3, |group| {
        let init = Init::Randn {
            mean: 0.,
            stdev: 1.,
        };
        let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
            let empty: Unit<()> = scope.pp("empty").unit(|_| candle_core::Result::Ok(()))?;
            let full = scope
                .pp("full")
                .unit(|scope| scope.vb().get_with_hints(5, "weight", init))?;
            Ok((empty, full))
        })
        .unwrap();
        let parameters = model.parameters();
        for (kind, key) in [
            (StateDictType::Full, "full.weight"),
            (StateDictType::Sharded, "full.weight"),
            (StateDictType::Local, "full._flat_param"),
        ] {
            let state = parameters
                .state_dict_type(StateDictSettings::from(kind), || state_dict(parameters))
                .unwrap();
            assert_eq!(state.keys().collect::<Vec<_>>(), [key]);
        }
        let before = group.traffic();
        let x = Tensor::ones(2, DType::F32, &candle_core::Device::Cpu).unwrap();
        let y = model
            .forward(|(empty, _)| empty.run(|()| x.affine(2., 1.)))
            .unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [3., 3.]);
        assert_eq!(group.traffic().since(&before).tensor_bytes(), 0);
    });
}

#[test]
fn tied_parameters_are_counted_once() {
    for layout in layouts() {
        let numel: Vec<usize> = ranks(layout.world, |group| {
            let model = model(&group, &tied(), layout);
            let parameters = model.parameters();
            assert_eq!(
                parameters.fqns().collect::<Vec<_>>(),
                ["embedding.weight", "decoder.bias"]
            );
            assert_eq!(parameters.aliases()["decoder.weight"], "embedding.weight");
            let boxes = parameters
                .fqns()
                .flat_map(|fqn| parameters.boxes(fqn).unwrap());
            boxes.map(|bounds| bounds.numel()).sum()
        });
        let copies = match layout.strategy {
            fsdp_nn::ShardingStrategy::NoShard => layout.world,
            fsdp_nn::ShardingStrategy::HybridShard => 2,
            _ => 1,
        };
        assert_eq!(
            numel.iter().sum::<usize>(),
            copies * (6 * 3 + 6),
            "{layout:?}"
        );
    }
}

/// One FlatParameter has one floating-point dtype, and without `use_orig_params` is trained as a
/// whole or not at all.
#[test]
fn what_cannot_be_one_flat_parameter_is_refused_by_name() {
    let init = Init::Const(0.);
    let build = |use_orig_params: bool, dtypes: [DType; 2], frozen: &'static str| {
        ranks(2, move |group| {
            let requires_grad = std::sync::Arc::new(move |fqn: &str| fqn != frozen);
            let config = FsdpConfig {
                use_orig_params,
                requires_grad,
                ..FsdpConfig::default()
            };
            let get = |scope: &Scope| -> candle_core::Result<Vec<Tensor>> {
                let vb = scope.vb();
                let names = ["a", "b"].into_iter().zip(dtypes);
                names
                    .map(|(name, dtype)| vb.get_with_hints_dtype((2, 3), name, init, dtype))
                    .collect()
            };
            FullyShardedDataParallel::new(group, config, get).map(|_| ())
        })
    };
    for use_orig_params in [true, false] {
        for result in build(use_orig_params, [DType::F32, DType::BF16], "") {
            assert!(
                matches!(result, Err(NnError::Flat(FlatError::MixedDType { fqn, .. })) if fqn == "b")
            );
        }
        let mixed = build(use_orig_params, [DType::F32; 2], "b");
        assert!(mixed.iter().all(|result| match result {
            Ok(()) => use_orig_params,
            Err(NnError::Flat(FlatError::MixedRequiresGrad { fqn })) =>
                !use_orig_params && fqn == "b",
            Err(_) => false,
        }));
    }
}

/// Full state into a model of other units, with two groups and an empty one whose parameters come
/// in another order on odd ranks, from every rank's dict and from rank 0's: it is loadable, and
/// training goes on as without any of this.
#[test]
fn full_state_goes_into_other_units_groups_and_orders() {
    let saved = reference(&nested(), &adam(), false, DType::F32, 2).1;
    let later = reference(&nested(), &adam(), false, DType::F32, 3).1;
    let first = [
        "bias",
        "block0.weight",
        "block0.bias",
        "block1.bias",
        "block1.weight",
        "block1.bias_module0.bias",
    ];
    for use_orig_params in [true, false] {
        for from_rank0 in [true, false] {
            ranks(3, |group| {
                let layout = full_shard(3, use_orig_params);
                let model = model(&group, &nested_alt(), layout);
                let parameters = model.parameters();
                let (mut a, mut b): (Vec<&str>, Vec<&str>) =
                    parameters.fqns().partition(|fqn| first.contains(fqn));
                if group.rank() % 2 == 1 {
                    a.reverse();
                    b.reverse();
                }
                let groups = [a, b, Vec::new()].map(|fqns| ParamGroup::new(adam(), fqns));
                let mut optimizer = Optimizer::with_groups(parameters, groups.to_vec()).unwrap();
                // With original parameters the model's own values do not matter for the state, nor
                // does its layout.
                let local = match from_rank0 {
                    true => {
                        let full = (group.rank() == 0).then_some(&saved);
                        scatter_full_optim_state_dict(full, parameters, &optimizer).unwrap()
                    }
                    false => shard_full_optim_state_dict(&saved, parameters, &optimizer).unwrap(),
                };
                optimizer.load_state_dict(&local).unwrap();
                assert_same(
                    &optimizer.state_dict().unwrap(),
                    &local,
                    "the optimizer has what it was given",
                );
                let again = optim_state_dict(None, parameters, &optimizer).unwrap();
                assert_same(
                    again.dict("state").unwrap(),
                    saved.dict("state").unwrap(),
                    "and gives it again",
                );
                train(&model, &mut [&mut optimizer], 2..3);
                let again = optim_state_dict(None, parameters, &optimizer).unwrap();
                assert_same(
                    again.dict("state").unwrap(),
                    later.dict("state").unwrap(),
                    "one step later",
                );
            });
        }
    }
}

/// A unit that was never used has no state; that is saved, loaded, and stepped on from, wherever it
/// is in the model.
#[test]
fn state_of_a_model_with_an_unused_unit_goes_through_every_type() {
    for unused in ["net1", "net2"] {
        let mut spec = dummy();
        spec.unused = vec![unused];
        for use_orig_params in [true, false] {
            ranks(3, |group| {
                let model = model(&group, &spec, full_shard(3, use_orig_params));
                let parameters = model.parameters();
                let mut source = optimizer(parameters, &spec, &adam(), false);
                train(&model, &mut [&mut source], 0..2);
                for kind in [StateDictType::Full, StateDictType::Sharded] {
                    let settings = StateDictSettings::from(kind);
                    let saved = parameters
                        .state_dict_type(settings, || optim_state_dict(None, parameters, &source))
                        .unwrap();
                    let states: &StateDict = saved.dict("state").unwrap();
                    assert!(states.len() == 3 && !states.keys().any(|fqn| fqn.starts_with(unused)));
                    let mut target = optimizer(parameters, &spec, &adam(), false);
                    let directly = OptimLoadOptions {
                        load_directly: true,
                        ..OptimLoadOptions::default()
                    };
                    optim_state_dict_to_load(&saved, parameters, &mut target, &directly).unwrap();
                    assert_same(
                        &target.state_dict().unwrap(),
                        &source.state_dict().unwrap(),
                        unused,
                    );
                    train(&model, &mut [&mut target], 2..3);
                }
            });
        }
    }
}

#[test]
fn rank_0_tells_the_others_what_its_state_is() {
    let spec = with_scalar();
    let saved = reference(&spec, &adam(), false, DType::F32, 2).1;
    let saved = edit(&saved, &["state", "bias", "val"], Some(2.5.into()));
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let optimizer = optimizer(model.parameters(), &spec, &adam(), false);
        let before = group.traffic();
        let mine = (group.rank() == 0).then_some(&saved);
        let processed = broadcast_processed_state(mine, &optimizer).unwrap();
        let traffic = group.traffic().since(&before);
        assert_eq!(
            (
                traffic.tensor_bytes(),
                traffic.count(Operation::BroadcastObject)
            ),
            (0, 1)
        );
        let of = |fqn: &str, name: &str| processed.dict(fqn).unwrap().get(name).unwrap().clone();
        for (fqn, shape) in [("u.weight", &[2, 3][..]), ("u.scale", &[])] {
            let value = of(fqn, "exp_avg");
            let tensor = value.as_sharded().unwrap();
            assert_eq!(
                (tensor.dtype(), tensor.shape()),
                (DType::F32, shape),
                "shaped like its parameter"
            );
            assert!(tensor.shards().is_empty(), "without elements");
        }
        assert!(matches!(
            of("bias", "val"),
            StateValue::Plain(PlainValue::Float(2.5))
        ));
        let step = of("bias", "step");
        assert_eq!(step.as_tensor().unwrap().to_scalar::<f32>().unwrap(), 2.0);
        // The result shares no memory with the caller's dict, on rank 0 neither.
        HostSliceMut::<f32>::write(step.as_tensor().unwrap())
            .unwrap()
            .fill(9.0);
        let state = saved
            .dict("state")
            .and_then(|states| states.dict("bias"))
            .unwrap();
        let own = state.get("step").and_then(StateValue::as_tensor).unwrap();
        assert_eq!(own.to_scalar::<f32>().unwrap(), 2.0);
        let message = text(broadcast_processed_state(None, &optimizer));
        assert!(
            message.starts_with("`optim_state_dict` must have the keys \"state\""),
            "{message}"
        );
    });
}
