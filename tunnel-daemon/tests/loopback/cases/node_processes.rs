//! Node to control plane between real processes: access events, kills of either end, and leaks after many tunnels.

use adit_net::socket::set_reset_on_close;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;

use super::processes::Processes;
use crate::support::node::{OPEN, OPENED, assert_is_reset, connect, echo};
use crate::support::process::{
    Process, descriptors_without_lanes, json_lines, metric, no_descriptor_left, scrape,
};
use crate::support::targets;
use crate::support::wait::{until, within};
use crate::support::world::sample;

/// A server that allows one destination, and an agent that listens for it.
async fn pair(destination: &str) -> (Processes, Process) {
    let allowed = format!("--allowed-destination={destination}");
    let target = format!("--target=0:{destination}");
    Processes::linked(&[&allowed], &[&target]).await
}

/// The server's access events of tunnels that agents opened.
fn events(server: &Process) -> Vec<Value> {
    let log = server.log();
    let lines = json_lines(&log);
    let of_agents =
        lines.filter(|event| event["target"] == "adit::access" && event["opened_by"] == "agent");
    of_agents.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_tunnel_has_an_access_event_that_names_its_agent_and_certificate() {
    let (target, _echo) = targets::local_echo().await;
    let destination = target.clone();
    let (processes, agent) = pair(&destination).await;
    let mut stream = connect(agent.address("address")).await;
    echo(&mut stream, b"in the log").await;
    drop(stream);
    until("an access event", || !events(&processes.server).is_empty()).await;
    let event = &events(&processes.server)[0];
    assert_eq!(event["client_dialect"], "node");
    assert_eq!(event["agent"], "agent-1");
    assert_eq!(event["destination"], destination);
    assert_eq!(
        (&event["bytes_to_target"], &event["bytes_to_client"]),
        (&10.into(), &10.into())
    );
    assert_eq!(
        (&event["end"], &event["path"]),
        (&"clean".into(), &"lane".into())
    );
    let principal = event["principal"].as_str().expect("a principal");
    assert!(principal.contains("agent"), "{principal}");
    // A refused tunnel has an access event, too.
    drop(processes);
    let processes = Processes::start(&["--allowed-destination=10.0.0.1:1"]).await;
    let agent = processes.agent("agent-1", &[&format!("--target=0:{destination}")]);
    let address = agent.address("address");
    until("a refusal in the log", || {
        let _reset = std::net::TcpStream::connect(address);
        let events = events(&processes.server);
        events
            .iter()
            .any(|event| event["detail"] == "not_allowed" && event["end"] == "other")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_resets_connections_and_its_successor_takes_new_ones() {
    let (target, _echo) = targets::local_echo().await;
    let (mut processes, agent) = pair(&target).await;
    let address = agent.address("address");
    let mut stream = connect(address).await;
    echo(&mut stream, b"before").await;
    processes.server.kill();
    assert_is_reset(&mut stream).await;
    // A new connection is held until a server is back.
    let mut stream = connect(address).await;
    let args = processes
        .world
        .server_args(&processes.agents.port().to_string());
    processes.server = Process::start("server-2", &args, processes.world.dir.path());
    echo(&mut stream, b"behind").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_agent_leaves_no_connection_at_the_destination() {
    let (port, _target, mut seen) = targets::summing().await;
    let (processes, mut agent) = pair(&format!("127.0.0.1:{port}")).await;
    let mut stream = connect(agent.address("address")).await;
    stream.write_all(b"cut").await.expect("taken");
    metric(processes.health, OPEN, 1.0).await;
    agent.kill();
    let sum = within("the destination's end", seen.recv()).await;
    assert!(!sum.expect("a sum").clean, "cut off, not ended");
    metric(processes.health, OPEN, 0.0).await;
    metric(
        processes.health,
        "adit_node_tunnels_closed_total{reason=\"lane_lost\"}",
        1.0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_tunnels_leave_no_descriptor_behind() {
    let (target, _echo) = targets::local_echo().await;
    let (processes, agent) = pair(&target).await;
    let (address, health) = (agent.address("address"), agent.address("health"));
    echo(&mut connect(address).await, b"first").await;
    metric(processes.health, OPEN, 0.0).await;
    let at_server = descriptors_without_lanes(&processes.server, processes.health).await;
    let at_agent = descriptors_without_lanes(&agent, health).await;
    for _round in 0..10 {
        let mut opening = JoinSet::new();
        for tunnel in 0..50 {
            opening.spawn(async move {
                let mut stream = connect(address).await;
                echo(&mut stream, b"one of many").await;
                if tunnel % 3 == 0 {
                    set_reset_on_close(&stream).expect("a flag");
                }
            });
        }
        within("a round", opening.join_all()).await;
    }
    metric(processes.health, OPEN, 0.0).await;
    metric(processes.health, OPENED, 501.0).await;
    metric(health, OPEN, 0.0).await;
    no_descriptor_left(&processes.server, processes.health, at_server).await;
    no_descriptor_left(&agent, health, at_agent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_short_of_descriptors_resets_connections_and_recovers() {
    let (port, _target) = targets::echo().await;
    let destination = format!("127.0.0.1:{port}");
    let processes = Processes::start(&[&format!("--allowed-destination={destination}")]).await;
    let target = format!("--target=0:{destination}");
    let flags = ["--log-format=json", &target];
    let args = processes
        .world
        .agent_args("a", processes.agents.port(), &flags);
    let agent = Process::start_limited("a", 640, &args, processes.world.dir.path());
    let (address, health) = (agent.address("address"), agent.address("health"));
    echo(&mut connect(address).await, b"before").await;
    // Many more connections than the agent has lanes for, so the agent holds most of them for a while.
    let mut held = Vec::new();
    let short = "adit_node_refusals_total{reason=\"descriptors\"}";
    within("it is short of descriptors", async {
        while sample(&scrape(health).await, short) == Some(0.0) {
            for _connection in 0..100 {
                // Some connections are reset before `connect` returns.
                held.extend(tokio::net::TcpStream::connect(address).await);
            }
        }
    })
    .await;
    drop(held);
    metric(health, "adit_node_waiting", 0.0).await;
    metric(health, OPEN, 0.0).await;
    echo(&mut connect(address).await, b"behind").await;
}
