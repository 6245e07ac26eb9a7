//! The pages of the book.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// A page of the book.
pub(super) struct Page {
    /// Its path below `docs/src`.
    pub(super) name: String,
    pub(super) text: String,
}

/// Reads all pages, sorted by name.
pub(super) fn read_all(source: &Path) -> Result<Vec<Page>> {
    let mut pages = Vec::new();
    collect(source, source, &mut pages)?;
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(pages)
}

/// Reads the pages below a directory.
fn collect(directory: &Path, source: &Path, pages: &mut Vec<Page>) -> Result<()> {
    for entry in fs::read_dir(directory)
        .with_context(|| format!("failed to list `{}`", directory.display()))?
    {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, source, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let name = path.strip_prefix(source)?.to_string_lossy().into_owned();
            let text = fs::read_to_string(&path)
                .with_context(|| format!("failed to read `{}`", path.display()))?;
            pages.push(Page { name, text });
        }
    }
    Ok(())
}

/// Writes a page or a picture.
#[expect(
    clippy::disallowed_methods,
    reason = "a page or a picture is no checkpoint"
)]
pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("failed to write `{}`", path.display()))
}
