//! From errors to exit codes and hints.

use std::io;

use anyhow::Error;
use fsdp::checkpoint::CheckpointError;
use fsdp::comm::CommError;
use fsdp::data::DataError;
use fsdp::dcp::{self, FormatError};
use fsdp::exit_codes;
use fsdp::gpt::GptConfigError;
use fsdp::layout::{DType, ErrorKind, Failure};
use fsdp::nn::NnError;
use fsdp::state::StateError;

use super::output::StdoutClosed;

/// What the user asked for cannot be done. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UsageError {
    #[error("`{directory}` holds the checkpoint of step {step} already")]
    OutIsTaken { directory: String, step: u64 },
    #[error("`{option}` cannot change from {saved} to {asked} on resume")]
    Changed { option: &'static str, saved: String, asked: String },
    #[error("hybrid-shard needs a number of ranks that {replicas} replicas divide, not {ranks}")]
    Replicas { replicas: usize, ranks: usize },
    #[error("`{path}` exists already")]
    Exists { path: String },
    #[error("`{path}` is not what `--overwrite` would put in its place: a file, or a checkpoint directory")]
    NotReplaceable { path: String },
    #[error("`{destination}` and `{source_path}` overlap: a checkpoint cannot be written over its source")]
    Overlap { source_path: String, destination: String },
    #[error("`{option}` means nothing for `--to {to}`")]
    Unused { option: &'static str, to: &'static str },
    #[error("`{glob}` is no glob: {reason}")]
    Glob { glob: String, reason: String },
    #[error("`--include` and `--exclude` leave nothing")]
    NothingSelected,
    #[error("`--rename {rule}` fits no key")]
    UnusedRule { rule: String },
    #[error("`--rename` leaves a key empty")]
    EmptyKey,
    #[error("`{name}` is a value, not a tensor")]
    NoTensor { name: String },
    #[error("elements of dtype {dtype} are no real numbers")]
    NoNumbers { dtype: DType },
    #[error("NumPy has no dtype for {dtype}")]
    NoNumpy { dtype: DType },
    #[error("{elements} elements are more than one JSON object may hold ({limit})")]
    TooLarge { elements: u64, limit: u64 },
    #[error("there is no command `{name}`")]
    NoCommand { name: String },
    #[error("this is node {node_rank}, but nodes are numbered from 0, and there are {nnodes}")]
    NodeRank { node_rank: usize, nnodes: usize },
    #[error("{nproc} processes on each of {nnodes} nodes are more than {max} ranks")]
    WorldSize { nproc: usize, nnodes: usize, max: usize },
    #[error("{nnodes} nodes need the address of node 0")]
    MasterAddr { nnodes: usize },
    #[error("failed to start `{program}`")]
    Program { program: String, source: io::Error },
    #[error("`--nproc` is {nproc}, but the launcher has started {world_size} ranks")]
    Nproc { nproc: usize, world_size: usize },
    #[error("`--backend nccl` moves GPU memory, which `--device cpu` has none of")]
    NcclOnCpus,
    #[cfg(feature = "cuda")]
    #[error("no GPU can be used: {reason}")]
    NoGpu { reason: String },
    #[cfg(not(feature = "cuda"))]
    #[error("this build computes on CPUs only")]
    NoCuda,
}

/// A checkpoint in which something is wrong.
#[derive(Debug, thiserror::Error)]
#[error("`{path}` is damaged: {count} problems, the first: {first}")]
pub(crate) struct Damaged {
    pub(crate) path: String,
    pub(crate) count: usize,
    pub(crate) first: String,
    /// The first is a file that is not there.
    pub(crate) incomplete: bool,
}

/// Two checkpoints that are not the same.
#[derive(Debug, thiserror::Error)]
#[error("`{first}` and `{second}` differ in {count} of {of} tensors and values")]
pub(crate) struct Different {
    pub(crate) first: String,
    pub(crate) second: String,
    pub(crate) count: usize,
    pub(crate) of: usize,
}

/// A process that `fsdp launch` has started failed. Its exit code is passed on.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} {how}")]
pub(crate) struct RankEnded {
    pub(crate) rank: usize,
    pub(crate) how: String,
    pub(crate) code: u8,
}

/// There is no checkpoint to go on from.
#[derive(Debug, thiserror::Error)]
#[error("`{directory}` holds no committed checkpoint")]
pub(crate) struct NoCheckpoint {
    pub(crate) directory: String,
}

/// A checkpoint whose tensors are not those of the model.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint `{path}` is of another model:{}", list(.differences))]
pub(crate) struct OtherModel {
    pub(crate) path: String,
    pub(crate) differences: Vec<String>,
}

/// Differences that a message lists.
const MAX_DIFFERENCES: usize = 50;

fn list(lines: &[String]) -> String {
    let mut list: String = lines.iter().take(MAX_DIFFERENCES).map(|line| format!("\n  {line}")).collect();
    if lines.len() > MAX_DIFFERENCES {
        list.push_str(&format!("\n  and {} more", lines.len() - MAX_DIFFERENCES));
    }
    list
}

/// The exit code of the first cause that has one.
pub(crate) fn exit_code(error: &Error) -> u8 {
    error.chain().find_map(code_of).unwrap_or(exit_codes::INTERNAL)
}

fn code_of(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if cause.is::<UsageError>() || cause.is::<GptConfigError>() {
        return Some(exit_codes::USAGE);
    }
    if let Some(error) = cause.downcast_ref::<RankEnded>() {
        return Some(error.code);
    }
    if cause.is::<NoCheckpoint>() {
        return Some(exit_codes::INCOMPLETE);
    }
    if cause.is::<OtherModel>() || cause.is::<Different>() {
        return Some(exit_codes::DIFFERENCE);
    }
    if let Some(damaged) = cause.downcast_ref::<Damaged>() {
        return Some(if damaged.incomplete { exit_codes::INCOMPLETE } else { exit_codes::CORRUPT });
    }
    if let Some(error) = cause.downcast_ref::<DataError>() {
        return match error {
            // What the system says decides.
            DataError::Read { .. } => None,
            _ => Some(exit_codes::USAGE),
        };
    }
    if cause.is::<StdoutClosed>() {
        return Some(exit_codes::IO);
    }
    kind_of(cause).map(exit_codes::of).filter(|&code| code != exit_codes::INTERNAL)
}

/// Whether an error is what a rank hears of others.
pub(crate) fn is_about_others(error: &Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<CommError>()
            || matches!(cause.downcast_ref(), Some(NnError::Comm(_) | NnError::State(StateError::Comm(_))))
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

/// The kind of an error of ours, or of the system's.
fn kind_of(cause: &(dyn std::error::Error + 'static)) -> Option<ErrorKind> {
    fn of<E: Failure + std::error::Error + 'static>(cause: &(dyn std::error::Error + 'static)) -> Option<ErrorKind> {
        cause.downcast_ref::<E>().map(Failure::kind)
    }
    of::<CheckpointError>(cause)
        .or_else(|| of::<NnError>(cause))
        .or_else(|| of::<StateError>(cause))
        .or_else(|| of::<dcp::FileError>(cause))
        .or_else(|| of::<FormatError>(cause))
        .or_else(|| of::<CommError>(cause))
        .or_else(|| of::<io::Error>(cause))
}

/// What to do about it, where that is known.
pub(crate) fn hint(error: &Error) -> Option<&'static str> {
    // These say all that there is to say.
    if error.chain().any(|cause| cause.is::<Damaged>() || cause.is::<Different>()) {
        return None;
    }
    error.chain().find_map(|cause| {
        if let Some(error) = cause.downcast_ref::<UsageError>() {
            return Some(match error {
                UsageError::OutIsTaken { .. } => "go on from it with `--resume`, or choose another `--out`",
                UsageError::Changed { .. } => "leave the option out, or start anew in another `--out`",
                UsageError::Replicas { .. } => "change `--replicas` or `--nproc`",
                UsageError::Exists { .. } => "choose another place; a checkpoint can be replaced with `--overwrite`",
                UsageError::NotReplaceable { .. } => "choose another place, or move it away",
                UsageError::Overlap { .. } => "choose a place outside the source",
                UsageError::Unused { .. } => "leave the option out, or choose another `--to`",
                UsageError::Glob { .. } => "globs have `*`, `?`, `[a-z]` and `{a,b}`; quote them for the shell",
                UsageError::NothingSelected | UsageError::UnusedRule { .. } | UsageError::EmptyKey => {
                    "`fsdp inspect` lists the keys"
                }
                UsageError::NoTensor { .. } => "leave `--stats` and `--npy` out to see the value",
                UsageError::NoNumbers { .. } => "leave `--stats` out to see the elements' bytes",
                UsageError::NoNumpy { .. } => {
                    "cast bfloat16 first: `fsdp convert --include NAME --dtype float32`; other types can be printed"
                }
                UsageError::TooLarge { .. } => "use `--npy` or `--stats`, or leave `--json` out",
                UsageError::NoCommand { .. } => "`fsdp help` lists the commands",
                UsageError::NodeRank { .. } => "give each node its own `--node-rank`",
                UsageError::WorldSize { .. } => "start fewer processes with `--nproc` or `--nnodes`",
                UsageError::MasterAddr { .. } => "name it with `--master-addr`, the same on all nodes",
                UsageError::Program { .. } => "check the program after `--`",
                UsageError::Nproc { .. } => "leave out `--nproc`, or use threads with `--backend local`",
                UsageError::NcclOnCpus => "leave `--device` out, or use `--backend tcp`",
                #[cfg(feature = "cuda")]
                UsageError::NoGpu { .. } => "`fsdp doctor` tells what is missing; `--device cpu` needs nothing",
                #[cfg(not(feature = "cuda"))]
                UsageError::NoCuda => "leave `--device` out, or build with `--features cuda`",
            });
        }
        if cause.is::<RankEnded>() {
            return Some("see what it wrote, above");
        }
        let no_directory = matches!(cause.downcast_ref(), Some(CheckpointError::Directory { .. }));
        if no_directory || cause.is::<NoCheckpoint>() {
            return Some("check `--out`, or leave out `--resume` to start from the beginning");
        }
        if cause.is::<OtherModel>() {
            return Some(
                "leave out `--layers`, `--hidden` and `--seq` to take the checkpoint's, or choose another `--out`",
            );
        }
        if let Some(error) = cause.downcast_ref::<DataError>() {
            return Some(match error {
                DataError::TooShort { .. } => "use a longer text, or a smaller `--seq`",
                DataError::Indivisible { .. } => "make `--batch` a multiple of `--nproc` times `--accumulate`",
                _ => "name a text file with `--data`, or leave it out for the built-in text",
            });
        }
        match exit_code(error) {
            exit_codes::INCOMPLETE => Some("name the directory of a checkpoint that was saved whole"),
            exit_codes::CORRUPT => Some("go on from an older checkpoint: move the damaged one away"),
            exit_codes::RANK_LOST => Some("see the first error above; a slow machine may need a longer `--timeout`"),
            _ => None,
        }
    })
}
