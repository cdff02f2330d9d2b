//! The redirect with a server, an agent and a plain client, each a process in its own cgroup.
//!
//! Addresses of 198.51.100.0/24 and 2001:db8::/32 are not routed. A second redirect, attached to the agent's cgroup, leads
//! its calls to a target on loopback. So a client that reaches them came through the tunnel.

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use adit_redirect::object::OBJECT;
use adit_redirect::pins;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};

use crate::support::bpffs::Bpffs;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::{ready, ready_v6, skip};
use crate::support::role::Role;
use crate::support::target::target;
use crate::support::world::{ServerProcess, World, calls};

pub(super) struct Scene {
    pub(super) server: ServerProcess,
    _agent: Role,
    _behind: Redirect,
    _world: World,
    // Last: processes end before their cgroups are removed.
    _agents: Cgroup,
    pub(super) clients: Cgroup,
}

/// Redirects the agent's calls to targets on loopback.
fn behind(agents: &Path, v4: SocketAddr, v6: Option<SocketAddr>) -> Redirect {
    let redirect = Redirect::attach(OBJECT, agents).unwrap();
    let here = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    redirect.set_listener(0, &here, Some(v4), v6).unwrap();
    let rules = ["198.51.100.0/24", "2001:db8::/32"].map(|network| RedirectRule {
        network: network.parse().unwrap(),
        port: None,
        action: Action::Redirect(0),
    });
    redirect.set_rules(&rules).unwrap();
    redirect
}

pub(super) fn scene(v4: SocketAddr, v6: Option<SocketAddr>, flags: &[&str]) -> Scene {
    let (agents, clients) = (Cgroup::new(), Cgroup::new());
    let world = World::new();
    let behind = behind(agents.path(), v4, v6);
    let mut all: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    all.push(clients.flag());
    let server = world.server(None, &all);
    let agent = world.agent(&server, Some(agents.path()));
    Scene {
        server,
        _agent: agent,
        _behind: behind,
        _world: world,
        _agents: agents,
        clients,
    }
}

/// Limit (redirect): A captured program without any settings | reaches what the agent reaches, and sees the address it
/// dialled
#[test]
fn a_plain_program_reaches_the_agents_targets_and_sees_the_address_it_dialled() {
    if !ready("the redirect") {
        return;
    }
    let scene = scene(target("127.0.0.1"), None, &["--redirect=198.51.100.0/24"]);
    let mut client = Client::start(Some(scene.clients.path()));
    let asked: SocketAddr = "198.51.100.7:9090".parse().unwrap();
    client.is_captured(asked);
    // An IPv6 socket that connects to the IPv4-mapped address.
    let seen = client.call_mapped(asked).unwrap();
    assert_eq!(seen.peer, "[::ffff:198.51.100.7]:9090".parse().unwrap());
    scene.server.metric_is(&calls("redirected"), 2.0);
    let active = scene.server.metric("adit_redirect_state{state=\"active\"}");
    assert_eq!(active, 1.0);
    let readyz = scene.server.readyz();
    assert!(readyz.contains("[+]redirect active"), "{readyz}");
}

/// Limit (redirect): A captured program without any settings
#[test]
fn a_plain_program_reaches_the_agents_ipv6_targets() {
    if !ready_v6("the redirect of IPv6") {
        return;
    }
    let rule = "--redirect=[2001:db8::/32]:443";
    let scene = scene(target("127.0.0.1"), Some(target("::1")), &[rule]);
    let mut client = Client::start(Some(scene.clients.path()));
    let asked: SocketAddr = "[2001:db8::7]:443".parse().unwrap();
    client.is_captured(asked);
    // No rule covers another port.
    assert!(client.call("[2001:db8::7]:80".parse().unwrap()).is_err());
}

/// Limit (redirect): Exclusions, other ports and other cgroups | left alone
#[test]
fn exclusions_other_ports_and_other_cgroups_are_left_alone() {
    if !ready("exclusions") {
        return;
    }
    let (inside, excluded) = (target("127.1.0.1"), target("127.1.2.1"));
    let captured = format!("--redirect=127.1.0.0/16:{}", inside.port());
    let other = format!("--redirect=127.1.2.0/24:{}", excluded.port());
    let exclude = format!("--redirect-exclude=127.1.2.1:{}", excluded.port());
    let scene = scene(target("127.0.0.1"), None, &[&captured, &other, &exclude]);
    let mut client = Client::start(Some(scene.clients.path()));
    assert!(!client.call(inside).unwrap().is_direct());
    assert!(client.call(excluded).unwrap().is_direct());
    let other_port = target("127.1.0.2");
    assert!(client.call(other_port).unwrap().is_direct());
    let mut outside = Client::start(None);
    assert!(outside.call(inside).unwrap().is_direct());
}

/// Limit (redirect): Connections to the listener that are not redirected
#[test]
fn a_direct_connection_to_the_listener_is_closed_and_counted() {
    if ready("direct connections") {
        direct("--redirect=198.51.100.0/24", IpAddr::is_ipv4);
    }
}

/// Calls the listener of one family at its own address. `rule` is a rule of that family.
pub(super) fn direct(rule: &str, is_of_family: impl Fn(&IpAddr) -> bool) {
    let scene = scene(target("127.0.0.1"), None, &[rule]);
    let refused = "adit_redirect_refused_total{reason=\"unknown_origin\"}";
    assert_eq!(scene.server.metric(refused), 0.0);
    let mut listeners = scene.server.listeners.iter();
    let listener = *listeners.find(|at| is_of_family(&at.ip())).unwrap();
    resets(listener);
    // A captured process that calls the listener fails, too.
    let mut client = Client::start(Some(scene.clients.path()));
    assert!(client.call(listener).is_err());
    scene.server.metric_is(refused, 2.0);
}

/// Asserts that `listener` sends no byte and resets the connection.
pub(super) fn resets(listener: SocketAddr) {
    // The connection may be reset before `connect` returns.
    let outcome = TcpStream::connect(listener).and_then(|mut stream| {
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.read(&mut [0; 1])
    });
    let kind = outcome.as_ref().map_err(std::io::Error::kind);
    assert_eq!(kind, Err(ErrorKind::ConnectionReset));
}

/// Limit (redirect): New connections after `kill -9` of the server | direct within 1 s
#[test]
fn a_daemon_that_is_killed_lets_new_connections_go_direct_within_a_second() {
    if ready("kill -9") {
        killed(target("127.3.0.1"));
    }
}

/// Kills the server that captures calls to `target`.
pub(super) fn killed(target: SocketAddr) {
    let rule = format!("--redirect={target}");
    let mut scene = scene(target, None, &[&rule]);
    let mut client = Client::start(Some(scene.clients.path()));
    client.is_captured(target);
    scene.server.role.kill();
    client.direct_within_a_second(target);
}

/// Limit (redirect): Server and agent among the captured processes
#[test]
fn an_agent_among_the_captured_processes_makes_no_loop() {
    if ready("loops") {
        no_loop("127.0.0.1", "127.4.0.1", "127.0.0.0/8");
    }
}

/// Captures server, agent and client. The network `all` contains the target at `at` and the server at `home`.
pub(super) fn no_loop(home: &str, at: &str, all: &str) {
    let target = target(at);
    let clients = Cgroup::new();
    let world = World::at(home.parse().unwrap());
    let flags = [
        // The agent's destination, and all of loopback, which contains the agent's connection to the server.
        format!("--redirect={target}"),
        format!("--redirect={all}"),
        clients.flag(),
    ];
    let server = world.server(Some(clients.path()), &flags);
    let agent = world.agent(&server, Some(clients.path()));
    let mut client = Client::start(Some(clients.path()));
    for _ in 0..5 {
        let seen = client.call(target).unwrap();
        assert!(!seen.is_direct(), "{seen:?}");
    }
    // One tunnel per call: no connection was redirected twice.
    server.metric_is(&calls("redirected"), 5.0);
    let opened: f64 = ["lane", "link", "raw-lane"]
        .iter()
        .map(|path| server.metric(&format!("adit_tunnels_opened_total{{path=\"{path}\"}}")))
        .sum();
    assert_eq!(opened, 5.0);
    drop((agent, server, client));
}

/// Limit (redirect): `closed` without a server | calls are denied until a server with `open` starts
#[test]
fn closed_on_failure_denies_calls_until_a_server_with_open_starts() {
    let test = "closing on failure";
    if ready(test) {
        closed(test, "127.12.0.1");
    }
}

/// Kills servers that deny calls to a target at this address, until a server with `open` replaces them.
pub(super) fn closed(test: &str, address: &str) {
    let _mounted = match Bpffs::somewhere() {
        Ok(mounted) => mounted,
        Err(why) => return skip(test, &why),
    };
    let target = target(address);
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = |mode: &str| {
        [
            format!("--redirect={target}"),
            format!("--redirect-on-failure={mode}"),
            clients.flag(),
        ]
    };
    let mut client = Client::start(Some(clients.path()));
    let denied = |client: &mut Client| client.fails(target, "not permitted");
    for round in 0..2 {
        let mut server = world.server(None, &flags("closed"));
        let agent = world.agent(&server, None);
        let seen = client.call(target).unwrap();
        assert!(!seen.is_direct(), "{round}: {seen:?}\n{}", server.readyz());
        server.role.kill();
        drop(agent);
        for _ in 0..3 {
            denied(&mut client);
        }
        // A process that takes over the server's port receives no call.
        let same_family = |at: &&SocketAddr| at.is_ipv6() == target.is_ipv6();
        let place = server.listeners.iter().find(same_family).unwrap();
        let _stranger = std::net::TcpListener::bind(place).unwrap();
        denied(&mut client);
        // Processes outside of the cgroup are left alone.
        assert!(Client::start(None).call(target).unwrap().is_direct());
    }
    let mut server = world.server(None, &flags("open"));
    let agent = world.agent(&server, None);
    assert!(!client.call(target).unwrap().is_direct());
    server.role.kill();
    drop(agent);
    client.direct_within_a_second(target);
}

/// A recreated cgroup of the same name gets another folder, so the old folder would stay forever.
#[test]
fn pins_of_a_removed_cgroup_are_deleted() {
    let Some(_mounted) = Bpffs::ready("pins of a cgroup that is gone") else {
        return;
    };
    let world = World::new();
    let flags = |cgroup: &Cgroup| {
        [
            "--redirect=198.51.100.0/24".to_owned(),
            "--redirect-on-failure=closed".to_owned(),
            cgroup.flag(),
        ]
    };
    let (gone, other) = (Cgroup::new(), Cgroup::new());
    let folders = [&gone, &other].map(|cgroup| pins::folder(cgroup.path()).unwrap());
    let [of_gone, of_other] = &folders;
    let mut server = world.server(None, &flags(&gone));
    server.role.kill();
    assert!(of_gone.exists() && !pins::is_over(of_gone));
    drop(gone);
    // The kernel detaches the programs with a delay.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !pins::is_over(of_gone) {
        assert!(Instant::now() < deadline, "still attached");
        std::thread::yield_now();
    }
    let mut server = world.server(None, &flags(&other));
    server.role.kill();
    assert!(!of_gone.exists() && of_other.exists());
    let open = flags(&other).map(|flag| flag.replace("closed", "open"));
    let _server = world.server(None, &open);
    assert!(!of_other.exists());
}

/// `end` removes or recreates the captured cgroup.
fn its_end_is_said(end: impl FnOnce(Cgroup) -> Option<Cgroup>) {
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = ["--redirect=198.51.100.0/24".to_owned(), clients.flag()];
    let server = world.server(None, &flags);
    let _agent = world.agent(&server, None);
    server.metric_is("adit_redirect_state{state=\"active\"}", 1.0);
    let _another = end(clients);
    server.metric_is("adit_redirect_state{state=\"missing\"}", 1.0);
    let readyz = server.readyz();
    assert!(readyz.contains("was removed or recreated"), "{readyz}");
}

/// Limit (redirect): Missing rights or cgroups of the redirect
#[test]
fn a_removed_cgroup_is_reported() {
    if ready("a cgroup that is removed") {
        its_end_is_said(|clients| {
            drop(clients);
            None
        });
    }
}

/// This happens when a service restarts: its new cgroup has the same name and no programs.
///
/// Limit (redirect): Missing rights or cgroups of the redirect
#[test]
fn a_recreated_cgroup_is_reported() {
    if ready("a cgroup that is recreated") {
        its_end_is_said(|clients| {
            fs::remove_dir(clients.path()).unwrap();
            fs::create_dir(clients.path()).unwrap();
            Some(clients)
        });
    }
}

#[test]
fn a_target_that_refuses_resets_the_client() {
    if !ready("refusals") {
        return;
    }
    let nobody = std::net::TcpListener::bind("127.10.0.1:0").unwrap();
    let closed = nobody.local_addr().unwrap();
    drop(nobody);
    let rule = format!("--redirect={closed}");
    let scene = scene(closed, None, &[&rule]);
    let mut client = Client::start(Some(scene.clients.path()));
    // The listener accepts first, so the client sees a reset instead of ECONNREFUSED.
    client.fails(closed, "reset");
}

/// Covers framed lanes, and raw lanes whose bytes relays move.
#[test]
fn a_target_reset_reaches_a_captured_client_as_rst_and_not_as_fin() {
    if !ready("a target that breaks off") {
        return;
    }
    let listener = std::net::TcpListener::bind("127.13.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // Sends half an answer. A reset discards bytes in transit, so the target waits until the client has received
            // them.
            writeln!(stream, "{}", stream.peer_addr().unwrap()).unwrap();
            let mut word = [0; 16];
            stream.read_exact(&mut word).unwrap();
            let linger = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
            linger.unwrap();
        }
    });
    for lanes in ["--lane-security=tls", "--lane-security=plaintext"] {
        let (clients, world) = (Cgroup::new(), World::new());
        let flags = [
            format!("--redirect={target}"),
            clients.flag(),
            lanes.to_owned(),
        ];
        let server = world.server(None, &flags);
        let _agent = world.agent_with(&server, None, &[lanes]);
        let mut client = Client::start(Some(clients.path()));
        for _call in 0..3 {
            let error = client.call(target).unwrap_err();
            assert!(error.contains("reset"), "{lanes}: {error}");
        }
        let closed = "adit_tunnels_closed_total{reason=\"target_reset\"}";
        server.metric_is(closed, 3.0);
    }
}

#[test]
fn the_relay_moves_a_captured_connection_on_plaintext_raw_lanes() {
    if !ready("captured connections on plain lanes") {
        return;
    }
    let (clients, world) = (Cgroup::new(), World::new());
    let target = target("127.11.0.1");
    let flags = [
        format!("--redirect={target}"),
        clients.flag(),
        "--lane-security=plaintext".to_owned(),
    ];
    let server = world.server(None, &flags);
    let _agent = world.agent_with(&server, None, &["--lane-security=plaintext"]);
    let mut client = Client::start(Some(clients.path()));
    let raw = "adit_tunnels_opened_total{path=\"raw-lane\"}";
    // Lanes open shortly after the link.
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.metric(raw) == 0.0 {
        assert!(!client.call(target).unwrap().is_direct());
        assert!(Instant::now() < deadline, "no tunnel without frames");
    }
    drop(client);
}

/// Limit (redirect): Missing rights or cgroups of the redirect
#[test]
fn a_missing_cgroup_is_reported_and_the_server_serves() {
    // This needs no privileges.
    let world = World::new();
    let flags = [
        "--redirect=198.51.100.0/24".to_owned(),
        "--redirect-cgroup=/nowhere/at/all".to_owned(),
    ];
    let server = world.server(None, &flags);
    let _agent = world.agent(&server, None);
    assert_eq!(server.metric("adit_redirect_state{state=\"missing\"}"), 1.0);
    assert!(
        server.readyz().contains("/nowhere/at/all"),
        "{}",
        server.readyz()
    );
    assert!(server.listeners.is_empty());
}
