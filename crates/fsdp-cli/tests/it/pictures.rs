//! `fsdp map`, `fsdp diff --heatmap` and `fsdp report` on checkpoints and metrics that lie there:
//! no tensor library is needed.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests write files of their own"
)]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use fsdp_cli::exit_codes;
use predicates::str::contains;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use crate::common::fsdp;

fn fixture() -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/fsdp2_adamw_ws2/dcp");
    path.to_str().unwrap().to_owned()
}

/// The path of a new file of the test's own.
fn place(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).to_str().unwrap().to_owned()
}

/// Runs a command that must succeed, and returns what it writes to stdout.
fn stdout(arguments: &[&str]) -> String {
    let output = fsdp(arguments)
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    String::from_utf8(output).unwrap()
}

/// Writes a safetensors file with one tensor of 4 x 128 elements.
fn write_tensor(path: &Path, name: &str, change: impl Fn(usize) -> f32) {
    let values: Vec<u8> = (0..512)
        .flat_map(|index| (index as f32 + change(index)).to_le_bytes())
        .collect();
    let view = TensorView::new(Dtype::F32, vec![4, 128], &values).unwrap();
    fs::write(
        path,
        safetensors::serialize([(name, view)], None::<HashMap<String, String>>).unwrap(),
    )
    .unwrap();
}

#[test]
fn a_map_shows_each_file_and_the_part_of_each_tensor_in_it() {
    let shown = stdout(&["map", &fixture(), "--include", "model.*.weight"]);
    assert!(
        shown.contains("0  __0_0.distcp") && shown.contains("1  __1_0.distcp"),
        "{shown}"
    );
    let strip = shown
        .lines()
        .find(|line| line.starts_with("model.") && line.contains("cut along dim 0"))
        .unwrap();
    let cells = strip.split_whitespace().nth(1).unwrap();
    assert_eq!(cells.chars().count(), 40, "{strip}");
    assert_eq!(cells, format!("{}{}", "0".repeat(20), "1".repeat(20)));
    // The bytes of the files are those of all tensors.
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&["map", &fixture(), "--json"])).unwrap();
    let files = json["files"].as_array().unwrap();
    let sum: u64 = files
        .iter()
        .map(|file| file["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(Some(sum), json["bytes"].as_u64());
    let inspected: serde_json::Value =
        serde_json::from_str(&stdout(&["inspect", &fixture(), "--json"])).unwrap();
    assert_eq!(json["bytes"], inspected["bytes"]);
}

#[test]
fn options_of_a_map_that_would_do_nothing_are_refused() {
    let cases: [(&[&str], &str); 4] = [
        (
            &["--include", "model.*", "--include", "zzz*"],
            "`--include zzz*` matches no key",
        ),
        (&["--json", "--limit", "1"], "cannot be used with"),
        (&["--json", "--overwrite"], "required"),
        (&["--overwrite"], "required"),
    ];
    for (options, message) in cases {
        fsdp(&["map", &fixture()])
            .args(options)
            .assert()
            .failure()
            .stderr(contains(message));
    }
}

#[test]
fn a_map_is_one_file_that_loads_nothing_and_escapes_names() {
    let directory = TempDir::new().unwrap();
    let model = directory.path().join("<b>.safetensors");
    write_tensor(&model, "<script>alert(1)</script>\u{202e}", |_| 0.0);
    let model = model.to_str().unwrap();
    for (option, name) in [("--html", "map.html"), ("--svg", "map.svg")] {
        let file = place(&directory, name);
        fsdp(&["map", model, option, &file]).assert().success();
        let text = fs::read_to_string(&file).unwrap();
        assert!(
            text.contains("&lt;script&gt;") && !text.contains("<script"),
            "{text}"
        );
        let without_namespace = text.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !without_namespace.contains("://")
                && !text.contains("src=")
                && !text.contains('\u{202e}')
        );
        assert!(text.contains("prefers-color-scheme:dark"));
        // A file that is there stays, unless it is one of these and may be replaced.
        let drawn = fs::read(&file).unwrap();
        for content in [&b"mine"[..], &fs::read(model).unwrap()] {
            fs::write(&file, content).unwrap();
            for overwrite in [&[][..], &["--overwrite"]] {
                fsdp(&[&["map", model, option, &file], overwrite].concat())
                    .assert()
                    .code(i32::from(exit_codes::USAGE))
                    .stderr(contains(if overwrite.is_empty() {
                        "exists already"
                    } else {
                        "cannot be replaced"
                    }));
            }
            assert_eq!(fs::read(&file).unwrap(), content);
        }
        for content in [&drawn[..15], b""] {
            fs::write(&file, content).unwrap();
            fsdp(&["map", model, option, &file, "--overwrite"])
                .assert()
                .success();
            assert_eq!(fs::read(&file).unwrap(), drawn);
        }
    }
}

#[test]
fn a_map_shows_no_more_than_asked_for() {
    let shown = stdout(&["map", &fixture(), "--limit", "3"]);
    assert_eq!(
        shown
            .lines()
            .filter(|line| line.contains("float32"))
            .count(),
        3,
        "{shown}"
    );
    assert!(
        shown.lines().last().unwrap().starts_with("… and "),
        "{shown}"
    );
    fsdp(&["map", &fixture(), "--include", "nothing"])
        .assert()
        .code(i32::from(exit_codes::USAGE));
}

#[test]
fn a_heat_map_shows_where_tensors_differ() {
    let directory = TempDir::new().unwrap();
    let [a, b] = ["a.safetensors", "b.safetensors"].map(|name| directory.path().join(name));
    write_tensor(&a, "w", |_| 0.0);
    // One large difference at the beginning of the second row, a small one at the end of the last.
    write_tensor(&b, "w", |index| match index {
        128 => 100.0,
        511 => 0.5,
        _ => 0.0,
    });
    let arguments = [
        "diff",
        a.to_str().unwrap(),
        b.to_str().unwrap(),
        "--heatmap",
    ];
    let output = fsdp(&arguments)
        .assert()
        .code(i32::from(exit_codes::DIFFERENCE))
        .stderr(contains("heat maps"));
    let shown = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let rows: Vec<&str> = shown.lines().skip(1).map(str::trim).collect();
    let dots = |count: usize| "·".repeat(count);
    assert_eq!(
        rows,
        [
            dots(64),
            format!("█{}", dots(63)),
            dots(64),
            format!("{}▒", dots(63))
        ],
        "{shown}"
    );
}

/// A run's directory with metrics, and events of two starts.
fn run(directory: &TempDir) -> PathBuf {
    let run = directory.path().join("run<1>");
    fs::create_dir(&run).unwrap();
    let line = |step: u64| {
        let loss = 2.0 / (step + 1) as f64;
        format!(
            "{{\"step\":{step},\"loss\":{loss},\"lr\":0.1,\"grad_norm\":null,\"tokens_per_s\":10.0,\"peak_memory_bytes\":1024}}\n"
        )
    };
    let metrics: String = (0..5000).map(line).collect();
    fs::write(run.join("metrics.jsonl"), format!("{metrics}{{\"step\":5")).unwrap();
    fs::write(
        run.join("events.jsonl"),
        "{\"event\":\"start\",\"time\":951782400,\"step\":0,\"ranks\":4,\"resumed_from\":null}\n\
         {\"event\":\"checkpoint\",\"step\":10,\"path\":\"<i>\",\"bytes\":2000000000,\"seconds\":1.0,\"stall_seconds\":0.5}\n\
         {\"event\":\"start\",\"time\":951782500,\"step\":10,\"ranks\":2,\"resumed_from\":\"step-10\"}\n\
         {\"event\":\"of a later version\"}\n{\"event\":\"end\",\"step\":20}\n",
    )
    .unwrap();
    run
}

#[test]
fn a_report_has_curves_saves_and_restarts_in_one_page() {
    let directory = TempDir::new().unwrap();
    let run = run(&directory);
    fsdp(&["report", run.to_str().unwrap()])
        .assert()
        .success()
        .stderr(contains("report.html"));
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    for wanted in [
        "<h2>Loss</h2>",
        "<polyline",
        "2000-02-29 00:00:00",
        "killed or crashed",
        "2.00",
        "&lt;i&gt;",
        "run&lt;1&gt;",
        ">5000<",
    ] {
        assert!(page.contains(wanted), "{wanted}");
    }
    // A norm that was never a number has no curve; a torn line is told.
    assert!(!page.contains("Norm of the gradients") && page.contains("1 line of the metrics"));
    assert!(!page.contains("<i>") && !page.contains("<script"));
    // 5,000 steps take no more room than 1,000 points.
    assert!(page.len() < 400_000, "{}", page.len());
    fsdp(&["report", run.to_str().unwrap()])
        .assert()
        .code(i32::from(exit_codes::USAGE));
    fsdp(&["report", run.to_str().unwrap(), "--overwrite"])
        .assert()
        .success();
}

#[test]
fn a_directory_that_is_no_run_has_no_report() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().to_str().unwrap();
    fsdp(&["report", path])
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("neither metrics nor"));
    assert!(!directory.path().join("report.html").exists());
}
