//! Kernel features that a command line asks for, redirect and accounting: whether the kernel would allow them now.
//!
//! Their absence does not keep a server or agent from starting, so this command reports it beforehand.

use rustix::thread::CapabilitySet;

use super::line::degraded;
use crate::ebpf::check::Host;
use crate::status::model::Capability;
use adit_config::plan::{AgentPlan, ServerPlan};
use adit_host::capabilities::of_this_process;

/// Lines about a server's kernel features.
pub(crate) fn of_server(plan: &ServerPlan, host: &Host) -> Vec<Capability> {
    let redirect = plan.transparent.redirect.iter();
    let mut lines: Vec<_> = redirect.flat_map(|plan| host.redirect(plan)).collect();
    if plan.transparent.bind.is_some() {
        lines.extend(tproxy(of_this_process()));
    }
    lines.extend(host.account(plan.account));
    lines
}

/// Lines about an agent's kernel features.
pub(crate) fn of_agent(plan: &AgentPlan, host: &Host) -> Vec<Capability> {
    let redirect = plan.redirect.iter();
    let mut lines: Vec<_> = redirect.flat_map(|plan| host.node_redirect(plan)).collect();
    lines.extend(host.account(plan.account));
    lines
}

/// Without CAP_NET_ADMIN the packet filter's listener takes REDIRECT rules only; `None`: TPROXY rules, too.
fn tproxy(may: CapabilitySet) -> Option<Capability> {
    (!may.contains(CapabilitySet::NET_ADMIN)).then(|| {
        let line = degraded(
            "TPROXY rules cannot lead to it without CAP_NET_ADMIN; REDIRECT rules can",
            "give it CAP_NET_ADMIN at the start, or use REDIRECT rules",
        );
        line.named("transparent")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::model::Verdict;

    #[test]
    fn without_net_admin_a_listener_serves_no_tproxy_rules() {
        assert_eq!(tproxy(CapabilitySet::NET_ADMIN), None);
        let line = tproxy(CapabilitySet::empty()).unwrap();
        assert!(
            line.verdict == Verdict::Degraded && line.text.contains("TPROXY"),
            "{line:?}"
        );
    }
}
