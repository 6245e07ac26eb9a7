//! Conversions and reshards of real checkpoints: bit for bit, there and back, and the source
//! untouched.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Format, open};
use fsdp_formats::internals::encode_value;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::with_causes;
use fsdp_layout::{DType, ErrorKind, Failure as _, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::convert::{Cast, ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::truth::{Truth, fixtures};
use crate::truth::{check_against_truth, dcp_fixtures};

fn to(source: &Path, destination: &Path, target: OutputFormat) {
    let source = open(source, OpenOptions::default()).unwrap();
    convert(&*source, destination, target, ConvertOptions::default()).unwrap();
}

#[test]
fn resharding_keeps_every_bit() {
    let parent = tempfile::tempdir().unwrap();
    for name in dcp_fixtures() {
        let truth = Truth::of(&name);
        let mut from = fixtures().join(&name).join("dcp");
        for ranks in [5, 2, 3, 1] {
            let resharded = parent.path().join(format!("{name}-{ranks}"));
            let source = open(&from, OpenOptions::default()).unwrap();
            let options = ConvertOptions {
                overwrite: true,
                ..ConvertOptions::default()
            };
            convert(&*source, &resharded, OutputFormat::Dcp { ranks }, options).unwrap();
            check_against_truth(&resharded, &truth);
            from = resharded;
        }
    }
}

#[test]
fn every_format_leads_back() {
    let parent = tempfile::tempdir().unwrap();
    let formats = [
        (
            "model.safetensors",
            OutputFormat::SafetensorsFile,
            Format::SafetensorsFile,
        ),
        (
            "hf",
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 4000,
            },
            Format::SafetensorsDirectory,
        ),
        (
            "shards",
            OutputFormat::SafetensorsShards { ranks: 3 },
            Format::SafetensorsDirectory,
        ),
        ("full.pt", OutputFormat::Torch, Format::Torch),
    ];
    for (index, name) in dcp_fixtures().iter().enumerate() {
        let truth = Truth::of(name);
        let source = fixtures().join(name).join("dcp");
        for (number, (file, target, format)) in formats.into_iter().enumerate() {
            // All formats of all fixtures would take a minute of fsyncs: those with every kind of
            // thing take all, of the others each takes one by turns (and the single file, below).
            if number != index % 4 && number > 0 && !name.starts_with("misc") {
                continue;
            }
            let converted = parent.path().join(name).join(file);
            to(&source, &converted, target);
            assert_eq!(
                open(&converted, OpenOptions::default()).unwrap().format(),
                format
            );
            check_against_truth(&converted, &truth);
            if number != index % 4 && !name.starts_with("misc") {
                continue;
            }
            let back = parent.path().join(name).join(format!("{file}-back"));
            to(&converted, &back, OutputFormat::Dcp { ranks: 2 });
            check_against_truth(&back, &truth);
        }
        // The safetensors crate reads the single file on its own.
        let bytes = std::fs::read(parent.path().join(name).join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (key, (_, shape, data)) in &truth.tensors {
            let tensor = file.tensor(key).unwrap();
            assert_eq!(
                (tensor.shape(), tensor.data()),
                (&shape[..], &data[..]),
                "{key} in {name}"
            );
        }
    }
}

#[test]
fn tensors_inside_values_get_keys_by_path_in_safetensors() {
    let parent = tempfile::tempdir().unwrap();
    let converted = parent.path().join("m.safetensors");
    let source = open(fixtures().join("misc_ws2/dcp"), OpenOptions::default()).unwrap();
    let report = convert(
        &*source,
        &converted,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    assert!(report.aside.contains(&"py.tuple_with_tensor".to_owned()));
    assert_eq!(report.aside_file.as_deref(), Some("m.values.json"));
    let bytes = std::fs::read(&converted).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("py.tuple_with_tensor.0").unwrap().shape(), [4]);
}

#[test]
fn a_tensor_under_the_key_of_a_value_is_an_error() {
    let parent = tempfile::tempdir().unwrap();
    let (source, to) = (
        parent.path().join("source.pt"),
        parent.path().join("to.safetensors"),
    );
    let tensor = PlainTensor {
        dtype: DType::U8,
        shape: vec![1],
        data: vec![7],
    };
    let state = PlainValue::Dict(vec![
        ("w".into(), PlainValue::Tensor(tensor)),
        ("step".into(), PlainValue::Int(5)),
    ]);
    std::fs::write(&source, encode_value(&state).unwrap()).unwrap();
    let opened = open(&source, OpenOptions::default()).unwrap();
    convert(
        &*opened,
        &to,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    // Another program writes the file again with one tensor more, and keeps the notes in the
    // header.
    let bytes = std::fs::read(&to).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let view =
        || safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![1], &[8]).unwrap();
    let again =
        safetensors::serialize([("w", view()), ("step", view())], header.metadata().clone())
            .unwrap();
    std::fs::write(&to, again).unwrap();
    let Err(error) = open(&to, OpenOptions::default()) else {
        panic!("the tensor or the value is lost")
    };
    let text = with_causes(&error);
    assert!(
        text.contains("to.values.json") && text.contains("`step` is a value in it, and a tensor"),
        "{text}"
    );
}

#[test]
fn hugging_face_files_keep_their_limit_and_their_index() {
    let parent = tempfile::tempdir().unwrap();
    let converted = parent.path().join("hf");
    to(
        &fixtures().join("hf_ws2/truth.safetensors"),
        &converted,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 4000,
        },
    );
    let index: serde_json::Value = serde_json::from_slice(
        &std::fs::read(converted.join("model.safetensors.index.json")).unwrap(),
    )
    .unwrap();
    let total: usize = Truth::of("hf_ws2")
        .tensors
        .values()
        .map(|(_, _, bytes)| bytes.len())
        .sum();
    assert_eq!(index["metadata"]["total_size"], total);
    let mut seen = 0;
    for entry in std::fs::read_dir(&converted).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(number) = name
            .strip_prefix("model-")
            .and_then(|rest| rest.strip_suffix(".safetensors"))
        {
            assert_eq!(number.len(), "00001-of-00009".len());
            let bytes = std::fs::read(converted.join(&name)).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let inside: usize = file
                .tensors()
                .iter()
                .map(|(_, tensor)| tensor.data().len())
                .sum();
            assert!(
                inside <= 4000 || file.len() == 1,
                "{name} holds {inside} bytes"
            );
            for key in file.names() {
                assert_eq!(index["weight_map"][key], name);
                seen += 1;
            }
        }
    }
    assert_eq!(seen, index["weight_map"].as_object().unwrap().len());
}

#[test]
fn views_select_rename_and_cast() {
    let parent = tempfile::tempdir().unwrap();
    let truth = Truth::of("fsdp2_adamw_ws2");
    let source = open(
        fixtures().join("fsdp2_adamw_ws2/dcp"),
        OpenOptions::default(),
    )
    .unwrap();
    let rename = |key: &str| match key.strip_prefix("model.") {
        Some(rest) => Rename::To(format!("net.{rest}")),
        None => Rename::Drop,
    };
    let view = View::new(
        &*source,
        rename,
        Some(Cast {
            dtype: DType::BF16,
            with_optimizer: false,
        }),
    )
    .unwrap();
    let converted = parent.path().join("m.safetensors");
    convert(
        &view,
        &converted,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    let checkpoint = open(&converted, OpenOptions::default()).unwrap();
    let keys: Vec<&String> = checkpoint.metadata().entries.keys().collect();
    assert!(keys.iter().all(|key| key.starts_with("net.")) && !keys.is_empty());
    for key in keys {
        let (_, shape, bytes) = &truth.tensors[&key.replace("net.", "model.")];
        let wanted: Vec<u8> = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|b| half::bf16::from_f32(f32::from_le_bytes(*b)).to_le_bytes())
            .collect();
        let mut read = vec![0; wanted.len()];
        checkpoint
            .read_box(key, &TensorBox::whole(shape), &mut read)
            .unwrap();
        assert!(read == wanted, "{key}");
    }
    let clash = View::new(&*source, |_| Rename::To("same".to_owned()), None);
    assert!(matches!(clash, Err(FileError::Encode { .. })));
}

/// 1001 steps are 1000 in bfloat16, and moments lose most of what they are.
#[test]
fn a_cast_leaves_the_optimizer_unless_asked_and_steps_always() {
    let step = |key: &str| key.ends_with("step");
    for (name, is_optimizer) in [
        ("fsdp2_adamw_ws2/dcp", &|key: &str| {
            key.starts_with("optim.")
        }),
        ("fsdp1_orig_adamw_ws2/full.pt", &|key: &str| {
            !key.starts_with("model.")
        }),
    ] as [(&str, &dyn Fn(&str) -> bool); 2]
    {
        let source = open(fixtures().join(name), OpenOptions::default()).unwrap();
        for with_optimizer in [false, true] {
            let cast = Cast {
                dtype: DType::BF16,
                with_optimizer,
            };
            let view = View::new(&*source, |_| Rename::Keep, Some(cast)).unwrap();
            let (mut cast, mut kept) = (0, 0);
            for (key, tensor) in view.metadata().tensors() {
                let before = source.metadata().tensor(key).unwrap().properties.dtype;
                let is_cast =
                    before == DType::F32 && !step(key) && (with_optimizer || !is_optimizer(key));
                assert_eq!(
                    tensor.properties.dtype,
                    if is_cast { DType::BF16 } else { before },
                    "{key}"
                );
                *(if is_cast { &mut cast } else { &mut kept }) += 1;
            }
            assert!(cast > 0 && kept > 0, "{name}: {cast} {kept}");
        }
    }
    // The file of an optimizer alone.
    let state = |key: &str| {
        PlainValue::Dict(vec![
            (key.into(), tensor(DType::F32, &[2])),
            ("step".into(), tensor(DType::F32, &[])),
        ])
    };
    let optimizer = PlainValue::Dict(vec![
        (
            "state".into(),
            PlainValue::Dict(vec![(PlainValue::Int(0), state("exp_avg"))]),
        ),
        ("param_groups".into(), PlainValue::List(Vec::new())),
    ]);
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("optimizer.pt");
    std::fs::write(&file, encode_value(&optimizer).unwrap()).unwrap();
    let source = open(&file, OpenOptions::default()).unwrap();
    let view = View::new(
        &*source,
        |_| Rename::Keep,
        Some(Cast {
            dtype: DType::BF16,
            with_optimizer: false,
        }),
    )
    .unwrap();
    assert!(
        view.metadata()
            .tensors()
            .all(|(_, tensor)| tensor.properties.dtype == DType::F32)
    );
}

fn tensor(dtype: DType, shape: &[usize]) -> PlainValue {
    let length = shape.iter().product::<usize>() * dtype.size_in_bytes() as usize;
    PlainValue::Tensor(PlainTensor {
        dtype,
        shape: shape.to_vec(),
        data: vec![0; length],
    })
}

/// Lightning's `meta.pt`, Megatron's `common.pt`, a model's `config.json`: without them the
/// framework opens nothing.
#[test]
fn files_beside_a_checkpoint_come_along_or_are_named() {
    let parent = tempfile::tempdir().unwrap();
    let (from, hf) = (parent.path().join("from"), parent.path().join("hf"));
    let source = open(
        fixtures().join("fsdp2_adamw_ws2/dcp"),
        OpenOptions::default(),
    )
    .unwrap();
    let directory = OutputFormat::SafetensorsDirectory {
        max_file_bytes: 10_000,
    };
    convert(
        &*source,
        &from,
        OutputFormat::Dcp { ranks: 2 },
        ConvertOptions::default(),
    )
    .unwrap();
    convert(&*source, &hf, directory, ConvertOptions::default()).unwrap();
    let extra = ["common.pt", "config.json", "meta.pt", "tokenizer.json"];
    // Copies of these would be stale, and nobody needs what was never finished.
    let others = [
        "pytorch_model.bin",
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "rust_model.ot",
        "model.safetensors.tmp",
    ];
    for path in [&from, &hf] {
        for name in extra {
            std::fs::write(path.join(name), name).unwrap();
        }
        for name in others {
            std::fs::write(path.join(name), "other weights").unwrap();
        }
        std::fs::create_dir(path.join("below")).unwrap();
    }
    for (number, (from, target, comes)) in [
        (&from, OutputFormat::Dcp { ranks: 3 }, &extra[..]),
        // The configuration and the tokenizer go into Hugging Face's layout, whatever format the
        // source has.
        (&from, directory, &["config.json", "tokenizer.json"]),
        (&from, OutputFormat::Torch, &[]),
        (&hf, directory, &extra),
        (&hf, OutputFormat::SafetensorsShards { ranks: 2 }, &extra),
        (&hf, OutputFormat::Dcp { ranks: 1 }, &[]),
        (&hf, OutputFormat::SafetensorsFile, &[]),
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(format!("to-{number}"));
        let source = open(from, OpenOptions::default()).unwrap();
        let done = convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        assert_eq!(done.copied, comes, "{target:?}");
        let stays = extra.into_iter().filter(|name| !comes.contains(name));
        let mut all: Vec<&str> = others.into_iter().chain(["below"]).chain(stays).collect();
        let mut left = done.left_behind.clone();
        all.sort_unstable();
        left.sort();
        assert_eq!(left, all, "{target:?}");
        for name in done.copied {
            assert_eq!(std::fs::read_to_string(to.join(&name)).unwrap(), name);
        }
        // They are covered by the hashes of the copy.
        let copy = open(&to, OpenOptions::default()).unwrap();
        assert!(
            verify(&*copy, Level::Deep, VerifyOptions::default())
                .unwrap()
                .is_ok()
        );
        if !comes.is_empty() {
            std::fs::write(to.join("config.json"), "config.jsoN").unwrap();
            assert!(
                !verify(&*copy, Level::Hashes, VerifyOptions::default())
                    .unwrap()
                    .is_ok()
            );
        }
    }
}

#[test]
fn a_conversion_that_fails_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let broken = parent.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    let from = fixtures().join("variants_ws2/lowestrank");
    std::fs::copy(from.join(".metadata"), broken.join(".metadata")).unwrap();
    std::fs::copy(from.join("__0_0.distcp"), broken.join("__0_0.distcp")).unwrap();
    for (index, target) in [
        OutputFormat::Dcp { ranks: 2 },
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 100,
        },
        OutputFormat::SafetensorsShards { ranks: 2 },
        OutputFormat::Torch,
    ]
    .into_iter()
    .enumerate()
    {
        let source = open(&broken, OpenOptions::default()).unwrap();
        let destination = parent.path().join(format!("out-{index}"));
        assert!(convert(&*source, &destination, target, ConvertOptions::default()).is_err());
        let left: Vec<_> = std::fs::read_dir(parent.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["broken"]);
    }
}

#[test]
fn a_tensor_whose_name_is_that_of_the_headers_texts_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("source.pt");
    let items = vec![("__metadata__".into(), tensor(DType::U8, &[2]))];
    std::fs::write(&path, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    let source = open(&path, OpenOptions::default()).unwrap();
    let to = parent.path().join("to");
    for target in [
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsShards { ranks: 2 },
    ] {
        let error = convert(&*source, &to, target, ConvertOptions::default()).unwrap_err();
        assert!(
            with_causes(&error).contains("__metadata__") && !to.exists(),
            "{error}"
        );
    }
}

#[test]
fn a_key_that_is_too_long_for_dcp_is_refused_before_anything_is_written() {
    const LIMIT: usize = 1 << 20;
    let parent = tempfile::tempdir().unwrap();
    let (path, destination) = (parent.path().join("source.pt"), parent.path().join("to"));
    for (length, is_refused) in [(LIMIT + 1, true), (LIMIT, false)] {
        let items = vec![("k".repeat(length).into(), tensor(DType::U8, &[2]))];
        std::fs::write(&path, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
        let source = open(&path, OpenOptions::default()).unwrap();
        let outcome = convert(
            &*source,
            &destination,
            OutputFormat::Dcp { ranks: 2 },
            ConvertOptions::default(),
        );
        assert_eq!(outcome.is_err(), is_refused);
        assert_eq!(destination.exists(), !is_refused);
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Usage);
        }
    }
    assert!(open(&destination, OpenOptions::default()).is_ok());
}

#[test]
fn a_file_of_torch_opens_again_whatever_its_name() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("source.pt");
    std::fs::write(
        &path,
        encode_value(&PlainValue::Dict(vec![(
            "a".into(),
            tensor(DType::U8, &[2]),
        )]))
        .unwrap(),
    )
    .unwrap();
    for name in ["model", "a.b.pt", "..pt", "...", "ü\n.pt"] {
        let destination = parent.path().join(name);
        to(&path, &destination, OutputFormat::Torch);
        let opened = open(&destination, OpenOptions::default()).unwrap();
        assert!(
            verify(&*opened, Level::Deep, VerifyOptions::default())
                .unwrap()
                .is_ok(),
            "{name:?}"
        );
    }
}

#[test]
fn notes_in_a_header_stay_where_the_format_has_a_place_for_them() {
    let parent = tempfile::tempdir().unwrap();
    let from = parent.path().join("lora.safetensors");
    let data = 1.5f32.to_le_bytes();
    let tensor =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &data).unwrap();
    let notes = [
        ("format", "pt"),
        ("ss_network_dim", "16"),
        ("modelspec.title", "ünter"),
    ];
    let notes: std::collections::HashMap<String, String> = notes
        .into_iter()
        .map(|(key, text)| (key.to_owned(), text.to_owned()))
        .collect();
    std::fs::write(
        &from,
        safetensors::serialize([("w", tensor)], Some(notes)).unwrap(),
    )
    .unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let notes_of = |checkpoint: &dyn Checkpoint| -> Vec<(String, String)> {
        let mut notes: Vec<_> = checkpoint
            .notes()
            .into_iter()
            .map(|(key, text)| (key.to_owned(), text.to_owned()))
            .collect();
        notes.sort();
        notes
    };
    let expected = [("modelspec.title", "ünter"), ("ss_network_dim", "16")]
        .map(|(key, text)| (key.to_owned(), text.to_owned()));
    assert_eq!(notes_of(&*source), expected);
    let cast = View::new(
        &*source,
        |_| Rename::Keep,
        Some(Cast {
            dtype: DType::F16,
            with_optimizer: false,
        }),
    )
    .unwrap();
    for (number, (target, keeps)) in [
        (OutputFormat::SafetensorsFile, true),
        (
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 1 << 30,
            },
            true,
        ),
        (OutputFormat::SafetensorsShards { ranks: 2 }, true),
        (OutputFormat::Torch, false),
        (OutputFormat::Dcp { ranks: 1 }, false),
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(number.to_string());
        let mut done = convert(&cast, &to, target, ConvertOptions::default()).unwrap();
        done.notes_left_out.sort();
        let written = open(&to, OpenOptions::default()).unwrap();
        if keeps {
            assert_eq!(notes_of(&*written), expected, "{target:?}");
            assert!(done.notes_left_out.is_empty());
        } else {
            assert_eq!(
                done.notes_left_out,
                ["modelspec.title", "ss_network_dim"],
                "{target:?}"
            );
        }
    }
}
