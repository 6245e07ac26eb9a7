//! The errors of jobs (`fsdp train` and `fsdp launch`), each with its exit code and a hint.

use std::io;

use anyhow::Error;
use fsdp::checkpoint::{CheckpointError, Location};
use fsdp::comm::CommError;
use fsdp::layout::ErrorKind;
use fsdp::nn::NnError;
use fsdp::state::StateError;

use crate::data::DataError;
use crate::exit_codes;
use crate::failure::kind_as;
use crate::gpt::GptConfigError;

/// A job that cannot be started as asked. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JobError {
    #[error("`{directory}` already holds a checkpoint, of step {step}")]
    OutIsTaken { directory: String, step: u64 },
    #[error(
        "the run in `{directory}` has saved its checkpoints in another place, the last one as `{place}`"
    )]
    SavedElsewhere { directory: String, place: String },
    #[error("another run uses `{directory}` now")]
    OutInUse { directory: String },
    #[error("`{option}` cannot change from {saved} to {asked} on resume")]
    Changed {
        option: &'static str,
        saved: String,
        asked: String,
    },
    #[error(
        "the learning rate falls to 0 after {schedule} steps, so the last of {steps} steps would train nothing"
    )]
    AfterSchedule { steps: u64, schedule: u64 },
    #[error("`--strategy hybrid-shard` cannot divide {ranks} ranks into {replicas} equal replicas")]
    Replicas { replicas: usize, ranks: usize },
    #[error("this is node {node_rank}, but nodes are numbered from 0, and there are {nnodes}")]
    NodeRank { node_rank: usize, nnodes: usize },
    #[error("{nproc} processes on each of {nnodes} nodes are more than {max} ranks")]
    WorldSize {
        nproc: usize,
        nnodes: usize,
        max: usize,
    },
    #[error("the number of processes can change only on one node, and there are {nnodes}")]
    ElasticNodes { nnodes: usize },
    #[error("{nnodes} nodes need the address of node 0")]
    MasterAddr { nnodes: usize },
    #[error("the ranks of {nnodes} nodes need a secret, by which they recognize each other")]
    Secret { nnodes: usize },
    #[error(
        "without a secret, the ranks of {nnodes} nodes know each other by the name of the job only, which has none"
    )]
    JobName { nnodes: usize },
    #[error("failed to start `{program}`")]
    Program { program: String, source: io::Error },
    #[error("`--nproc` is {nproc}, but the launcher has started {world_size} ranks")]
    Nproc { nproc: usize, world_size: usize },
    #[error("`--backend nccl` moves GPU memory, so it cannot be used with `--device cpu`")]
    NcclOnCpus,
    #[cfg(feature = "cuda")]
    #[error("no GPU can be used: {reason}")]
    NoGpu { reason: String },
    #[cfg(not(feature = "cuda"))]
    #[error("this build computes on CPUs only")]
    NoCuda,
}

impl JobError {
    /// Returns the hint that is printed below the error.
    const fn hint(&self) -> &'static str {
        match self {
            JobError::OutIsTaken { .. } => {
                "continue from it with `--resume`, or choose another `--out`"
            }
            JobError::SavedElsewhere { .. } => {
                "continue it with `--resume` and the `--checkpoint-dir` that it had, or choose another `--out`"
            }
            JobError::OutInUse { .. } => {
                "wait until it ends, or choose another directory. If its host has died and the lock has stayed, rename \
                 `events.jsonl` and copy it back under its name: the lock stays with the old file"
            }
            JobError::Changed { .. } => {
                "leave the option out, or start a new run in another `--out`"
            }
            JobError::AfterSchedule { .. } => {
                "make the schedule longer with `--schedule-steps`, or use `--schedule constant`"
            }
            JobError::Replicas { .. } => "change `--replicas` or `--nproc`",
            JobError::NodeRank { .. } => "give each node its own `--node-rank`",
            JobError::WorldSize { .. } => "start fewer processes with `--nproc` or `--nnodes`",
            JobError::ElasticNodes { .. } => "give `--nproc` one number",
            JobError::MasterAddr { .. } => "name it with `--master-addr`, the same on all nodes",
            JobError::Secret { .. } => {
                "set FSDP_SECRET to the same random text on all nodes (`openssl rand -hex 32` makes one), or trust \
                 everybody in the network with `--insecure`"
            }
            JobError::JobName { .. } => {
                "give all nodes the same new `--job-id`, or the same FSDP_SECRET"
            }
            JobError::Program { .. } => "check the program after `--`",
            JobError::Nproc { .. } => "leave out `--nproc`, or use threads with `--backend local`",
            JobError::NcclOnCpus => "leave `--device` out, or use `--backend tcp`",
            #[cfg(feature = "cuda")]
            JobError::NoGpu { .. } => {
                "`fsdp doctor` shows what is missing; `--device cpu` needs no GPU"
            }
            #[cfg(not(feature = "cuda"))]
            JobError::NoCuda => "leave `--device` out, or build with `--features cuda`",
        }
    }
}

/// A process started by `fsdp launch` that failed. Its exit code is passed on.
#[derive(Debug, Clone, thiserror::Error)]
#[error("rank {rank} {how}")]
pub(crate) struct RankEnded {
    pub(crate) rank: usize,
    pub(crate) how: String,
    pub(crate) code: u8,
}

/// A directory without a checkpoint to resume from.
#[derive(Debug, thiserror::Error)]
#[error("`{directory}` holds no committed checkpoint")]
pub(crate) struct NoCheckpoint {
    pub(crate) directory: String,
}

/// A place for checkpoints where nothing can be saved.
#[derive(Debug, thiserror::Error)]
#[error("no checkpoint can be saved in `{place}`")]
pub(crate) struct Unwritable {
    pub(crate) place: Location,
    pub(crate) source: CheckpointError,
}

/// A checkpoint that turned out to be damaged while it was loaded.
#[derive(Debug, thiserror::Error)]
#[error("failed to load `{path}`")]
pub(crate) struct UnreadableCheckpoint {
    pub(crate) path: Location,
}

/// A checkpoint whose tensors are not those of the model.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint `{path}` is of another model:{}", list(.differences))]
pub(crate) struct OtherModel {
    pub(crate) path: String,
    pub(crate) differences: Vec<String>,
}

/// The number of differences that a message lists.
const MAX_DIFFERENCES: usize = 50;

/// Returns the lines as a list below a message, of which only the first are shown.
fn list(lines: &[String]) -> String {
    // A model of another size differs in every tensor, and thousands of lines would hide the
    // message.
    let mut list: String = lines
        .iter()
        .take(MAX_DIFFERENCES)
        .map(|line| format!("\n  {line}"))
        .collect();
    if lines.len() > MAX_DIFFERENCES {
        list.push_str(&format!("\n  and {} more", lines.len() - MAX_DIFFERENCES));
    }
    list
}

/// Returns the exit code of an error that only jobs have.
pub(crate) fn exit_code(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    // Options that cannot work together are the user's to change, like those that clap refuses.
    if cause.is::<JobError>() || cause.is::<GptConfigError>() {
        return Some(exit_codes::USAGE);
    }
    // A launcher is transparent: whoever waits for it sees the exit code of the rank that failed.
    if let Some(ended) = cause.downcast_ref::<RankEnded>() {
        return Some(ended.code);
    }
    if cause.is::<NoCheckpoint>() {
        return Some(exit_codes::INCOMPLETE);
    }
    if cause.is::<OtherModel>() {
        return Some(exit_codes::DIFFERENCE);
    }
    // The operating system's error is its cause, and may be of a kind with another code; that the
    // run has no place to save is what counts.
    if cause.is::<Unwritable>() {
        return Some(exit_codes::IO);
    }
    match cause.downcast_ref::<DataError>() {
        // The cause, an error of the operating system, decides.
        None | Some(DataError::Read { .. }) => None,
        Some(_) => Some(exit_codes::USAGE),
    }
}

/// Returns the kind of an error of a library that only jobs use.
pub(crate) fn kind(cause: &(dyn std::error::Error + 'static)) -> Option<ErrorKind> {
    kind_as::<CheckpointError>(cause)
        .or_else(|| kind_as::<NnError>(cause))
        .or_else(|| kind_as::<StateError>(cause))
        .or_else(|| kind_as::<CommError>(cause))
}

/// Returns a hint for an error that only jobs have.
pub(crate) fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    if let Some(error) = cause.downcast_ref::<JobError>() {
        return Some(error.hint());
    }
    if cause.is::<RankEnded>() {
        return Some("see what it wrote, above");
    }
    if cause.is::<Unwritable>()
        || matches!(
            cause.downcast_ref(),
            Some(CheckpointError::Directory { .. })
        )
    {
        return Some(
            "check `--out` and `--checkpoint-dir`: a run needs a directory that it may read and write",
        );
    }
    if cause.is::<NoCheckpoint>() {
        return Some("check `--out`, or leave out `--resume` to start from the beginning");
    }
    if let Some(NnError::NonFiniteGradients { .. }) = cause.downcast_ref() {
        return Some(
            "a smaller `--lr` may help; `--nonfinite skip` leaves out the updates of such steps",
        );
    }
    if cause.is::<OtherModel>() {
        return Some(
            "leave out `--layers`, `--hidden` and `--seq` to take the checkpoint's, or choose another `--out`",
        );
    }
    Some(match cause.downcast_ref::<DataError>()? {
        DataError::TooShort { .. } => "use a longer text, or a smaller `--seq`",
        DataError::TooFewRows { .. } => "make `--batch` at least `--nproc` times `--accumulate`",
        _ => "name a text file with `--data`, or leave it out for the built-in text",
    })
}

/// Returns `true` if an error only passes on that another rank failed or was lost.
pub(crate) fn is_about_others(error: &Error) -> bool {
    // Libraries wrap the error of a lost rank in their own types, so each of these is looked into.
    error.chain().any(|cause| {
        cause.is::<CommError>()
            || matches!(
                cause.downcast_ref(),
                Some(NnError::Comm(_) | NnError::State(StateError::Comm(_)))
            )
            || matches!(cause.downcast_ref(), Some(StateError::Comm(_)))
            || matches!(
                cause.downcast_ref(),
                Some(
                    CheckpointError::Comm(_)
                        | CheckpointError::Nn(NnError::Comm(_))
                        | CheckpointError::State(StateError::Comm(_))
                )
            )
    })
}
