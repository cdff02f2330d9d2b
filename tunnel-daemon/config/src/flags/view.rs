//! `adit status`, `adit top`, `adit links`, `adit drain`, `adit unlink` and `adit check`: commands that query a running process
//! or the host.

use std::time::Duration;

use crate::command::{CheckGiven, CheckOptions, Command, LinksAction, LinksOptions, TopOptions};
use crate::error::{ConfigError, bail};
use crate::legacy::hypershift::{HTTPS, SOCKS5};
use crate::parse::parse_naming;
use crate::plan::AdminSocketChoice;
use crate::units::number;

/// Shortest and longest refresh interval of `adit top`.
const INTERVAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// Looks up an environment variable.
type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

#[derive(clap::Args, Debug)]
pub(super) struct LinkFlags {
    #[command(flatten)]
    socket: AdminSocketChoice,
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

impl TopOptions {
    /// # Errors
    /// The interval is out of range, or the socket's path is not valid.
    pub(super) fn check(&mut self, env: Env<'_>) -> Result<(), ConfigError> {
        let ((min, max), interval) = (INTERVAL, self.interval);
        if !(min..=max).contains(&interval) {
            bail!("--interval {interval:?} must be from {min:?} to {max:?}");
        }
        self.socket.find(env)
    }
}

impl LinkFlags {
    /// # Errors
    /// The socket's path is not valid.
    pub(super) fn options(
        mut self,
        action: LinksAction,
        env: Env<'_>,
    ) -> Result<LinksOptions, ConfigError> {
        self.socket.find(env)?;
        Ok(LinksOptions {
            socket: self.socket,
            action,
            agent: self.chosen.agent,
            link: self.chosen.link,
            json: false,
        })
    }
}

impl CheckOptions {
    /// Reads the command line to be checked. One that would not start is a result to report, and no error here.
    ///
    /// # Errors
    /// The command is none of those that can be checked.
    pub(super) fn command(
        mut self,
        env: Env<'_>,
        variables: &[String],
    ) -> Result<Command, ConfigError> {
        let command = self.command.iter().map(String::as_str);
        self.given = match self.command.first().map(String::as_str) {
            None => CheckGiven::Nothing,
            Some(name @ ("server" | "agent" | "proxy" | SOCKS5 | HTTPS)) => {
                // The names of HyperShift's sidecars are those of programs.
                let adit = Some("adit").filter(|_| ![SOCKS5, HTTPS].contains(&name));
                let argv = adit.into_iter().chain(command);
                match parse_naming(argv.map(Into::into), env, variables) {
                    Ok(parsed) => match parsed.command {
                        Command::Server(plan) => CheckGiven::Server(plan, parsed.warnings),
                        Command::Agent(plan) => CheckGiven::Agent(plan, parsed.warnings),
                        Command::Proxy(plan) => CheckGiven::Proxy(plan, parsed.warnings),
                        print => return Ok(print),
                    },
                    Err(error) => CheckGiven::Refused(error),
                }
            }
            Some(other) => {
                return Err(ConfigError::refused(&format!(
                    "{other:?} cannot be checked: write server, agent or proxy, or the name of a HyperShift sidecar, and its flags behind `adit check`"
                )));
            }
        };
        Ok(Command::Check(self))
    }
}
