//! The report of the parts that tensor-parallel ranks get.

use fsdp_formats::metadata::Metadata;
use fsdp_tools::tensor_parallel::{Cut, TensorParallelPlan};
use serde::Serialize;

use crate::text::escaped;

/// The shapes of one tensor and of its parts on each rank.
#[derive(Debug, Serialize)]
pub(super) struct CutTensor {
    name: String,
    /// The way of cutting, such as `colwise(heads)`.
    how: String,
    shape: Vec<usize>,
    /// The shape on each rank.
    ranks: Vec<Vec<usize>>,
}

/// Returns all tensors of a plan with the shape of each rank's part.
pub(super) fn cut_tensors(plan: &TensorParallelPlan) -> Vec<CutTensor> {
    let of = |(name, cut): (&str, &Cut)| CutTensor {
        name: name.to_owned(),
        how: cut.how().to_owned(),
        shape: cut.shape().to_vec(),
        ranks: (0..plan.ranks()).map(|rank| cut.shape_of(rank)).collect(),
    };
    plan.cuts().map(of).collect()
}

/// Returns the largest number of bytes of tensors that a rank gets.
pub(super) fn most_bytes(plan: &TensorParallelPlan, metadata: &Metadata) -> u64 {
    let bytes_of_rank = |rank| {
        let sizes = plan.cuts().map(|(name, cut)| {
            let element = metadata
                .tensor(name)
                .map_or(0, |tensor| tensor.properties.dtype.size_in_bytes());
            cut.shape_of(rank)
                .iter()
                .fold(element, |bytes, &size| bytes.saturating_mul(size as u64))
        });
        sizes.fold(0, u64::saturating_add)
    };
    (0..plan.ranks()).map(bytes_of_rank).max().unwrap_or(0)
}

impl CutTensor {
    /// Returns a line: key, shape, how it is cut, and the shapes on the ranks.
    pub(super) fn line(&self) -> String {
        let alike = self
            .ranks
            .chunk_by(|a, b| a == b)
            .map(|same| format!("{} x {:?}", same.len(), same[0]));
        let alike: Vec<String> = alike.collect();
        format!(
            "{}\t{:?}\t{}\t{}",
            escaped(&self.name),
            self.shape,
            escaped(&self.how),
            alike.join(", ")
        )
    }
}
