//! Small files that would become large: what is built from a file takes at most 64 MiB beyond it,
//! and linear time.

use std::path::Path;

use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::{ArchiveLayout, decode_value, encode_value};
use fsdp_formats::metadata::{
    BytesEntry, Chunk, Entry, METADATA_FILE, Metadata, StorageInfo, TensorEntry, TensorProperties,
    decode, encode,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::with_causes;
use fsdp_layout::{DType, KeyPath, PathPart, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::bounded_beyond;

/// Makes a dict with keys of text.
fn dict(items: Vec<(&str, PlainValue)>) -> PlainValue {
    PlainValue::Dict(
        items
            .into_iter()
            .map(|(key, value)| (key.into(), value))
            .collect(),
    )
}

/// Encodes text, and notes it as this entry of the memo.
pub(crate) fn text(value: &str, memo: u8) -> Vec<u8> {
    [
        b"X".as_slice(),
        &(value.len() as u32).to_le_bytes(),
        value.as_bytes(),
        &[b'q', memo],
    ]
    .concat()
}

pub(crate) fn torch(pickle: Vec<u8>) -> Vec<u8> {
    let layout = ArchiveLayout::new("archive", pickle, &[]);
    [layout.head(0), layout.tail(&[])].concat()
}

/// Makes a `.metadata` of these attributes, each a name and the opcodes of its value.
pub(crate) fn metadata(attributes: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut pickle = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(".to_vec();
    for (name, value) in attributes {
        pickle.extend_from_slice(
            &[
                b"\x8c".as_slice(),
                &[name.len() as u8],
                name.as_bytes(),
                value,
            ]
            .concat(),
        );
    }
    pickle.extend_from_slice(b"ub.");
    pickle
}

/// Writes the files of a checkpoint (a single one is the checkpoint itself), and returns the error
/// of opening it, or the first problem that is found in it.
pub(crate) fn error_of(files: &[(&str, Vec<u8>)]) -> String {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("checkpoint");
    if let [(name, bytes)] = files
        && !name.starts_with('.')
    {
        std::fs::write(&path, bytes).unwrap();
    } else {
        std::fs::create_dir(&path).unwrap();
        for (name, bytes) in files {
            std::fs::write(path.join(name), bytes).unwrap();
        }
    }
    let size = files.iter().map(|(_, bytes)| bytes.len()).sum();
    checked(&path, size)
}

/// Opens and verifies a checkpoint whose files have so many bytes.
pub(crate) fn checked(path: &Path, size: usize) -> String {
    bounded_beyond(size, || match open(path, OpenOptions::default()) {
        Err(error) => with_causes(&error),
        Ok(checkpoint) => {
            let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
            report
                .problems
                .into_iter()
                .next()
                .map_or_else(|| "none".to_owned(), |problem| problem.error)
        }
    })
}

#[test]
fn text_that_is_referenced_many_times_is_not_copied_each_time() {
    let long = "x".repeat(100_000);
    let many = b"h\x00".repeat(100_000);
    let list = [
        b"\x80\x02}X\x01\x00\x00\x00t](".as_slice(),
        &text(&long, 0),
        &many,
        b"es.",
    ]
    .concat();
    let error = error_of(&[("file.pt", torch(list))]);
    assert!(error.contains("copies of text and bytes"), "{error}");

    // The paths of many keys, each of as many parts as a path may have.
    let path = [b"h\x00".repeat(199).as_slice(), b"t"].concat();
    let mut paths = [b"}(X\x01\x00\x00\x00k(".as_slice(), &text(&long, 0), b"t"].concat();
    for key in 0..500 {
        let key = format!("{key:03}");
        paths.extend([b"X\x03\x00\x00\x00".as_slice(), key.as_bytes(), b"(", &path].concat());
    }
    paths.push(b'u');
    let error = error_of(&[(
        METADATA_FILE,
        metadata(&[
            ("state_dict_metadata", b"}".to_vec()),
            ("planner_data", paths),
        ]),
    )]);
    assert!(error.contains("memory for metadata"), "{error}");

    let path = [
        b"cpathlib\nPosixPath\n(".as_slice(),
        &text(&long, 0),
        &many,
        b"tR",
    ]
    .concat();
    let meta = [
        b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n)\x81".as_slice(),
        &items(&[("checkpoint_id", &path)]),
        b"b",
    ]
    .concat();
    let error = error_of(&[(
        METADATA_FILE,
        metadata(&[
            ("state_dict_metadata", b"}".to_vec()),
            ("storage_meta", meta),
        ]),
    )]);
    assert!(error.contains("copies of text and bytes"), "{error}");
}

#[test]
fn long_keys_that_are_nested_deep_are_not_copied_for_each_leaf() {
    let mut pickle = [b"\x80\x02}".as_slice(), &text(&"k".repeat(50_000), 0)].concat();
    for _ in 0..149 {
        pickle.extend_from_slice(b"}h\x00");
    }
    pickle.extend_from_slice(b"}(");
    for leaf in 0..2000u16 {
        pickle.extend_from_slice(&[b"M".as_slice(), &leaf.to_le_bytes(), b"K\x01"].concat());
    }
    pickle.push(b'u');
    pickle.extend(b"s".repeat(150));
    pickle.push(b'.');
    let error = error_of(&[("file.pt", torch(pickle))]);
    assert!(error.contains("memory for keys"), "{error}");
}

#[test]
fn paths_of_torch_checkpointing_are_not_nested_without_limit() {
    let path = format!("[\"item\"{}]", ",0".repeat(100_000));
    let metadata = items(&[
        ("metadata", &items(&[(path.as_str(), b"]")])),
        ("world_size", b"K\x01"),
        ("rank_to_layout_info_mappings", b"}"),
    ]);
    let error = error_of(&[
        ("metadata.pkl", [b"\x80\x02", &metadata[..], b"."].concat()),
        ("item_0.pt", torch_with(b"}")),
    ]);
    assert!(error.contains("nesting"), "{error}");
}

/// Makes a zstd stream of these bytes, in which runs of one byte take four bytes for 128 KiB.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    const BLOCK: usize = 128 << 10;
    let mut out = b"\x28\xb5\x2f\xfd\x00\x58".to_vec();
    let blocks: Vec<&[u8]> = bytes.chunks(BLOCK).collect();
    for (index, block) in blocks.iter().enumerate() {
        let is_run = block.iter().all(|byte| byte == &block[0]);
        let header = (block.len() as u32) << 3
            | u32::from(is_run) << 1
            | u32::from(index + 1 == blocks.len());
        out.extend_from_slice(&header.to_le_bytes()[..3]);
        out.extend_from_slice(if is_run { &block[..1] } else { block });
    }
    out
}

#[test]
fn a_compressed_value_of_empty_lists_stays_small() {
    for (length, words) in [
        (190 << 20, "decompressed length"),
        (8 << 20, "memory for values"),
    ] {
        let mut pickle = b"\x80\x02(".to_vec();
        pickle.resize(length, b']');
        pickle.extend_from_slice(b"l.");
        let item = zstd(&torch(pickle));
        assert!(item.len() < 400 << 10);
        let stored = StorageInfo {
            relative_path: "__0_0.distcp".to_owned(),
            offset: 0,
            length: item.len() as u64,
            transforms: vec!["stream.zstd/1".to_owned()],
        };
        let mut metadata = Metadata::default();
        metadata.entries.insert(
            "v".to_owned(),
            Entry::Bytes(BytesEntry {
                stored: Some(stored),
            }),
        );
        let error = error_of(&[(METADATA_FILE, encode(&metadata)), ("__0_0.distcp", item)]);
        assert!(error.contains(words), "{error}");
    }
}

fn safetensors(bytes: usize) -> Vec<u8> {
    let header =
        format!(r#"{{"b":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        &vec![0; bytes],
    ]
    .concat()
}

fn values(of: &str) -> Vec<u8> {
    format!(r#"{{"format":"fsdp-values","version":1,"values":{{"v":{of}}}}}"#).into_bytes()
}

#[test]
fn a_tensor_that_many_values_name_is_not_read_for_each() {
    let named = format!("[{}]", vec![r#"{"$tensor":"b"}"#; 20_000].join(","));
    let files = [
        ("m.safetensors", safetensors(1 << 20)),
        ("values.json", values(&named)),
    ];
    let error = error_of(&files);
    assert!(error.contains("bytes of tensors in values"), "{error}");
}

#[test]
fn json_of_numbers_takes_no_more_than_its_file_and_a_little() {
    // In a header, an index, and the notes of shards.
    let numbers = format!("[{}1]", "1,".repeat(16 << 20));
    let header = format!(r#"{{"b":{{"dtype":"U8","shape":{numbers},"data_offsets":[0,1]}}}}"#);
    let header = [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        b"0",
    ]
    .concat();
    let error = error_of(&[("m.safetensors", header)]);
    assert!(error.contains("memory for the header"), "{error}");
    let dtypes = format!("{{{}\"b\":\"uint8\"}}", "\"b\":\"uint8\",".repeat(2 << 20));
    let header = serde_json::json!({
        "__metadata__": { "fsdp.dtypes": dtypes },
        "b": { "dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1] },
    });
    let header = header.to_string();
    let header = [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        b"0",
    ]
    .concat();
    let error = error_of(&[("m.safetensors", header)]);
    assert!(error.contains("memory for dtypes"), "{error}");
    let index = format!(
        r#"{{"weight_map":{{{}"b":"m.safetensors"}}}}"#,
        r#""b":"m","#.repeat(2 << 20)
    )
    .into_bytes();
    let error = error_of(&[
        ("model.safetensors.index.json", index),
        ("m.safetensors", safetensors(1)),
    ]);
    assert!(error.contains("memory for the index"), "{error}");
    // In the note of a tensor-parallel rank: a range for each element.
    let count = 150_000;
    let ranges: Vec<String> = (0..count).map(|at| format!("[{at},{}]", at + 1)).collect();
    let cut = format!(
        r#"{{"how":"","shape":[{count}],"dim":0,"ranges":[{}]}}"#,
        ranges.join(",")
    );
    let note = format!(r#"{{"rank":0,"files":[1],"tensors":{{"b":{cut}}}}}"#);
    let header = serde_json::json!({
        "__metadata__": { "fsdp.tensor_parallel": note },
        "b": { "dtype": "U8", "shape": [count], "data_offsets": [0, count] },
    });
    let header = header.to_string();
    let file = [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        &vec![0; count],
    ]
    .concat();
    let error = error_of(&[("model-rank-0-part-0.safetensors", file)]);
    assert!(error.contains("memory for parts of tensors"), "{error}");
}

#[test]
fn lists_and_attributes_that_are_shared_are_not_looked_through_each_time() {
    // A list of numbers, many times in a list that holds a dict at its end.
    let (numbers, times) = (b"K\x01".repeat(100_000), b"h\x00".repeat(100_000));
    let list = [
        b"\x80\x02}X\x01\x00\x00\x00t](](".as_slice(),
        &numbers,
        b"eq\x00",
        &times,
        b"}es.",
    ]
    .concat();
    let error = error_of(&[("file.pt", torch(list))]);
    assert!(error.contains("expanded size"), "{error}");
    // Modules with the same parameters, all of them `None`.
    let mut names = Vec::new();
    for name in 0..50_000u32 {
        names.extend_from_slice(
            &[
                b"X\x05\x00\x00\x00".as_slice(),
                format!("{name:05}").as_bytes(),
                b"N",
            ]
            .concat(),
        );
    }
    let state = [
        b"}(".as_slice(),
        &text("_parameters", 1),
        b"}(",
        &names,
        b"u",
        &text("_buffers", 2),
        b"}",
    ]
    .concat();
    let state = [state, text("_modules", 3), b"}uq\x00".to_vec()].concat();
    let module = b"ca\nb\n)R".as_slice();
    let mut modules = [
        b"\x80\x02}(X\x01\x00\x00\x00m".as_slice(),
        module,
        &state,
        b"b",
    ]
    .concat();
    for number in 0..50_000u32 {
        let key = [
            b"X\x05\x00\x00\x00".as_slice(),
            format!("{number:05}").as_bytes(),
        ]
        .concat();
        modules.extend_from_slice(&[&key[..], module, b"h\x00b"].concat());
    }
    modules.extend_from_slice(b"u.");
    let error = error_of(&[("file.pt", torch(modules))]);
    assert!(error.contains("expanded size"), "{error}");
}

/// Makes the opcodes of a storage of four bytes.
fn storage(key: &str) -> Vec<u8> {
    let start = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX";
    [
        start.as_slice(),
        &(key.len() as u32).to_le_bytes(),
        key.as_bytes(),
        b"X\x03\x00\x00\x00cpuK\x01tQ",
    ]
    .concat()
}

/// Makes the arguments of a tensor in a storage, whose dimensions all have this size. Its strides
/// are 0. `rest` is what follows after the hooks.
fn arguments(storage: &[u8], size: &[u8], dims: usize, rest: &[u8]) -> Vec<u8> {
    let (sizes, strides) = (size.repeat(dims), b"K\x00".repeat(dims));
    [
        b"(", storage, b"K\x00(", &sizes, b"t(", &strides, b"t\x89N", rest, b"t",
    ]
    .concat()
}

/// Makes a tensor, as [`arguments`] does.
pub(crate) fn tensor(storage: &[u8], size: &[u8], dims: usize, rest: &[u8]) -> Vec<u8> {
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        &arguments(storage, size, dims, rest)[..],
        b"R",
    ]
    .concat()
}

/// Makes a file of torch: a dict with one item, which has these opcodes, and the storage `0`.
fn torch_with(item: &[u8]) -> Vec<u8> {
    let pickle = [b"\x80\x02}X\x01\x00\x00\x00t", item, b"s."].concat();
    let layout = ArchiveLayout::new("archive", pickle, &[4]);
    [layout.head(0), vec![0; 4], layout.tail(&[0])].concat()
}

/// Makes a list that holds one item many times, which is this entry of the memo.
fn list_of(item: &[u8], memo: u8, times: usize) -> Vec<u8> {
    [
        b"](",
        item,
        &[b'q', memo],
        &[b'h', memo].repeat(times - 1),
        b"e",
    ]
    .concat()
}

/// Makes an object of an unknown class with this state.
fn object(class: &str, state: &[u8]) -> Vec<u8> {
    [format!("cm\n{class}\n)R").as_bytes(), state, b"b"].concat()
}

/// Makes a dict of these items.
pub(crate) fn items(items: &[(&str, &[u8])]) -> Vec<u8> {
    let items = items
        .iter()
        .map(|(key, value)| [&text(key, 251)[..], value].concat());
    [b"}(", &items.collect::<Vec<_>>().concat()[..], b"u"].concat()
}

/// Makes the opcodes that add so many items to a dict, all of them `None`.
fn nones(count: usize) -> Vec<u8> {
    let names =
        (0..count).map(|name| [b"\x8c\x08", format!("{name:08}").as_bytes(), b"N"].concat());
    [b"(", &names.collect::<Vec<_>>().concat()[..], b"u"].concat()
}

/// Makes a tuple of these items.
fn tuple(items: &[u8]) -> Vec<u8> {
    [b"(", items, b"t"].concat()
}

/// Makes a sharded tensor of one dimension, with this state.
fn sharded(class: &str, size: &[u8], state: &[u8]) -> Vec<u8> {
    let start =
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_wrapper_subclass\ncm\n";
    [
        start,
        class.as_bytes(),
        b"\n(Nctorch\nfloat32\n",
        size,
        b"\x85t",
        state,
        b"tR",
    ]
    .concat()
}

/// Makes a ShardedTensor that has one shard many times.
fn sharded_tensor(times: usize) -> Vec<u8> {
    let place = items(&[
        ("shard_offsets", &tuple(b"K\x00")),
        ("shard_sizes", &tuple(b"K\x01")),
    ]);
    let local = tensor(&storage("0"), b"K\x01", 1, b"");
    let shard = object(
        "Shard",
        &items(&[
            ("tensor", &local),
            ("metadata", &object("ShardMetadata", &place)),
        ]),
    );
    let metadata = object(
        "ShardedTensorMetadata",
        &items(&[("shards_metadata", b"]")]),
    );
    sharded(
        "ShardedTensor",
        b"K\x01",
        &tuple(&[list_of(&shard, 250, times), metadata].concat()),
    )
}

/// Makes a DTensor of one dimension. `more` is added to its state.
fn dtensor(size: &[u8], placements: &[u8], mesh: &[u8], coordinate: &[u8], more: &[u8]) -> Vec<u8> {
    let layout = object("_MeshLayout", &items(&[("shape", &tuple(mesh))]));
    let mesh = items(&[
        ("_layout", &layout),
        ("_coordinate_on_dim", &tuple(coordinate)),
    ]);
    let spec = items(&[
        ("placements", &tuple(placements)),
        ("mesh", &object("DeviceMesh", &mesh)),
    ]);
    let local = tensor(&storage("0"), size, 1, b"");
    let state = items(&[
        ("_local_tensor", &local),
        ("_spec", &object("DTensorSpec", &spec)),
    ]);
    sharded("DTensor", size, &[&state[..], more].concat())
}

/// The references to a shared object in a test: so many that a look through all of them for each
/// takes hours.
const MANY: usize = 200_000;

/// Each of these files is read, or refused with an error that contains these words ("none" for no
/// error). Without limits each would take hours, or all memory.
#[test]
fn what_many_tensors_share_is_not_looked_through_for_each() {
    let many = MANY;
    let again = |opcodes: &[u8]| opcodes.repeat(many);
    let plain = arguments(&storage("0"), b"K\x01", 1, b"");
    let typed = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n";
    let states = [
        typed,
        &plain[..],
        b"(",
        &again(b"N"),
        b"tq\x00",
        &again(b"h\x00"),
        b"tR",
    ]
    .concat();
    let flags = tensor(
        &storage("0"),
        b"K\x01",
        1,
        &[b"}", &nones(many)[..]].concat(),
    );
    let wrapped = [
        b"ctorch._utils\n_rebuild_parameter\nq\x00",
        &again(b"h\x00")[..],
        b"N\x85R",
        &again(b"\x85R"),
    ];
    let partial = object("_Partial", b"}");
    let replicate = object("Replicate", b"}");
    let replicates = [&replicate[..], b"q\x00", &again(b"h\x00")].concat();
    let then_partial = [&replicates[..], &partial].concat();
    let mesh = [b"K\x01".repeat(many + 1), b"K\x00".repeat(many + 1)];
    // A tensor that is cut into 1024 blocks, and then again and again.
    let into = |blocks: &[u8]| {
        object(
            "_StridedShard",
            &items(&[("dim", b"K\x00"), ("split_factor", blocks)]),
        )
    };
    let shard = object("Shard", &items(&[("dim", b"K\x00")]));
    let cuts = [
        &into(b"M\x00\x04")[..],
        &shard,
        b"q\x00",
        &b"h\x00".repeat(1998),
    ]
    .concat();
    let cut = [b"K\x01".repeat(2000), b"K\x00".repeat(2000)];
    // One that is cut into many blocks, and then into none.
    let (large, zero) = (b"J\x00\x00\x00\x04", b"K\x00");
    let no_blocks = dtensor(
        large,
        &[into(large), into(zero)].concat(),
        b"K\x01K\x01",
        b"K\x00K\x00",
        b"",
    );
    for (name, item, words) in [
        ("states", states, "none"),
        ("flags", list_of(&flags, 250, many), "number of attributes"),
        (
            "wrappers",
            list_of(&wrapped.concat(), 250, many),
            "wrapped too many times",
        ),
        (
            "attributes",
            list_of(
                &dtensor(b"K\x01", &partial, b"K\x01", b"K\x00", &nones(many)),
                250,
                many,
            ),
            "expanded size",
        ),
        (
            "placements",
            list_of(
                &dtensor(b"K\x01", &then_partial, b"K\x01", b"K\x00", b""),
                250,
                many,
            ),
            "expanded size",
        ),
        (
            "mesh",
            list_of(
                &dtensor(b"K\x01", &replicates, &mesh[0], &mesh[1], b""),
                250,
                many,
            ),
            "expanded size",
        ),
        ("no blocks", no_blocks, "none"),
        ("shards", sharded_tensor(many), "none"),
        (
            "blocks",
            list_of(
                &dtensor(b"M\x00\x04", &cuts, &cut[0], &cut[1], b""),
                250,
                many,
            ),
            "expanded size",
        ),
    ] {
        let error = error_of(&[("file.pt", torch_with(&item))]);
        assert!(error.contains(words), "{name}: {error}");
    }
}

#[test]
fn the_path_of_a_module_is_charged_for_each_of_the_modules_in_it() {
    let empty = items(&[
        ("_parameters", b"}"),
        ("_buffers", b"}"),
        ("_modules", b"}"),
    ]);
    let names = [
        b"}(",
        &text("n", 1)[..],
        &object("c", &empty),
        b"q\x00",
        &b"h\x01h\x00".repeat(MANY),
        b"u",
    ]
    .concat();
    let module = object(
        "c",
        &items(&[
            ("_parameters", b"}"),
            ("_buffers", b"}"),
            ("_modules", &names),
        ]),
    );
    let below = [b"}", &text(&"k".repeat(8 << 20), 2)[..], &module, b"s"].concat();
    let error = error_of(&[("file.pt", torch_with(&below))]);
    assert!(error.contains("memory for keys"), "{error}");
}

#[test]
fn storages_of_a_file_of_torch_before_1_6_may_share_a_long_tuple() {
    let shared = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01";
    let storages = [
        shared,
        &b"N".repeat(MANY)[..],
        b"tq\x00Q0",
        &b"h\x00Q0".repeat(MANY),
    ]
    .concat();
    let start = [
        b"\x80\x02\x8a\x0a".as_slice(),
        &[0x11; 10],
        b".\x80\x02M\xe9\x03.\x80\x02}.",
    ]
    .concat();
    let error = error_of(&[(
        "file.pt",
        [&start[..], b"\x80\x02", &storages, b"}.\x80\x02]."].concat(),
    )]);
    assert_eq!(error, "none");
}

#[test]
fn all_that_is_made_for_each_reference_to_an_object_is_charged() {
    // A list of lists: few bytes are many references.
    let many = |item: &[u8]| list_of(&list_of(item, 250, 700), 249, 700);
    let in_set = |item: &[u8]| [b"(", &many(item)[..], b"\x91"].concat();
    // Beside an opaque object, types and storages are described.
    let opaque = object("c", b"N");
    let described = |item: &[u8]| [b"](", &opaque[..], &many(item), b"e"].concat();
    let name = "x".repeat(10_000);
    let long = text(&name, 0);
    let large = tensor(&storage("0"), b"K\x01", 64, b"");
    let parameters = [&text("_parameters", 1)[..], b"h\x00"]
        .concat()
        .repeat(4000);
    let parameters = [b"}", &nones(4000)[..], b"q\x00", &parameters].concat();
    let module = items(&[
        ("_buffers", b"}"),
        ("_modules", b"}"),
        ("_parameters", &parameters),
    ]);
    for (what, item) in [
        (
            "sizes",
            in_set(&[b"ctorch\nSize\n(", &b"K\x01".repeat(64)[..], b"t\x85R"].concat()),
        ),
        (
            "paths",
            in_set(&[b"cpathlib\nPath\n", &long[..], b"\x85R"].concat()),
        ),
        (
            "devices",
            in_set(&[b"ctorch\ndevice\n", &long[..], b"\x85R"].concat()),
        ),
        ("tensors in values", in_set(&large)),
        ("tensors", many(&large)),
        (
            "keys of storages",
            many(&tensor(&storage(&name), b"K\x01", 1, b"")),
        ),
        (
            "placements",
            many(&dtensor(
                b"K\x01",
                &object(&name, b"}"),
                b"K\x01",
                b"K\x00",
                b"",
            )),
        ),
        ("opaque objects", many(&opaque)),
        ("types", described(format!("cm\n{name}\n").as_bytes())),
        ("storages", described(&storage("0"))),
        ("parameters", object("c", &module)),
    ] {
        let error = error_of(&[("file.pt", torch_with(&item))]);
        assert!(error.contains("is beyond the limit of"), "{what}: {error}");
    }
}

/// A file that takes no space on the disk must not take its length in memory.
#[test]
fn files_with_holes_are_not_read_into_memory() {
    let parent = tempfile::tempdir().unwrap();
    // As much as a pickle may have, with the right bytes at both ends.
    let sparse = |path: &Path, start: &[u8], length: u64| {
        std::fs::write(path, start).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(length).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"ub.", length - 3).unwrap();
    };
    for (name, file, start, length) in [
        (
            "metadata",
            METADATA_FILE,
            b"\x80\x04\x8d\xf0\xff\xff\x7f\x00\x00\x00\x00".as_slice(),
            2 << 30,
        ),
        ("integrity", ".integrity", b"{}\n", 4 << 30),
        (
            "index",
            "model.safetensors.index.json",
            b"{\"weight_map\":{",
            256 << 20,
        ),
    ] {
        let path = parent.path().join(name);
        std::fs::create_dir(&path).unwrap();
        let other = metadata(&[("state_dict_metadata", b"}".to_vec())]);
        std::fs::write(path.join(METADATA_FILE), other).unwrap();
        if name == "index" {
            std::fs::remove_file(path.join(METADATA_FILE)).unwrap();
            std::fs::write(path.join("m.safetensors"), safetensors(1)).unwrap();
        }
        sparse(&path.join(file), start, length);
        let error = checked(&path, 0);
        assert!(
            error.contains("nothing was ever written"),
            "{name}: {error}"
        );
    }
    // The header of a safetensors file.
    let path = parent.path().join("m.safetensors");
    sparse(
        &path,
        &[&99_000_000u64.to_le_bytes()[..], b"{\""].concat(),
        99_000_100,
    );
    let error = checked(&path, 0);
    assert!(error.contains("nothing was ever written"), "{error}");
    // A text, and an array of small numbers, in the header of a GGUF file.
    let path = parent.path().join("m.gguf");
    let value = |of: &[u8]| {
        let start = [
            b"GGUF".as_slice(),
            &3u32.to_le_bytes(),
            &0u64.to_le_bytes(),
            &1u64.to_le_bytes(),
        ]
        .concat();
        [
            &start[..],
            &1u64.to_le_bytes(),
            b"k",
            of,
            &(1u64 << 30).to_le_bytes(),
        ]
        .concat()
    };
    for (of, words) in [
        (b"\x08\0\0\0".as_slice(), "nothing was ever written"),
        (b"\x09\0\0\0\0\0\0\0", "memory for the header"),
    ] {
        sparse(&path, &value(of), 2 << 30);
        let error = checked(&path, 0);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_value_of_a_flat_tensor_is_not_copied_for_all_parameters_in_it() {
    let parameters = 20_000;
    let shape = PlainValue::Tuple(vec![PlainValue::Int(1)]);
    let shapes = (0..parameters)
        .map(|number| (number.to_string().as_str().into(), shape.clone()))
        .collect();
    let model = dict(vec![
        ("module", dict(Vec::new())),
        (
            "param_shapes",
            PlainValue::List(vec![PlainValue::Dict(shapes)]),
        ),
    ]);
    let flat = PlainTensor {
        dtype: DType::F32,
        shape: vec![parameters],
        data: vec![0; 4 * parameters],
    };
    let long = PlainValue::List(vec![PlainValue::Int(1); 20_000]);
    let state = dict(vec![
        (
            "single_partition_of_fp32_groups",
            PlainValue::List(vec![PlainValue::Tensor(flat)]),
        ),
        (
            "base_optimizer_state",
            dict(vec![(
                "state",
                dict(vec![("0", dict(vec![("long", long)]))]),
            )]),
        ),
    ]);
    let error = error_of(&[
        ("mp_rank_00_model_states.pt", encode_value(&model).unwrap()),
        (
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            encode_value(&dict(vec![("optimizer_state_dict", state)])).unwrap(),
        ),
    ]);
    assert!(error.contains("memory for pieces of tensors"), "{error}");
}

#[test]
fn attributes_that_many_objects_share_are_not_searched_for_each() {
    let mut shared = b"}q\x00(".to_vec();
    for attribute in 0..200_000u32 {
        shared.extend_from_slice(
            &[
                b"\x8c\x08".as_slice(),
                format!("{attribute:08}").as_bytes(),
                b"N",
            ]
            .concat(),
        );
    }
    shared.push(b'u');
    let mut storage = b"}(".to_vec();
    for item in 0..100_000u32 {
        let index =
            b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}\x8c\x03fqn\x8c\x08"
                .as_slice();
        storage.extend_from_slice(&[index, format!("{item:08}").as_bytes(), b"sb"].concat());
        storage.extend_from_slice(b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81");
        storage.extend_from_slice(if item == 0 { &shared } else { b"h\x00" });
        storage.push(b'b');
    }
    storage.push(b'u');
    let error = error_of(&[(
        METADATA_FILE,
        metadata(&[
            ("state_dict_metadata", b"}".to_vec()),
            ("storage_data", storage),
        ]),
    )]);
    assert!(error.contains("number of attributes"), "{error}");
}

/// The budget is for what nobody writes: a `.metadata` of many small chunks, and a long list of
/// small numbers, pass.
#[test]
fn large_honest_files_are_within_the_budget() {
    let mut metadata = Metadata::default();
    let (rows, tensors) = (64, 2000);
    for tensor in 0..tensors {
        let chunks = (0..rows).map(|row| Chunk {
            bounds: TensorBox::new(vec![row, 0], vec![1, 1]),
            stored: Some(StorageInfo {
                relative_path: format!("__{row}_0.distcp"),
                offset: 100 * tensor,
                length: 100,
                transforms: Vec::new(),
            }),
        });
        let properties = TensorProperties::new(DType::F32);
        let entry = TensorEntry {
            properties,
            shape: vec![rows, 1],
            chunks: chunks.collect(),
        };
        let fqn = format!("w.{tensor}");
        let path = KeyPath(vec![
            PathPart::Key("w".to_owned()),
            PathPart::Key(tensor.to_string()),
        ]);
        metadata
            .planner_data
            .get_or_insert_default()
            .insert(fqn.clone(), path);
        metadata.entries.insert(fqn, Entry::Tensor(entry));
    }
    let bytes = encode(&metadata);
    assert!(bytes.len() > 8 << 20);
    assert_eq!(decode(&bytes).unwrap().entries.len(), tensors as usize);
    // Two bytes for each number.
    let list = [b"\x80\x02](".as_slice(), &b"K\x07".repeat(4 << 20), b"e."].concat();
    let PlainValue::List(items) = decode_value(&torch(list)).unwrap() else {
        panic!("no list")
    };
    assert_eq!(items.len(), 4 << 20);
}
