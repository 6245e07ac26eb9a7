//! Output of the offline commands, also where nobody reads it.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::Path;
use std::process::Stdio;

use fsdp_cli::exit_codes;
use fsdp_formats::metadata::{
    Chunk, Entry, METADATA_FILE, Metadata, StorageInfo, TensorEntry, TensorProperties, encode,
};
use fsdp_layout::{DType, TensorBox};
use predicates::prelude::*;
use predicates::str::contains;
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::commands::{copy, fixture, fixtures, flip, json, place};
use crate::common::fsdp;

#[test]
fn single_files_are_sealed_beside_them() {
    let directory = tempfile::tempdir().unwrap();
    let source = fixture("fsdp2_adamw_ws2/dcp");
    for (name, to) in [("model.safetensors", "safetensors"), ("model.pt", "torch")] {
        let file = place(&directory, name);
        fsdp(&["convert", &source, &file, "--to", to])
            .assert()
            .success();
        fsdp(&["verify", &file])
            .assert()
            .success()
            .stdout(contains("no hashes"));
        fsdp(&["verify", &file, "--seal"])
            .assert()
            .success()
            .stderr(contains("sealed"));
        fsdp(&["verify", &file])
            .assert()
            .success()
            .stdout(contains(", hashes,"));
        assert_eq!(json(&["inspect", &file])["hashed"], true);
        flip(
            Path::new(&file),
            fs::metadata(&file).unwrap().len() as usize / 2,
        );
        fsdp(&["verify", &file])
            .assert()
            .code(i32::from(exit_codes::CORRUPT))
            .stderr(contains(name));
    }
}

#[test]
fn variables_that_are_empty_count_as_unset_and_wrong_ones_are_named() {
    let source = fixture("fsdp2_adamw_ws2/dcp");
    fsdp(&["verify", &source])
        .env("FSDP_THREADS", "")
        .assert()
        .success();
    fsdp(&["verify", &source])
        .env("FSDP_THREADS", "many")
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("the value is that of the variable FSDP_THREADS"));
    // The option is what is wrong, whatever the variable says.
    fsdp(&["verify", &source, "--threads=many"])
        .env("FSDP_THREADS", "2")
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("FSDP_THREADS").not());
    // Whoever reads JSON gets JSON.
    let refused = fsdp(&["inspect", &source, "--bogus"])
        .env("FSDP_JSON", "true")
        .assert()
        .code(i32::from(exit_codes::USAGE));
    let object: serde_json::Value = serde_json::from_slice(&refused.get_output().stdout).unwrap();
    assert_eq!(object["error"]["exit_code"], exit_codes::USAGE);
}

#[test]
fn a_merge_of_one_checkpoint_says_that_it_is_a_copy() {
    let directory = tempfile::tempdir().unwrap();
    let source = fixture("fsdp2_adamw_ws2/dcp");
    let to = place(&directory, "merged");
    fsdp(&["merge", "--from", &source, &to, "--to", "dcp"])
        .assert()
        .success()
        .stderr(contains("no `--lora`, so the result is a copy of it"));
    fsdp(&["diff", &source, &to]).assert().success();
}

#[test]
fn cat_shows_elements_statistics_and_values() {
    let directory = tempfile::tempdir().unwrap();
    let source = fixture("misc_ws2/dcp");
    let truth = fs::read(fixtures().join("misc_ws2/truth.safetensors")).unwrap();
    let truth = SafeTensors::deserialize(&truth).unwrap();
    let wanted = truth.tensor("plain.x_f32").unwrap();
    let floats: Vec<f32> = wanted
        .data()
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();

    let shown = json(&["cat", &source, "plain.x_f32"]);
    assert_eq!(
        (&shown["dtype"], &shown["shape"]),
        (&"float32".into(), &serde_json::json!([5, 3]))
    );
    let elements = shown["elements"].as_array().unwrap();
    assert_eq!(elements.len(), floats.len());
    for (element, wanted) in elements
        .iter()
        .zip(&floats)
        .filter(|(_, wanted)| wanted.is_finite())
    {
        assert_eq!(element.as_f64().unwrap() as f32, *wanted);
    }
    let text = fsdp(&["cat", &source, "plain.x_f32"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    assert_eq!(String::from_utf8(text).unwrap().lines().count(), 5);
    let stats = &json(&["cat", &source, "plain.x_f32", "--stats"])["stats"];
    assert_eq!(stats["count"], 15);
    let max = floats
        .iter()
        .copied()
        .filter(|value| value.is_finite())
        .fold(f32::MIN, f32::max);
    assert_eq!(stats["max"].as_f64().unwrap(), f64::from(max));

    let file = place(&directory, "x.npy");
    fsdp(&["cat", &source, "plain.x_f32", "--npy", &file])
        .assert()
        .success()
        .stdout("");
    let bytes = fs::read(&file).unwrap();
    assert!(
        bytes.starts_with(b"\x93NUMPY\x01\x00") && bytes.len() % 64 == wanted.data().len() % 64
    );
    assert!(bytes.ends_with(wanted.data()));
    let header =
        String::from_utf8_lossy(&bytes[10..bytes.len() - wanted.data().len()]).into_owned();
    assert!(
        header.contains("'descr': '<f4', 'fortran_order': False, 'shape': (5,3,)"),
        "{header}"
    );
    // The same bytes go through a pipe, and nothing else does.
    let piped = fsdp(&["cat", &source, "plain.x_f32", "--npy", "-"])
        .current_dir(directory.path())
        .assert()
        .success();
    assert!(piped.get_output().stdout == bytes);
    assert!(!directory.path().join("-").exists());
    let mut from_environment = fsdp(&["cat", &source, "plain.x_f32", "--npy", "-"]);
    assert!(
        from_environment
            .env("FSDP_JSON", "true")
            .assert()
            .success()
            .get_output()
            .stdout
            == bytes
    );
    fsdp(&["cat", &source, "plain.x_f32", "--npy", "-", "--json"])
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stdout("")
        .stderr(contains("would both write to stdout"));

    fsdp(&["cat", &source, "py.int"])
        .assert()
        .success()
        .stdout("149\n");
    fsdp(&["cat", &source, "py.int", "--stats"])
        .assert()
        .code(i32::from(exit_codes::USAGE));
    fsdp(&["cat", &source, "no.such.key"])
        .assert()
        .code(i32::from(exit_codes::DIFFERENCE))
        .stderr(contains("no.such.key"));
}

/// One tensor whose name would clear the screen and turn text around.
#[test]
fn the_smallest_and_the_largest_of_integers_are_exact() {
    let directory = TempDir::new().unwrap();
    let write = |kind: &str, integers: [u64; 2]| {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': (2,), }}");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.bytes());
        bytes.extend(integers.iter().flat_map(|integer| integer.to_le_bytes()));
        let path = directory.path().join(format!("{}.npy", &kind[1..]));
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let signed = write("<i8", [i64::MIN as u64, (1 << 53) + 1]);
    let unsigned = write("<u8", [u64::MAX, (1 << 62) + 1]);
    let stats = &json(&["cat", &signed, "i8", "--stats"])["stats"];
    assert_eq!(stats["min"], i64::MIN);
    assert_eq!(stats["max"], (1u64 << 53) + 1);
    let stats = &json(&["cat", &unsigned, "u8", "--stats"])["stats"];
    assert_eq!(stats["min"], (1u64 << 62) + 1);
    assert_eq!(stats["max"], u64::MAX);
    fsdp(&["cat", &unsigned, "u8", "--stats"])
        .assert()
        .success()
        .stdout(contains("max       18446744073709551615"));
}

#[test]
fn names_cannot_act_on_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let file = place(&directory, "hostile.safetensors");
    let header = r#"{"a\u001b[2J\u202eb\nc":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.push(7);
    fs::write(&file, bytes).unwrap();
    let shown = "a\\u{1b}[2J\\u{202e}b\\nc";
    for arguments in [
        vec!["inspect", &file],
        vec!["inspect", &file, "--tree"],
        vec!["inspect", &file, "--tensors"],
    ] {
        let output = fsdp(&arguments).assert().success().stdout(contains(shown));
        assert!(!output.get_output().stdout.contains(&0x1b));
    }
    let output = fsdp(&["diff", &file, &fixture("misc_ws2/dcp")])
        .assert()
        .code(17)
        .stdout(contains(shown));
    assert!(!output.get_output().stdout.contains(&0x1b));
    let output = fsdp(&["cat", &fixture("misc_ws2/dcp"), "a\u{1b}[2J"])
        .assert()
        .failure();
    assert!(!output.get_output().stderr.contains(&0x1b));
}

/// Runs the command with a pipe as stdout that nobody reads.
fn unread(arguments: &[&str]) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fsdp"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command
        .args(arguments)
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .unwrap()
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let path = fixture("fsdp2_adamw_ws2/dcp");
    for arguments in [
        vec!["inspect", &path],
        vec!["inspect", &path, "--json"],
        vec!["cat", &path, "model.head.weight"],
    ] {
        let output = unread(&arguments);
        assert_eq!(
            (output.status.code(), output.stderr.as_slice()),
            (Some(0), [].as_slice()),
            "{arguments:?}"
        );
    }
}

/// Runs the command with a stdout that is full.
#[cfg(target_os = "linux")]
fn full(arguments: &[&str]) -> std::process::Output {
    let device = fs::File::options().write(true).open("/dev/full").unwrap();
    std::process::Command::new(env!("CARGO_BIN_EXE_fsdp"))
        .args(arguments)
        .stdout(device)
        .stderr(Stdio::piped())
        .output()
        .unwrap()
}

/// Calls a function with the command lines of reports that find something, and the exit code of
/// each.
fn for_each_finding(check: impl Fn(&[&str], u8)) {
    let directory = tempfile::tempdir().unwrap();
    let (whole, damaged, nothing) = (
        fixture("fsdp2_adamw_ws2/dcp"),
        place(&directory, "damaged"),
        place(&directory, "nothing"),
    );
    copy(&whole, &damaged);
    let file = Path::new(&damaged).join("__0_0.distcp");
    fs::write(&file, vec![0; fs::metadata(&file).unwrap().len() as usize]).unwrap();
    let other = fixture("fsdp2_adamw_ws4/dcp");
    for (arguments, code) in [
        (
            ["verify", &damaged, "--level", "deep"].as_slice(),
            exit_codes::CORRUPT,
        ),
        (
            &["verify", &damaged, "--level", "deep", "--json"],
            exit_codes::CORRUPT,
        ),
        (&["verify", &nothing, "--json"], exit_codes::INCOMPLETE),
        (&["diff", &whole, &other], exit_codes::DIFFERENCE),
        (&["diff", &whole, &other, "--json"], exit_codes::DIFFERENCE),
        (&["inspect", &nothing, "--json"], exit_codes::INCOMPLETE),
    ] {
        check(arguments, code);
    }
}

#[test]
fn what_a_report_has_found_is_told_by_the_exit_code_even_if_nobody_reads_the_report() {
    for_each_finding(|arguments, code| {
        let output = unread(arguments);
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(i32::from(code)),
            "{arguments:?}: {talk}"
        );
    });
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_report_has_found_is_told_by_the_exit_code_even_if_stdout_is_full() {
    for_each_finding(|arguments, code| {
        let output = full(arguments);
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(i32::from(code)),
            "{arguments:?}: {talk}"
        );
        // A warning tells that the report was not printed.
        assert!(
            talk.contains("warning: failed to write to stdout"),
            "{arguments:?}: {talk}"
        );
    });
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_stdout_is_an_error_where_nothing_else_is_wrong() {
    let path = fixture("fsdp2_adamw_ws2/dcp");
    for arguments in [
        &["inspect", &path][..],
        &["inspect", &path, "--json"],
        &["verify", &path],
        &["diff", &path, &path, "--json"],
        &["cat", &path, "model.head.weight"],
    ] {
        let output = full(arguments);
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(i32::from(exit_codes::NO_SPACE)),
            "{arguments:?}: {talk}"
        );
        assert!(
            talk.contains("error: failed to write to stdout") && !talk.contains("prune"),
            "{arguments:?}: {talk}"
        );
    }
}

#[test]
fn shells_and_man_are_served() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        fsdp(&["completions", shell])
            .assert()
            .success()
            .stdout(contains("reshard"));
    }
    fsdp(&["man"])
        .assert()
        .success()
        .stdout(contains(".TH fsdp 1"));
    fsdp(&["man", "convert"])
        .assert()
        .success()
        .stdout(contains(".TH fsdp\\-convert 1").or(contains(".TH fsdp-convert 1")));
}

/// Writes a safetensors file of `count` tensors of `length` bytes, the byte `value` over and over.
fn bytes_of(path: &str, count: usize, length: usize, value: u8) {
    let data = vec![value; length];
    let tensors = (0..count).map(|index| {
        let tensor =
            safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![length], &data)
                .unwrap();
        (format!("k{index}"), tensor)
    });
    fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
}

/// Runs the command in a shell with a limit on its address space, in KiB.
#[cfg(target_os = "linux")]
fn limited(kib: u64, arguments: &str) -> std::process::Output {
    let program = crate::common::program();
    let script = format!("ulimit -v {kib}; exec '{}' {arguments}", program.display());
    std::process::Command::new("sh")
        .args(["-c", &script])
        .output()
        .unwrap()
}

#[test]
fn sizes_whose_sum_has_more_than_64_bits_are_shown() {
    let directory = TempDir::new().unwrap();
    let mut metadata = Metadata::default();
    for number in 0..8 {
        let bounds = TensorBox::whole(&[1 << 58]);
        let stored = StorageInfo {
            relative_path: "__0_0.distcp".to_owned(),
            offset: 0,
            length: 1 << 62,
            transforms: Vec::new(),
        };
        let tensor = TensorEntry {
            properties: TensorProperties::new(DType::Complex128),
            shape: bounds.sizes.clone(),
            chunks: vec![Chunk {
                bounds,
                stored: Some(stored),
            }],
        };
        metadata
            .entries
            .insert(number.to_string(), Entry::Tensor(tensor));
    }
    fs::write(directory.path().join(METADATA_FILE), encode(&metadata)).unwrap();
    fs::write(directory.path().join("__0_0.distcp"), [0; 64]).unwrap();
    let path = directory.path().to_str().unwrap();
    fsdp(&["inspect", path])
        .assert()
        .success()
        .stdout(contains("17179869184.0 GiB"));
    fsdp(&["verify", path])
        .assert()
        .code(i32::from(exit_codes::CORRUPT));
}

#[test]
#[cfg(target_os = "linux")]
fn fewer_threads_than_were_asked_for_do_the_same_work() {
    let directory = TempDir::new().unwrap();
    let file = place(&directory, "many.safetensors");
    bytes_of(&file, 600, 1, 7);
    let output = limited(1_000_000, &format!("verify --threads 500 '{file}'"));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[cfg(target_os = "linux")]
fn tensors_that_differ_everywhere_are_compared_in_little_memory() {
    let directory = TempDir::new().unwrap();
    let (first, second) = (
        place(&directory, "a.safetensors"),
        place(&directory, "b.safetensors"),
    );
    bytes_of(&first, 1, 48 << 20, 1);
    bytes_of(&second, 1, 48 << 20, 3);
    // Two pieces of 16 MiB, beside the program itself. The numbers of one piece would take 256 MiB.
    let output = limited(300_000, &format!("diff --threads 1 '{first}' '{second}'"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(
        output.status.code(),
        Some(i32::from(exit_codes::DIFFERENCE)),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        text.contains("k0: 50331648 elements differ, by at most 2"),
        "{text}"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn a_map_that_never_ends_is_an_error_that_names_it() {
    let directory = TempDir::new().unwrap();
    let (source, target) = (
        fixture("fsdp2_adamw_ws2/dcp"),
        place(&directory, "out.safetensors"),
    );
    let output = limited(
        1_000_000,
        &format!("convert '{source}' '{target}' --to safetensors --map /dev/zero"),
    );
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(i32::from(exit_codes::USAGE)),
        "{talk}"
    );
    assert!(
        talk.contains("`/dev/zero`") && talk.contains("it is too large"),
        "{talk}"
    );
}

/// Returns the object that a command with `--json` writes, and its exit code.
fn error_object(arguments: &[&str]) -> (serde_json::Value, i32) {
    let output = fsdp(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "{arguments:?}: {text}");
    let object = serde_json::from_str(&text).unwrap();
    (object, output.status.code().unwrap())
}

#[test]
fn an_error_is_an_object_too_where_json_was_asked_for() {
    let parent = tempfile::tempdir().unwrap();
    let absent = parent.path().join("absent");
    let (absent, free) = (absent.to_str().unwrap(), parent.path().join("free"));
    let free = free.to_str().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (arguments, code) in [
        (&["inspect", absent][..], 11),
        (&["verify", absent], 11),
        (&["diff", absent, absent], 11),
        (&["digest", absent], 11),
        (&["sign", absent, "--key", absent], 14),
        (&["log", absent], 11),
        (&["ls", absent], 11),
        (&["prune", absent, "--keep", "1"], 11),
        (&["reshard", absent, free, "--world-size", "2"], 11),
        (&["convert", absent, free, "--to", "hf"], 11),
        (&["convert", source, free, "--to", "hf"], 12),
        (&["merge", "--from", absent, free, "--to", "hf"], 11),
        (&["cat", absent, "key"], 11),
        (&["plan", "--like", absent, "--ranks", "2"], 11),
        // Wrong command lines.
        (&["convert", absent, free], 2),
        (&["sign", absent], 2),
        (&["ls"], 2),
        (&["ls", absent, "--bogus"], 2),
    ] {
        let with_json = [arguments, &["--json"]].concat();
        let (object, exit_code) = error_object(&with_json);
        assert_eq!(exit_code, code, "{arguments:?}: {object}");
        let is_report = ["inspect", "verify"].contains(&arguments[0]);
        if !is_report {
            assert_eq!(
                object["error"]["exit_code"], code,
                "{arguments:?}: {object}"
            );
            let message = object["error"]["message"].as_str().unwrap();
            assert!(!message.is_empty(), "{arguments:?}: {object}");
        }
        // Without the option stdout is empty, as ever.
        let output = fsdp(arguments).output().unwrap();
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn what_a_killed_command_has_left_of_a_file_goes_with_the_next_one() {
    let checkpoint = fixture("fsdp2_adamw_ws2/dcp");
    let key = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../fsdp-tools/tests/fixtures/signed/key.pem"
    );
    for arguments in [
        &["cat", &checkpoint, "model.head.weight", "--npy"][..],
        &["map", &checkpoint, "--html"],
        &["map", &checkpoint, "--svg"],
        &["sign", &checkpoint, "--key", key, "--signature"],
    ] {
        let directory = TempDir::new().unwrap();
        let left = directory.path().join(".out.tmp-0123456789abcdef");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("file"), "unfinished").unwrap();
        let out = place(&directory, "out");
        fsdp(&[arguments, &[out.as_str()]].concat())
            .assert()
            .success();
        assert!(Path::new(&out).is_file() && !left.exists(), "{arguments:?}");
    }
}

#[cfg(unix)]
#[test]
fn where_nothing_can_be_created_no_checkpoint_is_called_incomplete() {
    let parent = tempfile::tempdir().unwrap();
    let link = parent.path().join("link");
    std::os::unix::fs::symlink(parent.path().join("absent/below"), &link).unwrap();
    let below = link.join("new");
    let below = below.to_str().unwrap();
    let fixture = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/fsdp2_adamw_ws2/dcp"
    );
    let key = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../fsdp-tools/tests/fixtures/signed/key.pem"
    );
    for arguments in [
        &["convert", fixture, below, "--to", "hf"][..],
        &["convert", fixture, below, "--to", "torch"],
        &["convert", fixture, below, "--to", "dcp"],
        &["reshard", fixture, below, "--world-size", "2"],
        &[
            "merge",
            "--from",
            fixture,
            "--from",
            fixture,
            below,
            "--to",
            "safetensors",
        ],
        &["sign", fixture, "--key", key, "--signature", below],
        &["map", fixture, "--html", below],
    ] {
        fsdp(arguments)
            .assert()
            .code(14)
            .stderr(contains("create").and(contains("saved whole").not()));
    }
}
