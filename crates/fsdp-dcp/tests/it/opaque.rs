//! Values that hold objects of unknown types are opaque, not damaged: named, shown, copied, never built.

use std::path::{Path, PathBuf};

use fsdp_dcp::FileError;
use fsdp_dcp::checkpoint::open;
use fsdp_dcp::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_dcp::diff::{Tolerance, diff};
use fsdp_dcp::metadata::{BytesEntry, Entry};
use fsdp_dcp::reader::OpenOptions;
use fsdp_dcp::verify::{Level, add_integrity, verify};
use fsdp_layout::PlainValue;

fn foreign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The objects that `dcp.save` wrote, and the type of each.
const OBJECTS: [(&str, &str); 7] = [
    ("np0", "numpy._core.multiarray.scalar"),
    ("npa", "numpy._core.multiarray._reconstruct"),
    ("dc", "objs.TrainState"),
    ("cnt", "collections.Counter"),
    ("dq", "collections.deque"),
    ("en", "objs.Col"),
    ("cust", "objs.Cust"),
];

/// Returns the bytes of every value as they are stored.
fn items(path: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = open(path, OpenOptions::default()).unwrap();
    let values = checkpoint.metadata().values();
    let items = values.map(|(fqn, entry)| {
        let BytesEntry { stored: Some(stored) } = entry else { panic!("`{fqn}` is stored nowhere") };
        (fqn.to_owned(), checkpoint.read_item(fqn, stored).unwrap())
    });
    items.collect()
}

fn differences(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (open(a, OpenOptions::default()).unwrap(), open(b, OpenOptions::default()).unwrap());
    let mut found = Vec::new();
    diff(&*a, &*b, Tolerance::default(), &mut |key, _| found.push(key.to_owned())).unwrap();
    found
}

#[test]
fn a_sound_object_is_opaque_and_copied_byte_for_byte() {
    let parent = tempfile::tempdir().unwrap();
    for (name, of) in OBJECTS {
        let path = foreign(&format!("obj/{name}"));
        let source = open(&path, OpenOptions::default()).unwrap();
        let report = verify(&*source, Level::Deep, None).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
        let [(key, found)] = report.opaque.as_slice() else { panic!("{name}: {:?}", report.opaque) };
        assert_eq!(found, of);
        assert_eq!(source.read_value(key).unwrap_err().opaque_type().as_deref(), Some(of));
        let copy = parent.path().join(name);
        convert(&*source, &copy, OutputFormat::Dcp { ranks: 3 }, ConvertOptions::default()).unwrap();
        assert_eq!(items(&copy), items(&path), "{name}");
        assert!(verify(&*open(&copy, OpenOptions::default()).unwrap(), Level::Deep, None).unwrap().is_ok());
        assert_eq!(differences(&path, &copy), [""; 0]);
        add_integrity(&copy, None).unwrap();
    }
    // Two objects that differ are told apart.
    let (a, b) = (foreign("obj/np0"), foreign("obj/npa"));
    assert!(!differences(&a, &b).is_empty());
}

#[test]
fn an_object_that_would_be_lost_is_an_error_unless_it_may_be() {
    let parent = tempfile::tempdir().unwrap();
    for (name, of) in OBJECTS {
        let source = open(foreign(&format!("obj/{name}")), OpenOptions::default()).unwrap();
        for (number, target) in [
            OutputFormat::Torch,
            OutputFormat::SafetensorsFile,
            OutputFormat::SafetensorsDirectory { max_file_bytes: 100 },
            OutputFormat::SafetensorsShards { ranks: 2 },
        ]
        .into_iter()
        .enumerate()
        {
            let to = parent.path().join(format!("{name}-{number}"));
            let refused = convert(&*source, &to, target, ConvertOptions::default());
            let Err(FileError::Opaque { values }) = refused else { panic!("{name}: {refused:?}") };
            assert_eq!(values.iter().map(|(_, of)| of.as_str()).collect::<Vec<_>>(), [of]);
            assert!(!to.exists());
            let options = ConvertOptions { drop_opaque: true, ..ConvertOptions::default() };
            let done = convert(&*source, &to, target, options).unwrap();
            assert_eq!(done.dropped, values);
            let written = open(&to, OpenOptions::default()).unwrap();
            assert_eq!(written.metadata().tensors().count(), source.metadata().tensors().count());
            assert_eq!(written.metadata().entries.len() + 1, source.metadata().entries.len());
        }
    }
}

#[test]
fn an_object_is_shown_with_its_type_and_its_parts() {
    let shown = |name: &str| {
        let source = open(foreign(name), OpenOptions::default()).unwrap();
        let key = source.metadata().values().find(|(key, _)| source.read_value(key).is_err()).unwrap().0.to_owned();
        source.describe_value(&key).unwrap()
    };
    let get = |value: &PlainValue, name: &str| match value {
        PlainValue::Dict(items) => items.iter().find(|(key, _)| key.as_str() == Some(name)).unwrap().1.clone(),
        other => panic!("{other:?}"),
    };
    let dataclass = shown("obj/dc");
    assert_eq!(get(&dataclass, "$type"), "objs.TrainState".into());
    assert_eq!(get(&get(&dataclass, "state"), "step"), PlainValue::Int(3));
    // A tensor inside is read.
    assert!(matches!(get(&get(&get(&shown("obj/cust"), "state"), "b"), "x"), PlainValue::Tensor(_)));
    let PlainValue::Tuple(counter) = shown("obj/cnt") else { panic!("no tuple") };
    assert_eq!(get(&counter[0], "$type"), "collections.Counter".into());
    assert_eq!(get(&shown("multistep.pt"), "$type"), "collections.Counter".into());
}

#[test]
fn torch_files_open_around_what_is_opaque() {
    for (name, opaque, tensors) in [
        ("module.pt", &[][..], 9),
        ("wo_sparse.pt", &["torch._utils._rebuild_sparse_tensor"], 1),
        ("wo_cplx.pt", &["__builtin__.complex"], 1),
        ("multistep.pt", &["collections.Counter"], 0),
    ] {
        let source = open(foreign(name), OpenOptions::default()).unwrap();
        let report = verify(&*source, Level::Deep, None).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
        assert_eq!(report.opaque.iter().map(|(_, of)| of.as_str()).collect::<Vec<_>>(), opaque, "{name}");
        assert!(source.metadata().tensors().count() >= tensors, "{name}");
    }
    // A module that was saved whole: its tensors by their paths, and a word about what it was.
    let source = open(foreign("module.pt"), OpenOptions::default()).unwrap();
    let keys: Vec<&str> = source.metadata().tensors().map(|(key, _)| key).collect();
    assert_eq!(keys[..3], ["0.weight", "0.bias", "1.weight"]);
    assert!(keys.contains(&"1.running_mean") && keys.contains(&"2.bias"));
    let parent = tempfile::tempdir().unwrap();
    let done = convert(&*source, parent.path().join("m.pt"), OutputFormat::Torch, ConvertOptions::default()).unwrap();
    assert!(done.containers[0].contains("torch.nn.modules.container.Sequential"), "{:?}", done.containers);
}

/// Megatron-core's `.metadata` holds objects of its planner, and its data `ShardedObject`s.
#[test]
fn checkpoints_of_megatron_core_open_and_reshard() {
    let parent = tempfile::tempdir().unwrap();
    let path = foreign("mcore");
    let source = open(&path, OpenOptions::default()).unwrap();
    let report = verify(&*source, Level::Deep, None).unwrap();
    assert!(report.is_ok() && report.tensors > 0, "{:?}", report.problems);
    let copy = parent.path().join("copy");
    let done = convert(&*source, &copy, OutputFormat::Dcp { ranks: 3 }, ConvertOptions::default()).unwrap();
    assert_eq!(done.copied, ["common.pt", "metadata.json"]);
    assert_eq!(differences(&path, &copy), [""; 0]);
    let has_opaque = |fqn: &str| report.opaque.iter().any(|(key, _)| key == fqn);
    for ((key, first), (_, second)) in items(&path).into_iter().zip(items(&copy)) {
        assert!(!has_opaque(&key) || first == second, "{key}");
    }
    assert!(source.metadata().entries.values().any(|entry| matches!(entry, Entry::Tensor(_))));
}
