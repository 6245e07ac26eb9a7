//! The header of a safetensors file: 8 bytes of length, then JSON.

use std::collections::HashMap;
use std::fmt;

use fsdp_layout::DType;
use fsdp_layout::boxes::checked_bytes;
use indexmap::IndexMap;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::budget::{Budget, FREE_BYTES};
use crate::error::FormatError;
use crate::limits::{BeyondLimit, MAX_SAFETENSORS_HEADER_BYTES, check_limit, is_sane_shape};
use crate::storage::read_at::{ReadAt, read_whole};

/// The content of a file's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// `__metadata__`
    pub metadata: IndexMap<String, String>,
    /// The tensors, in the header's order.
    pub tensors: IndexMap<String, TensorInfo>,
    /// The start of the data in the file.
    pub data_offset: u64,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// First byte, from the start of the data.
    pub start: u64,
    /// The byte after its last.
    pub end: u64,
}

/// The JSON of one tensor. Other programs may add fields, which readers pass over.
#[derive(Deserialize)]
struct RawInfo {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The JSON object; a key that occurs twice is an error, as `serde_json` by itself would take the
/// last.
#[derive(Default)]
struct RawHeader {
    metadata: IndexMap<String, String>,
    tensors: IndexMap<String, RawInfo>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                let mut has_metadata = false;
                while let Some(key) = map.next_key::<String>()? {
                    let is_repeated = if key == METADATA {
                        // The `safetensors` library reads `null` as no notes.
                        header.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                        std::mem::replace(&mut has_metadata, true)
                    } else {
                        let info = map.next_value()?;
                        header.tensors.insert(key, info).is_some()
                    };
                    if is_repeated {
                        return Err(A::Error::custom("a key stands twice"));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Makes the error of a header that is not what it should be.
pub(super) fn malformed(reason: impl ToString) -> FormatError {
    FormatError::malformed("safetensors header", reason)
}

/// The header's key of the file's metadata, a map from strings to strings.
const METADATA: &str = "__metadata__";

/// In `__metadata__`: the dtypes that safetensors has no name for, by key, as a JSON object. Such a
/// tensor is stored as its bytes: `U8`, with one more dimension, the bytes of an element.
pub(crate) const RAW_DTYPES: &str = "fsdp.dtypes";

/// Limits the memory that the JSON of a header takes, by its length: a file may well have a hundred
/// thousand tensors. JSON that takes more is an error.
fn charge_header(json: &[u8]) -> Result<(), FormatError> {
    Ok(
        Budget::new(json.len() as u64 + FREE_BYTES, 1)
            .charge_json("memory for the header", json)?,
    )
}

/// Checks the length of the JSON of a header.
fn check_header_length(length: u64) -> Result<(), BeyondLimit> {
    let limit = MAX_SAFETENSORS_HEADER_BYTES;
    check_limit("safetensors header length", length, limit)
}

/// Returns `true` if a tensor is stored as its bytes, because safetensors has no name for its
/// dtype, or because its shape has no dimension along which packed numbers could be counted.
#[must_use]
pub fn is_stored_as_bytes(dtype: DType, rank: usize) -> bool {
    dtype.safetensors_name().is_none() || (dtype.packing().is_some() && rank == 0)
}

/// Returns the dtype that a file names, and turns its shape into that of the dtype's elements: the
/// file counts packed numbers, and an element is a byte of them.
///
/// # Errors
/// The name is unknown; the last dimension does not end where a byte does.
fn read_dtype(tensor: &str, name: &str, shape: &mut [usize]) -> Result<DType, FormatError> {
    let Some(dtype) = DType::from_safetensors_name(name) else {
        let what = format!("the safetensors dtype `{name}` of `{tensor}` with shape {shape:?}");
        return Err(FormatError::unsupported(what));
    };
    let Some(packing) = dtype.packing() else {
        return Ok(dtype);
    };
    match shape.last_mut() {
        Some(size) if size.is_multiple_of(packing.numbers) => {
            *size = *size / packing.numbers * packing.bytes;
            Ok(dtype)
        }
        _ => {
            let what = format!(
                "the safetensors dtype `{name}` of `{tensor}` with shape {shape:?}, whose last dimension is no multiple \
                 of {} (torch cannot read it either),",
                packing.numbers
            );
            Err(FormatError::unsupported(what))
        }
    }
}

/// Returns the shape that a file gives for a tensor of a dtype with a name in safetensors, which
/// counts packed numbers.
///
/// # Errors
/// A part of a tensor that ends inside a group of packed numbers; more numbers than can be counted.
fn written_shape(tensor: &str, dtype: DType, shape: &[usize]) -> Result<Vec<usize>, FormatError> {
    let mut written = shape.to_vec();
    if let (Some(packing), Some(size)) = (dtype.packing(), written.last_mut()) {
        let groups = Some(*size / packing.bytes).filter(|_| size.is_multiple_of(packing.bytes));
        let numbers = groups.and_then(|groups| groups.checked_mul(packing.numbers));
        *size = numbers.ok_or_else(|| {
            let what =
                format!("`{tensor}` of `{dtype}`, cut to the shape {shape:?} inside a number,");
            FormatError::unsupported(what)
        })?;
    }
    Ok(written)
}

/// Limits the memory that other JSON takes, such as a text of a header: a short one can describe
/// much.
pub fn charge_text(text: impl AsRef<[u8]>, what: &'static str) -> Result<(), FormatError> {
    let text = text.as_ref();
    Ok(Budget::new(text.len() as u64, 1).charge_json(what, text)?)
}

/// Reads the dtypes under [`RAW_DTYPES`], by the key of their tensor. Returns none if there is no
/// such text.
fn read_raw_dtypes(
    metadata: &IndexMap<String, String>,
) -> Result<HashMap<String, DType>, FormatError> {
    let Some(text) = metadata.get(RAW_DTYPES) else {
        return Ok(HashMap::new());
    };
    charge_text(text, "memory for dtypes")?;
    let names: HashMap<String, String> = serde_json::from_str(text).map_err(malformed)?;
    let mut dtypes = HashMap::with_capacity(names.len());
    for (key, name) in names {
        let Some(dtype) = DType::from_torch_name(&name) else {
            let what = format!("the dtype `{name}` of `{key}`");
            return Err(FormatError::unsupported(what));
        };
        dtypes.insert(key, dtype);
    }
    Ok(dtypes)
}

impl Header {
    /// Reads the header of the file that is all of `source`, and checks that the tensors fill the
    /// rest of the file.
    pub fn read(source: &dyn ReadAt) -> Result<Self, FormatError> {
        let mut length_bytes = [0; 8];
        source.read_exact_at(0, &mut length_bytes)?;
        let length = u64::from_le_bytes(length_bytes);
        check_header_length(length)?;
        if length > source.len().saturating_sub(8) {
            return Err(malformed("the file is cut short: it ends inside it"));
        }
        let json = read_whole(source, 8, length)?;
        charge_header(&json)?;
        if json.first() != Some(&b'{') {
            return Err(malformed("it does not start with `{`"));
        }
        let raw: RawHeader = serde_json::from_slice(&json).map_err(malformed)?;
        let data_offset = 8 + length;
        let mut dtypes = read_raw_dtypes(&raw.metadata)?;
        let mut tensors = IndexMap::with_capacity(raw.tensors.len());
        for (name, mut info) in raw.tensors {
            let stored_dtype = read_dtype(&name, &info.dtype, &mut info.shape)?;
            let (start, end) = info.data_offsets;
            let fits = checked_bytes(&info.shape, stored_dtype)
                .is_some_and(|bytes| start.checked_add(bytes as u64) == Some(end));
            if !fits || !is_sane_shape(&info.shape) {
                let reason = format!("the offsets of `{name}` do not fit its shape");
                return Err(malformed(reason));
            }
            // A tensor of a dtype without a name in safetensors is stored as bytes. Its last
            // dimension counts the bytes of an element, so it is taken away.
            let dtype = match dtypes.remove(&name) {
                None => stored_dtype,
                Some(dtype) => match (stored_dtype, info.shape.pop()) {
                    (DType::U8, Some(size)) if size as u64 == dtype.size_in_bytes() => dtype,
                    _ => {
                        let reason = format!("`{name}` does not hold the bytes of `{dtype}`");
                        return Err(malformed(reason));
                    }
                },
            };
            tensors.insert(
                name,
                TensorInfo {
                    dtype,
                    shape: info.shape,
                    start,
                    end,
                },
            );
        }
        // The tensors follow each other without gaps, in any order, up to the end of the file.
        let mut ranges: Vec<(u64, u64, &str)> = tensors
            .iter()
            .map(|(name, info): (&String, &TensorInfo)| (info.start, info.end, name.as_str()))
            .collect();
        ranges.sort_unstable();
        let mut covered_end = 0;
        for (start, end, name) in ranges {
            if start != covered_end {
                return Err(malformed(format!(
                    "`{name}` begins at byte {start} of the data, and the tensors before it end at byte {covered_end}: \
                     tensors overlap, or leave gaps"
                )));
            }
            covered_end = end;
        }
        if data_offset.checked_add(covered_end) != Some(source.len()) {
            return Err(malformed("the tensors do not end where the file does"));
        }
        Ok(Header {
            metadata: raw.metadata,
            tensors,
            data_offset,
        })
    }

    /// Encodes a header for these tensors, `(name, dtype, shape)`, whose data follows in this
    /// order. It is padded with at least 8 spaces, so that the data starts at a multiple of 64. For
    /// dtypes that safetensors does not know, see `RAW_DTYPES`. A header that [`Header::read`]
    /// would refuse is an error.
    pub fn encode<'t>(
        metadata: &IndexMap<String, String>,
        tensors: impl IntoIterator<Item = (&'t str, DType, &'t [usize])>,
    ) -> Result<Vec<u8>, FormatError> {
        let mut metadata = metadata.clone();
        let mut raw_dtypes = serde_json::Map::new();
        let mut entries = Vec::new();
        let mut start = 0u64;
        for (name, dtype, shape) in tensors {
            if name == METADATA {
                let what = format!("a tensor named `{METADATA}`, which the format reserves,");
                return Err(FormatError::unsupported(what));
            }
            let (dtype_name, stored_shape) = match dtype.safetensors_name() {
                Some(dtype_name) if !is_stored_as_bytes(dtype, shape.len()) => {
                    (dtype_name, written_shape(name, dtype, shape)?)
                }
                _ => {
                    raw_dtypes.insert(name.to_owned(), dtype.torch_name().into());
                    let element_bytes = dtype.size_in_bytes() as usize;
                    ("U8", [shape, &[element_bytes]].concat())
                }
            };
            let end = checked_bytes(shape, dtype)
                .and_then(|bytes| start.checked_add(bytes as u64))
                .ok_or_else(|| malformed("the tensors are too large"))?;
            let info = serde_json::json!({
                "dtype": dtype_name,
                "shape": stored_shape,
                "data_offsets": [start, end]
            });
            entries.push((name.to_owned(), info));
            start = end;
        }
        if !raw_dtypes.is_empty() {
            let dtypes = serde_json::Value::Object(raw_dtypes).to_string();
            charge_text(&dtypes, "memory for dtypes")?;
            metadata.insert(RAW_DTYPES.to_owned(), dtypes);
        }
        let mut object = serde_json::Map::new();
        if !metadata.is_empty() {
            object.insert(
                METADATA.to_owned(),
                serde_json::to_value(metadata).map_err(malformed)?,
            );
        }
        object.extend(entries);
        let mut json = serde_json::to_vec(&object).map_err(malformed)?;
        // Pad by at least 8 spaces, which is more than the `safetensors` crate ever pads by. A file
        // that it writes again so has a header of another length. Readers tell by that length
        // whether digests are of this file or of an earlier one.
        json.extend([b' '; 8]);
        while !(8 + json.len()).is_multiple_of(64) {
            json.push(b' ');
        }
        let length = json.len() as u64;
        check_header_length(length)?;
        charge_header(&json)?;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(json);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a file with this header, and so many bytes of data.
    fn file(json: &str, data_bytes: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data_bytes, 0);
        bytes
    }

    #[test]
    fn the_safetensors_crate_reads_what_we_write() {
        let metadata = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
        let tensors = [
            ("b", DType::F32, &[2usize, 3][..]),
            ("a", DType::BF16, &[][..]),
            ("none", DType::I64, &[0, 4][..]),
        ];
        let mut bytes = Header::encode(&metadata, tensors).unwrap();
        assert_eq!(bytes.len() % 64, 0);
        bytes.extend(0..26);
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(
            theirs.tensor("b").unwrap().data(),
            (0..24).collect::<Vec<u8>>()
        );
        assert_eq!(theirs.tensor("a").unwrap().data(), [24, 25]);
        let ours = Header::read(&bytes).unwrap();
        assert_eq!(ours.metadata, metadata);
        assert_eq!(
            ours.tensors["b"],
            TensorInfo {
                dtype: DType::F32,
                shape: vec![2, 3],
                start: 0,
                end: 24
            }
        );
        // A dtype that safetensors lacks is stored as bytes.
        let mut bytes =
            Header::encode(&metadata, [("c", DType::Complex128, &[3usize, 1][..])]).unwrap();
        bytes.extend(0..48);
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("c").unwrap().shape(), [3, 1, 16]);
        let ours = Header::read(&bytes).unwrap();
        assert_eq!(
            ours.tensors["c"],
            TensorInfo {
                dtype: DType::Complex128,
                shape: vec![3, 1],
                start: 0,
                end: 48
            }
        );
        let lying = String::from_utf8_lossy(&bytes[8..bytes.len() - 48])
            .replace("complex128", "complex64 ");
        assert!(
            Header::read(&[&bytes[..8], lying.as_bytes(), &bytes[bytes.len() - 48..]].concat())
                .is_err()
        );
    }

    #[test]
    fn packed_numbers_are_counted_as_safetensors_does() {
        for (name, dtype, numbers, bytes) in [
            ("F4", DType::F4E2M1FnX2, 8, 4),
            ("F6_E2M3", DType::F6E2M3, 8, 6),
            ("F6_E3M2", DType::F6E3M2, 8, 6),
        ] {
            let header = |shape: &str, end: usize| {
                format!(r#"{{"a":{{"dtype":"{name}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
            };
            let theirs = file(&header(&format!("[3,{numbers}]"), 3 * bytes), 3 * bytes);
            let parsed_header = Header::read(&theirs).unwrap();
            let info = TensorInfo {
                dtype,
                shape: vec![3, bytes],
                start: 0,
                end: 3 * bytes as u64,
            };
            assert_eq!(parsed_header.tensors["a"], info);
            // What we write is the same to the `safetensors` crate.
            let tensors = [("a", dtype, &[3, bytes][..])];
            let mut ours = Header::encode(&IndexMap::new(), tensors).unwrap();
            ours.extend(vec![0; 3 * bytes]);
            for file in [&theirs, &ours] {
                let read = safetensors::SafeTensors::deserialize(file).unwrap();
                let tensor = read.tensor("a").unwrap();
                assert_eq!(tensor.dtype().to_string(), name);
                assert_eq!(tensor.shape(), [3, numbers]);
            }
            assert!(Header::read(&ours).unwrap().metadata.is_empty());
            for shape in ["[3]", "[]"] {
                let error = Header::read(&file(&header(shape, 1), 1))
                    .unwrap_err()
                    .to_string();
                assert!(error.contains(&format!("`{name}` of `a`")), "{error}");
            }
        }
        let cut = [("a", DType::F6E2M3, &[3usize, 4][..])];
        let error = Header::encode(&IndexMap::new(), cut).unwrap_err();
        assert!(error.to_string().contains("`a`"), "{error}");
    }

    #[test]
    fn packed_numbers_without_a_dimension_to_count_them_are_stored_as_bytes() {
        let tensors = [("a", DType::F4E2M1FnX2, &[][..])];
        let mut bytes = Header::encode(&IndexMap::new(), tensors).unwrap();
        bytes.push(7);
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("a").unwrap().shape(), [1]);
        let ours = Header::read(&bytes).unwrap();
        assert_eq!(ours.tensors["a"].dtype, DType::F4E2M1FnX2);
        assert_eq!(ours.tensors["a"].shape, [0; 0]);
    }

    /// Every dtype of the `safetensors` crate, and its bits.
    #[test]
    fn every_dtype_of_safetensors_is_known() {
        use safetensors::Dtype;
        for theirs in [
            Dtype::BOOL,
            Dtype::F4,
            Dtype::F6_E2M3,
            Dtype::F6_E3M2,
            Dtype::U8,
            Dtype::I8,
            Dtype::F8_E5M2,
            Dtype::F8_E4M3,
            Dtype::F8_E8M0,
            Dtype::F8_E4M3FNUZ,
            Dtype::F8_E5M2FNUZ,
            Dtype::I16,
            Dtype::U16,
            Dtype::F16,
            Dtype::BF16,
            Dtype::I32,
            Dtype::U32,
            Dtype::F32,
            Dtype::C64,
            Dtype::F64,
            Dtype::I64,
            Dtype::U64,
        ] {
            let dtype = DType::from_safetensors_name(&theirs.to_string()).expect("a name");
            let bits = dtype.packing().map_or(dtype.bits(), |packing| {
                8 * packing.bytes as u64 / packing.numbers as u64
            });
            assert_eq!(bits, theirs.bitsize() as u64, "{theirs}");
        }
    }

    #[test]
    fn notes_may_be_null() {
        let json = r#"{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let header = Header::read(&file(json, 1)).unwrap();
        assert!(header.metadata.is_empty() && header.tensors.len() == 1);
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let entry = |shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(Header::read(&file(&entry("[2]", "[0,8]"), 8)).is_ok());
        for (json, data) in [
            (entry("[2]", "[0,8]"), 7),
            (entry("[2]", "[0,8]"), 9),
            (entry("[2]", "[1,9]"), 9),
            (entry("[2]", "[8,0]"), 8),
            (entry("[3]", "[0,8]"), 8),
            (entry("[18446744073709551615,2]", "[0,8]"), 8),
            (entry("[-1]", "[0,8]"), 8),
            (entry("[2]", "[0,18446744073709551615]"), 8),
            (r#"{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}"#.to_owned(), 8),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#.to_owned(), 6),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#.to_owned(), 4),
            ("[]".to_owned(), 0),
            ("[".repeat(10_000), 0),
            (format!("{{\"a\":{}", "[".repeat(10_000)), 0),
        ] {
            assert!(Header::read(&file(&json, data)).is_err(), "{:.80}", json);
        }
        for length in [0u64, 7, 1 << 32, 1 << 63, u64::MAX] {
            assert!(Header::read(&length.to_le_bytes().to_vec()).is_err());
        }
        let good = file(&entry("[2]", "[0,8]"), 8);
        for end in 0..good.len() {
            assert!(
                Header::read(&good[..end].to_vec()).is_err(),
                "prefix of {end} bytes"
            );
        }
    }
}
