//! Memory and work of a command are for what is asked of it: what lies beside that in a checkpoint
//! costs next to nothing, whatever its size. Both are counted, by an allocator and by the system,
//! so this binary has no other test.

#![cfg(target_os = "linux")]
#![expect(
    clippy::disallowed_methods,
    reason = "tests write files beside checkpoints by hand"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use fsdp_cli::embed;
use fsdp_formats::internals::encode_value;
use fsdp_layout::{DType, PlainTensor, PlainValue};
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};
use proptest::prelude::*;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The kinds of content beside the tensor that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// A tensor.
    Tensor,
    /// Bytes, which are one value.
    Bytes,
    /// A list of entries of a log, in the state dict.
    Log,
    /// A log in the JSON file of a trainer.
    TrainersLog,
    /// The texts of a vocabulary, in the header of a GGUF file.
    Vocabulary,
    /// A file that is no part of the state: a tokenizer.
    File,
}

/// Each format with what may lie beside the tensor in it.
const CASES: [(&str, &[Beside]); 6] = [
    ("torch", &[Beside::Tensor, Beside::Bytes, Beside::Log]),
    (
        "dcp",
        &[Beside::Tensor, Beside::Bytes, Beside::Log, Beside::File],
    ),
    ("safetensors", &[Beside::Tensor, Beside::Log]),
    ("hf", &[Beside::Tensor, Beside::File, Beside::TrainersLog]),
    (
        "torch-checkpointing",
        &[Beside::Tensor, Beside::Bytes, Beside::Log],
    ),
    ("gguf", &[Beside::Tensor, Beside::Vocabulary]),
];

/// Runs `fsdp` with these arguments in this process, so that its allocations are counted. It must
/// succeed. Returns what it has written to stdout.
fn run(arguments: &[&str]) -> String {
    let arguments = arguments.iter().map(OsString::from);
    let (outcome, output) = embed::report(arguments, Default::default());
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
    output
}

fn tensor(numbers: &[f32]) -> PlainValue {
    PlainValue::Tensor(PlainTensor {
        dtype: DType::F32,
        shape: vec![numbers.len()],
        data: numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect(),
    })
}

/// Returns so many entries of a log.
fn log(count: usize) -> PlainValue {
    let entry = |step: usize| {
        PlainValue::Dict(vec![
            ("step".into(), PlainValue::Int(step as i64)),
            ("loss".into(), PlainValue::Float(step as f64 / 7.0)),
        ])
    };
    PlainValue::List((0..count).map(entry).collect())
}

/// Writes a checkpoint of this format, with a tensor `w` of four elements and so much beside it.
/// Returns its path.
fn write(parent: &Path, format: &str, beside: Beside, count: usize, is_first: bool) -> PathBuf {
    if format == "gguf" {
        return write_gguf(parent, beside, count);
    }
    let item = match beside {
        Beside::Tensor => tensor(&vec![1.5; 8 * count]),
        Beside::Bytes => PlainValue::Bytes(vec![7; 32 * count]),
        Beside::Log => log(count),
        _ => PlainValue::Int(1),
    };
    let wanted = PlainValue::Dict(vec![("w".into(), tensor(&[1.0, 2.0, 3.0, 4.0]))]);
    let other = PlainValue::Dict(vec![("large".into(), item)]);
    let mut items = vec![("model".into(), wanted), ("other".into(), other)];
    if !is_first {
        items.reverse();
    }
    let directory = if format == "torch" {
        parent.to_owned()
    } else {
        parent.join("source")
    };
    fs::create_dir_all(&directory).unwrap();
    let source = directory.join("step-10.pt");
    fs::write(&source, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    if format == "torch" {
        return source;
    }
    let ending = if format == "safetensors" {
        ".safetensors"
    } else {
        ""
    };
    let path = parent.join(format!("step-20{ending}"));
    run(&[
        "convert",
        source.to_str().unwrap(),
        path.to_str().unwrap(),
        "--to",
        format,
    ]);
    match beside {
        Beside::File => fs::write(path.join("tokenizer.json"), " ".repeat(32 * count)).unwrap(),
        Beside::TrainersLog => {
            let entries = vec![r#"{"loss": 0.25, "step": 10}"#; count].join(", ");
            let state = format!(r#"{{"global_step": 10, "log_history": [{entries}]}}"#);
            fs::write(path.join("trainer_state.json"), state).unwrap();
        }
        _ => {}
    }
    path
}

/// Writes a GGUF file with a tensor `model.w`, and a vocabulary or another tensor.
fn write_gguf(parent: &Path, beside: Beside, count: usize) -> PathBuf {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let sizes = match beside {
        Beside::Tensor => vec![("model.w", 4), ("other.large", 8 * count)],
        _ => vec![("model.w", 4)],
    };
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((sizes.len() as u64).to_le_bytes());
    let vocabulary = if beside == Beside::Vocabulary {
        count
    } else {
        1
    };
    file.extend(1u64.to_le_bytes());
    file.extend(text("tokens"));
    file.extend([9u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
    file.extend((vocabulary as u64).to_le_bytes());
    (0..vocabulary).for_each(|number| file.extend(text(&format!("a long word {number}"))));
    let mut offset = 0;
    for (name, size) in &sizes {
        file.extend(text(name));
        file.extend(1u32.to_le_bytes());
        file.extend((*size as u64).to_le_bytes());
        file.extend(0u32.to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += (4 * size).next_multiple_of(32);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(
        [1f32, 2.0, 3.0, 4.0]
            .iter()
            .flat_map(|number| number.to_le_bytes()),
    );
    file.resize(file.len().next_multiple_of(32) + offset - 32, 0);
    let path = parent.join("step-20.gguf");
    fs::write(&path, file).unwrap();
    path
}

/// The cost of a command: the most bytes that were allocated at once, and those that were read.
#[derive(Debug, Clone, Copy)]
struct Cost {
    memory: usize,
    read: usize,
}

/// Returns the bytes that this process has read so far.
fn bytes_read() -> usize {
    let counts = fs::read_to_string("/proc/self/io").unwrap();
    let line = counts.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

/// Measures the cost of a command when it runs for the second time.
fn cost(command: impl Fn()) -> Cost {
    // The first run also sets up what the process keeps, such as thread pools.
    command();
    let (live, read) = (live_bytes(), bytes_read());
    reset_peak();
    command();
    Cost {
        memory: peak_bytes() - live,
        read: bytes_read() - read,
    }
}

/// Returns the bytes of a file, or of all files in a directory.
fn size(path: &Path) -> usize {
    if path.is_file() {
        return path.metadata().unwrap().len() as usize;
    }
    let entries = fs::read_dir(path).unwrap();
    entries.map(|entry| size(&entry.unwrap().path())).sum()
}

/// A command, as messages name it, and its cost.
type NamedCost = (&'static str, Cost);

/// Returns the costs of commands that ask for one small tensor, or for no data, and the bytes of
/// what lies beside it.
fn costs(format: &str, beside: Beside, count: usize, is_first: bool) -> ([NamedCost; 3], usize) {
    let parent = TempDir::new().unwrap();
    let run_directory = parent.path().join("run");
    fs::create_dir(&run_directory).unwrap();
    let path = write(&run_directory, format, beside, count, is_first);
    let to = parent.path().join("to");
    let [source, run_text, to] = [&path, &run_directory, &to].map(|path| path.to_str().unwrap());
    // In the folder of a trainer, the model's keys are below `model`.
    let key = match beside {
        Beside::TrainersLog => "model.model.w",
        _ => "model.w",
    };
    let convert = [
        "convert",
        source,
        to,
        "--to",
        "safetensors",
        "--include",
        key,
        "--overwrite",
        "--threads",
        "1",
    ];
    let cat = || assert_eq!(run(&["cat", source, key]), "1.0 2.0 3.0 4.0\n");
    let costs = [
        ("cat", cost(cat)),
        ("convert --include", cost(|| drop(run(&convert)))),
        ("ls", cost(|| drop(run(&["ls", run_text])))),
    ];
    // A safetensors file has its values in a file beside it.
    let values = format!("{}.values.json", source.trim_end_matches(".safetensors"));
    let values_size = fs::metadata(values).map_or(0, |file| file.len() as usize);
    (costs, size(&path) + values_size)
}

/// Returns the most that each byte beside what is asked may cost: bytes of memory, and bytes that
/// are read.
///
/// A pickle, JSON and the header of GGUF have no index, so they are read as a whole, once; the
/// memory is that of what they describe. All else is not even looked at.
fn most_for_a_byte(format: &str, beside: Beside) -> (usize, usize) {
    let is_of_torch = ["torch", "torch-checkpointing"].contains(&format);
    match beside {
        // `ls` counts the values, which it holds.
        // `ls` holds the values that it counts.
        Beside::Log | Beside::Bytes if is_of_torch => (40, 1),
        Beside::Log if ["safetensors", "hf"].contains(&format) => (2, 1),
        Beside::TrainersLog => (40, 1),
        Beside::Vocabulary => (2, 1),
        _ => (0, 0),
    }
}

/// Bytes that a command may take besides: for hashes of blocks, and buffers that grow with their
/// input up to a limit, of which that of GGUF's header is the largest.
const BESIDES: usize = 1 << 20;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_lies_beside_what_is_asked_costs_next_to_nothing(
        count in 6000usize..7000,
        is_first in any::<bool>(),
    ) {
        for (format, besides) in CASES {
            for &beside in besides {
                let (before, small) = costs(format, beside, count, is_first);
                let (after, large) = costs(format, beside, 12 * count, is_first);
                let growth = large - small;
                prop_assert!(growth > BESIDES + BESIDES / 4, "{format} {beside:?}: {growth}");
                for ((command, before), (_, after)) in before.into_iter().zip(after) {
                    let (memory, read) = most_for_a_byte(format, beside);
                    let text = format!("{format} {beside:?} {command} {growth}: {before:?} {after:?}");
                    println!("{text}");
                    prop_assert!(after.memory <= before.memory + memory * growth + BESIDES, "{text}");
                    prop_assert!(after.read <= before.read + read * growth + BESIDES, "{text}");
                }
            }
        }
    }
}
