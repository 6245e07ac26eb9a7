//! A checkpoint that is assembled from pieces of files: boxes of tensors that lie in any layout,
//! and values that are held in memory.
//!
//! It is used for formats without their own metadata: files of `torch.save`, one or many, NumPy,
//! GGUF, and DeepSpeed's shards. Each format adds the places of its boxes; reading, the comparison
//! of copies and error messages are shared.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_digest::{Digest, StateDigest};
use fsdp_layout::boxes::copy_runs;
use fsdp_layout::{DType, KeyPath, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::blocks::{BlockFormat, BlockedTensor};
use super::byte_order::reverse_numbers;
use super::checkpoint::{Checkpoint, Format, KeyFilter};
use super::index::Index;
use super::lookup::{
    check_replica, fill_from_chunks, find_value, item_error, lookup_error, tensor_of,
};
use super::opaque::{describe_bytes, hash_of_item};
use super::replicas::check_replicas;
use super::structure::Structure;
use crate::budget::Budget;
use crate::error::{FileError, FormatError};
use crate::limits::PICKLE_FACTOR;
use crate::metadata::{
    BytesEntry, Chunk, Entry, Metadata, Replica, StorageInfo, TensorEntry, TensorProperties,
};
use crate::payload::slot::Slot;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::read_at::{BlockReader, ReadAt, Window};
use crate::strided::{StoredElements, StridedLayout};
use crate::zip::{Deflated, Stored, StoredRecords};

/// The place in its file where the storage of a piece begins.
#[derive(Debug, Clone)]
pub(crate) enum StorageStart {
    /// The storage begins at this offset.
    Offset(u64),
    /// The storage is the data of the record at this position in the directory of a zip archive.
    /// The header of the record tells where its data begins, and is read with the first piece. Its
    /// checksum is compared once all of it was read.
    Record(Arc<StoredRecords>, usize),
    /// The storage begins at this offset, in a record whose checksum is compared once all of it was
    /// read.
    Stored(Arc<Stored>, u64),
    /// The storage begins at this offset of the decompressed bytes of a record.
    Deflated(Arc<Deflated>, u64),
}

/// The way in which the elements of a piece are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elements {
    /// Plain elements, little-endian.
    Plain,
    /// Plain elements, big-endian; they are read as little-endian.
    BigEndian,
    /// Quantized in blocks along the last dimension; they are read as `f32`.
    Blocks(BlockFormat),
}

/// One box of a tensor, and its place in a file.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    /// The file, relative to the checkpoint.
    pub(crate) file: Arc<str>,
    /// The beginning of its storage.
    pub(crate) start: StorageStart,
    /// The places of its elements in the storage; its bounds are the box in the whole tensor.
    pub(crate) layout: StridedLayout,
    /// The kind of its elements.
    pub(crate) elements: Elements,
}

/// A value that was read, or located, when the checkpoint was opened.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Held {
    /// A plain value.
    Plain(PlainValue),
    /// A plain value that may be large, and is read when it is wanted.
    Unread(Unread),
    /// An opaque value: the type of the object in it, and its description.
    Opaque(String, PlainValue),
    /// An opaque value that is known by its bytes only: the kind of what they are, and their place.
    /// They are read when the value is described.
    Stored(String, StorageInfo),
}

/// A plain value of which only the place is known: see [`Held::Unread`].
#[derive(Debug, Clone)]
pub(crate) struct Unread {
    /// The bytes that it is read from.
    pub(crate) stored: StorageInfo,
    /// Reads it from these bytes.
    pub(crate) read: fn(&dyn ReadAt) -> Result<PlainValue, FormatError>,
}

impl PartialEq for Unread {
    /// Returns `true` if both are read from the same bytes.
    fn eq(&self, other: &Self) -> bool {
        self.stored == other.stored
    }
}

impl Held {
    /// Makes the opaque value of a whole file, which is of this kind.
    pub(crate) fn whole_file(kind: String, file: &str, length: u64) -> Self {
        Held::Stored(kind, StorageInfo::new(file, 0, length))
    }

    /// Returns `true` if the values of two files are the same, bit for bit.
    pub(crate) fn is_same(&self, other: &Held) -> bool {
        match (self, other) {
            (Held::Plain(value), Held::Plain(other)) => value.same_bits(other),
            (Held::Unread(unread), Held::Unread(other)) => unread == other,
            (Held::Opaque(kind, value), Held::Opaque(other_kind, other)) => {
                kind == other_kind && value.same_bits(other)
            }
            (Held::Stored(kind, stored), Held::Stored(other_kind, other)) => {
                kind == other_kind && stored == other
            }
            _ => false,
        }
    }
}

/// An assembled checkpoint.
#[derive(Debug)]
pub(crate) struct Assembled {
    path: PathBuf,
    format: Format,
    directory: CheckedDirectory,
    metadata: Metadata,
    pieces: HashMap<String, HashMap<StorageInfo, Piece>>,
    values: HashMap<String, Held>,
    quantizers: HashMap<String, PlainValue>,
    structure: Option<Structure>,
}

/// The approximate number of bytes of memory that the description of a piece takes.
const PIECE_COST_BYTES: usize = 512;

/// The parts of a checkpoint that are known so far.
#[derive(Debug)]
pub(crate) struct Assembler {
    checkpoint: Assembled,
    /// The boxes of each tensor that are there already.
    boxes: HashMap<String, HashSet<TensorBox>>,
    /// The file in which each tensor and value was found first.
    first_files: HashMap<String, Arc<str>>,
    /// The files so far.
    files: HashSet<Arc<str>>,
    /// A value of each file that has copies of values.
    copied_values: HashMap<Arc<str>, String>,
    /// The memory that descriptions of pieces may still take; each file adds to it.
    budget: Budget,
}

impl Assembler {
    /// Begins a checkpoint without any tensors. Its keys have paths in a nested state dict.
    pub(crate) fn new(format: Format, path: &Path, directory: CheckedDirectory) -> Self {
        Assembler {
            checkpoint: Assembled {
                path: path.to_owned(),
                format,
                directory,
                metadata: Metadata {
                    planner_data: Some(IndexMap::new()),
                    ..Metadata::default()
                },
                pieces: HashMap::new(),
                values: HashMap::new(),
                quantizers: HashMap::new(),
                structure: None,
            },
            boxes: HashMap::new(),
            first_files: HashMap::new(),
            files: HashSet::new(),
            copied_values: HashMap::new(),
            budget: Budget::new(0, 1),
        }
    }

    /// Returns the files that are read.
    pub(crate) fn directory(&self) -> &CheckedDirectory {
        &self.checkpoint.directory
    }

    /// Returns `true` if there is a tensor or a value at this path.
    pub(crate) fn has(&self, path: &KeyPath) -> bool {
        self.checkpoint
            .metadata
            .entries
            .contains_key(&path.flat_key())
    }

    /// Adds pieces of a tensor. A box that exists already is another copy, which is compared before
    /// the tensor is converted.
    ///
    /// # Errors
    /// The key has a value, a tensor of another dtype or shape, or the same box in the same file
    /// already; too many pieces for the memory budget.
    pub(crate) fn add_tensor(
        &mut self,
        path: &KeyPath,
        file: &Arc<str>,
        dtype: DType,
        shape: &[usize],
        pieces: Vec<Piece>,
    ) -> Result<(), FileError> {
        let fqn = path.flat_key();
        self.charge(
            file,
            fqn.len() + pieces.len() * (PIECE_COST_BYTES + 64 * shape.len()),
        )?;
        let first_file = self
            .first_files
            .entry(fqn.clone())
            .or_insert_with(|| file.clone())
            .clone();
        let metadata = &mut self.checkpoint.metadata;
        metadata
            .planner_data
            .get_or_insert_default()
            .entry(fqn.clone())
            .or_insert_with(|| path.clone());
        let entry = metadata.entries.entry(fqn.clone()).or_insert_with(|| {
            Entry::Tensor(TensorEntry {
                properties: TensorProperties::new(dtype),
                shape: shape.to_vec(),
                chunks: Vec::new(),
            })
        });
        let Entry::Tensor(tensor) = entry else {
            return Err(self.differing_error(
                fqn,
                file,
                "is a value in one and a tensor in the other",
            ));
        };
        if tensor.shape != shape && *first_file != **file {
            let what = format!(
                "`{fqn}` of shape {shape:?}, where `{first_file}` has it in {:?} (parts of ranks that do not say where they belong, \
                 as FSDP1's LOCAL_STATE_DICT has them),",
                tensor.shape
            );
            return Err(self
                .checkpoint
                .directory
                .file_error(file, FormatError::unsupported(what)));
        }
        if tensor.properties.dtype != dtype || tensor.shape != shape {
            let what = format!(
                "is a `{}` tensor of shape {:?} in one, and a `{dtype}` tensor of shape {shape:?} in the other",
                tensor.properties.dtype, tensor.shape
            );
            return Err(self.differing_error(fqn, file, what));
        }
        let boxes = self.boxes.entry(fqn.clone()).or_default();
        let tensor_pieces = self.checkpoint.pieces.entry(fqn.clone()).or_default();
        for piece in pieces {
            let bounds = piece.layout.bounds.clone();
            let stored = piece.storage_info(dtype);
            let is_copy = !boxes.insert(bounds.clone());
            if is_copy && *first_file == **file && !bounds.is_empty() {
                let source = FormatError::malformed("checkpoint", format!("it has `{fqn}` twice"));
                return Err(self.checkpoint.directory.file_error(file, source));
            }
            tensor_pieces.insert(stored.clone(), piece);
            if is_copy {
                metadata.replicas.push(Replica {
                    fqn: fqn.clone(),
                    bounds: Some(bounds),
                    stored,
                });
            } else {
                tensor.chunks.push(Chunk {
                    bounds,
                    stored: Some(stored),
                });
            }
        }
        Ok(())
    }

    /// Charges memory for one of many copies of a value of this file to the budget.
    pub(crate) fn charge_copy(&mut self, file: &Arc<str>, value: &Held) -> Result<(), FileError> {
        let bytes = match value {
            Held::Plain(value) | Held::Opaque(_, value) => memory_bytes(value),
            Held::Unread(_) | Held::Stored(..) => 0,
        };
        self.charge(file, PIECE_COST_BYTES + bytes)
    }

    /// Charges memory for the description of pieces to the budget.
    fn charge(&mut self, file: &Arc<str>, bytes: usize) -> Result<(), FileError> {
        if self.files.insert(file.clone()) {
            let length = self.checkpoint.directory.file(file)?.len();
            self.budget.allow(length.saturating_mul(PICKLE_FACTOR));
        }
        self.budget
            .charge("memory for pieces of tensors", bytes as u64)
            .map_err(|over| self.checkpoint.directory.file_error(file, over.into()))
    }

    /// Adds a value. If another file holds a value at the same path, the two must be equal, and the
    /// first one is kept.
    pub(crate) fn add_value(
        &mut self,
        path: &KeyPath,
        file: &Arc<str>,
        value: Held,
    ) -> Result<(), FileError> {
        let fqn = path.flat_key();
        let metadata = &mut self.checkpoint.metadata;
        if metadata.entries.contains_key(&fqn) {
            let first_value = self.checkpoint.values.get(&fqn);
            if first_value.is_some_and(|first_value| first_value.is_same(&value)) {
                if let Held::Plain(_) = value {
                    self.copied_values.entry(file.clone()).or_insert(fqn);
                }
                return Ok(());
            }
            return Err(self.differing_error(fqn, file, "is not the same in both"));
        }
        let stored = match &value {
            Held::Unread(Unread { stored, .. }) | Held::Stored(_, stored) => stored.clone(),
            Held::Plain(_) | Held::Opaque(..) => StorageInfo::new(&**file, 0, 0),
        };
        metadata
            .planner_data
            .get_or_insert_default()
            .insert(fqn.clone(), path.clone());
        metadata.entries.insert(
            fqn.clone(),
            Entry::Bytes(BytesEntry {
                stored: Some(stored),
            }),
        );
        self.first_files.insert(fqn.clone(), file.clone());
        self.checkpoint.values.insert(fqn, value);
        Ok(())
    }

    /// Adds how a tensor is quantized. If another file holds the tensor too, it must be quantized
    /// in the same way there.
    pub(crate) fn add_quantizer(
        &mut self,
        fqn: String,
        file: &Arc<str>,
        quantizer: PlainValue,
    ) -> Result<(), FileError> {
        let first_quantizer = self
            .checkpoint
            .quantizers
            .entry(fqn.clone())
            .or_insert_with(|| quantizer.clone());
        if first_quantizer.same_bits(&quantizer) {
            return Ok(());
        }
        Err(self.differing_error(fqn, file, "has another scale or zero point"))
    }

    /// Returns the error of a key that has other content in `file` than where it was found first.
    fn differing_error(&self, fqn: String, file: &str, what: impl Into<String>) -> FileError {
        let first_file = self.first_files.get(&fqn).map(ToString::to_string);
        FileError::Differing {
            first: first_file.expect("the file of each key is recorded when the key is added"),
            second: file.to_owned(),
            what: what.into(),
            fqn,
        }
    }

    /// Completes the checkpoint. `structure` has the containers of its keys, if they are known. It
    /// is dropped, without an error, if its keys are not exactly those of the checkpoint.
    pub(crate) fn finish(mut self, structure: Option<Structure>) -> Assembled {
        self.note_files_of_copies();
        let keys = &self.checkpoint.metadata.entries;
        let structure = structure.filter(|structure| {
            let leaves = structure.leaves();
            leaves.len() == keys.len() && keys.keys().all(|key| leaves.contains(key.as_str()))
        });
        Assembled {
            structure,
            ..self.checkpoint
        }
    }

    /// Notes a copy in each file of which nothing else is stored, so that it is known as a file of
    /// the checkpoint.
    fn note_files_of_copies(&mut self) {
        let metadata = &mut self.checkpoint.metadata;
        let stored: HashSet<&str> = metadata
            .stored()
            .map(|(_, _, stored)| stored.relative_path.as_str())
            .collect();
        let mut copies: Vec<(&Arc<str>, &String)> = self
            .copied_values
            .iter()
            .filter(|(file, _)| !stored.contains(&***file))
            .collect();
        copies.sort();
        let replicas = copies.into_iter().map(|(file, fqn)| Replica {
            fqn: fqn.clone(),
            bounds: None,
            stored: StorageInfo::new(&**file, 0, 0),
        });
        let replicas: Vec<Replica> = replicas.collect();
        for replica in &replicas {
            let file = &replica.stored.relative_path;
            self.checkpoint.directory.note_copies(file);
        }
        metadata.replicas.extend(replicas);
    }

    /// Sorts the keys in the order of an index.
    pub(crate) fn sort_as(&mut self, index: &Index) {
        index.sort(&mut self.checkpoint.metadata);
    }
}

/// Returns about how many bytes of memory a value takes.
fn memory_bytes(value: &PlainValue) -> usize {
    let inner = match value {
        PlainValue::Str(text) => text.len(),
        PlainValue::Bytes(bytes) | PlainValue::BigInt(bytes) => bytes.len(),
        PlainValue::List(items) | PlainValue::Tuple(items) | PlainValue::Set(items) => {
            items.iter().map(memory_bytes).sum()
        }
        PlainValue::Dict(items) => items
            .iter()
            .map(|(key, value)| memory_bytes(key) + memory_bytes(value))
            .sum(),
        PlainValue::Tensor(tensor) => tensor.data.len(),
        PlainValue::Typed(_, description) => memory_bytes(description),
        _ => 0,
    };
    size_of::<PlainValue>() + inner
}

impl Piece {
    /// Returns the place of the piece for the metadata. The places of two pieces of a tensor always
    /// differ.
    fn storage_info(&self, dtype: DType) -> StorageInfo {
        let start = match &self.start {
            StorageStart::Offset(start) | StorageStart::Stored(_, start) => *start,
            StorageStart::Record(archive, index) => archive.directory.records[*index].header_offset,
            StorageStart::Deflated(record, _) => {
                let (offset, length) = record.stored_range();
                return StorageInfo {
                    transforms: vec!["deflate".to_owned()],
                    ..StorageInfo::new(&*self.file, offset, length)
                };
            }
        };
        let (offset, length) = match self.elements {
            Elements::Plain | Elements::BigEndian => {
                // Strides and offsets come from a file, which may say anything: a read checks them.
                let first_position = self.layout.offset;
                let element_bytes = dtype.size_in_bytes();
                let count = if self.layout.bounds.is_empty() {
                    0
                } else {
                    let last_position = self.layout.last().unwrap_or(first_position);
                    last_position.saturating_sub(first_position) + 1
                };
                (
                    start.saturating_add(first_position.saturating_mul(element_bytes)),
                    count.saturating_mul(element_bytes),
                )
            }
            Elements::Blocks(format) => (
                start,
                format.bytes_of_elements(self.layout.bounds.numel() as u64),
            ),
        };
        StorageInfo::new(&*self.file, offset, length)
    }

    /// Returns the record that its storage is, if something of that was read.
    fn record_read(&self) -> Option<&Stored> {
        match &self.start {
            StorageStart::Record(archive, index) => archive.if_read(*index),
            // An array is all of its record.
            StorageStart::Offset(_) | StorageStart::Stored(..) | StorageStart::Deflated(..) => None,
        }
    }

    /// Reads the box `overlap`, which lies in the piece, into its place in a slot.
    fn read(
        &self,
        file: &dyn ReadAt,
        dtype: DType,
        overlap: &TensorBox,
        slot: &mut Slot<'_>,
    ) -> Result<(), FormatError> {
        let decompressed;
        let noted;
        let (bytes, start): (&dyn ReadAt, u64) = match &self.start {
            StorageStart::Offset(start) => (file, *start),
            StorageStart::Record(archive, index) => {
                let record = archive.get(file, *index)?;
                noted = record.reader(file);
                (&noted, record.start())
            }
            StorageStart::Stored(record, start) => {
                noted = record.reader(file);
                (&noted, *start)
            }
            StorageStart::Deflated(record, start) => {
                decompressed = record.reader(file);
                (&decompressed, *start)
            }
        };
        let plain_elements = StoredElements {
            storage: start,
            element: dtype.size_in_bytes() as usize,
            layout: &self.layout,
        };
        match self.elements {
            Elements::Plain => {
                plain_elements.read(&mut BlockReader::new(bytes), overlap, slot)?;
            }
            Elements::BigEndian => {
                // The digest is that of the elements as they are read.
                let digest = slot.digest.take();
                plain_elements.read(&mut BlockReader::new(bytes), overlap, slot)?;
                for run in copy_runs(overlap, &slot.bounds, overlap) {
                    let range = run.src * plain_elements.element
                        ..(run.src + run.len) * plain_elements.element;
                    reverse_numbers(dtype, &mut slot.bytes[range]);
                }
                slot.digest = digest;
                slot.add_to_digest(overlap, plain_elements.element);
            }
            Elements::Blocks(format) => BlockedTensor {
                file: bytes,
                start,
                format,
                bounds: &self.layout.bounds,
            }
            .read(overlap, slot)?,
        }
        Ok(())
    }
}

impl Assembled {
    /// Fills the part of a slot's box that lies in the piece that is stored at a place. If no piece
    /// is stored there, that is an error.
    fn fill(
        &self,
        fqn: &str,
        dtype: DType,
        stored: &StorageInfo,
        slot: &mut Slot<'_>,
    ) -> Result<(), FileError> {
        let pieces = self.pieces.get(fqn);
        let piece = pieces
            .and_then(|pieces| pieces.get(stored))
            .ok_or_else(|| FileError::not_stored(fqn))?;
        let Some(overlap) = piece.layout.bounds.intersect(&slot.bounds) else {
            return Ok(());
        };
        let file = self.directory.file(&piece.file)?;
        piece
            .read(&*file, dtype, &overlap, slot)
            .map_err(|source| item_error(&self.directory, fqn, stored, source))
    }

    /// Reads a plain value of which only the place is known.
    fn read_unread(&self, fqn: &str, unread: &Unread) -> Result<PlainValue, FileError> {
        let stored = &unread.stored;
        let file = self.directory.file(&stored.relative_path)?;
        Window::new(&*file, stored.offset, stored.length)
            .and_then(|bytes| (unread.read)(&bytes))
            .map_err(|source| item_error(&self.directory, fqn, stored, source))
    }
}

impl Checkpoint for Assembled {
    fn format(&self) -> Format {
        self.format
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn structure(&self) -> Option<&Structure> {
        self.structure.as_ref()
    }

    fn directory(&self) -> &CheckedDirectory {
        &self.directory
    }

    fn digests(&self) -> Option<&StateDigest> {
        self.directory.digests()
    }

    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let tensor = tensor_of(&self.metadata, fqn)?;
        fill_from_chunks(fqn, tensor, slots, &|_, stored, slot| {
            self.fill(fqn, tensor.properties.dtype, stored, slot)
        })
    }

    fn quantizer(&self, fqn: &str) -> Result<Option<PlainValue>, FileError> {
        Ok(self.quantizers.get(fqn).cloned())
    }

    fn read_replica(
        &self,
        replica: &Replica,
        bounds: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let (dtype, _) = check_replica(&self.metadata, replica, bounds, dst)?;
        let mut slot = Slot::new(bounds.clone(), dst);
        self.fill(&replica.fqn, dtype, &replica.stored, &mut slot)
    }

    /// Returns the value itself: its copies were compared when the checkpoint was opened.
    fn read_value_replica(&self, replica: &Replica) -> Result<PlainValue, FileError> {
        self.read_value(&replica.fqn)
    }

    fn check_copies(&self, keys: KeyFilter<'_>) -> Result<(), FileError> {
        check_replicas(self, keys)
    }

    fn check_elements_read(&self) -> Result<(), FileError> {
        for (fqn, pieces) in &self.pieces {
            for (stored, piece) in pieces {
                let Some(record) = piece.record_read() else {
                    continue;
                };
                let file = self.directory.file(&piece.file)?;
                record
                    .read_rest(&*file)
                    .map_err(|source| item_error(&self.directory, fqn, stored, source))?;
            }
        }
        Ok(())
    }

    fn opaque_type(&self, fqn: &str) -> Result<Option<String>, FileError> {
        match self.values.get(fqn) {
            Some(Held::Opaque(kind, _) | Held::Stored(kind, _)) => Ok(Some(kind.clone())),
            Some(Held::Plain(_) | Held::Unread(_)) | None => Ok(None),
        }
    }

    fn describe_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        match self.values.get(fqn) {
            Some(Held::Plain(value) | Held::Opaque(_, value)) => Ok(value.clone()),
            Some(Held::Unread(unread)) => self.read_unread(fqn, unread),
            Some(Held::Stored(kind, stored)) => {
                let hash = hash_of_item(self, fqn, stored)?.to_le_bytes();
                let digest = Digest::of_value(&PlainValue::Bytes(hash.to_vec()));
                let data = format!("{} bytes with the digest {digest}", stored.length);
                Ok(describe_bytes(kind.clone(), data.into()))
            }
            None => Err(lookup_error(&self.metadata, fqn, "value")),
        }
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        let source = match self.values.get(fqn) {
            Some(Held::Plain(value)) => return Ok(value.clone()),
            Some(Held::Unread(unread)) => return self.read_unread(fqn, unread),
            Some(Held::Opaque(kind, _)) => FormatError::Opaque { of: kind.clone() },
            Some(Held::Stored(kind, _)) => FormatError::NotRead { of: kind.clone() },
            None => return Err(lookup_error(&self.metadata, fqn, "value")),
        };
        let stored = find_value(&self.metadata, fqn)?;
        Err(item_error(&self.directory, fqn, stored, source))
    }
}
