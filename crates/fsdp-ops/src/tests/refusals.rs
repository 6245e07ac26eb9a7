//! Inputs that an operation cannot take are errors that name it.

use candle_core::{DType, Device, Tensor};

use super::autograd::Parameters;
use super::by_each_way;

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

/// Fails unless a result is an error that says all of these.
fn assert_refused(result: candle_core::Result<Tensor>, parts: &[&str]) {
    let message = result.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
}

#[test]
fn shapes_that_do_not_go_together_are_refused() {
    let x = zeros(&[2, 4]);
    assert_refused(
        crate::layer_norm(&x, &zeros(&[4]), &zeros(&[3]), 1e-5),
        &["layer-norm", "[3]"],
    );
    assert_refused(
        crate::rms_norm(&x, &zeros(&[2]), 1e-5),
        &["rms-norm", "[2]"],
    );
    assert_refused(
        crate::linear(&x, &zeros(&[3, 5]), None),
        &["linear", "[3, 5]"],
    );
    assert_refused(
        crate::linear_gelu_erf(&x, &zeros(&[3, 5]), &zeros(&[3])),
        &["linear", "[3, 5]"],
    );
    assert_refused(
        crate::linear_gelu_erf(&x, &zeros(&[3, 4]), &zeros(&[2])),
        &["linear", "[3, 4]"],
    );
    assert_refused(
        crate::linear_add(&x, &zeros(&[3, 5]), None, &zeros(&[2, 3])),
        &["linear", "[3, 5]"],
    );
    for residual in [&[1, 4][..], &[1, 2, 3], &[3]] {
        assert_refused(
            crate::linear_add(&x, &zeros(&[3, 4]), None, &zeros(residual)),
            &["linear-add", &format!("{residual:?}")],
        );
    }
    assert_refused(
        crate::cross_entropy(&x, &zeros(&[3])),
        &["cross-entropy", "[3]"],
    );
    let (heads, fewer) = (zeros(&[1, 2, 3, 4]), zeros(&[1, 1, 3, 4]));
    assert_refused(
        crate::scaled_dot_product_attention(&heads, &fewer, &heads, true, 1.0),
        &["attention"],
    );
    assert_refused(
        crate::rope(&heads, &zeros(&[3, 3]), &zeros(&[3, 3])),
        &["rope", "[3, 3]"],
    );
    assert_refused(
        crate::rope_i(&zeros(&[1, 2, 3, 5]), &zeros(&[3, 2]), &zeros(&[3, 2])),
        &["rope-i"],
    );
    assert_refused(
        crate::packed_attention(&zeros(&[1, 2, 8]), 2, true),
        &["attention", "8 values"],
    );
    assert_refused(
        crate::packed_attention(&zeros(&[1, 2, 6]), 0, true),
        &["attention", "0 heads"],
    );
}

#[test]
fn dtypes_that_differ_or_are_no_floats_are_refused() {
    let x = zeros(&[2, 4]);
    let double = |shape: &[usize]| zeros(shape).to_dtype(DType::F64).unwrap();
    assert_refused(
        crate::rms_norm(&x, &double(&[4]), 1e-5),
        &["rms-norm", "F32", "F64"],
    );
    let parameters = Parameters::new(&[x.clone(), zeros(&[3, 4]), zeros(&[2, 3])]).unwrap();
    let [of_x, weight, residual] = &parameters.tensors[..] else {
        unreachable!("there are three");
    };
    for (way, result) in
        by_each_way(|| crate::linear_add(of_x, weight, Some(&double(&[3])), residual))
    {
        println!("{way}");
        assert_refused(result, &["linear", "F32", "F64"]);
    }
    let heads = zeros(&[1, 2, 3, 4]);
    assert_refused(
        crate::rope(&heads, &double(&[3, 2]), &double(&[3, 2])),
        &["rope", "F64"],
    );
    let result =
        crate::scaled_dot_product_attention(&heads, &double(&[1, 2, 3, 4]), &heads, true, 1.0);
    assert_refused(result, &["attention", "F64"]);
    let bytes = x.to_dtype(DType::U8).unwrap();
    assert_refused(crate::softmax_last_dim(&bytes), &["softmax-last-dim", "U8"]);
    assert_refused(crate::gelu_erf(&bytes), &["gelu-erf", "U8"]);
    assert_refused(
        crate::cross_entropy(&x, &zeros(&[2])),
        &["cross-entropy", "F32"],
    );
}

#[test]
fn targets_that_are_no_class_and_means_of_nothing_are_refused() {
    let targets = |targets: &[i64]| Tensor::new(targets, &Device::Cpu).unwrap();
    assert_refused(
        crate::cross_entropy(&zeros(&[2, 4]), &targets(&[1, 4])),
        &["target 4 of row 1", "4 classes"],
    );
    assert_refused(
        crate::cross_entropy(&zeros(&[2, 4]), &targets(&[-100, 1])),
        &["target -100 of row 0"],
    );
    assert_refused(
        crate::embedding(&targets(&[1, 3]), &zeros(&[3, 2])),
        &["index 3 at position 1", "3 rows"],
    );
    assert_refused(
        crate::cross_entropy(&zeros(&[0, 4]), &targets(&[])),
        &["no rows"],
    );
    let (query, key) = (zeros(&[1, 2, 3, 4]), zeros(&[1, 2, 0, 4]));
    assert_refused(
        crate::scaled_dot_product_attention(&query, &key, &key, false, 1.0),
        &["without keys"],
    );
}
