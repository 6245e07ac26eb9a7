//! The heads of an attention. Each is computed independently of the others.

use std::borrow::Cow;

use candle_core::backend::BackendStorage as _;
use candle_core::{CpuStorage, Layout, Result, WithDType};
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use crate::element::{Element, widened};
use crate::real::{Real, sum};
use crate::rows::vectorized;
use crate::softmax::softmax_row;
use crate::values::elements;

/// The number of queries that are computed at a time.
const BLOCK: usize = 64;

/// Returns a storage in the type that its arithmetic is done in.
///
/// # Errors
/// Another dtype than `T`'s.
pub(super) fn wide<'a, T: Element>(storage: &'a CpuStorage, operation: &'static str) -> Result<Cow<'a, CpuStorage>> {
    let values = storage.as_slice::<T>().map_or(0, <[T]>::len);
    let values = elements::<T>(storage, 0..values, operation)?;
    if T::DTYPE == T::Real::DTYPE {
        return Ok(Cow::Borrowed(storage));
    }
    Ok(Cow::Owned(T::Real::to_cpu_storage_owned(widened(values))))
}

/// Heads `[batch, heads, rows, width]` within a storage.
pub(super) struct View<'a> {
    storage: &'a CpuStorage,
    layout: Layout,
}

impl<'a> View<'a> {
    pub(super) fn new(storage: &'a CpuStorage, layout: &Layout) -> Self {
        View { storage, layout: layout.clone() }
    }

    fn dim(&self, dim: usize) -> usize {
        self.layout.dims()[dim]
    }

    /// Returns the layout of `len` rows of a head, as a matrix.
    fn rows(&self, head: usize, start: usize, len: usize) -> Layout {
        let strides = self.layout.stride();
        let (batch, head) = (head / self.dim(1), head % self.dim(1));
        let offset = self.layout.start_offset() + batch * strides[0] + head * strides[1] + start * strides[2];
        Layout::new((len, self.dim(3)).into(), strides[2..].to_vec(), offset)
    }
}

/// The heads of queries, keys and values.
pub(super) struct Heads<'a> {
    pub(super) query: View<'a>,
    pub(super) key: View<'a>,
    pub(super) value: View<'a>,
    /// `true` if a row sees no columns after its own.
    pub(super) causal: bool,
    pub(super) scale: f64,
}

/// Some queries of a head, and the keys that they see.
#[derive(Clone, Copy)]
struct Block {
    head: usize,
    start: usize,
    rows: usize,
    columns: usize,
}

impl Heads<'_> {
    fn heads(&self) -> usize {
        self.query.dim(0) * self.query.dim(1)
    }

    fn blocks(&self, head: usize) -> impl Iterator<Item = Block> {
        let (all_rows, all_columns, causal) = (self.query.dim(2), self.key.dim(2), self.causal);
        (0..all_rows).step_by(BLOCK).map(move |start| {
            let rows = BLOCK.min(all_rows - start);
            let columns = if causal { all_columns.min(start + rows) } else { all_columns };
            Block { head, start, rows, columns }
        })
    }

    /// Computes each head of the output, `[rows, width of values]`.
    pub(super) fn forward<R: Real + WithDType>(&self) -> Result<Vec<Vec<R>>> {
        let head = |head: usize| {
            let mut output = Vec::with_capacity(self.query.dim(2) * self.value.dim(3));
            for block in self.blocks(head) {
                let weights = R::to_cpu_storage_owned(self.weights(block)?);
                let value = self.value.rows(head, 0, block.columns);
                let mixed = product(&weights, &block.layout(), self.value.storage, &value)?;
                output.extend_from_slice(mixed.as_slice::<R>()?);
            }
            Ok(output)
        };
        (0..self.heads()).into_par_iter().map(head).collect()
    }

    /// Computes the gradients of queries, keys and values from the gradient of the output: three lists with one entry
    /// for each head.
    pub(super) fn backward<R: Real + WithDType>(&self, grad: &View<'_>) -> Result<[Vec<Vec<R>>; 3]> {
        let heads = (0..self.heads()).into_par_iter().map(|head| self.backward_of(head, grad));
        let heads: Vec<[Vec<R>; 3]> = heads.collect::<Result<_>>()?;
        let mut parts: [Vec<Vec<R>>; 3] = Default::default();
        for head in heads {
            parts.iter_mut().zip(head).for_each(|(part, head)| part.push(head));
        }
        Ok(parts)
    }

    fn backward_of<R: Real + WithDType>(&self, head: usize, grad: &View<'_>) -> Result<[Vec<R>; 3]> {
        let mut dquery = Vec::with_capacity(self.query.dim(2) * self.query.dim(3));
        let mut dkey = vec![<R as Real>::ZERO; self.key.dim(2) * self.key.dim(3)];
        let mut dvalue = vec![<R as Real>::ZERO; self.value.dim(2) * self.value.dim(3)];
        for block in self.blocks(head) {
            let weights = self.weights::<R>(block)?;
            let grad_layout = grad.rows(head, block.start, block.rows);
            let value = transposed(&self.value.rows(head, 0, block.columns))?;
            // The gradient of the weights, and from it, in place, that of the scores.
            let dweights = product(grad.storage, &grad_layout, self.value.storage, &value)?;
            let mut dscores = R::cpu_storage_data(dweights)?;
            let scale = R::of(self.scale);
            vectorized(|| {
                for (dscores, weights) in dscores.chunks_mut(block.columns).zip(weights.chunks(block.columns)) {
                    let along = sum(weights.len(), |index| dscores[index] * weights[index]);
                    let elements = dscores.iter_mut().zip(weights);
                    elements.for_each(|(score, &weight)| *score = weight * (*score - along) * scale);
                }
            });
            let (weights, dscores) = (R::to_cpu_storage_owned(weights), R::to_cpu_storage_owned(dscores));
            let (layout, by_column) = (block.layout(), transposed(&block.layout())?);
            let query = self.query.rows(head, block.start, block.rows);
            add(&mut dvalue, &product(&weights, &by_column, grad.storage, &grad_layout)?)?;
            add(&mut dkey, &product(&dscores, &by_column, self.query.storage, &query)?)?;
            let key = self.key.rows(head, 0, block.columns);
            dquery.extend_from_slice(product(&dscores, &layout, self.key.storage, &key)?.as_slice::<R>()?);
        }
        Ok([dquery, dkey, dvalue])
    }

    /// Computes the softmax of the scores of a block, row by row; 0 where a row does not see a column.
    fn weights<R: Real + WithDType>(&self, block: Block) -> Result<Vec<R>> {
        let query = self.query.rows(block.head, block.start, block.rows);
        let key = transposed(&self.key.rows(block.head, 0, block.columns))?;
        let scores = product(self.query.storage, &query, self.key.storage, &key)?;
        let mut weights = R::cpu_storage_data(scores)?;
        let scale = R::of(self.scale);
        vectorized(|| {
            for (row, weights) in weights.chunks_mut(block.columns).enumerate() {
                let seen = if self.causal { block.columns.min(block.start + row + 1) } else { block.columns };
                let (seen, hidden) = weights.split_at_mut(seen);
                seen.iter_mut().for_each(|score| *score *= scale);
                softmax_row(seen);
                hidden.fill(<R as Real>::ZERO);
            }
        });
        Ok(weights)
    }
}

impl Block {
    /// Returns the layout of its scores.
    fn layout(&self) -> Layout {
        Layout::contiguous((self.rows, self.columns))
    }
}

fn transposed(layout: &Layout) -> Result<Layout> {
    layout.transpose(0, 1)
}

/// Multiplies two matrices.
fn product(lhs: &CpuStorage, lhs_layout: &Layout, rhs: &CpuStorage, rhs_layout: &Layout) -> Result<CpuStorage> {
    let ((rows, inner), columns) = (lhs_layout.shape().dims2()?, rhs_layout.dims()[1]);
    lhs.matmul(rhs, (1, rows, columns, inner), lhs_layout, rhs_layout)
}

/// Adds values to the first ones of a sum.
fn add<R: Real + WithDType>(sum: &mut [R], values: &CpuStorage) -> Result<()> {
    sum.iter_mut().zip(values.as_slice::<R>()?).for_each(|(sum, &value)| *sum += value);
    Ok(())
}
