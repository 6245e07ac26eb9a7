//! The offline commands from outside, on checkpoints that PyTorch wrote.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fsdp_cli::exit_codes;
use predicates::prelude::*;
use predicates::str::contains;
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

pub(crate) fn fixture(name: &str) -> String {
    fixtures().join(name).to_str().unwrap().to_owned()
}

pub(crate) fn json(arguments: &[&str]) -> Value {
    let output = fsdp(arguments)
        .arg("--json")
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    serde_json::from_slice(&output).unwrap()
}

/// The path of a new file or directory of the test's own.
pub(crate) fn place(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).to_str().unwrap().to_owned()
}

/// A copy that may be damaged.
pub(crate) fn copy(from: &str, to: &str) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::write(
            Path::new(to).join(entry.file_name()),
            fs::read(entry.path()).unwrap(),
        )
        .unwrap();
    }
}

pub(crate) fn flip(file: &Path, byte: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[byte] ^= 1;
    fs::write(file, bytes).unwrap();
}

/// Every fixture whose checkpoint is a DCP directory, with its truth.
fn dcp_fixtures() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(fixtures()).unwrap() {
        let directory = entry.unwrap().path();
        if directory.join("dcp/.metadata").is_file() {
            found.push((
                directory.join("dcp").to_str().unwrap().to_owned(),
                directory,
            ));
        }
    }
    assert!(found.len() >= 25);
    for variant in ["peritem", "threads2", "lowestrank", "nocollectives", "zstd"] {
        found.push((
            fixture(&format!("variants_ws2/{variant}")),
            fixtures().join("variants_ws2"),
        ));
    }
    found.push((fixture("hf_ws2/fs_safetensors"), fixtures().join("hf_ws2")));
    found
}

#[test]
fn inspect_lists_exactly_what_pytorch_saved() {
    for (checkpoint, truth) in dcp_fixtures() {
        let truth: Value =
            serde_json::from_slice(&fs::read(truth.join("truth.json")).unwrap()).unwrap();
        let (mut tensors, mut values) = (BTreeMap::new(), Vec::new());
        for (key, entry) in truth["entries"].as_object().unwrap() {
            match entry["kind"].as_str().unwrap() {
                "tensor" => drop(tensors.insert(key.as_str(), (&entry["dtype"], &entry["shape"]))),
                _ => values.push(key.as_str()),
            }
        }
        let found = json(&["inspect", &checkpoint]);
        assert_eq!(found["schema"], 1);
        assert_eq!(
            (&found["format"], &found["committed"]),
            (&"dcp".into(), &true.into()),
            "{checkpoint}"
        );
        let listed: BTreeMap<&str, (&Value, &Value)> = found["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tensor| {
                (
                    tensor["name"].as_str().unwrap(),
                    (&tensor["dtype"], &tensor["shape"]),
                )
            })
            .collect();
        assert_eq!(listed, tensors, "{checkpoint}");
        let mut listed: Vec<&str> = found["values"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value.as_str().unwrap())
            .collect();
        listed.sort_unstable();
        values.sort_unstable();
        assert_eq!(listed, values, "{checkpoint}");
    }
}

#[test]
fn inspect_knows_formats_by_their_content() {
    let directory = tempfile::tempdir().unwrap();
    let renamed = place(&directory, "no-extension");
    fs::copy(fixtures().join("misc_ws2/truth.safetensors"), &renamed).unwrap();
    for (path, format) in [
        (renamed, "safetensors"),
        (fixture("hf_ws2/hf_full_2files"), "safetensors-directory"),
        (fixture("fsdp1_orig_adamw_ws2/full.pt"), "torch"),
    ] {
        assert_eq!(json(&["inspect", &path])["format"], format, "{path}");
    }
    let path = fixture("fsdp1_orig_adamw_ws2/dcp");
    fsdp(&["inspect", &path, "--tree"])
        .assert()
        .success()
        .stdout(contains("\n  model (").and(contains("float32 [")));
    let lines = fsdp(&["inspect", &path, "--tensors"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let lines = String::from_utf8(lines).unwrap();
    assert!(lines.lines().all(|line| line.split('\t').count() == 4));
    let position = |key: &str| {
        lines
            .lines()
            .position(|line| line.starts_with(key))
            .unwrap()
    };
    assert!(position("model.blocks.0.") < position("model.blocks.1."));
}

/// Tensors that lie inside values have keys by their path besides: they are in no truth.
fn assert_same_tensors(found: &[u8], truth: &[u8], values: &[Value], what: &str) {
    let (found, truth) = (
        SafeTensors::deserialize(found).unwrap(),
        SafeTensors::deserialize(truth).unwrap(),
    );
    let inside = |key: &str| {
        values
            .iter()
            .any(|value| key.starts_with(&format!("{}.", value.as_str().unwrap())))
    };
    for key in found.names() {
        assert!(truth.tensor(key).is_ok() || inside(key), "{key} in {what}");
    }
    for (key, wanted) in truth.tensors() {
        let tensor = found.tensor(&key).unwrap();
        assert_eq!(
            (tensor.dtype(), tensor.shape()),
            (wanted.dtype(), wanted.shape()),
            "{key} in {what}"
        );
        assert!(tensor.data() == wanted.data(), "{key} in {what}");
    }
}

#[test]
fn converting_to_safetensors_gives_the_truth_bit_for_bit_and_lists_what_is_beside() {
    let directory = tempfile::tempdir().unwrap();
    for (number, (checkpoint, truth)) in dcp_fixtures().into_iter().enumerate() {
        let file = place(&directory, &format!("{number}.safetensors"));
        let values = json(&["inspect", &checkpoint])["values"]
            .as_array()
            .unwrap()
            .clone();
        let output = fsdp(&["convert", &checkpoint, &file, "--to", "safetensors"])
            .assert()
            .success();
        let talk = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        assert!(output.get_output().stdout.is_empty());
        for value in &values {
            assert!(
                talk.contains(&format!("\n  {}\n", value.as_str().unwrap())),
                "{value} of {checkpoint}: {talk}"
            );
        }
        let truth = fs::read(truth.join("truth.safetensors")).unwrap();
        assert_same_tensors(&fs::read(&file).unwrap(), &truth, &values, &checkpoint);
        // The values beside it are read again.
        assert_eq!(
            json(&["inspect", &file])["values"]
                .as_array()
                .unwrap()
                .len(),
            values.len(),
            "{checkpoint}"
        );
    }
}

#[test]
fn resharding_there_and_back_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    for (number, name) in ["fsdp1_flat_adamw_ws2", "fsdp2_bf16_adamw_ws2", "misc_ws3"]
        .into_iter()
        .enumerate()
    {
        let source = fixture(&format!("{name}/dcp"));
        let mut last = source.clone();
        for (step, ranks) in ["1", "2", "3", "5", "2"].into_iter().enumerate() {
            let next = place(&directory, &format!("{number}-{step}"));
            fsdp(&["reshard", &last, &next, "--world-size", ranks])
                .assert()
                .success();
            fsdp(&["diff", &source, &next])
                .assert()
                .success()
                .stdout("");
            fsdp(&["verify", &next])
                .assert()
                .success()
                .stdout(contains(", hashes,"));
            last = next;
        }
    }
}

#[test]
fn every_format_holds_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let source = fixture("misc_ws2/dcp");
    for (to, options) in [
        ("dcp", ["--world-size", "3"]),
        ("safetensors", ["--prefix", ""]),
        ("hf", ["--max-shard-size", "2KB"]),
    ] {
        let place = place(&directory, to);
        fsdp(&["convert", &source, &place, "--to", to])
            .args(options)
            .assert()
            .success();
        fsdp(&["diff", &source, &place])
            .assert()
            .success()
            .stdout("");
    }
    // Tensors that were inside values are not cut over the files.
    for name in ["misc_ws2", "fsdp2_adamw_ws2"] {
        let source = fixture(&format!("{name}/dcp"));
        let sharded = place(&directory, &format!("hf-sharded-{name}"));
        fsdp(&[
            "convert",
            &source,
            &sharded,
            "--to",
            "hf-sharded",
            "--world-size",
            "2",
        ])
        .assert()
        .success();
        fsdp(&["diff", &source, &sharded])
            .assert()
            .success()
            .stdout("");
    }
    let source = fixture("fsdp2_adamw_ws2/dcp");
    let file = place(&directory, "model.pt");
    fsdp(&["convert", &source, &file, "--to", "torch"])
        .assert()
        .success();
    fsdp(&["diff", &source, &file])
        .assert()
        .success()
        .stdout("");
}

#[test]
fn convert_selects_renames_and_casts() {
    let directory = tempfile::tempdir().unwrap();
    let (source, file) = (
        fixture("fsdp2_adamw_ws2/dcp"),
        place(&directory, "model.safetensors"),
    );
    let options = [
        "--to",
        "safetensors",
        "--include",
        "model.*",
        "--exclude",
        "*.bias",
        "--rename",
        "model.=",
        "--prefix",
        "gpt.",
        "--dtype",
        "bfloat16",
    ];
    let convert = [
        &["convert", source.as_str(), file.as_str()],
        options.as_slice(),
    ]
    .concat();
    let planned = json(&[convert.as_slice(), &["--dry-run"]].concat());
    assert!(!Path::new(&file).exists());
    assert!(planned["memory"].as_u64().unwrap() > 0);
    let written = json(&convert);
    assert_eq!(
        (&written["tensors"], &written["bytes"]),
        (&planned["tensors"], &planned["bytes"])
    );
    let bytes = fs::read(&file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert!(file.len() > 5);
    for (key, tensor) in file.tensors() {
        assert!(
            key.starts_with("gpt.") && !key.contains("model.") && !key.ends_with(".bias"),
            "{key}"
        );
        assert_eq!(tensor.dtype(), safetensors::Dtype::BF16);
    }
    let noted = [
        "convert",
        &source,
        &place(&directory, "noted"),
        "--to",
        "torch",
        "--exclude",
        "optmizer.*",
    ];
    fsdp(&noted)
        .assert()
        .success()
        .stderr(contains("`--exclude optmizer.*` matches no key"));
}

#[test]
fn diff_tells_what_differs_and_how_much() {
    let directory = tempfile::tempdir().unwrap();
    let (source, other) = (
        fixture("fsdp2_adamw_ws2/truth.safetensors"),
        place(&directory, "other"),
    );
    let mut bytes = fs::read(&source).unwrap();
    // The lowest bit of a float32 in the last tensor's last element.
    let at = bytes.len() - 4;
    bytes[at] ^= 1;
    fs::write(&other, bytes).unwrap();
    let found = fsdp(&["diff", &source, &other, "--json"])
        .assert()
        .code(i32::from(exit_codes::DIFFERENCE));
    let found: Value = serde_json::from_slice(&found.get_output().stdout).unwrap();
    assert_eq!(
        (&found["schema"], &found["equal"]),
        (&1.into(), &false.into())
    );
    let [difference] = found["differences"].as_array().unwrap().as_slice() else {
        panic!("{found}")
    };
    assert_eq!(
        (&difference["kind"], &difference["elements"]),
        (&"elements".into(), &1.into())
    );
    let max = difference["max_abs"].as_f64().unwrap();
    assert!(max > 0.0 && max < 1e-3, "{max}");
    fsdp(&["diff", &source, &other, "--tolerance", "0.001"])
        .assert()
        .success();
    fsdp(&["diff", &source, &other, "--tolerance", "-1"])
        .assert()
        .code(i32::from(exit_codes::USAGE));
    fsdp(&["diff", &source, &fixture("fsdp2_adamw_ws2/dcp")])
        .assert()
        .code(i32::from(exit_codes::DIFFERENCE))
        .stdout(contains("only in the second"));
}

#[test]
fn a_flipped_bit_in_a_sealed_checkpoint_is_found_where_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let sealed = place(&directory, "sealed");
    copy(&fixture("fsdp2_adamw_ws2/dcp"), &sealed);
    fsdp(&["verify", &sealed])
        .assert()
        .success()
        .stdout(contains("no hashes"));
    fsdp(&["verify", &sealed, "--seal"])
        .assert()
        .success()
        .stderr(contains("sealed"));
    let found = json(&["verify", &sealed, "--level", "deep"]);
    assert_eq!(
        (&found["ok"], &found["hashed"]),
        (&true.into(), &true.into())
    );

    for file in ["__0_0.distcp", "__1_0.distcp"] {
        let path = Path::new(&sealed).join(file);
        let length = fs::metadata(&path).unwrap().len() as usize;
        for byte in [0, length / 3, length - 1] {
            flip(&path, byte);
            // A lower level does not look, and says so, also if a variable has set it.
            let structure = fsdp(&["verify", &sealed])
                .env("FSDP_LEVEL", "structure")
                .assert()
                .success();
            structure.stdout(contains("hashes not all checked"));
            let structure = json(&["verify", &sealed, "--level", "structure"]);
            assert_eq!(
                (&structure["ok"], &structure["level"]),
                (&true.into(), &"structure".into())
            );
            let found = fsdp(&["verify", &sealed, "--json"])
                .assert()
                .code(i32::from(exit_codes::CORRUPT));
            let found: Value = serde_json::from_slice(&found.get_output().stdout).unwrap();
            let problem = found["problems"]
                .as_array()
                .unwrap()
                .iter()
                .find(|problem| problem["offset"].is_u64());
            let problem = problem.unwrap();
            assert_eq!(
                (&found["ok"], &problem["file"]),
                (&false.into(), &file.into())
            );
            assert!(problem["offset"].as_u64().unwrap() <= byte as u64);
            fsdp(&["verify", &sealed])
                .assert()
                .code(10)
                .stderr(contains(format!("`{file}` at byte")));
            // Damage is not sealed over.
            fsdp(&["verify", &sealed, "--seal"]).assert().code(10);
            fsdp(&["verify", &sealed, "--seal", "--level", "sizes"])
                .assert()
                .code(2)
                .stderr(contains("leave `--level` out"));
            flip(&path, byte);
        }
    }
    let metadata = Path::new(&sealed).join(".metadata");
    flip(&metadata, 100);
    fsdp(&["verify", &sealed])
        .assert()
        .code(10)
        .stderr(contains(".metadata"));
    flip(&metadata, 100);
    fsdp(&["verify", &sealed]).assert().success();
}

#[test]
fn what_is_missing_or_short_has_its_own_codes() {
    let directory = tempfile::tempdir().unwrap();
    let code = |code: u8| i32::from(code);
    let nothing = place(&directory, "nothing");
    for command in ["inspect", "verify"] {
        fsdp(&[command, &nothing])
            .assert()
            .code(code(exit_codes::INCOMPLETE))
            .stderr(contains("hint: "));
    }
    let damaged = place(&directory, "damaged");
    copy(&fixture("fsdp2_adamw_ws2/dcp"), &damaged);
    let file = Path::new(&damaged).join("__1_0.distcp");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    fsdp(&["verify", &damaged])
        .assert()
        .code(code(exit_codes::CORRUPT))
        .stderr(contains("__1_0.distcp"));
    let destination = place(&directory, "destination");
    fsdp(&["convert", &damaged, &destination, "--to", "hf"])
        .assert()
        .failure()
        .stderr(contains("__1_0.distcp"));
    fsdp(&["reshard", &damaged, &destination, "--world-size", "3"])
        .assert()
        .failure();
    fs::remove_file(&file).unwrap();
    for arguments in [
        &["verify", &damaged][..],
        &["convert", &damaged, &destination, "--to", "hf"],
    ] {
        fsdp(arguments)
            .assert()
            .code(code(exit_codes::INCOMPLETE))
            .stderr(contains("__1_0.distcp"));
    }
    // Failed commands leave nothing.
    let left: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["damaged"]);

    let text = place(&directory, "text");
    fs::write(&text, "this is no checkpoint, it is a text").unwrap();
    fsdp(&["inspect", &text])
        .assert()
        .code(code(exit_codes::UNSUPPORTED_VERSION))
        .stderr(contains("neither"));
}

/// A `.metadata` whose files lie elsewhere: same length, so that the pickle stays valid.
#[test]
fn paths_that_lead_out_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let hostile = place(&directory, "hostile");
    copy(&fixture("fsdp2_adamw_ws2/dcp"), &hostile);
    let metadata = Path::new(&hostile).join(".metadata");
    let mut bytes = fs::read(&metadata).unwrap();
    let (from, to) = (b"__1_0.distcp", b"../../../etc");
    let places: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|&at| bytes[at..].starts_with(from))
        .collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    fs::write(&metadata, bytes).unwrap();
    let destination = place(&directory, "destination");
    fsdp(&["convert", &hostile, &destination, "--to", "safetensors"])
        .assert()
        .code(i32::from(exit_codes::UNSAFE))
        .stderr(contains("../../../etc"));
    fsdp(&["verify", &hostile])
        .assert()
        .failure()
        .stderr(contains("../../../etc"));
    assert!(!Path::new(&destination).exists());
}

#[test]
fn usage_errors_write_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (source, taken) = (fixture("fsdp2_adamw_ws2/dcp"), place(&directory, "taken"));
    fs::write(&taken, "mine").unwrap();
    let free = place(&directory, "free");
    let inside = place(&directory, "copy/inside");
    let copied = place(&directory, "copy");
    copy(&source, &copied);
    for (arguments, message) in [
        (
            vec!["convert", &source, &taken, "--to", "hf"],
            "exists already",
        ),
        (
            vec!["reshard", &source, &taken, "--world-size", "2"],
            "exists already",
        ),
        (
            vec!["cat", &source, "model.head.weight", "--npy", &taken],
            "exists already",
        ),
        (
            vec![
                "reshard",
                &copied,
                &copied,
                "--world-size",
                "2",
                "--overwrite",
            ],
            "overlap",
        ),
        (vec!["convert", &copied, &inside, "--to", "hf"], "overlap"),
        (
            vec!["reshard", &source, &free, "--world-size", "0"],
            "--world-size",
        ),
        (
            vec![
                "convert",
                &source,
                &free,
                "--to",
                "torch",
                "--world-size",
                "2",
            ],
            "has no effect",
        ),
        (
            vec![
                "convert",
                &source,
                &free,
                "--to",
                "hf",
                "--include",
                "nothing.*",
            ],
            "select no key",
        ),
        (
            vec!["convert", &source, &free, "--to", "hf", "--include", "["],
            "not a valid glob",
        ),
        (
            vec![
                "convert",
                &source,
                &free,
                "--to",
                "hf",
                "--include",
                "model.*",
                "--include",
                "ema.*",
            ],
            "`--include ema.*`",
        ),
        (
            vec![
                "merge",
                "--from",
                &source,
                &free,
                "--to",
                "hf",
                "--include",
                "model.*",
                "--include",
                "ema.*",
            ],
            "`--include ema.*`",
        ),
        (
            vec![
                "diff",
                &source,
                &source,
                "--include",
                "model.*",
                "--include",
                "ema.*",
            ],
            "`--include ema.*`",
        ),
        (
            vec![
                "convert",
                &source,
                &free,
                "--to",
                "hf",
                "--rename",
                "nothing=x",
            ],
            "matches no key",
        ),
        (
            vec![
                "convert", &source, &free, "--to", "hf", "--rename", "nothing",
            ],
            "OLD=NEW",
        ),
        (
            vec![
                "convert", &source, &free, "--to", "hf", "--prefix", "a", "--dtype", "int8",
            ],
            "--dtype",
        ),
        (vec!["man", "nothing"], "no command"),
    ] {
        fsdp(&arguments)
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stdout("")
            .stderr(contains(message));
    }
    assert_eq!(fs::read_to_string(&taken).unwrap(), "mine");
    fsdp(&["diff", &source, &copied]).assert().success();
    assert!(!Path::new(&free).exists() && !Path::new(&inside).exists());
    // Only a checkpoint is replaced by one.
    let mine = place(&directory, "mine");
    fs::create_dir(&mine).unwrap();
    fs::write(Path::new(&mine).join("thesis.txt"), "years").unwrap();
    for path in [&taken, &mine] {
        let reshard = ["reshard", &source, path, "--world-size", "2", "--overwrite"];
        fsdp(&reshard)
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains("--overwrite"));
    }
    assert!(Path::new(&mine).join("thesis.txt").is_file());
    fsdp(&[
        "reshard",
        &source,
        &copied,
        "--world-size",
        "3",
        "--overwrite",
    ])
    .assert()
    .success();
    assert!(Path::new(&copied).join("__2_0.distcp").is_file());
    fsdp(&["diff", &source, &copied]).assert().success();
}

/// Killed at whatever moment: the destination is whole or absent, and the next command removes what
/// was left.
#[test]
fn a_killed_command_leaves_the_source_as_it_was_and_the_destination_whole_or_absent() {
    for to in ["dcp", "safetensors", "hf", "torch", "torch-checkpointing"] {
        let directory = tempfile::tempdir().unwrap();
        let (source, destination) = (
            place(&directory, "source"),
            place(&directory, "destination"),
        );
        let fixture = fixture("fsdp2_adamw_ws4/dcp");
        copy(&fixture, &source);
        fs::create_dir(directory.path().join(".destination.tmp-00000000deadbeef")).unwrap();
        let convert = match to {
            "dcp" => vec![
                "reshard",
                &source,
                &destination,
                "--overwrite",
                "--world-size",
                "7",
            ],
            to => vec!["convert", &source, &destination, "--overwrite", "--to", to],
        };
        let mut micros = 1_000;
        for round in 0..24u64 {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fsdp"));
            let mut child = command
                .args(&convert)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(std::time::Duration::from_micros(micros));
            child.kill().unwrap();
            let done = child.wait().unwrap().success();
            // Longer and longer, until it is done before; then from the start, a little shifted.
            micros = if done {
                700 + 131 * round
            } else {
                micros + micros / 3
            };
            if Path::new(&destination).exists() {
                fsdp(&["verify", &destination]).assert().success();
                fsdp(&["diff", &source, &destination]).assert().success();
            }
        }
        fsdp(&convert).assert().success();
        fsdp(&["diff", &fixture, &destination]).assert().success();
        for entry in fs::read_dir(&fixture).unwrap() {
            let name = entry.unwrap().file_name();
            let (before, after) = (
                Path::new(&fixture).join(&name),
                Path::new(&source).join(&name),
            );
            assert!(
                fs::read(before).unwrap() == fs::read(after).unwrap(),
                "{name:?}"
            );
        }
        let mut left: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.retain(|name| {
            name != "source" && name != "destination" && name != "destination.values.json"
        });
        assert!(left.is_empty(), "{to}: {left:?} are left");
    }
}

#[test]
fn a_directory_of_configuration_that_does_not_exist_is_refused_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let (destination, with) = (place(&directory, "destination"), place(&directory, "with"));
    let convert = [
        "convert",
        &fixture("fsdp2_adamw_ws2/dcp"),
        &destination,
        "--to",
        "hf",
        "--with",
        &with,
    ];
    fsdp(&convert)
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("`--with`").and(contains(&with)));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_file_that_is_named_like_a_directory_is_refused_before_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    for to in ["safetensors", "torch"] {
        let destination = format!("{}/", place(&directory, "destination"));
        let convert = [
            "convert",
            &fixture("fsdp2_adamw_ws2/dcp"),
            &destination,
            "--to",
            to,
        ];
        fsdp(&convert)
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains("writes one file"));
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// Types that neither candle nor safetensors has: every command handles them.
#[test]
fn every_dtype_goes_through_every_command() {
    let directory = tempfile::tempdir().unwrap();
    for (source, quantized) in [
        ("dtypes/every.pt", 0),
        ("dtypes/every", 0),
        ("dtypes/quantized.pt", 4),
    ] {
        let source = fixture(source);
        fsdp(&["inspect", &source]).assert().success();
        fsdp(&["verify", &source, "--level", "deep"])
            .assert()
            .success();
        for to in [
            "dcp",
            "safetensors",
            "hf",
            "hf-sharded",
            "torch",
            "torch-checkpointing",
        ] {
            let destination = place(&directory, to);
            let convert = ["convert", &source, &destination, "--to", to, "--overwrite"];
            let written = json(&convert);
            assert_eq!(
                written["quantized"].as_array().unwrap().len(),
                quantized,
                "{source} to {to}"
            );
            if quantized == 0 {
                fsdp(&["diff", &source, &destination]).assert().success();
            } else {
                fsdp(&convert)
                    .assert()
                    .success()
                    .stderr(contains("\n  m.channels\n"));
                // The keys of quantizers can be no names of items, so all of it is one.
                let item = match to {
                    "torch-checkpointing" => "model.",
                    _ => "",
                };
                fsdp(&["cat", &destination, &format!("{item}m.tensor.quantizer")])
                    .assert()
                    .success()
                    .stdout(contains("0.1"));
            }
            fsdp(&["verify", &destination, "--level", "deep"])
                .assert()
                .success();
        }
    }
    for name in [
        "complex128",
        "float8_e4m3fn",
        "bool",
        "int8",
        "empty",
        "scalar",
        "transposed",
    ] {
        fsdp(&["cat", &fixture("dtypes/every.pt"), &format!("m.{name}")])
            .assert()
            .success();
    }
}

#[test]
fn merge_renames_the_keys_of_its_sources() {
    let parent = TempDir::new().unwrap();
    let source = fixture("fsdp2_adamw_ws2/dcp");
    let merged = place(&parent, "merged.safetensors");
    let merge = [
        "merge",
        "--from",
        &source,
        "--from",
        &source,
        &merged,
        "--to",
        "safetensors",
        "--include",
        "model.*",
        "--rename",
        "model.=",
    ];
    fsdp(&merge).assert().success();
    let inspected = json(&["inspect", &merged]);
    let names: Vec<&str> = inspected["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tensor| tensor["name"].as_str().unwrap())
        .collect();
    assert!(
        names.contains(&"tok_emb.weight") && !names.iter().any(|name| name.starts_with("model.")),
        "{names:?}"
    );
    let other = place(&parent, "other.safetensors");
    let slip = [
        "merge",
        "--from",
        &source,
        &other,
        "--to",
        "safetensors",
        "--rename",
        "nothing=x",
    ];
    fsdp(&slip)
        .assert()
        .code(2)
        .stderr(contains("matches no key"));
}
