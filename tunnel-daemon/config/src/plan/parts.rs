//! The parts common to both plans.

use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::Level;

use super::http_proxy::HttpProxy;
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::files;
use crate::limits;
use crate::units::{self, bytes, duration, number};

/// Certificate and key, PEM files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Certificate chain.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

/// PEM files of a TLS listener. The listener watches and reloads them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// Certificate chain.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// CA for client certificates, which are then required; `None`: clients are asked for none.
    pub client_ca: Option<PathBuf>,
}

impl TlsFiles {
    /// Checks that the files exist; `flags` names those of certificate, key and CA.
    pub(super) fn check_files(&self, flags: [&'static str; 3]) -> Result<(), ConfigError> {
        let files = [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()];
        check_files(flags.into_iter().zip(files))
    }
}

/// Refuses a file that does not exist; each path comes with its flag.
pub(super) fn check_files<'a>(
    files: impl IntoIterator<Item = (&'static str, Option<&'a PathBuf>)>,
) -> Result<(), ConfigError> {
    for (flag, path) in files {
        if let Some(path) = path.filter(|path| files::is_missing(path)) {
            bail!("{flag} {}: no such file", path.display());
        }
    }
    Ok(())
}

/// A timeout; `None`: no limit. The alias keeps clap from treating the flag as optional.
type TimeLimit = Option<Duration>;

/// Limits on dials.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug)]
#[command(next_help_heading = "Dials")]
pub struct DialPlan {
    /// Time for a dial, from request to answer; 0 is no limit. A request that cannot be sent in this time retires its link:
    /// it gets no dials until the agent reads again
    #[arg(long = "dial-timeout", value_name = "TIME", default_value = "25s", value_parser = units::limit)]
    pub timeout: TimeLimit,
    /// Unanswered dials on one link, at most
    #[arg(
        long = "pending-dials-per-agent",
        value_name = "N",
        default_value = "1024",
        value_parser = number(NonZeroU32::MIN..=NonZeroU32::MAX)
    )]
    pub pending_per_agent_max: NonZeroU32,
    /// Unanswered dials over all agents, at most
    #[arg(long = "pending-dials", value_name = "N", default_value = "16384", value_parser = number(NonZeroU32::MIN..=NonZeroU32::MAX))]
    pub pending_max: NonZeroU32,
    /// Silence of an agent after which its links get no dials, at least 5s; 20s or more for an agent in Go. Its tunnels live on
    #[arg(long, value_name = "TIME", default_value = "8s", value_parser = duration)]
    pub link_dead_after: Duration,
}

impl DialPlan {
    pub(super) fn check(self) -> Result<(), ConfigError> {
        if self.pending_per_agent_max > self.pending_max {
            bail!(
                "--pending-dials-per-agent {} must not be above --pending-dials {}",
                self.pending_per_agent_max,
                self.pending_max
            );
        }
        if self.link_dead_after < limits::LINK_DEAD_AFTER_MIN {
            bail!(
                "--link-dead-after {:?} is below {:?}: a link is suspected after 4 s",
                self.link_dead_after,
                limits::LINK_DEAD_AFTER_MIN
            );
        }
        Ok(())
    }
}

impl Default for DialPlan {
    fn default() -> Self {
        const PER_AGENT: NonZeroU32 =
            NonZeroU32::new(limits::PENDING_DIALS_PER_AGENT).expect("not zero");
        const ALL: NonZeroU32 = NonZeroU32::new(limits::PENDING_DIALS).expect("not zero");
        Self {
            timeout: Some(limits::DIAL_ANSWER_TIMEOUT),
            pending_per_agent_max: PER_AGENT,
            pending_max: ALL,
            link_dead_after: limits::LINK_DEAD_AFTER,
        }
    }
}

/// Limits on what a slow tunnel may hold, to protect the others.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug)]
#[command(next_help_heading = "Isolation")]
pub struct IsolationPlan {
    /// Memory a tunnel owns while its reader is paused, on links to Go peers
    #[arg(skip = limits::TUNNEL_SHARE_BYTES)]
    pub tunnel_share_bytes: u64,
    /// Memory that all tunnels of one link may hold, and the most credit granted on the link; at least 4MiB, the share of
    /// one tunnel
    #[arg(long = "agent-budget", value_name = "SIZE", default_value = "64MiB", value_parser = bytes)]
    pub agent_budget_bytes: u64,
    /// Memory that all tunnels of the process may hold [default: a quarter of the smallest memory limit of its cgroups, else of
    /// the machine's memory; at least --agent-budget, at most half]
    #[arg(long = "process-budget", value_name = "SIZE", value_parser = bytes)]
    pub process_budget_bytes: Option<u64>,
    /// Close a tunnel that is over its share and made no progress for this long
    #[arg(skip = limits::STALL_TIMEOUT)]
    pub stall_timeout: Duration,
    /// Reset a half-closed tunnel after this time without a byte; raise it for clients that close their side and wait long
    /// for the answer
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    pub half_closed_timeout: Duration,
}

impl IsolationPlan {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let (share, agent) = (self.tunnel_share_bytes, self.agent_budget_bytes);
        let process = self.process_budget_bytes.unwrap_or(u64::MAX);
        if agent < share {
            bail!(
                "--agent-budget {agent} bytes must be at least {share} bytes: one tunnel may hold as much"
            );
        }
        if agent > process {
            bail!(
                "--agent-budget {agent} bytes must not be above --process-budget {process} bytes"
            );
        }
        if self.half_closed_timeout.is_zero() {
            bail!("--half-closed-timeout must be greater than 0");
        }
        Ok(())
    }
}

impl Default for IsolationPlan {
    fn default() -> Self {
        Self {
            tunnel_share_bytes: limits::TUNNEL_SHARE_BYTES,
            agent_budget_bytes: limits::AGENT_BUDGET_BYTES,
            process_budget_bytes: None,
            stall_timeout: limits::STALL_TIMEOUT,
            half_closed_timeout: limits::HALF_CLOSED_TIMEOUT,
        }
    }
}

/// Limits on the request head of an HTTP-CONNECT client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectPlan {
    /// Time for the head; then the client is closed.
    pub head_timeout: Duration,
    /// Longer heads are refused with status 431.
    pub head_bytes_max: u64,
}

impl Default for ConnectPlan {
    fn default() -> Self {
        Self {
            head_timeout: limits::CONNECT_HEAD_TIMEOUT,
            head_bytes_max: limits::CONNECT_HEAD_BYTES,
        }
    }
}

/// What happens after the first signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drain {
    /// Tunnels may finish for at most this time, then the process exits 0. Zero cuts them at once.
    For(Duration),
    /// No limit: only the second signal ends the process, as with upstream's agent.
    UntilSecondSignal,
}

/// Reaction to signals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShutdownPlan {
    /// What happens after the first signal.
    pub drain: Drain,
    /// Exit code when the second signal ends the process at once.
    pub second_signal_exit_code: u8,
}

/// Format of log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    /// logfmt: one line per event, for people and for programs.
    #[default]
    Text,
    /// One JSON object per line, with flattened fields.
    Json,
}

/// Destination of log lines.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum LogDestination {
    /// Standard error.
    #[default]
    Stderr,
    /// A file that is appended to. It is truncated before a line that would exceed its limit, as klog does, so that an
    /// operator's tooling for upstream still fits.
    File {
        /// Created if missing; its directory must exist.
        path: PathBuf,
        /// Size limit in bytes; `None`: no limit.
        bytes_max: Option<u64>,
        /// Lines of this level or more severe also go to standard error; `None`: no lines.
        also_stderr: Option<Level>,
    },
}

/// Log level, format and destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogPlan {
    /// Line format.
    pub format: LogFormat,
    /// Verbosity of this program.
    pub level: Level,
    /// Directives for libraries that should log more than warnings, as `TARGET=LEVEL` separated by commas.
    pub libraries: String,
    /// Sink.
    pub destination: LogDestination,
}

impl Default for LogPlan {
    fn default() -> Self {
        Self {
            format: LogFormat::default(),
            level: Level::INFO,
            libraries: String::new(),
            destination: LogDestination::default(),
        }
    }
}

/// HTTP proxy from agent to server, as raw text from the environment. `Debug` hides it, since it may contain a password.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ForwardProxy {
    /// `--https-proxy`, else `HTTPS_PROXY`, else `https_proxy`.
    pub https_proxy: Option<String>,
    /// `NO_PROXY`, else `no_proxy`.
    pub no_proxy: Option<String>,
    /// Certificates that are trusted in place of this system's, for TLS to the proxy.
    pub ca_cert: Option<PathBuf>,
    /// An `https://` proxy gets clear text, as from grpc-go, unless it gets a password.
    pub is_clear: bool,
}

impl ForwardProxy {
    /// Reads the environment; empty variables count as unset.
    pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Self {
        let first = |names: [&str; 2]| {
            names
                .into_iter()
                .filter_map(env)
                .find(|value| !value.is_empty())
        };
        Self {
            https_proxy: first(["HTTPS_PROXY", "https_proxy"]),
            no_proxy: first(["NO_PROXY", "no_proxy"]),
            ca_cert: None,
            is_clear: false,
        }
    }

    /// As [`Self::from_env`], for an agent in compat mode. grpc-go ignores the scheme `https`. Agents of Advanced Cluster Management
    /// have a grpc-go of their own, which does TLS to such a proxy, and `ROOT_CA_CERT` with the CAs that it trusts.
    pub fn from_compat_env(env: &dyn Fn(&str) -> Option<String>) -> Self {
        Self {
            is_clear: true,
            ca_cert: env("ROOT_CA_CERT")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            ..Self::from_env(env)
        }
    }

    /// With what flags say: the URL wins over the environment's, and an empty one is none; the certificates are for TLS to the proxy.
    /// A proxy that a flag names is spoken to as its scheme says.
    ///
    /// # Errors
    /// The URL of the flag is no proxy's.
    pub fn overridden(
        self,
        https_proxy: Option<String>,
        ca_cert: Option<PathBuf>,
    ) -> Result<Self, ConfigError> {
        let of_flag = https_proxy.filter(|url| !url.is_empty());
        if let Some(Err(why)) = of_flag.as_deref().map(HttpProxy::parse) {
            bail!("--https-proxy {why}");
        }
        let is_named = of_flag.is_some();
        let url = of_flag.or(self.https_proxy);
        let parsed = url.as_deref().map(HttpProxy::parse);
        let is_tls = parsed.is_some_and(|proxy| proxy.is_ok_and(|proxy| proxy.is_tls));
        // The environment's certificates are there whatever the proxy is.
        let ca_cert = ca_cert.or_else(|| self.ca_cert.filter(|_| is_tls));
        Ok(Self {
            https_proxy: url,
            is_clear: self.is_clear && !is_named && ca_cert.is_none(),
            ca_cert,
            ..self
        })
    }
}

impl fmt::Debug for ForwardProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let https_proxy = self.https_proxy.as_ref().map(|_hidden| "***");
        f.debug_struct("ForwardProxy")
            .field("https_proxy", &https_proxy)
            .field("no_proxy", &self.no_proxy)
            .finish_non_exhaustive()
    }
}

/// Refuses two listeners on the same host and port; port 0 never collides. Each listener comes with its flag.
pub(super) fn check_distinct<'a>(
    all: impl IntoIterator<Item = (&'static str, &'a BindAddress)>,
) -> Result<(), ConfigError> {
    let mut seen: Vec<(&str, &BindAddress)> = Vec::new();
    for (flag, bind) in all {
        let other = seen.iter().find(|(_, taken)| *taken == bind);
        if let Some((other, _)) = other.filter(|_| bind.port != 0) {
            bail!("two listeners want {bind}, by {other} and {flag}: change one of the ports");
        }
        seen.push((flag, bind));
    }
    Ok(())
}

/// Refuses paths that are too long for a socket address.
pub(super) fn check_socket_path(flag: &str, path: Option<&Path>) -> Result<(), ConfigError> {
    let Some(path) = path else { return Ok(()) };
    let (bytes, max) = (path.as_os_str().len(), limits::UNIX_SOCKET_PATH_BYTES_MAX);
    if bytes == 0 || bytes > max {
        bail!(
            "{flag} {}: a socket's path has 1 to {max} bytes",
            path.display()
        );
    }
    Ok(())
}

/// Refuses text that cannot be sent in a gRPC header, which carries printable ASCII.
pub(super) fn check_header_text(flag: &str, text: &str) -> Result<(), ConfigError> {
    match text.chars().find(|c| !(' '..='~').contains(c)) {
        Some(bad) => Err(ConfigError::new(format!(
            "{flag} {text:?}: {bad:?} cannot be sent in a gRPC header"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_for_a_proxy_is_never_printed() {
        let proxy = ForwardProxy {
            https_proxy: Some("http://me:s3cret@proxy.example".to_owned()),
            no_proxy: Some("localhost".to_owned()),
            ..ForwardProxy::default()
        };
        let printed = format!("{proxy:?}");
        assert!(!printed.contains("s3cret") && printed.contains("localhost"));
    }
}
