//! Directories with a file for each rank: DTensors of verl, SkyRL and accelerate, FSDP1's
//! ShardedTensors.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Format};
use fsdp_formats::internals::encode_value;
use fsdp_layout::with_causes;
use fsdp_layout::{DType, PlainTensor, PlainValue};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use tempfile::TempDir;

use crate::foreign::{assert_converts, copy, differences, fixture, opened, refused, replace};

fn per_rank(name: &str) -> Box<dyn Checkpoint> {
    opened(&fixture("per_rank").join(name))
}

/// Returns a view of the keys below a prefix, without it.
fn below<'c>(checkpoint: &'c dyn Checkpoint, prefix: &'static str) -> View<'c> {
    let rename = |key: &str| {
        key.strip_prefix(prefix)
            .map_or(Rename::Drop, |key| Rename::To(key.to_owned()))
    };
    View::new(checkpoint, rename, None).unwrap()
}

#[test]
fn parts_of_ranks_make_the_tensors_that_torch_gathers() {
    let (verl, whole) = (per_rank("verl"), per_rank("verl_whole.pt"));
    assert_eq!(verl.format(), Format::RankFiles);
    let state = View::new(
        &*verl,
        |key| {
            if key.starts_with("extra_state") {
                Rename::Drop
            } else {
                Rename::Keep
            }
        },
        None,
    );
    assert_eq!(differences(&state.unwrap(), &*whole), [""; 0]);
    assert_converts(&*verl);
    // Without an optimizer's files, the keys are the model's own.
    for name in ["hsdp", "tp"] {
        let (checkpoint, whole) = (per_rank(name), per_rank(&format!("{name}_whole.pt")));
        assert_eq!(
            differences(&*checkpoint, &below(&*whole, "model.")),
            [""; 0],
            "{name}"
        );
        assert_converts(&*checkpoint);
    }
    assert_eq!(
        differences(&*per_rank("accelerate"), &below(&*whole, "model.")),
        [""; 0]
    );
}

#[test]
fn each_rank_keeps_its_extra_state() {
    let verl = per_rank("verl");
    for rank in 0..4u8 {
        let mut bytes = [0xff; 4];
        let key = format!("extra_state.rank_{rank}.rng.cpu");
        verl.read_box(&key, &fsdp_layout::TensorBox::whole(&[4]), &mut bytes)
            .unwrap();
        assert_eq!(bytes, [rank; 4]);
        let epoch = verl
            .read_value(&format!("extra_state.rank_{rank}.lr_scheduler.last_epoch"))
            .unwrap();
        assert_eq!(epoch.as_int(), Some(2));
    }
}

#[test]
fn sharded_tensors_of_fsdp1_are_read() {
    let (sharded, whole) = (
        per_rank("fsdp1_sharded"),
        per_rank("fsdp1_sharded_whole.pt"),
    );
    assert_eq!(differences(&*sharded, &*whole), [""; 0]);
    assert_converts(&*sharded);
    // A local state dict has the flat parameter as it is: 8 * 6 + 8 + 6 * 8 + 6 elements, without
    // the padding.
    let local = per_rank("fsdp1_local");
    assert_eq!(
        local
            .metadata()
            .tensor("_flat_param")
            .unwrap()
            .shape
            .iter()
            .product::<usize>(),
        110
    );
    assert_converts(&*local);
}

#[test]
fn copies_that_differ_are_an_error_that_names_the_tensor() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("copy");
    copy(&fixture("per_rank/hsdp"), &path);
    // The buffer 0, 1, 2 of rank 3.
    let mask: Vec<u8> = [0f32, 1., 2.]
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let other: Vec<u8> = [0f32, 1., 3.]
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    replace(&path.join("model_world_size_4_rank_3.pt"), &mask, &other);
    let source = opened(&path);
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report
            .problems
            .iter()
            .any(|problem| problem.fqn.as_deref() == Some("mask")),
        "{:?}",
        report.problems
    );
    let to = parent.path().join("to");
    match convert(
        &*source,
        &to,
        OutputFormat::Torch,
        ConvertOptions::default(),
    ) {
        Err(FileError::Differing { fqn, second, .. }) => {
            assert_eq!(
                (fqn.as_str(), second.as_str()),
                ("mask", "model_world_size_4_rank_3.pt")
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(!to.exists());
    // Also through a view, which is what the command converts.
    let view = View::new(&*source, |_| Rename::Keep, None).unwrap();
    assert!(convert(&view, &to, OutputFormat::Torch, ConvertOptions::default()).is_err());
}

#[test]
fn a_malformed_part_of_a_tensor_is_an_error_that_names_the_tensor() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("copy");
    copy(&fixture("per_rank/hsdp"), &path);
    replace(
        &path.join("model_world_size_4_rank_0.pt"),
        b"_local_tensor",
        b"_lokal_tensor",
    );
    let text = with_causes(&refused(&path));
    assert!(
        text.contains("rank_0.pt") && text.contains("`: it has no `_local_tensor`"),
        "{text}"
    );
}

#[test]
fn values_that_differ_are_an_error_that_names_them() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("copy");
    copy(&fixture("per_rank/verl"), &path);
    let rate = |rate: f64| [b"G".as_slice(), &rate.to_be_bytes()].concat();
    replace(
        &path.join("optim_world_size_4_rank_2.pt"),
        &rate(0.01),
        &rate(0.02),
    );
    match refused(&path) {
        FileError::Differing { fqn, .. } => assert!(fqn.ends_with("lr"), "{fqn}"),
        other => panic!("{other}"),
    }
}

#[test]
fn a_missing_rank_is_an_error_that_names_its_file() {
    for (name, file) in [
        ("verl", "optim_world_size_4_rank_3.pt"),
        ("verl", "model_world_size_4_rank_0.pt"),
        ("hsdp", "model_world_size_4_rank_1.pt"),
        ("accelerate", "pytorch_model_fsdp_0_rank2.bin"),
        // The name tells no number of ranks, but the mesh does.
        ("accelerate", "pytorch_model_fsdp_0_rank3.bin"),
        ("fsdp1_sharded", "pytorch_model_fsdp_rank3.bin"),
    ] {
        let parent = TempDir::new().unwrap();
        let path = parent.path().join("copy");
        copy(&fixture("per_rank").join(name), &path);
        std::fs::remove_file(path.join(file)).unwrap();
        match refused(&path) {
            FileError::MissingFiles { files, .. } => assert_eq!(files, [file]),
            other => panic!("{name} {file}: {other}"),
        }
    }
}

#[test]
fn files_of_two_saves_are_not_mixed() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("copy");
    copy(&fixture("per_rank/hsdp"), &path);
    let from = path.join("model_world_size_4_rank_0.pt");
    std::fs::copy(&from, path.join("model_world_size_2_rank_0.pt")).unwrap();
    assert!(refused(&path).to_string().contains("model_world_size_"));
    // A file in the place of another rank's.
    let path = parent.path().join("swapped");
    copy(&fixture("per_rank/verl"), &path);
    std::fs::copy(
        path.join("model_world_size_4_rank_0.pt"),
        path.join("model_world_size_4_rank_1.pt"),
    )
    .unwrap();
    let source = opened(&path);
    let report = verify(&*source, Level::Structure, VerifyOptions::default()).unwrap();
    assert!(
        report
            .problems
            .iter()
            .any(|problem| problem.fqn.as_deref() == Some("model.up.weight"))
    );
    assert!(
        convert(
            &*source,
            parent.path().join("to"),
            OutputFormat::Torch,
            ConvertOptions::default()
        )
        .is_err()
    );
}

#[test]
fn the_file_of_one_rank_is_an_incomplete_checkpoint() {
    let source = opened(&fixture("per_rank/verl/model_world_size_4_rank_1.pt"));
    let tensor = source.metadata().tensor("up.weight").unwrap();
    assert_eq!(
        (tensor.shape.as_slice(), tensor.chunks.len()),
        (&[8, 6][..], 1)
    );
    let report = verify(&*source, Level::Structure, VerifyOptions::default()).unwrap();
    assert!(
        report
            .problems
            .iter()
            .any(|problem| problem.fqn.as_deref() == Some("up.weight"))
    );
    let parent = TempDir::new().unwrap();
    let to = parent.path().join("to");
    assert!(
        convert(
            &*source,
            &to,
            OutputFormat::SafetensorsFile,
            ConvertOptions::default()
        )
        .is_err()
    );
    assert!(!to.exists());
}

#[test]
fn a_directory_of_files_with_an_index_is_one_model() {
    let source = opened(&fixture("hfbin"));
    assert_eq!(source.format(), Format::TorchDirectory);
    assert_converts(&*source);
    let order: Vec<&String> = source.metadata().entries.keys().collect();
    let index = std::fs::read_to_string(fixture("hfbin/pytorch_model.bin.index.json")).unwrap();
    assert!(order.is_sorted_by_key(|key| index.find(&format!("\"{key}\"")).unwrap()));
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("copy");
    copy(&fixture("hfbin"), &path);
    std::fs::remove_file(path.join("pytorch_model-00002-of-00002.bin")).unwrap();
    assert!(matches!(refused(&path), FileError::MissingFiles { files, .. } if files.len() == 1));
    // A file in the place of another one lacks its keys.
    let first = path.join("pytorch_model-00001-of-00002.bin");
    std::fs::copy(&first, path.join("pytorch_model-00002-of-00002.bin")).unwrap();
    assert!(matches!(refused(Path::new(&path)), FileError::File { .. }));
}

#[test]
fn directories_of_torch_checkpointing_are_read() {
    let (source, whole) = (
        opened(&fixture("torch_checkpointing/tc")),
        opened(&fixture("torch_checkpointing/tc_whole.pt")),
    );
    assert_eq!(source.format(), Format::TorchCheckpointing);
    assert_eq!(differences(&*source, &*whole), [""; 0]);
    assert_converts(&*source);
    let parent = TempDir::new().unwrap();
    for file in ["model_1.pt", "optimizer_0.pt", "trainer_1.pt"] {
        let path = parent.path().join(file);
        copy(&fixture("torch_checkpointing/tc"), &path);
        std::fs::remove_file(path.join(file)).unwrap();
        match refused(&path) {
            FileError::MissingFiles { files, .. } => assert_eq!(files, [file]),
            other => panic!("{file}: {other}"),
        }
    }
    // A state that is another one on each rank is kept for each.
    let path = parent.path().join("by rank");
    copy(&fixture("torch_checkpointing/tc"), &path);
    replace(&path.join("trainer_1.pt"), b"stepq", b"seedq");
    let source = opened(&path);
    assert_eq!(
        source.read_value("trainer.rank_0.step").unwrap().as_int(),
        Some(7)
    );
    assert_eq!(
        source.read_value("trainer.rank_1.seed").unwrap().as_int(),
        Some(7)
    );
}

#[test]
fn random_numbers_of_each_rank_are_kept_though_they_are_tensors() {
    let parent = TempDir::new().unwrap();
    let state = |cpu: u8, size: usize| {
        let tensor = |data: Vec<u8>| {
            PlainValue::Tensor(PlainTensor {
                dtype: DType::U8,
                shape: vec![data.len()],
                data,
            })
        };
        PlainValue::Dict(vec![
            ("cpu".into(), tensor(vec![cpu; 16])),
            ("large".into(), tensor(vec![7; size])),
        ])
    };
    for (name, second, keys) in [
        ("same", state(1, 2 << 20), &["cpu", "large"][..]),
        (
            "other elements",
            state(2, 2 << 20),
            &["rank_0.cpu", "rank_0.large", "rank_1.cpu", "rank_1.large"],
        ),
        (
            "other shape",
            state(1, 3 << 20),
            &["rank_0.cpu", "rank_0.large", "rank_1.cpu", "rank_1.large"],
        ),
    ] {
        let path = parent.path().join(name);
        std::fs::create_dir(&path).unwrap();
        for (rank, rng) in [state(1, 2 << 20), second].into_iter().enumerate() {
            std::fs::write(
                path.join(format!("rng_rank_{rank}.pt")),
                encode_value(&rng).unwrap(),
            )
            .unwrap();
            let model =
                encode_value(&PlainValue::Dict(vec![("step".into(), 1i64.into())])).unwrap();
            std::fs::write(path.join(format!("model_rank_{rank}.pt")), model).unwrap();
        }
        let source = opened(&path);
        let found: Vec<&str> = source
            .metadata()
            .tensors()
            .filter_map(|(key, _)| key.strip_prefix("rng."))
            .collect();
        assert_eq!(found, keys, "{name}");
        assert_converts(&*source);
    }
}

#[test]
fn hidden_files_are_no_ranks() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("verl");
    copy(&fixture("per_rank/verl"), &path);
    for entry in std::fs::read_dir(fixture("per_rank/verl")).unwrap() {
        let hidden = format!("._{}", entry.unwrap().file_name().to_str().unwrap());
        std::fs::write(path.join(hidden), [0, 5, 22, 7]).unwrap();
    }
    let keys = |path| -> Vec<String> { opened(path).metadata().entries.keys().cloned().collect() };
    assert_eq!(keys(&path), keys(&fixture("per_rank/verl")));
}

#[test]
fn files_of_unknown_names_are_listed_with_the_names_that_are_read() {
    let parent = tempfile::tempdir().unwrap();
    for rank in 0..6 {
        std::fs::write(parent.path().join(format!("weights.part{rank}.pth")), b"").unwrap();
    }
    std::fs::write(parent.path().join("notes.txt"), b"").unwrap();
    let error = with_causes(&refused(parent.path()));
    for text in ["`weights.part0.pth`", "and 2 more", "_rank_0.pt`"] {
        assert!(error.contains(text), "{error}");
    }
    let arrays = tempfile::tempdir().unwrap();
    std::fs::write(arrays.path().join("weights.npz"), b"").unwrap();
    let error = with_causes(&refused(arrays.path()));
    assert!(error.contains("`weights.npz`"), "{error}");
    // A save of DCP that was interrupted is one still.
    std::fs::write(parent.path().join("__0_0.distcp"), b"").unwrap();
    assert!(matches!(
        refused(parent.path()),
        FileError::NotCommitted { .. }
    ));
}

#[test]
fn a_directory_whose_checkpoints_are_in_folders_says_so() {
    let parent = tempfile::tempdir().unwrap();
    for (folder, file) in [
        ("unet", "diffusion_pytorch_model.safetensors"),
        ("vae", "diffusion_pytorch_model.bin"),
        ("scheduler", "scheduler_config.json"),
        (".cache", "model.safetensors"),
    ] {
        std::fs::create_dir(parent.path().join(folder)).unwrap();
        std::fs::write(parent.path().join(folder).join(file), b"").unwrap();
    }
    std::fs::write(parent.path().join("model_index.json"), b"{}").unwrap();
    let error = refused(parent.path());
    assert!(matches!(error, FileError::NotCommitted { .. }));
    let error = with_causes(&error);
    assert!(error.contains("folders of their own"), "{error}");
    std::fs::remove_dir_all(parent.path().join("unet")).unwrap();
    std::fs::remove_dir_all(parent.path().join("vae")).unwrap();
    let error = with_causes(&refused(parent.path()));
    assert!(!error.contains("folders of their own"), "{error}");
}

#[test]
fn a_pointer_of_git_lfs_is_told_from_a_damaged_file() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n";
    for (file, is_named) in [
        ("model.safetensors", false),
        ("pytorch_model.bin", false),
        ("model.gguf", true),
        ("model.npy", true),
    ] {
        let parent = tempfile::tempdir().unwrap();
        std::fs::write(parent.path().join(file), pointer).unwrap();
        let path = match is_named {
            true => parent.path().join(file),
            false => parent.path().to_owned(),
        };
        let error = with_causes(&refused(&path));
        assert!(error.contains("`git lfs pull`"), "{error}");
    }
}
