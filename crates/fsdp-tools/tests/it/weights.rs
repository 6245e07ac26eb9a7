//! The files of a model's weights in a directory, as Hugging Face's libraries choose them.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Format, check_replaceable, open};
use fsdp_formats::internals::{Header, decode_value, encode_value};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::with_causes;
use fsdp_layout::{DType, ErrorKind, Failure, PlainTensor, PlainValue};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use indexmap::IndexMap;

use crate::foreign::refused;

fn tensor() -> PlainValue {
    PlainValue::Tensor(PlainTensor {
        dtype: DType::U8,
        shape: vec![2],
        data: vec![1, 2],
    })
}

/// Writes a safetensors file of small tensors with these keys.
fn weights(path: &Path, keys: &[&str]) {
    let source = path.with_extension("source.pt");
    let items = keys.iter().map(|key| ((*key).into(), tensor())).collect();
    std::fs::write(&source, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    let opened = open(&source, OpenOptions::default()).unwrap();
    convert(
        &*opened,
        path,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    std::fs::remove_file(source).unwrap();
}

#[test]
fn of_several_variants_in_one_directory_the_plain_one_is_read() {
    let parent = tempfile::tempdir().unwrap();
    let place = |name: &str| parent.path().join(name);
    weights(&place("diffusion_pytorch_model.safetensors"), &["a"]);
    weights(
        &place("diffusion_pytorch_model.fp16.safetensors"),
        &["half"],
    );
    weights(
        &place("diffusion_pytorch_model.non_ema.safetensors"),
        &["a", "b"],
    );
    std::fs::write(
        place("diffusion_pytorch_model.fp16.safetensors.index.json"),
        r#"{"weight_map": {"half": "diffusion_pytorch_model.fp16.safetensors"}}"#,
    )
    .unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.metadata().entries.keys().collect::<Vec<_>>(), ["a"]);
    // Two models, of which none comes first.
    for name in ["first", "second"] {
        weights(&place(&format!("{name}.safetensors")), &[name]);
        let index = format!(r#"{{"weight_map": {{"{name}": "{name}.safetensors"}}}}"#);
        std::fs::write(place(&format!("{name}.safetensors.index.json")), index).unwrap();
    }
    let error = with_causes(
        &open(parent.path(), OpenOptions::default())
            .map(drop)
            .unwrap_err(),
    );
    assert!(
        error.contains("first.safetensors.index.json")
            && error.contains("second.safetensors.index.json"),
        "{error}"
    );
}

/// Checks that a directory is refused, and that the error names a key and the two files that have
/// it.
fn assert_in_two_files(directory: &Path, key: &str, files: [&str; 2]) {
    let error = error_of(directory);
    assert!(
        error.contains(&format!(
            "`{key}` in both `{}` and `{}`",
            files[0], files[1]
        )),
        "{error}"
    );
}

#[test]
fn one_key_in_two_files_is_an_error_that_names_both() {
    let parent = tempfile::tempdir().unwrap();
    // Even if they are equal now: a load takes one of them, and nothing says that it is the right
    // one.
    let files = ["one.safetensors", "two.safetensors"];
    weights(&parent.path().join(files[0]), &["a", "b"]);
    weights(&parent.path().join(files[1]), &["b", "c"]);
    assert_in_two_files(parent.path(), "b", files);
    let index = r#"{"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}"#;
    std::fs::write(parent.path().join("model.safetensors.index.json"), index).unwrap();
    assert_in_two_files(parent.path(), "b", files);
    let index = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#;
    std::fs::write(parent.path().join("model.safetensors.index.json"), index).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(
        source.metadata().tensor("b").unwrap().chunks[0]
            .stored
            .as_ref()
            .unwrap()
            .relative_path,
        files[1]
    );
}

#[test]
fn all_files_that_an_index_names_and_that_are_missing_are_listed() {
    for (index, ending) in [
        ("model.safetensors.index.json", "safetensors"),
        ("pytorch_model.bin.index.json", "bin"),
    ] {
        let parent = tempfile::tempdir().unwrap();
        let names = ["one", "two"].map(|name| format!("{name}.{ending}"));
        let map = format!(
            r#"{{"weight_map": {{"a": "{}", "b": "{}"}}}}"#,
            names[1], names[0]
        );
        std::fs::write(parent.path().join(index), map).unwrap();
        match open(parent.path(), OpenOptions::default()).map(|_| ()) {
            Err(FileError::MissingFiles { files, .. }) => assert_eq!(files, names),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_key_in_two_files_of_torch_is_an_error_that_names_both() {
    let parent = tempfile::tempdir().unwrap();
    let files = [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ];
    for (file, keys) in files.into_iter().zip([["a", "b"], ["b", "c"]]) {
        let items = keys.into_iter().map(|key| (key.into(), tensor())).collect();
        std::fs::write(
            parent.path().join(file),
            encode_value(&PlainValue::Dict(items)).unwrap(),
        )
        .unwrap();
    }
    assert_in_two_files(parent.path(), "b", files);
    let index = format!(
        r#"{{"weight_map": {{"a": "{}", "c": "{}"}}}}"#,
        files[0], files[1]
    );
    std::fs::write(parent.path().join("pytorch_model.bin.index.json"), index).unwrap();
    assert_in_two_files(parent.path(), "b", files);
}

#[test]
fn copies_that_ranks_have_noted_are_compared_and_a_file_without_a_note_is_no_copy() {
    let parent = tempfile::tempdir().unwrap();
    let files = [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ];
    let write = |file: &str, note: &str, last: u8| {
        let metadata = IndexMap::from([("DCP_SHARDING_INFO".to_owned(), note.to_owned())]);
        let header = Header::encode(&metadata, [("a", DType::U8, &[2usize][..])]).unwrap();
        std::fs::write(parent.path().join(file), [header, vec![1, last]].concat()).unwrap();
    };
    let note = r#"{"a": {"saved_offsets": [0]}}"#;
    write(files[0], note, 2);
    write(files[1], note, 2);
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.metadata().replicas.len(), 1);
    let to = parent.path().join("to.pt");
    convert(
        &*source,
        &to,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    std::fs::remove_file(&to).unwrap();
    write(files[1], note, 3);
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
    assert_eq!(report.problems[0].file.as_deref(), Some(files[1]));
    let error = with_causes(
        &convert(
            &*source,
            &to,
            OutputFormat::Torch,
            ConvertOptions::default(),
        )
        .unwrap_err(),
    );
    assert!(
        files.iter().all(|file| error.contains(file)) && error.contains("`a`"),
        "{error}"
    );
    assert!(!to.exists());
    for plain in files {
        write(files[0], note, 2);
        write(files[1], note, 2);
        write(plain, "{}", 2);
        assert_in_two_files(parent.path(), "a", files);
    }
}

/// Writes files as torch's `HuggingFaceStorageWriter` does, each with two rows of one tensor. For
/// each file: its name, the key of the tensor, and the first of the rows.
fn write_torch_shards(directory: &Path, files: &[(&str, &str, usize)]) {
    for (file, key, first_row) in files {
        let note = format!(r#"{{"{key}": {{"saved_offsets": [{first_row}]}}}}"#);
        let metadata = IndexMap::from([
            ("DCP_SHARDING_INFO".to_owned(), note),
            ("DCP_VERSION".to_owned(), "1.0".to_owned()),
        ]);
        let header = Header::encode(&metadata, [(*key, DType::U8, &[2usize][..])]).unwrap();
        std::fs::write(directory.join(file), [header, vec![1, 2]].concat()).unwrap();
    }
}

#[test]
fn a_lost_shard_is_missed_by_the_numbers_of_the_others() {
    let shard = |rank: usize, number: usize, count: usize| {
        format!("shard-{rank:05}-model-{number:05}-of-{count:05}.safetensors")
    };
    let one = |rank: usize| shard(rank, 1, 1);
    for (files, missing) in [
        // Whole tensors, of which each is in one file.
        (vec![(one(1), "a", 0), (one(3), "c", 0)], one(2)),
        (vec![(one(2), "b", 0), (one(3), "c", 0)], one(1)),
        // Parts of a tensor.
        (vec![(one(1), "a", 0), (one(3), "a", 4)], one(2)),
        (vec![(one(2), "a", 2), (one(3), "a", 4)], one(1)),
        // A file of one rank among two for each.
        (
            vec![
                (shard(1, 1, 2), "a", 0),
                (shard(1, 2, 2), "b", 0),
                (shard(2, 2, 2), "b", 2),
                (shard(3, 1, 2), "a", 4),
                (shard(3, 2, 2), "b", 4),
            ],
            shard(2, 1, 2),
        ),
        (
            vec![(shard(1, 1, 2), "a", 0), (shard(2, 1, 2), "a", 2)],
            "shard-*-model-00002-of-00002.safetensors".to_owned(),
        ),
    ] {
        let parent = tempfile::tempdir().unwrap();
        let files: Vec<_> = files
            .iter()
            .map(|(name, key, row)| (name.as_str(), *key, *row))
            .collect();
        write_torch_shards(parent.path(), &files);
        let error = refused(parent.path());
        assert_eq!(error.kind(), ErrorKind::Incomplete, "{files:?}");
        match error {
            FileError::MissingFiles { files: found, .. } => assert_eq!(found, [missing]),
            other => panic!("{files:?}: {}", with_causes(&other)),
        }
    }
}

#[test]
fn shards_of_consecutive_ranks_are_whole_and_an_empty_file_stands_for_a_rank_without_tensors() {
    let parent = tempfile::tempdir().unwrap();
    let files = [
        ("shard-00001-model-00001-of-00001.safetensors", "a", 0),
        ("shard-00003-model-00001-of-00001.safetensors", "a", 2),
    ];
    write_torch_shards(parent.path(), &files);
    let empty = Header::encode(&IndexMap::new(), []).unwrap();
    let second = "shard-00002-model-00001-of-00001.safetensors";
    std::fs::write(parent.path().join(second), empty).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.metadata().tensor("a").unwrap().shape, [4]);
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
}

#[test]
fn copies_of_a_tensor_inside_a_value_belong_to_the_value() {
    let parent = tempfile::tempdir().unwrap();
    let metadata = IndexMap::from([(
        "DCP_SHARDING_INFO".to_owned(),
        r#"{"b": {"saved_offsets": [0]}}"#.to_owned(),
    )]);
    let header = Header::encode(&metadata, [("b", DType::U8, &[2usize][..])]).unwrap();
    for file in ["one.safetensors", "two.safetensors"] {
        std::fs::write(parent.path().join(file), [&header[..], &[1, 2]].concat()).unwrap();
    }
    let values = r#"{"format": "fsdp-values", "version": 1, "values": {"v": {"$tensor": "b"}}}"#;
    std::fs::write(parent.path().join("values.json"), values).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.read_value("v").unwrap(), tensor());
    assert_eq!(source.metadata().entries.keys().collect::<Vec<_>>(), ["v"]);
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
    convert(
        &*source,
        parent.path().join("to.pt"),
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
}

#[test]
fn a_value_of_any_length_goes_into_safetensors_and_back() {
    let parent = tempfile::tempdir().unwrap();
    let from = parent.path().join("from.pt");
    // The shortest numbers take most for their text.
    let order = PlainValue::List(
        (0..1_100_000)
            .map(|index| PlainValue::Int(index % 10))
            .collect(),
    );
    std::fs::write(
        &from,
        encode_value(&PlainValue::Dict(vec![("order".into(), order.clone())])).unwrap(),
    )
    .unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    for target in [
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 1 << 20,
        },
        OutputFormat::SafetensorsShards { ranks: 2 },
    ] {
        let to = parent.path().join(format!("{target:?}"));
        convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        let written = open(&to, OpenOptions::default()).unwrap();
        assert_eq!(written.read_value("order").unwrap(), order);
    }
}

#[test]
fn paths_that_could_not_be_read_again_are_not_written() {
    let parent = tempfile::tempdir().unwrap();
    let tensors = (0..42_000)
        .map(|number| (format!("{number}").as_str().into(), tensor()))
        .collect();
    // Each path has many parts.
    let nested = (0..18).fold(PlainValue::Dict(tensors), |inner, _| {
        PlainValue::Dict(vec![("in".into(), inner)])
    });
    let from = parent.path().join("from.pt");
    std::fs::write(&from, encode_value(&nested).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let to = parent.path().join("to.safetensors");
    let error = convert(
        &*source,
        &to,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap_err();
    assert!(
        with_causes(&error).contains("memory for a text of the header"),
        "{}",
        with_causes(&error)
    );
    assert!(!to.exists());
}

/// Returns the error of opening a file, with its causes.
fn error_of(path: &Path) -> String {
    with_causes(&open(path, OpenOptions::default()).map(drop).unwrap_err())
}

#[test]
fn the_shard_of_one_of_several_ranks_is_not_taken_for_the_model() {
    let parent = tempfile::tempdir().unwrap();
    let write = |file: &str, more: &[(&str, &str)]| {
        let mut metadata = IndexMap::from([(
            "DCP_SHARDING_INFO".into(),
            r#"{"a": {"saved_offsets": [0]}}"#.into(),
        )]);
        metadata.extend(
            more.iter()
                .map(|(key, text)| ((*key).to_owned(), (*text).to_owned())),
        );
        let header = Header::encode(&metadata, [("a", DType::U8, &[2usize][..])]).unwrap();
        std::fs::write(parent.path().join(file), [&header[..], &[1, 2]].concat()).unwrap();
        parent.path().join(file)
    };
    // By itself it may be that of a single rank, unless it tells of others.
    let first = write("shard-00001-model-00001-of-00001.safetensors", &[]);
    assert_eq!(
        open(&first, OpenOptions::default())
            .unwrap()
            .metadata()
            .tensor("a")
            .unwrap()
            .shape,
        [2]
    );
    write(
        "shard-00001-model-00001-of-00001.safetensors",
        &[("fsdp.shards", "2")],
    );
    assert!(
        error_of(&first).contains("name the directory"),
        "{}",
        error_of(&first)
    );
    write("shard-00001-model-00001-of-00001.safetensors", &[]);
    write("shard-00002-model-00001-of-00001.safetensors", &[]);
    assert!(
        error_of(&first).contains("name the directory"),
        "{}",
        error_of(&first)
    );
    // The files of a single rank hold whole tensors, and so do files with such notes that are no
    // shards.
    let parent = tempfile::tempdir().unwrap();
    let write = |file: &str| std::fs::rename(write(file, &[]), parent.path().join(file)).unwrap();
    write("shard-00001-model-00001-of-00002.safetensors");
    write("shard-00001-model-00002-of-00002.safetensors");
    assert!(
        open(
            parent
                .path()
                .join("shard-00001-model-00001-of-00002.safetensors"),
            OpenOptions::default()
        )
        .is_ok()
    );
    write("model-00001-of-00002.safetensors");
    assert!(
        open(
            parent.path().join("model-00001-of-00002.safetensors"),
            OpenOptions::default()
        )
        .is_ok()
    );
}

#[test]
fn files_of_tensor_parallel_ranks_without_notes_are_not_taken_for_the_model() {
    let parent = tempfile::tempdir().unwrap();
    let files = [0, 1].map(|rank| {
        parent
            .path()
            .join(format!("model-rank-{rank}-part-0.safetensors"))
    });
    files.iter().for_each(|file| weights(file, &["a"]));
    for path in [parent.path(), &files[0], &files[1]] {
        assert!(
            error_of(path).contains("without a note of the parts"),
            "{}",
            error_of(path)
        );
    }
}

#[test]
fn a_directory_that_is_refused_for_what_it_holds_is_not_replaced() {
    let parent = tempfile::tempdir().unwrap();
    weights(&parent.path().join("a.safetensors"), &["a"]);
    weights(&parent.path().join("a-backup.safetensors"), &["a"]);
    std::fs::write(parent.path().join("notes.txt"), "mine").unwrap();
    let error = check_replaceable(&parent.path().into()).unwrap_err();
    assert!(matches!(error, FileError::NotReplaceable { .. }), "{error}");
}

#[test]
fn files_that_authors_keep_beside_the_ones_of_libraries_are_left_out() {
    let parent = tempfile::tempdir().unwrap();
    weights(
        &parent.path().join("model.safetensors"),
        &["logit_scale", "a"],
    );
    weights(
        &parent.path().join("open_clip_model.safetensors"),
        &["logit_scale", "b"],
    );
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(
        source.metadata().entries.keys().collect::<Vec<_>>(),
        ["logit_scale", "a"]
    );
}

#[test]
fn files_of_directories_are_told_to_be_no_checkpoints_themselves() {
    let parent = tempfile::tempdir().unwrap();
    weights(&parent.path().join("m.safetensors"), &["a", "b"]);
    let dcp = parent.path().join("dcp");
    let source = open(parent.path().join("m.safetensors"), OpenOptions::default()).unwrap();
    convert(
        &*source,
        &dcp,
        OutputFormat::Dcp { ranks: 1 },
        ConvertOptions::default(),
    )
    .unwrap();
    let index = parent.path().join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map": {}}"#).unwrap();
    for (path, words) in [
        (
            dcp.join(".metadata"),
            "a DCP directory (name the directory)",
        ),
        (
            dcp.join("__0_0.distcp"),
            "a DCP directory (name the directory)",
        ),
        (
            index,
            "an index of the files of a model (name their directory)",
        ),
    ] {
        assert!(error_of(&path).contains(words), "{}", error_of(&path));
    }
}

#[test]
fn files_that_the_names_of_others_tell_of_are_missed() {
    for (there, missing) in [
        (
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ),
        (
            "model.fp16-00002-of-00002.safetensors",
            "model.fp16-00001-of-00002.safetensors",
        ),
    ] {
        let parent = tempfile::tempdir().unwrap();
        weights(&parent.path().join(there), &["a"]);
        let error = open(parent.path(), OpenOptions::default())
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(&error, FileError::MissingFiles { files, .. } if files == &[missing]),
            "{error}"
        );
    }
}

#[test]
fn tensors_that_an_index_leaves_out_are_read_where_they_are() {
    let parent = tempfile::tempdir().unwrap();
    weights(
        &parent.path().join("model-00001-of-00002.safetensors"),
        &["a", "b"],
    );
    weights(
        &parent.path().join("model-00002-of-00002.safetensors"),
        &["a", "c"],
    );
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}}"#;
    std::fs::write(parent.path().join("model.safetensors.index.json"), index).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    let mut keys: Vec<&String> = source.metadata().entries.keys().collect();
    keys.sort();
    assert_eq!(keys, ["a", "b", "c"]);
    assert!(
        verify(&*source, Level::Deep, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
}

#[test]
fn a_directory_with_one_file_of_torch_is_a_model() {
    let parent = tempfile::tempdir().unwrap();
    let items = vec![("a".into(), tensor())];
    std::fs::write(
        parent.path().join("pytorch_model.bin"),
        encode_value(&PlainValue::Dict(items)).unwrap(),
    )
    .unwrap();
    std::fs::write(parent.path().join("config.json"), "{}").unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.format(), Format::TorchDirectory);
    let to = parent.path().join("to");
    let directory = OutputFormat::SafetensorsDirectory {
        max_file_bytes: 1 << 20,
    };
    let done = convert(&*source, &to, directory, ConvertOptions::default()).unwrap();
    assert_eq!(done.copied, ["config.json"]);
    assert_eq!(
        open(&to, OpenOptions::default())
            .unwrap()
            .metadata()
            .entries
            .keys()
            .collect::<Vec<_>>(),
        ["a"]
    );
}

#[test]
fn hidden_files_are_no_weights() {
    let parent = tempfile::tempdir().unwrap();
    weights(
        &parent.path().join("model-00001-of-00002.safetensors"),
        &["a"],
    );
    weights(
        &parent.path().join("model-00002-of-00002.safetensors"),
        &["b"],
    );
    // On disks that are not its own, macOS keeps the attributes of a file in another one with this
    // name.
    std::fs::write(
        parent.path().join("._model-00001-of-00002.safetensors"),
        [0, 5, 22, 7],
    )
    .unwrap();
    let opened = open(parent.path(), OpenOptions::default()).unwrap();
    let keys: Vec<&String> = opened.metadata().entries.keys().collect();
    assert_eq!(keys, ["a", "b"]);
}

#[test]
fn an_index_that_lists_nothing_leaves_no_files_out() {
    let parent = tempfile::tempdir().unwrap();
    // Values only, in a nested dict whose path is not told by its flat key.
    let state = PlainValue::Dict(vec![(
        "a".into(),
        PlainValue::Dict(vec![("b.c".into(), 1i64.into())]),
    )]);
    let from = parent.path().join("from.pt");
    std::fs::write(&from, encode_value(&state).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let to = parent.path().join("hf");
    let target = OutputFormat::SafetensorsDirectory {
        max_file_bytes: 1 << 20,
    };
    convert(&*source, &to, target, ConvertOptions::default()).unwrap();
    let back = parent.path().join("back.pt");
    convert(
        &*open(&to, OpenOptions::default()).unwrap(),
        &back,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    assert_eq!(decode_value(&std::fs::read(back).unwrap()).unwrap(), state);
    // The index of a directory of a model hides no files either.
    let model = parent.path().join("model");
    std::fs::create_dir(&model).unwrap();
    weights(&model.join("model-00001-of-00001.safetensors"), &["a"]);
    std::fs::write(
        model.join("model.safetensors.index.json"),
        r#"{"weight_map": {}}"#,
    )
    .unwrap();
    assert_eq!(
        open(&model, OpenOptions::default())
            .unwrap()
            .metadata()
            .entries
            .len(),
        1
    );
}
