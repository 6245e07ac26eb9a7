//! The checkpoints in a run's folder, by the names that trainers give them.

use crate::error::FileError;
use crate::storage::location::Location;

/// A checkpoint of a run, known by its name only. It was not opened.
#[derive(Debug, Clone)]
pub struct StepOfRun {
    /// Its step, or its epoch, from its name.
    pub step: u64,
    /// The word before the number in its name: `step`, `checkpoint`, `epoch` and so on.
    pub counts: &'static str,
    /// Its name in the folder.
    pub name: String,
    /// Its place.
    pub path: Location,
}

/// The folders in which trainers put their checkpoints, below the one that a user names.
const SUBFOLDERS: [&str; 4] = ["", "checkpoint", "checkpoints", "outputs/checkpoint"];

/// The words before the number in the name of a checkpoint.
const WORDS: [&str; 5] = ["step", "checkpoint", "iter", "epoch", "ckpt"];

/// Returns the checkpoints of a run by their steps, the oldest first: `step-40`, `checkpoint-40`,
/// `checkpoint_3`, `global_step40`, `iter_0000040`, `epoch=1-step=40.ckpt`, and their like. They
/// are in the folder itself, or below `checkpoint`, `checkpoints` or `outputs/checkpoint`.
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
        let mut steps: Vec<StepOfRun> = names
            .into_iter()
            .filter_map(|name| {
                let (counts, step) = step_of(&name)?;
                Some(StepOfRun {
                    step,
                    counts,
                    path: folder.join(&name),
                    name,
                })
            })
            .collect();
        // The first folder that has any is the one: others may be of another run.
        if !steps.is_empty() {
            steps.sort_by(|a, b| (a.step, &a.name).cmp(&(b.step, &b.name)));
            return Ok(steps);
        }
    }
    Ok(Vec::new())
}

/// Returns the step in the name of a checkpoint, and the word before it; `None` for any other name.
pub(crate) fn step_of(name: &str) -> Option<(&'static str, u64)> {
    if name.starts_with('.') {
        return None;
    }
    let stem = [".ckpt", ".pt", ".pth", ".safetensors"]
        .iter()
        .find_map(|extension| name.strip_suffix(extension))
        .unwrap_or(name);
    let without_digits = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    // Without digits, or with too many, there is no step.
    let step = stem[without_digits.len()..].parse().ok()?;
    let word_in_name = without_digits.trim_end_matches(['-', '_', '=']);
    WORDS
        .into_iter()
        .find(|step_word| word_in_name.ends_with(step_word))
        .map(|step_word| (step_word, step))
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
            ("global_step40_universal", None),
        ] {
            assert_eq!(step_of(name).map(|(_, step)| step), step, "{name}");
        }
    }
}
