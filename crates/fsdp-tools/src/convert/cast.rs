//! Casts of dtypes in a conversion: which tensors are cast, and how elements are rounded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::AddAssign;
use std::sync::{Mutex, PoisonError};

use fsdp_formats::checkpoint::Change;
use fsdp_formats::metadata::{Metadata, TensorEntry};
use fsdp_layout::{DType, TensorBox};
use half::{bf16, f16};

use crate::elements::parts_of_complex;

/// The types from and to which elements can be cast.
pub(crate) const CASTABLE: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// A cast of the floating-point tensors of a checkpoint.
///
/// What is computed with rather than trained is never cast: 1001 steps are 1000 in `bf16`, and a
/// learning rate of 0.0025 is 0.00250244. That is hyperparameters, counts, and the scales of
/// quantized tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    /// The type to cast to.
    pub dtype: DType,
    /// `true` to cast the state of optimizers too. Training goes on worse from moments of fewer
    /// bits.
    pub with_optimizer: bool,
}

/// The outcome of a cast for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CastOutcome {
    /// It is cast.
    Cast,
    /// It is of no type that could be cast, or has the type already.
    Same,
    /// It is state of an optimizer, and stays.
    OptimizerState,
    /// It is a hyperparameter, a count or a scale, and stays.
    Constant,
    /// It is a number of a type that cannot be cast, and stays.
    Uncastable,
}

impl Cast {
    /// Returns what this cast does with a tensor.
    pub(super) fn outcome(
        &self,
        fqn: &str,
        tensor: &TensorEntry,
        roles: &Roles<'_>,
    ) -> CastOutcome {
        let dtype = tensor.properties.dtype;
        let is_number =
            dtype.is_float() || dtype.is_quantized() || parts_of_complex(dtype).is_some();
        if dtype == self.dtype || !is_number {
            return CastOutcome::Same;
        }
        // The codes of 8-bit floats may be scales too.
        if !self.with_optimizer && roles.optimizers.is_state(fqn) {
            return CastOutcome::OptimizerState;
        }
        if !CASTABLE.contains(&dtype) {
            return CastOutcome::Uncastable;
        }
        if roles.is_constant(fqn, tensor) {
            return CastOutcome::Constant;
        }
        CastOutcome::Cast
    }
}

/// The tensors of a checkpoint that are no weights: the state of optimizers, and the scales of
/// quantized weights.
pub(crate) struct Roles<'m> {
    pub(crate) optimizers: Optimizers<'m>,
    /// The keys below which scales belong to a quantized tensor.
    quantized_places: HashSet<&'m str>,
}

impl<'m> Roles<'m> {
    /// Finds the roles of a checkpoint's tensors by their keys and types.
    pub(crate) fn new(metadata: &'m Metadata) -> Self {
        let mut quantized_places = HashSet::new();
        for (fqn, tensor) in metadata.tensors() {
            if !is_quantized(fqn, tensor.properties.dtype) {
                continue;
            }
            // Scales lie beside the tensor, below it (`weight.absmax`), or beside its module
            // (`k_scale` of an attention).
            let module = parent_of(fqn);
            quantized_places.extend([fqn, module]);
            quantized_places.extend(module.rsplit_once('.').map(|(parent, _)| parent));
        }
        Roles {
            optimizers: Optimizers::new(metadata),
            quantized_places,
        }
    }

    /// Returns `true` for a tensor whose elements must not be rounded: a hyperparameter, a count,
    /// or a scale of a quantized tensor.
    pub(crate) fn is_constant(&self, fqn: &str, tensor: &TensorEntry) -> bool {
        is_count(fqn, tensor)
            || self.optimizers.is_hyperparameter(fqn, tensor)
            || self.is_scale(fqn)
    }

    /// Returns `true` for a scale, a zero point or a table of codes of a quantized tensor.
    pub(crate) fn is_scale(&self, fqn: &str) -> bool {
        find_scale_word(last_part(fqn)).is_some() && self.quantized_places.contains(parent_of(fqn))
    }
}

/// Returns `true` for a scale, a zero point or a table of codes whose weight is in the metadata,
/// and is of integers. The weight is looked for under the names that quantizers give it.
pub(crate) fn is_scale_of_integers(metadata: &Metadata, fqn: &str) -> bool {
    let (parent, name) = (parent_of(fqn), last_part(fqn));
    let Some(word_start) = find_scale_word(name) else {
        return false;
    };
    let is_codes = |key: &str| {
        metadata.tensor(key).is_some_and(|tensor| {
            let dtype = tensor.properties.dtype;
            !dtype.is_float() && dtype != DType::Bool && is_quantized(key, dtype)
        })
    };
    let before = name[..word_start].trim_end_matches(['_', ':']);
    let beside = ["", "_blocks", "_packed", ":qdata"].map(|end| format!("{before}{end}"));
    is_codes(parent)
        || beside
            .iter()
            .map(String::as_str)
            .chain([
                "weight",
                "qweight",
                "codes",
                "W_q",
                "_data",
                "weight_packed",
            ])
            .any(|codes| {
                is_codes(&format!("{parent}.{codes}")) || parent.is_empty() && is_codes(codes)
            })
}

/// Returns where the word begins that makes the last part of a key that of a scale; `None` if there
/// is none.
fn find_scale_word(name: &str) -> Option<usize> {
    let mut start = 0;
    for word in name.split(['_', ':']) {
        // The optimizers of bitsandbytes number theirs: `absmax1`.
        let plain = word.trim_end_matches(|digit: char| digit.is_ascii_digit());
        if SCALE_WORDS.contains(&plain.to_ascii_lowercase().as_str()) {
            return Some(start);
        }
        start += word.len() + 1;
    }
    None
}

/// The words in the names of what gives quantized elements their meaning: those of DeepSeek,
/// compressed-tensors, FBGEMM, GPTQ, AWQ, bitsandbytes, HQQ, quanto, torchao, AQLM, HIGGS and MLX.
const SCALE_WORDS: [&str; 16] = [
    "scale",
    "scales",
    "absmax",
    "scb",
    "zero",
    "zeros",
    "zp",
    "amax",
    "map",
    "qmap",
    "qzeros",
    "codebook",
    "codebooks",
    "shift",
    "biases",
    "tables",
];

/// Returns `true` for a tensor of codes: of 8 bits or fewer, or of several packed into an integer.
fn is_quantized(fqn: &str, dtype: DType) -> bool {
    match dtype {
        DType::I8 | DType::U8 => true,
        // No weight that is trained is of integers.
        DType::I16 | DType::U16 | DType::I32 | DType::U32 | DType::I64 | DType::U64 => {
            let name = last_part(fqn);
            matches!(name, "weight" | "qweight" | "codes") || name.ends_with("_packed")
        }
        _ => dtype.is_float() && dtype.bits() == 8,
    }
}

/// Returns the key without its last part; empty for a key of one part.
pub(crate) fn parent_of(fqn: &str) -> &str {
    fqn.rsplit_once('.').map_or("", |(parent, _)| parent)
}

/// Returns the last part of a key.
pub(crate) fn last_part(fqn: &str) -> &str {
    fqn.rsplit_once('.').map_or(fqn, |(_, last_part)| last_part)
}

/// The words at the end of the names of counts: `global_step`, `num_batches`, `tokens`.
const COUNT_WORDS: [&str; 20] = [
    "step",
    "steps",
    "epoch",
    "epochs",
    "iteration",
    "iterations",
    "iter",
    "iters",
    "count",
    "counts",
    "counter",
    "updates",
    "samples",
    "batches",
    "tokens",
    "averaged",
    "tracked",
    "seen",
    "tracker",
    "index",
];

/// Returns `true` for a count: `step`, `num_steps`, `global_step`.
fn is_count(fqn: &str, tensor: &TensorEntry) -> bool {
    let name = last_part(fqn);
    // Of any shape: torch has had steps of one dimension. A weight is not called `step`.
    let last_word = name.rsplit_once('_').map_or(name, |(_, word)| word);
    let is_word_of_count = COUNT_WORDS.contains(&last_word) || last_word.ends_with("steps");
    name == "step" || is_single(tensor) && is_word_of_count
}

/// Returns `true` for a tensor of one element.
fn is_single(tensor: &TensorEntry) -> bool {
    tensor.shape.iter().all(|&size| size == 1)
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

    /// Returns `true` for what is of the training, and not of the model: the state of an optimizer,
    /// hyperparameters, and counts of steps.
    pub(crate) fn is_of_training(&self, fqn: &str, tensor: &TensorEntry) -> bool {
        self.is_state(fqn) || self.is_hyperparameter(fqn, tensor) || is_count(fqn, tensor)
    }

    /// Returns `true` for what an optimizer, a schedule of learning rates or a scaler of losses
    /// computes with: all in `param_groups`, and the single numbers beside moments, such as the
    /// `eta` and `mu` of ASGD.
    fn is_hyperparameter(&self, fqn: &str, tensor: &TensorEntry) -> bool {
        if fqn.split('.').any(|part| part == "param_groups") {
            return true;
        }
        let is_of_schedule = fqn.split('.').any(|part| {
            part.starts_with("lr_scheduler")
                || part.contains("grad_scaler")
                || part.contains("loss_scaler")
                || matches!(part, "scheduler" | "schedulers" | "scaler")
        });
        // The moments of a parameter of one element are single numbers too.
        let name = last_part(fqn);
        let is_moment = ["avg", "momentum", "prev", "moment", "sum"]
            .iter()
            .any(|word| name.contains(word));
        is_single(tensor) && (is_of_schedule || self.is_state(fqn) && !is_moment)
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

/// The numbers of elements that a change of dtype has lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LostElements {
    /// Finite ones that became infinite.
    pub(crate) infinite: u64,
    /// Ones other than zero that became zero.
    pub(crate) zero: u64,
    /// Finite ones that became NaN or infinite because what they were computed with is.
    pub(crate) spoiled: u64,
}

impl LostElements {
    /// Returns the outcome for one element. One that is not a number stays that.
    pub(crate) fn of_element(before: NumberClass, after: NumberClass) -> Self {
        LostElements {
            infinite: u64::from(after.is_infinite && !before.is_infinite),
            zero: u64::from(after.is_zero && !before.is_zero),
            spoiled: 0,
        }
    }
}

impl AddAssign for LostElements {
    fn add_assign(&mut self, other: Self) {
        self.infinite += other.infinite;
        self.zero += other.zero;
        self.spoiled += other.spoiled;
    }
}

/// Tells whether a number is infinite, and whether it is zero.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NumberClass {
    pub(crate) is_infinite: bool,
    pub(crate) is_zero: bool,
}

impl From<f64> for NumberClass {
    fn from(number: f64) -> Self {
        NumberClass {
            is_infinite: number.is_infinite(),
            is_zero: number == 0.0,
        }
    }
}

impl From<f32> for NumberClass {
    fn from(number: f32) -> Self {
        NumberClass {
            is_infinite: number.is_infinite(),
            is_zero: number == 0.0,
        }
    }
}

/// The elements that were lost while they were read: by the key of the tensor, and by the box,
/// because some boxes are read more than once.
#[derive(Debug, Default)]
pub(crate) struct Losses(Mutex<BTreeMap<String, HashMap<TensorBox, LostElements>>>);

impl Losses {
    /// Notes how many elements of a box of a tensor were lost.
    pub(crate) fn note(&self, fqn: &str, bounds: &TensorBox, lost: LostElements) {
        if lost != LostElements::default() {
            let mut boxes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            boxes
                .entry(fqn.to_owned())
                .or_default()
                .insert(bounds.clone(), lost);
        }
    }

    /// Forgets what was noted, because it was read for a check and will be read again, maybe in
    /// other boxes.
    pub(crate) fn forget(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    /// Returns what tells them; nothing if no element was lost so far.
    pub(crate) fn changes(&self) -> Vec<Change> {
        let boxes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut infinite, mut zero, mut spoiled) = (Vec::new(), Vec::new(), Vec::new());
        let mut total = LostElements::default();
        for (fqn, lost_by_box) in &*boxes {
            let mut lost = LostElements::default();
            lost_by_box.values().for_each(|counts| lost += *counts);
            for (count, names) in [
                (lost.infinite, &mut infinite),
                (lost.zero, &mut zero),
                (lost.spoiled, &mut spoiled),
            ] {
                if count > 0 {
                    names.push(format!("{fqn}: {count}"));
                }
            }
            total += lost;
        }
        let too_large = format!(
            "got infinite elements, {} in all, which were finite and are too large for the dtype",
            total.infinite
        );
        let too_small = format!(
            "got zeros, {} in all, for elements that were not zero and are too small for the dtype",
            total.zero
        );
        let computed_with = format!(
            "got NaN or infinite elements, {} in all, because another source, or a scale, has such \
             ones",
            total.spoiled
        );
        let infinite = Change::new("tensor", too_large, infinite);
        let zero = Change::new("tensor", too_small, zero);
        let spoiled = Change::new("tensor", computed_with, spoiled);
        infinite.into_iter().chain(zero).chain(spoiled).collect()
    }
}

/// Writes elements of `input` to `output` in another type of [`CASTABLE`], rounded to nearest, ties
/// to even, as torch does. Returns the number of those that are lost by it.
pub(super) fn cast_elements(
    input: &[u8],
    input_dtype: DType,
    output: &mut [u8],
    output_dtype: DType,
) -> LostElements {
    debug_assert_ne!(
        input_dtype, output_dtype,
        "elements of the same type are read directly"
    );
    match input_dtype {
        // torch rounds a double that becomes a half to a float in between.
        DType::F64 => encode_floats(input, output, output_dtype, |element| {
            let number = f64::from_le_bytes(element);
            (number as f32, number.into())
        }),
        DType::F32 => encode_floats(input, output, output_dtype, |element| {
            with_class(f32::from_le_bytes(element))
        }),
        DType::F16 => encode_floats(input, output, output_dtype, |element| {
            with_class(f16::from_le_bytes(element).to_f32())
        }),
        DType::BF16 => encode_floats(input, output, output_dtype, |element| {
            with_class(bf16::from_le_bytes(element).to_f32())
        }),
        _ => unreachable!("a view casts only the types of CASTABLE"),
    }
}

/// Returns a number and its class.
fn with_class(number: f32) -> (f32, NumberClass) {
    (number, number.into())
}

/// Writes elements in the type `output_dtype`. `decode` reads one, and tells its class in
/// its own type. Returns the number of those that are lost by it.
fn encode_floats<const A: usize>(
    input: &[u8],
    output: &mut [u8],
    output_dtype: DType,
    decode: impl Fn([u8; A]) -> (f32, NumberClass),
) -> LostElements {
    match output_dtype {
        DType::F64 => convert_each(input, output, decode, |number| {
            (f64::from(number).to_le_bytes(), number)
        }),
        DType::F32 => convert_each(input, output, decode, |number| {
            (number.to_le_bytes(), number)
        }),
        DType::F16 => convert_each(input, output, decode, |number| {
            let half = f16::from_f32(number);
            (half.to_le_bytes(), half.to_f32())
        }),
        DType::BF16 => convert_each(input, output, decode, |number| {
            let half = bf16::from_f32(number);
            (half.to_le_bytes(), half.to_f32())
        }),
        _ => unreachable!("a view casts only to the types of CASTABLE"),
    }
}

/// Converts each element, `A` bytes to `B` bytes. `decode` also tells whether the number that it
/// read lies at an end of its type, and `encode` which number it has written. Returns the number of
/// elements that are lost by it.
fn convert_each<const A: usize, const B: usize>(
    input: &[u8],
    output: &mut [u8],
    decode: impl Fn([u8; A]) -> (f32, NumberClass),
    encode: impl Fn(f32) -> ([u8; B], f32),
) -> LostElements {
    let input_elements = input.as_chunks::<A>().0;
    let output_elements = output.as_chunks_mut::<B>().0;
    let mut lost = LostElements::default();
    for (input_element, output_element) in input_elements.iter().zip(output_elements) {
        let (number, before) = decode(*input_element);
        let (bytes, written) = encode(number);
        *output_element = bytes;
        lost += LostElements::of_element(before, written.into());
    }
    lost
}
