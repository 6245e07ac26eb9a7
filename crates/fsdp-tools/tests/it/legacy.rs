//! Files of torch before 1.6, which newer torches still write on demand.

use std::path::{Path, PathBuf};

use fsdp_formats::checkpoint::{Format, open};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{ErrorKind, Failure, PlainValue, PythonType};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn differences(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (
        open(a, OpenOptions::default()).unwrap(),
        open(b, OpenOptions::default()).unwrap(),
    );
    let mut found = Vec::new();
    diff(&*a, &*b, DiffOptions::default(), &mut |key, difference| {
        found.push(format!("{key}: {difference:?}"))
    })
    .unwrap();
    found
}

#[test]
fn a_legacy_file_holds_what_the_new_one_does() {
    let (legacy, new) = (fixture("legacy.pt"), fixture("full.pth"));
    let source = open(&legacy, OpenOptions::default()).unwrap();
    assert_eq!(source.format(), Format::Torch);
    assert!(source.metadata().tensors().count() > 20);
    assert!(
        verify(&*source, Level::Deep, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
    assert_eq!(differences(&legacy, &new), [""; 0]);
    let parent = tempfile::tempdir().unwrap();
    for (number, target) in [
        OutputFormat::Torch,
        OutputFormat::Dcp { ranks: 2 },
        OutputFormat::SafetensorsFile,
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(number.to_string());
        convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        assert_eq!(differences(&to, &new), [""; 0]);
    }
}

#[test]
fn all_protocols_of_pickle_hold_the_same() {
    let first = fixture("legacy_protocol_2.pt");
    for name in [
        "legacy_protocol_3.pt",
        "legacy_protocol_4.pt",
        "legacy_protocol_5.pt",
        "zip_protocol_5.pt",
    ] {
        assert_eq!(differences(&first, &fixture(name)), [""; 0], "{name}");
    }
    let source = open(&first, OpenOptions::default()).unwrap();
    let tuple = PlainValue::Tuple(vec![PlainValue::Int(2), PlainValue::Int(3)]);
    for (key, value) in [
        ("dt", PlainValue::typed(PythonType::DType, "torch.bfloat16")),
        ("dev", PlainValue::typed(PythonType::Device, "cuda:1")),
        ("size", PlainValue::typed(PythonType::Size, tuple)),
        (
            "f",
            PlainValue::typed(
                PythonType::FrozenSet,
                PlainValue::Set(vec![PlainValue::Int(3)]),
            ),
        ),
        (
            "ba",
            PlainValue::typed(PythonType::ByteArray, PlainValue::Bytes(b"xy".to_vec())),
        ),
    ] {
        assert_eq!(source.read_value(key).unwrap(), value, "{key}");
    }
}

#[test]
fn protocols_before_2_are_refused_with_advice() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("old.pt");
    for rest in ["\n.I1001\n.", "\n.M\u{3}\u{3}."] {
        std::fs::write(&path, format!("L119547037146038801333356L{rest}")).unwrap();
        let error = open(&path, OpenOptions::default()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::UnsupportedVersion);
        assert!(
            std::error::Error::source(&error)
                .unwrap()
                .to_string()
                .contains("`pickle_protocol` 0 or 1"),
            "{error:?}"
        );
    }
}

#[test]
fn every_prefix_of_a_legacy_file_is_an_error() {
    let bytes = std::fs::read(fixture("legacy.pt")).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file.pt");
    for end in (0..bytes.len()).step_by(13).chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert!(
            open(&path, OpenOptions::default()).is_err(),
            "prefix of {end} bytes"
        );
    }
}

#[test]
fn tensors_whose_conjugation_or_negation_is_pending_are_not_read_as_what_their_storage_holds() {
    for (name, advice) in [
        ("conjugated.pt", "resolve_conj"),
        ("negated.pt", "resolve_neg"),
    ] {
        let source = open(fixture(name), OpenOptions::default()).unwrap();
        let opaque = source.opaque_type("z").unwrap().unwrap();
        assert!(opaque.contains(advice), "{opaque}");
        assert!(source.read_value("z").is_err());
        assert_eq!(source.metadata().tensor("w").unwrap().shape, [2]);
        let parent = tempfile::tempdir().unwrap();
        let converted = convert(
            &*source,
            parent.path().join("c"),
            OutputFormat::Torch,
            ConvertOptions::default(),
        );
        assert!(converted.unwrap_err().to_string().contains("`z`"));
    }
}

#[test]
fn a_module_that_was_saved_whole_opens_in_the_old_format_too() {
    let source = open(fixture("legacy_module.pt"), OpenOptions::default()).unwrap();
    let tensors: Vec<(&str, &[usize])> = source
        .metadata()
        .tensors()
        .map(|(fqn, tensor)| (fqn, tensor.shape.as_slice()))
        .collect();
    assert_eq!(tensors, [("0.weight", &[3, 2][..]), ("0.bias", &[3])]);
    assert!(
        verify(&*source, Level::Deep, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
}
