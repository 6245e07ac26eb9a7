//! The pages of the book.

use std::path::Path;

use anyhow::Result;

use crate::files::{collect, read};

/// A page of the book.
pub(super) struct Page {
    /// Its path below `docs/src`.
    pub(super) name: String,
    pub(super) text: String,
}

/// Reads all pages, sorted by name.
pub(super) fn read_all(source: &Path) -> Result<Vec<Page>> {
    let mut files = Vec::new();
    collect(source, &mut files)?;
    let mut pages = Vec::new();
    for path in files {
        if path.extension().is_some_and(|extension| extension == "md") {
            let name = path.strip_prefix(source)?.to_string_lossy().into_owned();
            let text = read(&path)?;
            pages.push(Page { name, text });
        }
    }
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(pages)
}
