//! Copies of parts from rank to rank.

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_formats::parts::{NewPart, PartFiles, PartList};
use fsdp_formats::{FileError, Location};

use super::arithmetic::Transfer;

/// The number of bytes that a rank sends at once.
const WINDOW: u64 = 8 << 20;

/// Copies parts from rank to rank. Each rank sends at most one part and receives at most one. For a
/// transfer, `places` returns the path to send from and the path to receive to; each is meaningful
/// only on the rank that uses it. Collective: agreements, an object all-gather, and an all-to-all
/// for each 8 MiB of the longest part.
///
/// # Errors
/// The same on every rank: parts that cannot be read, errors of the storage. A part that was not
/// received whole is not there then.
pub(super) fn send(
    group: &ProcessGroup,
    operation: &str,
    transfers: &[Transfer],
    places: impl Fn(&Transfer) -> (Location, Location),
) -> Result<(), CommError> {
    let rank = group.rank();
    let outgoing = transfers.iter().find(|transfer| transfer.from == rank);
    let incoming = transfers.iter().find(|transfer| transfer.to == rank);
    // Step 1: each rank opens the part that it sends, and all ranks learn the files of each part.
    let part = outgoing
        .map(|transfer| PartFiles::open(places(transfer).0))
        .transpose();
    let part = group.agree(operation, part)?;
    let lists: Vec<PartList> = group.all_gather_object(
        &part
            .as_ref()
            .map_or_else(PartList::new, |part| part.list().clone()),
    )?;
    // Step 2: each rank prepares a directory for the part that it receives.
    let list = incoming
        .and_then(|transfer| lists.get(transfer.from))
        .cloned()
        .unwrap_or_default();
    let new = incoming
        .map(|transfer| NewPart::create(places(transfer).1, list))
        .transpose();
    let mut new = group.agree(operation, new)?;
    // Step 3: the bytes are sent in windows. A rank that fails goes on sending zeros, because the
    // others would wait for it.
    let lengths: Vec<u64> = lists.iter().map(length).collect();
    let mut failure: Option<FileError> = None;
    let mut at = 0;
    while lengths.iter().any(|&length| at < length) {
        let bytes_of = |from: usize| lengths[from].saturating_sub(at).min(WINDOW) as usize;
        let (mut to_each, mut from_each) = (vec![0; lengths.len()], vec![0; lengths.len()]);
        let mut sent = vec![0u8; bytes_of(rank)];
        if let (Some(transfer), Some(part)) = (outgoing, &part) {
            to_each[transfer.to] = sent.len();
            if failure.is_none() {
                failure = part.read(at, &mut sent).err();
            }
        }
        let mut received = vec![0u8; incoming.map_or(0, |transfer| bytes_of(transfer.from))];
        if let Some(transfer) = incoming {
            from_each[transfer.from] = received.len();
        }
        group.all_to_all_uneven(&mut received, &from_each, &sent, &to_each)?;
        if let (Some(new), None) = (&mut new, &failure) {
            failure = new.write(&received).err();
        }
        at += WINDOW;
    }
    // Step 4: if any rank failed, none commits the part that it received.
    group.agree(operation, failure.map_or(Ok(()), Err))?;
    group.agree(operation, new.map_or(Ok(()), NewPart::commit))
}

/// Returns the number of bytes of a part with these files.
fn length(list: &PartList) -> u64 {
    list.iter()
        .fold(0, |sum, (_, length)| sum.saturating_add(*length))
}
