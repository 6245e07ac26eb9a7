//! The errors of the command itself, each with its exit code and a hint. Libraries have errors of
//! their own.

use std::error::Error;

use fsdp_layout::{DType, ErrorKind, Failure};

use crate::exit_codes;

/// A request that cannot be carried out. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UsageError {
    #[error("`{path}` exists already")]
    Exists { path: String },
    #[error(
        "`{path}` cannot be replaced: `--overwrite` replaces a file only with a file, and a checkpoint directory only with one"
    )]
    NotReplaceable { path: String },
    #[error("`{path}` is the name of a directory, and `--to {to}` writes one file")]
    NotAFile { path: String, to: String },
    #[error(
        "`{destination}` and `{source_path}` overlap: a checkpoint cannot be written over its source"
    )]
    Overlap {
        source_path: String,
        destination: String,
    },
    #[error("`{option}` has no effect with `--to {to}`")]
    Unused { option: &'static str, to: String },
    #[error("`{option}` names `{path}`, which is not a directory that exists")]
    NoDirectory { option: &'static str, path: String },
    #[error("`{glob}` is not a valid glob: {reason}")]
    Glob { glob: String, reason: String },
    #[error("`--include` and `--exclude` select no key")]
    NothingSelected,
    #[error("`--include {glob}` matches no key")]
    UnusedGlob { glob: String },
    #[error("`--rename {rule}` matches no key")]
    UnusedRule { rule: String },
    #[error("`--rename` would make a key empty")]
    EmptyKey,
    #[error("`{name}` is a value, not a tensor")]
    NoTensor { name: String },
    #[error("elements of dtype {dtype} are not real numbers")]
    NoNumbers { dtype: DType },
    #[error("NumPy has no dtype for {dtype}")]
    NoNumpy { dtype: DType },
    #[error("the tensor has {elements} elements, but `--json` prints at most {limit}")]
    TooLarge { elements: u64, limit: u64 },
    #[error("cannot read the map `{name}`: {reason}")]
    NoMap { name: String, reason: String },
    #[error("`--set` has no effect without {}", if *.has_tp { "`--map` or `--tp`" } else { "`--map`" })]
    UnusedSet {
        /// `true` if the command has the option `--tp`.
        has_tp: bool,
    },
    #[error("{ranks} ranks cannot be divided into {replicas} equal replicas")]
    UnequalReplicas { ranks: usize, replicas: usize },
    #[error("the plan would have more than {limit} boxes")]
    TooManyBoxes { limit: usize },
    #[error("with `--lora`, give exactly one `--from`: the base")]
    OneBase,
    #[error("nothing was removed, because no checkpoint of `{run}` that would be kept is whole")]
    NothingWhole { run: String },
    #[error(
        "`{run}` has `{first}` and `{other}`, whose numbers count different things: it is not known which is older"
    )]
    MixedNames {
        run: String,
        first: String,
        other: String,
    },
    #[error("there is no model `{name}`")]
    NoModel { name: String },
    #[error("`{path}` has neither metrics nor checkpoints of a run")]
    NoRun { path: String },
    #[error("there is no command `{name}`")]
    NoCommand { name: String },
}

impl UsageError {
    /// Returns the hint that is printed below the error.
    pub(crate) const fn hint(&self) -> &'static str {
        match self {
            UsageError::Exists { .. } => {
                "choose another destination; `--overwrite` replaces a checkpoint"
            }
            UsageError::NotReplaceable { .. } => "choose another destination, or move it away",
            UsageError::NotAFile { .. } => {
                "leave out the slash at its end, or add the name of the file"
            }
            UsageError::Overlap { .. } => "choose a destination outside the source",
            UsageError::Unused { .. } => "leave the option out, or choose another `--to`",
            UsageError::NoDirectory { .. } => {
                "name the directory of a model's configuration and tokenizer"
            }
            UsageError::Glob { .. } => {
                "a glob may contain `*`, `?`, `[a-z]` and `{a,b}`; quote it for the shell"
            }
            UsageError::NothingSelected
            | UsageError::UnusedGlob { .. }
            | UsageError::UnusedRule { .. }
            | UsageError::EmptyKey => "`fsdp inspect` lists the keys",
            UsageError::NoTensor { .. } => "leave `--stats` and `--npy` out to see the value",
            UsageError::NoNumbers { .. } => "leave `--stats` out to see the elements' bytes",
            UsageError::NoNumpy { .. } => {
                "cast bfloat16 first: `fsdp convert --include NAME --dtype float32`; other types can be printed"
            }
            UsageError::TooLarge { .. } => "use `--npy` or `--stats`, or leave `--json` out",
            UsageError::NoMap { .. } => "name a file of rules, or a map that is built in",
            UsageError::UnusedSet { has_tp: true } => {
                "leave it out, or give the `--map` or `--tp` whose names it is for"
            }
            UsageError::UnusedSet { has_tp: false } => {
                "leave it out, or give the `--map` whose names it is for"
            }
            UsageError::UnequalReplicas { .. } => {
                "each number of ranks must be a multiple of `--replicas`"
            }
            UsageError::TooManyBoxes { .. } => {
                "plan fewer ranks, more `--replicas`, or `--layout flat`"
            }
            UsageError::OneBase => "average the checkpoints first, or give one",
            UsageError::NothingWhole { .. } => {
                "`fsdp verify` says what is wrong with each; or keep more with `--keep`"
            }
            UsageError::MixedNames { .. } => "move the checkpoints of one kind to another folder",
            UsageError::NoModel { .. } => "`fsdp plan --help` lists the models",
            UsageError::NoRun { .. } => "name the directory that `fsdp train --out` was given",
            UsageError::NoCommand { .. } => "`fsdp help` lists the commands",
        }
    }
}

/// A run that a signal has stopped. It has told so itself.
#[derive(Debug, thiserror::Error)]
#[error("a signal stopped the run after it had saved; continue with `--resume`")]
pub(crate) struct Stopped;

/// A conversion that a signal has stopped.
#[derive(Debug, thiserror::Error)]
#[error(
    "stopped by signal {signal}: nothing was written to `{destination}`, and no unfinished files are left"
)]
pub(crate) struct ConversionStopped {
    pub(crate) signal: u8,
    pub(crate) destination: String,
}

/// A checkpoint in which `fsdp verify` found problems.
#[derive(Debug, thiserror::Error)]
#[error("`{path}` {}: {count} problems, the first: {first}", found(*.unread, *.unsupported))]
pub(crate) struct Damaged {
    pub(crate) path: String,
    pub(crate) count: usize,
    pub(crate) first: String,
    /// `true` if the first problem is a file that is missing.
    pub(crate) incomplete: bool,
    /// `true` if there are no problems but files that the system did not let it read.
    pub(crate) unread: bool,
    /// `true` if there are no problems but tensors and values of a kind that is not supported.
    pub(crate) unsupported: bool,
}

/// Returns the end of the message: the same distinctions as in [`Damaged::exit_code`].
const fn found(unread: bool, unsupported: bool) -> &'static str {
    match (unread, unsupported) {
        // Files that the system does not let us read may be sound: that is said first.
        (true, _) => "could not be read",
        (false, true) => "could not be checked",
        (false, false) => "is damaged",
    }
}

impl Damaged {
    /// Returns the exit code for all problems together: files that could not be read come first.
    pub(crate) const fn exit_code(&self) -> u8 {
        // The first that holds decides: whoever cannot read the files learns nothing about their
        // content.
        match (self.unread, self.unsupported, self.incomplete) {
            (true, ..) => exit_codes::IO,
            (false, true, _) => exit_codes::UNSUPPORTED_VERSION,
            (false, false, true) => exit_codes::INCOMPLETE,
            (false, false, false) => exit_codes::CORRUPT,
        }
    }
}

/// A run whose chain of checkpoints `fsdp log` found to be broken.
#[derive(Debug, thiserror::Error)]
#[error("the chain of `{run}` is broken at {count} of its checkpoints")]
pub(crate) struct Broken {
    pub(crate) run: String,
    pub(crate) count: usize,
}

/// Two checkpoints that `fsdp diff` found to differ.
#[derive(Debug, thiserror::Error)]
#[error("`{first}` and `{second}` differ in {count} of {of} tensors and values")]
pub(crate) struct Different {
    pub(crate) first: String,
    pub(crate) second: String,
    pub(crate) count: usize,
    pub(crate) of: usize,
}

/// Returns the kind of one cause of an error, if it is an error of this type.
pub(crate) fn kind_as<E: Failure + Error + 'static>(
    cause: &(dyn Error + 'static),
) -> Option<ErrorKind> {
    cause.downcast_ref::<E>().map(Failure::kind)
}
