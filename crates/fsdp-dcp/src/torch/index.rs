//! Directories of several files of `torch.save` with a JSON index, as Hugging Face has written large models.

use std::collections::HashSet;
use std::sync::Arc;

use super::read::{add, read_flat};
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler};
use crate::formats::checkpoint::Format;
use crate::formats::index::Index;
use crate::formats::read::OpenOptions;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;

/// The end of the name of such an index.
pub(crate) const INDEX_END: &str = ".bin.index.json";

/// Opens the files that the index of this name lists: each key from the file that it gives.
pub(crate) fn open(location: &Location, index: &str, options: OpenOptions) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open(location, options.verify, Links::Follow)?;
    directory.check_covered()?;
    let index = Index::read(&directory, index)?;
    let files = index.files(&directory)?;
    let mut missing = Vec::new();
    for file in files.keys() {
        if !directory.has(file)? {
            missing.push((*file).to_owned());
        }
    }
    directory.check_missing(missing)?;
    let mut assembler = Assembler::new(Format::TorchDirectory, location.name(), directory);
    for (file, keys) in &files {
        let name: Arc<str> = Arc::from(*file);
        let flat = read_flat(assembler.directory(), &name)?;
        let keys: HashSet<&str> = keys.iter().copied().collect();
        if let Some(missing) = keys.iter().find(|key| !flat.found.contains_key(**key)) {
            let reason = format!("it does not hold `{missing}`, which the index looks for here");
            let source = FormatError::Malformed { what: "checkpoint", reason };
            return Err(assembler.directory().file_error(file, source));
        }
        add(&mut assembler, &name, &flat, &mut |key| keys.contains(key).then(Vec::new))?;
    }
    assembler.sort_by_order(&index.weight_map);
    Ok(assembler.finish(None))
}
