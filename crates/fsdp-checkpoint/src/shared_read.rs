//! Shared reading: ranks that load the same data from a checkpoint (replicas) each read a share of
//! it and send it to the others.

use std::hash::{Hash as _, Hasher as _};
use std::ops::Range;

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_formats::plan::LoadRequest;
use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::{DeviceMesh, TensorBox};
use fsdp_state::engine::Wanted;
use twox_hash::XxHash3_64;

/// The number of bytes that the replicas exchange at once. Each rank needs additional memory for
/// its share of them.
pub(crate) const PIECE_BYTES: usize = 64 << 20;

/// Returns the group of the ranks that load the same data as this one. Returns `None` if the ranks
/// do not form a mesh of replicas and shards, in which rank `r` loads the same as rank `r %
/// shards`. Collective: an object all-gather.
pub(crate) fn find_replicas(
    group: &ProcessGroup,
    wanted: &[Wanted],
) -> Result<Option<ProcessGroup>, CommError> {
    if group.world_size() == 1 {
        return Ok(None);
    }
    let mut hasher = XxHash3_64::new();
    for tensor in wanted {
        (tensor.position, tensor.dtype, &tensor.boxes).hash(&mut hasher);
    }
    let wanted_hashes = group.all_gather_object(&hasher.finish())?;
    let Some(shard_count) = shard_count_of(&wanted_hashes) else {
        return Ok(None);
    };
    let rank_count = wanted_hashes.len();
    let mesh = DeviceMesh::new(
        &[rank_count / shard_count, shard_count],
        &["replicate", "shard"],
        rank_count,
    )
    .expect("replicas and shards make up all ranks");
    group.mesh_group(&mesh, 0).map(Some)
}

/// Returns the number of shards, if each rank `r` loads the same as rank `r % shards`; else `None`.
/// `wanted_hashes` has a hash of what each rank loads.
fn shard_count_of(wanted_hashes: &[u64]) -> Option<usize> {
    let (first_hash, later_hashes) = wanted_hashes.split_first()?;
    // The second rank that loads the same as rank 0 is the first one of the second replica.
    let shard_count = 1 + later_hashes.iter().position(|hash| hash == first_hash)?;
    let mut replicas = wanted_hashes.chunks(shard_count);
    if replicas.all(|replica| *replica == wanted_hashes[..shard_count]) {
        Some(shard_count)
    } else {
        None
    }
}

/// The boxes of several tensors, one after the other, as one sequence of bytes. Each replica reads
/// a share of it.
pub(crate) struct JoinedBoxes {
    boxes: Vec<JoinedBox>,
    byte_len: usize,
}

/// A box in the sequence.
struct JoinedBox {
    /// The index of the tensor among the wanted ones.
    wanted_index: usize,
    /// The index of the box among the boxes of that tensor.
    box_index: usize,
    /// The position of the box's first byte in the sequence.
    sequence_offset: usize,
    /// The number of bytes of the box.
    byte_len: usize,
    /// The number of bytes of an element.
    element_bytes: usize,
}

/// A range of the bytes of a box.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BoxPart {
    /// The index of the box among all boxes of the sequence.
    pub(crate) joined_index: usize,
    /// The index of its tensor among the wanted ones.
    pub(crate) wanted_index: usize,
    /// The range, counted from the first byte of the box.
    pub(crate) byte_range: Range<usize>,
}

impl JoinedBoxes {
    /// Joins all boxes of the wanted tensors.
    pub(crate) fn new(wanted: &[Wanted]) -> Self {
        let mut joined = JoinedBoxes {
            boxes: Vec::new(),
            byte_len: 0,
        };
        for (wanted_index, tensor) in wanted.iter().enumerate() {
            let element_bytes = tensor.dtype.size_in_bytes() as usize;
            for (box_index, bounds) in tensor.boxes.iter().enumerate() {
                let byte_len = bounds.numel() * element_bytes;
                joined.boxes.push(JoinedBox {
                    wanted_index,
                    box_index,
                    sequence_offset: joined.byte_len,
                    byte_len,
                    element_bytes,
                });
                joined.byte_len += byte_len;
            }
        }
        joined
    }

    /// Cuts the sequence into pieces of `piece_bytes` ([`PIECE_BYTES`] except in tests), and each
    /// piece into one share for each replica. Returns the shares of each piece, in the order of the
    /// replicas, as ranges of the sequence. No element is cut.
    pub(crate) fn shares(
        &self,
        piece_bytes: usize,
        replica_count: usize,
    ) -> Vec<Vec<Range<usize>>> {
        let mut shares_of_pieces = Vec::new();
        for start in (0..self.byte_len).step_by(piece_bytes) {
            let piece_len = piece_bytes.min(self.byte_len - start);
            // Shares are equally long, except that a cut inside an element is moved to the start of
            // that element. The end of the piece is moved like this too, and the next piece then
            // begins there.
            let cuts: Vec<usize> = (0..=replica_count)
                .map(|replica| self.element_start(start + piece_len * replica / replica_count))
                .collect();
            shares_of_pieces.push(cuts.windows(2).map(|pair| pair[0]..pair[1]).collect());
        }
        shares_of_pieces
    }

    /// Returns the position of the first byte of the element that the byte at `offset` belongs to.
    fn element_start(&self, offset: usize) -> usize {
        let next_box = self
            .boxes
            .partition_point(|entry| entry.sequence_offset <= offset);
        match self.boxes[..next_box].last() {
            Some(entry) if offset < entry.sequence_offset + entry.byte_len => {
                offset - (offset - entry.sequence_offset) % entry.element_bytes
            }
            _ => offset,
        }
    }

    /// Returns the parts of boxes that a range of the sequence consists of.
    pub(crate) fn box_parts_in(&self, range: &Range<usize>) -> Vec<BoxPart> {
        let first_index = self
            .boxes
            .partition_point(|entry| entry.sequence_offset + entry.byte_len <= range.start);
        let mut parts = Vec::new();
        for (joined_index, entry) in self.boxes.iter().enumerate().skip(first_index) {
            if entry.sequence_offset >= range.end {
                break;
            }
            let start = range.start.max(entry.sequence_offset);
            let end = range.end.min(entry.sequence_offset + entry.byte_len);
            if start < end {
                parts.push(BoxPart {
                    joined_index,
                    wanted_index: entry.wanted_index,
                    byte_range: start - entry.sequence_offset..end - entry.sequence_offset,
                });
            }
        }
        parts
    }

    /// Returns the requests that read a range of the sequence. The bytes of their boxes, one after
    /// the other, are the bytes of the range. `make_request` makes the request for some boxes of a
    /// wanted tensor.
    pub(crate) fn requests(
        &self,
        wanted: &[Wanted],
        range: &Range<usize>,
        make_request: impl Fn(&Wanted, Vec<TensorBox>) -> LoadRequest,
    ) -> Vec<LoadRequest> {
        let mut requests: Vec<(usize, Vec<TensorBox>)> = Vec::new();
        for part in self.box_parts_in(range) {
            let JoinedBox {
                box_index,
                element_bytes,
                ..
            } = self.boxes[part.joined_index];
            let bounds = &wanted[part.wanted_index].boxes[box_index];
            let elements =
                part.byte_range.start / element_bytes..part.byte_range.end / element_bytes;
            let mut boxes = boxes_of_flat_range(&bounds.sizes, elements);
            for inner in &mut boxes {
                for (offset, outer_offset) in inner.offsets.iter_mut().zip(&bounds.offsets) {
                    *offset += outer_offset;
                }
            }
            match requests.last_mut() {
                Some((last_index, last_boxes)) if *last_index == part.wanted_index => {
                    last_boxes.append(&mut boxes)
                }
                _ => requests.push((part.wanted_index, boxes)),
            }
        }
        requests
            .into_iter()
            .map(|(wanted_index, boxes)| make_request(&wanted[wanted_index], boxes))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use fsdp_layout::DType;

    use super::*;

    fn wanted(dtype: DType, shape: &[usize], boxes: Vec<TensorBox>) -> Wanted {
        Wanted {
            position: 0,
            place: 0,
            key: String::new(),
            dtype,
            target_dtype: dtype,
            shape: shape.to_vec(),
            boxes,
            is_same_on_all: false,
            tied_positions: Vec::new(),
        }
    }

    #[test]
    fn replicas_are_found_where_ranks_form_a_mesh() {
        for (wants, expected) in [
            (&[1, 1, 1][..], Some(1)),
            (&[1, 2, 1, 2], Some(2)),
            (&[1, 2, 2, 1, 2, 2], Some(3)),
            (&[1, 2, 3], None),
            (&[1, 2, 1], None),
            (&[1, 1, 2, 2], None),
            (&[1, 2, 1, 3], None),
        ] {
            assert_eq!(shard_count_of(wants), expected, "{wants:?}");
        }
    }

    #[test]
    fn shares_cover_all_boxes_once_and_cut_no_element() {
        let wanted = [
            wanted(DType::U8, &[5], vec![TensorBox::whole(&[5])]),
            wanted(
                DType::F32,
                &[4, 3],
                vec![
                    TensorBox::new(vec![1, 0], vec![2, 3]),
                    TensorBox::new(vec![3, 1], vec![1, 1]),
                ],
            ),
            wanted(DType::F32, &[0], vec![TensorBox::whole(&[0])]),
            wanted(DType::U8, &[], vec![TensorBox::whole(&[])]),
        ];
        let joined = JoinedBoxes::new(&wanted);
        assert_eq!(joined.byte_len, 5 + 24 + 4 + 1);
        for piece_bytes in [1, 7, 16, 100] {
            for replicas in [1, 2, 3, 5] {
                let shares: Vec<Range<usize>> = joined
                    .shares(piece_bytes, replicas)
                    .into_iter()
                    .flatten()
                    .collect();
                let mut covered_bytes = 0;
                let mut elements = 0;
                for share in shares {
                    assert_eq!(share.start, covered_bytes);
                    covered_bytes = share.end;
                    let request = |wanted: &Wanted, boxes: Vec<TensorBox>| LoadRequest {
                        fqn: String::new(),
                        dtype: wanted.dtype,
                        shape: wanted.shape.clone(),
                        boxes,
                    };
                    let requests = joined.requests(&wanted, &share, request);
                    let bytes = requests.iter().map(|request| {
                        let numel: usize = request.boxes.iter().map(TensorBox::numel).sum();
                        elements += numel;
                        numel * request.dtype.size_in_bytes() as usize
                    });
                    assert_eq!(bytes.sum::<usize>(), share.len());
                }
                assert_eq!(
                    (covered_bytes, elements),
                    (joined.byte_len, 5 + 6 + 1 + 1),
                    "pieces of {piece_bytes}, {replicas} replicas"
                );
            }
        }
    }
}
