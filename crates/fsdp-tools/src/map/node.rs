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
    Gathered {
        parts: Vec<Node>,
        dim: usize,
        runs: Vec<Run>,
    },
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

/// The most tensors that one becomes: there is one for each layer.
const MAX_UNSTACKED: usize = 1 << 16;

/// Returns the shape, unless no machine could hold such a tensor.
fn sane(shape: Vec<usize>) -> Result<Vec<usize>, String> {
    if is_sane_shape(&shape) {
        Ok(shape)
    } else {
        Err(format!("a tensor of shape {shape:?} is too large"))
    }
}

impl Node {
    pub(super) fn source(fqn: &str, shape: &[usize]) -> Self {
        Node {
            shape: shape.to_vec(),
            kind: Kind::Source(fqn.to_owned()),
        }
    }

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
        if count > MAX_UNSTACKED {
            return Err(format!(
                "a tensor of shape {:?} would become more than {MAX_UNSTACKED} tensors",
                self.shape
            ));
        }
        let select = |index| Node {
            shape: shape.to_vec(),
            kind: Kind::Selected(Box::new(self.clone()), index),
        };
        Ok((0..count).map(select).collect())
    }

    /// Stacks tensors of one shape along a new first dimension.
    pub(super) fn stacked(parts: Vec<Node>) -> Result<Self, String> {
        let first = parts
            .first()
            .map(|part| part.shape.clone())
            .unwrap_or_default();
        if let Some(other) = parts.iter().find(|part| part.shape != first) {
            return Err(format!(
                "tensors of shapes {first:?} and {:?} cannot be stacked",
                other.shape
            ));
        }
        let shape = [vec![parts.len()], first].concat();
        Ok(Node {
            shape: sane(shape)?,
            kind: Kind::Stacked(parts),
        })
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
            .map(|part| part.shape.clone())
            .unwrap_or_default();
        for part in &parts {
            let others = |shape: &[usize]| {
                shape
                    .iter()
                    .enumerate()
                    .all(|(at, size)| at == dim || *size == part.shape[at])
            };
            if part.shape.len() != shape.len() || !others(&shape) {
                return Err(format!(
                    "tensors of shapes {shape:?} and {:?} do not fit together",
                    part.shape
                ));
            }
        }
        let slot = shape
            .get_mut(dim)
            .ok_or_else(|| format!("there is no dimension {dim}"))?;
        *slot = size;
        Ok(Node {
            shape: sane(shape)?,
            kind: Kind::Gathered { parts, dim, runs },
        })
    }

    /// Returns the source's tensors that it is made of.
    pub(super) fn sources<'n>(&'n self, found: &mut Vec<&'n str>) {
        match &self.kind {
            Kind::Source(fqn) => found.push(fqn),
            Kind::Transposed(of) | Kind::Selected(of, _) => of.sources(found),
            Kind::Stacked(parts) | Kind::Gathered { parts, .. } => {
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
                let swap = |pair: &[usize]| pair.iter().rev().copied().collect();
                let swapped = TensorBox::new(swap(&bounds.offsets), swap(&bounds.sizes));
                let mut bytes = vec![0; dst.len()];
                of.read(source, element, &swapped, &mut bytes)?;
                transpose(&bytes, swapped.sizes[0], swapped.sizes[1], element, dst);
                Ok(())
            }
            Kind::Selected(of, index) => {
                let (offsets, sizes) = (
                    [&[*index], &bounds.offsets[..]].concat(),
                    [&[1], &bounds.sizes[..]].concat(),
                );
                of.read(source, element, &TensorBox::new(offsets, sizes), dst)
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
            Kind::Gathered { parts, dim, runs } => {
                gather(source, element, parts, *dim, runs, bounds, dst)
            }
        }
    }
}

/// Reads a box of ranges of other tensors.
fn gather(
    source: &dyn Checkpoint,
    element: usize,
    parts: &[Node],
    dim: usize,
    runs: &[Run],
    bounds: &TensorBox,
    dst: &mut [u8],
) -> Result<(), FileError> {
    let (start, size) = (bounds.offsets[dim], bounds.sizes[dim]);
    // The bytes of one index of the dimension, and how often the dimension is gone through.
    let inner = bounds.sizes[dim + 1..].iter().product::<usize>() * element;
    let outer: usize = bounds.sizes[..dim].iter().product();
    let first = runs.partition_point(|run| run.to + run.len <= start);
    let wanted = runs[first..]
        .iter()
        .take_while(|run| run.to < start + size)
        .map(|run| {
            let (low, high) = (run.to.max(start), (run.to + run.len).min(start + size));
            Run {
                to: low - start,
                len: high - low,
                from: run.from + (low - run.to) * run.step,
                ..*run
            }
        });
    let wanted: Vec<Run> = wanted.collect();
    let mut bytes = Vec::new();
    for group in read_at_once(&wanted) {
        let range = range_of(group);
        let mut bounds = bounds.clone();
        (bounds.offsets[dim], bounds.sizes[dim]) = (range.start, range.len());
        let part = &parts[group[0].part];
        if let [
            Run {
                to, len, step: 1, ..
            },
        ] = *group
            && outer == 1
        {
            part.read(
                source,
                element,
                &bounds,
                &mut dst[to * inner..(to + len) * inner],
            )?;
            continue;
        }
        bytes.resize(outer * range.len() * inner, 0);
        part.read(source, element, &bounds, &mut bytes)?;
        for run in group {
            for block in 0..outer {
                for index in 0..run.len {
                    let from =
                        (block * range.len() + run.from - range.start + index * run.step) * inner;
                    let to = (block * size + run.to + index) * inner;
                    dst[to..to + inner].copy_from_slice(&bytes[from..from + inner]);
                }
            }
        }
    }
    Ok(())
}

/// Returns the range of indices that runs span in their part.
fn range_of(runs: &[Run]) -> Range<usize> {
    let start = runs.iter().map(|run| run.from).min().unwrap_or_default();
    let end = runs
        .iter()
        .map(|run| run.from + (run.len - 1) * run.step + 1)
        .max()
        .unwrap_or_default();
    start..end
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
            let (from, to) = (
                (row * columns + column) * element,
                (column * rows + row) * element,
            );
            dst[to..to + element].copy_from_slice(&src[from..from + element]);
        }
    }
}
