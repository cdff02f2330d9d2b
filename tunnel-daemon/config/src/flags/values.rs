//! Values of native flags, and the flags common to server and agent.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use tracing::Level;

use crate::address::BindAddress;
use crate::error::ConfigError;
use crate::plan::{
    AdminSocketPlan, Dialect, Drain, LogDestination, LogFormat, LogPlan, Program, ShutdownPlan,
    check_network,
};
use crate::units::{duration, listener_port};

/// A port; `None`: no listener. The alias keeps clap from treating the flag as optional.
pub(super) type PortSetting = Option<u16>;

/// `off`, or a port; 0 lets the kernel choose.
pub(super) fn port_setting(text: &str) -> Result<PortSetting, String> {
    if text == "off" {
        return Ok(None);
    }
    let port = listener_port(text).map(Some);
    port.map_err(|why| format!("{why}, or off for no listener"))
}

pub(super) fn bind_if_on(
    flag: &str,
    host: &str,
    port: PortSetting,
) -> Result<Option<BindAddress>, ConfigError> {
    port.map(|port| bind(flag, host, port)).transpose()
}

pub(super) fn bind(flag: &str, host: &str, port: u16) -> Result<BindAddress, ConfigError> {
    BindAddress::new(host, port).map_err(ConfigError::about(flag))
}

/// The program's log level, and directives for libraries that should log more.
#[derive(Clone, Debug)]
pub(super) struct LogLevels {
    level: Level,
    libraries: String,
}

/// `LEVEL[,TARGET=LEVEL...]`.
pub(super) fn log_levels(text: &str) -> Result<LogLevels, String> {
    let wrong = || {
        "write error, warn, info, debug or trace, and behind it libraries that are to be heard, such as debug,h2=debug"
            .to_owned()
    };
    let (own, libraries) = text.split_once(',').unwrap_or((text, ""));
    let is_target = |name: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        !name.is_empty() && name.chars().all(plain)
    };
    let named = libraries.split(',').filter(|entry| !entry.is_empty());
    let mut named = named.map(|entry| entry.split_once('='));
    let is_right = |entry: Option<(&str, &str)>| {
        entry.is_some_and(|(target, level)| is_target(target) && log_level(level).is_some())
    };
    if !named.all(is_right) {
        return Err(wrong());
    }
    Ok(LogLevels {
        level: log_level(own).ok_or_else(wrong)?,
        libraries: libraries.to_owned(),
    })
}

fn log_level(text: &str) -> Option<Level> {
    match text {
        "error" => Some(Level::ERROR),
        "warn" => Some(Level::WARN),
        "info" => Some(Level::INFO),
        "debug" => Some(Level::DEBUG),
        "trace" => Some(Level::TRACE),
        _ => None,
    }
}

pub(super) fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("write text or json".to_owned()),
    }
}

/// One `--frontend`, before the TLS files are known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FrontendSpec {
    pub(super) dialect: Dialect,
    pub(super) place: Place,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Unix(PathBuf),
    Tcp(BindAddress),
}

/// `DIALECT=unix:PATH` or `DIALECT=tcp:HOST:PORT`.
pub(super) fn frontend(text: &str) -> Result<FrontendSpec, String> {
    let dialects = Dialect::names();
    let form = format!("write DIALECT=unix:PATH or DIALECT=tcp:HOST:PORT, with DIALECT {dialects}");
    let (dialect, place) = text.split_once('=').ok_or(form.as_str())?;
    let dialect = Dialect::from_name(dialect)
        .ok_or_else(|| format!("{dialect:?} is not a dialect: {form}"))?;
    let place = match place.split_once(':') {
        Some(("unix", "")) => return Err(format!("no path: {form}")),
        Some(("unix", path)) => Place::Unix(PathBuf::from(path)),
        Some(("tcp", address)) => Place::Tcp(BindAddress::parse(address)?),
        _ => return Err(format!("{place:?} is not a listener address: {form}")),
    };
    Ok(FrontendSpec { dialect, place })
}

/// Flags for configuration, shutdown, admin requests and logs.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Operation")]
pub(super) struct AdminFlags {
    /// Address of admin requests
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    admin_bind_address: String,
}

impl AdminFlags {
    pub(super) fn bind(&self, port: PortSetting) -> Result<Option<BindAddress>, ConfigError> {
        bind_if_on("--admin-bind-address", &self.admin_bind_address, port)
    }
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Operation")]
pub(super) struct OperationFlags {
    /// TOML file of flags by name, with a list for a repeatable flag; the command line and environment variables (ADIT_ and
    /// the name, such as ADIT_LOG_LEVEL) win
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// After SIGTERM, let tunnels finish for at most this long; a second signal exits at once
    #[arg(long, value_name = "TIME", default_value = "25s", value_parser = duration)]
    shutdown_grace: Duration,
    /// Unix socket for adit status, top, links, drain and unlink, for this user and root only; off is none [default: server.sock,
    /// agent.sock or proxy.sock in /run/adit, else in $XDG_RUNTIME_DIR/adit]
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
    /// text (logfmt, one event a line) or json, fatal errors included
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = log_format)]
    log_format: LogFormat,
    /// error, warn, info, debug or trace; libraries log warnings only, unless named: debug,h2=debug
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = log_levels)]
    log_level: LogLevels,
}

impl OperationFlags {
    pub(super) fn shutdown(&self, second_signal_exit_code: u8) -> ShutdownPlan {
        ShutdownPlan {
            drain: Drain::For(self.shutdown_grace),
            second_signal_exit_code,
        }
    }

    pub(super) fn admin_socket(
        &self,
        program: Program,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> AdminSocketPlan {
        AdminSocketPlan::of_flag(self.admin_socket.clone(), program, env)
    }

    pub(super) fn log(&self) -> LogPlan {
        LogPlan {
            format: self.log_format,
            level: self.log_level.level,
            libraries: self.log_level.libraries.clone(),
            destination: LogDestination::Stderr,
        }
    }
}

/// A network, or a single address.
pub(super) fn network(text: &str) -> Result<IpNet, String> {
    let network = text
        .parse::<IpNet>()
        .or_else(|_error| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_error| "is no network: write ADDRESS/BITS".to_owned())?;
    Ok(match network {
        // Peers are known by their IPv4 address.
        IpNet::V6(mapped) if mapped.prefix_len() >= 96 => match mapped.addr().to_canonical() {
            IpAddr::V4(ip) => Ipv4Net::new_assert(ip, mapped.prefix_len() - 96).into(),
            IpAddr::V6(_) => network,
        },
        network => network,
    })
}

/// A network of clients. All addresses are refused: the flag would promise what it does not keep.
pub(super) fn clients(text: &str) -> Result<IpNet, String> {
    let network = network(text)?;
    if network.prefix_len() == 0 {
        return Err("would serve everyone: leave the flag out for that".to_owned());
    }
    Ok(network)
}

/// A network of balancers. All addresses are refused: every agent could claim any address.
pub(super) fn balancers(text: &str) -> Result<IpNet, String> {
    let network = network(text)?;
    if network.prefix_len() == 0 {
        return Err("would believe everyone: name the networks of the balancers".to_owned());
    }
    Ok(network)
}

/// A network of peers, inside which discovery may name servers.
pub(super) fn peer_network(text: &str) -> Result<IpNet, String> {
    let network = network(text)?.trunc();
    check_network(&network)?;
    Ok(network)
}
