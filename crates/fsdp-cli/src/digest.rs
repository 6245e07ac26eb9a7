//! `fsdp digest`: one number that two checkpoints share if their state is the same, whatever their
//! formats and layouts.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::checkpoint;
use fsdp_formats::digest::digest;
use fsdp_formats::reader::OpenOptions;
use serde_json::json;

use crate::failure::usage_error;
use crate::natural;
use crate::output;
use crate::text::escaped;
use crate::work::Threads;

/// Options of `fsdp digest`.
#[derive(Debug, Args)]
pub(crate) struct DigestArguments {
    /// A checkpoint of any format
    #[arg(value_name = "CKPT")]
    path: Location,
    /// The digests of all tensors and values as well
    #[arg(long, conflicts_with = "json")]
    each: bool,
    /// The digests that were recorded when it was saved, without reading its data
    #[arg(long)]
    recorded: bool,
    /// One JSON object on stdout, with all digests
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    threads: Threads,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// Prints the digest of a checkpoint: `fsdp digest`.
///
/// # Errors
/// There is no committed checkpoint, or it cannot be read; with `--recorded`, it has no digests.
pub(crate) fn run(arguments: &DigestArguments) -> Result<()> {
    let checkpoint = checkpoint::open(&arguments.path, OpenOptions { verify: true })?;
    let path = arguments.path.to_string();
    // Recorded digests cost nothing but may be stale; computed ones read every byte.
    let computed;
    let (origin, digests) = if !arguments.recorded {
        computed = digest(&*checkpoint, arguments.threads.count())?;
        ("computed", &computed)
    } else if let Some(recorded) = checkpoint.digests() {
        ("recorded", recorded)
    } else {
        let reason = if checkpoint.has_stale_digests() {
            ": another program has written the file again since"
        } else {
            ""
        };
        bail!(usage_error(
            format!("`{path}` has no recorded digests{reason}"),
            "leave `--recorded` out",
        ));
    };
    if arguments.json {
        let each: BTreeMap<&str, String> = digests
            .iter()
            .map(|(name, digest)| (name, digest.to_string()))
            .collect();
        return output::print_json(&json!({
            "schema": SCHEMA,
            "path": path,
            "from": origin,
            "digest": digests.root().to_string(),
            "each": each,
        }));
    }
    // The digest of all comes last, where it stands above the next prompt.
    let mut lines = Vec::new();
    if arguments.each {
        let mut sorted_digests: Vec<_> = digests.iter().collect();
        sorted_digests.sort_by(|(a, _), (b, _)| natural::compare(a, b));
        for (name, digest) in sorted_digests {
            lines.push(format!("{digest}  {}", escaped(name)));
        }
    }
    lines.push(format!("{}  {}", digests.root(), escaped(&path)));
    output::print_lines(&lines)
}
