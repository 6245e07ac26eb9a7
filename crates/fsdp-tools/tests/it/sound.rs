//! Files that are sound, but of a kind that is not read, are not called damaged.

use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Format, open};
use fsdp_formats::internals::encode_value;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, ErrorKind, Failure, PlainTensor, PlainValue};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/sound")
        .join(name)
}

fn causes(error: &FileError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[test]
fn files_of_other_kinds_are_not_called_damaged() {
    for (name, words) in [
        ("deep.pt", "nesting"),
        ("deflated.pt", "compressed record"),
        ("script.pt", "TorchScript"),
        ("export.pt2", "torch.export.save"),
        ("mixed.npz", "`readme.txt`"),
        ("protocol_0.pt", "pickle_protocol=2"),
    ] {
        let error = open(fixture(name), OpenOptions::default()).err().unwrap();
        let text = causes(&error);
        assert_eq!(
            error.kind(),
            ErrorKind::UnsupportedVersion,
            "{name}: {text}"
        );
        assert!(text.contains(words), "{name}: {text}");
    }
}

#[test]
fn an_archive_of_numpy_may_be_empty() {
    let opened = open(fixture("empty.npz"), OpenOptions::default()).unwrap();
    assert_eq!(
        (opened.format(), opened.metadata().entries.len()),
        (Format::Numpy, 0)
    );
}

#[test]
fn an_expanded_tensor_that_is_too_large_to_check_is_not_damage() {
    let opened = open(fixture("expanded.pt"), OpenOptions::default()).unwrap();
    let report = verify(&*opened, Level::Deep, VerifyOptions::default()).unwrap();
    let kinds: Vec<ErrorKind> = report.problems.iter().map(|problem| problem.kind).collect();
    assert_eq!(
        kinds,
        [ErrorKind::UnsupportedVersion],
        "{:?}",
        report.problems
    );
}

#[test]
fn directories_of_formats_that_are_not_read_are_named() {
    let parent = tempfile::tempdir().unwrap();
    let (zarr, old) = (parent.path().join("zarr"), parent.path().join("old"));
    std::fs::create_dir_all(zarr.join("model.w")).unwrap();
    std::fs::write(
        zarr.join("metadata.json"),
        r#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#,
    )
    .unwrap();
    std::fs::create_dir_all(old.join("mp_rank_00")).unwrap();
    for (path, word) in [(zarr, "`zarr`"), (old, "Megatron-LM's old format")] {
        let error = open(&path, OpenOptions::default()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::UnsupportedVersion);
        assert!(causes(&error).contains(word), "{}", causes(&error));
    }
}

#[test]
fn parts_of_ranks_that_do_not_say_where_they_belong_are_not_called_damaged() {
    let parent = tempfile::tempdir().unwrap();
    for (rank, length) in [(0, 3), (1, 4)] {
        let part = PlainTensor {
            dtype: DType::U8,
            shape: vec![length],
            data: vec![1; length],
        };
        let state = PlainValue::Dict(vec![("w".into(), PlainValue::Tensor(part))]);
        let file = parent
            .path()
            .join(format!("model_world_size_2_rank_{rank}.pt"));
        std::fs::write(file, encode_value(&state).unwrap()).unwrap();
    }
    let error = open(parent.path(), OpenOptions::default()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::UnsupportedVersion);
    assert!(
        causes(&error).contains("LOCAL_STATE_DICT"),
        "{}",
        causes(&error)
    );
}

#[test]
fn an_index_without_its_files_names_them() {
    let parent = tempfile::tempdir().unwrap();
    let index = r#"{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}"#;
    std::fs::write(parent.path().join("model.safetensors.index.json"), index).unwrap();
    let error = open(parent.path(), OpenOptions::default()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Incomplete);
    assert!(
        causes(&error).contains("model-00001-of-00001.safetensors"),
        "{}",
        causes(&error)
    );
}
