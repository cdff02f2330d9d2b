//! Settings of Adit for servers and agents in compat mode: platforms render upstream's flags alone, and a derived image or a
//! mounted file brings the others, from `ADIT_` variables or a file.
//!
//! The command line stays upstream's: what upstream has a flag for is given there alone.

use std::num::NonZeroU32;
use std::path::PathBuf;

use adit_core::grant::ClientRules;
use clap::{CommandFactory as _, Parser};
use ipnet::IpNet;

use super::agent::{NodeFlags, target_proxy};
use super::given::{Given, warn_compat};
use super::peers::PeerFlags;
use super::values::balancers;
use super::{Cli, cited};
use crate::error::ConfigError;
use crate::files;
use crate::plan::{
    AdminSocketPlan, AgentSettings, DestinationsPlan, IsolationPlan, Program, ServerSettings,
};
use crate::units::number;

/// Settings that upstream's programs lack and that compat mode's command line has, too; both are read there.
const ON_BOTH: [&str; 4] = [
    "account",
    "account-series-max",
    "lane-security",
    "relay-engine",
];

/// Where the files are. Unit tests do not see those of the host.
const FOLDER: &str = if cfg!(test) {
    "/nonexistent"
} else {
    "/etc/adit"
};
/// Where a setting is from whose flag an error does not name.
const FROM_NO_LINE: &str = "settings from ADIT_ variables or the file";

/// Settings of a server that compat mode's command line does not have.
#[derive(Parser, Debug)]
#[command(name = "server")]
pub(crate) struct ServerExtras {
    #[arg(long)]
    admin_socket: Option<PathBuf>,
    #[arg(long = "client-allow-target")]
    client_allow_targets: Vec<String>,
    #[arg(long, value_parser = balancers)]
    proxy_protocol_from: Vec<IpNet>,
    #[arg(long, value_parser = number(NonZeroU32::MIN..=NonZeroU32::MAX))]
    links_per_agent: Option<NonZeroU32>,
    #[arg(long, value_parser = number(0..=u32::MAX))]
    access_log_limit: Option<u32>,
    #[arg(long, value_parser = number(0..=crate::limits::METRICS_AGENTS_MAX))]
    metrics_agents: Option<u16>,
    #[command(flatten)]
    peers: PeerFlags,
    #[command(flatten)]
    destinations: DestinationsPlan,
    #[command(flatten)]
    isolation: IsolationPlan,
}

impl ServerExtras {
    /// Settings that compat mode's command line has, too.
    const ON_COMMAND_LINE: [&str; 5] = [
        "agent-crl",
        "agent-deny",
        "agent-grant",
        "lanes-per-link",
        "zone",
    ];

    /// Puts the settings into those of the command line.
    pub(crate) fn put(self, settings: &mut ServerSettings) -> Result<(), ConfigError> {
        settings.admin_socket = admin_socket(self.admin_socket);
        settings.clients.rules = ClientRules::parse(&self.client_allow_targets)
            .map_err(|error| ConfigError::new(format!("--client-allow-target {error}")))?;
        settings.agents.balancers = self.proxy_protocol_from;
        if let Some(links) = self.links_per_agent {
            settings.agents.links_per_agent_max = links;
        }
        if let Some(limit) = self.access_log_limit {
            settings.access_log_limit = limit;
        }
        settings.metrics_agents = self.metrics_agents.unwrap_or_default().into();
        settings.peers = self.peers.plan()?;
        settings.destinations = self.destinations.spelled_out();
        settings.isolation = self.isolation;
        Ok(())
    }
}

/// Settings of an agent that compat mode's command line does not have.
#[derive(Parser, Debug)]
#[command(name = "agent")]
pub(crate) struct AgentExtras {
    #[arg(long)]
    admin_socket: Option<PathBuf>,
    #[arg(long)]
    https_proxy: Option<String>,
    #[arg(long)]
    proxy_ca_cert: Option<PathBuf>,
    #[arg(long)]
    target_proxy: Option<String>,
    #[command(flatten)]
    node: NodeFlags,
    #[command(flatten)]
    isolation: IsolationPlan,
}

impl AgentExtras {
    /// Settings that compat mode's command line has, too.
    const ON_COMMAND_LINE: [&str; 2] = ["allow-target", "lanes"];

    /// Puts the settings into those of the command line.
    pub(crate) fn put(self, settings: &mut AgentSettings) -> Result<(), ConfigError> {
        settings.admin_socket = admin_socket(self.admin_socket);
        let proxy = settings.forward_proxy.clone();
        settings.forward_proxy = proxy.overridden(self.https_proxy, self.proxy_ca_cert)?;
        settings.target_proxy = target_proxy(self.target_proxy.as_deref())?;
        settings.target_listeners = self.node.target_listeners()?;
        settings.target_from = self.node.target_from.clone();
        settings.redirect = self.node.redirect()?;
        settings.isolation = self.isolation;
        Ok(())
    }
}

/// Without the setting there is no socket, as upstream has none.
fn admin_socket(given: Option<PathBuf>) -> AdminSocketPlan {
    let at = |path| AdminSocketPlan::of_flag(Some(path), Program::Server, &|_name| None);
    given.map_or(AdminSocketPlan::Off, at)
}

/// What variables and file say.
pub(crate) struct Extras<T> {
    /// Settings that compat mode's command line does not have.
    settings: T,
    /// Arguments for compat mode's command line, with those that were typed.
    pub(crate) args: Vec<String>,
    /// About what has no effect.
    warnings: Vec<String>,
    given: Given,
}

impl<T> Extras<T> {
    /// The error, with the variable or file that its flag is from.
    pub(crate) fn cite(&self, error: ConfigError) -> ConfigError {
        cited(&self.given, error)
    }

    /// What `plan` makes of the settings, and all warnings; `plan` gets those of the command line.
    pub(crate) fn plan<P>(
        self,
        mut warnings: Vec<String>,
        plan: impl FnOnce(T, &mut Vec<String>) -> Result<P, ConfigError>,
    ) -> Result<(P, Vec<String>), ConfigError> {
        let plan = plan(self.settings, &mut warnings);
        let plan = plan.map_err(|error| cited(&self.given, error))?;
        warnings.extend(self.warnings);
        Ok((plan, warnings))
    }
}

/// A command line of upstream's.
pub(crate) struct Line<'a> {
    /// As typed, without the program's name.
    pub(crate) args: &'a [String],
    /// Names of the flags that it may have.
    pub(crate) flags: Vec<&'static str>,
    pub(crate) env: &'a dyn Fn(&str) -> Option<String>,
    /// Names of all variables of the process.
    pub(crate) variables: &'a [String],
}

impl Line<'_> {
    /// Help works whatever variables and file say.
    fn asks_help(&self) -> bool {
        let mut before = self.args.iter().take_while(|arg| *arg != "--");
        before.any(|arg| ["-h", "-help", "--help"].contains(&arg.as_str()))
    }
}

/// Reads the settings of a server.
pub(crate) fn server(line: &Line<'_>) -> Result<Extras<ServerExtras>, ConfigError> {
    read(&ServerExtras::ON_COMMAND_LINE, line)
}

/// Reads the settings of an agent.
pub(crate) fn agent(line: &Line<'_>) -> Result<Extras<AgentExtras>, ConfigError> {
    read(&AgentExtras::ON_COMMAND_LINE, line)
}

/// The settings that compat mode takes, as native flags, and those that its command line lacks; for each program.
#[cfg(test)]
pub(crate) fn commands() -> [(clap::Command, clap::Command); 2] {
    let cli = Cli::command();
    [
        (
            known::<ServerExtras>(&cli, &ServerExtras::ON_COMMAND_LINE),
            ServerExtras::command(),
        ),
        (
            known::<AgentExtras>(&cli, &AgentExtras::ON_COMMAND_LINE),
            AgentExtras::command(),
        ),
    ]
}

/// The settings that compat mode takes, by their native flags.
fn known<T: Parser>(cli: &clap::Command, on_command_line: &[&str]) -> clap::Command {
    let own = T::command();
    let native = cli.find_subcommand(own.get_name());
    let shared = native.into_iter().flat_map(clap::Command::get_arguments);
    let shared = shared.filter(|arg| {
        let long = arg.get_long();
        long.is_some_and(|name| is_shared(name, on_command_line))
    });
    own.args(shared.cloned())
}

fn is_shared(name: &str, on_command_line: &[&str]) -> bool {
    on_command_line.contains(&name) || ON_BOTH.contains(&name)
}

fn read<T: Parser>(on_command_line: &[&str], line: &Line<'_>) -> Result<Extras<T>, ConfigError> {
    let Line {
        args,
        flags,
        env,
        variables,
    } = line;
    let cli = Cli::command();
    let known = known::<T>(&cli, on_command_line);
    let native = cli.find_subcommand(known.get_name()).unwrap_or(&known);
    let mut given = Given::of_line(known.get_name(), args);
    let mut warnings = Vec::new();
    if !line.asks_help() {
        given.add_environment(&known, env)?;
        if let Some(path) = file(known.get_name(), env) {
            given.add_compat_file(&known, native, flags, &path, &mut warnings)?;
        }
        warn_compat(&known, native, flags, variables, env, &mut warnings)?;
    }
    let (typed, added) = given.parts(args.len());
    let is_shared = |arg: &&String| {
        let name = arg.strip_prefix("--").and_then(|arg| arg.split('=').next());
        name.is_some_and(|name| is_shared(name, on_command_line))
    };
    let (shared, extra): (Vec<&String>, Vec<&String>) = added.iter().partition(is_shared);
    let args = shared.into_iter().chain(typed).cloned().collect();
    let extra = std::iter::once("adit").chain(extra.into_iter().map(String::as_str));
    let settings = T::try_parse_from(extra).map_err(|error| {
        let error = ConfigError::refused(&error.to_string());
        let origin = given.origin(error.message()).unwrap_or(FROM_NO_LINE);
        error.of(origin)
    })?;
    Ok(Extras {
        settings,
        args,
        warnings,
        given,
    })
}

/// The file of settings: the one that `ADIT_CONFIG` names, else the default one if there is any.
fn file(program: &str, env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let named = env("ADIT_CONFIG").filter(|path| !path.is_empty());
    named.or_else(|| {
        let path = format!("{FOLDER}/{program}.toml");
        (!files::is_missing(path.as_ref())).then_some(path)
    })
}
