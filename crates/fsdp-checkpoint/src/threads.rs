//! The number of threads with which a rank reads or writes, if its caller does not say.

use std::sync::OnceLock;

use fsdp_comm::ProcessGroup;

/// The most threads with which a rank reads or writes files by default. Each that writes has up to
/// 9 MiB of buffers: two pieces of pinned memory for state on a GPU, and one in which small values
/// are joined.
const MAX_THREADS: usize = 16;

/// The threads with which a rank writes to an object store by default. It reads by four times as
/// many requests at once.
const OBJECT_STORE_THREADS: usize = 4;

/// The use that a rank makes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Returns the number of threads with which a rank of `group` reads or writes: as many as
/// `requested`, or else four for an object store, and for files its share of the cores of its host,
/// and one more for reading.
///
/// A thread hashes what it writes, and compares what it reads, so that a fast disk, or memory,
/// keeps several busy. On a slow disk those that have nothing to do sleep.
///
/// Ranks that write with more threads than there are cores would wait for the locks of the files.
/// Reading takes no locks, and with one thread more a rank that is behind uses the core of one that
/// has already read its part.
///
/// Threads that read or write an object store mostly wait for it, so they need no core each.
pub(crate) fn thread_count(
    access: Access,
    requested: Option<usize>,
    group: &ProcessGroup,
    is_object_store: bool,
) -> usize {
    if let Some(requested) = requested {
        return requested;
    }
    if is_object_store {
        return OBJECT_STORE_THREADS;
    }
    // Counting the cores reads several files of the system, so they are counted once.
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
    default_thread_count(access, cores, group.ranks_on_host())
}

/// Returns the number of threads of each of `rank_count` ranks that share the cores of a host.
fn default_thread_count(access: Access, cores: usize, rank_count: usize) -> usize {
    let core_share = (cores / rank_count).max(1);
    let threads = match access {
        Access::Read => (core_share + 1).min(cores),
        Access::Write => core_share,
    };
    threads.min(MAX_THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_host_share_its_cores_and_each_has_a_thread_at_least() {
        // Cores, ranks, and the threads that read and that write.
        for (cores, ranks, reading, writing) in [
            (1, 1, 1, 1),
            (1, 3, 1, 1),
            (2, 1, 2, 2),
            (2, 2, 2, 1),
            (2, 5, 2, 1),
            (8, 4, 3, 2),
            (64, 8, 9, 8),
            (64, 2, 16, 16),
        ] {
            assert_eq!(
                default_thread_count(Access::Read, cores, ranks),
                reading,
                "{cores} cores, {ranks} ranks"
            );
            assert_eq!(
                default_thread_count(Access::Write, cores, ranks),
                writing,
                "{cores} cores, {ranks} ranks"
            );
        }
    }

    #[test]
    fn a_group_counts_its_ranks_on_this_host() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for ranks in [1, 2, 5] {
            for access in [Access::Read, Access::Write] {
                let found = fsdp_comm::run_local(ranks, |group| {
                    let of_object_store = thread_count(access, None, &group, true);
                    (
                        thread_count(access, None, &group, false),
                        of_object_store,
                        thread_count(access, Some(9), &group, false),
                    )
                });
                let expected = (
                    default_thread_count(access, cores, ranks),
                    OBJECT_STORE_THREADS,
                    9,
                );
                assert_eq!(found.unwrap_or_default(), vec![expected; ranks]);
            }
        }
    }
}
