//! The exit codes of the `fsdp` command. They are part of its interface: scripts may rely on them.

use fsdp_layout::ErrorKind;

/// The command is done.
pub const OK: u8 = 0;
/// Something that should not happen: a bug, or an error of no other kind.
pub const INTERNAL: u8 = 1;
/// The command line or the data cannot work as given. Nothing was changed.
pub const USAGE: u8 = 2;
/// A checkpoint is corrupt.
pub const CORRUPT: u8 = 10;
/// A checkpoint is incomplete or was never committed, or there is none.
pub const INCOMPLETE: u8 = 11;
/// A checkpoint is of a version or a kind that is not supported.
pub const UNSUPPORTED_VERSION: u8 = 12;
/// A checkpoint asks for something that would not be safe to do, such as running a pickle.
pub const UNSAFE: u8 = 13;
/// The operating system refused to read or write.
pub const IO: u8 = 14;
/// No space is left.
pub const NO_SPACE: u8 = 15;
/// A rank was lost, or did not answer in time.
pub const RANK_LOST: u8 = 16;
/// Two things that should match do not: two checkpoints, or a checkpoint of another model.
pub const DIFFERENCE: u8 = 17;
/// A signal stopped the run, which saved a checkpoint first: it can be resumed.
pub const STOPPED: u8 = 18;
/// A checkpoint is in its place, but something failed after that.
pub const AFTER_COMMIT: u8 = 19;
/// Values of opaque types would have to be left out of what is written.
pub const OPAQUE: u8 = 20;
/// The gradients of a training are NaN or infinite.
pub const NOT_FINITE: u8 = 21;

/// Returns the exit code of a kind of failure.
#[must_use]
pub const fn for_kind(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Usage => USAGE,
        ErrorKind::Corrupt => CORRUPT,
        ErrorKind::Incomplete => INCOMPLETE,
        ErrorKind::UnsupportedVersion => UNSUPPORTED_VERSION,
        ErrorKind::Unsafe => UNSAFE,
        ErrorKind::Io => IO,
        ErrorKind::NoSpace => NO_SPACE,
        ErrorKind::RankLost => RANK_LOST,
        ErrorKind::Difference => DIFFERENCE,
        ErrorKind::AfterCommit => AFTER_COMMIT,
        _ => INTERNAL,
    }
}
