//! The command with URLs.

use std::process::{Command, Output};

use fsdp::formats::storage::Durable;
use serde_json::Value;

use crate::conformance::LARGE;
use crate::load::load;
use crate::sample::sample;
use crate::server::{SECRET, Server};
use crate::state::save;

/// Runs `fsdp`, which lies beside the tests of the workspace.
fn run(server: &Server, arguments: &[&str]) -> Output {
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join("fsdp");
    assert!(
        program.exists(),
        "build it first: cargo build -p fsdp-cli --features object-store"
    );
    let output = Command::new(program)
        .args(arguments)
        .envs(server.environment())
        .output()
        .unwrap();
    for stream in [&output.stdout, &output.stderr] {
        assert!(!String::from_utf8_lossy(stream).contains(SECRET));
    }
    output
}

fn ok(server: &Server, arguments: &[&str]) -> String {
    let output = run(server, arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn json(server: &Server, arguments: &[&str]) -> Value {
    serde_json::from_str(&ok(server, arguments)).unwrap()
}

#[test]
fn offline_commands_take_urls() {
    let server = Server::start();
    save(&sample(LARGE), 2, server.location("run/c"), &Durable::new()).unwrap();
    let source = "s3://bucket/run/c";
    let inspected = json(&server, &["inspect", source, "--json"]);
    assert_eq!(
        (&inspected["committed"], &inspected["path"]),
        (&true.into(), &source.into())
    );
    let large = inspected["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .find(|tensor| tensor["name"] == "large")
        .unwrap();
    let ranks: Vec<_> = large["boxes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["rank"].clone())
        .collect();
    assert!(
        ranks.contains(&0.into()) && ranks.contains(&1.into()),
        "{ranks:?}"
    );
    assert_eq!(
        json(&server, &["verify", source, "--json", "--level", "deep"])["ok"],
        true
    );
    assert_eq!(ok(&server, &["cat", source, "step"]), "20\n");

    ok(
        &server,
        &[
            "reshard",
            source,
            "s3://bucket/run/three",
            "--world-size",
            "3",
        ],
    );
    load(&sample(LARGE), 2, server.location("run/three"));
    ok(&server, &["diff", source, "s3://bucket/run/three"]);
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("model.safetensors");
    for (from, to) in [
        (source, "s3://bucket/out/model.safetensors"),
        ("s3://bucket/out/model.safetensors", local.to_str().unwrap()),
    ] {
        ok(&server, &["convert", from, to, "--to", "safetensors"]);
        ok(&server, &["diff", source, to]);
    }

    let refused = run(
        &server,
        &[
            "convert",
            source,
            "s3://bucket/run/three",
            "--to",
            "dcp",
            "--overwrite",
        ],
    );
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("new prefix"),
        "{refused:?}"
    );
    for (url, code) in [
        ("s3://bucket/nowhere", 11),
        ("ftp://bucket/x", 2),
        ("s3://bucket/run/../x", 2),
    ] {
        let refused = run(&server, &["inspect", url]);
        assert_eq!(refused.status.code(), Some(code), "{refused:?}");
        assert!(
            String::from_utf8_lossy(&refused.stderr).contains(url),
            "{refused:?}"
        );
    }
}

#[test]
fn training_saves_to_and_resumes_from_a_url_at_any_number_of_ranks() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let out = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let sizes = [
        "--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "4",
        "--sample", "0",
    ];
    let train = |out: &str, more: &[&str]| {
        let arguments = [
            &[
                "train",
                "--out",
                out,
                "--checkpoint-dir",
                "s3://bucket/runs/a",
            ],
            more,
        ]
        .concat();
        ok(&server, &arguments)
    };
    train(
        &out("a"),
        &[
            &["--nproc", "2", "--steps", "4", "--save-every", "2"],
            &sizes[..],
        ]
        .concat(),
    );
    train(
        &out("a"),
        &[
            "--nproc",
            "3",
            "--batch",
            "6",
            "--steps",
            "8",
            "--save-every",
            "2",
            "--resume",
            "--keep-last",
            "2",
            "--async-save",
        ],
    );
    let steps: Vec<u64> = fsdp::checkpoint::list_checkpoints(server.location("runs/a"))
        .unwrap()
        .iter()
        .map(|checkpoint| checkpoint.step)
        .collect();
    assert_eq!(steps, [6, 8]);
    let names = std::fs::read_dir(out("a"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(
        names,
        ["events.jsonl", "metrics.jsonl"],
        "no checkpoint is in the directory"
    );
    ok(&server, &["verify", "s3://bucket/runs/a/step-00000008"]);

    let again = run(
        &server,
        &[
            "train",
            "--out",
            &out("b"),
            "--checkpoint-dir",
            "s3://bucket/runs/a",
            "--steps",
            "1",
        ],
    );
    assert_eq!(again.status.code(), Some(2), "{again:?}");
    let from = "s3://bucket/runs/a/step-00000006";
    ok(
        &server,
        &[
            "train",
            "--out",
            &out("c"),
            "--init-from",
            from,
            "--steps",
            "7",
            "--sample",
            "0",
        ],
    );
    ok(&server, &["verify", &out("c/step-00000007")]);
}

#[test]
fn a_damaged_checkpoint_at_a_url_is_replaced_when_the_run_reaches_its_step_again() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().to_str().unwrap();
    let sizes = [
        "--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "4",
        "--sample", "0",
    ];
    let train = |more: &[&str]| {
        let arguments = [
            "train",
            "--out",
            out,
            "--checkpoint-dir",
            "s3://bucket/runs/a",
            "--nproc",
            "2",
            "--save-every",
            "2",
        ];
        run(&server, &[&arguments[..], &sizes, more].concat())
    };
    assert!(train(&["--steps", "4"]).status.success());
    for more in [&["--steps", "6"][..], &["--steps", "8", "--async-save"]] {
        let newest = latest(&server);
        let place = server.location(&format!("runs/a/step-{newest:08}"));
        let data = place
            .names()
            .unwrap()
            .into_iter()
            .find(|name| name.ends_with(".distcp"))
            .unwrap();
        Durable::new()
            .replace_file(place.join(data), b"damaged")
            .unwrap();
        let output = train(&[&["--resume"], more].concat());
        let talk = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && talk.contains("is damaged"),
            "{talk}"
        );
        ok(
            &server,
            &[
                "verify",
                &format!("s3://bucket/runs/a/step-{newest:08}"),
                "--level",
                "deep",
            ],
        );
        assert_eq!(latest(&server), newest + 2);
    }
    // Objects of others stay, and the save is refused as before.
    let place = server.location("runs/a/step-00000008");
    Durable::new()
        .replace_file(place.join("notes.txt"), b"mine")
        .unwrap();
    Durable::new()
        .replace_file(place.join(".metadata"), b"damaged")
        .unwrap();
    let refused = train(&["--resume", "--steps", "8"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(place.names().unwrap().contains(&"notes.txt".to_owned()));
}

/// Returns the step of the newest checkpoint of the run `runs/a`.
fn latest(server: &Server) -> u64 {
    fsdp::checkpoint::latest_checkpoint(server.location("runs/a"))
        .unwrap()
        .unwrap()
        .step
}

#[test]
fn old_checkpoints_of_a_run_at_a_url_are_pruned() {
    let server = Server::start();
    for step in [10, 20, 30, 40] {
        save(
            &sample([4, 4]),
            2,
            server.location(&format!("run/step-{step}")),
            &Durable::new(),
        )
        .unwrap();
    }
    let steps = |server: &Server| -> Vec<i64> {
        let listed = json(server, &["ls", "s3://bucket/run", "--json"]);
        listed["checkpoints"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["step"].as_i64().unwrap())
            .collect()
    };
    // Without `--yes` nothing goes.
    let prune = [
        "prune",
        "s3://bucket/run",
        "--keep",
        "1",
        "--keep-every",
        "20",
    ];
    let listed = json(&server, &[&prune[..], &["--json"]].concat());
    assert_eq!(listed["removed"], serde_json::json!(["step-10", "step-30"]));
    assert_eq!(steps(&server), [10, 20, 30, 40]);
    ok(&server, &[&prune[..], &["--yes"]].concat());
    assert_eq!(steps(&server), [20, 40]);
    load(&sample([4, 4]), 1, server.location("run/step-20"));
    // A checkpoint with somebody else's object below it stays. In a run without a whole checkpoint
    // all of them stay.
    Durable::new()
        .replace_file(server.location("run/step-20/notes/mine.txt"), b"mine")
        .unwrap();
    let listed = json(
        &server,
        &["prune", "s3://bucket/run", "--keep", "1", "--yes", "--json"],
    );
    assert_eq!(
        (&listed["removed"], &listed["stay"][0]["name"]),
        (&serde_json::json!([]), &"step-20".into())
    );
    let names = server.location("run/step-40").names().unwrap();
    let data = names.iter().find(|name| name.ends_with(".distcp")).unwrap();
    Durable::new()
        .replace_file(server.location(&format!("run/step-40/{data}")), b"short")
        .unwrap();
    let refused = run(
        &server,
        &["prune", "s3://bucket/run", "--keep", "1", "--yes"],
    );
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(steps(&server), [20, 40]);
}
