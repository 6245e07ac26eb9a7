//! The note in the header of a tensor-parallel rank's file: the rank, and the part of each tensor
//! that the file holds.

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::row_major_strides;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use crate::limits::is_sane_shape;

/// The key of the note in the `__metadata__` of a rank's file. The value is a [`RankNote`] as JSON.
pub const RANK_NOTE: &str = "fsdp.tensor_parallel";

/// The note in a file of a tensor-parallel rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankNote {
    /// The rank.
    pub rank: usize,
    /// The number of files of each rank.
    pub files: Vec<usize>,
    /// The tensors that are cut, by key. The others are whole.
    pub tensors: IndexMap<String, SliceNote>,
}

/// The part of a tensor that a file holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceNote {
    /// The way of cutting, such as `colwise(heads)`.
    pub how: String,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The dimension along which the tensor is cut.
    pub dim: usize,
    /// The ranges of indices along `dim`, each as its first index and the one after its last.
    pub ranges: Vec<(usize, usize)>,
}

/// A box of a tensor, and its position in the part that a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SliceBox {
    pub(super) bounds: TensorBox,
    /// The position of the box's first element in the part, in elements.
    pub(super) first_element: u64,
    /// The strides of the part in elements, if the box's elements are not contiguous in it.
    pub(super) strides: Option<Vec<usize>>,
}

/// Returns the name of a rank's file. vLLM and SGLang look for files of these names.
pub fn rank_file_name(rank: usize, file: usize) -> String {
    format!("model-rank-{rank}-part-{file}.safetensors")
}

/// Returns the rank in the name of a rank's file; `None` for other names.
pub(super) fn rank_in_name(name: &str) -> Option<usize> {
    let (rank, file) = name
        .strip_prefix("model-rank-")?
        .strip_suffix(".safetensors")?
        .split_once("-part-")?;
    let rank = rank.parse().ok()?;
    // Other texts of the same numbers, such as `00`, are other names.
    (rank_file_name(rank, file.parse().ok()?) == name).then_some(rank)
}

impl RankNote {
    /// Returns the names of the files of all ranks.
    pub(super) fn file_names(&self) -> impl Iterator<Item = String> {
        self.files
            .iter()
            .enumerate()
            .flat_map(|(rank, &file_count)| {
                (0..file_count).map(move |file| rank_file_name(rank, file))
            })
    }
}

impl SliceNote {
    /// Returns the boxes that a part of the shape `part_shape` consists of, without empty ones;
    /// `None` if the note does not fit the shape.
    pub(super) fn boxes(&self, part_shape: &[usize]) -> Option<Vec<SliceBox>> {
        let mut expected_shape = self.shape.clone();
        let size = expected_shape.get_mut(self.dim)?;
        let whole_size = std::mem::replace(size, *part_shape.get(self.dim)?);
        if expected_shape != part_shape || !is_sane_shape(&self.shape) {
            return None;
        }
        let strides = row_major_strides(part_shape);
        let is_strided =
            self.ranges.len() > 1 && part_shape[..self.dim].iter().any(|&size| size != 1);
        let mut boxes = Vec::new();
        let mut part_index = 0usize;
        let mut last_end = 0;
        for &(start, end) in &self.ranges {
            // Ranges must be in order in the tensor too, so no index occurs twice.
            let range_size = end
                .checked_sub(start)
                .filter(|_| start >= last_end && end <= whole_size)?;
            last_end = end;
            if range_size > 0 {
                let mut bounds = TensorBox::whole(&self.shape);
                bounds.offsets[self.dim] = start;
                bounds.sizes[self.dim] = range_size;
                boxes.push(SliceBox {
                    bounds,
                    first_element: part_index.checked_mul(strides[self.dim])? as u64,
                    strides: is_strided.then(|| strides.clone()),
                });
            }
            part_index = part_index.checked_add(range_size)?;
        }
        (part_index == part_shape[self.dim]).then_some(boxes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a note of a part of a tensor.
    fn note(shape: &[usize], dim: usize, ranges: &[(usize, usize)]) -> SliceNote {
        SliceNote {
            how: String::new(),
            shape: shape.to_vec(),
            dim,
            ranges: ranges.to_vec(),
        }
    }

    #[test]
    fn ranges_become_boxes_in_the_part() {
        let boxes = note(&[4, 12], 1, &[(2, 4), (6, 8)]).boxes(&[4, 4]).unwrap();
        assert_eq!(boxes[1].bounds, TensorBox::new(vec![0, 6], vec![4, 2]));
        assert_eq!(
            (boxes[1].first_element, boxes[1].strides.as_deref()),
            (2, Some(&[4, 1][..]))
        );
        let boxes = note(&[12, 4], 0, &[(2, 4), (6, 8), (12, 12)])
            .boxes(&[4, 4])
            .unwrap();
        assert_eq!(
            (boxes.len(), boxes[1].first_element, &boxes[1].strides),
            (2, 8, &None)
        );
    }

    #[test]
    fn notes_that_do_not_fit_their_part_are_refused() {
        for (shape, dim, ranges, part) in [
            (&[4, 8][..], 0, &[(0, 2)][..], &[3, 8][..]),
            (&[4, 8], 0, &[(0, 2)], &[2, 7]),
            (&[4, 8], 0, &[(0, 2)], &[2]),
            (&[4, 8], 2, &[(0, 2)], &[2, 8]),
            (&[4, 8], 0, &[(3, 5)], &[2, 8]),
            (&[4, 8], 0, &[(2, 1), (0, 3)], &[2, 8]),
            (&[4, 8], 0, &[(2, 3), (1, 2)], &[2, 8]),
            (&[4, 8], 0, &[(1, 2), (1, 2)], &[2, 8]),
            (&[], 0, &[], &[]),
            (&[usize::MAX, usize::MAX], 0, &[(0, 2)], &[2, usize::MAX]),
        ] {
            assert_eq!(
                note(shape, dim, ranges).boxes(part),
                None,
                "{shape:?} {dim} {ranges:?} {part:?}"
            );
        }
    }
}
