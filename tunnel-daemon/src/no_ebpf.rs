//! Replaces `ebpf/` in a build without the cargo feature of that name: nothing is captured or accounted for.
//!
//! [`ebpf_flags`](crate::ebpf_flags) keeps servers and agents from starting with flags that need eBPF. The functions here
//! therefore report "off", or refuse.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::ebpf_flags;
use crate::listeners::Listening;
use crate::node::NodeServe;
use crate::process::Process;
use adit_config::address::BindAddress;
use adit_config::plan::{AccountPlan, NodeRedirectPlan, RedirectPlan};
use adit_config::{ConfigError, NetnsHelperOptions};
use adit_net::accounts::Accounts;
use adit_net::tasks::Tasks;
use adit_server::frontend::events::FrontendContext;
use adit_telemetry::AditMetrics;

const WHY: &str = "this binary is built without eBPF";

/// Why this binary has no eBPF.
pub(crate) const NOT_BUILT: Option<&str> = Some(WHY);

/// The redirect of a server: none.
pub(crate) struct Captured;

impl Captured {
    pub(crate) fn none() -> Self {
        Self
    }

    pub(crate) fn listeners(&self) -> &[SocketAddr] {
        &[]
    }

    pub(crate) fn redirected(&self) -> u64 {
        0
    }

    pub(crate) fn exempt(
        &self,
        _agents: SocketAddr,
        _others: impl IntoIterator<Item = SocketAddr>,
    ) {
    }

    pub(crate) fn detach(&self) {}
}

impl Listening<'_> {
    /// # Errors
    /// Always: this build has no eBPF.
    pub(crate) fn redirect(
        &self,
        plan: &RedirectPlan,
        _agents: &BindAddress,
        _context: &Arc<FrontendContext>,
    ) -> anyhow::Result<Captured> {
        ebpf_flags::check(ebpf_flags::of_redirect(plan))?;
        Ok(Captured)
    }
}

/// The redirect of an agent: none.
pub(crate) struct NodeRedirect;

impl NodeRedirect {
    pub(crate) fn none() -> Self {
        Self
    }

    /// # Errors
    /// Always: this build has no eBPF.
    pub(crate) fn start(
        plan: &NodeRedirectPlan,
        _process: &Process,
        _proxy: &NodeServe,
        _stop: &CancellationToken,
    ) -> anyhow::Result<Self> {
        ebpf_flags::check(ebpf_flags::of_node_redirect(plan))?;
        Ok(Self)
    }

    pub(crate) fn detach(&self) {}
}

/// # Errors
/// Always: this build has no eBPF.
pub(crate) fn account(
    _plan: AccountPlan,
    _metrics: &AditMetrics,
    _services: &Tasks,
) -> Result<(Accounts, u32), ConfigError> {
    ebpf_flags::check("--account").map(|()| (Accounts::off(), 0))
}

/// # Errors
/// Always: this build has no eBPF.
pub(crate) fn netns_helper(_options: &NetnsHelperOptions) -> Result<(), String> {
    Err(WHY.to_owned())
}

/// No program is loaded, so no caller asks.
pub(crate) fn maps_need_capability() -> bool {
    false
}

/// Why there is no redirect.
#[cfg(feature = "demo")]
pub(crate) fn lacks() -> String {
    WHY.to_owned()
}

pub(crate) mod check {
    //! Lines of `adit check` about flags with which this binary does not start.

    use super::WHY;
    use crate::check::line::{degraded, missing};
    use crate::ebpf_flags::{REMEDY, of_account, of_node_redirect, of_redirect};
    use crate::status::model::Capability;
    use adit_config::address::BindAddress;
    use adit_config::plan::{AccountPlan, NodeRedirectPlan, RedirectPlan};

    /// Stands in for the host's eBPF support, which is not probed.
    pub(crate) struct Host;

    impl Host {
        pub(crate) fn probe() -> Self {
            Self
        }

        pub(crate) fn probe_programs() -> Self {
            Self
        }

        pub(crate) fn loading(&self) -> Capability {
            let text = format!("{WHY}: no --redirect and no --account");
            degraded(text, REMEDY).named("ebpf")
        }

        pub(crate) fn redirect(&self, plan: &RedirectPlan) -> Vec<Capability> {
            vec![refused("redirect", of_redirect(plan))]
        }

        pub(crate) fn node_redirect(&self, plan: &NodeRedirectPlan) -> Vec<Capability> {
            vec![refused("redirect", of_node_redirect(plan))]
        }

        pub(crate) fn account(&self, plan: AccountPlan) -> Option<Capability> {
            of_account(plan).map(|flag| refused("account", flag))
        }
    }

    fn refused(name: &str, flag: &str) -> Capability {
        missing(format!("it would not start with {flag}: {WHY}"), REMEDY).named(name)
    }
}

#[cfg(test)]
mod tests {
    use super::check::Host;
    use super::*;
    use crate::check::kernel_paths;
    use crate::status::model::Verdict;
    use crate::{agent, server};
    use adit_config::Command;

    const SERVER: &str = "server --cluster-cert=/dev/null --cluster-key=/dev/null --cluster-ca-cert=/dev/null \
         --frontend=grpc=unix:/nonexistent/a.sock";
    const AGENT: &str =
        "agent --proxy-server-host=192.0.2.1 --ca-cert=/dev/null --token-path=/dev/null";

    #[tokio::test]
    async fn a_flag_that_needs_ebpf_keeps_the_program_from_starting() {
        let redirect = "--redirect-cgroup=/nonexistent --redirect";
        for (program, flags, flag) in [
            (SERVER, format!("{redirect}=192.0.2.0/24"), "--redirect"),
            (SERVER, format!("{redirect}-file=/rules"), "--redirect-file"),
            (SERVER, "--account=on".to_owned(), "--account"),
            (SERVER, "--account=auto".to_owned(), "--account"),
            (
                AGENT,
                format!("{redirect}-apiserver=192.0.2.1:443=k8s.example:6443"),
                "--redirect-apiserver",
            ),
            (AGENT, format!("{redirect}-file=/rules"), "--redirect-file"),
            (AGENT, "--account=on".to_owned(), "--account"),
        ] {
            let argv = format!("adit {program} {flags}");
            let argv = argv.split(' ').map(Into::into);
            let parsed = adit_config::parse(argv, &|_name| None).unwrap();
            let (error, lines) = match parsed.command {
                Command::Server(plan) => (
                    server::start(&plan).await.err(),
                    kernel_paths::of_server(&plan, &Host),
                ),
                Command::Agent(plan) => (
                    agent::start(&plan).await.err(),
                    kernel_paths::of_agent(&plan, &Host),
                ),
                other => panic!("the flags mean {other:?}"),
            };
            let error = error.expect(flag).to_string();
            assert_eq!(error, format!("{flag}: {WHY}; {}", ebpf_flags::REMEDY));
            let [line] = &lines[..] else {
                panic!("{lines:?}");
            };
            assert_eq!(line.verdict, Verdict::Missing, "{line:?}");
            assert!(line.text.contains(&format!(" {flag}: {WHY}")), "{line:?}");
        }
    }

    #[test]
    fn ebpf_has_no_line_when_no_flag_needs_it() {
        let host = crate::check::host_lines(crate::check::Needs::default());
        assert!(host.iter().all(|line| line.name != "ebpf"), "{host:?}");
    }
}
