//! Digests that are recorded with what is saved: they are the state's own, conversions keep them,
//! and `verify` compares them.

use std::path::Path;

use fsdp_digest::{Digest, StateDigest, Sum};
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::digest::digest;
use fsdp_formats::internals::{INTEGRITY_FILE, Integrity};
use fsdp_formats::plan::{Deduplicate, LoadRequest, plan_save};
use fsdp_formats::reader::{Destination, OpenOptions, ReadOptions};
use fsdp_formats::storage::Durable;
use fsdp_formats::writer::{RankItems, RankWritten, WriteOptions, finish_encoded, write_rank};
use fsdp_layout::with_causes;
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::sample::sample;
use crate::state::{State, save};
use crate::truth::{dcp_fixtures, fixtures};

fn opened(path: &Path) -> Box<dyn Checkpoint> {
    open(path, OpenOptions::default()).unwrap()
}

/// Opens a checkpoint, and checks that its recorded digests are those of what it holds.
fn recorded(path: &Path) -> StateDigest {
    let checkpoint = opened(path);
    let recorded = checkpoint.digests().unwrap().clone();
    assert_eq!(
        recorded.differing(&digest(&*checkpoint, 2).unwrap()),
        Vec::<String>::new(),
        "{}",
        path.display()
    );
    let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{}: {:?}", path.display(), report.problems);
    assert_eq!(report.digests, recorded.len());
    recorded
}

const FORMATS: [(&str, OutputFormat); 4] = [
    ("dcp", OutputFormat::Dcp { ranks: 3 }),
    ("one.safetensors", OutputFormat::SafetensorsFile),
    (
        "hf",
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 10_000,
        },
    ),
    ("shards", OutputFormat::SafetensorsShards { ranks: 3 }),
];

#[test]
fn a_save_records_the_digests_of_its_state_at_any_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let state = sample([300, 401]);
    let mut all = Vec::new();
    for ranks in 1..=4 {
        let path = directory.path().join(ranks.to_string());
        save(&state, ranks, &path, &Durable::new()).unwrap();
        all.push(recorded(&path));
    }
    assert!(all.iter().all(|digests| *digests == all[0]));
    assert_eq!(all[0].len(), state.tensors.len() + state.values.len());
}

#[test]
fn conversions_of_any_checkpoint_to_any_format_record_its_digests() {
    let directory = tempfile::tempdir().unwrap();
    for fixture in dcp_fixtures() {
        let source = opened(&fixtures().join(&fixture).join("dcp"));
        assert!(source.digests().is_none());
        for (name, format) in FORMATS {
            let path = directory.path().join(format!("{fixture}-{name}"));
            convert(
                &*source,
                &path,
                format,
                ConvertOptions {
                    drop_opaque: true,
                    ..Default::default()
                },
            )
            .unwrap();
            let first = recorded(&path);
            // On from there, where all is kept.
            let again = directory.path().join("again");
            let options = ConvertOptions {
                overwrite: true,
                ..Default::default()
            };
            convert(
                &*opened(&path),
                &again,
                OutputFormat::Dcp { ranks: 2 },
                options,
            )
            .unwrap();
            assert_eq!(recorded(&again), first, "{fixture} {name}");
        }
    }
}

#[test]
fn sealing_records_digests() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.pt");
    let source = opened(&fixtures().join("misc_ws2/dcp"));
    convert(
        &*source,
        &path,
        OutputFormat::Torch,
        ConvertOptions::default(),
    )
    .unwrap();
    assert!(opened(&path).digests().is_none());
    add_integrity(&path, None).unwrap();
    assert_eq!(recorded(&path), digest(&*opened(&path), 1).unwrap());
}

/// Records another digest of a name, as if other state had been saved under the same hashes.
fn change_digest(path: &Path, name: &str) {
    let file = path.join(INTEGRITY_FILE);
    let mut integrity = Integrity::decode(&std::fs::read(&file).unwrap()).unwrap();
    let digests = integrity.digests.as_mut().unwrap();
    assert!(
        digests
            .insert(name, Digest::of_value(&PlainValue::None))
            .is_some()
    );
    std::fs::write(&file, integrity.encode().unwrap()).unwrap();
}

#[test]
fn state_that_is_not_what_its_digests_say_is_found_where_all_hashes_are_right() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c");
    let state = sample([300, 401]);
    save(&state, 2, &path, &Durable::new()).unwrap();
    for name in [state.tensors.keys().next().unwrap(), "step"] {
        change_digest(&path, name);
    }
    let checkpoint = opened(&path);
    assert!(
        verify(&*checkpoint, Level::Hashes, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
    let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
    let mut names: Vec<&str> = report
        .problems
        .iter()
        .filter_map(|problem| problem.fqn.as_deref())
        .collect();
    names.sort_unstable();
    let mut expected = [state.tensors.keys().next().unwrap(), "step"];
    expected.sort_unstable();
    assert_eq!(names, expected);
    // It is not passed on in another layout or format, where it would be hard to find: nor in one
    // that has no digests of its own.
    for (name, format) in FORMATS
        .into_iter()
        .chain([("torch.pt", OutputFormat::Torch)])
    {
        let copy = directory.path().join(name);
        let error = convert(&*checkpoint, &copy, format, ConvertOptions::default()).unwrap_err();
        assert!(
            matches!(&error, FileError::Digests { names, .. } if *names == expected),
            "{error}"
        );
        assert!(!copy.exists());
    }
}

/// Reads a tensor whole, and returns its bytes and the sums over them.
fn read_whole(
    path: &Path,
    state: &State,
    fqn: &str,
    digest: bool,
) -> Result<(Vec<u8>, Vec<Vec<Sum>>), FileError> {
    let (dtype, shape, bytes) = &state.tensors[fqn];
    let boxes = vec![TensorBox::whole(shape)];
    let request = LoadRequest {
        fqn: fqn.to_owned(),
        dtype: *dtype,
        shape: shape.clone(),
        boxes,
    };
    let mut found = vec![0xee; bytes.len()];
    let destination = Destination::new(request, vec![&mut found]);
    let done = opened(path).read(
        vec![destination],
        ReadOptions {
            digest,
            ..ReadOptions::default()
        },
    )?;
    Ok((found, done.sums))
}

/// A tensor that is compared with its digest is read without its hashes. The error of damage is the
/// same.
#[test]
fn damage_to_a_tensor_that_is_read_whole_is_told_by_file_and_offset() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c");
    let state = sample([700, 401]);
    save(&state, 2, &path, &Durable::new()).unwrap();
    let (dtype, shape, bytes) = &state.tensors["large"];
    let (found, sums) = read_whole(&path, &state, "large", true).unwrap();
    assert!(found == *bytes);
    assert_eq!(
        Some(sums[0][0].finish(*dtype, shape)),
        opened(&path).digests().unwrap().get("large")
    );
    let file = path.join("__1_0.distcp");
    let sound = std::fs::read(&file).unwrap();
    let payload = &state.part("large", &TensorBox::new(vec![400, 0], vec![300, 401]));
    let start = sound
        .windows(64)
        .position(|window| window == &payload[..64])
        .unwrap();
    for at in [start, start + 70_001, start + payload.len() - 1] {
        let mut damaged = sound.clone();
        damaged[at] ^= 16;
        std::fs::write(&file, damaged).unwrap();
        let [with, without] =
            [true, false].map(|digest| read_whole(&path, &state, "large", digest).unwrap_err());
        let [with, without] = [&with, &without].map(|error| with_causes(error));
        let bytes = without.find("bytes ").map(|at| &without[at..]).unwrap();
        assert!(
            bytes.contains("of `__1_0.distcp`") && with.contains(bytes),
            "{with}; {without}"
        );
    }
    std::fs::write(&file, sound).unwrap();
    // Where the file is right and the digest is not, the sums tell.
    change_digest(&path, "large");
    let (_, sums) = read_whole(&path, &state, "large", true).unwrap();
    assert_ne!(
        Some(sums[0][0].finish(*dtype, shape)),
        opened(&path).digests().unwrap().get("large")
    );
}

#[test]
fn files_whose_digests_all_differ_are_searched_for_damage_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c");
    let state = sample([300, 401]);
    save(&state, 2, &path, &Durable::new()).unwrap();
    state
        .tensors
        .keys()
        .for_each(|fqn| change_digest(&path, fqn));
    let checkpoint = opened(&path);
    let mut buffers: Vec<Vec<u8>> = state
        .tensors
        .values()
        .map(|(.., bytes)| vec![0xee; bytes.len()])
        .collect();
    let destinations =
        state
            .tensors
            .iter()
            .zip(&mut buffers)
            .map(|((fqn, (dtype, shape, _)), buffer)| {
                let boxes = vec![TensorBox::whole(shape)];
                let request = LoadRequest {
                    fqn: fqn.clone(),
                    dtype: *dtype,
                    shape: shape.clone(),
                    boxes,
                };
                Destination::new(request, vec![buffer])
            });
    checkpoint
        .read(
            destinations.collect(),
            ReadOptions {
                digest: true,
                ..ReadOptions::default()
            },
        )
        .unwrap();
    assert!(
        state
            .tensors
            .values()
            .zip(&buffers)
            .all(|((.., bytes), read)| bytes == read)
    );
    let length = |rank: usize| {
        std::fs::metadata(path.join(format!("__{rank}_0.distcp")))
            .unwrap()
            .len()
    };
    // Once for the elements, and once for the hashes.
    let (read, files) = (checkpoint.bytes_read(), length(0) + length(1));
    assert!(read < 3 * files, "{read} bytes of {files}");
}

/// Writes a file again as another program does: with the header's texts that it found, and tensors
/// that may be others.
fn rewrite(path: &Path, change: impl Fn(&str, &mut Vec<u8>)) {
    let bytes = std::fs::read(path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let mut data = tensor.data().to_vec();
            change(&name, &mut data);
            (name, tensor.dtype(), tensor.shape().to_vec(), data)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (
            name,
            safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap(),
        )
    });
    std::fs::write(
        path,
        safetensors::serialize(views, header.metadata().clone()).unwrap(),
    )
    .unwrap();
}

#[test]
fn digests_that_another_program_took_over_are_stale_and_not_trusted() {
    let directory = tempfile::tempdir().unwrap();
    for fixture in dcp_fixtures() {
        let source = opened(&fixtures().join(&fixture).join("dcp"));
        let path = directory.path().join(format!("{fixture}.safetensors"));
        let options = ConvertOptions {
            drop_opaque: true,
            ..Default::default()
        };
        convert(&*source, &path, OutputFormat::SafetensorsFile, options).unwrap();
        recorded(&path);
        rewrite(&path, |_, data| {
            data.iter_mut().take(1).for_each(|byte| *byte ^= 1)
        });
        let checkpoint = opened(&path);
        assert_eq!(checkpoint.digests(), None, "{fixture}");
        let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{fixture}: {:?}", report.problems);
        assert!(report.stale_digests, "{fixture}");
        // A copy has its own again.
        let copy = directory.path().join(format!("{fixture}-copy.safetensors"));
        convert(
            &*checkpoint,
            &copy,
            OutputFormat::SafetensorsFile,
            ConvertOptions::default(),
        )
        .unwrap();
        assert_eq!(recorded(&copy), digest(&*checkpoint, 1).unwrap());
    }
}

#[test]
fn data_that_was_changed_in_its_place_is_not_what_the_digests_say() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("one.safetensors");
    let source = opened(&fixtures().join("misc_ws2/dcp"));
    convert(
        &*source,
        &path,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let report = verify(&*opened(&path), Level::Deep, VerifyOptions::default()).unwrap();
    assert_eq!((report.problems.len(), report.stale_digests), (1, false));
    let copy = directory.path().join("copy.pt");
    let options = ConvertOptions::default();
    let error = convert(&*opened(&path), &copy, OutputFormat::Torch, options).unwrap_err();
    assert!(
        matches!(&error, FileError::Digests { names, .. } if names.len() == 1),
        "{error}"
    );
    assert!(!copy.exists());
}

#[test]
fn a_save_whose_metadata_torch_has_encoded_records_the_same_digests() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, torchs) = (
        directory.path().join("ours"),
        directory.path().join("torchs"),
    );
    let state = sample([300, 401]);
    save(&state, 3, &ours, &Durable::new()).unwrap();
    // The same files, written by ranks that know no positions in the metadata: they count their own
    // items.
    let plans = state.plans(3);
    let global = plan_save(&plans, Deduplicate::default()).unwrap();
    let staging = Durable::new().prepare(&torchs, false).unwrap();
    let written: Vec<RankWritten> = (0..3)
        .map(|rank| {
            let mut selection = global.selections[rank].clone();
            for (entry, item) in selection.kept.iter_mut().enumerate() {
                (item.entry, item.chunk) = (entry as u32, 0);
            }
            let items = RankItems {
                rank,
                plan: &plans[rank],
                selection: &selection,
                source: &state,
            };
            write_rank(&staging, &items, &WriteOptions::default(), None).unwrap()
        })
        .collect();
    finish_encoded(
        staging,
        &std::fs::read(ours.join(".metadata")).unwrap(),
        &written,
    )
    .unwrap();
    assert_eq!(recorded(&torchs), recorded(&ours));
}
