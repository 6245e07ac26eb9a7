//! State that can be saved and loaded: the trait [`Stateful`], and [`TrainState`], which is enough
//! for most runs.

use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::CopiesEnd;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::{KeyPath, PathPart};
use fsdp_nn::state::{
    LiveTarget, MissingState, StatePrefixes, live_model_state_dict, live_optim_state_dict,
};
use fsdp_nn::{
    AveragedModel, FullyShardedDataParallel, GradScaler, NnError, Optimizer, ShardedParameters,
    ShardedSampler, Unchanged,
};
use fsdp_state::{
    LoadError as _, LoadOptions, LoadReport, Schema, Source as _, StateDict, StateError,
    StateValue, check_state, flatten_state_dict, is_part_of, load_state,
};
use tracing::warn;

use crate::error::CheckpointError;
use crate::load::{FillMode, LOAD, fill};
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
    /// The same on every rank, or an error of this rank only, before or after all collectives: a
    /// load turns it into an error on every rank. The state is unchanged, unless the error is
    /// [`StateError::PartlyLoaded`]: then some values are
    /// new.
    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError>;

    /// Checks that the state can be loaded from a checkpoint that every rank of `group` has opened,
    /// as far as that is known without reading tensors. Nothing changes. Collective.
    ///
    /// A [`StatefulDict`](crate::StatefulDict) asks this of all its states before it loads the
    /// first one, so that a checkpoint that does not fit one of them changes none. The default
    /// checks nothing; types that hold others ask these.
    ///
    /// # Errors
    /// The errors that [`Self::load_state_dict`] returns before it changes anything.
    fn check_load(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        let _ = (checkpoint, group, options);
        Ok(())
    }
}

/// Guards that keep the sharded tensors below some keys of a state dict unchanged until they have
/// been copied. Other values below these keys are copied at once.
#[derive(Debug)]
pub struct KeptUnchanged {
    /// The paths of the keys.
    paths: Vec<KeyPath>,
    guards: Vec<Unchanged>,
}

impl KeptUnchanged {
    /// Makes a guard of the sharded tensors below these keys, all of which `guard` must keep
    /// unchanged: they are parameters of its model, state of its optimizers, or averages.
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = impl Into<String>>, guard: Unchanged) -> Self {
        let paths = keys.into_iter().map(|key| KeyPath::from_key(key));
        KeptUnchanged {
            paths: paths.collect(),
            guards: vec![guard],
        }
    }

    /// Returns the same guards for a state dict in which all keys lie below another key.
    #[must_use]
    pub fn below(mut self, key: &str) -> Self {
        for path in &mut self.paths {
            path.0.insert(0, PathPart::Key(key.to_owned()));
        }
        self
    }

    /// Joins the guards of two parts of one state dict.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.paths.extend(other.paths);
        self.guards.extend(other.guards);
        self
    }

    /// Returns `true` for the path of a value that does not change if it is a sharded tensor.
    pub(crate) fn contains(&self, path: &KeyPath) -> bool {
        let mut paths = self.paths.iter();
        paths.any(|kept| path.0.len() > kept.0.len() && path.0.starts_with(&kept.0))
    }

    /// Ends the guards, and returns for how long changes have waited so far.
    pub(crate) fn release(self) -> Duration {
        self.guards.into_iter().map(Unchanged::release).sum()
    }

    /// Ends the guards like [`Self::release`] when GPUs have been given all copies of the values.
    pub(crate) fn release_after(self, end: &Arc<CopiesEnd>) -> Duration {
        let guards = self.guards.into_iter();
        guards
            .map(|guard| guard.release_after(Arc::clone(end)))
            .sum()
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
        fill(checkpoint, self, group, options, FillMode::InPlace)
    }

    fn check_load(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        fill(checkpoint, self, group, options, FillMode::Check)?;
        Ok(())
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

/// The way to load what a state dict of a run has only copies of.
const LOAD_ADVICE: &str = "call `TrainState::load_state_dict`, for several runs in one checkpoint \
    through a `StatefulDict` or on a `CheckpointPart`";

/// The state of a training run: the model, its optimizers, a sampler, a gradient scaler and
/// averaged weights if the run has them, and plain values.
///
/// In a checkpoint it is `{"model": …, "optim": …}` and the values, as torch programs save it, plus
/// `sampler`, `scaler` and `average` if the run has them. A load fills the shards of the live model
/// and the optimizers' state in place, without a second copy, and replaces plain values.
///
/// A strict load (the default) fails if the run has a name that the checkpoint lacks, or if the
/// checkpoint has a tensor, anything of optimizers, or a sampler or scaler that the run does not
/// have: set these before the load. Other plain values that only the checkpoint has are added to
/// [`TrainState::values`]. A tensor of one element
/// becomes a number where `values` has a plain value. A load that is not strict ignores names that
/// only one side has, and opaque values; an average that the checkpoint lacks begins anew from the
/// loaded weights.
///
/// Several runs share a checkpoint, each below a key of its own, in a
/// [`StatefulDict`](crate::StatefulDict).
///
/// A checkpoint without a `model` key, such as a published one, holds only a model. Load it into a
/// run without optimizers. Names that begin with `model.` in a format of flat keys are the model's
/// own, as in Hugging Face's files, if the model has one of them; otherwise they are names below
/// the key `model`.
///
/// A load may be limited to some of these keys, with [`LoadOptions::only`]. Model and optimizers
/// are loaded as a whole or not at all. A load of the model drops its gradients.
///
/// Gradients are not saved: save after a step of the optimizers, and not while gradients are being
/// accumulated for the next one.
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
    /// rate. Plain values must be the same on every rank. Of whole tensors that differ, such as the
    /// states of random generators, one is saved: give each rank's its own key.
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
    ///
    /// # Errors
    /// Averaged weights in the model, an optimizer of another model, values under a key of the
    /// model's or the optimizers' state.
    fn live_state(&self) -> Result<StateDict, CheckpointError> {
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
            let optim = live_optim_state_dict(&optimizers, MissingState::Initial)?;
            state.insert(OPTIM, optim.as_snapshot("", LOAD_ADVICE));
        }
        for (key, value) in self.values_and_parts()? {
            if let Some(part) = live_part(&key) {
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
    fn values_and_parts(&self) -> Result<StateDict, CheckpointError> {
        let mut values = self.values.clone();
        if let Some(sampler) = &self.sampler {
            values.insert_new(SAMPLER, sampler.state_dict())?;
        }
        if let Some(scaler) = &self.scaler {
            values.insert_new(SCALER, scaler.state_dict())?;
        }
        if let Some(average) = &self.average {
            values.insert_new(AVERAGE, average.state_dict()?)?;
        }
        Ok(values)
    }

    /// Decides what to load, and checks that sampler, scaler and average accept it, before anything
    /// changes. No communication.
    ///
    /// # Errors
    /// [`StateError::Incompatible`] if the load is strict, and neither side has a key that is asked
    /// for, or the run lacks a sampler or scaler that the checkpoint has; a part that refuses its
    /// saved state; values that cannot be read; lists with long gaps.
    fn prepare<'c>(
        &self,
        checkpoint: &'c dyn Checkpoint,
        options: &LoadOptions,
    ) -> Result<PreparedLoad<'c>, CheckpointError> {
        // Step 1: take the values that are asked for, on both sides.
        let all_values = self.values_and_parts()?;
        let paths = flatten_state_dict(&all_values)?.paths;
        let mut values: StateDict = all_values
            .into_iter()
            .filter(|(key, _)| options.includes(key))
            .collect();
        let mut source = CheckpointSource::with_known_paths(checkpoint, &paths);
        source.schema().check_gaps()?;
        let absent = self.absent_parts(&values, checkpoint, options);
        // The state of a part that the run does not have would become plain values, which a part
        // that is set later does not look at.
        let mut unwanted = Vec::new();
        for part in [SAMPLER, SCALER] {
            if !values.contains_key(part) && options.includes(part) {
                let removed_keys;
                (source, removed_keys) = source.without(|key| is_part_of(key, part));
                unwanted.extend(removed_keys);
            }
        }
        if options.strict && !(absent.is_empty() && unwanted.is_empty()) {
            let mut report = LoadReport::default();
            report.missing = absent;
            report.unexpected = unwanted;
            return Err(StateError::Incompatible {
                operation: LOAD,
                report,
            }
            .into());
        }
        if options.only.is_some() {
            // A checkpoint that holds no more than a model has its names without the key.
            let prefix = prefix_for(self.model.parameters(), source.schema());
            let takes_model = options.includes(MODEL) && prefix.is_empty();
            (source, _) = source.without(|key| {
                // Model and optimizers are taken as a whole.
                let part = live_part(key).unwrap_or(key);
                let is_model = takes_model && part != OPTIM;
                let is_absent = absent.iter().any(|absent| is_part_of(part, absent));
                !is_model && (is_absent || !options.includes(part))
            });
        }
        // Step 2: leave out what a load that is not strict need not take.
        let mut left_out = unwanted;
        if !options.strict {
            let object_keys;
            (source, object_keys) = source.without_foreign_objects(|path| {
                path.below(&[MODEL]).is_some() || path.below(&[OPTIM]).is_some()
            })?;
            left_out.extend(object_keys);
            // The number of updates alone would become a value of this run. A later average would
            // go on from it, with weights that were never averaged.
            if !values.contains_key(AVERAGE) && has_average(checkpoint) {
                let average_keys;
                (source, average_keys) = source.without(|key| is_part_of(key, AVERAGE));
                left_out.extend(average_keys);
            }
        }
        if let Some(average) = &self.average
            && let Some(StateValue::Dict(state)) = values.get_mut(AVERAGE)
        {
            let entries = &checkpoint.metadata().entries;
            average.retain_saved_names(state, |name| {
                entries.contains_key(&format!("{AVERAGE}.{name}"))
            });
        }
        // Step 3: check that the parts accept their saved state.
        if let Some(sampler) = &self.sampler
            && values.contains_key(SAMPLER)
        {
            sampler
                .clone()
                .load_state_dict(&saved_part(&source, &values, SAMPLER)?)
                .map_err(NnError::from)?;
        }
        if let Some(scaler) = &self.scaler
            && values.contains_key(SCALER)
        {
            scaler
                .clone()
                .load_state_dict(&saved_part(&source, &values, SCALER)?)?;
        }
        if self.average.is_some() && values.contains_key(AVERAGE) {
            AveragedModel::check_n_averaged(&saved_part(&source, &values, AVERAGE)?)?;
        }
        Ok(PreparedLoad {
            source,
            values,
            left_out,
            absent,
        })
    }

    /// Returns the keys that are asked for, but that neither this run nor the checkpoint has. The
    /// model, the optimizers and each value are loaded as a whole, so what lies inside of them is
    /// no key either.
    fn absent_parts(
        &self,
        values: &StateDict,
        checkpoint: &dyn Checkpoint,
        options: &LoadOptions,
    ) -> Vec<String> {
        let mut absent = options.only.clone().unwrap_or_default();
        absent.retain(|part| match part.as_str() {
            MODEL => false,
            OPTIM if !self.optimizers.is_empty() => false,
            part if part != OPTIM && live_part(part).is_some() => true,
            part if self.is_inside_value(part, checkpoint) => {
                // It is loaded with the value if that is asked for too.
                let mut wanted = options.only.iter().flatten();
                !wanted.any(|other| other != part && is_part_of(part, other))
            }
            part => {
                let saved_keys = checkpoint.metadata().entries.keys().map(String::as_str);
                !values
                    .keys()
                    .chain(saved_keys)
                    .any(|key| is_part_of(key, part))
            }
        });
        absent
    }

    /// Returns `true` if a key is that of a part of a value, in this run or in the checkpoint.
    fn is_inside_value(&self, part: &str, checkpoint: &dyn Checkpoint) -> bool {
        let is_around = |key: &str| key != part && is_part_of(part, key);
        let mut saved_paths = checkpoint.metadata().planner_data.iter().flatten();
        !self.values.contains_key(part)
            && (self.values.keys().any(is_around)
                || saved_paths.any(|(_, path)| match &path.0[..] {
                    [PathPart::Key(first), _, ..] => is_around(first),
                    _ => false,
                }))
    }

    /// Loads the model, the optimizers and the values, or only checks that they can be loaded.
    /// Returns the report, and the values, with the states of sampler, scaler and average among
    /// them.
    fn load_live(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
        only_checks: bool,
    ) -> Result<(LoadReport, StateDict), CheckpointError> {
        let prepared = self.prepare(checkpoint, options);
        let PreparedLoad {
            mut source,
            mut values,
            left_out,
            absent,
        } = CheckpointError::or_refuse(group, LOAD, prepared)?;
        let mut optimizers = Vec::new();
        let mut prefixes = StatePrefixes::default();
        if options.includes(MODEL) {
            prefixes.model = Some(prefix_for(self.model.parameters(), source.schema()));
        }
        if options.includes(OPTIM) {
            prefixes.optim = Some(vec![OPTIM.to_owned()]);
            optimizers.extend(&mut self.optimizers);
        }
        let live = LiveTarget::new(self.model.parameters(), optimizers, prefixes);
        let mut target = CheckpointError::or_refuse(group, LOAD, live)?.with_values(&mut values);
        let loaded: Result<LoadReport, CheckpointError> = if only_checks {
            check_state(LOAD, group, &mut source, &mut target, options)
        } else {
            load_state(LOAD, group, &mut source, &mut target, options)
        };
        let mut report = loaded?;
        drop(target);
        report.unexpected.extend(left_out);
        report.missing.extend(absent);
        report.sort();
        Ok((report, values))
    }

    /// Begins the average anew from the loaded weights if it was to be loaded, but the checkpoint
    /// has none, and tells so. An average without updates is that of the weights before the load,
    /// so it begins anew too if it was not to be loaded.
    ///
    /// # Errors
    /// candle's errors.
    fn restart_average(
        &mut self,
        checkpoint: &dyn Checkpoint,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        let Some(average) = &mut self.average else {
            return Ok(());
        };
        let is_left_out = !options.includes(AVERAGE);
        let is_loaded = !is_left_out && has_average(checkpoint);
        let is_stale = options.includes(MODEL) && average.belongs_to(self.model.parameters());
        if is_loaded || !is_stale || is_left_out && average.n_averaged() > 0 {
            return Ok(());
        }
        average.restart()?;
        if !is_left_out && self.model.group().rank() == 0 {
            warn!(
                path = %checkpoint.path().display(),
                "the checkpoint has no average of the weights: it begins anew from the loaded weights"
            );
        }
        Ok(())
    }

    /// Sets sampler, scaler, average and values to what was loaded.
    ///
    /// # Errors
    /// A part that refuses its state.
    fn set_loaded(&mut self, mut loaded: StateDict) -> Result<(), CheckpointError> {
        if let Some(sampler) = &mut self.sampler
            && let Some(state) = loaded.remove(SAMPLER)
        {
            sampler
                .load_state_dict(&dict_of(state))
                .map_err(NnError::from)?;
        }
        if let Some(scaler) = &mut self.scaler
            && let Some(state) = loaded.remove(SCALER)
        {
            scaler.load_state_dict(&dict_of(state))?;
        }
        if let Some(average) = &mut self.average
            && let Some(state) = loaded.remove(AVERAGE)
        {
            average.load_state_dict(&dict_of(state))?;
        }
        self.values.extend(loaded);
        Ok(())
    }
}

/// Returns the key of the model or of the optimizers, if a key is that key or begins with it.
fn live_part(key: &str) -> Option<&'static str> {
    [MODEL, OPTIM]
        .into_iter()
        .find(|part| is_part_of(key, part))
}

/// A load into a run that this rank is ready for.
struct PreparedLoad<'c> {
    /// The checkpoint, limited to what is loaded.
    source: CheckpointSource<'c>,
    /// The run's values, and the states of sampler, scaler and average.
    values: StateDict,
    /// Keys of the checkpoint that are left out.
    left_out: Vec<String>,
    /// Keys that were asked for, and that neither side has.
    absent: Vec<String>,
}

/// Returns `true` if a checkpoint holds an average of weights.
fn has_average(checkpoint: &dyn Checkpoint) -> bool {
    checkpoint.metadata().entries.keys().any(|key| {
        key.strip_prefix(AVERAGE)
            .is_some_and(|name| name.starts_with(".module."))
    })
}

/// Returns the part of the state below a key as it will be after the load, as far as small values
/// go, so that the part can be asked whether it accepts them before anything is loaded. Small
/// values come from the checkpoint, others from `values`, which has the key.
fn saved_part(
    source: &CheckpointSource<'_>,
    values: &StateDict,
    key: &str,
) -> Result<StateDict, CheckpointError> {
    let mut part = StateDict::new();
    let live_value = values.get(key).expect("the run has the part");
    part.insert(key, live_value.clone());
    source.copy_to(&mut part, |position, path| {
        source.schema().is_small(position) && path.below(&[key]).is_some()
    })?;
    Ok(dict_of(part.remove(key).expect("the part was inserted")))
}

/// Returns the state of a part of the run as a dict. A value that has taken its place in a
/// checkpoint is none, and the part finds its own values missing then.
fn dict_of(value: StateValue) -> StateDict {
    match value {
        StateValue::Dict(dict) => dict,
        _ => StateDict::new(),
    }
}

impl<M> Stateful for TrainState<M> {
    /// Returns the state, of which only the model's tensors, and those of an average, can be
    /// written to: steps, hyperparameters, moments of an optimizer that has not stepped, and plain
    /// values are copies. So a load in place into this dict is an error, unless it is limited to
    /// `model`.
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        let state = self.live_state()?;
        // The caller may write to the views.
        self.model.parameters().lend()?;
        Ok(state.as_snapshot(MODEL, LOAD_ADVICE))
    }

    fn state_to_save(&self) -> Result<(StateDict, Option<KeptUnchanged>), CheckpointError> {
        let state = self.live_state()?;
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
        let (report, loaded) = self.load_live(checkpoint, group, options, false)?;
        if options.includes(MODEL) {
            // These are of the weights before, and the next step would take them for new ones.
            self.model.parameters().zero_grad();
        }
        self.set_loaded(loaded)?;
        self.restart_average(checkpoint, options)?;
        Ok(report)
    }

    fn check_load(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        self.load_live(checkpoint, group, options, true)?;
        Ok(())
    }
}

/// Returns the keys that lead to the state of a model that is there: those of [`model_prefix`], or
/// `model` if the names of the checkpoint are flat, none is the model's own, and some are without
/// `model.`.
fn prefix_for(parameters: &ShardedParameters, schema: &Schema) -> Vec<String> {
    let prefix = model_prefix(schema);
    if !prefix.is_empty() {
        return prefix;
    }
    let mut is_below_model = false;
    for (path, _) in schema.iter() {
        let [PathPart::Key(name)] = path.0.as_slice() else {
            continue;
        };
        if parameters.contains(name) {
            return prefix;
        }
        let inner_name = name
            .strip_prefix(MODEL)
            .and_then(|rest| rest.strip_prefix('.'));
        is_below_model |= inner_name.is_some_and(|name| parameters.contains(name));
    }
    if is_below_model {
        vec![MODEL.to_owned()]
    } else {
        prefix
    }
}

/// Returns the keys that lead to the model's state in a checkpoint: `model` in that of a run, and
/// none in one that holds only a model. A flat name that begins with `model.` is the model's own.
pub(crate) fn model_prefix(schema: &Schema) -> Vec<String> {
    for (path, _) in schema.iter() {
        if let [PathPart::Key(top_key), _, ..] = path.0.as_slice()
            && top_key == MODEL
        {
            return vec![MODEL.to_owned()];
        }
    }
    Vec::new()
}
