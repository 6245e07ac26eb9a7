//! [`StatefulDict`]: several states in one checkpoint, each below a key of its own.

use std::collections::BTreeMap;
use std::fmt;

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::{ErrorKind, Failure as _, with_causes};
use fsdp_state::{LoadError as _, LoadOptions, LoadReport, StateDict, StateError, is_part_of};
use twox_hash::XxHash3_64;

use crate::error::CheckpointError;
use crate::load::{LOAD, agree_on_load};
use crate::part::{CheckpointPart, below};
use crate::stateful::{KeptUnchanged, Stateful};

/// Several states in one checkpoint, each below a key of its own: torch's
/// `dcp.save({"generator": AppState(…), "discriminator": AppState(…)})`.
///
/// The states may be [`TrainState`](crate::TrainState)s of different models, which keep their
/// weights, moments, steps and learning rates apart, state dicts, other dicts of this type, and
/// types of one's own. Every rank must have the same keys.
///
/// A strict load (the default) fails if the checkpoint has a top-level key that is none of these.
/// With [`LoadOptions::only`], keys are those of this dict, such as `generator`, or of what lies
/// below them, such as `generator.model`. All states are checked ([`Stateful::check_load`]) before
/// the first one is loaded, so that a checkpoint that does not fit one of them changes none. Then
/// they are loaded one after the other, in the order of their keys. If one fails after another has
/// been loaded, as damage in a file makes it, the error is [`StateError::PartlyLoaded`], also with
/// [`LoadOptions::staged`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, linear};
/// use fsdp_checkpoint::{
///     CheckpointError, Checkpointer, CheckpointerOptions, StatefulDict, TrainState,
/// };
/// use fsdp_comm::ProcessGroup;
/// use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
///
/// type Run = TrainState<candle_nn::Linear>;
///
/// fn build(group: &ProcessGroup, inputs: usize) -> Result<Run, CheckpointError> {
///     let config = FsdpConfig::default();
///     let model = FullyShardedDataParallel::new(group.clone(), config, |scope| linear(inputs, 2, scope.vb()))?;
///     let optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
///     Ok(TrainState::new(model, vec![optimizer]))
/// }
///
/// let dir = tempfile::tempdir()?;
/// fsdp_comm::run_local(2, |group| {
///     let mut checkpointer = Checkpointer::new(dir.path(), &group, CheckpointerOptions::default())?;
///     let mut generator = build(&group, 3)?;
///     let mut discriminator = build(&group, 5)?;
///     let x = Tensor::ones((1, 5), DType::F32, &Device::Cpu)?;
///     discriminator.model.backward(&discriminator.model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?)?;
///     discriminator.optimizers[0].step()?;
///     let mut both = StatefulDict::new()
///         .with("generator", &mut generator)
///         .with("discriminator", &mut discriminator);
///     checkpointer.save(1, &both)?;
///     let report = checkpointer.load(1, &mut both)?;
///     assert!(report.is_clean());
///     Ok::<_, CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct StatefulDict<'a> {
    /// The states by their keys, sorted.
    states: BTreeMap<String, &'a mut dyn Stateful>,
}

impl<'a> StatefulDict<'a> {
    /// Returns a dict without states.
    #[must_use]
    pub fn new() -> Self {
        StatefulDict::default()
    }

    /// Adds a state below a key, in the place of one that the dict has there.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, state: &'a mut dyn Stateful) -> Self {
        self.states.insert(key.into(), state);
        self
    }

    /// Checks that each key is one key in a checkpoint, so that a load finds the same states there.
    ///
    /// # Errors
    /// [`CheckpointError::Unsavable`] for an empty key, or one with a dot.
    fn check_keys(&self) -> Result<(), CheckpointError> {
        match self
            .states
            .keys()
            .find(|key| key.is_empty() || key.contains('.'))
        {
            None => Ok(()),
            Some(key) => Err(CheckpointError::Unsavable {
                fqn: key.clone(),
                problem: "the key of a state must not be empty, and have no dot".to_owned(),
            }),
        }
    }

    /// Checks that all ranks load states of the same keys, with the same options. Collective: one
    /// agreement, and if they differ an object all-gather.
    ///
    /// # Errors
    /// The same on every rank: [`StateError::ArgumentMismatch`].
    fn agree_on_keys(
        &self,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        let keys: Vec<&str> = self.states.keys().map(String::as_str).collect();
        let arguments = format!("states: {}, {}", keys.join(", "), options.describe_common());
        let hash = XxHash3_64::oneshot(arguments.as_bytes());
        match CheckpointError::agree(group, LOAD, Some(hash), Ok(())) {
            Err(CheckpointError::Comm(error @ CommError::SchemaMismatch { .. })) => {
                let all_arguments: Vec<String> = group.all_gather_object(&arguments)?;
                let expected = &all_arguments[0];
                let mut by_rank = group.global_ranks().iter().zip(&all_arguments);
                let Some((rank, found)) = by_rank.find(|(_, found)| *found != expected) else {
                    return Err(error.into());
                };
                Err(StateError::ArgumentMismatch {
                    operation: LOAD,
                    rank: *rank,
                    found: found.clone(),
                    reference: group.global_ranks()[0],
                    expected: expected.clone(),
                }
                .into())
            }
            agreed => agreed,
        }
    }

    /// Returns the keys of the checkpoint that no state takes, and those that are asked for, but
    /// that are no state's.
    fn find_lone_keys(&self, checkpoint: &dyn Checkpoint, options: &LoadOptions) -> LoadReport {
        let has_part = |key: &str| self.states.keys().any(|part| is_part_of(key, part));
        let mut report = LoadReport::default();
        let keys = checkpoint.metadata().entries.keys();
        let mut unexpected = keys.filter(|key| options.includes(key) && !has_part(key));
        report.unexpected.extend(unexpected.by_ref().cloned());
        let wanted = options.only.iter().flatten();
        report
            .missing
            .extend(wanted.filter(|key| !has_part(key)).cloned());
        report
    }
}

impl fmt::Debug for StatefulDict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.states.keys()).finish()
    }
}

impl Stateful for StatefulDict<'_> {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        self.check_keys()?;
        let mut dict = StateDict::new();
        for (key, state) in &self.states {
            dict.insert(key, state.state_dict()?);
        }
        Ok(dict)
    }

    fn state_to_save(&self) -> Result<(StateDict, Option<KeptUnchanged>), CheckpointError> {
        self.check_keys()?;
        let mut dict = StateDict::new();
        let mut kept: Option<KeptUnchanged> = None;
        for (key, state) in &self.states {
            let (state, guard) = state.state_to_save()?;
            dict.insert(key, state);
            if let Some(guard) = guard.map(|guard| guard.below(key)) {
                kept = Some(match kept {
                    Some(kept) => kept.and(guard),
                    None => guard,
                });
            }
        }
        Ok((dict, kept))
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        self.check_load(checkpoint, group, options)?;
        let mut report = self.find_lone_keys(checkpoint, options);
        let mut loaded_keys: Vec<&str> = Vec::new();
        for (key, state) in &mut self.states {
            let Some(part_options) = options_of_part(options, key) else {
                continue;
            };
            let part = CheckpointPart::new(checkpoint, key);
            let loaded = state.load_state_dict(&part, group, &part_options);
            let part_report =
                agree_on_load(group, loaded).map_err(|error| in_part(error, key, &loaded_keys))?;
            loaded_keys.push(key);
            report = report.merge(part_report.below(key));
        }
        Ok(report)
    }

    fn check_load(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        self.agree_on_keys(group, options)?;
        let report = self.find_lone_keys(checkpoint, options);
        // Every rank has the same checkpoint and the same keys, so all of them have this error.
        if options.strict && !report.is_clean() {
            let operation = LOAD;
            return Err(StateError::Incompatible { operation, report }.into());
        }
        for (key, state) in &mut self.states {
            let Some(part_options) = options_of_part(options, key) else {
                continue;
            };
            let part = CheckpointPart::new(checkpoint, key);
            let checked = state.check_load(&part, group, &part_options);
            agree_on_load(group, checked).map_err(|error| in_part(error, key, &[]))?;
        }
        Ok(())
    }
}

/// Returns the options for the load of one part; `None` if nothing of it is to be loaded.
fn options_of_part(options: &LoadOptions, part: &str) -> Option<LoadOptions> {
    let mut part_options = options.clone();
    if let Some(wanted) = &options.only {
        let inner_keys: Vec<String> = wanted
            .iter()
            .filter_map(|key| below(key, part).map(str::to_owned))
            .collect();
        let is_whole = wanted.iter().any(|key| key == part);
        if inner_keys.is_empty() && !is_whole {
            return None;
        }
        part_options.only = (!is_whole).then_some(inner_keys);
    }
    Some(part_options)
}

/// Adds the key of its part to an error that tells of differences or of values that are partly new.
/// If other parts have been loaded before, every error but that of a lost rank is of the second
/// kind, and names those.
fn in_part(error: CheckpointError, key: &str, loaded_keys: &[&str]) -> CheckpointError {
    let is_rank_lost = error
        .comm()
        .is_some_and(|comm| comm.kind() == ErrorKind::RankLost);
    let kind = error.kind();
    let (cause, can_be_staged) = match error {
        CheckpointError::State(StateError::Incompatible { operation, report })
            if loaded_keys.is_empty() =>
        {
            let report = report.below(key);
            return StateError::Incompatible { operation, report }.into();
        }
        CheckpointError::State(StateError::PartlyLoaded {
            reason,
            can_be_staged,
            ..
        }) => (reason, can_be_staged),
        error if loaded_keys.is_empty() || is_rank_lost => return error,
        error => (with_causes(&error), false),
    };
    let mut reason = format!("`{key}`: {cause}");
    if !loaded_keys.is_empty() {
        reason.push_str(&format!("; loaded before: {}", loaded_keys.join(", ")));
    }
    StateError::PartlyLoaded {
        reason,
        can_be_staged: can_be_staged && loaded_keys.is_empty(),
        kind,
    }
    .into()
}
