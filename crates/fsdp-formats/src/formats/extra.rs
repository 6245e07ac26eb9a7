//! Files that other programs put beside a checkpoint's own: the state of a trainer's loop, a
//! model's configuration, a tokenizer.

use std::collections::HashSet;

use super::checkpoint::{Checkpoint, Format};
use crate::error::FileError;
use crate::metadata::METADATA_FILE;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::integrity::INTEGRITY_FILE;
use crate::storage::names::{CLAIM_FILE, VALUES_FILE};

/// The files beside a checkpoint's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtraFiles {
    /// The regular files that belong to the checkpoint's framework, sorted: a copy of the
    /// checkpoint needs them.
    pub files: Vec<String>,
    /// Everything else, sorted: directories, links that lead out, the same weights in other
    /// formats, data files of other saves, and names that are not UTF-8, as messages show them.
    pub others: Vec<String>,
    /// The first file in either list that no framework keeps beside a checkpoint of this format.
    foreign: Option<String>,
}

impl ExtraFiles {
    /// Returns a file or directory that belongs neither to the checkpoint nor to its framework, and
    /// would be lost if the checkpoint were removed or replaced; `None` if there is none.
    pub fn foreign(&self) -> Option<&str> {
        self.foreign.as_deref()
    }

    /// Lists the files beside a checkpoint's own. A checkpoint that is one file has none.
    pub fn find(checkpoint: &dyn Checkpoint) -> Result<Self, FileError> {
        let directory = checkpoint.directory();
        let is_own: &dyn Fn(&str) -> bool = match checkpoint.format() {
            format if format.is_file() => return Ok(ExtraFiles::default()),
            Format::SafetensorsDirectory => &is_own_of_safetensors,
            Format::Dcp => &is_own_of_dcp,
            Format::Folder => &|name| is_own_of_safetensors(name) || is_own_of_torch(name),
            _ => &is_own_of_torch,
        };
        let mut stored: HashSet<&str> = checkpoint
            .metadata()
            .stored()
            .map(|(_, _, stored)| stored.relative_path.as_str())
            .collect();
        // Items may lie in folders.
        if checkpoint.format() == Format::TorchCheckpointing {
            let folders = stored.iter().filter_map(|path| path.split('/').next());
            stored.extend(folders.collect::<Vec<_>>());
        }
        // A part of a folder may be a directory of its own, or hold nothing.
        if checkpoint.format() == Format::Folder {
            stored.extend(checkpoint.parts().iter().map(|part| part.path));
        }
        // The directories that have some of its files.
        let own_directories: HashSet<&str> = stored
            .iter()
            .filter_map(|path| Some(path.split_once('/')?.0))
            .collect();
        let mut extra_files = ExtraFiles::default();
        for name in directory.names()? {
            // The hashes of a file that is a part of a folder lie beside the file.
            let hashed_file = name
                .strip_suffix(INTEGRITY_FILE)
                .filter(|_| checkpoint.format() == Format::Folder);
            if is_own(&name)
                || name == CLAIM_FILE
                || stored.contains(name.as_str())
                || directory.holds_copies(&name)
                || hashed_file.is_some_and(|file| stored.contains(file))
            {
                continue;
            }
            let is_file = is_file(directory, &name)?;
            if !(is_file && is_of_framework(checkpoint.format(), &name)) {
                extra_files.foreign.get_or_insert_with(|| name.clone());
            }
            if is_file && !is_other_data(&name) {
                extra_files.files.push(name)
            } else if !own_directories.contains(name.as_str()) {
                extra_files.others.push(name)
            }
        }
        for name in directory.names_not_utf8()? {
            extra_files.foreign.get_or_insert_with(|| name.clone());
            extra_files.others.push(name);
        }
        extra_files.others.sort();
        Ok(extra_files)
    }

    /// Returns the names of the files of a directory that Hugging Face's libraries need besides the
    /// weights: a configuration, a tokenizer, a model's own code.
    pub fn for_hugging_face(directory: &CheckedDirectory) -> Result<Vec<String>, FileError> {
        let mut files = Vec::new();
        for name in directory.names()? {
            if is_of_hugging_face(&name) && is_file(directory, &name)? {
                files.push(name);
            }
        }
        Ok(files)
    }
}

/// Returns `true` for a file; `false` for a directory, and for a link that must not be followed.
fn is_file(directory: &CheckedDirectory, name: &str) -> Result<bool, FileError> {
    match directory.has(name) {
        Err(FileError::Path { .. }) => Ok(false),
        is_file => is_file,
    }
}

/// Returns `true` for the name of a file that belongs to a DCP directory, besides those that the
/// metadata names.
fn is_own_of_dcp(name: &str) -> bool {
    name.starts_with(METADATA_FILE)
        || name.starts_with(INTEGRITY_FILE)
        || name.ends_with(METADATA_FILE)
}

/// Returns `true` for a data file of a DCP directory, and for the sidecar of hashes.
pub(crate) fn is_data_of_dcp(name: &str) -> bool {
    name.ends_with(".distcp") || name.starts_with(INTEGRITY_FILE)
}

/// Returns `true` for the name of a file that belongs to a safetensors directory, besides the
/// tensors.
fn is_own_of_safetensors(name: &str) -> bool {
    name.starts_with(INTEGRITY_FILE)
        || name == VALUES_FILE
        || name.ends_with(".safetensors.index.json")
}

/// Returns `true` for the name of a file that belongs to files of `torch.save`, besides those with
/// tensors.
fn is_own_of_torch(name: &str) -> bool {
    name.starts_with(INTEGRITY_FILE) || name.ends_with(".bin.index.json") || name == "metadata.pkl"
}

/// The beginnings of the names of files that Hugging Face's libraries look for.
const HUGGING_FACE_STARTS: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "tokenizer",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.",
    "merges.txt",
    "spiece.model",
    "chat_template.",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.",
];

/// Returns `true` for a configuration, a part of a tokenizer, or a model's own code.
fn is_of_hugging_face(name: &str) -> bool {
    const CODE: [&str; 3] = ["modeling_", "configuration_", "tokenization_"];
    let is_code = name.ends_with(".py") && CODE.iter().any(|start| name.starts_with(start));
    is_code
        || HUGGING_FACE_STARTS
            .iter()
            .any(|start| name.starts_with(start))
}

/// The files that Lightning and Megatron keep beside the data of a DCP directory.
const FILES_BESIDE_DCP: [&str; 3] = ["meta.pt", "common.pt", "metadata.json"];

/// The files that trainers keep beside their weights, besides those that Hugging Face's libraries
/// look for.
const FILES_BESIDE_WEIGHTS: [&str; 5] = [
    "README.md",
    "adapter_config.json",
    "training_args.bin",
    "zero_to_fp32.py",
    "latest",
];

/// Returns `true` for a file that a framework keeps beside a checkpoint of a format, or that an
/// earlier save or a signature has left there: it goes with the checkpoint.
fn is_of_framework(format: Format, name: &str) -> bool {
    if name.ends_with(".distcp") || name.ends_with(".sig") {
        return true;
    }
    match format {
        Format::Dcp => is_of_hugging_face(name) || FILES_BESIDE_DCP.contains(&name),
        _ => is_of_hugging_face(name) || FILES_BESIDE_WEIGHTS.contains(&name),
    }
}

/// Returns `true` for a file in a directory of `torch_checkpointing` that is no item: what other
/// frameworks keep beside weights, and the model that it was made into for Hugging Face's
/// libraries.
pub(crate) fn is_beside_items(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_made_for_hugging_face = name.ends_with(".safetensors.index.json")
        || name.ends_with(".safetensors") && name.contains("-of-");
    is_made_for_hugging_face
        || name.starts_with('.')
        || name != "config.json" && is_of_framework(Format::TorchCheckpointing, name)
}

/// Returns `true` for data files of another save, for weights in another format, which a copy would
/// make stale, for signatures, which are of the original's bytes, and for what interrupted programs
/// have left.
fn is_other_data(name: &str) -> bool {
    const STARTS: [&str; 5] = ["pytorch_model", "tf_model", "flax_model", "._", ".nfs"];
    const ENDS: [&str; 11] = [
        ".distcp",
        ".safetensors",
        ".gguf",
        ".onnx",
        ".sig",
        ".msgpack",
        ".h5",
        ".ot",
        ".ckpt",
        ".tmp",
        ".incomplete",
    ];
    // Weights that have another name than those which are read, and the indexes of such.
    let is_of_model =
        name.contains("model") && (name.ends_with(".bin") || name.contains(".index."));
    is_of_model
        || STARTS.iter().any(|start| name.starts_with(start))
        || ENDS.iter().any(|end| name.ends_with(end))
}
