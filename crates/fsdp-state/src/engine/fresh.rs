//! State dicts as targets: new values in the layout of a template, or whole ones.

use candle_core::Device;
use fsdp_comm::ProcessGroup;
use fsdp_flat::{FlatError, ShardedTensor};
use fsdp_layout::{KeyPath, TensorBox};
use indexmap::IndexMap;
use itertools::EitherOrBoth;

use super::options::{LoadOptions, is_part_of};
use super::target::{Plan, Target, Values, Wanted};
use crate::error::StateError;
use crate::keep_on::GatherOptions;
use crate::lend::Memory;
use crate::memory::device_of;
use crate::schema::Leaf;
use crate::schema::Schema;
use crate::state_dict::{StateDict, StateValue};
use crate::traverse::replace_element;

/// A state dict as a target: it has the structure, kinds and boxes of a template, with fresh
/// tensors or the template's own.
pub struct DictTarget<'a> {
    template: &'a StateDict,
    /// `true` if each rank reads from a checkpoint for itself.
    is_for_checkpoint: bool,
    /// `true` if the template's own tensors are filled.
    is_in_place: bool,
    /// `true` if ranks may have different whole tensors under one name.
    has_own_tensors: bool,
    schema: Schema,
    /// The template's values, by their positions in the schema.
    values: Vec<&'a StateValue>,
    /// The device of the new tensors; `None` for that of each tensor of the template.
    device: Option<Device>,
    loaded: IndexMap<KeyPath, StateValue>,
}

impl<'a> DictTarget<'a> {
    /// Returns a target of new tensors in the layout of `template`.
    ///
    /// # Errors
    /// Tensors whose memory is released, or of dtypes and shapes that no file holds.
    pub fn new(template: &'a StateDict, device: Option<Device>) -> Result<Self, StateError> {
        let (schema, values) = Schema::with_values(template)?;
        Ok(DictTarget {
            template,
            is_for_checkpoint: false,
            is_in_place: false,
            has_own_tensors: false,
            schema,
            values,
            device,
            loaded: IndexMap::new(),
        })
    }

    /// Makes this a target for a checkpoint, from which each rank reads for itself. Ranks may ask
    /// for different names, and names that only the checkpoint has are no error. With `in_place`
    /// the template's own tensors are filled, instead of new ones.
    #[must_use]
    pub const fn for_checkpoint(mut self, in_place: bool) -> Self {
        self.is_for_checkpoint = true;
        self.is_in_place = in_place;
        self.with_own_tensors()
    }

    /// Lets ranks have different whole tensors under one name: each takes its own.
    #[must_use]
    pub const fn with_own_tensors(mut self) -> Self {
        self.has_own_tensors = true;
        self
    }

    /// Returns the loaded dict. Values that were not loaded are those of the template.
    #[must_use]
    pub fn into_state(self) -> StateDict {
        let mut state = self.template.clone();
        for (path, value) in self.loaded {
            replace_element(&mut state, &path, value);
        }
        state
    }

    /// Returns the values that were loaded, by their paths. The template's own tensors, if they
    /// were filled, are not among them.
    #[must_use]
    pub fn into_loaded(self) -> IndexMap<KeyPath, StateValue> {
        self.loaded
    }

    /// Sets the new value at a position of the schema.
    fn insert_loaded(&mut self, position: usize, value: StateValue) {
        let leaf = self.schema.get(position);
        let (path, _) = leaf.expect("positions are those of the schema");
        self.loaded.insert(path.clone(), value);
    }

    fn device_for(&self, position: usize) -> Device {
        self.device
            .clone()
            .unwrap_or_else(|| device_of(self.values[position]))
    }

    /// Returns `true` if a value is so small that the plan takes a copy of it, before any memory is
    /// lent.
    fn goes_by_value(&self, saved: &Leaf, current: &Leaf) -> bool {
        // A plain value in the place of a tensor that is filled where it is would not reach those
        // who share its memory.
        let is_filled =
            current.tensor().is_some() && (self.is_in_place || saved.tensor().is_some());
        saved.is_scalar() && current.is_scalar() && !(self.is_for_checkpoint && is_filled)
    }

    /// Checks that the template's tensors can be filled where they are, because they are
    /// contiguous.
    ///
    /// # Errors
    /// [`StateError::NotFillable`].
    fn check_fillable(&self, wanted: &[Wanted]) -> Result<(), StateError> {
        // Elements are written as runs of bytes, which a view with gaps does not have.
        for target in wanted {
            let tensors = self.values[target.place].candle_tensors();
            if let Some(tensor) = tensors.iter().find(|tensor| !tensor.is_contiguous()) {
                return Err(StateError::NotFillable {
                    key: target.key.clone(),
                    problem: FlatError::NotContiguous {
                        shape: tensor.dims().to_vec(),
                    },
                });
            }
        }
        Ok(())
    }
}

impl Target for DictTarget<'_> {
    type Error = StateError;

    fn plan<E: From<StateError>>(
        &mut self,
        source: &Schema,
        small_values: &dyn Fn(&[usize]) -> Result<Values, E>,
        options: &LoadOptions,
    ) -> Result<Plan, E> {
        let mut plan = Plan {
            refuses_unexpected: !self.is_for_checkpoint,
            ..Plan::default()
        };
        // Step 1: compare what the source has with the template, name by name. Small values are
        // copied, and memory is wanted for all others.
        let mut copied_positions: Vec<(usize, usize)> = Vec::new();
        let mut absent_keys = options.only.clone().unwrap_or_default();
        for leaves in source.compare(&self.schema) {
            if options.only.is_some() {
                let (_, (path, _)) = leaves.clone().reduce(|either, _| either);
                let key = path.flat_key();
                if !options.includes(&key) {
                    continue;
                }
                absent_keys.retain(|part| !is_part_of(&key, part));
            }
            match leaves {
                EitherOrBoth::Left((_, (path, _))) => plan.report.unexpected.push(path.flat_key()),
                EitherOrBoth::Right((_, (path, _))) => plan.report.missing.push(path.flat_key()),
                EitherOrBoth::Both(
                    (source_position, (_, saved)),
                    (target_position, (_, current)),
                ) if self.goes_by_value(saved, current) => {
                    copied_positions.push((source_position, target_position));
                }
                EitherOrBoth::Both((source_position, (path, _)), (place, _)) => {
                    match Wanted::fit(
                        source,
                        source_position,
                        || path.flat_key(),
                        self.values[place],
                        options,
                    ) {
                        Ok(wanted) => {
                            plan.wanted.push(Wanted {
                                place,
                                is_same_on_all: !self.has_own_tensors,
                                ..wanted
                            });
                        }
                        Err(mismatch) => plan.report.mismatched.push(mismatch),
                    }
                }
            }
        }
        plan.report.missing.append(&mut absent_keys);
        // Step 2: take the small values.
        let positions: Vec<usize> = copied_positions
            .iter()
            .map(|(source_position, _)| *source_position)
            .collect();
        let values = small_values(&positions)?;
        for (source_position, target_position) in copied_positions {
            let value = values
                .get(&source_position)
                .expect("a scalar is a small value");
            let copied_value = value.copy_to(Some(&self.device_for(target_position)))?;
            self.insert_loaded(target_position, copied_value);
        }
        if self.is_in_place {
            self.check_fillable(&plan.wanted)?;
        }
        // Values that move between ranks need targets that agree. From a checkpoint each rank may
        // load what it likes.
        if !self.is_for_checkpoint {
            plan.common.target = self.schema.clone();
        }
        Ok(plan)
    }

    fn is_on_gpu(&self) -> bool {
        let mut tensors = self.values.iter().flat_map(|value| value.candle_tensors());
        self.is_in_place && tensors.any(|tensor| tensor.device().is_cuda())
    }

    fn memory(&mut self, wanted: &Wanted) -> Result<Memory, StateError> {
        let value = self.values[wanted.place];
        if self.is_in_place {
            Memory::live(value)
        } else {
            allocate_loaded(value, wanted)
        }
    }

    fn device(&self, wanted: &Wanted) -> Device {
        self.device_for(wanted.place)
    }

    fn filled(&mut self, wanted: &Wanted, memory: Memory) -> Result<(), StateError> {
        let current = self.values[wanted.place];
        // The template's own memory has been filled. Only raw tensors have none that can be.
        if self.is_in_place && !matches!(current, StateValue::Raw(_)) {
            return Ok(());
        }
        let is_whole = !matches!(current, StateValue::Sharded(_));
        let value = memory.into_value(is_whole, &self.device_for(wanted.place))?;
        self.insert_loaded(wanted.place, value);
        Ok(())
    }

    fn is_live(&self) -> bool {
        self.is_in_place
    }

    fn commit(&mut self) -> Result<(), StateError> {
        Ok(())
    }
}

/// Returns memory for a tensor that is not loaded in place: unfilled tensors for the boxes of
/// `wanted`, in the dtype of `value`, which the target has now. If candle lacks that dtype, returns
/// raw memory for the whole tensor in the target's dtype.
fn allocate_loaded(value: &StateValue, wanted: &Wanted) -> Result<Memory, StateError> {
    match value.candle_dtype() {
        Some(dtype) => Ok(Memory::Unfilled(ShardedTensor::unfilled(
            dtype,
            &wanted.shape,
            &wanted.boxes,
        )?)),
        None => Memory::raw(wanted.target_dtype, &wanted.shape),
    }
}

/// A target of whole tensors on some ranks. Each tensor goes to a sink as soon as it is complete,
/// and is not kept here.
///
/// The source must be a [`DictSource`](super::DictSource) of the same state dict: positions are the
/// same in both.
pub(crate) struct WholeTarget<'a> {
    options: &'a GatherOptions,
    /// `true` if this rank gets the tensors.
    is_kept_here: bool,
    /// This rank's values, by their positions in the schema.
    values: Vec<&'a StateValue>,
    schema: Schema,
    /// The first position whose value the sink has not received yet.
    next_position: usize,
    sink: &'a mut Sink<'a>,
}

/// A function that takes the values one by one, with their paths.
type Sink<'a> = dyn FnMut(&KeyPath, StateValue) -> Result<(), StateError> + 'a;

impl<'a> WholeTarget<'a> {
    /// Returns a target that gathers the values of `state`, and passes each of them, whole, to
    /// `sink`, sorted by path.
    ///
    /// `sink` is called only on the ranks of `group` that the options name. No communication.
    ///
    /// # Errors
    /// Ranks in `keep_on` that the group does not have; tensors whose memory is released.
    pub(crate) fn new(
        state: &'a StateDict,
        group: &ProcessGroup,
        options: &'a GatherOptions,
        sink: &'a mut Sink<'a>,
    ) -> Result<Self, StateError> {
        options.keep_on.check(group.world_size())?;
        let (schema, values) = Schema::with_values(state)?;
        Ok(WholeTarget {
            options,
            is_kept_here: options.keep_on.contains(group.rank()),
            values,
            schema,
            next_position: 0,
            sink,
        })
    }

    /// Passes this rank's own values before a position to the sink: those that are not sharded, and
    /// so do not move. Other ranks than those that keep the result pass nothing on.
    ///
    /// # Errors
    /// The sink's; a value that cannot be copied.
    fn pass_on_before(&mut self, position: usize) -> Result<(), StateError> {
        let values = self.schema.iter().zip(&self.values);
        for ((path, leaf), value) in values.take(position).skip(self.next_position) {
            if self.is_kept_here && !leaf.is_sharded() {
                (self.sink)(path, value.copy_to(self.options.device.as_ref())?)?;
            }
        }
        self.next_position = position;
        Ok(())
    }
}

impl Target for WholeTarget<'_> {
    type Error = StateError;

    fn plan<E: From<StateError>>(
        &mut self,
        source: &Schema,
        _: &dyn Fn(&[usize]) -> Result<Values, E>,
        _: &LoadOptions,
    ) -> Result<Plan, E> {
        let mut plan = Plan::default();
        plan.common.arguments = self.options.keep_on.to_string();
        for (position, (_, leaf)) in source.iter().enumerate() {
            if !leaf.is_sharded() {
                continue;
            }
            // The source is made of the same dict, so that its positions are those of the values
            // here.
            let whole = Wanted::whole(source, position).expect("a sharded tensor is a tensor");
            plan.wanted.push(Wanted {
                boxes: if self.is_kept_here {
                    whole.boxes
                } else {
                    Vec::new()
                },
                ..whole
            });
        }
        Ok(plan)
    }

    fn memory(&mut self, wanted: &Wanted) -> Result<Memory, StateError> {
        allocate_loaded(self.values[wanted.position], wanted)
    }

    fn device(&self, wanted: &Wanted) -> Device {
        match &self.options.device {
            Some(device) => device.clone(),
            None => device_of(self.values[wanted.position]),
        }
    }

    fn filled(&mut self, wanted: &Wanted, memory: Memory) -> Result<(), StateError> {
        let value = memory.into_value(true, &self.device(wanted))?;
        // The sink gets the values in the order of their paths, so those that did not have to move
        // go first.
        self.pass_on_before(wanted.position)?;
        self.next_position = wanted.position + 1;
        let leaf = self.schema.get(wanted.position);
        let (path, _) = leaf.expect("what is wanted is in the schema");
        (self.sink)(path, value)
    }

    fn wanted_on(&self, wanted: &Wanted, rank: usize) -> Option<Vec<TensorBox>> {
        Some(if self.options.keep_on.contains(rank) {
            vec![TensorBox::whole(&wanted.shape)]
        } else {
            Vec::new()
        })
    }

    fn commit(&mut self) -> Result<(), StateError> {
        // All tensors that move have been passed on by now. What is left are this rank's own values
        // after the last of them.
        self.pass_on_before(self.values.len())
    }
}
