//! Casts of dtypes in a conversion: which tensors are cast, and how elements are rounded.

use std::collections::HashSet;

use fsdp_formats::metadata::{Metadata, TensorEntry};
use fsdp_layout::DType;
use half::{bf16, f16};

/// The types from and to which elements can be cast.
pub(crate) const CASTABLE: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// A cast of the floating-point tensors of a checkpoint.
///
/// A count of steps is never cast: 1001 is 1000 in `bf16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    /// The type to cast to.
    pub dtype: DType,
    /// `true` to cast the state of optimizers too. Training goes on worse from moments of fewer
    /// bits.
    pub with_optimizer: bool,
}

impl Cast {
    /// Returns `true` if this cast changes a tensor.
    pub(super) fn changes(
        &self,
        fqn: &str,
        tensor: &TensorEntry,
        optimizers: &Optimizers<'_>,
    ) -> bool {
        CASTABLE.contains(&tensor.properties.dtype)
            && !is_count(fqn, tensor)
            && (self.with_optimizer || !optimizers.is_state(fqn))
    }
}

/// Returns `true` for a count of steps: `step`, `num_steps`, `global_step`.
fn is_count(fqn: &str, tensor: &TensorEntry) -> bool {
    let last_part = fqn.rsplit_once('.').map_or(fqn, |(_, last_part)| last_part);
    tensor.shape.is_empty()
        && (last_part == "step" || last_part.ends_with("_step") || last_part.ends_with("steps"))
}

/// The places in a checkpoint where optimizers have their state.
pub(crate) struct Optimizers<'m> {
    /// The keys before `param_groups`: beside it lies the `state` of an optimizer.
    beside_groups: HashSet<&'m str>,
}

impl<'m> Optimizers<'m> {
    /// Finds the optimizers of a checkpoint by its keys.
    pub(crate) fn new(metadata: &'m Metadata) -> Self {
        let groups = metadata.entries.keys().filter_map(|fqn| {
            let groups_start = fqn.find("param_groups")?;
            (groups_start == 0 || fqn[..groups_start].ends_with('.'))
                .then_some(&fqn[..groups_start])
        });
        Optimizers {
            beside_groups: groups.collect(),
        }
    }

    /// Returns `true` for the state of an optimizer, and for a count of steps.
    pub(crate) fn is_state_or_count(&self, fqn: &str, tensor: &TensorEntry) -> bool {
        self.is_state(fqn) || is_count(fqn, tensor)
    }

    /// Returns `true` if a key belongs to the state of an optimizer.
    fn is_state(&self, fqn: &str) -> bool {
        let mut part_start = 0;
        // `state` alone may be anything. Beside `param_groups` it is that of an optimizer.
        for part in fqn.split('.') {
            let is_optimizer = matches!(part, "optim" | "optimizer" | "optimizers")
                || part.starts_with("optim_")
                || part.starts_with("optimizer_");
            if is_optimizer || (part == "state" && self.beside_groups.contains(&fqn[..part_start]))
            {
                return true;
            }
            part_start += part.len() + 1;
        }
        false
    }
}

/// Writes elements of `input` to `output` in another type of [`CASTABLE`], rounded to nearest, ties
/// to even, as torch does.
pub(super) fn cast_elements(
    input: &[u8],
    input_dtype: DType,
    output: &mut [u8],
    output_dtype: DType,
) {
    debug_assert_ne!(
        input_dtype, output_dtype,
        "elements of the same type are read directly"
    );
    match input_dtype {
        // torch rounds a double that becomes a half to a float in between.
        DType::F64 => encode_floats(input, output, output_dtype, |element| {
            f64::from_le_bytes(element) as f32
        }),
        DType::F32 => encode_floats(input, output, output_dtype, f32::from_le_bytes),
        DType::F16 => encode_floats(input, output, output_dtype, |element| {
            f16::from_le_bytes(element).to_f32()
        }),
        DType::BF16 => encode_floats(input, output, output_dtype, |element| {
            bf16::from_le_bytes(element).to_f32()
        }),
        _ => unreachable!("a view casts only the types of CASTABLE"),
    }
}

/// Writes elements, which `decode` reads, in the type `output_dtype`.
fn encode_floats<const A: usize>(
    input: &[u8],
    output: &mut [u8],
    output_dtype: DType,
    decode: impl Fn([u8; A]) -> f32,
) {
    match output_dtype {
        DType::F64 => convert_each(input, output, |element| {
            f64::from(decode(element)).to_le_bytes()
        }),
        DType::F32 => convert_each(input, output, |element| decode(element).to_le_bytes()),
        DType::F16 => convert_each(input, output, |element| {
            f16::from_f32(decode(element)).to_le_bytes()
        }),
        DType::BF16 => convert_each(input, output, |element| {
            bf16::from_f32(decode(element)).to_le_bytes()
        }),
        _ => unreachable!("a view casts only to the types of CASTABLE"),
    }
}

/// Converts each element: `A` bytes to `B` bytes.
fn convert_each<const A: usize, const B: usize>(
    input: &[u8],
    output: &mut [u8],
    convert: impl Fn([u8; A]) -> [u8; B],
) {
    let input_elements = input.as_chunks::<A>().0;
    let output_elements = output.as_chunks_mut::<B>().0;
    for (input_element, output_element) in input_elements.iter().zip(output_elements) {
        *output_element = convert(*input_element);
    }
}
