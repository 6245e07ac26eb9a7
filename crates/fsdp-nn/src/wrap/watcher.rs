//! The tracing spans of a model, which tell when its forward comes to which layer.
//!
//! candle has no hook that sees the use of a weight. But the layers of candle-transformers hold a span each, which they
//! make with their parameters and enter in their forward. A span belongs to the subscriber that was there when it was
//! made. So while a model is built, a [`Watcher`] is the subscriber: it sees after how many parameters each span is made,
//! and is told of each entry, on whatever thread. The subscriber that was there before gets everything too.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Metadata, Subscriber};

use super::units::WrappedUnits;

/// A subscriber that tells wrapped units of the spans that are entered.
pub(crate) struct Watcher {
    units: Arc<WrappedUnits>,
    /// The subscriber that was there before.
    outer: Dispatch,
    spans: Mutex<HashMap<u64, Watched>>,
    next: AtomicU64,
}

/// A span of the model.
#[derive(Clone)]
struct Watched {
    /// The number of parameters that the model had asked for when it made the span.
    asked: usize,
    /// The span's number with the subscriber that was there before, if that wants it.
    outer: Option<Id>,
}

impl Watcher {
    /// Runs the making of a model, whose spans are watched from then on.
    pub(crate) fn watch<T>(units: &Arc<WrappedUnits>, build: impl FnOnce() -> T) -> T {
        let watcher = Watcher {
            units: Arc::clone(units),
            outer: tracing::dispatcher::get_default(Dispatch::clone),
            spans: Mutex::default(),
            next: AtomicU64::new(1),
        };
        tracing::dispatcher::with_default(&Dispatch::new(watcher), build)
    }

    fn watched(&self, span: &Id) -> Option<Watched> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.get(&span.into_u64()).cloned()
    }

    fn outer(&self, span: &Id) -> Option<Id> {
        self.watched(span).and_then(|watched| watched.outer)
    }
}

impl Subscriber for Watcher {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // The model's spans are wanted whatever the subscriber before wants.
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() || self.outer.enabled(metadata)
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let outer = self.outer.enabled(attributes.metadata()).then(|| self.outer.new_span(attributes));
        let asked = self.units.make_span();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.insert(id, Watched { asked, outer });
        // Numbers begin with 1.
        Id::from_u64(id)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        if let Some(outer) = self.outer(span) {
            self.outer.record(&outer, values);
        }
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        if let (Some(span), Some(follows)) = (self.outer(span), self.outer(follows)) {
            self.outer.record_follows_from(&span, &follows);
        }
    }

    fn event(&self, event: &Event<'_>) {
        if self.outer.enabled(event.metadata()) {
            self.outer.event(event);
        }
    }

    fn enter(&self, span: &Id) {
        let Some(watched) = self.watched(span) else { return };
        if let Some(outer) = &watched.outer {
            self.outer.enter(outer);
        }
        self.units.enter(watched.asked);
    }

    fn exit(&self, span: &Id) {
        if let Some(outer) = self.outer(span) {
            self.outer.exit(&outer);
        }
    }

    fn clone_span(&self, span: &Id) -> Id {
        if let Some(outer) = self.outer(span) {
            self.outer.clone_span(&outer);
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        // Its number is kept, since clones may live: a model has few spans.
        self.outer(&span).is_some_and(|outer| self.outer.try_close(outer))
    }
}
