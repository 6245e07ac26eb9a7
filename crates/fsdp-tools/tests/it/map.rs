//! Maps from one framework's keys and shapes to another's.

use std::path::Path;

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::encode_value;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::map::{Map, MapError, Mapped, Values};
use fsdp_tools::verify::add_integrity;
use tempfile::TempDir;

use crate::changes::told;
use crate::foreign::{assert_converts, differences, opened};

/// Writes a safetensors file of `u16` tensors whose elements are all different.
fn write(path: &Path, tensors: &[(&str, &[usize])]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = data.len();
        let count: usize = shape.iter().product();
        data.extend((0..count).flat_map(|at| ((start / 2 + at) as u16).to_le_bytes()));
        let info = serde_json::json!({ "dtype": "U16", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert((*name).to_owned(), info);
    }
    let header = serde_json::to_vec(&header).unwrap();
    std::fs::write(
        path,
        [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat(),
    )
    .unwrap();
}

fn read(checkpoint: &dyn Checkpoint, fqn: &str) -> (Vec<usize>, Vec<u16>) {
    let shape = checkpoint
        .metadata()
        .tensor(fqn)
        .unwrap_or_else(|| panic!("{fqn}"))
        .shape
        .clone();
    let mut bytes = vec![0; shape.iter().product::<usize>() * 2];
    checkpoint
        .read_box(fqn, &TensorBox::whole(&shape), &mut bytes)
        .unwrap();
    (
        shape,
        bytes
            .chunks_exact(2)
            .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
            .collect(),
    )
}

fn values() -> Values {
    Values::from([("heads".to_owned(), 4), ("kv_heads".to_owned(), 2)])
}

const LLAMA: &[(&str, &[usize])] = &[
    ("tok_embeddings.weight", &[10, 16]),
    ("layers.0.attention.wq.weight", &[16, 16]),
    ("layers.0.attention.wk.weight", &[8, 16]),
    ("layers.0.attention.wv.weight", &[8, 16]),
    ("layers.0.attention.wo.weight", &[16, 16]),
    ("layers.0.feed_forward.w1.weight", &[24, 16]),
    ("layers.0.feed_forward.w2.weight", &[16, 24]),
    ("layers.0.feed_forward.w3.weight", &[24, 16]),
    ("layers.0.attention_norm.weight", &[16]),
    ("layers.0.ffn_norm.weight", &[16]),
    ("norm.weight", &[16]),
    ("output.weight", &[10, 16]),
];

const NANOGPT: &[(&str, &[usize])] = &[
    ("transformer.wte.weight", &[10, 8]),
    ("transformer.h.0.ln_1.weight", &[8]),
    ("transformer.h.0.attn.c_attn.weight", &[24, 8]),
    ("transformer.h.0.attn.c_attn.bias", &[24]),
    ("transformer.h.0.attn.c_proj.weight", &[8, 8]),
    ("transformer.h.0.mlp.c_fc.weight", &[32, 8]),
    ("transformer.h.0.mlp.c_proj.weight", &[8, 32]),
    ("lm_head.weight", &[10, 8]),
];

const MEGATRON: &[(&str, &[usize])] = &[
    ("embedding.word_embeddings.weight", &[10, 16]),
    (
        "decoder.layers.self_attention.linear_qkv.weight",
        &[3, 32, 16],
    ),
    (
        "decoder.layers.self_attention.linear_proj.weight",
        &[3, 16, 16],
    ),
    ("decoder.layers.mlp.linear_fc1.weight", &[3, 48, 16]),
    ("decoder.layers.mlp.linear_fc2.weight", &[3, 16, 24]),
    (
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        &[3, 16],
    ),
    ("decoder.layers.mlp.linear_fc1.layer_norm_weight", &[3, 16]),
    ("decoder.final_layernorm.weight", &[16]),
    ("output_layer.weight", &[10, 16]),
];

#[test]
fn rows_that_move_within_their_heads_are_read_once() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("m.safetensors");
    write(&path, &[("w", &[256, 64])]);
    // With hashes, each read of a few rows takes a whole block.
    add_integrity(&path, None).unwrap();
    let length = std::fs::metadata(&path).unwrap().len();
    for operation in ["permute(2)", "unpermute(2)", "split_qkv(6, 1)"] {
        let source = opened(&path);
        let targets = if operation.starts_with("split") {
            "a, b, c"
        } else {
            "a"
        };
        let map = Map::parse(&format!("w -> {targets} | {operation}"), &Values::new()).unwrap();
        let mapped = Mapped::new(&*source, &map).unwrap();
        let before = source.bytes_read();
        read(&mapped, "a");
        let read = source.bytes_read() - before;
        assert!(read <= 2 * length, "{operation}: {read} bytes of {length}");
    }
}

#[test]
fn maps_that_are_built_in_lead_there_and_back() {
    for (tensors, there, back, key) in [
        (
            LLAMA,
            "llama-to-hf",
            "hf-to-llama",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            NANOGPT,
            "nanogpt-to-hf",
            "hf-to-nanogpt",
            "transformer.h.0.mlp.c_fc.weight",
        ),
        (
            MEGATRON,
            "megatron-to-hf",
            "hf-to-megatron",
            "model.layers.2.self_attn.v_proj.weight",
        ),
    ] {
        let parent = TempDir::new().unwrap();
        let path = parent.path().join("source.safetensors");
        write(&path, tensors);
        let source = opened(&path);
        let map = Map::builtin(there, &values()).unwrap().unwrap();
        let mapped = Mapped::new(&*source, &map).unwrap();
        assert!(mapped.metadata().tensor(key).is_some(), "{there}");
        assert_converts(&mapped);
        let converted = parent.path().join("converted");
        convert(
            &mapped,
            &converted,
            OutputFormat::Dcp { ranks: 2 },
            ConvertOptions::default(),
        )
        .unwrap();
        let converted = opened(&converted);
        let map = Map::builtin(back, &values()).unwrap().unwrap();
        let returned = Mapped::new(&*converted, &map).unwrap();
        assert_eq!(differences(&*source, &returned), [""; 0], "{back}");
    }
}

#[test]
fn rotary_halves_come_apart_as_hugging_face_has_them() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    write(&path, &[("w", &[8, 1])]);
    let source = opened(&path);
    let map = Map::parse("w -> v | permute(2)", &Values::new()).unwrap();
    let mapped = Mapped::new(&*source, &map).unwrap();
    assert_eq!(read(&mapped, "v").1, [0, 2, 1, 3, 4, 6, 5, 7]);
    // Any rows of it.
    let mut rows = [0; 6];
    mapped
        .read_box("v", &TensorBox::new(vec![1, 0], vec![3, 1]), &mut rows)
        .unwrap();
    assert_eq!(rows, [2, 0, 1, 0, 3, 0]);
}

#[test]
fn groups_of_megatron_come_apart_by_head() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    // Two groups of two heads of queries, one of keys and one of values, one row each.
    write(&path, &[("qkv", &[8, 1])]);
    let source = opened(&path);
    let map = Map::parse("qkv -> q, k, v | split_qkv(heads, kv_heads)", &values()).unwrap();
    let mapped = Mapped::new(&*source, &map).unwrap();
    let found = ["q", "k", "v"].map(|key| read(&mapped, key).1);
    assert_eq!(found, [vec![0, 1, 4, 5], vec![2, 6], vec![3, 7]]);
}

#[test]
fn operations_move_elements_along_any_dimension() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    write(
        &path,
        &[
            ("a.0", &[2, 2]),
            ("a.1", &[2, 2]),
            ("b.0", &[2, 1]),
            ("b.1", &[2, 1]),
            ("c", &[2, 4]),
        ],
    );
    let source = opened(&path);
    let text = "a.{i}, b.{i} -> ab.{i} | concat(1)\nc -> x, y | split(1, 3, 1) | transpose";
    let map = Map::parse(text, &Values::new()).unwrap();
    let mapped = Mapped::new(&*source, &map).unwrap();
    assert_eq!(
        read(&mapped, "ab.1"),
        (vec![2, 3], vec![4, 5, 10, 6, 7, 11])
    );
    assert_eq!(
        read(&mapped, "x"),
        (vec![3, 2], vec![12, 16, 13, 17, 14, 18])
    );
    assert_eq!(read(&mapped, "y"), (vec![1, 2], vec![15, 19]));
    let map = Map::parse("a.{i} -> a | stack(i)", &Values::new()).unwrap();
    let mapped = Mapped::new(&*source, &map).unwrap();
    assert_eq!(read(&mapped, "a"), (vec![2, 2, 2], (0..8).collect()));
    assert_eq!(
        told(&mapped.changes(), "no rule of the map"),
        ["b.0", "b.1", "c"]
    );
    assert_eq!(read(&mapped, "c"), read(&*source, "c"));
}

#[test]
fn a_matrix_of_packed_numbers_is_not_transposed() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    let header = br#"{"w":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}"#;
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(&path, [&length[..], header, &[0; 16]].concat()).unwrap();
    let map = Map::parse("w -> t | transpose", &Values::new()).unwrap();
    let error = Mapped::new(&*opened(&path), &map).unwrap_err().to_string();
    assert!(error.contains("are packed"), "{error}");
}

#[test]
fn tensors_without_rows_go_through_every_operation() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    write(&path, &[("a", &[2, 1]), ("b", &[0, 1]), ("c", &[2, 1])]);
    let source = opened(&path);
    let text = "b -> p | permute(2)\na, b, c -> abc | concat(0)";
    for text in text.lines().chain([
        "b -> u | unpermute(2)",
        "b -> x, y | split(0)",
        "b -> t | transpose",
    ]) {
        let map = Map::parse(text, &Values::new()).unwrap();
        let mapped = Mapped::new(&*source, &map).unwrap();
        assert_converts(&mapped);
    }
    let map = Map::parse("a, b, c -> abc | concat(0)", &Values::new()).unwrap();
    assert_eq!(
        read(&Mapped::new(&*source, &map).unwrap(), "abc"),
        (vec![4, 1], vec![0, 1, 2, 3])
    );
}

#[test]
fn numbers_of_heads_have_a_limit_wherever_they_come_from() {
    let values = Values::from([
        ("heads".to_owned(), usize::MAX),
        ("kv_heads".to_owned(), usize::MAX / 2),
    ]);
    for text in [
        "a -> b | permute(heads)",
        "a -> q, k, v | split_qkv(heads, kv_heads)",
        "a -> b, c | split(0, heads, 1)",
    ] {
        let error = Map::parse(text, &values).unwrap_err();
        assert!(error.to_string().contains("too large"), "{text}: {error}");
    }
}

#[test]
fn tensors_of_other_dtypes_are_not_stacked() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.pt");
    let tensor = |dtype| {
        PlainValue::Tensor(PlainTensor {
            dtype,
            shape: vec![2],
            data: vec![0; 4],
        })
    };
    let items = vec![
        ("a.0".into(), tensor(DType::F16)),
        ("a.1".into(), tensor(DType::BF16)),
    ];
    std::fs::write(&path, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    let source = opened(&path);
    let map = Map::parse("a.{i} -> a | stack(i)", &Values::new()).unwrap();
    let error = Mapped::new(&*source, &map).unwrap_err();
    assert!(error.to_string().contains("dtype"), "{error}");
}

#[test]
fn maps_that_do_not_fit_are_errors() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    write(&path, &[("a.0", &[2, 3]), ("a.2", &[2, 3]), ("b", &[3, 2])]);
    let source = opened(&path);
    for text in [
        "a -> ",
        "a",
        "a.{i} -> b",
        "a -> b.{i}",
        "a -> b | turn",
        "a -> b, c",
        "a -> b | split(0, heads)",
        "a.{i} -> x | permute(two)",
    ] {
        let parsed = Map::parse(text, &Values::new());
        let fails = parsed.is_err() || Mapped::new(&*source, &parsed.unwrap()).is_err();
        assert!(fails, "{text}");
    }
    for text in [
        "c -> d",
        "a.{i} -> b",
        "a.0 -> b",
        "b -> c | permute(2)",
        "a.0, b -> c | concat(0)",
        "b -> c, d | split(1, 3, 1)",
        "a.{i} -> c | stack(i)",
        "a.0 -> x\na.2 -> x",
    ] {
        if let Ok(map) = Map::parse(text, &Values::new()) {
            let made = Mapped::new(&*source, &map);
            assert!(made.is_err(), "{text}: {made:?}");
        }
    }
    let unused = Map::parse("b -> c\nz -> y", &Values::new()).unwrap();
    assert_eq!(
        Mapped::new(&*source, &unused).unwrap_err(),
        MapError::Unused { line: 2 }
    );
    let llama = Map::builtin("llama-to-hf", &values()).unwrap().unwrap();
    assert_eq!(
        Mapped::new(&*source, &llama).unwrap_err(),
        MapError::UnusedMap
    );
    assert!(matches!(
        Map::builtin("llama-to-hf", &Values::new()),
        Some(Err(MapError::Line { .. }))
    ));
    assert!(Map::builtin("other", &values()).is_none());
}
