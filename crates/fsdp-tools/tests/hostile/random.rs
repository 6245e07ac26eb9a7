//! Bytes of every kind into every parser: an error or a value, never a panic, and little memory.

use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::internals::{
    ArchiveLayout, Directory, Header, Integrity, StoredTensor, decode_value, encode_value, parse,
};
use fsdp_formats::metadata::decode;
use fsdp_formats::reader::{CheckpointReader, OpenOptions};
use fsdp_layout::PlainValue;
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use proptest::prelude::*;

use crate::{bounded, fixtures};

/// Opcodes that pickles of checkpoints consist of, so that random programs get somewhere.
fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        prop::sample::select(&b"(.012NRbet)]}uasQ\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"[..])
            .prop_map(|op| vec![op]),
        any::<u8>().prop_map(|n| vec![b'K', n]),
        any::<u8>().prop_map(|n| vec![b'h', n % 8]),
        any::<u8>().prop_map(|n| vec![b'q', n % 8]),
        any::<[u8; 4]>().prop_map(|n| [b"J", &n[..]].concat()),
        any::<[u8; 8]>().prop_map(|n| [b"\x95", &n[..]].concat()),
        Just(b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec()),
        Just(b"ctorch\nFloatStorage\n".to_vec()),
        Just(b"ctorch\nSize\n".to_vec()),
        Just(b"ccollections\nOrderedDict\n".to_vec()),
        Just(b"c__builtin__\nset\n".to_vec()),
        Just(b"c_codecs\nencode\n".to_vec()),
        Just(b"ctorch.distributed.checkpoint.metadata\nMetadata\n".to_vec()),
        Just(b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n".to_vec()),
        Just(b"\x8c\x07storage".to_vec()),
        Just(b"\x8c\x13state_dict_metadata".to_vec()),
        Just(b"\x8c\x010".to_vec()),
    ];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| [pieces.concat(), b".".to_vec()].concat())
}

/// Generates a known file with a few bytes changed, removed or repeated.
fn mutated(bytes: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6);
    edits.prop_map(move |edits| {
        let mut bytes = bytes.clone();
        for (at, value, kind) in edits {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = value,
                1 => bytes[at] ^= 1 << (value % 8),
                2 => drop(bytes.drain(at..(at + usize::from(value)).min(bytes.len()))),
                _ => {
                    let again = bytes[at..(at + usize::from(value)).min(bytes.len())].to_vec();
                    bytes.splice(at..at, again);
                }
            }
        }
        bytes
    })
}

fn item(pickle: &[u8]) -> Vec<u8> {
    let layout = ArchiveLayout::new("archive", pickle.to_vec(), &[64]);
    [layout.head(0), vec![0; 64], layout.tail(&[0])].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_programs(program in opcodes()) {
        bounded(|| {
            let _ = parse(&program);
            let _ = decode(&program);
            let item = item(&program);
            let _ = decode_value(&item);
            let _ = StoredTensor::locate(&item);
        });
    }

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        bounded(|| {
            let _ = parse(&bytes);
            let _ = Directory::read(&bytes);
            let _ = Integrity::decode(&bytes);
            let length = (bytes.len() as u64).to_le_bytes();
            let _ = Header::read(&[&length[..], b"{", &bytes].concat());
        });
    }

    #[test]
    fn changed_items(bytes in mutated(encode_value(&PlainValue::List(vec![1.5.into(), "text".into()])).unwrap())) {
        bounded(|| {
            let _ = Directory::read(&bytes);
            let _ = decode_value(&bytes);
        });
    }

    #[test]
    fn changed_tensors(bytes in mutated(std::fs::read(fixtures().join("variants_ws2/peritem/__0_0.distcp")).unwrap())) {
        bounded(|| {
            let _ = StoredTensor::locate(&bytes);
            let _ = decode_value(&bytes);
        });
    }

    #[test]
    fn changed_headers(
        bytes in mutated(std::fs::read(fixtures().join("hf_ws2/hf_full_2files/model-00001-of-00002.safetensors")).unwrap())
    ) {
        let _ = bounded(|| Header::read(&bytes));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn changed_metadata_leads_to_no_panic_while_reading(
        bytes in mutated(std::fs::read(fixtures().join("variants_ws2/lowestrank/.metadata")).unwrap())
    ) {
        if decode(&bytes).is_ok() {
            let directory = tempfile::tempdir().unwrap();
            for name in ["__0_0.distcp", "__1_0.distcp"] {
                let from = fixtures().join("variants_ws2/lowestrank").join(name);
                std::fs::copy(from, directory.path().join(name)).unwrap();
            }
            std::fs::write(directory.path().join(".metadata"), &bytes).unwrap();
            bounded(|| {
                let checkpoint = CheckpointReader::open_with(directory.path(), OpenOptions::default()).unwrap();
                let keys: Vec<String> = checkpoint.metadata().entries.keys().cloned().collect();
                for key in keys {
                    let _ = checkpoint.read_tensor(&key);
                    let _ = checkpoint.read_value(&key);
                }
                let _ = verify(&checkpoint, Level::Deep, VerifyOptions::default());
            });
        }
    }
}

#[test]
fn a_hostile_integrity_file_allocates_no_block() {
    let line = r#"{"path":"a","length":1073741824,"segments":[[1073741824,1073741824,"0000000000000000"]]}"#;
    let before = format!(
        "{{\"format\":\"fsdp-integrity\",\"version\":1,\"hash\":\"xxh3-64\",\"files\":1}}\n{line}\n"
    );
    let hash = twox_hash::XxHash3_128::oneshot(before.as_bytes());
    let file = format!("{before}{{\"xxh3_128\":\"{hash:032x}\"}}\n");
    assert!(bounded(|| Integrity::decode(file.as_bytes())).is_err());
}
