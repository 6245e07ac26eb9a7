//! Getting and setting the state of a sharded model and its optimizers: torch's `get_state_dict` family.
//!
//! Getting changes nothing. Setting checks everything on every rank first; if anything does not fit, every rank gets
//! the same error and nothing has been changed.

use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_nn::model_state::{CheckedModelState, check_model_state_dict, live_model_state_dict};
use fsdp_nn::optim_state::{CheckedOptimState, MissingState, Scalars, check_optim_state_dict, live_optim_state_dict};
use fsdp_nn::{Optimizer, ShardedParameters};
use fsdp_state::{
    GatherOptions, KeepOn, LoadReport, Reshard, StateDict, gather_state_dict, offload_state_dict_to_cpu,
    reshard_sharded_tensors_into,
};

use crate::exchange::{Coming, Place, announce};
use crate::from_rank0::{CPU, from_rank0};
use crate::incoming::Incoming;
use crate::{CheckpointError, StateDictOptions, names, optim_format};

/// The state dicts of a model and its optimizers: (model, optimizers). torch's `get_state_dict`.
///
/// Sharded (the default): no communication; each rank gets its own boxes under the same keys, and buffers and scalars
/// whole. Full: all ranks get whole tensors, or those that [`StateDictOptions`] names, and the others empty dicts.
///
/// Collectives for full dicts: those of [`gather_state_dict`], for the model and for the optimizers.
///
/// # Errors
/// Contradicting options ([`CheckpointError::Options`]); with full state dicts any rank's error, on every rank.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_checkpoint::{StateDictOptions, get_state_dict};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let (m, o) = get_state_dict(parameters, &[&optimizer], &StateDictOptions::default())?;
///     assert_eq!(m.get("weight").unwrap().as_sharded().unwrap().boxes(), parameters.boxes("weight")?);
///     assert!(o.dict("state").unwrap().dict("weight").unwrap().contains_key("exp_avg"));
///     Ok::<(), fsdp_checkpoint::CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_state_dict(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<(StateDict, StateDict), CheckpointError> {
    Ok((get_model_state_dict(parameters, options)?, get_optimizer_state_dict(parameters, optimizers, options)?))
}

/// The model's half of [`get_state_dict`]: parameters under all their names, and persistent buffers. torch's
/// `get_model_state_dict`. Collectives: as [`get_state_dict`].
///
/// # Errors
/// As [`get_state_dict`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_checkpoint::{StateDictOptions, get_model_state_dict};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let full = StateDictOptions { full_state_dict: true, cpu_offload: true, ..StateDictOptions::default() };
///     let state = get_model_state_dict(parameters, &full)?;
///     assert_eq!(state.is_empty(), group.rank() != 0);
///     Ok::<(), fsdp_checkpoint::CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_model_state_dict(
    parameters: &ShardedParameters,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    let mut state = StateDict::new();
    for (fqn, value) in live_model_state_dict(parameters)? {
        if options.ignore_frozen_params && parameters.contains(&fqn) && !parameters.requires_grad(&fqn)? {
            continue;
        }
        if let Some(name) = names::to_dict(&fqn, options) {
            state.insert(name, value);
        }
    }
    finish(parameters.group(), state, options)
}

/// The optimizers' half of [`get_state_dict`]: `{"state", "param_groups"}`, states joined, groups concatenated. torch's
/// `get_optimizer_state_dict`, which however takes a step with a fresh optimizer: here parameters that have not been
/// stepped have their algorithm's initial state (`step` 0), and the optimizer is not touched. Collectives: as
/// [`get_state_dict`].
///
/// # Errors
/// As [`get_state_dict`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_checkpoint::{StateDictOptions, get_optimizer_state_dict};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let flat = StateDictOptions { flatten_optimizer_state_dict: true, ..StateDictOptions::default() };
///     let state = get_optimizer_state_dict(parameters, &[&optimizer], &flat)?;
///     assert!(state.contains_key("state.weight.exp_avg") && state.contains_key("param_groups.weight.lr"));
///     Ok::<(), fsdp_checkpoint::CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_optimizer_state_dict(
    parameters: &ShardedParameters,
    optimizers: &[&Optimizer],
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    let nested = live_optim_state_dict(optimizers, MissingState::Initial)?;
    finish(parameters.group(), optim_format::to_dict(nested, options)?, options)
}

/// Gathers, offloads or copies, as the options say.
fn finish(group: &ProcessGroup, state: StateDict, options: &StateDictOptions) -> Result<StateDict, CheckpointError> {
    if options.full_state_dict {
        let device = options.cpu_offload.then_some(CPU);
        return Ok(gather_state_dict(group, &state, &GatherOptions { keep_on: options.kept_on(), device })?);
    }
    if options.cpu_offload {
        return Ok(offload_state_dict_to_cpu(&state, &KeepOn::All, group.rank())?);
    }
    if options.share_storage {
        return Ok(state);
    }
    Ok(state.copy()?)
}

/// Loads a model and its optimizers: torch's `set_state_dict`. The caller's dicts are not changed. An empty model dict
/// means optimizers only (with `broadcast_from_rank0`, one that is empty on rank 0).
///
/// Every rank brings dicts of the same names, and takes its own part of whole tensors and its own scalars and
/// hyperparameters. Scalars and hyperparameters must be the same on all ranks; whether whole tensors and buffers are is
/// not checked. With `broadcast_from_rank0` everything is rank 0's.
///
/// Unless [`StateDictOptions::strict`], what the dicts lack is in the report as missing: a parameter or buffer keeps its
/// value; a parameter of an optimizer has no state then, and begins afresh; one that no saved group names
/// (`param_groups.<index>.params.<name>`) takes the hyperparameters of the others of its group; a group of which none
/// is named (`param_groups.<index>`) keeps its own.
///
/// Values may be whole tensors or sharded in any boxes: what a rank needs and does not have comes from the others.
/// Collectives: four agreements and two object all-gathers (with `broadcast_from_rank0` five agreements, an object
/// broadcast and an object all-gather); then, for the values whose boxes have to move between ranks (with
/// `broadcast_from_rank0` those of all tensors), one or two agreements more and [`reshard_sharded_tensors_into`]: tensor
/// by tensor, only what a rank needs, small ones together. Beyond what it is given and what is replaced, a rank needs
/// memory for its shard of the new values, which are complete before the first is put in place, and for one tensor.
///
/// # Errors
/// The same on every rank, and nothing is changed: [`CheckpointError::Mismatch`] for names that differ (`strict`, or
/// between ranks), shapes and dtypes, with the ranks whose dict is wrong if not all are;
/// [`OptimStateError::DifferingOnRanks`](fsdp_nn::fsdp_state::OptimStateError::DifferingOnRanks) for scalars and
/// hyperparameters; malformed groups, values that no rank has, and whatever else one rank meets as its failure.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_checkpoint::{StateDictOptions, get_state_dict, set_state_dict};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let options = StateDictOptions::default();
///     let (m, o) = get_state_dict(parameters, &[&optimizer], &options)?;
///     optimizer.step()?;
///     let report = set_state_dict(parameters, &mut [&mut optimizer], &m, &o, &options)?;
///     assert!(report.is_clean());
///     Ok::<(), fsdp_checkpoint::CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn set_state_dict(
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    model: &StateDict,
    optim: &StateDict,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    set(parameters, optimizers, Some(model), Some(optim), options)
}

/// The model's half of [`set_state_dict`]: torch's `set_model_state_dict`. An empty dict changes nothing. Collectives: as
/// [`set_state_dict`].
///
/// # Errors
/// As [`set_state_dict`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_checkpoint::{StateDictOptions, get_model_state_dict, set_model_state_dict};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let full = StateDictOptions { full_state_dict: true, cpu_offload: true, ..StateDictOptions::default() };
///     let state = get_model_state_dict(parameters, &full)?; // empty on rank 1
///     let from_rank0 = StateDictOptions { broadcast_from_rank0: true, ..full };
///     assert!(set_model_state_dict(parameters, &state, &from_rank0)?.is_clean());
///     Ok::<(), fsdp_checkpoint::CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn set_model_state_dict(
    parameters: &ShardedParameters,
    model: &StateDict,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    set(parameters, &mut [], Some(model), None, options)
}

/// The optimizers' half of [`set_state_dict`]: torch's `set_optimizer_state_dict`. Groups go by the names in them; state
/// of parameters that no optimizer holds is reported as unexpected and left out. Collectives: as [`set_state_dict`].
///
/// # Errors
/// As [`set_state_dict`].
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// use fsdp_checkpoint::{StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict};
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let options = StateDictOptions::default();
///     let state = get_optimizer_state_dict(parameters, &[&optimizer], &options)?;
///     let mut resumed = Optimizer::new(parameters, Algorithm::Adam(AdamOptions::default()))?;
///     set_optimizer_state_dict(parameters, &mut [&mut resumed], &state, &options)?;
///     assert!(!resumed.is_fresh());
///     Ok::<(), fsdp_checkpoint::CheckpointError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn set_optimizer_state_dict(
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    optim: &StateDict,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    set(parameters, optimizers, None, Some(optim), options)
}

fn set(
    parameters: &ShardedParameters,
    optimizers: &mut [&mut Optimizer],
    model: Option<&StateDict>,
    optim: Option<&StateDict>,
    options: &StateDictOptions,
) -> Result<LoadReport, CheckpointError> {
    options.check()?;
    let group = parameters.group();
    let state = group.agree("set_state_dict", Incoming::new(parameters, model, optim, options))?;
    let (state, coming) = match options.broadcast_from_rank0 {
        true => from_rank0(parameters, optimizers, &state)?,
        false => announce(parameters, state)?,
    };
    let mut checked = group.agree("set_state_dict", Checked::new(parameters, optimizers, &state, options))?;
    drop(state);
    let reports = (checked.model_report.clone(), checked.optim_report.clone());
    let (reports, scalars): (Vec<(LoadReport, LoadReport)>, Vec<u64>) =
        group.all_gather_object(&(reports, checked.scalars.hash()))?.into_iter().unzip();
    let (model_reports, optim_reports): (Vec<LoadReport>, Vec<LoadReport>) = reports.into_iter().unzip();
    let model_report = judge("model", group, model_reports, options.strict, true)?;
    // State of parameters that are not here is no error: they may be frozen or belong to another model.
    let optim_report = judge("optimizer", group, optim_reports, options.strict, false)?;
    if scalars.iter().any(|of_rank| *of_rank != scalars[0]) {
        checked.scalars.compare(group)?;
    }
    checked.fill(parameters, optimizers, coming)?;
    group.agree("set_state_dict", checked.apply(parameters, optimizers))?;
    Ok(model_report.merge(optim_report))
}

/// What all ranks found, in one report, if it is no error.
fn judge(
    what: &'static str,
    group: &ProcessGroup,
    reports: Vec<LoadReport>,
    strict: bool,
    refuses_unexpected: bool,
) -> Result<LoadReport, CheckpointError> {
    let fails = |report: &LoadReport| {
        let names = !report.missing.is_empty() || refuses_unexpected && !report.unexpected.is_empty();
        !report.mismatched.is_empty() || strict && names
    };
    // Values that some ranks lack would be loaded by the others alone.
    let divided = reports.iter().any(|report| report.missing != reports[0].missing);
    if !divided && !reports.iter().any(fails) {
        return Ok(reports.into_iter().fold(LoadReport::default(), LoadReport::merge));
    }
    let found =
        group.global_ranks().iter().zip(&reports).filter(|(_, report)| fails(report) || !report.missing.is_empty());
    let mut ranks: Vec<usize> = found.map(|(rank, _)| *rank).collect();
    if ranks.len() == reports.len() {
        ranks.clear();
    }
    let report = Box::new(reports.into_iter().fold(LoadReport::default(), LoadReport::merge));
    Err(CheckpointError::Mismatch { what, report, ranks })
}

/// All that is to be put in place on this rank.
struct Checked {
    model: Option<CheckedModelState>,
    optims: Vec<CheckedOptimState>,
    model_report: LoadReport,
    optim_report: LoadReport,
    /// Of which each rank takes its own.
    scalars: Scalars,
}

impl Checked {
    fn new(
        parameters: &ShardedParameters,
        optimizers: &[&mut Optimizer],
        state: &Incoming,
        options: &StateDictOptions,
    ) -> Result<Self, CheckpointError> {
        let model = state.model.as_ref().filter(|model| !model.is_empty());
        let model = model.map(|model| check_model_state_dict(parameters, model)).transpose()?;
        let mut model_report = model.as_ref().map(|checked| checked.report.clone()).unwrap_or_default();
        if options.ignore_frozen_params {
            let is_trained = |name: &String| parameters.requires_grad(name).unwrap_or(true);
            model_report.missing.retain(is_trained);
        }
        let mut optim_report = LoadReport::default();
        let mut optims = Vec::new();
        let mut scalars = Scalars::default();
        if let Some(optim) = &state.optim {
            for optimizer in optimizers {
                let checked = check_optim_state_dict(optimizer, optim, &mut optim_report)?;
                scalars = scalars.merge(checked.scalars(optimizer)?);
                optims.push(checked);
            }
            for fqn in optim.dict("state").into_iter().flat_map(StateDict::keys) {
                if !optimizers.iter().any(|optimizer| optimizer.holds(fqn)) {
                    optim_report.unexpected.push(fqn.to_owned());
                }
            }
        }
        Ok(Checked { model, optims, model_report, optim_report, scalars })
    }

    /// Takes the values that come from other ranks, one after the other. Collectives: see
    /// [`reshard_sharded_tensors_into`], and one agreement; none if nothing comes.
    fn fill(
        &mut self,
        parameters: &ShardedParameters,
        optimizers: &[&mut Optimizer],
        coming: Vec<Coming>,
    ) -> Result<(), CheckpointError> {
        if coming.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = coming.iter().map(|coming| coming.place.name()).collect();
        let moves = coming.iter().zip(&names);
        let moves: Vec<Reshard<'_>> =
            moves.map(|(coming, name)| Reshard { name, tensor: &coming.tensor, boxes: &coming.boxes }).collect();
        let mut outcome = Ok(());
        reshard_sharded_tensors_into(parameters.group(), &moves, |index, values| {
            if outcome.is_ok() {
                outcome = self.put(parameters, optimizers, &coming[index].place, values);
            }
            Ok(())
        })?;
        Ok(parameters.group().agree("set_state_dict", outcome)?)
    }

    fn put(
        &mut self,
        parameters: &ShardedParameters,
        optimizers: &[&mut Optimizer],
        place: &Place,
        values: ShardedTensor,
    ) -> Result<(), CheckpointError> {
        let Some(name) = &place.state else {
            let model = self.model.as_mut();
            return Ok(model.map_or(Ok(()), |model| model.replace(parameters, &place.fqn, values))?);
        };
        for (optimizer, checked) in optimizers.iter().zip(&mut self.optims) {
            if optimizer.holds(&place.fqn) {
                checked.replace(optimizer, &place.fqn, name, &values)?;
            }
        }
        Ok(())
    }

    fn apply(self, parameters: &ShardedParameters, optimizers: &mut [&mut Optimizer]) -> Result<(), CheckpointError> {
        if let Some(model) = self.model {
            model.apply(parameters)?;
        }
        for (optimizer, checked) in optimizers.iter_mut().zip(self.optims) {
            checked.apply(optimizer)?;
        }
        Ok(())
    }
}
