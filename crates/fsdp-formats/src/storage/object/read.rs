//! Reads an object by position, one range per request.

use std::io;
use std::path::Path;
use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path as Key;
use object_store::{Error, GetOptions};

use super::prefix::{Prefix, Store};
use super::runtime::wait;
use crate::error::{FileError, FormatError, IoOutcome as _};
use crate::storage::backend::ReadDirectory;
use crate::storage::paths::relative_parts;
use crate::storage::read_at::{ReadAt, end_within};

/// The bytes of one request; a longer read is several.
const REQUEST_BYTES: usize = 8 << 20;
/// The requests of one read that are under way at once.
const REQUESTS_AT_ONCE: usize = 4;

impl ReadDirectory for Prefix {
    fn name(&self) -> &Path {
        &self.name
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        self.list_names()
    }

    /// Opens an object: one request.
    fn file(&self, relative: &str) -> Result<Box<dyn ReadAt>, FileError> {
        relative_parts(&self.name, relative)?;
        let meta = self
            .head(relative)?
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there is no such object"))
            .during("open", self.name_of(relative))?;
        Ok(Box::new(ObjectFile {
            store: self.store.clone(),
            key: meta.location,
            length: meta.size,
            version: meta.e_tag,
        }))
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

impl ObjectFile {
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
            .chunks_mut(REQUEST_BYTES)
            .enumerate()
            .map(|(index, part)| self.fill(offset + (index * REQUEST_BYTES) as u64, part));
        let all_done = futures_util::stream::iter(requests)
            .buffer_unordered(REQUESTS_AT_ONCE)
            .try_collect::<()>();
        wait(all_done).map_err(|source| FormatError::Read {
            offset,
            length,
            source,
        })
    }
}
