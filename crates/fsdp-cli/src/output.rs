//! The output of the command, which only this module prints. stdout is for data, stderr for
//! everything else.

use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Error, Result};
use serde::Serialize;
use serde_json::json;

use super::capture;
use super::failure::CommandError;
use super::text::{escaped, escaped_lines};

/// The end of a pipe whose reader has closed it (`fsdp inspect … | head`), which is not a failure.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub(crate) struct StdoutClosed;

/// A stdout that cannot be written, though nobody has closed it: a file on a full disk, for
/// example.
#[derive(Debug, thiserror::Error)]
#[error("failed to write to stdout")]
pub(crate) struct StdoutFailed(#[source] io::Error);

/// Returns the outcome of a command that has printed a report, and that fails if it has found
/// something. Its exit code must not depend on how much of the report was read, nor on where stdout
/// leads. So a finding counts more than a report that could not be written.
///
/// # Errors
/// The finding. Without one, the error of printing, unless stdout is only closed.
pub(crate) fn outcome_after_report(printed: Result<()>, finding: Result<()>) -> Result<()> {
    match (printed, finding) {
        (Ok(()), finding) => finding,
        (Err(error), finding) if error.is::<StdoutClosed>() => finding,
        (Err(error), Err(finding)) if error.is::<StdoutFailed>() => {
            print_message(&format!("warning: {}", error_messages(&error).join(": ")));
            Err(finding)
        }
        // A report that could not even be made is no report of the finding.
        (Err(error), _) => Err(error),
    }
}

/// Writes a line of data.
///
/// # Errors
/// stdout is closed or full.
pub(crate) fn print_line(line: &str) -> Result<()> {
    print_bytes(format!("{line}\n").as_bytes())
}

/// Writes bytes unchanged.
///
/// # Errors
/// The same as [`print_line`].
pub(crate) fn print_bytes(bytes: &[u8]) -> Result<()> {
    if capture::capture_bytes(bytes) {
        return Ok(());
    }
    match write_stdout(bytes) {
        Ok(()) => Ok(()),
        // A pipe whose reader has seen enough is another matter than a full disk.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        Err(error) => Err(StdoutFailed(error).into()),
    }
}

/// Writes bytes to stdout at once, without keeping a part of them back for a later line.
fn write_stdout(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()
}

/// Writes lines of data; nothing if there are none.
///
/// # Errors
/// The same as [`print_line`].
pub(crate) fn print_lines(lines: &[String]) -> Result<()> {
    // An empty list is no output at all, rather than an empty line.
    if lines.is_empty() {
        return Ok(());
    }
    let mut text = lines.join("\n");
    text.push('\n');
    print_bytes(text.as_bytes())
}

/// `true` once this process has written JSON.
static HAS_PRINTED_JSON: AtomicBool = AtomicBool::new(false);

/// The version of the schema of errors.
const ERROR_SCHEMA: u32 = 1;

/// Writes an error as one line of JSON, unless there is JSON on stdout already: a report that says
/// what is wrong. Failures to write are ignored, as the error is written to stderr too.
pub(crate) fn print_json_error(error: &CommandError) {
    if HAS_PRINTED_JSON.load(Ordering::Relaxed) {
        return;
    }
    let CommandError {
        exit_code,
        message,
        hint,
    } = error;
    let _ = print_json(&json!({
        "schema": ERROR_SCHEMA,
        "error": { "message": message, "exit_code": exit_code, "hint": hint },
    }));
}

/// Writes a value as one line of JSON.
///
/// # Errors
/// The same as [`print_line`].
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    HAS_PRINTED_JSON.store(true, Ordering::Relaxed);
    print_line(&serde_json::to_string(value).context("failed to write JSON")?)
}

/// The stream that output goes to.
#[cfg(feature = "train")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// Passes on bytes that another process has written.
///
/// # Errors
/// The stream is closed or full.
#[cfg(feature = "train")]
pub(crate) fn pass_on(stream: Stream, bytes: &[u8]) -> io::Result<()> {
    match stream {
        Stream::Stdout => write_stdout(bytes),
        Stream::Stderr => io::stderr().lock().write_all(bytes),
    }
}

/// Writes a line to stderr. Errors are ignored, as stderr may be closed.
pub(crate) fn print_message(line: &str) {
    if capture::is_on() {
        return;
    }
    let _ = writeln!(io::stderr().lock(), "{}", escaped_lines(line));
}

/// The most keys that are listed.
const MAX_LISTED_KEYS: usize = 20;

/// Writes keys to stderr, one in a line; of many only the first.
pub(crate) fn print_keys_message(keys: &[impl AsRef<str>]) {
    for key in keys.iter().take(MAX_LISTED_KEYS) {
        print_message(&format!("  {}", escaped(key.as_ref())));
    }
    if keys.len() > MAX_LISTED_KEYS {
        print_message(&format!("  and {} more", keys.len() - MAX_LISTED_KEYS));
    }
}

/// Returns the messages of an error and of its causes. Libraries repeat the message of a cause that
/// they pass on; it is told once.
pub(crate) fn error_messages(error: &Error) -> Vec<String> {
    let mut messages: Vec<String> = Vec::new();
    for message in error.chain().map(ToString::to_string) {
        let is_repeated = messages
            .last()
            .is_some_and(|previous| previous.ends_with(&message));
        if !is_repeated {
            messages.push(message);
        }
    }
    messages
}

/// Writes an error with its causes, one line each.
pub(crate) fn print_error(error: &Error, hint: Option<&str>) {
    let mut label = "error";
    for message in error_messages(error) {
        print_message(&format!("{label}: {}", escaped(&message)));
        label = "  caused by";
    }
    if let Some(hint) = hint {
        print_message(&format!("hint: {hint}"));
    }
}
