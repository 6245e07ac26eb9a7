//! Files of torch before 1.6, which newer torches still write on demand.

use std::path::{Path, PathBuf};

use fsdp_dcp::checkpoint::{Format, open};
use fsdp_dcp::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_dcp::diff::{Tolerance, diff};
use fsdp_dcp::reader::OpenOptions;
use fsdp_dcp::verify::{Level, verify};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn differences(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (open(a, OpenOptions::default()).unwrap(), open(b, OpenOptions::default()).unwrap());
    let mut found = Vec::new();
    diff(&*a, &*b, Tolerance::default(), &mut |key, difference| found.push(format!("{key}: {difference:?}"))).unwrap();
    found
}

#[test]
fn a_legacy_file_holds_what_the_new_one_does() {
    let (legacy, new) = (fixture("legacy.pt"), fixture("full.pth"));
    let source = open(&legacy, OpenOptions::default()).unwrap();
    assert_eq!(source.format(), Format::Torch);
    assert!(source.metadata().tensors().count() > 20);
    assert!(verify(&*source, Level::Deep, None).unwrap().is_ok());
    assert_eq!(differences(&legacy, &new), [""; 0]);
    let parent = tempfile::tempdir().unwrap();
    for (number, target) in
        [OutputFormat::Torch, OutputFormat::Dcp { ranks: 2 }, OutputFormat::SafetensorsFile].into_iter().enumerate()
    {
        let to = parent.path().join(number.to_string());
        convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        assert_eq!(differences(&to, &new), [""; 0]);
    }
}

#[test]
fn every_prefix_of_a_legacy_file_is_an_error() {
    let bytes = std::fs::read(fixture("legacy.pt")).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file.pt");
    for end in (0..bytes.len()).step_by(13).chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert!(open(&path, OpenOptions::default()).is_err(), "prefix of {end} bytes");
    }
}

#[test]
fn tensors_whose_conjugation_or_negation_is_pending_are_not_read_as_what_their_storage_holds() {
    for (name, advice) in [("conjugated.pt", "resolve_conj"), ("negated.pt", "resolve_neg")] {
        let source = open(fixture(name), OpenOptions::default()).unwrap();
        let opaque = source.opaque_type("z").unwrap().unwrap();
        assert!(opaque.contains(advice), "{opaque}");
        assert!(source.read_value("z").is_err());
        assert_eq!(source.metadata().tensor("w").unwrap().shape, [2]);
        let parent = tempfile::tempdir().unwrap();
        let converted = convert(&*source, parent.path().join("c"), OutputFormat::Torch, ConvertOptions::default());
        assert!(converted.unwrap_err().to_string().contains("`z`"));
    }
}
