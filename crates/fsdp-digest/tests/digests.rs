//! Properties of digests.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fsdp_digest::{BoxPlace, Digest, DigestError, StateDigest, Sum};
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use proptest::prelude::*;

/// Returns the bytes of a box of a tensor, row-major.
fn bytes_of(whole: &[u8], shape: &[usize], bounds: &TensorBox, element: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for run in fsdp_layout::boxes::copy_runs(bounds, &TensorBox::whole(shape), bounds) {
        bytes.extend_from_slice(&whole[run.src * element..(run.src + run.len) * element]);
    }
    bytes
}

fn digest(whole: &[u8], shape: &[usize], dtype: DType) -> Digest {
    let mut sum = Sum::default();
    sum.add_box(
        shape,
        &TensorBox::whole(shape),
        dtype.size_in_bytes() as usize,
        whole,
    )
    .unwrap();
    sum.finish(dtype, shape)
}

fn of_text(text: &str) -> Digest {
    Digest::of_value(&PlainValue::Str(text.to_owned()))
}

/// A value of every kind.
fn nested() -> PlainValue {
    let tensor = PlainTensor {
        dtype: DType::F32,
        shape: vec![],
        data: vec![0, 0, 128, 63],
    };
    let all = vec![
        PlainValue::None,
        PlainValue::Bool(true),
        PlainValue::Int(-3),
        PlainValue::BigInt(vec![1; 9]),
        PlainValue::Float(0.5),
        PlainValue::Bytes(vec![0, 255]),
        PlainValue::Tuple(vec![PlainValue::Int(1)]),
        PlainValue::Set(vec![PlainValue::Int(2)]),
        PlainValue::Tensor(tensor),
    ];
    PlainValue::Dict(vec![(
        PlainValue::Str("key".to_owned()),
        PlainValue::List(all),
    )])
}

/// Cuts a box in two again and again.
fn cut(bounds: TensorBox, cuts: &[(usize, usize)]) -> Vec<TensorBox> {
    let mut boxes = vec![bounds];
    for &(which, at) in cuts {
        let index = which % boxes.len();
        let bounds = boxes.swap_remove(index);
        if bounds.rank() == 0 {
            boxes.push(bounds);
            continue;
        }
        let dimension = at % bounds.rank();
        let rows = at % (bounds.sizes[dimension] + 1);
        let (mut low, mut high) = (bounds.clone(), bounds);
        low.sizes[dimension] = rows;
        high.offsets[dimension] += rows;
        high.sizes[dimension] -= rows;
        boxes.extend([low, high]);
    }
    boxes
}

fn tensors() -> impl Strategy<Value = (Vec<usize>, DType, Vec<u8>)> {
    let dtypes = prop::sample::select(vec![
        DType::U8,
        DType::BF16,
        DType::F32,
        DType::F64,
        DType::Complex128,
    ]);
    (prop::collection::vec(0usize..40, 0..4), dtypes).prop_flat_map(|(shape, dtype)| {
        let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes() as usize;
        (
            Just(shape),
            Just(dtype),
            prop::collection::vec(any::<u8>(), bytes),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn boxes_of_any_layout_in_any_order_have_the_digest_of_the_whole(
        (shape, dtype, whole) in tensors(),
        cuts in prop::collection::vec((any::<usize>(), any::<usize>()), 0..12),
    ) {
        let element = dtype.size_in_bytes() as usize;
        let (mut sum, mut other) = (Sum::default(), Sum::default());
        for (index, bounds) in cut(TensorBox::whole(&shape), &cuts).into_iter().enumerate() {
            let part = if index % 2 == 0 { &mut sum } else { &mut other };
            let bytes = bytes_of(&whole, &shape, &bounds, element);
            // Every third box in two pieces, the second one first.
            if index % 3 != 0 {
                part.add_box(&shape, &bounds, element, &bytes).unwrap();
                continue;
            }
            let place = BoxPlace::new(&shape, &bounds, element).unwrap();
            let middle = cuts.get(index).map_or(0, |(at, _)| at % (bytes.len() + 1));
            part.add_piece(&place, middle as u64, &bytes[middle..]);
            part.add_piece(&place, 0, &bytes[..middle]);
        }
        sum.add(other);
        prop_assert_eq!(sum.finish(dtype, &shape), digest(&whole, &shape, dtype));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_flipped_bit_is_noticed((shape, dtype, whole) in tensors(), at in any::<usize>(), bit in 0u8..8) {
        prop_assume!(!whole.is_empty());
        let mut changed = whole.clone();
        let at = at % changed.len();
        changed[at] ^= 1 << bit;
        prop_assert_ne!(digest(&changed, &shape, dtype), digest(&whole, &shape, dtype));
    }

    #[test]
    fn swapped_elements_are_noticed((shape, dtype, whole) in tensors(), a in any::<usize>(), b in any::<usize>()) {
        let element = dtype.size_in_bytes() as usize;
        prop_assume!(whole.len() >= 2 * element);
        let (a, b) = (a % (whole.len() / element), b % (whole.len() / element));
        let of = |index: usize| index * element..(index + 1) * element;
        prop_assume!(whole[of(a)] != whole[of(b)]);
        let mut changed = whole.clone();
        changed[of(a)].copy_from_slice(&whole[of(b)]);
        changed[of(b)].copy_from_slice(&whole[of(a)]);
        prop_assert_ne!(digest(&changed, &shape, dtype), digest(&whole, &shape, dtype));
    }
}

#[test]
fn blocks_far_apart_do_not_stand_for_each_other() {
    // Blocks of 4 KiB that change places, and the signs of all elements.
    let whole: Vec<u8> = (0..40_960u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let first = digest(&whole, &[10_240], DType::F32);
    let mut swapped = whole.clone();
    swapped.rotate_left(4096);
    assert_ne!(digest(&swapped, &[10_240], DType::F32), first);
    let negated: Vec<u8> = whole
        .iter()
        .enumerate()
        .map(|(index, byte)| if index % 4 == 3 { byte ^ 0x80 } else { *byte })
        .collect();
    assert_ne!(digest(&negated, &[10_240], DType::F32), first);
}

#[test]
fn shape_and_dtype_are_part_of_a_digest() {
    let whole: Vec<u8> = (0..24).collect();
    let digests = [
        digest(&whole, &[2, 3], DType::F32),
        digest(&whole, &[3, 2], DType::F32),
        digest(&whole, &[6], DType::F32),
        digest(&whole, &[2, 3], DType::I32),
        digest(&whole, &[2, 3, 2], DType::BF16),
        digest(&[], &[0], DType::F32),
        digest(&[], &[0, 1], DType::F32),
        of_text("0"),
    ];
    for (index, digest) in digests.iter().enumerate() {
        assert!(!digests[..index].contains(digest), "{index}");
    }
}

/// Test vectors of version 1, which a second implementation in another language has computed as
/// well. They never change: another algorithm is another version.
#[test]
fn version_1_is_what_it_was() {
    let whole: Vec<u8> = (0..10_000u32).map(|index| (index % 251) as u8).collect();
    let found = [
        digest(&[], &[0], DType::U8).to_string(),
        digest(&[0, 0, 128, 63], &[], DType::F32).to_string(),
        digest(&whole, &[50, 50], DType::F32).to_string(),
        digest(&whole, &[10, 500], DType::BF16).to_string(),
        of_text("3").to_string(),
        Digest::of_value(&nested()).to_string(),
    ];
    let expected = [
        "aed52483cd28a9a6edbf299dc58f0fff",
        "b2d25526a7163e8ad64028d067101da3",
        "85e8047dcddce79c337a6cd7d798b28a",
        "cf588228d3ee8af8f674d0ea663c9917",
        "cb1c4a585b3366a62dd96f3595d9d404",
        "fbb197d40bb4f3cc6af742b735ff1d91",
    ];
    assert_eq!(found, expected);
}

#[test]
fn values_of_other_kinds_and_structures_differ() {
    let int = |value| PlainValue::Int(value);
    let values = [
        PlainValue::None,
        PlainValue::Bool(true),
        int(1),
        PlainValue::Float(1.0),
        PlainValue::Float(f64::NAN),
        PlainValue::Str("1".to_owned()),
        PlainValue::Bytes(b"1".to_vec()),
        PlainValue::BigInt(vec![1]),
        PlainValue::List(vec![int(1), int(2)]),
        PlainValue::List(vec![PlainValue::List(vec![int(1)]), int(2)]),
        PlainValue::List(vec![PlainValue::List(vec![int(1), int(2)])]),
        PlainValue::Tuple(vec![int(1), int(2)]),
        PlainValue::Set(vec![int(1), int(2)]),
        PlainValue::Dict(vec![(int(1), int(2))]),
        nested(),
    ];
    let digests: Vec<Digest> = values.iter().map(Digest::of_value).collect();
    for (index, digest) in digests.iter().enumerate() {
        assert!(!digests[..index].contains(digest), "{:?}", values[index]);
    }
    assert_eq!(digests[4], Digest::of_value(&PlainValue::Float(f64::NAN)));
    assert_eq!(
        Digest::of_value(&PlainValue::Set(vec![int(2), int(1)])),
        digests[12]
    );
}

#[test]
fn digests_are_read_as_they_are_written() {
    let digest = of_text("x");
    assert_eq!(digest.to_string().parse(), Ok(digest));
    for text in [
        "",
        "12",
        "+0000000000000000000000000000000",
        &digest.to_string().to_uppercase(),
        &format!("{digest}0"),
    ] {
        assert!(text.parse::<Digest>().is_err(), "{text}");
    }
}

#[test]
fn boxes_that_are_no_part_of_the_tensor_are_errors() {
    let bounds = TensorBox::new(vec![1], vec![3]);
    let mut sum = Sum::default();
    assert!(matches!(
        sum.add_box(&[3], &bounds, 1, &[0; 3]),
        Err(DigestError::OutsideOfTensor { .. })
    ));
    assert!(matches!(
        sum.add_box(&[4], &bounds, 2, &[0; 3]),
        Err(DigestError::WrongLength {
            expected: 6,
            found: 3,
            ..
        })
    ));
    assert!(matches!(
        sum.add_box(
            &[usize::MAX, 2],
            &TensorBox::new(vec![0, 0], vec![1, 1]),
            8,
            &[0; 8]
        ),
        Err(DigestError::OutsideOfTensor { .. })
    ));
    assert_eq!(sum, Sum::default());
}

#[test]
fn a_state_digest_names_what_differs() {
    let state = |values: &[(&str, &str)]| -> StateDigest {
        values
            .iter()
            .map(|(name, value)| ((*name).to_owned(), of_text(value)))
            .collect()
    };
    let a = state(&[("x", "1"), ("y", "2"), ("z", "3")]);
    let b = state(&[("z", "3"), ("x", "1"), ("w", "2"), ("y", "4")]);
    assert_eq!(a.differing(&b), ["w", "y"]);
    assert_eq!(a.differing(&a), Vec::<String>::new());
    assert_ne!(a.root(), b.root());
    assert_eq!(
        a.root(),
        state(&[("z", "3"), ("y", "2"), ("x", "1")]).root()
    );
    // A name and a digest that change places, and names that run into each other.
    assert_ne!(
        state(&[("ab", "1"), ("c", "1")]).root(),
        state(&[("a", "1"), ("bc", "1")]).root()
    );
}
