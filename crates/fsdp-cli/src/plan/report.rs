//! The figures of a plan, as a table for people and as JSON.

use serde::Serialize;

use super::cost::{Links, Traffic};
use super::interval::{self, JobTimes};
use super::state::JobState;
use super::twin::{JobShape, Layout, LeastMost, Planned};
use crate::text::{escaped, iec, or_word};

/// The version of the JSON's schema.
pub(super) const SCHEMA: u32 = 1;

/// The machines that a job runs on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machines {
    pub(super) ranks_per_host: usize,
    pub(super) links: Links,
    /// The mean time between failures of one host, in seconds.
    pub(super) host_mtbf: f64,
    /// The time from a failure until a new start can load, in seconds.
    pub(super) restart: f64,
}

/// All figures of one plan. Times are in seconds.
#[derive(Debug, Serialize)]
pub(super) struct PlanReport {
    schema: u32,
    model: String,
    ranks: usize,
    replicas: usize,
    ranks_per_host: usize,
    layout: Layout,
    /// The elements of the model's parameters; none for a checkpoint, which does not tell.
    parameters: Option<u64>,
    tensors: usize,
    /// The bytes of all tensors, each once.
    bytes: u64,
    boxes: u64,
    /// The bytes of tensors and values that each rank writes.
    bytes_of_rank: LeastMost,
    /// The boxes and values that each rank writes.
    items_of_rank: LeastMost,
    /// The most bytes that a rank holds.
    held_by_rank: u64,
    /// The files of the checkpoint, `.metadata` and `.integrity` among them.
    files: usize,
    metadata_bytes: u64,
    planner: Planner,
    save: SaveTimes,
    load_seconds: f64,
    failures: Failures,
}

/// The planner's own needs, as measured on this machine.
#[derive(Debug, Serialize)]
struct Planner {
    received_bytes: u64,
    plan_seconds: f64,
    metadata_seconds: f64,
    /// The most memory that this process has had; none where the system does not tell, and of one
    /// plan among several.
    peak_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct SaveTimes {
    stall_seconds: f64,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Failures {
    hosts: usize,
    mtbf_seconds: f64,
    restart_seconds: f64,
    young_seconds: f64,
    interval_seconds: f64,
    /// The fraction of all time in which training makes progress that is kept.
    effective: f64,
}

impl PlanReport {
    /// Computes the times of saves, loads and restarts from what has been planned, and the best
    /// interval between saves.
    pub(super) fn new(
        model: String,
        state: &JobState,
        shape: &JobShape,
        machines: &Machines,
        planned: &Planned,
    ) -> Self {
        let per_host = machines.ranks_per_host;
        let links = &machines.links;
        // A save writes each byte once, but a load reads all that each rank holds: with replicas
        // that is several times as much.
        let written = Traffic::of_ranks(&planned.files, per_host);
        let held = Traffic::of_ranks(&planned.held, per_host);
        let hosts = shape.ranks.div_ceil(per_host);
        let load = links.transfer(&held);
        // A restart ends with a load, so the longer that takes, the more a failure costs.
        let times = JobTimes {
            mtbf: machines.host_mtbf / hosts as f64,
            // A save in the background copies all that a rank holds, before the ranks divide copies
            // among them.
            stall: links.stall(&held),
            tail: links.transfer(&written),
            restart: machines.restart + load,
        };
        let best = interval::best_interval(&times);
        PlanReport {
            schema: SCHEMA,
            model,
            ranks: shape.ranks,
            replicas: shape.replicas,
            ranks_per_host: per_host,
            layout: shape.layout,
            parameters: state.parameters,
            tensors: state.tensors(),
            bytes: state.bytes(),
            boxes: planned.boxes,
            bytes_of_rank: planned.payload,
            items_of_rank: planned.items,
            held_by_rank: held.rank,
            // Ranks that write nothing have no file. Two files are the metadata and the hashes.
            files: planned.files.iter().filter(|&&length| length > 0).count() + 2,
            metadata_bytes: planned.metadata,
            planner: Planner {
                received_bytes: planned.received,
                plan_seconds: planned.planning.as_secs_f64(),
                metadata_seconds: planned.encoding.as_secs_f64(),
                peak_bytes: crate::memory::peak_of_process(),
            },
            save: SaveTimes {
                stall_seconds: times.stall,
                seconds: times.stall + times.tail,
            },
            load_seconds: load,
            failures: Failures {
                hosts,
                mtbf_seconds: times.mtbf,
                restart_seconds: times.restart,
                young_seconds: interval::young(&times),
                interval_seconds: best,
                effective: interval::effective_fraction(&times, best),
            },
        }
    }

    /// Leaves out the memory of the process. Of several plans it would be that of the largest so
    /// far.
    pub(super) fn without_memory(mut self) -> Self {
        self.planner.peak_bytes = None;
        self
    }

    /// Returns the times that decide the interval between saves.
    pub(super) fn times(&self) -> JobTimes {
        JobTimes {
            mtbf: self.failures.mtbf_seconds,
            stall: self.save.stall_seconds,
            tail: self.save.seconds - self.save.stall_seconds,
            restart: self.failures.restart_seconds,
        }
    }

    /// Returns a line that tells what was planned.
    pub(super) fn title(&self) -> String {
        let replicas = if self.replicas > 1 {
            format!(", {} replicas", self.replicas)
        } else {
            String::new()
        };
        format!(
            "{} on {} ranks{replicas}",
            escaped(&self.model),
            grouped(self.ranks as u64)
        )
    }

    /// Returns the table of one plan.
    pub(super) fn lines(&self) -> Vec<String> {
        let layout = match self.layout {
            Layout::Flat => "each unit flattened, then cut",
            Layout::Rows => "each tensor cut along its rows",
        };
        // The rows are in the order of a reader's questions: what is it, what does a rank write,
        // how long does it take, how often should it happen.
        let planner = &self.planner;
        let planning = duration(planner.plan_seconds);
        let encoding = duration(planner.metadata_seconds);
        let failures = &self.failures;
        let mtbf = duration(failures.mtbf_seconds);
        let hosts = grouped(failures.hosts as u64);
        let interval = duration(failures.interval_seconds);
        let effective = format!("{:.1} %", 100.0 * failures.effective);
        let tensors = grouped(self.tensors as u64);
        let mut rows = vec![
            ("job", self.title()),
            ("layout", layout.to_owned()),
            (
                "parameters",
                or_word(self.parameters.map(grouped), "unknown"),
            ),
            ("state", format!("{} in {tensors} tensors", iec(self.bytes))),
            ("held by a rank", iec(self.held_by_rank)),
            ("", String::new()),
            ("written by a rank", self.bytes_of_rank.text(iec)),
            ("boxes of a rank", self.items_of_rank.text(grouped)),
            ("boxes of all", grouped(self.boxes)),
            ("files", grouped(self.files as u64)),
            (".metadata", iec(self.metadata_bytes)),
            ("", String::new()),
            ("sent to the planner", iec(planner.received_bytes)),
            ("planning", format!("{planning}, once for each layout")),
            ("encoding .metadata", format!("{encoding}, in each save")),
        ];
        if let Some(bytes) = planner.peak_bytes {
            rows.push(("memory of this plan", iec(bytes)));
        }
        rows.extend([
            ("", String::new()),
            (
                "training waits for a save",
                duration(self.save.stall_seconds),
            ),
            ("a save takes", duration(self.save.seconds)),
            ("load takes", duration(self.load_seconds)),
            (
                "mean time between failures",
                format!("{mtbf} on {hosts} hosts"),
            ),
            ("best interval between saves", interval),
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
            self.ranks,
            iec(self.bytes_of_rank.most),
            self.items_of_rank.most,
            iec(self.metadata_bytes),
            duration(self.planner.plan_seconds),
            duration(self.save.seconds),
            duration(self.load_seconds),
            duration(self.failures.interval_seconds),
            100.0 * self.failures.effective,
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
