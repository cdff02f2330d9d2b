//! Flags of the transparent frontend: what to capture, and where else captured connections may arrive.

use std::path::PathBuf;

use crate::address::BindAddress;
use crate::plan::{
    AgentCalls, NetnsChoice, NetnsPlan, OnFailure, RedirectPlan, RedirectTarget, TransparentPlan,
};

/// Network namespaces of captured processes.
#[derive(clap::Args, Debug)]
pub(super) struct NamespaceFlags {
    /// Redirect in this network namespace, too: auto for all in which processes of the cgroup are, a name below /run/netns, or a
    /// path such as /proc/4711/ns/net; needs CAP_SYS_ADMIN at the start; repeatable
    #[arg(long, value_name = "NETNS", requires = "redirect_cgroup")]
    redirect_netns: Vec<NetnsChoice>,
}

impl NamespaceFlags {
    pub(super) fn plan(self) -> Option<NetnsPlan> {
        NetnsPlan::of(self.redirect_netns)
    }
}

/// Connections of programs that know of no proxy.
#[derive(clap::Args, Debug)]
#[command(
    next_help_heading = "Transparent",
    group = clap::ArgGroup::new("captures").args(["redirect", "redirect_file"]).multiple(true)
)]
pub(super) struct TransparentFlags {
    /// Send connections of a cgroup's processes to these destinations through the tunnel: CIDR or address, with :PORT or
    /// without, IPv6 with a port as [CIDR]:PORT; needs eBPF; repeatable
    #[arg(long = "redirect", value_name = "TARGET", requires = "redirect_cgroup")]
    redirect: Vec<RedirectTarget>,
    /// Leave these destinations alone; the longest prefix decides; repeatable
    #[arg(long, value_name = "TARGET", requires = "captures")]
    redirect_exclude: Vec<RedirectTarget>,
    /// The cgroup whose processes, and those of cgroups below it, are redirected: a folder of the cgroup2 file system
    #[arg(long, value_name = "PATH", requires = "captures")]
    redirect_cgroup: Option<PathBuf>,
    /// What happens to these connections when no server takes them: open lets them go direct; closed denies them, also after
    /// this process has ended, and needs bpffs
    #[arg(
        long,
        value_name = "MODE",
        default_value = "open",
        requires = "captures"
    )]
    redirect_on_failure: OnFailure,
    /// How to treat a captured process that connects to the agent port: exempt takes it for an agent and redirects none of
    /// its later connections; captured goes on redirecting it, and agents have to be in another cgroup
    #[arg(
        long,
        value_name = "MODE",
        default_value = "exempt",
        requires = "captures"
    )]
    redirect_agents: AgentCalls,
    /// File of further rules, read again whenever it changes: one `redirect TARGET` or `redirect-exclude TARGET` a line
    #[arg(long, value_name = "FILE", requires = "redirect_cgroup")]
    redirect_file: Option<PathBuf>,
    #[command(flatten)]
    namespaces: NamespaceFlags,
    /// Listen here for connections that REDIRECT or TPROXY rules of a packet filter send, HOST:PORT
    #[arg(long, value_name = "ADDR", value_parser = BindAddress::parse)]
    transparent_bind_address: Option<BindAddress>,
}

impl TransparentFlags {
    pub(super) fn plan(self) -> TransparentPlan {
        TransparentPlan {
            redirect: self.redirect_cgroup.map(|cgroup| RedirectPlan {
                targets: self.redirect,
                excluded: self.redirect_exclude,
                on_failure: self.redirect_on_failure,
                agents: self.redirect_agents,
                cgroup,
                file: self.redirect_file,
                netns: self.namespaces.plan(),
            }),
            bind: self.transparent_bind_address,
        }
    }
}
