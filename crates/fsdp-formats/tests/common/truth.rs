//! The truth beside each fixture: what PyTorch held when it wrote the checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_formats::checkpoint::open;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, KeyPath, PathPart, PlainTensor, PlainValue, TensorBox};
use serde_json::Value;

/// A tensor's dtype, shape and bytes.
pub(crate) type Tensor = (DType, Vec<usize>, Vec<u8>);

pub(crate) struct Truth {
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) values: BTreeMap<String, Value>,
    pub(crate) paths: BTreeMap<String, KeyPath>,
}

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

impl Truth {
    pub(crate) fn of(fixture: &str) -> Truth {
        let directory = fixtures().join(fixture);
        let bytes = std::fs::read(directory.join("truth.safetensors")).unwrap();
        let json: Value =
            serde_json::from_slice(&std::fs::read(directory.join("truth.json")).unwrap()).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (mut tensors, mut values, mut paths) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (key, entry) in json["entries"].as_object().unwrap() {
            let parts = entry["path"]
                .as_array()
                .unwrap()
                .iter()
                .map(|part| match part {
                    Value::Number(index) => PathPart::Index(index.as_u64().unwrap() as usize),
                    part => PathPart::Key(part.as_str().unwrap().to_owned()),
                });
            paths.insert(key.clone(), KeyPath(parts.collect()));
            if entry["kind"] == "object" {
                values.insert(key.clone(), entry["value"].clone());
                continue;
            }
            let dtype = DType::from_torch_name(entry["dtype"].as_str().unwrap()).unwrap();
            let shape = entry["shape"]
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap() as usize)
                .collect();
            tensors.insert(
                key.clone(),
                (dtype, shape, file.tensor(key).unwrap().data().to_vec()),
            );
        }
        Truth {
            tensors,
            values,
            paths,
        }
    }
}

/// Returns `true` if a value is what the truth says. Tensors inside values are known there by their
/// shape, dtype and SHA-256 only; the first two are compared here.
fn same(value: &PlainValue, truth: &Value) -> bool {
    let items = |key: &str| truth[key].as_array().unwrap();
    let all = |values: &[PlainValue]| {
        values.len() == items("items").len()
            && values.iter().zip(items("items")).all(|(v, t)| same(v, t))
    };
    match (truth["type"].as_str().unwrap(), value) {
        ("none", PlainValue::None) => true,
        ("bool", PlainValue::Bool(value)) => truth["value"].as_bool() == Some(*value),
        ("int", PlainValue::Int(value)) => truth["value"].as_str().unwrap().parse() == Ok(*value),
        ("int", PlainValue::BigInt(bytes)) => {
            let wanted: i128 = truth["value"].as_str().unwrap().parse().unwrap();
            let mut wide = [if bytes.last().unwrap() & 0x80 == 0 {
                0
            } else {
                0xff
            }; 16];
            wide[..bytes.len()].copy_from_slice(bytes);
            i128::from_le_bytes(wide) == wanted
        }
        ("float", PlainValue::Float(value)) => {
            u64::from_str_radix(truth["bits"].as_str().unwrap().trim_start_matches("0x"), 16)
                == Ok(value.to_bits())
        }
        ("str", PlainValue::Str(value)) => truth["value"] == *value,
        ("bytes", PlainValue::Bytes(value)) => {
            truth["hex"]
                == value
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect::<String>()
        }
        ("list", PlainValue::List(values)) | ("tuple", PlainValue::Tuple(values)) => all(values),
        ("set", PlainValue::Set(values)) => all(values),
        ("dict" | "ordereddict", PlainValue::Dict(entries)) => {
            entries.len() == items("items").len()
                && entries
                    .iter()
                    .zip(items("items"))
                    .all(|((k, v), t)| same(k, &t[0]) && same(v, &t[1]))
        }
        ("tensor", PlainValue::Tensor(PlainTensor { dtype, shape, .. })) => {
            truth["dtype"] == dtype.torch_name() && truth["shape"] == serde_json::json!(shape)
        }
        _ => false,
    }
}

/// Returns every fixture with a DCP directory.
pub(crate) fn dcp_fixtures() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("dcp/.metadata").is_file())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 25, "only {} fixtures", names.len());
    names
}

pub(crate) fn check_against_truth(directory: &Path, truth: &Truth) {
    let checkpoint = open(directory, OpenOptions::default()).unwrap();
    let metadata = checkpoint.metadata();
    let keys: Vec<&str> = metadata.entries.keys().map(String::as_str).collect();
    assert_eq!(
        keys.len(),
        truth.tensors.len() + truth.values.len(),
        "{}",
        directory.display()
    );
    for (key, (dtype, shape, bytes)) in &truth.tensors {
        let tensor = metadata
            .tensor(key)
            .unwrap_or_else(|| panic!("no tensor {key} in {}", directory.display()));
        assert_eq!(
            (tensor.properties.dtype, &tensor.shape),
            (*dtype, shape),
            "{key}"
        );
        let mut whole = vec![0xee; bytes.len()];
        checkpoint
            .read_box(key, &TensorBox::whole(shape), &mut whole)
            .unwrap();
        assert!(whole == *bytes, "{key} in {}", directory.display());
        // The lower right quarter, by ranges.
        if !shape.contains(&0) {
            let offsets: Vec<usize> = shape.iter().map(|n| n / 2).collect();
            let sizes: Vec<usize> = shape.iter().zip(&offsets).map(|(n, o)| n - o).collect();
            let part = TensorBox::new(offsets, sizes);
            let element = dtype.size_in_bytes() as usize;
            let mut read = vec![0; part.numel() * element];
            checkpoint.read_box(key, &part, &mut read).unwrap();
            let mut wanted = Vec::new();
            for run in fsdp_layout::boxes::copy_runs(&part, &TensorBox::whole(shape), &part) {
                wanted.extend_from_slice(&bytes[run.src * element..(run.src + run.len) * element]);
            }
            assert!(
                read == wanted,
                "part {part} of {key} in {}",
                directory.display()
            );
        }
    }
    for (key, value) in &truth.values {
        let read = checkpoint.read_value(key).unwrap();
        assert!(
            same(&read, value),
            "{key} in {}: {read:?} is not {value}",
            directory.display()
        );
    }
    if let Some(paths) = &metadata.planner_data {
        for (key, path) in paths {
            assert_eq!(truth.paths.get(key), Some(path), "{key}");
        }
    }
}
