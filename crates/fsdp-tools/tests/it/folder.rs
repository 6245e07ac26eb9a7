//! The folders of trainers: one tree of model, optimizer and rest, in every command.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, ExtraFiles, Format, list_steps, open};
use fsdp_formats::internals::encode_value;
use fsdp_formats::metadata::Entry;
use fsdp_layout::{ErrorKind, Failure as _, PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::foreign::{assert_converts, copy, differences, fixture, opened, refused};

/// Asserts that a folder has what one of its parts has: below these keys, or at the same ones, if
/// `item` is empty.
fn assert_holds(folder: &Path, place: &str, item: &str) {
    let (whole, part) = (opened(folder), opened(&folder.join(place)));
    for (fqn, entry) in &part.metadata().entries {
        let key = if item.is_empty() {
            fqn.clone()
        } else {
            format!("{item}.{fqn}")
        };
        match entry {
            Entry::Tensor(tensor) => {
                let bounds = TensorBox::whole(&tensor.shape);
                let length = bounds.numel() * tensor.properties.dtype.size_in_bytes() as usize;
                let (mut first, mut second) = (vec![0; length], vec![1; length]);
                part.read_box(fqn, &bounds, &mut first).unwrap();
                whole.read_box(&key, &bounds, &mut second).unwrap();
                assert_eq!(first, second, "{key}");
            }
            Entry::Bytes(_) => {
                assert_eq!(
                    part.describe_value(fqn).unwrap(),
                    whole.describe_value(&key).unwrap(),
                    "{key}"
                )
            }
        }
    }
}

/// Returns a folder without the states of random numbers, which are opaque.
fn without_random_numbers(folder: &dyn Checkpoint) -> View<'_> {
    let is_random = |fqn: &str| fqn.starts_with("rng_state") || fqn.starts_with("random_states");
    View::new(
        folder,
        |fqn| {
            if is_random(fqn) {
                Rename::Drop
            } else {
                Rename::Keep
            }
        },
        None,
    )
    .unwrap()
}

#[test]
fn a_folder_of_hugging_faces_trainer_is_one_tree() {
    let path = fixture("folders/trainer");
    let folder = opened(&path);
    assert_eq!(folder.format(), Format::Folder);
    assert_holds(&path, "model.safetensors", "model");
    assert_holds(&path, "optimizer.pt", "optimizer");
    assert_holds(&path, "scheduler.pt", "scheduler");
    assert_holds(&path, "rng_state.pth", "rng_state");
    assert_eq!(
        folder.read_value("trainer_state.global_step").unwrap(),
        PlainValue::Int(2)
    );
    assert_converts(&without_random_numbers(&*folder));
    // The optimizer's keys keep their type in a file of torch.
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("whole.pt");
    let options = ConvertOptions {
        drop_opaque: true,
        ..ConvertOptions::default()
    };
    convert(&*folder, &to, OutputFormat::Torch, options).unwrap();
    assert_eq!(
        differences(&*folder, &*opened(&to))
            .iter()
            .filter(|line| line.contains("optimizer"))
            .count(),
        0
    );
}

#[test]
fn a_folder_of_accelerate_is_one_tree() {
    for (name, model, optimizer) in [
        // The keys of the directories begin with `model` and `optimizer` themselves.
        (
            "folders/accelerate",
            ("pytorch_model_fsdp_0", ""),
            ("optimizer_0", ""),
        ),
        (
            "folders/accelerate_full",
            ("pytorch_model_fsdp.bin", "model"),
            ("optimizer.bin", "optimizer"),
        ),
    ] {
        let path = fixture(name);
        let folder = opened(&path);
        assert_eq!(folder.format(), Format::Folder);
        assert_holds(&path, model.0, model.1);
        assert_holds(&path, optimizer.0, optimizer.1);
        assert_holds(&path, "scheduler.bin", "scheduler");
        assert!(
            folder
                .metadata()
                .entries
                .keys()
                .any(|key| key.starts_with("random_states.rank_1."))
        );
        assert!(
            folder
                .metadata()
                .tensor("model.model.embed_tokens.weight")
                .is_some(),
            "{name}"
        );
        assert!(
            !folder
                .metadata()
                .entries
                .keys()
                .any(|key| key.starts_with("optimizer.optimizer."))
        );
        assert_converts(&without_random_numbers(&*folder));
    }
    // Sharded and whole, it is the same model.
    let (sharded, full) = (
        fixture("folders/accelerate"),
        fixture("folders/accelerate_full"),
    );
    let (sharded, full) = (opened(&sharded), opened(&full));
    let keep = |fqn: &str| {
        if fqn.starts_with("model.") {
            Rename::Keep
        } else {
            Rename::Drop
        }
    };
    let (sharded, full) = (
        View::new(&*sharded, keep, None).unwrap(),
        View::new(&*full, keep, None).unwrap(),
    );
    assert_eq!(differences(&sharded, &full), [""; 0]);
}

/// Makes the folder of Hugging Face's trainer with DeepSpeed: shards in a directory of their own,
/// and no `optimizer.pt`.
fn with_deepspeed(parent: &Path, shards: &str, has_model: bool) -> std::path::PathBuf {
    let folder = parent.join(format!("checkpoint-{shards}-{has_model}"));
    copy(&fixture("folders/trainer"), &folder);
    std::fs::remove_file(folder.join("optimizer.pt")).unwrap();
    if !has_model {
        std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    }
    copy(
        &fixture("deepspeed").join(shards),
        &folder.join("global_step20"),
    );
    std::fs::write(folder.join("latest"), "global_step20\n").unwrap();
    folder
}

#[test]
fn shards_of_deepspeed_in_a_folder_are_part_of_its_tree() {
    let parent = tempfile::tempdir().unwrap();
    for shards in ["zero2", "zero3", "universal"] {
        // Where the folder has no model, that of the shards is the model.
        let path = with_deepspeed(parent.path(), shards, false);
        assert_holds(&path, "global_step20", "");
        assert_holds(&path, "scheduler.pt", "scheduler");
        assert_converts(&without_random_numbers(&*opened(&path)));
        let path = with_deepspeed(parent.path(), shards, true);
        assert_holds(&path, "model.safetensors", "model");
        assert_holds(&path, "global_step20", "deepspeed");
        // Damage is found with the file below the folder.
        let (folder, optim) = (opened(&path), "zero_pp_rank_1_mp_rank_00_optim_states.pt");
        assert!(
            folder
                .metadata()
                .stored()
                .any(|(_, _, stored)| stored.relative_path.starts_with("global_step20/"))
        );
        if shards != "universal" {
            std::fs::remove_file(path.join("global_step20").join(optim)).unwrap();
            assert!(
                matches!(refused(&path), FileError::MissingFiles { files, .. } if files == [optim])
            );
        }
    }
}

#[test]
fn the_shards_of_deepspeed_are_those_that_latest_names() {
    let parent = tempfile::tempdir().unwrap();
    let path = with_deepspeed(parent.path(), "zero2", false);
    copy(&path.join("global_step20"), &path.join("global_step10"));
    std::fs::remove_file(path.join("global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        .unwrap();
    opened(&path);
    for (text, what) in [
        ("global_step30", "global_step30"),
        ("../zero2", "no name"),
        ("", "no name"),
    ] {
        std::fs::write(path.join("latest"), text).unwrap();
        assert!(
            fsdp_layout::with_causes(&refused(&path)).contains(what),
            "{text}"
        );
    }
    // Nobody knows which one is meant, unless there is one only.
    std::fs::remove_file(path.join("latest")).unwrap();
    assert!(
        fsdp_layout::with_causes(&refused(&path)).contains("`global_step10` and `global_step20`")
    );
    std::fs::remove_dir_all(path.join("global_step10")).unwrap();
    opened(&path);
}

#[test]
fn damage_in_a_part_of_a_folder_is_found_with_its_key_and_its_file() {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("folder");
    copy(&fixture("folders/accelerate"), &to);
    let file = to.join("optimizer_0/__1_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes.truncate(middle);
    std::fs::write(&file, bytes).unwrap();
    let report = verify(&*opened(&to), Level::Sizes, VerifyOptions::default()).unwrap();
    assert!(!report.is_ok());
    assert!(
        report
            .problems
            .iter()
            .all(|problem| problem.file.as_deref() == Some("optimizer_0/__1_0.distcp"))
    );
    assert!(
        report.problems.iter().all(|problem| problem
            .fqn
            .as_ref()
            .unwrap()
            .starts_with("optimizer."))
    );
    // Damage in tensors that are not selected does not matter.
    let folder = opened(&to);
    let keep = |fqn: &str| {
        if fqn.starts_with("model.") {
            Rename::Keep
        } else {
            Rename::Drop
        }
    };
    let view = View::new(&*folder, keep, None).unwrap();
    let model = parent.path().join("model.safetensors");
    convert(
        &view,
        &model,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    let options = ConvertOptions {
        drop_opaque: true,
        ..ConvertOptions::default()
    };
    assert!(
        convert(
            &*folder,
            parent.path().join("all"),
            OutputFormat::SafetensorsFile,
            options
        )
        .is_err()
    );
    // A part that is gone altogether is an error too, where a trainer would look for it.
    std::fs::remove_file(to.join("optimizer_0/.metadata")).unwrap();
    assert!(refused(&to).to_string().contains("optimizer_0"));
}

#[test]
fn a_gap_in_the_numbers_of_parts_is_an_error_that_names_the_missing_files() {
    let parent = tempfile::tempdir().unwrap();
    let cases: [(&str, &str, &[&str], &[&str]); 4] = [
        (
            "accelerate",
            "random_states_0.pkl",
            &["random_states_1.pkl", "random_states_3.pkl"],
            &["random_states_2.pkl"],
        ),
        (
            "accelerate_full",
            "random_states_0.pkl",
            &["random_states_1.pkl", "random_states_4.pkl"],
            &["random_states_2.pkl", "random_states_3.pkl"],
        ),
        (
            "accelerate_full",
            "scheduler.bin",
            &["scheduler_2.bin"],
            &["scheduler.bin", "scheduler_1.bin"],
        ),
        (
            "trainer",
            "rng_state.pth",
            &["rng_state_0.pth", "rng_state_3.pth"],
            &["rng_state_1.pth", "rng_state_2.pth"],
        ),
    ];
    for (number, (name, file, numbered, missing)) in cases.into_iter().enumerate() {
        let to = parent.path().join(number.to_string());
        copy(&fixture("folders").join(name), &to);
        let bytes = std::fs::read(to.join(file)).unwrap();
        std::fs::remove_file(to.join(file)).unwrap();
        for numbered_file in numbered {
            std::fs::write(to.join(numbered_file), &bytes).unwrap();
        }
        let error = refused(&to);
        assert_eq!(error.kind(), ErrorKind::Incomplete, "{missing:?}: {error}");
        match error {
            FileError::MissingFiles { files, .. } => assert_eq!(files, missing),
            other => panic!("{missing:?}: {other}"),
        }
        // Without gaps it is a checkpoint again.
        for missing_file in missing {
            std::fs::write(to.join(missing_file), &bytes).unwrap();
        }
        opened(&to);
    }
}

#[test]
fn a_folder_has_no_folders_as_parts() {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("accelerate");
    copy(&fixture("folders/accelerate"), &to);
    copy(&fixture("folders/trainer"), &to.join("optimizer_1"));
    let error = fsdp_layout::with_causes(&refused(&to));
    assert!(
        error.contains("optimizer_1") && error.contains("inside of another one"),
        "{error}"
    );
    // Each folder leads to itself twice, so that there are 2^40 ways through the links that a path
    // may have.
    let to = parent.path().join("turning");
    std::fs::create_dir(&to).unwrap();
    for name in ["pytorch_model_fsdp_0", "pytorch_model_fsdp_1"] {
        std::os::unix::fs::symlink(&to, to.join(name)).unwrap();
    }
    assert!(fsdp_layout::with_causes(&refused(&to)).contains("inside of another one"));
}

#[test]
fn gradients_that_were_not_finite_do_not_damage_a_trainers_folder() {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("trainer");
    copy(&fixture("folders/trainer"), &to);
    let state = to.join("trainer_state.json");
    std::fs::write(
        &state,
        r#"{"global_step": 7, "log_history": [{"grad_norm": NaN, "loss": -Infinity}]}"#,
    )
    .unwrap();
    let folder = opened(&to);
    assert_eq!(
        folder.read_value("trainer_state.global_step").unwrap(),
        PlainValue::Int(7)
    );
    assert_eq!(
        folder
            .read_value("trainer_state.log_history.0.loss")
            .unwrap(),
        PlainValue::Float(f64::NEG_INFINITY)
    );
    let norm = folder
        .read_value("trainer_state.log_history.0.grad_norm")
        .unwrap();
    assert!(
        matches!(norm, PlainValue::Float(norm) if norm.is_nan()),
        "{norm:?}"
    );
}

#[test]
fn a_state_with_a_long_log_is_compared_all_the_same() {
    let parent = tempfile::tempdir().unwrap();
    let folders = ["1", "2"].map(|loss| {
        let to = parent.path().join(loss);
        copy(&fixture("folders/trainer"), &to);
        let history = format!(r#"{{"loss": {loss}}}, "#).repeat(100_000);
        std::fs::write(
            to.join("trainer_state.json"),
            format!(r#"{{"log_history": [{history}null]}}"#),
        )
        .unwrap();
        opened(&to)
    });
    let found = differences(&*folders[0], &*folders[1]);
    assert!(
        found.len() == 1 && found[0].starts_with("trainer_state.log_history: "),
        "{found:?}"
    );
}

#[test]
fn an_object_of_the_users_own_keeps_its_levels() {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("trainer");
    copy(&fixture("folders/trainer"), &to);
    let model = PlainValue::Dict(vec![("a".into(), PlainValue::Int(1))]);
    let object = PlainValue::Dict(vec![("model".into(), model)]);
    std::fs::write(
        to.join("custom_checkpoint_0.pkl"),
        encode_value(&object).unwrap(),
    )
    .unwrap();
    assert_eq!(
        opened(&to)
            .read_value("custom_checkpoint_0.model.a")
            .unwrap(),
        PlainValue::Int(1)
    );
}

#[test]
fn weights_for_hugging_face_take_configuration_and_tokenizer_along() {
    let parent = tempfile::tempdir().unwrap();
    let folder = opened(&fixture("folders/trainer"));
    let model = |fqn: &str| match fqn.strip_prefix("model.") {
        Some(name) => Rename::To(name.to_owned()),
        None => Rename::Drop,
    };
    let view = View::new(&*folder, model, None).unwrap();
    let target = OutputFormat::SafetensorsDirectory {
        max_file_bytes: 1 << 30,
    };
    let to = parent.path().join("hf");
    let done = convert(&view, &to, target, ConvertOptions::default()).unwrap();
    assert_eq!(done.copied, ["config.json", "generation_config.json"]);
    assert_eq!(done.left_behind, ["training_args.bin"]);
    // From elsewhere, and before those of the source.
    let with = parent.path().join("with");
    std::fs::create_dir(&with).unwrap();
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "notes.txt",
    ] {
        std::fs::write(with.join(name), name).unwrap();
    }
    // A pipeline has a directory of this name, which is not taken along.
    std::fs::create_dir(with.join("tokenizer")).unwrap();
    let (to, with) = (parent.path().join("hf2"), with.into());
    let options = ConvertOptions {
        with: Some(&with),
        ..ConvertOptions::default()
    };
    let done = convert(&view, &to, target, options).unwrap();
    assert_eq!(
        done.copied,
        [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    assert_eq!(
        std::fs::read(to.join("config.json")).unwrap(),
        b"config.json"
    );
    assert!(
        verify(&*opened(&to), Level::Deep, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
}

#[test]
fn the_checkpoints_of_a_run_are_found_by_their_names() {
    let parent = tempfile::tempdir().unwrap();
    let outputs = parent.path().join("outputs/checkpoint");
    for step in [10, 9, 100] {
        std::fs::create_dir_all(outputs.join(format!("step-{step}"))).unwrap();
    }
    let steps = |run: &Path| {
        list_steps(run)
            .unwrap()
            .iter()
            .map(|found| found.step)
            .collect::<Vec<_>>()
    };
    for run in [parent.path(), &parent.path().join("outputs"), &outputs] {
        assert_eq!(steps(run), [9, 10, 100]);
    }
    assert!(
        refused(&outputs)
            .to_string()
            .contains("the folder of a run")
    );
    // A folder that cannot be looked into may have some.
    let run = parent.path().join("run");
    std::fs::create_dir(&run).unwrap();
    assert!(steps(&run).is_empty());
    std::os::unix::fs::symlink("checkpoints", run.join("checkpoints")).unwrap();
    assert!(list_steps(&run).is_err());
}

#[test]
fn a_trainers_folder_is_sealed_part_by_part() {
    for (name, file) in [
        ("trainer", "model.safetensors"),
        ("trainer", "trainer_state.json"),
        ("trainer", "optimizer.pt"),
        ("accelerate", "pytorch_model_fsdp_0/__0_0.distcp"),
        ("accelerate", "scheduler.bin"),
        ("accelerate_full", "pytorch_model_fsdp.bin"),
    ] {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(name);
        copy(&fixture(&format!("folders/{name}")), &path);
        let before = opened(&path);
        let keys: Vec<&String> = before.metadata().entries.keys().collect();
        add_integrity(path.as_path(), None).unwrap();
        let whole = opened(&path);
        assert_eq!(
            whole.metadata().entries.keys().collect::<Vec<_>>(),
            keys,
            "{name}"
        );
        let report = verify(&*whole, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok() && report.has_integrity, "{name}: {report:?}");
        assert!(report.digests > 0, "{name}");
        // The hashes are the checkpoint's own: it may be replaced and removed with them.
        assert_eq!(ExtraFiles::find(&*whole).unwrap().foreign(), None, "{name}");
        // A flipped bit is found in the file where it is.
        let damaged = path.join(file);
        let mut bytes = std::fs::read(&damaged).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&damaged, bytes).unwrap();
        let found = open(&path, Default::default())
            .and_then(|checkpoint| verify(&*checkpoint, Level::Hashes, VerifyOptions::default()));
        match found {
            Ok(report) => {
                let files: Vec<_> = report
                    .problems
                    .iter()
                    .filter_map(|problem| problem.file.as_deref())
                    .collect();
                assert!(files.contains(&file), "{name}, {file}: {report:?}");
            }
            // A file that is read whole when the folder is opened.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}, {file}: {error}"),
        }
    }
}
