//! Signing a checkpoint, and checking a signature: who vouches for every byte of it.
//!
//! Hashes and digests find faults. They are no protection against somebody who changes a checkpoint
//! and its hashes with it; a signature is. It is one file in the format of OpenSSF Model Signing
//! 1.0, so that the Python tool `model_signing` checks those that are made here, and its own are
//! checked here:
//!
//! ```text
//! a bundle of Sigstore (JSON)
//!   verificationMaterial.publicKey.hint     SHA-256 of the public key's PEM
//!   dsseEnvelope
//!     signatures[0].sig                     ECDSA over P-256 and SHA-256, of the payload and its type
//!     payload                               a statement of in-toto (JSON)
//!       subject                             the checkpoint's name, and the SHA-256 of all hashes below
//!       predicate.serialization             how the files were hashed, and which were left out
//!       predicate.resources                 each file's path and SHA-256
//! ```
//!
//! All files below the checkpoint's directory are signed, the integrity file and those of other
//! programs included. So a checkpoint is sealed first and signed last. Left out are the signature
//! itself and what belongs to git (`.git`, `.github`, `.gitattributes`, `.gitignore`). A checkpoint
//! that is one file is signed by itself: nothing beside it is covered.
//!
//! A file may be changed between the check and a load. To rule that out, check a copy that nobody
//! else can write.

mod bundle;
mod error;
mod key;
mod statement;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use fsdp_formats::checkpoint::{open, values_beside};
use fsdp_formats::internals::{NEW_VALUES, default_threads, on_each};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{CheckedDirectory, Links, ReadAt};
use fsdp_formats::{FileError, FormatError, Location};
use sha2::{Digest as _, Sha256};

use self::bundle::{MAX_SIGNATURE_BYTES, read_bundle, write_bundle};
use self::statement::{Sha256Hash, Statement};
use crate::verify::{Level, VerifyOptions, verify};

pub use self::error::SignError;
pub use self::key::{PrivateKey, PublicKey};

/// The bytes of a file that are hashed at once.
const PIECE_BYTES: u64 = 1 << 20;

/// The names that belong to git, and are never signed. The Python tool leaves out the same.
const GIT_NAMES: [&str; 4] = [".git", ".gitattributes", ".github", ".gitignore"];

/// The name that the signature of a checkpoint that is one file has for this file.
const SINGLE_FILE: &str = ".";

/// The options of signing a checkpoint, and of checking a signature.
#[derive(Clone, Copy, Default)]
pub struct SignOptions<'a> {
    /// The path of the signature below the checkpoint's directory, if it lies there: it is not
    /// signed itself.
    pub signature: Option<&'a str>,
    /// The number of threads that hash, one file each. `None` takes one for each core, up to four.
    pub threads: Option<usize>,
    /// A function that is called with the number of bytes of every piece that was hashed.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

/// The files that a signature vouches for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    /// The number of files.
    pub files: usize,
    /// The hash of all of them, as hexadecimal digits.
    pub root: String,
    /// The hash of the key that signed them.
    pub key: String,
}

/// Signs a checkpoint of any format. Returns the content of the signature's file, and what the
/// signature vouches for.
///
/// Every byte is read once, in a trainer's folder twice. Bytes that have hashes are checked, so
/// that nothing damaged is signed.
///
/// # Errors
/// There is no checkpoint; it has bytes that are not those of its hashes; links or devices in its
/// directory; a file with values beside it, which a signature of the file would not cover.
pub fn sign(
    location: &Location,
    key: &PrivateKey,
    options: SignOptions<'_>,
) -> Result<(String, Signed), SignError> {
    let checkpoint = open(location, OpenOptions { verify: true })?;
    // The files of a folder are covered by the hashes of its parts, and only a part compares them.
    if !checkpoint.parts().is_empty() {
        let options = VerifyOptions {
            threads: options.threads,
            progress: None,
        };
        verify(&*checkpoint, Level::Hashes, options)?.into_result(location)?;
    }
    // Hash every file, whatever it is: a load could read it.
    let directory = checkpoint.directory();
    let hashes = if checkpoint.format().is_file() {
        hash_single_file(location, directory, options)?
    } else {
        hash_files(directory, &files_to_sign(location, options)?, options)?
    };
    // The root of a file system has no name.
    let name = location
        .name()
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let excluded = excluded_paths(options).map(str::to_owned).collect();
    let statement = Statement::new(name, &hashes, excluded);
    let signed = Signed {
        files: hashes.len(),
        root: statement.root().to_owned(),
        key: key.public_key()?.hash().to_owned(),
    };
    Ok((write_bundle(&statement, key)?, signed))
}

/// Checks that a signature is one of the key's, and that the files at a location are those that
/// were signed: no other, none changed, none missing. Nothing there is taken for a checkpoint.
///
/// # Errors
/// [`SignError`] says which of all that is not so.
pub fn check(
    location: &Location,
    signature: &[u8],
    key: &PublicKey,
    options: SignOptions<'_>,
) -> Result<Signed, SignError> {
    // The signature comes first: nothing that the statement says counts before.
    let statement = read_bundle(signature, key)?;
    let signed_hashes = statement.hashes()?;
    let mut changed = Vec::new();
    let mut added = Vec::new();
    let mut missing = Vec::new();
    let found_hashes = if location.is_file()? {
        let (parent, _) = location.split()?;
        let directory = CheckedDirectory::open(&parent, false, Links::Follow)?;
        hash_single_file(location, &directory, options)?
    } else {
        let directory = CheckedDirectory::open(location, false, Links::Refuse)?;
        // Only files that were signed need hashing: others are wrong whatever they hold. So are
        // those that the signer chose to leave out: nobody vouches for them, and a load would read
        // them all the same.
        let (files, unsigned): (Vec<_>, Vec<_>) = files_to_sign(location, options)?
            .into_iter()
            .partition(|name| signed_hashes.contains_key(name));
        added = unsigned;
        hash_files(&directory, &files, options)?
    };
    for (name, hash) in &signed_hashes {
        match found_hashes.get(name) {
            None => missing.push(name.clone()),
            Some(found) if found != hash => changed.push(name.clone()),
            Some(_) => {}
        }
    }
    // The name of a single file is not among those of a directory that was signed.
    added.extend(
        found_hashes
            .into_keys()
            .filter(|name| !signed_hashes.contains_key(name)),
    );
    if changed.len() + added.len() + missing.len() > 0 {
        return Err(SignError::FilesDiffer {
            path: location.name().to_owned(),
            changed,
            added,
            missing,
        });
    }
    Ok(Signed {
        files: signed_hashes.len(),
        root: statement.root().to_owned(),
        key: key.hash().to_owned(),
    })
}

/// Reads the file of a signature.
///
/// # Errors
/// [`FileError`]: it is not there, or larger than any signature.
pub fn read_signature(location: &Location) -> Result<Vec<u8>, FileError> {
    let (parent, name) = location.split()?;
    CheckedDirectory::open(&parent, false, Links::Follow)?.read_checked(name, MAX_SIGNATURE_BYTES)
}

/// Returns `true` if these bytes are a signature, of whatever checkpoint and key.
#[must_use]
pub fn is_signature(content: &[u8]) -> bool {
    bundle::is_bundle(content)
}

/// Returns the paths that are not signed, and neither is what lies below them.
fn excluded_paths(options: SignOptions<'_>) -> impl Iterator<Item = &str> {
    GIT_NAMES.into_iter().chain(options.signature)
}

/// Returns the paths of all files below a directory, without those that are not signed.
fn files_to_sign(location: &Location, options: SignOptions<'_>) -> Result<Vec<String>, FileError> {
    let excluded: Vec<&str> = excluded_paths(options).collect();
    let mut files = location.files()?;
    files.retain(|name| {
        !excluded.iter().any(|path| {
            // The path itself, or what lies below it.
            name.strip_prefix(path)
                .is_some_and(|below| below.is_empty() || below.starts_with('/'))
        })
    });
    Ok(files)
}

/// Hashes a checkpoint that is one file. A file of values beside it would not be covered, so it is
/// refused.
fn hash_single_file(
    location: &Location,
    directory: &CheckedDirectory,
    options: SignOptions<'_>,
) -> Result<BTreeMap<String, Sha256Hash>, SignError> {
    let (_, name) = location.split()?;
    let values = values_beside(name);
    let pending_values = format!("{values}{NEW_VALUES}");
    let mut names = directory.names()?.into_iter();
    if let Some(file) = names.find(|name| *name == values || name.starts_with(&pending_values)) {
        return Err(SignError::ValuesBeside {
            path: location.name().to_owned(),
            file,
        });
    }
    let file = directory.extra_file(name)?;
    let hash = hash_file(&file, options).map_err(|source| directory.file_error(name, source))?;
    Ok(BTreeMap::from([(SINGLE_FILE.to_owned(), hash)]))
}

/// Returns the hashes of files by their names. Each file is hashed on one thread.
fn hash_files(
    directory: &CheckedDirectory,
    files: &[String],
    options: SignOptions<'_>,
) -> Result<BTreeMap<String, Sha256Hash>, FileError> {
    let threads = options.threads.unwrap_or_else(default_threads);
    let hashed = on_each(files, threads, |name| {
        let file = directory.extra_file(name)?;
        let hash =
            hash_file(&file, options).map_err(|source| directory.file_error(name, source))?;
        Ok((name.clone(), hash))
    });
    hashed.into_iter().collect()
}

/// Returns the hash of a file, which is read a piece at a time.
fn hash_file(file: &dyn ReadAt, options: SignOptions<'_>) -> Result<Sha256Hash, FormatError> {
    let mut hasher = Sha256::new();
    let mut buffer = Vec::new();
    for offset in (0..file.len()).step_by(PIECE_BYTES as usize) {
        buffer.resize(PIECE_BYTES.min(file.len() - offset) as usize, 0);
        file.read_exact_at(offset, &mut buffer)?;
        hasher.update(&buffer);
        if let Some(progress) = options.progress {
            progress(buffer.len() as u64);
        }
    }
    Ok(hasher.finalize().into())
}
