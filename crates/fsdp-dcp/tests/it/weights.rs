//! The files of a model's weights in a directory, as Hugging Face's libraries choose them.

use std::path::Path;

use fsdp_dcp::FileError;
use fsdp_dcp::checkpoint::{Format, open};
use fsdp_dcp::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_dcp::internals::{Header, decode_value, encode_value};
use fsdp_dcp::reader::OpenOptions;
use fsdp_dcp::verify::{Level, verify, with_causes};
use fsdp_layout::{DType, PlainTensor, PlainValue};
use indexmap::IndexMap;

fn tensor() -> PlainValue {
    PlainValue::Tensor(PlainTensor { dtype: DType::U8, shape: vec![2], data: vec![1, 2] })
}

/// Writes a safetensors file of small tensors with these keys.
fn weights(path: &Path, keys: &[&str]) {
    let source = path.with_extension("source.pt");
    let items = keys.iter().map(|key| ((*key).into(), tensor())).collect();
    std::fs::write(&source, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    let opened = open(&source, OpenOptions::default()).unwrap();
    convert(&*opened, path, OutputFormat::SafetensorsFile, ConvertOptions::default()).unwrap();
    std::fs::remove_file(source).unwrap();
}

#[test]
fn of_several_variants_in_one_directory_the_plain_one_is_read() {
    let parent = tempfile::tempdir().unwrap();
    let place = |name: &str| parent.path().join(name);
    weights(&place("diffusion_pytorch_model.safetensors"), &["a"]);
    weights(&place("diffusion_pytorch_model.fp16.safetensors"), &["half"]);
    weights(&place("diffusion_pytorch_model.non_ema.safetensors"), &["a", "b"]);
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
    let error = with_causes(&open(parent.path(), OpenOptions::default()).map(drop).unwrap_err());
    assert!(
        error.contains("first.safetensors.index.json") && error.contains("second.safetensors.index.json"),
        "{error}"
    );
}

#[test]
fn one_key_in_two_files_is_converted_only_if_both_are_the_same() {
    let parent = tempfile::tempdir().unwrap();
    weights(&parent.path().join("one.safetensors"), &["a", "b"]);
    weights(&parent.path().join("two.safetensors"), &["b", "c"]);
    let to = parent.path().join("to");
    let converted = || {
        let source = open(parent.path(), OpenOptions::default()).unwrap();
        convert(&*source, &to, OutputFormat::Torch, ConvertOptions::default())
    };
    converted().unwrap();
    std::fs::remove_file(&to).unwrap();
    let second = parent.path().join("two.safetensors");
    let mut bytes = std::fs::read(&second).unwrap();
    // The elements of the tensors lie at the end.
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    std::fs::write(&second, bytes).unwrap();
    let error = with_causes(&converted().unwrap_err());
    assert!(error.contains("one.safetensors") && error.contains("two.safetensors") && error.contains("`b`"), "{error}");
    assert!(!to.exists());
}

#[test]
fn copies_of_a_tensor_inside_a_value_belong_to_the_value() {
    let parent = tempfile::tempdir().unwrap();
    let metadata = IndexMap::from([("DCP_SHARDING_INFO".to_owned(), r#"{"b": {"saved_offsets": [0]}}"#.to_owned())]);
    let header = Header::encode(&metadata, [("b", DType::U8, &[2usize][..])]).unwrap();
    for file in ["one.safetensors", "two.safetensors"] {
        std::fs::write(parent.path().join(file), [&header[..], &[1, 2]].concat()).unwrap();
    }
    let values = r#"{"format": "fsdp-values", "version": 1, "values": {"v": {"$tensor": "b"}}}"#;
    std::fs::write(parent.path().join("values.json"), values).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.read_value("v").unwrap(), tensor());
    assert_eq!(source.metadata().entries.keys().collect::<Vec<_>>(), ["v"]);
    let report = verify(&*source, Level::Deep, None).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
    convert(&*source, parent.path().join("to.pt"), OutputFormat::Torch, ConvertOptions::default()).unwrap();
}

/// The time is linear: a test that takes longer is stopped by the test runner.
#[test]
fn many_tensors_inside_values_are_put_back_in_time() {
    let parent = tempfile::tempdir().unwrap();
    let keys: Vec<String> = (0..90_000).map(|number| format!("v.{number}")).collect();
    let header = Header::encode(&IndexMap::new(), keys.iter().map(|key| (key.as_str(), DType::U8, &[1usize][..])));
    std::fs::write(parent.path().join("m.safetensors"), [header.unwrap(), vec![7; keys.len()]].concat()).unwrap();
    let tensors: Vec<String> = keys.iter().map(|key| format!(r#"{{"$tensor":"{key}"}}"#)).collect();
    let values = format!(r#"{{"format":"fsdp-values","version":1,"values":{{"v":[{}]}}}}"#, tensors.join(","));
    std::fs::write(parent.path().join("values.json"), values).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    let PlainValue::List(tensors) = source.read_value("v").unwrap() else { panic!("no list") };
    assert_eq!((tensors.len(), source.metadata().entries.len()), (keys.len(), 1));
}

#[test]
fn files_that_the_names_of_others_tell_of_are_missed() {
    for (there, missing) in [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("model.fp16-00002-of-00002.safetensors", "model.fp16-00001-of-00002.safetensors"),
    ] {
        let parent = tempfile::tempdir().unwrap();
        weights(&parent.path().join(there), &["a"]);
        let error = open(parent.path(), OpenOptions::default()).map(drop).unwrap_err();
        assert!(matches!(&error, FileError::MissingFiles { files, .. } if files == &[missing]), "{error}");
    }
}

#[test]
fn tensors_that_an_index_leaves_out_are_read_where_they_are() {
    let parent = tempfile::tempdir().unwrap();
    weights(&parent.path().join("model-00001-of-00002.safetensors"), &["a", "b", "tied"]);
    weights(&parent.path().join("model-00002-of-00002.safetensors"), &["a", "c", "tied"]);
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}}"#;
    std::fs::write(parent.path().join("model.safetensors.index.json"), index).unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    let mut keys: Vec<&String> = source.metadata().entries.keys().collect();
    keys.sort();
    assert_eq!(keys, ["a", "b", "c", "tied"]);
    assert!(verify(&*source, Level::Deep, None).unwrap().is_ok());
}

#[test]
fn a_directory_with_one_file_of_torch_is_a_model() {
    let parent = tempfile::tempdir().unwrap();
    let items = vec![("a".into(), tensor())];
    std::fs::write(parent.path().join("pytorch_model.bin"), encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    std::fs::write(parent.path().join("config.json"), "{}").unwrap();
    let source = open(parent.path(), OpenOptions::default()).unwrap();
    assert_eq!(source.format(), Format::TorchDirectory);
    let to = parent.path().join("to");
    let directory = OutputFormat::SafetensorsDirectory { max_file_bytes: 1 << 20 };
    let done = convert(&*source, &to, directory, ConvertOptions::default()).unwrap();
    assert_eq!(done.copied, ["config.json"]);
    assert_eq!(open(&to, OpenOptions::default()).unwrap().metadata().entries.keys().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn hidden_files_are_no_weights() {
    let parent = tempfile::tempdir().unwrap();
    weights(&parent.path().join("model-00001-of-00002.safetensors"), &["a"]);
    weights(&parent.path().join("model-00002-of-00002.safetensors"), &["b"]);
    // On disks that are not its own, macOS keeps the attributes of a file in another one with this name.
    std::fs::write(parent.path().join("._model-00001-of-00002.safetensors"), [0, 5, 22, 7]).unwrap();
    let opened = open(parent.path(), OpenOptions::default()).unwrap();
    let keys: Vec<&String> = opened.metadata().entries.keys().collect();
    assert_eq!(keys, ["a", "b"]);
}

#[test]
fn an_index_that_lists_nothing_leaves_no_files_out() {
    let parent = tempfile::tempdir().unwrap();
    // Values only, in a nested dict whose path is not told by its flat key.
    let state = PlainValue::Dict(vec![("a".into(), PlainValue::Dict(vec![("b.c".into(), 1i64.into())]))]);
    let from = parent.path().join("from.pt");
    std::fs::write(&from, encode_value(&state).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let to = parent.path().join("hf");
    let target = OutputFormat::SafetensorsDirectory { max_file_bytes: 1 << 20 };
    convert(&*source, &to, target, ConvertOptions::default()).unwrap();
    let back = parent.path().join("back.pt");
    convert(&*open(&to, OpenOptions::default()).unwrap(), &back, OutputFormat::Torch, ConvertOptions::default())
        .unwrap();
    assert_eq!(decode_value(&std::fs::read(back).unwrap()).unwrap(), state);
    // The index of a directory of a model hides no files either.
    let model = parent.path().join("model");
    std::fs::create_dir(&model).unwrap();
    weights(&model.join("model-00001-of-00001.safetensors"), &["a"]);
    std::fs::write(model.join("model.safetensors.index.json"), r#"{"weight_map": {}}"#).unwrap();
    assert_eq!(open(&model, OpenOptions::default()).unwrap().metadata().entries.len(), 1);
}
