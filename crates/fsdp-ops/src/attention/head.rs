//! The heads of an attention. Each is computed independently of the others.

use std::borrow::Cow;

use candle_core::{CpuStorage, Layout, Result, WithDType as _};
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use crate::element::Element;
use crate::product::{Matrix, product};
use crate::real::{Real, sum};
use crate::rows::vectorized;
use crate::softmax::softmax_row;
use crate::values::{Input, all_elements, elements, span};

pub(super) const NAME: &str = "attention";

/// The number of queries that are computed at a time.
const BLOCK_LEN: usize = 64;

/// Returns a storage in the type that its arithmetic is done in.
///
/// # Errors
/// Another dtype than `T`'s.
pub(super) fn widen_storage<T: Element>(storage: &CpuStorage) -> Result<Cow<'_, CpuStorage>> {
    Ok(match T::reals(all_elements::<T>(storage, NAME)?) {
        Cow::Borrowed(_) => Cow::Borrowed(storage),
        Cow::Owned(values) => Cow::Owned(T::Real::to_cpu_storage_owned(values)),
    })
}

/// Heads `[batch, heads, rows, width]` within a storage.
pub(super) struct View<'a> {
    pub(super) storage: Cow<'a, CpuStorage>,
    pub(super) layout: Layout,
}

impl<'a> View<'a> {
    /// Returns a tensor's heads in the type that their arithmetic is done in.
    ///
    /// # Errors
    /// Another dtype than `T`'s.
    pub(super) fn widened<T: Element>((storage, layout): Input<'a>) -> Result<Self> {
        Ok(View {
            storage: widen_storage::<T>(storage)?,
            layout: layout.clone(),
        })
    }

    fn dim(&self, dim: usize) -> usize {
        self.layout.dims()[dim]
    }

    /// Returns `len` rows of a head, as a matrix.
    fn matrix_of_rows<R: Real>(
        &self,
        head: usize,
        start: usize,
        len: usize,
    ) -> Result<Matrix<'_, R>> {
        let strides = self.layout.stride();
        let offset = self.layout.start_offset()
            + head / self.dim(1) * strides[0]
            + head % self.dim(1) * strides[1]
            + start * strides[2];
        let layout = Layout::new((len, self.dim(3)).into(), strides[2..].to_vec(), offset);
        Matrix::from_layout(elements(&self.storage, span(&layout), NAME)?, &layout)
    }
}

/// The options by which the heads of an attention are computed.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    /// `true` if a row sees no columns after its own.
    pub(super) causal: bool,
    pub(super) scale: f64,
}

/// The heads of queries, keys and values.
pub(super) struct Heads<'a> {
    pub(super) query: View<'a>,
    pub(super) key: View<'a>,
    pub(super) value: View<'a>,
    pub(super) attention: Attention,
}

/// Some queries of a head, and the keys that they see.
#[derive(Clone, Copy)]
struct Block {
    head: usize,
    start: usize,
    rows: usize,
    columns: usize,
}

impl<'a> Heads<'a> {
    /// Returns the heads of `query`, `key` and `value`.
    ///
    /// # Errors
    /// Another dtype than `T`'s.
    pub(super) fn new<T: Element>(
        attention: Attention,
        [query, key, value]: [Input<'a>; 3],
    ) -> Result<Self> {
        Ok(Heads {
            query: View::widened::<T>(query)?,
            key: View::widened::<T>(key)?,
            value: View::widened::<T>(value)?,
            attention,
        })
    }

    /// Returns the number of heads of the whole batch.
    fn head_count(&self) -> usize {
        self.query.dim(0) * self.query.dim(1)
    }

    /// Returns the number of threads of one product. Heads are computed in parallel, and share all
    /// threads.
    fn threads(&self) -> usize {
        rayon::current_num_threads().div_ceil(self.head_count().max(1))
    }

    /// Cuts the rows of a head into blocks. With `causal`, a block needs only the columns up to its
    /// last row.
    fn blocks(&self, head: usize) -> impl Iterator<Item = Block> {
        let row_count = self.query.dim(2);
        (0..row_count).step_by(BLOCK_LEN).map(move |start| {
            let rows = BLOCK_LEN.min(row_count - start);
            Block {
                head,
                start,
                rows,
                columns: self.visible_columns(start + rows - 1),
            }
        })
    }

    /// Returns the number of columns that a row sees, the first ones.
    #[inline(always)]
    fn visible_columns(&self, row: usize) -> usize {
        let key_count = self.key.dim(2);
        if self.attention.causal {
            key_count.min(row + 1)
        } else {
            key_count
        }
    }

    /// Computes each head of the output, `[rows, width of values]`.
    pub(super) fn forward<R: Real>(&self) -> Result<Vec<Vec<R>>> {
        (0..self.head_count())
            .into_par_iter()
            .map(|head| self.forward_head(head))
            .collect()
    }

    /// Computes one head of the output.
    fn forward_head<R: Real>(&self, head: usize) -> Result<Vec<R>> {
        let mut output = Vec::with_capacity(self.query.dim(2) * self.value.dim(3));
        // One block's scores fit into the cache, and are forgotten before the next block.
        for block in self.blocks(head) {
            let weights = self.compute_weights::<R>(block)?;
            let value = self.value.matrix_of_rows(head, 0, block.columns)?;
            output.extend(product(
                block.matrix(&weights),
                value,
                None,
                self.threads(),
            )?);
        }
        Ok(output)
    }

    /// Computes the gradients of queries, keys and values from the gradient of the output: three
    /// lists with one entry for each head.
    pub(super) fn backward<R: Real>(&self, grad: &View<'_>) -> Result<[Vec<Vec<R>>; 3]> {
        let heads: Result<Vec<[Vec<R>; 3]>> = (0..self.head_count())
            .into_par_iter()
            .map(|head| self.backward_head(head, grad))
            .collect();
        let mut gradients = [Vec::new(), Vec::new(), Vec::new()];
        for [dquery, dkey, dvalue] in heads? {
            gradients[0].push(dquery);
            gradients[1].push(dkey);
            gradients[2].push(dvalue);
        }
        Ok(gradients)
    }

    /// Computes the gradients of the queries, keys and values of one head.
    fn backward_head<R: Real>(&self, head: usize, grad: &View<'_>) -> Result<[Vec<R>; 3]> {
        let mut dquery = Vec::with_capacity(self.query.dim(2) * self.query.dim(3));
        let mut dkey = vec![R::ZERO; self.key.dim(2) * self.key.dim(3)];
        let mut dvalue = vec![R::ZERO; self.value.dim(2) * self.value.dim(3)];
        for block in self.blocks(head) {
            // The weights were not kept from the forward, because they are large: compute them
            // again.
            let weights = self.compute_weights::<R>(block)?;
            let grad = grad.matrix_of_rows(head, block.start, block.rows)?;
            let value = self.value.matrix_of_rows(head, 0, block.columns)?;
            // The gradient of the weights, which becomes that of the scores in place.
            let mut gradients = product(grad, value.transposed(), None, self.threads())?;
            let scale = R::nearest(self.attention.scale);
            vectorized(
                #[inline(always)]
                || {
                    // The gradient of a softmax, as in its own backward, times the scale.
                    for (dscores, weights) in gradients
                        .chunks_mut(block.columns)
                        .zip(weights.chunks(block.columns))
                    {
                        let dot_product =
                            sum(weights.len(), |index| dscores[index] * weights[index]);
                        let elements = dscores.iter_mut().zip(weights);
                        elements.for_each(|(score, &weight)| {
                            *score = weight * (*score - dot_product) * scale
                        });
                    }
                },
            );
            // Each block adds to the gradients of all keys and values that it has used. Only it has
            // these queries.
            let across_rows = block.matrix(&weights).transposed();
            add_values(
                &mut dvalue,
                &product(across_rows, grad, None, self.threads())?,
            );
            let dscores = block.matrix(&gradients);
            let query = self.query.matrix_of_rows(head, block.start, block.rows)?;
            add_values(
                &mut dkey,
                &product(dscores.transposed(), query, None, self.threads())?,
            );
            let key = self.key.matrix_of_rows(head, 0, block.columns)?;
            dquery.extend(product(dscores, key, None, self.threads())?);
        }
        Ok([dquery, dkey, dvalue])
    }

    /// Computes the softmax of the scores of a block, row by row; 0 where a row does not see a
    /// column.
    fn compute_weights<R: Real>(&self, block: Block) -> Result<Vec<R>> {
        let query = self
            .query
            .matrix_of_rows(block.head, block.start, block.rows)?;
        let key = self.key.matrix_of_rows(block.head, 0, block.columns)?;
        let mut weights = product(query, key.transposed(), None, self.threads())?;
        let scale = R::nearest(self.attention.scale);
        vectorized(
            #[inline(always)]
            || {
                for (row, weights) in weights.chunks_mut(block.columns).enumerate() {
                    let columns = self.visible_columns(block.start + row);
                    let (visible, hidden) = weights.split_at_mut(columns);
                    visible.iter_mut().for_each(|score| *score *= scale);
                    softmax_row(visible);
                    hidden.fill(R::ZERO);
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
fn add_values<R: Real>(sum: &mut [R], values: &[R]) {
    sum.iter_mut()
        .zip(values)
        .for_each(|(sum, &value)| *sum += value);
}
