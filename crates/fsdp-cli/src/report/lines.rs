//! The lines of a file of JSON objects, read one at a time.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;

/// The longest line that is read.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Parses each line as a JSON object and calls `handle` with it. Returns the number of lines that
/// could not be parsed. A missing file has no lines.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn parse_lines<T: DeserializeOwned>(
    path: &Path,
    mut handle: impl FnMut(T),
) -> Result<u64> {
    let mut unreadable = 0;
    let outcome = File::open(path).and_then(|file| {
        visit_lines(file, |line, _| match serde_json::from_slice(line) {
            Ok(object) => handle(object),
            // A kill may have cut it off, or another program may have written it.
            Err(_) => unreadable += 1,
        })
    });
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        outcome => {
            outcome.with_context(|| format!("failed to read `{}`", path.display()))?;
            Ok(unreadable)
        }
    }
}

/// Calls `handle` with each line, its line break included, and with the offset of its end. Of a
/// line that is too long only the start is given, which is no JSON object.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn visit_lines(
    source: impl io::Read,
    mut handle: impl FnMut(&[u8], u64),
) -> io::Result<()> {
    let mut reader = BufReader::new(source);
    let mut line = Vec::new();
    let mut line_end = 0;
    loop {
        line.clear();
        let byte_count = reader
            .by_ref()
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)?;
        if byte_count == 0 {
            return Ok(());
        }
        line_end += byte_count as u64;
        // Skip the rest of a line that is too long, which would be read as another line.
        if line.len() as u64 == MAX_LINE_BYTES && !line.ends_with(b"\n") {
            line_end += reader.skip_until(b'\n')? as u64;
        }
        handle(&line, line_end);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_is_no_object_is_counted_and_takes_no_memory() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let long = "x".repeat(3 * MAX_LINE_BYTES as usize);
        write!(file, "1\n{long}\nno\n2\n3").unwrap();
        let mut taken: Vec<u64> = Vec::new();
        assert_eq!(
            parse_lines(file.path(), |number| taken.push(number)).unwrap(),
            2
        );
        assert_eq!(taken, [1, 2, 3]);
        assert_eq!(
            parse_lines(Path::new("no/such/file"), |number: u64| taken.push(number)).unwrap(),
            0
        );
    }
}
