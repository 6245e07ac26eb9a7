//! Param groups, state entries and refusals.

use super::*;

fn find<'a>(group: &'a [(String, PlainValue)], key: &str) -> &'a PlainValue {
    &group.iter().find(|(name, _)| name == key).unwrap().1
}

/// Reads a value that the function `plain` of `algorithm.py` has written: an object whose only key
/// is the value's type in Python.
fn typed(value: &Value) -> PlainValue {
    let (kind, value) = value.as_object().unwrap().iter().next().unwrap();
    match kind.as_str() {
        "NoneType" => PlainValue::None,
        "bool" => PlainValue::Bool(value.as_bool().unwrap()),
        "int" => PlainValue::Int(value.as_i64().unwrap()),
        "float" => PlainValue::Float(value.as_f64().unwrap()),
        "str" => PlainValue::from(value.as_str().unwrap().to_owned()),
        "tuple" => PlainValue::Tuple(value.as_array().unwrap().iter().map(typed).collect()),
        kind => panic!("{kind}"),
    }
}

#[test]
fn groups_have_the_keys_order_and_types_of_torch_and_can_be_read_again() {
    for case in goldens()["groups"].as_array().unwrap() {
        let class = case["optimizer"].as_str().unwrap();
        let algorithm = with_options(class, &case["options"]);
        assert_eq!(algorithm.name(), class);
        let golden: Vec<(String, PlainValue)> = case["group"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| (entry[0].as_str().unwrap().to_owned(), typed(&entry[1])))
            .collect();
        assert_eq!(algorithm.to_group(), golden, "{class} {}", case["options"]);
        let read = default(class).with_group(&golden).unwrap();
        assert_eq!(
            read,
            ReadGroup {
                algorithm,
                unknown: vec![],
                missing: vec![]
            }
        );
    }
}

#[test]
fn unknown_keys_are_kept_and_missing_ones_named() {
    let sgd = Algorithm::Sgd(SgdOptions {
        momentum: 0.5,
        ..SgdOptions::default()
    });
    let initial_lr = ("initial_lr".to_owned(), PlainValue::Float(0.3));
    let group = [
        ("lr".to_owned(), PlainValue::Int(1)),
        initial_lr.clone(),
        ("maximize".to_owned(), true.into()),
    ];
    let read = sgd.with_group(&group).unwrap();
    // torch adds `fused` to groups that lack it.
    let switches = Switches {
        fused: Some(false),
        ..Switches::default()
    };
    let expected = SgdOptions {
        lr: 1.0,
        momentum: 0.5,
        maximize: true,
        switches,
        ..SgdOptions::default()
    };
    assert_eq!(read.algorithm, Algorithm::Sgd(expected));
    assert_eq!(read.unknown, [initial_lr]);
    assert_eq!(read.missing, ["momentum", "dampening", "weight_decay"]);
}

#[test]
fn decoupled_weight_decay_makes_adamw_and_adamw_keeps_it() {
    let group = |decoupled: bool| {
        [(
            "decoupled_weight_decay".to_owned(),
            PlainValue::Bool(decoupled),
        )]
    };
    let read = |class: &str, decoupled| {
        default(class)
            .with_group(&group(decoupled))
            .unwrap()
            .algorithm
    };
    assert_eq!(read("Adam", true), Algorithm::AdamW(AdamOptions::default()));
    assert_eq!(read("Adam", false), default("Adam"));
    assert_eq!(read("AdamW", false), default("AdamW"));
    assert_eq!(
        find(&read("AdamW", false).to_group(), "decoupled_weight_decay"),
        &PlainValue::Bool(true)
    );
}

#[test]
fn values_of_a_wrong_type_are_refused_by_key() {
    let pair = |items: &[f64]| PlainValue::Tuple(items.iter().map(|&item| item.into()).collect());
    for (class, key, value) in [
        ("SGD", "lr", "0.1".into()),
        ("SGD", "momentum", PlainValue::Bool(true)),
        ("SGD", "nesterov", PlainValue::Int(1)),
        ("Adam", "betas", PlainValue::Float(0.9)),
        ("AdamW", "betas", pair(&[0.9])),
        ("AdamW", "betas", pair(&[0.9, 0.9, 0.9])),
        ("Adam", "fused", PlainValue::Int(0)),
        ("Adagrad", "eps", PlainValue::None),
    ] {
        let found = value.type_name();
        let error = default(class)
            .with_group(&[(key.to_owned(), value)])
            .unwrap_err();
        let AlgorithmError::WrongType {
            algorithm,
            key: named,
            found: type_name,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((algorithm, named, type_name), (class, key, found));
    }
}

#[test]
fn values_out_of_range_are_refused_by_key() {
    for (class, key, value) in [
        ("SGD", "lr", -1.0),
        ("SGD", "momentum", -0.1),
        ("SGD", "weight_decay", f64::NAN),
        ("SGD", "dampening", f64::INFINITY),
        ("Adam", "lr", f64::NAN),
        ("AdamW", "eps", -1e-9),
        ("Adam", "weight_decay", -0.1),
        ("Adagrad", "lr", f64::INFINITY),
        ("Adagrad", "lr_decay", -1.0),
        ("Adagrad", "initial_accumulator_value", -1.0),
    ] {
        let error = default(class)
            .with_group(&[(key.to_owned(), value.into())])
            .unwrap_err();
        let AlgorithmError::OutOfRange {
            algorithm,
            key: named,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((algorithm, named), (class, key));
    }
    for (betas, key) in [
        ((1.0, 0.5), "betas[0]"),
        ((0.5, -0.1), "betas[1]"),
        ((f64::NAN, 0.5), "betas[0]"),
    ] {
        let error = Algorithm::AdamW(AdamOptions {
            betas,
            ..AdamOptions::adamw()
        })
        .validate()
        .unwrap_err();
        assert!(
            matches!(error, AlgorithmError::OutOfRange { key: named, .. } if named == key),
            "{error}"
        );
    }
}

#[test]
fn nesterov_needs_momentum_without_dampening() {
    let sgd = |momentum, dampening| {
        Algorithm::Sgd(SgdOptions {
            momentum,
            dampening,
            nesterov: true,
            ..SgdOptions::default()
        })
        .validate()
    };
    assert_eq!(sgd(0.9, 0.0), Ok(()));
    assert_eq!(
        sgd(0.0, 0.0),
        Err(AlgorithmError::Nesterov {
            momentum: 0.0,
            dampening: 0.0
        })
    );
    assert_eq!(
        sgd(0.9, 0.1),
        Err(AlgorithmError::Nesterov {
            momentum: 0.9,
            dampening: 0.1
        })
    );
}

#[test]
fn set_lr_refuses_a_negative_rate_and_keeps_the_last() {
    for class in ["SGD", "Adam", "AdamW", "Adagrad"] {
        let mut algorithm = default(class);
        algorithm.set_lr(0.25).unwrap();
        algorithm.set_lr(-1.0).unwrap_err();
        assert_eq!(algorithm.lr(), 0.25);
        assert_eq!(find(&algorithm.to_group(), "lr"), &PlainValue::Float(0.25));
    }
}

#[test]
fn state_entries_have_the_names_and_order_of_torch() {
    let names = |algorithm: Algorithm| {
        algorithm
            .state_entries()
            .map(|entry| entry.name)
            .collect::<Vec<_>>()
    };
    assert_eq!(names(default("SGD")), [""; 0]);
    assert_eq!(
        names(Algorithm::Sgd(SgdOptions {
            momentum: 0.1,
            ..SgdOptions::default()
        })),
        ["momentum_buffer"]
    );
    assert_eq!(names(default("AdamW")), ["step", "exp_avg", "exp_avg_sq"]);
    let amsgrad = AdamOptions {
        amsgrad: true,
        ..AdamOptions::default()
    };
    assert_eq!(
        names(Algorithm::Adam(amsgrad)),
        ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    );
    let adagrad = Algorithm::Adagrad(AdagradOptions {
        initial_accumulator_value: 0.5,
        ..AdagradOptions::default()
    });
    let [step, sum] = adagrad.state_entries().collect::<Vec<_>>()[..] else {
        panic!()
    };
    assert_eq!(
        (step.name, step.kind, step.dtype(DType::BF16)),
        ("step", StateKind::Scalar, DType::F32)
    );
    assert_eq!(
        (sum.name, sum.kind, sum.dtype(DType::BF16)),
        ("sum", StateKind::LikeParameter, DType::BF16)
    );
    assert_eq!(
        (step.initial, sum.initial),
        (Initial::Value(0.0), Initial::Value(0.5))
    );
    assert!(
        adagrad.state_exists_from_construction()
            && !default("Adam").state_exists_from_construction()
    );
}

#[test]
fn dtypes_that_cannot_work_are_refused() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        assert_eq!(default("AdamW").check_dtype(dtype), Ok(()));
        assert_eq!(default("SGD").check_dtype(dtype), Ok(()));
    }
    assert_eq!(default("SGD").check_dtype(DType::F16), Ok(()));
    let vanishing = AlgorithmError::VanishingEps {
        algorithm: "Adam",
        eps: 1e-8,
        dtype: DType::F16,
    };
    assert_eq!(default("Adam").check_dtype(DType::F16), Err(vanishing));
    for eps in [0.0, 1e-4] {
        assert_eq!(
            Algorithm::Adam(AdamOptions {
                eps,
                ..AdamOptions::default()
            })
            .check_dtype(DType::F16),
            Ok(())
        );
    }
    let unsupported = AlgorithmError::UnsupportedDType {
        algorithm: "SGD",
        dtype: DType::I64,
    };
    assert_eq!(default("SGD").check_dtype(DType::I64), Err(unsupported));
}

#[test]
fn slices_that_do_not_fit_change_nothing() {
    let adam = default("Adam");
    let mut param = [1.0f32, 2.0];
    let (mut first, mut second, mut third) = ([0.0; 2], [0.0; 2], [0.0; 3]);
    let error = adam
        .update(
            1.0,
            true,
            &mut param,
            &[1.0],
            &mut [&mut first, &mut second],
        )
        .unwrap_err();
    assert_eq!(
        error,
        AlgorithmError::Length {
            name: "grad",
            expected: 2,
            found: 1
        }
    );
    let error = adam
        .update(
            1.0,
            true,
            &mut param,
            &[1.0; 2],
            &mut [&mut first, &mut third],
        )
        .unwrap_err();
    assert_eq!(
        error,
        AlgorithmError::Length {
            name: "exp_avg_sq",
            expected: 2,
            found: 3
        }
    );
    let error = adam
        .update(1.0, true, &mut param, &[1.0; 2], &mut [&mut first])
        .unwrap_err();
    assert_eq!(
        error,
        AlgorithmError::StateCount {
            algorithm: "Adam",
            expected: 2,
            found: 1
        }
    );
    for step in [0.0, f32::NAN, f32::INFINITY] {
        let error = adam
            .update(
                step,
                true,
                &mut param,
                &[1.0; 2],
                &mut [&mut first, &mut second],
            )
            .unwrap_err();
        assert!(
            matches!(
                error,
                AlgorithmError::Step {
                    algorithm: "Adam",
                    ..
                }
            ),
            "{error}"
        );
    }
    let error = default("SGD")
        .update(1.0, true, &mut param, &[1.0; 2], &mut [&mut first])
        .unwrap_err();
    assert_eq!(
        error,
        AlgorithmError::StateCount {
            algorithm: "SGD",
            expected: 0,
            found: 1
        }
    );
    assert_eq!((param, first, second), ([1.0, 2.0], [0.0; 2], [0.0; 2]));
}

#[test]
fn nothing_to_update_is_no_error() {
    default("AdamW")
        .update::<f32>(1.0, true, &mut [], &[], &mut [&mut [], &mut []])
        .unwrap();
}

#[test]
fn amsgrad_does_not_lose_a_nan() {
    let adam = Algorithm::Adam(AdamOptions {
        amsgrad: true,
        ..AdamOptions::default()
    });
    let (mut param, mut first, mut second, mut max) =
        ([1.0f64; 2], [0.0; 2], [0.0; 2], [f64::NAN, 0.0]);
    adam.update(
        1.0,
        true,
        &mut param,
        &[1.0, f64::NAN],
        &mut [&mut first, &mut second, &mut max],
    )
    .unwrap();
    assert!(max[0].is_nan() && max[1].is_nan());
}
