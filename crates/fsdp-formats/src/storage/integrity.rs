//! The integrity file: hashes of every byte of a checkpoint, in blocks small enough to check
//! partial reads; and the digests of the tensors and values that the bytes are, however they are
//! cut.
//!
//! It lies beside `.metadata`, torch ignores it, and foreign checkpoints have none. It is text, one
//! JSON value per line:
//!
//! ```text
//! {"format":"fsdp-integrity","version":2,"hash":"xxh3-64","files":2}
//! {"path":".metadata","length":1807,"segments":[[1807,16384,"93a1…"]]}
//! {"path":"__0_0.distcp","length":8388608,"segments":[[1088,16384,"…"],[8387072,65536,"…128 hashes of 16 digits…"],…]}
//! {"root":"85e8…","digests":{"model.weight":"cb1c…","step":"b2d2…"}}
//! {"xxh3_128":"…"}
//! ```
//!
//! Each file is cut into *segments* that follow each other without a gap. Each large tensor payload
//! has a segment of its own, so that its first block begins where the payload does. A segment
//! `[length, block, hashes]` has one xxh3-64 for each `block` bytes of it (the last block may be
//! shorter). Blocks are about a 128th of a payload, at least 16 KiB and at most 1 MiB, so that
//! reading a part of a chunk costs little more than that part.
//!
//! The line of digests ([`StateDigest`]) came with version 2; a file without it has version 1.
//! Before the digests it may have the place of the checkpoint in its run ([`Lineage`]). The last
//! line is a hash of all bytes before it.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_digest::{Digest, StateDigest};
use serde::{Deserialize, Serialize};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::error::FormatError;
use crate::limits::{MAX_BLOCK_BYTES, MAX_INTEGRITY_BYTES, check_limit};
use crate::storage::lineage::Lineage;

/// The name of the integrity file in a checkpoint's directory.
pub const INTEGRITY_FILE: &str = ".integrity";

/// Returns the name of the integrity file of a checkpoint that is one file, which lies beside it:
/// `model.safetensors.integrity`.
#[must_use]
pub fn integrity_beside(name: &str) -> String {
    format!("{name}{INTEGRITY_FILE}")
}

/// The version of the format. Later ones are refused.
const INTEGRITY_VERSION: u32 = 2;
/// The version of a file without digests.
const WITHOUT_DIGESTS: u32 = 1;

/// The bytes of the smallest block.
const SMALLEST_BLOCK_BYTES: u64 = 16 << 10;
/// The bytes of the largest block.
const LARGEST_BLOCK_BYTES: u64 = 1 << 20;

/// Returns the length in bytes of the blocks into which a segment of this length is divided for
/// hashing.
#[must_use]
pub fn block_length(segment_bytes: u64) -> u64 {
    (segment_bytes / 128)
        .next_power_of_two()
        .clamp(SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES)
}

/// The hashes of a whole checkpoint, by file (relative to its directory).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Integrity {
    /// The files.
    pub files: BTreeMap<String, FileIntegrity>,
    /// The digests of the tensors and values, where they are known.
    pub digests: Option<StateDigest>,
    /// The place of the checkpoint in its run; only beside digests.
    pub lineage: Option<Lineage>,
}

/// The hashes of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIntegrity {
    segments: Vec<Segment>,
    length: u64,
}

/// A segment of a file, from `offset` to the next segment's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Segment {
    offset: u64,
    length: u64,
    block_bytes: u64,
    hashes: Vec<u64>,
}

/// A range that one hash covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashedBlock {
    /// The bytes, by position in the file.
    pub range: Range<u64>,
    /// Their hash.
    pub hash: u64,
}

impl FileIntegrity {
    /// Returns the number of bytes that the file must have.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns about how many bytes it takes to send this.
    pub(crate) fn wire_bytes(&self) -> u64 {
        self.segments
            .iter()
            .map(|segment| 32 + segment.hashes.len() as u64 * 8)
            .sum()
    }

    /// Appends a segment: its length, its block length, and a hash for each block. An empty one is
    /// left out.
    pub fn push(&mut self, length: u64, block_bytes: u64, hashes: Vec<u64>) {
        if length == 0 {
            return;
        }
        debug_assert_eq!(
            hashes.len() as u64,
            length.div_ceil(block_bytes),
            "each block has a hash"
        );
        self.segments.push(Segment {
            offset: self.length,
            length,
            block_bytes,
            hashes,
        });
        self.length += length;
    }

    /// Appends a segment of these bytes.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        let block_bytes = block_length(bytes.len() as u64);
        self.push(
            bytes.len() as u64,
            block_bytes,
            bytes
                .chunks(block_bytes as usize)
                .map(XxHash3_64::oneshot)
                .collect(),
        );
    }

    /// Returns the block around this position; `None` beyond the end of the file.
    pub(crate) fn block_at(&self, offset: u64) -> Option<HashedBlock> {
        // The last segment that begins at or before the position.
        let index = self
            .segments
            .partition_point(|segment| segment.offset <= offset)
            .checked_sub(1)?;
        let segment = &self.segments[index];
        let offset_in_segment = offset - segment.offset;
        if offset_in_segment >= segment.length {
            return None;
        }
        // The last block of a segment may be shorter than the others.
        let block_index = offset_in_segment / segment.block_bytes;
        let start = segment.offset + block_index * segment.block_bytes;
        let end = (start + segment.block_bytes).min(segment.offset + segment.length);
        Some(HashedBlock {
            range: start..end,
            hash: segment.hashes[block_index as usize],
        })
    }

    /// Returns all blocks in order.
    pub fn blocks(&self) -> impl Iterator<Item = HashedBlock> {
        let mut offset = 0;
        std::iter::from_fn(move || {
            let block = self.block_at(offset)?;
            offset = block.range.end;
            Some(block)
        })
    }
}

/// The first line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLine {
    format: String,
    version: u32,
    hash: String,
    files: usize,
}

/// The line of a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLine<'a> {
    path: String,
    length: u64,
    /// The length, the block length and the hashes of each segment.
    #[serde(borrow)]
    segments: Vec<(u64, u64, &'a str)>,
}

/// The line of the digests, which comes after those of the files.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DigestLine {
    /// The digest of all of them, for people and for other programs.
    root: Digest,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lineage: Option<Lineage>,
    digests: StateDigest,
}

/// The same line, of which only the lineage is read.
#[derive(Deserialize)]
struct LineageLine {
    #[serde(default)]
    lineage: Option<Lineage>,
}

/// The last line: a hash of all bytes before it.
#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HashLine {
    xxh3_128: String,
}

impl HashLine {
    /// Makes the line of a file with these bytes before it.
    fn new(before: &[u8]) -> Self {
        HashLine {
            xxh3_128: format!("{:032x}", XxHash3_128::oneshot(before)),
        }
    }
}

/// Appends a value as a line of JSON.
fn write_line(out: &mut Vec<u8>, value: &impl Serialize) -> Result<(), FormatError> {
    out.extend(serde_json::to_vec(value).map_err(malformed)?);
    out.push(b'\n');
    Ok(())
}

/// Returns hashes as text: 16 hexadecimal digits each.
fn digits_of(hashes: &[u64]) -> String {
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_be_bytes()).collect();
    base16ct::lower::encode_string(&bytes)
}

/// Returns the hashes in a text that [`digits_of`] made; any other text is an error.
fn hashes_of(digits: &str) -> Result<Vec<u64>, FormatError> {
    let bytes = base16ct::mixed::decode_vec(digits)
        .map_err(|_| malformed("a hash is not of hexadecimal digits"))?;
    let (hashes, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        return Err(malformed("a hash is cut short"));
    }
    Ok(hashes
        .iter()
        .map(|&hash| u64::from_be_bytes(hash))
        .collect())
}

/// Reads a line. One that is missing is an error, as an empty one is.
fn parse_line<'l, T: Deserialize<'l>>(line: Option<&'l [u8]>) -> Result<T, FormatError> {
    serde_json::from_slice(line.unwrap_or(b"")).map_err(malformed)
}

fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("integrity file", reason)
}

impl Integrity {
    /// Encodes the integrity file.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let mut out = Vec::new();
        let header = HeaderLine {
            format: "fsdp-integrity".into(),
            version: if self.digests.is_some() {
                INTEGRITY_VERSION
            } else {
                WITHOUT_DIGESTS
            },
            hash: "xxh3-64".into(),
            files: self.files.len(),
        };
        write_line(&mut out, &header)?;
        for (path, file) in &self.files {
            let digits: Vec<String> = file
                .segments
                .iter()
                .map(|segment| digits_of(&segment.hashes))
                .collect();
            let file_line = FileLine {
                path: path.clone(),
                length: file.length,
                segments: file
                    .segments
                    .iter()
                    .zip(&digits)
                    .map(|(segment, digits)| (segment.length, segment.block_bytes, digits.as_str()))
                    .collect(),
            };
            write_line(&mut out, &file_line)?;
        }
        if let Some(digests) = &self.digests {
            let line = DigestLine {
                root: digests.root(),
                lineage: self.lineage.clone(),
                digests: digests.clone(),
            };
            write_line(&mut out, &line)?;
        }
        let hash = HashLine::new(&out);
        write_line(&mut out, &hash)?;
        Ok(out)
    }

    /// Reads an integrity file. Every bit of it counts: any change is an error.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let (header, other_lines) = check_own_hash(bytes)?;
        let mut lines = other_lines
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty());
        let mut files = BTreeMap::new();
        for line in lines.by_ref().take(header.files) {
            let line: FileLine<'_> = parse_line(Some(line))?;
            let mut file = FileIntegrity::default();
            for (length, block_bytes, digits) in line.segments {
                // All lengths are checked before anything is allocated for them, and before a
                // division by the block length.
                let is_sane = length > 0 && (1..=MAX_BLOCK_BYTES).contains(&block_bytes);
                if !is_sane
                    || digits.len() as u64 != length.div_ceil(block_bytes).saturating_mul(16)
                {
                    return Err(malformed("a segment's lengths do not fit its hashes"));
                }
                if file
                    .length
                    .checked_add(length)
                    .is_none_or(|end| end > line.length)
                {
                    return Err(malformed("the segments are longer than their file"));
                }
                file.push(length, block_bytes, hashes_of(digits)?);
            }
            if file.length != line.length {
                return Err(malformed("the segments are shorter than their file"));
            }
            if files.insert(line.path, file).is_some() {
                return Err(malformed("a file stands twice in it"));
            }
        }
        if files.len() != header.files {
            return Err(malformed("the number of files is wrong"));
        }
        let mut digests = None;
        let mut lineage = None;
        if header.version > WITHOUT_DIGESTS {
            let line: DigestLine = parse_line(lines.next())?;
            // Other programs read the root alone, so it must be right too.
            if line.root != line.digests.root() {
                return Err(malformed("the digest of all is not that of the digests"));
            }
            digests = Some(line.digests);
            lineage = line.lineage;
        }
        if lines.next().is_some() {
            return Err(malformed("the number of files is wrong"));
        }
        Ok(Integrity {
            files,
            digests,
            lineage,
        })
    }
}

/// Checks the hash that an integrity file has of itself, and its version. Returns its header, and
/// the lines between the header and that hash.
fn check_own_hash(bytes: &[u8]) -> Result<(HeaderLine, &[u8]), FormatError> {
    check_limit(
        "integrity file length",
        bytes.len() as u64,
        MAX_INTEGRITY_BYTES,
    )?;
    // The last line is checked first: nothing else is believed before its hash.
    let body = bytes
        .strip_suffix(b"\n")
        .ok_or_else(|| malformed("it is cut short"))?;
    let last_line = body.rsplit(|&byte| byte == b'\n').next();
    let hash: HashLine = parse_line(last_line)?;
    let hashed_bytes = &body[..body.len() - last_line.map_or(0, <[u8]>::len)];
    if hash != HashLine::new(hashed_bytes) {
        return Err(malformed(
            "its own hash differs: it was damaged, or changed by hand",
        ));
    }
    let mut lines = hashed_bytes.splitn(2, |&byte| byte == b'\n');
    let header: HeaderLine = parse_line(lines.next())?;
    // A later version may mean other hashes by the same lines.
    if header.format != "fsdp-integrity"
        || header.version > INTEGRITY_VERSION
        || header.hash != "xxh3-64"
    {
        return Err(FormatError::unsupported(format!(
            "integrity file version {} with hash `{}`",
            header.version, header.hash
        )));
    }
    Ok((header, lines.next().unwrap_or_default()))
}

/// Reads only the lineage of an integrity file; `None` if it has none. The file's own hash is
/// checked, but its hashes of other files, which are many, are not looked at.
pub(crate) fn decode_lineage(bytes: &[u8]) -> Result<Option<Lineage>, FormatError> {
    let (header, lines) = check_own_hash(bytes)?;
    if header.version <= WITHOUT_DIGESTS {
        return Ok(None);
    }
    let lines = lines.strip_suffix(b"\n").unwrap_or(lines);
    let digest_line: LineageLine = parse_line(lines.rsplit(|&byte| byte == b'\n').next())?;
    Ok(digest_line.lineage)
}

#[cfg(test)]
mod tests {
    use fsdp_layout::PlainValue;

    use super::*;
    use crate::storage::lineage::{Branch, Parent};

    fn sample() -> Integrity {
        let mut data = FileIntegrity::default();
        data.push_bytes(b"head");
        data.push_bytes(&vec![7; 5 << 20]);
        data.push_bytes(b"tail");
        let mut metadata = FileIntegrity::default();
        metadata.push_bytes(b"metadata");
        let files = [
            (".metadata".to_owned(), metadata),
            ("__0_0.distcp".to_owned(), data),
        ]
        .into();
        let parent = Some(Parent {
            step: 7,
            digest: digests().root(),
        });
        let lineage = Lineage {
            step: 8,
            branch: Branch::default().fork(4, 1),
            parent,
            config: Some("c".to_owned()),
            data: None,
        };
        Integrity {
            files,
            digests: Some(digests()),
            lineage: Some(lineage),
        }
    }

    fn digests() -> StateDigest {
        [("step".to_owned(), Digest::of_value(&PlainValue::Int(1)))]
            .into_iter()
            .collect()
    }

    #[test]
    fn survives_and_finds_the_block_of_each_byte() {
        let integrity = sample();
        let bytes = integrity.encode().unwrap();
        let read = Integrity::decode(&bytes).unwrap();
        assert_eq!(read, integrity);
        assert_eq!(decode_lineage(&bytes).unwrap(), integrity.lineage);
        let file = &read.files["__0_0.distcp"];
        let block = block_length(5 << 20);
        assert_eq!(block, 65536);
        assert_eq!(file.length(), 4 + (5 << 20) + 4);
        assert_eq!(file.block_at(3).unwrap().range, 0..4);
        assert_eq!(file.block_at(4).unwrap().range, 4..4 + block);
        assert_eq!(
            file.block_at(4 + block).unwrap().range,
            4 + block..4 + 2 * block
        );
        assert_eq!(
            file.block_at(file.length() - 1).unwrap().range,
            file.length() - 4..file.length()
        );
        assert_eq!(file.block_at(file.length()), None);
        assert_eq!(
            file.blocks()
                .map(|block| block.range.end - block.range.start)
                .sum::<u64>(),
            file.length()
        );
        assert_eq!(file.blocks().count(), 2 + 80);
    }

    #[test]
    fn every_flipped_bit_and_every_prefix_is_found() {
        let mut small = Integrity::default();
        let mut file = FileIntegrity::default();
        file.push_bytes(b"bytes");
        small.files.insert("a".to_owned(), file);
        small.digests = Some(digests());
        let bytes = small.encode().unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let decoded = Integrity::decode(&flipped);
            // A flip may only change how the hash is spelled (`A` for `a`), never what is checked.
            assert!(decoded.is_err(), "bit {bit}");
            assert!(decode_lineage(&flipped).is_err(), "bit {bit}");
        }
        for end in 0..bytes.len() {
            assert!(
                Integrity::decode(&bytes[..end]).is_err(),
                "prefix of {end} bytes"
            );
        }
    }

    #[test]
    fn files_of_version_1_are_read_and_later_ones_refused() {
        // A file of before there were digests.
        let before = |version: u32| {
            let header = format!(
                "{{\"format\":\"fsdp-integrity\",\"version\":{version},\"hash\":\"xxh3-64\",\"files\":1}}\n"
            );
            let body = format!(
                "{header}{{\"path\":\"a\",\"length\":5,\"segments\":[[5,16384,\"{:016x}\"]]}}\n",
                7
            );
            format!(
                "{body}{{\"xxh3_128\":\"{:032x}\"}}\n",
                XxHash3_128::oneshot(body.as_bytes())
            )
        };
        let read = Integrity::decode(before(1).as_bytes()).unwrap();
        assert_eq!((read.digests.clone(), read.files["a"].length()), (None, 5));
        assert_eq!(read.encode().unwrap(), before(1).into_bytes());
        assert_eq!(decode_lineage(before(1).as_bytes()).unwrap(), None);
        assert!(Integrity::decode(before(2).as_bytes()).is_err());
        assert!(matches!(
            Integrity::decode(before(3).as_bytes()),
            Err(FormatError::Unsupported { .. })
        ));
    }
}
