//! The project's own rules, which neither the compiler nor clippy checks.

mod circles;
mod layers;
mod modules;
mod names;
mod report;
mod text;
mod toolchain;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;

use self::modules::Modules;
use crate::files::collect;

/// Options of `cargo xtask tidy`.
#[derive(Args)]
pub(crate) struct TidyArguments {
    /// Only count what shows how plain and how large each package is, beside other projects
    #[arg(long)]
    report: bool,
    /// Count the packages of another directory, for instance of an older checkout
    #[arg(long, value_name = "DIR", requires = "report")]
    at: Option<PathBuf>,
}

/// The files that are the root of a crate, relative to the package's directory.
const ROOTS: [&str; 2] = ["src/lib.rs", "src/main.rs"];

/// Checks all rules, or prints the report.
pub(crate) fn run(root: &Path, arguments: &TidyArguments) -> Result<()> {
    if arguments.report {
        let directory = arguments.at.as_deref().unwrap_or(root);
        return report::run(directory, &read_all(directory)?);
    }
    check(root)
}

/// Checks all rules. The error lists all breaches.
fn check(root: &Path) -> Result<()> {
    let files = read_all(root)?;
    let mut breaches = layers::check(root)?;
    for (name, text) in &files {
        breaches.extend(text::check(name, text));
    }
    breaches.extend(toolchain::check(&files));
    breaches.extend(check_modules(&files)?);
    ensure!(
        breaches.is_empty(),
        "the tree is not tidy:\n  {}",
        breaches.join("\n  ")
    );
    Ok(())
}

/// Returns a message for each circle within a crate, and for each name that several public types
/// have. `files` are the texts of all files, by name.
fn check_modules(files: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let mut breaches = Vec::new();
    let mut public_types: Vec<(String, String)> = Vec::new();
    // Each crate is read from the file that is its root.
    for root in files
        .keys()
        .filter(|name| ROOTS.iter().any(|root| name.ends_with(&format!("/{root}"))))
    {
        let modules = Modules::read(files, root)?;
        // A circle cannot lead through several crates: cargo refuses that.
        let uses = modules.uses();
        breaches.extend(circles::check(&uses));
        // The names of types matter only in the libraries: nobody else uses the types of xtask and
        // of the tests.
        if root.starts_with("crates/") {
            for (file, module) in modules.iter() {
                for name in &module.public_types {
                    public_types.push((name.clone(), file.to_owned()));
                }
            }
        }
    }
    // This rule needs all crates together.
    breaches.extend(names::check(&public_types));
    Ok(breaches)
}

/// Reads all text files of the project, each with its name below `root`.
fn read_all(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut paths = Vec::new();
    for top in [
        "crates", "examples", "tests", "fuzz", "xtask", "docs", ".ci", ".github",
    ] {
        // Other projects, which the report counts too, have other directories.
        if root.join(top).is_dir() {
            collect(&root.join(top), &mut paths)?;
        }
    }
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "md" || extension == "toml")
        {
            paths.push(path);
        }
    }
    let mut files = BTreeMap::new();
    for path in paths {
        // A file that is not text is not source.
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        let name = path
            .strip_prefix(root)
            .expect("the files are below the directory that was listed");
        files.insert(name.to_string_lossy().replace('\\', "/"), text);
    }
    Ok(files)
}
