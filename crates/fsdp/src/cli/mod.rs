//! The command line: what may be asked for, and who answers.

mod cat;
mod convert;
mod diff;
mod doctor;
mod failure;
mod inspect;
mod launch;
mod logs;
mod manual;
mod output;
mod progress;
mod text;
mod train;
mod tree;
mod verify;

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
    Train(Box<train::TrainArguments>),
    /// Start the processes of a job on this node, and end them together
    Launch(launch::LaunchArguments),
    /// Tell what a job would find here: backends, launcher, cores, memory, GPUs, libraries
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

pub(crate) fn main() -> ExitCode {
    let command = Arguments::parse().command;
    let trace = match &command {
        Command::Train(arguments) => train::trace_file(arguments),
        _ => None,
    };
    // A run that stopped half-way must not look done.
    let may_end_early = !matches!(command, Command::Train(_));
    let result = logs::start(trace.as_deref()).and_then(|guard| {
        let result = run(command);
        // The trace is whole now.
        drop(guard);
        result
    });
    match result {
        Ok(()) => ExitCode::from(fsdp::exit_codes::OK),
        Err(error) if may_end_early && error.is::<output::StdoutClosed>() => ExitCode::from(fsdp::exit_codes::OK),
        Err(error) => {
            output::error(&error, failure::hint(&error));
            ExitCode::from(failure::exit_code(&error))
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(arguments) => train::run(&arguments),
        Command::Launch(arguments) => launch::run(&arguments),
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
