//! A run's state in checkpoints: `{"model", "optim", "train"}`.

use std::path::Path;

use anyhow::Result;
use fsdp::checkpoint::load::read_template;
use fsdp::checkpoint::{SaveReport, optimizer_template};
use fsdp::dcp::durable;
use fsdp::dcp::metadata::Entry;
use fsdp::prelude::*;

use super::settings::{Resume, Settings};
use crate::cli::failure::OtherModel;

/// Views of the live values: nothing is copied.
fn views() -> StateDictOptions {
    StateDictOptions { share_storage: true, ..StateDictOptions::default() }
}

/// Saves the state after `step` steps. Every rank writes its own shards.
///
/// # Errors
/// Those of [`save`].
pub(super) fn save_state(
    path: &Path,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
    settings: &Settings,
    step: u64,
) -> Result<SaveReport> {
    if parameters.group().rank() == 0 {
        // What a killed run left of this very checkpoint.
        durable::clean_stale(path)?;
    }
    let (model, optim) = get_state_dict(parameters, &[optimizer], &views())?;
    let mut state = StateDict::new();
    state.insert("model", model);
    state.insert("optim", optim);
    state.insert("train", settings.state(step));
    Ok(save(path, &state, parameters.group(), &SaveOptions::default())?)
}

/// Loads model and optimizer (if there is one) from an open checkpoint: each rank reads the bytes that it needs.
///
/// # Errors
/// [`OtherModel`], the same on every rank; damaged files. Nothing has been changed then.
pub(super) fn restore(resume: &Resume, parameters: &ShardedParameters, optimizer: &mut Optimizer) -> Result<()> {
    let differences = differences(resume, parameters)?;
    if !differences.is_empty() {
        return Err(OtherModel { path: resume.path.display().to_string(), differences }.into());
    }
    let mut template = StateDict::new();
    let (model, _) = get_state_dict(parameters, &[], &views())?;
    template.insert("model", model);
    if resume.optimizer {
        template.insert("optim", optimizer_template(&resume.path, &["optim"], &[optimizer])?);
    }
    let read = read_template(&resume.reader, &template, &LoadOptions::default());
    // A rank's own error says most; the others hear which rank failed, and why.
    let agreed = parameters.group().agree("resume", read.as_ref().map(|_| ()));
    let (state, _) = read?;
    agreed?;
    let part = |key: &str| state.dict(key).cloned().unwrap_or_default();
    let optimizers: &mut [&mut Optimizer] = if resume.optimizer { &mut [optimizer] } else { &mut [] };
    set_state_dict(parameters, optimizers, &part("model"), &part("optim"), &StateDictOptions::default())?;
    Ok(())
}

/// Every tensor in which the checkpoint's model and this one differ, a line each.
fn differences(resume: &Resume, parameters: &ShardedParameters) -> Result<Vec<String>> {
    const PREFIX: &str = "model.";
    let entries = &resume.reader.metadata().entries;
    let mut lines = Vec::new();
    let names: Vec<&str> = parameters.fqns().chain(parameters.aliases().keys().map(String::as_str)).collect();
    for &name in &names {
        let shape = parameters.shape(name)?;
        match entries.get(&format!("{PREFIX}{name}")) {
            Some(Entry::Tensor(tensor)) if tensor.shape == shape => {}
            Some(Entry::Tensor(tensor)) => {
                lines.push(format!("`{name}`: checkpoint {:?}, this model {shape:?}", tensor.shape));
            }
            Some(Entry::Bytes(_)) => lines.push(format!("`{name}`: no tensor in the checkpoint")),
            None => lines.push(format!("`{name}`: not in the checkpoint, this model {shape:?}")),
        }
    }
    for (key, entry) in entries {
        if let (Some(name), Entry::Tensor(tensor)) = (key.strip_prefix(PREFIX), entry)
            && !names.contains(&name)
        {
            lines.push(format!("`{name}`: checkpoint {:?}, not in this model", tensor.shape));
        }
    }
    lines.sort_by(|a, b| natord::compare(a, b));
    Ok(lines)
}
