//! Files of `torch.save` beside a DCP directory's own: what is in them is part of the tree, and a
//! copy has them as they are.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Format};
use fsdp_formats::internals::encode_value;
use fsdp_formats::reader::CheckpointReader;
use fsdp_layout::{DType, ErrorKind, Failure as _, PlainTensor, PlainValue, with_causes};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::map::{Map, Mapped, Values};
use fsdp_tools::merge::Average;
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::foreign::{assert_converts, copy, damage, differences, fixture, opened, refused};

#[test]
fn what_lightning_keeps_in_its_own_file_is_in_the_tree() {
    let path = fixture("lightning");
    let source = opened(&path);
    assert_eq!(source.format(), Format::Dcp);
    assert_eq!(
        source.read_value("global_step").unwrap(),
        PlainValue::Int(3)
    );
    assert_eq!(
        source.read_value("hyper_parameters.lr").unwrap(),
        PlainValue::Float(0.001)
    );
    assert_eq!(
        source.read_value("lr_schedulers.0.last_epoch").unwrap(),
        PlainValue::Int(0)
    );
    // Nothing of the directory itself is lost or renamed.
    let own = CheckpointReader::open(&path).unwrap();
    assert!(
        own.metadata()
            .entries
            .keys()
            .all(|key| source.metadata().entries.contains_key(key))
    );
    assert_converts(&*source);
    // An empty dict of that file is one in a file of torch too.
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("whole.pt");
    let done = convert(
        &*source,
        &to,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    assert_eq!(done.left_behind, [""; 0]);
    assert_eq!(differences(&*source, &*opened(&to)), [""; 0]);
}

#[test]
fn what_megatron_keeps_in_its_own_file_is_in_the_tree_and_named_where_it_is_opaque() {
    let source = opened(&fixture("mcore"));
    assert_eq!(
        source.read_value("iteration").unwrap(),
        PlainValue::Int(100)
    );
    assert_eq!(
        source
            .read_value("optimizer.optimizer.param_groups.0.step")
            .unwrap(),
        PlainValue::Int(100)
    );
    assert_eq!(
        source.opaque_type("args").unwrap().as_deref(),
        Some("argparse.Namespace")
    );
    let parent = tempfile::tempdir().unwrap();
    // A copy has the file as it is, and so its opaque value. Another format has all but that one,
    // if it is told to drop it.
    for (name, target, lost) in [
        ("copy", OutputFormat::Dcp { ranks: 3 }, &[][..]),
        (
            "file",
            OutputFormat::SafetensorsFile,
            &["args: OnlyInFirst"],
        ),
        ("torch", OutputFormat::Torch, &["args: OnlyInFirst"]),
    ] {
        let to = parent.path().join(name);
        convert(
            &*source,
            &to,
            target,
            ConvertOptions {
                drop_opaque: true,
                ..ConvertOptions::default()
            },
        )
        .unwrap();
        let found = differences(&*source, &*opened(&to));
        assert_eq!(found, lost, "{target:?}");
    }
    let refused = convert(
        &*source,
        parent.path().join("m"),
        OutputFormat::Torch,
        ConvertOptions::default(),
    );
    let Err(FileError::Opaque { values }) = refused else {
        panic!("{refused:?}")
    };
    assert!(values.iter().any(|(key, _)| key == "args"), "{values:?}");
}

/// The names of the fixtures, and of the files that are beside a directory's own in them.
const FILES: [(&str, &str); 2] = [("lightning", "meta.pt"), ("mcore", "common.pt")];

#[test]
fn a_copy_has_the_file_as_it_is_where_all_of_it_is_wanted() {
    let parent = tempfile::tempdir().unwrap();
    for (name, file) in FILES {
        let path = fixture(name);
        let source = opened(&path);
        let beside = opened(&path.join(file));
        let is_beside = |key: &str| beside.metadata().entries.contains_key(key);
        let first = source
            .metadata()
            .tensors()
            .map(|(key, _)| key)
            .find(|key| !is_beside(key))
            .unwrap()
            .to_owned();
        let whole = View::new(&*source, |_| Rename::Keep, None).unwrap();
        let keep = |key: &str| {
            if key == first || is_beside(key) {
                Rename::Keep
            } else {
                Rename::Drop
            }
        };
        let one = View::new(&*source, keep, None).unwrap();
        let all = beside.metadata().entries.len();
        for (number, (view, keys)) in [(&whole, source.metadata().entries.len()), (&one, 1 + all)]
            .into_iter()
            .enumerate()
        {
            let to = parent.path().join(format!("{name}-{number}"));
            let done = convert(
                view,
                &to,
                OutputFormat::Dcp { ranks: 2 },
                ConvertOptions::default(),
            )
            .unwrap();
            assert!(
                done.copied.iter().any(|copied| copied == file),
                "{:?}",
                done.copied
            );
            assert_eq!(
                std::fs::read(to.join(file)).unwrap(),
                std::fs::read(path.join(file)).unwrap()
            );
            let copied = opened(&to);
            assert_eq!(copied.metadata().entries.len(), keys);
            assert!(
                verify(&*copied, Level::Deep, VerifyOptions::default())
                    .unwrap()
                    .is_ok()
            );
            // The framework finds in `.metadata` what it found there before, and nothing of the
            // other file.
            let own = CheckpointReader::open(&to).unwrap();
            let of = CheckpointReader::open(&path).unwrap();
            assert!(
                number > 0
                    || own
                        .metadata()
                        .entries
                        .keys()
                        .eq(of.metadata().entries.keys())
            );
            assert!(
                number > 0
                    || own.metadata().planner_data.is_some()
                        == of.metadata().planner_data.is_some()
            );
        }
    }
}

#[test]
fn a_copy_has_no_more_than_was_selected_of_such_a_file() {
    let parent = tempfile::tempdir().unwrap();
    for (name, file) in FILES {
        let path = fixture(name);
        let source = opened(&path);
        let beside = opened(&path.join(file));
        let opaque = |key: &str| beside.opaque_type(key).unwrap().is_some();
        let excluded = beside
            .metadata()
            .entries
            .keys()
            .find(|key| !opaque(key))
            .unwrap()
            .clone();
        let first = source.metadata().tensors().next().unwrap().0.to_owned();
        let but_one = View::new(
            &*source,
            |key| {
                if key == excluded {
                    Rename::Drop
                } else {
                    Rename::Keep
                }
            },
            None,
        )
        .unwrap();
        let one = View::new(
            &*source,
            |key| {
                if key == first {
                    Rename::Keep
                } else {
                    Rename::Drop
                }
            },
            None,
        )
        .unwrap();
        let renamed = View::new(&*source, |key| Rename::To(format!("of.{key}")), None).unwrap();
        for (number, view) in [&but_one, &one, &renamed].into_iter().enumerate() {
            let to = parent.path().join(format!("{name}-{number}"));
            let options = ConvertOptions {
                drop_opaque: true,
                ..ConvertOptions::default()
            };
            let done = convert(view, &to, OutputFormat::Dcp { ranks: 2 }, options).unwrap();
            // Where some of it is written with everything else, nothing is left behind.
            assert_eq!(
                done.left_behind.iter().any(|left| left == file),
                number == 1,
                "{:?}",
                done.left_behind
            );
            assert!(!done.copied.iter().any(|copied| copied == file) && !to.join(file).exists());
            assert!(
                number == 1 || done.dropped.is_empty() == (name == "lightning"),
                "{:?}",
                done.dropped
            );
            let lost: Vec<String> = done
                .dropped
                .iter()
                .map(|(key, _)| format!("{key}: OnlyInFirst"))
                .collect();
            assert_eq!(differences(view, &*opened(&to)), lost);
        }
        // Its opaque values are named before anything is written.
        let refused = convert(
            &but_one,
            parent.path().join("no"),
            OutputFormat::Dcp { ranks: 1 },
            ConvertOptions::default(),
        );
        assert_eq!(
            matches!(refused, Err(FileError::Opaque { .. })),
            name == "mcore",
            "{refused:?}"
        );
    }
}

/// Opens a copy of Lightning's fixture whose `meta.pt` holds an average of weights, a tensor of 2 x
/// 2 numbers, and two counts.
fn with_average(parent: &Path, numbers: [f32; 4]) -> Box<dyn Checkpoint> {
    let path = changed(parent, "lightning");
    let data = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let average = PlainValue::Tensor(PlainTensor {
        dtype: DType::F32,
        shape: vec![2, 2],
        data,
    });
    let items = [
        ("ema", PlainValue::Dict(vec![("w".into(), average)])),
        ("first", PlainValue::Int(1)),
        ("second", PlainValue::Int(2)),
    ];
    let items = items
        .into_iter()
        .map(|(key, value)| (key.into(), value))
        .collect();
    std::fs::write(
        path.join("meta.pt"),
        encode_value(&PlainValue::Dict(items)).unwrap(),
    )
    .unwrap();
    opened(&path)
}

#[test]
fn what_is_made_of_such_a_file_is_written_and_the_file_is_not_copied() {
    let parent = tempfile::tempdir().unwrap();
    let a = with_average(&parent.path().join("a"), [1.0, 2.0, 3.0, 4.0]);
    let b = with_average(&parent.path().join("b"), [5.0, 6.0, 7.0, 8.0]);
    let average = Average::new(vec![&*a, &*b], &[]).unwrap();
    let map = Map::parse("ema.w -> ema.w | transpose", &Values::new()).unwrap();
    let mapped = Mapped::new(&*a, &map).unwrap();
    let exchange = |key: &str| match key {
        "first" => Rename::To("second".to_owned()),
        "second" => Rename::To("first".to_owned()),
        _ => Rename::Keep,
    };
    let exchanged = View::new(&*a, exchange, None).unwrap();
    let of_average = View::new(&average, |_| Rename::Keep, None).unwrap();
    let views: [(&str, &dyn Checkpoint); 4] = [
        ("average", &average),
        ("mapped", &mapped),
        ("exchanged", &exchanged),
        ("view of average", &of_average),
    ];
    for (name, view) in views {
        let to = parent.path().join(name);
        let done = convert(
            view,
            &to,
            OutputFormat::Dcp { ranks: 2 },
            ConvertOptions::default(),
        )
        .unwrap();
        assert!(
            !done.copied.iter().any(|copied| copied == "meta.pt") && !to.join("meta.pt").exists(),
            "{name}"
        );
        assert_eq!(differences(view, &*opened(&to)), [""; 0], "{name}");
    }
}

/// Copies a fixture to a place where it may be changed.
fn changed(parent: &Path, name: &str) -> std::path::PathBuf {
    let to = parent.join(name);
    copy(&fixture(name), &to);
    to
}

#[test]
fn damage_to_such_a_file_is_found_with_and_without_hashes() {
    let parent = tempfile::tempdir().unwrap();
    let path = changed(parent.path(), "lightning");
    let file = path.join("meta.pt");
    let (sound, damaged) = (b"hyper_parameters", b"hyper_parameterz");
    let assert_is_refused = || {
        let error = refused(&path);
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let text = with_causes(&error);
        assert!(text.contains("meta.pt"), "{text}");
    };
    damage(&file, sound, damaged);
    assert_is_refused();
    damage(&file, damaged, sound);
    add_integrity(&path, None).unwrap();
    let report = verify(&*opened(&path), Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report.is_ok() && report.has_integrity,
        "{:?}",
        report.problems
    );
    damage(&file, sound, damaged);
    assert_is_refused();
}

/// Asserts that a checkpoint is called damaged, by the name of the file beside the directory's own.
fn assert_damaged(path: &Path, file: &str, case: &str) {
    let error = refused(path);
    let text = with_causes(&error);
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{case}: {text}");
    assert!(text.contains(file), "{case}: {text}");
}

#[test]
fn such_a_file_that_is_cut_short_is_damage_and_not_somebody_else_s() {
    let parent = tempfile::tempdir().unwrap();
    for (name, file) in FILES {
        let path = changed(parent.path(), name);
        let beside = path.join(file);
        let legacy = std::fs::read(fixture("legacy.pt")).unwrap();
        for whole in [std::fs::read(&beside).unwrap(), legacy] {
            for kept in 0..32 {
                std::fs::write(&beside, &whole[..kept]).unwrap();
                assert_damaged(&path, file, &format!("{name}: {kept} bytes"));
            }
        }
        // Also where the directory has hashes of it.
        let sealed = changed(&parent.path().join("sealed"), name);
        add_integrity(&sealed, None).unwrap();
        let whole = std::fs::read(sealed.join(file)).unwrap();
        for kept in 0..8 {
            std::fs::write(sealed.join(file), &whole[..kept]).unwrap();
            assert_damaged(&sealed, file, &format!("{name}: {kept} hashed bytes"));
        }
        std::fs::remove_file(sealed.join(file)).unwrap();
        match refused(&sealed) {
            FileError::MissingFiles { files, .. } => assert_eq!(files, [file]),
            other => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn anything_in_the_place_of_such_a_file_that_is_no_regular_file_is_damage() {
    let parent = tempfile::tempdir().unwrap();
    for (name, file) in FILES {
        let path = changed(parent.path(), name);
        let beside = path.join(file);
        std::fs::remove_file(&beside).unwrap();
        std::fs::create_dir(&beside).unwrap();
        assert_damaged(&path, file, "a directory");
        std::fs::remove_dir(&beside).unwrap();
        for target in ["nowhere", "/dev/zero", ".metadata"] {
            std::os::unix::fs::symlink(target, &beside).unwrap();
            assert_damaged(&path, file, target);
            std::fs::remove_file(&beside).unwrap();
        }
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &beside,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert_damaged(&path, file, "a fifo");
    }
}

#[test]
fn a_file_of_such_a_name_that_begins_as_no_file_of_torch_is_somebody_else_s() {
    let parent = tempfile::tempdir().unwrap();
    for (name, file) in FILES {
        let path = changed(parent.path(), name);
        std::fs::remove_file(path.join(file)).unwrap();
        let keys = opened(&path).metadata().entries.len();
        for content in ["x", "Pk", "Project", "PROJECT 1, of many", "{}"] {
            std::fs::write(path.join(file), content).unwrap();
            let checkpoint = opened(&path);
            assert_eq!(
                checkpoint.metadata().entries.len(),
                keys,
                "{name}: {content}"
            );
            let to = parent.path().join(format!("to-{name}-{}", content.len()));
            let target = OutputFormat::Dcp { ranks: 1 };
            let options = ConvertOptions {
                overwrite: true,
                ..ConvertOptions::default()
            };
            let done = convert(&*checkpoint, &to, target, options).unwrap();
            assert!(done.copied.contains(&file.to_owned()), "{name}: {content}");
        }
        // Torch began so with protocol 0.
        std::fs::write(path.join(file), "L119547037146038801333356L\n.").unwrap();
        let error = refused(&path);
        assert_eq!(error.kind(), ErrorKind::UnsupportedVersion, "{error}");
        std::fs::write(path.join(file), "L1").unwrap();
        assert_damaged(&path, file, "protocol 0, cut short");
    }
}

#[test]
fn keys_that_both_have_and_what_is_no_dict_are_opaque_and_the_rest_is_read() {
    let parent = tempfile::tempdir().unwrap();
    let path = changed(parent.path(), "mcore");
    let tensors = opened(&path).metadata().tensors().count();
    // A directory whose keys are those of the file.
    let whole = parent.path().join("whole");
    let source = opened(&fixture("lightning"));
    let view = View::new(&*source, |_| Rename::Keep, None).unwrap();
    convert(
        &view,
        &whole,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    let twice = changed(parent.path(), "lightning");
    std::fs::copy(&whole, twice.join("meta.pt")).unwrap();
    let opened_twice = opened(&twice);
    let of = opened_twice.opaque_type("meta.pt").unwrap().unwrap();
    assert!(
        of.contains("which another file of the directory has too"),
        "{of}"
    );
    // Files of the same kind with other contents are not the same.
    let other = changed(&parent.path().join("other"), "lightning");
    let view = View::new(
        &*source,
        |fqn| {
            if fqn == "global_step" {
                Rename::Drop
            } else {
                Rename::Keep
            }
        },
        None,
    )
    .unwrap();
    convert(
        &view,
        other.join("new.pt"),
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    std::fs::rename(other.join("new.pt"), other.join("meta.pt")).unwrap();
    let found = differences(&*opened_twice, &*opened(&other));
    assert!(
        found.len() == 1 && found[0].starts_with("meta.pt: "),
        "{found:?}"
    );
    // One tensor, and not a dict of them.
    std::fs::copy(fixture("multistep.pt"), path.join("common.pt")).unwrap();
    assert!(
        opened(&path)
            .metadata()
            .entries
            .contains_key("scheduler.milestones")
    );
    std::fs::copy(fixture("conjugated.pt"), path.join("common.pt")).unwrap();
    assert!(opened(&path).metadata().tensors().count() >= tensors);
}

#[test]
fn containers_in_a_file_that_is_copied_are_not_called_lost() {
    let parent = tempfile::tempdir().unwrap();
    for (name, file) in FILES {
        let source = opened(&fixture(name));
        for (target, is_copied) in [
            (OutputFormat::Dcp { ranks: 2 }, true),
            (OutputFormat::SafetensorsFile, false),
        ] {
            let to = parent.path().join(format!("{name}-{is_copied}"));
            let options = ConvertOptions {
                drop_opaque: true,
                ..ConvertOptions::default()
            };
            let done = convert(&*source, &to, target, options).unwrap();
            assert_eq!(done.copied.contains(&file.to_owned()), is_copied, "{name}");
            let has_lost = !is_copied && name == "lightning";
            assert_eq!(!done.containers.is_empty(), has_lost, "{name}: {done:?}");
        }
    }
}
