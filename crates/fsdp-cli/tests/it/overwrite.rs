//! `--overwrite` replaces checkpoints, and nothing that is not the checkpoint's.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests put files of others beside checkpoints"
)]

use std::fs;
use std::path::Path;

use predicates::prelude::PredicateBooleanExt as _;
use predicates::str::contains;
use tempfile::TempDir;

use crate::common::fsdp;

const SOURCE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/fixtures/fsdp2_adamw_ws2/dcp"
);

/// Writes the model of the fixture as a directory of Hugging Face, with a configuration beside it,
/// and returns its path.
fn model_directory(parent: &TempDir) -> String {
    let path = parent.path().join("model").to_str().unwrap().to_owned();
    let convert = [
        "convert",
        SOURCE,
        &path,
        "--to",
        "hf",
        "--include",
        "model.*",
    ];
    fsdp(&convert).assert().success();
    for name in ["config.json", "tokenizer.json", "README.md"] {
        fs::write(Path::new(&path).join(name), "{}").unwrap();
    }
    path
}

fn convert_again(path: &str) -> assert_cmd::assert::Assert {
    fsdp(&[
        "convert",
        SOURCE,
        path,
        "--to",
        "hf",
        "--include",
        "model.*",
        "--overwrite",
    ])
    .assert()
}

#[test]
fn the_files_of_a_framework_go_with_its_checkpoint() {
    let parent = TempDir::new().unwrap();
    let path = model_directory(&parent);
    convert_again(&path).success();
    assert!(!Path::new(&path).join("config.json").exists());
}

#[test]
fn files_of_others_are_never_taken_away() {
    for other in [
        "checkpoint-500/optimizer.pt",
        ".git/config",
        "thesis.tex",
        "other-model.safetensors.bak",
    ] {
        let parent = TempDir::new().unwrap();
        let path = model_directory(&parent);
        let other_path = Path::new(&path).join(other);
        fs::create_dir_all(other_path.parent().unwrap()).unwrap();
        fs::write(&other_path, "precious").unwrap();
        let name = other.split('/').next().unwrap();
        convert_again(&path)
            .code(2)
            .stderr(contains(format!("`{name}`")));
        assert_eq!(fs::read(&other_path).unwrap(), b"precious");
        assert!(Path::new(&path).join("config.json").exists());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn files_whose_names_are_not_utf8_are_never_taken_away() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let parent = TempDir::new().unwrap();
    // By itself, beside a checkpoint, and beside a damaged one.
    let (alone, path) = (
        parent.path().join("alone").to_str().unwrap().to_owned(),
        model_directory(&parent),
    );
    fs::create_dir(&alone).unwrap();
    for directory in [&alone, &path, &path] {
        let other = Path::new(directory).join(OsStr::from_bytes(b"caf\xe9.txt"));
        fs::write(&other, "precious").unwrap();
        convert_again(directory)
            .code(2)
            .stderr(contains("`caf\u{fffd}.txt`"));
        assert_eq!(fs::read(&other).unwrap(), b"precious");
        if directory == &path {
            fs::write(first_safetensors(Path::new(&path)), "cut off").unwrap();
        }
    }
}

#[test]
fn the_values_of_another_file_stay() {
    let parent = TempDir::new().unwrap();
    let path = |name: &str| parent.path().join(name).to_str().unwrap().to_owned();
    let (out, other) = (path("out"), path("out.safetensors"));
    fsdp(&["convert", SOURCE, &out, "--to", "safetensors"])
        .assert()
        .success();
    let values = fs::read(path("out.values.json")).unwrap();
    // Both files would have their values under this name.
    fsdp(&[
        "convert",
        &out,
        &other,
        "--to",
        "safetensors",
        "--include",
        "model.*",
    ])
    .assert()
    .success();
    let refused = [
        "convert",
        SOURCE,
        &other,
        "--to",
        "safetensors",
        "--overwrite",
    ];
    fsdp(&refused)
        .assert()
        .code(2)
        .stderr(contains("`out.values.json`").and(contains("move it away")));
    assert!(fs::read(path("out.values.json")).unwrap() == values);
    fsdp(&["diff", SOURCE, &out]).assert().success();
}

#[test]
fn a_configuration_stays_where_it_is_asked_for() {
    let parent = TempDir::new().unwrap();
    let path = model_directory(&parent);
    let convert = [
        "convert",
        SOURCE,
        &path,
        "--to",
        "hf",
        "--include",
        "model.*",
        "--with",
        &path,
        "--overwrite",
    ];
    fsdp(&convert).assert().success();
    assert_eq!(
        fs::read(Path::new(&path).join("config.json")).unwrap(),
        b"{}"
    );
}

#[test]
fn a_damaged_checkpoint_is_replaced_but_no_directory_beside_it() {
    let parent = TempDir::new().unwrap();
    let path = model_directory(&parent);
    fs::write(first_safetensors(Path::new(&path)), "cut off").unwrap();
    let other = Path::new(&path).join("checkpoint-500");
    fs::create_dir(&other).unwrap();
    convert_again(&path)
        .code(2)
        .stderr(contains("`checkpoint-500`"));
    fs::remove_dir(other).unwrap();
    convert_again(&path).success();
}

#[test]
fn an_adapter_that_is_read_is_not_replaced() {
    let parent = TempDir::new().unwrap();
    let path = model_directory(&parent);
    let adapter = parent.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    let settings = adapter.join("adapter_config.json");
    fs::write(
        &settings,
        r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#,
    )
    .unwrap();
    fs::copy(
        first_safetensors(Path::new(&path)),
        adapter.join("adapter_model.safetensors"),
    )
    .unwrap();
    let adapter = adapter.to_str().unwrap();
    let merge = [
        "merge",
        "--from",
        &path,
        "--lora",
        adapter,
        adapter,
        "--to",
        "hf",
        "--overwrite",
    ];
    fsdp(&merge).assert().code(2).stderr(contains("overlap"));
    assert!(settings.exists());
}

#[test]
fn a_checkpoint_that_another_program_has_saved_over_is_told() {
    let parent = TempDir::new().unwrap();
    let path = |name: &str| parent.path().join(name).to_str().unwrap().to_owned();
    for (name, ranks) in [("ours", "2"), ("other", "3")] {
        fsdp(&["reshard", SOURCE, &path(name), "--world-size", ranks])
            .assert()
            .success();
    }
    // Other programs know nothing of the file with the hashes.
    for entry in fs::read_dir(path("other")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != ".integrity" {
            fs::copy(
                entry.path(),
                parent.path().join("ours").join(entry.file_name()),
            )
            .unwrap();
        }
    }
    fsdp(&["inspect", &path("ours")])
        .assert()
        .code(10)
        .stderr(contains("another program has saved over"));
    fs::remove_file(parent.path().join("ours/.integrity")).unwrap();
    fsdp(&["inspect", &path("ours")]).assert().success();
}

fn first_safetensors(directory: &Path) -> std::path::PathBuf {
    let mut entries = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .find(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .unwrap()
}

#[test]
fn a_file_that_is_no_checkpoint_stays() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file");
    let to = path.to_str().unwrap();
    let convert = || {
        fsdp(&[
            "convert",
            SOURCE,
            to,
            "--to",
            "safetensors",
            "--include",
            "model.*",
            "--overwrite",
        ])
        .assert()
    };
    std::fs::write(&path, "notes of somebody").unwrap();
    convert().code(2).stderr(contains("cannot be replaced"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "notes of somebody");
    // An empty file is nobody's, and a checkpoint may be damaged.
    std::fs::write(&path, "").unwrap();
    convert().success();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    convert().success();
    assert!(std::fs::read(&path).unwrap() == bytes);
}

#[test]
#[cfg(unix)]
fn a_symbolic_link_stays_and_so_does_what_it_leads_to() {
    let parent = TempDir::new().unwrap();
    let path = |name: &str| parent.path().join(name).to_str().unwrap().to_owned();
    let (file, directory, link) = (path("file"), path("directory"), path("link"));
    fs::write(path("empty"), "").unwrap();
    fsdp(&["convert", SOURCE, &file, "--to", "torch"])
        .assert()
        .success();
    fsdp(&["convert", SOURCE, &directory, "--to", "dcp"])
        .assert()
        .success();
    let bytes = fs::read(&file).unwrap();
    for (command, leads_to, options) in [
        ("convert", "empty", &["--to", "safetensors"][..]),
        ("convert", "file", &["--to", "torch"]),
        ("convert", "directory", &["--to", "dcp"]),
        ("convert", "nowhere", &["--to", "torch"]),
        ("reshard", "directory", &["--world-size", "2"]),
    ] {
        std::os::unix::fs::symlink(leads_to, &link).unwrap();
        for overwrite in [&[][..], &["--overwrite"]] {
            let arguments = [&[command, SOURCE, &link][..], options, overwrite].concat();
            fsdp(&arguments).assert().code(2).stderr(contains(
                "link` is a symbolic link, which is never replaced",
            ));
        }
        assert_eq!(fs::read_link(&link).unwrap(), Path::new(leads_to));
        fs::remove_file(&link).unwrap();
    }
    assert!(fs::read(path("empty")).unwrap().is_empty() && fs::read(&file).unwrap() == bytes);
    fsdp(&["diff", SOURCE, &directory]).assert().success();
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 3);
}

#[test]
#[cfg(unix)]
fn a_socket_is_no_destination_whether_a_link_leads_to_it_or_not() {
    let parent = TempDir::new().unwrap();
    let path = |name: &str| parent.path().join(name).to_str().unwrap().to_owned();
    let (socket, link) = (path("socket"), path("link"));
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::os::unix::fs::symlink("socket", &link).unwrap();
    let key = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../fsdp-tools/tests/fixtures/signed/key.pem"
    );
    for place in [socket.as_str(), &link] {
        for arguments in [
            &["convert", SOURCE, place, "--to", "torch"][..],
            &["convert", SOURCE, place, "--to", "torch", "--overwrite"],
            &["convert", SOURCE, place, "--to", "dcp", "--overwrite"],
            &[
                "merge",
                "--from",
                SOURCE,
                place,
                "--to",
                "torch",
                "--overwrite",
            ],
            &["cat", SOURCE, "model.head.weight", "--npy", place],
            &["map", SOURCE, "--html", place],
            &["map", SOURCE, "--svg", place, "--overwrite"],
            &["sign", SOURCE, "--key", key, "--signature", place],
            &[
                "sign",
                SOURCE,
                "--key",
                key,
                "--signature",
                place,
                "--overwrite",
            ],
        ] {
            fsdp(arguments)
                .assert()
                .code(2)
                .stderr(contains("is a device, a pipe or a socket"));
        }
    }
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("socket"));
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 2);
}

#[test]
fn a_destination_may_have_the_longest_name_that_a_file_system_takes() {
    let parent = TempDir::new().unwrap();
    let path = |length: usize| {
        let path = parent.path().join("n".repeat(length));
        path.to_str().unwrap().to_owned()
    };
    // With 22 bytes for the rest, the name of the staging directory has 255 bytes at 233; with 10
    // for `.integrity`, that of the hashes at 245.
    for length in [233, 234, 245, 246, 255] {
        let place = path(length);
        for options in [
            &["--to", "dcp"][..],
            &["--to", "torch"],
            &["--to", "safetensors", "--include", "model.*"],
        ] {
            for overwrite in [&[][..], &["--overwrite"]] {
                let arguments = [&["convert", SOURCE, &place][..], options, overwrite].concat();
                fsdp(&arguments).assert().success();
            }
            fsdp(&["verify", &place]).assert().success();
            if Path::new(&place).is_dir() {
                fs::remove_dir_all(&place).unwrap();
            } else {
                fs::remove_file(&place).unwrap();
            }
        }
        fsdp(&["cat", SOURCE, "model.head.weight", "--npy", &place])
            .assert()
            .success();
        fs::remove_file(&place).unwrap();
    }
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
}

#[test]
fn a_name_that_is_too_long_is_an_error_before_anything_is_written() {
    let parent = TempDir::new().unwrap();
    let path = |length: usize| {
        let path = parent.path().join("n".repeat(length));
        path.to_str().unwrap().to_owned()
    };
    // Values lie beside the file under names of up to 49 bytes more.
    let (longest, longer, too_long) = (path(206), path(207), path(256));
    for arguments in [
        &["convert", SOURCE, &longer, "--to", "safetensors"][..],
        &["convert", SOURCE, &too_long, "--to", "safetensors"],
        &["convert", SOURCE, &too_long, "--to", "dcp"],
        &["cat", SOURCE, "model.head.weight", "--npy", &too_long],
        &["map", SOURCE, "--html", &too_long],
    ] {
        fsdp(arguments)
            .assert()
            .code(2)
            .stderr(contains("File name too long").and(contains("at most 255 bytes")));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
    fsdp(&["convert", SOURCE, &longest, "--to", "safetensors"])
        .assert()
        .success();
    fsdp(&["diff", SOURCE, &longest]).assert().success();
}
