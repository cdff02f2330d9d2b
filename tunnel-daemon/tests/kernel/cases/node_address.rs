//! KEP-2025 without eBPF: pods call the `kubernetes` Service, kube-proxy leads them to an address of their node, and the node's
//! agent listens there.
//!
//! Four network namespaces: a control plane, a node, a pod behind the node's bridge, and a neighbour host of the node, which
//! routes to the same addresses by the node.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use adit::node_interface::add;

use super::kep2025::{BULK, ip};
use super::namespaces::namespaces;
use super::node_interface::kind;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::namespace::Namespace;
use crate::support::privilege::ready_v6;
use crate::support::role::Role;
use crate::support::target::target;
use crate::support::world::{ServerProcess, World};

/// A SYN is sent again after a second.
const TWO_SYNS: Duration = Duration::from_secs(2);

/// Addresses of one family, with the lengths of their networks.
struct Addresses {
    /// The family, for `ip` and for `nft`.
    family: [&'static str; 2],
    /// Addresses of node and control plane.
    outer: [&'static str; 2],
    /// Addresses of node and neighbour.
    lan: [&'static str; 2],
    /// Addresses of bridge and pod.
    pods: [&'static str; 2],
    /// An address of the pods' network that no pod has.
    spare: &'static str,
    /// Where the agent listens.
    node: &'static str,
    /// The Service.
    service: &'static str,
}

/// Limit (redirect): A pod that calls the `kubernetes` Service, whose endpoint is the address of `adit node-interface` | reaches
/// the control plane by kube-proxy's rules, without eBPF. With `--target-from` a neighbour host gets no answer there
#[test]
fn a_pod_reaches_the_service_by_its_nodes_address_and_a_neighbour_does_not() {
    at_the_nodes_address(
        "the node's own address",
        &Addresses {
            family: ["-4", "ip"],
            outer: ["10.78.0.1/24", "10.78.0.2/24"],
            lan: ["10.80.0.1/24", "10.80.0.2/24"],
            pods: ["10.244.1.1/24", "10.244.1.2/24"],
            spare: "10.244.1.99",
            node: "192.0.2.10:6443",
            service: "10.96.0.1:443",
        },
    );
}

/// Limit (redirect): A pod that calls the `kubernetes` Service, whose endpoint is the address of `adit node-interface`
#[test]
fn a_pod_of_ipv6_reaches_the_service_by_its_nodes_address() {
    let test = "the node's own address of IPv6";
    if ready_v6(test) {
        at_the_nodes_address(
            test,
            &Addresses {
                family: ["-6", "ip6"],
                outer: ["fd78::1/64", "fd78::2/64"],
                lan: ["fd80::1/64", "fd80::2/64"],
                pods: ["fd44::1/64", "fd44::2/64"],
                spare: "fd44::99",
                node: "[fd00::10]:6443",
                service: "[fd96::1]:443",
            },
        );
    }
}

fn at_the_nodes_address(test: &str, addresses: &Addresses) {
    let Some([plane, node, pod, neighbour]) = namespaces(test) else {
        return;
    };
    let (at, service): (SocketAddr, SocketAddr) = (
        addresses.node.parse().unwrap(),
        addresses.service.parse().unwrap(),
    );
    wire(addresses, [&plane, &node, &pod, &neighbour]);
    // As an init container does.
    let kind = kind(&node);
    let init = || node.inside(|| add(kind, at.ip())).unwrap();
    init();
    let cgroup = Cgroup::new();
    plane.inside(|| {
        let plane_ip = ip(addresses.outer[1]);
        let api = target(&plane_ip.to_string());
        let world = World::at(plane_ip);
        let server = world.server(None, &[format!("--allowed-destination={api}")]);
        let mut callers = [&pod, &node].map(|at| Client::start_in(at, cgroup.path()));
        let mut agent = agent(&world, &server, &node, at, api, None);
        served(&mut callers, &[service, at], plane_ip);
        // The address has scope host, and still a neighbour reaches it.
        let mut stranger = Client::start_in(&neighbour, cgroup.path());
        served(
            std::slice::from_mut(&mut stranger),
            &[at, service],
            plane_ip,
        );

        // A pod takes over as in a rolling update: its init container runs while the old agent does.
        init();
        agent.kill();
        let _agent = self::agent(&world, &server, &node, at, api, Some(addresses.pods[0]));
        served(&mut callers, &[service, at], plane_ip);
        for called in [at, service] {
            unanswered(&neighbour, called);
        }
        // A source of the pods' network opens the filter, but the answer goes to the bridge.
        let [flag, _] = addresses.family;
        let (host, via, spare) = (at.ip(), ip(addresses.lan[0]), addresses.spare);
        // An address that is still looked for elsewhere is no source.
        let at_once = if flag == "-6" { " nodad" } else { "" };
        neighbour.run(&format!("ip {flag} address add {spare} dev lo{at_once}"));
        neighbour.run(&format!(
            "ip {flag} route replace {host} via {via} src {spare}"
        ));
        unanswered(&neighbour, at);
    });
}

/// Cables, the node's bridge, routes of pod and neighbour, and rules as kube-proxy makes them.
fn wire(addresses: &Addresses, [plane, node, pod, neighbour]: [&Namespace; 4]) {
    let Addresses {
        family: [flag, table],
        outer,
        lan,
        pods,
        node: at,
        service,
        ..
    } = addresses;
    node.connect_by("outer", plane, outer[0], outer[1]);
    // A process of the node needs some route to the Service before its packets are translated.
    node.run(&format!("ip {flag} route add default via {}", ip(outer[1])));
    node.connect_by("lan", neighbour, lan[0], lan[1]);
    node.connect_by("pod", pod, pods[0], pods[1]);
    node.run(&format!("ip {flag} address delete {} dev pod", pods[0]));
    node.run("ip link add cni type bridge");
    node.run("ip link set pod master cni");
    let at_once = if *flag == "-6" { " nodad" } else { "" };
    node.run(&format!(
        "ip {flag} address add {} dev cni{at_once}",
        pods[0]
    ));
    node.run("ip link set cni up");
    pod.run(&format!("ip {flag} route add default via {}", ip(pods[0])));
    let called: SocketAddr = service.parse().unwrap();
    let endpoint: SocketAddr = at.parse().unwrap();
    for host in [endpoint.ip(), called.ip()] {
        neighbour.run(&format!("ip {flag} route add {host} via {}", ip(lan[0])));
    }
    node.run(&format!("nft add table {table} kube-proxy"));
    for hook in ["prerouting", "output"] {
        // One argument: nft would take a lone -100 for an option.
        let chain = format!(
            "add chain {table} kube-proxy {hook} {{ type nat hook {hook} priority -100 ; }}"
        );
        let mut nft = node.command(Path::new("nft"));
        assert!(nft.arg(&chain).status().unwrap().success());
        node.run(&format!(
            "nft add rule {table} kube-proxy {hook} {table} daddr {} tcp dport {} dnat to {at}",
            called.ip(),
            called.port()
        ));
    }
}

/// An agent on the node; `pods` is the network that it serves.
fn agent(
    world: &World,
    server: &ServerProcess,
    node: &Namespace,
    at: SocketAddr,
    api: SocketAddr,
    pods: Option<&str>,
) -> Role {
    let target = format!("--target={}:{api}", at.port());
    let bind = format!("--bind-address={}", at.ip());
    let from = pods.map(|network| format!("--target-from={network}"));
    let flags: Vec<&str> = [Some(&target), Some(&bind), from.as_ref()]
        .into_iter()
        .flatten()
        .map(String::as_str)
        .collect();
    let program = std::env::current_exe().unwrap();
    world.agent_by(node.command(&program), server, None, &flags)
}

/// Each caller reaches the control plane at each address, where the server is its caller.
fn served(callers: &mut [Client], addresses: &[SocketAddr], plane: IpAddr) {
    for caller in callers {
        for address in addresses {
            let seen = caller.call(*address).unwrap();
            assert_eq!((seen.peer, seen.caller.ip()), (*address, plane));
            let received = caller.carry(*address, BULK).unwrap();
            assert!(received > BULK, "the target greets: {received}");
        }
    }
}

fn unanswered(namespace: &Namespace, address: SocketAddr) {
    let outcome = namespace.inside(|| TcpStream::connect_timeout(&address, TWO_SYNS));
    assert_eq!(
        outcome.unwrap_err().kind(),
        ErrorKind::TimedOut,
        "{address}"
    );
}
