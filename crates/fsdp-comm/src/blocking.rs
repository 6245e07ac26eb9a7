//! Reads and writes of blocking sockets, with a deadline for the whole and not for each call, and
//! the meaning of their errors.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::deadline::time_left;

/// Returns `true` if a read or write failed with `error` because the other side has closed the
/// connection.
pub(crate) fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

/// Writes all bytes.
pub(crate) fn write_all(
    mut stream: &TcpStream,
    mut bytes: &[u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        // The timeout of a socket is that of each call, so it is set again to the time that is
        // left.
        stream.set_write_timeout(Some(remaining(deadline)))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written_bytes) => bytes = &bytes[written_bytes..],
            Err(error) => check_may_retry(error, deadline)?,
        }
    }
    Ok(())
}

/// Fills the buffer.
pub(crate) fn read_exact(
    mut stream: &TcpStream,
    mut buffer: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(remaining(deadline)))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read_bytes) => buffer = &mut buffer[read_bytes..],
            Err(error) => check_may_retry(error, deadline)?,
        }
    }
    Ok(())
}

/// Fails unless the call may be made again.
fn check_may_retry(error: io::Error, deadline: Instant) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        _ if Instant::now() >= deadline => Err(io::ErrorKind::TimedOut.into()),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(()),
        _ => Err(error),
    }
}

/// Returns the time that remains until `deadline`, and at least a little, because zero would mean
/// no timeout.
fn remaining(deadline: Instant) -> Duration {
    time_left(deadline).max(Duration::from_millis(1))
}
