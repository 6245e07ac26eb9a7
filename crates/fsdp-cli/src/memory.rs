//! The memory of this machine and of this process, as Linux reports it.

/// Returns the bytes of this machine's memory; `None` if the system does not report them.
#[cfg(any(test, feature = "train"))]
pub(crate) fn machine_bytes() -> Option<u64> {
    read_field("/proc/meminfo", "MemTotal:")
}

/// Returns the most bytes of memory that this process ever had; `None` if the system does not
/// report them.
pub(crate) fn peak_process_bytes() -> Option<u64> {
    read_field("/proc/self/status", "VmHWM:")
}

/// Returns the bytes of a field that a file has in kibibytes; `None` if the file or the field is
/// missing.
fn read_field(file: &str, name: &str) -> Option<u64> {
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
        let (process, machine) = (peak_process_bytes().unwrap(), machine_bytes().unwrap());
        assert!(process > 0 && process < machine, "{process} of {machine}");
    }
}
