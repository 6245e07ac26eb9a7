//! A checkpoint seen with its weights of 8 bits multiplied by their scales: by block, as
//! DeepSeek-V3 has them, by row, or all by one, as compressed-tensors and FBGEMM write them.

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Change, Checkpoint, KeyFilter, stream};
use fsdp_formats::internals::{KeyChange, Layer, LayerView, Origin, check_expansion, tensor_of};
use fsdp_formats::metadata::{Entry, Metadata, TensorEntry};
use fsdp_formats::reader::Slot;
use fsdp_layout::boxes::checked_bytes;
use fsdp_layout::{DType, TensorBox};
use indexmap::IndexMap;

use super::cast::{
    CASTABLE, Losses, LostElements, NumberClass, cast_elements, last_part, parent_of,
};
use super::output::unsupported;
use crate::elements::for_each_number;

/// A checkpoint whose weights of 8 bits are multiplied by their scales, which it leaves out.
#[derive(Debug)]
pub struct Dequantized<'a> {
    view: LayerView<'a>,
    /// The weights, by key.
    weights: IndexMap<String, ScaledWeight>,
    changes: Vec<Change>,
    losses: Losses,
}

/// The scale of a weight.
#[derive(Debug)]
struct ScaledWeight {
    /// The key of the scale.
    scale: String,
    /// For each dimension of the weight, how many of its indices share a scale.
    block: Vec<usize>,
    /// The type of the scale's elements.
    scale_dtype: DType,
}

/// The names of scales of activations and caches, which nothing needs without quantization.
const ACTIVATION_SCALES: [&str; 8] = [
    "input_scale",
    "input_scale_ub",
    "output_scale",
    "activation_scale",
    "act_scale",
    "q_scale",
    "k_scale",
    "v_scale",
];

impl<'a> Dequantized<'a> {
    /// Makes the view of a checkpoint, with weights of `dtype`. `block` is the number of rows and
    /// of columns that share a scale, where the model's configuration says it. Weights that are not
    /// wanted stay as they are.
    ///
    /// # Errors
    /// A weight of 8 bits without a scale, or whose scale has a shape that does not fit; a weight
    /// of fewer bits; a `dtype` that nothing can be cast to.
    pub fn new(
        source: &'a dyn Checkpoint,
        dtype: DType,
        block: Option<[usize; 2]>,
        is_wanted: KeyFilter<'_>,
    ) -> Result<Self, FileError> {
        if !CASTABLE.contains(&dtype) {
            return Err(unsupported("", format!("casting to `{dtype}`")));
        }
        let source_metadata = source.metadata();
        // Step 1: find the weights and their scales.
        let mut weights = IndexMap::new();
        for (fqn, tensor) in source_metadata.tensors().filter(|(fqn, _)| is_wanted(fqn)) {
            if let Some(weight) = find_scale(source_metadata, fqn, tensor, block)? {
                weights.insert(fqn.to_owned(), weight);
            }
        }
        // Step 2: leave out the scales, and those of activations beside the weights.
        let mut left_out: HashSet<&str> = HashSet::new();
        left_out.extend(weights.values().map(|weight| weight.scale.as_str()));
        let mut modules = HashSet::new();
        for fqn in weights.keys() {
            let module = parent_of(fqn);
            modules.insert(module);
            modules.extend(module.rsplit_once('.').map(|(parent, _)| parent));
        }
        let mut activation_scales = Vec::new();
        for (fqn, _) in source_metadata.tensors() {
            if ACTIVATION_SCALES.contains(&last_part(fqn)) && modules.contains(parent_of(fqn)) {
                left_out.insert(fqn);
                activation_scales.push(fqn.to_owned());
            }
        }
        let mut metadata = source_metadata.clone();
        metadata
            .entries
            .retain(|fqn, _| !left_out.contains(fqn.as_str()));
        metadata.replicas.clear();
        if let Some(paths) = &mut metadata.planner_data {
            paths.retain(|fqn, _| !left_out.contains(fqn.as_str()));
        }
        for fqn in weights.keys() {
            if let Some(Entry::Tensor(tensor)) = metadata.entries.get_mut(fqn) {
                tensor.properties.dtype = dtype;
            }
        }
        let structure = match source.structure() {
            Some(structure) => Some(structure.rebuilt(&mut |fqn, _| {
                if left_out.contains(fqn) {
                    KeyChange::Remove
                } else {
                    KeyChange::Keep
                }
            })?),
            None => None,
        };
        // Step 3: tell both.
        let dequantized = format!("of 8 bits became {dtype}: each was multiplied by its scale");
        let weight_keys = weights.keys().cloned().collect();
        let mut changes = Vec::new();
        changes.extend(Change::new("weight", dequantized, weight_keys));
        let what = "of activations was left out";
        changes.extend(Change::new("scale", what, activation_scales));
        let kept = source_metadata.tensors().filter(|(fqn, tensor)| {
            let is_left_out = left_out.contains(fqn) || weights.contains_key(*fqn);
            tensor.properties.dtype == DType::I8 && is_wanted(fqn) && !is_left_out
        });
        changes.extend(Change::new(
            "tensor",
            "of 8-bit integers kept its codes: no scale was found beside it",
            kept.map(|(fqn, _)| fqn.to_owned()).collect(),
        ));
        Ok(Dequantized {
            view: LayerView::new(source, metadata, structure),
            weights,
            changes,
            losses: Losses::default(),
        })
    }

    /// Returns `true` if no weight is multiplied by a scale.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }
}

/// Returns the scale of a tensor, if it is a weight of 8 bits; `None` for any other tensor.
///
/// # Errors
/// Such a weight without a scale that fits it; a weight of fewer bits.
fn find_scale(
    metadata: &Metadata,
    fqn: &str,
    tensor: &TensorEntry,
    block: Option<[usize; 2]>,
) -> Result<Option<ScaledWeight>, FileError> {
    let dtype = tensor.properties.dtype;
    let module = fqn.strip_suffix("weight").unwrap_or(fqn);
    let scale = [
        format!("{fqn}_scale_inv"),
        format!("{fqn}_scale"),
        format!("{module}scale"),
        format!("{module}scale_weight"),
    ]
    .into_iter()
    .find_map(|key| Some((metadata.tensor(&key)?, key)));
    let is_float8 = dtype.is_float() && dtype.bits() == 8 && dtype != DType::F8E8M0Fnu;
    let is_packed = dtype == DType::F4E2M1FnX2
        || (dtype == DType::U8 && (scale.is_some() || fqn.ends_with("weight")))
        || ["qweight", "packed", "blocks"]
            .iter()
            .any(|end| last_part(fqn).ends_with(end) && !dtype.is_float())
        || metadata.tensor(&format!("{fqn}.absmax")).is_some()
        || metadata.tensor(&format!("{module}SCB")).is_some()
        || metadata.tensor(&format!("{fqn}_zero_point")).is_some();
    if is_packed {
        return Err(unsupported(
            fqn,
            "`--dequantize` of weights in fewer than 8 bits, of packed ones and of those with zero points",
        ));
    }
    // Other tensors of integers may be anything, such as masks.
    let is_integer_weight = dtype == DType::I8 && (scale.is_some() || fqn.ends_with("weight"));
    if !is_float8 && !is_integer_weight {
        return Ok(None);
    }
    // The codes of a scale are no weights.
    if ["_scale", "_scale_inv", ".scale"]
        .iter()
        .any(|end| fqn.ends_with(end))
    {
        return Ok(None);
    }
    let Some((scale_tensor, scale)) = scale else {
        return Err(unsupported(
            fqn,
            format!(
                "`--dequantize` of a weight without its scale, `{fqn}_scale` or `{fqn}_scale_inv`,"
            ),
        ));
    };
    // Bytes that stand for powers of two, of which some programs do not say the type.
    let scale_dtype = match scale_tensor.properties.dtype {
        DType::U8 => DType::F8E8M0Fnu,
        scale_dtype => scale_dtype,
    };
    let is_scale_of_codes = dtype == DType::I8 && scale_dtype == DType::F8E8M0Fnu;
    if is_scale_of_codes || !CASTABLE.contains(&scale_dtype) && scale_dtype != DType::F8E8M0Fnu {
        return Err(unsupported(
            fqn,
            format!("`--dequantize` of {dtype} with a scale of {scale_dtype}"),
        ));
    }
    let block = find_block(&tensor.shape, &scale_tensor.shape, block).ok_or_else(|| {
        let configured = match block {
            Some(configured) => format!("blocks of {configured:?}"),
            None => "nothing of blocks".to_owned(),
        };
        let what = format!(
            "a weight of shape {:?} with a scale of shape {:?}, where `config.json` says {configured},",
            tensor.shape, scale_tensor.shape
        );
        unsupported(fqn, what)
    })?;
    Ok(Some(ScaledWeight {
        scale,
        block,
        scale_dtype,
    }))
}

/// The number of rows and of columns that share a scale, where nothing says it.
const USUAL_BLOCK: usize = 128;

/// Returns for each dimension of a weight how many of its indices share a scale; `None` if the
/// shapes do not fit, or allow several lengths of which nothing says which it is.
fn find_block(
    shape: &[usize],
    scale_shape: &[usize],
    block: Option<[usize; 2]>,
) -> Option<Vec<usize>> {
    let whole: Vec<usize> = shape.iter().map(|&size| size.max(1)).collect();
    // One scale for all.
    if scale_shape.iter().all(|&size| size == 1) {
        return Some(whole);
    }
    // One for each row, or for each expert.
    if let ([count], [rows, ..]) = (scale_shape, shape)
        && count == rows
    {
        return Some([&[1], &whole[1..]].concat());
    }
    if scale_shape.len() != shape.len() {
        return None;
    }
    let mut blocks = Vec::new();
    for (dim, (&size, &count)) in shape.iter().zip(scale_shape).enumerate() {
        // The last two dimensions are rows and columns.
        let configured =
            block.and_then(|block| block.get((dim + 2).checked_sub(shape.len())?).copied());
        let candidates = [
            (count == 1).then_some(size),
            (count == size).then_some(1),
            configured.or(Some(USUAL_BLOCK)),
            // Blocks that are not ragged have a power of two, unless the configuration says
            // another.
            size.checked_div(count).filter(|length| {
                configured.is_none() && length.is_power_of_two() && size.is_multiple_of(*length)
            }),
        ];
        // The last block of a dimension may be ragged.
        blocks.push(
            candidates
                .into_iter()
                .flatten()
                .find(|&length| length > 0 && size.div_ceil(length) == count)?,
        );
    }
    Some(blocks)
}

impl ScaledWeight {
    /// Returns the box of the scales of a box of the weight, as if the scale had a dimension for
    /// each of the weight.
    fn scale_box(&self, bounds: &TensorBox) -> TensorBox {
        let mut scale_box = bounds.clone();
        for (dim, &length) in self.block.iter().enumerate() {
            let end = bounds.offsets[dim] + bounds.sizes[dim];
            scale_box.offsets[dim] = bounds.offsets[dim] / length;
            scale_box.sizes[dim] = end.div_ceil(length) - scale_box.offsets[dim];
        }
        scale_box
    }

    /// Reads the scales of a box of the weight, in row-major order.
    fn read_scales(
        &self,
        source: &dyn Checkpoint,
        scale_box: &TensorBox,
    ) -> Result<Vec<f32>, FileError> {
        let tensor = tensor_of(source.metadata(), &self.scale)?;
        // A scale may have fewer dimensions than the weight, or one more of one element.
        let mut bounds = TensorBox::whole(&tensor.shape);
        if tensor.shape.len() == scale_box.sizes.len() {
            bounds = scale_box.clone();
        } else if tensor.shape.iter().any(|&size| size > 1) {
            bounds.offsets[0] = scale_box.offsets[0];
            bounds.sizes[0] = scale_box.sizes[0];
        }
        let length = checked_bytes(&bounds.sizes, tensor.properties.dtype)
            .ok_or_else(|| unsupported(&self.scale, "a scale of so many elements"))?;
        check_expansion(source, &self.scale, length as u64)?;
        let mut bytes = vec![0; length];
        source.read_box(&self.scale, &bounds, &mut bytes)?;
        let mut scales = Vec::new();
        for_each_number(self.scale_dtype, &bytes, &mut |number| {
            scales.push(number as f32);
        });
        Ok(scales)
    }

    /// Multiplies consecutive elements of a box by their scales. `start` is the place of the first
    /// in the row-major order of the box. Returns the number of those that are lost by it.
    fn multiply(
        &self,
        numbers: &mut [f32],
        start: usize,
        bounds: &TensorBox,
        scales: &Scales<'_>,
    ) -> LostElements {
        let Some(last) = bounds.sizes.len().checked_sub(1) else {
            return multiply_by_scale(numbers, scales.numbers[0]);
        };
        let columns = bounds.sizes[last];
        let mut lost = LostElements::default();
        let mut position = 0;
        while position < numbers.len() {
            let row = (start + position) / columns;
            let mut column = (start + position) % columns;
            let row_start = scales.row_start(row, bounds, &self.block);
            // The elements of a row that share a scale follow each other.
            while column < columns && position < numbers.len() {
                let block = (bounds.offsets[last] + column) / self.block[last];
                let block_end = (block + 1) * self.block[last] - bounds.offsets[last];
                let count = (block_end.min(columns) - column).min(numbers.len() - position);
                let scale = scales.numbers[row_start + block - scales.bounds.offsets[last]];
                lost += multiply_by_scale(&mut numbers[position..position + count], scale);
                position += count;
                column += count;
            }
        }
        lost
    }
}

/// Multiplies each number by the scale of its block. Returns how many products cannot be held:
/// those that became infinite though number and scale are finite, those that became zero though
/// neither is, and those that became NaN or infinite because the scale is.
fn multiply_by_scale(numbers: &mut [f32], scale: f32) -> LostElements {
    let mut lost = LostElements::default();
    for number in numbers {
        let product = *number * scale;
        let before = NumberClass {
            is_infinite: number.is_infinite() || scale.is_infinite(),
            is_zero: *number == 0.0 || scale == 0.0,
        };
        lost += LostElements::of_element(before, product.into());
        lost.spoiled += u64::from(number.is_finite() && !scale.is_finite());
        *number = product;
    }
    lost
}

/// The scales of a box of a weight.
struct Scales<'s> {
    numbers: &'s [f32],
    bounds: &'s TensorBox,
}

impl Scales<'_> {
    /// Returns the place of the first scale of a row of the box of the weight, where rows are
    /// counted over all dimensions but the last.
    fn row_start(&self, row: usize, weight_box: &TensorBox, block: &[usize]) -> usize {
        let mut remaining = row;
        let mut start = 0;
        let mut stride = 1;
        for dim in (0..block.len()).rev() {
            if dim + 1 < block.len() {
                let index = weight_box.offsets[dim] + remaining % weight_box.sizes[dim];
                remaining /= weight_box.sizes[dim];
                start += (index / block[dim] - self.bounds.offsets[dim]) * stride;
            }
            stride *= self.bounds.sizes[dim];
        }
        start
    }
}

impl Layer for Dequantized<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn own_changes(&self) -> Vec<Change> {
        let mut changes = self.changes.clone();
        changes.extend(self.losses.changes());
        changes
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if self.weights.contains_key(fqn) {
            Origin::Made
        } else {
            Origin::Source(0, fqn)
        }
    }

    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        vec![(0, fqn.to_owned()), (0, self.weights[fqn].scale.clone())]
    }

    /// Computes boxes of a weight, in `f32`, and rounds once.
    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let source = self.source(0);
        let weight = &self.weights[fqn];
        let target_dtype = tensor_of(&self.view.metadata, fqn)?.properties.dtype;
        let source_dtype = tensor_of(source.metadata(), fqn)?.properties.dtype;
        let target_bytes = target_dtype.size_in_bytes() as usize;
        for slot in slots.iter_mut().filter(|slot| !slot.bytes.is_empty()) {
            let scale_box = weight.scale_box(&slot.bounds);
            let numbers = weight.read_scales(source, &scale_box)?;
            let scales = Scales {
                numbers: &numbers,
                bounds: &scale_box,
            };
            let mut start = 0;
            let mut lost = LostElements::default();
            let range = 0..slot.bounds.numel() as u64;
            stream::<FileError>(source, fqn, &slot.bounds, range, &mut |bytes| {
                // In parts, because numbers take four times as much memory as the elements.
                for part in bytes.chunks(1 << 16) {
                    let mut numbers = Vec::with_capacity(part.len());
                    for_each_number(source_dtype, part, &mut |number| {
                        numbers.push(number as f32)
                    });
                    lost += weight.multiply(&mut numbers, start, &slot.bounds, &scales);
                    let end = start + part.len();
                    lost += write_floats(
                        &numbers,
                        target_dtype,
                        &mut slot.bytes[start * target_bytes..end * target_bytes],
                    );
                    start = end;
                }
                Ok(())
            })?;
            self.losses.note(fqn, &slot.bounds, lost);
            slot.filled(0..slot.bytes.len());
        }
        Ok(())
    }
}

/// Writes numbers as elements of a type of [`CASTABLE`]. Returns the number of those that are lost
/// by it.
fn write_floats(numbers: &[f32], dtype: DType, output: &mut [u8]) -> LostElements {
    let mut bytes = Vec::with_capacity(4 * numbers.len());
    for number in numbers {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    if dtype == DType::F32 {
        output.copy_from_slice(&bytes);
        return LostElements::default();
    }
    cast_elements(&bytes, DType::F32, output, dtype)
}

#[cfg(test)]
mod tests {
    use super::find_block;

    #[test]
    fn blocks_are_those_of_the_shapes() {
        for (shape, scale_shape, block, expected) in [
            (&[300, 200][..], &[3, 2][..], None, Some(vec![128, 128])),
            (&[300, 200], &[5, 4], Some([64, 64]), Some(vec![64, 64])),
            (&[300, 200], &[300, 1], None, Some(vec![1, 200])),
            (&[300, 200], &[300], None, Some(vec![1, 200])),
            (&[300, 200], &[], None, Some(vec![300, 200])),
            (&[300, 200], &[1], None, Some(vec![300, 200])),
            (&[64, 96], &[64, 3], None, Some(vec![1, 32])),
            (&[2, 256, 128], &[2, 2, 1], None, Some(vec![1, 128, 128])),
            (&[2, 256, 128], &[2], None, Some(vec![1, 256, 128])),
            (&[300, 200], &[7, 2], None, None),
            (&[300, 200], &[2, 300], None, None),
        ] {
            assert_eq!(
                find_block(shape, scale_shape, block),
                expected,
                "{shape:?} {scale_shape:?}"
            );
        }
    }
}
