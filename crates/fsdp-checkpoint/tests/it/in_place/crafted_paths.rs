//! Paths of keys that ask for more than a checkpoint holds.

use fsdp_checkpoint::{Checkpointer, CheckpointerOptions, LoadOptions, load_whole};
use fsdp_comm::run_local;
use fsdp_layout::with_causes;

use crate::in_place::training::{adamw, new_run};

/// A few paths could otherwise ask for more memory than any machine has.
#[test]
fn paths_of_a_checkpoint_cannot_ask_for_many_long_lists_of_nothing() {
    assert_refused_with_paths(
        |name| format!("\"{name}\": [\"{name}\", 1048575]"),
        "list without long gaps",
    );
}

/// The functions that walk values are recursive.
#[test]
fn paths_of_a_checkpoint_cannot_nest_values_without_limit() {
    for part in ["\"p\"", "0"] {
        let parts = format!(",{part}").repeat(100_000);
        assert_refused_with_paths(|name| format!("\"{name}\": [\"{name}\"{parts}]"), "nesting");
    }
}

/// Checks that a checkpoint whose keys have these paths, each a member of a JSON object, is not
/// loaded.
fn assert_refused_with_paths(path_of: impl Fn(&str) -> String, expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lists.safetensors");
    let names = ["a", "b", "c"];
    let paths: Vec<String> = names.iter().map(|name| path_of(name)).collect();
    let paths = serde_json::to_string(&format!("{{{}}}", paths.join(", "))).unwrap();
    let tensors: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(at, name)| {
            format!(
                "\"{name}\":{{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[{},{}]}}",
                4 * at,
                4 * at + 4
            )
        })
        .collect();
    let header = format!(
        "{{\"__metadata__\":{{\"fsdp.paths\":{paths}}},{}}}",
        tensors.join(",")
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 12]);
    std::fs::write(&path, bytes).unwrap();
    let error = load_whole(path.as_path(), &[], &LoadOptions::default()).unwrap_err();
    let error = with_causes(&error);
    assert!(error.contains(expected), "{error}");
    let errors = run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        checkpointer
            .load(path.as_path(), &mut run)
            .unwrap_err()
            .to_string()
    });
    for error in errors.unwrap() {
        assert!(error.contains(expected), "{error}");
    }
}
