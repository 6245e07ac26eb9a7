//! Masks depend on the place of an element in the run, and on nothing else.

use candle_core::{DType, Device, Tensor, Var};

use crate::{DropoutMasks, dropout};

/// Returns the masks of some place in some step, with which the others are compared.
fn masks() -> DropoutMasks {
    masks_from(0)
}

/// Returns the masks of the same place for a part of the batch that begins at row `first_row`.
fn masks_from(first_row: u64) -> DropoutMasks {
    DropoutMasks::new(3, 41, first_row).at("layers.0")
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn dtypes_that_are_no_floats_are_refused_whatever_the_probability() {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let integers = ones(&[2]).to_dtype(dtype).unwrap();
        for p in [0.0, 0.5, 1.0] {
            let error = dropout(&integers, p, masks()).unwrap_err().to_string();
            assert!(
                error.contains("dropout") && error.contains(&format!("{dtype:?}")),
                "{p}: {error}"
            );
        }
    }
}

/// Returns the elements of a dropout of ones: 0 where one was dropped.
fn dropped_ones(masks: DropoutMasks, p: f64, shape: &[usize]) -> Vec<f32> {
    dropout(&ones(shape), p, masks)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

#[test]
fn a_batch_in_parts_is_masked_as_a_whole() {
    let whole = dropped_ones(masks(), 0.3, &[12, 5, 7]);
    for part in [1, 2, 3, 4, 6] {
        let mut parts = Vec::new();
        for row in (0..12).step_by(part) {
            parts.extend(dropped_ones(masks_from(row as u64), 0.3, &[part, 5, 7]));
        }
        assert_eq!(parts, whole, "parts of {part}");
    }
}

#[test]
fn steps_seeds_and_places_have_masks_of_their_own() {
    let all = [
        masks(),
        DropoutMasks::new(3, 42, 0).at("layers.0"),
        DropoutMasks::new(4, 41, 0).at("layers.0"),
        DropoutMasks::new(3, 41, 0).at("layers.1"),
        DropoutMasks::new(3, 41, 0),
        masks().at("drop"),
        masks_from(1),
    ];
    let found: Vec<Vec<f32>> = all
        .into_iter()
        .map(|masks| dropped_ones(masks, 0.5, &[64]))
        .collect();
    for (index, one) in found.iter().enumerate() {
        assert!(found[..index].iter().all(|other| other != one), "{index}");
    }
}

#[test]
fn as_many_are_dropped_as_asked_and_the_mean_stays() {
    for p in [0.1, 0.5, 0.9] {
        let values = dropped_ones(masks(), p, &[100, 1000]);
        let dropped = values.iter().filter(|value| **value == 0.0).count() as f64 / 1e5;
        // Five standard deviations of the share among 100,000.
        assert!(
            (dropped - p).abs() < 5.0 * (p * (1.0 - p) / 1e5).sqrt(),
            "{dropped} of {p}"
        );
        let scale = (1.0 / (1.0 - p)) as f32;
        assert!(values.iter().all(|value| *value == 0.0 || *value == scale));
        // Elements are dropped independently of their neighbours in the row and in the column.
        for distance in [1, 1000] {
            let pairs = values.iter().zip(&values[distance..]);
            let count = (values.len() - distance) as f64;
            let both = pairs.filter(|(a, b)| **a == 0.0 && **b == 0.0).count() as f64 / count;
            assert!((both - p * p).abs() < 0.01, "{both} at {distance}");
        }
    }
    assert_eq!(dropped_ones(masks(), 1.0, &[2, 2]), [0.0; 4]);
    assert_eq!(dropped_ones(masks(), 0.0, &[2, 2]), [1.0; 4]);
}

#[test]
fn the_gradient_passes_where_the_value_did() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let x = Var::from_tensor(&ones(&[6, 9]).to_dtype(dtype).unwrap()).unwrap();
        let y = dropout(x.as_tensor(), 0.5, masks()).unwrap();
        let weights = Tensor::arange(0f32, 54f32, &Device::Cpu)
            .unwrap()
            .reshape((6, 9))
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        let grads = (&y * &weights)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        let expected = (y.detach() * weights)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap();
        let found = grads.get(&x).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(
            found.to_vec2::<f32>().unwrap(),
            expected.to_vec2::<f32>().unwrap(),
            "{dtype:?}"
        );
        // An input that is not contiguous is accepted.
        let of_transposed = dropout(&x.as_tensor().t().unwrap(), 0.5, masks()).unwrap();
        assert_eq!(of_transposed.dims(), [9, 6]);
    }
}

#[test]
fn probabilities_that_are_none_and_tensors_without_rows_are_refused() {
    for p in [-0.1, 1.1, f64::NAN] {
        assert!(dropout(&ones(&[2]), p, masks()).is_err());
    }
    assert!(dropout(&ones(&[]), 0.5, masks()).is_err());
    assert_eq!(
        dropout(&ones(&[0, 3]), 0.5, masks()).unwrap().dims(),
        [0, 3]
    );
}
