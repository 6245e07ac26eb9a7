//! The files of `torch.save` beside a DCP directory's own, in which trainers keep what is no
//! sharded tensor.
//!
//! ```text
//! meta.pt       Lightning: loops, callbacks, hyperparameters, schedulers
//! common.pt     Megatron-core: arguments, iteration, the groups of the optimizer
//! ```
//!
//! Both frameworks put their contents at the top level of the state dict that they load, beside the
//! keys of the directory. So their keys are at the top level here too.

use std::collections::HashSet;
use std::sync::Arc;

use fsdp_layout::KeyPath;

use super::reader::CheckpointReader;
use crate::error::{FileError, FormatError};
use crate::formats::assembled::{Assembled, Assembler, Held};
use crate::formats::checkpoint::{Checkpoint, Format};
use crate::formats::joined::{Joined, Part};
use crate::formats::read::OpenOptions;
use crate::formats::structure::Structure;
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;
use crate::torch::flat::FlatFile;
use crate::torch::legacy;
use crate::torch::read::add;

/// The names of such files.
pub const SIDECAR_FILES: [&str; 2] = ["common.pt", "meta.pt"];

/// Opens a DCP directory with the files beside its own, if there are any.
pub(crate) fn open(
    location: &Location,
    options: OpenOptions,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let own_checkpoint = CheckpointReader::open_with(location, options)?;
    let mut sidecars = Vec::new();
    let mut taken_keys: HashSet<String> =
        own_checkpoint.metadata().entries.keys().cloned().collect();
    for name in SIDECAR_FILES {
        if is_torch_file(own_checkpoint.directory(), name)? {
            let sidecar = open_sidecar(location, name, options, &taken_keys)?;
            taken_keys.extend(sidecar.metadata().entries.keys().cloned());
            sidecars.push((name, sidecar));
        }
    }
    if sidecars.is_empty() {
        return Ok(Box::new(own_checkpoint));
    }
    let directory = CheckedDirectory::open(location, options.verify, Links::Refuse)?;
    let mut joined = Joined::new(Format::Dcp, location.name(), directory);
    joined.add(Part::default(), Box::new(own_checkpoint))?;
    for (name, sidecar) in sidecars {
        joined.add(
            Part {
                path: name.to_owned(),
                ..Part::default()
            },
            Box::new(sidecar),
        )?;
    }
    Ok(Box::new(joined.finish()))
}

/// Returns `true` if there is a file of this name that begins as a file of `torch.save` does, even
/// if it ends within these bytes. A file that begins differently was not written by the framework.
///
/// # Errors
/// An empty file, and anything but a regular file: it stands where the framework's own file was, so
/// the keys in that one are lost. A file that the integrity file lists, and that is missing.
fn is_torch_file(directory: &CheckedDirectory, name: &str) -> Result<bool, FileError> {
    let damage = |reason: &str| {
        let source = FormatError::malformed("file beside a checkpoint", reason);
        Err(directory.file_error(name, source))
    };
    match directory.has(name) {
        Ok(true) => {}
        Ok(false) => {
            let is_listed = directory.hashes(name).is_some();
            directory.check_missing(is_listed.then(|| name.to_owned()))?;
            return Ok(false);
        }
        Err(FileError::Path { reason, .. }) => return damage(reason),
        Err(error) => return Err(error),
    }
    let file = directory.extra_file(name)?;
    if file.is_empty() {
        return damage("it is empty");
    }
    let mut start = vec![0; file.len().min(legacy::START_LENGTH as u64) as usize];
    file.read_exact_at(0, &mut start)
        .map_err(|source| directory.file_error(name, source))?;
    if start.starts_with(legacy::OLD_START) {
        let source = FormatError::unsupported(legacy::OLD_FILE);
        return Err(directory.file_error(name, source));
    }
    Ok(may_be_of_torch(&start))
}

/// Returns `true` if a file that begins with these bytes, or is no longer than they are, may be one
/// of `torch.save`, whole or cut short. Other programs write pickles too.
fn may_be_of_torch(start: &[u8]) -> bool {
    if start.len() >= legacy::START_LENGTH {
        return start.starts_with(b"PK") || legacy::is_start(start);
    }
    let is_cut_pickle = matches!(
        start,
        [0x80] | [0x80, 2..=5] | [0x80, 2..=5, 0x8a, ..] | [0x80, 4 | 5, 0x95, ..]
    );
    let is_other_start = [b"PK".as_slice(), legacy::OLD_START]
        .iter()
        .any(|known| known.starts_with(start) || start.starts_with(known));
    is_cut_pickle || is_other_start
}

/// Opens one such file. A file that cannot be read as separate keys becomes one opaque value under
/// its file name.
fn open_sidecar(
    location: &Location,
    name: &str,
    options: OpenOptions,
    taken_keys: &HashSet<String>,
) -> Result<Assembled, FileError> {
    let directory = CheckedDirectory::open_for(location, name, options.verify)?;
    let mut assembler = Assembler::new(Format::Torch, location.join(name).name(), directory);
    let name: Arc<str> = Arc::from(name);
    let description = match FlatFile::read(assembler.directory(), &name) {
        Ok(flat) => match flat.found.keys().find(|key| taken_keys.contains(*key)) {
            Some(key) => {
                format!("a state dict with `{key}`, which another file of the directory has too")
            }
            None if !matches!(flat.structure, Structure::Dict(_)) => "what is no dict".to_owned(),
            None => {
                add(&mut assembler, &flat, &[])?;
                return Ok(assembler.finish(Some(flat.structure)));
            }
        },
        Err(FileError::File {
            source: FormatError::Unsupported { what },
            ..
        }) => what,
        Err(error) => return Err(error),
    };
    let path = KeyPath::from_key(&*name);
    let length = assembler.directory().file(&name)?.len();
    assembler.add_value(&path, &name, Held::whole_file(description, &name, length))?;
    Ok(assembler.finish(None))
}
