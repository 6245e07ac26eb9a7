//! Golden layouts measured with torch, and the properties that any layout has.

use proptest::prelude::*;

use super::*;

fn params(list: &[(&str, &[usize])]) -> Vec<(String, Vec<usize>)> {
    list.iter().map(|(fqn, shape)| ((*fqn).to_owned(), shape.to_vec())).collect()
}

/// Makes the layout of seven parameters: sc of 7 elements, l1 of 5x3 and 5, l2 of 2x5 and 2.
fn mini7(aligned: Option<DType>, world_size: usize) -> FlatLayout {
    let list =
        params(&[("sc", &[7]), ("l1.weight", &[5, 3]), ("l1.bias", &[5]), ("l2.weight", &[2, 5]), ("l2.bias", &[2])]);
    FlatLayout::new(list, aligned.map_or(0, aligned_numel), world_size).unwrap()
}

fn infos(layout: &FlatLayout, rank: usize) -> Vec<(&str, usize, usize, usize, usize)> {
    let infos = layout.shard_param_infos(rank);
    let named = layout.fqns().iter().zip(infos);
    named
        .filter_map(|(fqn, info)| {
            info.map(|i| (fqn.as_str(), i.offset_in_shard, i.numel_in_shard, i.intra_param_start, i.intra_param_end))
        })
        .collect()
}

#[test]
fn golden_sizes_of_mini7() {
    let f32 = Some(DType::F32);
    let bf16 = Some(DType::BF16);
    type Golden<'a> = (Option<DType>, usize, &'a [usize], usize, usize, usize, &'a [usize]);
    let table: &[Golden<'_>] = &[
        (None, 2, &[7, 15, 5, 10, 2], 39, 40, 20, &[0, 1]),
        (None, 3, &[7, 15, 5, 10, 2], 39, 39, 13, &[0, 0, 0]),
        (f32, 2, &[7, 1, 15, 1, 5, 3, 10, 2, 2], 46, 46, 23, &[0, 0]),
        (bf16, 2, &[7, 1, 15, 1, 5, 3, 10, 6, 2], 50, 50, 25, &[0, 0]),
        (f32, 3, &[7, 1, 15, 1, 5, 3, 10, 2, 2, 2], 48, 48, 16, &[0, 0, 0]),
        (bf16, 3, &[7, 1, 15, 1, 5, 3, 10, 6, 2, 1], 51, 51, 17, &[0, 0, 0]),
    ];
    for &(dtype, world_size, numels, unpadded, padded, sharded, right) in table {
        let layout = mini7(dtype, world_size);
        assert_eq!(layout.numels_with_padding(), numels, "{dtype:?} over {world_size}");
        assert_eq!(layout.unpadded_unsharded_numel(), unpadded);
        assert_eq!(layout.padded_unsharded_numel(), padded);
        assert_eq!(layout.sharded_numel(), sharded);
        let padding: Vec<usize> = (0..world_size).map(|rank| layout.shard(rank).padding).collect();
        assert_eq!(padding, right);
    }
}

#[test]
fn golden_shard_param_infos_of_mini7() {
    let layout = mini7(Some(DType::BF16), 2);
    assert_eq!(infos(&layout, 0), [("sc", 0, 7, 0, 6), ("l1.weight", 8, 15, 0, 14), ("l1.bias", 24, 1, 0, 0)]);
    assert_eq!(infos(&layout, 1), [("l1.bias", 0, 4, 1, 4), ("l2.weight", 7, 10, 0, 9), ("l2.bias", 23, 2, 0, 1)]);

    let layout = mini7(Some(DType::F32), 3);
    assert_eq!(infos(&layout, 0), [("sc", 0, 7, 0, 6), ("l1.weight", 8, 8, 0, 7)]);
    assert_eq!(infos(&layout, 1), [("l1.weight", 0, 7, 8, 14), ("l1.bias", 8, 5, 0, 4)]);
    assert_eq!(infos(&layout, 2), [("l2.weight", 0, 10, 0, 9), ("l2.bias", 12, 2, 0, 1)]);

    let layout = mini7(None, 2);
    assert_eq!(infos(&layout, 0), [("sc", 0, 7, 0, 6), ("l1.weight", 7, 13, 0, 12)]);
    assert_eq!(
        infos(&layout, 1),
        [("l1.weight", 0, 2, 13, 14), ("l1.bias", 2, 5, 0, 4), ("l2.weight", 7, 10, 0, 9), ("l2.bias", 17, 2, 0, 1)]
    );
}

#[test]
fn metadata_of_arbitrary_ranges_unaligned() {
    let layout =
        FlatLayout::new(params(&[("0.weight", &[10, 10]), ("2.weight", &[10, 10]), ("4.weight", &[10, 10])]), 0, 1)
            .unwrap();
    let of = |start: usize, last: usize| -> Vec<(usize, usize, usize)> {
        let infos = layout.shard_param_infos_of_range(start..last + 1);
        let held = infos.into_iter().enumerate();
        held.filter_map(|(p, info)| info.map(|i| (2 * p, i.intra_param_start, i.intra_param_end))).collect()
    };
    assert_eq!(of(0, 0), [(0, 0, 0)]);
    assert_eq!(of(0, 50), [(0, 0, 50)]);
    assert_eq!(of(0, 99), [(0, 0, 99)]);
    assert_eq!(of(50, 149), [(0, 50, 99), (2, 0, 49)]);
    assert_eq!(of(50, 199), [(0, 50, 99), (2, 0, 99)]);
    assert_eq!(of(99, 199), [(0, 99, 99), (2, 0, 99)]);
    assert_eq!(of(100, 199), [(2, 0, 99)]);
    assert_eq!(of(100, 299), [(2, 0, 99), (4, 0, 99)]);
    assert_eq!(of(100, 1000), [(2, 0, 99), (4, 0, 99)]);
    assert_eq!(of(299, 299), [(4, 99, 99)]);
}

#[test]
fn metadata_of_arbitrary_ranges_aligned() {
    let weights = params(&[("0.weight", &[7, 3]), ("2.weight", &[5, 7]), ("4.weight", &[5, 5])]);
    let layout = FlatLayout::new(weights, aligned_numel(DType::F32), 1).unwrap();
    assert_eq!(layout.numels_with_padding(), [21, 3, 35, 1, 25]);
    let of = |start: usize, last: usize| -> Vec<Option<(usize, usize)>> {
        let infos = layout.shard_param_infos_of_range(start..last + 1);
        infos.into_iter().map(|info| info.map(|i| (i.intra_param_start, i.intra_param_end))).collect()
    };
    assert_eq!(of(0, 42), [Some((0, 20)), Some((0, 18)), None]);
    assert_eq!(of(43, 85), [None, Some((19, 34)), Some((0, 24))]);
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
    assert_eq!(FlatLayout::new(params(&[("a", &[1])]), 4, 0), Err(FlatLayoutError::NoRanks));
    let huge = FlatLayout::new(params(&[("a", &[1 << 40, 1 << 40])]), 0, 2);
    assert!(matches!(huge, Err(FlatLayoutError::TooLarge { fqn, .. }) if fqn == "a"));
}

fn any_params() -> impl Strategy<Value = Vec<(String, Vec<usize>)>> {
    prop::collection::vec(prop::collection::vec(0usize..6, 0..4), 1..8)
        .prop_map(|shapes| shapes.into_iter().enumerate().map(|(i, shape)| (format!("p{i}"), shape)).collect())
}

proptest! {
    /// Over all ranks, the shards hold each element of each parameter once, and padding belongs to no parameter.
    #[test]
    fn any_layout_partitions_exactly(list in any_params(), aligned in 0usize..9, world_size in 1usize..9) {
        let layout = FlatLayout::new(list.clone(), aligned, world_size).unwrap();
        let mut seen: Vec<Vec<usize>> = layout.numels().iter().map(|&n| vec![0; n]).collect();
        for rank in 0..world_size {
            let shard = layout.shard(rank);
            prop_assert_eq!(shard.range.len() + shard.padding, layout.sharded_numel());
            let mut taken = vec![false; shard.range.len()];
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
