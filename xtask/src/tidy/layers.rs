//! The rule that a crate uses only crates of lower layers, and the check that the crates and builds
//! that should not need candle do not use it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use crate::metadata::packages;
use crate::shell::cargo_output;

/// Each crate with the crates of the project that it may use. Layers point down only.
const LAYERS: [(&str, &[&str]); 13] = [
    ("fsdp-ops", &[]),
    ("fsdp-layout", &[]),
    ("fsdp-digest", &["fsdp-layout"]),
    ("fsdp-formats", &["fsdp-layout", "fsdp-digest"]),
    (
        "fsdp-tools",
        &["fsdp-layout", "fsdp-digest", "fsdp-formats"],
    ),
    ("fsdp-comm", &["fsdp-layout"]),
    ("fsdp-flat", &["fsdp-layout"]),
    (
        "fsdp-state",
        &["fsdp-layout", "fsdp-digest", "fsdp-comm", "fsdp-flat"],
    ),
    (
        "fsdp-nn",
        &[
            "fsdp-ops",
            "fsdp-layout",
            "fsdp-comm",
            "fsdp-flat",
            "fsdp-state",
        ],
    ),
    (
        "fsdp-checkpoint",
        &[
            "fsdp-ops",
            "fsdp-layout",
            "fsdp-digest",
            "fsdp-formats",
            "fsdp-comm",
            "fsdp-flat",
            "fsdp-state",
            "fsdp-nn",
        ],
    ),
    (
        "fsdp",
        &[
            "fsdp-ops",
            "fsdp-layout",
            "fsdp-formats",
            "fsdp-tools",
            "fsdp-comm",
            "fsdp-flat",
            "fsdp-state",
            "fsdp-nn",
            "fsdp-checkpoint",
        ],
    ),
    (
        "fsdp-cli",
        &["fsdp-layout", "fsdp-formats", "fsdp-tools", "fsdp"],
    ),
    ("fsdp-python", &["fsdp-layout", "fsdp-formats", "fsdp-cli"]),
];

/// The packages that are in no layer: nothing uses them.
const WITHOUT_LAYER: [&str; 2] = ["fsdp-examples", "fsdp-tests"];

/// The crates that must not use a tensor library.
const WITHOUT_CANDLE: [&str; 5] = [
    "fsdp-layout",
    "fsdp-digest",
    "fsdp-formats",
    "fsdp-tools",
    "fsdp-comm",
];

/// The packages of tensor libraries, which the command must not need without its feature `train`.
const TENSOR_LIBRARIES: [&str; 3] = ["candle", "gemm", "tokenizers"];

/// Checks the dependencies of all crates, as cargo sees them.
pub(super) fn check(root: &Path) -> Result<Vec<String>> {
    let mut breaches = layers(&dependencies(root)?);
    // Indirect dependencies of the command show only in the whole tree.
    let tree = [
        "tree",
        "--package",
        "fsdp-cli",
        "--no-default-features",
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--locked",
    ];
    breaches.extend(tensor_libraries(&cargo_output(root, &tree)?));
    Ok(breaches)
}

/// Returns a message for each tensor library in the output of `cargo tree` for the command without
/// `train`.
fn tensor_libraries(tree: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for line in tree.lines() {
        let package = line.split(' ').next().unwrap_or(line);
        if TENSOR_LIBRARIES
            .iter()
            .any(|library| package.starts_with(library))
        {
            found.insert(package);
        }
    }
    found
        .iter()
        .map(|package| format!("`fsdp-cli` without its feature `train` must not need `{package}`"))
        .collect()
}

/// Returns the direct dependencies of each package, without those of its tests and build scripts.
fn dependencies(root: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let mut found = BTreeMap::new();
    for package in packages(root)? {
        let used = package
            .dependencies
            .into_iter()
            .filter(|dependency| dependency.kind.is_none())
            .map(|dependency| dependency.name)
            .collect();
        found.insert(package.name, used);
    }
    Ok(found)
}

/// Returns a message for each use of a crate that is not in a lower layer, or of a tensor library
/// where none is allowed.
fn layers(dependencies: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mut breaches = Vec::new();
    for (package, used) in dependencies {
        let allowed = LAYERS
            .iter()
            .find(|(name, _)| name == package)
            .map(|(_, allowed)| *allowed);
        for used in used {
            let ours = LAYERS.iter().any(|(name, _)| name == used);
            // Whether a dependency from elsewhere is wanted is for review to say.
            if let Some(allowed) = allowed
                && ours
                && !allowed.contains(&used.as_str())
            {
                breaches.push(format!(
                    "crate `{package}` must not use `{used}`: layers point down only"
                ));
            }
            if used.starts_with("candle") && WITHOUT_CANDLE.contains(&package.as_str()) {
                breaches.push(format!(
                    "crate `{package}` must not use `{used}`: it knows no tensor library"
                ));
            }
        }
        if package.starts_with("fsdp")
            && allowed.is_none()
            && !WITHOUT_LAYER.contains(&package.as_str())
        {
            breaches.push(format!(
                "crate `{package}` has no layer: add it to the table in xtask"
            ));
        }
    }
    breaches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, used: &[&str]) -> BTreeMap<String, Vec<String>> {
        BTreeMap::from([(
            name.to_owned(),
            used.iter().map(|&used| used.to_owned()).collect(),
        )])
    }

    #[test]
    fn layers_point_down_only() {
        assert!(layers(&package("fsdp-nn", &["fsdp-state", "candle-core", "serde"])).is_empty());
        assert_eq!(layers(&package("fsdp-state", &["fsdp-nn"])).len(), 1);
        assert_eq!(layers(&package("fsdp-formats", &["fsdp-comm"])).len(), 1);
        assert_eq!(layers(&package("fsdp-comm", &["candle-core"])).len(), 1);
        assert_eq!(layers(&package("fsdp-new", &[])).len(), 1);
    }

    #[test]
    fn tensor_libraries_are_found_among_the_packages_of_a_tree() {
        assert!(tensor_libraries("fsdp-cli v0.1.0\nanyhow v1.0.0\n").is_empty());
        let found = tensor_libraries(
            "fsdp-cli v0.1.0\ncandle-core v0.11.1\ngemm-f32 v0.1.0\ncandle-core v0.11.1 (*)\n",
        );
        assert_eq!(found.len(), 2, "{found:?}");
    }
}
