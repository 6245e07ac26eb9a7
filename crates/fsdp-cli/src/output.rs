//! The only place where the command prints. stdout is data, stderr is talk.

use std::io::{self, Write as _};

use anyhow::{Context, Error, Result};
use serde::Serialize;

use super::text::escaped_lines;

/// Whoever read stdout has gone (`fsdp inspect … | head`): no error, but the end.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub(crate) struct StdoutClosed;

fn told(written: io::Result<()>) -> Result<()> {
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => StdoutClosed.into(),
        _ => Error::new(error).context("failed to write to stdout"),
    })
}

/// A line of data.
///
/// # Errors
/// stdout is closed or full.
pub(crate) fn data(line: &str) -> Result<()> {
    raw(format!("{line}\n").as_bytes())
}

/// Bytes as they are.
///
/// # Errors
/// As [`data`].
pub(crate) fn raw(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    told(stdout.write_all(bytes).and_then(|()| stdout.flush()))
}

/// Many lines of data.
///
/// # Errors
/// As [`data`].
pub(crate) fn lines(lines: &[String]) -> Result<()> {
    let mut text = lines.join("\n");
    text.push('\n');
    raw(text.as_bytes())
}

/// A value as one line of JSON.
///
/// # Errors
/// As [`data`].
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    data(&serde_json::to_string(value).context("failed to write JSON")?)
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
        Stream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        Stream::Stderr => io::stderr().lock().write_all(bytes),
    }
}

/// A line of talk. Nobody may be listening.
pub(crate) fn talk(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", escaped_lines(line));
}

/// An error with its causes, one line each.
pub(crate) fn error(error: &Error, hint: Option<&str>) {
    talk(&format!("error: {error}"));
    // Libraries repeat the text of a cause that they pass on.
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        if !last.ends_with(&text) {
            talk(&format!("  caused by: {text}"));
        }
        last = text;
    }
    if let Some(hint) = hint {
        talk(&format!("hint: {hint}"));
    }
}
