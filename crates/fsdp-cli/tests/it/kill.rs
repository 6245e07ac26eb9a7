//! Killed in the middle of a save, a run goes on from its newest whole checkpoint; until it ends,
//! no other run does.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fsdp::checkpoint::{latest_checkpoint, list_checkpoints};
use tempfile::TempDir;

/// Large enough that a save takes a while, small enough that a step does not.
const MODEL: [&str; 12] = [
    "--layers", "2", "--heads", "2", "--hidden", "128", "--seq", "8", "--batch", "4", "--sample",
    "0",
];
const KILLS: usize = 3;
/// Some come too late: just after a commit.
const MAX_KILLS: usize = 30;

fn train(out: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fsdp"));
    command
        .args(["train", "--save-every", "1", "--out", out.to_str().unwrap()])
        .args(MODEL);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .env("FSDP_NPROC", "2");
    command
}

/// A save that is under way: its staging directory.
fn is_saving(out: &Path) -> bool {
    let Ok(list) = fs::read_dir(out) else {
        return false;
    };
    let mut names = list
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| name.starts_with(".step-") && name.contains(".tmp-"))
}

fn kill_in_a_save(mut child: Child, out: &Path) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !is_saving(out) {
        assert!(
            child.try_wait().unwrap().is_none(),
            "the run ended before it was seen to save"
        );
        assert!(Instant::now() < limit, "no save within a minute");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_run_goes_on_from_the_newest_whole_checkpoint() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    assert!(
        train(&out)
            .args(["--steps", "1"])
            .status()
            .unwrap()
            .success()
    );
    let (mut newest, mut kills_in_a_save) = (1, 0);
    for _ in 0..MAX_KILLS {
        let child = train(&out)
            .args(["--steps", "10000", "--resume"])
            .spawn()
            .unwrap();
        kill_in_a_save(child, &out);
        kills_in_a_save += usize::from(is_saving(&out));
        // Only what is whole is listed.
        let found = latest_checkpoint(&out).unwrap().unwrap().step;
        assert!(
            found >= newest,
            "the newest whole checkpoint was {newest}, now it is {found}"
        );
        // It loads, at another number of ranks, and the step whose save was killed can be saved.
        newest = found + 1;
        let output = train(&out)
            .args(["--steps", &newest.to_string(), "--resume"])
            .env("FSDP_NPROC", "1")
            .output();
        let output = output.unwrap();
        let talk = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && talk.contains(&format!("step-{found:08}")),
            "{talk}"
        );
        let steps: Vec<u64> = list_checkpoints(&out)
            .unwrap()
            .into_iter()
            .map(|found| found.step)
            .collect();
        assert_eq!(steps, (1..=newest).collect::<Vec<_>>());
        assert!(!is_saving(&out), "what the killed save left is gone");
        if kills_in_a_save == KILLS {
            return;
        }
    }
    panic!("only {kills_in_a_save} of {MAX_KILLS} kills came in the middle of a save");
}

/// Returns the exit code of a run, and what it wrote to stderr.
fn ends(command: &mut Command) -> (Option<i32>, String) {
    let output = command.stdout(Stdio::null()).output().unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn a_directory_takes_one_run_at_a_time_and_the_next_one_when_that_was_killed() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let mut first = train(&out).args(["--steps", "1000000"]).spawn().unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    while latest_checkpoint(&out)
        .ok()
        .flatten()
        .is_none_or(|latest| latest.step < 3)
    {
        assert!(
            first.try_wait().unwrap().is_none(),
            "the first run ended by itself"
        );
        assert!(Instant::now() < limit, "no steps within a minute");
    }
    let lines = || {
        fs::read_to_string(out.join("metrics.jsonl"))
            .unwrap()
            .lines()
            .count()
    };
    let before = lines();
    let refused = "another run uses";
    for mode in ["--resume", "--resume=auto"] {
        let (code, talk) = ends(train(&out).args(["--steps", "1000000", mode]));
        assert_eq!((code, talk.contains(refused)), (Some(2), true), "{talk}");
    }
    let mut beside = train(&dir.path().join("other"));
    let (code, talk) = ends(
        beside
            .args(["--steps", "1000000", "--resume", "--checkpoint-dir"])
            .arg(&out),
    );
    assert_eq!((code, talk.contains(refused)), (Some(2), true), "{talk}");
    let mut launch = Command::new(env!("CARGO_BIN_EXE_fsdp"));
    launch
        .args([
            "launch",
            "--nproc",
            "2",
            "--",
            env!("CARGO_BIN_EXE_fsdp"),
            "train",
        ])
        .args(MODEL);
    let (code, talk) = ends(
        launch
            .args(["--resume", "--steps", "1000000", "--out"])
            .arg(&out),
    );
    assert_eq!((code, talk.contains(refused)), (Some(2), true), "{talk}");
    assert!(
        lines() >= before && first.try_wait().unwrap().is_none(),
        "the first run goes on undisturbed"
    );
    first.kill().unwrap();
    first.wait().unwrap();
    let steps = (latest_checkpoint(&out).unwrap().unwrap().step + 1).to_string();
    let (code, talk) = ends(train(&out).args(["--steps", &steps, "--resume"]));
    assert_eq!(code, Some(0), "{talk}");
}
