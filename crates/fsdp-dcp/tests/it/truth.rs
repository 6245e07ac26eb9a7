//! The truth beside each fixture: what PyTorch held when it wrote the checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_layout::{DType, KeyPath, PathPart, PlainTensor, PlainValue};
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
pub(crate) fn same(value: &PlainValue, truth: &Value) -> bool {
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
