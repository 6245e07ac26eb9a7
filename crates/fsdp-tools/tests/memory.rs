//! Memory of convert and reshard, measured by a counting allocator: this binary has no other test.
//!
//! The source is sparse, so that only what is converted takes space on the disk: one copy of the
//! checkpoint at a time. `FSDP_TEST_LARGE=1` measures at 4 GiB besides, which takes a minute and 9
//! GiB of disk below `TMPDIR`, and prints what it finds: `FSDP_TEST_LARGE=1 cargo test --release -p
//! fsdp-tools --test memory -- --nocapture`.

#![expect(clippy::disallowed_methods, reason = "tests remove what they made")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::{Header, lay_out_tensor};
use fsdp_formats::metadata::{
    Chunk, Entry, METADATA_FILE, Metadata, StorageInfo, TensorEntry, TensorProperties, encode,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, TensorBox};
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};
use fsdp_tools::convert::{Cast, ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::tensor_parallel::{Rules, TensorParallelPlan};
use indexmap::IndexMap;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The promise is this and the largest chunk; what is seen is less, as no chunk is ever held.
const LIMIT: usize = 256 << 20;
const COLUMNS: usize = 1024;
const ROW: u64 = 4 * COLUMNS as u64;

/// Makes a DCP directory of one rank with holes for zeros: half of `total` in one tensor, the rest
/// in 16, and 1000 small ones. The last row of each tensor says which it is.
fn sparse(directory: &Path, total: u64) -> Vec<String> {
    std::fs::create_dir(directory).unwrap();
    let file = std::fs::File::create_new(directory.join("__0_0.distcp")).unwrap();
    let mut metadata = Metadata::default();
    let mut at = 0;
    let large = [("large".to_owned(), total / 2 / ROW)].into_iter();
    let medium = (0..16).map(|index| (format!("blocks.{index}.weight"), total / 32 / ROW));
    let small = (0..1000).map(|index| (format!("small.{index}"), 1));
    for (index, (fqn, rows)) in large.chain(medium).chain(small).enumerate() {
        let shape = vec![rows as usize, COLUMNS];
        let item = lay_out_tensor(DType::F32, &shape).unwrap();
        file.write_all_at(&item.head(0), at).unwrap();
        let end = at + item.storage_offset(0) + item.storage_length(0);
        file.write_all_at(&row(index), end - ROW).unwrap();
        file.write_all_at(&item.tail(&[0]), end).unwrap();
        let stored = StorageInfo {
            relative_path: "__0_0.distcp".to_owned(),
            offset: at,
            length: item.length(),
            transforms: Vec::new(),
        };
        let chunks = vec![Chunk {
            bounds: TensorBox::whole(&shape),
            stored: Some(stored),
        }];
        let tensor = TensorEntry {
            properties: TensorProperties::new(DType::F32),
            shape,
            chunks,
        };
        metadata.entries.insert(fqn, Entry::Tensor(tensor));
        at += item.length();
    }
    std::fs::write(directory.join(METADATA_FILE), encode(&metadata)).unwrap();
    metadata.entries.into_keys().collect()
}

/// Makes a row of numbers that bfloat16 can hold too.
fn row(index: usize) -> Vec<u8> {
    (0..COLUMNS)
        .flat_map(|column| (((index * 7 + column) % 256) as f32).to_le_bytes())
        .collect()
}

/// Checks that every tensor still ends with its own row.
fn check(path: &Path, keys: &[String], dtype: DType) {
    let checkpoint = open(path, OpenOptions::default()).unwrap();
    for (index, fqn) in keys.iter().enumerate() {
        let tensor = checkpoint.metadata().tensor(fqn).unwrap();
        assert_eq!(tensor.properties.dtype, dtype);
        let last = TensorBox::new(vec![tensor.shape[0] - 1, 0], vec![1, COLUMNS]);
        let mut found = vec![0; COLUMNS * dtype.size_in_bytes() as usize];
        checkpoint.read_box(fqn, &last, &mut found).unwrap();
        let wanted = row(index);
        let wanted = match dtype {
            DType::F32 => wanted,
            // The upper half of each number.
            DType::BF16 => wanted
                .as_chunks::<4>()
                .0
                .iter()
                .flat_map(|bytes| [bytes[2], bytes[3]])
                .collect(),
            _ => wanted
                .as_chunks()
                .0
                .iter()
                .flat_map(|b| f64::from(f32::from_le_bytes(*b)).to_le_bytes())
                .collect(),
        };
        assert!(found == wanted, "`{fqn}` in `{}`", path.display());
    }
}

fn remove(path: &Path) {
    if path.is_dir() {
        std::fs::remove_dir_all(path).unwrap()
    } else {
        std::fs::remove_file(path).unwrap()
    }
}

/// Converts, and asserts on the most that was allocated meanwhile.
fn measure(source: &Path, destination: &Path, target: OutputFormat, cast: Option<DType>) -> usize {
    let live = live_bytes();
    reset_peak();
    let opened = open(source, OpenOptions::default()).unwrap();
    let view = View::new(
        &*opened,
        |_| Rename::Keep,
        cast.map(|dtype| Cast {
            dtype,
            with_optimizer: true,
        }),
    )
    .unwrap();
    let options = ConvertOptions {
        threads: Some(4),
        ..ConvertOptions::default()
    };
    convert(&view, destination, target, options).unwrap();
    let peak = peak_bytes() - live;
    assert!(peak <= LIMIT, "{target:?}: {} MiB", peak >> 20);
    peak
}

/// Converts from one format to the next. Each checkpoint is made from the one before, whose hashes
/// are checked as it is read.
fn chain(total: u64, steps: &[(OutputFormat, Option<DType>)]) {
    let parent = tempfile::tempdir().unwrap();
    let mut last: PathBuf = parent.path().join("source");
    let keys = sparse(&last, total);
    let mut dtype = DType::F32;
    for (index, &(target, cast)) in steps.iter().enumerate() {
        let next = parent.path().join(format!("step-{index}"));
        let peak = measure(&last, &next, target, cast);
        report(&format!(
            "{:>5} MiB to {target:?}, {cast:?}: peak {} MiB",
            total >> 20,
            peak >> 20
        ));
        dtype = cast.unwrap_or(dtype);
        check(&next, &keys, dtype);
        remove(&last);
        last = next;
    }
}

#[expect(
    clippy::print_stderr,
    reason = "whoever asks for the large measurement wants its figures"
)]
fn report(line: &str) {
    eprintln!("{line}");
}

const EVERY_WAY: [(OutputFormat, Option<DType>); 8] = [
    (OutputFormat::Dcp { ranks: 3 }, None),
    (OutputFormat::SafetensorsFile, None),
    (OutputFormat::Dcp { ranks: 2 }, None),
    (OutputFormat::Torch, None),
    (
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 256 << 20,
        },
        None,
    ),
    (OutputFormat::SafetensorsShards { ranks: 5 }, None),
    // Casts read more than they write.
    (OutputFormat::Dcp { ranks: 1 }, Some(DType::F64)),
    (OutputFormat::SafetensorsFile, Some(DType::BF16)),
];

/// Writes the parts of tensor-parallel ranks, and asserts on the most that was allocated meanwhile.
fn parts_of_ranks(total: u64) {
    let parent = tempfile::tempdir().unwrap();
    let (source, to) = (parent.path().join("source"), parent.path().join("to"));
    let keys = sparse(&source, total);
    let opened = open(&source, OpenOptions::default()).unwrap();
    let rules = Rules::new(
        &[
            "large=rowwise",
            "blocks.*=packed_colwise",
            "small.*=replicate",
        ],
        [].into(),
    )
    .unwrap();
    let plan = TensorParallelPlan::new(opened.metadata(), &rules, 4).unwrap();
    let live = live_bytes();
    reset_peak();
    let options = ConvertOptions {
        threads: Some(4),
        tensor_parallel: Some(&plan),
        ..ConvertOptions::default()
    };
    convert(
        &*opened,
        &to,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 1 << 30,
        },
        options,
    )
    .unwrap();
    let peak = peak_bytes() - live;
    assert!(peak <= LIMIT, "{} MiB", peak >> 20);
    check(&to, &keys, DType::F32);
}

#[test]
fn convert_and_reshard_take_the_same_memory_whatever_the_size() {
    chain(64 << 20, &EVERY_WAY);
    chain(
        1 << 30,
        &[
            (OutputFormat::Dcp { ranks: 3 }, None),
            (OutputFormat::SafetensorsFile, Some(DType::BF16)),
        ],
    );
    parts_of_ranks(1 << 30);
    if std::env::var_os("FSDP_TEST_LARGE").is_some() {
        chain(4 << 30, &EVERY_WAY);
        // One tensor of 5 GiB: lengths beyond 32 bits in every format.
        chain(10 << 30, &[(OutputFormat::Torch, None)]);
    }
}

/// Items longer than 32 bits can say (zip64), read in place.
#[test]
fn an_item_beyond_4_gib_is_read_by_range() {
    let parent = tempfile::tempdir().unwrap();
    let source = parent.path().join("source");
    let keys = sparse(&source, 10 << 30);
    let live = live_bytes();
    reset_peak();
    check(&source, &keys, DType::F32);
    let opened = open(&source, OpenOptions::default()).unwrap();
    let first = TensorBox::new(vec![0, 0], vec![1, COLUMNS]);
    let mut zeros = vec![1; ROW as usize];
    opened.read_box("large", &first, &mut zeros).unwrap();
    assert!(zeros.iter().all(|&byte| byte == 0));
    assert!(peak_bytes() - live <= 64 << 20);
}

/// Descriptions of boxes are what takes memory when there are many of them.
#[test]
fn each_of_many_small_boxes_takes_little_memory() {
    const TENSORS: usize = 10_000;
    const ROWS: usize = 4;
    const MOST_BYTES_OF_BOX: usize = 3 << 10;
    let parent = tempfile::tempdir().unwrap();
    let source = parent.path().join("source.safetensors");
    let names: Vec<String> = (0..TENSORS)
        .map(|index| format!("model.layers.{index}.mlp.weight"))
        .collect();
    let shape = [ROWS, 2];
    let tensors = names
        .iter()
        .map(|name| (name.as_str(), DType::F32, &shape[..]));
    let header = Header::encode(&IndexMap::new(), tensors).unwrap();
    let elements = vec![0; TENSORS * ROWS * 2 * 4];
    std::fs::write(&source, [header, elements].concat()).unwrap();
    let to = parent.path().join("to");
    let target = OutputFormat::Dcp { ranks: 64 };
    let peak = measure(&source, &to, target, None);
    let bytes_of_box = peak / (TENSORS * ROWS);
    assert!(bytes_of_box <= MOST_BYTES_OF_BOX, "{bytes_of_box} bytes");
}
