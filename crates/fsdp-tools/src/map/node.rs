//! A tensor made of others, and how any box of it is read.

use std::ops::Range;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::is_sane_shape;
use fsdp_layout::TensorBox;

/// A tensor, made of the source's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) shape: Vec<usize>,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
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
#[derive(Debug, Clone, PartialEq, Eq)]
struct Gathered {
    parts: Vec<Node>,
    dim: usize,
    runs: Vec<Run>,
}

/// `len` indices from `to` on that are those of a part at `from`, `from + step`, … .
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) to: usize,
    pub(super) len: usize,
    pub(super) part: usize,
    pub(super) from: usize,
    pub(super) step: usize,
}

impl Run {
    /// Makes the run of `len` consecutive indices of the first part.
    pub(super) fn new(to: usize, from: usize, len: usize) -> Self {
        Run {
            to,
            len,
            part: 0,
            from,
            step: 1,
        }
    }
}

/// The most tensors that one becomes: there is one for each layer.
const MAX_UNSTACKED: usize = 1 << 16;

impl Node {
    /// Makes a tensor of this shape, unless no machine could hold it.
    fn new(shape: Vec<usize>, kind: Kind) -> Result<Self, String> {
        if !is_sane_shape(&shape) {
            return Err(format!("a tensor of shape {shape:?} is too large"));
        }
        Ok(Node { shape, kind })
    }

    /// Makes the node of a tensor of the source.
    pub(super) fn source(fqn: &str, shape: &[usize]) -> Self {
        Node {
            shape: shape.to_vec(),
            kind: Kind::Source(fqn.to_owned()),
        }
    }

    /// Swaps the dimensions of a matrix.
    pub(super) fn transposed(self) -> Result<Self, String> {
        let [rows, columns] = self.shape[..] else {
            return Err(format!("a tensor of shape {:?} is no matrix", self.shape));
        };
        Ok(Node {
            shape: vec![columns, rows],
            kind: Kind::Transposed(Box::new(self)),
        })
    }

    /// Returns the tensors of all indices of the first dimension.
    pub(super) fn unstacked(self) -> Result<Vec<Self>, String> {
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
                kind: Kind::Selected(Box::new(self.clone()), index),
            })
            .collect())
    }

    /// Stacks tensors of one shape along a new first dimension.
    pub(super) fn stacked(parts: Vec<Node>) -> Result<Self, String> {
        let first = &parts.first().expect("a stack has a first tensor").shape;
        if let Some(other) = parts.iter().find(|part| part.shape != *first) {
            return Err(format!(
                "tensors of shapes {first:?} and {:?} cannot be stacked",
                other.shape
            ));
        }
        let shape = [&[parts.len()], &first[..]].concat();
        Self::new(shape, Kind::Stacked(parts))
    }

    /// Makes a tensor whose indices in dimension `dim` are ranges of those of `parts`. The runs are
    /// in order and cover all `size` indices. All other dimensions must agree.
    pub(super) fn gathered(
        parts: Vec<Node>,
        dim: usize,
        size: usize,
        runs: Vec<Run>,
    ) -> Result<Self, String> {
        let mut shape = parts
            .first()
            .expect("an operation takes at least one tensor")
            .shape
            .clone();
        if dim >= shape.len() {
            return Err(format!("there is no dimension {dim}"));
        }
        for part in &parts {
            // The other dimensions must agree.
            let mut same = part.shape.clone();
            if let Some(size) = same.get_mut(dim) {
                *size = shape[dim];
            }
            if same != shape {
                return Err(format!(
                    "tensors of shapes {shape:?} and {:?} do not fit together",
                    part.shape
                ));
            }
        }
        shape[dim] = size;
        Self::new(shape, Kind::Gathered(Gathered { parts, dim, runs }))
    }

    /// Returns the source's tensors that it is made of.
    pub(super) fn sources<'n>(&'n self, found: &mut Vec<&'n str>) {
        match &self.kind {
            Kind::Source(fqn) => found.push(fqn),
            Kind::Transposed(of) | Kind::Selected(of, _) => of.sources(found),
            Kind::Stacked(parts) | Kind::Gathered(Gathered { parts, .. }) => {
                parts.iter().for_each(|part| part.sources(found))
            }
        }
    }

    /// Reads a box of it into row-major bytes.
    pub(super) fn read(
        &self,
        source: &dyn Checkpoint,
        element: usize,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        if bounds.is_empty() {
            return Ok(());
        }
        match &self.kind {
            Kind::Source(fqn) => source.read_box(fqn, bounds, dst),
            Kind::Transposed(of) => {
                let mut swapped = bounds.clone();
                swapped.offsets.reverse();
                swapped.sizes.reverse();
                // Read the box of the source as it is, and swap its elements afterwards.
                let mut bytes = vec![0; dst.len()];
                of.read(source, element, &swapped, &mut bytes)?;
                transpose(&bytes, swapped.sizes[0], swapped.sizes[1], element, dst);
                Ok(())
            }
            Kind::Selected(of, index) => {
                let mut selected = bounds.clone();
                selected.offsets.insert(0, *index);
                selected.sizes.insert(0, 1);
                of.read(source, element, &selected, dst)
            }
            Kind::Stacked(parts) => {
                let inner =
                    TensorBox::new(bounds.offsets[1..].to_vec(), bounds.sizes[1..].to_vec());
                let length = dst.len() / bounds.sizes[0];
                for (part, dst) in parts[bounds.offsets[0]..]
                    .iter()
                    .zip(dst.chunks_exact_mut(length))
                {
                    part.read(source, element, &inner, dst)?;
                }
                Ok(())
            }
            Kind::Gathered(gathered) => gathered.read(source, element, bounds, dst),
        }
    }
}

impl Gathered {
    /// Reads a box of it into row-major bytes.
    fn read(
        &self,
        source: &dyn Checkpoint,
        element: usize,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let dim = self.dim;
        let size = bounds.sizes[dim];
        // The bytes of one index of the dimension, and how often the dimension is gone through.
        let inner = bounds.sizes[dim + 1..].iter().product::<usize>() * element;
        let outer: usize = bounds.sizes[..dim].iter().product();
        let wanted = self.runs_in(bounds.offsets[dim]..bounds.offsets[dim] + size);
        let mut bytes = Vec::new();
        for group in read_at_once(&wanted) {
            let range = range_of(group);
            let mut bounds = bounds.clone();
            bounds.offsets[dim] = range.start;
            bounds.sizes[dim] = range.len();
            let part = &self.parts[group[0].part];
            // Consecutive indices that are consecutive in the result too need no copy.
            if let [run] = group
                && run.step == 1
                && outer == 1
            {
                let dst = &mut dst[run.to * inner..(run.to + run.len) * inner];
                part.read(source, element, &bounds, dst)?;
                continue;
            }
            // Read all that the runs span at once, and pick their indices from it.
            bytes.resize(outer * range.len() * inner, 0);
            part.read(source, element, &bounds, &mut bytes)?;
            for run in group {
                for block in 0..outer {
                    for index in 0..run.len {
                        let position = run.from - range.start + index * run.step;
                        let from = (block * range.len() + position) * inner;
                        let to = (block * size + run.to + index) * inner;
                        dst[to..to + inner].copy_from_slice(&bytes[from..from + inner]);
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
        let first = self
            .runs
            .partition_point(|run| run.to + run.len <= range.start);
        let mut found = Vec::new();
        for run in &self.runs[first..] {
            if run.to >= range.end {
                break;
            }
            let low = run.to.max(range.start);
            let high = (run.to + run.len).min(range.end);
            found.push(Run {
                to: low - range.start,
                len: high - low,
                from: run.from + (low - run.to) * run.step,
                ..*run
            });
        }
        found
    }
}

/// Returns the range of indices that runs span in their part.
fn range_of(runs: &[Run]) -> Range<usize> {
    let starts = runs.iter().map(|run| run.from);
    let ends = runs
        .iter()
        .map(|run| run.from + (run.len - 1) * run.step + 1);
    // No runs span nothing.
    starts.min().unwrap_or(0)..ends.max().unwrap_or(0)
}

/// Divides runs into those that are read at once: all of them, if they take at least half of the
/// range that they span in one part, and each by itself otherwise.
fn read_at_once(runs: &[Run]) -> Vec<&[Run]> {
    let taken: usize = runs.iter().map(|run| run.len).sum();
    if runs.iter().all(|run| run.part == runs[0].part) && range_of(runs).len() <= 2 * taken {
        vec![runs]
    } else {
        runs.chunks(1).collect()
    }
}

/// Writes the columns of a row-major matrix as rows.
fn transpose(src: &[u8], rows: usize, columns: usize, element: usize, dst: &mut [u8]) {
    for row in 0..rows {
        for column in 0..columns {
            let from = (row * columns + column) * element;
            let to = (column * rows + row) * element;
            dst[to..to + element].copy_from_slice(&src[from..from + element]);
        }
    }
}
