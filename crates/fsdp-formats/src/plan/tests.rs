//! Plans: torch's golden vectors, balance, disagreements, and broken chunk lists.

use super::save::VALUE_WEIGHT_BYTES;
use super::*;
use crate::limits::MAX_KEY_BYTES;
use crate::metadata::{Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties};
use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::{DType, TensorBox};
use proptest::prelude::*;

fn line(offset: usize, size: usize) -> TensorBox {
    TensorBox::new(vec![offset], vec![size])
}

fn saved(shape: Vec<usize>, chunks: Vec<TensorBox>) -> Metadata {
    let chunks = chunks.into_iter().enumerate().map(|(i, bounds)| {
        let relative_path = format!("__{i}_0.distcp");
        Chunk {
            bounds,
            stored: Some(StorageInfo {
                relative_path,
                offset: 0,
                length: 1,
                transforms: vec![],
            }),
        }
    });
    let entry = TensorEntry {
        properties: TensorProperties::new(DType::F32),
        shape,
        chunks: chunks.collect(),
    };
    let mut metadata = Metadata::default();
    metadata.entries.insert("t".into(), Entry::Tensor(entry));
    metadata
}

fn request(shape: Vec<usize>, boxes: Vec<TensorBox>) -> LoadRequest {
    LoadRequest {
        fqn: "t".into(),
        dtype: DType::F32,
        shape,
        boxes,
    }
}

/// Returns of each read: its offset in the saved chunk, its offset in the wanted box, and its
/// length.
fn reads(metadata: &Metadata, wanted: TensorBox) -> Vec<(usize, usize, usize)> {
    let tensor = metadata.tensor("t").unwrap();
    let plan = plan_load(
        metadata,
        &[request(tensor.shape.clone(), vec![wanted.clone()])],
    )
    .unwrap();
    let of = |read: &ReadItem| {
        let at = read.overlap.offsets[0];
        (
            at - tensor.chunks[read.chunk].bounds.offsets[0],
            at - wanted.offsets[0],
            read.overlap.sizes[0],
        )
    };
    plan.iter().map(of).collect()
}

#[test]
fn overlaps_are_those_of_torch() {
    let eight = saved(vec![128], (0..8).map(|i| line(i * 16, 16)).collect());
    assert_eq!(reads(&eight, line(32, 32)), [(0, 0, 16), (0, 16, 16)]);
    let four = saved(vec![128], (0..4).map(|i| line(i * 32, 32)).collect());
    assert_eq!(reads(&four, line(16, 16)), [(16, 0, 16)]);
    let of_120 = saved(vec![120], (0..4).map(|i| line(i * 30, 30)).collect());
    assert_eq!(reads(&of_120, line(40, 40)), [(10, 0, 20), (0, 20, 20)]);
    let two = saved(vec![16], vec![line(0, 8), line(8, 8)]);
    assert_eq!(reads(&two, line(4, 7)), [(4, 0, 4), (0, 4, 3)]);
}

/// Returns the item and the box of each selection.
fn kept(selection: &Selection) -> Vec<(u32, u32)> {
    selection
        .kept
        .iter()
        .map(|kept| (kept.item, kept.index))
        .collect()
}

#[test]
fn a_local_plan_becomes_metadata_with_each_thing_once() {
    let plans: Vec<LocalPlan> = (0..4)
        .map(|rank| {
            let mut plan = LocalPlan::default();
            plan.add_tensor("tensor", None, DType::F32, vec![10], vec![line(0, 10)]);
            plan.add_value("value", None, 1000);
            plan.add_tensor("st", None, DType::F32, vec![32], vec![line(rank * 8, 8)]);
            plan
        })
        .collect();
    let before = plans.clone();
    let global = plan_save(&plans, Deduplicate::default()).unwrap();
    assert_eq!(plans, before);
    assert_eq!(
        global
            .selections
            .iter()
            .map(|s| s.kept.len())
            .sum::<usize>(),
        4 + 1 + 1
    );
    assert!(global.selections.iter().all(|s| kept(s).contains(&(2, 0))));
    let keys: Vec<_> = global.metadata.entries.keys().collect();
    assert_eq!(keys, ["tensor", "value", "st"]);
    assert_eq!(global.metadata.tensor("st").unwrap().chunks.len(), 4);
    assert_eq!(global.metadata.tensor("tensor").unwrap().chunks.len(), 1);
    assert_eq!(global.metadata.version.as_deref(), Some("1.0.0"));

    let lowest = plan_save(&plans, Deduplicate::LowestRank).unwrap();
    assert_eq!(kept(&lowest.selections[0]), [(0, 0), (1, 0), (2, 0)]);
    assert_eq!(kept(&lowest.selections[3]), [(2, 0)]);
}

#[test]
fn ranks_that_share_an_offer_get_the_plan_of_ranks_that_each_bring_it() {
    let plan = |shard: usize| {
        let mut plan = LocalPlan::default();
        plan.add_tensor(
            "sharded",
            None,
            DType::F32,
            vec![6, 4],
            vec![TensorBox::new(vec![shard * 2, 0], vec![2, 4])],
        );
        plan.add_whole_tensor("whole", None, DType::F32, vec![5]);
        plan.add_value("step", None, 20);
        plan
    };
    let plans: Vec<LocalPlan> = (0..9).map(|rank| plan(rank % 3)).collect();
    for deduplicate in [Deduplicate::Balanced, Deduplicate::LowestRank] {
        let offers = (0..3)
            .map(|shard| Offer {
                schema: 0,
                boxes: plans[shard].held_boxes(),
            })
            .collect();
        let of_ranks: Vec<usize> = (0..9).map(|rank| rank % 3).collect();
        let shared = plan_offers(&[plans[0].schema()], offers, &of_ranks, deduplicate).unwrap();
        assert_eq!(shared, plan_save(&plans, deduplicate).unwrap());
    }
    let lost = Offer {
        schema: 0,
        boxes: Vec::new(),
    };
    let offers = vec![
        Offer {
            schema: 0,
            boxes: plans[1].held_boxes(),
        },
        lost,
    ];
    let error = plan_offers(
        &[plans[0].schema()],
        offers,
        &[0, 1, 0],
        Deduplicate::default(),
    )
    .unwrap_err();
    let SavePlanError::Chunks { ranks, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(ranks, [0, 2]);
}

#[test]
fn the_lengths_of_values_do_not_change_a_plan() {
    let plans = |length: u64| -> Vec<LocalPlan> {
        let plan = |_| {
            let mut plan = LocalPlan::default();
            plan.add_value("step", None, length);
            plan.add_tensor("a", None, DType::F32, vec![3], vec![line(0, 3)]);
            plan.add_tensor("b", None, DType::F32, vec![5], vec![line(0, 5)]);
            plan.add_value("name", None, 20);
            plan
        };
        (0..3).map(plan).collect()
    };
    let first = plan_save(&plans(1), Deduplicate::default()).unwrap();
    for length in [2, 15, 100, 10_000] {
        let other = plan_save(&plans(length), Deduplicate::default()).unwrap();
        assert_eq!(other.selections, first.selections, "{length}");
    }
}

#[test]
fn ranks_must_agree_and_are_named_when_they_do_not() {
    let plan = |dtype, shape: Vec<usize>| {
        let mut plan = LocalPlan::default();
        let whole = TensorBox::whole(&shape);
        plan.add_tensor("model.w", None, dtype, shape, vec![whole]);
        plan
    };
    let value = {
        let mut plan = LocalPlan::default();
        plan.add_value("model.w", None, 1);
        plan
    };
    let base = plan(DType::F32, vec![2]);
    for (other, what) in [
        (plan(DType::BF16, vec![2]), "dtype"),
        (plan(DType::F32, vec![3]), "shape"),
        (value, "kind"),
    ] {
        let error =
            plan_save(&[base.clone(), base.clone(), other], Deduplicate::default()).unwrap_err();
        let text = error.to_string();
        let SavePlanError::Disagreement {
            fqn,
            what: found,
            first_rank: 0,
            second_rank: 2,
            ..
        } = error
        else {
            panic!("{text}")
        };
        assert_eq!((fqn.as_str(), found), ("model.w", what));
    }
    let mut twice = base.clone();
    twice.items.extend(base.items.clone());
    assert!(matches!(
        plan_save(&[twice], Deduplicate::default()),
        Err(SavePlanError::DuplicateKey { rank: 0, .. })
    ));
}

#[test]
fn a_key_that_readers_would_refuse_is_an_error_with_its_beginning() {
    let plan = |length: usize| {
        let mut plan = LocalPlan::default();
        plan.add_value("é".repeat(length / 2), None, 1);
        plan
    };
    assert!(plan_save(&[plan(MAX_KEY_BYTES)], Deduplicate::default()).is_ok());
    let long = plan(MAX_KEY_BYTES + 2);
    for planned in [
        plan_save(&[plan(2), long.clone()], Deduplicate::default()),
        plan_part(&long),
    ] {
        let text = planned.unwrap_err().to_string();
        assert!(
            text.contains("1048578 bytes") && text.contains("`éé") && text.len() < 400,
            "{text}"
        );
    }
}

#[test]
fn holes_overlaps_and_strays_are_errors() {
    let plans = |boxes: &[TensorBox]| -> Vec<LocalPlan> {
        let plan = |bounds: &TensorBox| {
            let mut plan = LocalPlan::default();
            plan.add_tensor("t", None, DType::F32, vec![4], vec![bounds.clone()]);
            plan
        };
        boxes.iter().map(plan).collect()
    };
    let chunks = |boxes: &[TensorBox]| match plan_save(&plans(boxes), Deduplicate::default()) {
        Ok(_) => None,
        Err(SavePlanError::Chunks { source, .. }) => Some(*source),
        Err(other) => panic!("{other}"),
    };
    assert_eq!(
        chunks(&[line(0, 1), line(1, 1), line(2, 1), line(3, 1)]),
        None
    );
    assert!(matches!(
        chunks(&[line(0, 2), line(1, 3)]),
        Some(ChunkError::Overlap { .. })
    ));
    assert!(matches!(
        chunks(&[line(0, 2), line(0, 4)]),
        Some(ChunkError::Overlap { .. })
    ));
    assert_eq!(
        chunks(&[line(0, 2), line(3, 1)]),
        Some(ChunkError::Incomplete {
            covered: 3,
            numel: 4
        })
    );
    assert!(matches!(
        chunks(&[line(0, 4), line(3, 2)]),
        Some(ChunkError::OutOfBounds { .. })
    ));
    assert!(matches!(
        chunks(&[line(0, 4), line(usize::MAX, 2)]),
        Some(ChunkError::OutOfBounds { .. })
    ));
}

#[test]
fn empty_shards_are_left_out() {
    // 5 over 4 ranks: 2, 2, 1, 0; and a tensor without elements.
    let plans: Vec<LocalPlan> = [(0, 2), (2, 2), (4, 1), (5, 0)]
        .iter()
        .map(|&(offset, size)| {
            let mut plan = LocalPlan::default();
            plan.add_tensor("t", None, DType::F32, vec![5], vec![line(offset, size)]);
            plan.add_tensor(
                "none",
                None,
                DType::F32,
                vec![0, 3],
                vec![TensorBox::whole(&[0, 3])],
            );
            plan
        })
        .collect();
    let global = plan_save(&plans, Deduplicate::default()).unwrap();
    assert_eq!(global.metadata.tensor("t").unwrap().chunks.len(), 3);
    assert_eq!(global.metadata.tensor("none").unwrap().chunks.len(), 0);
    assert!(global.selections[3].kept.is_empty());
    let wanted = LoadRequest {
        fqn: "none".into(),
        ..request(vec![0, 3], vec![TensorBox::whole(&[0, 3])])
    };
    assert!(plan_load(&global.metadata, &[wanted]).unwrap().is_empty());
}

#[test]
fn what_cannot_be_loaded_is_said_before_reading() {
    let metadata = saved(vec![8], vec![line(0, 4), line(4, 3)]);
    let ask = |request: LoadRequest| plan_load(&metadata, &[request]).unwrap_err();
    let whole = || request(vec![8], vec![line(0, 8)]);
    assert!(matches!(
        ask(whole()),
        LoadPlanError::Incomplete {
            covered: 7,
            numel: 8,
            ..
        }
    ));
    assert!(matches!(
        ask(request(vec![2, 4], vec![])),
        LoadPlanError::Size { .. }
    ));
    assert!(matches!(
        ask(request(vec![8], vec![line(7, 2)])),
        LoadPlanError::OutOfBounds { .. }
    ));
    let bf16 = LoadRequest {
        dtype: DType::BF16,
        ..request(vec![8], vec![line(0, 4)])
    };
    assert!(matches!(ask(bf16), LoadPlanError::DType { .. }));
    let missing = LoadRequest {
        fqn: "zz".into(),
        ..whole()
    };
    assert_eq!(ask(missing).to_string(), "missing key in checkpoint: `zz`");
    let overlapping = saved(vec![8], vec![line(0, 5), line(4, 4)]);
    let error = plan_load(&overlapping, &[whole()]).unwrap_err();
    assert!(matches!(
        error,
        LoadPlanError::Chunks {
            source: ChunkError::Overlap { .. },
            ..
        }
    ));
    let mut value = Metadata::default();
    value
        .entries
        .insert("t".into(), Entry::Bytes(Default::default()));
    assert!(matches!(
        plan_load(&value, &[whole()]),
        Err(LoadPlanError::Kind { .. })
    ));
}

/// Boxes that cut a tensor by a grid: each dimension at the given places.
fn grid(shape: &[usize], cuts: &[Vec<usize>]) -> Vec<TensorBox> {
    let mut boxes = vec![TensorBox::new(vec![], vec![])];
    for (&size, cuts) in shape.iter().zip(cuts) {
        let mut ends: Vec<usize> = cuts
            .iter()
            .map(|cut| cut % (size + 1))
            .chain([0, size])
            .collect();
        ends.sort_unstable();
        ends.dedup();
        boxes = boxes
            .iter()
            .flat_map(|b| {
                ends.windows(2).map(move |pair| {
                    let mut b = b.clone();
                    b.offsets.push(pair[0]);
                    b.sizes.push(pair[1] - pair[0]);
                    b
                })
            })
            .collect();
    }
    boxes
}

/// A cut: of one box, along one dimension, at one place.
type BoxCut = (
    prop::sample::Index,
    prop::sample::Index,
    prop::sample::Index,
);

/// Cuts a tensor, and what the cuts before have made of it, in two again and again.
fn cut_up(shape: &[usize], cuts: &[BoxCut]) -> Vec<TensorBox> {
    let mut boxes = vec![TensorBox::whole(shape)];
    for (which, dim, at) in cuts {
        let (which, dim) = (which.index(boxes.len()), dim.index(shape.len()));
        let size = boxes[which].sizes[dim];
        if size > 1 {
            let low = 1 + at.index(size - 1);
            let mut high = boxes[which].clone();
            boxes[which].sizes[dim] = low;
            high.offsets[dim] += low;
            high.sizes[dim] -= low;
            boxes.push(high);
        }
    }
    boxes
}

/// The search takes about `n log n` steps. One that compared each chunk with each would be stopped
/// by the test runner.
#[test]
fn many_chunks_that_only_one_of_several_dimensions_tells_apart_are_checked_in_time() {
    let count = 100_000;
    for apart in 0..4 {
        let chunk = |index: usize, size: usize| {
            let mut bounds = TensorBox::new(vec![index % 2; 4], vec![2; 4]);
            (bounds.offsets[apart], bounds.sizes[apart]) = (2 * index, size);
            bounds
        };
        let mut shape = vec![3; 4];
        shape[apart] = 2 * count + 1;
        let mut chunks: Vec<TensorBox> = (0..count).map(|index| chunk(index, 2)).collect();
        assert_eq!(validate_chunks(&shape, &chunks), Ok(16 * count));
        chunks[count / 3] = chunk(count / 3, 3);
        assert!(
            matches!(
                validate_chunks(&shape, &chunks),
                Err(ChunkError::Overlap { .. })
            ),
            "{apart}"
        );
    }
}

proptest! {
    /// Cuts a tensor into chunks at random, leaves some out, and checks that they do not overlap.
    /// Then adds one more at random, which overlaps if a comparison with each of the others says
    /// so.
    #[test]
    fn chunks_are_said_to_overlap_exactly_if_two_share_an_element(
        (shape, cuts) in prop::collection::vec(1usize..40, 1..5).prop_flat_map(|shape| {
            (Just(shape), prop::collection::vec(any::<BoxCut>(), 0..300))
        }),
        left_out in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        more in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 4),
    ) {
        let mut boxes = cut_up(&shape, &cuts);
        for index in &left_out {
            boxes.swap_remove(index.index(boxes.len()));
            if boxes.is_empty() {
                break;
            }
        }
        let numel = boxes.iter().map(TensorBox::numel).sum();
        prop_assert_eq!(validate_chunks(&shape, &boxes), Ok(numel));
        // Any other box overlaps, unless it lies where one was left out.
        let (offsets, sizes) = shape.iter().zip(&more).map(|(&size, (offset, part))| {
            let offset = offset.index(size);
            (offset, 1 + part.index(size - offset).min(2))
        }).unzip();
        let added = TensorBox::new(offsets, sizes);
        let does_overlap = boxes.iter().any(|bounds| bounds.intersect(&added).is_some());
        boxes.push(added.clone());
        match validate_chunks(&shape, &boxes) {
            Err(ChunkError::Overlap { first, second }) => {
                prop_assert!(does_overlap);
                prop_assert!(first.intersect(&second).is_some() && (first == added || second == added));
            }
            other => {
                prop_assert!(!does_overlap, "{:?}", other);
                prop_assert_eq!(other, Ok(numel + added.numel()));
            }
        }
    }
}

proptest! {
    #[test]
    fn any_grid_is_valid_and_any_move_of_one_box_is_not(
        (shape, cuts) in prop::collection::vec(1usize..7, 1..4).prop_flat_map(|shape| {
            let cuts = prop::collection::vec(prop::collection::vec(0usize..8, 0..3), shape.len());
            (Just(shape), cuts)
        }),
        pick in any::<prop::sample::Index>(),
        dim in any::<prop::sample::Index>(),
    ) {
        let boxes = grid(&shape, &cuts);
        let numel: usize = shape.iter().product();
        prop_assert_eq!(validate_chunks(&shape, &boxes), Ok(numel));
        // One box grown by a step to the left or right shares elements with a neighbour, or leaves
        // the tensor.
        let mut grown = boxes.clone();
        let (which, dim) = (pick.index(boxes.len()), dim.index(shape.len()));
        grown[which].sizes[dim] += 1;
        prop_assert!(validate_chunks(&shape, &grown).is_err());
        if boxes[which].offsets[dim] > 0 {
            let mut grown = boxes.clone();
            grown[which].offsets[dim] -= 1;
            grown[which].sizes[dim] += 1;
            let overlaps = matches!(validate_chunks(&shape, &grown), Err(ChunkError::Overlap { .. }));
            prop_assert!(overlaps);
        }
    }

    #[test]
    fn every_chunk_is_written_once_and_ranks_are_balanced(
        sizes in prop::collection::vec(1usize..5000, 1..40),
        ranks in 1usize..9,
        replicated in any::<bool>(),
    ) {
        let plans: Vec<LocalPlan> = (0..ranks).map(|rank| {
            let mut plan = LocalPlan::default();
            for (i, &size) in sizes.iter().enumerate() {
                let each = size.div_ceil(ranks);
                let range = if replicated || i % 3 == 0 { 0..size } else { rank * each..(rank + 1) * each };
                plan.add_tensor(i.to_string(), None, DType::F32, vec![size], boxes_of_flat_range(&[size], range));
            }
            plan
        }).collect();
        let global = plan_save(&plans, Deduplicate::default()).unwrap();
        prop_assert_eq!(&global, &plan_save(&plans, Deduplicate::default()).unwrap());
        let total: u64 = sizes.iter().map(|&size| size as u64 * 4).sum();
        prop_assert_eq!(global.loads.iter().sum::<u64>(), total);
        let chunks: usize = global.metadata.tensors().map(|(_, tensor)| tensor.chunks.len()).sum();
        prop_assert_eq!(global.selections.iter().map(|s| s.kept.len()).sum::<usize>(), chunks);
        let (max, mean) = (*global.loads.iter().max().unwrap() as f64, total as f64 / ranks as f64);
        let largest = global.metadata.tensors()
            .flat_map(|(_, tensor)| tensor.chunks.iter().map(|chunk| chunk.bounds.numel() as u64 * 4))
            .max().unwrap() as f64;
        // Sharded tensors cannot be moved: their own imbalance comes on top.
        let fixed = if replicated { 0.0 } else { sizes.len() as f64 * 4.0 * ranks as f64 };
        prop_assert!(max <= (1.1 * mean).max(mean + largest) + fixed, "max {max}, mean {mean}, largest {largest}");
    }
}

#[test]
fn a_thousand_tensors_on_a_thousand_ranks_are_planned() {
    let ranks = 1024;
    let plans: Vec<LocalPlan> = (0..ranks)
        .map(|rank| {
            let mut plan = LocalPlan::default();
            for i in 0..64 {
                let bounds = TensorBox::new(vec![rank * 4, 0], vec![4, 64]);
                plan.add_tensor(
                    format!("layers.{i}.weight"),
                    None,
                    DType::F32,
                    vec![ranks * 4, 64],
                    vec![bounds],
                );
            }
            plan
        })
        .collect();
    let global = plan_save(&plans, Deduplicate::default()).unwrap();
    assert!(
        global
            .selections
            .iter()
            .all(|selection| selection.kept.len() == 64)
    );
    assert_eq!(
        global
            .metadata
            .tensor("layers.63.weight")
            .unwrap()
            .chunks
            .len(),
        ranks
    );
}

/// Plans as simply as can be: all ranks' items side by side. What it gives is what any other way
/// must give.
fn simple_plan(plans: &[LocalPlan]) -> (Metadata, Vec<Vec<(u32, u32)>>) {
    type Candidates = Vec<(u32, u32, u32)>;
    let mut metadata = Metadata {
        version: Some("1.0.0".to_owned()),
        ..Metadata::default()
    };
    let paths = metadata.planner_data.get_or_insert_default();
    // Per key: its first item, and per box (in order) or for the value all (rank, item, box) that
    // have it.
    let mut keys: indexmap::IndexMap<
        &str,
        (
            &WriteItem,
            std::collections::BTreeMap<Option<TensorBox>, Candidates>,
        ),
    > = Default::default();
    for (rank, plan) in plans.iter().enumerate() {
        for (position, item) in plan.items.iter().enumerate() {
            let (_, held) = keys
                .entry(&item.fqn)
                .or_insert_with(|| (item, Default::default()));
            match &item.content {
                WriteContent::Value { .. } => {
                    held.entry(None)
                        .or_default()
                        .push((rank as u32, position as u32, 0));
                }
                WriteContent::Tensor { boxes, .. } => {
                    for (index, bounds) in boxes
                        .iter()
                        .enumerate()
                        .filter(|(_, bounds)| !bounds.is_empty())
                    {
                        let candidate = (rank as u32, position as u32, index as u32);
                        held.entry(Some(bounds.clone()))
                            .or_default()
                            .push(candidate);
                    }
                }
            }
        }
    }
    let mut loads = vec![0u64; plans.len()];
    let mut kept = vec![Vec::new(); plans.len()];
    let mut shared: Vec<(u64, Candidates)> = Vec::new();
    for (fqn, (first, held)) in keys {
        paths.extend(first.path.clone().map(|path| (fqn.to_owned(), path)));
        let mut chunks = Vec::new();
        for (bounds, candidates) in held {
            let bytes = match (&first.content, &bounds) {
                (WriteContent::Value { .. }, _) => VALUE_WEIGHT_BYTES,
                (WriteContent::Tensor { properties, .. }, Some(bounds)) => {
                    bounds.numel() as u64 * properties.dtype.size_in_bytes()
                }
                _ => unreachable!(),
            };
            chunks.extend(bounds.map(|bounds| Chunk {
                bounds,
                stored: None,
            }));
            let stays_together = matches!(&first.content, WriteContent::Tensor { is_whole: true, shape, .. }
                if !shape.is_empty() && bytes <= 64 << 10);
            match candidates.as_slice() {
                [(rank, item, index), ..] if stays_together || candidates.len() == 1 => {
                    loads[*rank as usize] += bytes;
                    kept[*rank as usize].push((*item, *index));
                }
                _ => shared.push((bytes, candidates)),
            }
        }
        let entry = match &first.content {
            WriteContent::Value { .. } => Entry::Bytes(Default::default()),
            WriteContent::Tensor {
                properties, shape, ..
            } => Entry::Tensor(TensorEntry {
                properties: properties.clone(),
                shape: shape.clone(),
                chunks,
            }),
        };
        metadata.entries.insert(fqn.to_owned(), entry);
    }
    shared.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    for (bytes, candidates) in shared {
        let (rank, item, index) = *candidates
            .iter()
            .min_by_key(|(rank, ..)| (loads[*rank as usize], *rank))
            .unwrap();
        loads[rank as usize] += bytes;
        kept[rank as usize].push((item, index));
    }
    kept.iter_mut().for_each(|kept| kept.sort_unstable());
    (metadata, kept)
}

proptest! {
    /// Keys on some ranks only, replicated on some and sharded over others, in orders of their own:
    /// what ranks have in common is told once, and the plan is the one of whole plans.
    #[test]
    fn schemas_and_boxes_make_the_plan_that_whole_plans_make(
        ranks in 1usize..6,
        keys in prop::collection::vec((1usize..40, 0u8..5, 0usize..6), 1..12),
    ) {
        let plans: Vec<LocalPlan> = (0..ranks).map(|rank| {
            let mut plan = LocalPlan::default();
            for (i, &(size, kind, owner)) in keys.iter().enumerate() {
                let name = format!("k{i}");
                let owner = owner % ranks;
                let path = (i % 3 == 0).then(|| fsdp_layout::KeyPath(vec![fsdp_layout::PathPart::Key(name.clone())]));
                let each = size.div_ceil(ranks);
                let sharded = boxes_of_flat_range(&[size], (rank * each).min(size)..((rank + 1) * each).min(size));
                let whole = vec![TensorBox::whole(&[size])];
                match kind {
                    // On every rank; on one rank only; on one rank, while the others know of it.
                    0 if i % 2 == 0 => plan.add_whole_tensor(name, path, DType::F32, vec![size]),
                    0 => plan.add_tensor(name, path, DType::F32, vec![size], whole),
                    1 if rank == owner => plan.add_whole_tensor(name, path, DType::F32, vec![size]),
                    1 => {}
                    2 => {
                        let boxes = if rank == owner { whole } else { Vec::new() };
                        plan.add_tensor(name, path, DType::BF16, vec![size], boxes);
                    }
                    3 => plan.add_tensor(name, path, DType::F32, vec![size], sharded),
                    _ => plan.add_value(name, path, size as u64 * 10 + rank as u64),
                }
            }
            if rank % 2 == 1 {
                let first = plan.items.len().min(1);
                plan.items.rotate_left(first);
            }
            plan
        }).collect();
        let global = plan_save(&plans, Deduplicate::default()).unwrap();
        let (metadata, selected) = simple_plan(&plans);
        // The order of the keys too.
        prop_assert!(metadata.entries.keys().eq(global.metadata.entries.keys()));
        prop_assert_eq!(&metadata, &global.metadata);
        prop_assert_eq!(selected, global.selections.iter().map(kept).collect::<Vec<_>>());
        // Each selected box is the chunk that it says.
        for (plan, selection) in plans.iter().zip(&global.selections) {
            for of in &selection.kept {
                let item = &plan.items[of.item as usize];
                let (fqn, entry) = global.metadata.entries.get_index(of.entry as usize).unwrap();
                prop_assert_eq!(fqn, &item.fqn);
                if let (WriteContent::Tensor { boxes, .. }, Entry::Tensor(tensor)) = (&item.content, entry) {
                    prop_assert_eq!(&boxes[of.index as usize], &tensor.chunks[of.chunk as usize].bounds);
                }
            }
        }
    }
}
