//! The file format of torch before 1.6: pickles one after the other, then the storages.
//!
//! ```text
//! pickle   a magic number
//! pickle   the version of the format
//! pickle   the byte order and the sizes of C's types
//! pickle   the object; its storages are persistent ids
//! pickle   the keys of the storages, in the order in which they follow
//! for each: eight bytes, the number of its elements; its elements
//! ```

use std::collections::HashMap;

use super::Result;
use super::storages::Storages;
use super::tensor_ref::storage_key;
use crate::error::FormatError;
use crate::limits::{BeyondLimit, MAX_OBJECT_BYTES};
use crate::pickle::{Global, Node, Pickle, PickleError, PickleErrorKind, parse};
use crate::storage::read_at::{ReadAt, read_whole};

/// The number of first bytes by which such a file is recognized.
pub(crate) const START_LENGTH: usize = 13;

/// Returns `true` if a file that begins with these bytes is of this format. It begins with a pickle
/// of an integer of ten bytes, in a frame if its protocol is 4 or 5.
pub(crate) fn is_start(bytes: &[u8]) -> bool {
    matches!(
        bytes,
        [0x80, 4 | 5, 0x95, _, _, _, _, _, _, _, _, 0x8a, 10, ..] | [0x80, 2..=5, 0x8a, 10, ..]
    )
}

/// The bytes with which such a file begins if its pickles are of protocol 0 or 1, which are not
/// read.
pub(crate) const OLD_START: &[u8] = b"L11954703714";

/// The description of such a file, for the error that refuses it.
pub(crate) const OLD_FILE: &str =
    "a file of `torch.save` with `pickle_protocol` 0 or 1, which torch can save again without it,";

/// Returns the pickle of the object, and the places of the storages.
///
/// # Errors
/// A file of a big-endian machine; a storage that reaches beyond the file.
pub(crate) fn read(source: &dyn ReadAt) -> Result<(Vec<u8>, Storages)> {
    let mut offset = 0;
    let _magic = read_pickle(source, &mut offset)?;
    let _version = read_pickle(source, &mut offset)?;
    check_byte_order(&parse(&read_pickle(source, &mut offset)?)?)?;
    // The object names storages by their keys. Where they lie is known only from the keys' order.
    let object = read_pickle(source, &mut offset)?;
    let key_list = read_pickle(source, &mut offset)?;
    let keys = parse(&key_list)?;
    let element_sizes = element_bytes_by_key(&parse(&object)?)?;
    let mut storages = HashMap::new();
    for &key in keys.sequence(keys.root())? {
        let key = keys.str(key)?;
        let mut element_count = [0; 8];
        source.read_exact_at(offset, &mut element_count)?;
        // Its elements come after their number.
        let data_start = offset + 8;
        let element_bytes = element_sizes
            .get(key)
            .ok_or_else(|| FormatError::MissingRecord {
                name: key.to_owned(),
            })?;
        let end = u64::from_le_bytes(element_count)
            .checked_mul(*element_bytes)
            .and_then(|length| data_start.checked_add(length))
            .filter(|&end| end <= source.len())
            .ok_or_else(|| {
                FormatError::unexpected(format!("the storage `{key}`"), "the end of the file")
            })?;
        storages.insert(key.to_owned(), data_start..end);
        offset = end;
    }
    Ok((object, Storages::Legacy(storages)))
}

/// Returns the bytes of the pickle that starts at a position, and moves the position behind them.
fn read_pickle(source: &dyn ReadAt, offset: &mut u64) -> Result<Vec<u8>> {
    /// The number of bytes that are tried first. The length of a pickle is only known by parsing
    /// it.
    const FIRST_BYTES: u64 = 64 << 10;
    let remaining = source.len().saturating_sub(*offset).min(MAX_OBJECT_BYTES);
    let mut length = FIRST_BYTES.min(remaining);
    loop {
        let mut bytes = read_whole(source, *offset, length)?;
        let end = match parse(&bytes) {
            Ok(pickle) => pickle.end(),
            // More bytes may help.
            Err(PickleError {
                kind:
                    PickleErrorKind::Truncated
                    | PickleErrorKind::Limit(BeyondLimit { what: "length", .. }),
                ..
            }) if length < remaining => {
                length = length.saturating_mul(4).min(remaining);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        bytes.truncate(end);
        *offset += end as u64;
        return Ok(bytes);
    }
}

/// Refuses a file of a big-endian machine.
fn check_byte_order(system: &Pickle<'_>) -> Result<()> {
    for &(key, value) in system.dict(system.root())? {
        if system.str(key)? == "little_endian" && !system.bool(value)? {
            return Err(FormatError::unsupported("the byte order `big`"));
        }
    }
    Ok(())
}

/// Returns the bytes of an element of each storage, by key. A storage that is a view of another one
/// is an error.
fn element_bytes_by_key(pickle: &Pickle<'_>) -> Result<HashMap<String, u64>> {
    let mut sizes = HashMap::new();
    for id in pickle.persistent_ids() {
        let [_storage, class, key, _location, _elements, ref view @ ..] = *pickle.sequence(id)?
        else {
            continue;
        };
        // The view is the last value. Many storages may share a longer tuple, so what else is in it
        // is not looked at.
        if view
            .first()
            .is_some_and(|&view| *pickle.node(view) != Node::None)
        {
            let what = "a storage that is a view of another one";
            return Err(FormatError::unsupported(what));
        }
        let size = match pickle.node(class) {
            Node::Global(Global::TypedStorage(dtype)) => dtype.size_in_bytes(),
            Node::Global(Global::UntypedStorage) => 1,
            _ => return Err(pickle.expected_error(class, "a storage class").into()),
        };
        sizes.insert(storage_key(pickle, key)?.to_owned(), size);
    }
    Ok(sizes)
}
