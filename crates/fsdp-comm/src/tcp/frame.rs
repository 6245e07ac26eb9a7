//! The frames that ranks send to each other over a socket: a fixed header and a body.

use std::io::{self, Read, Write};

use bytes::{Buf, BufMut, Bytes};

use crate::access::wrong_protocol_error;
use crate::buffer::reserve;

/// The longest body. Tensors, and attachments of several ranks, are cut into bodies of
/// [`CHUNK_BYTES`]. The attachment of a single rank is not cut, but even in the largest job it is
/// shorter than this.
const MAX_BODY_BYTES: u64 = 16 << 20;

/// The number of bytes of a tensor that one frame carries.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// The length of a header: the kind (one byte), then the group, the round and the length of the
/// body, 8 bytes each, little-endian.
const HEADER_BYTES: usize = 25;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Ballots of a round, with attachments.
    Ballot,
    /// A chunk of a rank's bytes in a round.
    Chunk,
    /// The group has failed. The body is the error.
    Abort,
    /// A sign that the rank is alive.
    Heartbeat,
    /// The last frame of a rank that leaves. The body is a text that says in which way it leaves.
    Goodbye,
    /// The news that a rank has ended without a goodbye, and before it had finished this round of
    /// the group. The body is its global rank.
    Absent,
}

impl Kind {
    const ALL: [Kind; 6] = [
        Kind::Ballot,
        Kind::Chunk,
        Kind::Abort,
        Kind::Heartbeat,
        Kind::Goodbye,
        Kind::Absent,
    ];
}

/// A frame that has been received.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) group: u64,
    pub(super) round: u64,
    pub(super) body: Vec<u8>,
}

/// A frame to send.
#[derive(Debug)]
pub(super) struct OutgoingFrame<B> {
    pub(super) receiver: usize,
    pub(super) kind: Kind,
    pub(super) group: u64,
    pub(super) round: u64,
    pub(super) body: B,
}

/// A frame to send that no operation of this rank waits for: news, a heartbeat, a goodbye, or
/// ballots to spread. Notices to several ranks can share their bodies.
pub(super) type Notice = OutgoingFrame<Bytes>;

impl Notice {
    /// Returns a notice that is about no group.
    pub(super) fn new(receiver: usize, kind: Kind, body: impl Into<Bytes>) -> Self {
        OutgoingFrame {
            receiver,
            kind,
            group: 0,
            round: 0,
            body: body.into(),
        }
    }
}

impl<B: AsRef<[u8]>> OutgoingFrame<B> {
    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        header(self.kind, self.group, self.round, self.body.as_ref().len())
    }
}

/// Returns the header of a frame whose body has `body_len` bytes.
pub(super) fn header(kind: Kind, group: u64, round: u64, body_len: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    let mut fields = &mut header[..];
    fields.put_u8(kind as u8);
    fields.put_u64_le(group);
    fields.put_u64_le(round);
    fields.put_u64_le(body_len as u64);
    header
}

/// Reads one frame.
///
/// # Errors
/// The stream ends; a header that no rank sends; no memory for the body.
pub(super) fn read(stream: &mut impl Read) -> io::Result<Frame> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let mut fields = &header[..];
    let kind = Kind::ALL.get(usize::from(fields.get_u8())).copied();
    let [group, round, len] = std::array::from_fn(|_| fields.get_u64_le());
    // Check the header before any memory is reserved: it may come from another program.
    let (Some(kind), ..=MAX_BODY_BYTES) = (kind, len) else {
        return Err(wrong_protocol_error());
    };
    // The length comes from another process, so memory for it is reserved in a way that can fail.
    let mut body = Vec::new();
    reserve(&mut body, len as usize, "a frame")
        .map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
    if stream.take(len).read_to_end(&mut body)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Frame {
        kind,
        group,
        round,
        body,
    })
}

/// Returns `true` if a write that failed with `error` may be tried again.
pub(super) fn is_retryable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

/// Writes all bytes. After each timeout of the socket it asks `go_on` whether to try again.
pub(super) fn write(
    stream: &mut impl Write,
    mut bytes: &[u8],
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if !is_retryable(&error) => return Err(error),
            Err(_) if go_on() => {}
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;
    use crate::ballot::MESSAGE_BYTES;
    use crate::environment::MAX_WORLD_SIZE;
    use crate::error::{CommError, MAX_MESSAGE_BYTES, MIN_CALL_BYTES, RankCall};
    use crate::group::INLINE_BYTES;
    use crate::record::{Attachment, Call, Operation, Record};
    use crate::wire;

    #[test]
    fn frames_come_back() {
        for kind in Kind::ALL {
            let bytes = [&header(kind, 7, u64::MAX, 3)[..], b"abc", b"next"].concat();
            let mut stream = &bytes[..];
            let frame = read(&mut stream).unwrap();
            assert_eq!(
                (frame.kind, frame.group, frame.round, &frame.body[..]),
                (kind, 7, u64::MAX, &b"abc"[..])
            );
            assert_eq!(stream, b"next");
        }
    }

    #[test]
    fn the_longest_attachment_of_the_largest_job_fits_in_a_frame() {
        // The counts of an all-to-all, two for each rank, are the most that a rank says about
        // itself.
        let attachment = Attachment {
            numbers: vec![u64::MAX; 2 * MAX_WORLD_SIZE],
            payload: &[0; INLINE_BYTES],
        };
        // A call may have one size for each rank.
        let call = Call {
            sizes: vec![usize::MAX; MAX_WORLD_SIZE],
            ..Call::new(Operation::AllToAllUneven)
        };
        let record = Record { call, fault: None };
        let record_bytes = wire::encode(&record).unwrap().len() + 2 * MAX_MESSAGE_BYTES;
        // A message has the rank and the length in front of each attachment.
        let beside = MESSAGE_BYTES + 8;
        let longest = attachment.encode().len().max(record_bytes);
        assert!(longest + beside <= MAX_BODY_BYTES as usize);
    }

    /// A call of which only the end shows that it is not another one.
    #[derive(PartialEq)]
    struct LongCall(usize);

    impl fmt::Display for LongCall {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{}{}", "1, ".repeat(2 * MAX_MESSAGE_BYTES), self.0)
        }
    }

    #[test]
    fn the_error_of_ranks_that_all_call_something_else_fits_in_a_frame() {
        for ranks in [1, 300, 4096] {
            let calls = RankCall::collect((0..ranks).map(|rank| (rank, LongCall(rank))));
            assert_eq!(calls.len(), ranks);
            let error = CommError::Mismatch { sequence: 7, calls };
            assert!(
                wire::encode(&error).unwrap().len() <= MAX_BODY_BYTES as usize,
                "{ranks}"
            );
        }
        // A call also has two lengths, and a rank.
        const { assert!(MAX_WORLD_SIZE * (MIN_CALL_BYTES + 24) < MAX_BODY_BYTES as usize) };
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let mut wrong_kind = header(Kind::Goodbye, 0, 0, 0);
        wrong_kind[0] = Kind::ALL.len() as u8;
        assert!(read(&mut &wrong_kind[..]).is_err());
        assert!(read(&mut &header(Kind::Ballot, 0, 0, usize::MAX)[..]).is_err());
        assert!(read(&mut &header(Kind::Ballot, 0, 0, 1)[..]).is_err());
        assert!(read(&mut &[][..]).is_err());
    }
}
