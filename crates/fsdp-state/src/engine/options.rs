//! The options of every load.

use std::time::Duration;

use candle_core::Device;

/// The options of a load; the same on every rank.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// `true` (the default) if names that only one side has are an error. If `false`, values that the source lacks stay
    /// as they are, values that the target has no place for are left out, and the report names both.
    ///
    /// In a load of a checkpoint into a state dict, names that only the checkpoint has are never an error.
    pub strict: bool,
    /// `true` if values may be converted to the dtype of the target. torch's `dcp.load` always converts.
    pub cast: bool,
    /// `true` if live values are changed only when all new values are there. This takes memory for a second copy of
    /// them.
    ///
    /// If `false`, most errors are still found before anything changes. But a failure while elements move (damage
    /// inside a file, a lost rank) leaves some values changed.
    pub staged: bool,
    /// The device of fresh tensors; `None` puts each where the template's is. May differ between ranks.
    pub device: Option<Device>,
    /// `true` (the default) to check the bytes of a checkpoint against its hashes, and the loaded tensors against its
    /// digests, if it has any.
    pub verify: bool,
    /// `Some(true)` if ranks that want the same of a checkpoint (the replicas of `NoShard` and `HybridShard`) read a share of it
    /// each and pass it on, so that each byte is read from the storage once for all of them: the single-replica restore of
    /// Orbax. `Some(false)` if every rank reads all that it wants. `None` (the default) shares reads of object stores only: of
    /// files, each byte comes from the storage once for each host anyway, and from the system's cache to its other ranks, which
    /// is faster than passing it on. Give `Some(true)` for files that many hosts read over a network.
    pub read_once: Option<bool>,
    /// Threads that read files, on each rank.
    pub threads: usize,
    /// The time that a rank waits for the others. `None` means 30 minutes for checkpoints, because storage may be slow,
    /// and the process group's own deadline otherwise.
    pub deadline: Option<Duration>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get().min(4));
        LoadOptions {
            strict: true,
            cast: false,
            staged: false,
            device: None,
            verify: true,
            read_once: None,
            threads,
            deadline: None,
        }
    }
}
