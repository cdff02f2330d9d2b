//! The redirect of a server in three network namespaces: a control plane, a node, and a pod that only its node reaches.
//!
//! As in `kep2025`, and the other way: one cable leads from the node to the control plane, one from the node to the pod. The
//! control plane has no route further: whatever it reaches of the pod, it reaches by the node's agent.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use ipnet::IpNet;

use super::kep2025::{BULK, ip, unreachable};
use super::namespaces::namespaces;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::{ready, ready_v6};
use crate::support::target::target;
use crate::support::world::World;

const PART: &str = "a part of the host only";

#[test]
fn a_program_of_the_control_plane_reaches_a_pod_by_its_nodes_agent_only() {
    by_the_redirect_only(
        "a program of the control plane that calls a pod",
        ["10.78.0.1/24", "10.78.0.2/24"],
        ["10.79.0.1/24", "10.79.0.2/24"],
    );
}

#[test]
fn a_program_of_the_control_plane_reaches_a_pod_of_ipv6_by_its_nodes_agent_only() {
    let test = "a program of the control plane that calls a pod of IPv6";
    if ready_v6(test) {
        by_the_redirect_only(
            test,
            ["fd78::1/64", "fd78::2/64"],
            ["fd79::1/64", "fd79::2/64"],
        );
    }
}

/// `outer` are addresses of the node and of the control plane, `inner` of the node and of the pod.
fn by_the_redirect_only(test: &str, outer: [&str; 2], inner: [&str; 2]) {
    let Some([plane, node, pod]) = namespaces(test) else {
        return;
    };
    node.connect_by("outer", &plane, outer[0], outer[1]);
    node.connect_by("inner", &pod, inner[0], inner[1]);
    let asked: SocketAddr = pod.inside(|| target(&ip(inner[1]).to_string()));
    let beside: SocketAddr = node.inside(|| target(&ip(outer[0]).to_string()));
    let pods = inner[1].parse::<IpNet>().unwrap().trunc();
    let (captured, program) = (Cgroup::new(), std::env::current_exe().unwrap());
    // The server and its clients are in the control plane, and so is this thread.
    plane.inside(|| {
        let world = World::at(ip(outer[1]));
        let mut client = Client::start(Some(captured.path()));
        let mut stranger = Client::start(None);
        let mut neighbour = Client::start_in(&node, captured.path());
        unreachable(client.call(asked));

        let flags = [
            format!("--redirect={pods}"),
            format!("--redirect-cgroup={}", captured.path().display()),
        ];
        let mut server = world.server(None, &flags);
        let _agent = world.agent_by(node.command(&program), &server, None, &[]);
        let seen = client.call(asked).unwrap();
        assert_eq!(seen.peer, asked);
        assert!(seen.local.ip().is_loopback(), "{seen:?}");
        // Whoever called the pod is the agent, at its node.
        assert_eq!(seen.caller.ip(), ip(inner[0]));
        let received = client.carry(asked, BULK).unwrap();
        assert!(received > BULK, "the target greets: {received}");
        let mut calls = 2.0;
        if let IpAddr::V4(v4) = asked.ip() {
            let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), asked.port());
            assert_eq!(client.call_mapped(asked).unwrap().peer, mapped);
            calls += 1.0;
        }
        // What no rule names goes where it goes, and so do calls of the node, which has a way of its own.
        assert!(client.call(beside).unwrap().is_direct());
        assert!(neighbour.call(asked).unwrap().is_direct());
        unreachable(stranger.call(asked));
        server.metric_is("adit_redirect_calls_total{outcome=\"redirected\"}", calls);
        let readyz = server.readyz();
        assert!(!readyz.contains(PART), "{readyz}");

        server.role.kill();
        unreachable(client.call(asked));
        assert!(client.call(beside).unwrap().is_direct());
        assert!(neighbour.call(asked).unwrap().is_direct());
    });
}

/// As in a container: what is mounted as if it were all cgroups is the one it is in.
#[test]
fn a_server_in_a_cgroup_namespace_of_its_own_says_that_it_captures_a_part_of_the_host() {
    if !ready("a server in a cgroup namespace of its own") {
        return;
    }
    let (cgroup, world) = (Cgroup::new(), World::new());
    let mounted = world.dir().join("cgroup");
    fs::create_dir(&mounted).unwrap();
    // A namespace begins at the cgroup that its first process is in.
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!(
            "echo 0 > {}/cgroup.procs && \
             exec unshare --cgroup --mount sh -c 'mount -t cgroup2 none {} && exec \"$0\" \"$@\"' \"$0\" \"$@\"",
            cgroup.path().display(),
            mounted.display()
        ))
        .arg(std::env::current_exe().unwrap());
    let flags = [
        "--redirect=198.51.100.0/24".to_owned(),
        format!("--redirect-cgroup={}", mounted.display()),
    ];
    let server = world.server_by(command, None, &flags);
    let _agent = world.agent(&server, None);
    server.metric_is("adit_redirect_state{state=\"active\"}", 1.0);
    let readyz = server.readyz();
    let said = format!("[-]redirect-cgroup {}: {PART}", mounted.display());
    assert!(readyz.contains(&said), "{readyz}");
}
