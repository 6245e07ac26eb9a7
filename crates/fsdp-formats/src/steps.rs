//! The checkpoints in a run's folder, by the names that trainers give them. All commands on runs
//! have their checkpoints from here.

use std::path::Path;

use crate::error::FileError;
use crate::metadata::METADATA_FILE;
use crate::rank_files;
use crate::storage::cleanup::targets_with_leftovers;
use crate::storage::location::Location;

/// A checkpoint of a run, known by its name only. It was not opened.
#[derive(Debug, Clone)]
pub struct StepOfRun {
    /// Its step, or its epoch, from its name.
    pub step: u64,
    /// The word that says what the number in its name counts: `step`, `checkpoint`, `epoch` and so
    /// on, or whatever stands before the number.
    pub counts: String,
    /// Its name in the folder.
    pub name: String,
    /// Its place.
    pub path: Location,
}

/// The folders in which trainers put their checkpoints, below the one that a user names.
const SUBFOLDERS: [&str; 4] = ["", "checkpoint", "checkpoints", "outputs/checkpoint"];

/// The words before the number in the name of a checkpoint.
const WORDS: [&str; 6] = ["step", "checkpoint", "iter", "iteration", "epoch", "ckpt"];

/// The endings of the names of files with a checkpoint in them.
const ENDINGS: [&str; 6] = [".ckpt", ".pt", ".pth", ".pth.tar", ".bin", ".safetensors"];

/// The endings of the names of files beside checkpoints, and of what was never finished.
const OTHER_ENDINGS: [&str; 9] = [
    ".integrity",
    ".sig",
    ".json",
    ".yaml",
    ".txt",
    ".log",
    ".lock",
    ".tmp",
    ".incomplete",
];

/// Returns the checkpoints of a run by their steps, the oldest first: `step-40`, `checkpoint-40`,
/// `checkpoint_3`, `global_step40`, `iter_0000040`, `epoch=1-step=40.ckpt`, and their like; and all
/// DCP directories whose names end with a number. They are in the folder itself, or below
/// `checkpoint`, `checkpoints` or `outputs/checkpoint`.
///
/// # Errors
/// A folder that cannot be listed.
pub fn list_steps(run: impl Into<Location>) -> Result<Vec<StepOfRun>, FileError> {
    let run = run.into();
    for subfolder in SUBFOLDERS {
        let folder = if subfolder.is_empty() {
            run.clone()
        } else {
            run.join(subfolder)
        };
        let names = match folder.names() {
            Err(error) if !subfolder.is_empty() && error.is_absence() => continue,
            names => names?,
        };
        // In a checkpoint of one file for each item and rank, an item may be called `step`.
        let files_of_ranks = rank_files::find_files_of_ranks(&names);
        let mut steps = Vec::new();
        for name in &names {
            if files_of_ranks.contains(name.as_str()) {
                continue;
            }
            let path = folder.join(name);
            let found = match step_of(name) {
                None => step_of_directory(&path, name)?,
                found => found,
            };
            if let Some((counts, step)) = found {
                let counts = counts.to_owned();
                steps.push(StepOfRun {
                    step,
                    counts,
                    name: name.clone(),
                    path,
                });
            }
        }
        // The first folder that has any is the one: others may be of another run.
        if !steps.is_empty() {
            steps.sort_by(|a, b| (a.step, &a.name).cmp(&(b.step, &b.name)));
            return Ok(steps);
        }
    }
    Ok(Vec::new())
}

/// Returns the places in a run's folder beside which saves or removals have something, as
/// [`targets_with_leftovers`] finds them, up to the step of `newest`, a checkpoint of the run. A
/// save in progress may be among them, though usually of a later step.
///
/// # Errors
/// A folder that cannot be listed.
pub fn steps_with_leftovers(newest: &StepOfRun) -> Result<Vec<Location>, FileError> {
    let (folder, _) = newest.path.split()?;
    let mut found = Vec::new();
    for name in targets_with_leftovers(&folder)? {
        // What is left of a DCP directory may not show that it was one, so the name has to do.
        let counted = match step_of(&name) {
            None => split_number(&name),
            counted => counted,
        };
        if counted.is_some_and(|(counts, step)| counts == newest.counts && step <= newest.step) {
            found.push(folder.join(&name));
        }
    }
    Ok(found)
}

/// Returns the step in the name of a checkpoint, and the word that says what it counts; `None` for
/// a name that says nothing of this.
fn step_of(name: &str) -> Option<(&'static str, u64)> {
    if is_beside_checkpoints(name) {
        return None;
    }
    let stem = ENDINGS.iter().find_map(|ending| name.strip_suffix(ending));
    let stem = stem.unwrap_or(name).to_ascii_lowercase();
    // Lightning's names have several numbers, and others after them: a metric, or the number of a
    // copy.
    for word in ["step", "epoch"] {
        if let Some((_, number)) = stem.rsplit_once(&format!("{word}=")) {
            let end = number.find(|character: char| !character.is_ascii_digit());
            let digits = &number[..end.unwrap_or(number.len())];
            return Some((word, digits.parse().ok()?));
        }
    }
    let stem = stem.strip_suffix("-ckpt").unwrap_or(&stem);
    let (before, step) = split_number(stem)?;
    WORDS
        .into_iter()
        .find(|word| before.ends_with(word))
        .map(|word| (word, step))
}

/// Returns `true` for the name of what lies beside checkpoints, or was never finished.
fn is_beside_checkpoints(name: &str) -> bool {
    // Trainers write `tmp-checkpoint-500`, and rename it once it is whole.
    const STARTS: [&str; 3] = [".", "tmp-", "tmp_"];
    STARTS.iter().any(|start| name.starts_with(start))
        || OTHER_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns the step in the name of a directory that does not say what it counts, and what stands
/// before it; `None` if the name has none, or the directory is no DCP directory. A link is another
/// name of a checkpoint, and no checkpoint itself.
fn step_of_directory<'n>(
    path: &Location,
    name: &'n str,
) -> Result<Option<(&'n str, u64)>, FileError> {
    let found = split_number(name).filter(|_| !is_beside_checkpoints(name));
    if found.is_none()
        || path.local().is_some_and(Path::is_symlink)
        || !path.join(METADATA_FILE).is_file()?
    {
        return Ok(None);
    }
    Ok(found)
}

/// Splits the number off the end of a name. Returns what is before it, without the separator;
/// `None` without a number, or with one that is no step.
fn split_number(name: &str) -> Option<(&str, u64)> {
    let before = name.trim_end_matches(|character: char| character.is_ascii_digit());
    // Without digits, or with too many, there is no step.
    let step = name[before.len()..].parse().ok()?;
    Some((before.trim_end_matches(['-', '_', '=', '.']), step))
}

/// Returns the step in the name of a checkpoint if the name says that its number counts steps;
/// `None` for any other name.
#[must_use]
pub fn step_in_name(name: &str) -> Option<u64> {
    step_of(name)
        .filter(|(counts, _)| *counts == "step")
        .map(|(_, step)| step)
}

/// Returns the name that a run of this project gives to the checkpoint of a step: `step-00000020`.
#[must_use]
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_trainers_have_steps_and_others_none() {
        for (name, step) in [
            ("step-00000020", Some(20)),
            ("step_7", Some(7)),
            ("checkpoint-10", Some(10)),
            ("checkpoint_3", Some(3)),
            ("iteration_4", Some(4)),
            ("global_step40", Some(40)),
            ("iter_0000040", Some(40)),
            ("epoch=3-step=40.ckpt", Some(40)),
            ("dist_epoch_0", Some(0)),
            (".step-20.tmp-0011223344556677", None),
            ("model-00001-of-00002.safetensors", None),
            ("optimizer_0", None),
            ("step-", None),
            ("step-99999999999999999999999", None),
            ("last.ckpt", None),
            ("epoch=3-step=40-v1.ckpt", Some(40)),
            ("epoch=3-step=40-last", Some(40)),
            ("epoch=02-val_loss=0.32.ckpt", Some(2)),
            ("step=.ckpt", None),
            ("checkpoint_12.pth.tar", Some(12)),
            ("iter-000500-ckpt.pth", Some(500)),
            ("Epoch_3.pt", Some(3)),
            ("pytorch_model_fsdp_0", None),
            ("dcp-100", None),
            ("global_step40_universal", None),
            ("tmp-checkpoint-500", None),
            ("epoch=3-step=40.ckpt.integrity", None),
            ("epoch=3-step=40.values.json", None),
            ("epoch=3-step=40.ckpt.tmp", None),
        ] {
            assert_eq!(step_of(name).map(|(_, step)| step), step, "{name}");
        }
    }
}
