//! Placements of a tensor on a device mesh, as torch's DTensor has them, turned into boxes.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::boxes::TensorBox;
use crate::shard::chunk_range;

/// The way in which a tensor is spread along one mesh dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Placement {
    /// A cut of this tensor dimension by `torch.chunk`'s rule.
    Shard(usize),
    /// A whole copy on every rank of the mesh dimension.
    Replicate,
    /// A cut of tensor dimension `dim` inside each of `split_factor` blocks: torch's
    /// `_StridedShard`, which FSDP over tensor parallelism makes.
    StridedShard {
        /// The tensor dimension.
        dim: usize,
        /// Number of blocks.
        split_factor: usize,
    },
    /// A part of a sum that is not reduced over the mesh dimension yet. It has no boxes and cannot
    /// be checkpointed.
    Partial,
}

/// The reason that placements have no boxes.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// One of the placements is a partial sum.
    #[error("a partial placement has no boxes: reduce it first")]
    Partial,
    /// A shard names a dimension that the tensor does not have.
    #[error("a placement shards dimension {dim} of a tensor of {rank} dimensions")]
    NoSuchDim {
        /// The dimension asked for.
        dim: usize,
        /// The tensor's number of dimensions.
        rank: usize,
    },
    /// The placements or coordinates are not one for each mesh dimension.
    #[error("{placements} placements and {coordinate} coordinates on a mesh of {mesh} dimensions")]
    WrongMesh {
        /// Placements given.
        placements: usize,
        /// Coordinates given.
        coordinate: usize,
        /// Mesh dimensions.
        mesh: usize,
    },
    /// A coordinate lies outside of its mesh dimension.
    #[error("coordinate {coordinate} does not exist on a mesh dimension of size {size}")]
    NoSuchCoordinate {
        /// The coordinate.
        coordinate: usize,
        /// The size of the mesh dimension.
        size: usize,
    },
    /// A strided shard cuts a dimension into no blocks.
    #[error("a strided shard of dimension {dim} cuts it into no blocks")]
    NoBlocks {
        /// The tensor dimension.
        dim: usize,
    },
}

/// Returns the boxes of a tensor of `shape` that the rank at `coordinate` of a mesh of `mesh_shape`
/// owns.
///
/// Placements are applied left to right, as torch does. The list is empty for a rank without
/// elements, and has more than one box where strided shards own rows that do not touch (torch
/// writes those wrongly, as one box).
///
/// # Errors
/// See [`PlacementError`].
///
/// ```
/// use fsdp_layout::{Placement, TensorBox, placement::boxes_of_placements};
/// let boxes = boxes_of_placements(&[10, 4], &[Placement::Shard(0), Placement::Shard(0)], &[2, 2], &[0, 1])?;
/// assert_eq!(boxes, [TensorBox::new(vec![3, 0], vec![2, 4])]);
/// # Ok::<(), fsdp_layout::placement::PlacementError>(())
/// ```
pub fn boxes_of_placements(
    shape: &[usize],
    placements: &[Placement],
    mesh_shape: &[usize],
    coordinate: &[usize],
) -> Result<Vec<TensorBox>, PlacementError> {
    if placements.len() != mesh_shape.len() || coordinate.len() != mesh_shape.len() {
        return Err(PlacementError::WrongMesh {
            placements: placements.len(),
            coordinate: coordinate.len(),
            mesh: mesh_shape.len(),
        });
    }
    if let Some((&coordinate, &size)) = coordinate
        .iter()
        .zip(mesh_shape)
        .find(|(index, size)| index >= size)
    {
        return Err(PlacementError::NoSuchCoordinate { coordinate, size });
    }
    // For each tensor dimension, the ranges of indices that the rank still owns after the
    // placements so far.
    let mut owned_ranges: Vec<Vec<Range<usize>>> = shape
        .iter()
        .map(|&dim| std::iter::once(0..dim).collect())
        .collect();
    for ((placement, &mesh_size), &index) in placements.iter().zip(mesh_shape).zip(coordinate) {
        let (dim, split_factor) = match *placement {
            Placement::Replicate => continue,
            Placement::Partial => return Err(PlacementError::Partial),
            // A plain shard is a strided one whose only block is the whole dimension.
            Placement::Shard(dim) => (dim, 1),
            Placement::StridedShard { dim, split_factor } => (dim, split_factor),
        };
        let rank = shape.len();
        let ranges = owned_ranges
            .get_mut(dim)
            .ok_or(PlacementError::NoSuchDim { dim, rank })?;
        if split_factor == 0 {
            return Err(PlacementError::NoBlocks { dim });
        }
        let total = ranges.iter().map(ExactSizeIterator::len).sum();
        let mut pieces = Vec::new();
        // Each block is cut like a tensor of its own, so the rank owns a piece of every block.
        // Blocks after the last index are empty, and there may be very many of them.
        for block in 0..split_factor.min(total) {
            let block = chunk_range(total, split_factor, block);
            let piece = chunk_range(block.len(), mesh_size, index);
            pieces.extend(select_within(
                ranges,
                block.start + piece.start..block.start + piece.end,
            ));
        }
        *ranges = pieces;
    }
    // A box for each combination of one range in every dimension.
    let mut boxes = vec![TensorBox::whole(&[])];
    for ranges in owned_ranges {
        boxes = with_dimension(&boxes, &merge_ranges(ranges));
    }
    boxes.retain(|b| !b.is_empty());
    Ok(boxes)
}

/// Returns each box extended by one more dimension, once for each of the ranges in that dimension.
fn with_dimension(boxes: &[TensorBox], ranges: &[Range<usize>]) -> Vec<TensorBox> {
    let mut extended = Vec::new();
    for base in boxes {
        for range in ranges {
            let mut extended_box = base.clone();
            extended_box.offsets.push(range.start);
            extended_box.sizes.push(range.len());
            extended.push(extended_box);
        }
    }
    extended
}

/// Returns the indices at the positions `wanted` of `ranges`. Positions are counted over all
/// ranges, one after the other.
fn select_within(ranges: &[Range<usize>], wanted: Range<usize>) -> Vec<Range<usize>> {
    let mut selected = Vec::new();
    let mut previous_len = 0;
    for range in ranges {
        // The part of `wanted` in this range, counted from the start of the range. It is empty if
        // `wanted` is elsewhere.
        let start = wanted.start.clamp(previous_len, previous_len + range.len()) - previous_len;
        let end = wanted.end.clamp(previous_len, previous_len + range.len()) - previous_len;
        if start < end {
            selected.push(range.start + start..range.start + end);
        }
        previous_len += range.len();
    }
    selected
}

/// Joins ranges that follow each other without a gap.
fn merge_ranges(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(previous) if previous.end == range.start => previous.end = range.end,
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one_dim(len: usize, placements: [Placement; 2]) -> Vec<Vec<(usize, usize)>> {
        [[0, 0], [0, 1], [1, 0], [1, 1]]
            .iter()
            .map(|coordinate| {
                boxes_of_placements(&[len], &placements, &[2, 2], coordinate)
                    .unwrap()
                    .iter()
                    .map(|b| (b.sizes[0], b.offsets[0]))
                    .collect()
            })
            .collect()
    }

    #[test]
    fn two_mesh_dimensions_on_one_tensor_dimension_as_torch_has_them() {
        let shard = [Placement::Shard(0), Placement::Shard(0)];
        assert_eq!(one_dim(10, shard), [[(3, 0)], [(2, 3)], [(3, 5)], [(2, 8)]]);
        let over_tp = [
            Placement::StridedShard {
                dim: 0,
                split_factor: 2,
            },
            Placement::Shard(0),
        ];
        assert_eq!(
            one_dim(8, over_tp),
            [[(2, 0)], [(2, 4)], [(2, 2)], [(2, 6)]]
        );
        assert_eq!(
            one_dim(10, over_tp),
            [[(3, 0)], [(3, 5)], [(2, 3)], [(2, 8)]]
        );
    }

    #[test]
    fn disjoint_rows_are_several_boxes() {
        // torch describes these as one chunk of two rows at offset 0; the rows really are 0 and 2.
        let placements = [
            Placement::Shard(0),
            Placement::StridedShard {
                dim: 0,
                split_factor: 2,
            },
        ];
        let boxes = one_dim(8, placements);
        assert_eq!(boxes[0], [(1, 0), (1, 2)]);
        assert_eq!(boxes[1], [(1, 1), (1, 3)]);
    }

    #[test]
    fn what_has_no_boxes_is_refused() {
        assert_eq!(
            boxes_of_placements(&[4], &[Placement::Partial], &[2], &[0]),
            Err(PlacementError::Partial)
        );
        assert_eq!(
            boxes_of_placements(&[4], &[Placement::Shard(1)], &[2], &[0]),
            Err(PlacementError::NoSuchDim { dim: 1, rank: 1 })
        );
        assert!(matches!(
            boxes_of_placements(&[4], &[], &[2], &[0]),
            Err(PlacementError::WrongMesh {
                placements: 0,
                mesh: 1,
                ..
            })
        ));
        assert_eq!(
            boxes_of_placements(&[1], &[Placement::Shard(0)], &[2], &[1]),
            Ok(vec![])
        );
        let outside = PlacementError::NoSuchCoordinate {
            coordinate: 2,
            size: 2,
        };
        assert_eq!(
            boxes_of_placements(&[4], &[Placement::Replicate], &[2], &[2]),
            Err(outside)
        );
        let strided = |split_factor| Placement::StridedShard {
            dim: 0,
            split_factor,
        };
        assert_eq!(
            boxes_of_placements(&[4], &[strided(0)], &[2], &[0]),
            Err(PlacementError::NoBlocks { dim: 0 })
        );
        // More blocks than indices are no more work.
        let first = TensorBox::new(vec![0], vec![4]);
        assert_eq!(
            boxes_of_placements(&[4], &[strided(usize::MAX)], &[2], &[0]),
            Ok(vec![first])
        );
    }

    proptest! {
        #[test]
        fn shards_of_a_mesh_partition_the_tensor(
            shape in prop::collection::vec(0usize..7, 1..4),
            mesh in prop::collection::vec(1usize..4, 1..4),
            picks in prop::collection::vec((0usize..3, 0usize..4), 3),
        ) {
            let placements: Vec<Placement> = mesh.iter().zip(&picks).map(|(_, &(dim, split))| {
                let dim = dim % shape.len();
                if split == 0 { Placement::Shard(dim) } else { Placement::StridedShard { dim, split_factor: split } }
            }).collect();
            let strides = crate::boxes::row_major_strides(&mesh);
            let mut owners = vec![0; shape.iter().product()];
            for rank in 0..mesh.iter().product::<usize>() {
                let coordinate: Vec<usize> = strides.iter().zip(&mesh).map(|(s, d)| rank / s % d).collect();
                for b in boxes_of_placements(&shape, &placements, &mesh, &coordinate).unwrap() {
                    prop_assert!(b.fits(&shape));
                    for run in crate::boxes::copy_runs(&b, &TensorBox::whole(&shape), &b) {
                        owners[run.src..run.src + run.len].iter_mut().for_each(|n| *n += 1);
                    }
                }
            }
            prop_assert!(owners.iter().all(|&n| n == 1));
        }
    }
}
