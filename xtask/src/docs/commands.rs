//! The commands in all samples of the book, those that are not run too: every option must be one
//! that the command has.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::page::Page;
use crate::shell::say;

/// The beginnings of the languages of blocks that have commands.
const LANGUAGES: [&str; 3] = ["console", "bash", "yaml"];

/// Checks the options of every `fsdp VERB …` in a block of code.
pub(super) fn check(pages: &[Page], program: &Path) -> Result<()> {
    let mut helps: HashMap<String, String> = HashMap::new();
    let (mut unknown, mut commands) = (Vec::new(), 0);
    for page in pages {
        let blocks = page.text.split("```").skip(1).step_by(2);
        let blocks =
            blocks.filter(|block| LANGUAGES.iter().any(|language| block.starts_with(language)));
        for (verb, options) in blocks.flat_map(in_block) {
            if !helps.contains_key(&verb) {
                helps.insert(verb.clone(), help(program, &verb)?);
            }
            let help = &helps[&verb];
            commands += 1;
            let is_unknown = |option: &&String| {
                !help
                    .split([' ', '\n', ',', '='])
                    .any(|word| word == option.as_str())
            };
            unknown.extend(
                options
                    .iter()
                    .filter(is_unknown)
                    .map(|option| format!("{}: fsdp {verb} {option}", page.name)),
            );
        }
    }
    ensure!(
        unknown.is_empty(),
        "some samples of the book have options that do not exist:\n  {}",
        unknown.join("\n  ")
    );
    say(&format!(
        "xtask: {commands} commands of the book have options that exist"
    ));
    Ok(())
}

/// Returns the help of a verb.
fn help(program: &Path, verb: &str) -> Result<String> {
    let output = Command::new(program).args([verb, "--help"]).output();
    let output = output.with_context(|| format!("failed to start `{}`", program.display()))?;
    ensure!(
        output.status.success(),
        "a sample of the book has `fsdp {verb}`, which is not a command"
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the verb and the options of each command in a code block, which may be shell or YAML.
fn in_block(block: &str) -> Vec<(String, Vec<String>)> {
    // A backslash at the end of a line continues the command.
    let block = block.replace("\\\n", " ");
    let commands = block
        .lines()
        .filter_map(|line| line.split('#').next())
        .flat_map(|line| line.split(['|', ';', '`']));
    commands.filter_map(in_command).collect()
}

fn in_command(text: &str) -> Option<(String, Vec<String>)> {
    let mut words = text
        .split([' ', ',', '[', ']', '"', '\'', '(', ')'])
        .filter(|word| !word.is_empty());
    // `cargo run -p fsdp-cli -- train` is a command too.
    let is_start = |word: &str| word == "fsdp" || word.ends_with("/fsdp") || word == "--";
    words.by_ref().find(|word| is_start(word))?;
    let verb = words.next()?;
    let is_verb = verb.bytes().all(|byte| byte.is_ascii_lowercase());
    let option = |word: &str| {
        Some(
            word.starts_with("--")
                .then(|| word.split('=').next())
                .flatten()?
                .to_owned(),
        )
    };
    is_verb.then(|| {
        (
            verb.to_owned(),
            words
                .take_while(|word| *word != "--")
                .filter_map(option)
                .collect(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_shells_and_in_yaml() {
        let found = |text: &str| in_block(text);
        let command = |verb: &str, options: &[&str]| {
            (
                verb.to_owned(),
                options.iter().map(|o| (*o).to_owned()).collect(),
            )
        };
        assert_eq!(
            found("exec srun fsdp train --a=auto \\\n  --b 5\n"),
            [command("train", &["--a", "--b"])]
        );
        assert_eq!(
            found("command: [fsdp, train, --a, \"16\"]"),
            [command("train", &["--a"])]
        );
        assert_eq!(
            found("test \"$(fsdp digest w | cut -d' ' -f1)\""),
            [command("digest", &[])]
        );
        assert_eq!(
            found("cargo run --release -p x -- train --a"),
            [command("train", &["--a"])]
        );
        assert_eq!(found("cargo test --workspace"), []);
    }
}
