//! Log lines about connections between agents and servers that end or fail, from the real binary.

use std::time::Duration;

use adit_testkit::certificates::ThrowawayFiles;
use adit_tls::cause::TlsCause;
use rustix::process::Signal;
use serde_json::Value;
use tokio::net::TcpStream;

use super::processes::Processes;
use crate::support::connect::{end, say};
use crate::support::process::{Process, ask, json_lines, program};
use crate::support::wait::until;
use crate::support::world::World;

const END: Duration = Duration::from_secs(15);

/// A server and an agent that is linked, as processes.
async fn linked(flags: &[&str]) -> (World, Process, Process) {
    let (processes, agent) = Processes::linked(flags, &[]).await;
    (processes.world, processes.server, agent)
}

/// The events with this message.
fn events(process: &Process, message: &str) -> Vec<Value> {
    let log = process.log();
    let events = json_lines(&log);
    events.filter(|event| event["message"] == message).collect()
}

/// The first event with this message.
fn event(process: &Process, message: &str) -> Option<Value> {
    events(process, message).into_iter().next()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_agent_is_logged_as_left_and_not_as_disconnected() {
    let (_world, server, mut agent) = linked(&[]).await;
    until("the agent is up", || event(&agent, "agent is up").is_some()).await;
    agent.signal(Signal::TERM);
    assert_eq!(agent.wait(END).code(), Some(0));
    until("it left", || event(&server, "agent left").is_some()).await;
    let left = event(&server, "agent left").expect("logged");
    assert_eq!(left["agent"], "agent-1");
    let log = server.log();
    assert!(
        !log.contains("agent disconnected") && !log.contains("close_notify"),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_server_is_logged_as_left_and_not_as_disconnected() {
    let (_world, mut server, agent) = linked(&[]).await;
    server.signal(Signal::TERM);
    assert_eq!(server.wait(END).code(), Some(0));
    until("it left", || event(&agent, "server left").is_some()).await;
    let log = agent.log();
    assert!(
        !log.contains("server connection ended") && !log.contains("close_notify"),
        "{log}"
    );
    let disconnected = event(&server, "agent disconnected").expect("logged");
    assert_eq!(disconnected["reason"], "this server is shutting down");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_agent_is_not_logged_as_left() {
    let (_world, server, mut agent) = linked(&[]).await;
    agent.kill();
    until("it is gone", || {
        event(&server, "agent disconnected").is_some()
    })
    .await;
    let gone = event(&server, "agent disconnected").expect("logged");
    let reason = gone["reason"].as_str().expect("a text");
    assert!(!reason.contains("://"), "no link of a library: {reason}");
    assert!(event(&server, "agent left").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_handshake_is_one_warning_with_its_peer_and_cause() {
    let (_world, server, _agent) = linked(&[]).await;
    let mut stranger = TcpStream::connect(server.address("agents"))
        .await
        .expect("it listens");
    let peer = stranger.local_addr().expect("an address").to_string();
    say(&mut stranger, b"GET / HTTP/1.0\r\n\r\n").await;
    let _refused = end(&mut stranger).await;
    let message = "TLS handshake failed";
    until("the warning", || event(&server, message).is_some()).await;
    let failed = event(&server, message).expect("logged");
    assert_eq!(failed["level"], "WARN");
    assert_eq!(failed["peer"], peer);
    assert_eq!(failed["listener"], "agent");
    assert_eq!(failed["cause"], TlsCause::NotTls.to_string());
    assert_eq!(server.log().matches(&peer).count(), 1);
}

/// With TLS 1.3 the agent has already written when the server refuses its certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_the_server_refuses_logs_the_servers_alert_in_words() {
    let (world, server, _agent) = linked(&[]).await;
    let foreign = ThrowawayFiles::create(&[]).expect("certificates");
    let port = server.address("agents").port();
    let flags = ["!--agent-cert", "!--agent-key", "--log-format=json"];
    let without = world.agent_args("agent-2", port, &flags);
    let mut of_another_ca = without.clone();
    of_another_ca.extend([
        format!("--agent-cert={}", foreign.cert("agent").display()),
        format!("--agent-key={}", foreign.key("agent").display()),
    ]);
    for (name, args, cause) in [
        ("without", without, TlsCause::CertificateRequired),
        ("foreign", of_another_ca, TlsCause::NotOfThatCa),
    ] {
        let agent = Process::start(name, &args, world.dir.path());
        let attempts = || events(&agent, "cannot connect to a server");
        // Whether a read or a write of the agent meets the end first differs from one attempt to the next.
        until("several attempts", || attempts().len() >= 3).await;
        for refused in attempts() {
            let error = refused["error"].as_str().expect("a text");
            assert!(error.ends_with(&cause.to_string()), "{name}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlinked_agent_says_so_and_the_loss_of_the_last_agent_is_a_warning() {
    let (world, server, agent) = linked(&["--admin-socket={certs}/admin.sock"]).await;
    let socket = world.admin_socket();
    let flag = format!("--admin-socket={}", socket.display());
    let unlinked = tokio::process::Command::new(program())
        .args(["unlink", &flag, "--agent=agent-1"])
        .output()
        .await
        .expect("it runs");
    assert!(unlinked.status.success(), "{unlinked:?}");
    let message = "the server has ended this link";
    until("the agent's line", || event(&agent, message).is_some()).await;
    let told = event(&agent, message).expect("logged");
    assert_eq!(told["level"], "WARN");
    let why = told["why"].as_str().expect("a text");
    assert!(why.contains("adit unlink"), "{why}");
    assert!(event(&agent, "server connection ended").is_none());
    let last = "no strategy finds an agent that responds: dials fail";
    until("the server's line", || event(&server, last).is_some()).await;
    assert_eq!(event(&server, last).expect("logged")["level"], "WARN");
    let none = "the last server is gone: this agent serves no dials until it has a link again";
    until("the agent's warning", || event(&agent, none).is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_line_shows_each_listener_in_the_syntax_of_its_flag() {
    let (world, server, agent) = linked(&[]).await;
    let up = event(&server, "server is up").expect("logged");
    let (grpc, connect) = (world.grpc(), world.connect());
    let frontends = format!(
        "grpc=unix:{},http-connect=unix:{}",
        grpc.display(),
        connect.display()
    );
    assert_eq!(up["frontends"], frontends);
    assert_eq!(
        (&up["admin"], &up["admin_socket"]),
        (&"off".into(), &"off".into())
    );
    assert_eq!(up["version"], env!("CARGO_PKG_VERSION"));
    assert!(up["commit"].is_string() && up["health"].is_string());
    let started = event(&agent, "agent started").expect("logged");
    let servers = format!("127.0.0.1:{}", server.address("agents").port());
    assert_eq!(started["servers"], servers);
    until("the agent is up", || event(&agent, "agent is up").is_some()).await;
    let log = server.log() + &agent.log();
    assert!(!log.contains("Some(") && !log.contains("None"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_without_a_server_logs_started_and_not_up() {
    let world = World::start(&[]).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = closed.local_addr().expect("an address").port();
    let args = world.agent_args("agent-1", port, &["--log-format=json"]);
    let agent = Process::start("agent", &args, world.dir.path());
    let readiness = ask(agent.address("health"), "/readyz").await;
    assert!(readiness.contains("no servers connected"), "{readiness}");
    assert!(event(&agent, "agent started").is_some());
    assert!(event(&agent, "agent is up").is_none());
}
