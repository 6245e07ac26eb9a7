//! Values that hold objects of unknown types are opaque, not damaged: named, shown, copied, never
//! built.

use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::metadata::{BytesEntry, Entry};
use fsdp_formats::plan::LoadRequest;
use fsdp_formats::reader::{CheckpointReader, OpenOptions};
use fsdp_layout::{DType, PathPart, PlainValue, TensorBox};
use fsdp_tools::convert::{Cast, ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

fn foreign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// The objects that `dcp.save` wrote, and the type of each.
const OBJECTS: [(&str, &str); 5] = [
    ("dc", "objs.TrainState"),
    ("cnt", "collections.Counter"),
    ("dq", "collections.deque"),
    ("en", "objs.Col"),
    ("cust", "objs.Cust"),
];

/// Returns the bytes of every value of a DCP directory as they are stored.
fn items(path: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = CheckpointReader::open(path).unwrap();
    let values = checkpoint.metadata().values();
    let items = values.map(|(fqn, entry)| {
        let BytesEntry {
            stored: Some(stored),
        } = entry
        else {
            panic!("`{fqn}` is stored nowhere")
        };
        (fqn.to_owned(), checkpoint.read_item(fqn, stored).unwrap())
    });
    items.collect()
}

fn differences(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (
        open(a, OpenOptions::default()).unwrap(),
        open(b, OpenOptions::default()).unwrap(),
    );
    let mut found = Vec::new();
    diff(&*a, &*b, DiffOptions::default(), &mut |key, _| {
        found.push(key.to_owned())
    })
    .unwrap();
    found
}

#[test]
fn a_sound_object_is_opaque_and_copied_byte_for_byte() {
    let parent = tempfile::tempdir().unwrap();
    for (name, of) in OBJECTS {
        let path = foreign(&format!("obj/{name}"));
        let source = open(&path, OpenOptions::default()).unwrap();
        let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
        let [(key, found)] = report.opaque.as_slice() else {
            panic!("{name}: {:?}", report.opaque)
        };
        assert_eq!(found, of);
        assert_eq!(
            source.read_value(key).unwrap_err().opaque_type().as_deref(),
            Some(of)
        );
        let copy = parent.path().join(name);
        convert(
            &*source,
            &copy,
            OutputFormat::Dcp { ranks: 3 },
            ConvertOptions::default(),
        )
        .unwrap();
        assert_eq!(items(&copy), items(&path), "{name}");
        assert!(
            verify(
                &*open(&copy, OpenOptions::default()).unwrap(),
                Level::Deep,
                VerifyOptions::default()
            )
            .unwrap()
            .is_ok()
        );
        assert_eq!(differences(&path, &copy), [""; 0]);
        add_integrity(&copy, None).unwrap();
    }
    // Two objects that differ are told apart.
    let (a, b) = (foreign("obj/dc"), foreign("obj/cust"));
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
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 100,
            },
            OutputFormat::SafetensorsShards { ranks: 2 },
        ]
        .into_iter()
        .enumerate()
        {
            let to = parent.path().join(format!("{name}-{number}"));
            let refused = convert(&*source, &to, target, ConvertOptions::default());
            let Err(FileError::Opaque { values }) = refused else {
                panic!("{name}: {refused:?}")
            };
            assert_eq!(
                values.iter().map(|(_, of)| of.as_str()).collect::<Vec<_>>(),
                [of]
            );
            assert!(!to.exists());
            let options = ConvertOptions {
                drop_opaque: true,
                ..ConvertOptions::default()
            };
            let done = convert(&*source, &to, target, options).unwrap();
            assert_eq!(done.dropped, values);
            let written = open(&to, OpenOptions::default()).unwrap();
            assert_eq!(
                written.metadata().tensors().count(),
                source.metadata().tensors().count()
            );
            assert_eq!(
                written.metadata().entries.len() + 1,
                source.metadata().entries.len()
            );
        }
    }
}

#[test]
fn an_object_is_shown_with_its_type_and_its_parts() {
    let shown = |name: &str| {
        let source = open(foreign(name), OpenOptions::default()).unwrap();
        let key = source
            .metadata()
            .values()
            .find(|(key, _)| source.read_value(key).is_err())
            .unwrap()
            .0
            .to_owned();
        source.describe_value(&key).unwrap()
    };
    let get = |value: &PlainValue, name: &str| match value {
        PlainValue::Dict(items) => items
            .iter()
            .find(|(key, _)| key.as_str() == Some(name))
            .unwrap()
            .1
            .clone(),
        other => panic!("{other:?}"),
    };
    let dataclass = shown("obj/dc");
    assert_eq!(get(&dataclass, "$type"), "objs.TrainState".into());
    assert_eq!(get(&get(&dataclass, "state"), "step"), PlainValue::Int(3));
    // A tensor inside is read.
    assert!(matches!(
        get(&get(&get(&shown("obj/cust"), "state"), "b"), "x"),
        PlainValue::Tensor(_)
    ));
    let PlainValue::Tuple(counter) = shown("obj/cnt") else {
        panic!("no tuple")
    };
    assert_eq!(get(&counter[0], "$type"), "collections.Counter".into());
    assert_eq!(
        get(&shown("multistep.pt"), "$type"),
        "collections.Counter".into()
    );
}

/// A copy of a DCP checkpoint keeps what a plain value does not tell: that it is a dtype, a size or
/// a path.
#[test]
fn a_copy_has_the_items_of_all_values_as_they_are_under_any_name() {
    let parent = tempfile::tempdir().unwrap();
    let path = foreign("values");
    let source = open(&path, OpenOptions::default()).unwrap();
    let own = items(&path);
    assert_eq!(own.len(), 10);
    let (copy, renamed) = (parent.path().join("copy"), parent.path().join("renamed"));
    convert(
        &*source,
        &copy,
        OutputFormat::Dcp { ranks: 3 },
        ConvertOptions::default(),
    )
    .unwrap();
    assert!(items(&copy) == own);
    let view = View::new(&*source, |key| Rename::To(format!("of.{key}")), None).unwrap();
    convert(
        &view,
        &renamed,
        OutputFormat::Dcp { ranks: 2 },
        ConvertOptions::default(),
    )
    .unwrap();
    assert!(
        items(&renamed)
            .iter()
            .all(|(key, item)| own.contains(&(key["of.".len()..].to_owned(), item.clone())))
    );
    for copy in [copy, renamed] {
        assert!(
            verify(
                &*open(copy, OpenOptions::default()).unwrap(),
                Level::Deep,
                VerifyOptions::default()
            )
            .unwrap()
            .is_ok()
        );
    }
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
        let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
        assert_eq!(
            report
                .opaque
                .iter()
                .map(|(_, of)| of.as_str())
                .collect::<Vec<_>>(),
            opaque,
            "{name}"
        );
        assert!(source.metadata().tensors().count() >= tensors, "{name}");
    }
    // A module that was saved whole: its tensors by their paths, and a word about what it was.
    let source = open(foreign("module.pt"), OpenOptions::default()).unwrap();
    let keys: Vec<&str> = source.metadata().tensors().map(|(key, _)| key).collect();
    assert_eq!(keys[..3], ["0.weight", "0.bias", "1.weight"]);
    assert!(keys.contains(&"1.running_mean") && keys.contains(&"2.bias"));
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("m.pt");
    let done = convert(
        &*source,
        &to,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    // Written as its state dict, which is flat.
    let written = open(to, OpenOptions::default()).unwrap();
    let paths = written.metadata().planner_data.as_ref().unwrap();
    assert!(
        paths.len() == 9
            && paths
                .iter()
                .all(|(key, path)| path.0 == [PathPart::Key(key.clone())]),
        "{paths:?}"
    );
    assert!(
        done.containers[0].contains("torch.nn.modules.container.Sequential"),
        "{:?}",
        done.containers
    );
}

/// Megatron-core's `.metadata` holds objects of its planner, and its data `ShardedObject`s.
#[test]
fn a_tensor_of_a_device_without_storages_is_a_tensor() {
    let source = open(foreign("on_device.pt"), OpenOptions::default()).unwrap();
    let mut elements = [0; 8];
    let whole = TensorBox::whole(&[2]);
    source.read_box("w", &whole, &mut elements).unwrap();
    assert_eq!(
        *elements.as_chunks().0,
        [1.5f32, -2.0].map(f32::to_le_bytes)
    );
}

#[test]
fn checkpoints_of_megatron_core_open_and_reshard() {
    let parent = tempfile::tempdir().unwrap();
    let path = foreign("mcore");
    let source = open(&path, OpenOptions::default()).unwrap();
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report.is_ok() && report.tensors > 0,
        "{:?}",
        report.problems
    );
    let copy = parent.path().join("copy");
    let done = convert(
        &*source,
        &copy,
        OutputFormat::Dcp { ranks: 3 },
        ConvertOptions::default(),
    )
    .unwrap();
    assert_eq!(done.copied, ["common.pt", "metadata.json"]);
    assert_eq!(differences(&path, &copy), [""; 0]);
    let has_opaque = |fqn: &str| report.opaque.iter().any(|(key, _)| key == fqn);
    for ((key, first), (_, second)) in items(&path).into_iter().zip(items(&copy)) {
        assert!(!has_opaque(&key) || first == second, "{key}");
    }
    assert!(
        source
            .metadata()
            .entries
            .values()
            .any(|entry| matches!(entry, Entry::Tensor(_)))
    );
}

/// The opaque tensors that torch and torchao wrote, their types, and the plain tensors beside them.
const TENSORS: [(&str, &[&str], &str, &str); 2] = [
    (
        "int8",
        &["0.weight", "1.weight"],
        "torchao.quantization.Int8Tensor",
        "0.bias",
    ),
    (
        "conj",
        &["model.c"],
        "torch.Tensor (its conjugation is pending: `resolve_conj`)",
        "model.w",
    ),
];

/// Returns the boxes of a tensor and the bytes of each as they are stored.
fn stored_items(checkpoint: &dyn Checkpoint, fqn: &str) -> Vec<(TensorBox, Vec<u8>)> {
    let chunks = checkpoint.metadata().tensor(fqn).unwrap().chunks.iter();
    let mut items: Vec<_> = chunks
        .map(|chunk| {
            let stored = chunk.stored.as_ref().unwrap();
            let mut bytes = vec![0; stored.length as usize];
            checkpoint.read_stored(fqn, stored, 0, &mut bytes).unwrap();
            (chunk.bounds.clone(), bytes)
        })
        .collect();
    items.sort_by(|(a, _), (b, _)| a.cmp(b));
    items
}

#[test]
fn a_tensor_of_a_subclass_is_opaque_and_copied_byte_for_byte() {
    let parent = tempfile::tempdir().unwrap();
    for (name, tensors, of, _) in TENSORS {
        let path = foreign(&format!("opaque_tensors/{name}"));
        let source = open(&path, OpenOptions::default()).unwrap();
        for level in [Level::Sizes, Level::Hashes, Level::Deep] {
            let report = verify(&*source, level, VerifyOptions::default()).unwrap();
            assert!(report.is_ok(), "{name}: {:?}", report.problems);
            let expected: Vec<_> = tensors
                .iter()
                .map(|&fqn| (fqn.to_owned(), of.to_owned()))
                .collect();
            assert_eq!(report.opaque, expected);
        }
        for ranks in [1, 3] {
            let copy = parent.path().join(format!("{name}-{ranks}"));
            convert(
                &*source,
                &copy,
                OutputFormat::Dcp { ranks },
                ConvertOptions::default(),
            )
            .unwrap();
            let copied = open(&copy, OpenOptions::default()).unwrap();
            for fqn in tensors {
                assert_eq!(
                    copied.metadata().tensor(fqn).unwrap().shape,
                    source.metadata().tensor(fqn).unwrap().shape
                );
                assert_eq!(
                    stored_items(&*copied, fqn),
                    stored_items(&*source, fqn),
                    "{fqn}"
                );
            }
            let report = verify(&*copied, Level::Deep, VerifyOptions::default()).unwrap();
            assert!(
                report.is_ok() && report.digests == copied.metadata().entries.len(),
                "{:?}",
                report.problems
            );
            assert_eq!(differences(&path, &copy), [""; 0]);
            // A copy of the copy keeps the digests.
            let again = parent.path().join(format!("{name}-{ranks}-again"));
            convert(
                &*copied,
                &again,
                OutputFormat::Dcp { ranks: 2 },
                ConvertOptions::default(),
            )
            .unwrap();
            assert_eq!(differences(&copy, &again), [""; 0]);
        }
        let sealed = parent.path().join(format!("{name}-sealed"));
        crate::foreign::copy(&path, &sealed);
        add_integrity(&sealed, None).unwrap();
        assert!(
            verify(
                &*open(&sealed, OpenOptions::default()).unwrap(),
                Level::Deep,
                VerifyOptions::default()
            )
            .unwrap()
            .is_ok()
        );
    }
}

#[test]
fn a_changed_byte_of_an_opaque_tensor_is_a_difference_and_a_problem() {
    let parent = tempfile::tempdir().unwrap();
    let (path, copy) = (foreign("opaque_tensors/int8"), parent.path().join("copy"));
    crate::foreign::copy(&path, &copy);
    let source = open(&path, OpenOptions::default()).unwrap();
    let stored = source.metadata().tensor("0.weight").unwrap().chunks[0]
        .stored
        .clone()
        .unwrap();
    // In the middle of the item lie the integers.
    let file = copy.join(&stored.relative_path);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[(stored.offset + stored.length / 2) as usize] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(differences(&path, &copy), ["0.weight"]);
    let report = verify(
        &*open(&copy, OpenOptions::default()).unwrap(),
        Level::Hashes,
        VerifyOptions::default(),
    )
    .unwrap();
    assert!(!report.is_ok());
    // An item that ends too early is one too.
    let mut bytes = std::fs::read(path.join(&stored.relative_path)).unwrap();
    bytes.truncate(bytes.len() - 10);
    std::fs::write(&file, bytes).unwrap();
    let report = verify(
        &*open(&copy, OpenOptions::default()).unwrap(),
        Level::Sizes,
        VerifyOptions::default(),
    )
    .unwrap();
    assert!(!report.is_ok());
}

#[test]
fn an_opaque_tensor_that_would_be_lost_is_an_error_unless_it_may_be() {
    let parent = tempfile::tempdir().unwrap();
    for (name, tensors, of, plain) in TENSORS {
        let source = open(
            foreign(&format!("opaque_tensors/{name}")),
            OpenOptions::default(),
        )
        .unwrap();
        let to = parent.path().join(name);
        let refused = convert(
            &*source,
            &to,
            OutputFormat::SafetensorsFile,
            ConvertOptions::default(),
        );
        let Err(FileError::Opaque { values }) = refused else {
            panic!("{name}: {refused:?}")
        };
        assert_eq!(
            values,
            tensors
                .iter()
                .map(|&fqn| (fqn.to_owned(), of.to_owned()))
                .collect::<Vec<_>>()
        );
        let options = ConvertOptions {
            drop_opaque: true,
            ..ConvertOptions::default()
        };
        let done = convert(&*source, &to, OutputFormat::SafetensorsFile, options).unwrap();
        assert_eq!(done.dropped, values);
        let written = open(&to, OpenOptions::default()).unwrap();
        assert!(written.metadata().tensor(plain).is_some());
        assert_eq!(
            written.metadata().entries.len() + tensors.len(),
            source.metadata().entries.len()
        );
        // A selection without them needs no word; a cast leaves them as they are.
        let view = View::new(
            &*source,
            |fqn| {
                if tensors.contains(&fqn) {
                    Rename::Drop
                } else {
                    Rename::Keep
                }
            },
            None,
        );
        let alone = parent.path().join(format!("{name}-alone"));
        convert(
            &view.unwrap(),
            &alone,
            OutputFormat::Torch,
            ConvertOptions::default(),
        )
        .unwrap();
        let cast = View::new(
            &*source,
            |_| Rename::Keep,
            Some(Cast {
                dtype: DType::F16,
                with_optimizer: false,
            }),
        )
        .unwrap();
        let cast_to = parent.path().join(format!("{name}-cast"));
        convert(
            &cast,
            &cast_to,
            OutputFormat::Dcp { ranks: 2 },
            ConvertOptions::default(),
        )
        .unwrap();
        let cast = open(&cast_to, OpenOptions::default()).unwrap();
        for fqn in tensors {
            assert_eq!(stored_items(&*cast, fqn), stored_items(&*source, fqn));
        }
    }
}

#[test]
fn reading_an_opaque_tensor_names_its_type() {
    let source = open(foreign("opaque_tensors/int8"), OpenOptions::default()).unwrap();
    let whole = TensorBox::whole(&[64, 64]);
    let error = source
        .read_box("0.weight", &whole, &mut vec![0; 64 * 64 * 2])
        .unwrap_err();
    assert_eq!(
        error.opaque_type().as_deref(),
        Some("torchao.quantization.Int8Tensor")
    );
    let request = LoadRequest {
        fqn: "0.weight".to_owned(),
        dtype: DType::BF16,
        shape: vec![64, 64],
        boxes: vec![TensorBox::whole(&[64, 64])],
    };
    let error = source.check_read(&[request]).unwrap_err();
    assert_eq!(
        error.opaque_type().as_deref(),
        Some("torchao.quantization.Int8Tensor")
    );
    // It is described with the dtypes and shapes of the tensors in it, but without their elements.
    let shown = format!("{:?}", source.describe_value("0.weight").unwrap());
    assert!(
        shown.contains("Int8Tensor") && shown.len() < 4000,
        "{shown}"
    );
}

#[test]
fn looking_for_what_is_opaque_reads_no_elements() {
    let path = foreign("obj/cust");
    let source = CheckpointReader::open(&path).unwrap();
    let before = source.bytes_read();
    let fqns: Vec<String> = source
        .metadata()
        .values()
        .map(|(fqn, _)| fqn.to_owned())
        .collect();
    fqns.iter()
        .for_each(|fqn| drop(source.opaque_type(fqn).unwrap()));
    let looked = source.bytes_read() - before;
    fqns.iter()
        .for_each(|fqn| drop(source.describe_value(fqn).unwrap()));
    let read = source.bytes_read() - before - looked;
    assert!(looked < read, "{looked} of {read}");
}

#[test]
fn text_that_is_no_text_makes_only_its_value_opaque() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(foreign("surrogate.pt"), OpenOptions::default()).unwrap();
    let report = verify(&*source, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok());
    let to = parent.path().join("to.pt");
    let refused = convert(
        &*source,
        &to,
        OutputFormat::Torch,
        ConvertOptions::default(),
    );
    let Err(FileError::Opaque { values }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(
        values,
        [(
            "path".to_owned(),
            "builtins.str (with surrogates)".to_owned()
        )]
    );
    let options = ConvertOptions {
        drop_opaque: true,
        ..ConvertOptions::default()
    };
    let converted = convert(&*source, &to, OutputFormat::Torch, options).unwrap();
    assert_eq!(converted.tensors, 1);
}
