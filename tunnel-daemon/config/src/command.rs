//! The command that a command line asks for.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::error::ConfigError;
use crate::node_interface::NodeInterfaceOptions;
use crate::pki::PkiOptions;
#[cfg(feature = "demo")]
use crate::plan::LaneSecurity;
use crate::plan::{AdminSocketChoice, AgentPlan, ProxyPlan, ServerPlan};
use crate::units::duration;

/// The command to execute.
#[derive(Clone, PartialEq, Debug)]
pub enum Command {
    /// Run a server.
    Server(Box<ServerPlan>),
    /// Run an agent.
    Agent(Box<AgentPlan>),
    /// Run a proxy.
    Proxy(Box<ProxyPlan>),
    /// Run server, agents and sample targets in one process.
    #[cfg(feature = "demo")]
    Demo(DemoOptions),
    /// Show the state of a running process.
    Status(StatusOptions),
    /// Ask the servers and agents of a cluster by kubectl, and merge their answers.
    KubectlStatus(KubectlOptions),
    /// Show the open tunnels of a running process, live.
    Top(TopOptions),
    /// Show links, or drain or end some.
    Links(LinksOptions),
    /// Report what this host and a command line allow.
    Check(CheckOptions),
    /// Create or show certificates.
    Pki(PkiOptions),
    /// Give this host an address at which its agent listens, or take the address away.
    NodeInterface(NodeInterfaceOptions),
    /// Write manual pages.
    Man(ManOptions),
    /// Open listeners in other network namespaces, for the server or agent that started this process.
    NetnsHelper(NetnsHelperOptions),
    /// Become another program.
    Execute {
        /// Its file; searched for by `PATH` if it is a bare name.
        program: PathBuf,
        /// Its arguments.
        args: Vec<String>,
    },
    /// Print this text to standard output and exit 0: help or version.
    Print(String),
}

/// Options of `adit demo`.
#[cfg(feature = "demo")]
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct DemoOptions {
    /// Drive every frontend once, check every byte and exit: 0 if all bytes were right, else 1
    #[arg(long)]
    pub once: bool,
    /// Check every frontend, and show each check
    #[arg(long)]
    pub verbose: bool,
    /// Where certificates, sockets and configuration go [default: a new temporary directory]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Plain lines even on a terminal
    #[arg(long)]
    pub plain: bool,
    /// What protects the lanes between server and agents: tls, ktls or plaintext
    #[arg(long, value_name = "SECURITY", default_value = "tls")]
    pub lane_security: LaneSecurity,
    /// Also capture a plain curl by eBPF and send it through the tunnel; needs root, cgroup2 and curl
    #[arg(long)]
    pub redirect: bool,
}

/// Options of `adit man`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct ManOptions {
    /// Where the pages go
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Options of the helper that opens listeners in other network namespaces. Adit itself starts the helper: see package
/// `adit-redirect`. Positional, so that they are no public flags.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct NetnsHelperOptions {
    /// `SO_MARK` of the sockets; 0 is none
    pub mark: u32,
    /// The cgroup whose processes' namespaces are found; empty: none are
    #[arg(value_parser = path)]
    pub cgroup: OptionalPath,
    /// Files of namespaces
    pub paths: Vec<PathBuf>,
}

/// The alias keeps clap from treating the argument as optional.
type OptionalPath = Option<PathBuf>;

#[expect(clippy::unnecessary_wraps, reason = "a parser of clap may fail")]
fn path(text: &str) -> Result<OptionalPath, String> {
    Ok(Some(text)
        .filter(|text| !text.is_empty())
        .map(PathBuf::from))
}

/// Options of `adit status`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct StatusOptions {
    /// Admin socket of the process.
    #[command(flatten)]
    pub socket: AdminSocketChoice,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
    /// Do not ask, but merge answers of --json, one file for each process, into a table of agents by servers; - is standard input
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "given")]
    pub fleet: Vec<PathBuf>,
}

const FLEET_HELP: &str = "\
Exit codes: 0 every server reaches every agent; 1 a link is missing; 2 not known: an answer is missing, or the command failed.";

/// Options of `kubectl adit status`. Those that kubectl has, too, have its names and meanings.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
#[command(after_help = FLEET_HELP)]
pub struct KubectlOptions {
    /// Namespace of the pods [default: that of kubectl's context]
    #[arg(long, short, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Labels of the pods
    #[arg(
        long,
        short = 'l',
        value_name = "LABELS",
        default_value = "k8s-app in (konnectivity-server,konnectivity-agent)"
    )]
    pub selector: String,
    /// Container of the pods that runs Adit [default: kubectl's choice]
    #[arg(long, short, value_name = "NAME")]
    pub container: Option<String>,
    /// Context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// The kubeconfig [default: kubectl's]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<String>,
    /// Print the merged answers as JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `adit links`, `adit drain` and `adit unlink`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct LinksOptions {
    /// Admin socket of the process.
    #[command(flatten)]
    pub socket: AdminSocketChoice,
    /// What to do with the links.
    #[arg(skip)]
    pub action: LinksAction,
    /// Only links of this agent (of this server, where an agent is asked)
    #[arg(long, value_name = "ID")]
    pub agent: Option<String>,
    /// Only the link with this number.
    #[arg(skip)]
    pub link: Option<u64>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// What to do with links.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum LinksAction {
    /// Show the links.
    #[default]
    Show,
    /// Route new tunnels to other agents.
    Drain,
    /// End the links.
    Unlink,
}

/// Options of `adit top`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct TopOptions {
    /// Admin socket of the process.
    #[command(flatten)]
    pub socket: AdminSocketChoice,
    /// Print the rows once after one interval, and exit: for scripts and pipes
    #[arg(long)]
    pub once: bool,
    /// Print the rows once as one JSON object
    #[arg(long)]
    pub json: bool,
    /// rate, bytes, age, agent, destination, rtt or retransmits
    #[arg(long, value_name = "ORDER", default_value = "rate")]
    pub sort: TopSort,
    /// Time between two refreshes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub interval: Duration,
}

/// The order of the tunnels in `adit top`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TopSort {
    /// Bytes per second, both ways, most first.
    Rate,
    /// Bytes so far, both ways, most first.
    Bytes,
    /// The oldest first.
    Age,
    /// By agent (or server), then by rate.
    Agent,
    /// By destination, then by rate.
    Destination,
    /// Longest round-trip time first.
    Rtt,
    /// Most retransmits first.
    Retransmits,
}

impl TopSort {
    /// All orders by name, in the order in which keys step through them.
    pub const ALL: [(&'static str, Self); 7] = [
        ("rate", Self::Rate),
        ("bytes", Self::Bytes),
        ("age", Self::Age),
        ("agent", Self::Agent),
        ("destination", Self::Destination),
        ("rtt", Self::Rtt),
        ("retransmits", Self::Retransmits),
    ];

    /// The name used in flags.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, sort)| *sort == self);
        found.map_or("rate", |(name, _)| *name)
    }
}

impl FromStr for TopSort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, sort)| *sort).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
            format!(
                "{text:?} is not a sort order: use one of {}",
                names.join(", ")
            )
        })
    }
}

const CHECK_HELP: &str = "\
Exit codes: 0 all is ok; 1 something is degraded; 2 something is missing or broken.

Examples:
  adit check
  adit check server --frontend grpc=unix:/run/adit/kas.sock --cluster-cert tls.crt ...
  adit check --connect agent --proxy-server-host server.example --ca-cert ca.crt ...
  adit check --egress-config /etc/kubernetes/egress.yaml";

/// Options of `adit check`.
#[derive(clap::Args, Clone, PartialEq, Debug)]
#[command(after_help = CHECK_HELP)]
pub struct CheckOptions {
    /// One JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Connect to the servers of an agent's or proxy's flags, as it would, and to the proxy through which it reaches targets
    #[arg(long)]
    pub connect: bool,
    /// kube-apiserver's --egress-selector-config-file: what kube-apiserver would do with it. Connects as the file says;
    /// with a server's flags compares with these, and connects with --connect
    #[arg(long, value_name = "FILE")]
    pub egress_config: Option<PathBuf>,
    /// server, agent, proxy or the name of a HyperShift sidecar, and its flags, to be checked on this host
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<String>,
    /// What that command line says.
    #[arg(skip)]
    pub given: CheckGiven,
}

/// The command line to be checked.
#[derive(Clone, PartialEq, Default, Debug)]
pub enum CheckGiven {
    /// No command line: checks only the host.
    #[default]
    Nothing,
    /// A server's, with the warnings of its start.
    Server(Box<ServerPlan>, Vec<String>),
    /// An agent's, with the warnings of its start.
    Agent(Box<AgentPlan>, Vec<String>),
    /// A proxy's, with the warnings of its start.
    Proxy(Box<ProxyPlan>, Vec<String>),
    /// A command line that would be refused.
    Refused(ConfigError),
}

/// A command, and warnings to log once logging has started.
#[derive(Clone, PartialEq, Debug)]
pub struct Parsed {
    /// The command to execute.
    pub command: Command,
    /// Warnings of one line each.
    pub warnings: Vec<String>,
}
