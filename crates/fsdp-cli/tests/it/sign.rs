//! `fsdp sign`, and `fsdp verify --signature`.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::Path;

use fsdp_formats::internals::values_hash;
use predicates::prelude::PredicateBooleanExt as _;
use predicates::str::contains;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;

fn fixture(name: &str) -> String {
    format!(
        "{}/../fsdp-tools/tests/fixtures/signed/{name}",
        env!("CARGO_MANIFEST_DIR")
    )
}

/// Makes a checkpoint that `fsdp` wrote, with hashes.
fn checkpoint(directory: &Path) -> String {
    let path = directory.join("checkpoint").to_str().unwrap().to_owned();
    fsdp(&[
        "reshard",
        &fixture("checkpoint"),
        &path,
        "--world-size",
        "2",
    ])
    .assert()
    .success();
    path
}

/// The arguments of a check with the key of the fixture.
fn verify<'a>(path: &'a str, signature: &'a str, key: &'a str) -> [&'a str; 6] {
    [
        "verify",
        path,
        "--signature",
        signature,
        "--public-key",
        key,
    ]
}

#[test]
fn what_a_killed_command_has_left_of_a_signature_is_not_signed() {
    let directory = TempDir::new().unwrap();
    let path = checkpoint(directory.path());
    let left = Path::new(&path).join(".model.sig.tmp-0123456789abcdef");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("file"), "unfinished").unwrap();
    fsdp(&["sign", &path, "--key", &fixture("key.pem")])
        .assert()
        .success();
    assert!(!left.exists());
    let signature = format!("{path}/model.sig");
    fsdp(&verify(&path, &signature, &fixture("key.pub.pem")))
        .assert()
        .success();
}

#[test]
fn a_signed_checkpoint_is_verified_and_told() {
    let directory = TempDir::new().unwrap();
    let path = checkpoint(directory.path());
    let (key, public) = (fixture("key.pem"), fixture("key.pub.pem"));
    // The signature of the original is not one of the copy, and stays behind.
    let signature = format!("{path}/model.sig");
    assert!(!Path::new(&signature).exists());
    fsdp(&["sign", &path, "--key", &key])
        .assert()
        .success()
        .stdout(contains("signed    ").and(contains("model.sig")));
    fsdp(&verify(&path, &signature, &public))
        .assert()
        .success()
        .stdout(contains("signed    ").and(contains("hashes")));
    // The hashes do not mind the signature.
    fsdp(&["verify", &path, "--level", "deep"])
        .assert()
        .success();
    let output = fsdp(&[&verify(&path, &signature, &public)[..], &["--json"]].concat())
        .output()
        .unwrap()
        .stdout;
    let found: Value = serde_json::from_slice(&output).unwrap();
    // Two files of data, `.metadata`, `.integrity`, and the notes beside them.
    assert!(found["signed"]["files"].as_u64().unwrap() >= 4, "{found}");
    // A signature is replaced only if that is asked for.
    fsdp(&["sign", &path, "--key", &key])
        .assert()
        .code(2)
        .stderr(contains("exists already"));
    fsdp(&["sign", &path, "--key", &key, "--overwrite"])
        .assert()
        .success();
    // Nothing else is.
    let own_key = directory.path().join("key.pem");
    fs::copy(&key, &own_key).unwrap();
    let data = Path::new(&path).join("__0_0.distcp");
    for other in [&own_key, &data] {
        let before = fs::read(other).unwrap();
        let to_other = ["--signature", other.to_str().unwrap(), "--overwrite"];
        fsdp(&[&["sign", &path, "--key", &key][..], &to_other].concat())
            .assert()
            .code(2)
            .stderr(contains("it is not a signature"));
        assert_eq!(fs::read(other).unwrap(), before);
    }
    fsdp(&verify(&path, &signature, &public)).assert().success();
    // A copy has other files, so the signature does not go with it.
    let other = directory.path().join("other");
    fsdp(&[
        "reshard",
        &path,
        other.to_str().unwrap(),
        "--world-size",
        "3",
    ])
    .assert()
    .success();
    assert!(!other.join("model.sig").exists());
}

#[test]
fn a_folder_with_a_damaged_part_is_not_signed() {
    let directory = TempDir::new().unwrap();
    let folder = directory.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("trainer_state.json"), r#"{"global_step": 3}"#).unwrap();
    let part = folder.join("pytorch_model_fsdp_0");
    fs::rename(checkpoint(directory.path()), &part).unwrap();
    let (path, key) = (folder.to_str().unwrap(), fixture("key.pem"));
    fsdp(&["sign", path, "--key", &key]).assert().success();
    let data = part.join("__0_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&data, bytes).unwrap();
    fsdp(&["sign", path, "--key", &key, "--overwrite"])
        .assert()
        .code(10)
        .stderr(contains("__0_0.distcp"));
}

#[test]
fn a_single_file_is_signed_beside() {
    let directory = TempDir::new().unwrap();
    let path = directory
        .path()
        .join("model.safetensors")
        .to_str()
        .unwrap()
        .to_owned();
    let source = fixture("checkpoint");
    fsdp(&["convert", &source, &path, "--to", "safetensors"])
        .assert()
        .success();
    let (key, public) = (fixture("key.pem"), fixture("key.pub.pem"));
    // It has values beside it, which would not be signed, whatever name a killed process left them.
    let values = directory.path().join("model.values.json");
    let hash = values_hash(&std::fs::read(&values).unwrap());
    let pending = directory
        .path()
        .join(format!("model.values.json.new-{hash}"));
    for renamed in [false, true] {
        if renamed {
            std::fs::rename(&values, &pending).unwrap();
        }
        fsdp(&["sign", &path, "--key", &key])
            .assert()
            .code(2)
            .stderr(contains("is a part of the checkpoint"));
    }
    let path = directory
        .path()
        .join("weights.safetensors")
        .to_str()
        .unwrap()
        .to_owned();
    let signature = format!("{path}.sig");
    fsdp(&[
        "convert",
        &source,
        &path,
        "--to",
        "safetensors",
        "--include",
        "model.*",
    ])
    .assert()
    .success();
    fsdp(&["sign", &path, "--key", &key]).assert().success();
    fsdp(&verify(&path, &signature, &public)).assert().success();
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    fsdp(&verify(&path, &signature, &public))
        .assert()
        .code(10)
        .stderr(contains("`.` was changed"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_below_a_directory_whose_name_is_not_utf8_is_signed_beside() {
    use std::os::unix::ffi::OsStrExt as _;

    let parent = TempDir::new().unwrap();
    let directory = parent
        .path()
        .join(std::ffi::OsStr::from_bytes(b"mod\xe8les"));
    fs::create_dir(&directory).unwrap();
    let file = directory.join("weights.safetensors");
    let options = ["--to", "safetensors", "--include", "model.*"];
    fsdp(&["convert", &fixture("checkpoint")])
        .arg(&file)
        .args(options)
        .assert()
        .success();
    fsdp(&["sign", "--key", &fixture("key.pem")])
        .arg(&file)
        .assert()
        .success();
    assert!(directory.join("weights.safetensors.sig").exists());
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
}

#[test]
fn what_the_signature_does_not_vouch_for_is_named() {
    let directory = TempDir::new().unwrap();
    let path = checkpoint(directory.path());
    let (key, public, signature) = (
        fixture("key.pem"),
        fixture("key.pub.pem"),
        format!("{path}/model.sig"),
    );
    fsdp(&["sign", &path, "--key", &key]).assert().success();
    // Another key.
    let other = fixture("other.pub.pem");
    fsdp(&verify(&path, &signature, &other))
        .assert()
        .code(13)
        .stderr(
            contains("another key")
                .and(contains("model.sig"))
                .and(contains("do not load it")),
        );
    // An added file, and a changed one: also with hashes that were changed with it.
    fs::write(format!("{path}/extra.bin"), "x").unwrap();
    fsdp(&verify(&path, &signature, &public))
        .assert()
        .code(10)
        .stderr(contains("`extra.bin` was added"));
    let output = fsdp(&[&verify(&path, &signature, &public)[..], &["--json"]].concat())
        .output()
        .unwrap()
        .stdout;
    let found: Value = serde_json::from_slice(&output).unwrap();
    assert_eq!(found["ok"], false);
    assert!(
        found["problems"][0]["error"]
            .as_str()
            .unwrap()
            .contains("extra.bin"),
        "{found}"
    );
    fs::remove_file(format!("{path}/extra.bin")).unwrap();
    fs::remove_file(format!("{path}/.integrity")).unwrap();
    fsdp(&verify(&path, &signature, &public))
        .assert()
        .code(11)
        .stderr(contains("`.integrity` is missing"));
    // A key or a signature that is none.
    fsdp(&verify(&path, &signature, &key))
        .assert()
        .code(2)
        .stderr(contains("no public key").and(contains("openssl")));
    fsdp(&verify(&path, &public, &public))
        .assert()
        .code(13)
        .stderr(contains("not a model signature"));
    fsdp(&["verify", &path, "--signature", &signature])
        .assert()
        .code(2)
        .stderr(contains("--public-key"));
}
