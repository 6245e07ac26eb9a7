//! The trait of everything that a load can put values into.

use std::collections::HashMap;

use candle_core::Device;
use fsdp_layout::{DType, KeyPath, TensorBox};
use serde::{Deserialize, Serialize};

use super::options::LoadOptions;
use crate::error::StateError;
use crate::lend::Memory;
use crate::report::{LoadReport, Mismatch};
use crate::schema::Leaf;
use crate::schema::Schema;
use crate::state_dict::StateValue;

/// Something that takes state: fresh tensors, live ones, a model with its optimizers, an
/// optimizer's local state.
pub trait Target {
    /// The target's own errors.
    type Error;

    /// Compares the values of the source with those that the target can take, without changing
    /// anything.
    ///
    /// `small_values` returns those of the source's values at these positions that are small: plain
    /// values, and tensors of one element.
    ///
    /// # Errors
    /// An error of this rank only: values that no target could take, or that the source cannot
    /// read.
    fn plan<E: From<Self::Error>>(
        &mut self,
        source: &Schema,
        small_values: &dyn Fn(&[usize]) -> Result<Values, E>,
        options: &LoadOptions,
    ) -> Result<Plan, E>;

    /// Returns the memory that a wanted tensor goes to.
    ///
    /// # Errors
    /// An error of this rank only.
    fn memory(&mut self, wanted: &Wanted) -> Result<Memory, StateError>;

    /// Returns the device on which a wanted tensor ends up, if [`Self::memory`] returns fresh
    /// memory for it. The default is the CPU.
    fn device(&self, wanted: &Wanted) -> Device {
        let _ = wanted;
        Device::Cpu
    }

    /// Takes back the memory that [`Self::memory`] returned for these boxes, now with the new
    /// values in it. The default does nothing, for targets whose live memory was filled.
    ///
    /// # Errors
    /// An error of this rank only.
    fn filled(&mut self, wanted: &Wanted, memory: Memory) -> Result<(), StateError> {
        let _ = (wanted, memory);
        Ok(())
    }

    /// Returns `true` if the target lends live memory. A load that breaks off then leaves some
    /// values changed.
    fn is_live(&self) -> bool {
        false
    }

    /// Returns `true` if most of the target's memory is on a GPU.
    fn is_on_gpu(&self) -> bool {
        false
    }

    /// Returns `true` if the memory that a wanted tensor goes to is live. A staged load fills live
    /// memory only when all new values are there; it fills other memory at once.
    fn lends_live(&self, wanted: &Wanted) -> bool {
        let _ = wanted;
        self.is_live()
    }

    /// Returns `true` for a wanted tensor whose live memory other names of the target may have too.
    /// Such names must have the same values in the source.
    fn may_be_tied(&self, wanted: &Wanted) -> bool {
        self.lends_live(wanted)
    }

    /// Returns the boxes of a tensor that another rank wants; `None` if only that rank knows.
    fn wanted_on(&self, wanted: &Wanted, rank: usize) -> Option<Vec<TensorBox>> {
        let _ = (wanted, rank);
        None
    }

    /// Puts small values in place. Called once all tensors are in place.
    ///
    /// # Errors
    /// An error of this rank only.
    fn commit(&mut self) -> Result<(), Self::Error>;
}

/// Small values of a source, by their positions in its schema.
pub type Values = HashMap<usize, StateValue>;

/// The outcome of a comparison.
#[derive(Debug, Default)]
pub struct Plan {
    /// The tensors to be read, in an order that is the same on all ranks. Of several names of one
    /// live tensor the first counts.
    pub wanted: Vec<Wanted>,
    /// All that differs.
    pub report: LoadReport,
    /// `true` if names that only the source has are an error of a strict load.
    pub refuses_unexpected: bool,
    /// The data that must be the same on all ranks.
    pub common: Common,
}

/// The data of a rank that must be the same on all ranks. The agreement compares its hash.
#[derive(Debug, Clone, Default, Hash, Serialize, Deserialize)]
pub struct Common {
    /// The options of the load, for people to read; the load fills them in.
    pub options: String,
    /// Other arguments of the call, for people to read.
    pub arguments: String,
    /// The schema of the source; the load fills it in.
    pub source: Schema,
    /// The source's [`contents`](super::Source::contents); the load fills it in.
    pub contents: String,
    /// The schema that the target asks for; empty if ranks may ask for different ones.
    pub target: Schema,
    /// Values as pairs of a key and a text: small values, whose floats are compared by their bits.
    /// The load adds the hashes of whole tensors.
    pub values: Vec<(String, String)>,
}

/// A tensor that is to be read.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Its position in the source's schema.
    pub position: usize,
    /// The target's own number for the value that it becomes; 0 until the target sets it.
    pub place: usize,
    /// Its name, for messages.
    pub key: String,
    /// The dtype that the source has.
    pub dtype: DType,
    /// The dtype that it becomes.
    pub target_dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The boxes that this rank wants.
    pub boxes: Vec<TensorBox>,
    /// `true` if ranks that each hold the whole tensor must hold the same one.
    pub is_same_on_all: bool,
    /// The positions of further names in the source's schema of which the target makes one tensor
    /// with this. They must have the same shape, and a load checks that they have the same values.
    pub tied_positions: Vec<usize>,
}

impl Wanted {
    /// Returns a request for boxes of the tensor at a position of a schema; `None` if there is no
    /// tensor.
    #[must_use]
    pub fn new(
        schema: &Schema,
        position: usize,
        target_dtype: DType,
        boxes: Vec<TensorBox>,
    ) -> Option<Self> {
        let (path, leaf) = schema.get(position)?;
        let (dtype, shape) = leaf
            .tensor()
            .map(|(dtype, shape)| (dtype, shape.to_vec()))?;
        Some(Wanted {
            position,
            place: 0,
            key: path.flat_key(),
            dtype,
            target_dtype,
            shape,
            boxes,
            is_same_on_all: true,
            tied_positions: Vec::new(),
        })
    }

    /// Returns a request for all of the tensor at a position of a schema, as it is; `None` if there
    /// is no tensor.
    #[must_use]
    pub fn whole(schema: &Schema, position: usize) -> Option<Self> {
        let (dtype, shape) = schema.get(position).and_then(|(_, leaf)| leaf.tensor())?;
        Self::new(schema, position, dtype, vec![TensorBox::whole(shape)])
    }

    /// Returns a request for the tensor at a position of `source`, in the boxes of a tensor of the
    /// target. Kinds and shapes must be the same, and so must dtypes, unless the options allow
    /// casts and candle can do it.
    ///
    /// # Errors
    /// A line of the report about the value of this name, if the two do not fit.
    pub fn fit(
        source: &Schema,
        position: usize,
        name: impl FnOnce() -> String,
        target: &StateValue,
        options: &LoadOptions,
    ) -> Result<Self, Mismatch> {
        let leaf = source.get(position);
        let (_, saved) = leaf.expect("the position is one of the schema");
        // The target's own value may be one that no file can hold. That is a mismatch like another.
        let current_description = match Leaf::from_value(&KeyPath::default(), target) {
            Ok(current) => {
                if let (Some((dtype, shape)), Some((target_dtype, current_shape))) =
                    (saved.tensor(), current.tensor())
                    && shape == current_shape
                    && (dtype == target_dtype
                        || options.cast
                            && target
                                .candle_dtype()
                                .is_some_and(|candle_dtype| Memory::converts(dtype, candle_dtype)))
                {
                    let wanted = Wanted::new(source, position, target_dtype, target.boxes());
                    return Ok(wanted.expect("the value is a tensor"));
                }
                current.describe()
            }
            Err(error) => error.to_string(),
        };
        Err(Mismatch {
            fqn: name(),
            saved: saved.describe(),
            current: current_description,
        })
    }
}
