//! `fsdp verify`: checks that a checkpoint is whole, without loading it.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::ErrorKind;
use fsdp_layout::with_causes;
use fsdp_tools::verify::{self, Level, Report, VerifyOptions};
use serde::Serialize;

use crate::failure::Damaged;
use crate::output;
use crate::progress::Progress;
use crate::sign::{self, SignedFiles};
use crate::text::{escaped, iec};
use crate::work::Work;

/// The depth of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LevelName {
    /// Check the metadata: boxes are inside their tensors, disjoint and complete, and everything is
    /// stored somewhere
    Structure,
    /// Also check that files are long enough, and that items have the sizes in the metadata
    Sizes,
    /// Also check every byte against its hash; in a DCP directory without hashes, against the
    /// archives' checksums
    Hashes,
    /// Also read the numbers: count NaN and infinities, and compare digests and copies of
    /// replicated tensors
    Deep,
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

#[derive(Debug, Serialize)]
struct Finding<'a> {
    schema: u32,
    path: String,
    ok: bool,
    /// `true` if hashes lie beside the files now.
    hashed: bool,
    tensors: usize,
    values: usize,
    /// The number of copies that were compared with the first one (deep only).
    replicas: usize,
    /// Tensors and values whose digests were compared with the recorded ones.
    digests: usize,
    bytes_read: u64,
    problems: Vec<Problem>,
    /// The opaque values, which hold objects that only running code could build.
    opaque: Vec<OpaqueValue<'a>>,
    not_finite: Vec<NotFinite<'a>>,
    /// The data files that the metadata does not name.
    unknown_files: Vec<String>,
    /// `true` if the recorded digests are stale, because another program has rewritten the file.
    stale_digests: bool,
    /// The files that the signature vouches for, if one was asked for.
    signed: Option<SignedFiles<'a>>,
    /// `true` if there are no problems but tensors and values of a kind that is not supported.
    #[serde(skip)]
    is_unsupported: bool,
}

#[derive(Debug, Serialize)]
struct Problem {
    name: Option<String>,
    file: Option<String>,
    offset: Option<u64>,
    error: String,
}

#[derive(Debug, Serialize)]
struct OpaqueValue<'a> {
    name: &'a str,
    #[serde(rename = "type")]
    of: &'a str,
}

#[derive(Debug, Serialize)]
struct NotFinite<'a> {
    name: &'a str,
    nan: u64,
    infinite: u64,
}

/// Checks a checkpoint: `fsdp verify`.
///
/// # Errors
/// The checkpoint is damaged; the report is written all the same.
pub(crate) fn run(arguments: &VerifyArguments) -> Result<()> {
    let path = arguments.path.to_string();
    // With `--json` there is an object on stdout whatever happens: for an error that ends the check
    // early it has this error as its only problem.
    let json = arguments.work.json;
    // Check the signature first: until then nothing in the files can be trusted.
    let checked = match (&arguments.signature, &arguments.public_key) {
        (Some(signature), Some(key)) => {
            sign::check(&arguments.path, signature, key, &arguments.work).map(Some)
        }
        _ => Ok(None),
    };
    let signed = match checked {
        Err(error) => {
            if json {
                let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
                report_only_problem(path, causes.join(": "))?;
            }
            return Err(error);
        }
        Ok(signed) => signed,
    };
    let source = match checkpoint::open(&arguments.path, OpenOptions { verify: true }) {
        Err(error) => {
            if json {
                report_only_problem(path, with_causes(&error))?;
            }
            return Err(error.into());
        }
        Ok(source) => source,
    };
    let level = match arguments.level {
        LevelName::Structure => Level::Structure,
        LevelName::Sizes => Level::Sizes,
        LevelName::Hashes => Level::Hashes,
        LevelName::Deep => Level::Deep,
    };
    let shows_progress = arguments.work.shows_progress();
    // The deepest level reads the numbers after the hashes.
    let passes = if level == Level::Deep { 2 } else { 1 };
    let bar = Progress::new(bytes(&*source).saturating_mul(passes), shows_progress);
    let options = VerifyOptions {
        threads: Some(arguments.work.threads.count()),
        progress: Some(&|bytes| bar.add(bytes)),
    };
    let mut report = verify::verify(&*source, level, options)?;
    drop(bar);
    // Hashes of damaged files would make the damage look right from now on, so only a checkpoint
    // without problems gets them.
    if arguments.seal && report.is_ok() && !report.has_integrity {
        let bar = Progress::new(bytes(&*source), shows_progress);
        verify::add_integrity(&arguments.path, Some(&|bytes| bar.add(bytes)))?;
        report.has_integrity = true;
        drop(bar);
        output::talk(&format!("sealed `{path}`"));
    }
    // Files that no save has written are no damage, but whoever wonders about the size of the
    // directory wants to know of them.
    let unknown_files = verify::find_unknown_files(&*source)?
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let mut finding = Finding::new(path.clone(), &report);
    finding.unknown_files = unknown_files;
    finding.signed = signed.as_ref().map(SignedFiles::from);
    // The exit code must not depend on how much of the report was read.
    output::read_or_not(if json {
        output::json(&finding)
    } else {
        let mut lines: Vec<String> = signed.iter().map(sign::line).collect();
        lines.extend(finding.lines());
        output::lines(&lines)
    })?;
    // One problem is enough for the message: the report above has all of them.
    let Some(first) = report.problems.first() else {
        return Ok(());
    };
    // A file that is missing tells of an interrupted copy, which has another remedy than damage.
    let incomplete = match &first.file {
        Some(name) => matches!(source.directory().has(name), Ok(false)),
        None => false,
    };
    bail!(Damaged {
        path,
        count: report.problems.len(),
        first: Problem::from(first).to_string(),
        incomplete,
        unread: report
            .problems
            .iter()
            .all(|problem| problem.kind == ErrorKind::Io),
        unsupported: finding.is_unsupported,
    })
}

/// Prints the report of a checkpoint that could not be looked into, as JSON: the error is its only
/// problem.
fn report_only_problem(path: String, error: String) -> Result<()> {
    let report = Report::default();
    let mut finding = Finding::new(path, &report);
    finding.ok = false;
    finding.problems.push(Problem {
        name: None,
        file: None,
        offset: None,
        error,
    });
    output::read_or_not(output::json(&finding))
}

/// Returns the number of bytes of all items, as stored.
fn bytes(source: &dyn Checkpoint) -> u64 {
    // The lengths come from a file that may be damaged.
    let lengths = source
        .metadata()
        .stored()
        .map(|(_, _, stored)| stored.length);
    lengths.fold(0, u64::saturating_add)
}

impl<'a> Finding<'a> {
    /// Makes the finding of a report. The signature and unknown files are added by the caller.
    fn new(path: String, report: &'a Report) -> Self {
        let opaque = report.opaque.iter();
        let not_finite = report.not_finite.iter().map(|(name, census)| NotFinite {
            name,
            nan: census.nan,
            infinite: census.infinite,
        });
        Finding {
            schema: SCHEMA,
            // Where nothing but the kind of some items is wrong, the checkpoint may well be sound.
            is_unsupported: report
                .problems
                .iter()
                .all(|problem| problem.kind == ErrorKind::UnsupportedVersion),
            path,
            ok: report.is_ok(),
            hashed: report.has_integrity,
            tensors: report.tensors,
            values: report.values,
            replicas: report.replicas,
            digests: report.digests,
            bytes_read: report.bytes_read,
            problems: report.problems.iter().map(Problem::from).collect(),
            opaque: opaque.map(|(name, of)| OpaqueValue { name, of }).collect(),
            not_finite: not_finite.collect(),
            unknown_files: Vec::new(),
            stale_digests: report.stale_digests,
            signed: None,
        }
    }

    /// Returns the lines for people: first the problems, last the verdict.
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for problem in &self.problems {
            lines.push(format!("bad       {problem}"));
        }
        for OpaqueValue { name, of } in &self.opaque {
            lines.push(format!("opaque    {}: {}", escaped(name), escaped(of)));
        }
        for NotFinite {
            name,
            nan,
            infinite,
        } in &self.not_finite
        {
            lines.push(format!(
                "numbers   {}: {nan} NaN, {infinite} infinite",
                escaped(name)
            ));
        }
        if self.stale_digests {
            lines.push(
                "stale     the recorded digests: another program has written the file again"
                    .to_owned(),
            );
        }
        for file in &self.unknown_files {
            lines.push(format!("unknown   {}", escaped(file)));
        }
        let verdict = if self.ok {
            "ok"
        } else if self.is_unsupported {
            "unchecked"
        } else {
            "damaged"
        };
        let hashes = if self.hashed { "hashes" } else { "no hashes" };
        let Finding {
            tensors, values, ..
        } = self;
        let mut line = format!("{verdict:<9} {tensors} tensors, {values} values, {hashes}");
        if self.digests > 0 {
            line.push_str(&format!(", {} digests", self.digests));
        }
        lines.push(format!("{line}, {} read", iec(self.bytes_read)));
        lines
    }
}

impl From<&verify::Problem> for Problem {
    fn from(problem: &verify::Problem) -> Self {
        Problem {
            name: problem.fqn.clone(),
            file: problem.file.clone(),
            offset: problem.offset,
            error: problem.error.clone(),
        }
    }
}

impl std::fmt::Display for Problem {
    /// Writes the file with its offset, the name and the error, as far as they are known. All of
    /// them are escaped, because a checkpoint may contain names that act on a terminal.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "`{}`", escaped(file))?;
            match self.offset {
                Some(offset) => write!(f, " at byte {offset}: ")?,
                None => f.write_str(": ")?,
            }
        }
        if let Some(name) = &self.name {
            write!(f, "`{}`: ", escaped(name))?;
        }
        f.write_str(&escaped(&self.error))
    }
}
