//! The inbox as the threads of this process share it: its state behind a lock, and the signals of
//! its changes.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::frame::{Frame, Kind, Notice};
use super::inbox::InboxState;
use crate::deadline::{MAX_TIMEOUT, time_left};
use crate::sync::{lock, wait_timeout};

/// The time after which a notice is offered again to a rank whose socket was busy.
pub(super) const OFFER_INTERVAL: Duration = Duration::from_millis(20);

/// The state that all threads share.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    /// Notified when the state has changed.
    changed: Condvar,
    /// Notified when there may be notices to send.
    noticed: Condvar,
}

impl Inbox {
    /// Creates an inbox, on which nobody waits yet.
    pub(super) fn new(state: InboxState) -> Inbox {
        Inbox {
            state: Mutex::new(state),
            changed: Condvar::new(),
            noticed: Condvar::new(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        lock(&self.state)
    }

    /// Changes the state, and wakes all who wait for a change.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut InboxState) -> R) -> R {
        // Give the lock back before waking others, because they would only wait for it.
        let result = change(&mut self.lock());
        self.changed.notify_all();
        self.noticed.notify_all();
        result
    }

    /// Wakes the thread that sends notices, so that it looks whether there are any.
    pub(super) fn wake_notice_sender(&self) {
        self.noticed.notify_one();
    }

    /// Takes a frame of another rank.
    ///
    /// # Errors
    /// A frame that no rank sends.
    pub(super) fn receive(&self, sender: usize, frame: Frame) -> io::Result<()> {
        let kind = frame.kind;
        let mut state = self.lock();
        state.receive(sender, frame, Instant::now())?;
        let has_news = state.has_news;
        drop(state);
        // A heartbeat gives no operation what it waits for.
        if kind != Kind::Heartbeat {
            self.changed.notify_all();
        }
        if has_news {
            self.wake_notice_sender();
        }
        Ok(())
    }

    /// Waits for a change, but no longer than `timeout`.
    pub(super) fn wait<'s>(
        &self,
        state: MutexGuard<'s, InboxState>,
        timeout: Duration,
    ) -> MutexGuard<'s, InboxState> {
        wait_timeout(&self.changed, state, timeout)
    }

    /// Waits until `is_ready` returns `true`, but no longer than until `deadline`. Returns its last
    /// answer.
    pub(super) fn wait_until(
        &self,
        deadline: Instant,
        is_ready: impl Fn(&InboxState) -> bool,
    ) -> bool {
        let mut state = self.lock();
        while !is_ready(&state) {
            let remaining = time_left(deadline);
            if remaining.is_zero() {
                return false;
            }
            state = self.wait(state, remaining);
        }
        true
    }

    /// Records that the thread of the heartbeats runs, then waits for `interval`. Returns `true`,
    /// and at once, when this rank leaves.
    pub(super) fn wait_for_next_heartbeat(&self, interval: Duration) -> bool {
        let now = Instant::now();
        self.lock().record_heartbeat_thread_ran(now);
        self.wait_until(now + interval, |state| state.leaving)
    }

    /// Waits until there are notices to send, and returns them. With `has_others` there are notices
    /// that could not be sent before, and this returns after [`OFFER_INTERVAL`] at the latest, so
    /// that they are tried again. Returns `None` if this rank leaves.
    pub(super) fn wait_for_notices(&self, has_others: bool) -> Option<Vec<Notice>> {
        let mut state = self.lock();
        let mut is_first = true;
        loop {
            if state.leaving {
                return None;
            }
            let notices = state.notices();
            state.unsent_notices += notices.len();
            if !notices.is_empty() || (has_others && !is_first) {
                return Some(notices);
            }
            is_first = false;
            let timeout = if has_others {
                OFFER_INTERVAL
            } else {
                MAX_TIMEOUT
            };
            state = wait_timeout(&self.noticed, state, timeout);
        }
    }
}
