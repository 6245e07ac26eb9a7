//! Copies of parts from rank to rank.

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_formats::parts::{NewPart, PartFiles, PartList};
use fsdp_formats::{FileError, Location};

/// The number of bytes that a rank sends at once.
const WINDOW_BYTES: u64 = 8 << 20;

/// Copies parts from rank to rank. Each rank sends at most one part and receives at most one:
/// `outgoing` has its path and the rank that it goes to, and `incoming` the path for a part and the
/// rank that it comes from. Collective: agreements, an object all-gather, and an all-to-all for
/// each 8 MiB of the longest part.
///
/// # Errors
/// The same on every rank: parts that cannot be read, errors of the storage. A part that was not
/// received whole is not there then.
pub(super) fn exchange(
    group: &ProcessGroup,
    operation: &str,
    outgoing: Option<(Location, usize)>,
    incoming: Option<(Location, usize)>,
) -> Result<(), CommError> {
    let rank = group.rank();
    // Step 1: each rank opens the part that it sends, and all ranks learn the files of each part.
    let opened = outgoing.map(|(path, to)| PartFiles::open(path).map(|part| (part, to)));
    let outgoing = group.agree(operation, opened.transpose())?;
    let list = outgoing
        .as_ref()
        .map_or_else(PartList::new, |(part, _)| part.list().clone());
    let lists: Vec<PartList> = group.all_gather_object(&list)?;
    // Step 2: each rank prepares a directory for the part that it receives.
    let prepared = incoming
        .map(|(path, from)| NewPart::create(path, lists[from].clone()).map(|new| (new, from)));
    let mut incoming = group.agree(operation, prepared.transpose())?;
    // Step 3: the bytes are sent in windows. A rank that fails goes on sending zeros, because the
    // others would wait for it.
    let part_lens: Vec<u64> = lists.iter().map(byte_len).collect();
    let mut failure: Option<FileError> = None;
    let mut offset = 0;
    while part_lens.iter().any(|&part_len| offset < part_len) {
        let mut to_each = vec![0; part_lens.len()];
        let mut from_each = vec![0; part_lens.len()];
        let mut sent = vec![0u8; window_len(offset, part_lens[rank])];
        if let Some((part, to)) = &outgoing {
            to_each[*to] = sent.len();
            if failure.is_none() {
                failure = part.read(offset, &mut sent).err();
            }
        }
        let mut received = Vec::new();
        if let Some((_, from)) = &incoming {
            received.resize(window_len(offset, part_lens[*from]), 0);
            from_each[*from] = received.len();
        }
        group.all_to_all_uneven(&mut received, &from_each, &sent, &to_each)?;
        if let Some((new, _)) = &mut incoming
            && failure.is_none()
        {
            failure = new.write(&received).err();
        }
        offset += WINDOW_BYTES;
    }
    // Step 4: if any rank failed, none commits the part that it received.
    group.agree(operation, failure.map_or(Ok(()), Err))?;
    let committed = incoming.map_or(Ok(()), |(new, _)| new.commit());
    group.agree(operation, committed)
}

/// Returns the number of bytes of a part with these files.
fn byte_len(list: &PartList) -> u64 {
    list.iter()
        .fold(0, |sum, (_, length)| sum.saturating_add(*length))
}

/// Returns the number of bytes of a part of `part_len` bytes in the window that begins at `offset`.
fn window_len(offset: u64, part_len: u64) -> usize {
    part_len.saturating_sub(offset).min(WINDOW_BYTES) as usize
}
