//! The updates of weights: their factors, which way they lie, and their products.

use std::collections::{HashMap, HashSet};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{check_expansion, tensor_of};
use fsdp_layout::TensorBox;
use indexmap::IndexMap;

use super::config::LoraConfig;
use super::factor::Factor;
use crate::convert::{CASTABLE, unsupported};
use crate::elements::for_each_number;
use crate::merge::base_model::layer_name;

/// The update of one weight.
#[derive(Debug, Clone)]
pub(super) struct Update {
    /// The adapter's key of the factor `A`, which is `[rank, in]`.
    pub(super) a_key: String,
    /// The adapter's key of the factor `B`, which is `[out, rank]`.
    pub(super) b_key: String,
    pub(super) rank: usize,
    /// The number by which the product of the factors is multiplied.
    pub(super) scale: f64,
    /// `true` if the weight is `[in, out]`, `false` if it is `[out, in]`, `None` if it is square
    /// and [`orient`] has to decide.
    is_transposed: Option<bool>,
}

impl Update {
    /// Makes the update of a weight by two factors, whose keys in the adapter are `a_key` and
    /// `b_key`.
    ///
    /// # Errors
    /// A base without the weight; factors that are no matrices, or do not fit the weight or each
    /// other; their dtypes.
    pub(super) fn new(
        base: &dyn Checkpoint,
        adapter: &dyn Checkpoint,
        config: &LoraConfig,
        factor: &Factor<'_>,
        [a_key, b_key]: [&str; 2],
    ) -> Result<Self, FileError> {
        let key = format!("{}.weight", factor.module);
        let a_tensor = tensor_of(adapter.metadata(), a_key)?;
        let b_tensor = tensor_of(adapter.metadata(), b_key)?;
        let weight = base
            .metadata()
            .tensor(&key)
            .ok_or_else(|| unsupported(a_key, format!("an adapter to a base without `{key}`")))?;
        let ([rank, inputs], [outputs, b_rank]) =
            (a_tensor.shape.as_slice(), b_tensor.shape.as_slice())
        else {
            return Err(unsupported(
                a_key,
                "an update that is no product of two matrices",
            ));
        };
        // The weight of an embedding is `[in, out]`, that of a layer may be either.
        let fits_transposed = weight.shape == [*inputs, *outputs];
        let fits_plain = weight.shape == [*outputs, *inputs] && !factor.is_embedding;
        if rank != b_rank || *rank == 0 || !(fits_plain || fits_transposed) {
            let what = format!(
                "factors of shapes {:?} and {:?} for a weight of shape {:?}",
                a_tensor.shape, b_tensor.shape, weight.shape
            );
            return Err(unsupported(a_key, what));
        }
        for dtype in [a_tensor, b_tensor].map(|factor| factor.properties.dtype) {
            if !CASTABLE.contains(&dtype) {
                return Err(unsupported(a_key, format!("an update of dtype `{dtype}`")));
            }
        }
        Ok(Update {
            a_key: a_key.to_owned(),
            b_key: b_key.to_owned(),
            rank: *rank,
            scale: config.scale(factor.module, a_key, *rank)?,
            is_transposed: (fits_plain != fits_transposed).then_some(fits_transposed),
        })
    }

    /// Adds the update to `sums`, the numbers of a box of the weight.
    pub(super) fn add_to(
        &self,
        sums: &mut [f64],
        part: &TensorBox,
        adapter: &dyn Checkpoint,
    ) -> Result<(), FileError> {
        let rows = part.sizes[0];
        let columns = part.sizes[1];
        // Rows of the weight are outputs, and its columns inputs, or the other way round.
        let is_transposed = self
            .is_transposed
            .expect("every update was oriented when the merge was made");
        let (inputs, outputs) = if is_transposed { (0, 1) } else { (1, 0) };
        // All of the rank, for the inputs and the outputs of the box.
        let width = part.sizes[inputs];
        let a_box = TensorBox::new(vec![0, part.offsets[inputs]], vec![self.rank, width]);
        let b_box = TensorBox::new(
            vec![part.offsets[outputs], 0],
            vec![part.sizes[outputs], self.rank],
        );
        let a_numbers = read_numbers(adapter, &self.a_key, &a_box)?;
        let b_numbers = read_numbers(adapter, &self.b_key, &b_box)?;
        for row in 0..rows {
            let sums = &mut sums[row * columns..(row + 1) * columns];
            for rank_index in 0..self.rank {
                for (column, sum) in sums.iter_mut().enumerate() {
                    let (input, output) = if is_transposed {
                        (row, column)
                    } else {
                        (column, row)
                    };
                    *sum += self.scale
                        * b_numbers[output * self.rank + rank_index]
                        * a_numbers[rank_index * width + input];
                }
            }
        }
        Ok(())
    }
}

/// The types of models whose layers are `Conv1D`, with weights of shape `[in, out]`, except the
/// output layer.
const CONV1D_MODELS: [&str; 4] = ["decision_transformer", "gpt2", "imagegpt", "openai-gpt"];
/// The names of `Conv1D` layers in those models. In other models, layers of these names may be of
/// another kind.
const CONV1D_LAYERS: [&str; 3] = ["c_attn", "c_fc", "c_proj"];

/// Decides for each update of a square weight whether the weight is `[in, out]`. The other
/// weights of layers of the same name tell, or the type of the model. PEFT's setting
/// `fan_in_fan_out` is the last resort, because PEFT records it for the last layer only.
///
/// # Errors
/// A weight of a layer that may be a `Conv1D`, if none of these tells.
pub(super) fn orient(
    updates: &mut IndexMap<String, Update>,
    model_type: Option<&str>,
    fan_in_fan_out: bool,
) -> Result<(), FileError> {
    let layers: HashSet<&str> = updates.keys().map(|key| layer_name(key)).collect();
    let is_one_kind = layers.len() <= 1;
    let known_layers: HashMap<String, bool> = updates
        .iter()
        .filter_map(|(key, update)| Some((layer_name(key).to_owned(), update.is_transposed?)))
        .collect();
    for (key, update) in updates {
        if update.is_transposed.is_some() {
            continue;
        }
        let layer = layer_name(key);
        let may_be_conv1d = CONV1D_LAYERS.contains(&layer);
        update.is_transposed = Some(match (known_layers.get(layer), model_type) {
            (Some(is_transposed), _) => *is_transposed,
            (None, Some(model)) if may_be_conv1d => CONV1D_MODELS.contains(&model),
            (None, None) if may_be_conv1d && !is_one_kind => {
                let what = "an update of a square weight that may or may not be transposed: put the model's \
                            `config.json` into the base's directory;";
                return Err(unsupported(&update.a_key, what));
            }
            _ => fan_in_fan_out,
        });
    }
    Ok(())
}

/// The most numbers of a matrix that are compared at a time.
const COMPARED_NUMBERS: usize = 1 << 20;

/// Returns `true` if one matrix of an adapter is another one transposed.
pub(super) fn is_transposed(
    adapter: &dyn Checkpoint,
    first: &str,
    second: &str,
) -> Result<bool, FileError> {
    let first_shape = &tensor_of(adapter.metadata(), first)?.shape;
    let second_shape = &tensor_of(adapter.metadata(), second)?.shape;
    let [rows, columns] = first_shape[..] else {
        return Ok(false);
    };
    if second_shape[..] != [columns, rows] {
        return Ok(false);
    }
    let row_count = (COMPARED_NUMBERS / columns.max(1)).max(1);
    for start in (0..rows).step_by(row_count) {
        let count = row_count.min(rows - start);
        let first_box = TensorBox::new(vec![start, 0], vec![count, columns]);
        let second_box = TensorBox::new(vec![0, start], vec![columns, count]);
        let first_numbers = read_numbers(adapter, first, &first_box)?;
        let second_numbers = read_numbers(adapter, second, &second_box)?;
        for (index, number) in first_numbers.into_iter().enumerate() {
            let (row, column) = (index / columns, index % columns);
            if number != second_numbers[column * count + row] {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Reads a box of a matrix, and returns its elements as numbers.
fn read_numbers(
    source: &dyn Checkpoint,
    fqn: &str,
    bounds: &TensorBox,
) -> Result<Vec<f64>, FileError> {
    let dtype = tensor_of(source.metadata(), fqn)?.properties.dtype;
    let length = bounds.numel() * dtype.size_in_bytes() as usize;
    check_expansion(source, fqn, length as u64)?;
    let mut bytes = vec![0; length];
    source.read_box(fqn, bounds, &mut bytes)?;
    let mut numbers = Vec::with_capacity(bounds.numel());
    for_each_number(dtype, &bytes, &mut |number| numbers.push(number));
    Ok(numbers)
}
