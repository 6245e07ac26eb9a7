//! `cargo xtask package`: checks the files that would be published with every crate, without
//! building it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::shell::{cargo, program, say};

/// Options of `cargo xtask package`.
#[derive(Args, Clone)]
pub(crate) struct PackageArguments {
    /// Publish the crates, those first that others need
    #[arg(long)]
    pub(crate) publish: bool,
}

/// The files that every package holds.
const FILES: [&str; 4] = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// The fields that every manifest has.
const FIELDS: [&str; 5] = ["description", "license", "readme", "keywords", "categories"];

/// The longest description that a list of packages shows whole.
const MAX_DESCRIPTION: usize = 120;

/// Checks the manifest and the files of every crate that is published, and packs them.
pub(crate) fn run(root: &Path, arguments: &PackageArguments) -> Result<()> {
    let packages = published(root)?;
    let mut breaches = Vec::new();
    for package in &packages {
        breaches.extend(check_manifest(package));
        breaches.extend(check_files(root, name(package))?);
    }
    ensure!(
        breaches.is_empty(),
        "some crates cannot be published:\n  {}",
        breaches.join("\n  ")
    );
    let names: Vec<&str> = packages.iter().map(name).collect();
    let selected: Vec<&str> = names.iter().flat_map(|name| ["--package", name]).collect();
    // Together, because none of them is in a registry before the first release.
    let pack = [
        &["package", "--no-verify", "--allow-dirty", "--locked"],
        &selected[..],
    ]
    .concat();
    // A build has downloaded the descriptions of all dependencies. Ask the registry only if there
    // has been none.
    if cargo(root, &[&pack[..], &["--offline"]].concat(), &[]).is_err() {
        cargo(root, &pack, &[])?;
    }
    say(&format!("xtask: {} crates can be packed", names.len()));
    if arguments.publish {
        cargo(
            root,
            &[&["publish", "--locked"], &selected[..]].concat(),
            &[],
        )?;
    }
    Ok(())
}

/// Returns the packages of the workspace that may be published, as `cargo metadata` describes them.
fn published(root: &Path) -> Result<Vec<Value>> {
    let output = output(root, &["metadata", "--no-deps", "--format-version", "1"])?;
    let metadata: Value = serde_json::from_str(&output)?;
    let Some(packages) = metadata["packages"].as_array() else {
        bail!("`cargo metadata` lists no packages")
    };
    // An empty list of registries is `publish = false`.
    Ok(packages
        .iter()
        .filter(|package| package["publish"].is_null())
        .cloned()
        .collect())
}

fn name(package: &Value) -> &str {
    package["name"].as_str().unwrap_or_default()
}

/// Returns a message for each field that a manifest lacks.
fn check_manifest(package: &Value) -> Vec<String> {
    let mut breaches = Vec::new();
    for field in FIELDS {
        if is_empty(&package[field]) {
            breaches.push(format!("`{}` has no {field}", name(package)));
        }
    }
    if package["description"]
        .as_str()
        .is_some_and(|text| text.len() > MAX_DESCRIPTION)
    {
        breaches.push(format!(
            "the description of `{}` is longer than {MAX_DESCRIPTION} characters",
            name(package)
        ));
    }
    breaches
}

fn is_empty(field: &Value) -> bool {
    match field {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

/// Returns a message for each file that a package lacks.
fn check_files(root: &Path, package: &str) -> Result<Vec<String>> {
    let listed = output(
        root,
        &["package", "--list", "--allow-dirty", "--package", package],
    )?;
    let files: BTreeSet<&str> = listed.lines().collect();
    let lacks = FILES.iter().filter(|file| !files.contains(**file));
    Ok(lacks
        .map(|file| format!("the package of `{package}` lacks `{file}`"))
        .collect())
}

fn output(root: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program())
        .current_dir(root)
        .args(arguments)
        .output()
        .context("failed to run cargo")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "`cargo {}` failed: {errors}",
        arguments.join(" ")
    );
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_without_a_field_is_told() {
        let whole = serde_json::json!({
            "name": "a", "description": "A thing.", "license": "MIT", "readme": "README.md",
            "keywords": ["x"], "categories": ["science"],
        });
        assert!(check_manifest(&whole).is_empty());
        let mut without = whole.clone();
        without["keywords"] = serde_json::json!([]);
        without["description"] = Value::from("long ".repeat(40));
        assert_eq!(check_manifest(&without).len(), 2);
    }
}
