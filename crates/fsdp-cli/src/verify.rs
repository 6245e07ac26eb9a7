//! `fsdp verify`: checks that a checkpoint is whole, without loading it.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{ErrorKind, count_text};
use fsdp_tools::elements::Census;
use fsdp_tools::sign::Signed;
use fsdp_tools::verify::{self, Level, Problem, Report, VerifyOptions};
use serde_json::{Value, json};

use crate::exit_codes;
use crate::failure::{CommandError, usage_error};
use crate::output;
use crate::progress::Progress;
use crate::sign;
use crate::text::{bytes_text, escaped};
use crate::work::Work;

/// The depth of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum LevelName {
    /// Check the metadata: boxes are inside their tensors, disjoint and complete, and everything is
    /// stored somewhere
    Structure,
    /// Also check that files are long enough, and that items have the sizes in the metadata
    Sizes,
    /// Also check every byte against its hash; in archives without hashes, against their checksums
    Hashes,
    /// Also read the numbers: count NaN and infinities, and compare digests and copies of
    /// replicated tensors
    Deep,
}

impl LevelName {
    /// Returns the name that the option has.
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no level is hidden");
        value.get_name().to_owned()
    }
}

/// Options of `fsdp verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// A checkpoint of any format
    #[arg(value_name = "CKPT")]
    path: Location,
    /// How much to check; each level includes those before it
    #[arg(long, value_enum, default_value = "hashes")]
    level: LevelName,
    /// Add hashes to a checkpoint that has none, if no problem is found
    #[arg(long)]
    seal: bool,
    /// A signature that must vouch for every file; `fsdp sign` and Python's `model_signing` make it
    #[arg(
        long,
        value_name = "FILE",
        requires = "public_key",
        conflicts_with = "seal"
    )]
    signature: Option<Location>,
    /// The public key of the signature, in PEM
    #[arg(long, value_name = "FILE", requires = "signature")]
    public_key: Option<PathBuf>,
    #[command(flatten)]
    work: Work,
}

const SCHEMA: u32 = 1;

/// Checks a checkpoint: `fsdp verify`.
///
/// # Errors
/// The checkpoint is damaged; the report is written all the same.
pub(crate) fn run(arguments: &VerifyArguments) -> Result<()> {
    let path = arguments.path.to_string();
    // Hashes make damage look right from then on, so the bytes are checked before they get any.
    if arguments.seal && arguments.level < LevelName::Hashes {
        bail!(usage_error(
            "`--seal` would vouch for bytes that a lower level does not read",
            "leave `--level` out",
        ));
    }
    // Check the signature first: until then nothing in the files can be trusted.
    let signature_check = match (&arguments.signature, &arguments.public_key) {
        (Some(signature), Some(key)) => {
            sign::check_signature(&arguments.path, signature, key, &arguments.work).map(Some)
        }
        _ => Ok(None),
    };
    let opened = signature_check.and_then(|signed| {
        let source = checkpoint::open(&arguments.path, OpenOptions { verify: true })?;
        Ok((signed, source))
    });
    let (signed, source) = match opened {
        Err(error) => {
            if !arguments.work.json {
                return Err(error);
            }
            // With `--json` there is an object on stdout whatever happens.
            let early_error = Some(format!("{error:#}"));
            let object = report_json(arguments, &Report::default(), &[], None, early_error);
            return output::outcome_after_report(output::print_json(&object), Err(error));
        }
        Ok(opened) => opened,
    };
    let level = match arguments.level {
        LevelName::Structure => Level::Structure,
        LevelName::Sizes => Level::Sizes,
        LevelName::Hashes => Level::Hashes,
        LevelName::Deep => Level::Deep,
    };
    let shows_progress = !arguments.work.no_progress;
    // The deepest level reads the numbers after the hashes.
    let passes = if level == Level::Deep { 2 } else { 1 };
    let bar = Progress::new(
        stored_bytes(&*source).saturating_mul(passes),
        shows_progress,
    );
    let options = VerifyOptions {
        threads: Some(arguments.work.threads.count()),
        progress: Some(&|bytes| bar.add(bytes)),
    };
    let mut report = verify::verify(&*source, level, options)?;
    drop(bar);
    // Only a checkpoint without problems gets hashes.
    if arguments.seal && report.is_ok() && !report.has_integrity {
        let bar = Progress::new(stored_bytes(&*source), shows_progress);
        verify::add_integrity(&arguments.path, Some(&|bytes| bar.add(bytes)))?;
        report.has_integrity = true;
        drop(bar);
        output::print_message(&format!("sealed `{path}`"));
    }
    // Files that no save has written are no damage, but whoever wonders about the size of the
    // directory wants to know of them.
    let unknown_files: Vec<String> = verify::find_unknown_files(&*source)?
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let printed = if arguments.work.json {
        let object = report_json(arguments, &report, &unknown_files, signed.as_ref(), None);
        output::print_json(&object)
    } else {
        let mut lines: Vec<String> = signed.iter().map(sign::signed_line).collect();
        lines.extend(report_lines(arguments.level, &report, &unknown_files));
        output::print_lines(&lines)
    };
    // One problem is enough for the message: the report above has all of them.
    let Some(first_problem) = report.problems.first() else {
        return output::outcome_after_report(printed, Ok(()));
    };
    let problems = &report.problems;
    // The first that holds decides: whoever cannot read the files learns nothing about their
    // content, and they may be sound.
    let (exit_code, verdict) = if are_all_of_kind(problems, ErrorKind::Io) {
        (exit_codes::IO, "could not be read")
    } else if are_all_of_kind(problems, ErrorKind::UnsupportedVersion) {
        (exit_codes::UNSUPPORTED_VERSION, "could not be checked")
    } else if let Some(name) = &first_problem.file
        && matches!(source.directory().has(name), Ok(false))
    {
        // A file that is missing tells of an interrupted copy, which has another remedy than
        // damage.
        (exit_codes::INCOMPLETE, "is damaged")
    } else {
        (exit_codes::CORRUPT, "is damaged")
    };
    let first_problem = problem_text(first_problem);
    let problems = match problems.len() {
        1 => first_problem,
        count => format!("{count} problems, the first: {first_problem}"),
    };
    let damage = CommandError {
        exit_code,
        message: format!("`{path}` {verdict}: {problems}"),
        hint: None,
    };
    output::outcome_after_report(printed, Err(damage.into()))
}

/// Returns the number of bytes of all items, as stored.
fn stored_bytes(source: &dyn Checkpoint) -> u64 {
    // The lengths come from a file that may be damaged.
    let lengths = source
        .metadata()
        .stored()
        .map(|(_, _, stored)| stored.length);
    lengths.fold(0, u64::saturating_add)
}

/// Returns the object of `--json`. A check that an error has ended early has this error as its only
/// problem.
fn report_json(
    arguments: &VerifyArguments,
    report: &Report,
    unknown_files: &[String],
    signed: Option<&Signed>,
    early_error: Option<String>,
) -> Value {
    let mut problems: Vec<Value> = report
        .problems
        .iter()
        .map(|problem| {
            json!({
                "name": problem.fqn,
                "file": problem.file,
                "offset": problem.offset,
                "error": problem.error,
            })
        })
        .collect();
    problems.extend(
        early_error
            .map(|error| json!({ "name": null, "file": null, "offset": null, "error": error })),
    );
    let opaque: Vec<Value> = report
        .opaque
        .iter()
        .map(|(name, type_name)| json!({ "name": name, "type": type_name }))
        .collect();
    let not_finite: Vec<Value> = report
        .not_finite
        .iter()
        .map(|(name, Census { nan, infinite, .. })| {
            json!({ "name": name, "nan": nan, "infinite": infinite })
        })
        .collect();
    json!({
        "schema": SCHEMA,
        "path": arguments.path.to_string(),
        "ok": problems.is_empty(),
        // If hashes lie beside the files now.
        "hashed": report.has_integrity,
        "tensors": report.tensors,
        "values": report.values,
        "replicas": report.replicas,
        "digests": report.digests,
        "bytes_read": report.bytes_read,
        "problems": problems,
        "opaque": opaque,
        "not_finite": not_finite,
        // The data files that the metadata does not name.
        "unknown_files": unknown_files,
        "stale_digests": report.stale_digests,
        "signed": signed.map(sign::signed_json),
        // The level of this check, which the variable FSDP_LEVEL may have set.
        "level": arguments.level.name(),
    })
}

/// Returns `true` if no problem is of another kind.
fn are_all_of_kind(problems: &[Problem], kind: ErrorKind) -> bool {
    problems.iter().all(|problem| problem.kind == kind)
}

/// Returns the lines for people: first the problems, last the verdict.
fn report_lines(level: LevelName, report: &Report, unknown_files: &[String]) -> Vec<String> {
    let mut lines = Vec::new();
    for problem in &report.problems {
        lines.push(format!("bad       {}", problem_text(problem)));
    }
    for (name, type_name) in &report.opaque {
        lines.push(format!(
            "opaque    {}: {}",
            escaped(name),
            escaped(type_name)
        ));
    }
    for (name, Census { nan, infinite, .. }) in &report.not_finite {
        lines.push(format!(
            "numbers   {}: {nan} NaN, {infinite} infinite",
            escaped(name)
        ));
    }
    if report.stale_digests {
        lines.push(
            "stale     the recorded digests: another program has written the file again".to_owned(),
        );
    }
    for file in unknown_files {
        lines.push(format!("unknown   {}", escaped(file)));
    }
    // Where nothing but the kind of some items is wrong, the checkpoint may well be sound.
    let verdict = if report.is_ok() {
        "ok"
    } else if are_all_of_kind(&report.problems, ErrorKind::UnsupportedVersion) {
        "unchecked"
    } else {
        "damaged"
    };
    let hashes = match report.has_integrity {
        true if level < LevelName::Hashes => "hashes not all checked",
        true => "hashes",
        false => "no hashes",
    };
    let tensors = count_text(report.tensors, "tensor", "tensors");
    let values = count_text(report.values, "value", "values");
    let mut line = format!("{verdict:<9} {tensors}, {values}, {hashes}");
    if report.digests > 0 {
        let digests = count_text(report.digests, "digest", "digests");
        line.push_str(&format!(", {digests}"));
    }
    lines.push(format!("{line}, {} read", bytes_text(report.bytes_read)));
    lines
}

/// Returns the file with its offset, the name and the error, as far as they are known. All of them
/// are escaped, because a checkpoint may contain names that act on a terminal.
fn problem_text(problem: &Problem) -> String {
    let mut text = String::new();
    if let Some(file) = &problem.file {
        text.push_str(&format!("`{}`", escaped(file)));
        if let Some(offset) = problem.offset {
            text.push_str(&format!(" at byte {offset}"));
        }
        text.push_str(": ");
    }
    if let Some(name) = &problem.fqn {
        text.push_str(&format!("`{}`: ", escaped(name)));
    }
    text.push_str(&escaped(&problem.error));
    text
}
