//! Signatures that are ours, and those of the Python tool.
#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::{Path, PathBuf};

use base64ct::{Base64, Encoding as _};
use fsdp_layout::{ErrorKind, Failure as _};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// Returns the directory that `model_signing` of the OpenSSF has written.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/signed")
}

fn public(name: &str) -> PublicKey {
    PublicKey::from_pem(&fs::read(fixture().join(name)).unwrap()).unwrap()
}

fn private() -> PrivateKey {
    PrivateKey::from_pem(&fs::read(fixture().join("key.pem")).unwrap()).unwrap()
}

fn signature() -> Vec<u8> {
    fs::read(fixture().join("checkpoint/model.sig")).unwrap()
}

/// The options for a signature at its usual place.
fn usual() -> SignOptions<'static> {
    SignOptions {
        signature: Some("model.sig"),
        threads: Some(2),
        progress: None,
    }
}

/// Copies the signed checkpoint, so that it can be changed.
fn copy() -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let to = directory.path().join("checkpoint");
    fs::create_dir_all(to.join("notes")).unwrap();
    for name in Location::from(fixture().join("checkpoint"))
        .files()
        .unwrap()
    {
        fs::copy(fixture().join("checkpoint").join(&name), to.join(&name)).unwrap();
    }
    (directory, to)
}

fn check_at(path: &Path, signature: &[u8]) -> Result<Signed, SignError> {
    check(&path.into(), signature, &public("key.pub.pem"), usual())
}

/// Returns the names of files that were changed, added, and are missing.
fn differences(path: &Path) -> [Vec<String>; 3] {
    match check_at(path, &signature()) {
        Err(SignError::FilesDiffer {
            changed,
            added,
            missing,
            ..
        }) => [changed, added, missing],
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_signature_of_the_python_tool_is_accepted() {
    let signed = check_at(&fixture().join("checkpoint"), &signature()).unwrap();
    assert_eq!(signed.files, 4);
    assert_eq!(signed.key, public("key.pub.pem").hash());
}

#[test]
fn the_same_files_have_the_root_of_the_python_tool() {
    let (content, signed) =
        sign(&fixture().join("checkpoint").into(), &private(), usual()).unwrap();
    assert_eq!(
        signed,
        check_at(&fixture().join("checkpoint"), &signature()).unwrap()
    );
    assert_eq!(
        check_at(&fixture().join("checkpoint"), content.as_bytes()).unwrap(),
        signed
    );
    // Nothing in it is random: the same checkpoint and key have the same signature.
    assert_eq!(
        sign(&fixture().join("checkpoint").into(), &private(), usual())
            .unwrap()
            .0,
        content
    );
}

#[test]
fn files_that_are_changed_added_or_missing_are_named() {
    let (_directory, path) = copy();
    let mut data = fs::read(path.join("__0_0.distcp")).unwrap();
    *data.last_mut().unwrap() ^= 1;
    fs::write(path.join("__0_0.distcp"), data).unwrap();
    fs::write(path.join("notes/b.txt"), "").unwrap();
    fs::remove_file(path.join("notes.txt")).unwrap();
    assert_eq!(
        differences(&path),
        [vec!["__0_0.distcp"], vec!["notes/b.txt"], vec!["notes.txt"]]
    );
    let error = check_at(&path, &signature()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let message = error.to_string();
    let told = "`__0_0.distcp` was changed, `notes/b.txt` was added, `notes.txt` is missing";
    assert!(message.ends_with(told), "{message}");
}

#[test]
fn files_that_the_signer_left_out_are_not_vouched_for() {
    let (_directory, path) = copy();
    // The signature lies elsewhere, and what is at its place is some file.
    let options = SignOptions::default();
    match check(
        &path.as_path().into(),
        &signature(),
        &public("key.pub.pem"),
        options,
    ) {
        Err(SignError::FilesDiffer { added, .. }) => assert_eq!(added, ["model.sig"]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_link_is_refused_wherever_it_leads() {
    let (_directory, path) = copy();
    std::os::unix::fs::symlink("__0_0.distcp", path.join("notes/link")).unwrap();
    for error in [
        check_at(&path, &signature()).unwrap_err(),
        sign(&path.as_path().into(), &private(), usual()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsafe);
        assert!(error.to_string().contains("`notes/link`"), "{error}");
    }
}

#[test]
fn another_key_is_told() {
    let path = fixture().join("checkpoint");
    let error = check(
        &path.into(),
        &signature(),
        &public("other.pub.pem"),
        usual(),
    )
    .unwrap_err();
    assert!(matches!(error, SignError::WrongKey { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Unsafe);
}

#[test]
fn a_signature_that_is_stripped_or_forged_is_refused() {
    let path = fixture().join("checkpoint");
    let bundle: Value = serde_json::from_slice(&signature()).unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut bundle = bundle.clone();
        change(&mut bundle);
        check_at(&path, &serde_json::to_vec(&bundle).unwrap()).unwrap_err()
    };
    let stripped = changed(&|bundle| bundle["dsseEnvelope"]["signatures"] = json!([]));
    assert!(
        matches!(stripped, SignError::SignatureCount { found: 0 }),
        "{stripped}"
    );
    let none = changed(&|bundle| {
        _ = bundle["dsseEnvelope"]
            .as_object_mut()
            .unwrap()
            .remove("signatures")
    });
    assert!(
        matches!(none, SignError::SignatureCount { found: 0 }),
        "{none}"
    );
    let empty = changed(&|bundle| bundle["dsseEnvelope"]["signatures"][0]["sig"] = "".into());
    assert!(matches!(empty, SignError::InvalidSignature), "{empty}");
    // Another statement under the same signature.
    let other = changed(&|bundle| {
        let payload =
            Base64::decode_vec(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
        let payload = String::from_utf8(payload)
            .unwrap()
            .replace("__0_0", "__1_0");
        bundle["dsseEnvelope"]["payload"] = Base64::encode_string(payload.as_bytes()).into();
    });
    assert!(matches!(other, SignError::InvalidSignature), "{other}");
    let certificate = changed(&|bundle| {
        bundle["verificationMaterial"] = json!({"certificate": {"rawBytes": ""}})
    });
    assert!(
        matches!(certificate, SignError::Unsupported { .. }),
        "{certificate}"
    );
}

#[test]
fn no_changed_byte_of_a_signature_goes_unnoticed() {
    let (path, bytes) = (fixture().join("checkpoint"), signature());
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        // Bytes of names that say nothing may change: of `keyid` and the like.
        if let Ok(signed) = check_at(&path, &changed) {
            assert_eq!(signed, check_at(&path, &bytes).unwrap(), "byte {at}");
            let read: Value = serde_json::from_slice(&changed).unwrap();
            let before: Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(
                read["dsseEnvelope"]["payload"], before["dsseEnvelope"]["payload"],
                "byte {at}"
            );
        }
        assert!(
            check_at(&path, &bytes[..at]).is_err(),
            "prefix of {at} bytes"
        );
    }
}

#[test]
fn a_statement_that_contradicts_itself_is_refused_though_it_is_signed() {
    let hashes = BTreeMap::from([("a".to_owned(), [1; 32]), ("b".to_owned(), [2; 32])]);
    let statement =
        serde_json::to_value(Statement::new("c".to_owned(), &hashes, Vec::new())).unwrap();
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut statement = statement.clone();
        change(&mut statement);
        let read = Statement::parse(&serde_json::to_vec(&statement).unwrap());
        read.and_then(|statement| statement.hashes())
            .unwrap_err()
            .to_string()
    };
    let twice = refused(&|statement| statement["predicate"]["resources"][1]["name"] = "a".into());
    assert!(twice.contains("`a` stands twice"), "{twice}");
    let root = refused(&|statement| statement["subject"][0]["digest"]["sha256"] = "00".into());
    assert!(root.contains("the hash of all files"), "{root}");
    let short =
        refused(&|statement| statement["predicate"]["resources"][0]["digest"] = "0101".into());
    assert!(short.contains("`a`"), "{short}");
    let shards =
        refused(&|statement| statement["predicate"]["serialization"]["method"] = "shards".into());
    assert!(shards.contains("`shards`"), "{shards}");
    let old = refused(&|statement| {
        statement["predicateType"] = "https://model_signing/Digests/v0.1".into()
    });
    assert!(old.contains("Digests/v0.1"), "{old}");
}

#[test]
fn keys_of_other_kinds_are_errors_that_say_so() {
    let private = fs::read(fixture().join("key.pem")).unwrap();
    let public = fs::read(fixture().join("key.pub.pem")).unwrap();
    for error in [
        PrivateKey::from_pem(&public).unwrap_err(),
        PrivateKey::from_pem(b"").unwrap_err(),
        PrivateKey::from_pem(&[0xff; 8]).unwrap_err(),
        PrivateKey::from_pem(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n").unwrap_err(),
        PublicKey::from_pem(&private).unwrap_err(),
        PublicKey::from_pem(&public[..public.len() - 40]).unwrap_err(),
    ] {
        assert!(matches!(error, SignError::Key { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
    // The debug form of a private key shows nothing of it.
    assert_eq!(
        format!("{:?}", PrivateKey::from_pem(&private).unwrap()),
        "PrivateKey(SigningKey { .. })"
    );
}

#[test]
fn what_is_damaged_is_not_signed() {
    let (_directory, path) = copy();
    crate::verify::add_integrity(path.as_path(), None).unwrap();
    sign(&path.as_path().into(), &private(), usual()).unwrap();
    let mut data = fs::read(path.join("__0_0.distcp")).unwrap();
    *data.last_mut().unwrap() ^= 1;
    fs::write(path.join("__0_0.distcp"), data).unwrap();
    let error = sign(&path.as_path().into(), &private(), usual()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}
