//! The files in a run's directory beside its checkpoints.

/// The metrics of all steps, a line of JSON each.
pub(crate) const METRICS_FILE: &str = "metrics.jsonl";

/// The events of the run, a line of JSON each: starts, checkpoints, the end.
pub(crate) const EVENTS_FILE: &str = "events.jsonl";
