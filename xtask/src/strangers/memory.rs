//! The memory of ranks, and its growth.

use std::fs;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

/// The memory of some processes at one time.
#[derive(Debug)]
pub(super) struct Levels(Vec<(Pid, u64)>);

impl Levels {
    /// Takes the levels of these processes.
    pub(super) fn measure(processes: &[Pid]) -> Result<Levels> {
        let mut levels = Vec::new();
        for &process in processes {
            levels.push((process, resident(process)?));
        }
        Ok(Levels(levels))
    }

    /// Returns the largest growth of a process since then, in bytes, which must be no more than the
    /// limit.
    pub(super) fn check(&self, limit: u64) -> Result<u64> {
        let mut most = 0;
        for (process, before) in &self.0 {
            let now = resident(*process)?;
            let grown = now.saturating_sub(*before);
            ensure!(
                grown <= limit,
                "the process {process:?} has grown from {before} bytes to {now}"
            );
            most = most.max(grown);
        }
        Ok(most)
    }
}

/// Returns the bytes of a process that are in memory.
fn resident(process: Pid) -> Result<u64> {
    fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero()))
        .ok()
        .and_then(|status| resident_bytes(&status))
        .with_context(|| format!("the process {process:?} has ended"))
}

/// Returns the bytes in memory from the status of a process. One that has ended, and that nobody
/// has waited for, has none.
fn resident_bytes(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_status_and_a_process_that_has_ended_has_none() {
        assert_eq!(
            resident_bytes("Name:\tfsdp\nVmHWM:\t  9000 kB\nVmRSS:\t    2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(resident_bytes("Name:\tfsdp\nState:\tZ (zombie)\n"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn growth_over_the_limit_is_an_error() {
        let this = rustix::process::getpid();
        let now = resident(this).unwrap();
        assert!(Levels(vec![(this, now)]).check(64 << 20).is_ok());
        assert!(
            Levels(vec![(this, 0)])
                .check(0)
                .unwrap_err()
                .to_string()
                .contains("has grown")
        );
    }
}
