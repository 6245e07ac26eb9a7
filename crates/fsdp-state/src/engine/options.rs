//! The options of every load.

use std::time::Duration;

use candle_core::Device;

/// The options of a load; the same on every rank.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// `true` (the default) if names that only one side has are an error. If `false`, values that
    /// the source lacks stay as they are, values that the target has no place for are left out, and
    /// the report names both.
    ///
    /// In a load of a checkpoint into a state dict, names that only the checkpoint has are never an
    /// error.
    pub strict: bool,
    /// The top-level keys to load, such as `model` and `optim` of a training run; `None` (the
    /// default) for all. In state dicts of flat keys a top-level key is a whole key, or its
    /// beginning up to a dot. Everything else is ignored in the source, and stays as it is in the
    /// target. A key that neither side has counts as missing, and a list of no keys is an error.
    pub only: Option<Vec<String>>,
    /// `true` if values may be converted to the dtype of the target. torch's `dcp.load` always
    /// converts.
    pub cast: bool,
    /// `true` if live values are changed only when all new values are there. This takes memory for
    /// a second copy of them.
    ///
    /// If `false`, most errors are still found before anything changes. But a failure while
    /// elements move (damage inside a file, a lost rank) leaves some values changed.
    pub staged: bool,
    /// The device of fresh tensors; `None` puts each where the template's is. May differ between
    /// ranks.
    pub device: Option<Device>,
    /// `true` (the default) to check the bytes of a checkpoint against its hashes, and the loaded
    /// tensors against its digests, if it has any.
    pub verify: bool,
    /// `Some(true)` if ranks that load the same data (the replicas of `NoShard` and `HybridShard`)
    /// share the reading: each reads a part and sends it to the others, so that each byte is read
    /// from the storage only once, as in the single-replica restore of Orbax. `Some(false)` if
    /// every rank reads all that it loads. `None` (the default) shares the reading of object stores
    /// only. Files are usually read from the storage once per host and then come from the system's
    /// cache, which is faster than the network. Set `Some(true)` for files that many hosts read
    /// over a network.
    pub read_once: Option<bool>,
    /// Threads that read files, on each rank. `None` (the default) takes one for each core, up to
    /// sixteen. Ranks of one host share its cores, and each has one thread more than its share. An
    /// object store is read by four times as many threads as this says, by default by sixteen.
    pub threads: Option<usize>,
    /// The time that a rank waits for the others. `None` means 30 minutes for checkpoints, because
    /// storage may be slow, and the process group's own deadline otherwise. A time that is less
    /// than the group's deadline has no effect.
    pub deadline: Option<Duration>,
}

impl LoadOptions {
    /// Describes the options that must be the same on all ranks, for people to read. If only some
    /// ranks may cast, values that do not fit on the others are an error anyway.
    #[must_use]
    pub fn describe_common(&self) -> String {
        let LoadOptions {
            strict,
            only,
            staged,
            verify,
            read_once,
            ..
        } = self;
        let only = only
            .as_ref()
            .map_or("all".to_owned(), |keys| keys.join(", "));
        format!(
            "strict: {strict}, only: {only}, staged: {staged}, verify: {verify}, \
             read_once: {read_once:?}"
        )
    }

    /// Returns `true` if a flat key is to be loaded.
    #[must_use]
    pub fn includes(&self, key: &str) -> bool {
        match &self.only {
            Some(parts) => parts.iter().any(|part| is_part_of(key, part)),
            None => true,
        }
    }
}

/// Returns `true` if a flat key is the top-level key `part`, or begins with it and a dot.
#[must_use]
pub fn is_part_of(key: &str, part: &str) -> bool {
    key.strip_prefix(part)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            strict: true,
            only: None,
            cast: false,
            staged: false,
            device: None,
            verify: true,
            read_once: None,
            threads: None,
            deadline: None,
        }
    }
}
