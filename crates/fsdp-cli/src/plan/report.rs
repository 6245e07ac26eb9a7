//! The figures of a plan, as a table for people and as JSON.

use serde_json::{Value, json};

use super::cost::{Machines, Traffic};
use super::interval::{self, JobTimes};
use super::state::JobState;
use super::twin::{JobShape, Layout, LeastMost, PlannedCheckpoint};
use crate::text::{bytes_text, choice_name, escaped, or_word};

/// The version of the JSON's schema.
pub(super) const SCHEMA: u32 = 1;

/// All figures of one plan.
pub(super) struct PlanReport<'a> {
    model: &'a str,
    state: &'a JobState,
    shape: JobShape,
    planned: PlannedCheckpoint,
    host_count: usize,
    /// The most bytes that a rank holds.
    held_by_rank: u64,
    /// The files of the checkpoint, `.metadata` and `.integrity` among them.
    file_count: usize,
    /// The most memory that this process has had; none where the system does not tell, and of one
    /// plan among several.
    pub(super) peak_bytes: Option<u64>,
    load_seconds: f64,
    pub(super) times: JobTimes,
    /// The best interval between saves, in seconds.
    interval_seconds: f64,
    /// The fraction of all time in which training makes progress that is kept.
    effective_fraction: f64,
}

impl<'a> PlanReport<'a> {
    /// Computes the times of saves, loads and restarts from what has been planned, and the best
    /// interval between saves.
    pub(super) fn new(
        model: &'a str,
        state: &'a JobState,
        shape: JobShape,
        machines: &Machines,
        planned: PlannedCheckpoint,
    ) -> Self {
        // A save writes each byte once, but a load reads all that each rank holds: with replicas
        // that is several times as much.
        let written_traffic = Traffic::of_ranks(&planned.file_lengths, shape.ranks_per_host);
        let held_traffic = Traffic::of_ranks(&planned.held_bytes, shape.ranks_per_host);
        let hosts = shape.ranks.div_ceil(shape.ranks_per_host);
        let load_seconds = machines.transfer_seconds(&held_traffic);
        // A restart ends with a load, so the longer that takes, the more a failure costs.
        let times = JobTimes {
            mtbf: machines.mtbf / hosts as f64,
            // A save in the background copies all that a rank holds, before the ranks divide copies
            // among them.
            stall: machines.stall_seconds(&held_traffic),
            tail: machines.transfer_seconds(&written_traffic),
            restart: machines.restart + load_seconds,
        };
        let interval = interval::best_interval(&times);
        PlanReport {
            model,
            state,
            shape,
            host_count: hosts,
            held_by_rank: held_traffic.rank_bytes,
            // Ranks that write nothing have no file. Two files are the metadata and the hashes.
            file_count: planned
                .file_lengths
                .iter()
                .filter(|&&length| length > 0)
                .count()
                + 2,
            planned,
            peak_bytes: crate::memory::peak_process_bytes(),
            load_seconds,
            times,
            interval_seconds: interval,
            effective_fraction: interval::effective_fraction(&times, interval),
        }
    }

    /// Returns the object of `--json`. Times are in seconds.
    pub(super) fn json(&self) -> Value {
        let PlanReport {
            shape,
            planned,
            times,
            ..
        } = self;
        json!({
            "schema": SCHEMA,
            "model": self.model,
            "ranks": shape.ranks,
            "replicas": shape.replicas,
            "ranks_per_host": shape.ranks_per_host,
            "layout": choice_name(&shape.layout),
            // A checkpoint does not tell which of its tensors are parameters.
            "parameters": self.state.parameter_count,
            "tensors": self.state.tensor_count(),
            "bytes": self.state.total_bytes(),
            "boxes": planned.box_count,
            "bytes_of_rank": planned.payload_bytes,
            "items_of_rank": planned.items_of_rank,
            "held_by_rank": self.held_by_rank,
            "files": self.file_count,
            "metadata_bytes": planned.metadata_bytes,
            // The planner's own needs, as measured on this machine.
            "planner": {
                "received_bytes": planned.received_bytes,
                "plan_seconds": planned.planning_time.as_secs_f64(),
                "metadata_seconds": planned.encoding_time.as_secs_f64(),
                "peak_bytes": self.peak_bytes,
            },
            "save": { "stall_seconds": times.stall, "seconds": times.stall + times.tail },
            "load_seconds": self.load_seconds,
            "failures": {
                "hosts": self.host_count,
                "mtbf_seconds": times.mtbf,
                "restart_seconds": times.restart,
                "young_seconds": interval::young_interval(times),
                "interval_seconds": self.interval_seconds,
                "effective": self.effective_fraction,
            },
        })
    }

    /// Returns a line that tells what was planned.
    pub(super) fn title(&self) -> String {
        let JobShape {
            ranks, replicas, ..
        } = self.shape;
        let replicas = if replicas > 1 {
            format!(", {replicas} replicas")
        } else {
            String::new()
        };
        format!(
            "{} on {} ranks{replicas}",
            escaped(self.model),
            grouped_text(ranks as u64)
        )
    }

    /// Returns the table of one plan, for people.
    pub(super) fn lines(&self) -> Vec<String> {
        let layout = match self.shape.layout {
            Layout::Flat => "each unit flattened, then cut",
            Layout::Rows => "each tensor cut along its rows",
        };
        // The rows are in the order of a reader's questions: what is it, what does a rank write,
        // how long does it take, how often should it happen.
        let PlanReport {
            state,
            planned,
            times,
            ..
        } = self;
        let planning = duration_text(planned.planning_time.as_secs_f64());
        let encoding = duration_text(planned.encoding_time.as_secs_f64());
        let mtbf = duration_text(times.mtbf);
        let hosts = grouped_text(self.host_count as u64);
        let effective = format!("{:.1} %", 100.0 * self.effective_fraction);
        let tensors = grouped_text(state.tensor_count() as u64);
        let mut rows = vec![
            ("job", self.title()),
            ("layout", layout.to_owned()),
            (
                "parameters",
                or_word(state.parameter_count.map(grouped_text), "unknown"),
            ),
            (
                "state",
                format!("{} in {tensors} tensors", bytes_text(state.total_bytes())),
            ),
            ("held by a rank", bytes_text(self.held_by_rank)),
            ("", String::new()),
            (
                "written by a rank",
                planned.payload_bytes.range_text(bytes_text),
            ),
            (
                "boxes of a rank",
                planned.items_of_rank.range_text(grouped_text),
            ),
            ("boxes of all", grouped_text(planned.box_count)),
            ("files", grouped_text(self.file_count as u64)),
            (".metadata", bytes_text(planned.metadata_bytes)),
            ("", String::new()),
            ("sent to the planner", bytes_text(planned.received_bytes)),
            ("planning", format!("{planning}, once for each layout")),
            ("encoding .metadata", format!("{encoding}, in each save")),
        ];
        if let Some(bytes) = self.peak_bytes {
            rows.push(("memory of this plan", bytes_text(bytes)));
        }
        rows.extend([
            ("", String::new()),
            ("training waits for a save", duration_text(times.stall)),
            ("a save takes", duration_text(times.stall + times.tail)),
            ("load takes", duration_text(self.load_seconds)),
            (
                "mean time between failures",
                format!("{mtbf} on {hosts} hosts"),
            ),
            (
                "best interval between saves",
                duration_text(self.interval_seconds),
            ),
            ("effective time", effective),
        ]);
        rows.into_iter()
            .map(|(name, value)| format!("{name:<28} {value}").trim_end().to_owned())
            .collect()
    }

    /// Returns the header of the table of several plans.
    pub(super) fn header() -> String {
        format!(
            "{:>7} {:>10} {:>7} {:>9} {:>8} {:>8} {:>8} {:>8} {:>6}",
            "ranks",
            "of a rank",
            "boxes",
            ".metadata",
            "planning",
            "save",
            "load",
            "interval",
            "eff. %"
        )
    }

    /// Returns this plan's line in the table of several.
    pub(super) fn row(&self) -> String {
        format!(
            "{:>7} {:>10} {:>7} {:>9} {:>8} {:>8} {:>8} {:>8} {:>6.1}",
            self.shape.ranks,
            bytes_text(self.planned.payload_bytes.most),
            self.planned.items_of_rank.most,
            bytes_text(self.planned.metadata_bytes),
            duration_text(self.planned.planning_time.as_secs_f64()),
            duration_text(self.times.stall + self.times.tail),
            duration_text(self.load_seconds),
            duration_text(self.interval_seconds),
            100.0 * self.effective_fraction,
        )
    }
}

impl LeastMost {
    /// Formats the range, or the one number that it is.
    fn range_text(&self, format: fn(u64) -> String) -> String {
        if self.least == self.most {
            return format(self.most);
        }
        format!("{} to {}", format(self.least), format(self.most))
    }
}

/// Formats seconds for people.
pub(super) fn duration_text(seconds: f64) -> String {
    let units = [
        ("d", 86_400.0),
        ("h", 3600.0),
        ("min", 60.0),
        ("s", 1.0),
        ("ms", 1e-3),
    ];
    // The largest unit of which there is at least one leaves the fewest digits.
    let largest_unit = units.into_iter().find(|&(_, unit)| seconds >= unit);
    let (name, unit) = largest_unit.unwrap_or(("us", 1e-6));
    format!("{:.1} {name}", seconds / unit)
}

/// Formats a number with a comma for each thousand.
fn grouped_text(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        // Counted from the end, a comma comes before every third digit.
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_short() {
        assert_eq!(
            [
                grouped_text(7),
                grouped_text(999),
                grouped_text(1000),
                grouped_text(405_853_388_800)
            ],
            ["7", "999", "1,000", "405,853,388,800"]
        );
        assert_eq!(
            [
                duration_text(0.0),
                duration_text(0.25),
                duration_text(59.0),
                duration_text(90.0)
            ],
            ["0.0 us", "250.0 ms", "59.0 s", "1.5 min"]
        );
        assert_eq!(
            [duration_text(7200.0), duration_text(400_000.0)],
            ["2.0 h", "4.6 d"]
        );
    }
}
