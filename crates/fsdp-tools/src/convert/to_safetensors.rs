//! Writing safetensors: one file, Hugging Face's layout, or torch's shards.

use std::collections::HashSet;

use fsdp_digest::{BoxPlace, Digest, StateDigest, Sum};
use fsdp_formats::checkpoint::{Checkpoint, VALUES_FILE};
use fsdp_formats::internals::{
    DIGESTS, DIGESTS_LAYOUT, FileIntegrity, Header, INTEGRITY_FILE, Integrity, PATHS,
    PlannedPayload, RANK_NOTE, SHARDING, SHARDS, Sidecar, VALUES_HASH, charge_text, check_copy,
    decode_values, digests_text, encode_paths, encode_values, layout_text, shard_name, values_hash,
    values_names, write_payloads, wrong_box,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::storage::Staging;
use fsdp_formats::writer::PayloadSource;
use fsdp_formats::{FileError, Location};
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::old_values::OldValues;
use super::output::{
    Conversion, Converted, Streamed, commit_file, rows_of_rank, saturating_bytes, summary,
};

/// A tensor of the file to be written: its key, its dtype, and the box of it that the file holds.
#[derive(Debug, Clone)]
pub(super) struct Piece<'a> {
    pub(super) fqn: &'a str,
    pub(super) dtype: DType,
    pub(super) bounds: TensorBox,
}

impl Piece<'_> {
    fn bytes(&self) -> u64 {
        saturating_bytes(&self.bounds.sizes, self.dtype)
    }
}

/// The tensors that were inside values, by the keys that they get.
pub(super) type Inside<'a> = IndexMap<String, &'a PlainTensor>;

/// The contents of a checkpoint besides tensors: the values that safetensors cannot hold, the paths
/// of keys that cannot be told from the flat keys, and the notes in its headers.
pub(super) struct SideContents {
    values: IndexMap<String, PlainValue>,
    paths: Option<String>,
    notes: IndexMap<String, String>,
    /// The keys of the tensors that have keys of their own.
    tensors: HashSet<String>,
}

impl SideContents {
    /// Reads all values and notes of a checkpoint.
    pub(super) fn read(source: &dyn Checkpoint) -> Result<Self, FileError> {
        let metadata = source.metadata();
        let mut values = IndexMap::new();
        for (fqn, _) in metadata.values() {
            values.insert(fqn.to_owned(), source.read_value(fqn)?);
        }
        Ok(SideContents {
            values,
            paths: encode_paths(metadata),
            notes: source
                .notes()
                .into_iter()
                .map(|(key, text)| (key.to_owned(), text.to_owned()))
                .collect(),
            tensors: metadata.tensors().map(|(fqn, _)| fqn.to_owned()).collect(),
        })
    }

    /// Encodes the values file, if there are values, and returns the tensors that were inside
    /// values.
    pub(super) fn encode(&self) -> Result<(Option<Vec<u8>>, Inside<'_>), FileError> {
        let mut inside = IndexMap::new();
        if self.values.is_empty() {
            return Ok((None, inside));
        }
        let bytes = encode_values(&self.values, &mut |path, tensor| {
            let key = self.free_key(path, &inside);
            inside.insert(key.clone(), tensor);
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
        decode_values(&bytes, &mut |_| Ok(empty.clone())).map_err(|source| FileError::Encode {
            fqn: VALUES_FILE.to_owned(),
            source,
        })?;
        Ok((Some(bytes), inside))
    }

    /// Returns the key for a tensor that was inside a value: its path, with a number behind it if
    /// that is taken.
    fn free_key(&self, path: String, inside: &Inside<'_>) -> String {
        let mut key = path.clone();
        // Many tensors may have one path. A number that counts all of them is mostly free at once.
        let mut number = inside.len();
        while inside.contains_key(&key)
            || self.tensors.contains(&key)
            || self.values.contains_key(&key)
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
            texts.extend(self.notes.clone());
            if let Some(paths) = &self.paths {
                texts.insert(PATHS.to_owned(), paths.clone());
            }
        }
        texts
    }
}

/// Returns all tensors of the source, whole, and those that were inside values.
pub(super) fn whole_tensors<'a>(
    source: &'a dyn Checkpoint,
    inside: &'a Inside<'a>,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for (fqn, tensor) in source.metadata().tensors() {
        pieces.push(Piece {
            fqn,
            dtype: tensor.properties.dtype,
            bounds: TensorBox::whole(&tensor.shape),
        });
    }
    for (fqn, tensor) in inside {
        pieces.push(Piece {
            fqn,
            dtype: tensor.dtype,
            bounds: TensorBox::whole(&tensor.shape),
        });
    }
    pieces
}

/// The sums over the elements of tensors that files of a checkpoint have, by key.
pub(super) type Sums<'a> = IndexMap<&'a str, Sum>;

/// The texts of a file's header, made from the sums over its tensors.
pub(super) type Texts<'t, 'a> =
    dyn Fn(&Sums<'a>) -> Result<IndexMap<String, String>, FileError> + 't;

/// Encodes the header of a file, with the places of all tensors. Recorded digests are tied to this
/// header.
fn header(texts: &IndexMap<String, String>, pieces: &[Piece<'_>]) -> Result<Vec<u8>, FileError> {
    if !texts.contains_key(DIGESTS) {
        return encode_header(texts, pieces);
    }
    // The layout includes the length of the header, in which its text stands: one of the same
    // length holds its place.
    let mut texts = texts.clone();
    texts.insert(DIGESTS_LAYOUT.to_owned(), layout_text(0, []));
    let data = encode_header(&texts, pieces)?.len() as u64;
    let mut at = 0u64;
    let tensors = pieces.iter().map(|piece| {
        let start = at;
        at = at.saturating_add(piece.bytes());
        (piece.fqn, piece.dtype, &piece.bounds.sizes[..], start)
    });
    texts.insert(DIGESTS_LAYOUT.to_owned(), layout_text(data, tensors));
    encode_header(&texts, pieces)
}

/// The texts of a header that readers take as JSON, within limits.
const JSON_TEXTS: [&str; 4] = [PATHS, DIGESTS, SHARDING, RANK_NOTE];

/// Encodes the header of a file. One that readers would refuse for its size is an error.
fn encode_header(
    texts: &IndexMap<String, String>,
    pieces: &[Piece<'_>],
) -> Result<Vec<u8>, FileError> {
    for key in JSON_TEXTS {
        if let Some(text) = texts.get(key) {
            charge_text(text, "memory for a text of the header").map_err(|source| {
                FileError::Encode {
                    fqn: key.to_owned(),
                    source,
                }
            })?;
        }
    }
    let tensors = pieces
        .iter()
        .map(|piece| (piece.fqn, piece.dtype, &piece.bounds.sizes[..]));
    Header::encode(texts, tensors).map_err(|source| FileError::Encode {
        fqn: String::new(),
        source,
    })
}

/// Returns the digests of all that the files have: of tensors from the sums over their elements, of
/// values from themselves.
fn digests(streamed: &Streamed<'_>, side: &SideContents, sums: &Sums<'_>) -> StateDigest {
    let tensors = streamed.source.metadata().tensors().map(|(fqn, tensor)| {
        // Before the elements are written, there are no sums yet.
        let sum = sums.get(fqn).copied().unwrap_or_default();
        (
            fqn.to_owned(),
            sum.finish(tensor.properties.dtype, &tensor.shape),
        )
    });
    let values = side
        .values
        .iter()
        .map(|(fqn, value)| (fqn.clone(), Digest::of_value(value)));
    tensors.chain(values).collect()
}

/// The safetensors files of a checkpoint that is being written.
pub(super) struct Files<'w> {
    pub(super) staging: &'w Staging,
    pub(super) source: &'w dyn PayloadSource,
    /// The tensors over whose elements sums are made. A tensor that was inside a value is digested
    /// with that.
    pub(super) digested: &'w Metadata,
    pub(super) threads: usize,
}

impl<'w> Files<'w> {
    fn new(staging: &'w Staging, streamed: &'w Streamed<'_>) -> Self {
        Files {
            staging,
            source: streamed,
            digested: streamed.source.metadata(),
            threads: streamed.options.threads,
        }
    }

    /// Returns the position of each piece in its tensor.
    fn places(&self, pieces: &[Piece<'_>]) -> Result<Vec<Option<BoxPlace>>, FileError> {
        let mut places = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let element = piece.dtype.size_in_bytes() as usize;
            places.push(match self.digested.tensor(piece.fqn) {
                Some(tensor) => Some(
                    BoxPlace::new(&tensor.shape, &piece.bounds, element)
                        .map_err(|error| wrong_box(piece.fqn, &error))?,
                ),
                None => None,
            });
        }
        Ok(places)
    }

    /// Writes one safetensors file and adds to the sums over its tensors. `texts` makes the texts
    /// of the header. It is called again once the sums are known, and must then return texts of the
    /// same lengths.
    pub(super) fn write<'a>(
        &self,
        name: Option<&str>,
        texts: &Texts<'_, 'a>,
        pieces: &[Piece<'a>],
        sums: &mut Sums<'a>,
    ) -> Result<FileIntegrity, FileError> {
        let places = self.places(pieces)?;
        // The header comes first, so its length must be known. Its text may change, its length not.
        let mut at = header(&texts(sums)?, pieces)?.len() as u64;
        let mut payloads = Vec::with_capacity(pieces.len());
        for (piece, place) in pieces.iter().zip(&places) {
            payloads.push(PlannedPayload {
                fqn: piece.fqn,
                bounds: &piece.bounds,
                offset: at,
                length: piece.bytes(),
                place: place.as_ref(),
            });
            at = at.saturating_add(piece.bytes());
        }
        let file = match name {
            Some(name) => self.staging.create(name, at)?,
            None => self.staging.create_single(at)?,
        };
        let written = write_payloads(&*file, &payloads, self.source, self.threads, None)?;
        for (piece, written) in pieces.iter().zip(&written) {
            sums.entry(piece.fqn).or_default().add(written.sum);
        }
        let header = header(&texts(sums)?, pieces)?;
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

/// Distributes tensors over files, in order, so that no file has more than this many bytes of
/// tensors. A larger tensor gets a file of its own.
pub(super) fn files_of<'a>(
    pieces: impl IntoIterator<Item = Piece<'a>>,
    max_file_bytes: u64,
) -> Vec<Vec<Piece<'a>>> {
    let mut files: Vec<Vec<Piece<'a>>> = vec![Vec::new()];
    let mut filled = 0u64;
    for piece in pieces {
        let length = piece.bytes();
        // A file with one tensor may be larger than the limit.
        if filled > 0 && filled.saturating_add(length) > max_file_bytes {
            files.push(Vec::new());
            filled = 0;
        }
        filled = filled.saturating_add(length);
        if let Some(file) = files.last_mut() {
            file.push(piece);
        }
    }
    files
}

/// Returns the report of a conversion whose values are in a file beside the tensors.
fn with_sidecar(source: &dyn Checkpoint, file: Option<String>) -> Converted {
    Converted {
        aside: source
            .metadata()
            .values()
            .map(|(fqn, _)| fqn.to_owned())
            .collect(),
        aside_file: file,
        ..summary(source)
    }
}

/// Writes one file to `target`, and its values beside it.
pub(super) fn write_file(
    conversion: Conversion<'_>,
    target: &Location,
) -> Result<Converted, FileError> {
    let Conversion {
        source,
        staging,
        options,
        ..
    } = conversion;
    let side = SideContents::read(source)?;
    let (values, inside) = side.encode()?;
    let streamed = Streamed {
        source,
        options,
        extra: inside.clone(),
    };
    let old = OldValues::new(target)?;
    let hash = values.as_deref().map(values_hash);
    // Without values no file gets the second name, so any hash will do.
    let [values_name, pending_name, _] =
        values_names(&old.name, hash.as_deref().unwrap_or_default());
    let sidecar = Sidecar {
        name: &values_name,
        pending_name: &pending_name,
        bytes: values.as_deref(),
        is_unneeded: &|name| old.is_unneeded(name),
    };
    // The commit checks this again. A conversion that would be refused there need not begin.
    if values.is_some() && old.folder.join(&values_name).exists()? {
        staging.check_sidecar(&values_name)?;
        sidecar.find_unneeded(old.folder.name(), vec![values_name.clone()])?;
    }
    // The digests are in the header, which is written again once the elements are summed.
    let mut sums = Sums::new();
    Files::new(&staging, &streamed).write(
        None,
        &|sums| {
            let digests = digests_text(&digests(&streamed, &side, sums)).map_err(|source| {
                FileError::Encode {
                    fqn: DIGESTS.to_owned(),
                    source,
                }
            })?;
            let mut texts = side.texts(true);
            texts.extend(hash.clone().map(|hash| (VALUES_HASH.to_owned(), hash)));
            texts.insert(DIGESTS.to_owned(), digests);
            Ok(texts)
        },
        &whole_tensors(source, &inside),
        &mut sums,
    )?;
    check_copy(
        staging.target(),
        source.digests(),
        &digests(&streamed, &side, &sums),
    )?;
    commit_file(staging, Some(sidecar))?;
    Ok(with_sidecar(source, values.map(|_| values_name)))
}

/// A directory of safetensors files that is being written.
pub(super) struct DirectoryWriter<'w> {
    pub(super) staging: Staging,
    pub(super) streamed: Streamed<'w>,
    side: &'w SideContents,
    pub(super) integrity: Integrity,
    pub(super) sums: Sums<'w>,
}

impl<'w> DirectoryWriter<'w> {
    /// Claims the directory, and copies the files of other programs.
    pub(super) fn new(
        conversion: Conversion<'w>,
        side: &'w SideContents,
        inside: &Inside<'w>,
    ) -> Result<Self, FileError> {
        let Conversion {
            source,
            staging,
            extra,
            options,
        } = conversion;
        staging.claim()?;
        Ok(DirectoryWriter {
            integrity: Integrity {
                files: extra.copy(&staging)?,
                ..Integrity::default()
            },
            staging,
            streamed: Streamed {
                source,
                options,
                extra: inside.clone(),
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
        pieces: &[Piece<'w>],
    ) -> Result<(), FileError> {
        let files = Files::new(&self.staging, &self.streamed);
        let written = files.write(Some(&name), &|_| Ok(texts.clone()), pieces, &mut self.sums)?;
        self.integrity.files.insert(name, written);
        Ok(())
    }

    /// Writes the small files and the hashes of all files, and commits the directory.
    pub(super) fn finish(
        mut self,
        values: Option<Vec<u8>>,
        index: Option<Vec<u8>>,
    ) -> Result<Converted, FileError> {
        let source = self.streamed.source;
        let digests = digests(&self.streamed, self.side, &self.sums);
        check_copy(self.staging.target(), source.digests(), &digests)?;
        self.integrity.digests = Some(digests);
        // The integrity file covers the small files too, so they are hashed before it is written.
        let values_file = values.as_ref().map(|_| VALUES_FILE.to_owned());
        for (name, bytes) in [(INDEX, index), (VALUES_FILE, values)] {
            if let Some(bytes) = bytes {
                let mut hashes = FileIntegrity::default();
                hashes.push_bytes(&bytes);
                self.staging.write(name, &bytes)?;
                self.integrity.files.insert(name.to_owned(), hashes);
            }
        }
        let bytes = self.integrity.encode().map_err(|source| FileError::File {
            path: self.staging.directory().join(INTEGRITY_FILE),
            source,
        })?;
        self.staging.commit(INTEGRITY_FILE, &bytes)?;
        Ok(with_sidecar(source, values_file))
    }
}

/// The file with the index of a directory.
const INDEX: &str = "model.safetensors.index.json";

/// Returns the name of one of several files.
fn file_name(number: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", number + 1)
}

/// Encodes the index of files with these tensors. One that readers would refuse for its size is an
/// error.
fn encode_index(files: &[Vec<Piece<'_>>], total_size: u64) -> Result<Vec<u8>, FileError> {
    let mut weight_map = serde_json::Map::new();
    for (number, file) in files.iter().enumerate() {
        let name = file_name(number, files.len());
        for piece in file {
            weight_map.insert(piece.fqn.to_owned(), name.clone().into());
        }
    }
    let index = serde_json::to_vec_pretty(&serde_json::json!({
        "metadata": { "total_size": total_size },
        "weight_map": weight_map,
    }))
    .expect("a JSON value can be written as JSON");
    charge_text(&index, "memory for the index").map_err(|source| FileError::Encode {
        fqn: INDEX.to_owned(),
        source,
    })?;
    Ok(index)
}

/// Writes Hugging Face's layout: files of bounded size, and their index.
pub(super) fn write_directory(
    conversion: Conversion<'_>,
    max_file_bytes: u64,
) -> Result<Converted, FileError> {
    let side = SideContents::read(conversion.source)?;
    let (values, inside) = side.encode()?;
    let pieces = whole_tensors(conversion.source, &inside);
    let total = pieces
        .iter()
        .fold(0u64, |total, piece| total.saturating_add(piece.bytes()));
    let files = files_of(pieces, max_file_bytes);
    // An index that readers would refuse is found before anything is written.
    let index = encode_index(&files, total)?;
    let mut writer = DirectoryWriter::new(conversion, &side, &inside)?;
    for (number, file) in files.iter().enumerate() {
        let name = file_name(number, files.len());
        writer.write_file(name, &side.texts(number == 0), file)?;
    }
    writer.finish(values, Some(index))
}

/// Writes what torch's `HuggingFaceStorageWriter(save_distributed=True)` does: a file for each
/// rank, with its rows of every tensor.
pub(super) fn write_shards(
    conversion: Conversion<'_>,
    ranks: usize,
) -> Result<Converted, FileError> {
    let side = SideContents::read(conversion.source)?;
    let (values, inside) = side.encode()?;
    let whole = whole_tensors(conversion.source, &inside);
    let mut writer = DirectoryWriter::new(conversion, &side, &inside)?;
    // torch's rule gives rows to the first ranks: the others have no file.
    let shards = (1..ranks)
        .take_while(|&rank| !pieces_of_rank(&whole, &inside, rank, ranks).is_empty())
        .count()
        + 1;
    for rank in 0..shards {
        let pieces = pieces_of_rank(&whole, &inside, rank, ranks);
        let mut sharding = serde_json::Map::new();
        for piece in &pieces {
            let mut offsets = piece.bounds.offsets.clone();
            // A type that safetensors does not know is stored as bytes, in a dimension of their
            // own.
            if piece.dtype.safetensors_name().is_none() {
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
        texts.insert(SHARDS.to_owned(), shards.to_string());
        writer.write_file(shard_name(rank), &texts, &pieces)?;
    }
    writer.finish(values, None)
}

/// Returns a rank's rows of all tensors. Tensors that cannot be cut are in the first file: scalars,
/// empty tensors, and tensors that were inside values.
fn pieces_of_rank<'a>(
    whole: &[Piece<'a>],
    inside: &Inside<'_>,
    rank: usize,
    ranks: usize,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for piece in whole {
        let is_cut = !piece.bounds.sizes.is_empty()
            && !piece.bounds.is_empty()
            && !inside.contains_key(piece.fqn);
        if !is_cut {
            if rank == 0 {
                pieces.push(piece.clone());
            }
            continue;
        }
        let bounds = rows_of_rank(&piece.bounds.sizes, rank, ranks);
        if !bounds.is_empty() {
            pieces.push(Piece { bounds, ..*piece });
        }
    }
    pieces
}
