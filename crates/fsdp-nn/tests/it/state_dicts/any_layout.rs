//! Any layout to any other, through each type of state dict, is the identity: for models of random
//! units and shapes.

use candle_core::DType;
use fsdp_nn::torch::{
    OptimLoadOptions, StateDictConfig, StateDictSettings, StateDictType, full_optim_state_dict,
    load_state_dict, optim_state_dict, optim_state_dict_to_load, sharded_optim_state_dict,
    state_dict,
};
use fsdp_nn::{NnError, Optimizer, ShardedParameters, ShardingStrategy};
use fsdp_state::StateDict;
use proptest::prelude::*;

use crate::state_dicts::common::*;

const UNITS: [&str; 3] = ["", "a", "b.0"];
const NAMES: [&str; 4] = ["weight", "bias", "x", "y.z"];

/// A model, the dtype of its parameters, and the layouts that save and load it.
#[derive(Debug, Clone)]
struct Case {
    spec: Spec,
    algorithm: usize,
    groups: bool,
    dtype: DType,
    from: Layout,
    to: Layout,
}

/// Up to three dimensions, among them of one element and of none, and fewer rows than ranks.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        1 => Just(Vec::new()),
        1 => prop::collection::vec(0usize..3, 1..3),
        6 => prop::collection::vec(1usize..7, 1..4),
    ]
}

fn layout() -> impl Strategy<Value = Layout> {
    (1usize..=5, 0..ShardingStrategy::ALL.len(), any::<bool>()).prop_map(
        |(world, strategy, use_orig_params)| {
            let strategy = match ShardingStrategy::ALL[strategy] {
                // The mesh of these tests has two replicas.
                ShardingStrategy::HybridShard if world % 2 == 1 => ShardingStrategy::FullShard,
                strategy => strategy,
            };
            Layout {
                world,
                strategy,
                use_orig_params,
            }
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let units = prop::collection::vec(
        (
            prop::collection::vec((shape(), any::<bool>()), 1..4),
            any::<bool>(),
        ),
        1..4,
    );
    let choices = (
        0..algorithms().len(),
        any::<bool>(),
        any::<bool>(),
        0..4usize,
        any::<bool>(),
    );
    (units, layout(), layout(), choices).prop_map(
        |(units, from, to, (algorithm, groups, tie, dtype, unused))| {
            // The denominators of Adam and Adagrad do not fit float16.
            let is_sgd = algorithms()[algorithm].name() == "SGD";
            let dtype = [
                DType::F32,
                DType::BF16,
                DType::F64,
                if is_sgd { DType::F16 } else { DType::F32 },
            ][dtype];
            let mut spec = Spec::default();
            for (unit, (params, freeze)) in UNITS.into_iter().zip(units) {
                for (name, (shape, frozen)) in NAMES.into_iter().zip(params) {
                    // A FlatParameter is trained as a whole or not at all.
                    let mixed = from.use_orig_params && to.use_orig_params;
                    if if mixed { frozen } else { freeze } {
                        spec.frozen
                            .push(Box::leak(full_name(unit, name).into_boxed_str()));
                    }
                    spec.params.push((unit, name, shape));
                }
            }
            let (unit, name, _) = &spec.params[0];
            if tie {
                spec.ties.push((
                    "tied.weight",
                    Box::leak(full_name(unit, name).into_boxed_str()),
                ));
            }
            if unused {
                spec.unused = vec![UNITS[1]];
            }
            spec.buffers = vec![("buffer", 3, true), ("scratch", 2, false)];
            Case {
                spec,
                algorithm,
                groups,
                dtype,
                from,
                to,
            }
        },
    )
}

/// One rank's state of a run, in each type.
struct Saved {
    full: (StateDict, StateDict),
    sharded: (StateDict, StateDict),
    local: Result<StateDict, NnError>,
}

fn under<T>(parameters: &ShardedParameters, kind: StateDictType, f: impl FnOnce() -> T) -> T {
    parameters.state_dict_type(StateDictSettings::from(kind), f)
}

fn rank0_only() -> StateDictSettings {
    let model = StateDictConfig::Full {
        rank0_only: true,
        offload_to_cpu: true,
    };
    let optim = StateDictConfig::Full {
        rank0_only: true,
        offload_to_cpu: true,
    };
    StateDictSettings::new(StateDictType::Full, Some(model), Some(optim)).unwrap()
}

fn save(model: &Model, optimizer: &Optimizer) -> Saved {
    let parameters = model.parameters();
    let full = (
        state_dict(parameters).unwrap(),
        full_optim_state_dict(None, parameters, optimizer, false).unwrap(),
    );
    let sharded = under(parameters, StateDictType::Sharded, || {
        (
            state_dict(parameters).unwrap(),
            optim_state_dict(None, parameters, optimizer).unwrap(),
        )
    });
    let local = under(parameters, StateDictType::Local, || {
        // An optimizer's state has no form of its own for this type.
        let optim = optim_state_dict(None, parameters, optimizer).unwrap();
        assert_same(
            &optim,
            &sharded_optim_state_dict(None, parameters, optimizer).unwrap(),
            "Local",
        );
        state_dict(parameters)
    });
    Saved {
        full,
        sharded,
        local,
    }
}

fn check(case: &Case) {
    let Case {
        spec,
        algorithm,
        groups,
        dtype,
        from,
        to,
    } = case;
    let algorithm = algorithms().remove(*algorithm);
    // Two groups are of alternate units, which FlatParameters are whole in.
    let saved = ranks(from.world, |group| {
        let model = model_of(&group, spec, *from, *dtype, 1);
        let mut optimizer = optimizer(model.parameters(), spec, &algorithm, *groups);
        train(&model, &mut [&mut optimizer], 0..2);
        save(&model, &optimizer)
    });
    let (model_state, optim_state) = (&saved[0].full.0, sorted_params(&saved[0].full.1));
    for saved in &saved {
        assert_same(&saved.full.0, model_state, "full on another rank");
        assert_same(
            &sorted_params(&saved.full.1),
            &optim_state,
            "full optimizer on another rank",
        );
    }
    let sharded_models: Vec<StateDict> =
        saved.iter().map(|saved| saved.sharded.0.clone()).collect();
    let sharded_optims: Vec<StateDict> =
        saved.iter().map(|saved| saved.sharded.1.clone()).collect();
    let has_local = from.world > 1
        && !matches!(
            from.strategy,
            ShardingStrategy::NoShard | ShardingStrategy::HybridShard
        );
    assert!(saved.iter().all(|saved| saved.local.is_ok() == has_local));
    let locals: Vec<StateDict> = saved
        .iter()
        .filter_map(|saved| saved.local.as_ref().ok())
        .cloned()
        .collect();
    ranks(to.world, |group| {
        let rank = group.rank();
        let target = || {
            let model = model_of(&group, spec, *to, *dtype, 2);
            let optimizer = optimizer(model.parameters(), spec, &algorithm, *groups);
            (model, optimizer)
        };
        let directly = OptimLoadOptions {
            load_directly: true,
            ..OptimLoadOptions::default()
        };
        let load = |settings: StateDictSettings, m: &StateDict, o: &StateDict, what: &str| {
            let (model, mut optimizer) = target();
            let parameters = model.parameters();
            parameters.state_dict_type(settings, || {
                assert!(load_state_dict(m, parameters, true).unwrap().is_clean());
                optim_state_dict_to_load(o, parameters, &mut optimizer, &directly).unwrap();
            });
            let again = save(&model, &optimizer);
            assert_same(&again.full.0, model_state, what);
            assert_same(&sorted_params(&again.full.1), &optim_state, what);
            assert_same(&whole(&group, &again.sharded.0), model_state, what);
            assert_same(
                &sorted_params(&whole(&group, &again.sharded.1)),
                &optim_state,
                what,
            );
        };
        load(
            StateDictSettings::from(StateDictType::Full),
            model_state,
            &optim_state,
            "Full",
        );
        let (here, nothing) = (rank == 0, StateDict::new());
        let of_rank0 = |state| if here { state } else { &nothing };
        load(
            rank0_only(),
            of_rank0(model_state),
            of_rank0(&optim_state),
            "Full from rank 0",
        );
        let (m, o) = (
            redealt(&sharded_models, rank, to.world),
            redealt(&sharded_optims, rank, to.world),
        );
        load(
            StateDictSettings::from(StateDictType::Sharded),
            &m,
            &o,
            "Sharded",
        );
        let takes_local = to.world > 1
            && !matches!(
                to.strategy,
                ShardingStrategy::NoShard | ShardingStrategy::HybridShard
            );
        if has_local && takes_local && from.use_orig_params == to.use_orig_params {
            load(
                StateDictSettings::from(StateDictType::Local),
                &redealt(&locals, rank, to.world),
                &o,
                "Local",
            );
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_layout_through_any_type_into_any_other_is_the_identity(case in case()) {
        check(&case);
    }
}
