//! Flags that need eBPF, by the names under which messages know them.

use adit_config::plan::{
    AccountMode, AccountPlan, AgentPlan, NodeRedirectPlan, RedirectPlan, ServerPlan,
};

/// The first flag of a server that needs it; `None`: no flag does.
pub(crate) fn of_server(plan: &ServerPlan) -> Option<&'static str> {
    let redirect = plan.transparent.redirect.as_ref();
    redirect
        .map(of_redirect)
        .or_else(|| of_account(plan.account))
}

/// The same of an agent.
pub(crate) fn of_agent(plan: &AgentPlan) -> Option<&'static str> {
    let redirect = plan.redirect.as_ref();
    redirect
        .map(of_node_redirect)
        .or_else(|| of_account(plan.account))
}

/// The flag that asks for a server's redirect.
fn of_redirect(plan: &RedirectPlan) -> &'static str {
    if plan.targets.is_empty() {
        "--redirect-file"
    } else {
        "--redirect"
    }
}

/// The flag that asks for an agent's.
fn of_node_redirect(plan: &NodeRedirectPlan) -> &'static str {
    if plan.services.is_empty() {
        "--redirect-file"
    } else {
        "--redirect-apiserver"
    }
}

/// The flag that asks for accounting; `None`: nobody does.
fn of_account(plan: AccountPlan) -> Option<&'static str> {
    (plan.mode != AccountMode::Off).then_some("--account")
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_config::plan::{AgentCalls, OnFailure};

    #[test]
    fn flags_that_need_ebpf_are_named() {
        let account = |mode| {
            of_account(AccountPlan {
                mode,
                series_max: 1,
            })
        };
        assert_eq!(account(AccountMode::Off), None);
        assert_eq!(account(AccountMode::Auto), Some("--account"));
        assert_eq!(account(AccountMode::On), Some("--account"));
        let by_file = RedirectPlan {
            targets: Vec::new(),
            excluded: Vec::new(),
            cgroup: "/".into(),
            on_failure: OnFailure::Open,
            agents: AgentCalls::Exempt,
            file: Some("/rules".into()),
            netns: None,
        };
        assert_eq!(of_redirect(&by_file), "--redirect-file");
    }
}
