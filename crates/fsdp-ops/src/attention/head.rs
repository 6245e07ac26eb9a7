//! The heads of an attention. Each is computed independently of the others.

use std::borrow::Cow;

use candle_core::{CpuStorage, Layout, Result, WithDType};
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use crate::element::{Element, widened};
use crate::product::{Matrix, product};
use crate::real::{Real, sum};
use crate::rows::vectorized;
use crate::softmax::softmax_row;
use crate::values::{elements, span};

/// The number of queries that are computed at a time.
const BLOCK: usize = 64;

/// Returns a storage in the type that its arithmetic is done in.
///
/// # Errors
/// Another dtype than `T`'s.
pub(super) fn wide<'a, T: Element>(
    storage: &'a CpuStorage,
    operation: &'static str,
) -> Result<Cow<'a, CpuStorage>> {
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
        View {
            storage,
            layout: layout.clone(),
        }
    }

    fn dim(&self, dim: usize) -> usize {
        self.layout.dims()[dim]
    }

    /// Returns `len` rows of a head, as a matrix.
    fn rows<R: Real + WithDType>(
        &self,
        head: usize,
        start: usize,
        len: usize,
    ) -> Result<Matrix<'_, R>> {
        let strides = self.layout.stride();
        let (batch, head) = (head / self.dim(1), head % self.dim(1));
        let offset = self.layout.start_offset()
            + batch * strides[0]
            + head * strides[1]
            + start * strides[2];
        let layout = Layout::new((len, self.dim(3)).into(), strides[2..].to_vec(), offset);
        // A product refuses a matrix that is not all there.
        let values = self
            .storage
            .as_slice::<R>()?
            .get(span(&layout))
            .unwrap_or_default();
        Matrix::of_layout(values, &layout)
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

    /// Returns the number of threads of one product. Heads are computed in parallel, and share all
    /// threads.
    fn threads(&self) -> usize {
        rayon::current_num_threads().div_ceil(self.heads().max(1))
    }

    /// Cuts the rows of a head into blocks. With `causal`, a block needs only the columns up to its
    /// last row.
    fn blocks(&self, head: usize) -> impl Iterator<Item = Block> {
        let (all_rows, all_columns, causal) = (self.query.dim(2), self.key.dim(2), self.causal);
        (0..all_rows).step_by(BLOCK).map(move |start| {
            let rows = BLOCK.min(all_rows - start);
            let columns = if causal {
                all_columns.min(start + rows)
            } else {
                all_columns
            };
            Block {
                head,
                start,
                rows,
                columns,
            }
        })
    }

    /// Computes each head of the output, `[rows, width of values]`.
    pub(super) fn forward<R: Real + WithDType>(&self) -> Result<Vec<Vec<R>>> {
        let head = |head: usize| {
            let mut output = Vec::with_capacity(self.query.dim(2) * self.value.dim(3));
            for block in self.blocks(head) {
                let weights = self.weights::<R>(block)?;
                let value = self.value.rows(head, 0, block.columns)?;
                output.extend(product(
                    block.matrix(&weights),
                    value,
                    None,
                    self.threads(),
                )?);
            }
            Ok(output)
        };
        (0..self.heads()).into_par_iter().map(head).collect()
    }

    /// Computes the gradients of queries, keys and values from the gradient of the output: three
    /// lists with one entry for each head.
    pub(super) fn backward<R: Real + WithDType>(
        &self,
        grad: &View<'_>,
    ) -> Result<[Vec<Vec<R>>; 3]> {
        let heads = (0..self.heads())
            .into_par_iter()
            .map(|head| self.backward_of(head, grad));
        let heads: Vec<[Vec<R>; 3]> = heads.collect::<Result<_>>()?;
        let mut parts: [Vec<Vec<R>>; 3] = Default::default();
        for head in heads {
            parts
                .iter_mut()
                .zip(head)
                .for_each(|(part, head)| part.push(head));
        }
        Ok(parts)
    }

    /// Computes the gradients of the queries, keys and values of one head.
    fn backward_of<R: Real + WithDType>(
        &self,
        head: usize,
        grad: &View<'_>,
    ) -> Result<[Vec<R>; 3]> {
        let mut dquery = Vec::with_capacity(self.query.dim(2) * self.query.dim(3));
        let mut dkey = vec![<R as Real>::ZERO; self.key.dim(2) * self.key.dim(3)];
        let mut dvalue = vec![<R as Real>::ZERO; self.value.dim(2) * self.value.dim(3)];
        for block in self.blocks(head) {
            // The weights were not kept from the forward, because they are large: compute them
            // again.
            let weights = self.weights::<R>(block)?;
            let grad = grad.rows(head, block.start, block.rows)?;
            let value = self.value.rows(head, 0, block.columns)?;
            // The gradient of the weights, and from it, in place, that of the scores.
            let mut dscores = product(grad, value.transposed(), None, self.threads())?;
            let scale = R::of(self.scale);
            vectorized(
                #[inline(always)]
                || {
                    for (dscores, weights) in dscores
                        .chunks_mut(block.columns)
                        .zip(weights.chunks(block.columns))
                    {
                        let along = sum(weights.len(), |index| dscores[index] * weights[index]);
                        let elements = dscores.iter_mut().zip(weights);
                        elements.for_each(|(score, &weight)| {
                            *score = weight * (*score - along) * scale
                        });
                    }
                },
            );
            // Each block adds to the gradients of all keys and values that it has used. Only it has
            // these queries.
            let (weights, dscores) = (block.matrix(&weights), block.matrix(&dscores));
            let query = self.query.rows(head, block.start, block.rows)?;
            add(
                &mut dvalue,
                &product(weights.transposed(), grad, None, self.threads())?,
            );
            add(
                &mut dkey,
                &product(dscores.transposed(), query, None, self.threads())?,
            );
            let key = self.key.rows(head, 0, block.columns)?;
            dquery.extend(product(dscores, key, None, self.threads())?);
        }
        Ok([dquery, dkey, dvalue])
    }

    /// Computes the softmax of the scores of a block, row by row; 0 where a row does not see a
    /// column.
    fn weights<R: Real + WithDType>(&self, block: Block) -> Result<Vec<R>> {
        let query = self.query.rows(block.head, block.start, block.rows)?;
        let key = self.key.rows(block.head, 0, block.columns)?;
        let mut weights = product(query, key.transposed(), None, self.threads())?;
        let scale = R::of(self.scale);
        vectorized(
            #[inline(always)]
            || {
                for (row, weights) in weights.chunks_mut(block.columns).enumerate() {
                    let seen = if self.causal {
                        block.columns.min(block.start + row + 1)
                    } else {
                        block.columns
                    };
                    let (seen, hidden) = weights.split_at_mut(seen);
                    seen.iter_mut().for_each(|score| *score *= scale);
                    softmax_row(seen);
                    hidden.fill(<R as Real>::ZERO);
                }
            },
        );
        Ok(weights)
    }
}

impl Block {
    /// Returns scores or weights of the block as a matrix.
    const fn matrix<'a, R: Real>(&self, values: &'a [R]) -> Matrix<'a, R> {
        Matrix::row_major(values, [self.rows, self.columns])
    }
}

/// Adds values to the first ones of a sum.
fn add<R: Real>(sum: &mut [R], values: &[R]) {
    sum.iter_mut()
        .zip(values)
        .for_each(|(sum, &value)| *sum += value);
}
