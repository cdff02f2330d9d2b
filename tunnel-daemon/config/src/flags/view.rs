//! `adit status`, `adit top`, `adit links`, `adit drain`, `adit unlink` and `adit check`: commands that query a running process
//! or the host.

use std::path::PathBuf;
use std::time::Duration;

use crate::command::{
    ADMIN_SOCKET, CheckGiven, CheckOptions, Command, LinksAction, LinksOptions, TopOptions,
};
use crate::error::{ConfigError, bail};
use crate::parse::parse_naming;
use crate::units::number;

/// Shortest and longest refresh interval of `adit top`.
const INTERVAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// The admin socket of a server or agent.
#[derive(clap::Args, Debug)]
pub(super) struct SocketFlag {
    /// Admin socket of the server or agent
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    admin_socket: PathBuf,
}

#[derive(clap::Args, Debug)]
pub(super) struct LinksFlags {
    #[command(flatten)]
    socket: SocketFlag,
    /// Only links of this agent (of this server, where an agent is asked)
    #[arg(long, value_name = "ID")]
    agent: Option<String>,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
pub(super) struct LinkFlags {
    #[command(flatten)]
    socket: SocketFlag,
    #[command(flatten)]
    chosen: ChosenLinks,
}

#[derive(clap::Args, Debug)]
#[group(required = true, multiple = true)]
struct ChosenLinks {
    /// All links of this agent
    #[arg(long, value_name = "ID")]
    agent: Option<String>,
    /// The link of this number, as `adit links` shows it
    #[arg(long, value_name = "N", value_parser = number(1..=u64::MAX))]
    link: Option<u64>,
}

const CHECK_HELP: &str = "\
Exit codes: 0 all is ok; 1 something is degraded; 2 something is missing or broken.

Examples:
  adit check
  adit check server --frontend grpc=unix:/run/adit/kas.sock --cluster-cert tls.crt ...
  adit check --connect agent --proxy-server-host server.example --ca-cert ca.crt ...";

#[derive(clap::Args, Debug)]
#[command(after_help = CHECK_HELP)]
pub(super) struct CheckFlags {
    /// One JSON object instead of lines
    #[arg(long)]
    json: bool,
    /// Connect to the servers of the agent's flags, as the agent would
    #[arg(long)]
    connect: bool,
    /// server or agent, and its flags, to be checked on this host
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

impl LinksFlags {
    pub(super) fn options(self) -> LinksOptions {
        LinksOptions {
            socket: self.socket.admin_socket,
            action: LinksAction::Show,
            agent: self.agent,
            link: None,
            json: self.json,
        }
    }
}

impl LinkFlags {
    pub(super) fn options(self, action: LinksAction) -> LinksOptions {
        LinksOptions {
            socket: self.socket.admin_socket,
            action,
            agent: self.chosen.agent,
            link: self.chosen.link,
            json: false,
        }
    }
}

/// # Errors
/// The interval is out of range.
pub(super) fn check_top(options: TopOptions) -> Result<TopOptions, ConfigError> {
    let (min, max) = INTERVAL;
    if !(min..=max).contains(&options.interval) {
        let interval = options.interval;
        bail!("--interval {interval:?} must be from {min:?} to {max:?}");
    }
    Ok(options)
}

impl CheckFlags {
    /// A command line that would not start is a result to report, and no error here.
    ///
    /// # Errors
    /// The command is neither `server` nor `agent`.
    pub(super) fn command(
        self,
        env: &dyn Fn(&str) -> Option<String>,
        variables: &[String],
    ) -> Result<Command, ConfigError> {
        let given = match self.command.first().map(String::as_str) {
            None => CheckGiven::Nothing,
            Some("server" | "agent") => {
                let argv = std::iter::once("adit".to_owned()).chain(self.command);
                match parse_naming(argv.map(Into::into), env, variables) {
                    Ok(parsed) => match parsed.command {
                        Command::Server(plan) => CheckGiven::Server(plan, parsed.warnings),
                        Command::Agent(plan) => CheckGiven::Agent(plan, parsed.warnings),
                        print => return Ok(print),
                    },
                    Err(error) => CheckGiven::Refused(error),
                }
            }
            Some(other) => {
                return Err(ConfigError::refused(&format!(
                    "{other:?} cannot be checked: write server or agent and its flags behind `adit check`"
                )));
            }
        };
        Ok(Command::Check(CheckOptions {
            json: self.json,
            connect: self.connect,
            given,
        }))
    }
}
