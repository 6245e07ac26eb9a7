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
    let opened =
        outgoing.map(|(path, receiver)| PartFiles::open(path).map(|part| (part, receiver)));
    let outgoing = group.agree(operation, opened.transpose())?;
    let file_list = outgoing
        .as_ref()
        .map_or_else(PartList::new, |(part, _)| part.list().clone());
    let file_lists: Vec<PartList> = group.all_gather_object(&file_list)?;
    // Step 2: each rank prepares a directory for the part that it receives.
    let prepared = incoming.map(|(path, sender)| {
        NewPart::create(path, file_lists[sender].clone()).map(|new_part| (new_part, sender))
    });
    let mut incoming = group.agree(operation, prepared.transpose())?;
    // Step 3: the bytes are sent in windows. A rank that fails goes on sending zeros, because the
    // others would wait for it.
    let part_lens: Vec<u64> = file_lists.iter().map(byte_len).collect();
    let mut failure: Option<FileError> = None;
    let mut offset = 0;
    while part_lens.iter().any(|&part_len| offset < part_len) {
        let mut sent_counts = vec![0; part_lens.len()];
        let mut received_counts = vec![0; part_lens.len()];
        let mut sent = vec![0u8; window_len(offset, part_lens[rank])];
        if let Some((part, receiver)) = &outgoing {
            sent_counts[*receiver] = sent.len();
            if failure.is_none() {
                failure = part.read(offset, &mut sent).err();
            }
        }
        let mut received = Vec::new();
        if let Some((_, sender)) = &incoming {
            received.resize(window_len(offset, part_lens[*sender]), 0);
            received_counts[*sender] = received.len();
        }
        group.all_to_all_uneven(&mut received, &received_counts, &sent, &sent_counts)?;
        if let Some((new_part, _)) = &mut incoming
            && failure.is_none()
        {
            failure = new_part.write(&received).err();
        }
        offset += WINDOW_BYTES;
    }
    // Step 4: if any rank failed, none commits the part that it received.
    group.agree(operation, failure.map_or(Ok(()), Err))?;
    let committed = incoming.map_or(Ok(()), |(new_part, _)| new_part.commit());
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
