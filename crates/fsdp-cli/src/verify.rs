//! `fsdp verify`: checks that a checkpoint is whole, without loading it.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::ErrorKind;
use fsdp_layout::with_causes;
use fsdp_tools::sign::Signed;
use fsdp_tools::verify::{self, Level, Report};
use serde::Serialize;

use super::failure::Damaged;
use super::output;
use super::progress::Progress;
use super::sign::{self, SignedFiles};
use super::text::{escaped, iec};
use super::work::Work;

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
    #[arg(long, value_enum, default_value = "hashes", env = "FSDP_LEVEL")]
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
    opaque: Vec<Opaque<'a>>,
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
struct Opaque<'a> {
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
    // Check the signature first: until then nothing in the files can be trusted.
    let signed = match signature(arguments) {
        Err(error) if arguments.work.json => {
            let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
            let problem = Problem {
                name: None,
                file: None,
                offset: None,
                error: causes.join(": "),
            };
            output::read_or_not(output::json(&finding(
                path,
                &Report::default(),
                vec![problem],
                Vec::new(),
            )))?;
            return Err(error);
        }
        signed => signed?,
    };
    let opened = checkpoint::open(&arguments.path, OpenOptions { verify: true });
    if let (Err(error), true) = (&opened, arguments.work.json) {
        // A checkpoint that cannot be opened is reported as its only problem.
        let problem = Problem {
            name: None,
            file: None,
            offset: None,
            error: with_causes(error),
        };
        output::read_or_not(output::json(&finding(
            path.clone(),
            &Report::default(),
            vec![problem],
            Vec::new(),
        )))?;
    }
    let source = opened?;
    let level = match arguments.level {
        LevelName::Structure => Level::Structure,
        LevelName::Sizes => Level::Sizes,
        LevelName::Hashes => Level::Hashes,
        LevelName::Deep => Level::Deep,
    };
    let passes = if level == Level::Deep { 2 } else { 1 };
    let bar = Progress::new(
        bytes(&*source).saturating_mul(passes),
        arguments.work.shows_progress(),
    );
    let progress = |bytes| bar.add(bytes);
    let mut report = verify::verify_on_threads(
        &*source,
        level,
        arguments.work.threads.count(),
        Some(&progress),
    )?;
    drop(bar);
    if arguments.seal && report.is_ok() && !report.has_integrity {
        let bar = Progress::new(bytes(&*source), arguments.work.shows_progress());
        verify::add_integrity(&arguments.path, Some(&|bytes| bar.add(bytes)))?;
        report.has_integrity = true;
        drop(bar);
        output::talk(&format!("sealed `{path}`"));
    }
    let unknown = verify::unknown_files(&*source)?
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let mut found = finding(
        path.clone(),
        &report,
        report.problems.iter().map(Problem::new).collect(),
        unknown,
    );
    found.signed = signed.as_ref().map(SignedFiles::from);
    output::read_or_not(if arguments.work.json {
        output::json(&found)
    } else {
        let mut lines = found.lines();
        lines.splice(0..0, signed.as_ref().map(sign::line));
        output::lines(&lines)
    })?;
    let Some(first) = report.problems.first() else {
        return Ok(());
    };
    let missing = |name: &String| source.directory().has(name).is_ok_and(|there| !there);
    Err(Damaged {
        path,
        count: report.problems.len(),
        first: Problem::new(first).to_string(),
        incomplete: first.file.as_ref().is_some_and(missing),
        unread: report
            .problems
            .iter()
            .all(|problem| problem.kind == ErrorKind::Io),
        unsupported: found.is_unsupported,
    }
    .into())
}

/// Checks the signature, if one is asked for.
fn signature(arguments: &VerifyArguments) -> Result<Option<Signed>> {
    let (Some(signature), Some(key)) = (&arguments.signature, &arguments.public_key) else {
        return Ok(None);
    };
    let threads = arguments.work.threads.count();
    sign::check(
        &arguments.path,
        signature,
        key,
        threads,
        arguments.work.shows_progress(),
    )
    .map(Some)
}

/// Returns the number of bytes of all items, as stored.
fn bytes(source: &dyn Checkpoint) -> u64 {
    // The lengths come from a file that may be damaged.
    source
        .metadata()
        .stored()
        .fold(0, |sum: u64, (_, _, stored)| {
            sum.saturating_add(stored.length)
        })
}

/// Makes the finding of a report. The signature is added by the caller.
fn finding(
    path: String,
    report: &Report,
    problems: Vec<Problem>,
    unknown_files: Vec<String>,
) -> Finding<'_> {
    Finding {
        schema: SCHEMA,
        is_unsupported: report
            .problems
            .iter()
            .all(|problem| problem.kind == ErrorKind::UnsupportedVersion),
        path,
        ok: problems.is_empty(),
        hashed: report.has_integrity,
        tensors: report.tensors,
        values: report.values,
        replicas: report.replicas,
        digests: report.digests,
        bytes_read: report.bytes_read,
        problems,
        opaque: report
            .opaque
            .iter()
            .map(|(name, of)| Opaque { name, of })
            .collect(),
        not_finite: report
            .not_finite
            .iter()
            .map(|(name, census)| NotFinite {
                name,
                nan: census.nan,
                infinite: census.infinite,
            })
            .collect(),
        unknown_files,
        stale_digests: report.stale_digests,
        signed: None,
    }
}

impl Finding<'_> {
    /// Returns the lines for people: first the problems, last the verdict.
    fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self
            .problems
            .iter()
            .map(|problem| format!("bad       {problem}"))
            .collect();
        for Opaque { name, of } in &self.opaque {
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
        lines.extend(
            self.unknown_files
                .iter()
                .map(|file| format!("unknown   {}", escaped(file))),
        );
        let verdict = match (self.ok, self.is_unsupported) {
            (true, _) => "ok",
            (false, true) => "unchecked",
            (false, false) => "damaged",
        };
        let hashes = if self.hashed { "hashes" } else { "no hashes" };
        let (tensors, values, read) = (self.tensors, self.values, iec(self.bytes_read));
        let digests = if self.digests > 0 {
            format!(", {} digests", self.digests)
        } else {
            String::new()
        };
        lines.push(format!(
            "{verdict:<9} {tensors} tensors, {values} values, {hashes}{digests}, {read} read"
        ));
        lines
    }
}

impl Problem {
    fn new(problem: &verify::Problem) -> Self {
        let verify::Problem {
            fqn,
            file,
            offset,
            error,
            ..
        } = problem;
        Problem {
            name: fqn.clone(),
            file: file.clone(),
            offset: *offset,
            error: error.clone(),
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
