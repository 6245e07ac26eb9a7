//! A thread that runs the collectives of a model while it computes.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use crate::tasks;

use crate::error::{NnError, Result};

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs jobs one after the other, in the order in which they are submitted. When this
/// is dropped, it finishes the submitted jobs and ends.
#[derive(Debug)]
pub(crate) struct Worker {
    job_sender: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let (job_sender, job_receiver) = mpsc::channel::<Job>();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                tasks::stay_on_this_thread();
                job_receiver.into_iter().for_each(|job| job());
            })?;
        Ok(Worker {
            job_sender: Some(job_sender),
            thread: Some(thread),
        })
    }

    /// Submits a job, which runs after all earlier ones.
    pub(crate) fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Ticket<T> {
        let (result_sender, receiver) = mpsc::channel();
        // Nobody may be waiting for the result any more.
        let job = Box::new(move || drop(result_sender.send(job())));
        if let Some(job_sender) = &self.job_sender {
            // If the thread has ended, so has the sender of the result, which the ticket reports.
            let _ = job_sender.send(job);
        }
        Ticket {
            receiver,
            result: None,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.job_sender.take());
        if let Some(thread) = self.thread.take() {
            // A job that has panicked has been reported by its ticket.
            let _ = thread.join();
        }
    }
}

/// The result of a job, once it is done.
#[derive(Debug)]
pub(crate) struct Ticket<T> {
    receiver: Receiver<Result<T>>,
    result: Option<Result<T>>,
}

impl<T> Ticket<T> {
    /// Waits until the job is done.
    pub(crate) fn finish(&mut self) {
        if self.result.is_none() {
            self.result = Some(
                self.receiver
                    .recv()
                    .unwrap_or_else(|_| Err(worker_ended_error())),
            );
        }
    }

    /// Waits until the job is done, and returns its result.
    pub(crate) fn wait(mut self) -> Result<T> {
        self.finish();
        self.result.unwrap_or_else(|| Err(worker_ended_error()))
    }
}

/// Returns the error of a job that will never be done, since one before it has panicked.
fn worker_ended_error() -> NnError {
    candle_core::Error::Io(io::Error::other(
        "the thread of the model's collectives has ended",
    ))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_in_order_and_their_errors_come_back() {
        let worker = Worker::start("jobs").unwrap();
        let (seen_sender, seen_receiver) = mpsc::channel();
        let tickets: Vec<Ticket<usize>> = (0..4)
            .map(|index| {
                let seen_sender = seen_sender.clone();
                worker.submit(move || {
                    seen_sender.send(index).unwrap();
                    if index == 2 {
                        Err(NnError::Swapped)
                    } else {
                        Ok(index)
                    }
                })
            })
            .collect();
        let results: Vec<Result<usize>> = tickets.into_iter().map(Ticket::wait).collect();
        assert!(matches!(
            results.as_slice(),
            [Ok(0), Ok(1), Err(NnError::Swapped), Ok(3)]
        ));
        drop(seen_sender);
        assert_eq!(
            seen_receiver.into_iter().collect::<Vec<usize>>(),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn nobody_waits_for_a_thread_that_has_panicked() {
        let worker = Worker::start("jobs").unwrap();
        let ticket: Ticket<()> = worker.submit(|| panic!("a job panics"));
        let error = ticket.wait().unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
        let later_ticket = worker.submit(|| Ok(1));
        assert!(later_ticket.wait().is_err());
    }
}
