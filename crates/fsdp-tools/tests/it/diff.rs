//! Comparisons within a tolerance, and of what is no plain tensor.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::digest::digest;
use fsdp_formats::internals::encode_value;
use fsdp_layout::{DType, PlainTensor, PlainValue};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, Difference, Tolerance, diff, diff_digests};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::foreign::{fixture, opened};

fn file(path: &Path, number: f32) -> Box<dyn Checkpoint> {
    let tensor = PlainTensor {
        dtype: DType::F32,
        shape: vec![1],
        data: number.to_le_bytes().to_vec(),
    };
    let state = PlainValue::Dict(vec![("x".into(), PlainValue::Tensor(tensor))]);
    std::fs::write(path, encode_value(&state).unwrap()).unwrap();
    opened(path)
}

#[test]
fn nothing_is_near_an_infinity_but_itself() {
    let parent = tempfile::tempdir().unwrap();
    let numbers = [1.0, 1.25, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let files: Vec<_> = numbers
        .iter()
        .enumerate()
        .map(|(at, &number)| file(&parent.path().join(at.to_string()), number))
        .collect();
    for tolerance in [
        Tolerance {
            absolute: 0.5,
            relative: 0.0,
        },
        Tolerance {
            absolute: 0.0,
            relative: 0.5,
        },
    ] {
        for (a, first) in numbers.iter().zip(&files) {
            for (b, second) in numbers.iter().zip(&files) {
                let differences = differences(&**first, &**second, tolerance).len();
                let is_near = a == b || a.is_nan() && b.is_nan() || a.is_finite() && b.is_finite();
                assert_eq!(
                    differences == 0,
                    is_near,
                    "{a} and {b} within {tolerance:?}"
                );
            }
        }
    }
}

/// Returns the differences of two checkpoints, with their keys.
fn differences(
    first: &dyn Checkpoint,
    second: &dyn Checkpoint,
    tolerance: Tolerance,
) -> Vec<(String, Difference)> {
    let options = DiffOptions {
        tolerance,
        threads: None,
    };
    let mut found = Vec::new();
    diff(first, second, options, &mut |key, difference| {
        found.push((key.to_owned(), difference))
    })
    .unwrap();
    found
}

#[test]
fn the_tolerance_holds_for_values_that_one_checkpoint_has_in_parts() {
    let parent = tempfile::tempdir().unwrap();
    let group =
        |lr: f64| PlainValue::Dict(vec![("lr".into(), lr.into()), ("name".into(), "a".into())]);
    let write = |name: &str, state: PlainValue| {
        let path = parent.path().join(name);
        std::fs::write(&path, encode_value(&state).unwrap()).unwrap();
        opened(&path)
    };
    // A tuple that holds no tensors is one value; the items of a list of dicts have keys of their
    // own.
    let whole = write(
        "whole",
        PlainValue::Dict(vec![("groups".into(), PlainValue::Tuple(vec![group(0.5)]))]),
    );
    let parts = write(
        "parts",
        PlainValue::Dict(vec![(
            "groups".into(),
            PlainValue::List(vec![group(0.5625)]),
        )]),
    );
    let values = |found: Vec<(String, Difference)>| {
        found
            .into_iter()
            .filter(|(_, difference)| matches!(difference, Difference::Value { .. }))
            .count()
    };
    let near = Tolerance {
        absolute: 0.125,
        relative: 0.0,
    };
    for (first, second) in [(&whole, &parts), (&parts, &whole)] {
        assert_eq!(
            values(differences(&**first, &**second, Tolerance::default())),
            1
        );
        assert_eq!(values(differences(&**first, &**second, near)), 0);
    }
}

/// Writes a file of one tensor `x`, and of a tuple `t` that holds it.
fn with_tensor(path: &Path, dtype: DType, data: Vec<u8>) -> Box<dyn Checkpoint> {
    let shape = vec![data.len() / dtype.size_in_bytes() as usize];
    let tensor = PlainValue::Tensor(PlainTensor { dtype, shape, data });
    let tuple = PlainValue::Tuple(vec![tensor.clone()]);
    let state = PlainValue::Dict(vec![("x".into(), tensor), ("t".into(), tuple)]);
    std::fs::write(path, encode_value(&state).unwrap()).unwrap();
    opened(path)
}

#[test]
fn the_tolerance_holds_for_complex_numbers_and_for_tensors_inside_values() {
    let parent = tempfile::tempdir().unwrap();
    let number = |name: &str, real: f32, imaginary: f32| {
        let data = [real.to_le_bytes(), imaginary.to_le_bytes()].concat();
        with_tensor(&parent.path().join(name), DType::Complex64, data)
    };
    let first = number("first", 1.0, 1.0);
    // 5 apart: 3 in one direction, and 4 in the other.
    let second = number("second", 4.0, 5.0);
    let near = |absolute: f64| {
        differences(
            &*first,
            &*second,
            Tolerance {
                absolute,
                relative: 0.0,
            },
        )
    };
    assert_eq!(near(5.0), []);
    let found = near(4.5);
    assert_eq!(
        found[0],
        (
            "x".to_owned(),
            Difference::Elements {
                count: 1,
                first: 0,
                max_abs: Some(5.0)
            }
        )
    );
    assert!(found.len() == 2 && found[1].0 == "t", "{found:?}");
    let lost = number("lost", f32::NAN, 1.0);
    for (a, b) in [(&first, &lost), (&lost, &first)] {
        assert_eq!(
            differences(
                &**a,
                &**b,
                Tolerance {
                    absolute: 9.0,
                    relative: 0.0
                }
            )
            .len(),
            2
        );
    }
    assert_eq!(
        differences(
            &*lost,
            &*number("again", -f32::NAN, 1.5),
            Tolerance {
                absolute: 0.5,
                relative: 0.0
            }
        ),
        []
    );
}

#[test]
fn large_integers_are_as_far_apart_as_they_are() {
    let parent = tempfile::tempdir().unwrap();
    let number = |number: i64| {
        with_tensor(
            &parent.path().join(number.to_string()),
            DType::I64,
            number.to_le_bytes().to_vec(),
        )
    };
    // The first two become the same float of 64 bits.
    let (first, second, least) = (number((1 << 62) + 1), number(1 << 62), number(i64::MIN));
    let distance = |a: &dyn Checkpoint, b: &dyn Checkpoint, absolute: f64| match differences(
        a,
        b,
        Tolerance {
            absolute,
            relative: 0.0,
        },
    )
    .into_iter()
    .next()
    {
        Some((_, Difference::Elements { max_abs, .. })) => max_abs,
        _ => None,
    };
    assert_eq!(distance(&*first, &*second, 0.0), Some(1.0));
    assert_eq!(distance(&*first, &*second, 0.5), Some(1.0));
    assert_eq!(distance(&*first, &*second, 1.0), None);
    assert_eq!(distance(&*second, &*least, 0.0), Some(1.5 * 2f64.powi(63)));
}

#[test]
fn what_differs_in_one_thing_other_than_elements_is_found() {
    let parent = tempfile::tempdir().unwrap();
    let names = [
        "scale",
        "zero_point",
        "channel_scales",
        "packed",
        "conjugated",
        "negated",
        "storage",
        "type",
    ];
    for name in names {
        let [first, second] = [1, 2].map(|number| fixture(&format!("twins/{name}_{number}.pt")));
        let [a, b] = [&first, &second].map(|path| opened(path));
        assert!(
            differences(&*a, &*a, Tolerance::default()).is_empty(),
            "{name}"
        );
        let found = differences(&*a, &*b, Tolerance::default());
        assert!(
            matches!(found[..], [(ref key, Difference::Value { .. })] if key == "x"),
            "{name}: {found:?}"
        );
        let [digest_a, digest_b] = [&a, &b].map(|of| digest(&**of, 1).unwrap());
        assert_ne!(digest_a.root(), digest_b.root(), "{name}");
        // The recorded digests tell it too, and a deep verification finds them in order.
        let sealed = [&first, &second].map(|path| {
            let copy = parent.path().join(path.file_name().unwrap());
            std::fs::copy(path, &copy).unwrap();
            add_integrity(copy.as_path(), None).unwrap();
            let sealed = opened(&copy);
            assert!(
                verify(&*sealed, Level::Deep, VerifyOptions::default())
                    .unwrap()
                    .is_ok(),
                "{name}"
            );
            sealed
        });
        let mut keys = Vec::new();
        assert!(
            diff_digests(&*sealed[0], &*sealed[1], &mut |key, _| keys
                .push(key.to_owned()))
            .unwrap()
        );
        assert_eq!(keys, ["x"], "{name}");
    }
}

#[test]
fn a_quantized_tensor_inside_a_value_is_not_written_without_its_scale() {
    let parent = tempfile::tempdir().unwrap();
    let source = opened(&fixture("twins/packed_1.pt"));
    for (number, target) in [
        OutputFormat::SafetensorsFile,
        OutputFormat::Torch,
        OutputFormat::Dcp { ranks: 1 },
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(number.to_string());
        let refused = convert(&*source, &to, target, ConvertOptions::default());
        let Err(FileError::Opaque { values }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            values,
            [(
                "x".to_owned(),
                "torch.Tensor (quantized, inside another value)".to_owned()
            )]
        );
    }
}

#[test]
fn an_empty_dict_at_the_end_of_a_list_is_a_difference() {
    let parent = tempfile::tempdir().unwrap();
    let write = |name: &str, items: Vec<PlainValue>| {
        let path = parent.path().join(name);
        let state = PlainValue::Dict(vec![("x".into(), PlainValue::List(items))]);
        std::fs::write(&path, encode_value(&state).unwrap()).unwrap();
        opened(&path)
    };
    // The first is one value, the second a list whose items have keys.
    let first = write("first", vec![1i64.into()]);
    let second = write("second", vec![1i64.into(), PlainValue::Dict(Vec::new())]);
    for (a, b) in [(&first, &second), (&second, &first)] {
        let found = differences(&**a, &**b, Tolerance::default());
        assert!(
            matches!(found[..], [(ref key, Difference::Container { .. })] if key == "x"),
            "{found:?}"
        );
    }
}
