//! Updates with the same inputs as torch's give the same bits.

use half::{bf16, f16};

use super::*;

/// The operations that the tests need of an element type.
trait TestFloat: Float {
    const BYTES: usize = size_of::<Self>();
    fn from_f64(value: f64) -> Self;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn to_f64(self) -> f64;
    /// The bits, in two's complement, so that neighbours differ by one.
    fn place(self) -> i64;
}

macro_rules! test_float {
    ($($type:ty, $bits:ty, $from:expr, $to:expr;)*) => {
        $(impl TestFloat for $type {
            fn from_f64(value: f64) -> Self {
                $from(value)
            }

            fn from_bytes(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(bytes.try_into().unwrap())
            }

            fn to_f64(self) -> f64 {
                $to(self)
            }

            fn place(self) -> i64 {
                let bits = self.to_bits() as $bits;
                i64::from(if bits < 0 { <$bits>::MIN.wrapping_sub(bits) } else { bits })
            }
        })*
    };
}

test_float! {
    f32, i32, |value| value as f32, f64::from;
    f64, i64, |value| value, |value| value;
    bf16, i16, |value| bf16::from_f32(value as f32), bf16::to_f64;
    f16, i16, |value| f16::from_f32(value as f32), f16::to_f64;
}

/// The numbers that `values` in `algorithm.py` makes.
fn values<T: TestFloat>(seed: u32) -> Vec<T> {
    const SCALES: [f64; 8] = [
        1.0,
        0.5,
        1.0 / 128.0,
        16.0,
        0.0,
        1.0,
        1.0 / 1_048_576.0,
        1.0,
    ];
    let count = if T::BYTES == 2 { 64 } else { 24 };
    let mut state = seed;
    let mut number = |i: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        T::from_f64((f64::from(state >> 8) / f64::from(1 << 23) - 1.0) * SCALES[i % SCALES.len()])
    };
    (0..count).map(&mut number).collect()
}

fn from_hex<T: TestFloat>(hex: &Value) -> Vec<T> {
    let digits = |i: usize| u8::from_str_radix(&hex.as_str().unwrap()[i..i + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..hex.as_str().unwrap().len())
        .step_by(2)
        .map(digits)
        .collect();
    bytes.chunks_exact(T::BYTES).map(T::from_bytes).collect()
}

/// Makes the updates of a golden case, each on pieces of this many elements; gives the parameter
/// and its state.
fn run<T: TestFloat>(case: &Value, piece: usize) -> (Vec<T>, Vec<Vec<T>>) {
    let mut algorithm = with_options(case["optimizer"].as_str().unwrap(), &case["options"]);
    if let Algorithm::ScheduleFreeAdamW(options) = &mut algorithm {
        options.train_mode = true;
    }
    algorithm.check_dtype(T::DTYPE).unwrap();
    let mut param = values::<T>(1);
    // The content of a buffer that the first update makes must not matter.
    let initial = |entry: StateEntry| match entry.initial {
        Initial::Value(value) => vec![T::from_f64(value); param.len()],
        Initial::Parameter => param.clone(),
        Initial::FirstGradient => vec![T::from_f64(f64::NAN); param.len()],
    };
    let mut state: Vec<Vec<T>> = algorithm
        .state_entries()
        .filter(|entry| entry.kind == StateKind::LikeParameter)
        .map(initial)
        .collect();
    for step in 0..case["steps"].as_u64().unwrap() {
        let grad = values::<T>(100 + step as u32);
        algorithm.begin_step().unwrap();
        for start in (0..param.len()).step_by(piece) {
            let range = start..param.len().min(start + piece);
            let mut slices: Vec<&mut [T]> = state
                .iter_mut()
                .map(|entry| &mut entry[range.clone()])
                .collect();
            let number = (step + 1) as f32;
            algorithm
                .update(
                    number,
                    step == 0,
                    &mut param[range.clone()],
                    &grad[range],
                    &mut slices,
                )
                .unwrap();
        }
        algorithm.end_step();
    }
    (param, state)
}

fn assert_same<T: TestFloat>(found: &[T], golden: &Value, what: &str) {
    let golden = from_hex::<T>(golden);
    assert_eq!(found.len(), golden.len());
    for (i, (found, golden)) in found.iter().zip(golden).enumerate() {
        let (found_place, place) = (found.place(), golden.place());
        let (found, golden) = (found.to_f64(), golden.to_f64());
        assert!(
            found_place == place,
            "{what}, element {i}: {found:e} but torch has {golden:e}"
        );
    }
}

/// Compares every case of this dtype; gives how many there were.
fn compare<T: TestFloat>() -> usize {
    let goldens = goldens();
    let cases: Vec<_> = goldens["updates"].as_array().unwrap().iter().collect();
    let cases = cases
        .iter()
        .filter(|case| case["dtype"] == T::DTYPE.torch_name());
    cases
        .inspect(|case| {
            let (param, state) = run::<T>(case, usize::MAX);
            let what = format!(
                "{} {} {}",
                case["optimizer"], case["options"], case["dtype"]
            );
            assert_same(&param, &case["param"], &format!("{what} parameter"));
            let golden = case["state"].as_object().unwrap();
            assert_eq!(golden.len(), state.len(), "{what}");
            for ((name, golden), found) in golden.iter().zip(&state) {
                assert_same(found, golden, &format!("{what} {name}"));
            }
        })
        .count()
}

#[test]
fn f32_updates_are_those_of_torch_bit_for_bit() {
    assert_eq!(compare::<f32>(), 23);
}

#[test]
fn f64_updates_are_those_of_torch_bit_for_bit() {
    assert_eq!(compare::<f64>(), 23);
}

#[test]
fn bf16_updates_are_those_of_torch_bit_for_bit() {
    assert_eq!(compare::<bf16>(), 23);
}

#[test]
fn f16_updates_are_those_of_torch_bit_for_bit() {
    assert_eq!(compare::<f16>(), 23);
}

/// Compares every case with what MKL's square roots make of it; gives how many elements differ at
/// all.
fn compare_with_mkl<T: TestFloat>(epsilon: f64) -> usize {
    let mut different = 0;
    for case in goldens()["updates"].as_array().unwrap() {
        if case["dtype"] != T::DTYPE.torch_name() || case["mkl"].is_null() {
            continue;
        }
        let lr = with_options(case["optimizer"].as_str().unwrap(), &case["options"]).lr();
        let (param, _) = run::<T>(case, usize::MAX);
        let rows = values::<T>(1)
            .into_iter()
            .zip(param)
            .zip(from_hex::<T>(&case["mkl"]));
        for ((before, found), golden) in rows {
            let (before, found, golden) = (before.to_f64(), found.to_f64(), golden.to_f64());
            // At each step a rounding of the parameter, and one of the update, which is about as
            // large as the rate.
            let bound =
                case["steps"].as_f64().unwrap() * epsilon * (before.abs() + found.abs() + lr);
            assert!(
                (found - golden).abs() <= bound,
                "{} {}: {found:e}, {golden:e}",
                case["optimizer"],
                case["options"]
            );
            different += usize::from(found != golden);
        }
    }
    different
}

/// torch's `lerp` with a weight of -1, to which `eval` comes with a first beta of 0.5. Computed
/// from the start, these would be other roundings.
#[test]
fn a_lerp_far_beyond_its_start_is_computed_from_its_end() {
    let mut start = [0.1f32, 1.1, 5.3];
    lerp(&mut start, &[0.7, -0.7, 0.1], -1.0);
    assert_eq!(start, [-0.499_999_94, 2.899_999_9, 10.500_001]);
}

#[test]
fn square_roots_of_mkl_change_roundings_only() {
    assert!(compare_with_mkl::<f32>(f64::from(f32::EPSILON)) > 0);
    compare_with_mkl::<f64>(f64::EPSILON);
}

#[test]
fn pieces_of_a_parameter_get_the_bits_of_the_whole() {
    for case in goldens()["updates"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|case| case["dtype"] == "bfloat16")
    {
        for piece in [1, 3, 17] {
            let (param, _) = run::<bf16>(case, piece);
            assert_same(&param, &case["param"], &case["options"].to_string());
        }
    }
}
