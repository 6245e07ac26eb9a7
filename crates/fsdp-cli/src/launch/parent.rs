//! Processes that end with this one, even if it is killed.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Has the process killed when the thread that starts it ends, which is the main thread.
pub(super) fn end_with_this_process(command: &mut Command) {
    let parent = getpid();
    let before_exec = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the line above.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::NotConnected)) }
    };
    // SAFETY: between fork and exec this makes two system calls; it takes no locks and allocates nothing.
    unsafe {
        command.pre_exec(before_exec);
    }
}
