//! Reads an object by position, one range per request.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path as Key;
use object_store::{Error, GetOptions};

use super::prefix::{Prefix, Store};
use super::runtime::wait;
use crate::error::{FileError, FormatError};
use crate::storage::backend::ReadDirectory;
use crate::storage::paths::relative_parts;
use crate::storage::read_at::{ReadAt, end_within};

/// Bytes of one request; a longer read is several.
const REQUEST: usize = 8 << 20;
/// Requests of one read that are under way at once.
const AT_ONCE: usize = 4;

/// The objects below a prefix.
#[derive(Debug)]
pub(super) struct ObjectDirectory {
    prefix: Prefix,
}

impl ObjectDirectory {
    pub(super) fn new(prefix: Prefix) -> Self {
        ObjectDirectory { prefix }
    }
}

impl ReadDirectory for ObjectDirectory {
    fn name(&self) -> &Path {
        self.prefix.name()
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        self.prefix.names()
    }

    fn file(&self, relative: &str) -> Result<Box<dyn ReadAt>, FileError> {
        relative_parts(self.prefix.name(), relative)?;
        Ok(Box::new(ObjectFile::open(&self.prefix, relative)?))
    }

    fn is_object_store(&self) -> bool {
        true
    }

    fn threads_per_reader(&self) -> usize {
        // Requests mostly wait.
        4
    }

    fn bytes_per_read(&self) -> u64 {
        // Fewer bytes would not be worth a request.
        32 << 20
    }
}

/// An object in the version that was opened. If another version takes its place, reading fails.
struct ObjectFile {
    store: Arc<dyn Store>,
    key: Key,
    length: u64,
    version: Option<String>,
}

impl fmt::Debug for ObjectFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectFile")
            .field("key", &self.key)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl ObjectFile {
    /// Opens an object: one request.
    fn open(prefix: &Prefix, below: &str) -> Result<Self, FileError> {
        let meta = prefix.head(below)?.ok_or_else(|| {
            let missing = io::Error::new(io::ErrorKind::NotFound, "there is no such object");
            FileError::io("open", prefix.name_of(below), missing)
        })?;
        Ok(ObjectFile {
            store: prefix.store().clone(),
            key: meta.location,
            length: meta.size,
            version: meta.e_tag,
        })
    }

    /// Fills `dst` with one request.
    async fn fill(&self, offset: u64, dst: &mut [u8]) -> Result<(), Error> {
        let range = offset..offset + dst.len() as u64;
        // Bytes of another version would not fit those that were read before.
        let options = GetOptions::new()
            .with_range(Some(range))
            .with_if_match(self.version.clone());
        let got = self.store.get_opts(&self.key, options).await?;
        let mut filled = 0;
        let mut pieces = got.into_stream();
        while let Some(piece) = pieces.try_next().await? {
            let into = dst
                .get_mut(filled..filled + piece.len())
                .ok_or_else(wrong_length)?;
            into.copy_from_slice(&piece);
            filled += piece.len();
        }
        if filled == dst.len() {
            Ok(())
        } else {
            Err(wrong_length())
        }
    }
}

/// Returns the error of an answer that is longer or shorter than what was asked for.
fn wrong_length() -> Error {
    let source = "the answer has another length than what was asked for".into();
    Error::Generic {
        store: "object store",
        source,
    }
}

impl ReadAt for ObjectFile {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let length = dst.len() as u64;
        end_within(self.length, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let requests = dst
            .chunks_mut(REQUEST)
            .enumerate()
            .map(|(index, part)| self.fill(offset + (index * REQUEST) as u64, part));
        let all_done = futures_util::stream::iter(requests)
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>();
        wait(all_done).map_err(|source| FormatError::Read {
            offset,
            length,
            source,
        })
    }
}
