//! The checksums of the records of an archive.

use super::read::check_crc;
use super::{Deflated, Directory, ReadStates, Record, Result};
use crate::error::FormatError;
use crate::metadata::StorageInfo;
use crate::storage::read_at::{ReadAt, Window};
use crate::threads::on_each;

/// Checks the checksum of each record of the item that lies at `stored` in a file. The first one
/// that differs is the error. An item that does not begin as an archive has none, and passes.
pub fn check_records(
    file: &dyn ReadAt,
    stored: &StorageInfo,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<()> {
    let item = Window::new(file, stored.offset, stored.length)?;
    let archive = match Directory::read(&item).or_else(|_| Directory::read_rootless(&item)) {
        // Items of the SAFETENSORS format are no archives, and have no checksums.
        Err(FormatError::Archive { .. }) if !is_archive(&item)? => return Ok(()),
        archive => archive?,
    };
    let records: Vec<(&String, &Record)> = archive.records.iter().collect();
    let outcomes = on_each(&records, threads, |(name, record)| {
        let start = archive.data_offset(&item, name, record)?;
        // The range is read even where there is no checksum, so that a range that cannot be read is
        // found.
        let crc = if record.is_deflated {
            // The checksum is compared below, where the error has the place in the file.
            let mut unclaimed = **record;
            unclaimed.crc = 0;
            let deflated = Deflated::new(start, &unclaimed, &ReadStates::default());
            compute_crc(&deflated.reader(&item), 0, record.length, progress)
                .map_err(|error| error.of_key(name))?
        } else {
            compute_crc(&item, start, record.length, progress)?
        };
        // A checksum of 0 says nothing: some writers leave it so, and torch accepts that.
        if record.crc != 0 && record.crc != crc {
            return Err(FormatError::Corrupt {
                file: stored.relative_path.clone(),
                offset: stored.offset + start,
                end: stored.offset + start + record.stored_bytes,
            });
        }
        Ok(())
    });
    outcomes.into_iter().collect()
}

/// Checks the checksum of each record of an item of torch that is in memory.
pub(crate) fn check_records_in_memory(item: &[u8]) -> Result<()> {
    let archive = Directory::read(&item)?;
    for (name, record) in &archive.records {
        let start = archive.data_offset(&item, name, record)? as usize;
        let data = &item[start..start + record.length as usize];
        check_crc(record.crc, crc32fast::hash(data))?;
    }
    Ok(())
}

/// Returns `true` if an item or a file begins as a zip archive does.
pub fn is_archive(item: &dyn ReadAt) -> Result<bool> {
    let mut start = [0; 4];
    if item.len() < start.len() as u64 {
        return Ok(false);
    }
    item.read_exact_at(0, &mut start)?;
    Ok(start == *b"PK\x03\x04")
}

/// Computes the CRC-32 of `length` bytes from `start` on, and reports them to `progress`.
fn compute_crc(
    item: &dyn ReadAt,
    start: u64,
    length: u64,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<u32> {
    // Read in pieces, because a record may be larger than the memory.
    const PIECE_BYTES: u64 = 1 << 20;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = Vec::new();
    for offset in (start..start + length).step_by(PIECE_BYTES as usize) {
        buffer.resize((start + length - offset).min(PIECE_BYTES) as usize, 0);
        item.read_exact_at(offset, &mut buffer)?;
        hasher.update(&buffer);
        if let Some(progress) = progress {
            progress(buffer.len() as u64);
        }
    }
    Ok(hasher.finalize())
}
