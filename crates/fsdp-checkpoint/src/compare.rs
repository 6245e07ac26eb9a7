//! The comparison of what was loaded with the digests that were recorded when it was saved.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, StateDigest, Sum};
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::{Entry, Metadata, TensorEntry};
use fsdp_formats::plan::LoadRequest;
use fsdp_layout::cover::uncovered;
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_state::{LoadError as _, WrongTensor};
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;
use crate::rounds::{ROUND_BYTES, gather_in_rounds};

/// The rank that compares.
const COMPARING_RANK: usize = 0;

/// The sum over a box that a rank has read.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct BoxSum {
    /// The position of the tensor among the checkpoint's entries.
    entry_index: usize,
    bounds: TensorBox,
    sum: Sum,
}

/// The sums over the boxes of one tensor, by box: the rank that has read it, and the sum.
type BoxSums = BTreeMap<TensorBox, Vec<(usize, Sum)>>;

/// The comparison of a load with the digests of its checkpoint. Every rank adds what it reads.
pub(crate) struct Comparison<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
    recorded: &'a StateDigest,
    parts: Vec<BoxSum>,
}

impl<'a> Comparison<'a> {
    /// Begins a comparison with the digests of a checkpoint; returns `None` if it has none.
    pub(crate) fn with_digests_of(checkpoint: &'a dyn Checkpoint) -> Option<Self> {
        let recorded = checkpoint.digests()?;
        Some(Comparison {
            path: checkpoint.path(),
            metadata: checkpoint.metadata(),
            recorded,
            parts: Vec::new(),
        })
    }

    /// Records what this rank has read of a tensor: `sums` has the sum over each box of `request`.
    /// A tensor without a recorded digest is ignored.
    pub(crate) fn record_read(&mut self, request: LoadRequest, sums: Vec<Sum>) {
        let Some(recorded) = self.recorded.get(&request.fqn) else {
            return;
        };
        let Some((entry_index, _, Entry::Tensor(tensor))) =
            self.metadata.entries.get_full(&request.fqn)
        else {
            unreachable!("a tensor of the checkpoint was read");
        };
        for (bounds, sum) in request.boxes.into_iter().zip(sums) {
            // A whole tensor with the right digest needs no further check. A wrong one is kept with
            // the sums of parts, which `check` sends to the rank that compares.
            let is_settled = is_whole(&bounds, tensor) && tensor_digest(sum, tensor) == recorded;
            if !bounds.is_empty() && !is_settled {
                self.parts.push(BoxSum {
                    entry_index,
                    bounds,
                    sum,
                });
            }
        }
    }

    /// Checks the whole tensors that this rank has read. No communication.
    ///
    /// # Errors
    /// [`FileError::Digests`].
    pub(crate) fn check_whole_tensors(&self) -> Result<(), CheckpointError> {
        let mut names = Vec::new();
        for part in &self.parts {
            if let Some((fqn, Entry::Tensor(tensor))) =
                self.metadata.entries.get_index(part.entry_index)
                && is_whole(&part.bounds, tensor)
            {
                names.push(fqn.clone());
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        Err(FileError::Digests {
            path: self.path.to_owned(),
            names,
        }
        .into())
    }

    /// Compares the tensors that all ranks have read together with the recorded digests. Tensors of
    /// which some element was read by no rank are not compared.
    ///
    /// `is_unchecked` is `true` if hashes were not checked because the tensors would be compared;
    /// the same on every rank. `check_hashes` checks the hashes of what this rank has read of some
    /// tensors. It is called for tensors that are wrong, to find the damage, and for unchecked ones
    /// that could not be compared.
    ///
    /// Collectives: an object all-gather of sizes, an object gather for each 64 MiB of sums, and an
    /// object broadcast; if hashes are checked, also an agreement.
    ///
    /// # Errors
    /// The same on every rank: [`CheckpointError::NotAsSaved`]; the error of any rank's
    /// `check_hashes`.
    pub(crate) fn check(
        self,
        group: &ProcessGroup,
        operation: &str,
        is_unchecked: bool,
        check_hashes: impl FnOnce(&HashSet<&str>) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        // An encoded sum takes about 48 bytes, and two numbers of 8 bytes for each dimension of its
        // box.
        let gathered = gather_in_rounds(
            ROUND_BYTES,
            group,
            self.parts,
            |part| 48 + 16 * part.bounds.rank() as u64,
            COMPARING_RANK,
        )?;
        let outcome = gathered.map(|parts| {
            // Errors name global ranks, also if `group` is a subgroup.
            let ranks = group.global_ranks().iter().copied();
            compare_all(self.metadata, self.recorded, ranks.zip(parts))
        });
        let Compared {
            wrong,
            mut incomplete,
        } = group.broadcast_object(outcome.as_ref(), COMPARING_RANK)?;
        if !is_unchecked {
            incomplete.clear();
        }
        let unchecked: HashSet<&str> = wrong
            .iter()
            .map(|tensor| &tensor.fqn)
            .chain(&incomplete)
            .map(String::as_str)
            .collect();
        if unchecked.is_empty() {
            return Ok(());
        }
        CheckpointError::agree(group, operation, None, check_hashes(&unchecked))?;
        if wrong.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::NotAsSaved {
            path: self.path.to_owned(),
            tensors: wrong,
        })
    }
}

/// Checks a value that was read against the digest that was recorded of it, if there is one.
///
/// # Errors
/// [`FileError::Digests`].
pub(crate) fn check_value(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    value: &PlainValue,
) -> Result<(), CheckpointError> {
    let recorded = checkpoint.digests().and_then(|recorded| recorded.get(fqn));
    if recorded.is_some_and(|recorded| recorded != Digest::of_value(value)) {
        return Err(FileError::Digests {
            path: checkpoint.path().to_owned(),
            names: vec![fqn.to_owned()],
        }
        .into());
    }
    Ok(())
}

/// Returns `true` if a box is the whole tensor.
fn is_whole(bounds: &TensorBox, tensor: &TensorEntry) -> bool {
    bounds.sizes == tensor.shape
}

/// Returns the digest of a tensor from the sum over all its elements.
fn tensor_digest(sum: Sum, tensor: &TensorEntry) -> Digest {
    sum.finish(tensor.properties.dtype, &tensor.shape)
}

/// The outcome of a comparison.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Compared {
    /// The tensors whose elements are not those that were saved.
    wrong: Vec<WrongTensor>,
    /// The tensors that were read in parts that do not make up the whole, each element once.
    incomplete: Vec<String>,
}

/// Compares tensors that were read in parts, which come with the rank that has read them.
fn compare_all(
    metadata: &Metadata,
    recorded: &StateDigest,
    parts: impl Iterator<Item = (usize, Vec<BoxSum>)>,
) -> Compared {
    let mut tensors: BTreeMap<usize, BoxSums> = BTreeMap::new();
    for (rank, parts) in parts {
        for part in parts {
            let boxes = tensors.entry(part.entry_index).or_default();
            let sums = boxes.entry(part.bounds).or_default();
            sums.push((rank, part.sum));
        }
    }
    let mut compared = Compared::default();
    for (entry_index, boxes) in tensors {
        // Positions come from other ranks, so they are not trusted.
        let Some((fqn, Entry::Tensor(tensor))) = metadata.entries.get_index(entry_index) else {
            continue;
        };
        let Some(recorded) = recorded.get(fqn) else {
            continue;
        };
        let (ranks, is_complete) = wrong_ranks(tensor, recorded, boxes);
        if !is_complete {
            compared.incomplete.push(fqn.clone());
        }
        if !ranks.is_empty() {
            compared.wrong.push(WrongTensor {
                fqn: fqn.clone(),
                ranks,
            });
        }
    }
    compared
}

/// Returns the ranks whose elements of a tensor are wrong, sorted. The second result is `true` if
/// the boxes that ranks have read in part make up the tensor, each element once.
fn wrong_ranks(tensor: &TensorEntry, recorded: Digest, mut boxes: BoxSums) -> (Vec<usize>, bool) {
    // A rank that has read the whole tensor sends its sum only if it is wrong.
    let whole = TensorBox::whole(&tensor.shape);
    let mut ranks: Vec<usize> = Vec::new();
    for (rank, _) in boxes.remove(&whole).into_iter().flatten() {
        ranks.push(rank);
    }
    let elements: usize = boxes.keys().map(TensorBox::numel).sum();
    let is_complete = elements == whole.numel() && uncovered(&whole, boxes.keys()).is_empty();
    // Ranks that have read the same box must have read the same elements.
    let mut total = Sum::default();
    for sums in boxes.values() {
        let usual_sum = most_frequent(sums);
        for (rank, sum) in sums {
            if *sum != usual_sum {
                ranks.push(*rank);
            }
        }
        total.add(usual_sum);
    }
    // Boxes that make up the tensor, each element once, add up to its digest.
    if is_complete && !boxes.is_empty() && tensor_digest(total, tensor) != recorded {
        ranks.extend(boxes.values().flatten().map(|(rank, _)| *rank));
    }
    ranks.sort_unstable();
    ranks.dedup();
    (ranks, is_complete)
}

/// Returns the sum that most ranks have; of several, the first.
fn most_frequent(sums: &[(usize, Sum)]) -> Sum {
    // The last of several largest is the first of the ranks.
    sums.iter()
        .rev()
        .map(|(_, sum)| *sum)
        .max_by_key(|sum| sums.iter().filter(|(_, other)| other == sum).count())
        .expect("a box is listed with the ranks that have read it")
}

#[cfg(test)]
mod tests {
    use fsdp_formats::metadata::TensorProperties;
    use fsdp_layout::DType;

    use super::*;

    fn tensor() -> TensorEntry {
        TensorEntry {
            properties: TensorProperties::new(DType::U8),
            shape: vec![4],
            chunks: Vec::new(),
        }
    }

    fn sum_of(start: usize, bytes: &[u8]) -> (TensorBox, Sum) {
        let mut sum = Sum::default();
        sum.add_bytes(start as u64, bytes);
        (TensorBox::new(vec![start], vec![bytes.len()]), sum)
    }

    /// Returns the ranks that are found wrong, where each rank has read some bytes of the tensor 1,
    /// 2, 3, 4.
    fn wrong_ranks_of(reads: &[(usize, usize, &[u8])]) -> Vec<usize> {
        let mut boxes = BoxSums::new();
        for &(rank, start, bytes) in reads {
            let (bounds, sum) = sum_of(start, bytes);
            boxes.entry(bounds).or_default().push((rank, sum));
        }
        wrong_ranks(
            &tensor(),
            tensor_digest(sum_of(0, &[1, 2, 3, 4]).1, &tensor()),
            boxes,
        )
        .0
    }

    #[test]
    fn parts_are_right_or_wrong_together() {
        assert!(wrong_ranks_of(&[(0, 0, &[1, 2]), (1, 2, &[3, 4])]).is_empty());
        assert_eq!(wrong_ranks_of(&[(0, 0, &[1, 2]), (1, 2, &[3, 5])]), [0, 1]);
        // Nobody knows what an element is that nobody has read, or that several have read in other
        // boxes.
        assert!(wrong_ranks_of(&[(0, 0, &[9, 9])]).is_empty());
        assert!(wrong_ranks_of(&[(0, 0, &[1, 2, 3]), (1, 2, &[3, 4])]).is_empty());
    }

    #[test]
    fn of_replicas_the_one_that_differs_is_named() {
        let right = [
            (0, 0, &[1u8, 2][..]),
            (1, 2, &[3, 4]),
            (2, 0, &[1, 2]),
            (3, 2, &[3, 4]),
        ];
        assert!(wrong_ranks_of(&right).is_empty());
        let other = [&right[..], &[(4, 0, &[1, 3])]].concat();
        assert_eq!(wrong_ranks_of(&other), [4]);
        assert_eq!(wrong_ranks_of(&[(0, 0, &[1, 2, 3, 5])]), [0]);
    }
}
