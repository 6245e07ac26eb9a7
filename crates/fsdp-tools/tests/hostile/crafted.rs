//! Files made to do harm, one for each trick: refused with an error that says why, by every command
//! that reads.

use std::path::Path;
use std::sync::{Arc, Mutex};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::{ArchiveLayout, encode_value};
use fsdp_formats::metadata::{
    BytesEntry, Chunk, Entry, METADATA_FILE, Metadata, StorageInfo, TensorEntry, TensorProperties,
    encode,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, Step, StepHook};
use fsdp_layout::with_causes;
use fsdp_layout::{DType, KeyPath, PathPart, PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::bombs::{error_of, items, metadata, text};
use crate::bounded;

/// Returns the error of reading all of it and converting it; nothing but the checkpoint itself may
/// be left.
fn refused(path: &Path) -> String {
    let attempt = || -> Result<Option<String>, FileError> {
        let checkpoint = open(path, OpenOptions::default())?;
        let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default())?;
        let mut first = report
            .problems
            .into_iter()
            .next()
            .map(|problem| problem.error);
        for (number, target) in [
            OutputFormat::Torch,
            OutputFormat::SafetensorsFile,
            OutputFormat::Dcp { ranks: 2 },
        ]
        .into_iter()
        .enumerate()
        {
            let destination = path.with_file_name(format!("converted-{number}"));
            let converted = convert(
                &*checkpoint,
                &destination,
                target,
                ConvertOptions::default(),
            );
            assert_eq!(converted.is_ok(), destination.exists());
            first = first.or_else(|| converted.err().map(|error| with_causes(&error)));
        }
        Ok(first)
    };
    match bounded(attempt) {
        Ok(found) => found.unwrap_or_else(|| panic!("`{}` was taken", path.display())),
        Err(error) => with_causes(&error),
    }
}

/// A name, the files of a checkpoint (a single one may be the checkpoint itself), and words of the
/// error.
type Case<'a> = (&'a str, Files<'a>, &'a str);
type Files<'a> = Vec<(&'a str, Vec<u8>)>;

/// Writes each case as a checkpoint of its own, and looks for its words in the error.
fn check(cases: Vec<Case<'_>>) {
    for (name, files, words) in cases {
        let parent = tempfile::tempdir().unwrap();
        let path = match files.as_slice() {
            [(file, bytes)]
                if !file.starts_with('.') && *file != "model.safetensors.index.json" =>
            {
                let path = parent.path().join(file);
                std::fs::write(&path, bytes).unwrap();
                path
            }
            files => {
                let path = parent.path().join("checkpoint");
                std::fs::create_dir(&path).unwrap();
                for (file, bytes) in files {
                    std::fs::write(path.join(file), bytes).unwrap();
                }
                path
            }
        };
        let error = refused(&path);
        assert!(error.contains(words), "{name}: {error}");
    }
}

fn torch(pickle: &[u8], storage: usize) -> Vec<u8> {
    let layout = ArchiveLayout::new("archive", pickle.to_vec(), &[storage as u64]);
    [layout.head(0), vec![0; storage], layout.tail(&[0])].concat()
}

/// Makes a torch archive of one tensor; each argument is a piece of its pickle.
fn torch_tensor(numel: &[u8], offset: &[u8], shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let before = b"\x80\x02}X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu";
    let after = b"\x89ccollections\nOrderedDict\n)RtRs.";
    torch(
        &[before, numel, b"tQ", offset, shape, strides, after].concat(),
        64,
    )
}

/// Encodes an integer of eight bytes.
fn long(value: i64) -> Vec<u8> {
    [b"\x8a\x08".as_slice(), &value.to_le_bytes()].concat()
}

#[test]
fn pickles_that_would_run_something() {
    let mut cases = Vec::new();
    for (name, pickle) in [
        (
            "os.system",
            b"cos\nsystem\nX\x04\x00\x00\x00true\x85R.".as_slice(),
        ),
        ("eval", b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R."),
        (
            "stack global",
            b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        ),
        (
            "a loader of torch",
            b"ctorch.storage\n_load_from_bytes\nX\x00\x00\x00\x00\x85R.",
        ),
        ("getattr", b"cbuiltins\ngetattr\n."),
        ("a name in an allowed module", b"ctorch\nload\n."),
        ("numpy", b"cnumpy\ndtype\n."),
    ] {
        cases.push((
            name,
            vec![("file.pt", torch(pickle, 64))],
            "only running code could build",
        ));
        cases.push((
            name,
            vec![
                (METADATA_FILE, pickle.to_vec()),
                ("__0_0.distcp", Vec::new()),
            ],
            "is not allowed",
        ));
    }
    check(cases);
}

#[test]
fn pickles_that_would_take_all_memory() {
    let nested = |count: usize| {
        [
            b"\x80\x02".as_slice(),
            &b"(".repeat(count),
            &b"t".repeat(count),
            b".",
        ]
        .concat()
    };
    let wrapped = [
        b"\x80\x02}X\x01\x00\x00\x00tN".as_slice(),
        &b"\x85".repeat(100_000),
        b"s.",
    ]
    .concat();
    let mut laughs = b"\x80\x02}X\x01\x00\x00\x00t]q\x000".to_vec();
    for level in 0..40u8 {
        laughs.extend_from_slice(b"](");
        for _ in 0..10 {
            laughs.extend_from_slice(&[b'h', level]);
        }
        laughs.extend_from_slice(&[b'e', b'q', level + 1, b'0']);
    }
    laughs.extend_from_slice(b"h\x28s.");
    let cases = [
        (
            "a frame of 2^63 bytes",
            b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.".to_vec(),
            "beyond the limit",
        ),
        (
            "text of 2^64 bytes",
            b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.".to_vec(),
            "beyond the limit",
        ),
        (
            "text of 4 GiB",
            b"\x80\x02X\xff\xff\xff\xff.".to_vec(),
            "beyond the limit",
        ),
        (
            "an integer of 4 GiB",
            b"\x80\x02\x8b\xff\xff\xff\xff.".to_vec(),
            "beyond the limit",
        ),
        (
            "a memo index of 2^31",
            b"\x80\x02Nr\xff\xff\xff\x7f.".to_vec(),
            "beyond the limit",
        ),
        (
            "a memo index of nothing",
            b"\x80\x02j\xff\xff\xff\x7f.".to_vec(),
            "memo",
        ),
        ("deep marks", nested(100_000), "nesting"),
        ("deep tuples", wrapped, "nesting"),
        (
            "a list in itself",
            b"\x80\x02}X\x01\x00\x00\x00t]q\x00h\x00as.".to_vec(),
            "nesting",
        ),
        ("billion laughs", laughs, "expanded size"),
    ];
    check(
        cases
            .into_iter()
            .map(|(name, pickle, words)| (name, vec![("file.pt", torch(&pickle, 64))], words))
            .collect(),
    );
}

#[test]
fn torch_tensors_that_are_not_in_their_storage() {
    let small = |value: u8| vec![b'K', value];
    let (shape, strides) = (b"K\x04\x85".to_vec(), b"K\x01\x85".to_vec());
    let square = |size: i64| [long(size), long(size), b"\x86".to_vec()].concat();
    let cases = [
        (
            "a storage of 2^62 elements",
            long(1 << 62),
            small(0),
            shape.clone(),
            strides.clone(),
            "too large",
        ),
        (
            "a storage longer than its record",
            long(1 << 40),
            small(0),
            shape.clone(),
            strides.clone(),
            "storage",
        ),
        (
            "an offset beyond",
            small(4),
            small(4),
            shape.clone(),
            strides.clone(),
            "beyond its storage",
        ),
        (
            "a stride beyond",
            small(4),
            small(0),
            shape.clone(),
            b"K\x02\x85".to_vec(),
            "beyond its storage",
        ),
        (
            "a shape that overflows",
            small(16),
            small(0),
            square(1 << 40),
            b"K\x00K\x00\x86".to_vec(),
            "too many",
        ),
        (
            "a stride that overflows",
            small(16),
            small(0),
            b"K\x02K\x02\x86".to_vec(),
            square(i64::MAX),
            "beyond",
        ),
        (
            "a negative size",
            small(16),
            small(0),
            [long(-4), b"\x85".to_vec()].concat(),
            strides.clone(),
            "size",
        ),
        (
            "another number of strides",
            small(16),
            small(0),
            shape.clone(),
            b"K\x01K\x01\x86".to_vec(),
            "differ",
        ),
    ];
    let file = |(name, numel, offset, shape, strides, words): (
        _,
        Vec<u8>,
        Vec<u8>,
        Vec<u8>,
        Vec<u8>,
        _,
    )| {
        (
            name,
            vec![("file.pt", torch_tensor(&numel, &offset, &shape, &strides))],
            words,
        )
    };
    check(cases.into_iter().map(file).collect());
}

/// A tensor that repeats one element by strides of 0 is legal, and larger than its file: 2^50
/// elements of it are not held in memory by anything but a request for all.
#[test]
fn a_tensor_of_repeated_elements_takes_no_memory() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("file.pt");
    let shape = [long(1 << 25), long(1 << 25), b"\x86".to_vec()].concat();
    std::fs::write(
        &path,
        torch_tensor(b"K\x10", b"K\x00", &shape, b"K\x00K\x00\x86"),
    )
    .unwrap();
    bounded(|| {
        let checkpoint = open(&path, OpenOptions::default()).unwrap();
        assert_eq!(
            checkpoint.metadata().tensor("t").unwrap().shape,
            [1 << 25, 1 << 25]
        );
        assert!(
            verify(&*checkpoint, Level::Hashes, VerifyOptions::default())
                .unwrap()
                .is_ok()
        );
        let mut element = [1; 4];
        let last = TensorBox::new(vec![(1 << 25) - 1; 2], vec![1; 2]);
        checkpoint.read_box("t", &last, &mut element).unwrap();
        assert_eq!(element, [0; 4]);
    });
}

#[test]
fn a_dict_inside_a_value_with_a_key_twice() {
    let pickle =
        b"\x80\x02}X\x01\x00\x00\x00t}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u\x85s.";
    check(vec![(
        "a key twice",
        vec![("file.pt", torch(pickle, 64))],
        "a dict has a key twice",
    )]);
}

#[test]
fn zips_that_lie() {
    let good = torch(b"\x80\x02}X\x01\x00\x00\x00tK\x01s.", 64);
    let find = |what: &[u8], nth: usize| {
        (0..good.len() - what.len())
            .filter(|&at| good[at..].starts_with(what))
            .nth(nth)
            .unwrap()
    };
    let entry = find(b"PK\x01\x02", 0);
    let end = find(b"PK\x05\x06", 0);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let name = |nth: usize, name: &[u8]| with(find(b"archive/version", nth), name);
    // The end in 64 bits: number of entries, length and start of the directory, and where the
    // locator points.
    let zip64 = |count: u64, length: u64, start: u64, locator: u64| {
        let mut bytes = good[..end].to_vec();
        bytes.extend_from_slice(b"PK\x06\x06\x2c\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        [count, count, length, start]
            .iter()
            .for_each(|field| bytes.extend_from_slice(&field.to_le_bytes()));
        bytes.extend_from_slice(b"PK\x06\x07\0\0\0\0");
        bytes.extend_from_slice(&locator.to_le_bytes());
        bytes.extend_from_slice(b"\x01\0\0\0");
        bytes.extend_from_slice(&good[end..]);
        let last = bytes.len() - 22;
        bytes[last + 8..last + 20].fill(255);
        bytes
    };
    let (here, max) = (end as u64, u64::MAX);
    let (start, length) = (entry as u64, (end - entry) as u64);
    check(
        [
            ("a compressed record", with(entry + 10, &[8]), "compressed"),
            ("a compressed record, locally", with(8, &[8]), "compressed"),
            (
                "two lengths (a bomb)",
                with(entry + 20, &[255, 255, 255, 127]),
                "length",
            ),
            (
                "a length beyond the file",
                with(entry + 20, &[255, 255, 255, 127, 255, 255, 255, 127]),
                "directory",
            ),
            (
                "an absurd number of entries",
                with(end + 10, &[255, 254]),
                "number of entries",
            ),
            (
                "an absurd length of the directory",
                with(end + 12, &[254, 255, 255, 255]),
                "before its end record",
            ),
            (
                "a directory beyond the file",
                with(end + 16, &[254, 255, 255, 255]),
                "before its end record",
            ),
            ("no zip64 end", with(end + 10, &[255, 255]), "locator"),
            (
                "an absurd number of entries, zip64",
                zip64(max, length, start, here),
                "number of entries",
            ),
            (
                "an absurd length of the directory, zip64",
                zip64(1, max, 0, here),
                "before its end record",
            ),
            (
                "a directory beyond the file, zip64",
                zip64(1, 46, max, here),
                "before its end record",
            ),
            ("a locator beyond the file", zip64(1, 46, 0, max), "locator"),
            (
                "a locator to something else",
                zip64(1, 46, 0, here - 1),
                "zip64 end record",
            ),
            (
                "a path upwards",
                name(1, b"archive/../../x"),
                "plain relative path",
            ),
            (
                "an absolute path",
                name(1, b"/rchive/version"),
                "plain relative path",
            ),
            (
                "a backslash",
                name(1, b"archive\\..\\vers"),
                "plain relative path",
            ),
            ("a NUL", name(1, b"archive/versi\0n"), "plain relative path"),
            (
                "another root",
                name(1, b"brchive/version"),
                "several root directories",
            ),
            (
                "overlapping records",
                with(find(b"PK\x01\x02", 1) + 42, &[0; 4]),
                "overlap",
            ),
            (
                "another name in the local header",
                with(30, b"brchive"),
                "another record's",
            ),
            ("no local header", with(0, b"PK\x03\x05"), "local header"),
            ("no end", good[..good.len() - 1].to_vec(), "end record"),
        ]
        .into_iter()
        .map(|(name, bytes, words)| (name, vec![("file.pt", bytes)], words))
        .collect(),
    );
}

#[test]
fn gguf_files_that_lie() {
    let tensor = |name: &str, offset: u64| {
        let name = [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
        [
            &name[..],
            &1u32.to_le_bytes(),
            &4u64.to_le_bytes(),
            &0u32.to_le_bytes(),
            &offset.to_le_bytes(),
        ]
        .concat()
    };
    let file = |tensors: [Vec<u8>; 2], data_bytes: usize| {
        let start = [
            b"GGUF".as_slice(),
            &3u32.to_le_bytes(),
            &2u64.to_le_bytes(),
            &0u64.to_le_bytes(),
        ]
        .concat();
        let mut bytes = [start, tensors.concat()].concat();
        bytes.resize(bytes.len().next_multiple_of(32) + data_bytes, 0);
        vec![("file.gguf", bytes)]
    };
    check(vec![
        (
            "a name twice",
            file([tensor("w", 0), tensor("w", 32)], 48),
            "it has `w` twice",
        ),
        (
            "a tensor beyond the file",
            file([tensor("v", 0), tensor("w", 32)], 47),
            "the tensor `w` reaches beyond the end",
        ),
        (
            "a tensor in another one",
            file([tensor("v", 0), tensor("w", 0)], 48),
            "the tensor `w` begins at byte 0 of the data, in the tensor before it",
        ),
        (
            "a tensor far beyond the file",
            file([tensor("v", 0), tensor("w", u64::MAX - 31)], 48),
            "the tensor `w` begins at byte 18446744073709551584 of the data, too far",
        ),
    ]);
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        &vec![0; data],
    ]
    .concat()
}

#[test]
fn safetensors_that_lie() {
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let with_length = |length: u64| [&length.to_le_bytes()[..], b"{}      "].concat();
    let index = |file: &str, key: &str| {
        let index = format!(r#"{{"weight_map":{{"{key}":"{file}"}}}}"#).into_bytes();
        let good = safetensors(&tensor("[2]", "[0,8]"), 8);
        vec![
            ("model.safetensors.index.json", index),
            ("m.safetensors", good),
        ]
    };
    let sharded = |notes: &str| {
        let notes = serde_json::Value::String(notes.to_owned());
        let header = format!(
            r#"{{"__metadata__":{{"DCP_SHARDING_INFO":{notes}}},"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#
        );
        vec![
            ("m.safetensors", safetensors(&header, 8)),
            ("n.safetensors", safetensors("{}", 0)),
        ]
    };
    let values = |json: &str| {
        vec![
            ("m.safetensors", safetensors(&tensor("[2]", "[0,8]"), 8)),
            ("values.json", json.as_bytes().to_vec()),
        ]
    };
    let with_paths = |tensors: &[String], paths: &str| {
        let paths = serde_json::Value::String(paths.to_owned());
        let tensors: Vec<String> = tensors
            .iter()
            .map(|key| format!(r#""{key}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
            .collect();
        let header = format!(
            r#"{{"__metadata__":{{"fsdp.paths":{paths}}},{}}}"#,
            tensors.join(",")
        );
        vec![("m.safetensors", safetensors(&header, 0))]
    };
    let one = ["a".to_owned()];
    let long_path = format!(r#"{{"a":[{}"a"]}}"#, "\"p\",".repeat(100_000));
    let many: Vec<String> = (0..200).map(|key| format!("v{key}")).collect();
    let many_wide: Vec<String> = (0..200)
        .map(|key| format!(r#""v{key}":["{key}",1048575]"#))
        .collect();
    let many_wide = format!("{{{}}}", many_wide.join(","));
    let mut cases = vec![
        (
            "an index that leads out",
            index("../m.safetensors", "a"),
            "beside it only",
        ),
        (
            "an index of another directory",
            index("/etc/passwd", "a"),
            "beside it only",
        ),
        (
            "an index to a missing file",
            index("no.safetensors", "a"),
            "no.safetensors",
        ),
        (
            "an index to a missing tensor",
            index("m.safetensors", "b"),
            "does not hold",
        ),
        (
            "shard offsets that overflow",
            sharded(r#"{"a":{"saved_offsets":[18446744073709551615]}}"#),
            "make no sense",
        ),
        (
            "shard offsets of other rank",
            sharded(r#"{"a":{"saved_offsets":[0,0]}}"#),
            "make no sense",
        ),
        (
            "a shard far away",
            sharded(r#"{"a":{"saved_offsets":[1099511627776]}}"#),
            "of 1099511627778 elements",
        ),
        (
            "negative shard offsets",
            sharded(r#"{"a":{"saved_offsets":[-1]}}"#),
            "malformed",
        ),
        (
            "values of another format",
            values(r#"{"format":"x","version":1,"values":{}}"#),
            "another format",
        ),
        (
            "a value's tensor that is not there",
            values(r#"{"format":"fsdp-values","version":1,"values":{"v":{"$tensor":"b"}}}"#),
            "no tensor `b`",
        ),
        (
            "deep values",
            values(&format!(
                r#"{{"format":"fsdp-values","values":{}"#,
                "[".repeat(10_000)
            )),
            "malformed",
        ),
        (
            "a later field of values",
            values(r#"{"format":"fsdp-values","version":1,"values":{},"paths":{}}"#),
            "unknown field `paths`",
        ),
        ("a long path", with_paths(&one, &long_path), "nesting"),
        (
            "a position far away",
            with_paths(&one, r#"{"a":["l",99999999999]}"#),
            "position",
        ),
        (
            "many positions far away",
            with_paths(&many, &many_wide),
            "position",
        ),
    ];
    for (name, bytes, words) in [
        ("no header", with_length(0), "does not start with"),
        (
            "a header of 4 GiB",
            with_length(1 << 32),
            "beyond the limit",
        ),
        ("a header of 2^63", with_length(1 << 63), "beyond the limit"),
        (
            "a header of 2^64",
            with_length(u64::MAX),
            "beyond the limit",
        ),
        (
            "a shape that overflows",
            safetensors(&tensor("[18446744073709551615,2]", "[0,8]"), 8),
            "do not fit",
        ),
        (
            "a shape of zeros and absurdities",
            safetensors(&tensor("[0,18446744073709551615,9]", "[0,0]"), 0),
            "fit",
        ),
        (
            "a negative size",
            safetensors(&tensor("[-2]", "[0,8]"), 8),
            "malformed",
        ),
        (
            "data beyond the file",
            safetensors(&tensor("[2]", "[0,8]"), 4),
            "where the file does",
        ),
        ("a gap", safetensors(&tensor("[2]", "[4,12]"), 12), "gaps"),
        (
            "reversed offsets",
            safetensors(&tensor("[2]", "[8,0]"), 8),
            "do not fit",
        ),
        (
            "an unknown dtype",
            safetensors(&tensor("[2]", "[0,8]").replace("F32", "F33"), 8),
            "F33",
        ),
        (
            "deep JSON",
            safetensors(&format!("{{\"a\":{}", "[".repeat(100_000)), 0),
            "malformed",
        ),
        (
            "invalid UTF-8",
            [&2u64.to_le_bytes()[..], b"{\xff"].concat(),
            "malformed",
        ),
    ] {
        cases.push((name, vec![("file.safetensors", bytes)], words));
    }
    check(cases);
}

fn stored(path: &str, offset: u64, length: u64) -> StorageInfo {
    StorageInfo {
        relative_path: path.to_owned(),
        offset,
        length,
        transforms: Vec::new(),
    }
}

/// Makes a DCP directory of one tensor in these chunks, all at the start of a file of zeros.
fn dcp(shape: &[usize], chunks: &[TensorBox], at: StorageInfo) -> Files<'static> {
    let mut metadata = Metadata::default();
    let chunks = chunks
        .iter()
        .map(|bounds| Chunk {
            bounds: bounds.clone(),
            stored: Some(at.clone()),
        })
        .collect();
    let tensor = TensorEntry {
        properties: TensorProperties::new(DType::F32),
        shape: shape.to_vec(),
        chunks,
    };
    metadata
        .entries
        .insert("t".to_owned(), Entry::Tensor(tensor));
    vec![
        (METADATA_FILE, encode(&metadata)),
        ("__0_0.distcp", vec![0; 4096]),
    ]
}

#[test]
fn metadata_that_lies() {
    let whole = TensorBox::whole(&[4]);
    let here = || stored("__0_0.distcp", 0, 4096);
    let bounds = |offset: usize, size: usize| TensorBox::new(vec![offset], vec![size]);
    let mut pathological = Metadata::default();
    let long_path = KeyPath(vec![PathPart::Key("p".to_owned()); 100_000]);
    let item = encode_value(&PlainValue::Int(1)).unwrap();
    let value = BytesEntry {
        stored: Some(stored("__0_0.distcp", 0, item.len() as u64)),
    };
    pathological
        .entries
        .insert("v".to_owned(), Entry::Bytes(value));
    pathological.planner_data = Some([("v".to_owned(), long_path)].into_iter().collect());
    let compressed = StorageInfo {
        transforms: vec!["stream.zstd/1".to_owned()],
        ..here()
    };
    let unknown = StorageInfo {
        transforms: vec!["stream.none/1".to_owned()],
        ..here()
    };
    check(vec![
        (
            "overlapping chunks",
            dcp(&[4], &[bounds(0, 3), bounds(2, 2)], here()),
            "overlap",
        ),
        (
            "a chunk outside",
            dcp(&[4], &[bounds(2, 4)], here()),
            "does not lie in",
        ),
        (
            "a chunk that overflows",
            dcp(&[4], &[bounds(i64::MAX as usize, 2)], here()),
            "does not lie in",
        ),
        (
            "a chunk of other rank",
            dcp(&[4], &[TensorBox::whole(&[2, 2])], here()),
            "does not lie in",
        ),
        (
            "a chunk that is missing",
            dcp(&[4], &[bounds(0, 2)], here()),
            "hold 2 of 4",
        ),
        (
            "an absurd shape",
            dcp(&[1 << 40, 1 << 40], &[], here()),
            "too many elements",
        ),
        (
            "an absurd tensor in a small file",
            dcp(&[1 << 50], &[TensorBox::whole(&[1 << 50])], here()),
            "archive",
        ),
        (
            "a large tensor in a small file",
            dcp(&[1 << 28], &[TensorBox::whole(&[1 << 28])], here()),
            "archive",
        ),
        (
            "an item beyond the file",
            dcp(
                &[4],
                std::slice::from_ref(&whole),
                stored("__0_0.distcp", 4000, 200),
            ),
            "ends",
        ),
        (
            "an item that overflows",
            dcp(
                &[4],
                std::slice::from_ref(&whole),
                stored("__0_0.distcp", u64::MAX, 2),
            ),
            "",
        ),
        (
            "an item of 2^63 bytes",
            dcp(
                &[4],
                std::slice::from_ref(&whole),
                stored("__0_0.distcp", 0, 1 << 63),
            ),
            "",
        ),
        (
            "no archive",
            dcp(&[4], std::slice::from_ref(&whole), here()),
            "archive",
        ),
        (
            "no zstd",
            dcp(&[4], std::slice::from_ref(&whole), compressed),
            "zstd",
        ),
        (
            "an unknown transform",
            dcp(&[4], std::slice::from_ref(&whole), unknown),
            "is not supported",
        ),
        (
            "a path that leads out",
            dcp(
                &[4],
                std::slice::from_ref(&whole),
                stored("../__0_0.distcp", 0, 4096),
            ),
            "not a file inside",
        ),
        (
            "a long path of keys",
            vec![
                (METADATA_FILE, encode(&pathological)),
                ("__0_0.distcp", item),
            ],
            "nesting",
        ),
    ]);
}

#[test]
fn what_is_stored_under_a_key_that_the_metadata_does_not_list_is_named() {
    let object = |class: &str, state: &[(&str, &[u8])]| {
        let class = format!("ctorch.distributed.checkpoint.{class}\n)");
        [class.as_bytes(), b"\x81", &items(state), b"b"].concat()
    };
    let index = object(
        "metadata\nMetadataIndex",
        &[("fqn", &text("lost", 1)), ("offset", b"N"), ("index", b"N")],
    );
    let info = object(
        "filesystem\n_StorageInfo",
        &[
            ("relative_path", &text("__0_0.distcp", 2)),
            ("offset", b"K\x00"),
            ("length", b"K\x04"),
        ],
    );
    let places = [b"}", &index[..], &info, b"s"].concat();
    let error = error_of(&[
        (
            METADATA_FILE,
            metadata(&[
                ("state_dict_metadata", b"}".to_vec()),
                ("storage_data", places),
            ]),
        ),
        ("__0_0.distcp", vec![0; 4]),
    ]);
    assert!(error.contains("it has a place for `lost`"), "{error}");
}

/// Space is reserved before data is written: a claim that nothing stands behind must not take the
/// disk.
#[test]
fn no_space_is_reserved_for_what_cannot_be_there() {
    struct Watch(Mutex<u64>);
    impl StepHook for Watch {
        fn before(&self, step: Step, path: &Path) -> std::io::Result<()> {
            assert_ne!(step, Step::Preallocate, "`{}`", path.display());
            *self.0.lock().unwrap() += 1;
            Ok(())
        }
    }
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("checkpoint");
    std::fs::create_dir(&path).unwrap();
    let shape = [1usize << 28];
    for (file, bytes) in dcp(
        &shape,
        &[TensorBox::whole(&shape)],
        stored("__0_0.distcp", 0, 4096),
    ) {
        std::fs::write(path.join(file), bytes).unwrap();
    }
    let source = open(&path, OpenOptions::default()).unwrap();
    for target in [
        OutputFormat::Torch,
        OutputFormat::SafetensorsFile,
        OutputFormat::Dcp { ranks: 2 },
    ] {
        let durable = Durable::with_hook(Arc::new(Watch(Mutex::new(0))));
        let options = ConvertOptions {
            durable: Some(&durable),
            ..ConvertOptions::default()
        };
        let refused =
            convert(&*source, parent.path().join("converted"), target, options).unwrap_err();
        assert!(
            with_causes(&refused).contains("at least 1073741824 bytes"),
            "{refused}"
        );
    }
}

/// A few bytes of zstd that make 256 MiB: at most what the tensor's shape needs is made of them.
#[test]
fn a_zstd_bomb_stays_small() {
    // A frame without checksum: blocks that repeat one byte 128 KiB times (RLE), the last one
    // marked.
    let mut bomb = b"\x28\xb5\x2f\xfd\x00\x58".to_vec();
    for index in 0..2048u32 {
        let header = (128 << 10) << 3 | 1 << 1 | u32::from(index == 2047);
        bomb.extend_from_slice(&header.to_le_bytes()[..3]);
        bomb.push(0);
    }
    let at = StorageInfo {
        transforms: vec!["stream.zstd/1".to_owned()],
        ..stored("__0_0.distcp", 0, bomb.len() as u64)
    };
    let mut files = dcp(&[4], &[TensorBox::whole(&[4])], at.clone());
    files[1].1.clone_from(&bomb);
    let mut metadata = Metadata::default();
    metadata.entries.insert(
        "v".to_owned(),
        Entry::Bytes(BytesEntry { stored: Some(at) }),
    );
    let value = vec![(METADATA_FILE, encode(&metadata)), ("__0_0.distcp", bomb)];
    check(vec![
        ("as a tensor", files, "decompressed length"),
        ("as a value", value, "decompressed length"),
    ]);
}
