//! A rank that fails or is lost: every rank ends in time, with the exit code of what happened.

#![cfg(target_os = "linux")]
#![expect(
    clippy::disallowed_methods,
    reason = "the tests make and damage files on purpose"
)]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fsdp::checkpoint::latest_checkpoint;
use fsdp_cli::exit_codes;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

use crate::metrics::losses;

const FSDP: &str = env!("CARGO_BIN_EXE_fsdp");
const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(4);
const LATE: Duration = Duration::from_secs(2);

/// Trains up to a step, with a save every other step. `before` is what starts the command.
fn train_to(steps: &str, before: &[&str], out: &Path, more: &[&str]) -> std::process::Output {
    let mut command = Command::new(FSDP);
    command
        .args(before)
        .args([
            "train",
            "--steps",
            steps,
            "--save-every",
            "2",
            "--sample",
            "0",
            "--out",
        ])
        .arg(out);
    command
        .args([
            "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16",
        ])
        .args(more)
        .output()
        .unwrap()
}

/// Damages a file: metadata so that opening shows it, all else so that only reading shows it.
fn damage(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    if file.ends_with(".metadata") {
        bytes.truncate(middle);
    }
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over_unless_resuming_is_strict() {
    for file in [".metadata", "__0_0.distcp"] {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("out");
        assert!(train_to("8", &[], &out, &["--nproc", "2"]).status.success());
        let straight = losses(&out);
        fs::remove_dir_all(out.join("step-00000008")).unwrap();
        damage(&out.join("step-00000006").join(file));
        let strict = train_to("8", &[], &out, &["--resume=strict"]);
        assert_eq!(strict.status.code(), Some(i32::from(exit_codes::CORRUPT)));
        for (before, more) in [
            (&[][..], &["--resume", "--nproc", "2"][..]),
            (
                &["launch", "--nproc", "2", "--", FSDP],
                &["--resume", "--timeout", "20"],
            ),
        ] {
            let output = train_to("8", before, &out, more);
            let talk = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{talk}");
            assert_eq!(talk.matches("warning: ").count(), 1, "{talk}");
            assert!(
                talk.contains("step-00000006` is damaged") && talk.contains("step-00000004`\n"),
                "{talk}"
            );
            // It does not stay, so nothing is left behind.
            assert!(!talk.contains("stay until"), "{talk}");
            assert_eq!(losses(&out), straight, "{file}");
            // It was replaced by a whole one; the next round damages it again.
            fs::remove_dir_all(out.join("step-00000008")).unwrap();
            assert!(
                train_to("7", &[], &out, &["--resume=strict"])
                    .status
                    .success()
            );
            fs::remove_dir_all(out.join("step-00000007")).unwrap();
            damage(&out.join("step-00000006").join(file));
        }
    }
}

/// The ways in which [`lose_metadata`] takes the `.metadata` of a checkpoint away.
const WAYS_TO_LOSE_METADATA: [&str; 5] = [
    "the file is gone",
    "all hidden files are gone",
    "all files are gone",
    "a directory is in its place",
    "a link that leads nowhere is in its place",
];

/// Takes the `.metadata` of a checkpoint away.
fn lose_metadata(checkpoint: &Path, way: &str) {
    let metadata = checkpoint.join(".metadata");
    fs::remove_file(&metadata).unwrap();
    match way {
        "all hidden files are gone" => fs::remove_file(checkpoint.join(".integrity")).unwrap(),
        "all files are gone" => {
            fs::remove_dir_all(checkpoint).unwrap();
            fs::create_dir(checkpoint).unwrap();
        }
        "a directory is in its place" => fs::create_dir(metadata).unwrap(),
        "a link that leads nowhere is in its place" => {
            std::os::unix::fs::symlink("nowhere", metadata).unwrap();
        }
        _ => {}
    }
}

#[test]
fn a_newest_checkpoint_that_has_lost_its_metadata_is_damaged_and_is_replaced() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    assert!(train_to("8", &[], &out, &["--nproc", "2"]).status.success());
    let straight = losses(&out);
    fs::remove_dir_all(out.join("step-00000008")).unwrap();
    let launch = ["launch", "--nproc", "2", "--", FSDP];
    for (number, way) in WAYS_TO_LOSE_METADATA.into_iter().enumerate() {
        lose_metadata(&out.join("step-00000006"), way);
        let strict = train_to("8", &[], &out, &["--resume=strict"]);
        assert_eq!(
            strict.status.code(),
            Some(i32::from(exit_codes::INCOMPLETE)),
            "{way}"
        );
        // With threads and with processes.
        let output = if number % 2 == 0 {
            train_to("8", &[], &out, &["--resume", "--nproc", "2"])
        } else {
            train_to("8", &launch, &out, &["--resume=auto", "--timeout", "20"])
        };
        let talk = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{way}: {talk}");
        assert_eq!(talk.matches("warning: ").count(), 1, "{way}: {talk}");
        assert!(
            talk.contains("step-00000006` is damaged") && talk.contains("step-00000004`\n"),
            "{way}: {talk}"
        );
        assert_eq!(losses(&out), straight, "{way}");
        // It was replaced by a whole one.
        fs::remove_dir_all(out.join("step-00000008")).unwrap();
        let resumed = train_to("7", &[], &out, &["--resume=strict"]);
        let talk = String::from_utf8_lossy(&resumed.stderr);
        assert!(
            resumed.status.success() && talk.contains("step-00000006`\n"),
            "{way}: {talk}"
        );
        fs::remove_dir_all(out.join("step-00000007")).unwrap();
    }
}

#[test]
fn a_checkpoint_that_has_lost_its_metadata_is_replaced_by_a_run_that_stops_before_its_step_too() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    assert!(train_to("6", &[], &out, &[]).status.success());
    lose_metadata(&out.join("step-00000006"), "the file is gone");
    for (steps, from) in [("5", "step-00000004`\n"), ("7", "step-00000005`\n")] {
        let output = train_to(steps, &[], &out, &["--resume"]);
        let talk = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success()
                && talk.contains("step-00000006` is damaged")
                && talk.contains(from),
            "{talk}"
        );
    }
    assert!(out.join("step-00000006/.metadata").is_file());
}

#[test]
fn what_is_no_checkpoint_of_the_run_is_no_damage() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    assert!(train_to("4", &[], &out, &[]).status.success());
    let source = out.join("step-00000004/__0_0.distcp");
    // A save in progress, one of another program that has not finished, and a directory of a user.
    for (directory, file) in [
        (".step-00000006.tmp-0123456789abcdef", "__0_0.distcp"),
        ("step-6", "__0_0.distcp"),
        ("step-00000006", "thesis.tex"),
    ] {
        let directory = out.join(directory);
        fs::create_dir(&directory).unwrap();
        fs::copy(&source, directory.join(file)).unwrap();
    }
    let output = train_to("5", &[], &out, &["--resume=strict"]);
    let talk = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !talk.contains("warning: "),
        "{talk}"
    );
    assert!(out.join("step-00000006/thesis.tex").is_file());
}

#[test]
fn a_run_whose_only_checkpoint_has_lost_its_metadata_does_not_begin_anew() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    assert!(train_to("2", &[], &out, &[]).status.success());
    lose_metadata(&out.join("step-00000002"), "the file is gone");
    for (more, exit_code) in [
        (&[][..], exit_codes::USAGE),
        (&["--resume=auto"], exit_codes::INCOMPLETE),
        (&["--resume"], exit_codes::INCOMPLETE),
    ] {
        let output = train_to("4", &[], &out, more);
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(i32::from(exit_code)), "{talk}");
        assert!(talk.contains("step 2") || talk.contains("step-00000002"));
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_death() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let script = format!(
        "ulimit -f 64; exec {FSDP} train --nproc 2 --steps 1 --sample 0 --out {}",
        out.display()
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(i32::from(exit_codes::IO)),
        "{talk}"
    );
    assert!(
        talk.contains("File too large") && talk.contains(".distcp"),
        "{talk}"
    );
    // Nothing of the checkpoint is left.
    let mut left: Vec<_> = fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["events.jsonl", "metrics.jsonl"]);
}

#[test]
fn gradients_that_are_not_finite_end_the_run_or_skip_the_step_but_are_never_applied() {
    let dir = TempDir::new().unwrap();
    // The first update makes the parameters so large that the next gradients are not finite.
    let run = |out: &Path, nonfinite: &str| {
        let mut command = Command::new(FSDP);
        command.args([
            "train",
            "--nproc",
            "2",
            "--steps",
            "4",
            "--save-every",
            "1",
            "--sample",
            "0",
            "--lr",
            "1e38",
        ]);
        command
            .args(["--optimizer", "sgd", "--nonfinite", nonfinite, "--out"])
            .arg(out)
            .output()
            .unwrap()
    };
    let (ends, skips) = (dir.path().join("ends"), dir.path().join("skips"));
    let ended = run(&ends, "error");
    let talk = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(
        ended.status.code(),
        Some(i32::from(exit_codes::NOT_FINITE)),
        "{talk}"
    );
    assert!(
        talk.contains("step 2 was not done")
            && talk.contains("gradients of some rank are not finite"),
        "{talk}"
    );
    assert_eq!(latest_checkpoint(&ends).unwrap().unwrap().step, 1);
    let skipped = run(&skips, "skip");
    let talk = String::from_utf8_lossy(&skipped.stderr);
    assert!(
        skipped.status.success() && talk.contains("step 4/4: the gradients are not finite"),
        "{talk}"
    );
    let metrics = fs::read_to_string(skips.join("metrics.jsonl")).unwrap();
    let skipped: Vec<bool> = metrics
        .lines()
        .map(|line| line.contains(r#""skipped":true"#))
        .collect();
    assert_eq!(skipped, [false, true, true, true]);
}

/// Nothing else takes longer than this.
const HANG: Duration = Duration::from_secs(60);

/// `$1` is a directory for each rank's process id and exit code, `$2` what one does first, `$3` how
/// many ranks end by themselves. The launcher, which ends all ranks when one fails, learns of a
/// failure only when these have told theirs.
const RANK: &str = r#"
dir=$1; before=$2; ending=$3; shift 3
(eval "$before"; exec "$@") & echo $! > "$dir/pid-$RANK.new"; mv "$dir/pid-$RANK.new" "$dir/pid-$RANK"
wait $!; code=$?
echo $code > "$dir/code-$RANK.new"; mv "$dir/code-$RANK.new" "$dir/code-$RANK"
for rank in $(seq 0 $((ending - 1))); do
    while ! [ -e "$dir/code-$rank" ]; do sleep 0.02; done
done
exit $code
"#;

/// Ranks under way; ended on drop.
struct Job {
    launch: Child,
    dir: TempDir,
}

impl Job {
    fn start(before: &str, ending: usize, steps: &str) -> Job {
        let dir = TempDir::new().unwrap();
        let mut command = Command::new(FSDP);
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FSDP_"))
        {
            command.env_remove(name);
        }
        command.args([
            "launch",
            "--grace",
            "1",
            "--nproc",
            &RANKS.to_string(),
            "--",
            "sh",
            "-c",
            RANK,
            "rank",
        ]);
        command
            .arg(dir.path())
            .arg(before)
            .arg(ending.to_string())
            .args([FSDP, "train", "--backend", "tcp", "--out"])
            .arg(dir.path().join("out"));
        command.args([
            "--timeout",
            &DEADLINE.as_secs().to_string(),
            "--steps",
            steps,
            "--save-every",
            "1",
        ]);
        command.args([
            "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--sample", "0",
        ]);
        let said = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.path().join("said"))
            .unwrap();
        command
            .stdin(Stdio::null())
            .stdout(said.try_clone().unwrap())
            .stderr(said);
        Job {
            launch: command.spawn().unwrap(),
            dir,
        }
    }

    fn said(&self) -> String {
        fs::read_to_string(self.dir.path().join("said")).unwrap_or_default()
    }

    /// Waits for a rank's file, and returns what is in it.
    fn told(&self, what: &str, rank: usize, limit: Duration) -> i32 {
        let path = self.dir.path().join(format!("{what}-{rank}"));
        self.until(limit, &format!("the {what} of rank {rank}"), || {
            path.exists()
        });
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }

    fn until(&self, limit: Duration, what: &str, happens: impl Fn() -> bool) {
        let until = Instant::now() + limit;
        while !happens() {
            assert!(
                Instant::now() < until,
                "no {what} within {limit:?}\n{}",
                self.said()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn newest(&self) -> Option<u64> {
        let out = self.dir.path().join("out");
        if out.exists() {
            latest_checkpoint(&out).unwrap().map(|found| found.step)
        } else {
            None
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        kill_process(Pid::from_child(&self.launch), Signal::TERM).ok();
        self.launch.wait().ok();
    }
}

fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(
        Path::new("/proc")
            .join(pid.as_raw_nonzero().to_string())
            .join("stat"),
    );
    test_kill_process(pid).is_ok() && !stat.is_ok_and(|stat| stat.contains(") Z "))
}

/// The last rank is hit in the middle of training and saving.
fn lost(signal: Signal) {
    let mut job = Job::start("", RANKS - 1, "1000000");
    let pids: Vec<Pid> = (0..RANKS)
        .map(|rank| Pid::from_raw(job.told("pid", rank, HANG)).unwrap())
        .collect();
    job.until(HANG, "checkpoint", || job.newest().is_some());
    let hit = Instant::now();
    kill_process(pids[RANKS - 1], signal).unwrap();
    for rank in 0..RANKS - 1 {
        let code = job.told(
            "code",
            rank,
            (DEADLINE + LATE).saturating_sub(hit.elapsed()),
        );
        assert_eq!(
            code,
            i32::from(exit_codes::RANK_LOST),
            "rank {rank}\n{}",
            job.said()
        );
    }
    job.launch.wait().unwrap();
    job.until(LATE, "end of all processes", || {
        !pids.iter().any(|&pid| is_alive(pid))
    });
    let step = job.newest().unwrap();
    let mut resume = Command::new(FSDP);
    resume.args([
        "train",
        "--resume",
        "--nproc",
        "2",
        "--steps",
        &(step + 1).to_string(),
        "--out",
    ]);
    let output = resume.arg(job.dir.path().join("out")).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(job.newest(), Some(step + 1));
}

#[test]
fn survivors_of_a_killed_rank_end_in_time_and_the_newest_checkpoint_resumes() {
    lost(Signal::KILL);
}

#[test]
fn survivors_of_a_stopped_rank_end_in_time_and_the_newest_checkpoint_resumes() {
    lost(Signal::STOP);
}

/// The system lets one rank write no more than 4 KiB to a file, and says so instead of ending it.
#[test]
fn what_one_rank_cannot_write_is_the_exit_code_of_all() {
    for limited in 0..RANKS - 1 {
        let job = Job::start(
            &format!("if [ $RANK = {limited} ]; then trap '' XFSZ; ulimit -f 8; fi"),
            RANKS,
            "2",
        );
        for rank in 0..RANKS {
            assert_eq!(
                job.told("code", rank, HANG),
                i32::from(exit_codes::IO),
                "rank {rank}\n{}",
                job.said()
            );
        }
        assert_eq!(job.newest(), None);
    }
}

/// Where a file system of 64 KiB may be mounted for it.
#[test]
fn a_full_disk_is_the_exit_code_of_all() {
    let user = ["--user", "--map-root-user", "--mount"];
    let mount = "mount -t tmpfs -o size=64k none \"$0\"";
    let dir = TempDir::new().unwrap();
    let tried = Command::new("unshare")
        .args(user)
        .args(["sh", "-c", mount])
        .arg(dir.path())
        .output();
    if !tried.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system mounts nothing for tests");
        return;
    }
    let train = format!("{mount} && exec \"$@\"");
    for nproc in ["1", "3"] {
        let mut command = Command::new("unshare");
        command
            .args(user)
            .args(["sh", "-c", &train])
            .arg(dir.path())
            .args([FSDP, "train", "--nproc", nproc]);
        let output = command
            .args(["--steps", "1", "--sample", "0", "--out"])
            .arg(dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(i32::from(exit_codes::NO_SPACE)),
            "{nproc} ranks: {said}"
        );
    }
}
