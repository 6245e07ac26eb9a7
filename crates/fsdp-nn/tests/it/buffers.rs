//! Batch norm's running statistics are buffers, as in plain candle: updated in training, used in
//! evaluation, saved and loaded.

use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNorm, Linear, Module, ModuleT, VarBuilder, VarMap, batch_norm, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::SgdOptions;
use fsdp_nn::torch::{
    StateDictOptions, StateDictSettings, StateDictType, get_model_state_dict, load_state_dict,
    set_model_state_dict, state_dict,
};
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, Optimizer, Scope, ShardingStrategy, Unit,
};

struct Net {
    input: Linear,
    norm: Unit<BatchNorm>,
}

impl Net {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        Ok(Net {
            input: linear(3, 4, scope.vb().pp("input"))?,
            norm: scope
                .pp("norm")
                .unit(|scope| batch_norm(4, 1e-5, scope.vb()))?,
        })
    }

    fn forward(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let h = self.input.forward(x)?;
        self.norm.run(|norm| norm.forward_t(&h, train))
    }
}

type Model = FullyShardedDataParallel<Net>;

fn model(group: &ProcessGroup, strategy: ShardingStrategy) -> Model {
    let config = FsdpConfig {
        strategy,
        seed: 2,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group.clone(), config, Net::new).unwrap()
}

fn input(k: usize) -> Tensor {
    let values: Vec<f32> = (0..18)
        .map(|i| ((i * 5 + k * 7) % 13) as f32 / 3.0 - 1.0)
        .collect();
    Tensor::from_vec(values, (6, 3), &Device::Cpu).unwrap()
}

fn buffer(model: &Model, name: &str) -> Vec<f32> {
    model.parameters().buffers()[name].0.to_vec1().unwrap()
}

#[test]
fn running_statistics_are_buffers_and_not_parameters() {
    run_local(2, |group| {
        let model = model(&group, ShardingStrategy::FullShard);
        let parameters = model.parameters();
        assert_eq!(
            parameters.fqns().collect::<Vec<_>>(),
            ["input.weight", "input.bias", "norm.weight", "norm.bias"]
        );
        let buffers: Vec<(&str, bool)> = parameters
            .buffers()
            .iter()
            .map(|(name, (_, saved))| (name.as_str(), *saved))
            .collect();
        assert_eq!(
            buffers,
            [("norm.running_mean", true), ("norm.running_var", true)]
        );
        assert_eq!(buffer(&model, "norm.running_mean"), [0.0; 4]);
        assert_eq!(buffer(&model, "norm.running_var"), [1.0; 4]);
    })
    .unwrap();
}

#[test]
fn batch_norm_trains_and_evaluates_as_in_plain_candle() {
    for strategy in [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
    ] {
        run_local(2, |group| {
            let model = model(&group, strategy);
            // The same values in plain candle.
            let vars = VarMap::new();
            let plain = Net::new(&Scope::plain(VarBuilder::from_varmap(
                &vars,
                DType::F32,
                &Device::Cpu,
            )))
            .unwrap();
            let options = StateDictOptions {
                full_state_dict: true,
                ..StateDictOptions::default()
            };
            let state = get_model_state_dict(model.parameters(), &options).unwrap();
            for (name, var) in vars.data().lock().unwrap().iter() {
                var.set(state.get(name).unwrap().as_tensor().unwrap())
                    .unwrap();
            }
            let mut optimizer = Optimizer::new(
                model.parameters(),
                Algorithm::Sgd(SgdOptions {
                    lr: 0.1,
                    ..SgdOptions::default()
                }),
            )
            .unwrap();
            // All ranks have one batch.
            for step in 0..3 {
                let evaluated = model.forward(|net| net.forward(&input(9), false)).unwrap();
                let expected = plain.forward(&input(9), false).unwrap();
                assert_close(&evaluated, &expected);
                let loss = model
                    .forward(|net| {
                        (net.forward(&input(step), true)? - 0.5)?
                            .powf(4.0)?
                            .mean_all()
                    })
                    .unwrap();
                model.backward(&loss).unwrap();
                optimizer.step().unwrap();
                model.parameters().zero_grad();
                let loss = (plain.forward(&input(step), true).unwrap() - 0.5)
                    .unwrap()
                    .powf(4.0)
                    .unwrap()
                    .mean_all()
                    .unwrap();
                let grads = loss.backward().unwrap();
                for var in vars.all_vars() {
                    if let Some(grad) = grads.get(&var) {
                        var.set(&(var.as_tensor() - (grad * 0.1).unwrap()).unwrap())
                            .unwrap();
                    }
                }
            }
            assert_ne!(buffer(&model, "norm.running_mean"), [0.0; 4]);
            assert_close(
                &model.parameters().buffers()["norm.running_var"].0,
                plain
                    .norm
                    .run(|n| Ok(n.running_var().clone()))
                    .as_ref()
                    .unwrap(),
            );
        })
        .unwrap();
    }
}

fn assert_close(found: &Tensor, expected: &Tensor) {
    let difference = (found - expected)
        .unwrap()
        .abs()
        .unwrap()
        .max_all()
        .unwrap()
        .to_scalar::<f32>()
        .unwrap();
    assert!(difference < 1e-5, "{found} is not {expected}");
}

#[test]
fn running_statistics_go_with_the_state_dict_and_come_back_into_the_layer() {
    run_local(2, |group| {
        let trained = model(&group, ShardingStrategy::FullShard);
        trained.forward(|net| net.forward(&input(0), true)).unwrap();
        let options = StateDictOptions::default();
        let state = get_model_state_dict(trained.parameters(), &options).unwrap();
        let fresh = model(&group, ShardingStrategy::FullShard);
        set_model_state_dict(&state, fresh.parameters(), &options).unwrap();
        assert_eq!(
            buffer(&fresh, "norm.running_mean"),
            buffer(&trained, "norm.running_mean")
        );
        let outputs = [&trained, &fresh]
            .map(|model| model.forward(|net| net.forward(&input(3), false)).unwrap());
        assert_close(&outputs[0], &outputs[1]);
    })
    .unwrap();
}

#[test]
fn a_local_state_dict_brings_each_rank_its_own_statistics_back() {
    run_local(2, |group| {
        let model = model(&group, ShardingStrategy::FullShard);
        let parameters = model.parameters();
        let local = StateDictSettings::from(StateDictType::Local);
        // Each rank has other samples.
        model
            .forward(|net| net.forward(&input(group.rank()), true))
            .unwrap();
        let before = buffer(&model, "norm.running_mean");
        let state = parameters
            .state_dict_type(local, || state_dict(parameters))
            .unwrap();
        model.forward(|net| net.forward(&input(7), true)).unwrap();
        let report = parameters
            .state_dict_type(local, || load_state_dict(&state, parameters, true))
            .unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(buffer(&model, "norm.running_mean"), before);
    })
    .unwrap();
}

#[test]
fn a_buffer_under_a_name_that_is_taken_is_an_error() {
    run_local(2, |group| {
        let value = || Tensor::zeros(3, DType::F32, &Device::Cpu);
        let build = |build: &dyn Fn(&Scope) -> candle_core::Result<()>| {
            FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), build)
                .err()
                .unwrap()
                .to_string()
        };
        let after_a_parameter = build(&|scope| {
            linear(3, 3, scope.vb())?;
            scope.buffer("bias", value()?, true);
            Ok(())
        });
        assert!(
            after_a_parameter.contains("`bias`") && after_a_parameter.contains("parameter"),
            "{after_a_parameter}"
        );
        let before_a_parameter = build(&|scope| {
            scope.buffer(
                "weight",
                Tensor::zeros((3, 3), DType::F32, &Device::Cpu)?,
                true,
            );
            linear(3, 3, scope.vb()).map(drop)
        });
        assert!(
            before_a_parameter.contains("`weight`") && before_a_parameter.contains("parameter"),
            "{before_a_parameter}"
        );
        let twice = build(&|scope| {
            linear(3, 3, scope.vb())?;
            scope.pp("norm").buffer("mean", value()?, true);
            scope.buffer("norm.mean", value()?, false);
            Ok(())
        });
        assert!(
            twice.contains("`norm.mean`") && twice.contains("twice"),
            "{twice}"
        );
    })
    .unwrap();
}

/// A table that each layer registers under a name of its own, say.
#[test]
fn buffers_that_are_one_tensor_are_loaded_from_the_first_of_their_names() {
    const NAMES: [&str; 2] = ["0.table", "1.table"];
    run_local(2, |group| {
        let build = |value: f32| {
            let model =
                FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                    let table = Tensor::full(value, 3, &Device::Cpu)?;
                    NAMES
                        .iter()
                        .for_each(|name| drop(scope.buffer(name, table.clone(), true)));
                    linear(3, 2, scope.vb())
                });
            model.unwrap()
        };
        let assert_first = |model: &FullyShardedDataParallel<Linear>, how: &dyn std::fmt::Debug| {
            for name in NAMES {
                let (buffer, _) = &model.parameters().buffers()[name];
                assert_eq!(buffer.to_vec1::<f32>().unwrap(), [1.0; 3], "{how:?}");
            }
        };
        let saved = build(1.0);
        let second = || Tensor::full(2f32, 3, &Device::Cpu).unwrap();
        let full = StateDictOptions {
            full_state_dict: true,
            ..StateDictOptions::default()
        };
        let from_rank0 = StateDictOptions {
            broadcast_from_rank0: true,
            ..full.clone()
        };
        for options in [StateDictOptions::default(), full.clone(), from_rank0] {
            let mut state = get_model_state_dict(saved.parameters(), &full).unwrap();
            state.insert(NAMES[1], second());
            let model = build(0.0);
            let report = set_model_state_dict(&state, model.parameters(), &options).unwrap();
            assert!(report.is_clean(), "{report:?}");
            assert_first(&model, &options);
        }
        for kind in [
            StateDictType::Full,
            StateDictType::Sharded,
            StateDictType::Local,
        ] {
            let settings = StateDictSettings::from(kind);
            let mut state = saved
                .parameters()
                .state_dict_type(settings, || state_dict(saved.parameters()))
                .unwrap();
            state.insert(NAMES[1], second());
            let model = build(0.0);
            let parameters = model.parameters();
            parameters
                .state_dict_type(settings, || load_state_dict(&state, parameters, true))
                .unwrap();
            assert_first(&model, &kind);
        }
    })
    .unwrap();
}

/// A table of which one layer uses a part, say.
#[test]
fn buffers_that_share_some_elements_are_loaded_and_the_later_name_counts_there() {
    run_local(2, |group| {
        let build = || {
            let model =
                FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                    let table = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
                    scope.buffer("0.table", table.clone(), true);
                    scope.buffer("1.part", table.narrow(0, 1, 2)?, true);
                    linear(3, 2, scope.vb())
                });
            model.unwrap()
        };
        let full = StateDictOptions {
            full_state_dict: true,
            ..StateDictOptions::default()
        };
        let from_rank0 = StateDictOptions {
            broadcast_from_rank0: true,
            ..full.clone()
        };
        for options in [StateDictOptions::default(), full.clone(), from_rank0] {
            let mut state = get_model_state_dict(build().parameters(), &full).unwrap();
            state.insert(
                "0.table",
                Tensor::new(&[1f32, 2., 3.], &Device::Cpu).unwrap(),
            );
            state.insert("1.part", Tensor::new(&[4f32, 5.], &Device::Cpu).unwrap());
            let model = build();
            let report = set_model_state_dict(&state, model.parameters(), &options).unwrap();
            assert!(report.is_clean(), "{report:?}");
            let (table, _) = &model.parameters().buffers()["0.table"];
            assert_eq!(table.to_vec1::<f32>().unwrap(), [1., 4., 5.], "{options:?}");
        }
    })
    .unwrap();
}
