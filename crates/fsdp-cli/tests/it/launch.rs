//! `fsdp launch`, and `fsdp train` with ranks that are processes.

#![cfg(unix)]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use fsdp_cli::exit_codes;
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::{Pid, Signal, getpgid, kill_process, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{FSDP, fsdp};
use crate::metrics::losses;

pub(crate) const SMALL: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "12", "--sample",
    "8",
];

pub(crate) fn launch(nproc: &str, program: &[&str]) -> Command {
    let mut command = fsdp(&["launch", "--grace", "1", "--nproc", nproc, "--"]);
    command.args(program);
    command
}

fn launch_train(nproc: &str, out: &Path, arguments: &[&str]) -> Command {
    let mut command = launch(
        nproc,
        &[
            FSDP,
            "train",
            "--timeout",
            "20",
            "--out",
            out.to_str().unwrap(),
        ],
    );
    command.args(arguments);
    command
}

pub(crate) fn train(out: &Path, arguments: &[&str]) {
    fsdp(&["train", "--out", out.to_str().unwrap()])
        .args(arguments)
        .assert()
        .success();
}

#[test]
fn processes_get_the_losses_of_threads_bit_for_bit_and_checkpoints_cross() {
    let dir = TempDir::new().unwrap();
    let (threads, processes) = (dir.path().join("threads"), dir.path().join("processes"));
    train(
        &threads,
        &[&SMALL[..], &["--nproc", "3", "--steps", "6"]].concat(),
    );
    let output = launch_train("3", &processes, &SMALL)
        .args(["--steps", "6", "--backend", "tcp"])
        .assert()
        .success();
    assert_eq!(losses(&processes), losses(&threads));
    // Only rank 0 talks.
    let talk = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(
        talk.contains("[0] step 6/6") && !talk.contains("[1]") && !talk.contains("[2]"),
        "{talk}"
    );

    let ahead = dir.path().join("ahead");
    let prefetch = [
        "--backward-prefetch",
        "pre",
        "--forward-prefetch",
        "--limit-all-gathers",
        "false",
    ];
    launch_train("3", &ahead, &SMALL)
        .args(["--steps", "6"])
        .args(prefetch)
        .assert()
        .success();
    assert_eq!(
        losses(&ahead),
        losses(&threads),
        "units that are gathered ahead"
    );

    // To threads at another number of ranks, and back; a launched `train` needs no `--backend`.
    for out in [&threads, &processes] {
        train(out, &["--nproc", "2", "--steps", "9", "--resume"]);
    }
    launch_train("4", &processes, &["--steps", "12", "--resume"])
        .assert()
        .success();
    train(&threads, &["--nproc", "4", "--steps", "12", "--resume"]);
    assert_eq!(losses(&processes), losses(&threads));
    assert_eq!(losses(&processes).len(), 12);
}

#[test]
fn ranks_that_were_given_different_options_are_told_which() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let out = out.to_str().unwrap();
    for (option, difference) in [
        ("--lr 0.00$((1+RANK))", ["lr: 0.001", "lr: 0.002"]),
        ("--seed $RANK", ["seed: 0", "seed: 1"]),
        ("--sample 1$RANK", ["--sample: 10", "--sample: 11"]),
    ] {
        let small = SMALL.join(" ");
        let script = format!("exec {FSDP} train {small} --steps 2 --out {out} {option}");
        let [first, other] = difference;
        launch("2", &["sh", "-c", &script])
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains(format!(
                "rank 0 has `{first}`, and rank 1 has `{other}`"
            )));
    }
}

#[test]
fn programs_get_their_share_of_the_cores_unless_the_user_has_set_it() {
    let script = ["sh", "-c", "echo $RAYON_NUM_THREADS"];
    let cores = thread::available_parallelism().unwrap().get();
    launch("1", &script)
        .assert()
        .success()
        .stdout(format!("[0] {cores}\n"));
    let many = launch("64", &script).assert().success();
    let share = (cores / 64).max(1);
    assert!(
        String::from_utf8_lossy(&many.get_output().stdout)
            .lines()
            .all(|line| line.ends_with(&format!("] {share}")))
    );
    launch("1", &script)
        .env("RAYON_NUM_THREADS", "7")
        .assert()
        .success()
        .stdout("[0] 7\n");
}

#[test]
fn output_has_its_rank_and_variables_are_torchruns() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT \
                  $FSDP_JOB_ID; printf torn >&2";
    let several = [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "h",
        "--master-port",
        "7",
        "--job-id",
        "j",
    ];
    fsdp(&["launch", "--nproc", "2"])
        .env("FSDP_SECRET", "a secret of this test")
        .args(several)
        .args(["--", "sh", "-c", script])
        .assert()
        .success()
        .stdout(contains("[2] 2 4 0 2 1 h 7 j\n").and(contains("[3] 3 4 1 2 1 h 7 j\n")))
        .stderr(contains("[2] torn\n").and(contains("[3] torn\n")));
}

#[test]
fn ranks_that_share_gpus_see_one_each_and_more_than_fit_are_refused() {
    let launch = |nproc: &str, gpus: &str| {
        let mut command = fsdp(&["launch", "--nproc", nproc, "--ranks-per-gpu", "2", "--"]);
        command
            .args([
                "sh",
                "-c",
                "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES $NCCL_HOSTID",
            ])
            .env("CUDA_VISIBLE_DEVICES", gpus)
            .env_remove("NCCL_HOSTID")
            .env_remove("NCCL_MULTI_RANK_GPU_ENABLE");
        command
    };
    let output = launch("3", "4,6").assert().success();
    let mut lines: Vec<String> = String::from_utf8_lossy(&output.get_output().stdout)
        .lines()
        .map(str::to_owned)
        .collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "[0] 0 4 0-fsdp-node-0",
            "[1] 1 4 1-fsdp-node-0",
            "[2] 2 6 0-fsdp-node-0"
        ]
    );
    launch("1", "0")
        .env("NCCL_HOSTID", "mine")
        .assert()
        .stdout("[0] 0 0 0-mine\n");
    launch("1", "0")
        .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        .assert()
        .stdout("[0] 0 0\n");
    for (nproc, gpus) in [("5", "4,6"), ("1", "")] {
        launch(nproc, gpus)
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains("GPUs with 2 ranks on each").and(contains("CUDA_VISIBLE_DEVICES")));
    }
}

#[test]
fn each_job_has_a_secret_and_several_nodes_must_be_given_one() {
    let one_node = || {
        let output = launch("2", &["sh", "-c", "echo $FSDP_SECRET"])
            .assert()
            .success();
        let lines = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
        let secrets: Vec<String> = lines
            .lines()
            .map(|line| line.split(' ').nth(1).unwrap().to_owned())
            .collect();
        assert!(
            secrets.len() == 2 && secrets[0] == secrets[1] && secrets[0].len() >= 32,
            "{lines}"
        );
        secrets[0].clone()
    };
    assert_ne!(one_node(), one_node());

    let nodes = |options: &[&str]| {
        let mut command = fsdp(&[
            "launch",
            "--nproc",
            "1",
            "--nnodes",
            "2",
            "--master-addr",
            "node0",
        ]);
        command
            .args(options)
            .args(["--", "sh", "-c", "echo ${FSDP_SECRET:-none} $FSDP_INSECURE"]);
        command
    };
    nodes(&[])
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("FSDP_SECRET"));
    // The name that is made of address, port and sizes is that of other jobs too.
    nodes(&["--insecure"])
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("--job-id"));
    nodes(&["--insecure", "--job-id", "j"])
        .assert()
        .success()
        .stdout("[0] none true\n");
    let secret = "a secret of this test";
    nodes(&[])
        .env("FSDP_SECRET", secret)
        .assert()
        .success()
        .stdout(format!("[0] {secret} false\n"));
    // Nobody else reaches a loopback address.
    for loopback in ["127.0.0.1", "[::1]", "::1"] {
        fsdp(&[
            "launch",
            "--nproc",
            "1",
            "--nnodes",
            "2",
            "--master-addr",
            loopback,
            "--",
            "true",
        ])
        .assert()
        .success();
    }
}

#[test]
fn the_first_failure_ends_all_and_its_exit_code_is_returned() {
    let dir = TempDir::new().unwrap();
    let pids = dir.path().join("pids");
    // Rank 0 does not hear TERM, and has a child of its own; rank 1 fails once they are there.
    let script = format!(
        "if [ $RANK = 0 ]; then trap '' TERM; sleep 600 & echo $$ $! > {0}.new; mv {0}.new {0}; wait; sleep 600; \
         else while ! [ -e {0} ]; do sleep 0.05; done; exit 7; fi",
        pids.display()
    );
    launch("2", &["sh", "-c", &script])
        .assert()
        .code(7)
        .stderr(contains("rank 1 failed with exit code 7"));
    for pid in fs::read_to_string(&pids).unwrap().split_whitespace() {
        assert_ended(pid.parse().unwrap());
    }
    launch("2", &["sh", "-c", "kill -9 $$"])
        .assert()
        .code(137)
        .stderr(contains("died of signal 9"));
    launch("2", &["./no-such-program"])
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("no-such-program"));
}

#[test]
fn the_rank_that_failed_first_is_blamed_although_others_end_before_it() {
    // Ranks 0 and 2 fail because of rank 1, which takes longer to say why it failed.
    let script = "if [ $RANK = 1 ]; then sleep 0.5; echo the reason >&2; exit 7; fi; \
                  printf 1 > $FSDP_BLAME_DIR/$RANK; echo lost rank 1 >&2; exit 16";
    let blamed = contains("error: rank 1 failed with exit code 7")
        .and(contains("the last lines of rank 1:\n  the reason\n"));
    let listed =
        contains("all exits: ranks 0, 2 failed with exit code 16; rank 1 failed with exit code 7");
    launch("3", &["sh", "-c", script])
        .assert()
        .code(7)
        .stderr(blamed.and(listed));
    // A rank that does not end by itself is not the one that is reported, but it is named.
    let script =
        "if [ $RANK = 1 ]; then exec sleep 600; fi; printf 1 > $FSDP_BLAME_DIR/$RANK; exit 16";
    let listed = contains("rank 1 died of signal 15 after being asked to end");
    let blamed = contains("error: rank 0 failed with exit code 16 because of rank 1");
    launch("2", &["sh", "-c", script])
        .assert()
        .code(16)
        .stderr(blamed.and(listed));
}

#[test]
fn the_longest_times_are_times() {
    let longest = u64::MAX.to_string();
    let script = "if [ $RANK = 1 ]; then exit 3; fi; sleep 1";
    fsdp(&[
        "launch", "--nproc", "2", "--grace", &longest, "--", "sh", "-c", script,
    ])
    .assert()
    .code(3);
    let elastic = [
        "launch",
        "--nproc",
        "1:2",
        "--max-restarts",
        "1",
        "--grace",
        "1",
        "--regrow-after",
        &longest,
    ];
    fsdp(&[&elastic[..], &["--", "sh", "-c", "exit 3"]].concat())
        .assert()
        .code(3);
}

/// Its process is gone, or will be once its new parent has waited for it.
pub(crate) fn assert_ended(pid: i32) {
    let limit = Instant::now() + Duration::from_secs(20);
    let is_zombie =
        || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
    while test_kill_process(Pid::from_raw(pid).unwrap()).is_ok() && !is_zombie() {
        assert!(Instant::now() < limit, "process {pid} still runs");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A launch that is running: each rank writes its process id to a file `R` of the directory first.
pub(crate) fn start(dir: &Path, nproc: usize, then: &str) -> (std::process::Child, Vec<i32>) {
    let script = format!(
        "echo $$ > {0}/$RANK.new; mv {0}/$RANK.new {0}/$RANK; {then}",
        dir.display()
    );
    let mut command = std::process::Command::new(FSDP);
    command.args([
        "launch",
        "--grace",
        "5",
        "--nproc",
        &nproc.to_string(),
        "--",
        "sh",
        "-c",
        &script,
    ]);
    command
        .env_remove("FSDP_BACKEND")
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    (
        child,
        (0..nproc)
            .map(|rank| wait_for_pid(&dir.join(rank.to_string())))
            .collect(),
    )
}

/// Waits until a process has written its id to this file.
fn wait_for_pid(file: &Path) -> i32 {
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        match fs::read_to_string(file) {
            Ok(pid) => return pid.trim().parse().unwrap(),
            Err(_) => assert!(Instant::now() < limit, "{} was not written", file.display()),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a program has ended, and returns its exit code.
pub(crate) fn code_of(mut launch: std::process::Child) -> Option<i32> {
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = launch.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > limit {
            launch.kill().unwrap();
            panic!("the launcher does not end");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the text of a program in a shell that tells that it is ready, and needs a while to save
/// when it is asked to end. Its pauses are short, because a signal can miss a process that has just
/// been started.
fn slow_to_save(dir: &Path) -> String {
    let dirs = dir.display();
    format!(
        "trap 'sleep 1; : > {dirs}/saved-$RANK; exit 18' TERM; : > {dirs}/ready-$RANK; while :; do sleep 0.05; done"
    )
}

#[test]
fn a_program_in_a_shell_has_its_grace_although_the_shell_dies_at_once() {
    let dir = TempDir::new().unwrap();
    // The shell has no trap.
    let program = slow_to_save(dir.path());
    let (launch, pids) = start(dir.path(), 2, &format!("sh -c \"{program}\"; exit 1"));
    for rank in 0..2 {
        wait_for(&dir.path().join(format!("ready-{rank}")));
    }
    // A scheduler signals every process, the shells included. A user signals only the launcher.
    kill_process(Pid::from_raw(pids[0]).unwrap(), Signal::TERM).unwrap();
    kill_process(Pid::from_child(&launch), Signal::TERM).unwrap();
    assert_eq!(code_of(launch), Some(i32::from(exit_codes::STOPPED)));
    assert!((0..2).all(|rank| dir.path().join(format!("saved-{rank}")).exists()));
    pids.into_iter().for_each(assert_ended);
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_rank_has_started_in_a_group_of_its_own_has_its_grace_too() {
    let dir = TempDir::new().unwrap();
    let program = slow_to_save(dir.path());
    // `timeout` makes a group of its own for itself and its program.
    let (launch, pids) = start(
        dir.path(),
        2,
        &format!("timeout 600 sh -c \"{program}\"; exit 1"),
    );
    for rank in 0..2 {
        wait_for(&dir.path().join(format!("ready-{rank}")));
    }
    kill_process(Pid::from_child(&launch), Signal::TERM).unwrap();
    assert_eq!(code_of(launch), Some(i32::from(exit_codes::STOPPED)));
    assert!((0..2).all(|rank| dir.path().join(format!("saved-{rank}")).exists()));
    pids.into_iter().for_each(assert_ended);
}

#[test]
#[cfg(target_os = "linux")]
fn an_attempt_begins_when_nothing_is_left_of_the_one_before_but_daemons() {
    let dir = TempDir::new().unwrap();
    let dirs = dir.path().display();
    // A process that has ended may wait for its parent to ask how.
    let script = format!(
        "cd {dirs}
         field() {{ cut -d ' ' -f $2 /proc/$(cat $1)/stat; }}
         runs() {{ case $(field $1 3) in Z | X | '') false ;; esac; }}
         if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
           timeout 600 sleep 600 & echo $! > job
           setsid sleep 600 & echo $! > daemon
           for name in job daemon; do
             until [ $(field $name 5) = $(cat $name) ]; do sleep 0.05; done
           done
           exit 7
         fi
         ! runs job && runs daemon"
    );
    fsdp(&["launch", "--nproc", "1", "--max-restarts", "1", "--"])
        .args(["sh", "-c", &script])
        .assert()
        .success();
    let daemon = wait_for_pid(&dir.path().join("daemon"));
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
}

/// Waits until a file is there.
fn wait_for(file: &Path) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !file.exists() {
        assert!(Instant::now() < limit, "{} was not made", file.display());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn signals_of_the_users_own_choice_are_passed_on_and_end_nothing() {
    let dir = TempDir::new().unwrap();
    let dirs = dir.path().display();
    let then = format!(
        "trap 'echo x >> {dirs}/heard-$RANK' USR1; trap 'exit 9' USR2; : > {dirs}/ready-$RANK; while :; do sleep 0.05; done"
    );
    let (launch, _) = start(dir.path(), 2, &then);
    for (file, signal) in [("ready", Signal::USR1), ("heard", Signal::USR2)] {
        (0..2).for_each(|rank| wait_for(&dir.path().join(format!("{file}-{rank}"))));
        kill_process(Pid::from_child(&launch), signal).unwrap();
    }
    assert_eq!(code_of(launch), Some(9));
    // Once each.
    for rank in 0..2 {
        let heard = fs::read_to_string(dir.path().join(format!("heard-{rank}"))).unwrap();
        assert_eq!(heard, "x\n");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_rank_leaves_behind_is_forgotten_once_it_has_ended() {
    let dir = TempDir::new().unwrap();
    let dirs = dir.path().display();
    let then = format!(
        "(sleep 0.5 & echo $! > {dirs}/orphan.new; mv {dirs}/orphan.new {dirs}/orphan); exec sleep 600"
    );
    let (launch, pids) = start(dir.path(), 1, &then);
    let orphan = wait_for_pid(&dir.path().join("orphan"));
    let limit = Instant::now() + Duration::from_secs(20);
    while Path::new("/proc").join(orphan.to_string()).exists() {
        assert!(Instant::now() < limit, "process {orphan} is still there");
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&launch), Signal::TERM).unwrap();
    assert_eq!(code_of(launch), Some(143));
    pids.into_iter().for_each(assert_ended);
}

#[test]
fn a_launcher_ends_although_nobody_reads_its_output() {
    let dir = TempDir::new().unwrap();
    let pid = dir.path().join("pid");
    // More than the pipe to this test holds, but less than that and the pipe to the launcher.
    let script = format!(
        "echo $$ > {0}.new; mv {0}.new {0}; head -c 100000 /dev/zero | tr '\\0' x; exit 0",
        pid.display()
    );
    let mut command = std::process::Command::new(FSDP);
    command.args(["launch", "--nproc", "1", "--", "sh", "-c", &script]);
    let mut launch = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let unread = launch.stdout.take();
    assert_ended(wait_for_pid(&pid));
    assert!(
        launch.try_wait().unwrap().is_none(),
        "all output was written"
    );
    kill_process(Pid::from_child(&launch), Signal::TERM).unwrap();
    assert_eq!(code_of(launch), Some(0));
    drop(unread);
}

#[test]
fn a_launcher_needs_no_directory_for_temporary_files_and_leaves_none() {
    launch("2", &["true"])
        .env("TMPDIR", "/no/such/directory")
        .assert()
        .success();
    let dir = TempDir::new().unwrap();
    let place = dir.path().join("place");
    let then = format!(
        "echo $FSDP_BLAME_DIR > {0}.new; mv {0}.new {0}; exec sleep 600",
        place.display()
    );
    let (mut launch, _) = start(dir.path(), 1, &then);
    wait_for(&place);
    let notes = fs::read_to_string(&place).unwrap();
    let notes = Path::new(notes.trim());
    assert!(notes.is_dir());
    launch.kill().unwrap();
    launch.wait().unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    while notes.exists() {
        assert!(Instant::now() < limit, "{} is still there", notes.display());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn signals_are_passed_on() {
    let dir = TempDir::new().unwrap();
    let (mut launch, pids) = start(dir.path(), 2, "exec sleep 600");
    kill_process(Pid::from_child(&launch), Signal::TERM).unwrap();
    assert_eq!(launch.wait().unwrap().code(), Some(143));
    pids.into_iter().for_each(assert_ended);
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_launch_leaves_no_process() {
    let dir = TempDir::new().unwrap();
    let (mut launch, pids) = start(dir.path(), 2, "exec sleep 600");
    launch.kill().unwrap();
    launch.wait().unwrap();
    pids.into_iter().for_each(assert_ended);
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_launch_leaves_nothing_that_its_processes_started() {
    let dir = TempDir::new().unwrap();
    let then = format!(
        "sleep 600 & echo $! > {0}/child-$RANK.new; mv {0}/child-$RANK.new {0}/child-$RANK; wait",
        dir.path().display()
    );
    let (mut launch, pids) = start(dir.path(), 2, &then);
    let children: Vec<i32> = (0..2)
        .map(|rank| wait_for_pid(&dir.path().join(format!("child-{rank}"))))
        .collect();
    launch.kill().unwrap();
    launch.wait().unwrap();
    pids.into_iter().chain(children).for_each(assert_ended);
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_launch_leaves_nothing_that_is_in_a_group_of_its_own() {
    let dir = TempDir::new().unwrap();
    let then = format!(
        "timeout 600 sleep 600 & echo $! > {0}/child.new; mv {0}/child.new {0}/child; wait",
        dir.path().display()
    );
    let (mut launch, pids) = start(dir.path(), 1, &then);
    let child = wait_for_pid(&dir.path().join("child"));
    // It makes its group at once, but after it has told its number.
    let limit = Instant::now() + Duration::from_secs(20);
    while getpgid(Pid::from_raw(child)).unwrap() != Pid::from_raw(child).unwrap() {
        assert!(Instant::now() < limit, "it makes no group");
        thread::sleep(Duration::from_millis(10));
    }
    launch.kill().unwrap();
    launch.wait().unwrap();
    pids.into_iter().chain([child]).for_each(assert_ended);
}

/// A session without a number is one that has been made outside of the container.
#[test]
#[cfg(target_os = "linux")]
fn a_launcher_in_a_session_without_a_number_ends_what_ranks_have_started() {
    let container = ["--user", "--map-root-user", "--pid", "--fork"];
    let tried = Command::new("unshare")
        .args(container)
        .args(["--mount-proc", "true"])
        .output();
    if !tried.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system makes no containers for tests");
        return;
    }
    let rank = "timeout 600 sleep 600 & exit 3";
    let then = "\"$@\"; code=$?; cat /proc/[0-9]*/comm; exit $code";
    // Where `/proc` is that of the system outside, its numbers are of other processes.
    for (proc, is_known) in [(&["--mount-proc"][..], true), (&[], false)] {
        let output = Command::new("unshare")
            .args(container)
            .args(proc)
            .args(["sh", "-c", then, "sh", FSDP, "launch", "--grace", "1"])
            .args(["--nproc", "1", "--", "sh", "-c", rank])
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{errors}");
        let names = String::from_utf8_lossy(&output.stdout);
        assert!(names.lines().any(|name| name == "sh"), "{names}");
        if is_known {
            assert!(!names.lines().any(|name| name == "sleep"), "{names}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_guard_outlives_a_request_to_all_processes_of_a_job() {
    let dir = TempDir::new().unwrap();
    let then = format!(
        "sleep 600 & echo $! > {0}/child-$RANK.new; mv {0}/child-$RANK.new {0}/child-$RANK; wait",
        dir.path().display()
    );
    let (mut launch, pids) = start(dir.path(), 1, &then);
    let child = wait_for_pid(&dir.path().join("child-0"));
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", launch.id())).unwrap();
    let guard = children.split_whitespace().find(|id| {
        fs::read_to_string(format!("/proc/{id}/cmdline"))
            .is_ok_and(|command| command.contains("launch-guard"))
    });
    let guard = guard.unwrap();
    // It hears the signal once it has begun to listen.
    let limit = Instant::now() + Duration::from_secs(20);
    while !catches(guard, Signal::TERM) {
        assert!(Instant::now() < limit, "the guard does not listen");
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_raw(guard.parse().unwrap()).unwrap(), Signal::TERM).unwrap();
    launch.kill().unwrap();
    launch.wait().unwrap();
    pids.into_iter().chain([child]).for_each(assert_ended);
}

/// Returns `true` if a process has a handler for a signal.
#[cfg(target_os = "linux")]
fn catches(process: &str, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigCgt:"))
        .unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

#[test]
fn a_rendezvous_that_fails_is_told_with_its_exit_code() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let alone = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = fsdp(&["train", "--timeout", "1", "--out", out.to_str().unwrap()]);
        command.envs(variables.iter().copied()).args(arguments);
        command
    };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let place = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port.as_str()),
        ("FSDP_JOB_ID", "test"),
    ];
    let lost = i32::from(exit_codes::RANK_LOST);
    let usage = i32::from(exit_codes::USAGE);
    alone(&place, &[])
        .assert()
        .code(lost)
        .stderr(contains(format!("rendezvous at `127.0.0.1:{port}` failed")));
    alone(&place, &["--nproc", "3"])
        .assert()
        .code(usage)
        .stderr(contains("the launcher has started 2 ranks"));
    drop(taken);
    alone(&place, &[])
        .assert()
        .code(lost)
        .stderr(contains("connected: rank 0; missing: rank 1"));
    alone(&[("RANK", "0"), ("WORLD_SIZE", "none")], &[])
        .assert()
        .code(usage)
        .stderr(contains("`WORLD_SIZE`"));
    alone(&[], &["--backend", "tcp"])
        .assert()
        .code(usage)
        .stderr(contains("`RANK` is not set"));
    assert!(!out.exists());
}

#[test]
fn doctor_tells_backends_and_launcher() {
    let report = |variables: &[(&str, &str)]| -> Value {
        let output = fsdp(&["doctor", "--json"])
            .envs(variables.iter().copied())
            .assert()
            .success();
        serde_json::from_slice(&output.get_output().stdout).unwrap()
    };
    let alone = report(&[]);
    assert_eq!(alone["backends"][1]["name"], "tcp");
    assert_eq!(alone["backends"][1]["compiled_in"], true);
    assert_eq!(
        (&alone["launcher"], alone["cpu_cores"].as_u64() > Some(0)),
        (&Value::Null, true)
    );
    assert!(alone["libraries"].get("libnccl.so.2").is_some());
    let launched = report(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node0")]);
    assert_eq!(launched["launcher"]["name"], "torchrun");
    assert_eq!(
        (
            &launched["launcher"]["rank"],
            &launched["variables"]["RANK"]
        ),
        (&1.into(), &"1".into())
    );
    assert!(
        launched["hints"][0]
            .as_str()
            .unwrap()
            .contains("`FSDP_JOB_ID` is not set"),
        "{launched}"
    );
    let named = report(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("FSDP_JOB_ID", "the job of this test"),
    ]);
    assert!(
        !named["hints"].to_string().contains("FSDP_JOB_ID"),
        "{named}"
    );
    let broken = report(&[("RANK", "5"), ("WORLD_SIZE", "2")]);
    assert!(
        broken["hints"][0].as_str().unwrap().contains("`RANK`"),
        "{broken}"
    );
    let half = report(&[("RANK", "0"), ("FSDP_SECRET", "a secret of this test")]);
    assert!(
        half["hints"][0].as_str().unwrap().contains("`WORLD_SIZE`"),
        "{half}"
    );
    assert!(
        half["secret"] == true
            && alone["secret"] == false
            && !half.to_string().contains("a secret of this")
    );
    fsdp(&["doctor"])
        .assert()
        .success()
        .stdout(contains("nccl: not compiled in"));
}
