//! `cargo xtask docs`: builds the book, checks its links and plots, and runs its console samples
//! again.

mod commands;
mod links;
mod page;
mod plots;
mod samples;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::python::{environment, install};
use crate::shell::{TESTED, cargo, run, say, target};

/// The package that drives the browser.
const PLAYWRIGHT: &str = "playwright>=1.50";

/// Options of `cargo xtask docs`.
#[derive(Args)]
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
    /// Also open every page in this Chromium, at the widths of a desktop and of a phone
    #[arg(long, value_name = "CHROMIUM", conflicts_with = "no_build")]
    browser: Option<PathBuf>,
    /// Build the `fsdp` of the samples together with all tests, which is quicker where they are
    /// built anyway
    #[arg(long, conflicts_with = "program")]
    with_tests: bool,
}

/// Builds and checks the book.
pub(crate) fn check(root: &Path, arguments: &DocsArguments) -> Result<()> {
    let source = root.join("docs/src");
    let pages = page::read_all(&source)?;
    let broken = links::check(&pages, &source);
    ensure!(
        broken.is_empty(),
        "some links of the book lead nowhere:\n  {}",
        broken.join("\n  ")
    );
    plots::check(root, arguments.bless)?;
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => {
            let build = if arguments.with_tests {
                [&["test", "--no-run", "--tests"], TESTED].concat()
            } else {
                vec!["build", "--package", "fsdp-cli", "--locked"]
            };
            cargo(root, &build, &[])?;
            target(root).join("debug/fsdp")
        }
    };
    commands::check(&pages, &program)?;
    samples::check(&pages, root, &program, arguments.bless)?;
    if arguments.no_build {
        return Ok(());
    }
    run(Command::new("mdbook").arg("build").arg(root.join("docs")))
        .context("mdBook is needed: `cargo install mdbook --locked`")?;
    say(&format!(
        "xtask: the book is in `{}`",
        root.join("docs/book/index.html").display()
    ));
    match &arguments.browser {
        Some(chromium) => read_in_browser(root, chromium),
        None => Ok(()),
    }
}

/// Opens the pages of the book in a browser, and leaves pictures of them in the target directory.
fn read_in_browser(root: &Path, chromium: &Path) -> Result<()> {
    let target = target(root);
    let python = environment(&target.join("docs-python"), false)?;
    install(&python, &[PLAYWRIGHT])?;
    let mut test = Command::new(python);
    test.arg(root.join("docs/tests/browser.py"))
        .arg(root.join("docs/book"))
        .arg(chromium);
    run(test.arg(target.join("docs-screenshots")))
}
