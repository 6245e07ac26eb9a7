//! The commands in all samples of the book, those that are not run too: every option must be one
//! that the command has.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::page::Page;
use crate::shell::{output, say};

/// The beginnings of the languages of blocks that have commands.
const LANGUAGES: [&str; 3] = ["console", "bash", "yaml"];

/// A command in a sample.
#[derive(Debug, PartialEq, Eq)]
struct Sample {
    verb: String,
    options: Vec<String>,
}

/// Checks the options of every `fsdp VERB …` in a block of code.
pub(super) fn check(pages: &[Page], program: &Path) -> Result<()> {
    let mut helps: HashMap<String, String> = HashMap::new();
    let mut unknown = Vec::new();
    let mut commands = 0;
    for page in pages {
        for Sample { verb, options } in samples(&page.text) {
            commands += 1;
            if !helps.contains_key(&verb) {
                let help = output(Command::new(program).args([&verb, "--help"]))
                    .with_context(|| format!("{} has `fsdp {verb}`", page.name))?;
                helps.insert(verb.clone(), help);
            }
            let known: Vec<&str> = helps[&verb].split([' ', '\n', ',', '=']).collect();
            for option in options {
                if !known.contains(&option.as_str()) {
                    unknown.push(format!("{}: fsdp {verb} {option}", page.name));
                }
            }
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

/// Returns the commands in the blocks of a page that have any.
fn samples(text: &str) -> Vec<Sample> {
    // Every second part is one between two fences.
    text.split("```")
        .skip(1)
        .step_by(2)
        .filter(|block| LANGUAGES.iter().any(|language| block.starts_with(language)))
        .flat_map(in_block)
        .collect()
}

/// Returns the commands in a code block, which may be shell or YAML.
fn in_block(block: &str) -> Vec<Sample> {
    // A backslash at the end of a line continues the command.
    block
        .replace("\\\n", " ")
        .lines()
        .filter_map(|line| line.split('#').next())
        .flat_map(|line| line.split(['|', ';', '`']))
        .filter_map(in_command)
        .collect()
}

fn in_command(text: &str) -> Option<Sample> {
    let mut words = text
        .split([' ', ',', '[', ']', '"', '\'', '(', ')'])
        .filter(|word| !word.is_empty());
    // `cargo run -p fsdp-cli -- train` is a command too.
    words.find(|&word| word == "fsdp" || word.ends_with("/fsdp") || word == "--")?;
    let verb = words.next()?;
    if !verb.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return None;
    }
    let options = words
        .take_while(|word| *word != "--")
        .filter(|word| word.starts_with("--"))
        // `--option=value` is one word.
        .map(|word| word.split_once('=').map_or(word, |(option, _)| option))
        .map(str::to_owned)
        .collect();
    Some(Sample {
        verb: verb.to_owned(),
        options,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_shells_and_in_yaml() {
        let command = |verb: &str, options: &[&str]| Sample {
            verb: verb.to_owned(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
        };
        assert_eq!(
            in_block("exec srun fsdp train --a=auto \\\n  --b 5\n"),
            [command("train", &["--a", "--b"])]
        );
        assert_eq!(
            in_block("command: [fsdp, train, --a, \"16\"]"),
            [command("train", &["--a"])]
        );
        assert_eq!(
            in_block("test \"$(fsdp digest w | cut -d' ' -f1)\""),
            [command("digest", &[])]
        );
        assert_eq!(
            in_block("cargo run --release -p x -- train --a"),
            [command("train", &["--a"])]
        );
        assert_eq!(in_block("cargo test --workspace"), []);
    }
}
