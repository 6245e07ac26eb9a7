//! Every checkpoint that PyTorch wrote for us is read bit for bit.

use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::metadata::{decode, encode};
use fsdp_formats::reader::CheckpointReader;
use fsdp_layout::{PlainTensor, PlainValue};

use crate::truth::{Truth, check_against_truth, dcp_fixtures, fixtures};

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
