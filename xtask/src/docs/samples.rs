//! Console samples of the book: run again, and compared with what the page shows.
//!
//! A block that begins with <code>```console,run</code> is run. Lines that begin with `$ ` are
//! commands of a shell, and what follows each, up to the next, is its output, stdout and stderr
//! together. A line `…` stands for any number of lines. All samples of a page run one after the
//! other in one directory, in which `pytorch` is a checkpoint that PyTorch wrote on two ranks.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::page::Page;
use crate::files::write;
use crate::shell::{run, say};

/// The start of a block that is run.
const OPENING: &str = "```console,run";

/// The line that stands for lines left out.
const ELLIPSIS: &str = "…";

/// The checkpoint that the samples find in their directory.
const CHECKPOINT: &str = "tests/fixtures/fsdp2_adamw_ws2/dcp";

/// Runs the samples of all pages. With `bless` the pages get what was printed.
pub(super) fn check(pages: &[Page], root: &Path, program: &Path, bless: bool) -> Result<()> {
    let mut differences = Vec::new();
    let mut commands = 0;
    for page in pages.iter().filter(|page| page.text.contains(OPENING)) {
        // The samples of one page build on each other; those of two pages must not.
        let place = tempfile::tempdir().context("failed to make a directory for samples")?;
        run(Command::new("cp")
            .arg("-r")
            .arg(root.join(CHECKPOINT))
            .arg(place.path().join("pytorch")))?;
        let (text, ran) = rerun_samples(&page.text, |line| shell(line, place.path(), program))?;
        commands += ran;
        if text == page.text {
            continue;
        }
        if bless {
            write(&root.join("docs/src").join(&page.name), &text)?;
            say(&format!("xtask: blessed `{}`", page.name));
        } else {
            let changed = page
                .text
                .lines()
                .zip(text.lines())
                .find(|(shown, now)| shown != now);
            let (shown, now) = changed.unwrap_or(("the end", "more"));
            differences.push(format!(
                "{}: the page shows\n    {shown}\n  and now it is\n    {now}",
                page.name
            ));
        }
    }
    ensure!(
        differences.is_empty(),
        "console samples print something else now (`--bless` writes it):\n  {}",
        differences.join("\n  ")
    );
    say(&format!(
        "xtask: {commands} commands of console samples print what the book shows"
    ));
    Ok(())
}

/// Returns the text of a page with its samples as `run` prints them now, and the number of
/// commands. A part that `…` leaves out stays left out if the rest fits.
fn rerun_samples(
    text: &str,
    mut run: impl FnMut(&str) -> Result<String>,
) -> Result<(String, usize)> {
    let mut now = String::new();
    let mut ran = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        push(&mut now, line);
        if line != OPENING {
            continue;
        }
        while let Some(command) = lines.next() {
            push(&mut now, command);
            if command == "```" {
                break;
            }
            let Some(command) = command.strip_prefix("$ ") else {
                bail!("`{command}` follows no command")
            };
            let mut shown = Vec::new();
            while let Some(output) = lines.next_if(|line| !line.starts_with("$ ") && *line != "```")
            {
                shown.push(output);
            }
            let output = run(command)?;
            let printed: Vec<&str> = output.lines().collect();
            let current = if fits(&shown, &printed) {
                shown
            } else {
                printed
            };
            for line in current {
                push(&mut now, line);
            }
            ran += 1;
        }
    }
    Ok((now, ran))
}

fn push(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

/// Returns `true` if the lines shown are those printed, where each `…` stands for any number of
/// lines.
fn fits(shown: &[&str], printed: &[&str]) -> bool {
    match shown.split_first() {
        None => printed.is_empty(),
        Some((&ELLIPSIS, rest)) => {
            (0..=printed.len()).any(|skipped| fits(rest, &printed[skipped..]))
        }
        Some((line, rest)) => printed.first() == Some(line) && fits(rest, &printed[1..]),
    }
}

/// Runs a line of a shell, and returns what it wrote to stdout and stderr.
fn shell(line: &str, place: &Path, program: &Path) -> Result<String> {
    let program = program
        .canonicalize()
        .with_context(|| format!("failed to find `{}`", program.display()))?;
    let directory = program.parent().context("a program is in a directory")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("sh")
        .args(["-c", &format!("exec 2>&1; {line}")])
        .current_dir(place)
        .env("PATH", format!("{}:{path}", directory.display()))
        .env("RUST_BACKTRACE", "0")
        .env("LC_ALL", "C.UTF-8")
        .output()
        .with_context(|| format!("failed to run `{line}`"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# A\n```console,run\n$ one\n1\n$ two\na\n…\nz\n```\nend\n";

    #[test]
    fn a_sample_that_prints_the_same_stays_as_it_is() {
        let printed = |line: &str| {
            Ok(if line == "one" {
                "1\n".to_owned()
            } else {
                "a\nb\nc\nz\n".to_owned()
            })
        };
        assert_eq!(rerun_samples(PAGE, printed).unwrap(), (PAGE.to_owned(), 2));
    }

    #[test]
    fn a_sample_that_prints_something_else_is_changed() {
        let (text, _) = rerun_samples(PAGE, |_| Ok("2\n".to_owned())).unwrap();
        assert_eq!(text, "# A\n```console,run\n$ one\n2\n$ two\n2\n```\nend\n");
    }
}
