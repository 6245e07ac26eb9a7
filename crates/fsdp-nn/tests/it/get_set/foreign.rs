//! Optimizer state of other programs: older versions of torch, the flat form, state of the user's
//! own.

use candle_core::{DType, Device, Tensor};
use fsdp_comm::run_local;
use fsdp_flat::storage::share_storage;
use fsdp_layout::PlainValue;
use fsdp_nn::algorithm::{AdamOptions, Algorithm, ScheduleFreeOptions, SgdOptions};
use fsdp_nn::torch::{
    OptimLoadOptions, StateDictOptions, get_optimizer_state_dict, optim_state_dict_to_load,
    set_optimizer_state_dict,
};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
use fsdp_state::{StateDict, StateValue};

use crate::get_set::common::*;

/// torch adds these keys when it loads a group that lacks them.
#[test]
fn groups_of_older_versions_of_torch_lack_nothing() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let mut saved =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let Some(StateValue::List(groups)) = saved.get_mut("param_groups") else {
            panic!()
        };
        let StateValue::Dict(first) = &mut groups[0] else {
            panic!()
        };
        for key in [
            "decoupled_weight_decay",
            "fused",
            "differentiable",
            "capturable",
            "foreach",
            "maximize",
        ] {
            assert!(first.remove(key).is_some());
        }
        let mut target = Optimizer::new(model.parameters(), adamw()).unwrap();
        let report =
            set_optimizer_state_dict(&saved, model.parameters(), &mut [&mut target], &options())
                .unwrap();
        assert!(report.is_clean(), "{report:?}");
        optim_state_dict_to_load(
            &saved,
            model.parameters(),
            &mut target,
            &OptimLoadOptions::default(),
        )
        .unwrap();
    })
    .unwrap();
}

#[test]
fn an_integer_of_a_group_that_is_a_tensor_stays_an_integer() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        let mut saved =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let Some(StateValue::List(groups)) = saved.get_mut("param_groups") else {
            panic!()
        };
        let StateValue::Dict(first) = &mut groups[0] else {
            panic!()
        };
        // As a float it would be rounded.
        let samples = (1i64 << 53) + 1;
        first.insert("samples", Tensor::new(samples, &Device::Cpu).unwrap());
        set_optimizer_state_dict(
            &saved,
            model.parameters(),
            &mut [&mut optimizer],
            &options(),
        )
        .unwrap();
        assert_eq!(
            optimizer.groups()[0].extra,
            [("samples".to_owned(), PlainValue::Int(samples))]
        );
    })
    .unwrap();
}

#[test]
fn a_flat_dict_of_parameters_whose_names_begin_with_numbers_loads() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            candle_nn::linear(3, 2, scope.vb().pp("0"))
        })
        .unwrap();
        let sgd = |lr| {
            Algorithm::Sgd(SgdOptions {
                lr,
                ..SgdOptions::default()
            })
        };
        let saved = Optimizer::new(model.parameters(), sgd(0.5)).unwrap();
        let mut target = Optimizer::new(model.parameters(), sgd(0.1)).unwrap();
        let flat = StateDictOptions {
            flatten_optimizer_state_dict: true,
            ..options()
        };
        let state = get_optimizer_state_dict(model.parameters(), &[&saved], &flat).unwrap();
        assert!(state.contains_key("param_groups.0.weight.lr"));
        let report =
            set_optimizer_state_dict(&state, model.parameters(), &mut [&mut target], &flat)
                .unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(target.groups()[0].algorithm.lr(), 0.5);
    })
    .unwrap();
}

#[test]
fn state_under_keys_of_the_user_s_own_comes_back_without_any_other() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        let mut own = StateDict::new();
        own.insert("best", 0.5);
        own.insert("pair", StateValue::Tuple(vec![1.0.into(), 2.0.into()]));
        let mut states = StateDict::new();
        states.insert("mine", own);
        let mut state = StateDict::new();
        state.insert("state", states);
        let options = StateDictOptions {
            strict: false,
            ..options()
        };
        set_optimizer_state_dict(&state, model.parameters(), &mut [&mut optimizer], &options)
            .unwrap();
        let again = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
        let mine = again.dict("state").unwrap().dict("mine").unwrap();
        assert_eq!(
            mine.get("best").and_then(StateValue::as_plain),
            Some(&PlainValue::Float(0.5))
        );
    })
    .unwrap();
}

/// The hyperparameters that come with the state say which entries it has, not those of the live
/// optimizer.
#[test]
fn state_of_a_parameter_without_dimensions_goes_by_the_groups_that_come_with_it() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            scope.vb().get_with_hints((), "scale", candle_nn::init::ONE)
        })
        .unwrap();
        let train = |optimizer: &mut Optimizer| {
            let loss = model.forward(|scale| scale.sqr()).unwrap();
            model.backward(&loss).unwrap();
            optimizer.step().unwrap();
            model.parameters().zero_grad();
        };
        let adam = |amsgrad| {
            Algorithm::Adam(AdamOptions {
                amsgrad,
                ..AdamOptions::default()
            })
        };
        let sgd = |momentum| {
            Algorithm::Sgd(SgdOptions {
                momentum,
                ..SgdOptions::default()
            })
        };
        for (saved, live) in [(adam(true), adam(false)), (sgd(0.9), sgd(0.0))] {
            let mut saved = Optimizer::new(model.parameters(), saved).unwrap();
            let mut live = Optimizer::new(model.parameters(), live).unwrap();
            train(&mut saved);
            train(&mut live);
            let state =
                get_optimizer_state_dict(model.parameters(), &[&saved], &options()).unwrap();
            let report =
                set_optimizer_state_dict(&state, model.parameters(), &mut [&mut live], &options())
                    .unwrap();
            assert!(report.is_clean(), "{report:?}");
            let again = get_optimizer_state_dict(model.parameters(), &[&live], &options()).unwrap();
            assert_eq!(
                bits(&full(model.group(), &again)),
                bits(&full(model.group(), &state))
            );
        }
    })
    .unwrap();
}

/// The state before the first step is made once for each unit, not once for each parameter of it.
#[test]
fn the_initial_state_of_a_flat_parameter_is_in_memory_once() {
    run_local(2, |group| {
        let model = model(
            group.clone(),
            config(2, fsdp_nn::ShardingStrategy::FullShard, false, 1),
        );
        let algorithm = Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default());
        let optimizer = Optimizer::new(model.parameters(), algorithm).unwrap();
        let views = StateDictOptions {
            share_storage: true,
            ..options()
        };
        let state = get_optimizer_state_dict(model.parameters(), &[&optimizer], &views).unwrap();
        let z_of = |fqn: &str| {
            let entries = state.dict("state").unwrap().dict(fqn).unwrap();
            let shards = entries
                .get("z")
                .unwrap()
                .as_sharded()
                .unwrap()
                .shards()
                .to_vec();
            shards.first().map(|shard| shard.tensor.clone())
        };
        let whole = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        for pair in [["a.weight", "a.bias"], ["b.weight", "b.bias"]] {
            if let [Some(weight), Some(bias)] = pair.map(z_of) {
                assert!(
                    share_storage(&weight, &bias) && !share_storage(&weight, &whole),
                    "{pair:?}"
                );
            }
        }
    })
    .unwrap();
}
