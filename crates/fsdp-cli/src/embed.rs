//! Runs the commands on checkpoints inside another program, such as the Python package. Returns
//! what they would write to stdout, and errors with the messages and hints that the command prints.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use anyhow::{Error, anyhow};

use super::{Command, capture, execute, outcome, parse};
use crate::exit_codes;

/// An error as the command reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained {
    /// The exit code that it has; see [`exit_codes`].
    pub exit_code: u8,
    /// The error and its causes.
    pub message: String,
    /// Advice on what to do, if there is any.
    pub hint: Option<&'static str>,
}

impl Explained {
    /// Returns the exit code, the message and the hint of an error of this crate, or of a crate
    /// that it uses.
    #[must_use]
    pub fn new(error: &Error) -> Self {
        // A command line that clap refuses.
        if let Some(error) = error.downcast_ref::<clap::Error>() {
            return Explained {
                exit_code: exit_codes::USAGE,
                message: refusal(&error.to_string()),
                hint: None,
            };
        }
        let mut message = error.to_string();
        for cause in error.chain().skip(1).map(ToString::to_string) {
            // Some libraries include the text of a cause in their own message. It is not repeated.
            if !message.ends_with(&cause) {
                message.push_str(": ");
                message.push_str(&cause);
            }
        }
        Explained {
            exit_code: outcome::exit_code(error),
            message,
            hint: outcome::hint(error),
        }
    }
}

/// Returns what is wrong with a command line in one line. The rest of what clap says is for those
/// who have typed it.
fn refusal(text: &str) -> String {
    let lines = text.trim_start_matches("error: ").lines().map(str::trim);
    let wrong = lines.take_while(|line| {
        !line.starts_with("Usage:") && !line.starts_with("For more information")
    });
    wrong
        .filter(|line| !line.is_empty() && !line.starts_with("tip:"))
        .collect::<Vec<_>>()
        .join(" ")
}

/// A command that failed.
#[derive(Debug)]
pub struct Failed {
    /// The text that it would have written to stdout all the same: the report of a damaged
    /// checkpoint, for instance.
    pub output: String,
    /// The error.
    pub error: Error,
}

impl From<Error> for Failed {
    /// Makes the failure of a command that has written nothing yet.
    fn from(error: Error) -> Self {
        Failed {
            output: String::new(),
            error,
        }
    }
}

/// Runs a command that writes one JSON object, and returns what it would write to stdout.
/// `arguments` are those of the command line, without the name of the program.
///
/// Signals are left to the caller. To stop a conversion, store the number of a signal in `stop`;
/// the conversion then removes what it has written so far, and fails.
///
/// ```
/// let failed = fsdp_cli::embed::report(["inspect", "no/such/checkpoint"].map(Into::into), Default::default());
/// let explained = fsdp_cli::embed::Explained::new(&failed.unwrap_err().error);
/// assert_eq!(explained.exit_code, fsdp_cli::exit_codes::INCOMPLETE);
/// ```
///
/// # Errors
/// The errors of the command.
pub fn report(
    arguments: impl IntoIterator<Item = OsString>,
    stop: Arc<AtomicUsize>,
) -> Result<String, Failed> {
    let program = std::iter::once(OsString::from("fsdp"));
    let arguments: Vec<OsString> = program.chain(arguments).collect();
    let command = parse(&arguments).map_err(Error::from)?;
    // Commands that print text, or run until a signal ends them, have no report to return.
    if !command.runs_inside() {
        return Err(anyhow!(
            "this command does not run inside another program: use the command `fsdp`"
        )
        .into());
    }
    let (outcome, output) = capture::run(stop, || execute(command));
    let output = String::from_utf8_lossy(&output).into_owned();
    match outcome {
        Ok(()) => Ok(output),
        Err(error) => Err(Failed { output, error }),
    }
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

    #[test]
    fn a_wrong_argument_is_told_without_advice_for_a_command_line() {
        for (arguments, wanted) in [
            (
                &["verify", "x", "--level", "bogus"][..],
                "invalid value 'bogus' for '--level <LEVEL>' [possible values: structure, sizes, hashes, deep]",
            ),
            (
                &["diff", "a", "b", "--tolerance", "-1"],
                "unexpected argument '-1' found",
            ),
        ] {
            let failed = report(arguments.iter().map(OsString::from), Arc::default()).unwrap_err();
            let explained = Explained::new(&failed.error);
            assert_eq!(
                (explained.message.as_str(), explained.exit_code),
                (wanted, exit_codes::USAGE)
            );
        }
    }
}
