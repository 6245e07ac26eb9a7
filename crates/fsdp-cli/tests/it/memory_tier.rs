//! A run with a memory tier: killed, it goes on from the newest step in memory, whatever of it is
//! lost or damaged.

#![cfg(unix)]
#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_cli::exit_codes;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

use crate::common::{FSDP, fsdp};
use crate::metrics::losses;

const SMALL: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "12", "--sample",
    "0",
];

/// Nothing takes longer than this.
const HANG: Duration = Duration::from_secs(60);

/// A run whose only checkpoint is that of step 4, killed when a later step was in memory.
struct Killed {
    dir: TempDir,
    /// The newest step in memory, of which each part has a copy.
    step: u64,
    /// The step before it that a run can go on from: in memory too, unless it was just making room,
    /// or else the checkpoint.
    before: u64,
}

impl Killed {
    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// Trains on to one step more, and returns what it says.
    fn resume(&self, nproc: &str, more: &[&str]) -> String {
        let (out, tier, steps) = (
            self.out(),
            self.dir.path().join("tier"),
            (self.step + 1).to_string(),
        );
        let tier = [
            "--memory-tier",
            tier.to_str().unwrap(),
            "--resume",
            "--steps",
            &steps,
        ];
        let arguments = ["train", "--nproc", nproc, "--out", out.to_str().unwrap()];
        let output = fsdp(&arguments)
            .args(tier)
            .args(SMALL)
            .args(more)
            .assert()
            .success()
            .get_output()
            .clone();
        String::from_utf8(output.stderr).unwrap()
    }

    /// Checks that a run went on from a step in memory, and went as if it had never been killed.
    fn assert_went_on(&self, talk: &str, step: u64) {
        let place = if step > 4 { "tier" } else { "out" };
        assert!(
            talk.contains(&format!("step-{step:08}`")) && talk.contains(&format!("/{place}/")),
            "{talk}"
        );
        let straight = self.dir.path().join("straight");
        let steps = (self.step + 1).to_string();
        fsdp(&[
            "train",
            "--nproc",
            "2",
            "--steps",
            &steps,
            "--out",
            straight.to_str().unwrap(),
        ])
        .args(SMALL)
        .assert()
        .success();
        assert_eq!(losses(&self.out()), losses(&straight));
    }
}

/// The step that a part is of.
fn step_of(part: &Path) -> u64 {
    part.file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .split('-')
        .nth(1)
        .unwrap()
        .parse()
        .unwrap()
}

/// The steps of which both copies of the parts of `ranks` ranks are in a tier, the newest last.
fn steps_in(tier: &Path, ranks: usize) -> Vec<u64> {
    let parts: Vec<u64> = directories(tier).iter().map(|part| step_of(part)).collect();
    let steps: BTreeSet<u64> = parts.iter().copied().collect();
    steps
        .into_iter()
        .filter(|step| parts.iter().filter(|of| *of == step).count() == 2 * ranks)
        .collect()
}

/// Returns the newest of these steps, and the one before it, or that of the checkpoint. A newer one
/// of which the kill has left something is removed: whether it is whole is a matter of luck.
fn newest_in(tier: &Path, ranks: usize) -> (u64, u64) {
    let mut steps = steps_in(tier, ranks);
    let step = steps.pop().unwrap();
    directories(tier)
        .iter()
        .filter(|part| step_of(part) > step)
        .for_each(|part| fs::remove_dir_all(part).unwrap());
    (step, steps.pop().unwrap_or(4))
}

/// The directories of parts: `rank-*/step-*` below the directories of runs, in one tier or in those
/// of several hosts.
fn directories(tier: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(tier).into_iter().flatten().flatten() {
        let (path, name) = (
            entry.path(),
            entry.file_name().to_string_lossy().into_owned(),
        );
        if name.starts_with("step-") && name.contains("-of-") {
            found.push(path);
        } else if path.is_dir() {
            found.extend(directories(&path));
        }
    }
    found.sort();
    found
}

/// Returns the names of all files and directories below a directory.
fn snapshot(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let mut found: Vec<PathBuf> = entries
        .flat_map(|path| [vec![path.clone()], snapshot(&path)].concat())
        .collect();
    found.sort();
    found
}

fn start(before: &[&str], arguments: &[&str]) -> Child {
    let mut command = Command::new(FSDP);
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FSDP_"))
    {
        command.env_remove(name);
    }
    command
        .args(before)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Waits until a job has a step after the 8th in memory, beside the one before it.
fn wait_for_memory(child: &mut Child, tier: &Path, ranks: usize) {
    let limit = Instant::now() + HANG;
    while steps_in(tier, ranks)
        .into_iter()
        .filter(|step| *step > 8)
        .count()
        < 2
    {
        assert!(
            child.try_wait().unwrap().is_none(),
            "the run ended by itself"
        );
        assert!(Instant::now() < limit, "no steps in memory within a minute");
        thread::sleep(Duration::from_millis(5));
    }
}

fn kill_a_run() -> Killed {
    let dir = TempDir::new().unwrap();
    let (out, tier) = (dir.path().join("out"), dir.path().join("tier"));
    let (out, memory) = (
        out.to_str().unwrap(),
        [
            "--memory-tier",
            tier.to_str().unwrap(),
            "--memory-every",
            "3",
        ],
    );
    fsdp(&["train", "--nproc", "2", "--steps", "4", "--out", out])
        .args(SMALL)
        .args(memory)
        .assert()
        .success();
    assert_eq!(
        directories(&tier),
        [] as [PathBuf; 0],
        "a run that is done leaves no steps in memory"
    );
    let arguments = [
        &[
            "train", "--nproc", "2", "--steps", "1000000", "--resume", "--out", out,
        ][..],
        &SMALL,
        &memory,
    ];
    let mut child = start(&[], &arguments.concat());
    wait_for_memory(&mut child, &tier, 2);
    child.kill().unwrap();
    child.wait().unwrap();
    let (step, before) = newest_in(&tier, 2);
    assert_eq!(step % 3, 0);
    Killed { dir, step, before }
}

/// Changes a byte of the data of a part.
fn flip(part: &Path) {
    let data = fs::read_dir(part)
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let data = data
        .into_iter()
        .find(|file| file.extension().is_some_and(|end| end == "distcp"))
        .unwrap();
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(data, bytes).unwrap();
}

#[test]
fn a_killed_run_goes_on_from_memory_without_the_files_of_one_rank() {
    let killed = kill_a_run();
    for part in directories(&killed.dir.path().join("tier")) {
        if part.parent().unwrap().ends_with("rank-0") {
            fs::remove_dir_all(part).unwrap();
        }
    }
    let talk = killed.resume("2", &[]);
    killed.assert_went_on(&talk, killed.step);
}

#[test]
fn damaged_memory_is_never_used() {
    let killed = kill_a_run();
    let tier = killed.dir.path().join("tier");
    let newest = |rank: usize| -> Vec<PathBuf> {
        let end = format!("-rank-{rank}-of-2");
        let start = format!("step-{:08}-", killed.step);
        let is_it = |part: &PathBuf| {
            let name = part.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with(&start) && name.ends_with(&end)
        };
        directories(&tier).into_iter().filter(is_it).collect()
    };
    // A run that begins anew would mix its steps with these.
    let (out, text) = (killed.out(), tier.to_str().unwrap().to_owned());
    fs::rename(out.join("step-00000004"), killed.dir.path().join("away")).unwrap();
    let before = snapshot(&tier);
    let anew = fsdp(&[
        "train",
        "--steps",
        "9",
        "--out",
        out.to_str().unwrap(),
        "--memory-tier",
        &text,
    ])
    .assert();
    anew.code(i32::from(exit_codes::USAGE))
        .stderr(predicates::str::contains("already"));
    assert_eq!(
        snapshot(&tier),
        before,
        "a run that is refused changes nothing"
    );
    fs::rename(killed.dir.path().join("away"), out.join("step-00000004")).unwrap();
    // Both copies of rank 1's part: the step before it.
    assert_eq!(newest(1).len(), 2);
    newest(1).iter().for_each(|part| flip(part));
    let strict = [
        "train",
        "--resume=strict",
        "--steps",
        "1000",
        "--out",
        out.to_str().unwrap(),
        "--memory-tier",
        &text,
    ];
    let strict = fsdp(&strict).assert().code(i32::from(exit_codes::CORRUPT));
    strict.stderr(predicates::str::contains(format!("step {}", killed.step)));
    let talk = killed.resume("2", &[]);
    assert!(talk.contains("damaged"), "{talk}");
    killed.assert_went_on(&talk, killed.before);
}

/// A file lies where the tier should be.
#[test]
fn a_run_goes_on_without_a_tier_that_cannot_be_used() {
    let dir = TempDir::new().unwrap();
    let (out, tier) = (dir.path().join("out"), dir.path().join("file"));
    fs::write(&tier, "x").unwrap();
    let tier = tier.join("tier");
    let train = |steps: &str, more: &[&str]| {
        let arguments = [
            "train",
            "--nproc",
            "2",
            "--steps",
            steps,
            "--out",
            out.to_str().unwrap(),
        ];
        fsdp(&arguments)
            .args([
                "--memory-tier",
                tier.to_str().unwrap(),
                "--memory-every",
                "1",
            ])
            .args(SMALL)
            .args(more)
            .assert()
    };
    let warns = || predicates::str::contains("memory tier");
    train("3", &[]).success().stderr(warns());
    train("5", &["--resume=strict"]).failure().stderr(warns());
    train("5", &["--resume"]).success().stderr(warns());
    assert_eq!(losses(&out).len(), 5);
}

#[test]
fn a_step_in_memory_before_a_damaged_checkpoint_is_found() {
    let killed = kill_a_run();
    let (out, newest) = (killed.out(), killed.out().join("step-00900000"));
    fs::create_dir(&newest).unwrap();
    for entry in fs::read_dir(out.join("step-00000004")).unwrap().flatten() {
        fs::copy(entry.path(), newest.join(entry.file_name())).unwrap();
    }
    flip(&newest);
    let talk = killed.resume("2", &[]);
    assert!(talk.contains("damaged"), "{talk}");
    killed.assert_went_on(&talk, killed.step);
}

#[test]
fn a_step_in_memory_before_a_checkpoint_that_has_lost_its_metadata_is_found() {
    let killed = kill_a_run();
    fs::create_dir(killed.out().join("step-00900000")).unwrap();
    let talk = killed.resume("2", &[]);
    assert!(talk.contains("step-00900000` is damaged"), "{talk}");
    killed.assert_went_on(&talk, killed.step);
}

#[test]
fn the_step_in_memory_of_a_checkpoint_that_has_lost_its_metadata_is_used() {
    let killed = kill_a_run();
    fs::create_dir(killed.out().join(format!("step-{:08}", killed.step))).unwrap();
    let talk = killed.resume("2", &[]);
    killed.assert_went_on(&talk, killed.step);
}

/// Kills a job of four processes on two hosts, and replaces the second one by one that has nothing.
#[test]
fn a_job_goes_on_when_a_host_is_replaced_also_at_another_number_of_ranks() {
    for ranks in ["4", "3"] {
        let dir = TempDir::new().unwrap();
        let (out, tier) = (dir.path().join("out"), dir.path().join("tier"));
        let train = |out: &Path, more: &str| {
            // Each rank writes its process id first.
            let dir = dir.path().display();
            let train = format!(
                "echo $$ > {dir}/pid-$RANK.new; mv {dir}/pid-$RANK.new {dir}/pid-$RANK; exec {FSDP} train --backend tcp \
                 --timeout 20 --out {} {more} {}",
                out.display(),
                SMALL.join(" ")
            );
            train.replace("HOST", &format!("{}/host$((RANK / 2))", tier.display()))
        };
        let script = train(&out, "--steps 1000000 --memory-tier HOST --memory-every 3");
        let mut child = start(&["launch", "--nproc", "4", "--", "sh", "-c", &script], &[]);
        wait_for_memory(&mut child, &tier, 4);
        let pids: Vec<i32> = (0..4)
            .map(|rank| {
                fs::read_to_string(dir.path().join(format!("pid-{rank}")))
                    .unwrap()
                    .trim()
                    .parse()
                    .unwrap()
            })
            .collect();
        for pid in &pids {
            // The launcher may have ended the others already.
            let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
        }
        child.wait().unwrap();
        pids.into_iter().for_each(assert_ended);
        let (step, _) = newest_in(&tier, 4);
        fs::remove_dir_all(tier.join("host1")).unwrap();

        let launch = |script: &str| {
            let output = fsdp(&["launch", "--nproc", ranks, "--", "sh", "-c", script])
                .assert()
                .success();
            String::from_utf8(output.get_output().stderr.clone()).unwrap()
        };
        let steps = step + 2;
        let talk = launch(&train(
            &out,
            &format!("--resume --steps {steps} --memory-tier HOST"),
        ));
        assert!(
            talk.contains("host0") && talk.contains(&format!("step-{step:08}`")),
            "{talk}"
        );
        // The same from a checkpoint of that step.
        let straight = dir.path().join("straight");
        fsdp(&[
            "launch",
            "--nproc",
            "4",
            "--",
            "sh",
            "-c",
            &train(&straight, &format!("--steps {step}")),
        ])
        .assert()
        .success();
        launch(&train(&straight, &format!("--resume --steps {steps}")));
        assert_eq!(losses(&out), losses(&straight), "{ranks} ranks");
    }
}

/// Its process is gone, or will be once its parent has waited for it.
fn assert_ended(pid: i32) {
    let limit = Instant::now() + HANG;
    let is_zombie =
        || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
    while test_kill_process(Pid::from_raw(pid).unwrap()).is_ok() && !is_zombie() {
        assert!(Instant::now() < limit, "process {pid} still runs");
        thread::sleep(Duration::from_millis(10));
    }
}
