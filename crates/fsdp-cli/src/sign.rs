//! `fsdp sign`: a signature over every byte of a checkpoint; and its check, which is a part of
//! `fsdp verify`.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::storage;
use fsdp_layout::count_text;
use fsdp_tools::sign::{self, PrivateKey, PublicKey, SignOptions, Signed};
use serde_json::{Value, json};

use crate::failure::{CommandError, exists_already_error, not_of_content_error};
use crate::progress::Progress;
use crate::text::escaped;
use crate::work::Work;
use crate::{output, stop};

/// The name of a signature in a checkpoint's directory, unless another is given.
const SIGNATURE_FILE: &str = "model.sig";

/// The most bytes of a key's file; a longer file holds no key.
const MAX_KEY_FILE_BYTES: u64 = 1 << 20;

/// Options of `fsdp sign`.
#[derive(Debug, Args)]
pub(crate) struct SignArguments {
    /// A checkpoint of any format
    #[arg(value_name = "CKPT")]
    path: Location,
    /// The private key: PEM of the curve P-256, without a password
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// The signature to write [default: `model.sig` in a directory, `NAME.sig` beside a file]
    #[arg(long, value_name = "FILE")]
    signature: Option<Location>,
    /// Replace a signature that is there
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    work: Work,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// Returns the files that a signature vouches for, in JSON.
pub(crate) fn signed_json(Signed { files, root, key }: &Signed) -> Value {
    json!({ "files": files, "root": root, "key": key })
}

/// Writes a signature of a checkpoint: `fsdp sign`.
///
/// # Errors
/// No key, no sound checkpoint, or something is where the signature would be.
pub(crate) fn run(arguments: &SignArguments) -> Result<()> {
    let path = &arguments.path;
    let pem = read_key(&arguments.key)?;
    let key = PrivateKey::from_pem(&pem)
        .with_context(|| format!("failed to use `{}`", arguments.key.display()))?;
    let signature = match &arguments.signature {
        Some(signature) => signature.clone(),
        None if path.is_file()? => signature_location_for(path),
        None => path.join(SIGNATURE_FILE),
    };
    signature.check_target()?;
    if signature.exists()? {
        check_replaceable(&signature, arguments.overwrite)?;
    }
    // A killed command may have left a temporary file in the checkpoint's directory, which must not
    // be signed.
    storage::clean_stale(&signature)?;
    let bar = progress_over(path, &arguments.work);
    // A signature inside the checkpoint is not one of the files that it vouches for.
    let relative_signature = path_inside(path, &signature);
    let options = SignOptions {
        signature: relative_signature.as_deref(),
        threads: Some(arguments.work.threads.count()),
        progress: Some(&|bytes| bar.add(bytes)),
    };
    let (content, signed) =
        sign::sign(path, &key, options).with_context(|| format!("failed to sign `{path}`"))?;
    drop(bar);
    stop::write_unless_stopped(&signature, |durable| {
        Ok(durable.replace_file(&signature, content.as_bytes())?)
    })?;
    if arguments.work.json {
        return output::print_json(&json!({
            "schema": SCHEMA,
            "path": path.to_string(),
            "signature": signature.to_string(),
            "signed": signed_json(&signed),
        }));
    }
    output::print_line(&format!(
        "{}  {}",
        signed_line(&signed),
        escaped(&signature.to_string())
    ))
}

/// Checks that a file that is there is a signature that may be replaced, and not a checkpoint or a
/// key.
fn check_replaceable(signature: &Location, overwrite: bool) -> Result<(), CommandError> {
    let place = signature.to_string();
    if !overwrite {
        let hint = "choose another place with `--signature`; `--overwrite` replaces a signature";
        return Err(exists_already_error(&place, hint));
    }
    match sign::read_signature(signature) {
        Ok(content) if sign::is_signature(&content) => Ok(()),
        _ => Err(not_of_content_error(&place, "a signature")),
    }
}

/// Returns the default location of the signature of a `checkpoint` that is one file: in the same
/// directory, with `.sig` after its name.
fn signature_location_for(checkpoint: &Location) -> Location {
    const ENDING: &str = ".sig";
    match checkpoint.local() {
        // The text of a path may be another path: what is not UTF-8 is replaced in it.
        Some(path) => {
            let mut path = path.as_os_str().to_owned();
            path.push(ENDING);
            path.into()
        }
        None => format!("{checkpoint}{ENDING}").into(),
    }
}

/// Checks a signature of a checkpoint, for `fsdp verify`.
///
/// # Errors
/// The signature is not one of the key's, or not of the files that are there.
pub(crate) fn check_signature(
    path: &Location,
    signature: &Location,
    key: &Path,
    work: &Work,
) -> Result<Signed> {
    let public_key = PublicKey::from_pem(&read_key(key)?)
        .with_context(|| format!("failed to use `{}`", key.display()))?;
    let content = sign::read_signature(signature)?;
    let bar = progress_over(path, work);
    let relative_signature = path_inside(path, signature);
    let options = SignOptions {
        signature: relative_signature.as_deref(),
        threads: Some(work.threads.count()),
        progress: Some(&|bytes| bar.add(bytes)),
    };
    sign::check(path, &content, &public_key, options)
        .with_context(|| format!("`{path}` is not what `{signature}` vouches for"))
}

/// Returns the progress over all files of a checkpoint. In an object store their sizes are not
/// known before.
fn progress_over(path: &Location, work: &Work) -> Progress {
    let Some(local) = path.local() else {
        return Progress::Hidden;
    };
    let files = match path.files() {
        Ok(files) => files.iter().map(|file| local.join(file)).collect(),
        // One file, or nothing that can be signed.
        Err(_) => vec![local.to_owned()],
    };
    // A file that cannot be examined is an error when it is read.
    let metadata = files.iter().filter_map(|file| file.metadata().ok());
    let bytes = metadata.map(|metadata| metadata.len()).sum();
    Progress::new(bytes, !work.no_progress && bytes > 0)
}

/// Returns a line about the files that a signature vouches for.
pub(crate) fn signed_line(signed: &Signed) -> String {
    let files = count_text(signed.files, "file", "files");
    format!("{:<9} {files}, key {}", "signed", signed.key)
}

/// Reads the file of a key.
fn read_key(path: &Path) -> Result<Vec<u8>> {
    let mut pem = Vec::new();
    let outcome =
        File::open(path).and_then(|file| file.take(MAX_KEY_FILE_BYTES).read_to_end(&mut pem));
    outcome.with_context(|| format!("failed to read the key `{}`", path.display()))?;
    Ok(pem)
}

/// Returns the path of `signature` relative to the directory of `checkpoint`; `None` if it lies
/// elsewhere.
fn path_inside(checkpoint: &Location, signature: &Location) -> Option<String> {
    let (Some(directory), Some(file)) = (checkpoint.local(), signature.local()) else {
        let relative = signature.name().strip_prefix(checkpoint.name()).ok()?;
        return relative.to_str().map(str::to_owned);
    };
    // Compare the real paths, because one may be given relatively, or through a link. The signature
    // itself may not be there yet.
    let parent = match file.parent()? {
        parent if parent.as_os_str().is_empty() => Path::new("."),
        parent => parent,
    };
    let real_file = parent.canonicalize().ok()?.join(file.file_name()?);
    let relative = real_file
        .strip_prefix(directory.canonicalize().ok()?)
        .ok()?;
    relative.to_str().map(str::to_owned)
}
