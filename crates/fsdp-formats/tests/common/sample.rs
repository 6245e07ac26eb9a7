//! A state with everything in it.

use fsdp_layout::{DType, PlainValue};

use crate::state::State;

/// Tensors of many shapes: a scalar, empty, odd, small, and one of the shape `large`.
pub(crate) fn sample(large: [usize; 2]) -> State {
    let mut state = State::default();
    let mut seed = 1u64;
    for (name, dtype, shape) in [
        ("scalar", DType::F32, vec![]),
        ("empty", DType::I64, vec![0, 4]),
        ("vector", DType::BF16, vec![1001]),
        ("matrix", DType::F32, vec![513, 257]),
        ("cube", DType::U8, vec![7, 5, 11]),
        ("large", DType::F32, large.to_vec()),
        ("bool", DType::Bool, vec![3]),
    ] {
        let length = shape.iter().product::<usize>() * dtype.size_in_bytes() as usize;
        let bytes = (0..length).map(|_| {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        });
        state
            .tensors
            .insert(name.to_owned(), (dtype, shape, bytes.collect()));
    }
    state.values.insert("step".to_owned(), PlainValue::Int(20));
    state.values.insert(
        "betas".to_owned(),
        PlainValue::Tuple(vec![0.9.into(), 0.95.into()]),
    );
    state
}
