//! The rules that the kernel gets for a server: rules of the plan, and rules for the server's own listeners.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use adit_config::plan::{AgentCalls, OnFailure, RedirectPlan, RedirectTarget};
use adit_redirect::redirect::{Action, RedirectRule};

/// The listener's number in rules.
pub(crate) const LISTENER: u32 = 0;
/// Networks that are not redirected unless a rule names them, or a part of them: this host's own addresses never leave it.
const ALWAYS_LEFT: [&str; 6] = [
    "127.0.0.0/8",
    "169.254.0.0/16",
    "0.0.0.0/32",
    "::1/128",
    "fe80::/10",
    "::/128",
];

/// One rule per address of each listener. A caller over loopback joins only in this network namespace: in another namespace the
/// loopback address belongs to another listener.
pub(crate) fn own_rules(
    listeners: impl IntoIterator<Item = SocketAddr>,
    action: Action,
    here: &[IpAddr],
) -> Vec<RedirectRule> {
    let rule = |ip: IpAddr, port| RedirectRule {
        network: IpNet::from(ip.to_canonical()),
        port: Some(port),
        action: match action {
            Action::Join if ip.to_canonical().is_loopback() => Action::JoinAtHome,
            other => other,
        },
    };
    let mut rules = Vec::new();
    for listener in listeners {
        if listener.ip().is_unspecified() {
            rules.extend(here.iter().map(|ip| rule(*ip, listener.port())));
        } else {
            rules.push(rule(listener.ip(), listener.port()));
        }
    }
    rules
}

/// Action for calls to the agent port.
pub(crate) fn at_agents(plan: &RedirectPlan) -> Action {
    match plan.agents {
        AgentCalls::Exempt => Action::Join,
        AgentCalls::Captured => Action::Leave,
    }
}

/// The rules of a plan. Networks that are never redirected come first, so that the plan's rules for the same network win.
///
/// # Errors
/// One of these fixed networks cannot be parsed.
pub(crate) fn rules(plan: &RedirectPlan) -> anyhow::Result<Vec<RedirectRule>> {
    let mut rules = Vec::new();
    for network in ALWAYS_LEFT {
        rules.push(RedirectRule {
            network: network.parse()?,
            port: None,
            action: Action::Leave,
        });
    }
    let rule = |target: &RedirectTarget, action| RedirectRule {
        network: target.network,
        port: target.port,
        action,
    };
    let action = match plan.on_failure {
        OnFailure::Open => Action::Redirect(LISTENER),
        OnFailure::Closed => Action::RedirectOrDeny(LISTENER),
    };
    // Exclusions first: if the map is too small, no target is captured without its exclusions.
    let excluded = plan.excluded.iter();
    rules.extend(excluded.map(|target| rule(target, Action::Leave)));
    rules.extend(plan.targets.iter().map(|target| rule(target, action)));
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_listener_has_a_rule_for_each_address() {
        let here: [IpAddr; 2] = [[127, 0, 0, 1].into(), [192, 0, 2, 7].into()];
        let any: SocketAddr = "[::]:8091".parse().unwrap();
        let rules = own_rules([any], Action::Join, &here);
        let networks: Vec<String> = rules.iter().map(|rule| rule.network.to_string()).collect();
        assert_eq!(networks, ["127.0.0.1/32", "192.0.2.7/32"]);
        // Every network namespace has the loopback address.
        let actions: Vec<Action> = rules.iter().map(|rule| rule.action).collect();
        assert_eq!(actions, [Action::JoinAtHome, Action::Join]);
        let one: SocketAddr = "192.0.2.9:8131".parse().unwrap();
        let rules = own_rules([one], Action::Leave, &here);
        assert_eq!(rules.len(), 1);
        assert_eq!(
            (rules[0].port, rules[0].action),
            (Some(8131), Action::Leave)
        );
    }

    #[test]
    fn loopback_is_excluded_even_from_a_catch_all_rule() {
        let plan = RedirectPlan {
            targets: vec![RedirectTarget {
                network: "0.0.0.0/0".parse().unwrap(),
                port: None,
            }],
            excluded: Vec::new(),
            cgroup: "/".into(),
            on_failure: OnFailure::Open,
            agents: AgentCalls::Exempt,
            file: None,
            netns: None,
        };
        let rules = rules(&plan).unwrap();
        let loopback: IpNet = "127.0.0.0/8".parse().unwrap();
        let found = rules.iter().find(|rule| rule.network == loopback);
        assert_eq!(found.map(|rule| rule.action), Some(Action::Leave));
    }
}
