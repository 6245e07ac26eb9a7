//! Elements and chunks that a small file names many times: maps, plans and verification stay
//! linear.

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::open;
use fsdp_formats::digest::digest;
use fsdp_formats::internals::{ArchiveLayout, lay_out_tensor};
use fsdp_formats::metadata::{
    Chunk, Entry, METADATA_FILE, Metadata, StorageInfo, TensorEntry, TensorProperties, encode,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::with_causes;
use fsdp_layout::{DType, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::map::{Map, Mapped, Values};
use fsdp_tools::verify::{Level, VerifyOptions, compute_census, verify};

use crate::bombs::{checked, error_of};
use crate::bounded_beyond;

/// Makes a file of a tensor `t` of so many elements: one that strides of 0 repeat.
fn repeated(elements: u64) -> Vec<u8> {
    let before = b"\x80\x02}X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00\x8a\x08";
    let after = b"\x85K\x00\x85\x89ccollections\nOrderedDict\n)RtRs.";
    let pickle = [before.as_slice(), &elements.to_le_bytes(), after].concat();
    let layout = ArchiveLayout::new("archive", pickle, &[4]);
    [layout.head(0), vec![0; 4], layout.tail(&[0])].concat()
}

#[test]
fn a_map_makes_no_more_of_a_tensor_than_it_is_worth() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file.pt");
    std::fs::write(&path, repeated(1 << 40)).unwrap();
    let source = open(&path, OpenOptions::default()).unwrap();
    for text in ["t -> b.{i} | unstack(i)", "t -> b | unpermute(1)"] {
        let map = Map::parse(text, &Values::new()).unwrap();
        bounded_beyond(0, || assert!(Mapped::new(&*source, &map).is_err()));
    }
}

#[test]
fn no_plan_is_made_for_elements_that_are_not_stored() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file.pt");
    std::fs::write(&path, repeated(1 << 58)).unwrap();
    let checkpoint = open(&path, OpenOptions::default()).unwrap();
    let refused = |outcome: Result<(), FileError>| {
        let error = with_causes(&outcome.unwrap_err());
        assert!(
            error.contains("bytes of elements that are not stored"),
            "{error}"
        );
    };
    bounded_beyond(0, || refused(digest(&*checkpoint, 2).map(drop)));
    for target in [
        OutputFormat::Dcp { ranks: 3 },
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 1 << 20,
        },
        OutputFormat::SafetensorsShards { ranks: 3 },
        OutputFormat::Torch,
    ] {
        let to = parent.path().join("to");
        bounded_beyond(0, || {
            refused(convert(&*checkpoint, &to, target, ConvertOptions::default()).map(drop))
        });
        assert!(!to.exists());
    }
}

#[test]
fn repeated_elements_are_not_all_counted() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file.pt");
    std::fs::write(&path, repeated(1 << 40)).unwrap();
    let error = checked(&path, 0);
    assert!(
        error.contains("bytes of elements that are not stored"),
        "{error}"
    );
    let checkpoint = open(&path, OpenOptions::default()).unwrap();
    assert_eq!(checkpoint.metadata().tensor("t").unwrap().shape, [1 << 40]);
    for refused in [
        compute_census(&*checkpoint, "t").map(drop),
        diff(
            &*checkpoint,
            &*checkpoint,
            DiffOptions::default(),
            &mut |_, _| {},
        ),
    ] {
        let error = with_causes(&refused.unwrap_err());
        assert!(
            error.contains("bytes of elements that are not stored"),
            "{error}"
        );
    }
}

/// Chunks of one tensor are checked in linear time: the first step of each load and of each removal
/// of old checkpoints.
#[test]
fn a_tensor_of_many_chunks_is_verified_in_linear_time() {
    let (chunks, item) = (60_000, lay_out_tensor(DType::U8, &[1]).unwrap());
    let bytes = [item.head(0), vec![0], item.tail(&[0])].concat();
    let stored = StorageInfo {
        relative_path: "__0_0.distcp".to_owned(),
        offset: 0,
        length: bytes.len() as u64,
        transforms: Vec::new(),
    };
    let chunk = |at| Chunk {
        bounds: TensorBox::new(vec![at], vec![1]),
        stored: Some(stored.clone()),
    };
    let properties = TensorProperties::new(DType::U8);
    let tensor = TensorEntry {
        properties,
        shape: vec![chunks],
        chunks: (0..chunks).map(chunk).collect(),
    };
    let mut metadata = Metadata::default();
    metadata
        .entries
        .insert("t".to_owned(), Entry::Tensor(tensor));
    let parent = tempfile::tempdir().unwrap();
    std::fs::write(parent.path().join(METADATA_FILE), encode(&metadata)).unwrap();
    std::fs::write(parent.path().join("__0_0.distcp"), bytes).unwrap();
    let checkpoint = open(parent.path(), OpenOptions::default()).unwrap();
    for threads in [1, 3] {
        let report = verify(
            &*checkpoint,
            Level::Hashes,
            VerifyOptions {
                threads: Some(threads),
                progress: None,
            },
        )
        .unwrap();
        assert!(report.is_ok(), "{:?}", report.problems);
    }
}

/// torch's SAFETENSORS format has all tensors of a file in one blob, whose header is read once.
#[test]
fn many_tensors_in_one_blob_are_verified_in_linear_time() {
    let names: Vec<String> = (0..14_000).map(|number| format!("t.{number}")).collect();
    let header = names.iter().enumerate().map(|(at, name)| {
        (
            name.clone(),
            serde_json::json!({ "dtype": "U8", "shape": [1], "data_offsets": [at, at + 1] }),
        )
    });
    let header = serde_json::Value::Object(header.collect()).to_string();
    let blob = [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        &vec![0; names.len()],
    ]
    .concat();
    let mut metadata = Metadata::default();
    for name in names {
        let stored = StorageInfo {
            relative_path: "__0_0.distcp".to_owned(),
            offset: 0,
            length: 1,
            transforms: Vec::new(),
        };
        let chunks = vec![Chunk {
            bounds: TensorBox::whole(&[1]),
            stored: Some(stored),
        }];
        let entry = TensorEntry {
            properties: TensorProperties::new(DType::U8),
            shape: vec![1],
            chunks,
        };
        metadata.entries.insert(name, Entry::Tensor(entry));
    }
    let found = error_of(&[(METADATA_FILE, encode(&metadata)), ("__0_0.distcp", blob)]);
    assert_eq!(found, "none");
}
