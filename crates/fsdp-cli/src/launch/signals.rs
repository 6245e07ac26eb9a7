//! The signals to `fsdp launch`, and all other events that it waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Result;
use signal_hook::consts::SIGCHLD;

use crate::stop::{REQUESTS, end_by, on_signals};

/// An event while processes run.
#[derive(Debug)]
pub(super) enum Event {
    /// The process of this rank has ended. Its status has yet to be read.
    Ended(usize),
    /// This process received a signal. SIGCHLD tells that a child of it has ended, which may be one
    /// that a rank has left behind.
    Signal(i32),
}

/// The events that have not been handled yet, in the order in which they happened.
pub(super) struct Events {
    pub(super) sender: Sender<Event>,
    receiver: Receiver<Event>,
    ends_at_request: Arc<AtomicBool>,
}

impl Events {
    /// Begins to listen for signals.
    ///
    /// # Errors
    /// The system does not allow it.
    pub(super) fn listen() -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let ends_at_request = Arc::new(AtomicBool::new(false));
        let event_sender = sender.clone();
        let is_ending = Arc::clone(&ends_at_request);
        // SIGUSR1 and SIGUSR2 are meant for the processes of the job. By default they would end
        // this process, and all others with it.
        on_signals(&[SIGCHLD], move |signal| {
            if is_ending.load(Ordering::Relaxed) && REQUESTS.contains(&signal) {
                end_by(signal);
            }
            // Sending fails only when all is over.
            event_sender.send(Event::Signal(signal)).ok();
        })?;
        Ok(Events {
            sender,
            receiver,
            ends_at_request,
        })
    }

    /// Waits for the next event, until `deadline` if there is one.
    ///
    /// # Errors
    /// The deadline has passed.
    pub(super) fn next(&self, deadline: Option<Instant>) -> Result<Event, RecvTimeoutError> {
        match deadline {
            Some(deadline) => {
                let remaining = deadline.saturating_duration_since(Instant::now());
                self.receiver.recv_timeout(remaining)
            }
            None => self.receiver.recv().map_err(RecvTimeoutError::from),
        }
    }

    /// Returns `true` if this process has been asked to end, or is asked to within `timeout`.
    /// Only for times in which no process runs: all other events are dropped.
    pub(super) fn was_asked_to_end_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while let Ok(event) = self.next(Some(deadline)) {
            if matches!(event, Event::Signal(signal) if REQUESTS.contains(&signal)) {
                return true;
            }
        }
        false
    }

    /// Lets the next request to end this process end it at once.
    pub(super) fn end_at_next_request(&self) {
        self.ends_at_request.store(true, Ordering::Relaxed);
    }
}
