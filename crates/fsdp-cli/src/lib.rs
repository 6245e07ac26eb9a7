//! The `fsdp` command: the command line, and the code behind each of its commands.
//!
//! The commands that read and rewrite checkpoints (`inspect`, `verify`, `diff`, `reshard`, `convert`, `cat`) need no
//! tensor library. `train`, `launch` and `doctor` come with the feature `train`, which is on by default; so does the
//! model that `train` trains ([`gpt`]), its text ([`data`]) and the way its ranks are run ([`ranks`]), which tests and
//! benches use too.

pub mod exit_codes;

mod cat;
mod convert;
mod diff;
mod failure;
mod inspect;
mod logs;
mod manual;
mod outcome;
mod output;
mod progress;
mod text;
mod tree;
mod verify;

#[cfg(feature = "train")]
pub mod data;
#[cfg(feature = "train")]
pub mod gpt;
#[cfg(feature = "train")]
pub mod ranks;

#[cfg(feature = "train")]
mod cpu_threads;
#[cfg(feature = "train")]
mod doctor;
#[cfg(feature = "train")]
mod job_failure;
#[cfg(feature = "train")]
mod launch;
#[cfg(feature = "train")]
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

/// Shard candle models over many ranks; save, load and look into their state.
#[derive(Debug, Parser)]
#[command(name = "fsdp", version, max_term_width = 100, after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Exit codes: 0 done, 1 internal error, 2 usage, 10 corrupt checkpoint, 11 incomplete or no checkpoint, \
12 unsupported version, 13 unsafe input refused, 14 input/output, 15 no space, 16 rank lost or timeout, \
17 difference (two checkpoints, or a checkpoint of another model).
Every option can also be set by an environment variable, which its help names. RUST_LOG=info turns logs on.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a GPT on a text over sharded ranks, with checkpoints that any number of ranks can resume
    #[cfg(feature = "train")]
    Train(Box<train::TrainArguments>),
    /// Start the processes of a job on this node, and end them together
    #[cfg(feature = "train")]
    Launch(launch::LaunchArguments),
    /// Tell what a job would find here: backends, launcher, cores, memory, GPUs, libraries
    #[cfg(feature = "train")]
    Doctor(doctor::DoctorArguments),
    /// Show what a checkpoint holds: tensors, shapes, dtypes, boxes, bytes
    Inspect(inspect::InspectArguments),
    /// Check a checkpoint: structure, sizes, hashes, numbers; the first bad file and offset
    Verify(verify::VerifyArguments),
    /// Compare two checkpoints of any formats, tensor by tensor
    Diff(diff::DiffArguments),
    /// Write a checkpoint for another number of ranks
    Reshard(convert::ReshardArguments),
    /// Write a checkpoint in another format, with some keys left out, renamed or cast
    Convert(Box<convert::ConvertArguments>),
    /// Show one tensor or value: its elements, statistics, or a NumPy file
    Cat(cat::CatArguments),
    /// Print a script that completes fsdp's commands and options in a shell
    Completions(manual::CompletionsArguments),
    /// Print fsdp's manual page, or that of one command
    Man(manual::ManArguments),
}

/// Runs the command line of this process, and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let command = Arguments::parse().command;
    #[cfg(feature = "train")]
    size_pools(&command);
    // A reader of stdout that has seen enough is no error, but a training run that stopped halfway must not look done.
    let may_end_early = !command.trains();
    let result = logs::start(command.trace_file().as_deref()).and_then(|guard| {
        let result = run(command);
        // Completes the trace file.
        drop(guard);
        result
    });
    match result {
        Ok(()) => ExitCode::from(exit_codes::OK),
        Err(error) if may_end_early && error.is::<output::StdoutClosed>() => ExitCode::from(exit_codes::OK),
        Err(error) => {
            output::error(&error, outcome::hint(&error));
            ExitCode::from(outcome::exit_code(&error))
        }
    }
}

/// Gives candle's pools in this process the threads of one rank. Only for the start of [`main`].
#[cfg(feature = "train")]
#[expect(unsafe_code, reason = "candle reads the number of threads from the environment only")]
fn size_pools(command: &Command) {
    if let Command::Train(arguments) = command {
        let threads = train::threads_per_rank(arguments).to_string();
        // SAFETY: this process has no other thread yet that could read the environment meanwhile.
        unsafe { std::env::set_var(cpu_threads::VARIABLE, threads) };
    }
}

impl Command {
    /// Returns `true` for `fsdp train`.
    const fn trains(&self) -> bool {
        match self {
            #[cfg(feature = "train")]
            Command::Train(_) => true,
            _ => false,
        }
    }

    /// Returns the file that `--trace` names, for this process.
    fn trace_file(&self) -> Option<PathBuf> {
        match self {
            #[cfg(feature = "train")]
            Command::Train(arguments) => train::trace_file(arguments),
            _ => None,
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        #[cfg(feature = "train")]
        Command::Train(arguments) => train::run(&arguments),
        #[cfg(feature = "train")]
        Command::Launch(arguments) => launch::run(&arguments),
        #[cfg(feature = "train")]
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Reshard(arguments) => convert::reshard(&arguments),
        Command::Convert(arguments) => convert::run(&arguments),
        Command::Cat(arguments) => cat::run(&arguments),
        Command::Completions(arguments) => manual::completions(&arguments, Arguments::command()),
        Command::Man(arguments) => manual::man(&arguments, Arguments::command()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_option_has_an_environment_twin() {
        Arguments::command().debug_assert();
        for command in Arguments::command().get_subcommands() {
            for option in command.get_opts() {
                let name = option.get_id().as_str();
                let twin = option.get_env().map(|twin| twin.to_string_lossy().into_owned());
                assert_eq!(twin, Some(format!("FSDP_{}", name.to_uppercase())), "`{name}`");
            }
        }
    }
}
