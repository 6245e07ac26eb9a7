//! Every checkpoint that PyTorch wrote for us is read bit for bit.

use std::path::Path;

use fsdp_dcp::checkpoint::open;
use fsdp_dcp::metadata::{decode, encode};
use fsdp_dcp::reader::{CheckpointReader, OpenOptions};
use fsdp_layout::{PlainTensor, PlainValue, TensorBox};

use crate::truth::{Truth, fixtures, same};

/// Returns every fixture with a DCP directory.
pub(crate) fn dcp_fixtures() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("dcp/.metadata").is_file())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 25, "only {} fixtures", names.len());
    names
}

pub(crate) fn check_against_truth(directory: &Path, truth: &Truth) {
    let checkpoint = open(directory, OpenOptions::default()).unwrap();
    let metadata = checkpoint.metadata();
    let keys: Vec<&str> = metadata.entries.keys().map(String::as_str).collect();
    assert_eq!(
        keys.len(),
        truth.tensors.len() + truth.values.len(),
        "{}",
        directory.display()
    );
    for (key, (dtype, shape, bytes)) in &truth.tensors {
        let tensor = metadata
            .tensor(key)
            .unwrap_or_else(|| panic!("no tensor {key} in {}", directory.display()));
        assert_eq!(
            (tensor.properties.dtype, &tensor.shape),
            (*dtype, shape),
            "{key}"
        );
        let mut whole = vec![0xee; bytes.len()];
        checkpoint
            .read_box(key, &TensorBox::whole(shape), &mut whole)
            .unwrap();
        assert!(whole == *bytes, "{key} in {}", directory.display());
        // The lower right quarter, by ranges.
        if !shape.contains(&0) {
            let offsets: Vec<usize> = shape.iter().map(|n| n / 2).collect();
            let sizes: Vec<usize> = shape.iter().zip(&offsets).map(|(n, o)| n - o).collect();
            let part = TensorBox::new(offsets, sizes);
            let element = dtype.size_in_bytes() as usize;
            let mut read = vec![0; part.numel() * element];
            checkpoint.read_box(key, &part, &mut read).unwrap();
            let mut wanted = Vec::new();
            for run in fsdp_layout::boxes::copy_runs(&part, &TensorBox::whole(shape), &part) {
                wanted.extend_from_slice(&bytes[run.src * element..(run.src + run.len) * element]);
            }
            assert!(
                read == wanted,
                "part {part} of {key} in {}",
                directory.display()
            );
        }
    }
    for (key, value) in &truth.values {
        let read = checkpoint.read_value(key).unwrap();
        assert!(
            same(&read, value),
            "{key} in {}: {read:?} is not {value}",
            directory.display()
        );
    }
    if let Some(paths) = &metadata.planner_data {
        for (key, path) in paths {
            assert_eq!(truth.paths.get(key), Some(path), "{key}");
        }
    }
}

#[test]
fn every_dcp_checkpoint_of_pytorch_reads_bit_for_bit() {
    for name in dcp_fixtures() {
        check_against_truth(&fixtures().join(&name).join("dcp"), &Truth::of(&name));
    }
}

#[test]
fn writer_variants_read_the_same() {
    let truth = Truth::of("variants_ws2");
    for variant in ["peritem", "threads2", "lowestrank", "nocollectives", "zstd"] {
        check_against_truth(&fixtures().join("variants_ws2").join(variant), &truth);
    }
}

#[test]
fn safetensors_of_every_kind_read_the_same() {
    let truth = Truth::of("hf_ws2");
    for variant in [
        "fs_safetensors",
        "hf_consolidated",
        "hf_consolidated/sharded",
        "hf_full_2files",
        "hf_sharded",
    ] {
        check_against_truth(&fixtures().join("hf_ws2").join(variant), &truth);
    }
    check_against_truth(&fixtures().join("hf_ws2/truth.safetensors"), &truth);
}

#[test]
fn files_of_torch_save_read_the_same() {
    for name in [
        "fsdp1_flat_adamw_ws2",
        "fsdp1_orig_adamw_ws2",
        "fsdp2_adamw_ws2",
    ] {
        let mut truth = Truth::of(name);
        // The file holds the model and its optimizer, without the extras of the job.
        let is_in_file = |key: &String| key.starts_with("model.") || key.starts_with("optim.");
        truth.tensors.retain(|key, _| is_in_file(key));
        truth.values.retain(|key, _| is_in_file(key));
        if name.starts_with("fsdp1_orig") {
            // Here torch saved views of a buffer that it had used again: each first moment is the
            // second one.
            let squares: Vec<_> = truth
                .tensors
                .iter()
                .filter(|(key, _)| key.ends_with(".exp_avg_sq"))
                .collect();
            let squares: Vec<_> = squares
                .into_iter()
                .map(|(key, square)| (key.clone(), square.clone()))
                .collect();
            truth.tensors.extend(
                squares
                    .into_iter()
                    .map(|(key, square)| (key.replace("_sq", ""), square)),
            );
        }
        check_against_truth(&fixtures().join(name).join("full.pt"), &truth);
    }
}

#[test]
fn without_flattening_a_dict_is_one_value_with_its_tensors_inside() {
    let truth = Truth::of("variants_ws2");
    let checkpoint = CheckpointReader::open(fixtures().join("variants_ws2/noflatten")).unwrap();
    let PlainValue::Dict(entries) = checkpoint.read_value("n").unwrap() else {
        panic!("not a dict")
    };
    let at = |key: &str| {
        &entries
            .iter()
            .find(|(k, _)| k.as_str() == Some(key))
            .unwrap()
            .1
    };
    assert_eq!(at("step"), &PlainValue::Int(12));
    let (dtype, shape, data) = truth.tensors["n.t"].clone();
    assert_eq!(
        at("t"),
        &PlainValue::Tensor(PlainTensor { dtype, shape, data })
    );
}

#[test]
fn metadata_survives_being_written_by_us() {
    for name in dcp_fixtures() {
        let bytes = std::fs::read(fixtures().join(&name).join("dcp/.metadata")).unwrap();
        let metadata = decode(&bytes).unwrap();
        let ours = encode(&metadata);
        assert_eq!(decode(&ours).unwrap(), metadata, "{name}");
        assert_eq!(encode(&decode(&ours).unwrap()), ours, "{name}");
        assert!(
            ours.len() <= bytes.len(),
            "{name}: {} bytes, torch has {}",
            ours.len(),
            bytes.len()
        );
    }
}
