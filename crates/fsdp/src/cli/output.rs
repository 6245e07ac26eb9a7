//! The only place where the command prints. stdout is data, stderr is talk.

use std::io::{self, Write as _};

use anyhow::{Context, Result};
use serde::Serialize;

/// A line of data.
///
/// # Errors
/// stdout is closed or full.
pub(crate) fn data(line: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context("failed to write to stdout")
}

/// A value as one line of JSON.
///
/// # Errors
/// As [`data`].
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    data(&serde_json::to_string(value).context("failed to write JSON")?)
}

/// A line of talk. Nobody may be listening.
pub(crate) fn talk(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// An error with its causes, one line each.
pub(crate) fn error(error: &anyhow::Error, hint: Option<&str>) {
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
