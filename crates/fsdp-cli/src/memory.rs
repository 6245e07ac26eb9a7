//! The memory of this machine and of this process, as Linux reports it.

/// Returns the memory of the machine, if the system reports it.
#[cfg(any(test, feature = "train"))]
pub(crate) fn of_machine() -> Option<u64> {
    field("/proc/meminfo", "MemTotal:")
}

/// Returns the most memory that this process ever had, if the system reports it.
pub(crate) fn peak_of_process() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// Returns the bytes of a field that a file has in kibibytes.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?;
    kib.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_had_less_memory_than_the_machine_has() {
        let (process, machine) = (peak_of_process().unwrap(), of_machine().unwrap());
        assert!(process > 0 && process < machine, "{process} of {machine}");
    }
}
