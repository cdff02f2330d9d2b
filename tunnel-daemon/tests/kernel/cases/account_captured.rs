//! Accounting of captured clients: kernel and relay engines count the same bytes.

use std::net::SocketAddr;

use rand::{Rng as _, SeedableRng as _};

use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::daemon::{Daemon, User};
use crate::support::privilege::{ready, ready_v6};
use crate::support::target::target;
use crate::support::world::World;

use super::privileges::{account, linked_agent};

const CONNECTIONS: u32 = 12;

/// Bytes to the target and to the client, as the kernel counts them at the daemon's client sockets. They cover clients of
/// agent `kernel` with destinations of `class`.
fn accounted(daemon: &Daemon, class: &str) -> (f64, f64) {
    let agent = format!("agent=\"kernel\",destination_class=\"{class}\"");
    let bytes = |direction: &str| {
        let labels =
            format!("{agent},direction=\"{direction}\",role=\"client\",tenant=\"default\"");
        daemon.metric(&format!("adit_ebpf_bytes_total{{{labels}}}"))
    };
    (bytes("received"), bytes("sent"))
}

/// The same bytes as the engines count them.
fn engine(daemon: &Daemon, family: &str) -> (f64, f64) {
    let bytes = |direction: &str| daemon.metric(&format!("{family}{{direction=\"{direction}\"}}"));
    (bytes("to_target"), bytes("to_client"))
}

/// Opens connections with random sizes and returns the bytes in each direction.
fn drive(client: &mut Client, at: SocketAddr) -> (f64, f64) {
    let (mut there, mut back) = (0.0, 0.0);
    let mut random = rand::rngs::StdRng::seed_from_u64(32);
    for _ in 0..CONNECTIONS {
        let bytes: u32 = random.random_range(0..400_000);
        let received = client.carry(at, bytes as usize).unwrap();
        there += f64::from(bytes);
        back += f64::from(u32::try_from(received).unwrap());
    }
    (there, back)
}

fn equal(daemon: &Daemon, class: &str, family: &str, moved: (f64, f64)) {
    daemon.until("ends of all connections", |daemon| {
        daemon.metric(&account(class)) == f64::from(CONNECTIONS) && engine(daemon, family) == moved
    });
    assert_eq!(accounted(daemon, class), moved);
    assert!(moved.1 > moved.0, "the target greets: {moved:?}");
}

fn captured_by_the_server(target: SocketAddr, lanes: &str) {
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = [
        format!("--redirect={target}"),
        clients.flag(),
        "--account=on".to_owned(),
        lanes.to_owned(),
    ];
    let args = world.server_args(&flags);
    let server = Daemon::start(User::Root, "server", &args, world.dir());
    let _agent = linked_agent(&world, User::Root, &server, &[lanes.to_owned()]);
    let mut client = Client::start(Some(clients.path()));
    let moved = drive(&mut client, target);
    // The destination class is the rule that captured the connections.
    let class = target.to_string();
    equal(&server, &class, "adit_tunnel_bytes_total", moved);
}

#[test]
fn kernel_and_engine_byte_counts_agree_for_captured_clients() {
    if ready("accounting for captured clients") {
        captured_by_the_server(target("127.23.0.1"), "--lane-security=tls");
    }
}

#[test]
fn kernel_and_relay_byte_counts_agree_for_captured_clients() {
    if ready("accounting for captured clients on plain lanes") {
        captured_by_the_server(target("127.23.0.1"), "--lane-security=plaintext");
    }
}

#[test]
fn kernel_and_engine_byte_counts_agree_for_captured_ipv6_clients() {
    if ready_v6("accounting for captured clients of IPv6") {
        captured_by_the_server(target("::1"), "--lane-security=tls");
    }
}

#[test]
fn kernel_and_relay_byte_counts_agree_for_captured_ipv6_clients() {
    if ready_v6("accounting for captured clients of IPv6 on plain lanes") {
        captured_by_the_server(target("::1"), "--lane-security=plaintext");
    }
}

/// Limit (accounting): Connections from node to control plane and of gRPC clients | the former are counted by agent and
/// rule, the latter under a role of their own
#[test]
fn byte_counts_agree_for_clients_captured_by_an_agent() {
    if ready("accounting for clients captured by an agent") {
        captured_by_the_agent(target("127.24.0.1"), "198.51.100.2:443".parse().unwrap());
    }
}

#[test]
fn byte_counts_agree_for_ipv6_clients_captured_by_an_agent() {
    if ready_v6("accounting for clients of IPv6 captured by an agent") {
        captured_by_the_agent(target("::1"), "[2001:db8::2]:443".parse().unwrap());
    }
}

/// Limit (accounting): Connections from node to control plane and of gRPC clients
#[test]
fn byte_counts_agree_for_clients_of_an_agents_listener() {
    if ready("accounting for clients of an agent's own listener") {
        at_the_agents_own_listener(target("127.24.0.1"), "127.0.0.1");
    }
}

/// Limit (accounting): Connections from node to control plane and of gRPC clients
#[test]
fn byte_counts_agree_for_clients_of_an_agents_ipv6_listener() {
    if ready_v6("accounting for clients of an agent's own listener of IPv6") {
        at_the_agents_own_listener(target("::1"), "::1");
    }
}

fn captured_by_the_agent(api: SocketAddr, service: SocketAddr) {
    let nodes = Cgroup::new();
    let flags = [
        nodes.flag(),
        format!("--redirect-apiserver={service}={api}"),
    ];
    by_the_agent(api, &flags, |_agent| {
        (Client::start(Some(nodes.path())), service)
    });
}

/// `home` is the address on which the agent listens.
fn at_the_agents_own_listener(api: SocketAddr, home: &str) {
    let flags = [
        format!("--target=0:{api}"),
        format!("--bind-address={home}"),
    ];
    by_the_agent(api, &flags, |agent| {
        let listener = agent.address_of("listening for the control plane", "address");
        (Client::start(None), listener)
    });
}

/// Starts an agent with `flags` that leads to `api`. `connecting` returns a client and the address to which it connects.
fn by_the_agent(
    api: SocketAddr,
    flags: &[String],
    connecting: impl FnOnce(&Daemon) -> (Client, SocketAddr),
) {
    let (world, account) = (World::new(), "--account=on".to_owned());
    let of_server = [format!("--allowed-destination={api}"), account.clone()];
    let args = world.server_args(&of_server);
    let server = Daemon::start(User::Root, "server", &args, world.dir());
    let of_agent = [flags, &[account]].concat();
    let agent = linked_agent(&world, User::Root, &server, &of_agent);
    let (mut client, at) = connecting(&agent);
    let moved = drive(&mut client, at);
    equal(
        &agent,
        &api.to_string(),
        "adit_node_tunnel_bytes_total",
        moved,
    );
    // The server accounts its connections to the destination under the requesting agent and the allowing entry.
    let entry = match api {
        SocketAddr::V4(at) => format!("{}/32:{}", at.ip(), at.port()),
        SocketAddr::V6(at) => format!("[{}/128]:{}", at.ip(), at.port()),
    };
    server.until("they are counted at the server", |server| {
        let bytes = |direction: &str| {
            server.metric(&format!(
                "adit_ebpf_bytes_total{{agent=\"kernel\",destination_class=\"{entry}\",direction=\"{direction}\",role=\"target\",tenant=\"default\"}}"
            ))
        };
        (bytes("sent"), bytes("received")) == moved
    });
}
