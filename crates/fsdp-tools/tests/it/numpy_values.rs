//! Values of NumPy in pickles: they are read without running anything, and keep their types where
//! the format can.

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{decode_value, encode_value};
use fsdp_layout::{DType, PlainTensor, PlainValue, PythonType, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::foreign::{fixture, opened};

/// The files that hold the same values, written by NumPy 1 and 2 in two protocols.
const FILES: [&str; 3] = ["numpy_1.pt", "protocol_2.pt", "protocol_5.pt"];

fn numpy_values(name: &str) -> Box<dyn Checkpoint> {
    opened(&fixture("numpy_values").join(name))
}

/// Returns a checkpoint without the values that stay opaque.
fn without_opaque(source: &dyn Checkpoint) -> View<'_> {
    let keep = |fqn: &str| match fqn.starts_with("opaque.") {
        true => Rename::Drop,
        false => Rename::Keep,
    };
    View::new(source, keep, None).unwrap()
}

fn tensor_of(source: &dyn Checkpoint, fqn: &str) -> PlainTensor {
    let tensor = source.metadata().tensor(fqn).unwrap();
    let dtype = tensor.properties.dtype;
    let bounds = TensorBox::whole(&tensor.shape);
    let mut data = vec![0; bounds.numel() * dtype.size_in_bytes() as usize];
    source.read_box(fqn, &bounds, &mut data).unwrap();
    PlainTensor {
        dtype,
        shape: tensor.shape.clone(),
        data,
    }
}

#[test]
fn arrays_and_numbers_of_numpy_are_read_with_their_dtypes_in_any_order_of_bytes() {
    let tensors = numpy_values("tensors.pt");
    for name in FILES {
        let source = numpy_values(name);
        assert_eq!(tensors.metadata().entries.len(), 60);
        for fqn in tensors.metadata().entries.keys() {
            let python_type = match fqn.starts_with("arrays.") {
                true => PythonType::NumpyArray,
                false => PythonType::NumpyScalar,
            };
            let expected = PlainValue::Tensor(tensor_of(&*tensors, fqn));
            assert_eq!(
                source.read_value(fqn).unwrap(),
                PlainValue::typed(python_type, expected),
                "{name}: {fqn}"
            );
        }
        assert_eq!(
            source.read_value("dtype").unwrap(),
            PlainValue::typed(PythonType::NumpyDType, ">f4")
        );
        let PlainValue::Tuple(rng) = source.read_value("rng").unwrap() else {
            panic!("no tuple")
        };
        assert_eq!(rng[0], "MT19937".into());
        let PlainValue::Typed(PythonType::NumpyArray, state) = &rng[1] else {
            panic!("{:?}", rng[1])
        };
        let PlainValue::Tensor(state) = &**state else {
            panic!("{state:?}")
        };
        assert_eq!((state.dtype, &state.shape[..]), (DType::U32, &[624][..]));
    }
}

#[test]
fn what_numpy_has_that_is_no_number_stays_opaque() {
    for name in FILES {
        let source = numpy_values(name);
        let opaque = |fqn: &str| source.opaque_type(fqn).unwrap().is_some();
        let keys = source.metadata().entries.keys();
        let found: Vec<&String> = keys.filter(|fqn| opaque(fqn)).collect();
        let kinds = ["matrix", "objects", "structures", "texts", "times"];
        let mut found: Vec<&str> = found
            .iter()
            .filter_map(|fqn| fqn.strip_prefix("opaque."))
            .collect();
        found.sort_unstable();
        assert_eq!(found, kinds, "{name}");
    }
}

#[test]
fn values_of_numpy_are_the_same_in_formats_that_keep_types() {
    let parent = tempfile::tempdir().unwrap();
    let source = numpy_values("protocol_2.pt");
    let source = without_opaque(&*source);
    for (number, target) in [
        OutputFormat::Dcp { ranks: 3 },
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 200,
        },
        OutputFormat::SafetensorsShards { ranks: 2 },
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(number.to_string());
        let done = convert(&source, &to, target, ConvertOptions::default()).unwrap();
        assert!(
            !done.containers.iter().any(|line| line.contains("NumPy")),
            "{:?}",
            done.containers
        );
        let written = opened(&to);
        for (fqn, _) in source.metadata().values() {
            assert_eq!(
                written.read_value(fqn).unwrap(),
                source.read_value(fqn).unwrap(),
                "{target:?}: {fqn}"
            );
        }
        let report = verify(&*written, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{:?}", report.problems);
    }
}

#[test]
fn a_file_of_torch_gets_tensors_and_numbers_for_numpys_and_says_so() {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("to.pt");
    let source = numpy_values("protocol_5.pt");
    let source = without_opaque(&*source);
    let done = convert(&source, &to, OutputFormat::Torch, ConvertOptions::default()).unwrap();
    let mut changes = done.changes.iter();
    let told = changes.find(|change| change.what.contains("of NumPy became"));
    assert_eq!(
        told.expect("the conversion tells it").names.len(),
        source.metadata().values().count()
    );
    let written = opened(&to);
    let tensors = numpy_values("tensors.pt");
    for fqn in tensors.metadata().entries.keys() {
        if fqn.starts_with("arrays.") {
            let written = tensor_of(&*written, fqn);
            assert_eq!(written, tensor_of(&*tensors, fqn), "{fqn}");
        }
    }
    assert_eq!(
        written.read_value("mixed").unwrap(),
        PlainValue::Tuple(vec![
            1.5.into(),
            PlainValue::List(vec![PlainValue::Int(-3), "text".into()])
        ])
    );
}

#[test]
fn values_of_numpy_are_written_as_numpy_pickles_them() {
    for name in FILES {
        let source = numpy_values(name);
        let source = without_opaque(&*source);
        for (fqn, _) in source.metadata().values() {
            let value = source.read_value(fqn).unwrap();
            assert_eq!(decode_value(&encode_value(&value).unwrap()).unwrap(), value);
        }
    }
}

/// Nothing in a dict with such keys has a flat key, so all of it is one value.
#[test]
fn a_dict_with_numbers_of_numpy_as_keys_is_one_value() {
    let parent = tempfile::tempdir().unwrap();
    let source = opened(&fixture("numpy_key.pt"));
    let PlainValue::Dict(items) = source.read_value("by_class").unwrap() else {
        panic!("no dict")
    };
    assert!(matches!(
        items[0].0,
        PlainValue::Typed(PythonType::NumpyScalar, _)
    ));
    let to = parent.path().join("to.pt");
    convert(
        &*source,
        &to,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    assert_eq!(
        opened(&to).read_value("by_class.3").unwrap(),
        PlainValue::Float(0.5)
    );
}

/// The state of random numbers that trainers save goes wherever their folder does.
#[test]
fn the_random_numbers_of_a_trainers_folder_are_read_and_kept() {
    let parent = tempfile::tempdir().unwrap();
    for name in [
        "folders/trainer",
        "folders/accelerate",
        "folders/accelerate_full",
    ] {
        let folder = opened(&fixture(name));
        let to = parent.path().join(name.replace('/', "_"));
        let done = convert(
            &*folder,
            &to,
            OutputFormat::Dcp { ranks: 2 },
            ConvertOptions::default(),
        );
        let done = done.unwrap();
        assert_eq!(done.dropped, []);
        let written = opened(&to);
        let mut random_count = 0;
        for (fqn, _) in folder.metadata().values() {
            if fqn.starts_with("rng_state") || fqn.starts_with("random_states") {
                random_count += 1;
                assert_eq!(
                    written.read_value(fqn).unwrap(),
                    folder.read_value(fqn).unwrap(),
                    "{fqn}"
                );
            }
        }
        assert!(random_count > 1, "{name}");
    }
}

/// An error tells of what it is about.
#[test]
fn a_numpy_value_with_a_dtype_that_numpy_lacks_cannot_be_written() {
    let tensor = PlainTensor {
        dtype: DType::BF16,
        shape: Vec::new(),
        data: vec![0; 2],
    };
    let value = PlainValue::typed(PythonType::NumpyScalar, PlainValue::Tensor(tensor));
    let error = encode_value(&value).unwrap_err().to_string();
    assert!(error.contains("bfloat16"), "{error}");
    let text = PlainValue::typed(PythonType::NumpyDType, "<f3");
    let error = encode_value(&text).unwrap_err().to_string();
    assert!(error.contains("`<f3`"), "{error}");
}

#[test]
fn arrays_in_a_directory_of_torch_checkpointing_are_read_and_verified_as_what_they_became() {
    let directory = tempfile::tempdir().unwrap();
    for name in FILES {
        let source = numpy_values(name);
        let source = without_opaque(&*source);
        let to = directory.path().join(name);
        let target = OutputFormat::TorchCheckpointing { ranks: 2 };
        convert(&source, &to, target, ConvertOptions::default()).unwrap();
        let written = opened(&to);
        let report = verify(&*written, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.problems.is_empty(), "{name}: {:?}", report.problems);
        let again = directory.path().join(format!("{name} again"));
        let target = OutputFormat::Dcp { ranks: 1 };
        convert(&*written, &again, target, ConvertOptions::default()).unwrap();
    }
}
