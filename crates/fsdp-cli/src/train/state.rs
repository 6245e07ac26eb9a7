//! A run's state in checkpoints: `{"model", "optim", "train"}`.

use anyhow::Result;
use fsdp::checkpoint::in_place::read_in_place;
use fsdp::checkpoint::{CheckpointError, get_model_state_dict, init_optimizer_state, optimizer_template};
use fsdp::dcp::metadata::Entry;
use fsdp::prelude::*;

use super::settings::{Resume, Settings};
use crate::job_failure::OtherModel;

/// The options for views of the live values: nothing is copied.
fn views() -> StateDictOptions {
    StateDictOptions { share_storage: true, ..StateDictOptions::default() }
}

/// Returns the state after `step` steps, as it is saved: views of this rank's shards.
///
/// # Errors
/// Those of [`get_state_dict`].
pub(super) fn state(
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    settings: &Settings,
    step: u64,
) -> Result<StateDict> {
    let (model, optim) = get_state_dict(parameters, &[optimizer], &views())?;
    let mut state = StateDict::new();
    state.insert("model", model);
    state.insert("optim", optim);
    state.insert("train", settings.state(step));
    Ok(state)
}

/// Loads model and optimizer (if there is one) from an open checkpoint: each rank reads the bytes that it needs, to where
/// they belong.
///
/// # Errors
/// [`OtherModel`], the same on every rank, and nothing has been changed then; damaged files.
pub(super) fn restore(resume: &Resume, parameters: &ShardedParameters, optimizer: &mut Optimizer) -> Result<()> {
    let differences = differences(resume, parameters)?;
    if !differences.is_empty() {
        return Err(OtherModel { path: resume.path.to_string(), differences }.into());
    }
    let read = read(resume, parameters, optimizer);
    // A rank's own error says most; the others hear which rank failed, and why.
    let group = parameters.group().with_deadline_at_least(LoadOptions::default().deadline);
    let agreed = group.agree("resume", read.as_ref().map(|_| ()));
    let (model, optim) = read?;
    agreed?;
    let optimizers: &mut [&mut Optimizer] = if resume.optimizer { &mut [optimizer] } else { &mut [] };
    set_state_dict(parameters, optimizers, &model, &optim, &StateDictOptions::default())?;
    Ok(())
}

/// Reads what this rank needs of model and optimizer into their memory; what comes back are views of it, and the values
/// that are no tensors.
fn read(
    resume: &Resume,
    parameters: &ShardedParameters,
    optimizer: &mut Optimizer,
) -> Result<(StateDict, StateDict), CheckpointError> {
    let checkpoint = &*resume.checkpoint;
    let mut state = StateDict::new();
    for (name, value) in get_model_state_dict(parameters, &views())? {
        // Of a tied parameter's names one is enough.
        let key = format!("{}{name}", resume.model);
        if checkpoint.metadata().entries.contains_key(&key) {
            state.insert(key, value);
        }
    }
    if resume.optimizer {
        init_optimizer_state(checkpoint, &["optim"], &mut [optimizer])?;
        state.insert("optim", optimizer_template(checkpoint, &["optim"], &[optimizer])?);
    }
    read_in_place(checkpoint, &mut state, &LoadOptions::default()).map_err(|error| match error {
        // The run ends, so nobody goes on with what was loaded partly.
        CheckpointError::PartlyLoaded { source } => *source,
        error => error,
    })?;
    let optim = if resume.optimizer { state.remove("optim") } else { None };
    let optim = optim.as_ref().and_then(StateValue::as_dict).cloned().unwrap_or_default();
    let model = state.into_iter().map(|(key, value)| (key[resume.model.len()..].to_owned(), value)).collect();
    Ok((model, optim))
}

/// Returns `true` if a key belongs to a part of a run that is not the model.
fn is_of_run(key: &str) -> bool {
    key.starts_with("optim.") || key.starts_with("train.")
}

/// Lists the tensors in which the checkpoint's model and this one differ, a line each.
fn differences(resume: &Resume, parameters: &ShardedParameters) -> Result<Vec<String>> {
    let entries = &resume.checkpoint.metadata().entries;
    let entry = |name: &str| entries.get(&format!("{}{name}", resume.model));
    let mut lines = Vec::new();
    let names: Vec<&str> = parameters.fqns().chain(parameters.aliases().keys().map(String::as_str)).collect();
    for &name in &names {
        let shape = parameters.shape(name)?;
        match entry(name) {
            Some(Entry::Tensor(tensor)) if tensor.shape == shape => {}
            Some(Entry::Tensor(tensor)) => {
                lines.push(format!("`{name}`: checkpoint {:?}, this model {shape:?}", tensor.shape));
            }
            Some(Entry::Bytes(_)) => lines.push(format!("`{name}`: no tensor in the checkpoint")),
            // A tied parameter may be there under another of its names.
            None if parameters.aliases().iter().any(|(alias, tied)| {
                (tied == name && entry(alias).is_some()) || (alias == name && entry(tied).is_some())
            }) => {}
            None => lines.push(format!("`{name}`: not in the checkpoint, this model {shape:?}")),
        }
    }
    for (key, entry) in entries {
        if let (Some(name), Entry::Tensor(tensor)) = (key.strip_prefix(resume.model), entry)
            && !names.contains(&name)
            && !(resume.model.is_empty() && is_of_run(name))
        {
            lines.push(format!("`{name}`: checkpoint {:?}, not in this model", tensor.shape));
        }
    }
    lines.sort_by(|a, b| natord::compare(a, b));
    Ok(lines)
}
