//! Ranks as processes that are on GPUs.

use crate::processes::Ranks;

/// Starts ranks that do `what`, on so many GPUs. If there are fewer GPUs than ranks, several ranks
/// share one. NCCL refuses two ranks of a host that use the same GPU, so each is then on a host of
/// its own.
pub(crate) fn start(
    gpus: usize,
    world_size: usize,
    what: &str,
    variables: &[(&str, &str)],
) -> Ranks {
    Ranks::start(world_size, what, |rank| {
        let mut of_rank: Vec<(String, String)> = variables
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        of_rank.push(("LOCAL_RANK".to_owned(), (rank % gpus).to_string()));
        if world_size > gpus {
            of_rank.push(("NCCL_HOSTID".to_owned(), format!("host-{rank}")));
        }
        of_rank
    })
}
