//! The `fsdp` command: the command line, and the code behind each of its commands.
//!
//! The commands that read and rewrite checkpoints (`inspect`, `verify`, `diff`, `digest`, `sign`,
//! `log`, `ls`, `prune`, `map`, `report`, `reshard`, `convert`, `merge`, `cat`, `plan`) need no
//! tensor library. `train`, `launch` and `doctor` are in the feature `train`, which is on by
//! default. So are the model that `train` trains (module `gpt`), its text (`data`) and the code
//! that runs ranks as threads (`ranks`), which tests and benches use too.

pub mod embed;
pub mod exit_codes;

pub use self::failure::CommandError;

mod capture;
mod cat;
mod convert;
mod diff;
mod digest;
mod failure;
mod heatmap;
mod inspect;
mod keys;
mod log;
mod logs;
mod ls;
mod manual;
mod map;
mod markup;
mod memory;
mod natural;
mod new_file;
mod outcome;
mod output;
mod parsers;
mod picture;
mod plan;
mod progress;
mod prune;
mod report;
mod sign;
mod stop;
mod svg;
mod text;
mod tree;
mod verify;
mod work;

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

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

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
17 difference (two checkpoints, or a checkpoint of another model), 18 stopped by a signal, and saved, \
19 failure after a commit, 20 values of opaque types that would be left out, \
21 gradients that are not finite.
Options whose help names an environment variable can be set by that too; the command line beats it. RUST_LOG=info turns \
logs on.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a GPT on a text over sharded ranks, with checkpoints that any number of ranks can
    /// resume
    #[cfg(feature = "train")]
    Train(Box<train::TrainArguments>),
    /// Start the processes of a job on this node, and end them together
    #[cfg(feature = "train")]
    Launch(launch::LaunchArguments),
    /// End the processes of a job whose `fsdp launch` was killed
    #[cfg(feature = "train")]
    #[command(name = launch::guard::COMMAND, hide = true)]
    LaunchGuard,
    /// Tell what a job would find here: backends, launcher, cores, memory, GPUs, libraries
    #[cfg(feature = "train")]
    Doctor(doctor::DoctorArguments),
    /// Show what a checkpoint holds: tensors, shapes, dtypes, boxes, bytes
    Inspect(inspect::InspectArguments),
    /// Check a checkpoint: structure, sizes, hashes, numbers; the first bad file and offset
    Verify(verify::VerifyArguments),
    /// Compare two checkpoints of any formats, tensor by tensor
    Diff(diff::DiffArguments),
    /// Print the digest of a checkpoint, the same for the same state in any format and layout
    Digest(digest::DigestArguments),
    /// Sign every byte of a checkpoint with a key, in the format of OpenSSF Model Signing
    Sign(sign::SignArguments),
    /// Show the chain of a run's checkpoints, and where it is broken or forked
    Log(log::LogArguments),
    /// Draw which rank and file holds which part of which tensor, in the terminal or as a page
    Map(picture::PictureArguments),
    /// Write a page about a run: loss, speed, memory, saves, restarts, checkpoints
    Report(report::ReportArguments),
    /// List the checkpoints of a run
    Ls(ls::LsArguments),
    /// Remove the old checkpoints of a run
    Prune(prune::PruneArguments),
    /// Write a checkpoint for another number of ranks
    Reshard(convert::ReshardArguments),
    /// Write a checkpoint in another format, with some keys left out, renamed or cast
    Convert(Box<convert::ConvertArguments>),
    /// Average checkpoints, or merge a LoRA adapter into its base
    Merge(Box<convert::MergeArguments>),
    /// Show one tensor or value: its elements, statistics, or a NumPy file
    Cat(cat::CatArguments),
    /// Tell what the checkpoints of a large job would be, and how often it should save
    Plan(Box<plan::PlanArguments>),
    /// Print a script that completes fsdp's commands and options in a shell
    Completions(manual::CompletionsArguments),
    /// Print fsdp's manual page, or that of one command
    Man(manual::ManArguments),
}

/// Runs a command line, whose first argument is the name of the program, as this process, and
/// returns its exit code.
///
/// A wrong command line ends the process.
#[must_use]
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let Parsed {
        command,
        prints_json,
    } = parse(&arguments).unwrap_or_else(|error| end_with_refusal(&error, &arguments));
    // With a larger pad than 16 MiB, glibc uses all of it before it joins small free blocks, so
    // each connection that a thread refuses would take more memory.
    keep_freed_memory(16 << 20);
    #[cfg(feature = "train")]
    if let Command::Train(arguments) = &command {
        prepare_training(arguments);
    }
    // A reader of stdout that has seen enough is not an error, but a training run that stopped
    // halfway must not look done.
    let may_end_early = !command.is_train();
    // The message of a panic is on stderr already.
    let Ok(outcome) = catch_unwind(AssertUnwindSafe(|| prepare_and_execute(command))) else {
        return exit_codes::INTERNAL;
    };
    match outcome {
        Ok(()) => exit_codes::OK,
        // The run has printed that it was stopped.
        Err(error) if error.is::<failure::Stopped>() => exit_codes::STOPPED,
        Err(error) if may_end_early && error.is::<output::StdoutClosed>() => exit_codes::OK,
        Err(error) => {
            if prints_json {
                output::print_json_error(&outcome::explain(&error));
            }
            output::print_error(&error, outcome::hint(&error));
            outcome::exit_code(&error)
        }
    }
}

/// Ends the process because of a command line that clap refuses, or that asks for help.
fn end_with_refusal(error: &clap::Error, arguments: &[OsString]) -> ! {
    let runs_jobs = arguments
        .get(1)
        .is_some_and(|name| JOB_COMMANDS.iter().any(|command| name == command));
    // Nothing is known of the options but their text. With `--npy -` stdout is for numbers.
    if error.use_stderr()
        && !runs_jobs
        && asks_for_json(arguments)
        && !arguments.iter().any(|argument| argument == "-")
    {
        output::print_json_error(&outcome::explain_refusal(error));
    }
    error.exit()
}

/// Returns `true` if a command line that may be wrong, or the environment, asks for JSON.
fn asks_for_json(arguments: &[OsString]) -> bool {
    arguments.iter().any(|argument| argument == "--json")
        || std::env::var_os(variable_of("json")).is_some_and(|value| value == "true")
}

/// Returns the name of the variable of an option, which is called `name` in the code.
fn variable_of(name: &str) -> String {
    format!("FSDP_{}", name.to_uppercase())
}

/// Sets this process up for a command, and runs it.
fn prepare_and_execute(command: Command) -> anyhow::Result<()> {
    stop::survive_file_size_limit()?;
    // The system drops signals without a handler to the first process of a container, so a command
    // that only reads gets one there, which ends it.
    if std::process::id() == 1 && command.only_reads() {
        stop::StopRequest::new().listen()?;
    }
    // The trace file is complete when the guard is dropped.
    let _guard = logs::start(command.trace_file().as_deref())?;
    execute(command)
}

/// The commands that run jobs, or look at what a job would find. With `--json` they may write an
/// object for each event, and not only one.
const JOB_COMMANDS: [&str; 3] = ["train", "launch", "doctor"];

/// The options of the commands on checkpoints that an environment variable may set. All others
/// change what is selected or written, and a variable that somebody has left would change it
/// unseen.
const OPTIONS_WITH_VARIABLES: [&str; 4] = ["json", "level", "no_progress", "threads"];

/// Returns the command line. An option `--some-name` may be set by the variable `FSDP_SOME_NAME`
/// too: any option of the commands that run jobs, and some of the others; `--json` only if
/// `json_has_variable`.
fn command_line(json_has_variable: bool) -> clap::Command {
    Arguments::command().mut_subcommands(|command| {
        let runs_jobs = JOB_COMMANDS.contains(&command.get_name());
        command.mut_args(|option| {
            let name = option.get_id().as_str();
            let has_variable = (runs_jobs || OPTIONS_WITH_VARIABLES.contains(&name))
                && (name != "json" || json_has_variable);
            if option.is_positional() || !has_variable {
                return option;
            }
            let variable = variable_of(name);
            // A template may set a variable to nothing.
            if std::env::var_os(&variable).is_some_and(|value| value.is_empty()) {
                return option;
            }
            option.env(variable)
        })
    })
}

/// Parses a command line and the environment.
///
/// A flag beats the environment: where only `FSDP_JSON` makes options conflict, it does not count.
fn parse(arguments: &[OsString]) -> Result<Parsed, clap::Error> {
    match parse_with(command_line(true), arguments) {
        Err(error) if error.kind() == ErrorKind::ArgumentConflict => {
            parse_with(command_line(false), arguments)
        }
        outcome => outcome,
    }
    .map_err(|error| with_variable(error, arguments))
}

/// Adds to an error about the value of an option that the value is that of a variable, if it is.
fn with_variable(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let Some(flag) = option
        .split([' ', '='])
        .next()
        .filter(|flag| flag.starts_with("--"))
    else {
        return error;
    };
    let is_given = arguments.iter().any(|argument| {
        let text = argument.to_string_lossy();
        text.strip_prefix(flag)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    });
    let variable = variable_of(&flag[2..].replace('-', "_"));
    if !is_given && std::env::var_os(&variable).is_some() {
        let note = format!("the value is that of the variable {variable}");
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![note.into()]),
        );
    }
    error
}

/// A command line.
#[derive(Debug)]
struct Parsed {
    command: Command,
    /// `true` if it asks for one JSON object on stdout.
    prints_json: bool,
}

/// Parses a command line by the options of `definition`.
///
/// # Errors
/// The command line is wrong, or asks for help or the version.
fn parse_with(definition: clap::Command, arguments: &[OsString]) -> Result<Parsed, clap::Error> {
    let matches = definition.try_get_matches_from(arguments)?;
    let prints_json = matches.subcommand().is_some_and(|(name, options)| {
        !JOB_COMMANDS.contains(&name)
            && matches!(options.try_get_one::<bool>("json"), Ok(Some(true)))
    });
    let command = Arguments::from_arg_matches(&matches)?.command;
    if let Command::Cat(arguments) = &command {
        arguments.check()?;
    }
    Ok(Parsed {
        command,
        prints_json,
    })
}

/// Gives candle's pools in this process the threads of one rank. Only for the start of the process.
#[cfg(feature = "train")]
#[expect(
    unsafe_code,
    reason = "candle reads the number of threads from the environment only"
)]
fn prepare_training(arguments: &train::TrainArguments) {
    let threads = train::threads_per_rank(arguments).to_string();
    // SAFETY: this process has no other thread yet that could read the environment meanwhile.
    unsafe { std::env::set_var(cpu_threads::THREADS_VARIABLE, threads) };
    // The threads of candle's own pool wait for work in a loop, on cores that matrix products need
    // meanwhile.
    if std::env::var_os(cpu_threads::SPIN_VARIABLE).is_none() {
        // SAFETY: as above.
        unsafe {
            std::env::set_var(
                cpu_threads::SPIN_VARIABLE,
                cpu_threads::SPIN_LIMIT.to_string(),
            )
        };
    }
}

/// Lets glibc keep freed memory for later allocations. By default it gives large blocks back to the
/// system as soon as they are free, and memory that is taken anew costs a page fault and zeroing
/// for every page: a quarter of a training step of a small model, and a quarter of a comparison of
/// two checkpoints. Other allocators are left as they are.
///
/// Call it when a program starts, because it changes the allocator of all threads. A thread's heap
/// grows by `pad_bytes` at a time. With a pad of 64 MiB or more, the size of one heap, no heap is
/// given back.
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(
        unsafe_code,
        reason = "mallopt is a C function, and there is no other way to set this from inside a program"
    )
)]
pub fn keep_freed_memory(pad_bytes: i32) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the options are numbers, which glibc checks, and it sets them under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TOP_PAD, pad_bytes);
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = pad_bytes;
}

impl Command {
    /// Returns `true` for `fsdp train`.
    const fn is_train(&self) -> bool {
        match self {
            #[cfg(feature = "train")]
            Command::Train(_) => true,
            _ => false,
        }
    }

    /// Returns `true` for a command that writes nothing but its report.
    const fn only_reads(&self) -> bool {
        match self {
            #[cfg(feature = "train")]
            Command::Doctor(_) => true,
            Command::Inspect(_)
            | Command::Verify(_)
            | Command::Diff(_)
            | Command::Digest(_)
            | Command::Log(_)
            | Command::Ls(_)
            | Command::Plan(_) => true,
            _ => false,
        }
    }

    /// Returns the file that `--trace` names, for this process; `None` without a trace.
    fn trace_file(&self) -> Option<PathBuf> {
        match self {
            #[cfg(feature = "train")]
            Command::Train(arguments) => train::trace_file(arguments),
            _ => None,
        }
    }
}

/// Runs a command of the command line.
fn execute(command: Command) -> anyhow::Result<()> {
    match command {
        #[cfg(feature = "train")]
        Command::Train(arguments) => train::run(&arguments),
        #[cfg(feature = "train")]
        Command::Launch(arguments) => launch::run(&arguments),
        #[cfg(feature = "train")]
        Command::LaunchGuard => {
            launch::guard::run();
            Ok(())
        }
        #[cfg(feature = "train")]
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Diff(arguments) => diff::run(&arguments),
        Command::Digest(arguments) => digest::run(&arguments),
        Command::Sign(arguments) => sign::run(&arguments),
        Command::Log(arguments) => log::run(&arguments),
        Command::Map(arguments) => picture::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Ls(arguments) => ls::run(&arguments),
        Command::Prune(arguments) => prune::run(&arguments),
        Command::Reshard(arguments) => convert::reshard(&arguments),
        Command::Convert(arguments) => convert::run(&arguments),
        Command::Merge(arguments) => convert::merge(&arguments),
        Command::Cat(arguments) => cat::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Completions(arguments) => {
            manual::print_completions(&arguments, command_line(true))
        }
        Command::Man(arguments) => manual::print_manual_page(&arguments, command_line(true)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command_line(true).debug_assert();
        command_line(false).debug_assert();
    }

    #[test]
    fn no_variable_changes_what_is_selected_or_written() {
        for command in command_line(true).get_subcommands() {
            let runs = ["train", "launch", "doctor"].contains(&command.get_name());
            for option in command.get_opts() {
                let name = option.get_id().as_str();
                let twin = option
                    .get_env()
                    .map(|twin| twin.to_string_lossy().into_owned());
                let has_twin = runs || OPTIONS_WITH_VARIABLES.contains(&name);
                assert_eq!(
                    twin,
                    has_twin.then(|| format!("FSDP_{}", name.to_uppercase())),
                    "`{name}`"
                );
            }
        }
    }
}
