//! The encoding of values that ranks send to each other. This is the only module that names the
//! encoder.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::error::{DecodeError, EncodeError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest number of bytes that a single value may claim to need. The decoder checks it before
/// it allocates.
pub(crate) const MAX_BYTES: usize = 1 << 30;

const CONFIGURATION: Configuration<LittleEndian, Fixint, Limit<MAX_BYTES>> =
    bincode::config::standard()
        .with_fixed_int_encoding()
        .with_limit::<MAX_BYTES>();

/// Encodes a value of any type, of which the type decides whether it can be encoded.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
    bincode::serde::encode_to_vec(value, CONFIGURATION).map_err(|error| match error {
        EncodeError::OtherString(message) => message,
        error => error.to_string(),
    })
}

/// Encodes a value of this crate, whose parts are numbers, texts and lists.
pub(crate) fn encode_plain<T: Serialize>(value: &T) -> Vec<u8> {
    encode(value).expect("numbers, texts and lists of them can be encoded")
}

/// Decodes a value that takes up all of `bytes`.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match decode_prefix(bytes)? {
        (value, consumed) if consumed == bytes.len() => Ok(value),
        (_, consumed) => Err(format!(
            "{} bytes are left over after {consumed}",
            bytes.len() - consumed
        )),
    }
}

/// Decodes the value at the start of `bytes`, and returns its length too.
pub(crate) fn decode_prefix<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, usize), String> {
    bincode::serde::decode_from_slice(bytes, CONFIGURATION).map_err(|error| match error {
        DecodeError::OtherString(message) => message,
        error => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back() {
        let value = (String::from("é"), vec![Some(1u64), None], -3i32);
        let bytes = encode(&value).unwrap();
        assert_eq!(decode::<(String, Vec<Option<u64>>, i32)>(&bytes), Ok(value));
        assert!(decode::<u8>(&bytes).unwrap_err().contains("left over"));
        assert!(decode::<u64>(&bytes[..4]).is_err());
    }

    #[test]
    fn a_length_that_lies_allocates_nothing() {
        assert!(decode::<Vec<u64>>(&u64::MAX.to_le_bytes()).is_err());
        assert!(decode::<String>(&(1u64 << 40).to_le_bytes()).is_err());
    }
}
