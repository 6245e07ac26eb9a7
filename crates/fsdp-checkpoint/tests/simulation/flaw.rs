//! Bugs put into the disk on purpose, each of which the simulation must find.

/// A bug of a disk, or of a program's way to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Files with tensors are not synced.
    DataSyncMissing,
    /// `.metadata` and `.integrity` are not synced.
    MetadataSyncMissing,
    /// The staging directory is not synced before it is renamed.
    StagingSyncMissing,
    /// The directory of the checkpoint is not synced after the rename.
    ParentSyncMissing,
    /// Files are synced, but only after the rename.
    SyncAfterRename,
    /// Two directories change places in two steps.
    ExchangeInTwoSteps,
    /// The old checkpoint is removed before the new one takes its place.
    OldRemovedFirst,
    /// Some writes are confirmed but not made.
    WriteLost,
    /// A sync that failed is confirmed: the rank that failed counts as one that has written.
    SyncErrorLost,
    /// A file that is removed is emptied under its other names too.
    RemovalReachesLinks,
    /// Every lock is granted to everybody.
    LocksIgnored,
    /// The newest entry of a directory is not listed.
    ListingStale,
    /// A rename to where nothing should be replaces what is there.
    RenameReplaces,
}

impl Flaw {
    pub(crate) const ALL: [Flaw; 13] = [
        Flaw::DataSyncMissing,
        Flaw::MetadataSyncMissing,
        Flaw::StagingSyncMissing,
        Flaw::ParentSyncMissing,
        Flaw::SyncAfterRename,
        Flaw::ExchangeInTwoSteps,
        Flaw::OldRemovedFirst,
        Flaw::WriteLost,
        Flaw::SyncErrorLost,
        Flaw::RemovalReachesLinks,
        Flaw::LocksIgnored,
        Flaw::ListingStale,
        Flaw::RenameReplaces,
    ];
}
