//! `fsdp launch --restarts` and elastic jobs: what goes on after a rank has failed, and from where.

#![cfg(unix)]
#![expect(
    clippy::disallowed_methods,
    reason = "the test renames a checkpoint as a person does"
)]

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use fsdp::checkpoint::latest_checkpoint;
use fsdp_cli::exit_codes;
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::{FSDP, fsdp};
use crate::launch::{SMALL, assert_ended, code_of, launch, start, train};
use crate::metrics::losses;

#[test]
fn a_rank_killed_in_training_ends_all_and_the_newest_checkpoint_resumes() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let train_forever = format!(
        "exec {FSDP} train --backend tcp --timeout 10 --steps 1000000 --save-every 2 --out {} {}",
        out.display(),
        SMALL.join(" ")
    );
    let (launch, pids) = start(dir.path(), 3, &train_forever);
    let limit = Instant::now() + Duration::from_secs(60);
    while !out.exists() || latest_checkpoint(&out).unwrap().is_none() {
        assert!(Instant::now() < limit, "no checkpoint within a minute");
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_raw(pids[1]).unwrap(), Signal::KILL).unwrap();
    let output = launch.wait_with_output().unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(137), "{talk}");
    assert!(talk.contains("rank 1 died of signal 9"), "{talk}");
    pids.into_iter().for_each(assert_ended);
    let step = latest_checkpoint(&out).unwrap().unwrap().step;
    train(
        &out,
        &[
            "--nproc",
            "2",
            "--resume",
            "--steps",
            &(step + 1).to_string(),
        ],
    );
    assert_eq!(losses(&out).len() as u64, step + 1);
}

#[test]
fn a_restarted_job_goes_on_from_its_newest_checkpoint_as_if_nothing_had_happened() {
    let dir = TempDir::new().unwrap();
    let (out, straight, failed) = (
        dir.path().join("out"),
        dir.path().join("straight"),
        dir.path().join("failed"),
    );
    // Rank 1 is killed once, as soon as there is a checkpoint; then again before there is anything
    // to save.
    let script = format!(
        "{FSDP} train --backend tcp --timeout 20 --steps 200 --save-every 10 --out {out} {small} & train=$!\n\
         if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then\n\
         while [ $TORCHELASTIC_RESTART_COUNT = 0 ] && ! [ -e {out}/step-00000010 ]; do sleep 0.01; done\n\
         echo $TORCHELASTIC_RESTART_COUNT >> {failed}; kill -9 $train; fi\n\
         wait $train",
        out = out.display(),
        failed = failed.display(),
        small = SMALL.join(" "),
    );
    let mut command = fsdp(&[
        "launch",
        "--grace",
        "1",
        "--nproc",
        "3",
        "--max-restarts",
        "2",
        "--",
        "sh",
        "-c",
        &script,
    ]);
    let told = contains("rank 1 failed with exit code 137").and(contains("(restart 2 of 2)"));
    command.assert().success().stderr(told);
    assert_eq!(fs::read_to_string(failed).unwrap(), "0\n1\n");
    train(
        &straight,
        &[&SMALL[..], &["--nproc", "3", "--steps", "200"]].concat(),
    );
    assert_eq!(losses(&out), losses(&straight));

    // There is no restart without need: after the last one, a mistake on the command line, or a
    // signal.
    launch("1", &["false"])
        .assert()
        .code(1)
        .stderr(contains("restart").not());
    let restarting = |script: &str| {
        fsdp(&[
            "launch",
            "--nproc",
            "1",
            "--max-restarts",
            "3",
            "--",
            "sh",
            "-c",
            script,
        ])
    };
    restarting("exit 2")
        .assert()
        .code(2)
        .stderr(contains("restart").not());
    restarting("kill -TERM $PPID; sleep 600")
        .assert()
        .code(143)
        .stderr(contains("restart").not());
    restarting("exit 5")
        .assert()
        .code(5)
        .stderr(contains("(restart 3 of 3)"));
}

#[test]
fn a_launcher_that_is_told_to_end_while_a_failure_ends_its_processes_does_not_restart_them() {
    let dir = TempDir::new().unwrap();
    // Rank 1 waits until the launcher knows of rank 0's end.
    let script = format!(
        "if [ $RANK = 0 ]; then echo $$ > {pid}.new; mv {pid}.new {pid}; exit 5; fi\n\
         while ! [ -e {pid} ]; do sleep 0.01; done\n\
         while kill -0 $(cat {pid}); do sleep 0.01; done 2> /dev/null\n\
         kill -TERM $PPID; exec sleep 600",
        pid = dir.path().join("pid").display(),
    );
    let options = [
        "launch",
        "--grace",
        "1",
        "--nproc",
        "2",
        "--max-restarts",
        "3",
        "--",
        "sh",
        "-c",
        &script,
    ];
    fsdp(&options)
        .assert()
        .code(5)
        .stderr(contains("restart").not());
}

#[test]
fn an_elastic_job_goes_on_with_the_processes_that_are_left_and_takes_them_back() {
    let dir = TempDir::new().unwrap();
    let worlds = dir.path().join("worlds");
    // Rank 1 of 3 fails once. The 2 that are left work until they are told to stop; the 3 after
    // that succeed.
    let script = format!(
        "[ $RANK = 0 ] && echo $WORLD_SIZE >> {worlds}\n\
         case $TORCHELASTIC_RESTART_COUNT$RANK in 01) exit 7;; 0*) sleep 600;; esac\n\
         [ $WORLD_SIZE = 3 ] && exit 0\n\
         trap 'exit {stopped}' TERM; sleep 600 & wait",
        worlds = worlds.display(),
        stopped = exit_codes::STOPPED,
    );
    let options = [
        "launch",
        "--grace",
        "20",
        "--nproc",
        "2:3",
        "--max-restarts",
        "1",
        "--regrow-after",
        "1",
    ];
    let mut command = fsdp(&[&options[..], &["--", "sh", "-c", &script]].concat());
    let told =
        contains("starting 2 processes again").and(contains("saved; starting 3 processes again\n"));
    command.assert().success().stderr(told);
    assert_eq!(fs::read_to_string(worlds).unwrap(), "3\n2\n3\n");

    // There are never fewer than the least, and nothing changes on several nodes.
    let script = "echo $WORLD_SIZE >> $0; exit 5";
    let least = dir.path().join("least");
    let options = [
        "launch",
        "--nproc",
        "1:2",
        "--max-restarts",
        "3",
        "--",
        "sh",
        "-c",
        script,
    ];
    fsdp(&[&options[..], &[least.to_str().unwrap()]].concat())
        .assert()
        .code(5)
        .stderr(contains("(restart 3 of 3)"));
    assert!(fs::read_to_string(least).unwrap().ends_with("1\n1\n1\n"));
    let nodes = [
        "launch",
        "--nproc",
        "1:2",
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--",
        "true",
    ];
    fsdp(&nodes)
        .assert()
        .code(2)
        .stderr(contains("can change only on one node"));
    let never_started_again = ["launch", "--nproc", "1:2", "--", "true"];
    fsdp(&never_started_again)
        .assert()
        .code(2)
        .stderr(contains("`--max-restarts`"));
    let never_shrinks = [
        "launch",
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "--regrow-after",
        "60",
        "--",
        "true",
    ];
    fsdp(&never_shrinks)
        .assert()
        .code(2)
        .stderr(contains("give `--nproc` as MIN:MAX"));
    for wrong in ["0", "3:2", "1:2:3", "2:", "2000"] {
        launch(wrong, &["true"])
            .assert()
            .code(2)
            .stderr(contains("or two as MIN:MAX"));
    }
}

#[test]
fn a_job_that_regrows_loses_no_process_where_the_grace_is_too_short() {
    let dir = TempDir::new().unwrap();
    let worlds = dir.path().join("worlds");
    let script = format!(
        "[ $RANK = 0 ] && echo $WORLD_SIZE >> {worlds}\n\
         case $TORCHELASTIC_RESTART_COUNT$RANK in 01) exit 7;; 0*) exit 0;; esac\n\
         [ $WORLD_SIZE = 3 ] && exit 0\n\
         trap '' TERM; sleep 600",
        worlds = worlds.display(),
    );
    let options = [
        "launch",
        "--grace",
        "1",
        "--nproc",
        "1:3",
        "--max-restarts",
        "2",
        "--regrow-after",
        "1",
    ];
    let told = contains("choose a longer `--grace`")
        .and(contains("starting 3 processes again (restart 2 of 2)"));
    fsdp(&[&options[..], &["--", "sh", "-c", &script]].concat())
        .assert()
        .success()
        .stderr(told);
    assert_eq!(fs::read_to_string(&worlds).unwrap(), "3\n2\n3\n");
    // A program that never saves ends at last.
    let options = [
        "launch",
        "--grace",
        "1",
        "--nproc",
        "1:3",
        "--max-restarts",
        "1",
        "--regrow-after",
        "1",
    ];
    fsdp(&[&options[..], &["--", "sh", "-c", &script]].concat())
        .assert()
        .code(137);
}

#[test]
fn a_number_of_processes_that_the_program_refuses_is_not_the_last_that_is_tried() {
    let dir = TempDir::new().unwrap();
    let worlds = dir.path().join("worlds");
    // One of 4 processes fails, and the program refuses to run with 3.
    let script = format!(
        "[ $RANK = 0 ] && echo $WORLD_SIZE >> {worlds}\n\
         case $WORLD_SIZE$RANK in 41) exit 5;; 3*) exit 2;; esac",
        worlds = worlds.display(),
    );
    let launch = |nproc: &str| {
        fs::remove_file(&worlds).ok();
        fsdp(&[
            "launch",
            "--nproc",
            nproc,
            "--max-restarts",
            "1",
            "--",
            "sh",
            "-c",
            &script,
        ])
        .assert()
    };
    launch("1:4")
        .success()
        .stderr(contains("starting 2 processes again\n"));
    assert_eq!(fs::read_to_string(&worlds).unwrap(), "4\n3\n2\n");
    launch("3:4").code(2);
    assert_eq!(fs::read_to_string(&worlds).unwrap(), "4\n3\n");
}

#[test]
fn restarts_of_what_fails_at_once_are_not_used_up_at_once() {
    let mut command = std::process::Command::new(FSDP);
    command.args([
        "launch",
        "--nproc",
        "1",
        "--max-restarts",
        "100",
        "--",
        "sh",
        "-c",
        "exit 5",
    ]);
    let mut launch = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(launch.stderr.take().unwrap()));
    let mut pauses = Vec::new();
    for line in lines
        .map_while(Result::ok)
        .filter(|line| line.contains("(restart "))
    {
        pauses.push(line.split("again").nth(1).unwrap().to_owned());
        if pauses.len() == 3 {
            // Between two attempts there is no process that a signal could end.
            kill_process(Pid::from_child(&launch), Signal::TERM).unwrap();
            break;
        }
    }
    assert_eq!(
        pauses,
        [
            " (restart 1 of 100)",
            " in 1s (restart 2 of 100)",
            " in 2s (restart 3 of 100)"
        ]
    );
    assert_eq!(code_of(launch), Some(5));
}

#[test]
fn a_job_that_has_lost_a_rank_trains_on_with_the_others() {
    let dir = TempDir::new().unwrap();
    let (out, straight) = (dir.path().join("out"), dir.path().join("straight"));
    let script = format!(
        "{FSDP} train --backend tcp --timeout 20 --steps 60 --save-every 10 --out {out} {small} & train=$!\n\
         if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then\n\
         while ! [ -e {out}/step-00000010 ]; do sleep 0.01; done; kill -9 $train; fi\n\
         wait $train",
        out = out.display(),
        small = SMALL.join(" "),
    );
    // 12 rows are shared by 8 ranks at first, and by 7 then.
    let options = [
        "launch",
        "--grace",
        "1",
        "--nproc",
        "6:8",
        "--max-restarts",
        "1",
        "--",
        "sh",
        "-c",
        &script,
    ];
    fsdp(&options)
        .assert()
        .success()
        .stderr(contains("starting 7 processes again"));
    train(
        &straight,
        &[&SMALL[..], &["--nproc", "1", "--steps", "60"]].concat(),
    );
    let (losses, expected) = (losses(&out), losses(&straight));
    assert_eq!(losses.len(), expected.len());
    for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
        assert!(
            (loss - expected).abs() < 1e-3 * expected,
            "step {step}: loss {loss} is not {expected}"
        );
    }
}

/// `fsdp ls` knows it by this name too.
#[test]
fn a_checkpoint_with_another_trainers_name_is_one_that_a_resume_finds() {
    let dir = TempDir::new().unwrap();
    for name in ["step_2", "global_step2", "epoch=0-step=2"] {
        let out = dir.path().join(name);
        train(&out, &["--steps", "2"]);
        fs::rename(out.join("step-00000002"), out.join(name)).unwrap();
        fsdp(&["ls", out.to_str().unwrap()])
            .assert()
            .success()
            .stdout(contains(name));
        train(&out, &["--steps", "3", "--resume", "--keep-last", "1"]);
        assert_eq!(losses(&out).len(), 3, "{name}");
        // The run removes only checkpoints with names that it gives itself.
        assert!(out.join(name).exists() && out.join("step-00000003").exists());
    }
}
