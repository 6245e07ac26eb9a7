//! `cargo xtask features`: checks each crate on its own, without features, with each feature alone,
//! and with all together.
//!
//! A build of the whole workspace turns on what any crate asks for. So it does not show that a
//! crate needs a feature, of its own or of a dependency, that it does not name.

use std::path::Path;

use anyhow::Result;
use clap::Args;

use crate::gpu::check_target;
use crate::metadata::{Package, packages};
use crate::shell::{cargo, say};

/// Options of `cargo xtask features`.
#[derive(Args)]
pub(crate) struct FeaturesArguments {
    /// Only list what would be checked
    #[arg(long)]
    list: bool,
}

/// The features that not every machine can build, each with its reason.
const EXCLUDED: [(&str, &str); 2] = [
    (
        "cuda",
        "it needs a CUDA toolkit; `cargo xtask gpu --check` checks it with a stand-in",
    ),
    (
        "mpi",
        "it needs an MPI and libclang; `cargo xtask mpi` builds and tests it",
    ),
];

/// Checks all crates, one selection of features after the other.
pub(crate) fn run(root: &Path, arguments: &FeaturesArguments) -> Result<()> {
    let packages = packages(root)?;
    let target = check_target(root);
    for package in packages.iter().filter(|package| package.is_crate()) {
        for feature in package.features.keys() {
            if let Some(reason) = excluded(&packages, package, feature) {
                say(&format!(
                    "xtask: features: `{}/{feature}` is left out: {reason}",
                    package.name
                ));
            }
        }
        for features in selections(&packages, package) {
            let features = features.join(",");
            let clippy = [
                "clippy",
                "--package",
                &package.name,
                "--no-default-features",
                "--features",
                &features,
                "--locked",
            ];
            if arguments.list {
                say(&format!("cargo {}", clippy.join(" ")));
                continue;
            }
            let directory = ["--target-dir", &*target.to_string_lossy()];
            let all = [&clippy[..], &directory, &["--", "-D", "warnings"]];
            cargo(root, &all.concat(), &[])?;
        }
    }
    Ok(())
}

/// Returns the selections of features with which to check a package: none, each, and all.
fn selections<'a>(packages: &[Package], package: &'a Package) -> Vec<Vec<&'a str>> {
    let all: Vec<&str> = package
        .features
        .keys()
        .filter(|feature| *feature != "default" && excluded(packages, package, feature).is_none())
        .map(String::as_str)
        .collect();
    let mut selections = vec![Vec::new()];
    selections.extend(all.iter().map(|feature| vec![*feature]));
    if all.len() > 1 {
        selections.push(all);
    }
    selections
}

/// Returns the reason for which a feature is left out: it is one of [`EXCLUDED`], or turns one on.
fn excluded(packages: &[Package], package: &Package, feature: &str) -> Option<&'static str> {
    if let Some((_, reason)) = EXCLUDED.iter().find(|(name, _)| *name == feature) {
        return Some(reason);
    }
    package.features.get(feature)?.iter().find_map(|turned_on| {
        match turned_on.split_once('/') {
            // `name?/feature` turns on the feature of a dependency that something else asks for.
            Some((dependency, feature)) => {
                let dependency = dependency.trim_end_matches('?');
                match packages.iter().find(|package| package.name == dependency) {
                    Some(package) => excluded(packages, package, feature),
                    None => EXCLUDED
                        .iter()
                        .find(|(name, _)| *name == feature)
                        .map(|(_, reason)| *reason),
                }
            }
            None => excluded(packages, package, turned_on),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn package(name: &str, features: &[(&str, &[&str])]) -> Package {
        let features: BTreeMap<String, Vec<String>> = features
            .iter()
            .map(|(feature, turned_on)| {
                let turned_on = turned_on.iter().map(|&name| name.to_owned()).collect();
                ((*feature).to_owned(), turned_on)
            })
            .collect();
        Package {
            name: name.to_owned(),
            features,
            ..Package::default()
        }
    }

    #[test]
    fn none_each_and_all_features_are_selected_but_for_the_default_ones() {
        let one = package("a", &[("x", &["dep:x"])]);
        assert_eq!(selections(&[], &one), [vec![], vec!["x"]]);
        let features: [(&str, &[&str]); 3] = [("default", &["x"]), ("x", &[]), ("y", &["x"])];
        let two = package("a", &features);
        assert_eq!(
            selections(&[], &two),
            [vec![], vec!["x"], vec!["y"], vec!["x", "y"]]
        );
        assert_eq!(selections(&[], &package("a", &[])), [Vec::<&str>::new()]);
    }

    #[test]
    fn a_feature_that_turns_an_excluded_one_on_is_excluded() {
        let features: [(&str, &[&str]); 5] = [
            ("cuda", &[]),
            ("gpus", &["cuda"]),
            ("tensors", &["tensors/cuda"]),
            ("ranks", &["b?/far"]),
            ("free", &["b/free", "dep:c"]),
        ];
        let a = package("a", &features);
        let b = package("b", &[("far", &["mpi"]), ("mpi", &[]), ("free", &[])]);
        let packages = [a, b];
        let is_excluded = |feature| excluded(&packages, &packages[0], feature).is_some();
        assert!(
            ["cuda", "gpus", "tensors", "ranks"]
                .into_iter()
                .all(is_excluded)
        );
        assert!(!is_excluded("free"));
        assert_eq!(selections(&packages, &packages[0]), [vec![], vec!["free"]]);
    }
}
