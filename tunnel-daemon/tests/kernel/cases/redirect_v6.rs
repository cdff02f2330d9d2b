//! The cases of `redirect`, `node_redirect` and `namespaces` over IPv6.
//!
//! As in those modules, 2001:db8::/32 is not routed. The machine's only IPv6 address is loopback.

use std::net::{IpAddr, SocketAddr};

use super::namespaces::{CAPTURED, closed_until_captured, flag, namespaces, until_captured};
use super::redirect::{closed, direct, killed, no_loop, scene};
use crate::support::client::Client;
use crate::support::privilege::{ready, ready_v6};
use crate::support::target::target;
use crate::support::world::nodes_of;

/// Limit (redirect): A program on a node that calls a Service address
#[test]
fn a_plain_program_reaches_the_control_plane_at_an_ipv6_service_address() {
    if !ready_v6("the redirect to the control plane over IPv6") {
        return;
    }
    let (api, neighbour) = (target("::1"), target("::1"));
    let (world, server, nodes) = nodes_of(api);
    let service: SocketAddr = "[2001:db8::1]:443".parse().unwrap();
    let nowhere = format!("--redirect-apiserver={service}={api}");
    let captured = nodes.flag();
    // A Service address at which another program listens, too.
    let taken = format!("--redirect-apiserver={neighbour}={api}");
    let flags = [captured.as_str(), &nowhere, &taken];
    let mut agent = world.agent_with(&server, Some(nodes.path()), &flags);
    let mut client = Client::start(Some(nodes.path()));
    for service in [service, neighbour] {
        for _ in 0..3 {
            client.is_captured(service);
        }
    }
    // Another port and processes outside of the cgroup are left alone.
    assert!(client.call(target("::1")).unwrap().is_direct());
    assert!(client.call("[2001:db8::1]:80".parse().unwrap()).is_err());
    let mut outside = Client::start(None);
    assert!(outside.call(neighbour).unwrap().is_direct());
    agent.kill();
    client.direct_within_a_second(neighbour);
}

/// Limit (redirect): A program on a node that calls a Service address
#[test]
fn an_ipv4_mapped_service_address_is_treated_as_ipv4() {
    if !ready("services written as mapped IPv4") {
        return;
    }
    let api = target("127.0.0.1");
    let (world, server, nodes) = nodes_of(api);
    let flag = format!(
        "--redirect-apiserver=[::ffff:198.51.100.1]:443=[::ffff:127.0.0.1]:{}",
        api.port()
    );
    let _agent = world.agent_with(&server, Some(nodes.path()), &[&nodes.flag(), &flag]);
    let mut client = Client::start(Some(nodes.path()));
    let service: SocketAddr = "198.51.100.1:443".parse().unwrap();
    assert_eq!(client.call(service).unwrap().peer, service);
    let seen = client.call_mapped(service).unwrap();
    assert_eq!(seen.peer, "[::ffff:198.51.100.1]:443".parse().unwrap());
}

/// Limit (redirect): New connections after `kill -9` of the server
#[test]
fn a_daemon_that_is_killed_lets_new_ipv6_connections_go_direct_within_a_second() {
    if ready_v6("kill -9 and IPv6") {
        killed(target("::1"));
    }
}

/// Limit (redirect): `closed` without a server
#[test]
fn closed_on_failure_denies_ipv6_calls_until_a_server_with_open_starts() {
    let test = "closing on failure over IPv6";
    if ready_v6(test) {
        closed(test, "::1");
    }
}

/// Limit (redirect): A call in a namespace that has no listener yet, with `closed`
#[test]
fn closed_on_failure_denies_ipv6_in_a_namespace_until_it_has_a_listener() {
    let test = "closing in other namespaces over IPv6";
    if ready_v6(test) {
        let rule = "--redirect=[2001:db8::/32]:443";
        let asked = "[2001:db8::7]:443".parse().unwrap();
        closed_until_captured(test, rule, asked, Some(target("::1")));
    }
}

/// This happens when IPv6 is enabled after IPv4, or the helper looks between the two.
#[test]
fn a_namespace_that_gets_ipv6_after_its_listener_is_captured_over_ipv6() {
    let test = "IPv6 that comes later than a listener";
    if !ready_v6(test) {
        return;
    }
    let Some([namespace]) = namespaces(test) else {
        return;
    };
    namespace.run("ip address del ::1/128 dev lo");
    let flags = [
        "--redirect=198.51.100.0/24",
        "--redirect=[2001:db8::/32]:443",
        &flag(&namespace),
    ];
    let scene = scene(target("127.0.0.1"), Some(target("::1")), &flags);
    assert_eq!(scene.server.metric(CAPTURED), 1.0);
    let [v4, v6] = ["198.51.100.7:9090", "[2001:db8::7]:443"]
        .map(|asked| asked.parse::<SocketAddr>().expect("an address"));
    let mut client = Client::start_in(&namespace, scene.clients.path());
    let seen = client.call(v4).expect("captured");
    assert!(!seen.is_direct(), "{seen:?}");
    assert!(client.call(v6).is_err());
    namespace.run("ip address add ::1/128 dev lo");
    for error in until_captured(&mut client, &scene, v6) {
        // No route yet, or a route without a source address.
        let is_of_host = error.contains("unreachable") || error.contains("Cannot assign");
        assert!(is_of_host, "{error}");
    }
    // The IPv4 listener still works.
    let seen = client.call(v4).expect("captured");
    assert!(!seen.is_direct(), "{seen:?}");
    assert_eq!(scene.server.metric(CAPTURED), 1.0);
}

/// Limit (redirect): Connections to the listener that are not redirected
#[test]
fn a_direct_connection_to_the_ipv6_listener_is_closed_and_counted() {
    if ready_v6("direct connections over IPv6") {
        direct("--redirect=[2001:db8::/32]:443", IpAddr::is_ipv6);
    }
}

/// Limit (redirect): Server and agent among the captured processes
#[test]
fn an_agent_among_processes_captured_on_ipv6_loopback_makes_no_loop() {
    if ready_v6("loops over IPv6") {
        no_loop("::1", "::1", "::1/128");
    }
}
