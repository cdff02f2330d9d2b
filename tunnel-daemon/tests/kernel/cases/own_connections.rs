//! Own connections of a captured server or agent: to name servers over TCP, and to a forward proxy.
//!
//! Each test uses its own network namespace: the port of name servers is free there, and loopback has additional addresses.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use adit_core::lane::Growth;

use super::exempt_processes::is_exempt;
use super::namespaces::namespaces;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::forward_proxy::ForwardProxy;
use crate::support::name_server::NameServer;
use crate::support::target::target;
use crate::support::world::{PROXY, World, calls, sample};

/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Address of the name server.
const NAMES: &str = "127.30.0.53";
/// The address that it returns for all names.
const KNOWN: Ipv4Addr = Ipv4Addr::new(127, 5, 0, 1);

/// Series for the agent's own connections to the server.
fn bytes_of(role: &str, direction: &str) -> String {
    let labels = r#"agent="kernel",destination_class="""#;
    format!(
        r#"adit_ebpf_bytes_total{{{labels},direction="{direction}",role="{role}",tenant="default"}}"#
    )
}

/// The server captures calls to the name server that it queries itself.
///
/// Limit (redirect): Own connections to name servers by TCP and to a forward proxy | bypass the redirect
#[test]
fn dns_queries_over_tcp_of_a_captured_server_bypass_its_own_redirect() {
    let Some([host]) = namespaces("a captured server that asks a name server by TCP") else {
        return;
    };
    let program = std::env::current_exe().unwrap();
    host.inside(|| {
        let api = target(&KNOWN.to_string());
        let names = NameServer::start(NAMES, KNOWN);
        let beside = target(NAMES);
        let world = World::new();
        let (servers, nodes) = (Cgroup::new(), Cgroup::new());
        let command = names.asked_by(&program, &world.dir().join("etc"));
        let flags = [
            format!("--allowed-destination={api}"),
            format!("--redirect={NAMES}"),
            servers.flag(),
        ];
        let server = world.server_by(command, Some(servers.path()), &flags);
        let service: SocketAddr = "198.51.100.1:443".parse().unwrap();
        let flag = format!("--redirect-apiserver={service}=api.test:{}", api.port());
        let _agent = world.agent_with(&server, Some(nodes.path()), &[&nodes.flag(), &flag]);
        let mut node = Client::start(Some(nodes.path()));
        assert!(!node.call(service).unwrap().is_direct());
        assert!(names.connections() > 0, "UDP was enough");
        // Connections to the name server, which counts them, and one to the destination.
        server.until("the server's calls are exempt, all of them", || {
            let own = names.connections() + 1;
            (server.metric(&calls("exempt")) == own as f64).then_some(())
        });
        assert_eq!(server.metric(&calls("redirected")), 0.0);
        assert!(!is_exempt(server.role.id()));
        // Calls of other processes in the cgroup are captured.
        let mut neighbour = Client::start(Some(servers.path()));
        assert!(!neighbour.call(beside).unwrap().is_direct());
        server.metric_is(&calls("redirected"), 1.0);
    });
}

/// As above, for an agent that resolves a target. A captured query would reach a listener that is no name server.
///
/// Limit (redirect): Own connections to name servers by TCP and to a forward proxy
#[test]
fn dns_queries_over_tcp_of_a_captured_agent_bypass_its_own_redirect() {
    let Some([host]) = namespaces("a captured agent that asks a name server by TCP") else {
        return;
    };
    let program = std::env::current_exe().unwrap();
    host.inside(|| {
        let (api, asked) = (target("127.0.0.1"), target(&KNOWN.to_string()));
        let names = NameServer::start(NAMES, KNOWN);
        let world = World::new();
        let nodes = Cgroup::new();
        let server = world.server(None, &[format!("--allowed-destination={api}")]);
        let command = names.asked_by(&program, &world.dir().join("etc"));
        let cgroup = nodes.flag();
        let flag = format!("--redirect-apiserver={}={api}", names.at);
        let flags = [cgroup.as_str(), &flag];
        let agent = world.agent_by(command, &server, Some(nodes.path()), &flags);
        let mut neighbour = Client::start(Some(nodes.path()));
        assert!(!neighbour.call(names.at).unwrap().is_direct());
        assert_eq!(names.connections(), 0, "it was captured");
        let head = connected(&world, &format!("target.test:{}", asked.port()));
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(names.connections() > 0, "UDP was enough");
        assert!(!is_exempt(agent.id()));
    });
}

/// The server's answer to a CONNECT request.
fn connected(world: &World, target: &str) -> String {
    let mut stream = UnixStream::connect(world.dir().join("c")).expect("the frontend listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("an answer");
        head.extend_from_slice(&byte);
    }
    String::from_utf8(head).expect("text")
}

/// Captured links and lanes would be tunnelled through themselves.
///
/// Limit (redirect): Own connections to name servers by TCP and to a forward proxy
#[test]
fn calls_of_a_captured_agent_to_its_forward_proxy_bypass_its_redirect() {
    let Some([host]) = namespaces("a captured agent behind a forward proxy") else {
        return;
    };
    // The agent bypasses its proxy for loopback addresses.
    let home = "10.80.0.1";
    host.run(&format!("ip address add {home}/32 dev lo"));
    let program = std::env::current_exe().unwrap();
    host.inside(|| {
        let api = target("127.0.0.1");
        let world = World::at(home.parse().unwrap());
        let nodes = Cgroup::new();
        let account = "--account=on";
        let flags = [format!("--allowed-destination={api}"), account.to_owned()];
        let server = world.server(None, &flags);
        let proxy = ForwardProxy::start("127.31.0.1", server.agents);
        let mut command = Command::new(&program);
        command.env(PROXY, format!("http://{}", proxy.at));
        let cgroup = nodes.flag();
        let flag = format!("--redirect-apiserver={}={api}", proxy.at);
        let flags = [cgroup.as_str(), &flag, account];
        let (agent, health) = world.probed_agent_by(command, &server, Some(nodes.path()), &flags);
        let mut client = Client::start(Some(nodes.path()));
        let lanes = || server.lanes_opened();
        // The first lanes may have been opened before the agent's programs were attached.
        server.until("a lane beyond the first ones", || {
            let seen = client.call(proxy.at).unwrap();
            assert!(!seen.is_direct(), "{seen:?}");
            (lanes() > Growth::WARM_MAX as f64).then_some(())
        });
        // The link uses the proxy, too: there is no other route.
        let opened = lanes();
        assert!(proxy.tunnels() as f64 > opened, "{opened}");
        assert!(!is_exempt(agent.id()));
        // Both ends account for links and lanes behind a proxy. The agent counts sent bytes of open connections, and the
        // server counts all bytes at their end.
        server.until("bytes of links and lanes at the agent", || {
            let sent = |role| sample(health, &bytes_of(role, "sent")) > Some(0.0);
            (sent("link") && sent("lane")).then_some(())
        });
        drop(agent);
        server.until("bytes of links and lanes at the server", || {
            let carried = |role| {
                ["sent", "received"]
                    .iter()
                    .all(|way| sample(server.health, &bytes_of(role, way)) > Some(0.0))
            };
            (carried("link") && carried("lane")).then_some(())
        });
    });
}
