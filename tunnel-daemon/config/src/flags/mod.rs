//! Adit's native command line: `adit server`, `adit agent`, `adit proxy`, `adit demo`, and the commands that inspect them.
//!
//! Flags have upstream's names where upstream has the flag; durations are `25s`, `5m`, `1h30m`; sizes `4MiB`.

mod agent;
mod clients;
pub(crate) mod compat;
mod given;
pub(super) mod kubectl;
mod peers;
mod proxy;
mod redirect;
mod server;
#[cfg(test)]
pub(crate) mod tests;
mod values;
mod view;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};

use self::agent::AgentFlags;
use self::given::Given;
use self::proxy::ProxyFlags;
use self::server::ServerFlags;
use self::view::LinkFlags;
#[cfg(feature = "demo")]
use crate::command::DemoOptions;
use crate::command::{
    CheckOptions, Command, LinksAction, LinksOptions, ManOptions, NetnsHelperOptions, Parsed,
    StatusOptions, TopOptions,
};
use crate::error::ConfigError;
use crate::node_interface::NodeInterfaceOptions;
use crate::pki::PkiOptions;
use crate::version;

/// Adit: a Konnectivity data plane. Called as proxy-server or proxy-agent it takes upstream's flags.
#[derive(Parser, Debug)]
#[command(name = "adit", version = version::TEXT, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Subcommand, Debug)]
enum Sub {
    /// Run a server: clients on its frontends reach targets through its agents
    Server(Box<ServerFlags>),
    /// Run an agent: connects to servers and dials targets for them
    Agent(Box<AgentFlags>),
    /// Run a proxy: programs beside it that know SOCKS5 or HTTP proxies reach targets through servers
    Proxy(Box<ProxyFlags>),
    /// Run server, agents and sample targets in this process and drive tunnels through them
    #[cfg(feature = "demo")]
    Demo(DemoOptions),
    /// Show the state of a running server or agent
    Status(StatusOptions),
    /// Show the open tunnels of a running server or agent, live
    Top(TopOptions),
    /// Show the links of a running server or agent, each with what its agent has proved and claims
    Links(LinksOptions),
    /// Have a running server send new tunnels to other agents of the same kind, while there are any
    Drain(LinkFlags),
    /// Have a running server end the links of an agent and its tunnels; the agent may link again
    Unlink(LinkFlags),
    /// Say what this host and these flags allow, and what is missing
    Check(CheckOptions),
    /// Make the certificates of an installation, or show what is in some
    #[command(subcommand)]
    Pki(PkiOptions),
    /// Give this host an address at which its agent listens for the host's pods, or take the address away
    #[command(subcommand)]
    NodeInterface(NodeInterfaceOptions),
    /// Say which version, commit and upstream release this is
    Version(VersionFlags),
    /// Print a script that lets a shell complete commands and flags: adit completion bash > /etc/bash_completion.d/adit
    Completion(CompletionFlags),
    /// Write manual pages into a folder
    #[command(hide = true)]
    Man(ManOptions),
    /// Started by server and agent for themselves
    #[command(hide = true)]
    NetnsHelper(NetnsHelperOptions),
}

#[derive(clap::Args, Debug)]
struct VersionFlags {
    /// text or json
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    output: OutputFormat,
}

#[derive(clap::Args, Debug)]
struct CompletionFlags {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: clap_complete::Shell,
}

impl CompletionFlags {
    fn text(&self) -> String {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut for_users(), "adit", &mut script);
        String::from_utf8_lossy(&script).into_owned()
    }
}

/// The command line without internal commands, which completions must not offer.
#[must_use]
pub fn for_users() -> clap::Command {
    let all = Cli::command();
    let shown = all
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    let empty = clap::Command::new("adit").version(version::TEXT);
    let about = all.get_about().cloned().unwrap_or_default();
    empty.about(about).subcommands(shown.cloned())
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum OutputFormat {
    Text,
    Json,
}

impl VersionFlags {
    fn text(&self) -> String {
        match self.output {
            OutputFormat::Text => format!("adit {}\n", version::TEXT),
            OutputFormat::Json => version::json(),
        }
    }
}

/// Reads native arguments, without the program's name.
///
/// # Errors
/// Clap refuses the arguments (exit code 2), or they contradict each other (exit code 1).
pub(super) fn parse(
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
    variables: &[String],
) -> Result<Parsed, ConfigError> {
    let cli = Cli::command();
    let given = given::complete(&cli, args, env)?;
    read(&cli, &given, env, variables).map_err(|error| {
        let error = cited(&given, error);
        if given.asks_json() {
            error.in_json()
        } else {
            error
        }
    })
}

/// The error, with the variable or file that its flag is from.
fn cited(given: &Given, error: ConfigError) -> ConfigError {
    match given.origin(error.message()) {
        Some(origin) => error.of(origin),
        None => error,
    }
}

/// Help and version, which clap reports as errors, to be printed.
///
/// # Errors
/// The error is one.
fn printed(error: &clap::Error) -> Result<Parsed, ConfigError> {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Ok(Parsed {
            command: Command::Print(error.to_string()),
            warnings: Vec::new(),
        }),
        _ => Err(ConfigError::refused(&error.to_string())),
    }
}

fn read(
    all: &clap::Command,
    given: &Given,
    env: &dyn Fn(&str) -> Option<String>,
    variables: &[String],
) -> Result<Parsed, ConfigError> {
    let argv = std::iter::once("adit").chain(given.args.iter().map(String::as_str));
    let cli = match Cli::try_parse_from(argv) {
        Ok(cli) => cli,
        Err(error) => return printed(&error),
    };
    let mut warnings = Vec::new();
    let command = match cli.command {
        Sub::Server(flags) => Command::Server(Box::new(flags.plan(env, &mut warnings)?)),
        Sub::Agent(flags) => Command::Agent(Box::new(flags.plan(env)?)),
        Sub::Proxy(flags) => Command::Proxy(Box::new(flags.plan(env, &mut warnings)?)),
        #[cfg(feature = "demo")]
        Sub::Demo(options) => Command::Demo(options),
        Sub::Status(mut options) => {
            // Files need no socket, whatever the environment says.
            if options.fleet.is_empty() {
                options.socket.find(env)?;
            }
            Command::Status(options)
        }
        Sub::Top(mut options) => {
            options.check(env)?;
            Command::Top(options)
        }
        Sub::Links(mut options) => {
            options.socket.find(env)?;
            Command::Links(options)
        }
        Sub::Drain(flags) => Command::Links(flags.options(LinksAction::Drain, env)?),
        Sub::Unlink(flags) => Command::Links(flags.options(LinksAction::Unlink, env)?),
        Sub::Check(options) => options.command(env, variables)?,
        Sub::Pki(options) => Command::Pki(options),
        Sub::NodeInterface(options) => Command::NodeInterface(options),
        Sub::Version(flags) => Command::Print(flags.text()),
        Sub::Completion(flags) => Command::Print(flags.text()),
        Sub::Man(options) => Command::Man(options),
        Sub::NetnsHelper(options) => Command::NetnsHelper(options),
    };
    let name = match command {
        Command::Server(_) => "server",
        Command::Agent(_) => "agent",
        Command::Proxy(_) => "proxy",
        #[cfg(feature = "demo")]
        Command::Demo(_) => "demo",
        _ => return Ok(Parsed { command, warnings }),
    };
    if let Some(known) = all.find_subcommand(name) {
        given::warn_unknown(known, variables, env, &mut warnings);
    }
    Ok(Parsed { command, warnings })
}
