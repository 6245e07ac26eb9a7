//! The rules that hold for checkpoints in a directory, in memory, and on an S3 server.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fsdp::checkpoint::{
    Checkpointer, CheckpointerOptions, Retention, SaveOptions, prune, step_name,
};
use fsdp::flat::{LocalShard, ShardedTensor};
use fsdp::formats::checkpoint::Checkpoint as _;
use fsdp::formats::checkpoint::{self, Format};
use fsdp::formats::object_store::ObjectStoreExt as _;
use fsdp::formats::object_store::memory::InMemory;
use fsdp::formats::object_store::path::Path as Key;
use fsdp::formats::reader::{CheckpointReader, OpenOptions};
use fsdp::formats::storage::Durable;
use fsdp::formats::{FileError, Location};
use fsdp::tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp::tools::diff::{DiffOptions, diff};
use fsdp::tools::verify::{Level, VerifyOptions, add_integrity, verify};
use fsdp_comm::run_local;
use fsdp_layout::{DType, PlainValue, TensorBox};
use fsdp_state::StateDict;

use crate::load::load;
use crate::sample::sample;
use crate::server::Server;
use crate::state::{State, save};

/// Its upload takes several parts.
pub(crate) const LARGE: [usize; 2] = [601, 4003];

/// Returns `true` if two checkpoints hold the same, bit for bit.
fn assert_same(a: &Location, b: &Location) {
    let open =
        |location: &Location| checkpoint::open(location, OpenOptions { verify: true }).unwrap();
    let mut differences = Vec::new();
    let mut note = |name: &str, difference| differences.push(format!("{name}: {difference:?}"));
    diff(&*open(a), &*open(b), DiffOptions::default(), &mut note).unwrap();
    assert_eq!(differences, Vec::<String>::new(), "{a} and {b}");
}

fn suite(root: &Location, is_object_store: bool) {
    let state = sample(LARGE);
    for ranks in [1, 2, 4] {
        let target = root.join(format!("ranks-{ranks}"));
        save(&state, ranks, &target, &Durable::new()).unwrap();
        for loading in [1, 2, 3] {
            let (read, needed) = load(&state, loading, &target);
            assert!(
                read as f64 <= needed as f64 * 1.05 + 65536.0,
                "{ranks} to {loading}: {read} of {needed} bytes"
            );
        }
        let opened = checkpoint::open(&target, OpenOptions { verify: true }).unwrap();
        let report = verify(&*opened, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(
            report.has_integrity && report.is_ok(),
            "{:?}",
            report.problems
        );
    }
    let source = root.join("ranks-4");

    // Part of a tensor costs no more than that part and the blocks that it touches.
    let opened = CheckpointReader::open(&source).unwrap();
    let before = opened.bytes_read();
    let rows = TensorBox::new(vec![100, 0], vec![200, 4003]);
    let mut bytes = vec![0; rows.numel() * 4];
    opened.read_box("large", &rows, &mut bytes).unwrap();
    assert!(bytes == state.part("large", &rows));
    let read = opened.bytes_read() - before;
    assert!(
        read as f64 <= bytes.len() as f64 * 1.05,
        "{read} of {} bytes",
        bytes.len()
    );

    // Every format, there and back.
    for (name, target, format) in [
        ("resharded", OutputFormat::Dcp { ranks: 3 }, Format::Dcp),
        (
            "model.safetensors",
            OutputFormat::SafetensorsFile,
            Format::SafetensorsFile,
        ),
        (
            "hf",
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 1 << 20,
            },
            Format::SafetensorsDirectory,
        ),
        (
            "shards",
            OutputFormat::SafetensorsShards { ranks: 2 },
            Format::SafetensorsDirectory,
        ),
        ("model.pt", OutputFormat::Torch, Format::Torch),
    ] {
        let destination = root.join(name);
        let opened = checkpoint::open(&source, OpenOptions { verify: true }).unwrap();
        convert(&*opened, &destination, target, ConvertOptions::default()).unwrap();
        assert_eq!(
            checkpoint::open(&destination, OpenOptions::default())
                .unwrap()
                .format(),
            format
        );
        assert_same(&source, &destination);
        let again = convert(&*opened, &destination, target, ConvertOptions::default()).unwrap_err();
        assert!(matches!(again, FileError::Exists { .. }), "{name}: {again}");
        let replace = ConvertOptions {
            overwrite: true,
            ..ConvertOptions::default()
        };
        let replaced = convert(&*opened, &destination, target, replace);
        match is_object_store && matches!(format, Format::Dcp | Format::SafetensorsDirectory) {
            true => assert!(
                matches!(replaced, Err(FileError::Overwrite { .. })),
                "{name}: {replaced:?}"
            ),
            false => drop(replaced.unwrap()),
        }
        assert_same(&source, &destination);
    }

    // The second save gets an error, and harms nothing.
    if is_object_store {
        let again = save(&sample(LARGE), 1, &source, &Durable::new()).unwrap_err();
        assert!(matches!(again, FileError::Exists { .. }), "{again}");
    }
    load(&state, 2, &source);
    let nothing = CheckpointReader::open(root.join("nothing")).unwrap_err();
    assert!(
        matches!(nothing, FileError::NotCommitted { .. }),
        "{nothing}"
    );
}

/// Two savers of one target, both prepared before either commits, and more that race: one gets
/// through.
fn race(root: &Location) {
    let state = sample(LARGE);
    let target = &root.join("race");
    let outcomes = std::thread::scope(|scope| {
        let savers: Vec<_> = (0..4)
            .map(|saver| {
                scope.spawn(move || (saver, save(&generation(saver), 2, target, &Durable::new())))
            })
            .collect();
        savers
            .into_iter()
            .map(|saver| saver.join().unwrap())
            .collect::<Vec<_>>()
    });
    let won: Vec<u8> = outcomes
        .iter()
        .filter(|(_, outcome)| outcome.is_ok())
        .map(|(saver, _)| *saver)
        .collect();
    assert_eq!(won.len(), 1, "{outcomes:?}");
    for (_, outcome) in outcomes {
        assert!(
            matches!(outcome, Ok(()) | Err(FileError::Exists { .. })),
            "{outcome:?}"
        );
    }
    load(&generation(won[0]), 3, target);
    let names = target.names().unwrap();
    assert_eq!(names.len(), 4, "{names:?}");

    // Safetensors directories have fixed names: a claim decides.
    let source = root.join("source");
    save(&state, 1, &source, &Durable::new()).unwrap();
    let target = &root.join("race-hf");
    let outcomes = std::thread::scope(|scope| {
        let convert = || {
            let opened = checkpoint::open(&source, OpenOptions::default()).unwrap();
            convert(
                &*opened,
                target,
                OutputFormat::SafetensorsShards { ranks: 2 },
                ConvertOptions::default(),
            )
            .map(|_| ())
        };
        let savers: Vec<_> = (0..3).map(|_| scope.spawn(convert)).collect();
        savers
            .into_iter()
            .map(|saver| saver.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert_eq!(
        outcomes.iter().filter(|outcome| outcome.is_ok()).count(),
        1,
        "{outcomes:?}"
    );
    assert_same(&source, target);
    assert!(
        !target
            .names()
            .unwrap()
            .iter()
            .any(|name| name.contains("claim"))
    );
}

/// Converters of different checkpoints to one file, which has a file of values beside it: what is
/// there afterwards is the whole of one that was told so.
fn race_to_a_file(root: &Location) {
    for number in 0..3 {
        save(
            &generation(number),
            1,
            root.join(format!("of-{number}")),
            &Durable::new(),
        )
        .unwrap();
    }
    for (name, format) in [
        ("race.safetensors", OutputFormat::SafetensorsFile),
        ("race.pt", OutputFormat::Torch),
    ] {
        for overwrite in [false, true, true] {
            let target = &root.join(name);
            let outcomes = std::thread::scope(|scope| {
                let converters: Vec<_> = (0..3)
                    .map(|number| {
                        let source = root.join(format!("of-{number}"));
                        scope.spawn(move || {
                            let opened = checkpoint::open(&source, OpenOptions::default()).unwrap();
                            let options = ConvertOptions {
                                overwrite,
                                ..ConvertOptions::default()
                            };
                            (source, convert(&*opened, target, format, options))
                        })
                    })
                    .collect();
                converters
                    .into_iter()
                    .map(|converter| converter.join().unwrap())
                    .collect::<Vec<_>>()
            });
            for (_, outcome) in &outcomes {
                assert!(
                    matches!(outcome, Ok(_) | Err(FileError::Exists { .. })),
                    "{outcome:?}"
                );
            }
            let won: Vec<&Location> = outcomes
                .iter()
                .filter(|(_, outcome)| outcome.is_ok())
                .map(|(source, _)| source)
                .collect();
            assert!(
                if overwrite {
                    !won.is_empty()
                } else {
                    won.len() == 1
                },
                "{outcomes:?}"
            );
            let there = checkpoint::open(target, OpenOptions { verify: true }).unwrap();
            let PlainValue::Int(of) = there.read_value("generation").unwrap() else {
                panic!("no number")
            };
            let source = root.join(format!("of-{of}"));
            assert!(won.contains(&&source), "{source} of {won:?}");
            assert_same(&source, target);
            let names = root.names().unwrap();
            assert!(
                !names
                    .iter()
                    .any(|name| name.contains("claim") || name.contains(".new-")),
                "{names:?}"
            );
        }
    }
}

/// Two files may have values files of the same name. Neither takes those of the other, nor a user's
/// file.
fn values_of_others_stay(root: &Location) {
    let with = root.join("with");
    let other = root.join("other");
    let without = root.join("without");
    save(&generation(1), 1, &with, &Durable::new()).unwrap();
    save(&generation(2), 1, &other, &Durable::new()).unwrap();
    save(
        &State {
            values: BTreeMap::new(),
            ..generation(3)
        },
        1,
        &without,
        &Durable::new(),
    )
    .unwrap();
    let convert = |source: &Location, name: &str, overwrite| {
        let opened = checkpoint::open(source, OpenOptions::default()).unwrap();
        let options = ConvertOptions {
            overwrite,
            ..ConvertOptions::default()
        };
        convert(
            &*opened,
            root.join(name),
            OutputFormat::SafetensorsFile,
            options,
        )
    };
    let refused = |name: &str| {
        let refused = convert(&other, name, true).unwrap_err();
        assert!(
            matches!(&refused, FileError::HoldsOthers { name, .. } if name == "m.values.json"),
            "{refused}"
        );
    };
    // `m.values.json` belongs to `m`, and not to `m.safetensors`.
    convert(&with, "m", false).unwrap();
    refused("m.safetensors");
    for overwrite in [false, true] {
        convert(&without, "m.safetensors", overwrite).unwrap();
        assert_same(&without, &root.join("m.safetensors"));
        assert_same(&with, &root.join("m"));
        refused("m.safetensors");
    }
    // A file that is replaced takes its own values with it.
    convert(&other, "m", true).unwrap();
    assert_same(&other, &root.join("m"));
    convert(&without, "m", true).unwrap();
    assert!(!root.join("m.values.json").exists().unwrap());
    // A user's file belongs to no checkpoint.
    Durable::new()
        .replace_file(root.join("m.values.json"), b"mine")
        .unwrap();
    for name in ["m", "m.safetensors"] {
        convert(&without, name, true).unwrap();
        refused(name);
        assert_same(&without, &root.join(name));
    }
    assert_eq!(root.join("m.values.json").read_file(4).unwrap(), b"mine");
}

/// A small state that says whose it is.
pub(crate) fn generation(number: u8) -> State {
    let mut state = State::default();
    for name in ["a", "b"] {
        state.tensors.insert(
            name.to_owned(),
            (DType::U8, vec![4, 50_000], vec![number; 200_000]),
        );
    }
    state
        .values
        .insert("generation".to_owned(), PlainValue::Int(i64::from(number)));
    state
}

#[test]
fn a_directory() {
    let directory = tempfile::tempdir().unwrap();
    suite(&directory.path().into(), false);
    values_of_others_stay(&directory.path().join("values").into());
    let url = Location::from(format!(
        "file://{}",
        directory.path().join("ranks-1").display()
    ));
    load(&sample(LARGE), 2, &url);
}

#[test]
fn a_store_in_memory() {
    let root = Location::with_store(Arc::new(InMemory::new()), "memory://test", "some/where");
    suite(&root, true);
    race(&root);
    race_to_a_file(&root);
    values_of_others_stay(&root.join("values"));
}

#[test]
fn an_s3_server() {
    let server = Server::start();
    let root = server.location("some/where");
    suite(&root, true);
    race(&root);
    race_to_a_file(&root);
    values_of_others_stay(&root.join("values"));
    assert_eq!(server.unfinished(), 0);
    // No object was ever read without a range, but for small ones at commit.
    let requests = server.behaviour.requests.lock().unwrap();
    let whole = requests
        .iter()
        .filter(|line| line.starts_with("GET") && line.contains(".distcp") && line.ends_with(' '));
    assert_eq!(whole.collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn sealing_and_damage() {
    let root = Location::with_store(Arc::new(InMemory::new()), "memory://test", "");
    let target = root.join("c");
    save(&generation(1), 2, &target, &Durable::new()).unwrap();
    let integrity = target
        .names()
        .unwrap()
        .into_iter()
        .find(|name| name.starts_with(".integrity-"))
        .unwrap();
    // Files that another save has left do not confuse a reader, and the next save seals anew.
    Durable::new()
        .replace_file(target.join(".integrity-0123456789abcdef"), b"broken")
        .unwrap();
    assert!(CheckpointReader::open(&target).is_err());
    add_integrity(&target, None).unwrap();
    assert!(
        target.join(".integrity").is_file().unwrap() && target.join(&integrity).is_file().unwrap()
    );
    load(&generation(1), 1, &target);
    // A byte of a data object changes.
    let data = target
        .names()
        .unwrap()
        .into_iter()
        .find(|name| name.starts_with("__0_0-"))
        .unwrap();
    let opened = CheckpointReader::open(&target).unwrap();
    let length = opened.directory().file(&data).unwrap();
    let mut bytes = vec![0; fsdp::formats::storage::ReadAt::len(&*length) as usize];
    fsdp::formats::storage::ReadAt::read_exact_at(&*length, 0, &mut bytes).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    Durable::new()
        .replace_file(target.join(&data), &bytes)
        .unwrap();
    // The object that was opened is not there any more, and the one that is there is not what was
    // written.
    assert!(opened.read_tensor("a").is_err());
    let opened = checkpoint::open(&target, OpenOptions { verify: true }).unwrap();
    let report = verify(&*opened, Level::Hashes, VerifyOptions::default()).unwrap();
    assert_eq!(
        report
            .problems
            .first()
            .and_then(|problem| problem.file.as_deref()),
        Some(data.as_str())
    );
}

/// Ranks with other URLs, or other endpoints, would each write somewhere else.
#[test]
fn ranks_that_save_to_different_places_commit_nothing() {
    let root = Location::with_store(Arc::new(InMemory::new()), "memory://test", "run");
    let errors = run_local(3, |group| {
        let place = root.join(if group.rank() == 2 { "other" } else { "here" });
        let tensor = Tensor::full(group.rank() as f32, (1, 4), &Device::Cpu).unwrap();
        let bounds = TensorBox::new(vec![group.rank(), 0], vec![1, 4]);
        let rows = ShardedTensor::new(
            tensor.dtype(),
            vec![3, 4],
            vec![LocalShard { bounds, tensor }],
        )
        .unwrap();
        let state: StateDict = [("rows", rows.into())].into_iter().collect();
        fsdp::checkpoint::save(place, &state, &group, &SaveOptions::default())
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    assert!(
        errors[0].contains("`__2_0-") && errors[0].contains("memory://test/run/here"),
        "{errors:?}"
    );
    for place in ["here", "other"] {
        assert!(!root.join(place).join(".metadata").is_file().unwrap());
    }
}

#[test]
fn what_a_removal_left_is_removed_with_the_next() {
    let store = Arc::new(InMemory::new());
    let root = Location::with_store(store.clone(), "memory://test", "run");
    for step in [10, 20, 30] {
        save(
            &generation(step),
            2,
            root.join(step_name(step.into())),
            &Durable::new(),
        )
        .unwrap();
    }
    // Broken off after `.metadata` had gone; and something that is nobody's checkpoint.
    let left = root.join(step_name(10));
    let metadata = Key::from("run/step-00000010/.metadata");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(store.delete(&metadata)).unwrap();
    let notes = root.join(step_name(5));
    Durable::new()
        .replace_file(notes.join("notes"), b"mine")
        .unwrap();
    let retention = Retention {
        keep_last: NonZeroUsize::new(2),
        keep_every: None,
    };
    assert!(prune(&root, &retention).unwrap().is_empty());
    assert_eq!(left.names().unwrap(), Vec::<String>::new());
    assert!(notes.join("notes").is_file().unwrap());
    load(&generation(20), 1, root.join(step_name(20)));
}

/// In an object store nothing can be linked: the store itself copies what has not changed.
#[test]
fn what_has_not_changed_since_the_last_save_is_copied_by_the_store() {
    let root = Location::with_store(Arc::new(InMemory::new()), "memory://test", "run");
    let reports = run_local(2, |group| {
        let options = CheckpointerOptions {
            save: SaveOptions {
                incremental: true,
                ..SaveOptions::default()
            },
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(&root, &group, options).unwrap();
        let mut save = |step: i64| {
            let rows = |value: f32, length: usize| {
                let tensor =
                    Tensor::full(value + group.rank() as f32, (1, length), &Device::Cpu).unwrap();
                let bounds = TensorBox::new(vec![group.rank(), 0], vec![1, length]);
                ShardedTensor::new(
                    tensor.dtype(),
                    vec![2, length],
                    vec![LocalShard { bounds, tensor }],
                )
                .unwrap()
            };
            let base = rows(5.0, 300_000);
            let lora = rows(step as f32, 10);
            let state: StateDict = [
                ("base", base.into()),
                ("lora", lora.into()),
                ("step", step.into()),
            ]
            .into_iter()
            .collect();
            checkpointer
                .save(root.join(step_name(step as u64)), &state)
                .unwrap()
                .linked_bytes
        };
        [save(1), save(2), save(3)]
    })
    .unwrap();
    assert_eq!(reports, vec![[0, 1_200_000, 1_200_000]; 2]);
    // Each is whole without the others, in names that its own save gave.
    let retention = Retention {
        keep_last: NonZeroUsize::new(1),
        keep_every: None,
    };
    assert_eq!(prune(&root, &retention).unwrap().len(), 2);
    let last = root.join(step_name(3));
    let opened = checkpoint::open(&last, OpenOptions { verify: true }).unwrap();
    let report = verify(&*opened, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report.is_ok() && report.digests == 3,
        "{:?}",
        report.problems
    );
    let nonces: Vec<String> = last
        .names()
        .unwrap()
        .iter()
        .filter_map(|name| Some(name.strip_suffix(".distcp")?.split_once('-')?.1.to_owned()))
        .collect();
    assert!(
        nonces.len() == 4 && nonces.iter().all(|nonce| *nonce == nonces[0]),
        "{nonces:?}"
    );
}
