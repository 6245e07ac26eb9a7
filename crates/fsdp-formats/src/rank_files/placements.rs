//! Where the parts of tensors belong that are stored as plain tensors: what `metadata.pkl` of
//! `torch_checkpointing` says of them.

use std::collections::HashMap;

use fsdp_layout::{DType, Placement, PlainValue, TensorBox};

use crate::error::{FileError, FormatError};
use crate::limits::is_sane_shape;
use crate::strided::StridedLayout;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::sharded::{ShardedRef, cut_by_placements};
use crate::torch::tensor_ref::TensorRef;

/// The tensors of one item, by their keys, whose parts are joined with dots.
#[derive(Debug, Default)]
pub(super) struct Placements(pub(super) HashMap<String, PlacedTensor>);

/// The description of one tensor.
#[derive(Debug)]
pub(super) struct PlacedTensor {
    /// The parts of its key: texts and numbers.
    pub(super) keys: Vec<PlainValue>,
    /// How ranks hold it; none if that is not known. Ranks that hold it in the same way are
    /// together.
    pub(super) groups: Vec<RankGroup>,
    /// The group of each rank, if there are several groups.
    pub(super) group_of_rank: HashMap<usize, usize>,
}

/// Ranks that hold a tensor in the same way.
#[derive(Debug)]
pub(super) struct RankGroup {
    /// The ranks, sorted.
    pub(super) ranks: Vec<usize>,
    /// The whole tensor.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) sharding: Sharding,
}

/// How ranks hold a tensor.
#[derive(Debug)]
pub(super) enum Sharding {
    /// By placements on a mesh of ranks.
    Mesh {
        placements: Vec<Placement>,
        mesh_shape: Vec<usize>,
        /// The ranks in the mesh, row by row.
        mesh_ranks: Vec<usize>,
    },
    /// In boxes, which each rank names.
    Boxes(Vec<LocalBox>),
}

/// A box of a whole tensor, and its place in the tensor that a rank holds.
#[derive(Debug)]
pub(super) struct LocalBox {
    pub(super) bounds: TensorBox,
    pub(super) local_offsets: Vec<usize>,
}

impl Placements {
    /// Returns `true` if the places of all tensors' parts are known.
    pub(super) fn are_known(&self) -> bool {
        self.0.values().all(|tensor| !tensor.groups.is_empty())
    }

    /// Returns the parts of a tensor's key; `None` if the tensor is not known.
    pub(super) fn keys_of(&self, key: &str) -> Option<&[PlainValue]> {
        self.0.get(key).map(|tensor| &tensor.keys[..])
    }
}

/// Makes parts of whole tensors of the plain tensors in a rank's file. A tensor that every rank has
/// whole, or of which nothing is known, stays as it is.
///
/// # Errors
/// A tensor that does not fit its place; a place that is not known for this rank.
pub(super) fn place_tensors(
    flat: &mut FlatFile,
    placements: &Placements,
    rank: usize,
) -> Result<(), FileError> {
    let mut placed = Vec::new();
    for (key, (path, leaf)) in &flat.found {
        let Leaf::Tensor(tensor, None) = leaf else {
            continue;
        };
        let Some(known) = placements.0.get(&path.flat_key()) else {
            continue;
        };
        let sharded = known
            .place(tensor, rank)
            .map_err(|error| flat.error(error.of_key(key)))?;
        if let Some(sharded) = sharded {
            placed.push((key.clone(), sharded));
        }
    }
    for (key, sharded) in placed {
        if let Some((_, leaf)) = flat.found.get_mut(&key) {
            *leaf = Leaf::Sharded(sharded);
        }
    }
    Ok(())
}

impl PlacedTensor {
    /// Returns the part of the whole tensor that a rank's plain tensor is; `None` if it is all of
    /// it, or if that is not known.
    fn place(&self, tensor: &TensorRef, rank: usize) -> Result<Option<ShardedRef>, FormatError> {
        if self.groups.is_empty() {
            return Ok(None);
        }
        let group = match &self.groups[..] {
            [group] => group.ranks.binary_search(&rank).is_ok().then_some(group),
            groups => self.group_of_rank.get(&rank).map(|index| &groups[*index]),
        }
        .ok_or_else(|| misplaced(format!("it has no place for the tensor of rank {rank}")))?;
        if tensor.dtype != group.dtype {
            let expected = format!("a tensor of dtype `{}`", group.dtype);
            return Err(FormatError::unexpected(
                expected,
                format!("one of `{}`", tensor.dtype),
            ));
        }
        let (parts, ranks) = match &group.sharding {
            Sharding::Mesh { placements, .. }
                if placements
                    .iter()
                    .all(|placement| *placement == Placement::Replicate) =>
            {
                if tensor.shape != group.shape {
                    let expected = format!("a tensor of shape {:?}", group.shape);
                    return Err(FormatError::unexpected(
                        expected,
                        format!("one of {:?}", tensor.shape),
                    ));
                }
                return Ok(None);
            }
            Sharding::Mesh {
                placements,
                mesh_shape,
                mesh_ranks,
            } => {
                let coordinate = coordinate_of(rank, mesh_shape, mesh_ranks)
                    .ok_or_else(|| misplaced(format!("its mesh does not have rank {rank}")))?;
                let parts =
                    cut_by_placements(tensor, &group.shape, placements, mesh_shape, &coordinate)?;
                (parts, mesh_ranks.len())
            }
            Sharding::Boxes(boxes) => (cut_boxes(tensor, boxes)?, 0),
        };
        Ok(Some(ShardedRef {
            dtype: group.dtype,
            shape: group.shape.clone(),
            parts,
            ranks,
        }))
    }
}

/// Makes the error of a description of a tensor's place that cannot be right.
pub(super) fn misplaced(reason: impl ToString) -> FormatError {
    FormatError::malformed("placement in `metadata.pkl`", reason)
}

/// Returns the place of a rank in a mesh; `None` if it is not in it.
fn coordinate_of(rank: usize, mesh_shape: &[usize], mesh_ranks: &[usize]) -> Option<Vec<usize>> {
    // In most meshes the ranks stand in their order.
    let mut position = match mesh_ranks.get(rank) {
        Some(at_own_place) if *at_own_place == rank => rank,
        _ => mesh_ranks.iter().position(|other| *other == rank)?,
    };
    let mut coordinate = vec![0; mesh_shape.len()];
    for (index, size) in coordinate.iter_mut().zip(mesh_shape).rev() {
        *index = position % size;
        position /= size;
    }
    Some(coordinate)
}

/// Cuts the boxes of a whole tensor out of the tensor that a rank holds. A box that lies outside of
/// that is an error.
fn cut_boxes(tensor: &TensorRef, boxes: &[LocalBox]) -> Result<Vec<TensorRef>, FormatError> {
    let mut parts = Vec::with_capacity(boxes.len());
    for LocalBox {
        bounds,
        local_offsets,
    } in boxes
    {
        let local = TensorBox::new(local_offsets.clone(), bounds.sizes.clone());
        if !local.fits(&tensor.shape) {
            let reason = format!(
                "a box of it does not fit the tensor of shape {:?}",
                tensor.shape
            );
            return Err(misplaced(reason));
        }
        if bounds.is_empty() {
            continue;
        }
        let skipped: usize = local_offsets
            .iter()
            .zip(&tensor.layout.strides)
            .map(|(offset, stride)| offset * stride)
            .sum();
        parts.push(TensorRef {
            shape: bounds.sizes.clone(),
            layout: StridedLayout {
                bounds: bounds.clone(),
                offset: tensor.layout.offset + skipped as u64,
                strides: tensor.layout.strides.clone(),
            },
            ..tensor.clone()
        });
    }
    Ok(parts)
}

/// Checks the description of a whole tensor, and that of its boxes or mesh.
pub(super) fn check_group(group: &RankGroup) -> Result<(), FormatError> {
    if !is_sane_shape(&group.shape) {
        return Err(misplaced("the whole tensor has too many elements"));
    }
    match &group.sharding {
        Sharding::Mesh {
            placements,
            mesh_shape,
            mesh_ranks,
        } => {
            let size = mesh_shape
                .iter()
                .try_fold(1usize, |total, &size| total.checked_mul(size));
            if size != Some(mesh_ranks.len()) || mesh_ranks.is_empty() {
                return Err(misplaced("the shape of its mesh does not fit its ranks"));
            }
            if placements.len() != mesh_shape.len() {
                return Err(misplaced(
                    "it has not one placement for each dimension of its mesh",
                ));
            }
        }
        Sharding::Boxes(boxes) => {
            for LocalBox {
                bounds,
                local_offsets,
            } in boxes
            {
                if local_offsets.len() != group.shape.len() || !bounds.fits(&group.shape) {
                    return Err(misplaced("a box lies outside of the whole tensor"));
                }
            }
        }
    }
    Ok(())
}
