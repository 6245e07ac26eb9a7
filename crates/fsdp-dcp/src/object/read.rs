//! Reading an object by position, a range a request.

use std::fmt;
use std::io;
use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::Error;
use object_store::path::Path as Key;

use super::{Prefix, Store, ranged, wait};
use crate::error::{CheckpointError, FormatError};
use crate::source::{ReadAt, beyond_the_end};

/// A longer read is several requests…
const REQUEST: usize = 8 << 20;
/// … of which this many are under way at once.
const AT_ONCE: usize = 4;

/// An object, as it was when it was opened: should another one take its place, reading it fails.
pub(crate) struct ObjectFile {
    store: Arc<dyn Store>,
    key: Key,
    length: u64,
    version: Option<String>,
}

impl fmt::Debug for ObjectFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectFile").field("key", &self.key).field("length", &self.length).finish_non_exhaustive()
    }
}

impl ObjectFile {
    /// Opens an object: one request.
    pub(crate) fn open(prefix: &Prefix, below: &str) -> Result<Self, CheckpointError> {
        let meta = prefix.head(below)?.ok_or_else(|| {
            let missing = io::Error::new(io::ErrorKind::NotFound, "there is no such object");
            CheckpointError::io("open", prefix.name_of(below))(missing)
        })?;
        Ok(ObjectFile { store: prefix.store().clone(), key: meta.location, length: meta.size, version: meta.e_tag })
    }

    /// Fills `dst` with one request.
    async fn fill(&self, offset: u64, dst: &mut [u8]) -> Result<(), Error> {
        let range = offset..offset + dst.len() as u64;
        let got = self.store.get_opts(&self.key, ranged(range, self.version.clone())).await?;
        let short = || Error::Generic {
            store: "object store",
            source: "the answer has another length than what was asked for".into(),
        };
        let (mut filled, mut pieces) = (0, got.into_stream());
        while let Some(piece) = pieces.try_next().await? {
            let into = dst.get_mut(filled..filled + piece.len()).ok_or_else(short)?;
            into.copy_from_slice(&piece);
            filled += piece.len();
        }
        if filled == dst.len() { Ok(()) } else { Err(short()) }
    }
}

impl ReadAt for ObjectFile {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let length = dst.len();
        if offset.checked_add(length as u64).is_none_or(|end| end > self.length) {
            return Err(beyond_the_end(offset, length));
        }
        if length == 0 {
            return Ok(());
        }
        let parts = dst.chunks_mut(REQUEST).enumerate();
        let parts = parts.map(|(index, part)| self.fill(offset + (index * REQUEST) as u64, part));
        let all = futures_util::stream::iter(parts).buffer_unordered(AT_ONCE).try_collect::<()>();
        wait(all).map_err(|source| FormatError::Read { offset, length: length as u64, source })
    }
}
