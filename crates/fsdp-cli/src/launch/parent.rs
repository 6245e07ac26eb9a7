//! Processes that end when this process ends, even if this process is killed.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the kernel kill the new process when the thread that spawns it ends. The main thread must
/// spawn it, because that thread lives as long as this process.
pub(super) fn end_with_this_process(command: &mut Command) {
    let parent = getpid();
    // SAFETY: between fork and exec this makes two system calls; it takes no locks and allocates
    // nothing.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // If the parent ended before the line above, no signal comes any more. Then the new
            // process must not run.
            if getppid() == Some(parent) {
                Ok(())
            } else {
                Err(io::Error::from(io::ErrorKind::NotConnected))
            }
        });
    }
}
