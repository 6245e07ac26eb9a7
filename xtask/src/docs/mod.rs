//! `cargo xtask docs`: builds the book, checks its links and plots, and runs its console samples again.

mod links;
mod page;
mod plots;
mod samples;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::shell::{cargo, say};

/// Options of `cargo xtask docs`.
#[derive(Args, Clone)]
pub(crate) struct DocsArguments {
    /// Write what the console samples print now into the pages, and draw the plots again
    #[arg(long)]
    bless: bool,
    /// The `fsdp` that the samples run [default: the debug build of this tree]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Only the samples and the links between pages: no mdBook is needed
    #[arg(long)]
    no_build: bool,
}

/// Builds and checks the book.
pub(crate) fn run(root: &Path, arguments: &DocsArguments) -> Result<()> {
    let source = root.join("docs/src");
    let pages = page::read_all(&source)?;
    let broken = links::check(&pages, &source);
    ensure!(broken.is_empty(), "some links of the book lead nowhere:\n  {}", broken.join("\n  "));
    plots::check(root, arguments.bless)?;
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => {
            cargo(root, &["build", "--package", "fsdp-cli", "--locked"], &[])?;
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from).join("debug/fsdp")
        }
    };
    samples::check(&pages, root, &program, arguments.bless)?;
    if arguments.no_build {
        return Ok(());
    }
    let built = Command::new("mdbook").arg("build").arg(root.join("docs")).status();
    let built = built.context("failed to start mdbook: `cargo install mdbook --locked`")?;
    ensure!(built.success(), "`mdbook build` failed with {built}");
    say(&format!("xtask: the book is in `{}`", root.join("docs/book/index.html").display()));
    Ok(())
}
