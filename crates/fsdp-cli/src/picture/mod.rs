//! `fsdp map`: which rank and file holds which part of which tensor, as a picture.

mod drawing;
mod files;
mod raster;
mod terminal;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::checkpoint;
use fsdp_formats::reader::OpenOptions;

use self::files::CheckpointFiles;
use crate::failure::nothing_selected_error;
use crate::keys::KeyFilter;
use crate::markup::page;
use crate::new_file::{Content, NewFile};
use crate::output;
use crate::parsers::one_to;

/// The most tensors of a picture.
const MAX_TENSORS: u64 = 2000;
/// The tensors that a terminal shows, by default.
const TERMINAL_LIMIT: usize = 32;
/// The tensors that a file shows, by default.
const FILE_LIMIT: usize = 300;

/// Options of `fsdp map`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fsdp map step-00000020 --include 'model.*'
  fsdp map step-00000020 --html map.html")]
pub(crate) struct PictureArguments {
    /// A checkpoint of any format
    #[arg(value_name = "CKPT")]
    path: Location,
    #[command(flatten)]
    filter: KeyFilter,
    /// Show at most N tensors, the first by name [default: 32 in a terminal, 300 in a file]
    #[arg(long, value_name = "N", value_parser = one_to(MAX_TENSORS), conflicts_with = "json")]
    limit: Option<usize>,
    /// Write a picture
    #[arg(long, value_name = "FILE", group = "file", conflicts_with_all = ["html", "json"])]
    svg: Option<PathBuf>,
    /// Write a page with the picture, which needs no other file
    #[arg(long, value_name = "FILE", group = "file", conflicts_with = "json")]
    html: Option<PathBuf>,
    /// Replace the file that is there
    #[arg(long, requires = "file")]
    overwrite: bool,
    /// One JSON object on stdout: the boxes and bytes of each file. Those of each tensor are in
    /// `fsdp inspect --json`
    #[arg(long)]
    json: bool,
}

/// Shows who holds what: `fsdp map`.
///
/// # Errors
/// There is no committed checkpoint, its metadata is damaged, or the file is there already.
pub(crate) fn run(arguments: &PictureArguments) -> Result<()> {
    let picture = arguments.svg.as_ref().map(|path| (path, Content::Picture));
    let html = arguments.html.as_ref().map(|path| (path, Content::Page));
    let file = picture.or(html).map(|(path, content)| NewFile {
        path,
        content,
        overwrite: Some(arguments.overwrite),
    });
    // Reading a checkpoint may take long, so refuse to replace a file before that.
    if let Some(file) = file {
        file.check()?;
    }
    let source = checkpoint::open(&arguments.path, OpenOptions::default())?;
    let keys = arguments.filter.keys(&[], None)?;
    let checkpoint_files = CheckpointFiles::new(arguments.path.to_string(), &*source, &keys);
    if checkpoint_files.entries.is_empty() && !source.metadata().entries.is_empty() {
        bail!(nothing_selected_error());
    }
    keys.check_globs(source.metadata().entries.keys().map(String::as_str))?;
    let Some(file) = file else {
        if arguments.json {
            return output::print_json(&checkpoint_files);
        }
        let max_tensors = arguments.limit.unwrap_or(TERMINAL_LIMIT);
        return output::print_lines(&terminal::picture_lines(&checkpoint_files, max_tensors));
    };
    // A file can be scrolled, so it shows more than a terminal does.
    let max_tensors = arguments.limit.unwrap_or(FILE_LIMIT);
    let title = format!("Map of {}", checkpoint_files.path);
    // Both are one file that loads nothing, so they can be sent as they are.
    let text = match file.content {
        Content::Page => page(&title, &drawing::page_body(&checkpoint_files, max_tensors)),
        _ => drawing::picture_file(&title, &checkpoint_files, max_tensors),
    };
    file.write(text.as_bytes())?;
    output::print_message(&format!("wrote `{}`", file.path.display()));
    Ok(())
}
