//! Verifying, sealing and comparing.

use std::collections::HashSet;
use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::{encode_value, lay_out_tensor};
use fsdp_formats::metadata::{
    BytesEntry, Chunk, Entry, Metadata, StorageInfo, TensorEntry, TensorProperties, encode,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::Durable;
use fsdp_layout::{DType, ErrorKind, Failure as _, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, Difference, Tolerance, diff};
use fsdp_tools::verify::{
    Level, Report, VerifyOptions, add_integrity, compute_census, find_unknown_files, verify,
};

use crate::foreign::clear_checksums;
use crate::sample::sample;
use crate::state::save;
use crate::truth::{Truth, check_against_truth, dcp_fixtures, fixtures};

/// Cut into several parts, which threads share.
const LARGE: [usize; 2] = [1024, 4099];

fn verified(path: &Path, level: Level) -> Report {
    verify(
        &*open(path, OpenOptions::default()).unwrap(),
        level,
        VerifyOptions::default(),
    )
    .unwrap()
}

/// Makes a writable copy of a fixture.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

fn flip(file: &Path, at: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    bytes[at] ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn fixtures_are_whole_at_every_level() {
    for name in dcp_fixtures() {
        let report = verified(&fixtures().join(&name).join("dcp"), Level::Deep);
        assert!(
            report.is_ok() && !report.has_integrity,
            "{name}: {:?}",
            report.problems
        );
        let not_finite: Vec<&str> = report
            .not_finite
            .iter()
            .map(|(key, _)| key.as_str())
            .collect();
        if name.starts_with("misc") {
            assert_eq!(not_finite, ["plain.x_nan_inf"], "{name}");
        } else {
            assert!(not_finite.is_empty(), "{name}");
        }
    }
}

#[test]
fn a_complex_number_with_a_part_that_is_not_finite_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("complex.pt");
    let parts = [1.0, f64::NAN, f64::NEG_INFINITY, 1.0, 2.0, -3.0];
    let data = parts.iter().flat_map(|part| part.to_le_bytes()).collect();
    let tensor = PlainTensor {
        dtype: DType::Complex128,
        shape: vec![3],
        data,
    };
    std::fs::write(
        &path,
        encode_value(&PlainValue::Dict(vec![(
            "c".into(),
            PlainValue::Tensor(tensor),
        )]))
        .unwrap(),
    )
    .unwrap();
    let report = verified(&path, Level::Deep);
    let [(key, census)] = report.not_finite.as_slice() else {
        panic!("{:?}", report.not_finite)
    };
    assert_eq!(
        (key.as_str(), census.count, census.nan, census.infinite),
        ("c", 3, 1, 1)
    );
    assert_eq!(
        compute_census(&*open(&path, OpenOptions::default()).unwrap(), "c").unwrap(),
        None
    );
}

#[test]
fn sealing_makes_later_damage_visible() {
    let parent = tempfile::tempdir().unwrap();
    for (from, truth) in [
        ("misc_ws2/dcp", "misc_ws2"),
        ("variants_ws2/nocollectives", "variants_ws2"),
        ("variants_ws2/zstd", "variants_ws2"),
        ("hf_ws2/fs_safetensors", "hf_ws2"),
        ("hf_ws2/hf_full_2files", "hf_ws2"),
        ("hf_ws2/hf_sharded", "hf_ws2"),
    ] {
        let path = parent.path().join(from);
        copy(&fixtures().join(from), &path);
        add_integrity(&path, None).unwrap();
        let report = verified(&path, Level::Hashes);
        assert!(
            report.is_ok() && report.has_integrity,
            "{from}: {:?}",
            report.problems
        );
        check_against_truth(&path, &Truth::of(truth));
        for entry in std::fs::read_dir(&path).unwrap() {
            let file = entry.unwrap().path();
            let length = std::fs::metadata(&file).unwrap().len() as usize;
            for at in (0..length).step_by(length / 7 + 1) {
                flip(&file, at);
                // Metadata is checked when the checkpoint is opened, data by `verify`.
                let found = match open(&path, OpenOptions::default()) {
                    Err(_) => true,
                    Ok(checkpoint) => {
                        !verify(&*checkpoint, Level::Hashes, VerifyOptions::default())
                            .unwrap()
                            .is_ok()
                    }
                };
                assert!(found, "byte {at} of {}", file.display());
                flip(&file, at);
            }
        }
    }
}

/// A checkpoint that is one file has its hashes beside it.
#[test]
fn single_files_are_sealed_too() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(fixtures().join("misc_ws2/dcp"), OpenOptions::default()).unwrap();
    for (name, target) in [
        ("m.safetensors", OutputFormat::SafetensorsFile),
        ("m.pt", OutputFormat::Torch),
    ] {
        let file = parent.path().join(name);
        convert(&*source, &file, target, ConvertOptions::default()).unwrap();
        assert!(!verified(&file, Level::Hashes).has_integrity);
        add_integrity(&file, None).unwrap();
        let report = verified(&file, Level::Deep);
        assert!(
            report.is_ok() && report.has_integrity,
            "{:?}",
            report.problems
        );
        let values = parent.path().join("m.values.json");
        let covered: Vec<&Path> = [&file]
            .into_iter()
            .chain(name.ends_with('s').then_some(&values))
            .map(|p| &**p)
            .collect();
        for path in covered {
            let length = std::fs::metadata(path).unwrap().len() as usize;
            for at in (0..length).step_by(length / 50 + 1).chain([length - 1]) {
                flip(path, at);
                let found = match open(&file, OpenOptions::default()) {
                    Err(_) => true,
                    Ok(checkpoint) => {
                        !verify(&*checkpoint, Level::Hashes, VerifyOptions::default())
                            .unwrap()
                            .is_ok()
                    }
                };
                assert!(found, "byte {at} of {}", path.display());
                flip(path, at);
            }
        }
        assert!(verified(&file, Level::Hashes).is_ok());
        // The hashes go when the file is replaced.
        let options = ConvertOptions {
            overwrite: true,
            ..ConvertOptions::default()
        };
        convert(&*source, &file, target, options).unwrap();
        let report = verified(&file, Level::Hashes);
        assert!(report.is_ok() && !report.has_integrity);
    }
}

#[test]
fn the_first_bad_file_and_offset_are_named() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    save(&sample(LARGE), 2, &path, &Durable::new()).unwrap();
    assert!(verified(&path, Level::Deep).is_ok());
    let at = 8_000_000;
    flip(&path.join("__1_0.distcp"), at);
    let report = verified(&path, Level::Hashes);
    let problem = report
        .problems
        .iter()
        .find(|problem| problem.fqn.is_none())
        .unwrap();
    assert_eq!(problem.file.as_deref(), Some("__1_0.distcp"));
    let offset = problem.offset.unwrap() as usize;
    assert!(offset <= at && at < offset + (1 << 20), "{offset}");
}

/// Checks that a damaged checkpoint is not written again, under new hashes.
fn assert_is_not_converted(path: &Path) {
    let parent = tempfile::tempdir().unwrap();
    let damaged = open(path, OpenOptions::default()).unwrap();
    for (name, target) in [
        ("copy.safetensors", OutputFormat::SafetensorsFile),
        ("copy", OutputFormat::Dcp { ranks: 2 }),
        ("copy.pt", OutputFormat::Torch),
    ] {
        let to = parent.path().join(name);
        let error = convert(&*damaged, &to, target, ConvertOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error:?}");
        assert!(!to.exists(), "{name}");
    }
}

#[test]
fn checksums_find_damage_in_transformed_items_and_in_large_ones() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("zstd");
    copy(&fixtures().join("variants_ws2/zstd"), &path);
    assert!(verified(&path, Level::Hashes).is_ok());
    // A literal of the compressed stream, which has no checksum of its own.
    let file = path.join("__1_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[3098] ^= 2;
    std::fs::write(&file, bytes).unwrap();
    assert!(!verified(&path, Level::Hashes).is_ok());
    assert_is_not_converted(&path);

    let source = parent.path().join("large.pt");
    let tensor = PlainTensor {
        dtype: DType::F32,
        shape: LARGE.to_vec(),
        data: vec![7; 4 * LARGE[0] * LARGE[1]],
    };
    let state = PlainValue::Dict(vec![("w".into(), PlainValue::Tensor(tensor))]);
    std::fs::write(&source, encode_value(&state).unwrap()).unwrap();
    let large = parent.path().join("large");
    let opened = open(&source, OpenOptions::default()).unwrap();
    let target = OutputFormat::Dcp { ranks: 1 };
    convert(&*opened, &large, target, ConvertOptions::default()).unwrap();
    // As torch writes it.
    std::fs::remove_file(large.join(".integrity")).unwrap();
    assert!(verified(&large, Level::Hashes).is_ok());
    flip(&large.join("__0_0.distcp"), 9_000_000);
    assert_is_not_converted(&large);
    // Without verification nothing is compared.
    let unverified = open(&large, OpenOptions { verify: false }).unwrap();
    let to = parent.path().join("unverified");
    convert(&*unverified, &to, target, ConvertOptions::default()).unwrap();
}

#[test]
fn checksums_find_damage_in_foreign_checkpoints() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    copy(&fixtures().join("variants_ws2/lowestrank"), &path);
    let truth = Truth::of("variants_ws2");
    let bytes = std::fs::read(path.join("__0_0.distcp")).unwrap();
    let payload = &truth.tensors["rep"].2;
    let at = bytes
        .windows(payload.len())
        .position(|window| window == payload)
        .unwrap();
    flip(&path.join("__0_0.distcp"), at + 5);
    assert!(verified(&path, Level::Structure).is_ok());
    let report = verified(&path, Level::Hashes);
    assert_eq!(report.problems.len(), 1);
    assert_eq!(report.problems[0].fqn.as_deref(), Some("rep"));
    assert_is_not_converted(&path);
    std::fs::write(path.join("__7_0.distcp"), b"left by an earlier save").unwrap();
    let unknown = find_unknown_files(&*open(&path, OpenOptions::default()).unwrap()).unwrap();
    assert_eq!(unknown, [Path::new("__7_0.distcp")]);
}

#[test]
fn checksums_find_damage_in_torch_files() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(fixtures().join("misc_ws2/dcp"), OpenOptions::default()).unwrap();
    let ours = parent.path().join("ours.pt");
    convert(
        &*source,
        &ours,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    let theirs = parent.path().join("theirs.pt");
    std::fs::copy(fixtures().join("fsdp2_adamw_ws2/full.pt"), &theirs).unwrap();
    for file in [ours, theirs] {
        assert!(verified(&file, Level::Deep).is_ok());
        let checkpoint = open(&file, OpenOptions::default()).unwrap();
        let places: Vec<StorageInfo> = checkpoint
            .metadata()
            .stored()
            .map(|(_, _, stored)| stored.clone())
            .collect();
        let mut tried = 0;
        for stored in places.iter().filter(|stored| stored.length > 0) {
            // The record's header comes first, and less than two kilobytes of padding.
            let bytes = std::fs::read(&file).unwrap();
            let header = stored.offset as usize;
            let field = |at: usize| {
                usize::from(u16::from_le_bytes([
                    bytes[header + at],
                    bytes[header + at + 1],
                ]))
            };
            let data = header + 30 + field(26) + field(28);
            for at in [
                data,
                data + stored.length as usize / 2,
                data + stored.length as usize - 1,
            ] {
                flip(&file, at);
                let report = verified(&file, Level::Hashes);
                assert_eq!(report.problems.len(), 1, "byte {at} of {}", file.display());
                // Some are small enough to be read whole before, and are named by their header.
                let places = [data as u64, stored.offset].map(Some);
                assert!(places.contains(&report.problems[0].offset));
                assert!(report.problems[0].fqn.is_some());
                let report = verified(&file, Level::Deep);
                let names: HashSet<_> = report.problems.iter().map(|found| &found.fqn).collect();
                assert_eq!(names.len(), report.problems.len(), "{:?}", report.problems);
                if tried % 20 == 0 {
                    assert_is_not_converted(&file);
                }
                flip(&file, at);
                tried += 1;
            }
        }
        assert!(tried > 10);
    }
}

#[test]
fn what_is_missing_is_reported_at_its_level() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    copy(&fixtures().join("variants_ws2/lowestrank"), &path);
    std::fs::remove_file(path.join("__1_0.distcp")).unwrap();
    assert!(verified(&path, Level::Structure).is_ok());
    let report = verified(&path, Level::Sizes);
    assert!(
        report
            .problems
            .iter()
            .all(|problem| problem.file.as_deref() == Some("__1_0.distcp"))
    );
    assert!(
        report
            .problems
            .iter()
            .any(|problem| problem.fqn.as_deref() == Some("w"))
    );
    assert!(add_integrity(&path, None).is_err());
}

/// A directory of shards has no list of them: a missing one would leave tensors cut in half.
#[test]
fn a_missing_shard_is_an_error_on_open() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(
        fixtures().join("fsdp2_adamw_ws2/dcp"),
        OpenOptions::default(),
    )
    .unwrap();
    let missing = |path: &Path| match open(path, OpenOptions::default()).map(drop) {
        Err(FileError::MissingFiles { files, .. }) => files,
        other => panic!("{other:?}"),
    };
    for shard in [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ] {
        let path = parent.path().join(shard);
        convert(
            &*source,
            &path,
            OutputFormat::SafetensorsShards { ranks: 2 },
            ConvertOptions::default(),
        )
        .unwrap();
        std::fs::remove_file(path.join(shard)).unwrap();
        assert_eq!(missing(&path), [shard]);
        // Without the hashes too.
        std::fs::remove_file(path.join(".integrity")).unwrap();
        assert_eq!(missing(&path), [shard]);
    }
    // torch notes no number: hashes that were added later tell.
    let foreign = parent.path().join("foreign");
    copy(&fixtures().join("hf_ws2/hf_sharded"), &foreign);
    add_integrity(&foreign, None).unwrap();
    let names = std::fs::read_dir(&foreign)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let last = names
        .filter(|name| name.ends_with(".safetensors"))
        .max()
        .unwrap();
    std::fs::remove_file(foreign.join(&last)).unwrap();
    assert_eq!(missing(&foreign), [last]);
}

#[test]
fn another_file_does_not_stand_in_for_a_missing_shard() {
    let parent = tempfile::tempdir().unwrap();
    let source = open(
        fixtures().join("fsdp2_adamw_ws2/dcp"),
        OpenOptions::default(),
    )
    .unwrap();
    let path = parent.path().join("shards");
    convert(
        &*source,
        &path,
        OutputFormat::SafetensorsShards { ranks: 2 },
        ConvertOptions::default(),
    )
    .unwrap();
    std::fs::remove_file(path.join(".integrity")).unwrap();
    let other =
        safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![1], &[7]).unwrap();
    std::fs::write(
        path.join("other.safetensors"),
        safetensors::serialize([("other", other)], None).unwrap(),
    )
    .unwrap();
    assert!(open(&path, OpenOptions::default()).is_ok());
    let shard = "shard-00002-model-00001-of-00001.safetensors";
    std::fs::remove_file(path.join(shard)).unwrap();
    let Err(FileError::MissingFiles { files, .. }) = open(&path, OpenOptions::default()) else {
        panic!("no error")
    };
    assert_eq!(files, [shard]);
}

/// Rank-local metadata: each rank wrote the replicated tensors and values for itself.
#[test]
fn copies_that_differ_are_found_at_the_deepest_level() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    copy(&fixtures().join("variants_ws2/nocollectives"), &path);
    let report = verified(&path, Level::Deep);
    assert!(report.is_ok(), "{:?}", report.problems);
    assert_eq!(
        report.replicas,
        open(&path, OpenOptions::default())
            .unwrap()
            .metadata()
            .replicas
            .len()
    );
    let replicas = open(&path, OpenOptions::default())
        .unwrap()
        .metadata()
        .replicas
        .clone();
    let tensor = replicas
        .iter()
        .find(|replica| replica.bounds.is_some())
        .unwrap();
    assert!(replicas.iter().any(|replica| replica.bounds.is_none()));
    // One element of the second rank's copy.
    let truth = &Truth::of("variants_ws2").tensors[&tensor.fqn].2;
    let file = path.join(&tensor.stored.relative_path);
    let bytes = std::fs::read(&file).unwrap();
    let item =
        tensor.stored.offset as usize..(tensor.stored.offset + tensor.stored.length) as usize;
    let at = item.start
        + bytes[item]
            .windows(truth.len())
            .position(|window| window == truth)
            .unwrap();
    flip(&file, at);
    let mut bytes = std::fs::read(&file).unwrap();
    clear_checksums(&mut bytes);
    std::fs::write(&file, bytes).unwrap();
    assert!(verified(&path, Level::Sizes).is_ok());
    let report = verified(&path, Level::Deep);
    let problem = report
        .problems
        .iter()
        .find(|problem| problem.error.contains("differs from the first"))
        .unwrap();
    assert_eq!(problem.fqn.as_ref(), Some(&tensor.fqn));
    assert_eq!(problem.file.as_ref(), Some(&tensor.stored.relative_path));
    // A conversion could keep only one of them.
    let (source, to) = (
        open(&path, OpenOptions::default()).unwrap(),
        parent.path().join("to"),
    );
    for target in [OutputFormat::Torch, OutputFormat::Dcp { ranks: 2 }] {
        let refused = convert(&*source, &to, target, ConvertOptions::default());
        assert!(matches!(refused, Err(FileError::Differing { fqn, .. }) if fqn == tensor.fqn));
        assert!(!to.exists());
    }
}

#[test]
fn what_is_a_tensor_on_one_rank_and_a_value_on_another_is_found() {
    let parent = tempfile::tempdir().unwrap();
    let plain = lay_out_tensor(DType::U8, &[1]).unwrap();
    let items = [
        [plain.head(0), vec![0], plain.tail(&[0])].concat(),
        encode_value(&PlainValue::Int(0)).unwrap(),
    ];
    let entry = |rank: usize| {
        let stored = Some(StorageInfo {
            relative_path: format!("__{rank}_0.distcp"),
            offset: 0,
            length: items[rank].len() as u64,
            transforms: Vec::new(),
        });
        if rank == 1 {
            return Entry::Bytes(BytesEntry { stored });
        }
        let chunks = vec![Chunk {
            bounds: TensorBox::whole(&[1]),
            stored,
        }];
        Entry::Tensor(TensorEntry {
            properties: TensorProperties::new(DType::U8),
            shape: vec![1],
            chunks,
        })
    };
    for (name, ranks) in [("tensor-first", [0, 1]), ("value-first", [1, 0])] {
        let path = parent.path().join(name);
        std::fs::create_dir(&path).unwrap();
        for (number, rank) in ranks.into_iter().enumerate() {
            let mut metadata = Metadata::default();
            metadata.entries.insert("x".to_owned(), entry(rank));
            std::fs::write(path.join(format!("__{number}.metadata")), encode(&metadata)).unwrap();
            std::fs::write(path.join(format!("__{rank}_0.distcp")), &items[rank]).unwrap();
        }
        let report = verified(&path, Level::Deep);
        assert_eq!(report.problems.len(), 1, "{name}: {:?}", report.problems);
        assert_eq!(report.problems[0].fqn.as_deref(), Some("x"));
        let source = open(&path, OpenOptions::default()).unwrap();
        let to = parent.path().join("to");
        let options = ConvertOptions::default();
        match convert(&*source, &to, OutputFormat::Torch, options) {
            Err(FileError::Differing { first, second, .. }) => {
                let expected = ranks.map(|rank| format!("__{rank}_0.distcp"));
                assert_eq!([first, second], expected, "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn differences_are_told_apart() {
    let a = open(
        fixtures().join("fsdp2_adamw_ws2/dcp"),
        OpenOptions::default(),
    )
    .unwrap();
    let b = open(
        fixtures().join("fsdp2_adamw_ws1/dcp"),
        OpenOptions::default(),
    )
    .unwrap();
    let mut found = Vec::new();
    diff(&*a, &*a, DiffOptions::default(), &mut |key, difference| {
        found.push((key.to_owned(), difference))
    })
    .unwrap();
    assert_eq!(found, []);
    diff(&*a, &*b, DiffOptions::default(), &mut |key, difference| {
        found.push((key.to_owned(), difference))
    })
    .unwrap();
    let (key, difference) = &found[0];
    assert!(key.starts_with("model."));
    let Difference::Elements {
        count,
        max_abs: Some(max),
        ..
    } = difference
    else {
        panic!("{difference:?}")
    };
    assert!(*count > 0 && *max > 0.0 && *max < 10.0);
    let mut loose = 0;
    diff(
        &*a,
        &*b,
        DiffOptions {
            tolerance: Tolerance {
                absolute: 100.0,
                relative: 0.0,
            },
            threads: None,
        },
        &mut |_, _| loose += 1,
    )
    .unwrap();
    assert_eq!(loose, 0);
    let c = open(fixtures().join("misc_ws1/dcp"), OpenOptions::default()).unwrap();
    let mut kinds = (0, 0);
    diff(
        &*a,
        &*c,
        DiffOptions::default(),
        &mut |_, difference| match difference {
            Difference::OnlyInFirst => kinds.0 += 1,
            Difference::OnlyInSecond => kinds.1 += 1,
            other => panic!("{other:?}"),
        },
    )
    .unwrap();
    assert_eq!(
        kinds,
        (a.metadata().entries.len(), c.metadata().entries.len())
    );
}

#[test]
fn each_item_of_a_file_that_is_cut_off_is_named_once() {
    let parent = tempfile::tempdir().unwrap();
    let from = fixtures().join("fsdp2_adamw_ws2/dcp");
    let (plain, sealed) = (parent.path().join("plain"), parent.path().join("sealed"));
    for path in [&plain, &sealed] {
        copy(&from, path);
    }
    add_integrity(sealed.as_path(), None).unwrap();
    for path in [&plain, &sealed] {
        let file = std::fs::File::options()
            .write(true)
            .open(path.join("__1_0.distcp"))
            .unwrap();
        file.set_len(3000).unwrap();
        let sizes = verified(path, Level::Sizes);
        assert!(sizes.problems.len() > 10);
        for level in [Level::Hashes, Level::Deep] {
            let report = verified(path, level);
            let of_items = report
                .problems
                .iter()
                .filter(|problem| problem.fqn.is_some());
            let mut names: Vec<_> = of_items
                .map(|problem| (&problem.fqn, &problem.file, problem.offset))
                .collect();
            let count = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count, "{level:?}");
            assert_eq!(count, sizes.problems.len(), "{level:?}");
        }
    }
}

#[test]
fn a_problem_with_one_box_of_a_tensor_names_the_file_of_that_box() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("sealed");
    copy(&fixtures().join("fsdp2_adamw_ws2/dcp"), &path);
    add_integrity(path.as_path(), None).unwrap();
    let file = path.join("__1_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    // A hash of every block, so that all items have one that is wrong.
    bytes.iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(&file, bytes).unwrap();
    for problem in verified(&path, Level::Deep).problems {
        assert_eq!(problem.file.as_deref(), Some("__1_0.distcp"), "{problem:?}");
    }
}
