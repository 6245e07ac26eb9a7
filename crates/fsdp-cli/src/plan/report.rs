//! The figures of a plan, as a table for people and as JSON.

use serde_json::{Value, json};

use super::cost::{Machines, Traffic};
use super::interval::{self, JobTimes};
use super::state::JobState;
use super::twin::{JobShape, Layout, LeastMost, Planned};
use crate::text::{choice_name, escaped, iec, or_word};

/// The version of the JSON's schema.
pub(super) const SCHEMA: u32 = 1;

/// All figures of one plan.
pub(super) struct PlanReport<'a> {
    model: &'a str,
    state: &'a JobState,
    shape: JobShape,
    planned: Planned,
    hosts: usize,
    /// The most bytes that a rank holds.
    held_by_rank: u64,
    /// The files of the checkpoint, `.metadata` and `.integrity` among them.
    files: usize,
    /// The most memory that this process has had; none where the system does not tell, and of one
    /// plan among several.
    pub(super) peak_bytes: Option<u64>,
    load_seconds: f64,
    pub(super) times: JobTimes,
    /// The best interval between saves, in seconds.
    interval: f64,
    /// The fraction of all time in which training makes progress that is kept.
    effective: f64,
}

impl<'a> PlanReport<'a> {
    /// Computes the times of saves, loads and restarts from what has been planned, and the best
    /// interval between saves.
    pub(super) fn new(
        model: &'a str,
        state: &'a JobState,
        shape: JobShape,
        machines: &Machines,
        planned: Planned,
    ) -> Self {
        // A save writes each byte once, but a load reads all that each rank holds: with replicas
        // that is several times as much.
        let written = Traffic::of_ranks(&planned.files, shape.ranks_per_host);
        let held = Traffic::of_ranks(&planned.held, shape.ranks_per_host);
        let hosts = shape.ranks.div_ceil(shape.ranks_per_host);
        let load_seconds = machines.transfer(&held);
        // A restart ends with a load, so the longer that takes, the more a failure costs.
        let times = JobTimes {
            mtbf: machines.mtbf / hosts as f64,
            // A save in the background copies all that a rank holds, before the ranks divide copies
            // among them.
            stall: machines.stall(&held),
            tail: machines.transfer(&written),
            restart: machines.restart + load_seconds,
        };
        let interval = interval::best_interval(&times);
        PlanReport {
            model,
            state,
            shape,
            hosts,
            held_by_rank: held.rank,
            // Ranks that write nothing have no file. Two files are the metadata and the hashes.
            files: planned.files.iter().filter(|&&length| length > 0).count() + 2,
            planned,
            peak_bytes: crate::memory::peak_of_process(),
            load_seconds,
            times,
            interval,
            effective: interval::effective_fraction(&times, interval),
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
            "parameters": self.state.parameters,
            "tensors": self.state.tensors(),
            "bytes": self.state.bytes(),
            "boxes": planned.boxes,
            "bytes_of_rank": planned.payload,
            "items_of_rank": planned.items,
            "held_by_rank": self.held_by_rank,
            "files": self.files,
            "metadata_bytes": planned.metadata,
            // The planner's own needs, as measured on this machine.
            "planner": {
                "received_bytes": planned.received,
                "plan_seconds": planned.planning.as_secs_f64(),
                "metadata_seconds": planned.encoding.as_secs_f64(),
                "peak_bytes": self.peak_bytes,
            },
            "save": { "stall_seconds": times.stall, "seconds": times.stall + times.tail },
            "load_seconds": self.load_seconds,
            "failures": {
                "hosts": self.hosts,
                "mtbf_seconds": times.mtbf,
                "restart_seconds": times.restart,
                "young_seconds": interval::young(times),
                "interval_seconds": self.interval,
                "effective": self.effective,
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
            grouped(ranks as u64)
        )
    }

    /// Returns the table of one plan.
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
        let planning = duration(planned.planning.as_secs_f64());
        let encoding = duration(planned.encoding.as_secs_f64());
        let mtbf = duration(times.mtbf);
        let hosts = grouped(self.hosts as u64);
        let effective = format!("{:.1} %", 100.0 * self.effective);
        let tensors = grouped(state.tensors() as u64);
        let mut rows = vec![
            ("job", self.title()),
            ("layout", layout.to_owned()),
            (
                "parameters",
                or_word(state.parameters.map(grouped), "unknown"),
            ),
            (
                "state",
                format!("{} in {tensors} tensors", iec(state.bytes())),
            ),
            ("held by a rank", iec(self.held_by_rank)),
            ("", String::new()),
            ("written by a rank", planned.payload.text(iec)),
            ("boxes of a rank", planned.items.text(grouped)),
            ("boxes of all", grouped(planned.boxes)),
            ("files", grouped(self.files as u64)),
            (".metadata", iec(planned.metadata)),
            ("", String::new()),
            ("sent to the planner", iec(planned.received)),
            ("planning", format!("{planning}, once for each layout")),
            ("encoding .metadata", format!("{encoding}, in each save")),
        ];
        if let Some(bytes) = self.peak_bytes {
            rows.push(("memory of this plan", iec(bytes)));
        }
        rows.extend([
            ("", String::new()),
            ("training waits for a save", duration(times.stall)),
            ("a save takes", duration(times.stall + times.tail)),
            ("load takes", duration(self.load_seconds)),
            (
                "mean time between failures",
                format!("{mtbf} on {hosts} hosts"),
            ),
            ("best interval between saves", duration(self.interval)),
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
            iec(self.planned.payload.most),
            self.planned.items.most,
            iec(self.planned.metadata),
            duration(self.planned.planning.as_secs_f64()),
            duration(self.times.stall + self.times.tail),
            duration(self.load_seconds),
            duration(self.interval),
            100.0 * self.effective,
        )
    }
}

impl LeastMost {
    /// Formats the range, or the one number that it is.
    fn text(&self, number: fn(u64) -> String) -> String {
        if self.least == self.most {
            return number(self.most);
        }
        format!("{} to {}", number(self.least), number(self.most))
    }
}

/// Formats seconds for people.
pub(super) fn duration(seconds: f64) -> String {
    let units = [
        ("d", 86_400.0),
        ("h", 3600.0),
        ("min", 60.0),
        ("s", 1.0),
        ("ms", 1e-3),
    ];
    // The largest unit of which there is at least one leaves the fewest digits.
    let fits = units.into_iter().find(|&(_, unit)| seconds >= unit);
    let (name, unit) = fits.unwrap_or(("us", 1e-6));
    format!("{:.1} {name}", seconds / unit)
}

/// Formats a number with a comma for each thousand.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        // Counted from the end, a comma comes before every third digit.
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
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
                grouped(7),
                grouped(999),
                grouped(1000),
                grouped(405_853_388_800)
            ],
            ["7", "999", "1,000", "405,853,388,800"]
        );
        assert_eq!(
            [
                duration(0.0),
                duration(0.25),
                duration(59.0),
                duration(90.0)
            ],
            ["0.0 us", "250.0 ms", "59.0 s", "1.5 min"]
        );
        assert_eq!([duration(7200.0), duration(400_000.0)], ["2.0 h", "4.6 d"]);
    }
}
