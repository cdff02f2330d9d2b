//! Flags that select the captured connections.

use std::path::Path;

use super::{agent, says, server, words};
use crate::plan::{AgentCalls, OnFailure};

/// Limit (redirect): Values of `--redirect` and `--redirect-exclude` | 4,096
#[test]
fn a_redirect_needs_a_cgroup_and_contradictions_are_refused() {
    let with = |more: &[&str]| {
        let mut args = vec!["--cluster-ca-cert", "PEM"];
        args.extend_from_slice(more);
        server(&args)
    };
    let whole = words("--redirect 10.0.0.0/8 --redirect-cgroup /sys/fs/cgroup/x");
    // A redirect needs no further frontend.
    let (plan, _) = with(&whole).unwrap();
    let redirect = plan.transparent.redirect.as_ref().unwrap();
    assert_eq!(
        (redirect.targets.len(), redirect.on_failure, redirect.agents),
        (1, OnFailure::Open, AgentCalls::Exempt)
    );
    let (plan, _) = with(&[&whole[..], &["--redirect-agents=captured"]].concat()).unwrap();
    let agents = plan.transparent.redirect.as_ref().unwrap().agents;
    assert_eq!(agents, AgentCalls::Captured);
    let (plan, _) = with(&["--transparent-bind-address", "127.0.0.1:15001"]).unwrap();
    assert!(plan.transparent.redirect.is_none() && plan.transparent.bind.is_some());
    let many: Vec<String> = (0..4097)
        .map(|number| format!("--redirect=10.{}.{}.0/24", number / 256, number % 256))
        .collect();
    let mut too_many = vec!["--redirect-cgroup", "/x"];
    too_many.extend(many.iter().map(String::as_str));
    let both = [&whole[..], &["--redirect-exclude", "10.0.0.0/8"]].concat();
    let ajar = ["--redirect-on-failure", "ajar"];
    let free = ["--redirect-agents", "free"];
    for (args, said) in [
        (&whole[..2], "--redirect-cgroup"),
        (&whole[2..], "--redirect"),
        (&["--redirect-exclude", "10.0.0.0/8"][..], "--redirect"),
        (&both[..], "both name 10.0.0.0/8"),
        (&[&whole[..], &ajar].concat()[..], "open or closed"),
        (&[&whole[..], &free].concat()[..], "exempt or captured"),
        (&["--redirect-agents", "captured"][..], "--redirect"),
        (&too_many[..], "4097"),
        (&[][..], "no frontend"),
    ] {
        says(&with(args).unwrap_err(), said);
    }
    assert!(with(&too_many[..4097]).is_ok());
}

#[test]
fn redirect_rules_may_be_in_a_file_and_cover_other_network_namespaces() {
    let base = ["--cluster-ca-cert=PEM", "--redirect-cgroup=/c"];
    let with = |more: &[&str]| server(&[&base[..], more].concat());
    // A rule file suffices.
    let (plan, _) = with(&words(
        "--redirect-file=/etc/adit/rules --redirect-netns=auto --redirect-netns=blue",
    ))
    .unwrap();
    let redirect = plan.transparent.redirect.clone().unwrap();
    assert_eq!(redirect.file.as_deref(), Some(Path::new("/etc/adit/rules")));
    let netns = redirect.netns.unwrap();
    assert_eq!(
        (netns.auto, netns.paths),
        (true, vec!["/run/netns/blue".into()])
    );
    let (plan, _) = with(&["--redirect=10.0.0.1"]).unwrap();
    let redirect = plan.transparent.redirect.clone().unwrap();
    assert_eq!((redirect.file, redirect.netns), (None, None));
    for (args, said) in [
        (&["--redirect-netns=auto"][..], "--redirect"),
        (
            &["--redirect=10.0.0.1", "--redirect-netns=./blue"],
            "write the whole path",
        ),
    ] {
        says(&with(args).unwrap_err(), said);
    }
}

#[test]
fn an_agent_takes_redirect_flags_and_node_addresses() {
    let base = words("--proxy-server-host=h --agent-cert=PEM --agent-key=PEM --redirect-cgroup=/c");
    let with = |more: &[&str]| agent(&[&base[..], more].concat());
    let plan = with(&words(
        "--redirect-file=/rules --redirect-netns=/proc/7/ns/net \
             --redirect-node-address=10.0.0.7 --redirect-node-address=fd00::7",
    ))
    .unwrap();
    let redirect = plan.redirect.clone().unwrap();
    assert_eq!(redirect.file.as_deref(), Some(Path::new("/rules")));
    assert!(redirect.netns.is_some_and(|netns| !netns.auto));
    assert_eq!(redirect.node_addresses.len(), 2);
    let (rules, by_name) = ("--redirect-file=/rules", "--redirect-node-address=node");
    let ip = "--redirect-node-address=10.0.0.7";
    let another = "--redirect-node-address=10.0.0.8";
    for (args, said) in [
        (&[ip][..], "--redirect"),
        (&[rules, by_name], "--redirect-node-address"),
        (&[rules, ip, another], "two addresses"),
    ] {
        says(&with(args).unwrap_err(), said);
    }
}
