//! Readiness of a server with several strategies: it serves as long as one of them finds an agent.

use adit::status::Socket;
use adit::status::model::Status;

use super::processes::Processes;
use crate::support::process::ask;
use crate::support::wait::until;
use crate::support::{connect, targets};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_ready_by_whichever_strategy_finds_an_agent() {
    let (target, _echo) = targets::local_echo().await;
    let flags = [
        "--proxy-strategies=destHost,defaultRoute",
        "--admin-socket={certs}/admin.sock",
    ];
    let processes = Processes::start(&flags).await;
    let ready = ask(processes.health, "/readyz").await;
    let nobody = "no connection to any proxy agent";
    assert!(
        ready.contains(" 500 ") && ready.ends_with(nobody),
        "{ready}"
    );

    let mut agent = processes.agent("edge", &["--agent-identifiers=default-route=true"]);
    processes.links(1.0).await;
    let mut stream = connect::open(&processes.world.connect(), &target).await;
    connect::echo(&mut stream, b"served by the second strategy").await;
    let ready = ask(processes.health, "/readyz?verbose").await;
    let lines = "[-]strategy destHost: no agent\n[+]strategy defaultRoute: ready\n";
    assert!(ready.contains(" 200 ") && ready.contains(lines), "{ready}");
    let socket = processes.world.admin_socket();
    let status: Status = Socket::new(&socket).ask("/v1/status").expect("an answer");
    let states = status.strategies.iter();
    let states: Vec<_> = states
        .map(|of| (of.name.as_str(), of.state.as_str()))
        .collect();
    assert_eq!(
        states,
        [("destHost", "no agent"), ("defaultRoute", "ready")]
    );
    assert!(status.readiness.ready);
    let logged = |text: &str| processes.server.log().contains(text);
    until("a line about both strategies", || {
        logged("destHost: no agent, defaultRoute: ready")
    })
    .await;

    agent.kill();
    until("a warning", || {
        logged("no strategy finds an agent that responds: dials fail")
    })
    .await;

    let other = processes.agent("other", &[]);
    processes.links(1.0).await;
    let ready = ask(processes.health, "/readyz").await;
    let unmatched = "agents are connected, but --proxy-strategies finds none of them";
    assert!(
        ready.contains(" 500 ") && ready.ends_with(unmatched),
        "{ready}"
    );
    drop(other);
}
