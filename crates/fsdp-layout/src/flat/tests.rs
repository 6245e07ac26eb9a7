//! Golden layouts measured with torch, and the properties that any layout has.

use proptest::prelude::*;

use super::*;

fn params(list: &[(&str, &[usize])]) -> Vec<(String, Vec<usize>)> {
    list.iter()
        .map(|(fqn, shape)| ((*fqn).to_owned(), shape.to_vec()))
        .collect()
}

/// Makes the layout of five parameters: `sc` of 7 elements, the weight of `l1` of 5x3 and its bias
/// of 5, the weight of `l2` of 2x5 and its bias of 2. They are aligned for the dtype `aligned`, if
/// one is given.
fn mini7(aligned: Option<DType>, world_size: usize) -> FlatLayout {
    let list = params(&[
        ("sc", &[7]),
        ("l1.weight", &[5, 3]),
        ("l1.bias", &[5]),
        ("l2.weight", &[2, 5]),
        ("l2.bias", &[2]),
    ]);
    FlatLayout::new(list, aligned.map_or(0, aligned_numel), world_size).unwrap()
}

/// Returns the parameters in a rank's shard, each with its name, its offset and length in the
/// shard, and the first and the last of its elements there.
fn infos(layout: &FlatLayout, rank: usize) -> Vec<(&str, usize, usize, usize, usize)> {
    let infos = layout.shard_param_infos(rank);
    let named = layout.fqns().iter().zip(infos);
    named
        .filter_map(|(fqn, info)| {
            info.map(|i| {
                (
                    fqn.as_str(),
                    i.offset_in_shard,
                    i.numel_in_shard,
                    i.intra_param_start,
                    i.intra_param_end,
                )
            })
        })
        .collect()
}

#[test]
fn golden_sizes_of_mini7() {
    let f32 = Some(DType::F32);
    let bf16 = Some(DType::BF16);
    // The dtype to align for, the ranks, the lengths of parameters and padding, the elements
    // without and with right padding, the elements of a shard, and each rank's right padding.
    type Golden<'a> = (
        Option<DType>,
        usize,
        &'a [usize],
        usize,
        usize,
        usize,
        &'a [usize],
    );
    let table: &[Golden<'_>] = &[
        (None, 2, &[7, 15, 5, 10, 2], 39, 40, 20, &[0, 1]),
        (None, 3, &[7, 15, 5, 10, 2], 39, 39, 13, &[0, 0, 0]),
        (f32, 2, &[7, 1, 15, 1, 5, 3, 10, 2, 2], 46, 46, 23, &[0, 0]),
        (bf16, 2, &[7, 1, 15, 1, 5, 3, 10, 6, 2], 50, 50, 25, &[0, 0]),
        (
            f32,
            3,
            &[7, 1, 15, 1, 5, 3, 10, 2, 2, 2],
            48,
            48,
            16,
            &[0, 0, 0],
        ),
        (
            bf16,
            3,
            &[7, 1, 15, 1, 5, 3, 10, 6, 2, 1],
            51,
            51,
            17,
            &[0, 0, 0],
        ),
    ];
    for &(dtype, world_size, numels, unpadded, padded, sharded, right) in table {
        let layout = mini7(dtype, world_size);
        assert_eq!(
            layout.numels_with_padding(),
            numels,
            "{dtype:?} over {world_size}"
        );
        assert_eq!(layout.unpadded_unsharded_numel(), unpadded);
        assert_eq!(layout.padded_unsharded_numel(), padded);
        assert_eq!(layout.sharded_numel(), sharded);
        let padding: Vec<usize> = (0..world_size)
            .map(|rank| layout.sharded_numel() - layout.shard_range(rank).len())
            .collect();
        assert_eq!(padding, right);
    }
}

#[test]
fn golden_shard_param_infos_of_mini7() {
    let layout = mini7(Some(DType::BF16), 2);
    assert_eq!(
        infos(&layout, 0),
        [
            ("sc", 0, 7, 0, 6),
            ("l1.weight", 8, 15, 0, 14),
            ("l1.bias", 24, 1, 0, 0)
        ]
    );
    assert_eq!(
        infos(&layout, 1),
        [
            ("l1.bias", 0, 4, 1, 4),
            ("l2.weight", 7, 10, 0, 9),
            ("l2.bias", 23, 2, 0, 1)
        ]
    );

    let layout = mini7(Some(DType::F32), 3);
    assert_eq!(
        infos(&layout, 0),
        [("sc", 0, 7, 0, 6), ("l1.weight", 8, 8, 0, 7)]
    );
    assert_eq!(
        infos(&layout, 1),
        [("l1.weight", 0, 7, 8, 14), ("l1.bias", 8, 5, 0, 4)]
    );
    assert_eq!(
        infos(&layout, 2),
        [("l2.weight", 0, 10, 0, 9), ("l2.bias", 12, 2, 0, 1)]
    );

    let layout = mini7(None, 2);
    assert_eq!(
        infos(&layout, 0),
        [("sc", 0, 7, 0, 6), ("l1.weight", 7, 13, 0, 12)]
    );
    assert_eq!(
        infos(&layout, 1),
        [
            ("l1.weight", 0, 2, 13, 14),
            ("l1.bias", 2, 5, 0, 4),
            ("l2.weight", 7, 10, 0, 9),
            ("l2.bias", 17, 2, 0, 1)
        ]
    );
}

/// Returns the parameters that have elements from `first` to `last` (inclusive) of the
/// FlatParameter: the index of each, and the first and the last of its elements there.
fn params_from_to(layout: &FlatLayout, first: usize, last: usize) -> Vec<(usize, usize, usize)> {
    (0..layout.fqns().len())
        .filter_map(|param| {
            let info = layout.param_info_of_range(param, &(first..last + 1))?;
            Some((param, info.intra_param_start, info.intra_param_end))
        })
        .collect()
}

// The ranges of this test and the next are those of torch's `test_flat_param_shard_metadata_*`.
#[test]
fn any_range_has_the_right_part_of_each_parameter() {
    let layout = FlatLayout::new(
        params(&[
            ("0.weight", &[10, 10]),
            ("2.weight", &[10, 10]),
            ("4.weight", &[10, 10]),
        ]),
        0,
        1,
    )
    .unwrap();
    assert_eq!(params_from_to(&layout, 0, 0), [(0, 0, 0)]);
    assert_eq!(params_from_to(&layout, 0, 50), [(0, 0, 50)]);
    assert_eq!(params_from_to(&layout, 0, 99), [(0, 0, 99)]);
    assert_eq!(params_from_to(&layout, 50, 149), [(0, 50, 99), (1, 0, 49)]);
    assert_eq!(params_from_to(&layout, 50, 199), [(0, 50, 99), (1, 0, 99)]);
    assert_eq!(params_from_to(&layout, 99, 199), [(0, 99, 99), (1, 0, 99)]);
    assert_eq!(params_from_to(&layout, 100, 199), [(1, 0, 99)]);
    assert_eq!(params_from_to(&layout, 100, 299), [(1, 0, 99), (2, 0, 99)]);
    // A range may end beyond the last parameter.
    assert_eq!(params_from_to(&layout, 100, 1000), [(1, 0, 99), (2, 0, 99)]);
    assert_eq!(params_from_to(&layout, 299, 299), [(2, 99, 99)]);
}

#[test]
fn alignment_padding_in_a_range_belongs_to_no_parameter() {
    let weights = params(&[
        ("0.weight", &[7, 3]),
        ("2.weight", &[5, 7]),
        ("4.weight", &[5, 5]),
    ]);
    let layout = FlatLayout::new(weights, aligned_numel(DType::F32), 1).unwrap();
    assert_eq!(layout.numels_with_padding(), [21, 3, 35, 1, 25]);
    assert_eq!(params_from_to(&layout, 0, 42), [(0, 0, 20), (1, 0, 18)]);
    assert_eq!(params_from_to(&layout, 43, 85), [(1, 19, 34), (2, 0, 24)]);
}

#[test]
fn mixed_precision_aligns_to_the_compute_dtype() {
    let weights = params(&[("a", &[5, 2]), ("b", &[5, 5]), ("c", &[3, 5])]);
    let layout = FlatLayout::new(weights, aligned_numel(DType::F16), 1).unwrap();
    assert_eq!(layout.numels_with_padding(), [10, 6, 25, 7, 15]);
}

#[test]
fn what_cannot_be_laid_out_is_refused() {
    assert_eq!(FlatLayout::new(vec![], 4, 2), Err(FlatLayoutError::Empty));
    assert_eq!(
        FlatLayout::new(params(&[("a", &[1])]), 4, 0),
        Err(FlatLayoutError::NoRanks)
    );
    let huge = FlatLayout::new(params(&[("a", &[1 << 40, 1 << 40])]), 0, 2);
    assert!(matches!(huge, Err(FlatLayoutError::TooLarge { fqn, .. }) if fqn == "a"));
}

fn any_params() -> impl Strategy<Value = Vec<(String, Vec<usize>)>> {
    prop::collection::vec(prop::collection::vec(0usize..6, 0..4), 1..8).prop_map(|shapes| {
        shapes
            .into_iter()
            .enumerate()
            .map(|(i, shape)| (format!("p{i}"), shape))
            .collect()
    })
}

proptest! {
    /// Over all ranks, the shards hold each element of each parameter once, and padding belongs to
    /// no parameter.
    #[test]
    fn any_layout_partitions_exactly(list in any_params(), aligned in 0usize..9, world_size in 1usize..9) {
        let layout = FlatLayout::new(list.clone(), aligned, world_size).unwrap();
        prop_assert_eq!(layout.shard_range(0).len(), layout.sharded_numel());
        let mut seen: Vec<Vec<usize>> = layout.numels().iter().map(|&n| vec![0; n]).collect();
        for rank in 0..world_size {
            let range = layout.shard_range(rank);
            prop_assert!(range.len() <= layout.sharded_numel());
            let mut taken = vec![false; range.len()];
            for (param, info) in layout.shard_param_infos(rank).into_iter().enumerate() {
                prop_assert_eq!(layout.shard_param_info(param, rank), info);
                let boxes = layout.param_boxes(param, rank);
                let in_boxes: usize = boxes.iter().map(TensorBox::numel).sum();
                prop_assert_eq!(in_boxes, info.map_or(0, |i| i.numel_in_shard));
                let Some(info) = info else { continue };
                prop_assert_eq!(info.shard_range().len(), info.param_range().len());
                for at in info.shard_range() {
                    prop_assert!(!std::mem::replace(&mut taken[at], true), "two parameters share an element");
                }
                for at in info.param_range() {
                    seen[param][at] += 1;
                }
            }
        }
        prop_assert!(seen.iter().flatten().all(|&n| n == 1));
        let padding: usize = layout.entries().iter().zip(layout.numels_with_padding())
            .filter(|(entry, _)| **entry == FlatEntry::Padding).map(|(_, n)| n).sum();
        prop_assert_eq!(layout.numels().iter().sum::<usize>() + padding, layout.unpadded_unsharded_numel());
        if aligned > 0 {
            prop_assert_eq!(layout.unpadded_unsharded_numel() % world_size, 0);
            for param in 0..list.len() {
                prop_assert_eq!(layout.param_range(param).start % aligned, 0);
            }
        }
    }
}
