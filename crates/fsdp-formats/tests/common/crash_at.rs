//! A hook that lets a durable step fail, or ends the process there.

use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fsdp_formats::storage::{Step, StepHook};

/// Fails, or ends the process, before or after the step of this number.
pub(crate) struct At {
    pub(crate) step: usize,
    pub(crate) after: bool,
    pub(crate) kill: bool,
    /// `true` if the file system can exchange two directories.
    pub(crate) exchange: bool,
    pub(crate) count: AtomicUsize,
    pub(crate) struck: AtomicBool,
}

impl At {
    pub(crate) fn new(step: usize, after: bool, exchange: bool) -> Self {
        At {
            step,
            after,
            kill: false,
            exchange,
            count: AtomicUsize::new(0),
            struck: AtomicBool::new(false),
        }
    }
}

thread_local! {
    /// The number of the step that this thread is in.
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl At {
    fn strike(&self) -> io::Result<()> {
        self.struck.store(true, Ordering::SeqCst);
        if self.kill {
            std::process::abort();
        }
        Err(io::Error::from_raw_os_error(28))
    }
}

impl StepHook for At {
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        let number = self.count.fetch_add(1, Ordering::SeqCst);
        NUMBER.set(number);
        if number == self.step && !self.after {
            return self.strike();
        }
        if step == Step::Exchange && !self.exchange {
            // ENOSYS: a file system that cannot exchange two names.
            return Err(io::Error::from_raw_os_error(38));
        }
        Ok(())
    }

    fn after(&self, _: Step, _: &Path) -> io::Result<()> {
        if NUMBER.get() == self.step && self.after {
            self.strike()
        } else {
            Ok(())
        }
    }
}
