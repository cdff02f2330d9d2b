//! The redirect of a server in three network namespaces: a control plane, a node, and a pod that only its node reaches.
//!
//! As in `kep2025`, in the opposite direction. One veth pair connects the node to the control plane, another one the node to
//! the pod. The control plane has no route to the pod, so it reaches the pod only by the node's agent.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;

use ipnet::IpNet;

use super::kep2025::{BULK, ip, unreachable};
use super::namespaces::namespaces;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::namespace::Namespace;
use crate::support::privilege::{ready, ready_v6};
use crate::support::role::Role;
use crate::support::target::{serve, target};
use crate::support::world::{ServerProcess, World, calls};

const PART: &str = "only a part of the host";
const V4: Addresses = Addresses {
    outer: ["10.78.0.1/24", "10.78.0.2/24"],
    inner: ["10.79.0.1/24", "10.79.0.2/24"],
};
const V6: Addresses = Addresses {
    outer: ["fd78::1/64", "fd78::2/64"],
    inner: ["fd79::1/64", "fd79::2/64"],
};

/// Addresses of one family, with the lengths of their networks.
struct Addresses {
    /// Addresses of node and control plane.
    outer: [&'static str; 2],
    /// Addresses of node and pod.
    inner: [&'static str; 2],
}

impl Addresses {
    /// Creates the veth pairs of a node.
    fn cable(&self, node: &Namespace, plane: &Namespace, pod: &Namespace) {
        node.connect_by("outer", plane, self.outer[0], self.outer[1]);
        node.connect_by("inner", pod, self.inner[0], self.inner[1]);
    }

    /// Flags of a server that captures calls to pods.
    fn flags(&self, captured: &Cgroup) -> [String; 2] {
        let pods = self.inner[1].parse::<IpNet>().unwrap().trunc();
        [format!("--redirect={pods}"), captured.flag()]
    }
}

/// Limit (redirect): A program of the control plane without a route to a pod | reaches the pod by its node's agent, and
/// nothing else
#[test]
fn a_program_of_the_control_plane_reaches_a_pod_by_its_nodes_agent_only() {
    by_the_redirect_only("a program of the control plane that calls a pod", &V4);
}

/// Limit (redirect): A program of the control plane without a route to a pod
#[test]
fn a_program_of_the_control_plane_reaches_a_pod_of_ipv6_by_its_nodes_agent_only() {
    let test = "a program of the control plane that calls a pod of IPv6";
    if ready_v6(test) {
        by_the_redirect_only(test, &V6);
    }
}

fn by_the_redirect_only(test: &str, addresses: &Addresses) {
    let Some([plane, node, pod]) = namespaces(test) else {
        return;
    };
    addresses.cable(&node, &plane, &pod);
    let Addresses { outer, inner } = *addresses;
    let asked: SocketAddr = pod.inside(|| target(&ip(inner[1]).to_string()));
    let beside: SocketAddr = node.inside(|| target(&ip(outer[0]).to_string()));
    let (captured, program) = (Cgroup::new(), std::env::current_exe().unwrap());
    // The server and its clients run in the control plane's namespace, and so does this thread.
    plane.inside(|| {
        let world = World::at(ip(outer[1]));
        let mut client = Client::start(Some(captured.path()));
        let mut stranger = Client::start(None);
        let mut neighbour = Client::start_in(&node, captured.path());
        unreachable(client.call(asked));

        let mut server = world.server(None, &addresses.flags(&captured));
        let _agent = world.agent_by(node.command(&program), &server, None, &[]);
        let seen = client.call(asked).unwrap();
        assert_eq!(seen.peer, asked);
        assert!(seen.local.ip().is_loopback(), "{seen:?}");
        // The pod sees the agent as its caller, at the node's address.
        assert_eq!(seen.caller.ip(), ip(inner[0]));
        let received = client.carry(asked, BULK).unwrap();
        assert!(received > BULK, "the target greets: {received}");
        let mut redirected = 2.0;
        if let IpAddr::V4(v4) = asked.ip() {
            let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), asked.port());
            assert_eq!(client.call_mapped(asked).unwrap().peer, mapped);
            redirected += 1.0;
        }
        // Calls without a rule go direct, and so do calls of the node, which has its own route.
        assert!(client.call(beside).unwrap().is_direct());
        assert!(neighbour.call(asked).unwrap().is_direct());
        unreachable(stranger.call(asked));
        server.metric_is(&calls("redirected"), redirected);
        let readyz = server.readyz();
        assert!(!readyz.contains(PART), "{readyz}");

        server.role.kill();
        unreachable(client.call(asked));
        assert!(client.call(beside).unwrap().is_direct());
        assert!(neighbour.call(asked).unwrap().is_direct());
    });
}

/// Processes of one control plane.
struct Running {
    client: Client,
    agent: Role,
    server: ServerProcess,
    _world: World,
    // Last: processes end before their cgroup is removed.
    _captured: Cgroup,
}

impl Running {
    /// Starts a server, a client that it captures, and an agent at the node.
    fn start(addresses: &Addresses, plane: &Namespace, node: &Namespace) -> Self {
        let (captured, program) = (Cgroup::new(), std::env::current_exe().unwrap());
        plane.inside(move || {
            let world = World::at(ip(addresses.outer[1]));
            let server = world.server(None, &addresses.flags(&captured));
            let agent = world.agent_by(node.command(&program), &server, None, &[]);
            Self {
                client: Client::start(Some(captured.path())),
                agent,
                server,
                _world: world,
                _captured: captured,
            }
        })
    }
}

/// Limit (redirect): Captured programs of two control planes with the same addresses | each reach their own pods
#[test]
fn two_control_planes_with_the_same_addresses_reach_their_own_pods() {
    each_reaches_its_own("two control planes with the same addresses", &V4);
}

/// Limit (redirect): Captured programs of two control planes with the same addresses
#[test]
fn two_control_planes_with_the_same_ipv6_addresses_reach_their_own_pods() {
    let test = "two control planes with the same IPv6 addresses";
    if ready_v6(test) {
        each_reaches_its_own(test, &V6);
    }
}

fn each_reaches_its_own(test: &str, addresses: &Addresses) {
    let Some([plane, node, pod, other_plane, other_node, other_pod]) = namespaces(test) else {
        return;
    };
    addresses.cable(&node, &plane, &pod);
    addresses.cable(&other_node, &other_plane, &other_pod);
    let [node_ip, pod_ip] = addresses.inner.map(ip);
    let mut one = Running::start(addresses, &plane, &node);
    let mut other = Running::start(addresses, &other_plane, &other_node);
    let asked = other_pod.inside(|| target(&pod_ip.to_string()));
    let reaches = |client: &mut Client| {
        let seen = client.call(asked).unwrap();
        assert_eq!(seen.peer, asked);
        assert_eq!(seen.caller.ip(), node_ip);
    };
    reaches(&mut other.client);
    // Nothing listens at that address of its own pod.
    let error = one.client.call(asked).unwrap_err();
    // The connection may be closed before the client calls `getpeername`.
    let is_over = error.contains("reset") || error.contains("not connected");
    assert!(is_over, "{error}");

    pod.inside(|| serve(TcpListener::bind(asked).unwrap()));
    reaches(&mut one.client);
    reaches(&mut other.client);
    // The other control plane is stopped, so `one` reaches its own pod.
    other.server.role.kill();
    other.agent.kill();
    unreachable(other.client.call(asked));
    reaches(&mut one.client);
}

/// As in a container, the mounted cgroup root is the cgroup of the process.
///
/// Limit (redirect): A cgroup namespace that shows a part of the host as its root
#[test]
fn a_server_in_its_own_cgroup_namespace_reports_that_it_captures_part_of_the_host() {
    if !ready("a server in a cgroup namespace of its own") {
        return;
    }
    let (cgroup, world) = (Cgroup::new(), World::new());
    let mounted = world.dir().join("cgroup");
    fs::create_dir(&mounted).unwrap();
    // A cgroup namespace is rooted at the cgroup of its first process.
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
