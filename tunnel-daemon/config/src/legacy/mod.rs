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
use crate::flags::compat::{self, Extras, Line};
use crate::plan::ForwardProxy;
use crate::process_id::id;

/// Reads the arguments of `proxy-server`, without the program's name. `variables`: see [`crate::parse_naming`].
///
/// # Errors
/// Options that upstream refuses, or that this version does not support; exit code 1. Settings of Adit that are invalid.
pub(super) fn server(
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
    variables: &[String],
) -> Result<Parsed, ConfigError> {
    let mut options = ServerOptions::new(id(env, "PROXY_SERVER_ID"));
    let extras = compat::server(&Line {
        args,
        flags: names(&options.flags()),
        env,
        variables,
    })?;
    let read = read(
        &mut options.flags(),
        "proxy-server",
        retired::SERVER,
        &extras.args,
    );
    let about = "The server end of Konnectivity tunnels, by Adit.";
    parsed(about, read, extras, |extras, warnings| {
        let plan = options.plan(extras, warnings)?;
        Ok(Command::Server(Box::new(plan)))
    })
}

/// Reads the arguments of `proxy-agent`, without the program's name. `variables`: see [`crate::parse_naming`].
///
/// # Errors
/// See [`server`].
pub(super) fn agent(
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
    variables: &[String],
) -> Result<Parsed, ConfigError> {
    let proxy = ForwardProxy::from_compat_env(env);
    let mut options = AgentOptions::new(id(env, "PROXY_AGENT_ID"));
    let extras = compat::agent(&Line {
        args,
        flags: names(&options.flags()),
        env,
        variables,
    })?;
    let read = read(
        &mut options.flags(),
        "proxy-agent",
        retired::AGENT,
        &extras.args,
    );
    let about = "The agent end of Konnectivity tunnels, by Adit.";
    parsed(about, read, extras, |extras, warnings| {
        let plan = options.plan(proxy, extras, warnings)?;
        Ok(Command::Agent(Box::new(plan)))
    })
}

/// `about` is the first line of the help; `plan` makes the command.
fn parsed<T>(
    about: &str,
    read: Result<(String, Outcome), ConfigError>,
    extras: Extras<T>,
    plan: impl FnOnce(T, &mut Vec<String>) -> Result<Command, ConfigError>,
) -> Result<Parsed, ConfigError> {
    let (usage, outcome) = read.map_err(|error| extras.cite(error))?;
    if outcome.help {
        return Ok(help(about, &usage));
    }
    let (command, warnings) = extras.plan(outcome.warnings, plan)?;
    Ok(Parsed { command, warnings })
}

fn names(flags: &[Flag<'_>]) -> Vec<&'static str> {
    flags.iter().map(|flag| flag.name).collect()
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
