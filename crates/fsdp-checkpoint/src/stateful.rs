//! State that can be saved and loaded: the trait [`Stateful`], and [`TrainState`], which suits most runs.

use fsdp_comm::ProcessGroup;
use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_layout::{KeyPath, PathPart};
use fsdp_nn::state::{LiveTarget, StatePrefixes};
use fsdp_nn::torch::{StateDictOptions, get_model_state_dict, get_optimizer_state_dict};
use fsdp_nn::{FullyShardedDataParallel, Optimizer};
use fsdp_state::{
    LoadError as _, LoadOptions, LoadReport, Source as _, StateDict, StateError, flatten_state_dict, load_state,
};

use crate::CheckpointError;
use crate::load::fill;
use crate::source::CheckpointSource;

/// State that a [`Checkpointer`](crate::Checkpointer) saves and loads: torch's `Stateful`.
pub trait Stateful {
    /// Returns the state to save. No communication.
    ///
    /// Values may be views of live tensors. A save reads them before it returns; a save in the background copies them
    /// first.
    ///
    /// # Errors
    /// An error of this rank alone. A save passes it on to every rank.
    fn state_dict(&self) -> Result<StateDict, CheckpointError>;

    /// Loads the state from a checkpoint that every rank of `group` has opened. Collective.
    ///
    /// # Errors
    /// The same on every rank. The state is unchanged, unless the error is [`StateError::PartlyLoaded`]: then some
    /// values are new.
    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError>;
}

/// A state dict is saved as it is. A load fills its tensors in place and replaces its plain values, as
/// [`load_in_place`](crate::load_in_place()).
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
        fill("load", checkpoint, self, group, options, true)
    }
}

/// The key of the model's state in a checkpoint.
pub(crate) const MODEL: &str = "model";
/// The key of the optimizers' state in a checkpoint.
const OPTIM: &str = "optim";

/// A run's state: the model, its optimizers, and values beside them.
///
/// In a checkpoint it is `{"model": …, "optim": …}` and the values, as torch programs save it. A load fills the shards of
/// the live model and the optimizers' state where they are, with no second copy of them, and replaces plain values.
///
/// A strict load (the default) is an error if the run has a name that the checkpoint lacks, or the checkpoint a tensor that
/// the run has no place for. Plain values that only the checkpoint has are added to [`TrainState::values`]. A load that is
/// not strict leaves out whatever only one side has, and values that hold objects of other programs.
///
/// A checkpoint without a `model` key, such as a published one, holds only a model. Load it into a run without optimizers.
/// Names that begin with `model.` in a format of flat keys are the model's own, as in Hugging Face's files.
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
    /// Values beside them, by their keys in the checkpoint: steps done, and the `state_dict` of a sampler
    /// ([`ShardedSampler`](fsdp_nn::ShardedSampler)), of a [`GradScaler`](fsdp_nn::GradScaler), of an average of the weights
    /// ([`AveragedModel`](fsdp_nn::AveragedModel)). Put them in before a save and before a load, and give them back to their
    /// `load_state_dict` after it. A [`Schedule`](fsdp_nn::Schedule) needs the step only: the optimizers keep its base. Plain
    /// values must be the same on every rank.
    pub values: StateDict,
}

impl<M> TrainState<M> {
    /// Returns the state of a run without values beside model and optimizers.
    #[must_use]
    pub fn new(model: FullyShardedDataParallel<M>, optimizers: Vec<Optimizer>) -> Self {
        TrainState { model, optimizers, values: StateDict::new() }
    }
}

impl<M> Stateful for TrainState<M> {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        let parameters = self.model.parameters();
        let views = StateDictOptions { share_storage: true, ..StateDictOptions::default() };
        let mut state = StateDict::new();
        state.insert(MODEL, get_model_state_dict(parameters, &views)?);
        if !self.optimizers.is_empty() {
            let optimizers: Vec<&Optimizer> = self.optimizers.iter().collect();
            state.insert(OPTIM, get_optimizer_state_dict(parameters, &optimizers, &views)?);
        }
        for (key, value) in &self.values {
            if state.insert(key, value.clone()).is_some() {
                return Err(StateError::DuplicateKey { key: key.to_owned() }.into());
            }
        }
        Ok(state)
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        let parameters = self.model.parameters();
        let optimizers: Vec<&mut Optimizer> = self.optimizers.iter_mut().collect();
        let prepared = flatten_state_dict(&self.values).map_err(CheckpointError::from).and_then(|values| {
            let source = CheckpointSource::with_known_paths(checkpoint, &values.paths);
            let (source, left_out) = if options.strict {
                (source, Vec::new())
            } else {
                source.without_foreign_objects(|path| is_below(path, MODEL) || is_below(path, OPTIM))?
            };
            // A checkpoint without a `model` key holds only a model.
            let is_run = source.schema().iter().any(|(path, _)| is_nested_model(path));
            let model = if is_run { vec![MODEL.to_owned()] } else { Vec::new() };
            let optim = (!optimizers.is_empty()).then(|| vec![OPTIM.to_owned()]);
            let prefixes = StatePrefixes { model: Some(model), optim };
            Ok((source, LiveTarget::new(parameters, optimizers, prefixes)?, left_out))
        });
        let (mut source, target, left_out) = match prepared {
            Ok(prepared) => prepared,
            // Take part in the round in which the other ranks compare what they load, so that all get this error.
            Err(error) => return CheckpointError::agree(group, "load", Some(0), Err(error)),
        };
        let mut target = target.with_values(&mut self.values);
        let mut report: LoadReport =
            load_state::<_, _, CheckpointError>("load", group, &mut source, &mut target, options)?;
        report.unexpected.extend(left_out);
        report.sort();
        Ok(report)
    }
}

/// Returns `true` for a path below the key `model` of a nested state dict. A flat name that begins with `model.` is the
/// model's own.
pub(crate) fn is_nested_model(path: &KeyPath) -> bool {
    matches!(path.0.as_slice(), [PathPart::Key(first), _, ..] if first == MODEL)
}

/// Returns `true` if a path lies below a key. A path of one part may be a flat key: then it
/// must begin with `key` and a dot.
fn is_below(path: &KeyPath, key: &str) -> bool {
    match path.0.as_slice() {
        [PathPart::Key(flat)] => flat.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')),
        [PathPart::Key(first), ..] => first == key,
        _ => false,
    }
}
