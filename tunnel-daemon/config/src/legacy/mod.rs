//! The command lines of upstream's programs, flag by flag (compat 8 to 10), and of HyperShift's sidecars, mapped to Adit's plans.
//!
//! Clap is not used here: Go's spelling rules, defaults and error texts are the contract.

mod agent;
mod gotype;
pub(crate) mod hypershift;
mod klog;
mod options;
mod pflag;
mod retired;
mod selector;
mod server;
mod server_check;
mod server_plan;
mod shared;
mod usage;

#[cfg(test)]
mod tests;

use self::agent::AgentOptions;
use self::pflag::{Flag, Outcome};
use self::retired::Retired;
use self::server::ServerOptions;
use crate::command::{Command, Parsed};
use crate::error::ConfigError;
use crate::plan::ForwardProxy;

/// Reads the arguments of `proxy-server`, without the program's name. `server_id` is the default of its flag.
///
/// # Errors
/// Options that upstream refuses, or that this version does not support; exit code 1.
pub(super) fn server(args: &[String], server_id: String) -> Result<Parsed, ConfigError> {
    let mut options = ServerOptions::new(server_id);
    let (usage, outcome) = read(&mut options.flags(), "proxy-server", retired::SERVER, args)?;
    if outcome.help {
        return Ok(help(
            "The server end of Konnectivity tunnels, by Adit.",
            &usage,
        ));
    }
    let mut warnings = outcome.warnings;
    let command = Command::Server(Box::new(options.plan(&mut warnings)?));
    Ok(Parsed { command, warnings })
}

/// Reads the arguments of `proxy-agent`, without the program's name. `agent_id` is the default of its flag.
///
/// # Errors
/// See [`server`].
pub(super) fn agent(
    args: &[String],
    agent_id: String,
    proxy: ForwardProxy,
) -> Result<Parsed, ConfigError> {
    let mut options = AgentOptions::new(agent_id);
    let (usage, outcome) = read(&mut options.flags(), "proxy-agent", retired::AGENT, args)?;
    if outcome.help {
        return Ok(help(
            "The agent end of Konnectivity tunnels, by Adit.",
            &usage,
        ));
    }
    let mut warnings = outcome.warnings;
    let command = Command::Agent(Box::new(options.plan(proxy, &mut warnings)?));
    Ok(Parsed { command, warnings })
}

/// The usage is rendered first, while the slots still hold the defaults.
fn read(
    flags: &mut [Flag<'_>],
    program: &str,
    retired: &'static [Retired],
    args: &[String],
) -> Result<(String, Outcome), ConfigError> {
    let usage = usage::usage(program, flags);
    let mut outcome = pflag::parse(flags, retired, args).map_err(ConfigError::new)?;
    // Upstream ignores positional arguments; the usual cause is `--some-bool false`.
    let ignored = outcome.positional.iter().map(|arg| {
        format!("argument {arg:?} is not a flag and is ignored (booleans need --flag=value)")
    });
    outcome.warnings.extend(ignored);
    Ok((usage, outcome))
}

fn help(about: &str, usage: &str) -> Parsed {
    Parsed {
        command: Command::Print(format!("{about}\n\n{usage}")),
        warnings: Vec::new(),
    }
}
