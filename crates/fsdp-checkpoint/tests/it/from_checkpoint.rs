//! A model is built from a checkpoint of any format: what the file has is what the model gets, or
//! an error that names it.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{
    Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear_no_bias,
};
use fsdp_checkpoint::{
    CheckpointError, FromCheckpointOptions, LoadOptions, SaveOptions, TrainState, from_checkpoint,
    save,
};
use fsdp_checkpoint::{Checkpointer, CheckpointerOptions};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, Scope, ShardingStrategy};
use fsdp_state::StateDict;

/// A language model whose head is tied unless the file has one, as Qwen2 is, and whose norm may
/// have its old names.
struct Lm {
    tokens: Embedding,
    norm: LayerNorm,
    head: Linear,
}

impl Lm {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let tokens = embedding(5, 4, vb.pp("model.embed_tokens"))?;
        let norm = layer_norm(4, 1e-5, vb.pp("model.norm"))?;
        let head = if vb.contains_tensor("lm_head.weight") {
            linear_no_bias(4, 5, vb.pp("lm_head"))?
        } else {
            Linear::new(tokens.embeddings().clone(), None)
        };
        Ok(Lm { tokens, norm, head })
    }

    fn forward(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        self.head
            .forward(&self.norm.forward(&self.tokens.forward(tokens)?)?)
    }
}

fn tensor(first: usize, shape: &[usize]) -> Tensor {
    let numel = shape.iter().product::<usize>();
    let values: Vec<f32> = (first..first + numel)
        .map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0)
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The tensors of a model, with or without a head of its own, under new or old names.
fn tensors(untied: bool, norm: [&str; 2]) -> HashMap<String, Tensor> {
    let mut tensors = HashMap::from([("model.embed_tokens.weight".to_owned(), tensor(3, &[5, 4]))]);
    for (index, name) in norm.into_iter().enumerate() {
        tensors.insert(format!("model.norm.{name}"), tensor(40 + 9 * index, &[4]));
    }
    if untied {
        tensors.insert("lm_head.weight".to_owned(), tensor(70, &[5, 4]));
    }
    tensors
}

const NEW: [&str; 2] = ["weight", "bias"];

fn tokens() -> Tensor {
    Tensor::new(&[0u32, 3, 4, 1], &Device::Cpu).unwrap()
}

fn load<M>(
    group: &ProcessGroup,
    path: &Path,
    options: &FromCheckpointOptions,
    build: impl FnOnce(&Scope) -> candle_core::Result<M>,
) -> Result<FullyShardedDataParallel<M>, CheckpointError> {
    from_checkpoint(group.clone(), FsdpConfig::default(), path, options, build)
}

fn check_equal_to_plain(
    path: &Path,
    tensors: &HashMap<String, Tensor>,
    options: &FromCheckpointOptions,
) {
    let plain = Lm::new(VarBuilder::from_tensors(
        tensors.clone(),
        DType::F32,
        &Device::Cpu,
    ))
    .unwrap();
    let expected = plain.forward(&tokens()).unwrap().to_vec2::<f32>().unwrap();
    for world in 1..=3 {
        run_local(world, |group| {
            let model = load(&group, path, options, |scope| Lm::new(scope.vb())).unwrap();
            let found = model
                .forward(|lm| lm.forward(&tokens()))
                .unwrap()
                .to_vec2::<f32>()
                .unwrap();
            assert_eq!(found, expected, "{world} ranks");
        })
        .unwrap();
    }
}

/// Saves tensors as a file of safetensors and as a sharded checkpoint, and returns the paths.
fn saved(dir: &Path, name: &str, tensors: &HashMap<String, Tensor>) -> [std::path::PathBuf; 2] {
    let file = dir.join(format!("{name}.safetensors"));
    candle_core::safetensors::save(tensors, &file).unwrap();
    let sharded = dir.join(name);
    run_local(1, |group| {
        let mut names: Vec<&String> = tensors.keys().collect();
        names.sort();
        let mut state = StateDict::new();
        for name in names {
            state.insert(name.as_str(), tensors[name].clone());
        }
        save(sharded.as_path(), &state, &group, &SaveOptions::default()).unwrap();
    })
    .unwrap();
    [file, sharded]
}

#[test]
fn names_that_begin_with_model_are_the_models_own_in_a_format_of_flat_keys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors(true, ["weight", "bias"]), &path).unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            let model = Lm::new(scope.vb())?;
            let head = linear_no_bias(4, 5, scope.vb().pp("lm_head"))?;
            Ok(Lm { head, ..model })
        });
        let mut run = TrainState::new(model.unwrap(), Vec::new());
        checkpointer.load(path.as_path(), &mut run).unwrap();
        let tokens = Tensor::new(&[[0u32, 3]], &Device::Cpu).unwrap();
        let found = run.model.forward(|lm| lm.forward(&tokens)).unwrap();
        let expected =
            VarBuilder::from_tensors(tensors(true, ["weight", "bias"]), DType::F32, &Device::Cpu);
        let expected = Lm::new(expected).unwrap().forward(&tokens).unwrap();
        assert_eq!(
            found.to_vec3::<f32>().unwrap(),
            expected.to_vec3::<f32>().unwrap()
        );
    })
    .unwrap();
}

#[test]
fn the_file_tells_a_tied_head_from_one_of_its_own_and_old_names_from_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    for untied in [false, true] {
        for norm in [NEW, ["gamma", "beta"]] {
            let tensors = tensors(untied, norm);
            // candle's layers with old names are those of its models.
            if norm == NEW {
                for path in saved(dir.path(), &format!("untied-{untied}"), &tensors) {
                    check_equal_to_plain(&path, &tensors, &FromCheckpointOptions::default());
                }
                continue;
            }
            for path in saved(dir.path(), &format!("old-{untied}"), &tensors) {
                run_local(2, |group| {
                    let model = load(&group, &path, &FromCheckpointOptions::default(), |scope| {
                        let vb = scope.vb().pp("model.norm");
                        let weight = vb.get(4, "weight").or_else(|_| vb.get(4, "gamma"))?;
                        let bias = vb.get(4, "bias").or_else(|_| vb.get(4, "beta"))?;
                        let tokens = embedding(5, 4, scope.vb().pp("model.embed_tokens"))?;
                        let head = untied
                            .then(|| scope.vb().get((5, 4), "lm_head.weight"))
                            .transpose()?;
                        Ok((weight, bias, tokens, head))
                    })
                    .unwrap();
                    let found = model
                        .forward(|(weight, ..)| weight.affine(1.0, 0.0))
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap();
                    assert_eq!(found, tensors["model.norm.gamma"].to_vec1::<f32>().unwrap());
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn renames_apply_while_the_model_is_built() {
    let dir = tempfile::tempdir().unwrap();
    let expected = tensors(true, NEW);
    let old: HashMap<String, Tensor> = expected
        .iter()
        .map(|(name, tensor)| {
            (
                format!("wrapper.{}", name.replace("model.", "m.")),
                tensor.clone(),
            )
        })
        .collect();
    let pairs = [("model", "wrapper.m"), ("", "wrapper")]
        .map(|(model, dict)| (model.to_owned(), dict.to_owned()));
    let options = FromCheckpointOptions {
        fqn_renames: pairs.to_vec(),
        ..FromCheckpointOptions::default()
    };
    for path in saved(dir.path(), "renamed", &old) {
        check_equal_to_plain(&path, &expected, &options);
    }
}

#[test]
fn a_key_that_the_checkpoint_lacks_fails_while_the_model_is_built() {
    let dir = tempfile::tempdir().unwrap();
    let mut incomplete = tensors(false, NEW);
    incomplete.remove("model.norm.bias");
    for path in saved(dir.path(), "incomplete", &incomplete) {
        let errors = run_local(3, |group| {
            let built = load(&group, &path, &FromCheckpointOptions::default(), |scope| {
                let lm = Lm::new(scope.vb());
                assert!(lm.is_err(), "the build fails, and not a load after it");
                lm
            });
            built.err().unwrap().to_string()
        })
        .unwrap();
        assert!(
            errors[0].contains("`model.norm.bias`")
                && errors.iter().all(|error| *error == errors[0]),
            "{errors:?}"
        );
    }
}

#[test]
fn another_shape_is_named_while_the_model_is_built_and_the_files_shape_can_be_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for path in saved(dir.path(), "shapes", &tensors(false, NEW)) {
        run_local(2, |group| {
            let options = FromCheckpointOptions {
                load: LoadOptions {
                    strict: false,
                    ..LoadOptions::default()
                },
                ..FromCheckpointOptions::default()
            };
            let error = load(&group, &path, &options, |scope| {
                scope.vb().get((4, 4), "model.embed_tokens.weight")
            });
            let error = error.err().unwrap().to_string();
            assert!(
                error.contains("`model.embed_tokens.weight`")
                    && error.contains("[4, 4]")
                    && error.contains("[5, 4]"),
                "{error}"
            );
            let model = load(&group, &path, &options, |scope| {
                scope.vb().get_unchecked("model.embed_tokens.weight")
            });
            assert_eq!(
                model
                    .unwrap()
                    .parameters()
                    .shape("model.embed_tokens.weight")
                    .unwrap(),
                [5, 4]
            );
        })
        .unwrap();
    }
}

#[test]
fn a_tensor_that_the_model_never_asks_for_is_an_error_unless_it_may_be_left() {
    let dir = tempfile::tempdir().unwrap();
    let [path, _] = saved(dir.path(), "more", &tensors(true, NEW));
    run_local(2, |group| {
        let build = |scope: &Scope| embedding(5, 4, scope.vb().pp("model.embed_tokens"));
        let error = load(&group, &path, &FromCheckpointOptions::default(), build)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("lm_head.weight"), "{error}");
        let load_options = LoadOptions {
            strict: false,
            ..LoadOptions::default()
        };
        load(
            &group,
            &path,
            &FromCheckpointOptions {
                load: load_options,
                ..FromCheckpointOptions::default()
            },
            build,
        )
        .unwrap();
    })
    .unwrap();
}

#[test]
fn values_are_converted_to_the_models_dtype() {
    let dir = tempfile::tempdir().unwrap();
    let half: HashMap<String, Tensor> = tensors(true, NEW)
        .into_iter()
        .map(|(name, tensor)| (name, tensor.to_dtype(DType::BF16).unwrap()))
        .collect();
    let [path, _] = saved(dir.path(), "bf16", &half);
    let expected = half
        .into_iter()
        .map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).unwrap()))
        .collect();
    check_equal_to_plain(&path, &expected, &FromCheckpointOptions::default());
}

#[test]
fn the_model_of_a_run_comes_from_below_its_key_at_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let build = |scope: &Scope| {
        scope
            .pp("model")
            .unit(|scope| linear_no_bias(3, 5, scope.vb()))
    };
    let input = || Tensor::ones((1, 3), DType::F32, &Device::Cpu).unwrap();
    let expected = run_local(2, |group| {
        let config = FsdpConfig {
            seed: 8,
            ..FsdpConfig::default()
        };
        let model = FullyShardedDataParallel::new(group.clone(), config, build).unwrap();
        let optimizer =
            Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw())).unwrap();
        let mut run = TrainState::new(model, vec![optimizer]);
        run.model
            .backward(
                &run.model
                    .forward(|layer| layer.forward(&input())?.sqr()?.mean_all())
                    .unwrap(),
            )
            .unwrap();
        run.optimizers[0].step().unwrap();
        run.values.insert("step", 1i64);
        Checkpointer::new(dir.path(), &group, CheckpointerOptions::default())
            .unwrap()
            .save(1, &run)
            .unwrap();
        run.model
            .forward(|layer| layer.forward(&input()))
            .unwrap()
            .to_vec2::<f32>()
            .unwrap()
    })
    .unwrap();
    let path = fsdp_checkpoint::latest_checkpoint(dir.path())
        .unwrap()
        .unwrap()
        .path;
    for world in [1, 3] {
        run_local(world, |group| {
            for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
                let config = FsdpConfig {
                    strategy,
                    ..FsdpConfig::default()
                };
                let options = FromCheckpointOptions::default();
                let model =
                    from_checkpoint(group.clone(), config, path.clone(), &options, build).unwrap();
                let found = model
                    .forward(|layer| layer.forward(&input()))
                    .unwrap()
                    .to_vec2::<f32>()
                    .unwrap();
                assert_eq!(found, expected[0]);
            }
        })
        .unwrap();
    }
}
