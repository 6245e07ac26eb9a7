//! The state of a run, loaded from a checkpoint.

use anyhow::{Result, bail, ensure};
use fsdp::checkpoint::CheckpointError;
use fsdp::formats::metadata::Entry;
use fsdp::prelude::*;
use fsdp::state::StateError;

use super::settings::Resume;
use crate::exit_codes;
use crate::failure::CommandError;
use crate::gpt::Gpt;
use crate::natural;

/// The key of a gradient scaler's scale in a checkpoint.
const SCALE_KEY: &str = "scaler.scale";

/// Returns the parts of a checkpoint that a run loads: the model, and the optimizer if it holds a
/// usable one. If the run in it was in another precision, it holds no scaler. Then this run begins
/// with its own scaler. The run's other values stay as they are.
pub(super) fn parts_to_load(resume: &Resume, has_scaler: bool) -> Vec<String> {
    let mut parts = vec!["model".to_owned()];
    if resume.has_optimizer {
        parts.push("optim".to_owned());
    }
    if has_scaler && resume.checkpoint.metadata().entries.contains_key(SCALE_KEY) {
        parts.push("scaler".to_owned());
    }
    parts
}

/// Loads the [`parts_to_load`] of a checkpoint, to which the checkpointer is limited: each rank
/// reads the bytes that it needs, to where they belong. This is a collective.
///
/// # Errors
/// The same on every rank: the checkpoint of another model, and nothing has been changed then;
/// damaged files.
pub(super) fn restore(
    resume: &Resume,
    checkpointer: &mut Checkpointer,
    run: &mut TrainState<Gpt>,
) -> Result<()> {
    let differences = list_differences(resume, run.model.parameters())?;
    if differences.iter().any(|kind| !kind.is_empty()) {
        bail!(CommandError {
            exit_code: exit_codes::DIFFERENCE,
            message: format!(
                "checkpoint `{}` is of another model: {}",
                resume.path,
                list_text(&differences)
            ),
            hint: Some(
                "leave out `--layers`, `--hidden` and `--seq` to take the checkpoint's, or choose \
                 another `--out`"
            ),
        });
    }
    let report = checkpointer
        .load(&resume.path, run)
        .map_err(without_advice)?;
    // Other programs may save more beside model and optimizer, which is left alone. Nothing that
    // the run needs may be missing.
    ensure!(
        report.missing.is_empty(),
        StateError::Incompatible {
            operation: "resume",
            report,
        }
    );
    Ok(())
}

/// The number of differences of each kind that a message lists.
const MAX_DIFFERENCES: usize = 8;

/// Returns the differences in one line, as messages are, of which only the first of each kind are
/// shown.
fn list_text(differences: &[Vec<String>]) -> String {
    let mut texts = Vec::new();
    for of_kind in differences {
        // A model of another size differs in every tensor, and thousands of them would hide the
        // message.
        let shown = &of_kind[..of_kind.len().min(MAX_DIFFERENCES)];
        texts.extend_from_slice(shown);
        if of_kind.len() > shown.len() {
            texts.push(format!(
                "and {} more of that kind",
                of_kind.len() - shown.len()
            ));
        }
    }
    texts.join("; ")
}

/// Returns the cause of a load that was interrupted: the run ends, so nobody continues with what
/// was loaded partly.
fn without_advice(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::State(StateError::PartlyLoaded { reason, kind, .. }) => {
            StateError::Other {
                message: reason,
                kind,
            }
            .into()
        }
        error => error,
    }
}

/// Returns `true` if a key belongs to a part of a run that is not the model.
fn is_run_key(key: &str) -> bool {
    key.starts_with("optim.") || key.starts_with("train.") || key.starts_with("scaler.")
}

/// Lists the tensors in which the checkpoint's model and this one differ, a text each: those that
/// are otherwise in the checkpoint, those that only this model has, and those that only the
/// checkpoint has.
fn list_differences(resume: &Resume, parameters: &ShardedParameters) -> Result<[Vec<String>; 3]> {
    let entries = &resume.checkpoint.metadata().entries;
    let mut changed = Vec::new();
    let mut missing = Vec::new();
    let mut unknown = Vec::new();
    let names: Vec<&str> = parameters
        .fqns()
        .chain(parameters.aliases().keys().map(String::as_str))
        .collect();
    for &name in &names {
        let shape = parameters.shape(name)?;
        match resume.entry(name) {
            Some(Entry::Tensor(tensor)) if tensor.shape == shape => {}
            Some(Entry::Tensor(tensor)) => {
                changed.push(format!(
                    "`{name}`: checkpoint {:?}, this model {shape:?}",
                    tensor.shape
                ));
            }
            Some(Entry::Bytes(_)) => {
                changed.push(format!("`{name}`: no tensor in the checkpoint"));
            }
            // A tied parameter may be there under another of its names.
            None if parameters.aliases().iter().any(|(alias, tied)| {
                (tied == name && resume.entry(alias).is_some())
                    || (alias == name && resume.entry(tied).is_some())
            }) => {}
            None => missing.push(format!(
                "`{name}`: not in the checkpoint, this model {shape:?}"
            )),
        }
    }
    for (key, entry) in entries {
        if let (Some(name), Entry::Tensor(tensor)) = (key.strip_prefix(resume.model_prefix), entry)
            && !names.contains(&name)
            && !(resume.model_prefix.is_empty() && is_run_key(name))
        {
            unknown.push(format!(
                "`{name}`: checkpoint {:?}, not in this model",
                tensor.shape
            ));
        }
    }
    let mut differences = [changed, missing, unknown];
    for of_kind in &mut differences {
        of_kind.sort_by(natural::compare);
    }
    Ok(differences)
}
