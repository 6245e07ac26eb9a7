//! Files with very many values: vocabularies, logs. They open, and what is not read costs nothing.

use std::path::Path;

use fsdp_formats::checkpoint::{open, open_selected};
use fsdp_formats::internals::encode_value;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::foreign::{assert_converts, copy, fixture, opened};

/// An array in the header of a GGUF file: its key, the number of the type of its items, their
/// number, and their bytes.
type Array<'a> = (&'a str, u32, usize, Vec<u8>);

/// Makes a GGUF file of these arrays, and without tensors.
fn gguf(arrays: &[Array<'_>]) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(0u64.to_le_bytes());
    file.extend((arrays.len() as u64).to_le_bytes());
    for (key, item_type, count, items) in arrays {
        file.extend(text(key));
        file.extend([9u32.to_le_bytes(), item_type.to_le_bytes()].concat());
        file.extend((*count as u64).to_le_bytes());
        file.extend(items);
    }
    file
}

/// Returns a text as GGUF stores it.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns the bytes of so many texts.
fn texts(count: usize, make: impl Fn(usize) -> String) -> Vec<u8> {
    (0..count).flat_map(|index| text(&make(index))).collect()
}

#[test]
fn a_gguf_file_with_a_large_vocabulary_opens_and_has_all_of_it() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("model.gguf");
    let count = 262_144;
    let file = gguf(&[
        (
            "tokens",
            8,
            count,
            texts(count, |index| format!("t{index}")),
        ),
        ("scores", 6, count, 1.5f32.to_le_bytes().repeat(count)),
        ("types", 5, count, 3i32.to_le_bytes().repeat(count)),
        ("charsmap", 0, 300_000, vec![7; 300_000]),
        (
            "nested",
            9,
            1,
            [
                &4u32.to_le_bytes()[..],
                &2u64.to_le_bytes(),
                &[1, 0, 0, 0, 2, 0, 0, 0],
            ]
            .concat(),
        ),
    ]);
    std::fs::write(&path, &file).unwrap();
    let model = opened(&path);
    let list = |key: &str| match model.read_value(key).unwrap() {
        PlainValue::List(items) => items,
        other => panic!("{other:?}"),
    };
    let tokens = list("tokens");
    assert_eq!(
        (tokens.len(), &tokens[count - 1]),
        (count, &"t262143".into())
    );
    assert_eq!(list("scores"), vec![PlainValue::Float(1.5); count]);
    assert_eq!(list("types"), vec![PlainValue::Int(3); count]);
    assert_eq!(list("charsmap"), vec![PlainValue::Int(7); 300_000]);
    let nested = PlainValue::List(vec![PlainValue::Int(1), PlainValue::Int(2)]);
    assert_eq!(list("nested"), [nested]);
    let report = verify(&*model, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
    // Cut short anywhere, it is an error.
    for kept in [30, 200, 4_000_000, file.len() - 1] {
        std::fs::write(&path, &file[..kept]).unwrap();
        assert!(open(&path, OpenOptions::default()).is_err(), "{kept}");
    }
}

#[test]
fn an_array_of_gguf_that_is_malformed_is_a_problem_of_its_key() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("model.gguf");
    let not_utf8 = [&1u64.to_le_bytes()[..], b"\xff"].concat();
    std::fs::write(&path, gguf(&[("tokens", 8, 1, not_utf8)])).unwrap();
    let report = verify(&*opened(&path), Level::Sizes, VerifyOptions::default()).unwrap();
    assert_eq!(report.problems[0].fqn.as_deref(), Some("tokens"));
    assert!(report.problems[0].error.contains("UTF-8"));
    std::fs::write(&path, gguf(&[("tokens", 13, 1, vec![0; 8])])).unwrap();
    assert!(open(&path, OpenOptions::default()).is_err());
}

#[test]
fn a_gguf_file_with_many_merges_is_written_as_safetensors() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("model.gguf");
    let (tokens, merges) = (128_256, 446_189);
    let file = gguf(&[
        (
            "tokens",
            8,
            tokens,
            texts(tokens, |index| format!("t{index}")),
        ),
        ("types", 5, tokens, 1i32.to_le_bytes().repeat(tokens)),
        (
            "merges",
            8,
            merges,
            texts(merges, |index| format!("a{index} b{index}")),
        ),
    ]);
    std::fs::write(&path, file).unwrap();
    let model = opened(&path);
    for (name, target) in [
        ("m.safetensors", OutputFormat::SafetensorsFile),
        (
            "hf",
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 1 << 20,
            },
        ),
    ] {
        let to = parent.path().join(name);
        convert(&*model, &to, target, ConvertOptions::default()).unwrap();
        let written = opened(&to);
        for key in ["tokens", "types", "merges"] {
            assert!(written.read_value(key).unwrap() == model.read_value(key).unwrap());
        }
    }
}

/// Returns an entry of a log.
fn log_entry(step: i64) -> PlainValue {
    PlainValue::Dict(vec![
        ("epoch".into(), 0.5.into()),
        ("loss".into(), (step as f64 / 7.0).into()),
        ("step".into(), PlainValue::Int(step)),
    ])
}

/// Returns a dict with keys of text.
fn dict(items: Vec<(&str, PlainValue)>) -> PlainValue {
    let items = items.into_iter().map(|(key, value)| (key.into(), value));
    PlainValue::Dict(items.collect())
}

/// Writes a file of torch with a model, and a log beside it.
fn write_with_log(path: &Path, log: PlainValue) {
    let weight = PlainValue::Tensor(PlainTensor {
        dtype: DType::F32,
        shape: vec![2],
        data: vec![1; 8],
    });
    let state = dict(vec![
        ("model", dict(vec![("w", weight)])),
        (
            "extra",
            dict(vec![("log", log), ("epoch", PlainValue::Int(3))]),
        ),
    ]);
    std::fs::write(path, encode_value(&state).unwrap()).unwrap();
}

#[test]
fn a_long_log_in_a_torch_file_is_one_value_that_every_format_keeps_and_a_short_one_has_flat_keys() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("log.pt");
    let list = PlainValue::List((0..40_000).map(log_entry).collect());
    let by_step = (0..40_000).map(|step| (PlainValue::Int(step), log_entry(step)));
    for log in [list, PlainValue::Dict(by_step.collect())] {
        write_with_log(&path, log.clone());
        let source = opened(&path);
        let keys: Vec<&String> = source.metadata().entries.keys().collect();
        assert_eq!(keys, ["model.w", "extra.log", "extra.epoch"]);
        assert_eq!(source.read_value("extra.log").unwrap(), log);
        assert_converts(&*source);
    }
    // A short one has a key for each value, as torch's own state dicts have them.
    write_with_log(&path, PlainValue::List((0..3000).map(log_entry).collect()));
    let source = opened(&path);
    assert_eq!(source.metadata().entries.len(), 9002);
    assert_eq!(
        source.read_value("extra.log.2999.step").unwrap(),
        PlainValue::Int(2999)
    );
}

#[test]
fn the_groups_of_an_optimizer_have_flat_keys_however_many_there_are() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("optimizer.pt");
    let options = ["lr", "eps", "weight_decay", "maximize", "fused", "foreach"];
    let group = |index| {
        let mut items: Vec<(&str, PlainValue)> =
            options.iter().map(|option| (*option, 0.5.into())).collect();
        items.push(("params", PlainValue::List(vec![PlainValue::Int(index)])));
        dict(items)
    };
    let groups = PlainValue::List((0..2000).map(group).collect());
    let optimizer = dict(vec![
        ("state", PlainValue::Dict(Vec::new())),
        ("param_groups", groups),
    ]);
    let state = dict(vec![("optimizer", optimizer)]);
    std::fs::write(&path, encode_value(&state).unwrap()).unwrap();
    let source = opened(&path);
    assert_eq!(source.metadata().entries.len(), 2000 * 7);
    let last = source.read_value("optimizer.param_groups.1999.lr").unwrap();
    assert_eq!(last, 0.5.into());
}

#[test]
fn a_log_that_is_not_wanted_is_not_read() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("log.pt");
    write_with_log(
        &path,
        PlainValue::List((0..20_000).map(log_entry).collect()),
    );
    let wanted = |key: &str| key == "model.w";
    let source = open_selected(&path, OpenOptions::default(), &wanted).unwrap();
    let keys: Vec<&String> = source.metadata().entries.keys().collect();
    assert_eq!(keys, ["model.w", "extra.epoch"]);
    let mut bytes = [0; 8];
    let bounds = TensorBox::whole(&[2]);
    source.read_box("model.w", &bounds, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 8]);
    let wanted = |key: &str| key == "extra.log";
    let source = open_selected(&path, OpenOptions::default(), &wanted).unwrap();
    assert!(source.read_value("extra.log").is_ok());
}

#[test]
fn a_trainers_long_state_is_read_and_never_opaque() {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("trainer");
    copy(&fixture("folders/trainer"), &to);
    let entry = |step: usize| format!(r#"{{"epoch": 0.1, "loss": {}.5, "step": {step}}}"#, step);
    let entries: Vec<String> = (0..60_000).map(entry).collect();
    let state = format!(
        r#"{{"global_step": 7, "best": NaN, "log_history": [{}]}}"#,
        entries.join(", ")
    );
    assert!(state.len() > 2 << 20);
    std::fs::write(to.join("trainer_state.json"), state).unwrap();
    let folder = opened(&to);
    assert_eq!(
        folder.read_value("trainer_state.global_step").unwrap(),
        PlainValue::Int(7)
    );
    let PlainValue::List(log) = folder.read_value("trainer_state.log_history").unwrap() else {
        panic!("no list")
    };
    assert_eq!(log.len(), 60_000);
    let last = dict(vec![
        ("epoch", 0.1.into()),
        ("loss", 59_999.5.into()),
        ("step", PlainValue::Int(59_999)),
    ]);
    assert_eq!(log[59_999], last);
    let keys = folder.metadata().entries.keys();
    for fqn in keys.filter(|fqn| fqn.starts_with("trainer_state")) {
        assert_eq!(folder.opaque_type(fqn).unwrap(), None, "{fqn}");
    }
    // Files of torch have other types for NumPy's random numbers.
    let keep = |fqn: &str| match fqn.starts_with("rng_state") {
        true => Rename::Drop,
        false => Rename::Keep,
    };
    assert_converts(&View::new(&*folder, keep, None).unwrap());
}
