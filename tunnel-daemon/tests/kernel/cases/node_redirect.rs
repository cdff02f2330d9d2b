//! The agent redirects calls of a node's processes to Service addresses of the control plane.

use std::net::SocketAddr;

use adit_core::lane::Growth;

use super::exempt_processes::is_exempt;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::ready;
use crate::support::target::target;
use crate::support::world::{World, calls, nodes_of};

/// Limit (redirect): A program on a node that calls a Service address | reaches the control plane, also with the agent
/// among the captured
#[test]
fn a_plain_program_reaches_the_control_plane_at_the_service_address() {
    if !ready("the redirect to the control plane") {
        return;
    }
    let api = target("127.0.0.1");
    let (world, server, nodes) = nodes_of(api);
    let service: SocketAddr = "198.51.100.1:443".parse().unwrap();
    let flag = format!("--redirect-apiserver={service}={api}");
    // The agent itself is in the captured cgroup.
    let _agent = world.agent_with(&server, Some(nodes.path()), &[&nodes.flag(), &flag]);
    let mut client = Client::start(Some(nodes.path()));
    for _ in 0..3 {
        client.is_captured(service);
    }
    let seen = client.call_mapped(service).unwrap();
    assert_eq!(seen.peer, "[::ffff:198.51.100.1]:443".parse().unwrap());
    server.metric_is("adit_node_tunnels", 0.0);
    // Another port and processes outside of the cgroup are left alone.
    let other = target("127.0.0.1");
    assert!(client.call(other).unwrap().is_direct());
    let mut outside = Client::start(None);
    assert!(outside.call(api).unwrap().is_direct());
}

/// The agent's own connections are never captured. Otherwise its link would be tunnelled through itself.
///
/// Limit (redirect): A program on a node that calls a Service address
#[test]
fn an_agent_that_captures_its_own_servers_address_reaches_it() {
    if !ready("an agent among the captured") {
        return;
    }
    let api = target("127.0.0.1");
    let (world, server, nodes) = nodes_of(api);
    let flag = format!("--redirect-apiserver={}={api}", server.agents);
    let agent = world.agent_with(&server, Some(nodes.path()), &[&nodes.flag(), &flag]);
    let mut client = Client::start(Some(nodes.path()));
    // The link and the first lanes may have been opened before the programs were attached. Replacements for lanes in use are
    // opened after that.
    server.until("a lane beyond the first ones", || {
        let seen = client.call(server.agents).unwrap();
        assert!(!seen.is_direct(), "{seen:?}");
        (server.lanes_opened() > Growth::WARM_MAX as f64).then_some(())
    });
    // The agent's sockets are exempt, not its process.
    assert!(!is_exempt(agent.id()));
}

/// Limit (redirect): A node's connections without its agent | go direct within 1 s
#[test]
fn connections_of_a_node_go_direct_without_its_agent() {
    if !ready("an agent that is killed") {
        return;
    }
    let api = target("127.0.0.1");
    let service = target("127.4.0.1");
    let (world, server, nodes) = nodes_of(api);
    let flag = format!("--redirect-apiserver={service}={api}");
    let mut agent = world.agent_with(&server, None, &[&nodes.flag(), &flag]);
    let mut client = Client::start(Some(nodes.path()));
    assert!(!client.call(service).unwrap().is_direct());
    agent.kill();
    client.direct_within_a_second(service);
}

/// The server may capture calls to a destination that it also dials for an agent.
///
/// Limit (redirect): Server and agent among the captured processes | no loop
#[test]
fn own_dials_of_a_captured_server_are_left_alone() {
    if !ready("a captured server") {
        return;
    }
    let api = target("127.5.0.1");
    let world = World::new();
    let (servers, nodes) = (Cgroup::new(), Cgroup::new());
    let server = world.server(
        Some(servers.path()),
        &[
            format!("--allowed-destination={api}"),
            format!("--redirect={api}"),
            servers.flag(),
        ],
    );
    let service: SocketAddr = "198.51.100.1:443".parse().unwrap();
    let flag = format!("--redirect-apiserver={service}={api}");
    let _agent = world.agent_with(&server, Some(nodes.path()), &[&nodes.flag(), &flag]);
    let mut node = Client::start(Some(nodes.path()));
    assert!(!node.call(service).unwrap().is_direct());
    // Other processes of its cgroup are captured.
    let mut neighbour = Client::start(Some(servers.path()));
    assert!(!neighbour.call(api).unwrap().is_direct());
    // The programs saw the server's own call, and left it alone.
    server.metric_is(&calls("exempt"), 1.0);
    server.metric_is(&calls("redirected"), 1.0);
    // The server's socket is exempt, not its process.
    assert!(!is_exempt(server.role.id()));
}
