//! `fsdp ls` and `fsdp prune`: the checkpoints of a run.

#![expect(
    clippy::disallowed_methods,
    reason = "a test makes a run's folder by hand"
)]

use std::fs;
use std::path::Path;

use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

use crate::common::fsdp;

/// Makes a run with checkpoints of these steps.
fn run_with(steps: &[u64]) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/fsdp2_adamw_ws2/dcp");
    for step in steps {
        let to = run.path().join(format!("step-{step}"));
        let (source, to) = (source.to_str().unwrap(), to.to_str().unwrap());
        fsdp(&["reshard", source, to, "--world-size", "2"])
            .assert()
            .success();
    }
    run
}

fn names(run: &TempDir) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(run.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn ls_lists_the_checkpoints_of_a_run_by_step() {
    let run = run_with(&[9, 10]);
    fs::create_dir(run.path().join("step-11")).unwrap();
    let path = run.path().to_str().unwrap();
    let output = fsdp(&["ls", path])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let lines: Vec<String> = String::from_utf8(output)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    assert_eq!(lines.len(), 3);
    assert!(
        lines[0].contains("step-9  dcp, ") && lines[0].ends_with(", hashes"),
        "{}",
        lines[0]
    );
    assert!(
        lines[2].contains("step-11  cannot be opened"),
        "{}",
        lines[2]
    );
    let json = fsdp(&["ls", path, "--json"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["checkpoints"][1]["step"], 10);
    assert!(json["checkpoints"][2]["error"].is_string());
    fsdp(&["inspect", path])
        .assert()
        .code(11)
        .stderr(contains("the folder of a run"));
}

#[test]
fn prune_removes_the_oldest_and_only_if_told() {
    let run = run_with(&[10, 20, 30, 40]);
    let path = run.path().to_str().unwrap();
    let prune = ["prune", path, "--keep", "1", "--keep-every", "20"];
    let listed = contains("step-10  would be removed").and(contains("step-30  would be removed"));
    fsdp(&prune)
        .assert()
        .success()
        .stdout(listed.and(contains("step-20").not()))
        .stderr(contains("--yes"));
    assert_eq!(names(&run), ["step-10", "step-20", "step-30", "step-40"]);
    fsdp(&[&prune[..], &["--yes"]].concat())
        .assert()
        .success()
        .stdout(contains("step-10  removed"));
    assert_eq!(names(&run), ["step-20", "step-40"]);
    fsdp(&["prune", path, "--keep", "0", "--yes"])
        .assert()
        .code(2);
    assert_eq!(names(&run), ["step-20", "step-40"]);
}

#[test]
fn prune_keeps_the_old_ones_if_no_newer_one_is_whole() {
    let run = run_with(&[10, 20]);
    fs::remove_file(run.path().join("step-20/__0_0.distcp")).unwrap();
    let path = run.path().to_str().unwrap();
    fsdp(&["prune", path, "--keep", "1", "--yes"])
        .assert()
        .code(2)
        .stderr(contains("whole"));
    assert_eq!(names(&run), ["step-10", "step-20"]);
}

#[test]
fn prune_leaves_what_may_not_be_a_checkpoint() {
    let run = run_with(&[10, 40]);
    fs::create_dir(run.path().join("step-5")).unwrap();
    fs::write(run.path().join("step-5/thesis.tex"), "not yours").unwrap();
    fs::write(run.path().join("step-6.ckpt"), "nor this").unwrap();
    fs::create_dir(run.path().join("step-10/plots")).unwrap();
    let path = run.path().to_str().unwrap();
    let stays = contains("step-5  stays")
        .and(contains("step-6.ckpt  stays"))
        .and(contains("`plots` is not its own"));
    fsdp(&["prune", path, "--keep", "1", "--yes"])
        .assert()
        .success()
        .stdout(stays);
    assert_eq!(names(&run), ["step-10", "step-40", "step-5", "step-6.ckpt"]);
}

#[test]
fn prune_leaves_a_checkpoint_with_a_file_of_somebody_else_in_it() {
    let run = run_with(&[10, 40]);
    fs::write(run.path().join("step-10/results.csv"), "mine").unwrap();
    let path = run.path().to_str().unwrap();
    let prune = ["prune", path, "--keep", "1", "--yes"];
    fsdp(&prune)
        .assert()
        .success()
        .stdout(contains("step-10  stays: `results.csv` is not its own"));
    assert_eq!(names(&run), ["step-10", "step-40"]);
}

#[test]
#[cfg(unix)]
fn prune_leaves_a_checkpoint_that_a_link_in_the_folder_needs() {
    let run = run_with(&[10, 20, 30]);
    // The link counts as the newest checkpoint, and is whole only as long as its target is there.
    std::os::unix::fs::symlink("step-30", run.path().join("step-40")).unwrap();
    std::os::unix::fs::symlink("step-10/__0_0.distcp", run.path().join("best")).unwrap();
    std::os::unix::fs::symlink("nowhere", run.path().join("lost")).unwrap();
    let path = run.path().to_str().unwrap();
    let stays = contains("step-30  stays: the link `step-40` leads to it")
        .and(contains("step-10  stays: the link `best` leads to it"))
        .and(contains("step-20  removed"));
    fsdp(&["prune", path, "--keep", "1", "--yes"])
        .assert()
        .success()
        .stdout(stays);
    assert_eq!(
        names(&run),
        ["best", "lost", "step-10", "step-30", "step-40"]
    );
    fsdp(&["verify", &format!("{path}/step-40")])
        .assert()
        .success();
}

#[test]
#[cfg(unix)]
fn prune_sees_links_in_the_runs_folder_when_the_checkpoints_lie_below_it() {
    let checkpoints = run_with(&[10, 20, 30, 40]);
    let run = tempfile::tempdir().unwrap();
    let outputs = run.path().join("outputs");
    fs::create_dir(&outputs).unwrap();
    fs::rename(checkpoints.path(), outputs.join("checkpoint")).unwrap();
    std::os::unix::fs::symlink("outputs/checkpoint/step-10", run.path().join("best")).unwrap();
    std::os::unix::fs::symlink("checkpoint/step-20", outputs.join("last")).unwrap();
    std::os::unix::fs::symlink("step-30", outputs.join("checkpoint/good")).unwrap();
    let path = run.path().to_str().unwrap();
    let stays = contains("step-10  stays: the link `best` leads to it")
        .and(contains(
            "step-20  stays: the link `outputs/last` leads to it",
        ))
        .and(contains(
            "step-30  stays: the link `outputs/checkpoint/good` leads to it",
        ));
    fsdp(&["prune", path, "--keep", "1", "--yes"])
        .assert()
        .success()
        .stdout(stays);
    assert!(run.path().join("best/.metadata").exists() && outputs.join("last/.metadata").exists());
}

#[test]
#[cfg(target_os = "linux")]
fn prune_leaves_a_checkpoint_with_a_name_in_it_that_is_not_utf8() {
    use std::os::unix::ffi::OsStrExt as _;

    let run = run_with(&[10, 40]);
    let results = run
        .path()
        .join("step-10")
        .join(std::ffi::OsStr::from_bytes(b"r\xe9sultats"));
    fs::create_dir(&results).unwrap();
    let path = run.path().to_str().unwrap();
    let prune = ["prune", path, "--keep", "1", "--yes"];
    fsdp(&prune).assert().success().stdout(contains(
        "step-10  stays: `r\u{fffd}sultats` is not its own",
    ));
    assert!(results.exists());
}

#[test]
fn prune_removes_what_is_left_of_a_removal_once_no_process_works_on_it() {
    let run = run_with(&[10, 20, 30]);
    let path = run.path().to_str().unwrap();
    let prune = ["prune", path, "--keep", "2"];
    // A removal was killed after it had taken the name away, and some files. Another one is in
    // progress, and so is the save of a later step.
    let hidden = |name: &str| run.path().join(name);
    let left = hidden(".step-10.tmp-0123456789abcdef");
    fs::rename(hidden("step-10"), &left).unwrap();
    fs::remove_file(left.join(".metadata")).unwrap();
    let busy = hidden(".step-5.tmp-0123456789abcdef");
    fs::create_dir(&busy).unwrap();
    fs::create_dir(hidden(".step-40.tmp-0123456789abcdef")).unwrap();
    let lock = fs::File::open(&busy).unwrap();
    lock.lock().unwrap();
    fsdp(&prune).assert().success();
    assert!(left.exists());
    fsdp(&[&prune[..], &["--yes"]].concat())
        .assert()
        .success()
        .stdout(contains(".step-10.tmp-0123456789abcdef  removed"));
    let others = [".step-40.tmp-0123456789abcdef", "step-20", "step-30"];
    assert!(!left.exists() && busy.exists());
    lock.unlock().unwrap();
    let removed = listed_names(&[&prune[..], &["--yes", "--json"]].concat(), "leftovers");
    assert_eq!(removed, [".step-5.tmp-0123456789abcdef"]);
    assert_eq!(names(&run), others);
}

#[test]
#[cfg(target_os = "linux")]
fn prune_tells_of_a_removal_that_fails_in_the_middle_and_ends_it_the_next_time() {
    let run = run_with(&[10, 20, 30]);
    let path = run.path().to_str().unwrap();
    let prune = ["prune", path, "--keep", "1", "--yes"];
    // A file on which something is mounted cannot be removed.
    let unshare = |script: &str| {
        let mut command = std::process::Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
            .arg(run.path().join("step-10/__1_0.distcp"))
            .arg(crate::common::program())
            .args(prune)
            .output()
    };
    let mount = "mount --bind \"$0\" \"$0\"";
    if !unshare(mount).is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system mounts nothing for tests");
        return;
    }
    let output = unshare(&format!("{mount} && exec \"$@\"")).unwrap();
    let listed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(14), "{output:?}");
    assert!(
        listed.contains("step-10  removed in part: ") && listed.contains("step-20  removed\n"),
        "{listed}"
    );
    assert!(!listed.contains("stays"), "{listed}");
    let left = names(&run);
    assert!(left.len() == 2 && left[0].starts_with(".step-10.tmp-") && left[1] == "step-30");
    fsdp(&prune)
        .assert()
        .success()
        .stdout(contains(format!("{}  removed", left[0])));
    assert_eq!(names(&run), ["step-30"]);
}

#[test]
fn a_folder_without_checkpoints_is_told() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().to_str().unwrap();
    for command in [
        &["ls", path][..],
        &["log", path],
        &["prune", path, "--keep", "1"],
    ] {
        fsdp(command)
            .assert()
            .success()
            .stderr(contains("no checkpoints in"));
    }
}

#[test]
fn log_lists_checkpoints_of_other_programs_by_the_steps_in_their_names() {
    let run = tempfile::tempdir().unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/fsdp2_adamw_ws2/dcp");
    for step in [9, 100, 10] {
        let to = run.path().join(format!("step-{step}"));
        fs::create_dir(&to).unwrap();
        for file in fs::read_dir(&source).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    let output = fsdp(&["log", run.path().to_str().unwrap()])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let lines: Vec<String> = String::from_utf8(output)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    let names: Vec<&str> = lines
        .iter()
        .filter_map(|line| line.strip_suffix("  no digest"))
        .collect();
    assert_eq!(names, ["step-100", "step-10", "step-9"]);
}

/// Removes the `.metadata` of a checkpoint. What is there then is no file: a directory, a link that
/// leads nowhere, or nothing.
#[cfg(unix)]
fn lose_metadata(checkpoint: &Path, in_its_place: &str) {
    let metadata = checkpoint.join(".metadata");
    fs::remove_file(&metadata).unwrap();
    match in_its_place {
        "a directory" => fs::create_dir(metadata).unwrap(),
        "a link" => std::os::unix::fs::symlink("nowhere", metadata).unwrap(),
        _ => {}
    }
}

/// Runs `fsdp log --json`, which must end with this exit code, and returns its `whole`.
fn is_chain_whole(run: &str, exit_code: i32) -> bool {
    let log = fsdp(&["log", run, "--json"]).assert().code(exit_code);
    let json: serde_json::Value = serde_json::from_slice(&log.get_output().stdout).unwrap();
    json["whole"].as_bool().unwrap()
}

#[test]
#[cfg(unix)]
fn a_checkpoint_that_has_lost_its_metadata_is_damage_to_log_and_stays() {
    for in_its_place in ["nothing", "a directory", "a link"] {
        let run = run_with(&[10, 20]);
        lose_metadata(&run.path().join("step-20"), in_its_place);
        let path = run.path().to_str().unwrap();
        assert!(!is_chain_whole(path, 11), "{in_its_place}");
        fsdp(&["log", path])
            .assert()
            .code(11)
            .stdout(contains("! cannot be opened: ").and(contains("step-10  ")))
            .stderr(contains("step-20"));
        fsdp(&["ls", path])
            .assert()
            .success()
            .stdout(contains("step-20  cannot be opened"));
        fsdp(&["prune", path, "--keep", "1", "--yes"])
            .assert()
            .code(2)
            .stderr(contains("whole"));
        assert_eq!(names(&run), ["step-10", "step-20"], "{in_its_place}");
    }
}

#[test]
fn log_takes_damaged_metadata_for_damage_and_a_save_that_was_cut_off_for_none() {
    let run = run_with(&[10, 20]);
    let path = run.path().to_str().unwrap();
    fs::create_dir(run.path().join("step-30")).unwrap();
    assert!(is_chain_whole(path, 0));
    fs::write(run.path().join("step-20/.metadata"), "damaged").unwrap();
    assert!(!is_chain_whole(path, 10));
}

#[test]
fn prune_does_not_compare_steps_with_epochs() {
    let run = run_with(&[100]);
    let epoch = run.path().join("epoch-3");
    fs::rename(run_with(&[1]).path().join("step-1"), &epoch).unwrap();
    let path = run.path().to_str().unwrap();
    let names_of_both = contains("`epoch-3`").and(contains("`step-100`"));
    fsdp(&["prune", path, "--keep", "1", "--yes"])
        .assert()
        .code(2)
        .stderr(names_of_both);
    assert_eq!(names(&run), ["epoch-3", "step-100"]);
}

#[test]
fn a_key_that_is_not_there_gets_those_most_like_it() {
    let run = run_with(&[1]);
    let path = run.path().join("step-1");
    let path = path.to_str().unwrap();
    let inspect = fsdp(&["inspect", path, "--json"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let inspect: serde_json::Value = serde_json::from_slice(&inspect).unwrap();
    let key = inspect["tensors"][0]["name"].as_str().unwrap();
    let wrong = format!("{}x", &key[..key.len() - 1]);
    fsdp(&["cat", path, &wrong])
        .assert()
        .code(17)
        .stderr(contains(format!("`{key}`")));
}

/// Runs a command on a run, and returns the names in one of the lists of its JSON.
fn listed_names(command: &[&str], list: &str) -> Vec<String> {
    let output = fsdp(command).assert().success().get_output().stdout.clone();
    let json: serde_json::Value = serde_json::from_slice(&output).unwrap();
    let mut names: Vec<String> = json[list]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| {
            let name = item
                .as_str()
                .unwrap_or_else(|| item["name"].as_str().unwrap());
            name.to_owned()
        })
        .collect();
    names.sort();
    names
}

/// Copies all files of a directory to a new one.
fn copy_directory(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The names that trainers give to their checkpoints.
const NAMES_OF_TRAINERS: [&str; 14] = [
    "100",
    "checkpoint-60",
    "ckpt110",
    "dcp-80",
    "default--loss=0.25-epoch=0-step=120-last",
    "ep0-ba130",
    "epoch=1-step=70",
    "epoch_0",
    "global_step40",
    "global_step_140",
    "iter_0000050",
    "save5",
    "step-20",
    "step_30",
];

#[test]
fn all_commands_on_a_run_know_the_same_checkpoints_whatever_trainer_named_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/misc_ws1/dcp");
    for below in ["", "checkpoints"] {
        let run = tempfile::tempdir().unwrap();
        let folder = run.path().join(below);
        // None of these is a checkpoint of the run.
        copy_directory(&source, &folder.join("best"));
        fs::create_dir(folder.join("plots-3")).unwrap();
        fs::write(folder.join("events.0"), "").unwrap();
        for name in NAMES_OF_TRAINERS {
            copy_directory(&source, &folder.join(name));
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink("step-20", folder.join("link-7")).unwrap();
        let path = run.path().to_str().unwrap();
        for command in ["ls", "log"] {
            let names = listed_names(&[command, path, "--json"], "checkpoints");
            assert_eq!(names, NAMES_OF_TRAINERS, "{command}, `{below}`");
        }
        let page = run.path().join("page.html");
        let page_text = page.to_str().unwrap();
        fsdp(&["report", path, "--html", page_text])
            .assert()
            .success();
        let page = fs::read_to_string(&page).unwrap();
        for name in NAMES_OF_TRAINERS {
            assert!(page.contains(&format!("<code>{name}</code>")), "{name}");
        }
        assert!(!page.contains("<code>best</code>"));
        // Their numbers count different things.
        fsdp(&["prune", path, "--keep", "1"]).assert().code(2);
    }
}

#[test]
fn prune_counts_what_ls_lists() {
    let run = tempfile::tempdir().unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/fsdp2_adamw_ws2/dcp");
    for name in ["save_1", "save_2", "save_10", "final"] {
        copy_directory(&source, &run.path().join(name));
    }
    // What is left of another one.
    fs::create_dir(run.path().join(".save_3.tmp-0123456789abcdef")).unwrap();
    let path = run.path().to_str().unwrap();
    let removed = listed_names(
        &["prune", path, "--keep", "1", "--yes", "--json"],
        "removed",
    );
    assert_eq!(removed, ["save_1", "save_2"]);
    assert_eq!(names(&run), ["final", "save_10"]);
}

#[test]
fn the_chain_of_a_trainers_run_has_its_folders() {
    let run = tempfile::tempdir().unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-tools/tests/fixtures/folders/trainer");
    for step in [100, 20] {
        copy_directory(&source, &run.path().join(format!("checkpoint-{step}")));
    }
    // A save that was cut off.
    fs::create_dir(run.path().join("checkpoint-120")).unwrap();
    let path = run.path().to_str().unwrap();
    for command in ["ls", "log"] {
        let names = listed_names(&[command, path, "--json"], "checkpoints");
        assert_eq!(
            names,
            ["checkpoint-100", "checkpoint-120", "checkpoint-20"],
            "{command}"
        );
    }
    fsdp(&["log", path])
        .assert()
        .success()
        .stdout(contains("! cannot be opened: ").and(contains("! no lineage recorded")));
    // One that is damaged is an error, after the list.
    fs::write(
        run.path().join("checkpoint-100/model.safetensors"),
        "damaged",
    )
    .unwrap();
    let whole = contains("checkpoint-20  no digest").and(contains("checkpoint-100  no digest"));
    fsdp(&["log", path]).assert().failure().stdout(whole);
}
