//! Opens a checkpoint of any format, which is recognized by its content.

use crate::dcp::reader::{CheckpointReader, metadata_files};
use crate::dcp::sidecars;
use crate::deepspeed;
use crate::error::{FileError, FormatError, listed};
use crate::folder;
use crate::formats::checkpoint::{Checkpoint, KeyFilter};
use crate::formats::extra::{ExtraFiles, is_data_of_dcp};
use crate::formats::read::OpenOptions;
use crate::formats::weights;
use crate::gguf;
use crate::metadata::METADATA_FILE;
use crate::numpy;
use crate::rank_files;
use crate::safetensors::read::SafetensorsCheckpoint;
use crate::steps::{list_steps, step_in_name, step_name};
use crate::storage::backend::{EntryKind, Links};
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::checked_file::CheckedFile;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;
use crate::torch::{self, legacy};
use crate::zip::Directory;

/// Opens the checkpoint that is at a path, or at the URL of an object store.
///
/// The format is recognized by the content, not the name: a DCP directory, a directory of
/// safetensors files (Hugging Face's layout, or torch's `HuggingFaceStorageWriter`), one
/// safetensors file, or one torch archive (`.pt`, `.pth`, `.bin`). A trainer's folder, which holds
/// several of them, is recognized by the names in it.
///
/// # Errors
/// [`FileError::NotCommitted`] if there is no checkpoint; errors in the files.
pub fn open(
    location: impl Into<Location>,
    options: OpenOptions,
) -> Result<Box<dyn Checkpoint>, FileError> {
    open_selected(location, options, &|_| true)
}

/// Opens the checkpoint at a path as [`open`] does, of which only some keys are wanted. In a file
/// of torch, very large values whose keys `is_wanted` returns `false` for are left out, so that
/// they take no memory. All other keys are there, wanted or not.
///
/// # Errors
/// Those of [`open`].
pub fn open_selected(
    location: impl Into<Location>,
    options: OpenOptions,
    is_wanted: KeyFilter<'_>,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let location = location.into();
    match location.storage()?.kind()? {
        None => Err(FileError::NotCommitted {
            path: location.name().to_owned(),
            reason: "there is nothing",
        }),
        Some(EntryKind::Directory) => open_directory(&location, options),
        Some(EntryKind::File | EntryKind::Special) => open_file(&location, options, is_wanted),
    }
}

/// Opens a part of a trainer's folder. A part that is such a folder too is refused, because links
/// could lead from folder to folder without end.
fn open_part(location: &Location, options: OpenOptions) -> Result<Box<dyn Checkpoint>, FileError> {
    if location.is_directory()? {
        let directory = CheckedDirectory::open(location, false, Links::Refuse)?;
        if metadata_files(&directory)?.is_empty() && folder::is_there(&directory.names()?) {
            return Err(unsupported_error(
                location,
                "a trainer's folder inside of another one",
            ));
        }
    }
    open(location.clone(), options)
}

/// Returns `true` for a directory that was a checkpoint of a run, and has no file `.metadata` any
/// more.
///
/// A save gives its directory the final name once all is in it. So a directory with such a name and
/// without the file is damaged. It is no save in progress, and nothing that a killed one has left:
/// those have hidden names.
///
/// The integrity file tells that it was a checkpoint: it lists the `.metadata`. Where that file is
/// lost too, the name must be the one that runs give to their checkpoints ([`step_name`]), and the
/// directory may hold nothing but data files of DCP. Directories of other programs have other names
/// or other files.
///
/// Returns `false` in an object store. A save writes below the final name there from its beginning
/// on, so what lacks the `.metadata` may be a save in progress, or what a killed one has left.
///
/// # Errors
/// A directory that cannot be read.
pub fn has_lost_metadata(checkpoint: &Location) -> Result<bool, FileError> {
    if checkpoint.local().is_none()
        || !checkpoint.is_directory()?
        || checkpoint.join(METADATA_FILE).is_file()?
    {
        return Ok(false);
    }
    let directory = match CheckedDirectory::open(checkpoint, false, Links::Refuse) {
        // It was removed a moment ago.
        Err(error) if error.is_absence() => return Ok(false),
        directory => directory?,
    };
    if is_named_by_run(checkpoint) && directory.names_not_utf8()?.is_empty() {
        let mut names = directory.names()?.into_iter();
        if names.all(|name| name == METADATA_FILE || is_data_of_dcp(&name)) {
            // A save may have replaced it meanwhile.
            return Ok(!checkpoint.join(METADATA_FILE).is_file()?);
        }
    }
    // An integrity file that is damaged too tells nothing.
    Ok(CheckedDirectory::open(checkpoint, true, Links::Refuse)
        .is_ok_and(|directory| directory.hashes(METADATA_FILE).is_some()))
}

/// Returns `true` for the very name that runs give to the checkpoint of a step.
fn is_named_by_run(checkpoint: &Location) -> bool {
    let name = checkpoint.name().file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| step_in_name(name).is_some_and(|step| step_name(step) == name))
}

/// Checks that a checkpoint of a run has not lost its `.metadata` ([`has_lost_metadata`]).
///
/// # Errors
/// [`FileError::NotCommitted`] if it has; a directory that cannot be read.
pub fn check_has_metadata(checkpoint: &Location) -> Result<(), FileError> {
    if !has_lost_metadata(checkpoint)? {
        return Ok(());
    }
    // A directory of that name may be in the place of the file, or a link that leads nowhere.
    let reason = if checkpoint.join(METADATA_FILE).exists()? {
        "its `.metadata` is no file"
    } else {
        "it has no `.metadata`"
    };
    Err(FileError::NotCommitted {
        path: checkpoint.name().to_owned(),
        reason,
    })
}

/// Checks that a checkpoint directory may be written here, replacing what exists. That is allowed
/// if nothing exists, for an empty directory, and for a checkpoint, damaged or not, whose directory
/// holds nothing else that would be lost.
///
/// # Errors
/// [`FileError::NotReplaceable`] and [`FileError::HoldsOthers`].
pub fn check_replaceable(location: &Location) -> Result<(), FileError> {
    match location.storage()?.kind()? {
        None => return Ok(()),
        Some(EntryKind::Directory) => {}
        Some(EntryKind::File | EntryKind::Special) => {
            return Err(not_replaceable_error(location, "directory"));
        }
    }
    let directory = CheckedDirectory::open(location, false, Links::Refuse)?;
    if let Some(name) = directory.names_not_utf8()?.into_iter().next() {
        return Err(holds_others_error(location, name));
    }
    if location.names()?.is_empty() {
        return Ok(());
    }
    match open_directory(location, OpenOptions { verify: false }) {
        Ok(checkpoint) => match ExtraFiles::find(&*checkpoint)?.foreign() {
            None => Ok(()),
            Some(name) => Err(holds_others_error(location, name.to_owned())),
        },
        // A directory that holds nothing but data files of DCP may be replaced: its metadata are
        // lost.
        Err(FileError::NotCommitted { .. })
            if location.names()?.iter().all(|name| is_data_of_dcp(name)) =>
        {
            Ok(())
        }
        // A directory that is refused for what it holds is not damaged.
        Err(
            FileError::NotCommitted { .. }
            | FileError::File {
                source: FormatError::Unsupported { .. },
                ..
            },
        ) => Err(not_replaceable_error(location, "checkpoint directory")),
        // A damaged checkpoint may be replaced. It is not known any more which files are its own,
        // but directories are not, so there must be none.
        Err(_) => {
            let names = location.names()?;
            // Beside data files of DCP, an empty directory in the place of the `.metadata`, which
            // is lost, holds nothing that would be lost too.
            let is_dcp = |name: &String| name == METADATA_FILE || is_data_of_dcp(name);
            let metadata = location.join(METADATA_FILE);
            let may_lose_metadata = names.iter().all(is_dcp) && is_empty_directory(&metadata);
            let directory_name = names.into_iter().find(|name| {
                may_be_directory(location, name) && !(may_lose_metadata && name == METADATA_FILE)
            });
            directory_name.map_or(Ok(()), |name| Err(holds_others_error(location, name)))
        }
    }
}

/// Returns the error of a directory that may not be replaced, because it holds this too.
fn holds_others_error(location: &Location, name: String) -> FileError {
    FileError::HoldsOthers {
        path: location.name().to_owned(),
        name,
    }
}

/// Returns the error of something that a checkpoint of the `wanted` kind may not replace.
fn not_replaceable_error(location: &Location, wanted: &'static str) -> FileError {
    FileError::NotReplaceable {
        path: location.name().to_owned(),
        wanted,
    }
}

/// Returns `true` if a name in a directory is that of a directory, or if that is not known.
fn may_be_directory(location: &Location, name: &str) -> bool {
    location.join(name).is_directory().unwrap_or(true)
}

/// Returns `true` for a directory that is known to hold nothing.
fn is_empty_directory(location: &Location) -> bool {
    CheckedDirectory::open(location, false, Links::Refuse).is_ok_and(|directory| {
        let names = [directory.names(), directory.names_not_utf8()];
        names
            .iter()
            .all(|names| names.as_ref().is_ok_and(Vec::is_empty))
    })
}

/// The ending of the names of safetensors files.
const SAFETENSORS: &str = ".safetensors";

/// Opens a directory, whose format the names in it tell. The order of the checks matters: a folder
/// of a trainer also has the names of other formats.
fn open_directory(
    location: &Location,
    options: OpenOptions,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let directory = CheckedDirectory::open(location, false, Links::Refuse)?;
    if !metadata_files(&directory)?.is_empty() {
        return sidecars::open(location, options);
    }
    let names = directory.names()?;
    if rank_files::is_described(location, &names)? {
        return Ok(Box::new(rank_files::open_checkpointing(location, options)?));
    }
    if folder::is_there(&names) {
        return folder::open(location, &names, options, &open_part);
    }
    if deepspeed::universal::is_there(location, &names)? {
        return Ok(Box::new(deepspeed::universal::open(location, options)?));
    }
    if deepspeed::is_there(&names) {
        return Ok(Box::new(deepspeed::zero::open(location, options)?));
    }
    if rank_files::is_there(&names) {
        return Ok(Box::new(rank_files::open(location, options)?));
    }
    if rank_files::is_bare(location, &names)? {
        return Ok(Box::new(rank_files::open_checkpointing(location, options)?));
    }
    if names
        .iter()
        .any(|name| name.ends_with(SAFETENSORS) || weights::is_library_name(name, SAFETENSORS))
    {
        return Ok(Box::new(SafetensorsCheckpoint::open_directory(
            location, options,
        )?));
    }
    let files = torch::index::weight_files(&names);
    if !files.is_empty() {
        return Ok(Box::new(torch::index::open(location, &files, options)?));
    }
    if !list_steps(location)?.is_empty() {
        return Err(FileError::NotCommitted {
            path: location.name().to_owned(),
            reason: "it is the folder of a run, whose checkpoints lie below it",
        });
    }
    if let Some(what) = megatron_format(&directory, &names)? {
        return Err(unsupported_error(location, what));
    }
    // An interrupted save of DCP may have other files beside its own.
    if !names.iter().any(|name| is_data_of_dcp(name)) {
        if deepspeed::universal::lacks_model_states(location, &names)? {
            return Err(FileError::NotCommitted {
                path: location.name().to_owned(),
                reason: "it is a Universal Checkpoint of DeepSpeed without its file of model states (`*_model_states.pt`)",
            });
        }
        if let Some(what) = unknown_files(&names) {
            return Err(unsupported_error(location, &what));
        }
        if has_checkpoints_in_folders(location, &names) {
            return Err(FileError::NotCommitted {
                path: location.name().to_owned(),
                reason: "its checkpoints are in folders of their own: name one of these",
            });
        }
    }
    // A directory of no known format gets the error of a DCP directory without metadata.
    Ok(Box::new(CheckpointReader::open_with(location, options)?))
}

/// Returns `true` for the name of a file that is a checkpoint by itself, or a rank's.
fn is_checkpoint_file(name: &str) -> bool {
    const ENDINGS: [&str; 7] = [".pt", ".pth", ".bin", ".ckpt", ".gguf", ".npz", ".npy"];
    !name.starts_with('.') && ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns `true` for a directory whose checkpoints are in folders of their own, as the models of a
/// pipeline are.
fn has_checkpoints_in_folders(location: &Location, names: &[String]) -> bool {
    let folders = names.iter().filter(|name| !name.starts_with('.'));
    folders
        .take(MAX_ENTRIES)
        .any(|folder| has_checkpoint(&location.join(folder)))
}

/// The most entries of a directory that are looked at for the sake of a message.
const MAX_ENTRIES: usize = 100;

/// Returns `true` for a folder with files of a checkpoint.
fn has_checkpoint(folder: &Location) -> bool {
    let names = folder.names().unwrap_or_default();
    let mut names = names.iter().take(MAX_ENTRIES);
    names.any(|name| {
        name == METADATA_FILE || name.ends_with(SAFETENSORS) || is_checkpoint_file(name)
    })
}

/// Returns the description, for an error, of a directory with files whose names tell no format;
/// `None` if there are none.
fn unknown_files(names: &[String]) -> Option<String> {
    let files = names.iter().filter(|name| is_checkpoint_file(name));
    let files: Vec<&String> = files.collect();
    if files.is_empty() {
        return None;
    }
    let is_of_one_file = [".gguf", ".npz", ".npy"]
        .iter()
        .any(|ending| files[0].ends_with(ending));
    let files = listed(&files, |name| format!("`{name}`"));
    if is_of_one_file {
        return Some(format!("a directory with {files} (name one of the files),"));
    }
    Some(format!(
        "a directory with {files}, whose names tell no format (name a file that has all; rename those of ranks as \
         `model_world_size_4_rank_0.pt` or `model_rank0.bin`),"
    ))
}

/// Returns the description, for an error, of a directory in one of Megatron's formats that are not
/// read; `None` for any other directory.
fn megatron_format(
    directory: &CheckedDirectory,
    names: &[String],
) -> Result<Option<&'static str>, FileError> {
    const CONFIG: &str = "metadata.json";
    const MAX_CONFIG_BYTES: u64 = 1 << 20;
    if names.iter().any(|name| name == CONFIG) {
        let bytes = directory.read_checked(CONFIG, MAX_CONFIG_BYTES)?;
        // Other programs have a file of this name too, in which anything may be.
        let config: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if config["sharded_backend"] == "zarr" {
            return Ok(Some(
                "Megatron-core's format `zarr` (Megatron-core saves `torch_dist` by default)",
            ));
        }
    }
    let is_old = names.iter().any(|name| name.starts_with("mp_rank_"));
    Ok(is_old.then_some(
        "Megatron-LM's old format, with a directory `mp_rank_…` for each rank (name the file in one of them),",
    ))
}

/// Returns, judging by its name, which part of a directory a file is; `None` if the name does not
/// tell.
fn part_of_directory(name: &str) -> Option<&'static str> {
    if name == METADATA_FILE || is_data_of_dcp(name) {
        Some("a file of a DCP directory (name the directory),")
    } else if name.ends_with(".index.json") {
        Some("an index of the files of a model (name their directory),")
    } else {
        None
    }
}

/// Opens a file. The error of one that is a part of a directory says so.
fn open_file(
    location: &Location,
    options: OpenOptions,
    is_wanted: KeyFilter<'_>,
) -> Result<Box<dyn Checkpoint>, FileError> {
    match open_content(location, options, is_wanted) {
        Err(error @ FileError::File { .. }) => {
            let (_, name) = location.split()?;
            Err(part_of_directory(name).map_or(error, |what| unsupported_error(location, what)))
        }
        opened => opened,
    }
}

/// Opens a file, whose format its first bytes tell.
fn open_content(
    location: &Location,
    options: OpenOptions,
    is_wanted: KeyFilter<'_>,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let (parent, name) = location.split()?;
    let directory = CheckedDirectory::open_beside(&parent, name, options.verify)?;
    let file = directory.file(name).map_err(|error| match error {
        // The user named it, so it is not a path inside a checkpoint.
        FileError::Path { reason, .. } => {
            unsupported_error(location, &format!("what is no regular file ({reason})"))
        }
        error => error,
    })?;
    // What one rank has of a tensor would look like the whole.
    if rank_files::is_part(&parent, name)? {
        return Err(unsupported_error(
            location,
            "one rank's file of a checkpoint of torch_checkpointing (name the directory with `metadata.pkl`),",
        ));
    }
    match read_first_bytes(location, &file)?.as_slice() {
        [b'P', b'K', 3 | 5, ..] => open_archive(location, directory, is_wanted),
        bytes if legacy::is_start(bytes) => Ok(Box::new(torch::read::open(
            location, directory, None, is_wanted,
        )?)),
        bytes if bytes.starts_with(legacy::OLD_START) => {
            Err(unsupported_error(location, legacy::OLD_FILE))
        }
        bytes if bytes.starts_with(numpy::MAGIC) => {
            Ok(Box::new(numpy::open_array(location, directory)?))
        }
        bytes if bytes.starts_with(gguf::MAGIC) => Ok(Box::new(gguf::open(location, directory)?)),
        // Eight bytes of length, and JSON.
        [_, _, _, _, _, _, _, _, b'{', ..] => Ok(Box::new(SafetensorsCheckpoint::open_file(
            location, directory, options,
        )?)),
        [] => Err(directory.file_error(name, FormatError::malformed("file", "it is empty"))),
        _ => {
            let what =
                "a file that is neither an archive of torch or NumPy, nor safetensors, nor GGUF,";
            Err(directory.file_error(name, FormatError::unsupported(what)))
        }
    }
}

/// Reads the first bytes of a file, by which its format is recognized. They are not checked yet,
/// because a file of no known format may have no hashes that are meant for it.
fn read_first_bytes(location: &Location, file: &CheckedFile) -> Result<Vec<u8>, FileError> {
    let mut bytes = vec![0; file.len().min(16) as usize];
    file.unchecked()
        .read_exact_at(0, &mut bytes)
        .map_err(|error| error.in_file(location.name()))?;
    Ok(bytes)
}

/// Opens a zip archive, which is torch's or NumPy's.
fn open_archive(
    location: &Location,
    directory: CheckedDirectory,
    is_wanted: KeyFilter<'_>,
) -> Result<Box<dyn Checkpoint>, FileError> {
    let (_, name) = location.split()?;
    let file = directory.file(name)?;
    let rooted_archive = Directory::read(&*file);
    // The records of NumPy's archives have no root, and may be compressed, so such an archive was
    // not read yet, or not with the names of its records.
    let may_be_numpy = rooted_archive.as_ref().map_or(true, numpy::is_archive);
    if may_be_numpy {
        match Directory::read_rootless(&*file) {
            Ok(archive) if numpy::is_archive(&archive) => {
                let arrays = numpy::open_archive(location, directory, &archive)?;
                return Ok(Box::new(arrays));
            }
            // Not even the names are known then, so the error must not be about torch's root.
            Err(error) if rooted_archive.is_err() => {
                return Err(directory.file_error(name, error));
            }
            _ => {}
        }
    }
    let archive = rooted_archive.map_err(|error| directory.file_error(name, error))?;
    Ok(Box::new(torch::read::open(
        location,
        directory,
        Some(archive),
        is_wanted,
    )?))
}

/// Makes the error of a location that is `what`, which is not supported.
fn unsupported_error(location: &Location, what: &str) -> FileError {
    FormatError::unsupported(what).in_file(location.name())
}
