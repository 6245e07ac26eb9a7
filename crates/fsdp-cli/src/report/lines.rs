//! The lines of a file of JSON objects, read one at a time.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;

/// The longest line that is read.
const LONGEST: u64 = 1 << 20;

/// Parses each line as a JSON object and calls `take` with it. Returns the number of lines that could not be parsed,
/// for example because a kill cut them off or another program wrote them. A missing file has no lines.
///
/// # Errors
/// The file cannot be read.
pub(super) fn read<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T)) -> Result<u64> {
    let failed = || format!("failed to read `{}`", path.display());
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        file => file.with_context(failed)?,
    };
    let mut reader = BufReader::new(file);
    let (mut line, mut unreadable) = (Vec::new(), 0);
    loop {
        line.clear();
        if reader.by_ref().take(LONGEST).read_until(b'\n', &mut line).with_context(failed)? == 0 {
            return Ok(unreadable);
        }
        match serde_json::from_slice(&line) {
            Ok(object) => take(object),
            Err(_) => unreadable += 1,
        }
        // Skip the rest of a line that is too long, which would be read as another line.
        if line.len() as u64 == LONGEST && !line.ends_with(b"\n") {
            skip_line(&mut reader).with_context(failed)?;
        }
    }
}

/// Skips what is left of a line.
fn skip_line(reader: &mut impl io::BufRead) -> io::Result<()> {
    loop {
        let buffer = reader.fill_buf()?;
        let end = buffer.iter().position(|&byte| byte == b'\n');
        let length = end.map_or(buffer.len(), |end| end + 1);
        let is_over = end.is_some() || buffer.is_empty();
        reader.consume(length);
        if is_over {
            return Ok(());
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
        let long = "x".repeat(3 * LONGEST as usize);
        write!(file, "1\n{long}\nno\n2\n3").unwrap();
        let mut taken: Vec<u64> = Vec::new();
        assert_eq!(read(file.path(), |number| taken.push(number)).unwrap(), 2);
        assert_eq!(taken, [1, 2, 3]);
        assert_eq!(read(Path::new("no/such/file"), |number: u64| taken.push(number)).unwrap(), 0);
    }
}
