//! The fuzz targets, one function for each. Each input must give an error or a value, never a
//! panic, and a value that was read must be written and read again the same. The tests of
//! `fsdp-tools` run the same functions over the seeds.

use std::path::Path;

use fsdp_formats::checkpoint::{Checkpoint, VALUES_FILE, open};
use fsdp_formats::internals::{
    Directory, Header, Integrity, StoredTensor, decode_value, encode_value, parse, value_of,
};
use fsdp_formats::metadata::{decode, encode};
use fsdp_formats::plan::{LoadRequest, plan_load};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

/// A target, by its name.
pub type Named = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Named; 6] = [
    ("pickle", pickle),
    ("torch_archive", torch_archive),
    ("dcp_metadata", dcp_metadata),
    ("safetensors_header", safetensors_header),
    ("safetensors_directory", safetensors_directory),
    ("integrity", integrity),
];

/// A pickle of plain values.
pub fn pickle(data: &[u8]) {
    let Ok(pickle) = parse(data) else { return };
    let Ok(value) = value_of(&pickle, pickle.root()) else {
        return;
    };
    survives(&value);
}

fn survives(value: &PlainValue) {
    // Some values cannot be written: dicts with tensors as keys, say.
    let Ok(item) = encode_value(value) else {
        return;
    };
    let again = decode_value(&item).expect("what was written is read");
    assert!(value.same_bits(&again), "{value:?} became {again:?}");
}

/// A file of `torch.save`, and an item of a DCP file.
pub fn torch_archive(data: &[u8]) {
    let bytes = data.to_vec();
    let Ok(directory) = Directory::read(&bytes) else {
        return;
    };
    for name in directory.records.keys() {
        let _ = directory.read_record(&bytes, name, 1 << 20);
    }
    let _ = StoredTensor::locate(&bytes);
    if let Ok(value) = decode_value(&bytes) {
        survives(&value);
    }
    in_directory(&[("file.pt", data)], |path| {
        everything(&path.join("file.pt"))
    });
}

/// `.metadata` of a DCP directory.
pub fn dcp_metadata(data: &[u8]) {
    let Ok(metadata) = decode(data) else { return };
    let again = decode(&encode(&metadata)).expect("what was written is read");
    assert_eq!(metadata, again);
    for (fqn, tensor) in metadata.tensors() {
        let boxes = vec![TensorBox::whole(&tensor.shape)];
        let request = LoadRequest {
            fqn: fqn.to_owned(),
            dtype: tensor.properties.dtype,
            shape: tensor.shape.clone(),
            boxes,
        };
        let _ = plan_load(&metadata, &[request]);
    }
    in_directory(
        &[(".metadata", data), ("__0_0.distcp", &[0; 2048])],
        everything,
    );
}

/// One safetensors file: whatever we read, the `safetensors` crate reads the same.
pub fn safetensors_header(data: &[u8]) {
    let Ok(header) = Header::read(&data.to_vec()) else {
        return;
    };
    let theirs =
        safetensors::SafeTensors::deserialize(data).expect("the safetensors crate reads it too");
    assert_eq!(theirs.len(), header.tensors.len());
    for (name, info) in &header.tensors {
        let tensor = theirs.tensor(name).expect("it has the same tensors");
        // Types that safetensors does not know are bytes there, in a dimension more.
        assert_eq!(&tensor.shape()[..info.shape.len()], info.shape);
        let range =
            (header.data_offset + info.start) as usize..(header.data_offset + info.end) as usize;
        assert_eq!(tensor.data(), &data[range]);
    }
}

/// The JSON files of a directory of safetensors files: the index, the values, torch's sharding
/// notes.
pub fn safetensors_directory(data: &[u8]) {
    let Some((kind, json)) = data.split_first() else {
        return;
    };
    let tensors = br#"{"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},"b.0":{"dtype":"F32","shape":[],"data_offsets":[4,8]}}"#;
    let file = |header: &[u8]| [&(header.len() as u64).to_le_bytes(), header, &[1; 8]].concat();
    let plain = file(tensors);
    match kind % 3 {
        0 => in_directory(
            &[
                ("a.safetensors", &plain),
                ("model.safetensors.index.json", json),
            ],
            everything,
        ),
        1 => in_directory(
            &[("a.safetensors", &plain), (VALUES_FILE, json)],
            everything,
        ),
        _ => {
            let notes = serde_json::Value::String(String::from_utf8_lossy(json).into_owned());
            let mut header =
                format!(r#"{{"__metadata__":{{"DCP_SHARDING_INFO":{notes}}},"#).into_bytes();
            header.extend_from_slice(&tensors[1..]);
            let noted = file(&header);
            in_directory(
                &[
                    ("shard-00001.safetensors", &noted),
                    ("shard-00002.safetensors", &noted),
                ],
                everything,
            );
        }
    }
}

/// The integrity file, with its own hash put right, so that what stands before it is read at all.
pub fn integrity(data: &[u8]) {
    let _ = Integrity::decode(data);
    let hash = twox_hash::XxHash3_128::oneshot(data);
    let whole = [
        data,
        format!("{{\"xxh3_128\":\"{hash:032x}\"}}\n").as_bytes(),
    ]
    .concat();
    let Ok(integrity) = Integrity::decode(&whole) else {
        return;
    };
    let again = integrity.encode().expect("what was read is written");
    assert_eq!(
        Integrity::decode(&again).expect("what was written is read"),
        integrity
    );
    for file in integrity.files.values() {
        // As many as a hostile file may have; each takes sixteen digits of it.
        assert!(file.blocks().count() as u64 * 16 <= data.len() as u64);
    }
}

/// Makes the files in a directory that is then gone; in memory where the system has such a place.
fn in_directory(files: &[(&str, &[u8])], run: impl Fn(&Path)) {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    };
    let directory = tempfile::tempdir_in(parent).expect("a temporary directory");
    let inside = directory.path().join("checkpoint");
    #[expect(
        clippy::disallowed_methods,
        reason = "these files are what is tested, and soon gone"
    )]
    let write = || {
        std::fs::create_dir(&inside)?;
        files
            .iter()
            .try_for_each(|(name, bytes)| std::fs::write(inside.join(name), bytes))
    };
    write().expect("the temporary directory can be written");
    run(&inside);
}

/// Opens whatever is there, verifies and reads all of it, and converts it.
fn everything(path: &Path) {
    let Ok(checkpoint) = open(path, OpenOptions::default()) else {
        return;
    };
    let _ = verify(&*checkpoint, Level::Deep, VerifyOptions::default());
    // What does not fit its files fails early; what is huge all the same would only be slow.
    let small = checkpoint
        .metadata()
        .tensors()
        .all(|(_, tensor)| tensor.shape.iter().product::<usize>() < 1 << 20);
    if !small || checkpoint.metadata().entries.len() > 1000 {
        return;
    }
    let destination = path.with_file_name("converted");
    for (number, target) in [
        OutputFormat::Torch,
        OutputFormat::SafetensorsFile,
        OutputFormat::Dcp { ranks: 2 },
    ]
    .into_iter()
    .enumerate()
    {
        let destination = destination.with_extension(number.to_string());
        let options = ConvertOptions {
            threads: Some(1),
            ..ConvertOptions::default()
        };
        if convert(&*checkpoint, &destination, target, options).is_ok() {
            let again =
                open(&destination, OpenOptions::default()).expect("what was converted is read");
            same(&*checkpoint, &*again);
        }
    }
}

/// A conversion keeps all tensors. (Values keep theirs too, but may be nested otherwise by hostile
/// paths.)
fn same(a: &dyn Checkpoint, b: &dyn Checkpoint) {
    for (fqn, tensor) in a.metadata().tensors() {
        let Some(other) = b.metadata().tensor(fqn) else {
            continue;
        };
        assert_eq!(tensor.shape, other.shape, "`{fqn}`");
    }
}
