//! Connections of a node to an agent's own listeners.

use std::net::SocketAddr;
use std::time::Duration;

use adit::agent::RunningAgent;
use adit_testkit::scrape::{self, sum};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

pub(crate) use super::connect::echo;
use super::wait::{until, within};
use super::world::World;

/// Open tunnels that agents opened.
pub(crate) const OPEN: &str = "adit_node_tunnels";
/// All tunnels that agents have opened.
pub(crate) const OPENED: &str = "adit_node_tunnels_opened_total";

/// A world whose server allows these destinations, and an agent that listens for `targets`.
pub(crate) async fn world(allowed: &[&str], targets: &[&str]) -> (World, RunningAgent) {
    let flags: Vec<String> = allowed
        .iter()
        .map(|entry| format!("--allowed-destination={entry}"))
        .collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let world = World::start(&flags).await;
    let agent = agent(&world, targets).await;
    world.links(1).await;
    (world, agent)
}

/// An agent, `agent-1`, that listens for these destinations on ports that the kernel chooses.
pub(crate) async fn agent(world: &World, targets: &[&str]) -> RunningAgent {
    let flags: Vec<String> = targets
        .iter()
        .map(|target| format!("--target=0:{target}"))
        .collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    world.agent("agent-1", &flags).await
}

/// An agent, `agent-1`, that listens for `target` and whose server is gone.
pub(crate) async fn without_server(target: &str) -> (World, RunningAgent) {
    let mut world = World::start(&[]).await;
    let agents = world.server().agents.port();
    world.stop_server(Duration::ZERO).await;
    let target = format!("--target=0:{target}");
    let agent = world.agent_of(agents, "agent-1", &[&target]).await;
    (world, agent)
}

/// A connection to an agent's listener.
pub(crate) async fn connect(address: SocketAddr) -> TcpStream {
    let stream = within("a connection to the agent", TcpStream::connect(address)).await;
    let stream = stream.expect("the agent listens");
    stream.set_nodelay(true).expect("a flag");
    stream
}

/// Asserts that a connection to this listener is reset, not closed.
pub(crate) async fn assert_reset(address: SocketAddr) {
    // The RST may arrive before `connect` returns.
    let connected = within("a connection to the agent", TcpStream::connect(address)).await;
    let read = match connected {
        Ok(mut stream) => within("a reset", stream.read_u8()).await,
        Err(error) => Err(error),
    };
    let error = read.expect_err("nothing comes");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
}

/// Asserts that this connection is reset, and that no byte comes before.
pub(crate) async fn assert_is_reset(stream: &mut TcpStream) {
    let read = within("the connection's end", stream.read_u8()).await;
    let error = read.expect_err("nothing comes");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
}

/// The value of an agent's series, which must exist.
pub(crate) fn value(agent: &RunningAgent, series: &str) -> f64 {
    scrape::value(&agent.metrics.scrape().text(), series)
}

/// The series of refusals for a reason.
pub(crate) fn refusals(reason: &str) -> String {
    format!("adit_node_refusals_total{{reason=\"{reason}\"}}")
}

/// All refusals that an agent has counted.
pub(crate) fn refused(agent: &RunningAgent) -> f64 {
    sum(&agent.metrics.scrape().text(), "adit_node_refusals_total")
}

/// Waits until neither end has a node tunnel, a waiting connection or a busy lane.
pub(crate) async fn assert_quiet(world: &World, agent: &RunningAgent) {
    until("no node tunnel is left", || {
        let mut series = [OPEN, "adit_node_waiting", super::lanes::BUSY].into_iter();
        series.all(|one| super::lanes::value(world, one) + value(agent, one) == 0.0)
    })
    .await;
}
