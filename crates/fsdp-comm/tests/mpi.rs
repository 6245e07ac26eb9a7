//! The `mpi` backend does what every backend must do, between processes that `mpirun` has started.
//!
//! A test starts this very program again for each rank, where `rank_process` finds out from its
//! environment what to do, and writes how that went to a file: an MPI launcher ends all ranks when
//! one fails.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]
#![expect(
    clippy::disallowed_methods,
    reason = "what ranks tell the test is no checkpoint"
)]

mod conformance;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use conformance::{Case, DEADLINE, cases};
use fsdp_comm::{BackendKind, CommError, ProcessGroup, ReduceOp, init_process_group_within};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

/// For what must fail.
const SHORT_DEADLINE: Duration = Duration::from_secs(3);

/// A harness that waits longer than this has found a hang.
const HANG: Duration = Duration::from_secs(120);

/// Returns `true` for a case in which a rank ends badly, so that it needs processes of its own.
fn is_fatal(case: &Case) -> bool {
    case.casualty.is_some() || case.name.contains("leaves") || case.name.contains("that left")
}

fn verdict(dir: &Path, rank: usize) -> PathBuf {
    dir.join(format!("rank-{rank}"))
}

/// Writes a file whole or not at all.
fn write(path: &Path, text: &str) {
    fs::write(path.with_extension("new"), text).unwrap();
    fs::rename(path.with_extension("new"), path).unwrap();
}

/// The program of each rank.
#[test]
fn rank_process() {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(what) = variable("FSDP_TEST") else {
        return;
    };
    let dir = PathBuf::from(variable("FSDP_TEST_DIR").unwrap());
    let deadline = if what.starts_with("until") {
        SHORT_DEADLINE
    } else {
        DEADLINE
    };
    let group = init_process_group_within(BackendKind::Mpi, deadline).unwrap();
    assert_eq!(group.backend_name(), "mpi");
    let (rank, path) = (group.rank(), verdict(&dir, group.rank()));
    if let Some(len) = what.strip_prefix("until it fails, of ") {
        write(&path.with_extension("pid"), &std::process::id().to_string());
        let error = until_it_fails(
            &group,
            len.parse().unwrap(),
            &path.with_extension("started"),
        );
        write(&path, &error.to_string());
        assert_eq!(group.barrier(), Err(error));
        // The first rank that ends takes the others along.
        let victim: usize = variable("FSDP_TEST_VICTIM").unwrap().parse().unwrap();
        let survivors: Vec<usize> = (0..group.world_size())
            .filter(|&rank| rank != victim)
            .collect();
        wait_until(SHORT_DEADLINE, || {
            survivors.iter().all(|&rank| verdict(&dir, rank).exists())
        });
        return;
    }
    let mut chosen: Vec<Case> = cases()
        .into_iter()
        .filter(|case| case.name.starts_with(&what))
        .collect();
    chosen.retain(|case| {
        case.worlds.contains(&group.world_size()) && (case.name == what || !is_fatal(case))
    });
    let last = chosen.pop().expect("there is such a case");
    let casualty = last.casualty;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        chosen.iter().for_each(|case| case.run(group.clone()));
        last.run(group);
    }));
    write(&path, if outcome.is_ok() { "done" } else { "panicked" });
    assert_eq!(
        outcome.is_err(),
        casualty == Some(rank),
        "rank {rank} of `{what}`"
    );
}

fn until_it_fails(group: &ProcessGroup, len: usize, started: &Path) -> CommError {
    loop {
        let mut buffer = vec![group.rank() as f32; len];
        match group
            .all_reduce(&mut buffer, ReduceOp::Sum)
            .and_then(|()| group.agree("save", Ok::<_, String>(())))
        {
            Ok(()) => write(started, ""),
            Err(error) => break error,
        }
    }
}

fn wait_until(limit: Duration, mut happens: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !happens() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Ranks under `mpirun`.
struct Job {
    mpirun: Child,
    what: String,
    ranks: usize,
    dir: TempDir,
}

impl Job {
    fn start(ranks: usize, what: &str, variables: &[(&str, &str)]) -> Job {
        let dir = TempDir::new().unwrap();
        let mut command = Command::new("mpirun");
        command
            .args(["-n", &ranks.to_string()])
            .arg(std::env::current_exe().unwrap());
        command.args(["rank_process", "--exact", "--nocapture", "--test-threads=1"]);
        // More ranks than processors, in a container's root too: Open MPI's words for it, which
        // others do not hear.
        command
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .env("OMPI_MCA_hwloc_base_binding_policy", "none");
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
            .env("FSDP_TEST", what)
            .env("FSDP_TEST_DIR", dir.path())
            .envs(variables.iter().copied());
        let output = || {
            fs::File::options()
                .create(true)
                .append(true)
                .open(dir.path().join("output"))
                .unwrap()
        };
        command
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output());
        let mpirun = command
            .spawn()
            .expect("`mpirun` is installed where the feature `mpi` is built");
        Job {
            mpirun,
            what: what.to_owned(),
            ranks,
            dir,
        }
    }

    fn output(&self) -> String {
        fs::read_to_string(self.dir.path().join("output")).unwrap_or_default()
    }

    /// Waits until all ranks have ended. Returns `true` if all ended well.
    fn wait(&mut self, limit: Duration) -> bool {
        let over = wait_until(limit, || self.mpirun.try_wait().unwrap().is_some());
        assert!(
            over,
            "`{}` on {} ranks hangs\n{}",
            self.what,
            self.ranks,
            self.output()
        );
        self.mpirun.wait().unwrap().success()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.mpirun.try_wait().is_ok_and(|status| status.is_none()) {
            // It ends its ranks, too.
            kill_process(Pid::from_child(&self.mpirun), Signal::TERM).ok();
            self.mpirun.wait().ok();
        }
    }
}

/// Runs all cases of one file on 2 to 4 ranks.
fn run_all(prefix: &str) {
    for ranks in 2..=4 {
        let fits = |case: &Case| case.name.starts_with(prefix) && case.worlds.contains(&ranks);
        let cases: Vec<Case> = cases().into_iter().filter(fits).collect();
        let together = cases
            .iter()
            .any(|case| !is_fatal(case))
            .then_some((prefix, None));
        let alone = cases
            .iter()
            .filter(|case| is_fatal(case))
            .map(|case| (&case.name[..], case.casualty));
        for (what, casualty) in together.into_iter().chain(alone) {
            let mut job = Job::start(ranks, what, &[]);
            let well = job.wait(HANG);
            let verdicts: Vec<String> = (0..ranks)
                .map(|rank| fs::read_to_string(verdict(job.dir.path(), rank)).unwrap_or_default())
                .collect();
            let expected: Vec<&str> = (0..ranks)
                .map(|rank| {
                    if casualty == Some(rank) {
                        "panicked"
                    } else {
                        "done"
                    }
                })
                .collect();
            assert!(
                well && verdicts == expected,
                "`{what}` on {ranks} ranks: {verdicts:?}\n{}",
                job.output()
            );
        }
    }
}

macro_rules! conformance_tests {
    ($($name:ident: $prefix:literal,)*) => {
        $(#[test] fn $name() { run_all($prefix); })*
    };
}

conformance_tests! {
    operations: "operations",
    reductions: "reductions",
    groups: "groups",
    objects: "objects",
    invalid_arguments: "invalid",
    traffic: "traffic",
    mismatches: "mismatch",
    ranks_that_leave: "faults: a rank leaves",
    ranks_that_panic: "faults: a rank panics",
    ranks_that_are_late: "faults: a rank is late",
    other_faults: "faults: others",
}

/// Sends a signal to a rank while all exchange numbers, and returns the output of the others once
/// all have ended.
fn hit(signal: Signal, victim: usize, len: usize) -> Vec<String> {
    let mut job = Job::start(
        3,
        &format!("until it fails, of {len}"),
        &[("FSDP_TEST_VICTIM", victim.to_string().as_str())],
    );
    let path = |rank: usize| verdict(job.dir.path(), rank);
    let under_way = wait_until(HANG, || {
        (0..3).all(|rank| path(rank).with_extension("started").exists())
    });
    assert!(under_way, "the ranks do not get going\n{}", job.output());
    thread::sleep(Duration::from_millis(30));
    let pids: Vec<Pid> = (0..3)
        .map(|rank| {
            let pid = fs::read_to_string(path(rank).with_extension("pid")).unwrap();
            Pid::from_raw(pid.parse().unwrap()).unwrap()
        })
        .collect();
    kill_process(pids[victim], signal).unwrap();
    let survivors: Vec<PathBuf> = (0..3).filter(|&rank| rank != victim).map(path).collect();
    assert!(
        !job.wait(SHORT_DEADLINE + Duration::from_secs(10)),
        "the launcher noticed nothing\n{}",
        job.output()
    );
    assert!(wait_until(Duration::from_secs(5), || pids
        .iter()
        .all(|&pid| test_kill_process(pid).is_err())));
    survivors
        .iter()
        .map(|path| fs::read_to_string(path).unwrap_or_default())
        .collect()
}

#[test]
fn a_rank_that_is_stopped_is_named() {
    for len in [5, 3_000_000] {
        for said in hit(Signal::STOP, 1, len) {
            assert!(said.contains("rank 1 has sent no heartbeat"), "{said}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_leaves_nobody_behind() {
    for len in [5, 3_000_000] {
        // Its launcher may be quicker than the others' errors.
        for said in hit(Signal::KILL, 1, len) {
            assert!(
                said.is_empty() || said.contains("rank 1 exited without leaving"),
                "{said}"
            );
        }
    }
}

#[test]
fn without_a_launcher_it_is_not_available() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["rank_process", "--exact", "--nocapture"])
        .env("FSDP_TEST", "operations")
        .env("FSDP_TEST_DIR", "");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["OMPI_", "PMI", "SLURM_"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(&name);
        }
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("BackendUnavailable") && said.contains("mpirun"),
        "{said}"
    );
}
