//! Directories of `torch_checkpointing` in every layout that the library writes: items in files of
//! torch, safetensors, JSON and raw bytes, with names of their own, with and without resharders.

use std::fs;
use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, ExtraFiles, Format, check_replaceable, list_steps};
use fsdp_formats::internals::encode_value;
use fsdp_layout::{PlainValue, TensorBox, with_causes};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use tempfile::TempDir;

use crate::foreign::{assert_converts, copy, differences, fixture, opened, refused, replace};

fn layout(name: &str) -> PathBuf {
    fixture("torch_checkpointing").join(name)
}

/// Copies a layout to a fresh directory.
fn copied(name: &str) -> (TempDir, PathBuf) {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join(name);
    copy(&layout(name), &path);
    (parent, path)
}

/// Asserts that a directory holds what the library saved, as torch has it in one file.
fn assert_holds(path: &Path, whole: &str) -> Box<dyn Checkpoint> {
    let (source, whole) = (opened(path), opened(&layout(whole)));
    assert_eq!(
        source.format(),
        Format::TorchCheckpointing,
        "{}",
        path.display()
    );
    assert_eq!(
        differences(&*source, &*whole),
        [""; 0],
        "{}",
        path.display()
    );
    source
}

#[test]
fn every_layout_holds_what_the_library_saved() {
    for name in [
        "kinds",
        "bare",
        "bare_folders",
        "bare_safetensors",
        "boxes",
        "single",
        "single_safetensors",
    ] {
        let source = assert_holds(&layout(name), &format!("{name}_whole.pt"));
        assert_converts(&*source);
        // Every file is one of the checkpoint's own, so it can be replaced, and nothing is left
        // behind.
        let view = View::new(&*source, |_| Rename::Keep, None).unwrap();
        for checkpoint in [&*source, &view] {
            assert_eq!(
                ExtraFiles::find(checkpoint).unwrap(),
                ExtraFiles::default(),
                "{name}"
            );
        }
        check_replaceable(&layout(name).as_path().into()).unwrap();
    }
}

#[test]
fn the_first_version_of_the_metadata_says_the_same() {
    let (_parent, path) = copied("kinds");
    fs::copy(layout("kinds_version_1.pkl"), path.join("metadata.pkl")).unwrap();
    assert_holds(&path, "kinds_whole.pt");
}

#[test]
fn json_is_values_and_raw_bytes_are_a_value() {
    let source = opened(&layout("kinds"));
    let value = |key: &str| source.read_value(key).unwrap();
    assert_eq!(value("trainer.step"), PlainValue::Int(7));
    assert_eq!(value("trainer.nested.name"), "é".into());
    assert_eq!(value("trainer.nested.none"), PlainValue::None);
    assert_eq!(
        value("blob"),
        PlainValue::Bytes(b"\x00\x01raw\xff".to_vec())
    );
}

#[test]
fn json_that_differs_is_kept_for_each_rank() {
    let (_parent, path) = copied("kinds");
    replace(
        &path.join("rank_2/trainer.json"),
        b"\"step\": 7",
        b"\"step\": 9",
    );
    let source = opened(&path);
    let step = |rank: u8| {
        source
            .read_value(&format!("trainer.rank_{rank}.step"))
            .unwrap()
    };
    assert_eq!((step(1), step(2)), (PlainValue::Int(7), PlainValue::Int(9)));
    assert_converts(&*source);
}

#[test]
fn a_missing_file_of_a_rank_is_named_in_every_layout() {
    for (name, file) in [
        ("kinds", "weights/part-2.safetensors"),
        ("kinds", "rank_3/optim.state"),
        ("kinds", "rank_1/trainer.json"),
        ("kinds", "blob_0.bin"),
        ("kinds", "rng_3.pt"),
        ("boxes", "model_1.safetensors"),
        ("single", "state/model.pt"),
    ] {
        let (_parent, path) = copied(name);
        fs::remove_file(path.join(file)).unwrap();
        match refused(&path) {
            FileError::MissingFiles { files, .. } => assert_eq!(files, [file], "{name}"),
            other => panic!("{name} {file}: {other}"),
        }
    }
}

#[test]
fn what_only_the_first_rank_saved_is_an_item() {
    let (_parent, path) = copied("kinds");
    for rank in 1..4 {
        fs::remove_file(path.join(format!("rng_{rank}.pt"))).unwrap();
    }
    fs::write(path.join("settings.json"), r#"{"lr": 0.5}"#).unwrap();
    let source = opened(&path);
    assert_eq!(source.read_value("rng.seed").unwrap(), PlainValue::Int(11));
    assert_eq!(
        source.read_value("settings.lr").unwrap(),
        PlainValue::Float(0.5)
    );
}

#[test]
fn a_file_that_is_one_opaque_value_is_reported_where_it_cannot_be_read() {
    let (_parent, path) = copied("kinds");
    let log = path.join("log.json");
    fs::write(&log, vec![b' '; 17 << 20]).unwrap();
    let source = opened(&path);
    fs::File::options()
        .write(true)
        .open(&log)
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    let problems: Vec<_> = report
        .problems
        .iter()
        .map(|problem| (problem.fqn.as_deref(), problem.file.as_deref()))
        .collect();
    assert_eq!(problems, [(Some("log"), Some("log.json"))]);
}

#[test]
fn one_ranks_file_is_not_taken_for_a_whole_checkpoint() {
    for file in [
        "kinds/weights/part-1.safetensors",
        "boxes/model_0.safetensors",
    ] {
        let text = with_causes(&refused(&layout(file)));
        assert!(
            text.contains("name the directory with `metadata.pkl`"),
            "{text}"
        );
    }
    // An item that is called `step` is no step of a run.
    assert_eq!(list_steps(layout("bare").as_path()).unwrap().len(), 0);
    // But checkpoints of a run are, whatever else lies beside them.
    let run = TempDir::new().unwrap();
    for name in ["step_0.pt", "step_10.pt", "model_10.pt"] {
        fs::write(
            run.path().join(name),
            encode_value(&PlainValue::Int(1)).unwrap(),
        )
        .unwrap();
    }
    assert_eq!(list_steps(run.path()).unwrap().len(), 2);
}

#[test]
fn safetensors_of_one_rank_are_not_taken_for_a_model_of_hugging_face() {
    let (_parent, path) = copied("single_safetensors");
    fs::remove_file(path.join("metadata.pkl")).unwrap();
    let source = opened(&path);
    assert_eq!(source.format(), Format::TorchCheckpointing);
    assert!(source.metadata().tensor("model.weight").is_some());
    assert_eq!(
        source.read_value("trainer.step").unwrap(),
        PlainValue::Int(7)
    );
}

#[test]
fn files_of_epochs_are_not_ranks() {
    for names in [
        &["model_1.pt", "model_2.pt"][..],
        &["model_0.pt", "model_1.pt"],
        &["model_0.pt", "model_1.pt", "model_2.pt", "optimizer_1.pt"],
        &["data_0.pt", "data_1.pt"],
    ] {
        let directory = TempDir::new().unwrap();
        for (epoch, name) in names.iter().enumerate() {
            let value = PlainValue::Dict(vec![("epoch".into(), PlainValue::Int(epoch as i64))]);
            fs::write(directory.path().join(name), encode_value(&value).unwrap()).unwrap();
        }
        let error = with_causes(&refused(directory.path()));
        assert!(
            error.contains("whose names tell no format"),
            "{names:?}: {error}"
        );
    }
}

#[test]
fn a_model_made_for_hugging_face_beside_it_changes_nothing() {
    let (_parent, path) = copied("kinds");
    convert(
        &*opened(&layout("boxes")),
        path.join("hf"),
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 1 << 20,
        },
        ConvertOptions::default(),
    )
    .unwrap();
    for name in [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ] {
        fs::rename(path.join("hf").join(name), path.join(name)).unwrap();
    }
    fs::remove_dir_all(path.join("hf")).unwrap();
    assert_holds(&path, "kinds_whole.pt");
}

#[test]
fn a_users_own_description_of_shards_is_no_hindrance() {
    let (_parent, path) = copied("tc");
    replace(
        &path.join("metadata.pkl"),
        b"DTensorShardingMetadata",
        b"MTensorShardingMetadata",
    );
    assert_holds(&path, "tc_whole.pt");
}

#[test]
fn placements_that_do_not_fit_are_an_error_that_names_file_and_tensor() {
    let (_parent, path) = copied("kinds");
    replace(&path.join("metadata.pkl"), b"split_factor", b"splot_factor");
    let text = with_causes(&refused(&path));
    assert!(
        text.contains("metadata.pkl") && text.contains("split_factor"),
        "{text}"
    );
    // Another rank's file in the place of this one's: its rows are others, or do not fit.
    let (_parent, path) = copied("boxes");
    fs::copy(
        layout("kinds/weights/part-0.safetensors"),
        path.join("model_0.safetensors"),
    )
    .unwrap();
    let report = verify(&*opened(&path), Level::Structure, VerifyOptions::default()).unwrap();
    assert!(!report.is_ok());
}

#[test]
fn what_is_written_is_read_again_on_any_number_of_ranks() {
    for name in ["kinds", "bare_safetensors", "single"] {
        let source = opened(&layout(name));
        for ranks in [1, 3, 4] {
            let parent = TempDir::new().unwrap();
            let to = parent.path().join("to");
            let target = OutputFormat::TorchCheckpointing { ranks };
            convert(&*source, &to, target, ConvertOptions::default()).unwrap();
            let written = opened(&to);
            assert_eq!(written.format(), Format::TorchCheckpointing);
            assert_eq!(differences(&*source, &*written), [""; 0], "{name} {ranks}");
            let report = verify(&*written, Level::Deep, VerifyOptions::default()).unwrap();
            assert!(report.is_ok(), "{:?}", report.problems);
            // The hashes of every file are checked.
            let file = to.join(format!("model_{}.pt", ranks - 1));
            let length = fs::metadata(&file).unwrap().len();
            let mut bytes = fs::read(&file).unwrap();
            bytes[length as usize / 2] ^= 1;
            fs::write(&file, bytes).unwrap();
            let is_found = match fsdp_formats::checkpoint::open(&*to, Default::default()) {
                Ok(damaged) => {
                    let report = verify(&*damaged, Level::Deep, VerifyOptions::default());
                    report.map_or(true, |report| !report.is_ok())
                }
                Err(_) => true,
            };
            assert!(is_found, "{name} {ranks}");
        }
    }
}

#[test]
fn a_state_dict_without_items_becomes_the_item_model() {
    let source = opened(&fixture("hfbin"));
    let parent = TempDir::new().unwrap();
    let to = parent.path().join("to");
    let target = OutputFormat::TorchCheckpointing { ranks: 2 };
    convert(&*source, &to, target, ConvertOptions::default()).unwrap();
    let written = opened(&to);
    for (key, tensor) in source.metadata().tensors() {
        let found = written.metadata().tensor(&format!("model.{key}")).unwrap();
        assert_eq!(
            (&found.shape, found.properties.dtype),
            (&tensor.shape, tensor.properties.dtype)
        );
        let whole = TensorBox::whole(&tensor.shape);
        let bytes = whole.numel() * tensor.properties.dtype.size_in_bytes() as usize;
        let (mut before, mut after) = (vec![0; bytes], vec![1; bytes]);
        source.read_box(key, &whole, &mut before).unwrap();
        written
            .read_box(&format!("model.{key}"), &whole, &mut after)
            .unwrap();
        assert_eq!(before, after, "{key}");
    }
    assert_converts(&*written);
}

#[test]
fn a_file_of_somebody_else_is_left_behind_and_not_replaced() {
    let (_parent, path) = copied("kinds");
    fs::write(path.join("notes.txt"), "mine").unwrap();
    let source = assert_holds(&path, "kinds_whole.pt");
    assert_eq!(
        ExtraFiles::find(&*source).unwrap().foreign(),
        Some("notes.txt")
    );
    assert!(matches!(
        check_replaceable(&path.as_path().into()),
        Err(FileError::HoldsOthers { .. })
    ));
}
