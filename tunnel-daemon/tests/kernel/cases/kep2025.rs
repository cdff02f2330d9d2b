//! KEP-2025 in three network namespaces: a control plane, a node, and a pod with a route only to its node.
//!
//! One veth pair connects the node to the control plane, another one the node to the pod. The pod has no other route, so it
//! reaches the control plane only by the node's agent.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use super::namespaces::namespaces;
use crate::support::cgroup::Cgroup;
use crate::support::client::{Client, Seen};
use crate::support::privilege::ready_v6;
use crate::support::target::target;
use crate::support::world::World;

/// More bytes than a lane buffers.
pub(super) const BULK: usize = 3_000_001;

/// Addresses of one family, with the lengths of their networks.
struct Addresses {
    /// Addresses of node and control plane.
    outer: [&'static str; 2],
    /// Addresses of node and pod.
    inner: [&'static str; 2],
    /// The Service address to which processes of the node connect.
    service: &'static str,
}

/// Limit (redirect): A pod without a route to the control plane | reaches it by its node's agent, and nothing else
#[test]
fn a_pod_reaches_the_control_plane_by_its_nodes_agent_only() {
    by_the_agent_only(
        "a control plane, a node and a pod",
        &Addresses {
            outer: ["10.78.0.1/24", "10.78.0.2/24"],
            inner: ["10.79.0.1/24", "10.79.0.2/24"],
            service: "10.96.0.1:443",
        },
    );
}

/// Limit (redirect): A pod without a route to the control plane
#[test]
fn a_pod_of_ipv6_reaches_the_control_plane_by_its_nodes_agent_only() {
    let test = "a control plane, a node and a pod of IPv6";
    if ready_v6(test) {
        by_the_agent_only(
            test,
            &Addresses {
                outer: ["fd78::1/64", "fd78::2/64"],
                inner: ["fd79::1/64", "fd79::2/64"],
                service: "[fd96::1]:443",
            },
        );
    }
}

/// Parses an address with a prefix length.
pub(super) fn ip(address: &str) -> IpAddr {
    address.parse::<IpNet>().unwrap().addr()
}

/// Asserts that a call failed because no route exists.
pub(super) fn unreachable(outcome: Result<Seen, String>) {
    let error = outcome.unwrap_err();
    assert!(error.contains("unreachable"), "{error}");
}

fn by_the_agent_only(test: &str, addresses: &Addresses) {
    let Some([plane, node, pod]) = namespaces(test) else {
        return;
    };
    let Addresses {
        outer,
        inner,
        service,
    } = addresses;
    node.connect_by("outer", &plane, outer[0], outer[1]);
    node.connect_by("inner", &pod, inner[0], inner[1]);
    let service: SocketAddr = service.parse().unwrap();
    let (nodes, program) = (Cgroup::new(), std::env::current_exe().unwrap());
    // The server and its destinations run in the control plane's namespace, and so does this thread.
    plane.inside(|| {
        let plane_ip = ip(outer[1]);
        let api = target(&plane_ip.to_string());
        let world = World::at(plane_ip);
        let server = world.server(None, &[format!("--allowed-destination={api}")]);
        let mut client = Client::start_in(&pod, nodes.path());
        let mut neighbour = Client::start_in(&node, nodes.path());
        // The node has a route to the control plane and none to the Service. The pod has neither.
        assert!(neighbour.call(api).unwrap().is_direct());
        unreachable(neighbour.call(service));
        unreachable(client.call(api));
        unreachable(client.call(service));

        let cgroup = nodes.flag();
        let redirect = format!("--redirect-apiserver={service}={api}");
        let netns = format!("--redirect-netns={}", pod.path().display());
        let flags = [cgroup.as_str(), &redirect, &netns];
        let command = node.command(&program);
        let mut agent = world.agent_by(command, &server, Some(nodes.path()), &flags);
        for caller in [&mut client, &mut neighbour] {
            let seen = caller.call(service).unwrap();
            assert_eq!(seen.peer, service);
            assert!(seen.local.ip().is_loopback(), "{seen:?}");
            // The target sees the server as its caller.
            assert_eq!(seen.caller.ip(), plane_ip);
            let received = caller.carry(service, BULK).unwrap();
            assert!(received > BULK, "the target greets: {received}");
        }
        if let IpAddr::V4(v4) = service.ip() {
            let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), service.port());
            assert_eq!(client.call_mapped(service).unwrap().peer, mapped);
        }
        // The agent serves only the Service.
        unreachable(client.call(api));

        agent.kill();
        unreachable(client.call(service));
        unreachable(neighbour.call(service));
        assert!(neighbour.call(api).unwrap().is_direct());
    });
}
