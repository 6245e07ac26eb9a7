//! Every dtype of torch, those too that candle and safetensors do not know, and quantized tensors:
//! readable, and the same after any conversion.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::metadata::{Entry, METADATA_FILE, StorageInfo, decode, encode};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::with_causes;
use fsdp_layout::{DType, PlainValue, PythonType, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::map::{Map, Mapped, Values};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::foreign::clear_checksums;
use crate::truth::{Tensor, fixtures};

const TARGETS: [OutputFormat; 6] = [
    OutputFormat::Dcp { ranks: 1 },
    OutputFormat::Dcp { ranks: 3 },
    OutputFormat::SafetensorsFile,
    OutputFormat::SafetensorsDirectory {
        max_file_bytes: 300,
    },
    OutputFormat::SafetensorsShards { ranks: 2 },
    OutputFormat::Torch,
];

/// Returns the values that PyTorch held.
fn truth() -> BTreeMap<String, Tensor> {
    let directory = fixtures().join("dtypes");
    let bytes = std::fs::read(directory.join("truth.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let json = std::fs::read(directory.join("truth.json")).unwrap();
    let json: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&json).unwrap();
    let tensor = |(name, what): (String, serde_json::Value)| {
        let dtype = DType::from_torch_name(what["dtype"].as_str().unwrap()).unwrap();
        let shape = what["shape"]
            .as_array()
            .unwrap()
            .iter()
            .map(|size| size.as_u64().unwrap() as usize)
            .collect();
        let data = file.tensor(&name).unwrap().data().to_vec();
        (name, (dtype, shape, data))
    };
    json.into_iter().map(tensor).collect()
}

/// Returns all tensors of a checkpoint, after verifying it.
fn tensors(checkpoint: &dyn Checkpoint) -> BTreeMap<String, Tensor> {
    let report = verify(checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
    let read = |(fqn, tensor): (&str, &fsdp_formats::metadata::TensorEntry)| {
        let (dtype, bounds) = (tensor.properties.dtype, TensorBox::whole(&tensor.shape));
        let mut data = vec![0; bounds.numel() * dtype.size_in_bytes() as usize];
        checkpoint.read_box(fqn, &bounds, &mut data).unwrap();
        (fqn.to_owned(), (dtype, tensor.shape.clone(), data))
    };
    checkpoint.metadata().tensors().map(read).collect()
}

#[test]
fn every_dtype_survives_every_conversion() {
    let parent = tempfile::tempdir().unwrap();
    let truth: BTreeMap<_, _> = truth()
        .into_iter()
        .filter(|(_, (dtype, ..))| !dtype.torch_name().starts_with('q'))
        .collect();
    assert!(truth.len() >= 24);
    for from in ["every", "every.pt"] {
        let source = open(fixtures().join("dtypes").join(from), OpenOptions::default()).unwrap();
        assert_eq!(tensors(&*source), truth, "{from}");
        for (number, target) in TARGETS.into_iter().enumerate() {
            let converted = parent.path().join(format!("{from}-{number}"));
            convert(&*source, &converted, target, ConvertOptions::default()).unwrap();
            let opened = open(&converted, OpenOptions::default()).unwrap();
            assert_eq!(tensors(&*opened), truth, "{from} to {target:?}");
            // And back.
            let back = parent.path().join(format!("{from}-{number}-back"));
            convert(
                &*opened,
                &back,
                OutputFormat::Dcp { ranks: 2 },
                ConvertOptions::default(),
            )
            .unwrap();
            assert_eq!(
                tensors(&*open(&back, OpenOptions::default()).unwrap()),
                truth,
                "{from} to {target:?} and back"
            );
        }
    }
}

/// Writes a safetensors file as the `safetensors` library does: names, dtypes, shapes and bytes.
fn write_safetensors(path: &Path, tensors: &[(&str, safetensors::Dtype, &[usize], &[u8])]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.to_vec(), data);
        (*name, view.expect("the bytes fit the shape"))
    });
    let bytes = safetensors::serialize(views, None).expect("all of it can be written");
    std::fs::write(path, bytes).unwrap();
}

/// Returns the safetensors files of a checkpoint, which is one or a directory of them.
fn safetensors_files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).unwrap();
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|ending| ending == "safetensors")
        })
        .collect()
}

#[test]
fn packed_floats_keep_their_name_and_are_counted_as_the_safetensors_library_does() {
    use safetensors::Dtype;
    let parent = tempfile::tempdir().unwrap();
    let from = parent.path().join("from.safetensors");
    let data: Vec<u8> = (0..24).map(|byte| byte * 7 + 3).collect();
    let theirs = [
        ("four", Dtype::F4, &[6, 8][..], &data[..]),
        ("four.row", Dtype::F4, &[10], &data[..5]),
        ("four.none", Dtype::F4, &[3, 0], &[]),
        ("scale", Dtype::F8_E8M0, &[2, 3], &data[..6]),
        ("fnuz", Dtype::F8_E4M3FNUZ, &[4], &data[..4]),
        ("complex", Dtype::C64, &[3], &data[..24]),
    ];
    write_safetensors(&from, &theirs);
    let source = open(&from, OpenOptions::default()).unwrap();
    let held = tensors(&*source);
    let info = |name: &str| (held[name].0.torch_name(), held[name].1.as_slice());
    assert_eq!(info("four"), ("float4_e2m1fn_x2", &[6, 4][..]));
    assert_eq!(info("scale"), ("float8_e8m0fnu", &[2, 3][..]));
    assert_eq!(info("complex"), ("complex64", &[3][..]));
    for (number, target) in TARGETS.into_iter().enumerate() {
        let converted = parent.path().join(format!("{number}"));
        let done = convert(&*source, &converted, target, ConvertOptions::default()).unwrap();
        assert_eq!(done.stored_as_bytes, [""; 0], "{target:?}");
        let opened = open(&converted, OpenOptions::default()).unwrap();
        assert_eq!(tensors(&*opened), held, "{target:?}");
        // And back: the library reads what it had written.
        let back = parent.path().join(format!("{number}-back.safetensors"));
        convert(
            &*opened,
            &back,
            OutputFormat::SafetensorsFile,
            ConvertOptions::default(),
        )
        .unwrap();
        let bytes = std::fs::read(&back).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, dtype, shape, data) in theirs {
            let tensor = file.tensor(name).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (dtype, shape), "{name}");
            assert_eq!(tensor.data(), data, "{name}");
        }
    }
}

#[test]
fn six_bit_floats_which_torch_lacks_stay_in_safetensors() {
    use safetensors::Dtype;
    let parent = tempfile::tempdir().unwrap();
    let from = parent.path().join("from.safetensors");
    let data: Vec<u8> = (0..60).map(|byte| byte * 4 + 1).collect();
    let theirs = [
        ("a", Dtype::F6_E2M3, &[5, 16][..], &data[..]),
        ("b", Dtype::F6_E3M2, &[8], &data[..6]),
    ];
    write_safetensors(&from, &theirs);
    let source = open(&from, OpenOptions::default()).unwrap();
    let held = tensors(&*source);
    assert_eq!(held["a"].0.torch_name(), "F6_E2M3_bytes");
    for (number, target) in TARGETS.into_iter().enumerate() {
        let converted = parent.path().join(format!("{number}"));
        let outcome = convert(&*source, &converted, target, ConvertOptions::default());
        if matches!(target, OutputFormat::Dcp { .. } | OutputFormat::Torch) {
            let error = with_causes(&outcome.unwrap_err());
            for text in ["cannot write `", "F6_E", "--exclude"] {
                assert!(error.contains(text), "{target:?}: {error}");
            }
            assert!(!converted.exists());
            continue;
        }
        assert_eq!(outcome.unwrap().stored_as_bytes, [""; 0]);
        let opened = open(&converted, OpenOptions::default()).unwrap();
        assert_eq!(tensors(&*opened), held, "{target:?}");
        for file in safetensors_files(&converted) {
            let bytes = std::fs::read(&file).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (name, tensor) in file.tensors() {
                let their_dtype = theirs.iter().find(|(their_name, ..)| *their_name == name);
                assert_eq!(
                    Some(tensor.dtype()),
                    their_dtype.map(|(_, dtype, ..)| *dtype)
                );
            }
        }
    }
}

#[test]
fn tensors_that_safetensors_stores_as_bytes_are_listed() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(fixtures().join("dtypes/every"), OpenOptions::default()).unwrap();
    for target in [
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsShards { ranks: 2 },
    ] {
        let to = parent.path().join(format!("{target:?}"));
        let done = convert(&*source, to, target, ConvertOptions::default()).unwrap();
        let mut listed = done.stored_as_bytes;
        listed.sort();
        assert_eq!(
            listed,
            [
                "m.complex128 (complex128)",
                "m.complex32 (complex32)",
                "m.empty (complex128)",
                "m.scalar (complex32)",
                "m.transposed (complex128)",
            ]
        );
    }
}

#[test]
fn quantized_tensors_become_their_integers_and_say_what_these_mean() {
    let parent = tempfile::tempdir().unwrap();
    let truth = truth();
    let per_tensor = PlainValue::Tuple(vec![
        PlainValue::typed(PythonType::QScheme, "torch.per_tensor_affine"),
        PlainValue::Float(0.1),
        PlainValue::Int(3),
    ]);
    for (from, count) in [("quantized", 2), ("quantized.pt", 4)] {
        let source = open(fixtures().join("dtypes").join(from), OpenOptions::default()).unwrap();
        let held = tensors(&*source);
        assert_eq!(held["m.tensor"], truth["m.tensor"]);
        assert_eq!(
            source.quantizer("m.tensor").unwrap(),
            Some(per_tensor.clone())
        );
        for (number, target) in TARGETS.into_iter().enumerate() {
            let converted = parent.path().join(format!("{from}-{number}"));
            let done = convert(&*source, &converted, target, ConvertOptions::default()).unwrap();
            assert_eq!(done.quantized.len(), count);
            let opened = open(&converted, OpenOptions::default()).unwrap();
            let found = tensors(&*opened);
            assert_eq!(found.len(), held.len());
            for (key, (dtype, shape, data)) in &held {
                let (integer, same_shape, same_data) = &found[key];
                assert!(
                    !integer.torch_name().starts_with('q')
                        && integer.size_in_bytes() == dtype.size_in_bytes()
                );
                assert_eq!((shape, data), (same_shape, same_data), "{key}");
            }
            assert_eq!(
                opened.read_value("m.tensor.quantizer").unwrap(),
                per_tensor,
                "{from} to {target:?}"
            );
            if from == "quantized.pt" {
                let PlainValue::Tuple(parts) = opened.read_value("m.channels.quantizer").unwrap()
                else {
                    panic!()
                };
                let [
                    scheme,
                    PlainValue::Tensor(scales),
                    PlainValue::Tensor(zeros),
                    axis,
                ] = &parts[..]
                else {
                    panic!("{parts:?}")
                };
                assert_eq!(
                    (scheme, axis),
                    (
                        &PlainValue::typed(PythonType::QScheme, "torch.per_channel_affine"),
                        &PlainValue::Int(0)
                    )
                );
                assert_eq!(
                    (scales.shape.as_slice(), zeros.shape.as_slice()),
                    (&[3][..], &[3][..])
                );
                assert_eq!(
                    opened.read_value("list.0.quantizer").unwrap(),
                    PlainValue::Tuple(parts)
                );
            }
        }
    }
}

#[test]
fn quantized_tensors_keep_their_scale_under_another_name_or_are_refused() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(
        fixtures().join("dtypes/quantized.pt"),
        OpenOptions::default(),
    )
    .unwrap();
    let quantizer = source.quantizer("m.tensor").unwrap().unwrap();
    let mapped =
        |text: &str| Mapped::new(&*source, &Map::parse(text, &Values::new()).unwrap()).unwrap();
    let to = parent.path().join("renamed.safetensors");
    convert(
        &mapped("m.tensor -> x"),
        &to,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    let written = open(&to, OpenOptions::default()).unwrap();
    assert_eq!(written.read_value("x.quantizer").unwrap(), quantizer);
    // A transposed tensor may need other scales, so the conversion is refused.
    let to = parent.path().join("changed.safetensors");
    let changed = mapped("m.tensor -> x | transpose");
    let error = convert(
        &changed,
        &to,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap_err();
    assert!(
        with_causes(&error).contains("`x`") && with_causes(&error).contains("scale"),
        "{error}"
    );
    assert!(!to.exists());
}

/// Makes a zstd stream in which these bytes are stored as they are.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut out = b"\x28\xb5\x2f\xfd\x00\x58".to_vec();
    let blocks: Vec<&[u8]> = bytes.chunks(64 << 10).collect();
    for (index, block) in blocks.iter().enumerate() {
        let header = (block.len() as u32) << 3 | u32::from(index + 1 == blocks.len());
        out.extend_from_slice(&header.to_le_bytes()[..3]);
        out.extend_from_slice(block);
    }
    out
}

#[test]
fn quantized_tensors_keep_their_scale_when_they_are_stored_with_zstd() {
    let parent = tempfile::tempdir().unwrap();
    let plain = fixtures().join("dtypes/quantized");
    let mut metadata = decode(&std::fs::read(plain.join(METADATA_FILE)).unwrap()).unwrap();
    let mut file = Vec::new();
    for entry in metadata.entries.values_mut() {
        let Entry::Tensor(tensor) = entry else {
            panic!("a value")
        };
        for stored in tensor
            .chunks
            .iter_mut()
            .filter_map(|chunk| chunk.stored.as_mut())
        {
            let bytes = std::fs::read(plain.join(&stored.relative_path)).unwrap();
            let item = zstd(&bytes[stored.offset as usize..][..stored.length as usize]);
            *stored = StorageInfo {
                relative_path: "__0_0.distcp".to_owned(),
                offset: file.len() as u64,
                length: item.len() as u64,
                transforms: vec!["stream.zstd/1".to_owned()],
            };
            file.extend(item);
        }
    }
    std::fs::write(parent.path().join(METADATA_FILE), encode(&metadata)).unwrap();
    std::fs::write(parent.path().join("__0_0.distcp"), file).unwrap();
    let (plain, source) = (
        open(plain, OpenOptions::default()).unwrap(),
        open(parent.path(), OpenOptions::default()).unwrap(),
    );
    assert_eq!(tensors(&*source), tensors(&*plain));
    assert_eq!(
        source.quantizer("m.tensor").unwrap(),
        plain.quantizer("m.tensor").unwrap()
    );
}

#[test]
fn chunks_of_a_quantized_tensor_must_have_one_scale() {
    let plain = fixtures().join("dtypes/quantized");
    let metadata = decode(&std::fs::read(plain.join(METADATA_FILE)).unwrap()).unwrap();
    let Some(Entry::Tensor(tensor)) = metadata.entries.get("m.tensor") else {
        panic!("no tensor")
    };
    let stored = tensor.chunks[0].stored.clone().unwrap();
    let file = std::fs::read(plain.join(&stored.relative_path)).unwrap();
    let item = &file[stored.offset as usize..][..stored.length as usize];
    let mut other = item.to_vec();
    let at = item
        .windows(8)
        .position(|bytes| bytes == 0.1f64.to_be_bytes())
        .unwrap();
    other[at..at + 8].copy_from_slice(&0.2f64.to_be_bytes());
    clear_checksums(&mut other);
    for (second, is_same) in [(item, true), (&other, false)] {
        // Two chunks of three rows, each in a file of its own.
        let parent = tempfile::tempdir().unwrap();
        let mut tensor = tensor.clone();
        tensor.shape[0] *= 2;
        tensor.chunks.push(tensor.chunks[0].clone());
        tensor.chunks[1].bounds.offsets[0] = 3;
        for (number, bytes) in [item, second].into_iter().enumerate() {
            let name = format!("__{number}_0.distcp");
            std::fs::write(parent.path().join(&name), bytes).unwrap();
            let place = StorageInfo {
                relative_path: name,
                offset: 0,
                ..stored.clone()
            };
            tensor.chunks[number].stored = Some(place);
        }
        let mut metadata = metadata.clone();
        metadata.entries = [("m.tensor".to_owned(), Entry::Tensor(tensor))]
            .into_iter()
            .collect();
        std::fs::write(parent.path().join(METADATA_FILE), encode(&metadata)).unwrap();
        let source = open(parent.path(), OpenOptions::default()).unwrap();
        let to = parent.path().join("to.safetensors");
        let converted = convert(
            &*source,
            &to,
            OutputFormat::SafetensorsFile,
            ConvertOptions::default(),
        );
        match converted {
            Ok(done) => assert!(is_same && done.quantized == ["m.tensor"]),
            Err(FileError::Differing {
                fqn, first, second, ..
            }) => {
                assert_eq!(
                    (fqn, first, second),
                    (
                        "m.tensor".into(),
                        "__0_0.distcp".into(),
                        "__1_0.distcp".into()
                    )
                );
                assert!(!is_same);
            }
            Err(other) => panic!("{}", with_causes(&other)),
        }
    }
}
