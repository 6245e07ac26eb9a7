//! The state that is saved of a sharded run equals, bit for bit, an unsharded run:
//! `verify_osd_by_load` and `verify_msd` of each optimizer, strategy, mode, number of groups and of
//! ranks.
//!
//! Gradients are small integers that every rank has alike, so that their sum over any number of
//! ranks is exact and so is its division by that number: the mean is the unsharded gradient, and
//! equality can be asked for on 3 and 5 ranks too.

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::{DeviceMesh, PlainValue};
use fsdp_nn::algorithm::{AdagradOptions, AdamOptions, Algorithm, SgdOptions};
use fsdp_nn::torch::{
    StateDictOptions, get_state_dict, set_state_dict, verify_msd, verify_osd_by_load,
};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ParamGroup, ShardingStrategy, Unit,
};
use fsdp_state::{GatherOptions, StateDict, gather_state_dict};

type Named = Vec<(&'static str, Tensor)>;
type Model = FullyShardedDataParallel<(Named, Unit<Named>, Unit<Named>)>;

/// Shapes that no number of ranks divides, one of a single element, one tied.
fn model(
    group: ProcessGroup,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    seed: u64,
) -> Model {
    let world = group.world_size();
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    let mesh = Some(mesh).filter(|_| strategy == ShardingStrategy::HybridShard);
    let config = FsdpConfig {
        strategy,
        use_orig_params,
        seed,
        mesh,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group, config, |scope| {
        let init = candle_nn::Init::Randn {
            mean: 0.0,
            stdev: 1.0,
        };
        scope.tie("head.weight", "embedding.weight");
        let root = vec![
            (
                "embedding",
                scope
                    .vb()
                    .get_with_hints((7, 3), "embedding.weight", init)?,
            ),
            (
                "head",
                scope.vb().get_with_hints((7, 3), "head.weight", init)?,
            ),
            ("scale", scope.vb().get_with_hints(1, "scale", init)?),
        ];
        let a = scope.pp("a").unit(|scope| {
            let weight = scope.vb().get_with_hints((5, 9), "weight", init)?;
            candle_core::Result::Ok(vec![
                ("weight", weight),
                ("bias", scope.vb().get_with_hints(5, "bias", init)?),
            ])
        })?;
        let b = scope.pp("b").unit(|scope| {
            candle_core::Result::Ok(vec![(
                "weight",
                scope.vb().get_with_hints((2, 2, 3), "weight", init)?,
            )])
        })?;
        Ok((root, a, b))
    })
    .unwrap()
}

/// A loss whose gradients are small integers, in all parameters.
fn loss(params: &Named, step: usize) -> candle_core::Result<Tensor> {
    let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for (name, param) in params {
        let from = name.len() * 5 + step * 3;
        let factors = (0..param.elem_count())
            .map(|i| ((i * 7 + from) % 9) as f32 - 4.0)
            .collect();
        loss = (loss
            + (param * Tensor::from_vec(factors, param.dims(), &Device::Cpu)?)?.sum_all()?)?;
    }
    Ok(loss)
}

fn train(model: &Model, optimizer: &mut Optimizer, steps: std::ops::Range<usize>) {
    for step in steps {
        let loss = model
            .forward(|(root, a, b)| {
                let units = (a.run(|a| loss(a, step))? + b.run(|b| loss(b, step + 1))?)?;
                loss(root, step)? + units
            })
            .unwrap();
        model.backward(&loss).unwrap();
        optimizer.step().unwrap();
        model.parameters().zero_grad();
    }
}

/// One group of all parameters; or two, and one of them has a key that no algorithm knows.
fn optimizer(model: &Model, algorithm: &Algorithm, groups: usize) -> Optimizer {
    if groups == 1 {
        return Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
    }
    let mut slow = algorithm.clone();
    slow.set_lr(0.002).unwrap();
    let mut groups = vec![
        ParamGroup::new(algorithm.clone(), ["a.weight", "a.bias"]),
        ParamGroup::new(slow, ["b.weight", "embedding.weight", "scale"]),
    ];
    groups[1].extra = vec![("initial_lr".to_owned(), PlainValue::Float(0.5))];
    Optimizer::with_groups(model.parameters(), groups).unwrap()
}

fn algorithms() -> Vec<Algorithm> {
    let adam = AdamOptions {
        lr: 0.01,
        ..AdamOptions::default()
    };
    let sgd = SgdOptions {
        lr: 0.05,
        ..SgdOptions::default()
    };
    vec![
        Algorithm::Adam(adam),
        Algorithm::AdamW(AdamOptions {
            lr: 0.01,
            amsgrad: true,
            ..AdamOptions::adamw()
        }),
        Algorithm::Sgd(sgd.clone()),
        Algorithm::Sgd(SgdOptions {
            momentum: 0.9,
            nesterov: true,
            ..sgd
        }),
        Algorithm::Adagrad(AdagradOptions {
            lr: 0.1,
            ..AdagradOptions::default()
        }),
    ]
}

fn whole(model: &Model, optimizer: &Optimizer) -> (StateDict, StateDict) {
    let options = StateDictOptions {
        full_state_dict: true,
        ..StateDictOptions::default()
    };
    get_state_dict(model.parameters(), &[optimizer], &options).unwrap()
}

/// The unsharded run that all ranks of all layouts are compared with.
fn reference(algorithm: &Algorithm, groups: usize, seed: u64, steps: usize) -> (Model, Optimizer) {
    let group = run_local(1, |group| group).unwrap().remove(0);
    let model = model(group, ShardingStrategy::NoShard, true, seed);
    let mut optimizer = optimizer(&model, algorithm, groups);
    train(&model, &mut optimizer, 0..steps);
    (model, optimizer)
}

fn every_layout(check: impl Fn(ProcessGroup, ShardingStrategy, bool) + Sync) {
    for strategy in ShardingStrategy::ALL {
        for use_orig_params in [true, false] {
            for world in 1..=5 {
                run_local(world, |group| check(group, strategy, use_orig_params)).unwrap();
            }
        }
    }
}

#[test]
fn what_is_saved_equals_the_unsharded_reference_by_load() {
    for algorithm in algorithms() {
        for groups in [1, 2] {
            every_layout(|group, strategy, use_orig_params| {
                let what = format!("{algorithm:?}, {groups} groups, {strategy}, {use_orig_params}");
                let (plain, reference) = reference(&algorithm, groups, 1, 3);
                let expected = whole(&plain, &reference).0;
                let model = model(group.clone(), strategy, use_orig_params, 1);
                let mut trained = optimizer(&model, &algorithm, groups);
                train(&model, &mut trained, 0..3);
                let mut fresh = optimizer(&plain, &algorithm, groups);
                for options in [
                    StateDictOptions::default(),
                    StateDictOptions {
                        full_state_dict: true,
                        ..StateDictOptions::default()
                    },
                ] {
                    let (m, o) = get_state_dict(model.parameters(), &[&trained], &options).unwrap();
                    verify_osd_by_load(
                        &o,
                        plain.parameters(),
                        &mut [&mut fresh],
                        &[&reference],
                        &group,
                    )
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                    verify_msd(&m, &expected, &group)
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                }
            });
        }
    }
}

/// Loads the unsharded run, goes on, and is where the unsharded run then is.
#[test]
fn what_is_loaded_trains_on_as_the_unsharded_reference() {
    for algorithm in algorithms() {
        every_layout(|group, strategy, use_orig_params| {
            let (plain, mut reference) = reference(&algorithm, 2, 1, 2);
            let (m, o) = whole(&plain, &reference);
            let model = model(group.clone(), strategy, use_orig_params, 2);
            let mut loaded = optimizer(&model, &algorithm, 2);
            let options = StateDictOptions {
                full_state_dict: true,
                ..StateDictOptions::default()
            };
            let report =
                set_state_dict(&m, &o, model.parameters(), &mut [&mut loaded], &options).unwrap();
            assert!(report.is_clean(), "{report:?}");
            train(&model, &mut loaded, 2..4);
            train(&plain, &mut reference, 2..4);
            let options = StateDictOptions::default();
            let (m, o) = get_state_dict(model.parameters(), &[&loaded], &options).unwrap();
            let mut fresh = optimizer(&plain, &algorithm, 2);
            verify_osd_by_load(
                &o,
                plain.parameters(),
                &mut [&mut fresh],
                &[&reference],
                &group,
            )
            .unwrap();
            verify_msd(&m, &whole(&plain, &reference).0, &group).unwrap();
        });
    }
}

/// The checks themselves must be able to fail: on one more step, on one bit, on other
/// hyperparameters.
#[test]
fn a_difference_anywhere_is_named_on_every_rank() {
    let algorithm = algorithms().remove(0);
    run_local(3, |group| {
        let (plain, reference) = reference(&algorithm, 2, 1, 2);
        let model = model(group.clone(), ShardingStrategy::FullShard, true, 1);
        let mut trained = optimizer(&model, &algorithm, 2);
        train(&model, &mut trained, 0..2);
        let options = StateDictOptions::default();
        let mut fresh = optimizer(&plain, &algorithm, 2);
        let mut verify = |o: &StateDict| {
            verify_osd_by_load(
                o,
                plain.parameters(),
                &mut [&mut fresh],
                &[&reference],
                &group,
            )
        };
        let (m, o) = get_state_dict(model.parameters(), &[&trained], &options).unwrap();
        verify(&o).unwrap();
        let whole_o = gather_state_dict(&o, &group, &GatherOptions::default()).unwrap();
        // The last bit of one element of one entry, on one rank only.
        let moment = whole_o
            .dict("state")
            .unwrap()
            .dict("a.weight")
            .unwrap()
            .get("exp_avg")
            .unwrap();
        let mut values = moment
            .as_tensor()
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        values[44] = f32::from_bits(values[44].to_bits() ^ 1);
        let mut changed = whole_o.clone();
        if group.rank() == 2
            && let Some(fsdp_state::StateValue::Dict(states)) = changed.get_mut("state")
            && let Some(fsdp_state::StateValue::Dict(entries)) = states.get_mut("a.weight")
        {
            entries.insert(
                "exp_avg",
                Tensor::from_vec(values, (5, 9), &Device::Cpu).unwrap(),
            );
        }
        let error = verify(&changed).unwrap_err();
        assert!(matches!(error, NnError::Comm(_)), "{error}");
        assert!(
            error.to_string().contains("state.a.weight.exp_avg"),
            "{error}"
        );
        trained.groups_mut()[0].algorithm.set_lr(0.3).unwrap();
        let (_, o) = get_state_dict(model.parameters(), &[&trained], &options).unwrap();
        assert!(verify(&o).unwrap_err().to_string().contains("lr"));
        train(&model, &mut trained, 2..3);
        let (later, o) = get_state_dict(model.parameters(), &[&trained], &options).unwrap();
        assert!(verify(&o).is_err());
        let expected = whole(&plain, &reference).0;
        verify_msd(&m, &expected, &group).unwrap();
        assert!(verify_msd(&later, &expected, &group).is_err());
    })
    .unwrap();
}
