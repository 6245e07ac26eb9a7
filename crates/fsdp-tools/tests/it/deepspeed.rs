//! DeepSpeed's ZeRO 1 to 3, and its Universal Checkpoint.

use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, ExtraFiles, Format};
use fsdp_formats::internals::{decode_value, encode_value};
use fsdp_layout::with_causes;
use fsdp_layout::{DType, ErrorKind, Failure as _, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::convert::{Rename, View};
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use tempfile::TempDir;

use crate::foreign::{assert_converts, copy, differences, fixture, opened, refused, replace};

fn deepspeed(name: &str) -> Box<dyn Checkpoint> {
    opened(&fixture("deepspeed").join(name))
}

/// Returns a checkpoint without anything but its model and moments.
fn model_and_moments(checkpoint: &dyn Checkpoint) -> View<'_> {
    let of_tensors = |key: &str| {
        let is_moment = key.starts_with("optim.state.") && !key.ends_with(".step");
        if key.starts_with("model.") || is_moment {
            Rename::Keep
        } else {
            Rename::Drop
        }
    };
    View::new(checkpoint, of_tensors, None).unwrap()
}

/// Lists how the parameters, buffers and moments differ from those that were cut.
fn differences_from_whole(checkpoint: &dyn Checkpoint) -> Vec<String> {
    differences(&model_and_moments(checkpoint), &*deepspeed("whole.pt"))
}

/// Opens a checkpoint that DeepSpeed itself has written.
fn deepspeed_run(name: &str) -> Box<dyn Checkpoint> {
    opened(&fixture("deepspeed_run").join(name))
}

/// The key of a parameter that has a gradient, and that no optimizer has.
const ALONE: &str = "model.alone";

#[test]
fn all_of_a_model_is_read_from_what_deepspeed_has_written() {
    for (name, whole) in [
        ("zero1", "zero1.pt"),
        ("zero2", "zero2.pt"),
        ("zero3", "zero3.pt"),
        ("universal1", "zero1.pt"),
        ("universal3", "zero3.pt"),
    ] {
        let checkpoint = deepspeed_run(name);
        let mut found = differences(&model_and_moments(&*checkpoint), &*deepspeed_run(whole));
        // ZeRO 3 leaves it empty, so it is in no file.
        if whole == "zero3.pt" {
            found.retain(|line| !line.starts_with(ALONE));
            let opaque = checkpoint.read_value(ALONE).unwrap_err();
            assert!(
                with_causes(&opaque).contains("has left empty"),
                "{name}: {}",
                with_causes(&opaque)
            );
        }
        assert_eq!(found, [""; 0], "{name}");
        let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
    }
    for name in ["zero1", "zero2", "universal1"] {
        let extra_files = ExtraFiles::find(&*deepspeed_run(name)).unwrap();
        assert_eq!(extra_files.others, [""; 0], "{name}");
        assert_converts(&model_and_moments(&*deepspeed_run(name)));
    }
}

#[test]
fn the_other_names_of_a_parameter_have_its_fp32_elements() {
    // `ds_to_universal.py` stores a copy of the 16-bit ones for each other name.
    for name in ["zero1", "universal1", "universal3"] {
        let checkpoint = deepspeed_run(name);
        let read = |key: &str| {
            let mut elements = vec![0; 7 * 4 * 4];
            let whole = TensorBox::whole(&[7, 4]);
            checkpoint.read_box(key, &whole, &mut elements).unwrap();
            elements
        };
        assert_eq!(
            read("model.head.weight"),
            read("model.embed.weight"),
            "{name}"
        );
    }
}

#[test]
fn one_rank_s_flat_tensors_are_no_part_of_a_universal_checkpoint() {
    for name in ["universal1", "universal3"] {
        let checkpoint = deepspeed_run(name);
        let metadata = checkpoint.metadata();
        for (key, tensor) in metadata.tensors() {
            let is_moment = key.starts_with("optim.state.");
            assert!(key.starts_with("model.") || is_moment, "{name}: {key}");
            assert!(!tensor.shape.contains(&24), "{name}: {key}");
        }
        let rate = checkpoint.read_value("optim.param_groups.0.lr").unwrap();
        assert_eq!(rate, PlainValue::Float(0.01));
    }
}

#[test]
fn a_missing_directory_of_a_trained_parameter_is_named() {
    let parent = TempDir::new().unwrap();
    for name in ["universal1", "universal3"] {
        let path = parent.path().join(name);
        copy(&fixture("deepspeed_run").join(name), &path);
        std::fs::remove_dir_all(path.join("zero/middle.bias")).unwrap();
        match refused(&path) {
            FileError::MissingFiles { files, .. } => {
                assert_eq!(files, ["zero/middle.bias/fp32.pt"]);
            }
            other => panic!("{name}: {other}"),
        }
        // The copy of a buffer is not needed.
        copy(&fixture("deepspeed_run").join(name), &path);
        let _ = std::fs::remove_dir_all(path.join("zero/seen"));
        assert!(opened(&path).metadata().tensor("model.seen").is_some());
    }
    let path = parent.path().join("universal3");
    std::fs::remove_file(path.join("zero_pp_rank_0_mp_rank_00_model_states.pt")).unwrap();
    assert!(matches!(
        refused(&path),
        FileError::MissingFiles { files, .. } if files == ["zero_pp_rank_0_mp_rank_00_model_states.pt"]
    ));
}

/// Copies a fixture into a directory of this name.
fn copied(parent: &TempDir, name: &str, fixture_name: &str) -> PathBuf {
    let path = parent.path().join(name);
    copy(&fixture(fixture_name), &path);
    path
}

/// Asserts that exactly these files are missing.
fn assert_lacks(path: &Path, missing: &[&str]) {
    let error = refused(path);
    assert_eq!(error.kind(), ErrorKind::Incomplete, "{missing:?}: {error}");
    match error {
        FileError::MissingFiles { files, .. } => assert_eq!(files, missing),
        other => panic!("{missing:?}: {other}"),
    }
}

#[test]
fn a_missing_state_of_a_parameter_is_an_error_that_names_its_file() {
    let parent = TempDir::new().unwrap();
    let cases: [(&str, &[&str]); 7] = [
        ("deepspeed/universal", &["zero/embed.weight/exp_avg.pt"]),
        ("deepspeed/universal", &["zero/embed.weight/exp_avg_sq.pt"]),
        ("deepspeed/universal", &["zero/layers.0.attn.bias/step.pt"]),
        ("deepspeed_run/universal1", &["zero/middle.bias/step.pt"]),
        ("deepspeed_run/universal3", &["zero/middle.bias/exp_avg.pt"]),
        // All states of one parameter of a group.
        (
            "deepspeed/universal",
            &[
                "zero/norm.weight/exp_avg.pt",
                "zero/norm.weight/exp_avg_sq.pt",
                "zero/norm.weight/step.pt",
            ],
        ),
        // One state of all parameters of a group.
        (
            "deepspeed/universal",
            &[
                "zero/layers.0.attn.bias/exp_avg.pt",
                "zero/layers.1.attn.bias/exp_avg.pt",
                "zero/norm.weight/exp_avg.pt",
            ],
        ),
    ];
    for (number, (name, files)) in cases.into_iter().enumerate() {
        let path = copied(&parent, &number.to_string(), name);
        for file in files {
            std::fs::remove_file(path.join(file)).unwrap();
        }
        assert_lacks(&path, files);
    }
}

#[test]
fn a_missing_file_of_the_optimizer_is_an_error_where_there_are_states() {
    let parent = TempDir::new().unwrap();
    let file = "zero/optimizer_state.pt";
    for name in [
        "deepspeed/universal",
        "deepspeed_run/universal1",
        "deepspeed_run/universal3",
    ] {
        let path = copied(&parent, name, name);
        std::fs::remove_file(path.join(file)).unwrap();
        assert_lacks(&path, &[file]);
    }
    // It is named together with states that are missing.
    let path = copied(&parent, "states", "deepspeed_run/universal1");
    let state = "zero/middle.bias/exp_avg.pt";
    std::fs::remove_file(path.join(file)).unwrap();
    std::fs::remove_file(path.join(state)).unwrap();
    assert_lacks(&path, &[state, file]);
    // Parameters alone are a model.
    for name in ["embed.weight", "middle.weight", "middle.bias"] {
        for state in ["exp_avg", "exp_avg_sq", "step"] {
            let _ = std::fs::remove_file(path.join(format!("zero/{name}/{state}.pt")));
        }
    }
    let checkpoint = opened(&path);
    assert!(checkpoint.metadata().tensor("model.middle.bias").is_some());
}

#[test]
fn a_universal_checkpoint_without_model_states_says_what_it_lacks() {
    let parent = TempDir::new().unwrap();
    for name in ["deepspeed/universal", "deepspeed_run/universal3"] {
        let path = copied(&parent, name, name);
        for entry in std::fs::read_dir(&path).unwrap() {
            let file = entry.unwrap().path();
            if file.is_file() {
                std::fs::remove_file(file).unwrap();
            }
        }
        let error = refused(&path);
        assert_eq!(error.kind(), ErrorKind::Incomplete, "{name}: {error}");
        let text = with_causes(&error);
        assert!(text.contains("`*_model_states.pt`"), "{name}: {text}");
    }
}

#[test]
fn groups_of_parameters_may_have_other_states_or_none() {
    let parent = TempDir::new().unwrap();
    let path = copied(&parent, "muon", "deepspeed/universal");
    // The first group has momentum in place of Adam's states.
    for name in ["embed", "layers.0.attn", "layers.1.attn", "head"] {
        let parameter = path.join(format!("zero/{name}.weight"));
        std::fs::rename(
            parameter.join("exp_avg.pt"),
            parameter.join("momentum_buffer.pt"),
        )
        .unwrap();
        std::fs::remove_file(parameter.join("exp_avg_sq.pt")).unwrap();
        std::fs::remove_file(parameter.join("step.pt")).unwrap();
    }
    let key = "optim.state.embed.weight.momentum_buffer";
    assert!(opened(&path).metadata().tensor(key).is_some());
    let file = "zero/embed.weight/momentum_buffer.pt";
    std::fs::remove_file(path.join(file)).unwrap();
    assert_lacks(&path, &[file]);
    // The second group has no optimizer.
    let path = copied(&parent, "half", "deepspeed/universal");
    for name in ["layers.0.attn.bias", "layers.1.attn.bias", "norm.weight"] {
        for state in ["exp_avg", "exp_avg_sq", "step"] {
            std::fs::remove_file(path.join(format!("zero/{name}/{state}.pt"))).unwrap();
        }
    }
    let checkpoint = opened(&path);
    assert!(checkpoint.metadata().tensor("model.norm.weight").is_some());
    let key = "optim.state.embed.weight.exp_avg";
    assert!(checkpoint.metadata().tensor(key).is_some());
}

#[test]
fn a_moment_of_another_shape_than_its_parameter_is_an_error_that_names_both_files() {
    let parent = TempDir::new().unwrap();
    for (name, from) in [
        ("deepspeed/universal", "norm.weight"),
        ("deepspeed_run/universal1", "middle.weight"),
        ("deepspeed_run/universal3", "middle.weight"),
    ] {
        let path = copied(&parent, name, name);
        let zero = path.join("zero");
        std::fs::copy(
            zero.join(from).join("exp_avg_sq.pt"),
            zero.join("embed.weight/exp_avg_sq.pt"),
        )
        .unwrap();
        let error = refused(&path);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error}");
        match error {
            FileError::Differing {
                fqn, first, second, ..
            } => assert_eq!(
                [fqn.as_str(), first.as_str(), second.as_str()],
                [
                    "optim.state.embed.weight.exp_avg_sq",
                    "zero/embed.weight/fp32.pt",
                    "zero/embed.weight/exp_avg_sq.pt"
                ],
                "{name}"
            ),
            other => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn shards_of_every_stage_make_the_fp32_parameters_and_moments() {
    for (name, format) in [
        ("zero2", Format::DeepSpeed),
        ("zero1_elastic", Format::DeepSpeed),
        ("zero3", Format::DeepSpeed),
        ("universal", Format::DeepSpeedUniversal),
    ] {
        let checkpoint = deepspeed(name);
        assert_eq!(checkpoint.format(), format);
        assert_eq!(differences_from_whole(&*checkpoint), [""; 0], "{name}");
        assert_eq!(
            checkpoint.read_value("global_steps").unwrap(),
            PlainValue::Int(20)
        );
        assert_converts(&*checkpoint);
    }
}

#[test]
fn steps_and_hyperparameters_come_along() {
    for name in ["zero2", "zero3", "universal"] {
        let checkpoint = deepspeed(name);
        let mut step = [0; 4];
        let whole = TensorBox::whole(&[]);
        checkpoint
            .read_box("optim.state.layers.1.attn.bias.step", &whole, &mut step)
            .unwrap();
        assert_eq!(f32::from_le_bytes(step), 20.0);
        let group = if name == "universal" {
            "optim.optimizer_state_dict"
        } else {
            "optim"
        };
        let decay = checkpoint
            .read_value(&format!("{group}.param_groups.0.weight_decay"))
            .unwrap();
        assert_eq!(decay, PlainValue::Float(0.1));
    }
    assert_eq!(
        deepspeed("zero1_elastic")
            .read_value("optim.base_optimizer_state_step")
            .unwrap(),
        PlainValue::Int(20)
    );
}

/// Makes a dict with keys of text.
fn dict<K: Into<PlainValue>>(items: Vec<(K, PlainValue)>) -> PlainValue {
    PlainValue::Dict(
        items
            .into_iter()
            .map(|(key, value)| (key.into(), value))
            .collect(),
    )
}

/// Writes the shards of ZeRO 2 of one rank: a flat tensor of parameters of these shapes, a moment
/// like it, and the trainer's values.
fn write_zero2(
    path: &Path,
    flat: &PlainTensor,
    shapes: Vec<(&str, Vec<i64>)>,
    moment: &PlainTensor,
    values: Vec<(&str, PlainValue)>,
) {
    let shape =
        |sizes: Vec<i64>| PlainValue::Tuple(sizes.into_iter().map(PlainValue::Int).collect());
    let shapes = shapes
        .into_iter()
        .map(|(name, sizes)| (name, shape(sizes)))
        .collect();
    let mut model = vec![
        ("module", PlainValue::Dict(Vec::new())),
        ("buffer_names", PlainValue::List(Vec::new())),
        ("param_shapes", PlainValue::List(vec![dict(shapes)])),
    ];
    model.extend(values);
    let model = dict(model);
    let state = PlainValue::Dict(vec![(
        PlainValue::Int(0),
        dict(vec![("exp_avg", PlainValue::Tensor(moment.clone()))]),
    )]);
    let state = dict(vec![
        (
            "single_partition_of_fp32_groups",
            PlainValue::List(vec![PlainValue::Tensor(flat.clone())]),
        ),
        ("partition_count", PlainValue::Int(1)),
        ("base_optimizer_state", dict(vec![("state", state)])),
    ]);
    let rank = dict(vec![("optimizer_state_dict", state)]);
    std::fs::write(
        path.join("mp_rank_00_model_states.pt"),
        encode_value(&model).unwrap(),
    )
    .unwrap();
    std::fs::write(
        path.join("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        encode_value(&rank).unwrap(),
    )
    .unwrap();
}

/// Removes the last parameter of a group from the list of shapes in a file of model states, and
/// returns its name.
fn forget_last_parameter(file: &Path, group: usize) -> PlainValue {
    let mut model = decode_value(&std::fs::read(file).unwrap()).unwrap();
    let PlainValue::Dict(items) = &mut model else {
        panic!("no dict")
    };
    let shapes = items
        .iter_mut()
        .find(|(key, _)| key.as_str() == Some("param_shapes"));
    let Some((_, PlainValue::List(groups))) = shapes else {
        panic!("no list of groups")
    };
    let PlainValue::Dict(parameters) = &mut groups[group] else {
        panic!("no dict of shapes")
    };
    let (name, _) = parameters.pop().unwrap();
    std::fs::write(file, encode_value(&model).unwrap()).unwrap();
    name
}

/// Asserts that the file of model states is called damaged, because a group has more elements than
/// its parameters.
fn assert_lacks_parameters(path: &Path, group: usize, elements: &str) {
    let error = refused(path);
    let text = with_causes(&error);
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}");
    for part in [
        "mp_rank_00_model_states.pt",
        format!("group {group} ").as_str(),
        elements,
    ] {
        assert!(text.contains(part), "`{part}`: {text}");
    }
}

#[test]
fn a_parameter_that_the_list_of_shapes_lacks_is_noticed_by_its_elements() {
    let parent = TempDir::new().unwrap();
    for name in ["zero2", "zero1_elastic"] {
        let path = copied(&parent, name, &format!("deepspeed/{name}"));
        let file = path.join("mp_rank_00_model_states.pt");
        assert_eq!(forget_last_parameter(&file, 0), "head.weight".into());
        assert_lacks_parameters(&path, 0, "20 elements more");
        // One whose elements are fewer than the padding of three ranks may be.
        copy(&fixture("deepspeed").join(name), &path);
        assert_eq!(forget_last_parameter(&file, 1), "unused.weight".into());
        assert_eq!(forget_last_parameter(&file, 1), "norm.weight".into());
        assert_lacks_parameters(&path, 1, "3 elements more");
    }
    for name in ["zero1", "zero2"] {
        let path = copied(
            &parent,
            &format!("run-{name}"),
            &format!("deepspeed_run/{name}"),
        );
        let file = path.join("mp_rank_00_model_states.pt");
        assert_eq!(forget_last_parameter(&file, 0), "middle.bias".into());
        assert_lacks_parameters(&path, 0, "4 elements more");
    }
}

/// Writes the shards of ZeRO 2 of a group with one parameter of so many elements, and flat tensors
/// of these lengths, one for each rank. `paddings` are those that the ranks note.
fn write_parts(path: &Path, part_lengths: &[usize], paddings: Option<&[i64]>, elements: i64) {
    let shape = PlainValue::Tuple(vec![PlainValue::Int(elements)]);
    let model = dict(vec![
        ("module", PlainValue::Dict(Vec::new())),
        (
            "param_shapes",
            PlainValue::List(vec![dict(vec![("a", shape)])]),
        ),
    ]);
    std::fs::create_dir_all(path).unwrap();
    let write = |name: &str, value: &PlainValue| {
        std::fs::write(path.join(name), encode_value(value).unwrap()).unwrap();
    };
    write("mp_rank_00_model_states.pt", &model);
    for (rank, &length) in part_lengths.iter().enumerate() {
        let flat = PlainTensor {
            dtype: DType::F32,
            shape: vec![length],
            data: vec![0; 4 * length],
        };
        let mut state = vec![
            (
                "single_partition_of_fp32_groups",
                PlainValue::List(vec![PlainValue::Tensor(flat)]),
            ),
            (
                "partition_count",
                PlainValue::Int(part_lengths.len() as i64),
            ),
        ];
        if let Some(paddings) = paddings {
            let padding = PlainValue::Int(paddings[rank]);
            state.push(("group_paddings", PlainValue::List(vec![padding])));
        }
        write(
            &format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"),
            &dict(vec![("optimizer_state_dict", dict(state))]),
        );
    }
}

#[test]
fn padding_that_a_version_of_deepspeed_saves_or_takes_off_is_no_missing_parameter() {
    let parent = TempDir::new().unwrap();
    /// The parts and their paddings, if some are noted, with the most elements that the one
    /// parameter may have, and the fewest.
    type Case<'c> = (&'c [usize], Option<&'c [i64]>, i64, i64);
    let cases: [Case<'_>; 8] = [
        // ZeRO takes off the padding of each part.
        (&[2, 1, 0], Some(&[0, 1, 2]), 3, 3),
        (&[4, 4], Some(&[0, 0]), 8, 8),
        // Older versions take off that of the last part, in which not all of it is.
        (&[2, 2, 2, 1], Some(&[0, 0, 0, 1]), 7, 7),
        (&[2, 2, 2, 0], Some(&[0, 0, 0, 5]), 6, 1),
        // The optimizer for bf16 takes off none.
        (&[4, 4], Some(&[0, 3]), 8, 5),
        (&[6], Some(&[1]), 6, 5),
        // The oldest versions note none.
        (&[4, 4], None, 8, 5),
        (&[4, 1], None, 5, 5),
    ];
    for (number, (part_lengths, paddings, most, fewest)) in cases.into_iter().enumerate() {
        let path = parent.path().join(number.to_string());
        for elements in fewest..=most {
            write_parts(&path, part_lengths, paddings, elements);
            let tensor = opened(&path).metadata().tensor("model.a").cloned();
            assert_eq!(tensor.unwrap().shape, [elements as usize], "{number}");
        }
        write_parts(&path, part_lengths, paddings, fewest - 1);
        assert_lacks_parameters(&path, 0, "more");
        write_parts(&path, part_lengths, paddings, most + 1);
        let error = with_causes(&refused(&path));
        assert!(error.contains("too short"), "{number}: {error}");
    }
}

#[test]
fn master_parameters_and_moments_keep_their_dtype() {
    let parent = TempDir::new().unwrap();
    let flat = PlainTensor {
        dtype: DType::BF16,
        shape: vec![6],
        data: (0..12).collect(),
    };
    let moment = PlainTensor {
        dtype: DType::F16,
        shape: vec![6],
        data: (20..32).collect(),
    };
    write_zero2(
        parent.path(),
        &flat,
        vec![("a", vec![2, 2]), ("b", vec![2])],
        &moment,
        Vec::new(),
    );
    let checkpoint = opened(parent.path());
    for (key, dtype, shape, data) in [
        ("model.a", DType::BF16, vec![2, 2], &flat.data[..8]),
        ("model.b", DType::BF16, vec![2], &flat.data[8..]),
        (
            "optim.state.a.exp_avg",
            DType::F16,
            vec![2, 2],
            &moment.data[..8],
        ),
    ] {
        assert_eq!(
            checkpoint.metadata().tensor(key).unwrap().properties.dtype,
            dtype,
            "{key}"
        );
        let mut read = vec![0; data.len()];
        checkpoint
            .read_box(key, &TensorBox::whole(&shape), &mut read)
            .unwrap();
        assert_eq!(read, data, "{key}");
    }
}

#[test]
fn a_long_log_beside_the_shards_is_one_value_and_parameters_of_any_number_are_found() {
    let parent = TempDir::new().unwrap();
    let names: Vec<String> = (0..12_000)
        .map(|number| format!("layer{number}.weight"))
        .collect();
    let flat = PlainTensor {
        dtype: DType::F32,
        shape: vec![names.len()],
        data: vec![7; 4 * names.len()],
    };
    let shapes = names.iter().map(|name| (name.as_str(), vec![1])).collect();
    let entry = |step| dict(vec![("loss", 0.5.into()), ("step", PlainValue::Int(step))]);
    let log = PlainValue::List((0..50_000).map(entry).collect());
    let rates = (0..30_000).map(|step| (PlainValue::Int(step), 0.25.into()));
    let rates = PlainValue::Dict(rates.collect());
    let values = vec![
        ("log", log.clone()),
        ("lr_scheduler", dict(vec![("rates", rates.clone())])),
    ];
    write_zero2(parent.path(), &flat, shapes, &flat, values);
    let checkpoint = opened(parent.path());
    assert!(checkpoint.read_value("log").unwrap() == log);
    assert!(checkpoint.read_value("lr_scheduler.rates").unwrap() == rates);
    let metadata = checkpoint.metadata();
    for name in &names {
        assert!(
            metadata.tensor(&format!("model.{name}")).is_some(),
            "{name}"
        );
    }
    assert_eq!(metadata.entries.len(), 2 * names.len() + 2);
}

/// The time is linear: a test that takes longer is stopped by the test runner.
#[test]
fn parameters_that_share_the_elements_of_frozen_ones_are_found_in_time() {
    let parent = TempDir::new().unwrap();
    let (frozen, shared) = (40_000, 500_000);
    let name = |number: usize| format!("frozen{number:06}");
    let (mut shapes, mut fragments) = (Vec::new(), Vec::new());
    for number in 0..frozen {
        let fragment = PlainTensor {
            dtype: DType::F32,
            shape: vec![0],
            data: Vec::new(),
        };
        shapes.push((
            name(number).as_str().into(),
            PlainValue::Tuple(vec![PlainValue::Int(0)]),
        ));
        fragments.push((name(number).as_str().into(), PlainValue::Tensor(fragment)));
    }
    // Nearly all share the elements of a parameter that is not there.
    let aliases = (0..shared).map(|number| {
        (
            format!("alias{number}").as_str().into(),
            name(number).as_str().into(),
        )
    });
    let model = dict(vec![
        ("module", PlainValue::Dict(Vec::new())),
        (
            "param_shapes",
            PlainValue::List(vec![PlainValue::Dict(Vec::new())]),
        ),
        ("frozen_param_shapes", PlainValue::Dict(shapes)),
        ("frozen_param_fragments", PlainValue::Dict(fragments)),
        ("shared_params", PlainValue::Dict(aliases.collect())),
    ]);
    let groups = (
        "single_partition_of_fp32_groups",
        PlainValue::List(Vec::new()),
    );
    let rank = dict(vec![(
        "optimizer_state_dict",
        dict(vec![groups, ("partition_count", PlainValue::Int(1))]),
    )]);
    let write = |name: &str, value| {
        std::fs::write(parent.path().join(name), encode_value(value).unwrap()).unwrap()
    };
    write("mp_rank_00_model_states.pt", &model);
    write("zero_pp_rank_0_mp_rank_00_optim_states.pt", &rank);
    let checkpoint = opened(parent.path());
    let count = |start: &str| {
        checkpoint
            .metadata()
            .tensors()
            .filter(|(key, _)| key.starts_with(start))
            .count()
    };
    assert_eq!(
        (count("model.frozen"), count("model.alias")),
        (frozen, frozen)
    );
}

#[test]
fn missing_shards_are_named() {
    for (name, file) in [
        (
            "deepspeed/zero2",
            "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        ),
        (
            "deepspeed/zero2",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ),
        ("deepspeed/zero2", "mp_rank_00_model_states.pt"),
        (
            "deepspeed/zero3",
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
        ),
        (
            "deepspeed/zero3",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        ("deepspeed/universal", "zero/norm.weight/fp32.pt"),
        // The names of a training in 16 bits begin with its precision.
        (
            "deepspeed_run/zero1",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        (
            "deepspeed_run/zero3",
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ),
        (
            "deepspeed_run/zero3",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
        ),
    ] {
        let parent = TempDir::new().unwrap();
        let path = copied(&parent, "copy", name);
        std::fs::remove_file(path.join(file)).unwrap();
        assert_lacks(&path, &[file]);
    }
}

#[test]
fn a_directory_without_zero_is_told_from_one_whose_shards_are_missing() {
    let parent = TempDir::new().unwrap();
    let file = parent.path().join("mp_rank_00_model_states.pt");
    let weight = PlainTensor {
        dtype: DType::U8,
        shape: vec![2],
        data: vec![1, 2],
    };
    let model = dict(vec![
        ("module", dict(vec![("w", PlainValue::Tensor(weight))])),
        ("param_shapes", PlainValue::None),
    ]);
    std::fs::write(&file, encode_value(&model).unwrap()).unwrap();
    let error = with_causes(&refused(parent.path()));
    assert!(
        error.contains("without ZeRO") && error.contains("mp_rank_00_model_states.pt"),
        "{error}"
    );
    assert_eq!(
        opened(&file).metadata().tensor("module.w").unwrap().shape,
        [2]
    );
    std::fs::copy(fixture("deepspeed/zero2/mp_rank_00_model_states.pt"), &file).unwrap();
    let files = ["zero_pp_rank_0_mp_rank_00_optim_states.pt"];
    assert!(
        matches!(refused(parent.path()), FileError::MissingFiles { files: missing, .. } if missing == files)
    );
}

#[test]
fn shards_that_do_not_fit_are_refused() {
    let parent = TempDir::new().unwrap();
    let zero3 = parent.path().join("zero3");
    copy(&fixture("deepspeed/zero3"), &zero3);
    // A shard of another stage in the place of one.
    let name = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    std::fs::copy(fixture("deepspeed/zero2").join(name), zero3.join(name)).unwrap();
    assert!(matches!(refused(&zero3), FileError::File { .. }));
    // Tensor parallelism would be taken for one model.
    let zero2 = parent.path().join("zero2");
    copy(&fixture("deepspeed/zero2"), &zero2);
    std::fs::copy(
        zero2.join("mp_rank_00_model_states.pt"),
        zero2.join("mp_rank_01_model_states.pt"),
    )
    .unwrap();
    assert!(format!("{:#?}", refused(&zero2)).contains("tensor parallelism"));
}

#[test]
fn hidden_files_are_no_shards_and_shards_of_two_saves_are_refused() {
    let parent = TempDir::new().unwrap();
    for name in ["deepspeed/zero2", "deepspeed/zero3"] {
        let path = parent.path().join(name);
        copy(&fixture(name), &path);
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let hidden = format!("._{}", entry.unwrap().file_name().to_str().unwrap());
            std::fs::write(path.join(hidden), [0, 5, 22, 7]).unwrap();
        }
        assert_eq!(
            opened(&path).metadata().entries.len(),
            opened(&fixture(name)).metadata().entries.len()
        );
    }
    let path = parent.path().join("deepspeed/zero2");
    let shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    let other = path.join(format!("bf16_{shard}"));
    std::fs::copy(path.join(shard), other).unwrap();
    assert!(with_causes(&refused(&path)).contains("files of two saves"));
}

#[test]
fn a_file_of_model_states_too_many_is_refused() {
    let ranked = "zero_pp_rank_0_mp_rank_00_model_states.pt";
    for (name, source, extra, expected) in [
        (
            "deepspeed/zero3",
            ranked,
            "zero_pp_rank_3_mp_rank_00_model_states.pt",
            "it is of 3 ranks, and there are files of 4",
        ),
        (
            "deepspeed/zero3",
            ranked,
            "mp_rank_00_model_states.pt",
            "it is of 3 ranks, and there are files of 4",
        ),
        (
            "deepspeed/zero2",
            "mp_rank_00_model_states.pt",
            ranked,
            "files of two saves",
        ),
        (
            "deepspeed_run/universal3",
            ranked,
            "bf16_zero_pp_rank_0_mp_rank_00_model_states.pt",
            "files of two saves",
        ),
        // A number that no rank has.
        (
            "deepspeed_run/universal3",
            ranked,
            "zero_pp_rank_18446744073709551615_mp_rank_00_model_states.pt",
            "pipeline stages or experts",
        ),
    ] {
        let parent = TempDir::new().unwrap();
        let path = copied(&parent, "copy", name);
        std::fs::copy(path.join(source), path.join(extra)).unwrap();
        let error = with_causes(&refused(&path));
        assert!(error.contains(expected), "{name} with {extra}: {error}");
    }
}

/// Returns the bytes of a float in a pickle.
fn pickled(number: f64) -> Vec<u8> {
    [b"G".as_slice(), &number.to_be_bytes()].concat()
}

/// Replaces the first small integer behind the first place of a name in a file of torch.
fn replace_integer(path: &Path, name: &str, old: u8, new: u8) {
    let bytes = std::fs::read(path).unwrap();
    let find = |start: usize, part: &[u8]| {
        let mut windows = bytes[start..].windows(part.len());
        start + windows.position(|window| window == part).unwrap()
    };
    let start = find(0, name.as_bytes());
    let end = find(start, &[b'K', old]) + 2;
    let mut changed = bytes[start..end].to_vec();
    *changed.last_mut().unwrap() = new;
    replace(path, &bytes[start..end], &changed);
}

/// Asserts that the files of the first two ranks, which end like this, differ in a value.
fn assert_differ(path: &Path, key: &str, end: &str) {
    let error = refused(path);
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{key}: {error}");
    match error {
        FileError::Differing {
            fqn, first, second, ..
        } => {
            let name = |rank: u8| format!("zero_pp_rank_{rank}_mp_rank_00_{end}_states.pt");
            assert_eq!([fqn, first, second], [key.to_owned(), name(0), name(1)]);
        }
        other => panic!("{key}: {other}"),
    }
}

#[test]
fn steps_and_hyperparameters_that_differ_between_ranks_are_errors_that_name_both_files() {
    let parent = TempDir::new().unwrap();
    let optimizer = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    for (name, state) in [
        ("zero2", "optimizer_state_dict.base_optimizer_state"),
        ("zero3", "optimizer_state_dict.optimizer_state_dict"),
    ] {
        let from = format!("deepspeed/{name}");
        let path = copied(&parent, &format!("{name}-step"), &from);
        replace(
            &path.join(optimizer),
            &20f32.to_le_bytes(),
            &10f32.to_le_bytes(),
        );
        assert_differ(&path, &format!("{state}.state.0.step"), "optim");
        let path = copied(&parent, &format!("{name}-rate"), &from);
        replace(&path.join(optimizer), &pickled(0.001), &pickled(0.5));
        assert_differ(&path, &format!("{state}.param_groups.0.lr"), "optim");
    }
    let path = copied(&parent, "zero1", "deepspeed/zero1_elastic");
    let key = "base_optimizer_state_step";
    replace_integer(&path.join(optimizer), key, 20, 10);
    assert_differ(&path, &format!("optimizer_state_dict.{key}"), "optim");
    let path = copied(&parent, "model", "deepspeed/zero3");
    let model = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    replace_integer(&path.join(model), "global_steps", 20, 10);
    assert_differ(&path, "global_steps", "model");
    let path = copied(&parent, "universal", "deepspeed_run/universal3");
    replace_integer(&path.join(model), "global_steps", 2, 1);
    assert_differ(&path, "global_steps", "model");
}

#[test]
fn values_that_an_optimizer_computes_on_each_rank_may_differ() {
    let parent = TempDir::new().unwrap();
    let path = copied(&parent, "zero2", "deepspeed/zero2");
    let file = |rank: u8| path.join(format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"));
    for rank in 0..3 {
        replace(&file(rank), b"X\x03\0\0\0eps", b"X\x03\0\0\0own");
    }
    replace(&file(1), &pickled(1e-8), &pickled(2e-8));
    assert_eq!(
        opened(&path)
            .read_value("optim.param_groups.0.own")
            .unwrap(),
        PlainValue::Float(1e-8)
    );
}
