//! Local optimizer state to state by the model's names.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::Tensor;
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{TensorBuffer, owned_copy, with_bytes, with_bytes_mut, zeros};
use fsdp_flat::{ShardedTensor, dtype};
use fsdp_layout::{DType, PlainValue};
use fsdp_state::{StateDict, StateValue};
use indexmap::IndexMap;

use super::agree::{agree, agree_on};
use super::gather::{Keep, gather_flat};
use super::local::LocalStateDict;
use super::resolve::{Entry, Resolved, bring, resolve};
use super::settings::StateDictType;
use super::{OptimStateError, OptimStateKeyType};
use crate::handle::FlatParamHandle;
use crate::optim_state::SavedGroup;
use crate::optimizer::Optimizer;
use crate::parameters::ShardedParameters;
use crate::{NnError, Result};

/// How optimizer state is to be given out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SaveOptions {
    /// Whole tensors rather than boxes.
    pub(crate) full: bool,
    pub(crate) keep: Keep,
}

impl SaveOptions {
    fn of(parameters: &ShardedParameters) -> Self {
        let settings = parameters.get_state_dict_type();
        let config = settings.optim_state_dict_config();
        SaveOptions {
            full: settings.state_dict_type() == StateDictType::Full,
            keep: Keep { rank0_only: config.rank0_only(), offload_to_cpu: config.offload_to_cpu() },
        }
    }
}

/// The optimizer's state by the model's names: torch's `FSDP.optim_state_dict`. Collective over the model's group.
///
/// `state` is a local state dict, by ids or by names, as [`Optimizer::state_dict`] and
/// [`Optimizer::named_state_dict`] give it; `None` is the live state of `optimizer`, which is not changed. The type and
/// the config that are set on the model say what comes: whole tensors on all ranks (`Full`), on rank 0 alone while the
/// others get an empty dict (`rank0_only`), or the boxes of each rank (`Sharded`; `Local` is the same, as in torch).
/// `param_groups` is there if `state` has it; a FlatParameter's id becomes the names of all its parameters. State
/// under keys that are neither ids nor names is passed on, each rank its own.
///
/// Each parameter has tensors of its own, `step` included. Parameters without state, or that the optimizer does not
/// hold, are left out. Scalars must agree on all ranks that have elements of the parameter; those of others are ignored.
///
/// Collectives: two agreements and one object all-gather; for each unit and state entry with elements, one all-gather,
/// or with `rank0_only` one gather, over the shard group; none with `Sharded` or where nothing is sharded. (A tensor of a
/// shape other than the parameter's, where some rank has nothing of the parameter, is broadcast.)
///
/// # Errors
/// The same on every rank: [`OptimStateError`] for state that differs between ranks or that some ranks lack;
/// [`NnError::ForeignOptimizer`].
///
/// ```
/// use fsdp_nn::algorithm::{Algorithm, SgdOptions};
/// use fsdp_nn::fsdp_state::optim_state_dict;
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
///         candle_nn::linear(3, 2, scope.vb())
///     })?;
///     let optimizer = Optimizer::new(model.parameters(), Algorithm::Sgd(SgdOptions::default()))?;
///     let state = optim_state_dict(model.parameters(), &optimizer, None)?;
///     assert!(state.dict("state").unwrap().is_empty()); // not stepped yet
///     assert!(state.contains_key("param_groups"));
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn optim_state_dict(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
) -> Result<StateDict> {
    save(parameters, optimizer, state, SaveOptions::of(parameters))
}

pub(crate) fn save(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
    options: SaveOptions,
) -> Result<StateDict> {
    let mut states: IndexMap<String, StateDict> = IndexMap::new();
    let rest = save_into(parameters, optimizer, state, options, &mut |fqn, name, value| {
        states.entry(fqn.to_owned()).or_default().insert(name, value);
        Ok(())
    })?;
    if !options.keep.here(parameters) {
        return Ok(StateDict::new());
    }
    let mut merged: StateDict = states.into_iter().map(|(fqn, state)| (fqn, StateValue::Dict(state))).collect();
    let mut result = StateDict::new();
    for (key, value) in rest {
        match value {
            StateValue::Dict(user_state) if key == "state" => {
                for (key, value) in user_state {
                    merged.insert(key, value);
                }
                result.insert(key, std::mem::take(&mut merged));
            }
            value => {
                result.insert(key, value);
            }
        }
    }
    Ok(result)
}

/// As [`optim_state_dict`], with each value handed to `sink` (parameter, entry, value) as soon as it is there, so that
/// a rank that writes a file needs memory for one entry of one unit. Returns what is left: `state` with user state
/// alone, and `param_groups`; on ranks that keep nothing an empty dict.
///
/// # Errors
/// As [`optim_state_dict`], and those of `sink`: on every rank, once all values have passed.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::optim_state_dict_into;
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
///     let mut names = Vec::new();
///     let rest = optim_state_dict_into(parameters, &optimizer, None, |fqn, name, _value| {
///         names.push(format!("{fqn}.{name}"));
///         Ok(())
///     })?;
///     assert_eq!(names.len(), 2 * 3);
///     assert!(rest.dict("state").unwrap().is_empty() && rest.contains_key("param_groups"));
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn optim_state_dict_into(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
    mut sink: impl FnMut(&str, &str, StateValue) -> Result<()>,
) -> Result<StateDict> {
    save_into(parameters, optimizer, state, SaveOptions::of(parameters), &mut sink)
}

type Sink<'a> = dyn FnMut(&str, &str, StateValue) -> Result<()> + 'a;

fn save_into(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    state: Option<&StateDict>,
    options: SaveOptions,
    sink: &mut Sink<'_>,
) -> Result<StateDict> {
    const OPERATION: &str = "optim_state_dict";
    let group = parameters.group();
    let live;
    let views = match state {
        Some(state) => Ok(state),
        None => match optimizer.state_dict_views(OptimStateKeyType::ParamId) {
            Ok(views) => {
                live = views;
                Ok(&live)
            }
            Err(error) => Err(error),
        },
    };
    let brought = check_owner(parameters, optimizer).and(views).and_then(|state| {
        let local = LocalStateDict::read(optimizer, state)?;
        let brought = bring(optimizer, &local)?;
        Ok((local, brought))
    });
    let hash = twox_hash::XxHash3_64::oneshot(format!("{options:?}").as_bytes());
    let (local, brought) = agree_on(group, OPERATION, hash, brought)?;
    let all = group.all_gather_object(&brought)?;
    let resolved = resolve(optimizer, &all)?;
    let mut emission = Emission { parameters, optimizer, local: &local, options, sink, outcome: Ok(()) };
    for handle in &parameters.handles {
        let fqns: BTreeSet<&str> = handle.params.iter().map(|param| param.fqn.as_str()).collect();
        let of_handle = |one: &&Resolved| one.key.unflat_param_names.iter().any(|fqn| fqns.contains(fqn.as_str()));
        let of_handle: Vec<&Resolved> = resolved.iter().filter(of_handle).collect();
        or_abort(group, emission.unit(handle, &of_handle))?;
    }
    let outcome = emission.outcome;
    let rest = outcome.and_then(|()| rest(parameters, &local, options));
    agree(group, OPERATION, rest)
}

pub(crate) fn check_owner(parameters: &ShardedParameters, optimizer: &Optimizer) -> Result<()> {
    match std::ptr::eq(parameters, Arc::as_ptr(optimizer.parameters())) {
        true => Ok(()),
        false => Err(NnError::ForeignOptimizer),
    }
}

/// What goes wrong on one rank while tensors move ends all ranks' operations, with that error's text.
pub(crate) fn or_abort<T>(group: &ProcessGroup, outcome: Result<T>) -> Result<T> {
    if let Err(error) = &outcome
        && !matches!(error, NnError::Comm(_))
    {
        group.abort(error.to_string());
    }
    outcome
}

/// User state and groups.
fn rest(parameters: &ShardedParameters, local: &LocalStateDict<'_>, options: SaveOptions) -> Result<StateDict> {
    let mut rest = StateDict::new();
    if !options.keep.here(parameters) {
        return Ok(rest);
    }
    let mut user_state = StateDict::new();
    for (key, value) in &local.user_state {
        user_state.insert(*key, value.copy()?);
    }
    rest.insert("state", user_state);
    if let Some(groups) = &local.groups {
        rest.insert("param_groups", StateValue::List(groups.iter().map(group_dict).collect()));
    }
    Ok(rest)
}

/// A group as a state dict has it.
pub(crate) fn group_dict(group: &SavedGroup) -> StateValue {
    let hyperparameters = group.hyperparameters.iter().cloned();
    let mut dict: StateDict = hyperparameters.map(|(key, value)| (key, StateValue::Plain(value))).collect();
    let param = |key: &String| match (group.key_type, key.parse()) {
        (Some(OptimStateKeyType::ParamId), Ok(id)) => PlainValue::Int(id),
        _ => PlainValue::Str(key.clone()),
    };
    dict.insert("params", PlainValue::List(group.params.iter().map(param).collect()));
    StateValue::Dict(dict)
}

/// Giving out the values, unit by unit, in an order that all ranks share.
struct Emission<'a> {
    parameters: &'a ShardedParameters,
    optimizer: &'a Optimizer,
    local: &'a LocalStateDict<'a>,
    options: SaveOptions,
    sink: &'a mut Sink<'a>,
    /// The sink's first error; collectives go on after it, so that no rank waits for this one.
    outcome: Result<()>,
}

impl Emission<'_> {
    fn offer(&mut self, fqn: &str, name: &str, value: StateValue) {
        if self.outcome.is_ok() && self.options.keep.here(self.parameters) {
            self.outcome = (self.sink)(fqn, name, value);
        }
    }

    fn unit(&mut self, handle: &FlatParamHandle, resolved: &[&Resolved]) -> Result<()> {
        let mut names: BTreeSet<&str> = BTreeSet::new();
        for one in resolved {
            names.extend(one.states.iter().map(|(name, _)| name.as_str()));
        }
        for name in names {
            let mut dtypes: BTreeSet<DType> = BTreeSet::new();
            for (one, entry) in entries(resolved, name) {
                match entry {
                    Entry::Piece(dtype) => {
                        dtypes.insert(*dtype);
                    }
                    Entry::Scalar(value) => {
                        for fqn in &one.key.unflat_param_names {
                            if let Some(value) = value.scalar()? {
                                self.offer(fqn, name, value);
                            }
                        }
                    }
                    Entry::Whole { dtype, shape, on } => {
                        let tensor = self.whole(one, name, *dtype, shape, on)?;
                        for fqn in &one.key.unflat_param_names {
                            let copy = self.options.keep.place(owned_copy(&tensor)?)?;
                            self.offer(fqn, name, copy.into());
                        }
                    }
                }
            }
            for dtype in dtypes {
                self.pieces(handle, resolved, name, dtype)?;
            }
        }
        Ok(())
    }

    /// One state entry of a unit's parameters that is shaped like them.
    fn pieces(&mut self, handle: &FlatParamHandle, resolved: &[&Resolved], name: &str, dtype: DType) -> Result<()> {
        let position = |fqn: &String| handle.params.iter().position(|param| param.fqn == *fqn);
        let mut wanted = vec![false; handle.params.len()];
        let mut held = Vec::new();
        for (one, entry) in entries(resolved, name) {
            if matches!(entry, Entry::Piece(found) if *found == dtype) {
                one.key.unflat_param_names.iter().filter_map(position).for_each(|param| wanted[param] = true);
                held.push(one);
            }
        }
        let here = self.options.keep.here(self.parameters);
        if !self.options.full {
            for one in held {
                self.boxes(handle, one, name, dtype)?;
            }
            return Ok(());
        }
        if !handle.is_sharded() && !here {
            return Ok(());
        }
        let shard = self.shard(handle, &held, name, dtype)?;
        let whole = gather_flat(self.parameters, handle.layout(), &shard, &wanted, self.options.keep)?;
        drop(shard);
        for (param, tensor) in handle.params.iter().zip(whole.into_iter().flatten()) {
            if let Some(tensor) = tensor {
                let tensor = self.options.keep.place(tensor)?;
                self.offer(&param.fqn, name, tensor.into());
            }
        }
        Ok(())
    }

    /// This rank's tensor of a local parameter's state, if it has any.
    fn tensor(&self, one: &Resolved, name: &str) -> Option<(usize, &Tensor)> {
        let fqn = one.key.unflat_param_names.first()?;
        let index = self.optimizer.local_index(fqn)?;
        let (_, _, state) = self.local.params.iter().find(|(_, local, _)| *local == index)?;
        let tensor = state.get(name)?.as_tensor()?;
        Some((index, tensor)).filter(|_| !self.optimizer.locals()[index].is_empty())
    }

    /// This rank's shard of a flat tensor of one state entry: zeros where no parameter is.
    fn shard(&self, handle: &FlatParamHandle, held: &[&Resolved], name: &str, dtype: DType) -> Result<Tensor> {
        let infos = handle.layout().shard_param_infos(handle.shard_rank());
        let shard = zeros(&[handle.layout().sharded_numel()], dtype::to_candle(dtype)?)?;
        for one in held {
            let Some((index, tensor)) = self.tensor(one, name) else { continue };
            let local = &self.optimizer.locals()[index];
            let flat = tensor.flatten_all()?.force_contiguous()?;
            for segment in local.segments.iter().filter(|segment| segment.len > 0) {
                let Some(info) = infos[segment.param] else { continue };
                let size = flat.dtype().size_in_bytes();
                with_bytes(&flat, |from| {
                    with_bytes_mut(&shard, |to| {
                        let start = info.offset_in_shard * size;
                        let from = &from[segment.start * size..(segment.start + segment.len) * size];
                        to[start..start + from.len()].copy_from_slice(from);
                    })
                })??;
            }
        }
        Ok(shard)
    }

    /// The boxes of a local parameter's state that this rank has, as copies.
    fn boxes(&mut self, handle: &FlatParamHandle, one: &Resolved, name: &str, dtype: DType) -> Result<()> {
        for fqn in &one.key.unflat_param_names {
            let Some(param) = handle.params.iter().position(|param| param.fqn == *fqn) else { continue };
            let shape = &handle.layout().shapes()[param];
            let piece = match self.tensor(one, name) {
                Some((index, tensor)) => {
                    let segment = self.optimizer.locals()[index].segment(param);
                    let flat = tensor.flatten_all()?;
                    (segment.len > 0).then(|| flat.narrow(0, segment.start, segment.len)).transpose()?
                }
                None => None,
            };
            let sharded = match piece {
                Some(piece) => {
                    let boxes = handle.layout().param_boxes(param, handle.shard_rank());
                    let piece = self.options.keep.place(owned_copy(&piece)?)?;
                    ShardedTensor::from_flat(shape, boxes, &piece)?
                }
                None => ShardedTensor::new(dtype::to_candle(dtype)?, shape.clone(), Vec::new())?,
            };
            self.offer(fqn, name, sharded.into());
        }
        Ok(())
    }

    /// A tensor that ranks hold whole; from the first of them where some rank has nothing of the parameter.
    fn whole(&self, one: &Resolved, name: &str, dtype: DType, shape: &[usize], on: &[bool]) -> Result<Tensor> {
        let own = self.tensor(one, name).map(|(_, tensor)| tensor);
        let group = self.parameters.group();
        let root = on.iter().position(|on| *on).unwrap_or(0);
        if on.iter().all(|on| *on) {
            return own.cloned().ok_or_else(|| self.lost(one, name));
        }
        let mut buffer = TensorBuffer::zeros(shape, dtype::to_candle(dtype)?)?;
        if group.rank() == root {
            let own = own.ok_or_else(|| self.lost(one, name))?;
            with_bytes(&own.force_contiguous()?, |bytes| buffer.bytes_mut().copy_from_slice(bytes))?;
        }
        group.broadcast(buffer.bytes_mut(), root)?;
        Ok(buffer.into_tensor())
    }

    fn lost(&self, one: &Resolved, name: &str) -> NnError {
        let fqn = one.key.unflat_param_names.first().cloned().unwrap_or_default();
        OptimStateError::MissingEntry { fqn, name: name.to_owned() }.into()
    }
}

fn entries<'a>(resolved: &'a [&Resolved], name: &'a str) -> impl Iterator<Item = (&'a Resolved, &'a Entry)> {
    resolved.iter().flat_map(move |one| {
        one.states.iter().filter(move |(known, _)| known == name).map(move |(_, entry)| (*one, entry))
    })
}

/// One FlatParameter's local state (`{entry: value}`, as in [`Optimizer::state_dict`]) as the states of its parameters,
/// in their order: torch's `_unflatten_optim_state`. Whole tensors or boxes, and on the ranks, that the settings say;
/// elsewhere empty dicts. Collectives: as [`optim_state_dict`].
///
/// # Errors
/// As [`optim_state_dict`]; [`NnError::NotAFlatParameter`], as every rank's error.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::unflatten_optim_state;
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig { use_orig_params: false, ..FsdpConfig::default() }, |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let local = optimizer.named_state_dict()?;
///     let flat = local.dict("state").unwrap().dict("_flat_param").unwrap();
///     let [weight, bias] = &unflatten_optim_state(parameters, &optimizer, &["weight", "bias"], flat)?[..] else { panic!() };
///     assert_eq!(weight.get("exp_avg").unwrap().as_tensor().unwrap().dims(), [2, 3]);
///     assert_eq!(bias.get("exp_avg").unwrap().as_tensor().unwrap().dims(), [2]);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn unflatten_optim_state(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    fqns: &[impl AsRef<str>],
    flat_state: &StateDict,
) -> Result<Vec<StateDict>> {
    let fqns: Vec<&str> = fqns.iter().map(AsRef::as_ref).collect();
    let local = optimizer.locals().iter().find(|local| local.fqns() == fqns);
    let named = local
        .map(|local| local.name())
        .ok_or_else(|| NnError::NotAFlatParameter { fqns: fqns.iter().map(|fqn| (*fqn).to_owned()).collect() });
    let name = agree(parameters.group(), "unflatten_optim_state", named)?;
    let mut local = StateDict::new();
    local.insert("state", [(name, StateValue::Dict(flat_state.clone()))].into_iter().collect::<StateDict>());
    let mut state = optim_state_dict(parameters, optimizer, Some(&local))?;
    let mut take = |fqn: &str| match state.get_mut("state") {
        Some(StateValue::Dict(states)) => match states.remove(fqn) {
            Some(StateValue::Dict(state)) => state,
            _ => StateDict::new(),
        },
        _ => StateDict::new(),
    };
    Ok(fqns.into_iter().map(&mut take).collect())
}
