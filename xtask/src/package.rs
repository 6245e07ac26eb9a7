//! `cargo xtask package`: checks what would be published of every crate, rehearses the release, and
//! publishes.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;

use crate::metadata::{Package, packages};
use crate::shell::{cargo, cargo_output, say};

/// Options of `cargo xtask package`.
#[derive(Args)]
pub(crate) struct PackageArguments {
    /// Rehearse the release: do all that `cargo publish` does, except the upload. This asks the
    /// registry, and builds every crate from its packed files
    #[arg(long)]
    dry_run: bool,
    /// Do not build the packed crates
    #[arg(long, requires = "dry_run")]
    no_verify: bool,
    /// Publish the crates, those first that others need
    #[arg(long, conflicts_with = "dry_run")]
    publish: bool,
}

/// The files that every package holds.
const FILES: [&str; 4] = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// The longest description that a list of packages shows whole.
const MAX_DESCRIPTION: usize = 120;

/// Checks the manifest and the files of every crate that is published, and packs them.
pub(crate) fn run(root: &Path, arguments: &PackageArguments) -> Result<()> {
    let mut packages = packages(root)?;
    packages.retain(Package::is_published);
    // All breaches are told at once, because a release has many crates.
    let mut breaches = Vec::new();
    for package in &packages {
        breaches.extend(check_manifest(package));
        breaches.extend(check_files(root, &package.name)?);
        // Until then there may be no place where the project lives.
        if arguments.publish && package.repository.is_none() {
            breaches.push(format!("`{}` has no repository", package.name));
        }
    }
    ensure!(
        breaches.is_empty(),
        "some crates cannot be published:\n  {}",
        breaches.join("\n  ")
    );

    // Together, because none of them is in a registry before the first release. cargo takes them
    // in the order in which they need each other, which is that of the layers.
    let selected: Vec<&str> = packages
        .iter()
        .flat_map(|package| ["--package", &package.name])
        .collect();
    if arguments.publish {
        return cargo(
            root,
            &[&["publish", "--locked"], &selected[..]].concat(),
            &[],
        );
    }
    if arguments.dry_run {
        let mut publish = vec!["publish", "--dry-run", "--allow-dirty", "--locked"];
        publish.extend(arguments.no_verify.then_some("--no-verify"));
        return cargo(root, &[&publish[..], &selected].concat(), &[]);
    }
    pack(root, &selected)?;
    say(&format!("xtask: {} crates can be packed", packages.len()));
    Ok(())
}

/// Packs the selected crates without building them.
fn pack(root: &Path, selected: &[&str]) -> Result<()> {
    let pack = ["package", "--no-verify", "--allow-dirty", "--locked"];
    // A build has downloaded the descriptions of all dependencies. Ask the registry only if there
    // has been none.
    let offline = [&pack[..], &["--offline"], selected].concat();
    if cargo(root, &offline, &[]).is_err() {
        cargo(root, &[&pack[..], selected].concat(), &[])?;
    }
    Ok(())
}

/// Returns a message for each fault of a manifest.
fn check_manifest(package: &Package) -> Vec<String> {
    let name = &package.name;
    let texts = [
        ("description", &package.description),
        ("license", &package.license),
        ("readme", &package.readme),
        ("documentation", &package.documentation),
        ("rust-version", &package.rust_version),
    ];
    let lists = [
        ("keywords", &package.keywords),
        ("categories", &package.categories),
    ];
    let mut breaches = Vec::new();
    for (field, text) in texts {
        if text.as_deref().is_none_or(str::is_empty) {
            breaches.push(format!("`{name}` has no {field}"));
        }
    }
    for (field, list) in lists {
        if list.is_empty() {
            breaches.push(format!("`{name}` has no {field}"));
        }
    }
    if let Some(description) = &package.description
        && description.len() > MAX_DESCRIPTION
    {
        breaches.push(format!(
            "the description of `{name}` is longer than {MAX_DESCRIPTION} characters"
        ));
    }
    // docs.rs builds no documentation at all if it is asked for a feature that is not there.
    for feature in documented_features(package) {
        if !package.features.contains_key(feature) {
            breaches.push(format!("`{name}` has no feature `{feature}` for docs.rs"));
        }
    }
    breaches
}

/// Returns the features with which docs.rs is to build the documentation.
fn documented_features(package: &Package) -> Vec<&str> {
    let features = package.metadata["docs"]["rs"]["features"].as_array();
    features
        .into_iter()
        .flatten()
        .filter_map(|feature| feature.as_str())
        .collect()
}

/// Returns a message for each file that a package lacks.
fn check_files(root: &Path, package: &str) -> Result<Vec<String>> {
    let list = ["package", "--list", "--allow-dirty", "--package", package];
    let listed = cargo_output(root, &list)?;
    let files: BTreeSet<&str> = listed.lines().collect();
    let missing = FILES.iter().filter(|file| !files.contains(**file));
    Ok(missing
        .map(|file| format!("the package of `{package}` lacks `{file}`"))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_without_a_field_is_told() {
        let complete = serde_json::json!({
            "name": "a", "description": "A thing.", "license": "MIT", "readme": "README.md",
            "documentation": "https://docs.rs/a", "rust_version": "1.95",
            "keywords": ["x"], "categories": ["science"], "features": {"x": []},
            "metadata": {"docs": {"rs": {"features": ["x"]}}},
        });
        let package: Package = serde_json::from_value(complete.clone()).unwrap();
        assert!(check_manifest(&package).is_empty());

        let mut faulty = complete;
        faulty["keywords"] = serde_json::json!([]);
        faulty["description"] = "long ".repeat(40).into();
        faulty["readme"] = serde_json::Value::Null;
        faulty["metadata"]["docs"]["rs"]["features"] = serde_json::json!(["y"]);
        let package: Package = serde_json::from_value(faulty).unwrap();
        assert_eq!(check_manifest(&package).len(), 4);
    }
}
