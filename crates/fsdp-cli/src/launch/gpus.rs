//! The GPUs of this node, and ranks that share them: `fsdp launch --ranks-per-gpu`.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::failure::usage_error;

/// The variable that tells CUDA which GPUs a process sees.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// The variable that tells NCCL the name of a rank's host.
const HOST_ID: &str = "NCCL_HOSTID";
/// The variable that lets NCCL 2.30 and later put several ranks of a host on one GPU.
const MULTI_RANK: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The GPUs of this node, and the number of ranks on each.
pub(super) struct SharedGpus {
    ranks_per_gpu: usize,
    /// The GPUs, as `CUDA_VISIBLE_DEVICES` names them. `None` if only the ranks can find out how
    /// many there are.
    gpus: Option<Vec<String>>,
    /// The beginning of the names that NCCL gets for this host. `None` if NCCL is to see that ranks
    /// share a GPU.
    host_name: Option<String>,
}

impl SharedGpus {
    /// Looks for the GPUs of this node, on which `nproc` ranks have to find a place.
    ///
    /// # Errors
    /// More ranks than fit on the GPUs, if their number is known.
    pub(super) fn find(
        ranks_per_gpu: NonZeroUsize,
        nproc: usize,
        node_rank: usize,
    ) -> Result<SharedGpus> {
        let variable = |name: &str| std::env::var(name).ok();
        let shared = SharedGpus {
            ranks_per_gpu: ranks_per_gpu.get(),
            gpus: match variable(VISIBLE_DEVICES) {
                Some(list) => Some(visible_gpus(&list)),
                None => count_of_devices().map(numbered_gpus),
            },
            // With an experimental setting NCCL can do it by itself.
            host_name: (variable(MULTI_RANK).as_deref() != Some("1"))
                .then(|| variable(HOST_ID).unwrap_or_else(|| format!("fsdp-node-{node_rank}"))),
        };
        shared.check(nproc)?;
        Ok(shared)
    }

    /// Checks that so many ranks fit on the GPUs.
    ///
    /// # Errors
    /// They do not.
    fn check(&self, nproc: usize) -> Result<()> {
        let Some(gpus) = &self.gpus else {
            return Ok(());
        };
        let ranks_per_gpu = self.ranks_per_gpu;
        ensure!(
            nproc <= gpus.len().saturating_mul(ranks_per_gpu),
            usage_error(
                format!(
                    "{nproc} processes need {} GPUs with {ranks_per_gpu} ranks on each, and this \
                     node has {}",
                    nproc.div_ceil(ranks_per_gpu),
                    gpus.len(),
                ),
                "see `CUDA_VISIBLE_DEVICES`, or change `--nproc` or `--ranks-per-gpu`",
            )
        );
        Ok(())
    }

    /// Returns the variables of a rank: the GPU that it sees, and the name of its host for NCCL.
    ///
    /// NCCL refuses two ranks of one host on one GPU, so the ranks of a GPU get hosts of different
    /// names. The first ranks of all GPUs have the same one, and so have the second ones, because
    /// NCCL uses NVLink and shared memory within a host only.
    pub(super) fn variables(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let number = local_rank / self.ranks_per_gpu;
        let gpu = match &self.gpus {
            Some(gpus) => gpus[number].clone(),
            None => number.to_string(),
        };
        let mut variables = vec![(VISIBLE_DEVICES, gpu)];
        if let Some(host_name) = &self.host_name {
            // The number comes first, as NCCL cuts long names.
            let place = local_rank % self.ranks_per_gpu;
            variables.push((HOST_ID, format!("{place}-{host_name}")));
        }
        variables
    }
}

/// Returns the GPUs of a list in the form of `CUDA_VISIBLE_DEVICES`, which ends at the first entry
/// that names none.
fn visible_gpus(list: &str) -> Vec<String> {
    list.split(',')
        .map(|entry| entry.trim().to_owned())
        .take_while(|entry| !entry.is_empty() && !entry.starts_with('-'))
        .collect()
}

/// Returns the number of GPUs that have a device file here; `None` if there is none, as the driver
/// of some systems has no such files.
fn count_of_devices() -> Option<usize> {
    Some(list_gpus().len()).filter(|&count| count > 0)
}

/// Returns the names of GPUs that CUDA numbers from 0.
fn numbered_gpus(count: usize) -> Vec<String> {
    (0..count).map(|number| number.to_string()).collect()
}

/// Lists the device files of NVIDIA's GPUs.
pub(crate) fn list_gpus() -> Vec<String> {
    let mut device_paths = Vec::new();
    for entry in fs::read_dir("/dev").into_iter().flatten().flatten() {
        let path = entry.path();
        if is_gpu(&path) {
            device_paths.push(path.display().to_string());
        }
    }
    device_paths.sort();
    device_paths
}

/// Returns `true` for the device file of a GPU, such as `/dev/nvidia0`.
fn is_gpu(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return false;
    };
    name.strip_prefix("nvidia").is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(gpus: Option<&str>, host_name: Option<&str>) -> SharedGpus {
        SharedGpus {
            ranks_per_gpu: 2,
            gpus: gpus.map(visible_gpus),
            host_name: host_name.map(str::to_owned),
        }
    }

    #[test]
    fn a_list_of_gpus_ends_where_cuda_ends_it() {
        assert_eq!(visible_gpus("3, GPU-1"), ["3", "GPU-1"]);
        assert_eq!(visible_gpus("1,-1,2"), ["1"]);
        assert!(visible_gpus("").is_empty());
    }

    #[test]
    fn ranks_of_one_gpu_have_hosts_of_their_own_and_neighbours_share_one() {
        let shared = shared(Some("3,5"), Some("node"));
        let variables: Vec<[String; 2]> = (0..4)
            .map(|local_rank| {
                let [(_, gpu), (_, host)] = shared.variables(local_rank).try_into().unwrap();
                [gpu, host]
            })
            .collect();
        assert_eq!(
            variables,
            [
                ["3", "0-node"],
                ["3", "1-node"],
                ["5", "0-node"],
                ["5", "1-node"]
            ]
        );
    }

    #[test]
    fn nccl_is_told_no_host_where_it_puts_several_ranks_on_a_gpu_itself() {
        let variables = shared(None, None).variables(5);
        assert_eq!(variables, [(VISIBLE_DEVICES, "2".to_owned())]);
    }

    #[test]
    fn more_ranks_than_fit_are_refused_where_the_number_of_gpus_is_known() {
        assert!(shared(Some("0,1"), None).check(4).is_ok());
        let error = shared(Some("0,1"), None).check(5).unwrap_err().to_string();
        assert!(
            error.contains("need 3 GPUs") && error.contains("has 2"),
            "{error}"
        );
        assert!(shared(None, None).check(100).is_ok());
    }
}
