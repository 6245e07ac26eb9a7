//! State that can be saved and loaded: the trait [`Stateful`], and [`TrainState`], which is enough
//! for most runs.

use std::time::Duration;

use fsdp_comm::ProcessGroup;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::{KeyPath, PathPart};
use fsdp_nn::state::{
    LiveTarget, MissingState, StatePrefixes, live_model_state_dict, live_optim_state_dict,
};
use fsdp_nn::{
    AveragedModel, FullyShardedDataParallel, GradScaler, NnError, Optimizer, ShardedSampler,
    Unchanged,
};
use fsdp_state::{
    LoadError as _, LoadOptions, LoadReport, Schema, Source as _, StateDict, StateValue,
    flatten_state_dict, load_state, set_element,
};

use crate::CheckpointError;
use crate::load::{LOAD, fill};
use crate::source::CheckpointSource;

/// State that a [`Checkpointer`](crate::Checkpointer) saves and loads: torch's `Stateful`.
pub trait Stateful {
    /// Returns the state to save. No communication.
    ///
    /// Values may be views of live tensors. A save reads them before it returns; a save in the
    /// background copies them first.
    ///
    /// # Errors
    /// An error of this rank only. A save turns it into an error on every rank.
    fn state_dict(&self) -> Result<StateDict, CheckpointError>;

    /// Returns the state for a save, which only reads it, with a guard for the part of it that a
    /// save in the background may copy during the next forward and backward. Without a guard all of
    /// it is copied at once. No communication.
    ///
    /// The default is [`Self::state_dict`] without a guard.
    ///
    /// # Errors
    /// The errors of [`Self::state_dict`].
    fn state_to_save(&self) -> Result<(StateDict, Option<KeptUnchanged>), CheckpointError> {
        Ok((self.state_dict()?, None))
    }

    /// Loads the state from a checkpoint that every rank of `group` has opened. Collective.
    ///
    /// # Errors
    /// The same on every rank. The state is unchanged, unless the error is
    /// [`StateError::PartlyLoaded`](fsdp_state::StateError::PartlyLoaded): then some values are
    /// new.
    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError>;
}

/// A guard that keeps the sharded tensors below some keys of a state dict unchanged until they have
/// been copied. Other values below these keys are copied at once.
#[derive(Debug)]
pub struct KeptUnchanged {
    keys: Vec<String>,
    guard: Unchanged,
}

impl KeptUnchanged {
    /// Makes a guard of the sharded tensors below these keys, all of which `guard` must keep
    /// unchanged: they are parameters of its model, state of its optimizers, or averages.
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = impl Into<String>>, guard: Unchanged) -> Self {
        KeptUnchanged {
            keys: keys.into_iter().map(Into::into).collect(),
            guard,
        }
    }

    /// Returns `true` for the path of a value that does not change if it is a sharded tensor.
    pub(crate) fn contains(&self, path: &KeyPath) -> bool {
        let [PathPart::Key(first), _, ..] = path.0.as_slice() else {
            return false;
        };
        self.keys.contains(first)
    }

    /// Ends the guard, and returns for how long a change has waited so far.
    pub(crate) fn release(self) -> Duration {
        self.guard.release()
    }
}

/// A state dict is saved as it is. A load fills its tensors in place and replaces its plain values,
/// as [`load_in_place`](crate::load_in_place()).
impl Stateful for StateDict {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        Ok(self.clone())
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        fill(checkpoint, self, group, options, true)
    }
}

/// The key of the model's state in a checkpoint.
const MODEL: &str = "model";
/// The key of the optimizers' state in a checkpoint.
const OPTIM: &str = "optim";
/// The key of the sampler's state in a checkpoint.
const SAMPLER: &str = "sampler";
/// The key of the gradient scaler's state in a checkpoint.
const SCALER: &str = "scaler";
/// The key of the averaged weights in a checkpoint.
const AVERAGE: &str = "average";

/// The state of a training run: the model, its optimizers, a sampler, a gradient scaler and
/// averaged weights if the run has them, and plain values.
///
/// In a checkpoint it is `{"model": …, "optim": …}` and the values, as torch programs save it, plus
/// `sampler`, `scaler` and `average` if the run has them. A load fills the shards of the live model
/// and the optimizers' state in place, without a second copy, and replaces plain values.
///
/// A strict load (the default) fails if the run has a name that the checkpoint lacks, or if the
/// checkpoint has a tensor, or anything of optimizers, that the run does not have. Other plain
/// values that only the checkpoint has are added to [`TrainState::values`]. A tensor of one element
/// becomes a number where `values` has a plain value. A load that is not strict ignores names that
/// only one side has, and opaque values.
///
/// A checkpoint without a `model` key, such as a published one, holds only a model. Load it into a
/// run without optimizers. Names that begin with `model.` in a format of flat keys are the model's
/// own, as in Hugging Face's files.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, linear};
/// use fsdp_checkpoint::{CheckpointError, Checkpointer, CheckpointerOptions, TrainState};
/// use fsdp_comm::ProcessGroup;
/// use fsdp_nn::algorithm::{Algorithm, SgdOptions};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
///
/// fn build(group: &ProcessGroup) -> Result<TrainState<Linear>, CheckpointError> {
///     let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| linear(3, 2, scope.vb()))?;
///     let optimizer = Optimizer::new(model.parameters(), Algorithm::Sgd(SgdOptions { momentum: 0.9, ..SgdOptions::default() }))?;
///     let mut run = TrainState::new(model, vec![optimizer]);
///     run.values.insert("step", 0i64);
///     Ok(run)
/// }
///
/// let dir = tempfile::tempdir()?;
/// let steps = fsdp_comm::run_local(2, |group| {
///     let mut checkpointer = Checkpointer::new(dir.path(), &group, CheckpointerOptions::default())?;
///     let mut run = build(&group)?;
///     let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
///     run.model.backward(&run.model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?)?;
///     run.optimizers[0].step()?;
///     run.values.insert("step", 1i64);
///     checkpointer.save(1, &run)?;
///
///     let mut resumed = build(&group)?;
///     checkpointer.load_latest(&mut resumed)?;
///     Ok::<_, CheckpointError>(resumed.values.plain_at(&["step"]).and_then(|step| step.as_int()))
/// })?;
/// assert_eq!(steps.into_iter().collect::<Result<Vec<_>, _>>()?, [Some(1), Some(1)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[non_exhaustive]
pub struct TrainState<M> {
    /// The model.
    pub model: FullyShardedDataParallel<M>,
    /// The optimizers, all over this model.
    pub optimizers: Vec<Optimizer>,
    /// The sampler that deals the run's samples; `None` at first.
    pub sampler: Option<ShardedSampler>,
    /// The scaler of the run's losses; `None` at first.
    pub scaler: Option<GradScaler>,
    /// The average of the model's weights; `None` at first.
    pub average: Option<AveragedModel>,
    /// Further values by their keys in the checkpoint, such as the number of steps done. A
    /// [`Schedule`](fsdp_nn::Schedule) needs only the step, because the optimizers keep its base
    /// rate. Plain values must be the same on every rank.
    pub values: StateDict,
}

impl<M> TrainState<M> {
    /// Returns the state of a run that consists of a model and optimizers only.
    #[must_use]
    pub fn new(model: FullyShardedDataParallel<M>, optimizers: Vec<Optimizer>) -> Self {
        TrainState {
            model,
            optimizers,
            sampler: None,
            scaler: None,
            average: None,
            values: StateDict::new(),
        }
    }

    /// Returns the whole state. Tensors are views of the live ones, for reading.
    fn views(&self) -> Result<StateDict, CheckpointError> {
        let parameters = self.model.parameters();
        // While an average is swapped in, the model holds averaged weights, and they would be saved
        // as its weights.
        if parameters.has_average() {
            return Err(NnError::Swapped.into());
        }
        if self
            .optimizers
            .iter()
            .any(|optimizer| !optimizer.belongs_to(parameters))
        {
            return Err(NnError::ForeignOptimizer.into());
        }
        let mut state = StateDict::new();
        state.insert(MODEL, live_model_state_dict(parameters)?);
        if !self.optimizers.is_empty() {
            let optimizers: Vec<&Optimizer> = self.optimizers.iter().collect();
            state.insert(
                OPTIM,
                live_optim_state_dict(&optimizers, MissingState::Initial)?,
            );
        }
        for (key, value) in self.beside()? {
            if let Some(part) = [MODEL, OPTIM]
                .into_iter()
                .find(|part| is_part_of(&key, part))
            {
                let problem =
                    format!("a load would take it for a part of `{part}`; give it another key");
                return Err(CheckpointError::Unsavable { fqn: key, problem });
            }
            state.insert_new(key, value)?;
        }
        Ok(state)
    }

    /// Returns the run's plain values, and the states of sampler, scaler and average under their
    /// keys. Tensors share memory with the live ones.
    fn beside(&self) -> Result<StateDict, CheckpointError> {
        let mut beside = self.values.clone();
        let average = self
            .average
            .as_ref()
            .map(AveragedModel::state_dict)
            .transpose()?;
        for (key, part) in [
            (
                SAMPLER,
                self.sampler.as_ref().map(ShardedSampler::state_dict),
            ),
            (SCALER, self.scaler.as_ref().map(GradScaler::state_dict)),
            (AVERAGE, average),
        ] {
            if let Some(part) = part {
                beside.insert_new(key, part)?;
            }
        }
        Ok(beside)
    }

    /// Loads the model and the optimizers. Returns the report, and the other values that were
    /// loaded.
    fn load_live(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<(LoadReport, StateDict), CheckpointError> {
        let prepared = self.beside().and_then(|mut beside| {
            let values = flatten_state_dict(&beside)?;
            let source = CheckpointSource::with_known_paths(checkpoint, &values.paths);
            source.schema().check_gaps()?;
            let (mut source, mut left_out) = if options.strict {
                (source, Vec::new())
            } else {
                source.without_foreign_objects(|path| {
                    [MODEL, OPTIM]
                        .iter()
                        .any(|key| path.below(&[key]).is_some())
                })?
            };
            // The number of updates alone would become a value of this run. A later average would
            // go on from it, with weights that were never averaged.
            if !options.strict && !beside.contains_key(AVERAGE) && has_average(checkpoint) {
                let (rest, average) = source.without(|key| is_part_of(key, AVERAGE));
                source = rest;
                left_out.extend(average);
            }
            if let (Some(average), Some(StateValue::Dict(state))) =
                (&self.average, beside.get_mut(AVERAGE))
            {
                let saved = &checkpoint.metadata().entries;
                average.retain_saved_names(state, |name| {
                    saved.contains_key(&format!("{AVERAGE}.{name}"))
                });
            }
            // Check that sampler, scaler and average accept their saved state before anything
            // changes.
            let saved = |key: &str| saved_part(&source, &beside, key);
            set_sampler_and_scaler(&mut self.sampler.clone(), &mut self.scaler.clone(), saved)?;
            if self.average.is_some() {
                AveragedModel::check_n_averaged(&saved(AVERAGE)?)?;
            }
            let prefixes = StatePrefixes {
                model: Some(model_prefix(source.schema())),
                optim: Some(vec![OPTIM.to_owned()]),
            };
            let optimizers = self.optimizers.iter_mut().collect();
            Ok((
                source,
                LiveTarget::new(self.model.parameters(), optimizers, prefixes)?,
                left_out,
                beside,
            ))
        });
        let (mut source, target, left_out, mut beside) =
            CheckpointError::or_refuse(group, LOAD, prepared)?;
        let mut report: LoadReport = {
            let mut target = target.with_values(&mut beside);
            load_state::<_, _, CheckpointError>(LOAD, group, &mut source, &mut target, options)?
        };
        report.unexpected.extend(left_out);
        report.sort();
        Ok((report, beside))
    }

    /// Sets sampler, scaler and average to loaded values, and keeps the remaining values.
    fn set_beside(&mut self, mut beside: StateDict) -> Result<(), CheckpointError> {
        let mut part = |key: &str| Ok(dict_of(beside.remove(key)));
        set_sampler_and_scaler(&mut self.sampler, &mut self.scaler, &mut part)?;
        if let Some(average) = &mut self.average {
            average.load_state_dict(&part(AVERAGE)?)?;
        }
        self.values = beside;
        Ok(())
    }
}

/// Returns `true` if a key, or its beginning in formats of flat keys, is `part`.
fn is_part_of(key: &str, part: &str) -> bool {
    key.strip_prefix(part)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns `true` if a checkpoint holds an average of weights.
fn has_average(checkpoint: &dyn Checkpoint) -> bool {
    checkpoint.metadata().entries.keys().any(|key| {
        key.strip_prefix(AVERAGE)
            .is_some_and(|rest| rest.starts_with(".module."))
    })
}

/// Returns the values below a key: small values from the checkpoint, and others from `beside`.
fn saved_part(
    source: &CheckpointSource<'_>,
    beside: &StateDict,
    key: &str,
) -> Result<StateDict, CheckpointError> {
    let mut part = StateDict::new();
    part.extend(beside.get(key).map(|here| (key.to_owned(), here.clone())));
    let leaves = source.schema().iter().enumerate();
    let saved = leaves.filter(|(position, (path, _))| {
        source.schema().is_small(*position) && path.below(&[key]).is_some()
    });
    let (positions, paths): (Vec<usize>, Vec<&KeyPath>) =
        saved.map(|(position, (path, _))| (position, path)).unzip();
    for (path, value) in paths.into_iter().zip(source.values(&positions)?) {
        set_element(&mut part, path, value)?;
    }
    Ok(dict_of(part.remove(key)))
}

/// Returns the value as a dict; an empty dict if there is none, or it is something else.
fn dict_of(value: Option<StateValue>) -> StateDict {
    match value {
        Some(StateValue::Dict(dict)) => dict,
        _ => StateDict::new(),
    }
}

/// Sets a sampler and a scaler to the states that `part` returns for their keys.
fn set_sampler_and_scaler(
    sampler: &mut Option<ShardedSampler>,
    scaler: &mut Option<GradScaler>,
    mut part: impl FnMut(&str) -> Result<StateDict, CheckpointError>,
) -> Result<(), CheckpointError> {
    if let Some(sampler) = sampler {
        sampler
            .load_state_dict(&part(SAMPLER)?)
            .map_err(NnError::from)?;
    }
    if let Some(scaler) = scaler {
        scaler.load_state_dict(&part(SCALER)?)?;
    }
    Ok(())
}

impl<M> Stateful for TrainState<M> {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        let state = self.views()?;
        // The caller may write to the views.
        self.model.parameters().lend()?;
        Ok(state)
    }

    fn state_to_save(&self) -> Result<(StateDict, Option<KeptUnchanged>), CheckpointError> {
        let state = self.views()?;
        let parameters = self.model.parameters();
        let mut keys = vec![MODEL, OPTIM];
        // An average of another model does not wait for readers of this one.
        if self
            .average
            .as_ref()
            .is_some_and(|average| average.belongs_to(parameters))
        {
            keys.push(AVERAGE);
        }
        Ok((
            state,
            parameters
                .keep_unchanged()
                .map(|guard| KeptUnchanged::new(keys, guard)),
        ))
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        let (report, beside) = self.load_live(checkpoint, group, options)?;
        self.set_beside(beside)?;
        Ok(report)
    }
}

/// Returns the keys that lead to the model's state in a checkpoint: `model` in that of a run, and
/// none in one that holds only a model. A flat name that begins with `model.` is the model's own.
pub(crate) fn model_prefix(schema: &Schema) -> Vec<String> {
    let is_nested = |path: &KeyPath| matches!(path.0.as_slice(), [PathPart::Key(first), _, ..] if first == MODEL);
    let is_run = schema.iter().any(|(path, _)| is_nested(path));
    if is_run {
        vec![MODEL.to_owned()]
    } else {
        Vec::new()
    }
}
