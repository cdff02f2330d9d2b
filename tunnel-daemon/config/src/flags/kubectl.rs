//! The command line of `kubectl adit`: kubectl runs a program of the name `kubectl-adit` for it, which is a link to this one.

use clap::{Parser, Subcommand};

use super::printed;
use crate::command::{Command, KubectlOptions, Parsed};
use crate::error::ConfigError;
use crate::version;

/// The name by which kubectl calls its plugin.
pub(crate) const PLUGIN: &str = "kubectl-adit";

/// Looks at the servers and agents of a cluster, with the rights of the user.
#[derive(Parser, Debug)]
#[command(name = PLUGIN, bin_name = "kubectl adit", version = version::TEXT, max_term_width = 120)]
pub(super) struct PluginCli {
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(Subcommand, Debug)]
enum PluginCommand {
    /// Ask the servers and agents of a cluster by kubectl exec, and show which agents reach which servers
    Status(KubectlOptions),
}

/// Reads the arguments, without the program's name.
///
/// # Errors
/// Clap refuses the arguments; exit code 2.
pub(crate) fn parse(args: &[String]) -> Result<Parsed, ConfigError> {
    let argv = std::iter::once(PLUGIN).chain(args.iter().map(String::as_str));
    match PluginCli::try_parse_from(argv) {
        Ok(PluginCli {
            command: PluginCommand::Status(options),
        }) => Ok(Parsed {
            command: Command::KubectlStatus(options),
            warnings: Vec::new(),
        }),
        Err(error) => printed(&error),
    }
}
