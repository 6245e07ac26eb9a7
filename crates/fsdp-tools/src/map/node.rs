//! A tensor made of others, and how any box of it is read.

use std::ops::Range;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::is_sane_shape;
use fsdp_formats::metadata::TensorEntry;
use fsdp_layout::{DType, TensorBox};

/// A tensor, made of the source's.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    kind: NodeKind,
}

/// The way in which a tensor is made.
#[derive(Debug, Clone)]
enum NodeKind {
    /// A tensor of the source.
    Source(String),
    /// A matrix, its dimensions swapped.
    Transposed(Box<Node>),
    /// One index of the first dimension.
    Selected(Box<Node>, usize),
    /// Several tensors along a new first dimension.
    Stacked(Vec<Node>),
    /// Ranges of other tensors along one dimension.
    Gathered(Gathered),
}

/// Ranges of other tensors along one dimension.
#[derive(Debug, Clone)]
struct Gathered {
    parts: Vec<Node>,
    dim: usize,
    runs: Vec<Run>,
}

/// `len` indices of a result, from `result_start` on: they are the indices `part_start`,
/// `part_start + step`, … of the part at position `part`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) result_start: usize,
    pub(super) len: usize,
    pub(super) part: usize,
    pub(super) part_start: usize,
    pub(super) step: usize,
}

impl Run {
    /// Makes the run of `len` consecutive indices of the first part.
    pub(super) fn new(result_start: usize, part_start: usize, len: usize) -> Self {
        Run {
            result_start,
            len,
            part: 0,
            part_start,
            step: 1,
        }
    }
}

/// The most tensors that one becomes: there is one for each layer.
const MAX_UNSTACKED: usize = 1 << 16;

impl Node {
    /// Makes a tensor of this shape, unless no machine could hold it.
    fn new(shape: Vec<usize>, dtype: DType, kind: NodeKind) -> Result<Self, String> {
        if !is_sane_shape(&shape) {
            return Err(format!("a tensor of shape {shape:?} is too large"));
        }
        Ok(Node { shape, dtype, kind })
    }

    /// Makes the node of a tensor of the source.
    pub(super) fn from_source(fqn: &str, tensor: &TensorEntry) -> Self {
        Node {
            shape: tensor.shape.clone(),
            dtype: tensor.properties.dtype,
            kind: NodeKind::Source(fqn.to_owned()),
        }
    }

    /// Returns a matrix with its dimensions swapped.
    pub(super) fn transpose(self) -> Result<Self, String> {
        let [rows, columns] = self.shape[..] else {
            return Err(format!("a tensor of shape {:?} is no matrix", self.shape));
        };
        if self.dtype.packing().is_some() {
            return Err(format!(
                "the numbers of `{}` are packed, and stay in their order",
                self.dtype
            ));
        }
        Ok(Node {
            shape: vec![columns, rows],
            dtype: self.dtype,
            kind: NodeKind::Transposed(Box::new(self)),
        })
    }

    /// Returns the tensors of all indices of the first dimension. A tensor without dimensions, or
    /// with more than [`MAX_UNSTACKED`] indices, is an error.
    pub(super) fn unstack(self) -> Result<Vec<Self>, String> {
        let Some((&count, shape)) = self.shape.split_first() else {
            return Err("a tensor without dimensions cannot be unstacked".to_owned());
        };
        // The size comes from a file.
        if count > MAX_UNSTACKED {
            return Err(format!(
                "a tensor of shape {:?} would become more than {MAX_UNSTACKED} tensors",
                self.shape
            ));
        }
        Ok((0..count)
            .map(|index| Node {
                shape: shape.to_vec(),
                dtype: self.dtype,
                kind: NodeKind::Selected(Box::new(self.clone()), index),
            })
            .collect())
    }

    /// Returns tensors of one shape and dtype as one, along a new first dimension.
    pub(super) fn stack(parts: Vec<Node>) -> Result<Self, String> {
        let first_part = parts.first().expect("a stack has a first tensor");
        for part in &parts {
            if part.shape != first_part.shape || part.dtype != first_part.dtype {
                return Err(first_part.mismatch(part));
            }
        }
        let shape = [&[parts.len()], &first_part.shape[..]].concat();
        Self::new(shape, first_part.dtype, NodeKind::Stacked(parts))
    }

    /// Returns the message that two tensors cannot become one.
    fn mismatch(&self, other: &Node) -> String {
        format!(
            "tensors of shape {:?} and dtype {} and of shape {:?} and dtype {} do not fit together",
            self.shape, self.dtype, other.shape, other.dtype
        )
    }

    /// Makes a tensor whose indices in dimension `dim` are ranges of those of `parts`. The runs are
    /// in order and cover all `size` indices. All other dimensions must agree.
    pub(super) fn gather(
        parts: Vec<Node>,
        dim: usize,
        size: usize,
        runs: Vec<Run>,
    ) -> Result<Self, String> {
        let first_part = parts
            .first()
            .expect("an operation takes at least one tensor");
        let dtype = first_part.dtype;
        let mut shape = first_part.shape.clone();
        if dim >= shape.len() {
            return Err(format!("there is no dimension {dim}"));
        }
        shape[dim] = size;
        for part in &parts {
            let mut part_shape = part.shape.clone();
            if let Some(part_size) = part_shape.get_mut(dim) {
                *part_size = size;
            }
            // Elements are moved and never cast, so the dtypes must agree too.
            if part_shape != shape || part.dtype != dtype {
                return Err(first_part.mismatch(part));
            }
        }
        Self::new(
            shape,
            dtype,
            NodeKind::Gathered(Gathered { parts, dim, runs }),
        )
    }

    /// Returns the keys of the source's tensors that it is made of.
    pub(super) fn sources(&self) -> Vec<&str> {
        match &self.kind {
            NodeKind::Source(fqn) => vec![fqn],
            NodeKind::Transposed(inner) | NodeKind::Selected(inner, _) => inner.sources(),
            NodeKind::Stacked(parts) | NodeKind::Gathered(Gathered { parts, .. }) => {
                parts.iter().flat_map(Node::sources).collect()
            }
        }
    }

    /// Reads a box of it into row-major bytes.
    pub(super) fn read(
        &self,
        source: &dyn Checkpoint,
        bounds: &TensorBox,
        output: &mut [u8],
    ) -> Result<(), FileError> {
        if bounds.is_empty() {
            return Ok(());
        }
        match &self.kind {
            NodeKind::Source(fqn) => source.read_box(fqn, bounds, output),
            NodeKind::Transposed(inner) => {
                let mut swapped = bounds.clone();
                swapped.offsets.reverse();
                swapped.sizes.reverse();
                // Read the box of the source as it is, and swap its elements afterwards.
                let mut bytes = vec![0; output.len()];
                inner.read(source, &swapped, &mut bytes)?;
                let element_bytes = self.dtype.size_in_bytes() as usize;
                copy_transposed(
                    &bytes,
                    swapped.sizes[0],
                    swapped.sizes[1],
                    element_bytes,
                    output,
                );
                Ok(())
            }
            NodeKind::Selected(inner, index) => {
                let mut selected = bounds.clone();
                selected.offsets.insert(0, *index);
                selected.sizes.insert(0, 1);
                inner.read(source, &selected, output)
            }
            NodeKind::Stacked(parts) => {
                let inner =
                    TensorBox::new(bounds.offsets[1..].to_vec(), bounds.sizes[1..].to_vec());
                let length = output.len() / bounds.sizes[0];
                for (part, output) in parts[bounds.offsets[0]..]
                    .iter()
                    .zip(output.chunks_exact_mut(length))
                {
                    part.read(source, &inner, output)?;
                }
                Ok(())
            }
            NodeKind::Gathered(gathered) => gathered.read(source, bounds, output),
        }
    }
}

impl Gathered {
    /// Reads a box of it into row-major bytes.
    fn read(
        &self,
        source: &dyn Checkpoint,
        bounds: &TensorBox,
        output: &mut [u8],
    ) -> Result<(), FileError> {
        let dim = self.dim;
        let size = bounds.sizes[dim];
        // In row-major bytes the dimension is gone through once for each index of the dimensions
        // before it. There, the bytes of one of its indices follow each other.
        let element_bytes = self.parts[0].dtype.size_in_bytes() as usize;
        let index_bytes = bounds.sizes[dim + 1..].iter().product::<usize>() * element_bytes;
        let repeats: usize = bounds.sizes[..dim].iter().product();
        let wanted = self.runs_in(bounds.offsets[dim]..bounds.offsets[dim] + size);
        let mut bytes = Vec::new();
        for group in group_runs(&wanted) {
            let range = spanned_range(group);
            let mut bounds = bounds.clone();
            bounds.offsets[dim] = range.start;
            bounds.sizes[dim] = range.len();
            let part = &self.parts[group[0].part];
            // Consecutive indices that are consecutive in the result too need no copy.
            if let [run] = group
                && run.step == 1
                && repeats == 1
            {
                let output = &mut output
                    [run.result_start * index_bytes..(run.result_start + run.len) * index_bytes];
                part.read(source, &bounds, output)?;
                continue;
            }
            // Read all that the runs span at once, and pick their indices from it.
            bytes.resize(repeats * range.len() * index_bytes, 0);
            part.read(source, &bounds, &mut bytes)?;
            for run in group {
                for repeat in 0..repeats {
                    for index in 0..run.len {
                        let position = run.part_start - range.start + index * run.step;
                        let input_start = (repeat * range.len() + position) * index_bytes;
                        let start = (repeat * size + run.result_start + index) * index_bytes;
                        output[start..start + index_bytes]
                            .copy_from_slice(&bytes[input_start..input_start + index_bytes]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the parts of the runs that lie in a range of the dimension, with positions in that
    /// range.
    fn runs_in(&self, range: Range<usize>) -> Vec<Run> {
        // The runs are in order, so those before the range are skipped at once.
        let first_index = self
            .runs
            .partition_point(|run| run.result_start + run.len <= range.start);
        let mut found = Vec::new();
        for run in &self.runs[first_index..] {
            if run.result_start >= range.end {
                break;
            }
            let low = run.result_start.max(range.start);
            let high = (run.result_start + run.len).min(range.end);
            found.push(Run {
                result_start: low - range.start,
                len: high - low,
                part_start: run.part_start + (low - run.result_start) * run.step,
                ..*run
            });
        }
        found
    }
}

/// Returns the range of indices that runs span in their part.
fn spanned_range(runs: &[Run]) -> Range<usize> {
    let starts = runs.iter().map(|run| run.part_start);
    let ends = runs
        .iter()
        .map(|run| run.part_start + (run.len - 1) * run.step + 1);
    // No runs span nothing.
    starts.min().unwrap_or(0)..ends.max().unwrap_or(0)
}

/// Divides runs into groups of which each is read at once: all of them, if they take at least half
/// of the range that they span in one part, and each by itself otherwise, so that not much is read
/// that nobody wants.
fn group_runs(runs: &[Run]) -> Vec<&[Run]> {
    let taken_indices: usize = runs.iter().map(|run| run.len).sum();
    if runs.iter().all(|run| run.part == runs[0].part)
        && spanned_range(runs).len() <= 2 * taken_indices
    {
        vec![runs]
    } else {
        runs.chunks(1).collect()
    }
}

/// Writes the columns of a row-major matrix as rows.
fn copy_transposed(
    input: &[u8],
    rows: usize,
    columns: usize,
    element_bytes: usize,
    output: &mut [u8],
) {
    for row in 0..rows {
        for column in 0..columns {
            let input_start = (row * columns + column) * element_bytes;
            let output_start = (column * rows + row) * element_bytes;
            output[output_start..output_start + element_bytes]
                .copy_from_slice(&input[input_start..input_start + element_bytes]);
        }
    }
}
