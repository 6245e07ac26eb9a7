//! Writing safetensors: one file, Hugging Face's layout, or torch's shards.

use fsdp_digest::{BoxPlace, Digest, StateDigest, Sum};
use fsdp_formats::checkpoint::{Checkpoint, VALUES_FILE};
use fsdp_formats::internals::{
    DIGESTS, DIGESTS_LAYOUT, FileIntegrity, Header, Integrity, PATHS, PlannedPayload, RANK_NOTE,
    SHARDING, SHARDS, Sidecar, VALUES_HASH, ValuesFile, charge_text, check_copy, digests_text,
    encode_paths, encode_values, is_stored_as_bytes, layout_text, shard_name, values_hash,
    values_names, write_payloads, wrong_box,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::storage::Staging;
use fsdp_formats::writer::PayloadSource;
use fsdp_formats::{FileError, Location};
use fsdp_layout::boxes::saturating_bytes;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::copied::{commit_with_hashes, write_hashed};
use super::old_values::OldValues;
use super::output::{
    CheckpointPayloads, Conversion, InnerTensors, commit_file, encode_error, rows_of_rank,
};

/// A tensor of the file to be written: its key, its dtype, and the box of it that the file holds.
#[derive(Debug, Clone)]
pub(super) struct Piece<'a> {
    pub(super) fqn: &'a str,
    pub(super) dtype: DType,
    pub(super) bounds: TensorBox,
}

impl Piece<'_> {
    /// Returns the number of bytes of the box.
    fn byte_len(&self) -> u64 {
        saturating_bytes(&self.bounds.sizes, self.dtype)
    }
}

/// The contents of a checkpoint besides tensors: the values that safetensors cannot hold, the paths
/// of keys that cannot be told from the flat keys, and the notes in its headers.
pub(super) struct SideContents<'s> {
    source: &'s dyn Checkpoint,
    values: IndexMap<String, PlainValue>,
}

impl<'s> SideContents<'s> {
    /// Reads all values of a checkpoint.
    pub(super) fn read(source: &'s dyn Checkpoint) -> Result<Self, FileError> {
        let mut values = IndexMap::new();
        for (fqn, _) in source.metadata().values() {
            values.insert(fqn.to_owned(), source.read_value(fqn)?);
        }
        Ok(SideContents { source, values })
    }

    /// Encodes the values, and returns the content of the values file, if there are values, and the
    /// tensors that were inside values.
    pub(super) fn encode(&self) -> Result<(Option<Vec<u8>>, InnerTensors<'_>), FileError> {
        let mut inner_tensors = IndexMap::new();
        if self.values.is_empty() {
            return Ok((None, inner_tensors));
        }
        let bytes = encode_values(&self.values, &mut |path, tensor| {
            let key = self.find_free_key(path, &inner_tensors);
            inner_tensors.insert(key.clone(), tensor);
            key
        })
        .map_err(|(fqn, source)| FileError::Encode { fqn, source })?;
        // A reader limits the memory that values may take. Values beyond that must not be written.
        // The elements of the tensors do not count.
        let empty = PlainTensor {
            dtype: DType::U8,
            shape: Vec::new(),
            data: Vec::new(),
        };
        let file = ValuesFile::new(bytes).map_err(|source| encode_error(VALUES_FILE, source))?;
        for fqn in self.values.keys() {
            if let Some(Err(source)) = file.read(fqn, &mut |_| Ok(empty.clone())) {
                return Err(encode_error(fqn, source));
            }
        }
        Ok((Some(file.into_text()), inner_tensors))
    }

    /// Returns the key for a tensor that was inside a value: its path, with a number behind it if
    /// that is taken.
    fn find_free_key(&self, path: String, inner_tensors: &InnerTensors<'_>) -> String {
        let mut key = path.clone();
        // Many tensors may have one path. A number that counts all of them is mostly free at once.
        let mut number = inner_tensors.len();
        while inner_tensors.contains_key(&key) || self.source.metadata().entries.contains_key(&key)
        {
            key = format!("{path}.{number}");
            number += 1;
        }
        key
    }

    /// Returns the texts for the header of a file; the first one has the notes and the paths.
    pub(super) fn texts(&self, is_first: bool) -> IndexMap<String, String> {
        let mut texts = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
        if is_first {
            for (key, text) in self.source.notes() {
                texts.insert(key.to_owned(), text.to_owned());
            }
            if let Some(paths) = encode_paths(self.source.metadata()) {
                texts.insert(PATHS.to_owned(), paths);
            }
        }
        texts
    }

    /// Returns the digests of all that the files have.
    fn digests(&self, sums: &Sums) -> StateDigest {
        digests_of(self.source, &self.values, sums)
    }
}

/// Returns the digests of all that is written: of tensors from the sums over their elements, of
/// values from themselves.
pub(super) fn digests_of<'v>(
    source: &dyn Checkpoint,
    values: impl IntoIterator<Item = (&'v String, &'v PlainValue)>,
    sums: &Sums,
) -> StateDigest {
    let tensors = source.metadata().tensors().map(|(fqn, tensor)| {
        // Before the elements are written, there are no sums yet.
        let sum = sums.get(fqn).copied().unwrap_or_default();
        let digest = sum.finish(tensor.properties.dtype, &tensor.shape);
        (fqn.to_owned(), digest)
    });
    let values = values
        .into_iter()
        .map(|(fqn, value)| (fqn.clone(), Digest::of_value(value)));
    tensors.chain(values).collect()
}

/// Returns all tensors of the source, whole, and those that were inside values.
pub(super) fn list_whole_tensors<'a>(
    source: &'a dyn Checkpoint,
    inner_tensors: &'a InnerTensors<'a>,
) -> Vec<Piece<'a>> {
    let stored_tensors = source
        .metadata()
        .tensors()
        .map(|(fqn, tensor)| (fqn, tensor.properties.dtype, &tensor.shape));
    let inner = inner_tensors
        .iter()
        .map(|(fqn, tensor)| (fqn.as_str(), tensor.dtype, &tensor.shape));
    stored_tensors
        .chain(inner)
        .map(|(fqn, dtype, shape)| Piece {
            fqn,
            dtype,
            bounds: TensorBox::whole(shape),
        })
        .collect()
}

/// The sums over the elements of tensors that files of a checkpoint have, by key.
pub(super) type Sums = IndexMap<String, Sum>;

/// Encodes the header of a file, with the places of all tensors. Recorded digests are tied to this
/// header: beside them it has a text of the layout, which no longer fits if another program writes
/// the file again.
fn encode_header(
    texts: &IndexMap<String, String>,
    pieces: &[Piece<'_>],
) -> Result<Vec<u8>, FileError> {
    if !texts.contains_key(DIGESTS) {
        return encode_texts(texts, pieces);
    }
    // The layout includes the length of the header, in which its text stands: one of the same
    // length holds its place.
    let mut texts = texts.clone();
    texts.insert(DIGESTS_LAYOUT.to_owned(), layout_text(0, []));
    let header_bytes = encode_texts(&texts, pieces)?.len() as u64;
    let mut end = 0u64;
    let tensors = pieces.iter().map(|piece| {
        let start = end;
        end = end.saturating_add(piece.byte_len());
        (piece.fqn, piece.dtype, &piece.bounds.sizes[..], start)
    });
    texts.insert(
        DIGESTS_LAYOUT.to_owned(),
        layout_text(header_bytes, tensors),
    );
    encode_texts(&texts, pieces)
}

/// The texts of a header that readers take as JSON, within limits.
const JSON_TEXTS: [&str; 4] = [PATHS, DIGESTS, SHARDING, RANK_NOTE];

/// Encodes the header of a file with these texts. One that readers would refuse for its size is an
/// error.
fn encode_texts(
    texts: &IndexMap<String, String>,
    pieces: &[Piece<'_>],
) -> Result<Vec<u8>, FileError> {
    for key in JSON_TEXTS {
        if let Some(text) = texts.get(key) {
            charge_text(text, "memory for a text of the header")
                .map_err(|source| encode_error(key, source))?;
        }
    }
    let tensors = pieces
        .iter()
        .map(|piece| (piece.fqn, piece.dtype, &piece.bounds.sizes[..]));
    Header::encode(texts, tensors).map_err(|source| encode_error("", source))
}

/// A writer of safetensors files.
pub(super) struct FileWriter<'w> {
    pub(super) staging: &'w Staging,
    pub(super) source: &'w dyn PayloadSource,
    /// The tensors over whose elements sums are made. A tensor that was inside a value is digested
    /// with that.
    pub(super) digested: &'w Metadata,
    pub(super) threads: usize,
}

impl<'w> FileWriter<'w> {
    /// Makes the writer of a checkpoint's own tensors, over all of which sums are made.
    fn new(staging: &'w Staging, payloads: &'w CheckpointPayloads<'_>) -> Self {
        FileWriter {
            staging,
            source: payloads,
            digested: payloads.source.metadata(),
            threads: payloads.options.thread_count(),
        }
    }

    /// Returns the position of each piece in its tensor; `None` for a piece that is not digested.
    fn find_places(&self, pieces: &[Piece<'_>]) -> Result<Vec<Option<BoxPlace>>, FileError> {
        let mut places = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let element_bytes = piece.dtype.size_in_bytes() as usize;
            let tensor = self.digested.tensor(piece.fqn);
            let place = tensor
                .map(|tensor| BoxPlace::new(&tensor.shape, &piece.bounds, element_bytes))
                .transpose()
                .map_err(|error| wrong_box(piece.fqn, &error))?;
            places.push(place);
        }
        Ok(places)
    }

    /// Writes one safetensors file, adds to the sums over its tensors, and returns the file's
    /// hashes. `texts` makes the texts of the header. It is called again once the sums are known,
    /// and must then return texts of the same lengths.
    pub(super) fn write(
        &self,
        name: Option<&str>,
        texts: impl Fn(&Sums) -> Result<IndexMap<String, String>, FileError>,
        pieces: &[Piece<'_>],
        sums: &mut Sums,
    ) -> Result<FileIntegrity, FileError> {
        let places = self.find_places(pieces)?;
        // The header comes first, so its length must be known. Its text may change, its length not.
        let mut end = encode_header(&texts(sums)?, pieces)?.len() as u64;
        let mut payloads = Vec::with_capacity(pieces.len());
        for (piece, place) in pieces.iter().zip(&places) {
            payloads.push(PlannedPayload {
                fqn: piece.fqn,
                bounds: &piece.bounds,
                offset: end,
                length: piece.byte_len(),
                place: place.as_ref(),
            });
            end = end.saturating_add(piece.byte_len());
        }
        let file = match name {
            Some(name) => self.staging.create(name, end)?,
            None => self.staging.create_single(end)?,
        };
        let written = write_payloads(&*file, &payloads, self.source, self.threads, None)?;
        for (piece, written) in pieces.iter().zip(&written) {
            sums.entry(piece.fqn.to_owned())
                .or_default()
                .add(written.sum);
        }
        let header = encode_header(&texts(sums)?, pieces)?;
        file.write_at(0, &header)?;
        file.finish()?;
        // The header and each tensor are segments of their own, so that reading one checks little
        // else.
        let mut integrity = FileIntegrity::default();
        integrity.push_bytes(&header);
        for (payload, written) in payloads.iter().zip(written) {
            integrity.push(payload.length, payload.block_length(), written.hashes);
        }
        Ok(integrity)
    }
}

/// Divides tensors into files, in order, so that no file has more than this many bytes of tensors.
/// A larger tensor gets a file of its own.
pub(super) fn split_into_files<'a>(
    pieces: impl IntoIterator<Item = Piece<'a>>,
    max_file_bytes: u64,
) -> Vec<Vec<Piece<'a>>> {
    let mut files: Vec<Vec<Piece<'a>>> = vec![Vec::new()];
    let mut file_bytes = 0u64;
    for piece in pieces {
        let length = piece.byte_len();
        // A file with one tensor may be larger than the limit.
        if file_bytes > 0 && file_bytes.saturating_add(length) > max_file_bytes {
            files.push(Vec::new());
            file_bytes = 0;
        }
        file_bytes = file_bytes.saturating_add(length);
        if let Some(file) = files.last_mut() {
            file.push(piece);
        }
    }
    files
}

/// Writes one file to `target`, and its values beside it. Returns the name of the values file, if
/// there are values.
pub(super) fn write_file(
    conversion: Conversion<'_>,
    target: &Location,
) -> Result<Option<String>, FileError> {
    let Conversion {
        source,
        staging,
        options,
        ..
    } = conversion;
    let side = SideContents::read(source)?;
    let (values, inner_tensors) = side.encode()?;
    let payloads = CheckpointPayloads {
        source,
        options,
        inner_tensors: &inner_tensors,
    };
    let old_values = OldValues::new(target)?;
    let hash = values.as_deref().map(values_hash);
    // Without values no file gets the second name, so any hash will do.
    let [values_name, pending_name] =
        values_names(&old_values.name, hash.as_deref().unwrap_or_default());
    let sidecar = Sidecar {
        name: &values_name,
        pending_name: &pending_name,
        bytes: values.as_deref(),
        is_unneeded: &|name| old_values.is_unneeded(name),
    };
    // A conversion that would be refused at the commit need not begin.
    if values.is_some() {
        // The longest name: that which the values have before the commit.
        old_values.folder.join(&pending_name).check_target()?;
        if old_values.folder.join(&values_name).exists()? {
            staging.check_sidecar(&values_name)?;
            sidecar.find_unneeded(old_values.folder.name(), vec![values_name.clone()])?;
        }
    }
    // The digests are in the header, which is written again once the elements are summed.
    let mut sums = Sums::new();
    FileWriter::new(&staging, &payloads).write(
        None,
        |sums: &Sums| {
            let digests = digests_text(&side.digests(sums))
                .map_err(|source| encode_error(DIGESTS, source))?;
            let mut texts = side.texts(true);
            texts.extend(hash.clone().map(|hash| (VALUES_HASH.to_owned(), hash)));
            texts.insert(DIGESTS.to_owned(), digests);
            Ok(texts)
        },
        &list_whole_tensors(source, &inner_tensors),
        &mut sums,
    )?;
    source.check_elements_read()?;
    check_copy(staging.target(), source.digests(), &side.digests(&sums))?;
    commit_file(staging, Some(sidecar))?;
    Ok(values.map(|_| values_name))
}

/// A writer of a directory of safetensors files.
pub(super) struct DirectoryWriter<'w> {
    pub(super) staging: Staging,
    pub(super) payloads: CheckpointPayloads<'w>,
    side: &'w SideContents<'w>,
    pub(super) integrity: Integrity,
    pub(super) sums: Sums,
}

impl<'w> DirectoryWriter<'w> {
    /// Returns a writer to the staging directory, which it claims, and copies the files of other
    /// programs there.
    pub(super) fn new(
        conversion: Conversion<'w>,
        side: &'w SideContents<'w>,
        inner_tensors: &'w InnerTensors<'w>,
    ) -> Result<Self, FileError> {
        let Conversion {
            source,
            staging,
            copied_files,
            options,
        } = conversion;
        staging.claim()?;
        Ok(DirectoryWriter {
            integrity: Integrity {
                files: copied_files.copy_to(&staging)?,
                ..Integrity::default()
            },
            staging,
            payloads: CheckpointPayloads {
                source,
                options,
                inner_tensors,
            },
            side,
            sums: Sums::new(),
        })
    }

    /// Writes one file with these texts in its header.
    fn write_file(
        &mut self,
        name: String,
        texts: &IndexMap<String, String>,
        pieces: &[Piece<'_>],
    ) -> Result<(), FileError> {
        let writer = FileWriter::new(&self.staging, &self.payloads);
        let hashes = writer.write(Some(&name), |_| Ok(texts.clone()), pieces, &mut self.sums)?;
        self.integrity.files.insert(name, hashes);
        Ok(())
    }

    /// Writes the small files and the hashes of all files, and commits the directory. Returns the
    /// name of the values file, if there are values.
    pub(super) fn finish(
        mut self,
        values: Option<Vec<u8>>,
        index: Option<Vec<u8>>,
    ) -> Result<Option<String>, FileError> {
        let digests = self.side.digests(&self.sums);
        self.side.source.check_elements_read()?;
        check_copy(self.staging.target(), self.side.source.digests(), &digests)?;
        self.integrity.digests = Some(digests);
        // The integrity file covers the small files too, so they are hashed before it is written.
        let values_file = values.as_ref().map(|_| VALUES_FILE.to_owned());
        for (name, bytes) in [(INDEX, index), (VALUES_FILE, values)] {
            if let Some(bytes) = bytes {
                let hashes = write_hashed(&self.staging, name, &bytes)?;
                self.integrity.files.insert(name.to_owned(), hashes);
            }
        }
        commit_with_hashes(self.staging, &self.integrity)?;
        Ok(values_file)
    }
}

/// The file with the index of a directory.
const INDEX: &str = "model.safetensors.index.json";

/// Returns the name of the file at this index, from 0, of `count` files.
fn numbered_file_name(index: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", index + 1)
}

/// Encodes the index of files with these tensors. One that readers would refuse for its size is an
/// error.
fn encode_index(files: &[Vec<Piece<'_>>], total_bytes: u64) -> Result<Vec<u8>, FileError> {
    let mut weight_map = serde_json::Map::new();
    for (index, file) in files.iter().enumerate() {
        let name = numbered_file_name(index, files.len());
        for piece in file {
            weight_map.insert(piece.fqn.to_owned(), name.clone().into());
        }
    }
    let index = serde_json::to_vec_pretty(&serde_json::json!({
        "metadata": { "total_size": total_bytes },
        "weight_map": weight_map,
    }))
    .expect("a JSON value can be written as JSON");
    charge_text(&index, "memory for the index").map_err(|source| encode_error(INDEX, source))?;
    Ok(index)
}

/// Writes Hugging Face's layout: files of bounded size, and their index. Returns the name of the
/// values file, if there are values.
pub(super) fn write_directory(
    conversion: Conversion<'_>,
    max_file_bytes: u64,
) -> Result<Option<String>, FileError> {
    let side = SideContents::read(conversion.source)?;
    let (values, inner_tensors) = side.encode()?;
    let pieces = list_whole_tensors(conversion.source, &inner_tensors);
    let total_bytes = pieces
        .iter()
        .fold(0u64, |total, piece| total.saturating_add(piece.byte_len()));
    let files = split_into_files(pieces, max_file_bytes);
    // An index that readers would refuse is found before anything is written.
    let json = encode_index(&files, total_bytes)?;
    let mut writer = DirectoryWriter::new(conversion, &side, &inner_tensors)?;
    for (index, file) in files.iter().enumerate() {
        let name = numbered_file_name(index, files.len());
        writer.write_file(name, &side.texts(index == 0), file)?;
    }
    writer.finish(values, Some(json))
}

/// Writes a safetensors file for each rank, with its rows of every tensor, as torch's
/// `HuggingFaceStorageWriter(save_distributed=True)` does. Ranks without rows get no file. Returns
/// the name of the values file, if there are values.
pub(super) fn write_shards(
    conversion: Conversion<'_>,
    rank_count: usize,
) -> Result<Option<String>, FileError> {
    let side = SideContents::read(conversion.source)?;
    let (values, inner_tensors) = side.encode()?;
    let whole_tensors = list_whole_tensors(conversion.source, &inner_tensors);
    let mut writer = DirectoryWriter::new(conversion, &side, &inner_tensors)?;
    // torch cuts rows into equal chunks from the first rank on, so the ranks without rows come
    // last.
    let shard_count = (1..rank_count)
        .take_while(|&rank| {
            !pieces_of_rank(&whole_tensors, &inner_tensors, rank, rank_count).is_empty()
        })
        .count()
        + 1;
    for rank in 0..shard_count {
        let pieces = pieces_of_rank(&whole_tensors, &inner_tensors, rank, rank_count);
        let mut sharding = serde_json::Map::new();
        for piece in &pieces {
            let mut offsets = piece.bounds.offsets.clone();
            // The bytes of a tensor that is stored as such have a dimension of their own.
            if is_stored_as_bytes(piece.dtype, offsets.len()) {
                offsets.push(0);
            }
            let place = serde_json::json!({ "saved_offsets": offsets });
            sharding.insert(piece.fqn.to_owned(), place);
        }
        let mut texts = side.texts(rank == 0);
        texts.insert("DCP_VERSION".to_owned(), "1.0".to_owned());
        texts.insert(
            SHARDING.to_owned(),
            serde_json::Value::Object(sharding).to_string(),
        );
        texts.insert(SHARDS.to_owned(), shard_count.to_string());
        writer.write_file(shard_name(rank), &texts, &pieces)?;
    }
    writer.finish(values, None)
}

/// Returns a rank's rows of all tensors. Tensors that cannot be cut are in the first file: scalars,
/// empty tensors, rows of packed numbers, and tensors that were inside values.
fn pieces_of_rank<'a>(
    whole_tensors: &[Piece<'a>],
    inner_tensors: &InnerTensors<'_>,
    rank: usize,
    rank_count: usize,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for piece in whole_tensors {
        // A row of packed numbers must not be cut inside of one byte.
        let row_rank = if piece.dtype.packing().is_some() {
            2
        } else {
            1
        };
        let is_cut = piece.bounds.rank() >= row_rank
            && !piece.bounds.is_empty()
            && !inner_tensors.contains_key(piece.fqn);
        if !is_cut {
            if rank == 0 {
                pieces.push(piece.clone());
            }
            continue;
        }
        let bounds = rows_of_rank(&piece.bounds.sizes, rank, rank_count);
        if !bounds.is_empty() {
            pieces.push(Piece { bounds, ..*piece });
        }
    }
    pieces
}
