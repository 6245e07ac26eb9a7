//! `fsdp completions` and `fsdp man`: scripts for shells, and manual pages.

use anyhow::{Context as _, Result, bail};
use clap::{Args, Command};
use clap_complete::Shell;

use super::failure::usage_error;
use super::output;

/// Options of `fsdp completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Options of `fsdp man`.
#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The page of one command [default: the page of fsdp itself]
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

/// Prints a completion script: `fsdp completions`.
///
/// # Errors
/// stdout cannot be written.
pub(crate) fn print_completions(
    arguments: &CompletionsArguments,
    mut command: Command,
) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "fsdp", &mut script);
    output::print_bytes(&script)
}

/// Prints a manual page: `fsdp man`.
///
/// # Errors
/// There is no such command, or stdout cannot be written.
pub(crate) fn print_manual_page(arguments: &ManArguments, mut command: Command) -> Result<()> {
    // Only a built command has the options that clap adds, such as `--help`.
    command.build();
    let page = match &arguments.command {
        None => command,
        Some(name) => {
            let Some(subcommand) = command.find_subcommand(name) else {
                bail!(usage_error(
                    format!("there is no command `{name}`"),
                    "`fsdp help` lists the commands",
                ));
            };
            subcommand.clone().display_name(format!("fsdp-{name}"))
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page)
        .render(&mut text)
        .context("failed to write the page")?;
    output::print_bytes(&text)
}
