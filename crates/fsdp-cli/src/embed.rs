//! Runs the commands on checkpoints inside another program, such as the Python package. Returns
//! what they would write to stdout, and errors with the messages and hints that the command prints.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use anyhow::{Error, ensure};

use super::{Command, capture, execute, outcome, parse};
use crate::failure::CommandError;

/// Returns an error of this crate, or of a crate that it uses, as the command reports it: with its
/// exit code, the messages of its causes, and a hint.
#[must_use]
pub fn explain(error: &Error) -> CommandError {
    outcome::explain(error)
}

/// Runs a command that writes one JSON object, and returns its outcome and what it would write to
/// stdout. A command that fails may have written something all the same: the report of a damaged
/// checkpoint, for instance. `arguments` are those of the command line, without the name of the
/// program.
///
/// Signals are left to the caller. To stop a conversion, store the number of a signal in `stop`;
/// the conversion then removes what it has written so far, and fails.
///
/// ```
/// use fsdp_cli::embed::{explain, report};
/// let arguments = ["inspect", "no/such/checkpoint"].map(Into::into);
/// let (outcome, _) = report(arguments, Default::default());
/// let explained = explain(&outcome.unwrap_err());
/// assert_eq!(explained.exit_code, fsdp_cli::exit_codes::INCOMPLETE);
/// ```
pub fn report(
    arguments: impl IntoIterator<Item = OsString>,
    stop: Arc<AtomicUsize>,
) -> (Result<(), Error>, String) {
    let program = std::iter::once(OsString::from("fsdp"));
    let arguments: Vec<OsString> = program.chain(arguments).collect();
    let (outcome, output) = capture::run(stop, || {
        let command = parse(&arguments)?.command;
        // Commands that print text, or run until a signal ends them, have no report to return.
        ensure!(
            command.runs_inside(),
            "this command does not run inside another program: use the command `fsdp`"
        );
        execute(command)
    });
    (outcome, String::from_utf8_lossy(&output).into_owned())
}

impl Command {
    /// Returns `true` for a command that [`report`] runs.
    const fn runs_inside(&self) -> bool {
        matches!(
            self,
            Command::Inspect(_)
                | Command::Verify(_)
                | Command::Diff(_)
                | Command::Digest(_)
                | Command::Sign(_)
                | Command::Log(_)
                | Command::Ls(_)
                | Command::Prune(_)
                | Command::Reshard(_)
                | Command::Convert(_)
                | Command::Merge(_)
                | Command::Cat(_)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit_codes;

    #[test]
    fn a_wrong_argument_is_told_without_advice_for_a_command_line() {
        for (arguments, wanted) in [
            (
                &["verify", "x", "--level", "bogus"][..],
                "invalid value 'bogus' for '--level <LEVEL>' [possible values: structure, sizes, hashes, deep]",
            ),
            (
                &["diff", "a", "b", "--tolerance", "-1"],
                "invalid value '-1' for '--tolerance <X>': it must be a finite number that is not negative",
            ),
            (
                &["diff", "a", "b", "--tolerant"],
                "unexpected argument '--tolerant' found",
            ),
        ] {
            let (outcome, _) = report(arguments.iter().map(OsString::from), Arc::default());
            let explained = explain(&outcome.unwrap_err());
            assert_eq!(
                (explained.message.as_str(), explained.exit_code),
                (wanted, exit_codes::USAGE)
            );
        }
    }
}
