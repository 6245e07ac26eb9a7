//! The zip container of torch and NumPy. torch's has stored entries only, one root
//! directory, and aligned storages of tensors:
//!
//! ```text
//! header  <root>/data.pkl           a pickle, protocol 2
//! header  <root>/.format_version    "0": the places of storages are those in the directory only
//! header  <root>/.storage_alignment "64"
//! header  <root>/byteorder          "little"
//! header  <root>/version            "3\n"
//! header  <root>/data/0             raw bytes of storage 0, starting at a multiple of 64 from the archive's start
//!         …
//! central directory, zip64 end records where needed, end record
//! ```
//!
//! [`Directory`] reads it by range; [`ArchiveLayout`] says where each byte will lie before any
//! storage is there.

mod checksums;
mod decoder;
mod inflate;
mod layout;
mod read;
mod stored;

pub(crate) use checksums::check_records_in_memory;
pub use checksums::{check_records, is_archive};
pub(crate) use inflate::{Deflated, ReadStates};
pub use layout::ArchiveLayout;
#[cfg(test)]
use layout::STORAGE_ALIGNMENT;
pub use read::Directory;
pub(crate) use read::Record;
pub(crate) use stored::{Stored, StoredRecords};

use crate::error::FormatError;

/// The result of reading an archive.
type Result<T, E = FormatError> = std::result::Result<T, E>;

/// The root directory of the archives in `.distcp` files.
pub const ROOT: &str = "archive";

/// The numbers that the parts of a zip archive begin with.
pub(crate) const LOCAL_HEADER: u32 = 0x0403_4b50;
pub(crate) const DIRECTORY_ENTRY: u32 = 0x0201_4b50;
pub(crate) const END: u32 = 0x0605_4b50;
pub(crate) const ZIP64_END: u32 = 0x0606_4b50;
pub(crate) const ZIP64_LOCATOR: u32 = 0x0706_4b50;
/// The number of the extra field that holds lengths and positions of 64 bits.
pub(crate) const ZIP64_EXTRA: u16 = 1;
/// The length of a local header, without the name and the extra fields.
const LOCAL_HEADER_BYTES: u64 = 30;
/// The content of a 32-bit field whose value is in the zip64 record.
pub(crate) const IN_ZIP64: u32 = u32::MAX;

#[cfg(test)]
mod tests;
