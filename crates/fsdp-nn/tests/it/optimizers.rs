//! Optimizers that need more than elements: Muon's matrices, the modes of schedule-free AdamW, and
//! averages of weights.

use candle_core::{Device, Tensor};
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_flat::storage::{Contents, release};
use fsdp_layout::{DeviceMesh, PlainValue};
use fsdp_nn::algorithm::{
    AdafactorOptions, AdamOptions, Algorithm, AlgorithmError, MuonAdjust, MuonOptions,
    ScheduleFreeOptions, SgdOptions,
};
use fsdp_nn::torch::{
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict,
};
use fsdp_nn::{
    AveragedModel, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ParamGroup,
    ShardingStrategy, Unit,
};
use serde_json::Value;

type Model = FullyShardedDataParallel<(Vec<Unit<Tensor>>, Tensor)>;

/// The shapes of the matrices; a unit each but the last.
const SHAPES: [[usize; 2]; 4] = [[6, 4], [4, 7], [1, 3], [5, 5]];

fn model(group: &ProcessGroup, config: FsdpConfig) -> Model {
    let world = group.world_size();
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    let config = FsdpConfig {
        mesh: Some(mesh),
        ..config
    };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let unit = |i: usize| {
            scope
                .pp(i)
                .unit(|scope| scope.vb().get((SHAPES[i][0], SHAPES[i][1]), "weight"))
        };
        let units = (0..SHAPES.len() - 1)
            .map(unit)
            .collect::<candle_core::Result<_>>()?;
        Ok((units, scope.vb().get((5, 5), "last")?))
    });
    let model: Model = model.unwrap();
    let mut whole = model.parameters().summon_full_params().unwrap();
    for (index, fqn) in names().into_iter().enumerate() {
        whole.set(&fqn, matrix(1, &SHAPES[index])).unwrap();
    }
    whole.write_back().unwrap();
    model
}

fn names() -> Vec<String> {
    (0..SHAPES.len() - 1)
        .map(|i| format!("{i}.weight"))
        .chain(["last".to_owned()])
        .collect()
}

/// The numbers that `values` in `matrices.py` makes.
fn matrix(seed: u32, shape: &[usize]) -> Tensor {
    let mut state = seed;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(state >> 8) / f64::from(1 << 23) - 1.0) as f32
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| number()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// A backward that gives each matrix the gradient of this step.
fn backward(model: &Model, step: u32) {
    let loss = model.forward(|(units, last)| {
        let mut loss = (last * matrix(100 + step, &[5, 5]))?.sum_all()?;
        for (unit, shape) in units.iter().zip(SHAPES) {
            loss = (loss + unit.run(|weight| (weight * matrix(100 + step, &shape))?.sum_all())?)?;
        }
        Ok(loss)
    });
    model.backward(&loss.unwrap()).unwrap();
}

fn step(model: &Model, optimizer: &mut Optimizer, number: u32) {
    backward(model, number);
    optimizer.step().unwrap();
    model.parameters().zero_grad();
}

fn values(model: &Model) -> Vec<Vec<f32>> {
    let whole = model.parameters().summon_full_params().unwrap();
    whole
        .iter()
        .map(|(_, tensor)| tensor.flatten_all().unwrap().to_vec1().unwrap())
        .collect()
}

fn muon(lr: f64) -> Algorithm {
    Algorithm::Muon(MuonOptions {
        lr,
        ..MuonOptions::default()
    })
}

/// The optimizer that a torch call with these keyword arguments makes.
fn with_options(optimizer: &str, options: &Value) -> Algorithm {
    let default = match optimizer {
        "Muon" => Algorithm::Muon(MuonOptions::default()),
        _ => Algorithm::Adafactor(AdafactorOptions::default()),
    };
    let group: Vec<_> = options
        .as_object()
        .unwrap()
        .iter()
        .map(|(key, value)| (key.clone(), plain(value)))
        .collect();
    default.with_group(&group).unwrap().algorithm
}

fn plain(value: &Value) -> PlainValue {
    match value {
        Value::Bool(value) => PlainValue::Bool(*value),
        Value::String(value) => PlainValue::from(value.clone()),
        Value::Array(items) => PlainValue::List(items.iter().map(plain).collect()),
        value => value.as_i64().map_or_else(
            || PlainValue::Float(value.as_f64().unwrap()),
            PlainValue::Int,
        ),
    }
}

fn floats(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|value| value.as_f64().unwrap())
        .collect()
}

/// The largest difference of Muon's parameters from torch's: the elements of a direction are at
/// most about 1, where `bf16` has a unit of 1/256, and a few of these roundings add up in each of
/// three steps.
fn muon_tolerance(muon: &MuonOptions, shape: &[usize]) -> f64 {
    let scale = match muon.adjust_lr_fn {
        Some(MuonAdjust::MatchRmsAdamw) => 0.2 * (shape[0].max(shape[1]) as f64).sqrt(),
        _ => (shape[0] as f64 / shape[1] as f64).max(1.0).sqrt(),
    };
    3.0 * muon.lr * scale / 16.0
}

#[test]
fn muon_and_adafactor_step_as_torchs_but_for_roundings() {
    let goldens: Value = serde_json::from_str(include_str!("../data/matrices.json")).unwrap();
    for world in [1, 2] {
        run_local(world, |group| {
            for case in goldens["cases"].as_array().unwrap() {
                let shape: Vec<usize> = floats(&case["shape"])
                    .into_iter()
                    .map(|size| size as usize)
                    .collect();
                let algorithm = with_options(case["optimizer"].as_str().unwrap(), &case["options"]);
                let model =
                    FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                        scope.vb().get(shape.as_slice(), "w")
                    });
                let model = model.unwrap();
                let mut whole = model.parameters().summon_full_params().unwrap();
                whole.set("w", matrix(1, &shape)).unwrap();
                whole.write_back().unwrap();
                let mut optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
                for number in 0..case["steps"].as_u64().unwrap() as u32 {
                    let loss = model
                        .forward(|w| (w * matrix(100 + number, &shape))?.sum_all())
                        .unwrap();
                    model.backward(&loss).unwrap();
                    optimizer.step().unwrap();
                    model.parameters().zero_grad();
                }
                let what = format!("{} {} on {world}", case["optimizer"], case["options"]);
                let within = match &algorithm {
                    Algorithm::Muon(muon) => muon_tolerance(muon, &shape),
                    _ => 1e-5,
                };
                let found = model
                    .parameters()
                    .summon_full_params()
                    .unwrap()
                    .get("w")
                    .unwrap()
                    .flatten_all()
                    .unwrap();
                for (found, expected) in found
                    .to_vec1::<f32>()
                    .unwrap()
                    .iter()
                    .zip(floats(&case["param"]))
                {
                    assert!(
                        (f64::from(*found) - expected).abs() < within,
                        "{what}: {found} is not {expected}"
                    );
                }
                let options = StateDictOptions {
                    full_state_dict: true,
                    ..StateDictOptions::default()
                };
                let state =
                    get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
                let state = state
                    .get("state")
                    .unwrap()
                    .as_dict()
                    .unwrap()
                    .get("w")
                    .unwrap()
                    .as_dict()
                    .unwrap();
                let golden = case["state"].as_object().unwrap();
                let sorted = |keys: Vec<&str>| {
                    let mut keys = keys;
                    keys.sort_unstable();
                    keys.join(" ")
                };
                let keys = sorted(golden.keys().map(String::as_str).collect());
                assert_eq!(sorted(state.keys().collect()), keys, "{what}");
                for (key, golden) in golden {
                    let found = state.get(key).unwrap().as_tensor().unwrap();
                    let dims: Vec<f64> = found.dims().iter().map(|&size| size as f64).collect();
                    assert_eq!(dims, floats(&golden[0]), "{what}: {key}");
                    let found = found.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    for (found, expected) in found.iter().zip(floats(&golden[1])) {
                        assert!(
                            (f64::from(*found) - expected).abs() < 1e-5,
                            "{what}, {key}: {found} is not {expected}"
                        );
                    }
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn muon_and_adafactor_have_the_bits_of_one_rank_on_any_number_in_any_layout() {
    let train = |world: usize, config: FsdpConfig, algorithm: &Algorithm| {
        let mut values = run_local(world, |group| {
            let model = model(&group, config.clone());
            let mut optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
            (0..3).for_each(|number| step(&model, &mut optimizer, number));
            values(&model)
        })
        .unwrap();
        assert!(values.iter().all(|other| other == &values[0]));
        values.remove(0)
    };
    let adafactor = Algorithm::Adafactor(AdafactorOptions {
        lr: 0.1,
        ..AdafactorOptions::default()
    });
    for (algorithm, layouts) in [(muon(0.05), [true, false].as_slice()), (adafactor, &[true])] {
        let expected = train(1, FsdpConfig::default(), &algorithm);
        for world in [2, 4] {
            for strategy in ShardingStrategy::ALL {
                for &use_orig_params in layouts {
                    let config = FsdpConfig {
                        strategy,
                        use_orig_params,
                        ..FsdpConfig::default()
                    };
                    let what = format!(
                        "{} {strategy} on {world}, {use_orig_params}",
                        algorithm.name()
                    );
                    assert_eq!(train(world, config, &algorithm), expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn muon_exchanges_twice_a_step_and_what_does_not_suit_an_optimizer_is_refused() {
    run_local(2, |group| {
        let model = model(&group, FsdpConfig::default());
        let mut optimizer = Optimizer::new(model.parameters(), muon(0.05)).unwrap();
        backward(&model, 0);
        let before = group.traffic();
        optimizer.step().unwrap();
        assert_eq!(
            group
                .traffic()
                .since(&before)
                .count(Operation::AllToAllUneven),
            2
        );
        let flat = FullyShardedDataParallel::new(
            group.clone(),
            FsdpConfig {
                use_orig_params: false,
                ..FsdpConfig::default()
            },
            |scope| scope.vb().get((2, 3), "w"),
        );
        let adafactor = Algorithm::Adafactor(AdafactorOptions::default());
        let error = Optimizer::new(flat.unwrap().parameters(), adafactor).unwrap_err();
        assert!(
            matches!(
                error,
                NnError::Algorithm(AlgorithmError::FlatParameters { .. })
            ),
            "{error}"
        );
        let vector = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            scope.vb().get(3, "bias")
        });
        let error = Optimizer::new(vector.unwrap().parameters(), muon(0.05)).unwrap_err();
        assert!(
            matches!(error, NnError::Algorithm(AlgorithmError::NotAMatrix { .. })),
            "{error}"
        );
    })
    .unwrap();
}

#[test]
fn state_goes_on_at_another_number_of_ranks_with_the_bits_of_a_run_that_never_stopped() {
    let free = ScheduleFreeOptions {
        lr: 0.05,
        warmup_steps: 4,
        weight_decay: 0.1,
        ..ScheduleFreeOptions::default()
    };
    let adafactor = Algorithm::Adafactor(AdafactorOptions {
        lr: 0.1,
        ..AdafactorOptions::default()
    });
    for algorithm in [muon(0.05), adafactor, Algorithm::ScheduleFreeAdamW(free)] {
        let begin = |group: &ProcessGroup| {
            let model = model(group, FsdpConfig::default());
            let groups = vec![
                ParamGroup::new(algorithm.clone(), &names()[..3]),
                ParamGroup::new(
                    Algorithm::AdamW(AdamOptions {
                        lr: 0.01,
                        ..AdamOptions::adamw()
                    }),
                    ["last"],
                ),
            ];
            let mut optimizer = Optimizer::with_groups(model.parameters(), groups).unwrap();
            optimizer.train().unwrap();
            (model, optimizer)
        };
        let options = StateDictOptions {
            full_state_dict: true,
            ..StateDictOptions::default()
        };
        let whole = run_local(1, |group| {
            let (model, mut optimizer) = begin(&group);
            (0..5).for_each(|number| step(&model, &mut optimizer, number));
            values(&model)
        });
        let whole = whole.unwrap().remove(0);
        for (first, then) in [(2, 4), (4, 1)] {
            let mut saved = run_local(first, |group| {
                let (model, mut optimizer) = begin(&group);
                (0..2).for_each(|number| step(&model, &mut optimizer, number));
                let entries: Vec<(String, Vec<String>)> = names()
                    .into_iter()
                    .filter_map(|fqn| {
                        let entries = optimizer.state_of(&fqn).unwrap()?.keys().cloned().collect();
                        Some((fqn, entries))
                    })
                    .collect();
                let state =
                    get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
                (values(&model), state, entries)
            })
            .unwrap();
            let (weights, state, entries) = saved.remove(0);
            let found = run_local(then, |group| {
                let (model, mut optimizer) = begin(&group);
                let mut target = model.parameters().summon_full_params().unwrap();
                for ((fqn, shape), weights) in names().iter().zip(SHAPES).zip(&weights) {
                    let tensor =
                        Tensor::from_slice(weights, (shape[0], shape[1]), &Device::Cpu).unwrap();
                    target.set(fqn, tensor).unwrap();
                }
                target.write_back().unwrap();
                set_optimizer_state_dict(
                    &state,
                    model.parameters(),
                    &mut [&mut optimizer],
                    &options,
                )
                .unwrap();
                for (fqn, names) in &entries {
                    let found = optimizer.state_of(fqn).unwrap().unwrap();
                    assert!(
                        found.keys().eq(names),
                        "{} has {:?}, not {names:?}",
                        algorithm.name(),
                        found.keys()
                    );
                }
                (2..5).for_each(|number| step(&model, &mut optimizer, number));
                values(&model)
            });
            assert_eq!(
                found.unwrap()[0],
                whole,
                "{} from {first} to {then}",
                algorithm.name()
            );
        }
    }
}

/// Makes an optimizer of one group for all matrices, or one for each.
fn in_order(model: &Model, algorithm: &Algorithm, one_group: bool, is_reversed: bool) -> Optimizer {
    let mut names = names();
    if is_reversed {
        names.reverse();
    }
    let groups = if one_group {
        vec![ParamGroup::new(algorithm.clone(), names)]
    } else {
        names
            .into_iter()
            .map(|name| ParamGroup::new(algorithm.clone(), [name]))
            .collect()
    };
    Optimizer::with_groups(model.parameters(), groups).unwrap()
}

/// Matrices of one shape, and of shapes that have as many elements together, would be mixed without
/// an error.
#[test]
fn ranks_may_name_matrices_and_make_groups_in_different_orders() {
    for algorithm in [
        muon(0.1),
        Algorithm::Adafactor(AdafactorOptions {
            lr: 0.1,
            ..AdafactorOptions::default()
        }),
    ] {
        let trained = |world: usize, one_group: bool, differ: bool| {
            let found = run_local(world, |group| {
                let model = model(&group, FsdpConfig::default());
                let is_reversed = differ && !group.rank().is_multiple_of(2);
                let mut optimizer = in_order(&model, &algorithm, one_group, is_reversed);
                (0..3).for_each(|number| step(&model, &mut optimizer, number));
                values(&model)
            });
            found.unwrap().swap_remove(0)
        };
        for world in [2, 3, 4] {
            let expected = trained(world, true, false);
            for one_group in [true, false] {
                assert_eq!(
                    trained(world, one_group, true),
                    expected,
                    "{} on {world}, {one_group}",
                    algorithm.name()
                );
            }
        }
    }
}

#[test]
fn ranks_that_would_update_different_matrices_as_whole_ones_get_the_same_error() {
    for algorithm in [muon(0.1), Algorithm::Adafactor(AdafactorOptions::default())] {
        let errors = run_local(3, |group| {
            let model = model(&group, FsdpConfig::default());
            let mut names = names();
            names.remove(group.rank());
            let group = ParamGroup::new(algorithm.clone(), names);
            let mut optimizer = Optimizer::with_groups(model.parameters(), vec![group]).unwrap();
            backward(&model, 0);
            let before = values(&model);
            let error = optimizer.step().unwrap_err().to_string();
            assert_eq!(values(&model), before);
            error
        })
        .unwrap();
        assert!(
            errors[0].contains(algorithm.name()) && errors[0].contains("rank 1"),
            "{}",
            errors[0]
        );
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

#[test]
fn schedule_free_parameters_are_the_average_in_eval_and_come_back_for_training() {
    run_local(2, |group| {
        let model = model(&group, FsdpConfig::default());
        let free = ScheduleFreeOptions {
            lr: 0.1,
            ..ScheduleFreeOptions::default()
        };
        let mut optimizer =
            Optimizer::new(model.parameters(), Algorithm::ScheduleFreeAdamW(free)).unwrap();
        backward(&model, 0);
        let error = optimizer.step().unwrap_err();
        assert!(
            matches!(
                error,
                NnError::Algorithm(AlgorithmError::NotTraining { .. })
            ),
            "{error}"
        );
        assert!(optimizer.is_fresh());
        model.parameters().zero_grad();
        optimizer.train().unwrap();
        let mut z = values(&model);
        let mut average = z.clone();
        let mut sum = 0.0f64;
        for number in 0..3 {
            step(&model, &mut optimizer, number);
            let state = |fqn: &str| optimizer.state_of(fqn).unwrap().unwrap();
            assert_eq!(
                state("0.weight").keys().collect::<Vec<_>>(),
                ["z", "exp_avg_sq"]
            );
            // By the definition: the average of all z, each with the same weight here.
            sum += 1.0;
            let mut found = Vec::new();
            for fqn in names() {
                let z = state(&fqn)["z"].as_sharded().unwrap().clone();
                let shards = z
                    .shards()
                    .iter()
                    .map(|shard| shard.tensor.flatten_all().unwrap());
                let mine: Vec<f32> = shards
                    .flat_map(|shard| shard.to_vec1::<f32>().unwrap())
                    .collect();
                found.push(group.all_gather_object(&mine).unwrap().concat());
            }
            z = found;
            for (average, z) in average.iter_mut().zip(&z) {
                for (average, z) in average.iter_mut().zip(z) {
                    *average += (z - *average) / sum as f32;
                }
            }
        }
        let training = values(&model);
        optimizer.eval().unwrap();
        optimizer.eval().unwrap();
        for (found, expected) in values(&model).concat().into_iter().zip(average.concat()) {
            assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
        }
        optimizer.train().unwrap();
        for (found, expected) in values(&model).concat().into_iter().zip(training.concat()) {
            assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
        }
    })
    .unwrap();
}

#[test]
fn an_average_of_weights_is_that_of_torch_and_its_state_comes_back() {
    for world in [1, 2, 3] {
        run_local(world, |group| {
            let model = model(&group, FsdpConfig::default());
            let sgd = Algorithm::Sgd(SgdOptions {
                lr: 0.1,
                ..SgdOptions::default()
            });
            let mut optimizer = Optimizer::new(model.parameters(), sgd).unwrap();
            let mut average = AveragedModel::new(model.parameters(), 0.75).unwrap();
            let mut expected = Vec::new();
            for number in 0..4 {
                step(&model, &mut optimizer, number);
                average.update().unwrap();
                let now = values(&model).concat();
                // torch: a copy first, then `average.lerp(weights, 1 - decay)`.
                expected = match number {
                    0 => now,
                    _ => expected
                        .iter()
                        .zip(now)
                        .map(|(a, w): (&f32, f32)| a + 0.25 * (w - a))
                        .collect(),
                };
            }
            let weights = values(&model);
            average.swap().unwrap();
            for (found, expected) in values(&model).concat().iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
            }
            assert!(matches!(average.update(), Err(NnError::Swapped)));
            assert!(matches!(average.state_dict(), Err(NnError::Swapped)));
            let of_average = values(&model);
            average.swap().unwrap();
            assert_eq!(values(&model), weights);

            let state = average.state_dict().unwrap();
            let keys: Vec<String> = state.keys().map(str::to_owned).collect();
            let modules = names().into_iter().map(|name| format!("module.{name}"));
            assert_eq!(
                keys,
                ["n_averaged".to_owned()]
                    .into_iter()
                    .chain(modules)
                    .collect::<Vec<_>>()
            );
            let mut other = AveragedModel::new(model.parameters(), 0.75).unwrap();
            let mut part = state.clone();
            part.remove("module.last");
            assert!(
                other
                    .load_state_dict(&part)
                    .unwrap_err()
                    .to_string()
                    .contains("module.last")
            );
            assert_eq!(other.n_averaged(), 0);
            other.load_state_dict(&state).unwrap();
            assert_eq!(other.n_averaged(), 4);
            other.swap().unwrap();
            assert_eq!(values(&model), of_average);
            let error = AveragedModel::new(model.parameters(), 1.5).unwrap_err();
            assert!(
                error.to_string().contains("decay of an average of weights"),
                "{error}"
            );
        })
        .unwrap();
    }
}

#[test]
fn a_model_that_has_its_average_is_not_trained_or_loaded() {
    run_local(2, |group| {
        let model = model(&group, FsdpConfig::default());
        let parameters = model.parameters();
        let free = ScheduleFreeOptions {
            lr: 0.1,
            ..ScheduleFreeOptions::default()
        };
        let mut optimizer = Optimizer::new(parameters, Algorithm::ScheduleFreeAdamW(free)).unwrap();
        optimizer.train().unwrap();
        let [mut average, mut other] =
            [(); 2].map(|()| AveragedModel::new(parameters, 0.5).unwrap());
        for number in 0..2 {
            step(&model, &mut optimizer, number);
            average.update().unwrap();
        }
        let weights = values(&model);
        backward(&model, 2);
        average.swap().unwrap();
        assert!(parameters.has_average());
        let of_average = values(&model);
        assert!(of_average != weights);
        let name = parameters.fqns().next().unwrap();
        let weight = parameters.parameter(name).unwrap();
        let mut whole = parameters.summon_full_params().unwrap();
        let doubled = (whole.get(name).unwrap() * 2.0).unwrap();
        whole.set(name, doubled).unwrap();
        let options = StateDictOptions::default();
        let state = get_model_state_dict(parameters, &options).unwrap();
        for refused in [
            optimizer.step(),
            optimizer.eval(),
            other.swap(),
            other.update(),
            AveragedModel::new(parameters, 0.5).map(drop),
            set_model_state_dict(&state, parameters, &options).map(drop),
            parameters.set_parameter(name, &weight),
            whole.write_back(),
        ] {
            let error = refused.unwrap_err();
            assert!(
                error.to_string().contains("has the average of its weights"),
                "{error}"
            );
        }
        assert_eq!(values(&model), of_average);
        average.swap().unwrap();
        assert_eq!(values(&model), weights);
        optimizer.step().unwrap();
        assert!(values(&model) != weights);
        other.swap().unwrap();
    })
    .unwrap();
}

/// Takes the memory of a tensor away while `f` runs, and gives it back.
fn without<R>(tensor: &Tensor, f: impl FnOnce() -> R) -> R {
    let tensor = tensor.flatten_all().unwrap();
    let values = tensor.to_vec1::<f32>().unwrap();
    release(&tensor).unwrap();
    let result = f();
    Contents::new(values).move_into(&tensor).unwrap();
    result
}

#[test]
fn a_swap_that_fails_in_the_middle_exchanges_nothing() {
    run_local(1, |group| {
        let model = model(&group, FsdpConfig::default());
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let mut optimizer = Optimizer::new(model.parameters(), adamw).unwrap();
        let mut average = AveragedModel::new(model.parameters(), 0.5).unwrap();
        step(&model, &mut optimizer, 0);
        let weights = values(&model);
        let state = average.state_dict().unwrap();
        let last = state.get("module.last").unwrap().as_sharded().unwrap();
        let last = &last.shards()[0].tensor;
        without(last, || average.swap().unwrap_err());
        assert_eq!(values(&model), weights);
        assert!(!model.parameters().has_average());
        average.swap().unwrap();
        assert!(values(&model)[0] != weights[0]);
        without(last, || average.swap().unwrap_err());
        assert!(model.parameters().has_average());
        average.swap().unwrap();
        assert_eq!(values(&model), weights);
    })
    .unwrap();
}

#[test]
fn a_switch_of_modes_that_fails_in_the_middle_leaves_the_weights_of_the_old_mode() {
    run_local(1, |group| {
        let model = model(&group, FsdpConfig::default());
        let free = ScheduleFreeOptions {
            lr: 0.1,
            ..ScheduleFreeOptions::default()
        };
        let mut optimizer =
            Optimizer::new(model.parameters(), Algorithm::ScheduleFreeAdamW(free)).unwrap();
        optimizer.train().unwrap();
        (0..3).for_each(|number| step(&model, &mut optimizer, number));
        let state = optimizer.state_of("last").unwrap().unwrap();
        let last = state["z"].as_sharded().unwrap().shards()[0].tensor.clone();
        let close = |expected: &[Vec<f32>]| {
            for (found, expected) in values(&model).concat().into_iter().zip(expected.concat()) {
                assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
            }
        };
        let training = values(&model);
        without(&last, || optimizer.eval().unwrap_err());
        close(&training);
        optimizer.eval().unwrap();
        let average = values(&model);
        assert!(average.concat()[0] - training.concat()[0] != 0.0);
        without(&last, || optimizer.train().unwrap_err());
        close(&average);
        optimizer.train().unwrap();
        close(&training);
    })
    .unwrap();
}

#[test]
fn a_number_of_updates_that_none_can_be_is_refused() {
    run_local(1, |group| {
        let model = model(&group, FsdpConfig::default());
        let mut average = AveragedModel::new(model.parameters(), 0.5).unwrap();
        let mut state = average.state_dict().unwrap();
        state.insert("n_averaged", Tensor::new(-1i64, &Device::Cpu).unwrap());
        assert!(
            average
                .load_state_dict(&state)
                .unwrap_err()
                .to_string()
                .contains("n_averaged")
        );
        state.insert("n_averaged", Tensor::new(i64::MAX, &Device::Cpu).unwrap());
        average.load_state_dict(&state).unwrap();
        average.update().unwrap();
        assert_eq!(average.n_averaged(), i64::MAX);
    })
    .unwrap();
}
