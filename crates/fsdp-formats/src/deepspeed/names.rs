//! The names of DeepSpeed's files.

use crate::error::FormatError;
use crate::limits::MAX_RANKS;

/// The end of the name of a file of model states.
pub(super) const MODEL_END: &str = "_model_states.pt";
/// The end of the name of a file of a rank's optimizer states.
pub(super) const OPTIM_END: &str = "_optim_states.pt";

/// Returns `true` if a directory with these entries is a DeepSpeed checkpoint.
pub(crate) fn is_there(names: &[String]) -> bool {
    names
        .iter()
        .any(|name| is_model(name) || is_optimizer(name))
}

/// Returns `true` for the name of a file of model states. Hidden files, which macOS leaves on
/// foreign disks, are none.
pub(super) fn is_model(name: &str) -> bool {
    name.ends_with(MODEL_END) && !name.starts_with('.')
}

/// Returns `true` for the name of a file of optimizer states.
pub(super) fn is_optimizer(name: &str) -> bool {
    name.ends_with(OPTIM_END) && !name.starts_with('.')
}

/// Returns the start of a file's name that tells the precision of the training; it is empty if the
/// name tells none.
pub(super) fn precision(name: &str) -> &'static str {
    ["bf16_", "fp16_"]
        .into_iter()
        .find(|start| name.starts_with(start))
        .unwrap_or("")
}

/// Returns the data-parallel rank in a file's name; `None` if the file is not one of ZeRO's shards.
/// Tensor parallelism, pipeline stages and experts are not supported, and an error.
pub(super) fn data_rank(name: &str) -> Result<Option<usize>, FormatError> {
    let without_end = name
        .strip_suffix(MODEL_END)
        .or_else(|| name.strip_suffix(OPTIM_END))
        .unwrap_or(name);
    let stem = &without_end[precision(without_end).len()..];
    // `None` stands for a name that does not read like this, as those of pipeline stages.
    let ranks = match stem
        .strip_prefix("zero_pp_rank_")
        .and_then(|numbers| numbers.split_once("_mp_rank_"))
    {
        Some((data_rank, model_rank)) => data_rank
            .parse()
            .ok()
            .filter(|rank| *rank < MAX_RANKS)
            .map(Some)
            .zip(model_rank.parse::<usize>().ok()),
        None => stem
            .strip_prefix("mp_rank_")
            .and_then(|model_rank| Some((None, model_rank.parse().ok()?))),
    };
    match ranks {
        Some((data_rank, 0)) => Ok(data_rank),
        Some(_) => Err(FormatError::unsupported(
            "a checkpoint of DeepSpeed with tensor parallelism",
        )),
        None => Err(FormatError::unsupported(
            "a checkpoint of DeepSpeed with pipeline stages or experts",
        )),
    }
}
