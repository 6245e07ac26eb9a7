//! The rule that the toolchain of all checks is the oldest one that the manifest promises.

use std::collections::BTreeMap;

const MANIFEST: &str = "Cargo.toml";
const TOOLCHAIN: &str = "rust-toolchain.toml";

/// Returns a message if the two files disagree. `files` are the texts of all files, by name.
pub(super) fn check(files: &BTreeMap<String, String>) -> Option<String> {
    let promised = files
        .get(MANIFEST)
        .and_then(|text| value(text, "rust-version"));
    let pinned = files.get(TOOLCHAIN).and_then(|text| value(text, "channel"));
    if let (Some(promised), Some(pinned)) = (promised, pinned)
        && (pinned == promised || pinned.starts_with(&format!("{promised}.")))
    {
        return None;
    }
    Some(format!(
        "{MANIFEST} promises Rust {promised:?} and {TOOLCHAIN} names {pinned:?}: what is promised \
         has to be what is checked"
    ))
}

/// Returns the text that a line of a TOML file gives to a key.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let assigned = line.strip_prefix(key)?.trim_start().strip_prefix('=')?;
        assigned.trim().strip_prefix('"')?.strip_suffix('"')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_promised_version_is_the_one_of_the_toolchain() {
        let check_texts = |manifest: &str, toolchain: &str| {
            let files = [(MANIFEST, manifest), (TOOLCHAIN, toolchain)]
                .map(|(name, text)| (name.to_owned(), text.to_owned()));
            check(&BTreeMap::from(files))
        };
        let manifest = "[workspace.package]\nrust-version = \"1.95\"\n";
        assert_eq!(check_texts(manifest, "channel = \"1.95.0\""), None);
        assert_eq!(check_texts(manifest, "channel = \"1.95\""), None);
        assert!(check_texts(manifest, "channel = \"1.950.0\"").is_some());
        assert!(check_texts(manifest, "channel = \"stable\"").is_some());
        assert!(check_texts("rust-version.workspace = true", "channel = \"1.95.0\"").is_some());
    }
}
