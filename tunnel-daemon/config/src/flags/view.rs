//! `adit status`, `adit top`, `adit links`, `adit drain`, `adit unlink` and `adit check`: commands that query a running process
//! or the host.

use std::path::PathBuf;
use std::time::Duration;

use crate::command::{
    CheckGiven, CheckOptions, Command, LinksAction, LinksOptions, StatusOptions, TopOptions,
    TopSort,
};
use crate::error::{ConfigError, bail};
use crate::parse::parse_naming;
use crate::plan::AdminSocketChoice;
use crate::units::{duration, number};

/// Shortest and longest refresh interval of `adit top`.
const INTERVAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// Looks up an environment variable.
type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The admin socket of a server or agent.
#[derive(clap::Args, Debug)]
pub(super) struct SocketFlag {
    /// Admin socket of the server or agent; ADIT_ADMIN_SOCKET has the same meaning [default: that of a server, else of an agent,
    /// with its default socket]
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
}

impl SocketFlag {
    fn choice(self, env: Env<'_>) -> Result<AdminSocketChoice, ConfigError> {
        AdminSocketChoice::of_flag(self.admin_socket, env)
    }
}

#[derive(clap::Args, Debug)]
pub(super) struct StatusFlags {
    #[command(flatten)]
    socket: SocketFlag,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
pub(super) struct TopFlags {
    #[command(flatten)]
    socket: SocketFlag,
    /// Print the rows once after one interval, and exit: for scripts and pipes
    #[arg(long)]
    once: bool,
    /// Print the rows once as one JSON object
    #[arg(long)]
    json: bool,
    /// rate, bytes, age, agent, destination, rtt or retransmits
    #[arg(long, value_name = "ORDER", default_value = "rate")]
    sort: TopSort,
    /// Time between two refreshes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    interval: Duration,
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

impl StatusFlags {
    /// # Errors
    /// The socket's path is not valid.
    pub(super) fn options(self, env: Env<'_>) -> Result<StatusOptions, ConfigError> {
        Ok(StatusOptions {
            socket: self.socket.choice(env)?,
            json: self.json,
        })
    }
}

impl TopFlags {
    /// # Errors
    /// The interval is out of range, or the socket's path is not valid.
    pub(super) fn options(self, env: Env<'_>) -> Result<TopOptions, ConfigError> {
        let ((min, max), interval) = (INTERVAL, self.interval);
        if !(min..=max).contains(&interval) {
            bail!("--interval {interval:?} must be from {min:?} to {max:?}");
        }
        Ok(TopOptions {
            socket: self.socket.choice(env)?,
            once: self.once,
            json: self.json,
            sort: self.sort,
            interval,
        })
    }
}

impl LinksFlags {
    /// # Errors
    /// The socket's path is not valid.
    pub(super) fn options(self, env: Env<'_>) -> Result<LinksOptions, ConfigError> {
        Ok(LinksOptions {
            socket: self.socket.choice(env)?,
            action: LinksAction::Show,
            agent: self.agent,
            link: None,
            json: self.json,
        })
    }
}

impl LinkFlags {
    /// # Errors
    /// The socket's path is not valid.
    pub(super) fn options(
        self,
        action: LinksAction,
        env: Env<'_>,
    ) -> Result<LinksOptions, ConfigError> {
        Ok(LinksOptions {
            socket: self.socket.choice(env)?,
            action,
            agent: self.chosen.agent,
            link: self.chosen.link,
            json: false,
        })
    }
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
