//! The packages of the workspace, as `cargo metadata` describes them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;

use crate::shell::cargo_output;

/// The fields of a package that the tasks look at.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    pub(crate) license: Option<String>,
    pub(crate) readme: Option<String>,
    pub(crate) documentation: Option<String>,
    pub(crate) repository: Option<String>,
    pub(crate) rust_version: Option<String>,
    pub(crate) keywords: Vec<String>,
    pub(crate) categories: Vec<String>,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
    /// Each feature, with what it turns on.
    pub(crate) features: BTreeMap<String, Vec<String>>,
    /// The tables of other tools.
    pub(crate) metadata: Value,
    /// The registries that it may be published to: `None` for all.
    pub(crate) publish: Option<Vec<String>>,
}

/// A direct dependency of a package.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` for one of the package itself: only those of tests and build scripts have a kind.
    pub(crate) kind: Option<String>,
}

impl Package {
    /// Returns `true` if the package may be published.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.is_none()
    }

    /// Returns `true` if the package is one of the product's crates, and not one that tests it.
    pub(crate) fn is_crate(&self) -> bool {
        let mut directories = self.manifest_path.iter().rev().skip(2);
        directories
            .next()
            .is_some_and(|directory| directory == "crates")
    }
}

/// Returns the packages of the workspace.
pub(crate) fn packages(root: &Path) -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }

    let output = cargo_output(root, &["metadata", "--no-deps", "--format-version", "1"])?;
    let metadata: Metadata = serde_json::from_str(&output)?;
    Ok(metadata.packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packages_of_this_workspace_are_read() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let packages = packages(root).unwrap();
        let find = |name: &str| {
            packages
                .iter()
                .find(|package| package.name == name)
                .unwrap()
        };
        assert!(find("fsdp").is_crate());
        assert!(find("fsdp").is_published());
        assert!(find("fsdp-python").is_crate());
        assert!(!find("fsdp-python").is_published());
        assert!(!find("xtask").is_crate());
        assert!(find("fsdp").features.contains_key("object-store"));
    }
}
