//! The files that hold a model's weights, told by the names in a Hugging Face directory.
//!
//! ```text
//! STEM[.VARIANT].ENDING                     model.safetensors, model.fp16.safetensors
//! STEM[.VARIANT]-00001-of-00002.ENDING      or STEM-00001-of-00002.VARIANT.ENDING: one of several files
//! STEM[.VARIANT].ENDING.index.json          or STEM.ENDING.index.VARIANT.json: the index of several files
//! ```
//!
//! A directory may hold the same model several times: in half precision, without its moving average, or as its authors
//! keep it. Libraries load the one without a variant, and so does this.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{FileError, FormatError};
use crate::storage::checked_directory::CheckedDirectory;

/// The stems that libraries look for, the first one first.
const STEMS: [&str; 4] = ["model", "diffusion_pytorch_model", "adapter_model", "pytorch_model"];
/// The most missing files that an error names.
const MAX_LISTED: usize = 1000;
/// The stem of Mistral's own files, which lie beside those of [`STEMS`] under other keys.
const CONSOLIDATED: &str = "consolidated";

/// The files to read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// The files that this index names.
    Indexed(String),
    /// All of these.
    Files(Vec<String>),
}

/// The files of one stem and variant.
#[derive(Debug, Default)]
struct Group {
    index: Option<String>,
    files: Vec<String>,
    /// The parts whose names tell how many there are, one for each count.
    parts: BTreeMap<String, Part>,
}

impl Weights {
    /// Chooses among the names of a directory those with this ending, such as `.safetensors`.
    ///
    /// # Errors
    /// Several models with an index, of which no library would take one before the others, and files that are missing by
    /// the names of those that are there.
    pub(crate) fn choose(directory: &CheckedDirectory, names: &[String], ending: &str) -> Result<Self, FileError> {
        let groups = chosen_groups(names, ending);
        let mut indexed: Vec<(&String, &String)> =
            groups.iter().filter_map(|(stem, group)| Some((stem, group.index.as_ref()?))).collect();
        let known = STEMS.iter().find_map(|known| indexed.iter().find(|(stem, _)| stem == known)).copied();
        if let Some(known) = known {
            indexed = vec![known];
        }
        match &indexed[..] {
            [] => {}
            [(_, index)] => return Ok(Weights::Indexed((*index).clone())),
            [(_, first), (_, second), ..] => {
                let reason = format!("it has both `{first}` and `{second}`: name the files of one of them");
                let source = FormatError::Malformed { what: "directory of one model", reason };
                return Err(FileError::File { path: directory.path().to_owned(), source });
            }
        }
        let parts = groups.values().flat_map(|group| group.parts.values());
        let expected = parts.flat_map(|part| part.names_of_all(ending));
        let missing = expected.filter(|name| names.binary_search(name).is_err());
        directory.check_missing(missing.take(MAX_LISTED).collect())?;
        let mut files: Vec<String> = groups.into_values().flat_map(|group| group.files).collect();
        files.sort_unstable();
        Ok(Weights::Files(files))
    }
}

/// Returns the groups of files by stem and variant, without variants of others and without Mistral's copies of others.
fn chosen_groups(names: &[String], ending: &str) -> BTreeMap<String, Group> {
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for name in names {
        if let Some(stem) = stem_of_index(name, ending) {
            groups.entry(stem).or_default().index = Some(name.clone());
        } else if let Some(base) = name.strip_suffix(ending) {
            let part = Part::of(base);
            let group =
                groups.entry(part.as_ref().map_or_else(|| base.to_owned(), |part| part.stem.clone())).or_default();
            group.files.push(name.clone());
            if let Some(part) = part {
                group.parts.insert(part.count.clone(), part);
            }
        }
    }
    let stems: BTreeSet<String> = groups.keys().cloned().collect();
    let is_variant = |stem: &str| {
        let dots = stem.match_indices('.').map(|(at, _)| &stem[..at]);
        dots.into_iter().any(|before| stems.contains(before))
    };
    let has_known = STEMS.iter().any(|known| stems.contains(*known));
    groups.retain(|stem, _| !(is_variant(stem) || has_known && stem == CONSOLIDATED));
    groups
}

/// Returns `true` for a file of weights that libraries look for, or for its index.
pub(crate) fn is_known(name: &str, ending: &str) -> bool {
    let rest = STEMS.iter().find_map(|stem| name.strip_prefix(stem).filter(|rest| rest.starts_with(['.', '-'])));
    rest.is_some_and(|rest| rest.ends_with(ending) || rest.contains(&format!("{ending}.index")))
}

/// Returns the stem and variant of an index: `model` of `model.safetensors.index.json`.
fn stem_of_index(name: &str, ending: &str) -> Option<String> {
    let (stem, rest) = name.strip_suffix(".json")?.split_once(&format!("{ending}.index"))?;
    match rest.strip_prefix('.') {
        None => rest.is_empty().then(|| stem.to_owned()),
        Some(variant) => Some(format!("{stem}.{variant}")),
    }
}

/// A file of several.
#[derive(Debug)]
struct Part {
    /// The stem and the variant.
    stem: String,
    /// The text before the number, and after the count.
    before: String,
    after: String,
    /// The number of files, as it is written.
    count: String,
}

/// The longest count that is believed: more files than that are in no directory.
const COUNT_DIGITS: usize = 5;

impl Part {
    /// Reads `STEM-00001-of-00002` or `STEM-00001-of-00002.VARIANT`. A shard of a rank is no such part: ranks that have nothing
    /// to write leave theirs out.
    fn of(base: &str) -> Option<Self> {
        let (before, rest) = base.rsplit_once("-of-")?;
        let (before, number) = before.rsplit_once('-')?;
        let (count, variant) = rest.split_once('.').map_or((rest, None), |(count, variant)| (count, Some(variant)));
        let is_number = |text: &str| text.len() == COUNT_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(number) || !is_number(count) || before.starts_with("shard-") {
            return None;
        }
        let after = variant.map_or_else(String::new, |variant| format!(".{variant}"));
        Some(Part { stem: format!("{before}{after}"), before: before.to_owned(), after, count: count.to_owned() })
    }

    /// Returns the names of all files that there are to be. The count comes from a name: of many, only the first are made.
    fn names_of_all(&self, ending: &str) -> impl Iterator<Item = String> {
        let Part { before, after, count, .. } = self;
        let all = count.parse().unwrap_or(0usize);
        (1..=all).map(move |number| format!("{before}-{number:05}-of-{count}{after}{ending}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str]) -> Vec<String> {
        let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        names.sort_unstable();
        let groups = chosen_groups(&names, ".safetensors");
        groups.into_values().flat_map(|group| group.index.into_iter().chain(group.files)).collect()
    }

    #[test]
    fn a_variant_is_taken_only_by_itself() {
        for others in [
            &["model.fp16.safetensors"][..],
            &["model.non_ema.safetensors", "model.bf16.safetensors"],
            &["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            &["model-00001-of-00002.fp16.safetensors", "model.safetensors.index.fp16.json"],
            &["model.fp16.safetensors.index.json", "consolidated.safetensors"],
        ] {
            assert_eq!(chosen(&[&["model.safetensors"], others].concat()), ["model.safetensors"], "{others:?}");
            assert_eq!(chosen(others).len(), others.len(), "{others:?}");
        }
    }

    #[test]
    fn files_of_other_stems_are_taken_together() {
        let names = ["a.safetensors", "b-1.safetensors", "llama-3.1.safetensors", "consolidated.safetensors"];
        assert_eq!(chosen(&names).len(), names.len());
    }

    #[test]
    fn the_count_in_a_name_tells_which_files_there_are_to_be() {
        let part = Part::of("model-00002-of-00003.fp16").unwrap();
        assert_eq!(part.stem, "model.fp16");
        let all: Vec<String> = part.names_of_all(".safetensors").collect();
        assert_eq!(all[2], "model-00003-of-00003.fp16.safetensors");
        assert_eq!(all.len(), 3);
        for none in ["model", "model-1-of-2", "shard-00001-model-00001-of-00003", "model-0000x-of-00002", "-of-00002"] {
            assert!(Part::of(none).is_none(), "{none}");
        }
    }
}
