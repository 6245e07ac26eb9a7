//! Directories with the weights of a model in files of `torch.save`, as older versions of Hugging
//! Face's libraries wrote them: one file, or several with a JSON index.

use std::collections::HashMap;
use std::sync::Arc;

use super::flat::FlatFile;
use super::read::add_leaf;
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::index::Index;
use crate::formats::read::OpenOptions;
use crate::formats::weights::{Weights, is_library_name, key_in_two_files};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;

/// The ending of the names of these files.
const ENDING: &str = ".bin";

/// Returns those names in a directory that are of a model's weights, or of an index of them.
pub(crate) fn weight_files(names: &[String]) -> Vec<String> {
    names
        .iter()
        .filter(|name| is_library_name(name, ENDING))
        .cloned()
        .collect()
}

/// Opens the files of these names. If one of them is an index, opens the files that it lists, and
/// reads each key from the file that the index gives. Any other key that is in two files is an
/// error.
pub(crate) fn open(
    location: &Location,
    names: &[String],
    options: OpenOptions,
) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_covered(location, options.verify)?;
    let weights = Weights::choose(&directory, names, ENDING)?;
    // The files, with the keys that the index looks for in each.
    let (index, files) = match &weights {
        Weights::Indexed(index) => (Some(index), index.keys_by_file(&directory)?),
        Weights::Files(files) => {
            let without_keys = files.iter().map(|file| (file.as_str(), Vec::new()));
            (None, without_keys.collect())
        }
    };
    let mut assembler = Assembler::new(Format::TorchDirectory, location.name(), directory);
    let mut structure = None;
    let mut file_of_key = HashMap::new();
    for (file, keys) in &files {
        let flat = FlatFile::read(assembler.directory(), file)?;
        if let Some(missing_key) = keys.iter().find(|key| !flat.found.contains_key(**key)) {
            let reason =
                format!("it does not hold `{missing_key}`, which the index looks for here");
            return Err(flat.error(FormatError::malformed("checkpoint", reason)));
        }
        add_new_keys(&mut assembler, &mut file_of_key, &flat, index)?;
        structure = Some(flat.structure);
    }
    // The containers of one file are those of all keys, but an index may leave keys out.
    if let Some(index) = index {
        assembler.sort_as(index);
        structure = None;
    }
    Ok(assembler.finish(structure.filter(|_| files.len() == 1)))
}

/// Adds the keys of a file, without those that the index gives to another one. A key that
/// `file_of_key` has from another file already is an error.
fn add_new_keys(
    assembler: &mut Assembler,
    file_of_key: &mut HashMap<String, Arc<str>>,
    flat: &FlatFile,
    index: Option<&Index>,
) -> Result<(), FileError> {
    for (key, (path, leaf)) in &flat.found {
        if index.is_some_and(|index| index.is_elsewhere(key, &flat.name)) {
            continue;
        }
        if let Some(first_file) = file_of_key.insert(key.clone(), flat.name.clone()) {
            return Err(key_in_two_files(
                assembler.directory(),
                key,
                &first_file,
                &flat.name,
            ));
        }
        add_leaf(assembler, flat, path, leaf)?;
    }
    Ok(())
}
