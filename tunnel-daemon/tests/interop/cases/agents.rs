//! Agents that drain, stop, reconnect, share an id, or connect to several servers.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Signal;

use crate::support::certs::Certs;
use crate::support::combo::{Combo, Maker};
use crate::support::go::Release;
use crate::support::peer::Peer;
use crate::support::stack::{Agent, Server, Stack};
use crate::support::wait::{poll, secs, until};

/// Upstream (choice): A draining agent takes new tunnels when it is the only one.
fn drained_only_agent_still_takes_new_tunnels(combo: Combo) {
    let stack = Stack::start(combo);
    stack.agents[0].drain();
    stack.assert_serves();
    stack.assert_serves();
    let status = stack.agents[0].ready_status();
    assert_eq!(status, 200, "draining does not end readiness");
}
rows!(drained_only_agent_still_takes_new_tunnels: both);

/// Upstream (agents): When an agent stops, the next request on an open connection fails at once.
fn second_request_fails_promptly_once_the_agent_is_gone(combo: Combo) {
    let mut stack = Stack::start(combo);
    let mut client = stack.begin("get http requests=2 pause=true");
    client.process().named_event("paused", secs(10));
    stack.agents[0].process.kill();
    stack.await_backends(0);
    client.process().line("go on");
    let report = client.report().bad();
    let took = report.number("last_request_ms");
    assert!(took < 3_000.0, "the second request took {took} ms to fail");
}
rows!(second_request_fails_promptly_once_the_agent_is_gone: both);

/// Upstream (agents): After an agent restarts with another id, new clients are served.
fn requests_work_again_after_an_agent_restart(combo: Combo) {
    let mut stack = Stack::start(combo);
    stack.assert_serves();
    stack.agents.remove(0);
    stack.await_backends(0);
    stack.add_agent("another-id", &[]);
    stack.await_backends(1);
    stack.assert_serves();
}
rows!(requests_work_again_after_an_agent_restart: both);

/// Upstream (agents): An agent reconnects when its server restarts.
fn agent_reconnects_when_its_server_restarts(combo: Combo) {
    let mut stack = Stack::start(combo);
    stack.await_agent_metric("open_server_connections", &[], 1.0);
    stack.server.process.kill();
    stack.await_agent_metric("open_server_connections", &[], 0.0);
    until("the agent is not ready", secs(5), || {
        (stack.agents[0].ready_status() != 200).then_some(())
    });
    let dir = stack.dir.path().to_owned();
    stack.server.start_again(&dir);
    stack.await_agent_metric("open_server_connections", &[], 1.0);
    stack.await_backends(1);
    stack.assert_serves();
}
rows!(agent_reconnects_when_its_server_restarts: both);

/// Upstream (agents): A request in flight survives a second agent with the same id.
fn request_in_flight_survives_a_second_agent_with_the_same_id(combo: Combo) {
    let mut stack = Stack::start(combo);
    let client = stack.begin("get http path=/wait?ms=2500");
    stack.await_agent_metric("open_endpoint_connections", &[], 1.0);
    stack.add_agent("agent-0", &[]);
    stack.await_backends(1);
    let report = client.report().good();
    assert_eq!(report.text("body"), "waited\n");
    let default = [("proxy_strategy", "default")];
    assert_eq!(stack.server.metric("ready_backends", &default), 1.0);
    stack.assert_serves();
}
rows!(request_in_flight_survives_a_second_agent_with_the_same_id: both);

/// A TCP load balancer that distributes connections round-robin.
pub(super) struct Balancer {
    pub(super) port: u16,
    backends: Arc<Mutex<Vec<u16>>>,
    taken: Arc<AtomicUsize>,
}

impl Balancer {
    pub(super) fn start(backends: Vec<u16>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("a listener has an address");
        let backends = Arc::new(Mutex::new(backends));
        let taken = Arc::new(AtomicUsize::new(0));
        let (shared, count) = (Arc::clone(&backends), Arc::clone(&taken));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let n = count.fetch_add(1, Relaxed);
                let ports = shared.lock().expect("nobody panics with the list").clone();
                let Ok(server) = TcpStream::connect(("127.0.0.1", ports[n % ports.len()])) else {
                    continue;
                };
                splice(&client, &server);
                splice(&server, &client);
            }
        });
        Self {
            port: address.port(),
            backends,
            taken,
        }
    }

    /// Number of accepted connections.
    fn taken(&self) -> usize {
        self.taken.load(Relaxed)
    }

    fn replace(&self, backends: Vec<u16>) {
        *self.backends.lock().expect("nobody panics with the list") = backends;
    }
}

/// Copies one direction in a thread. At EOF it closes both sockets, so that the peer notices a killed server.
fn splice(from: &TcpStream, to: &TcpStream) {
    let [mut from, mut to] = [from, to].map(|socket| socket.try_clone().expect("sockets clone"));
    thread::spawn(move || {
        io::copy(&mut from, &mut to).ok();
        from.shutdown(std::net::Shutdown::Both).ok();
        to.shutdown(std::net::Shutdown::Both).ok();
    });
}

/// Sends a request through the server called `name`.
#[track_caller]
fn get_through(stack: &Stack, name: &str) {
    let socket = stack.dir.path().join(format!("{name}.sock"));
    Peer::new("get", stack.dir.path())
        .flag("mode", stack.combo.mode.flag())
        .flag("uds", socket.display())
        .flag("target", stack.targets.address("http"))
        .run()
        .good();
}

/// An agent whose only server address is the balancer.
fn agent_behind(balancer: &Balancer, combo: Combo, dir: &Path, certs: &Certs) -> Agent {
    let (name, id) = ("agent", "agent-0");
    Agent::start(combo.agent, name, id, balancer.port, dir, certs, &[])
}

/// Upstream (agents): An agent connects to all of three servers behind one address, also after one was replaced.
fn agent_finds_all_servers_behind_a_balancer(combo: Combo) {
    let mut stack = Stack::with(combo, 0, &["--server-count=3"]);
    let dir = stack.dir.path().to_owned();
    let start = |name: &str| Server::start(combo, name, &dir, &stack.certs, &["--server-count=3"]);
    let (second, mut third) = (start("second"), start("third"));
    let [first, two, three] = [&stack.server, &second, &third].map(|server| server.agent_port);
    let balancer = Balancer::start(vec![first, two, three]);
    let agent = agent_behind(&balancer, combo, &dir, &stack.certs);
    stack.agents.push(agent);
    stack.await_agent_metric("open_server_connections", &[], 3.0);
    for name in ["server", "second", "third"] {
        get_through(&stack, name);
    }
    balancer.replace(vec![first, two]);
    third.process.kill();
    stack.await_agent_metric("open_server_connections", &[], 2.0);
    let fourth = start("fourth");
    balancer.replace(vec![first, two, fourth.agent_port]);
    stack.await_agent_metric("open_server_connections", &[], 3.0);
    for name in ["server", "second", "fourth"] {
        get_through(&stack, name);
    }
}
rows!(agent_finds_all_servers_behind_a_balancer: grpc);

/// Behind the same balancer a Go server refuses the handshakes of lanes, and our server still gets its lanes. When only the
/// Go server is left behind the balancer, tunnels use our server's link, and retries are bounded.
fn lanes_find_our_server_beside_a_go_server(combo: Combo) {
    /// Most refused connections in ten seconds: four at first, one more after a lane was used, then one after each backoff.
    const REFUSED_MAX: usize = 16;
    /// More tunnels than lanes: four at first, and on a busy host those that the server has asked for since.
    const TUNNELS: usize = 20;
    let two = ["--server-count=2"];
    let mut stack = Stack::with(combo, 0, &two);
    let dir = stack.dir.path().to_owned();
    let go = Combo {
        server: Maker::Upstream(Release::V0360),
        ..combo
    };
    let theirs = Server::start(go, "theirs", &dir, &stack.certs, &two);
    let balancer = Balancer::start(vec![stack.server.agent_port, theirs.agent_port]);
    let agent = agent_behind(&balancer, combo, &dir, &stack.certs);
    stack.agents.push(agent);
    stack.await_agent_metric("open_server_connections", &[], 2.0);
    until("lanes of our server", secs(30), || {
        let idle = stack.server.adit_metric("lanes", &[("state", "idle")]);
        (idle >= 4.0).then_some(())
    });
    let server = &stack.server;
    let dials = |result| server.adit_metric("lane_dials_total", &[("result", result)]);
    get_through(&stack, "theirs");
    get_through(&stack, "server");
    assert_eq!((dials("hit"), dials("miss")), (1.0, 0.0));

    balancer.replace(vec![theirs.agent_port]);
    let stalled = stack.client("stall", "source").flag("streams", TUNNELS);
    let stalled = stalled.start();
    stalled.named_event("stalled", secs(20));
    let before = balancer.taken();
    let missed = dials("miss");
    assert!(missed > 0.0, "some of {TUNNELS} tunnels ride the link");
    let refused = || balancer.taken() - before;
    let stormed = poll(secs(10), || (refused() > REFUSED_MAX).then_some(()));
    assert!(stormed.is_none(), "{} lanes were refused", refused());
    // After many failures the pause is longer than that.
    until("it goes on looking for lanes", secs(75), || {
        (refused() > 0).then_some(())
    });
    get_through(&stack, "theirs");
    get_through(&stack, "server");
}
rows!(lanes_find_our_server_beside_a_go_server: adit_adit);

/// Upstream (agents): Readiness of server and agent follows their links.
fn readiness_follows_the_connection_on_both_ends(combo: Combo) {
    let mut stack = Stack::with(combo, 0, &[]);
    assert_eq!(stack.server.ready_status(), 500, "no agent yet");
    stack.add_agent("agent-0", &[]);
    until("the server is ready", secs(5), || {
        (stack.server.ready_status() == 200).then_some(())
    });
    stack.server.process.kill();
    until("the agent is not ready", secs(5), || {
        (stack.agents[0].ready_status() == 503).then_some(())
    });
}
rows!(readiness_follows_the_connection_on_both_ends: both);

/// Upstream (agents): A custom ALPN protocol is offered and selected.
fn custom_alpn_protocol_is_offered_and_selected(combo: Combo) {
    let stack = Stack::with(combo, 0, &[]);
    let stub = Peer::new("server-stub", stack.dir.path())
        .flag("ca", stack.certs.ca.display())
        .flag("cert", stack.certs.server_cert.display())
        .flag("key", stack.certs.server_key.display())
        .flag("alpn", "konnectivity-test")
        .start();
    let port = stub.named_event("listening", secs(10))["port"]
        .as_u64()
        .expect("a port");
    let port = u16::try_from(port).expect("ports fit");
    let flags = ["--alpn-proto=konnectivity-test"];
    let (dir, certs) = (stack.dir.path(), &stack.certs);
    let _agent = Agent::start(combo.agent, "alpn-agent", "a", port, dir, certs, &flags);
    let shaken = stub.named_event("handshake", secs(10));
    assert_eq!(shaken["alpn"], "konnectivity-test", "{shaken}");
    assert!(shaken["error"].is_null(), "{shaken}");
}
rows!(custom_alpn_protocol_is_offered_and_selected: go_go go_adit);

/// Both links of one agent id number their connections from 1, so a table keyed by (id, connID) would mix them up.
///
/// Upstream (agents): Two links with one agent id do not mix their tunnels.
fn two_links_of_one_id_do_not_mix_their_tunnels(combo: Combo) {
    let stack = Stack::with(combo, 0, &[]);
    let mut stub = stack
        .stub_agent("echo")
        .flag("second", "line")
        .flag("second-id", "stub-a")
        .start();
    stub.named_event("linked", secs(10));
    stack.await_backends(1);
    let talk = || stack.begin("wrong 10.0.0.1:80 kind=tagged");
    let mut first = talk();
    first.process().named_event("tag", secs(10));
    stub.line("now the second link");
    stub.event("linked b", secs(10), |event| {
        event["event"] == "linked" && event["link"] == "b"
    });
    let second = talk();
    let third = talk();
    for client in [first, second, third] {
        client.report().good();
    }
    stack.await_backends(1);
}
rows!(two_links_of_one_id_do_not_mix_their_tunnels: go_go adit_go);

/// Upstream's server keeps dialling over the oldest link, so it is no baseline.
///
/// Upstream (choice): A new link of an agent id replaces a dead one, and takes new dials.
fn half_open_agent_is_replaced_by_its_new_link_at_once(combo: Combo) {
    let mut stack = Stack::start(combo);
    stack.assert_serves();
    stack.agents[0].process.signal(Signal::STOP);
    stack.add_agent("agent-0", &[]);
    let report = stack.good("get http timeout=3s");
    let took = report.number("elapsed_ms");
    assert!(took < 2_000.0, "the request took {took} ms: {report:?}");
}
rows!(half_open_agent_is_replaced_by_its_new_link_at_once: our_server_both);
