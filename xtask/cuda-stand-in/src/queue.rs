//! Streams: queues of work, each with a thread that does it in order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::handles::lock;

/// A piece of work: its error is that of the GPU.
pub(crate) type Work = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A point in a queue, which the queue reaches once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Marker(Arc<(Mutex<bool>, Condvar)>);

impl Marker {
    /// Returns a marker that is reached already.
    pub(crate) fn reached() -> Marker {
        let marker = Marker::default();
        marker.reach();
        marker
    }

    fn reach(&self) {
        let (reached, changed) = &*self.0;
        *lock(reached) = true;
        changed.notify_all();
    }

    pub(crate) fn is_reached(&self) -> bool {
        *lock(&self.0.0)
    }

    pub(crate) fn wait(&self) {
        let (reached, changed) = &*self.0;
        let mut now = lock(reached);
        while !*now {
            now = changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// How often a queue has waited for points in others.
#[derive(Debug, Default)]
struct Waits {
    /// The waits that were asked for.
    asked: AtomicU64,
    /// The waits whose point had not been reached when the queue came to them.
    held_up: AtomicU64,
}

/// A queue and the thread that empties it. The thread ends after the work that is queued when this
/// is dropped.
#[derive(Debug)]
pub(crate) struct Queue {
    work: Mutex<Sender<(Work, Marker, Duration)>>,
    last: Mutex<Marker>,
    /// The time for which the queue does nothing before each piece of work that takes a GPU time.
    delay: Duration,
    waits: Arc<Waits>,
    /// `true` if work of the default stream and of this one waits for each other.
    pub(crate) is_blocking: bool,
}

impl Queue {
    /// Starts a queue, which gives its errors to `report`.
    pub(crate) fn start(
        is_blocking: bool,
        delay: Duration,
        report: impl Fn(String) + Send + 'static,
    ) -> std::io::Result<Queue> {
        let (work, taken) = mpsc::channel();
        thread::Builder::new()
            .name("stream".to_owned())
            .spawn(move || run(&taken, report))?;
        Ok(Queue {
            work: Mutex::new(work),
            last: Mutex::new(Marker::reached()),
            delay,
            waits: Arc::default(),
            is_blocking,
        })
    }

    /// Adds work. Returns the point behind it.
    pub(crate) fn push(&self, work: Work) -> Marker {
        self.push_after(work, self.delay)
    }

    /// Adds work that takes a GPU no time. Returns the point behind it.
    pub(crate) fn push_instant(&self, work: Work) -> Marker {
        self.push_after(work, Duration::ZERO)
    }

    /// Adds work before which the queue does nothing for a while.
    fn push_after(&self, work: Work, delay: Duration) -> Marker {
        let marker = Marker::default();
        // Both under one lock, so that the last marker is the last one in the queue.
        let mut last = lock(&self.last);
        match lock(&self.work).send((work, marker.clone(), delay)) {
            Ok(()) => *last = marker.clone(),
            Err(_) => marker.reach(),
        }
        marker
    }

    /// Makes later work of this queue wait for a point in another.
    pub(crate) fn wait_for(&self, marker: Marker) {
        if !marker.is_reached() {
            self.push_instant(Box::new(move || {
                marker.wait();
                Ok(())
            }));
        }
    }

    /// Makes later work of this queue wait for a point in another, and counts that.
    pub(crate) fn wait_and_count(&self, marker: Marker) {
        self.waits.asked.fetch_add(1, Ordering::Relaxed);
        if marker.is_reached() {
            return;
        }
        let waits = Arc::clone(&self.waits);
        self.push_instant(Box::new(move || {
            if !marker.is_reached() {
                waits.held_up.fetch_add(1, Ordering::Relaxed);
                marker.wait();
            }
            Ok(())
        }));
    }

    /// Returns how often this queue was asked to wait for a point in another, and how often that
    /// point had not been reached when the queue came to it.
    pub(crate) fn waits(&self) -> [u64; 2] {
        [&self.waits.asked, &self.waits.held_up].map(|count| count.load(Ordering::Relaxed))
    }

    /// Returns the point behind all work so far.
    pub(crate) fn last(&self) -> Marker {
        lock(&self.last).clone()
    }
}

fn run(work: &Receiver<(Work, Marker, Duration)>, report: impl Fn(String)) {
    for (work, marker, delay) in work {
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        if let Err(error) = carry_out(work) {
            report(error);
        }
        // Also after an error: others wait for the marker.
        marker.reach();
    }
}

/// Carries out work. A panic is an error: kernels panic where they leave their memory.
pub(crate) fn carry_out(work: Work) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text
            .or_else(|| panic.downcast_ref().copied())
            .unwrap_or("it panicked")
            .to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(delay: u64) -> (Arc<Queue>, Receiver<String>) {
        let (errors, received) = mpsc::channel();
        let report = move |error| drop(errors.send(error));
        (
            Arc::new(Queue::start(true, Duration::from_millis(delay), report).unwrap()),
            received,
        )
    }

    #[test]
    fn work_runs_in_order_and_waits_for_other_queues_only_if_told_to() {
        let ((slow, _), (quick, _)) = (queue(30), queue(0));
        let (done, order) = mpsc::channel();
        let work = |name: &'static str| -> Work {
            let done = done.clone();
            Box::new(move || {
                done.send(name).ok();
                Ok(())
            })
        };
        slow.push(work("slow"));
        let first = quick.push(work("quick"));
        first.wait();
        assert!(!slow.last().is_reached());
        assert_eq!(quick.waits(), [0, 0]);
        quick.wait_and_count(slow.last());
        quick.push(work("after")).wait();
        quick.wait_and_count(slow.last());
        assert_eq!(quick.waits(), [2, 1]);
        assert_eq!(
            order.try_iter().collect::<Vec<_>>(),
            ["quick", "slow", "after"]
        );
    }

    #[test]
    fn errors_and_panics_are_reported_and_do_not_end_the_queue() {
        let (queue, errors) = queue(0);
        queue.push(Box::new(|| Err("no".to_owned())));
        queue.push(Box::new(|| panic!("out of {}", "bounds")));
        queue.push(Box::new(|| Ok(()))).wait();
        assert_eq!(
            errors.try_iter().collect::<Vec<_>>(),
            ["no", "out of bounds"]
        );
    }
}
