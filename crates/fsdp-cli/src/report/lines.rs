//! The lines of a file of JSON objects, read one at a time.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;

/// The longest line that is read.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A line of a file.
#[cfg_attr(
    not(feature = "train"),
    expect(dead_code, reason = "only `fsdp train` needs the ends of lines")
)]
pub(crate) struct JsonLine<T> {
    /// The offset of its end.
    pub(crate) end: u64,
    /// `true` if a line break ends it.
    pub(crate) is_whole: bool,
    /// Its object; `None` if it could not be parsed, for example because a kill cut it off or
    /// another program wrote it.
    pub(crate) object: Option<T>,
}

/// Parses each line as a JSON object and calls `take` with it. Returns the number of lines that
/// could not be parsed. A missing file has no lines.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T)) -> Result<u64> {
    let mut unreadable = 0;
    let visited = File::open(path).and_then(|file| {
        visit(file, |line: JsonLine<T>| match line.object {
            Some(object) => take(object),
            None => unreadable += 1,
        })
    });
    match visited {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        visited => {
            visited.with_context(|| format!("failed to read `{}`", path.display()))?;
            Ok(unreadable)
        }
    }
}

/// Calls `take` with each line, parsed as a JSON object.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn visit<T: DeserializeOwned>(
    from: impl io::Read,
    mut take: impl FnMut(JsonLine<T>),
) -> io::Result<()> {
    let mut reader = BufReader::new(from);
    let mut bytes = Vec::new();
    let mut end = 0;
    loop {
        bytes.clear();
        let read = reader
            .by_ref()
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut bytes)?;
        if read == 0 {
            return Ok(());
        }
        end += read as u64;
        // A kill may have cut off the last line.
        let mut is_whole = bytes.ends_with(b"\n");
        let object = serde_json::from_slice(&bytes).ok();
        // Skip the rest of a line that is too long, which would be read as another line.
        if bytes.len() as u64 == MAX_LINE_BYTES && !is_whole {
            is_whole = skip_line(&mut reader, &mut end)?;
        }
        take(JsonLine {
            end,
            is_whole,
            object,
        });
    }
}

/// Skips the rest of a line, and moves `end` to its end. Returns `true` if a line break ends
/// it.
fn skip_line(reader: &mut impl io::BufRead, end: &mut u64) -> io::Result<bool> {
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Ok(false);
        }
        let line_break = buffer.iter().position(|&byte| byte == b'\n');
        let skipped = line_break.map_or(buffer.len(), |at| at + 1);
        reader.consume(skipped);
        *end += skipped as u64;
        if line_break.is_some() {
            return Ok(true);
        }
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
        assert_eq!(read(file.path(), |number| taken.push(number)).unwrap(), 2);
        assert_eq!(taken, [1, 2, 3]);
        assert_eq!(
            read(Path::new("no/such/file"), |number: u64| taken.push(number)).unwrap(),
            0
        );
    }
}
