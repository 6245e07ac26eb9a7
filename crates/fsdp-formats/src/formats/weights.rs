//! The choice of the files with a model's weights in a Hugging Face directory, by their names.
//!
//! ```text
//! STEM[.VARIANT].ENDING                     model.safetensors, model.fp16.safetensors
//! STEM[.VARIANT]-00001-of-00002.ENDING      or STEM-00001-of-00002.VARIANT.ENDING: one of several files
//! STEM[.VARIANT].ENDING.index.json          or STEM.ENDING.index.VARIANT.json: the index of several files
//! ```
//!
//! A directory may hold the same model several times: in half precision (`fp16`), without the
//! moving average of its weights (`non_ema`), or in its authors' own format (`consolidated`).
//! Libraries load the files without a variant, and so does this.

use std::collections::{BTreeMap, BTreeSet};

use super::index::Index;
use crate::error::{FileError, FormatError};
use crate::storage::checked_directory::CheckedDirectory;

/// The stems that libraries look for, in their order of preference.
const STEMS: [&str; 4] = [
    "model",
    "diffusion_pytorch_model",
    "adapter_model",
    "pytorch_model",
];
/// The stems of which `transformers` loads a single file even if there is an index, which may be
/// left from an older save.
const SINGLE_FILE_STEMS: [&str; 2] = ["model", "pytorch_model"];
/// The words for variants after other stems than [`STEMS`]. Any other dot is a part of a name, as
/// in `llama-3.1`.
const VARIANTS: [&str; 7] = ["bf16", "ema", "fp16", "fp32", "fp8", "int8", "non_ema"];
/// The stems of files in the formats of Mistral and of OpenCLIP. They hold the same weights as the
/// files of [`STEMS`] beside them, mostly under other keys.
const STEMS_OF_AUTHORS: [&str; 3] = ["consolidated", "open_clip_model", "open_clip_pytorch_model"];

/// The beginning of the name of a rank's shard, as torch's `HuggingFaceStorageWriter` has it.
pub(crate) const SHARD_PREFIX: &str = "shard-";

/// The files to read.
#[derive(Debug)]
pub(crate) enum Weights {
    /// The files that this index lists.
    Indexed(Index),
    /// All files of these names.
    Files(Vec<String>),
}

/// The files with the same stem and variant.
#[derive(Debug, Default)]
struct WeightGroup {
    index: Option<String>,
    files: Vec<String>,
    /// One of the files `…-00001-of-00002` for each count, such as `00002`. The names of the others
    /// follow from it.
    numbered_files: BTreeMap<String, NumberedFile>,
}

impl Weights {
    /// Chooses the files to read among the sorted `names` in a directory that have this ending,
    /// such as `.safetensors`.
    ///
    /// # Errors
    /// Several indexes, none of which libraries prefer; a file such as `…-00001-of-00002` whose
    /// counterparts are missing.
    pub(crate) fn choose(
        directory: &CheckedDirectory,
        names: &[String],
        ending: &str,
    ) -> Result<Self, FileError> {
        let groups = choose_groups(names, ending);
        let mut indexed: Vec<(&String, &String)> = groups
            .iter()
            .filter_map(|(stem, group)| Some((stem, group.index.as_ref()?)))
            .collect();
        let mut by_preference = STEMS.iter();
        let preferred = by_preference
            .find_map(|library_stem| indexed.iter().find(|(stem, _)| stem == library_stem));
        if let Some(&(stem, index)) = preferred {
            let single = format!("{stem}{ending}");
            if SINGLE_FILE_STEMS.contains(&stem.as_str()) && names.binary_search(&single).is_ok() {
                return Ok(Weights::Files(vec![single]));
            }
            indexed = vec![(stem, index)];
        }
        match &indexed[..] {
            [] => {}
            [(_, index)] => {
                let index = Index::read(directory, index)?;
                // One that lists nothing chooses nothing: a model of values only has it.
                if !index.weight_map.is_empty() {
                    return Ok(Weights::Indexed(index));
                }
            }
            [(_, first), (_, second), ..] => {
                let what = format!(
                    "a directory with both `{first}` and `{second}` (name a file of one of them)"
                );
                return Err(FormatError::unsupported(what).in_file(directory.path()));
            }
        }
        // Without an index, only the names tell how many files there should be.
        let numbered_files = groups
            .values()
            .flat_map(|group| group.numbered_files.values());
        let missing = numbered_files
            .flat_map(|numbered_file| numbered_file.expected_names(ending))
            .filter(|name| names.binary_search(name).is_err());
        directory.check_missing(missing)?;
        let mut files: Vec<String> = groups.into_values().flat_map(|group| group.files).collect();
        files.sort_unstable();
        Ok(Weights::Files(files))
    }
}

/// Returns the files grouped by stem and variant. It leaves out a variant if the plain files exist,
/// and files of [`STEMS_OF_AUTHORS`] if there are files of [`STEMS`].
fn choose_groups(names: &[String], ending: &str) -> BTreeMap<String, WeightGroup> {
    let mut groups: BTreeMap<String, WeightGroup> = BTreeMap::new();
    // macOS leaves a hidden `._NAME` of its own beside every file on foreign disks.
    for name in names.iter().filter(|name| !name.starts_with('.')) {
        if let Some(stem) = stem_of_index(name, ending) {
            groups.entry(stem).or_default().index = Some(name.clone());
        } else if let Some(base) = name.strip_suffix(ending) {
            if let Some(numbered_file) = NumberedFile::from_base_name(base) {
                let group = groups.entry(numbered_file.stem.clone()).or_default();
                group.files.push(name.clone());
                group
                    .numbered_files
                    .insert(numbered_file.count.clone(), numbered_file);
            } else {
                let group = groups.entry(base.to_owned()).or_default();
                group.files.push(name.clone());
            }
        }
    }
    let stems: BTreeSet<String> = groups.keys().cloned().collect();
    let has_library_stem = STEMS
        .iter()
        .any(|library_stem| stems.contains(*library_stem));
    groups.retain(|stem, _| {
        !(is_variant(stem, &stems) || has_library_stem && STEMS_OF_AUTHORS.contains(&stem.as_str()))
    });
    groups
}

/// Returns `true` if a stem is another one of `stems` with the name of a variant behind it.
fn is_variant(stem: &str, stems: &BTreeSet<String>) -> bool {
    stem.match_indices('.').any(|(dot, _)| {
        let plain_stem = &stem[..dot];
        let variant = &stem[dot + 1..];
        stems.contains(plain_stem) && (STEMS.contains(&plain_stem) || VARIANTS.contains(&variant))
    })
}

/// Returns `true` for the name of a file of weights that libraries look for, or of its index.
pub(crate) fn is_library_name(name: &str, ending: &str) -> bool {
    let index = format!("{ending}.index");
    STEMS.iter().any(|stem| {
        name.strip_prefix(stem).is_some_and(|rest| {
            rest.starts_with(['.', '-']) && (rest.ends_with(ending) || rest.contains(&index))
        })
    })
}

/// Returns the error of a key that is in two files of a directory, where nothing tells which of
/// them counts.
pub(crate) fn key_in_two_files(
    directory: &CheckedDirectory,
    key: &str,
    first_file: &str,
    second_file: &str,
) -> FileError {
    let what = format!(
        "`{key}` in both `{first_file}` and `{second_file}`, where no index tells which one counts (name a file, or move one away),"
    );
    directory.file_error(second_file, FormatError::unsupported(what))
}

/// Returns the stem and variant of an index: `model` for `model.safetensors.index.json`.
fn stem_of_index(name: &str, ending: &str) -> Option<String> {
    let (stem, rest) = name
        .strip_suffix(".json")?
        .split_once(&format!("{ending}.index"))?;
    match rest.strip_prefix('.') {
        None => rest.is_empty().then(|| stem.to_owned()),
        Some(variant) => Some(format!("{stem}.{variant}")),
    }
}

/// The parsed name of one of several files.
#[derive(Debug)]
struct NumberedFile {
    /// The stem and the variant.
    stem: String,
    /// The text before the number.
    prefix: String,
    /// The text after the count.
    suffix: String,
    /// The number of files, as written in the name.
    count: String,
}

/// The number of digits of the number and of the count.
const COUNT_DIGITS: usize = 5;

impl NumberedFile {
    /// Parses `STEM-00001-of-00002` or `STEM-00001-of-00002.VARIANT`; returns `None` for other
    /// names. Files that begin with [`SHARD_PREFIX`] are those of ranks. They do not count, because
    /// a rank that has nothing to write has no file.
    fn from_base_name(base: &str) -> Option<Self> {
        let (name_start, name_end) = base.rsplit_once("-of-")?;
        let (prefix, number) = name_start.rsplit_once('-')?;
        // The text after the count is a variant, with its dot.
        let (count, suffix) = name_end.split_at(name_end.find('.').unwrap_or(name_end.len()));
        if !is_number(number) || !is_number(count) || prefix.starts_with(SHARD_PREFIX) {
            return None;
        }
        Some(NumberedFile {
            stem: format!("{prefix}{suffix}"),
            prefix: prefix.to_owned(),
            suffix: suffix.to_owned(),
            count: count.to_owned(),
        })
    }

    /// Returns the names of all files that should exist. This is lazy, because the count comes from
    /// a file's name and may be absurdly large.
    fn expected_names(&self, ending: &str) -> impl Iterator<Item = String> {
        let NumberedFile {
            prefix,
            suffix,
            count,
            ..
        } = self;
        let file_count: usize = count.parse().expect("a count has digits only, and few");
        (1..=file_count)
            .map(move |number| format!("{prefix}-{number:05}-of-{count}{suffix}{ending}"))
    }
}

/// Returns `true` for the text of a number, or of a count, in the name of one of several files.
fn is_number(text: &str) -> bool {
    text.len() == COUNT_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the files and indexes of all groups that are chosen.
    fn chosen(names: &[&str]) -> Vec<String> {
        let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        names.sort_unstable();
        let groups = choose_groups(&names, ".safetensors");
        groups
            .into_values()
            .flat_map(|group| group.index.into_iter().chain(group.files))
            .collect()
    }

    #[test]
    fn a_variant_is_taken_only_by_itself() {
        for files in [
            &["model.fp16.safetensors"][..],
            &["model.non_ema.safetensors", "model.bf16.safetensors"],
            &[
                "model.fp16-00001-of-00002.safetensors",
                "model.fp16-00002-of-00002.safetensors",
            ],
            &[
                "model-00001-of-00002.fp16.safetensors",
                "model.safetensors.index.fp16.json",
            ],
            &[
                "model.fp16.safetensors.index.json",
                "consolidated.safetensors",
            ],
        ] {
            assert_eq!(
                chosen(&[&["model.safetensors"], files].concat()),
                ["model.safetensors"],
                "{files:?}"
            );
            assert_eq!(chosen(files).len(), files.len(), "{files:?}");
        }
    }

    #[test]
    fn files_of_other_stems_are_taken_together() {
        let names = [
            "a.safetensors",
            "b-1.safetensors",
            "llama-3.1.safetensors",
            "consolidated.safetensors",
        ];
        assert_eq!(chosen(&names).len(), names.len());
        let names = [
            "encoder.safetensors",
            "encoder.0.safetensors",
            "llama-3.safetensors",
            "llama-3.1.safetensors",
        ];
        assert_eq!(chosen(&names).len(), names.len());
        assert_eq!(
            chosen(&["unet.safetensors", "unet.fp16.safetensors"]),
            ["unet.safetensors"]
        );
    }

    #[test]
    fn the_count_in_a_name_tells_which_files_there_are_to_be() {
        let numbered = NumberedFile::from_base_name("model-00002-of-00003.fp16").unwrap();
        assert_eq!(numbered.stem, "model.fp16");
        let file_names: Vec<String> = numbered.expected_names(".safetensors").collect();
        assert_eq!(file_names[2], "model-00003-of-00003.fp16.safetensors");
        assert_eq!(file_names.len(), 3);
        for name in [
            "model",
            "model-1-of-2",
            "shard-00001-model-00001-of-00003",
            "model-0000x-of-00002",
            "-of-00002",
        ] {
            assert!(NumberedFile::from_base_name(name).is_none(), "{name}");
        }
    }
}
