//! The number of threads with which a rank reads or writes, if its caller does not say.

use std::sync::OnceLock;

use fsdp_comm::ProcessGroup;

/// The most threads with which a rank reads or writes by default. More do not make a disk faster.
const MAX_THREADS: usize = 4;

/// Returns the number of threads with which a rank of `group` reads or writes: as many as `asked`, or else its share of
/// the cores of its host. With more threads than cores, the ranks would wait for the locks of the files that others
/// write.
///
/// Threads that read or write an object store mostly wait for it, so they need no core each.
pub(crate) fn threads(asked: Option<usize>, group: &ProcessGroup, is_object_store: bool) -> usize {
    if let Some(asked) = asked {
        return asked;
    }
    if is_object_store {
        return MAX_THREADS;
    }
    // Counting the cores reads several files of the system, so they are counted once.
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
    (cores / group.ranks_on_host()).clamp(1, MAX_THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_host_share_its_cores_and_each_has_a_thread_at_least() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for ranks in [1, 2, 5] {
            let found = fsdp_comm::run_local(ranks, |group| {
                let of_object_store = threads(None, &group, true);
                (threads(None, &group, false), of_object_store, threads(Some(9), &group, false))
            });
            let expected = ((cores / ranks).clamp(1, MAX_THREADS), MAX_THREADS, 9);
            assert_eq!(found.unwrap_or_default(), vec![expected; ranks]);
        }
    }
}
