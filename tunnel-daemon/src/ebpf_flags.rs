//! Flags that need eBPF, named as messages name them.

use crate::ebpf::NOT_BUILT;
use adit_config::ConfigError;
use adit_config::plan::{
    AccountMode, AccountPlan, AgentPlan, NodeRedirectPlan, RedirectPlan, ServerPlan,
};

/// What to do when [`NOT_BUILT`] gives a reason.
pub(crate) const REMEDY: &str = "use a binary built with the cargo feature ebpf, or drop the flag";

/// The first flag of a server's plan that needs eBPF.
pub(crate) fn of_server(plan: &ServerPlan) -> Option<&'static str> {
    let redirect = plan.transparent.redirect.as_ref();
    redirect
        .map(of_redirect)
        .or_else(|| of_account(plan.account))
}

/// The first flag of an agent's plan that needs eBPF.
pub(crate) fn of_agent(plan: &AgentPlan) -> Option<&'static str> {
    let redirect = plan.redirect.as_ref();
    redirect
        .map(of_node_redirect)
        .or_else(|| of_account(plan.account))
}

/// The flag that requests a server's redirect.
pub(crate) fn of_redirect(plan: &RedirectPlan) -> &'static str {
    if plan.targets.is_empty() {
        "--redirect-file"
    } else {
        "--redirect"
    }
}

/// The flag that requests an agent's redirect.
pub(crate) fn of_node_redirect(plan: &NodeRedirectPlan) -> &'static str {
    if plan.services.is_empty() {
        "--redirect-file"
    } else {
        "--redirect-apiserver"
    }
}

/// The flag that requests accounting; `None` if it is off.
pub(crate) fn of_account(plan: AccountPlan) -> Option<&'static str> {
    (plan.mode != AccountMode::Off).then_some("--account")
}

/// # Errors
/// A flag needs eBPF, and this binary is built without it.
pub(crate) fn check(flag: &str) -> Result<(), ConfigError> {
    match NOT_BUILT {
        Some(why) => Err(ConfigError::new(format!("{flag}: {why}; {REMEDY}"))),
        None => Ok(()),
    }
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
