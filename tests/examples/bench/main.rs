//! How fast state is saved, loaded, gathered and converted, each beside what the machine allows in
//! the same run.
//!
//! `cargo xtask bench` runs it and puts its figures in one table with those of the other benches.
//! By itself: `cargo run --release -p fsdp-tests --example bench -- --size 256m --ranks 1,2,4
//! --only save,load`.
//!
//! The state is a GPT's parameters and its AdamW state after one step. Every figure is a median,
//! taken in turns with that of its limit: raw writes to fresh files, raw reads and copies into
//! fresh or warm memory, by as many threads.

#![expect(clippy::print_stdout, reason = "a bench's figures are its output")]
#![expect(
    clippy::disallowed_methods,
    reason = "limits are measured with plain files"
)]

mod background;
mod conversions;
mod figures;
mod full;
mod limits;
mod load;
mod model;
mod planning;
mod save;
mod scale;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Parser;
use fsdp_tests::counting_allocator::CountingAllocator;

use self::figures::{Case, Figures, Limit};
use self::model::Size;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[derive(Debug, Parser)]
struct Arguments {
    /// Bytes of state
    #[arg(long, value_enum, value_delimiter = ',', default_value = "256m")]
    size: Vec<Size>,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    ranks: Vec<usize>,
    /// Groups of cases: save, load, full, background, conversions, planning, scale [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Where to write, as NAME=DIRECTORY: one in memory, one on a disk
    #[arg(long, value_delimiter = ',', default_values = ["tmpfs=/dev/shm", "disk=target"])]
    place: Vec<Place>,
    /// The ranks that save what is loaded [default: as many as load, and some other numbers]
    #[arg(long)]
    saved_on: Option<usize>,
    /// Times that each figure is taken
    #[arg(long, default_value = "5")]
    runs: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A directory to write to.
#[derive(Debug, Clone)]
struct Place {
    name: String,
    directory: PathBuf,
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, directory) = text.split_once('=').ok_or("it is not NAME=DIRECTORY")?;
        Ok(Place {
            name: name.to_owned(),
            directory: directory.into(),
        })
    }
}

/// The options of a group of cases.
struct Bench<'a> {
    size: Size,
    runs: usize,
    place: &'a str,
    /// An empty directory of its own.
    directory: PathBuf,
}

impl Bench<'_> {
    fn case(&self, name: &str, ranks: usize, bytes: u64, seconds: f64, limit: Limit) -> Case {
        Case {
            name: name.to_owned(),
            size: self.size.name().to_owned(),
            ranks,
            place: self.place.to_owned(),
            bytes,
            seconds,
            limit: Some(limit),
            peak_bytes: None,
            read_ratio: None,
        }
    }
}

fn main() -> Result<()> {
    // Otherwise it depends on where small values lie which memory the allocator gives back to the
    // system, and taking it anew takes longer than what is measured.
    fsdp_cli::keep_freed_memory(64 << 20);
    let arguments = Arguments::parse();
    let wanted =
        |group: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == group);
    let mut figures = Figures::new(!arguments.json);
    for (index, place) in arguments.place.iter().enumerate() {
        let directory = tempfile::Builder::new()
            .prefix("fsdp-bench-")
            .tempdir_in(&place.directory);
        let directory = directory
            .with_context(|| format!("cannot write to `{}`", place.directory.display()))?;
        for &size in &arguments.size {
            let path = directory.path().join(size.name());
            std::fs::create_dir(&path)?;
            let bench = Bench {
                size,
                runs: arguments.runs,
                place: &place.name,
                directory: path,
            };
            for &ranks in &arguments.ranks {
                if wanted("save") {
                    save::run(&bench, ranks, &mut figures)?;
                }
                // What does not touch the files, or reads them from the cache, is the same
                // everywhere.
                if index == 0 && wanted("full") {
                    full::run(&bench, ranks, &mut figures)?;
                }
                if index == 0 && wanted("background") {
                    background::run(&bench, ranks, &mut figures)?;
                }
            }
            if index == 0 && wanted("load") {
                load::run(&bench, &arguments.ranks, arguments.saved_on, &mut figures)?;
            }
            if index == 0 && wanted("conversions") {
                conversions::run(&bench, &mut figures)?;
            }
            std::fs::remove_dir_all(&bench.directory)?;
        }
    }
    if wanted("scale") {
        scale::run(arguments.runs, &mut figures)?;
    }
    if wanted("planning") {
        planning::run(arguments.runs, &mut figures)?;
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&figures.cases)?);
    }
    Ok(())
}
