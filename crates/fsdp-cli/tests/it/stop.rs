//! SIGINT and SIGTERM: a run stops after its step and loses nothing; a conversion leaves nothing.

#![cfg(unix)]
#![expect(
    clippy::disallowed_methods,
    reason = "the tests make and damage files on purpose"
)]

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fsdp::checkpoint::latest_checkpoint;
use fsdp_cli::exit_codes;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::{FSDP, fsdp};
use crate::metrics::losses;

const SMALL: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "12", "--sample",
    "0",
];

/// Nothing takes longer than this.
const HANG: Duration = Duration::from_secs(60);

/// A model whose step takes long enough for a second signal to arrive in it.
const SLOW: [&str; 12] = [
    "--layers", "4", "--heads", "4", "--hidden", "128", "--seq", "128", "--batch", "24",
    "--sample", "0",
];

fn start(before: &[&str], out: &Path, more: &[&str]) -> Child {
    start_model(&SMALL, before, out, more)
}

fn start_model(model: &[&str], before: &[&str], out: &Path, more: &[&str]) -> Child {
    let mut command = Command::new(FSDP);
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FSDP_"))
    {
        command.env_remove(name);
    }
    command
        .args(before)
        .args([
            "train",
            "--steps",
            "1000000",
            "--out",
            out.to_str().unwrap(),
        ])
        .args(model)
        .args(more);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until some steps are done.
fn wait_for_steps(child: &mut Child, out: &Path) {
    let limit = Instant::now() + HANG;
    while !fs::read_to_string(out.join("metrics.jsonl"))
        .is_ok_and(|lines| lines.lines().count() >= 3)
    {
        assert!(
            child.try_wait().unwrap().is_none(),
            "the run ended by itself"
        );
        assert!(Instant::now() < limit, "no steps within a minute");
        thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Checks that a run which was told to stop has saved its last step, and goes on like one that was
/// never stopped.
fn assert_stopped_and_goes_on(child: Child, out: &Path, nproc: &str) {
    let output = child.wait_with_output().unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(i32::from(exit_codes::STOPPED)),
        "{talk}"
    );
    let step = latest_checkpoint(out).unwrap().unwrap().step;
    assert!(
        talk.contains(&format!("stopped by a signal after step {step}/"))
            && !talk.contains("error"),
        "{talk}"
    );
    assert_eq!(losses(out).len() as u64, step);
    let steps = (step + 2).to_string();
    let straight = out.with_file_name("straight");
    for (out, more) in [(out, &["--resume"][..]), (&straight, &[])] {
        let arguments = [
            "train",
            "--nproc",
            nproc,
            "--steps",
            &steps,
            "--out",
            out.to_str().unwrap(),
        ];
        fsdp(&arguments).args(SMALL).args(more).assert().success();
    }
    assert_eq!(losses(out), losses(&straight));
}

#[test]
fn a_run_that_is_told_to_stop_saves_its_step() {
    for (told, more) in [
        (Signal::TERM, &[][..]),
        (Signal::INT, &["--async-save", "--save-every", "1"]),
        (Signal::USR1, &[]),
    ] {
        let dir = TempDir::new().unwrap();
        let (out, trace) = (dir.path().join("out"), dir.path().join("trace.json"));
        let arguments = [
            &["--nproc", "2", "--trace", trace.to_str().unwrap()][..],
            more,
        ]
        .concat();
        let mut child = start(&[], &out, &arguments);
        wait_for_steps(&mut child, &out);
        signal(&child, told);
        assert_stopped_and_goes_on(child, &out, "2");
        // The trace is whole.
        serde_json::from_slice::<serde_json::Value>(&fs::read(trace).unwrap()).unwrap();
    }
}

#[test]
fn a_job_of_processes_that_is_told_to_stop_saves_its_step() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let mut child = start(
        &["launch", "--nproc", "2", "--", FSDP],
        &out,
        &["--timeout", "20"],
    );
    wait_for_steps(&mut child, &out);
    signal(&child, Signal::TERM);
    assert_stopped_and_goes_on(child, &out, "2");
}

#[test]
fn a_job_in_shells_that_is_told_to_stop_saves_its_step() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    // The shell has no trap: it dies of the signal while the program saves.
    let shell = [
        "launch",
        "--nproc",
        "2",
        "--",
        "sh",
        "-c",
        r#""$@"; exit $?"#,
        "sh",
        FSDP,
    ];
    let mut child = start(&shell, &out, &["--timeout", "20"]);
    wait_for_steps(&mut child, &out);
    signal(&child, Signal::TERM);
    assert_stopped_and_goes_on(child, &out, "2");
}

/// Returns `true` if a process has threads that compute for a rank: the run has begun, and builds
/// its model.
#[cfg(target_os = "linux")]
fn has_begun(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let mut names =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    names.any(|name| name.starts_with("rank-0-"))
}

#[test]
#[cfg(target_os = "linux")]
fn a_run_that_is_told_to_stop_while_it_loads_ends_without_another_save() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    // Large enough that the load takes a while.
    let large = [
        "--layers", "6", "--heads", "4", "--hidden", "256", "--seq", "16", "--batch", "1",
        "--sample", "0",
    ];
    let first = ["train", "--steps", "1", "--out", out.to_str().unwrap()];
    fsdp(&first).args(large).assert().success();
    let before = losses(&out);
    let mut child = start_model(&large, &[], &out, &["--resume"]);
    let limit = Instant::now() + HANG;
    while !has_begun(child.id()) {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < limit);
    }
    [Signal::STOP, Signal::TERM, Signal::CONT]
        .into_iter()
        .for_each(|next| signal(&child, next));
    let output = child.wait_with_output().unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(i32::from(exit_codes::STOPPED)),
        "{talk}"
    );
    assert!(talk.contains("before the first step"), "{talk}");
    assert_eq!(
        (latest_checkpoint(&out).unwrap().unwrap().step, losses(&out)),
        (1, before)
    );
}

/// Where a program may be the first process of a container for it.
#[test]
#[cfg(target_os = "linux")]
fn the_first_process_of_a_container_ends_while_it_waits_for_other_ranks() {
    let container = [
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
    ];
    let tried = Command::new("unshare").args(container).arg("true").output();
    if !tried.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system makes no containers for tests");
        return;
    }
    let dir = TempDir::new().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut command = Command::new("unshare");
    command
        .args(container)
        .args([FSDP, "train", "--timeout", "600", "--out"])
        .arg(dir.path().join("out"));
    command.envs([
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("FSDP_JOB_ID", "test"),
    ]);
    let mut outer = command
        .env("MASTER_PORT", free.to_string())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let limit = Instant::now() + HANG;
    // Once rank 0 accepts connections it waits for the other.
    while std::net::TcpStream::connect(("127.0.0.1", free)).is_err() {
        assert!(outer.try_wait().unwrap().is_none() && Instant::now() < limit);
        thread::sleep(Duration::from_millis(10));
    }
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", outer.id())).unwrap();
    let inner = children.trim().parse().unwrap();
    kill_process(Pid::from_raw(inner).unwrap(), Signal::TERM).unwrap();
    let status = loop {
        if let Some(status) = outer.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > limit {
            outer.kill().unwrap();
            panic!("it does not hear the signal");
        }
        thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(143));
}

#[test]
fn signals_that_come_together_are_one_request() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let mut child = start(&[], &out, &["--nproc", "2"]);
    wait_for_steps(&mut child, &out);
    // All are there when it goes on.
    [
        Signal::STOP,
        Signal::TERM,
        Signal::HUP,
        Signal::INT,
        Signal::CONT,
    ]
    .into_iter()
    .for_each(|next| signal(&child, next));
    assert_stopped_and_goes_on(child, &out, "2");
}

#[test]
fn a_run_that_ignores_a_terminal_that_closes_goes_on() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    // The shell starts the program with SIGHUP ignored, as `nohup` does.
    let script = r#"trap "" HUP; exec "$@""#;
    let mut command = Command::new("sh");
    command.args([
        "-c",
        script,
        "sh",
        FSDP,
        "train",
        "--steps",
        "1000000",
        "--out",
        out.to_str().unwrap(),
    ]);
    let mut child = command
        .args(SMALL)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_steps(&mut child, &out);
    let before = losses(&out).len();
    signal(&child, Signal::HUP);
    let limit = Instant::now() + HANG;
    while losses(&out).len() < before + 20 {
        assert!(child.try_wait().unwrap().is_none(), "the run ended");
        assert!(Instant::now() < limit, "the run stands still");
        thread::sleep(Duration::from_millis(5));
    }
    signal(&child, Signal::TERM);
    assert_stopped_and_goes_on(child, &out, "1");
}

#[test]
fn a_second_signal_ends_a_run_at_once() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let mut child = start_model(&SLOW, &[], &out, &[]);
    wait_for_steps(&mut child, &out);
    signal(&child, Signal::INT);
    // The time between the signals passes while the run is stopped, so the second one comes before
    // the step is done.
    thread::sleep(Duration::from_millis(100));
    signal(&child, Signal::STOP);
    thread::sleep(Duration::from_millis(1200));
    [Signal::TERM, Signal::CONT]
        .into_iter()
        .for_each(|next| signal(&child, next));
    let status = child.wait().unwrap();
    assert!(status.signal().is_some(), "{status}");
    assert!(latest_checkpoint(&out).unwrap().is_none());
}

/// Makes a safetensors file of one large tensor, which takes no space.
fn large_file(path: &Path) {
    const BYTES: u64 = 512 << 20;
    let header = format!(
        r#"{{"x":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{BYTES}]}}}}"#,
        BYTES / 4
    );
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(path, &bytes).unwrap();
    fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(bytes.len() as u64 + BYTES)
        .unwrap();
}

#[test]
fn a_conversion_or_an_array_that_is_told_to_stop_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let (source, destination) = (
        dir.path().join("source.safetensors"),
        dir.path().join("to/target"),
    );
    large_file(&source);
    // The arguments before the source, and those between it and the destination.
    for (before, between, told, code) in [
        (
            &["reshard", "--world-size", "4"][..],
            &[][..],
            Signal::TERM,
            143,
        ),
        (&["convert", "--to", "safetensors"], &[], Signal::INT, 130),
        (&["cat"], &["x", "--npy"], Signal::INT, 130),
        (&["cat"], &["x", "--npy"], Signal::TERM, 143),
    ] {
        let mut command = Command::new(FSDP);
        command
            .args(before)
            .arg(&source)
            .args(between)
            .arg(&destination)
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let limit = Instant::now() + HANG;
        let is_empty = || {
            fs::read_dir(dir.path().join("to")).is_ok_and(|mut entries| entries.next().is_none())
        };
        while !dir.path().join("to").exists() || is_empty() {
            assert!(
                child.try_wait().unwrap().is_none() && Instant::now() < limit,
                "it did not begin to write"
            );
        }
        signal(&child, told);
        let output = child.wait_with_output().unwrap();
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{talk}");
        assert!(
            talk.contains("nothing was written to")
                && talk.contains("no unfinished files are left"),
            "{talk}"
        );
        assert!(is_empty());
    }
}

#[test]
fn a_run_that_has_passed_over_a_damaged_checkpoint_saves_its_step_when_it_is_told_to_stop() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let first = [
        "train",
        "--nproc",
        "2",
        "--steps",
        "4",
        "--save-every",
        "2",
        "--out",
        out.to_str().unwrap(),
    ];
    fsdp(&first).args(SMALL).assert().success();
    // Only reading shows the damage, when the run listens for signals already.
    let file = out.join("step-00000004/__0_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let mut child = start(&[], &out, &["--nproc", "2", "--resume"]);
    let limit = Instant::now() + HANG;
    // The run begins again after step 2, and does more steps than there were before.
    while !fs::read_to_string(out.join("metrics.jsonl"))
        .is_ok_and(|lines| lines.lines().count() >= 8)
    {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < limit);
        thread::sleep(Duration::from_millis(5));
    }
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(i32::from(exit_codes::STOPPED)),
        "{} {talk}",
        output.status
    );
    assert!(talk.contains("step-00000004` is damaged"), "{talk}");
    assert!(latest_checkpoint(&out).unwrap().unwrap().step >= 8);
}
