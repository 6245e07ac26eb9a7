//! The units of a model whose code has none: each is gathered when a computation first uses one of
//! its weights, and released when the computation uses the next unit.
//!
//! During a forward or a backward, the parameters of all units that are not gathered are withheld
//! ([`fsdp_flat::storage::Withheld`]): an operation that reads a withheld parameter blocks. A
//! second thread gathers each unit when the computation waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};

use super::watch::{WrappedUnit, watch};
use crate::Result;
use crate::exchange::{Phase, Ticket, Worker};
use crate::handle::FlatParamHandle;

/// The wrapped units of a model.
#[derive(Debug, Default)]
pub(crate) struct WrappedUnits {
    watched: OnceLock<Watched>,
    /// `true` while a computation is watched.
    is_watching: AtomicBool,
}

#[derive(Debug)]
struct Watched {
    units: Vec<Arc<WrappedUnit>>,
    /// The thread that gathers them.
    worker: Worker,
}

impl WrappedUnits {
    /// Starts to watch the units of the complete model.
    ///
    /// # Errors
    /// [`FlatError::UnseenUse`](fsdp_flat::FlatError::UnseenUse); the errors of starting threads.
    pub(crate) fn complete(&self, handles: &[Arc<FlatParamHandle>]) -> Result<()> {
        let gathered = handles.iter().filter(|handle| handle.needs_gather());
        let units = gathered.map(|handle| {
            Ok(Arc::new(WrappedUnit {
                handle: Arc::clone(handle),
                withheld: handle.withheld()?,
            }))
        });
        let units: Vec<_> = units.collect::<Result<_>>()?;
        if !units.is_empty() {
            let worker = Worker::start("fsdp-wrapped").map_err(candle_core::Error::Io)?;
            // A second call cannot happen: a model is completed once.
            let _ = self.watched.set(Watched { units, worker });
        }
        Ok(())
    }

    /// Returns the units whose parameters are gathered on demand.
    pub(crate) fn handles(&self) -> Vec<Arc<FlatParamHandle>> {
        let units = self.watched.get().map_or(&[][..], |watched| &watched.units);
        units.iter().map(|unit| Arc::clone(&unit.handle)).collect()
    }

    /// Begins a forward or a backward: until the returned guard is dropped, units are gathered when
    /// the computation waits for them. Returns `None` if there are no wrapped units, or if an outer
    /// computation is being watched, which covers this one.
    pub(crate) fn begin(&self, phase: Phase) -> Result<Option<Watching<'_>>> {
        let Some(watched) = self.watched.get() else {
            return Ok(None);
        };
        if self.is_watching.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let mut watching = Watching {
            units: self,
            stop: None,
            ticket: None,
        };
        let mut withheld = Vec::new();
        for unit in &watched.units {
            if unit.handle.prepare_on_demand(phase == Phase::Forward)? {
                withheld.push(Arc::clone(unit));
            }
        }
        let (stop, stopped) = mpsc::channel();
        watching.stop = Some(stop);
        let (begun, has_begun) = mpsc::channel();
        watching.ticket = Some(
            watched
                .worker
                .submit(move || watch(withheld, phase, &stopped, begun)),
        );
        // Wait until all units are withheld. A computation that reads one before that would get the
        // error of a released tensor. If withholding fails, the ticket has the error.
        if has_begun.recv().is_err() {
            watching.end()?;
            return Ok(None);
        }
        Ok(Some(watching))
    }
}

/// A forward or a backward that is watched, until this is dropped.
pub(crate) struct Watching<'a> {
    units: &'a WrappedUnits,
    /// The thread goes on until this is dropped.
    stop: Option<Sender<()>>,
    ticket: Option<Ticket<()>>,
}

impl Watching<'_> {
    /// Ends the watch. If a unit could not be gathered, this returns the reason. The computation
    /// itself has failed with another error then, that of a released tensor.
    pub(crate) fn end(mut self) -> Result<()> {
        self.stop()
    }

    /// Stops the thread that watches, and returns its error.
    fn stop(&mut self) -> Result<()> {
        drop(self.stop.take());
        self.ticket.take().map_or(Ok(()), Ticket::wait)
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        // After a computation that went well, `end` was called. If not, the computation's own error
        // is being returned.
        let _ = self.stop();
        self.units.is_watching.store(false, Ordering::Release);
    }
}
