//! Padding against what torch makes of the same tensors; `data/pad.py` writes the expectations.

use candle_core::{DType, Device, Tensor, Var};
use fsdp_flat::pad::{PadError, PadMode, pad};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Case {
    dtype: String,
    shape: Vec<usize>,
    padding: Vec<isize>,
    mode: String,
    #[serde(default)]
    refused: bool,
    #[serde(default)]
    padded_shape: Vec<usize>,
    #[serde(default)]
    padded: Vec<f64>,
}

fn mode(name: &str) -> PadMode {
    match name {
        "constant" => PadMode::Constant(7.0),
        "reflect" => PadMode::Reflect,
        "replicate" => PadMode::Replicate,
        "circular" => PadMode::Circular,
        other => panic!("unknown mode {other}"),
    }
}

#[test]
fn every_mode_pads_and_crops_as_torch_does_and_refuses_what_torch_refuses() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("data/pad.json")).unwrap();
    let (mut padded, mut refused) = (0, 0);
    for case in cases {
        let (dtype, scale) = if case.dtype == "int64" {
            (DType::I64, 1.0)
        } else {
            (DType::F32, 0.5)
        };
        let numel: usize = case.shape.iter().product();
        let values: Vec<f64> = (0..numel).map(|i| (i as f64 - 3.0) * scale).collect();
        let tensor = Tensor::from_vec(values, case.shape.as_slice(), &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        match pad(&tensor, &case.padding, mode(&case.mode)) {
            Ok(result) => {
                assert!(!case.refused, "torch refuses {case:?}");
                assert_eq!(
                    (result.dims(), result.dtype()),
                    (case.padded_shape.as_slice(), dtype),
                    "{case:?}"
                );
                let values = result
                    .flatten_all()
                    .unwrap()
                    .to_dtype(DType::F64)
                    .unwrap()
                    .to_vec1::<f64>()
                    .unwrap();
                assert_eq!(values, case.padded, "{case:?}");
                padded += 1;
            }
            Err(error) => {
                assert!(case.refused, "torch pads {case:?}, but: {error}");
                refused += 1;
            }
        }
    }
    assert!(
        padded > 300 && refused > 200,
        "{padded} padded, {refused} refused"
    );
}

#[test]
fn every_dtype_that_candle_computes_with_is_padded() {
    for dtype in [
        DType::U8,
        DType::U32,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::F64,
    ] {
        let tensor = Tensor::new(&[[1f32, 2., 3.]], &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        for (mode, expected) in [
            (PadMode::Constant(7.0), [[7., 1., 2., 3., 7.]]),
            (PadMode::Reflect, [[2., 1., 2., 3., 2.]]),
            (PadMode::Replicate, [[1., 1., 2., 3., 3.]]),
            (PadMode::Circular, [[3., 1., 2., 3., 1.]]),
        ] {
            let padded = pad(&tensor, &[1, 1], mode).unwrap();
            assert_eq!(padded.dtype(), dtype);
            assert_eq!(
                padded
                    .to_dtype(DType::F32)
                    .unwrap()
                    .to_vec2::<f32>()
                    .unwrap(),
                expected,
                "{dtype:?} {mode:?}"
            );
        }
    }
}

#[test]
fn what_cannot_be_padded_is_told_apart() {
    let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let error = |padding: &[isize], mode| pad(&tensor, padding, mode).unwrap_err();
    assert!(matches!(
        error(&[1], PadMode::Reflect),
        PadError::Unpaired { given: 1 }
    ));
    assert!(matches!(
        error(&[0; 6], PadMode::Reflect),
        PadError::TooManyDims { pairs: 3, .. }
    ));
    assert!(matches!(
        error(&[0, 3], PadMode::Reflect),
        PadError::TooLarge {
            dim: 1,
            size: 3,
            largest: 2,
            ..
        }
    ));
    assert!(matches!(
        error(&[4, 0], PadMode::Circular),
        PadError::TooLarge {
            dim: 1,
            largest: 3,
            ..
        }
    ));
    assert!(matches!(
        error(&[-2, -2], PadMode::Constant(0.)),
        PadError::CropsTooMuch {
            dim: 1,
            size: 3,
            ..
        }
    ));
    assert!(matches!(
        error(&[0, 0, -1, -1], PadMode::Replicate),
        PadError::CropsTooMuch { dim: 0, .. }
    ));
    assert!(matches!(
        error(&[isize::MAX, 1], PadMode::Constant(0.)),
        PadError::TooLarge { .. }
    ));
    assert!(matches!(
        error(&[isize::MIN, isize::MIN], PadMode::Circular),
        PadError::TooLarge { .. }
    ));
    for mode in [PadMode::Replicate, PadMode::Constant(0.)] {
        let shape = |error| match error {
            PadError::OutOfMemory { shape } => shape,
            other => panic!("{other}"),
        };
        assert_eq!(shape(error(&[1 << 60, 0], mode)), [2, (1 << 60) + 3]);
        assert_eq!(
            shape(error(&[1 << 40, 0, 1 << 40, 0], mode)),
            [(1 << 40) + 2, (1 << 40) + 3]
        );
    }
    let empty = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
    assert!(matches!(
        pad(&empty, &[1, 0], PadMode::Replicate),
        Err(PadError::Empty { dim: 1, .. })
    ));
    assert_eq!(
        pad(&empty, &[1, 1], PadMode::Constant(2.))
            .unwrap()
            .to_vec2::<f32>()
            .unwrap(),
        [[2., 2.]; 2]
    );
}

#[test]
fn views_are_padded_and_gradients_flow_back() {
    let weight = Var::from_vec((0..6).map(|i| i as f32).collect(), (2, 3), &Device::Cpu).unwrap();
    let transposed = weight.t().unwrap();
    let padded = pad(&transposed, &[1, 1], PadMode::Circular).unwrap();
    assert_eq!(
        padded.to_vec2::<f32>().unwrap(),
        [[3., 0., 3., 0.], [4., 1., 4., 1.], [5., 2., 5., 2.]]
    );
    for (mode, each) in [(PadMode::Circular, 2.0), (PadMode::Constant(3.0), 1.0)] {
        let sum = pad(&transposed, &[1, 1], mode).unwrap().sum_all().unwrap();
        let grads = sum.backward().unwrap();
        assert_eq!(
            grads.get(&weight).unwrap().to_vec2::<f32>().unwrap(),
            [[each; 3]; 2],
            "{mode:?}"
        );
    }
}
