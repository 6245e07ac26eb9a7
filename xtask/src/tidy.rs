//! The project's own rules, those that neither the compiler nor clippy knows.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// A file longer than this should be two.
const MAX_LINES: usize = 1000;

/// Each crate, and what it may use of ours. Layers point down only.
const LAYERS: [(&str, &[&str]); 8] = [
    ("fsdp-layout", &[]),
    ("fsdp-dcp", &["fsdp-layout"]),
    ("fsdp-comm", &["fsdp-layout"]),
    ("fsdp-flat", &["fsdp-layout"]),
    ("fsdp-state", &["fsdp-layout", "fsdp-comm", "fsdp-flat"]),
    ("fsdp-nn", &["fsdp-layout", "fsdp-comm", "fsdp-flat", "fsdp-state"]),
    ("fsdp-checkpoint", &["fsdp-layout", "fsdp-dcp", "fsdp-comm", "fsdp-flat", "fsdp-state", "fsdp-nn"]),
    ("fsdp", &["fsdp-layout", "fsdp-dcp", "fsdp-comm", "fsdp-flat", "fsdp-state", "fsdp-nn", "fsdp-checkpoint"]),
];

/// Crates that know no tensor library.
const WITHOUT_CANDLE: [&str; 3] = ["fsdp-layout", "fsdp-dcp", "fsdp-comm"];

/// The only files with `unsafe` in them.
const UNSAFE: [&str; 15] = [
    // A rank lends a slice to other threads for the duration of a round.
    "crates/fsdp-comm/src/local/mod.rs",
    "crates/fsdp-comm/src/local/slot.rs",
    // Processes of one host lend slices to each other through a shared memory segment.
    "crates/fsdp-comm/src/tcp/mod.rs",
    "crates/fsdp-comm/src/tcp/segment.rs",
    // MPI's own calls.
    "crates/fsdp-comm/src/mpi/library.rs",
    "crates/fsdp-comm/src/mpi/mod.rs",
    // NCCL's own calls.
    "crates/fsdp-comm/src/nccl/library.rs",
    "crates/fsdp-comm/src/nccl/mod.rs",
    // Bytes of GPU memory, and pinned memory.
    "crates/fsdp-flat/src/cuda/mod.rs",
    "crates/fsdp-flat/src/cuda/staging.rs",
    // Stores that go around the caches.
    "crates/fsdp-flat/src/non_temporal.rs",
    // What runs between fork and exec, so that no process of a launch is left behind.
    "crates/fsdp/src/cli/launch/mod.rs",
    "crates/fsdp/src/cli/launch/parent.rs",
    // Global allocators that count.
    "crates/fsdp-state/tests/memory.rs",
    "tests/src/counting_allocator.rs",
];

/// Directories that hold no source of ours.
const SKIPPED: [&str; 8] = ["target", ".git", "fixtures", "book", "runs", "seeds", "corpus", "artifacts"];

/// Checks all rules, and lists all breaches together.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut breaches = layers(&dependencies(root)?);
    let mut files = Vec::new();
    for top in ["crates", "tests", "fuzz", "xtask", "docs", ".ci"] {
        collect(&root.join(top), &mut files)?;
    }
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "md" || extension == "toml") {
            files.push(path);
        }
    }
    files.sort();
    for path in files {
        // What is not text is not source.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        breaches.extend(file(&name, &text));
    }
    ensure!(breaches.is_empty(), "the tree is not tidy:\n  {}", breaches.join("\n  "));
    Ok(())
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("failed to list `{}`", directory.display()))? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if !SKIPPED.iter().any(|skipped| entry.file_name() == *skipped) {
                collect(&path, files)?;
            }
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// Direct dependencies of each package (not those of its tests), from cargo itself.
fn dependencies(root: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--no-deps", "--format-version", "1"];
    let output = Command::new(program).current_dir(root).args(arguments).output().context("failed to run cargo")?;
    ensure!(output.status.success(), "`cargo metadata` failed with {}", output.status);
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let Some(packages) = metadata["packages"].as_array() else { bail!("`cargo metadata` lists no packages") };
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let normal = |package: &Value| {
        let all = package["dependencies"].as_array().into_iter().flatten();
        all.filter(|dependency| dependency["kind"].is_null()).map(name).collect()
    };
    Ok(packages.iter().map(|package| (name(package), normal(package))).collect())
}

fn layers(dependencies: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mut breaches = Vec::new();
    for (package, used) in dependencies {
        let allowed = LAYERS.iter().find(|(name, _)| name == package).map(|(_, allowed)| *allowed);
        for used in used {
            let ours = LAYERS.iter().any(|(name, _)| name == used);
            if let Some(allowed) = allowed
                && ours
                && !allowed.contains(&used.as_str())
            {
                breaches.push(format!("crate `{package}` must not use `{used}`: layers point down only"));
            }
            if used.starts_with("candle") && WITHOUT_CANDLE.contains(&package.as_str()) {
                breaches.push(format!("crate `{package}` must not use `{used}`: it knows no tensor library"));
            }
        }
        if package.starts_with("fsdp") && allowed.is_none() && package != "fsdp-tests" {
            breaches.push(format!("crate `{package}` has no layer: add it to the table in xtask"));
        }
    }
    breaches
}

/// What one text file breaks.
fn file(name: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    // Written in halves, so that this file does not break its own rule.
    for machine in [concat!("/", "work/"), concat!("/", "root/"), concat!("/", "home/"), concat!("/", "tmp/")] {
        for (number, line) in text.lines().enumerate().filter(|(_, line)| line.contains(machine)) {
            breaches.push(format!("{name}:{}: a path of one machine: {}", number + 1, line.trim()));
        }
    }
    if !name.ends_with(".rs") {
        return breaches;
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        breaches.push(format!("{name}: {lines} lines, more than {MAX_LINES}: split it by purpose"));
    }
    if !text.starts_with("//!") {
        breaches.push(format!("{name}: its first line should say what it is for (`//! ...`)"));
    }
    if !UNSAFE.contains(&name) {
        for (number, line) in text.lines().enumerate() {
            let code = line.trim_start();
            let keyword = [concat!("unsafe", " {"), concat!("unsafe", " fn"), concat!("unsafe", " impl")];
            let opens = code.contains(concat!("(unsafe", "_code"));
            if !code.starts_with("//") && (opens || keyword.iter().any(|keyword| code.contains(keyword))) {
                breaches.push(format!("{name}:{}: `unsafe` outside the modules that xtask lists", number + 1));
            }
        }
    }
    breaches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, used: &[&str]) -> BTreeMap<String, Vec<String>> {
        BTreeMap::from([(name.to_owned(), used.iter().map(|&used| used.to_owned()).collect())])
    }

    #[test]
    fn layers_point_down_only() {
        assert!(layers(&package("fsdp-nn", &["fsdp-state", "candle-core", "serde"])).is_empty());
        assert_eq!(layers(&package("fsdp-state", &["fsdp-nn"])).len(), 1);
        assert_eq!(layers(&package("fsdp-dcp", &["fsdp-comm"])).len(), 1);
        assert_eq!(layers(&package("fsdp-comm", &["candle-core"])).len(), 1);
        assert_eq!(layers(&package("fsdp-new", &[])).len(), 1);
    }

    #[test]
    fn files_that_break_a_rule_are_found() {
        assert!(file("a.rs", "//! About.\n").is_empty());
        assert_eq!(file("a.rs", "use b;\n").len(), 1);
        assert_eq!(file("a.rs", &format!("//! About.\n{}", "\n".repeat(MAX_LINES))).len(), 1);
        let code = concat!("//! About.\nlet x = unsafe", " { y };\n");
        assert_eq!(file("a.rs", code).len(), 1);
        assert!(file(UNSAFE[0], code).is_empty());
        assert_eq!(file("a.md", concat!("see /", "tmp/x")).len(), 1);
    }
}
