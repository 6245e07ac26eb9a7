//! The options of `fsdp train`.

use std::fmt;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use candle_core::DType;
use clap::builder::{
    OsStringValueParser, PossibleValuesParser, RangedU64ValueParser, TypedValueParser,
};
use clap::{ArgAction, Args, ValueEnum};
use fsdp::checkpoint::Location;
use fsdp::comm::BackendKind;
use fsdp::nn::BackwardPrefetch;
use fsdp::prelude::*;

use super::optimizers::OptimizerName;
use crate::parsers::{one_to, parse_not_negative, parse_positive};

/// The largest number of ranks that are threads of one process.
const MAX_RANKS: u64 = 1024;

/// The largest number of CPU threads of a rank: more than the cores of any machine.
const MAX_THREADS: u64 = 1024;

/// The largest size of a model or batch.
pub(super) const MAX_SIZE: u64 = 1 << 24;

/// The most blocks of a model. However small a block is, its names and its plans take memory and
/// time.
pub(super) const MAX_LAYERS: u64 = 4096;

// The headings of options in the help.
const RUN: &str = "Run";
const RANKS: &str = "Ranks";
const CHECKPOINTS: &str = "Checkpoints";
const MODEL: &str = "Model and batch";
const OPTIMIZER: &str = "Optimizer";
const SHARDING: &str = "Sharding and precision";
const OUTPUT: &str = "Output";

/// Returns the parser of a place for checkpoints. An empty text would be the current directory,
/// which nobody means.
fn location_parser() -> impl TypedValueParser<Value = Location> {
    // A path need not be UTF-8, so the text is not turned into a string first.
    OsStringValueParser::new().try_map(|text| {
        if text.is_empty() {
            Err("it is empty")
        } else {
            Ok(Location::from(text))
        }
    })
}

/// Returns the parser of a number of steps, up to the largest that a checkpoint can keep.
fn step_count_parser() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(..=i64::MAX.unsigned_abs())
}

/// The checkpoint that `--resume` continues from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum ResumeMode {
    /// None: start from the beginning
    #[default]
    #[value(alias = "false")]
    No,
    /// The newest one that is not damaged; start from the beginning if there is none yet
    Auto,
    /// The newest one that is not damaged
    #[value(alias = "true")]
    Newest,
    /// The newest one, or an error if it is damaged
    Strict,
}

/// The reaction to gradients that are not finite.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum NonFinite {
    #[default]
    Error,
    Skip,
}

/// The ways in which the learning rate falls, by their names.
pub(super) const DECAYS: [(&str, Decay); 3] = [
    ("constant", Decay::Constant),
    ("cosine", Decay::Cosine),
    ("linear", Decay::Linear),
];

/// Returns the decay of this name; `None` if there is none.
pub(super) fn find_decay(name: &str) -> Option<Decay> {
    let (_, decay) = DECAYS
        .into_iter()
        .find(|(decay_name, _)| *decay_name == name)?;
    Some(decay)
}

/// Returns the parser of a choice that is one of these names.
fn choice_parser<T: Clone + Send + Sync + 'static>(
    names: impl Into<PossibleValuesParser>,
    find_choice: fn(&str) -> Option<T>,
) -> impl TypedValueParser<Value = T> {
    names
        .into()
        .map(move |name| find_choice(&name).expect("clap takes no other name"))
}

/// The moments at which a backward begins to gather its next unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum PrefetchName {
    /// Before the gradients of the present unit are computed
    Pre,
    /// After they are computed, and before they are reduced
    Post,
    /// When the backward comes to that unit
    #[default]
    None,
}

impl PrefetchName {
    /// Returns the library's option; `None` for no prefetch.
    pub(super) const fn library_option(self) -> Option<BackwardPrefetch> {
        match self {
            PrefetchName::Pre => Some(BackwardPrefetch::Pre),
            PrefetchName::Post => Some(BackwardPrefetch::Post),
            PrefetchName::None => None,
        }
    }
}

/// The devices on which ranks compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DeviceName {
    Cpu,
    Cuda,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "\
Examples:
  fsdp train --nproc 4 --steps 60 --save-every 20 --out runs/demo
  fsdp train --nproc 2 --steps 120 --out runs/demo --resume
  fsdp train --nproc 4 --steps 600 --save-every 20 --async-save --keep-last 3 --out runs/long
  fsdp train --nproc 4 --steps 600 --save-every 200 --memory-tier /dev/shm/fsdp --out runs/tiers
  fsdp train --init-from pytorch/step-00000020 --steps 40 --out runs/went-on
  fsdp launch --nproc 4 -- fsdp train --steps 60 --out runs/processes
  mpirun -n 4 fsdp train --backend mpi --steps 60 --out runs/mpi
  fsdp launch --nproc 4 -- fsdp train --backend nccl --steps 60 --out runs/gpus
  fsdp train --data book.txt --layers 6 --heads 6 --hidden 384 --seq 256 --out runs/book"
)]
pub(crate) struct TrainArguments {
    /// Text to train on; its bytes are the tokens [default: a text that comes with the program]
    #[arg(help_heading = RUN, long, value_name = "FILE")]
    pub(super) data: Option<PathBuf>,
    /// Directory of the checkpoints and of metrics.jsonl
    #[arg(help_heading = RUN, long, value_name = "DIR")]
    pub(super) out: PathBuf,
    /// Place for the checkpoints instead of --out: a directory, or the URL of an object store
    /// (s3://, gs://, az://)
    #[arg(help_heading = RUN, long, value_name = "LOCATION", value_parser = location_parser())]
    pub(super) checkpoint_dir: Option<Location>,
    /// Go on from the newest checkpoint of --out (or --checkpoint-dir), at whatever number of ranks
    /// is given now, or from the one before if it is damaged. With --resume=strict a damaged one is
    /// an error; with --resume=auto a run without checkpoints begins. Sizes, batch, learning rate,
    /// its schedule, optimizer and text are the checkpoint's unless given
    #[arg(help_heading = RUN, long, value_name = "MODE", value_enum, num_args = 0..=1, require_equals = true, default_value_t,
          default_missing_value = "newest")]
    pub(super) resume: ResumeMode,
    /// Start from a checkpoint of the same model, PyTorch's too: model, optimizer and step, as far
    /// as it has them. Sizes, batch, learning rate, optimizer and text are the checkpoint's unless
    /// given
    #[arg(help_heading = RUN, long, value_name = "CKPT", conflicts_with = "resume")]
    pub(super) init_from: Option<Location>,
    /// Number of ranks; each holds its own shard [default: as many as the launcher started, or 1]
    #[arg(help_heading = RANKS, long, value_name = "N", value_parser = one_to(MAX_RANKS))]
    pub(super) nproc: Option<usize>,
    /// How ranks reach each other: they are threads of this process (local), or the processes that
    /// a launcher (tcp; nccl with GPUs) or an MPI launcher (mpi) started [default: tcp if a
    /// launcher started several, else local]
    #[arg(help_heading = RANKS, long,
          value_parser = choice_parser(["local", "tcp", "mpi", "nccl"], |name| name.parse::<BackendKind>().ok()))]
    pub(super) backend: Option<BackendKind>,
    /// Device of each rank; if there are several GPUs, the one with its number on this machine
    /// [default: cuda with --backend nccl, else cpu]
    #[arg(help_heading = RANKS, long, value_enum)]
    pub(super) device: Option<DeviceName>,
    /// CPU threads of each rank, candle's included [default: RAYON_NUM_THREADS, or an equal share
    /// of the machine's. Where the launcher does not say how many ranks a machine has, the share is
    /// that of all ranks]
    #[arg(help_heading = RANKS, long, value_name = "THREADS", value_parser = one_to(MAX_THREADS))]
    pub(super) threads: Option<usize>,
    /// Seconds after which ranks stop waiting for each other
    #[arg(help_heading = RANKS, long, value_name = "SECONDS", default_value = "60")]
    pub(super) timeout: NonZeroU64,
    /// Total number of steps, those before a resume included
    #[arg(help_heading = RUN, long, value_name = "S", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) steps: u64,
    /// Save a checkpoint after every K steps, and after the last [default: after the last only]
    #[arg(help_heading = CHECKPOINTS, long, value_name = "K")]
    pub(super) save_every: Option<NonZeroU64>,
    /// Keep steps between the checkpoints in this directory of each host, which should be a tmpfs
    /// such as /dev/shm. Each rank saves its part there, and another rank, on another host if there
    /// is one, keeps a copy. --resume continues from the newest step, here or in the checkpoints.
    /// The last two steps are kept until the run is complete
    #[arg(help_heading = CHECKPOINTS, long, value_name = "DIR")]
    pub(super) memory_tier: Option<PathBuf>,
    /// Save to --memory-tier after every K steps
    #[arg(help_heading = CHECKPOINTS, long, value_name = "K", requires = "memory_tier", default_value = "10")]
    pub(super) memory_every: NonZeroU64,
    /// Write only what has changed since the last checkpoint; data files that are mostly the same
    /// are hard links
    #[arg(help_heading = CHECKPOINTS, long)]
    pub(super) incremental: bool,
    /// Go on training while checkpoints are written: a step waits only for a copy of the state
    #[arg(help_heading = CHECKPOINTS, long)]
    pub(super) async_save: bool,
    /// On a resume, let replicas (no-shard, hybrid-shard) share the reading: each reads a part of
    /// the checkpoint and sends it to the others. Always on for object stores; for files it is
    /// worthwhile if many hosts read them over a network
    #[arg(help_heading = CHECKPOINTS, long)]
    pub(super) read_once: bool,
    /// Remove checkpoints but the newest K, once a new one is whole [default: keep all]
    #[arg(help_heading = CHECKPOINTS, long, value_name = "K")]
    pub(super) keep_last: Option<NonZeroUsize>,
    /// Keep checkpoints that --keep-last would remove if their step is a multiple of N
    #[arg(help_heading = CHECKPOINTS, long, value_name = "N", requires = "keep_last")]
    pub(super) keep_every: Option<NonZeroU64>,
    /// Rows of the global batch; at least --nproc times --accumulate [default: 12]
    #[arg(help_heading = MODEL, long, value_name = "B", value_parser = one_to(MAX_SIZE))]
    pub(super) batch: Option<usize>,
    /// Tokens of a row, and the model's longest context [default: 64]
    #[arg(help_heading = MODEL, long, value_name = "T", value_parser = one_to(MAX_SIZE))]
    pub(super) seq: Option<usize>,
    /// Blocks of the model [default: 2]
    #[arg(help_heading = MODEL, long, value_name = "L", value_parser = one_to(MAX_LAYERS))]
    pub(super) layers: Option<usize>,
    /// Attention heads of a block [default: 4]
    #[arg(help_heading = MODEL, long, value_name = "H", value_parser = one_to(MAX_SIZE))]
    pub(super) heads: Option<usize>,
    /// Width of the model [default: 64]
    #[arg(help_heading = MODEL, long, value_name = "C", value_parser = one_to(MAX_SIZE))]
    pub(super) hidden: Option<usize>,
    /// Seed of the initial parameters and of the text sample [default: 0]
    #[arg(help_heading = MODEL, long, value_name = "Z")]
    pub(super) seed: Option<u64>,
    /// Learning rate [default: 0.001]
    #[arg(help_heading = OPTIMIZER, long, value_name = "X", value_parser = parse_not_negative,
          allow_negative_numbers = true)]
    pub(super) lr: Option<f64>,
    /// The way in which the learning rate falls to 0, or not at all [default: constant]
    #[arg(help_heading = OPTIMIZER, long,
          value_parser = choice_parser(DECAYS.map(|(name, _)| name), find_decay))]
    pub(super) schedule: Option<Decay>,
    /// Steps in which the learning rate rises from 0 [default: 0]
    #[arg(help_heading = OPTIMIZER, long, value_name = "N", value_parser = step_count_parser())]
    pub(super) warmup: Option<u64>,
    /// Steps after which the learning rate has fallen [default: --steps of the first run]
    #[arg(help_heading = OPTIMIZER, long, value_name = "S", value_parser = step_count_parser())]
    pub(super) schedule_steps: Option<u64>,
    /// Optimizer, with torch's defaults. muon takes the matrices of the blocks, and leaves the rest
    /// to adamw [default: adamw]
    #[arg(help_heading = OPTIMIZER, long, value_enum)]
    pub(super) optimizer: Option<OptimizerName>,
    /// Strategy of sharding: full-shard, shard-grad-op, no-shard or hybrid-shard
    #[arg(help_heading = SHARDING, long, default_value_t)]
    pub(super) strategy: ShardingStrategy,
    /// Replicas of the model under hybrid-shard [default: 2]
    #[arg(help_heading = SHARDING, long, value_name = "R")]
    pub(super) replicas: Option<NonZeroUsize>,
    /// The optimizer sees the model's own parameters: the default
    #[arg(help_heading = SHARDING, long, overrides_with = "flat")]
    pub(super) use_orig_params: bool,
    /// The optimizer sees one FlatParameter per unit
    #[arg(help_heading = SHARDING, long, overrides_with = "use_orig_params")]
    pub(super) flat: bool,
    /// Compute in this type, with parameters, reductions and optimizer state in f32. With f16 the
    /// loss is scaled
    #[arg(help_heading = SHARDING, long,
          value_parser = choice_parser(["bf16", "f16"], |name| name.parse::<DType>().ok()))]
    pub(super) mixed_precision: Option<DType>,
    /// Let GPUs round the factors of f32 matrix products to TF32: faster, less exact
    #[arg(help_heading = SHARDING, long)]
    pub(super) allow_tf32: bool,
    /// Keep shards and optimizer state in the host's memory, also where the device is a GPU
    #[arg(help_heading = SHARDING, long)]
    pub(super) cpu_offload: bool,
    /// Scale gradients down so that their norm over all parameters is at most this
    #[arg(help_heading = OPTIMIZER, long, value_name = "NORM", value_parser = parse_positive,
          allow_negative_numbers = true)]
    pub(super) clip_grad_norm: Option<f64>,
    /// When gradients of some rank are NaN or infinite: end the run with an error, or skip the
    /// update of that step
    #[arg(help_heading = OPTIMIZER, long, value_enum, default_value_t)]
    pub(super) nonfinite: NonFinite,
    /// Gradient accumulation: forward and backward passes of each rank per step. Only the last one
    /// reduces gradients over the ranks
    #[arg(help_heading = OPTIMIZER, long, value_name = "A", default_value_t = 1, value_parser = one_to(MAX_SIZE))]
    pub(super) accumulate: usize,
    /// Compute the activations of each block again in the backward, instead of keeping them: less
    /// memory, more time
    #[arg(help_heading = SHARDING, long)]
    pub(super) activation_checkpointing: bool,
    /// When a backward begins to gather its next unit, beside the computation. Takes the memory of
    /// one more unit, and pays where ranks wait for the network
    #[arg(help_heading = SHARDING, long, value_enum, default_value_t)]
    pub(super) backward_prefetch: PrefetchName,
    /// Begin to gather the next unit of a forward before the present one is computed, beside the
    /// computation
    #[arg(help_heading = SHARDING, long)]
    pub(super) forward_prefetch: bool,
    /// Gather at most one unit ahead, rather than three: less memory
    #[arg(help_heading = SHARDING, long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true)]
    pub(super) limit_all_gathers: bool,
    /// Check after every K steps that ranks which hold the same weights, optimizer state or values
    /// hold the same bits
    #[arg(help_heading = SHARDING, long, value_name = "K")]
    pub(super) check_replicas: Option<NonZeroU64>,
    /// Bytes of the text sample at the end
    #[arg(help_heading = OUTPUT, long, value_name = "BYTES", default_value_t = 200)]
    pub(super) sample: usize,
    /// Write a trace of the time spent to FILE, for Perfetto or chrome://tracing; each process its
    /// own, with its rank in the name
    #[arg(help_heading = OUTPUT, long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// One JSON object a line on stdout for the start, each step, each checkpoint and the end
    #[arg(help_heading = OUTPUT, long)]
    pub(super) json: bool,
    /// No progress bar, also on a terminal
    #[arg(help_heading = OUTPUT, long)]
    pub(super) no_progress: bool,
}

impl TrainArguments {
    /// Returns the options that must be the same on all ranks, as text, a line for each: they
    /// decide what ranks compute together, and in which order they call collectives.
    pub(super) fn shared_options_text(&self) -> String {
        // Options of this process alone, such as the trace or the threads, are left out.
        // The directory may differ from host to host.
        let memory_tier = self.memory_tier.is_some();
        let options: [(&str, &dyn fmt::Debug); 20] = [
            ("--save-every", &self.save_every),
            ("--memory-tier", &memory_tier),
            ("--memory-every", &self.memory_every),
            ("--incremental", &self.incremental),
            ("--async-save", &self.async_save),
            ("--read-once", &self.read_once),
            ("--check-replicas", &self.check_replicas),
            ("--strategy", &self.strategy),
            ("--replicas", &self.replicas),
            ("--use-orig-params", &self.use_orig_params),
            ("--flat", &self.flat),
            ("--mixed-precision", &self.mixed_precision),
            ("--allow-tf32", &self.allow_tf32),
            ("--cpu-offload", &self.cpu_offload),
            ("--activation-checkpointing", &self.activation_checkpointing),
            ("--steps", &self.steps),
            ("--clip-grad-norm", &self.clip_grad_norm),
            ("--nonfinite", &self.nonfinite),
            ("--accumulate", &self.accumulate),
            ("--sample", &self.sample),
        ];
        let lines = options.map(|(name, value)| format!("{name}: {value:?}"));
        lines.join("\n")
    }

    /// Returns the way in which the run resumes. A process that a launcher has started again
    /// continues, whatever it did the first time.
    pub(super) fn resume_mode(&self) -> ResumeMode {
        // The command line of a process that is started again is that of its first start.
        if self.is_resumed_by_launcher() {
            ResumeMode::Auto
        } else {
            self.resume
        }
    }

    /// Returns `true` if the run continues only because a launcher has started it again.
    pub(super) fn is_resumed_by_launcher(&self) -> bool {
        self.resume == ResumeMode::No && restart_count() > 0
    }

    /// Returns the place of the checkpoints.
    pub(super) fn checkpoint_location(&self) -> Location {
        match &self.checkpoint_dir {
            Some(location) => location.clone(),
            None => Location::from(&self.out),
        }
    }
}

/// Returns the number of times that a launcher has started this process again; 0 if no launcher
/// says so.
pub(super) fn restart_count() -> u64 {
    // Without a launcher there is no such variable.
    let count = std::env::var("TORCHELASTIC_RESTART_COUNT");
    count.map_or(0, |count| count.trim().parse().unwrap_or(0))
}

/// Returns torchrun's name of this job, which stays the same when its processes are started again;
/// `None` if it has none.
pub(super) fn elastic_job() -> Option<String> {
    // torchrun gives the name `none` to a job without one.
    let job = std::env::var("TORCHELASTIC_RUN_ID").ok()?;
    (!job.is_empty() && job != "none").then_some(job)
}
