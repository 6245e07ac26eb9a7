//! Comparisons within a tolerance.

use std::path::Path;

use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_dcp::diff::{Tolerance, diff};
use fsdp_dcp::internals::encode_value;
use fsdp_layout::{DType, PlainTensor, PlainValue};

use crate::foreign::opened;

fn file(path: &Path, number: f32) -> Box<dyn Checkpoint> {
    let tensor = PlainTensor { dtype: DType::F32, shape: vec![1], data: number.to_le_bytes().to_vec() };
    let state = PlainValue::Dict(vec![("x".into(), PlainValue::Tensor(tensor))]);
    std::fs::write(path, encode_value(&state).unwrap()).unwrap();
    opened(path)
}

#[test]
fn nothing_is_near_an_infinity_but_itself() {
    let parent = tempfile::tempdir().unwrap();
    let numbers = [1.0, 1.25, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let files: Vec<_> =
        numbers.iter().enumerate().map(|(at, &number)| file(&parent.path().join(at.to_string()), number)).collect();
    for tolerance in [Tolerance { absolute: 0.5, relative: 0.0 }, Tolerance { absolute: 0.0, relative: 0.5 }] {
        for (a, first) in numbers.iter().zip(&files) {
            for (b, second) in numbers.iter().zip(&files) {
                let mut differences = 0;
                diff(&**first, &**second, tolerance, &mut |_, _| differences += 1).unwrap();
                let is_near = a == b || a.is_nan() && b.is_nan() || a.is_finite() && b.is_finite();
                assert_eq!(differences == 0, is_near, "{a} and {b} within {tolerance:?}");
            }
        }
    }
}
