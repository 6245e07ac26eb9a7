//! What to ask of a checkpoint for an optimizer: the state that was saved, in the boxes that this rank owns.

use std::collections::HashSet;

use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_dcp::metadata::Entry;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_nn::Optimizer;
use fsdp_state::{FlatStateDict, StateDict, StateValue, unflatten_state_dict};

use crate::CheckpointError;

/// A template for [`load`](crate::load()) or [`load_in_place`](crate::load_in_place) of the optimizer state that a
/// checkpoint holds under `prefix` (the keys that lead to `{"state", "param_groups"}`), for the parameters of
/// `optimizers`.
///
/// Unlike a state dict of the live optimizer, it has exactly what was saved: state that begins with the first step
/// (momentum), groups of whatever number. Tensors shaped like their parameter are asked for in this rank's boxes: views of
/// the live state where there is such an entry (see [`init_optimizer_state`]), zeros elsewhere.
/// In formats of flat keys (safetensors), the parameters' names tell where the parts of a key end. No communication.
///
/// # Errors
/// Dtypes that candle does not have, for sharded state.
pub fn optimizer_template(
    checkpoint: &dyn Checkpoint,
    prefix: &[&str],
    optimizers: &[&Optimizer],
) -> Result<StateDict, CheckpointError> {
    let mut flat = FlatStateDict::default();
    for (fqn, inner, entry) in saved(checkpoint, prefix, optimizers) {
        let value = match entry {
            Entry::Bytes(_) => StateValue::Plain(PlainValue::None),
            Entry::Tensor(tensor) => match owner(&inner, optimizers) {
                // The step of a parameter without dimensions is shaped like it, and yet no piece of it.
                Some((optimizer, name, entry))
                    if optimizer.parameters().shape(name)? == tensor.shape
                        && !optimizer.is_scalar_state(name, entry) =>
                {
                    let dtype = fsdp_flat::dtype::to_candle(tensor.properties.dtype)?;
                    let live = optimizer.state_of(name)?.and_then(|mut state| state.swap_remove(entry));
                    match live {
                        Some(StateValue::Sharded(live)) if live.dtype() == dtype => StateValue::Sharded(live),
                        _ => {
                            let boxes = optimizer.parameters().boxes(name)?;
                            StateValue::Sharded(ShardedTensor::zeros(dtype, &tensor.shape, &boxes)?)
                        }
                    }
                }
                _ => crate::load::empty_tensor(&tensor.shape, tensor.properties.dtype)?,
            },
        };
        flat.values.insert(fqn.to_owned(), value);
        flat.paths.insert(fqn.to_owned(), KeyPath(inner));
    }
    let mut template = unflatten_state_dict(flat)?;
    // A never-stepped optimizer saves no state, and an empty dict leaves no trace in a checkpoint.
    if !template.is_empty() && !template.contains_key("state") {
        template.insert("state", StateDict::new());
    }
    Ok(template)
}

/// Gives optimizers that have not stepped yet room for the state that a checkpoint holds under `prefix`, so that
/// [`load_in_place`](crate::load_in_place) can read it to where it belongs: zeros, of those entries of their algorithm that
/// were saved ([`Optimizer::init_state`]). Parameters that have state keep it. No communication.
///
/// The way to resume that needs no memory beyond model and optimizer:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, linear};
/// use fsdp_checkpoint::{
///     CheckpointError, LoadOptions, SaveOptions, StateDictOptions, get_model_state_dict, get_state_dict,
///     init_optimizer_state, load_in_place, optimizer_template, save, set_optimizer_state_dict,
/// };
/// use fsdp_comm::ProcessGroup;
/// use fsdp_dcp::reader::CheckpointReader;
/// use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// use fsdp_state::StateDict;
///
/// let build = |group: &ProcessGroup| -> Result<(FullyShardedDataParallel<Linear>, Optimizer), CheckpointError> {
///     let config = FsdpConfig::default();
///     let model = FullyShardedDataParallel::new(group.clone(), config, |scope| linear(3, 2, scope.vb()))?;
///     let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
///     Ok((model, optimizer))
/// };
/// let views = StateDictOptions { share_storage: true, ..StateDictOptions::default() };
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("step-00000001");
/// let outcomes = fsdp_comm::run_local(2, |group| {
///     let (model, mut optimizer) = build(&group)?;
///     let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
///     model.backward(&model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?)?;
///     optimizer.step()?;
///     let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &views)?;
///     let state: StateDict = [("model", m.into()), ("optim", o.into())].into_iter().collect();
///     save(path.as_path(), &state, &group, &SaveOptions::default())?;
///
///     let (model, mut optimizer) = build(&group)?;
///     let checkpoint = CheckpointReader::open(&path)?;
///     init_optimizer_state(&checkpoint, &["optim"], &mut [&mut optimizer])?;
///     let m = get_model_state_dict(model.parameters(), &views)?;
///     let o = optimizer_template(&checkpoint, &["optim"], &[&optimizer])?;
///     let mut state: StateDict = [("model", m.into()), ("optim", o.into())].into_iter().collect();
///     load_in_place(path.as_path(), &mut state, &group, &LoadOptions::default())?;
///     // Steps and hyperparameters; the tensors are where they should be, and are not copied.
///     let optim = state.dict("optim").cloned().unwrap_or_default();
///     set_optimizer_state_dict(model.parameters(), &mut [&mut optimizer], &optim, &StateDictOptions::default())?;
///     let step = optimizer.state_of("weight")?.and_then(|mut state| state.swap_remove("step"));
///     assert_eq!(step.unwrap().as_tensor().unwrap().to_scalar::<f32>()?, 1.0);
///     Ok::<(), CheckpointError>(())
/// })?;
/// outcomes.into_iter().collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// candle's.
pub fn init_optimizer_state(
    checkpoint: &dyn Checkpoint,
    prefix: &[&str],
    optimizers: &mut [&mut Optimizer],
) -> Result<(), CheckpointError> {
    let held: Vec<&Optimizer> = optimizers.iter().map(|optimizer| &**optimizer).collect();
    let mut found: HashSet<(String, String)> = HashSet::new();
    for (_, inner, _) in saved(checkpoint, prefix, &held) {
        if let Some((optimizer, name, entry)) = owner(&inner, &held) {
            found.insert((optimizer.parameters().canonical_fqn(name).to_owned(), entry.to_owned()));
        }
    }
    for optimizer in optimizers {
        optimizer.init_state(|fqn, entry| found.contains(&(fqn.to_owned(), entry.name.to_owned())))?;
    }
    Ok(())
}

/// What a checkpoint holds under `prefix`: its key, the parts of it below `prefix`, and what it is.
fn saved<'a>(
    checkpoint: &'a dyn Checkpoint,
    prefix: &'a [&str],
    optimizers: &'a [&Optimizer],
) -> impl Iterator<Item = (&'a str, Vec<PathPart>, &'a Entry)> {
    let metadata = checkpoint.metadata();
    let flat_prefix: String = prefix.iter().map(|key| format!("{key}.")).collect();
    metadata.entries.iter().filter_map(move |(fqn, entry)| {
        let inner = match &metadata.planner_data {
            Some(paths) => paths.get(fqn).and_then(|path| strip(path, prefix)).map(<[PathPart]>::to_vec),
            None => fqn.strip_prefix(&flat_prefix).and_then(|key| parse(key, optimizers)),
        };
        Some((fqn.as_str(), inner?, entry))
    })
}

/// The path below `prefix`.
fn strip<'a>(path: &'a KeyPath, prefix: &[&str]) -> Option<&'a [PathPart]> {
    let (start, inner) = path.0.split_at_checked(prefix.len())?;
    let same = start.iter().zip(prefix).all(|(part, key)| matches!(part, PathPart::Key(part) if part == key));
    (same && !inner.is_empty()).then_some(inner)
}

/// The parts of a flat key: `state.<fqn>.<name>` or `param_groups.<index>.<hyperparameter>`, where both names have dots.
fn parse(key: &str, optimizers: &[&Optimizer]) -> Option<Vec<PathPart>> {
    let part = |key: &str| PathPart::Key(key.to_owned());
    if let Some(state) = key.strip_prefix("state.") {
        // The longest name, if one parameter's begins another's.
        let fqns = optimizers.iter().flat_map(|optimizer| optimizer.fqns());
        let names = fqns.filter_map(|fqn| Some((fqn, state.strip_prefix(fqn)?.strip_prefix('.')?)));
        let (fqn, name) = names.max_by_key(|(fqn, _)| fqn.len())?;
        return Some(vec![part("state"), part(fqn), part(name)]);
    }
    let (index, hyperparameter) = key.strip_prefix("param_groups.")?.split_once('.')?;
    Some(vec![part("param_groups"), PathPart::Index(index.parse().ok()?), part(hyperparameter)])
}

/// The optimizer that holds the parameter of `state.<fqn>.<name>`, the parameter, and the name.
fn owner<'a>(inner: &'a [PathPart], optimizers: &[&'a Optimizer]) -> Option<(&'a Optimizer, &'a str, &'a str)> {
    match inner {
        [PathPart::Key(state), PathPart::Key(fqn), PathPart::Key(name), ..] if state == "state" => {
            let optimizer = optimizers.iter().find(|optimizer| optimizer.holds(fqn))?;
            Some((optimizer, fqn, name))
        }
        _ => None,
    }
}
