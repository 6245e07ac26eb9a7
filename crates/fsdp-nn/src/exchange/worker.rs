//! A thread that runs the collectives of a model while it computes.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use candle_core::Device;

use super::mark::Mark;
use crate::error::{NnError, Result};
use crate::tasks;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs jobs one after the other, in the order in which they are submitted. When this
/// is dropped, it finishes the submitted jobs and ends.
///
/// On a GPU a job comes after the work that the submitting thread has queued before, and whoever
/// takes its result queues later work behind the job. The threads do not wait for the GPU.
#[derive(Debug)]
pub(crate) struct Worker {
    device: Device,
    job_sender: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread for jobs on a device.
    pub(crate) fn start(name: &str, device: &Device) -> io::Result<Self> {
        let (job_sender, job_receiver) = mpsc::channel::<Job>();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                tasks::stay_on_this_thread();
                job_receiver.into_iter().for_each(|job| job());
            })?;
        Ok(Worker {
            device: device.clone(),
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
        let device = self.device.clone();
        let submitted = Mark::new(&device);
        let ordered_job = move || {
            submitted?.wait()?;
            let value = job()?;
            let end = Mark::new(&device)?;
            Ok(Done {
                value: Some(value),
                end,
            })
        };
        // Nobody may be waiting for the result any more.
        let job = Box::new(move || drop(result_sender.send(ordered_job())));
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

/// The value of a job that has run. The GPU may still be at work for it.
struct Done<T> {
    /// `None` once it has been taken.
    value: Option<T>,
    /// The point behind the job.
    end: Mark,
}

impl<T> Done<T> {
    /// Returns the value, which later work of this thread may use.
    fn take(mut self) -> Result<T> {
        self.end.wait()?;
        Ok(self.value.take().expect("a value is taken once"))
    }
}

impl<T> Drop for Done<T> {
    /// Frees a value that nobody has taken, behind the job on the GPU.
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            // If this fails, the GPU does nothing any more.
            let _ = self.end.wait();
            drop(value);
        }
    }
}

/// The result of a job, once it has run.
#[derive(Debug)]
pub(crate) struct Ticket<T> {
    receiver: Receiver<Result<Done<T>>>,
    result: Option<Result<T>>,
}

impl<T> Ticket<T> {
    /// Waits until the job has run. Later work of this thread then comes behind it on the GPU.
    pub(crate) fn finish(&mut self) {
        if self.result.is_none() {
            self.result = Some(match self.receiver.recv() {
                Ok(done) => done.and_then(Done::take),
                Err(_) => Err(worker_ended_error()),
            });
        }
    }

    /// Waits until the job has run, and returns its result, as [`Self::finish`] does.
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
        let worker = Worker::start("jobs", &Device::Cpu).unwrap();
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
        let worker = Worker::start("jobs", &Device::Cpu).unwrap();
        let ticket: Ticket<()> = worker.submit(|| panic!("a job panics"));
        let error = ticket.wait().unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
        let later_ticket = worker.submit(|| Ok(1));
        assert!(later_ticket.wait().is_err());
    }
}
