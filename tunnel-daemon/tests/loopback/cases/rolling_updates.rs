//! Servers that know each other are replaced one by one, while agents stay and clients dial.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use adit::agent::RunningAgent;
use adit::server::{self, RunningServer};
use adit_config::plan::ServerPlan;
use adit_testkit::blocking::is_nightly;
use tokio::sync::RwLock;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::balancer::{Balancer, Call};
use crate::support::peers::PeerFiles;
use crate::support::wait::{until, until_for};
use crate::support::world::{World, server_plan};
use crate::support::{connect, ports, targets};

const SERVERS: usize = 3;
/// Slowest dial while there is a path.
const SLOWEST: Duration = Duration::from_secs(4);
/// A server that leaves waits this long for its tunnels.
const GRACE: Duration = Duration::from_secs(5);
/// Agents are told to link to two of the servers once all have known each other for so long.
const SETTLED: Duration = Duration::from_secs(61);
/// Links of an agent.
const LINKS: usize = 2;

fn agents() -> usize {
    if is_nightly() { 200 } else { 30 }
}

/// The address of which an agent alone is in charge.
fn address(agent: usize) -> String {
    format!("127.1.{}.{}", agent / 250, agent % 250 + 1)
}

/// A server that can be replaced by one with the same addresses.
struct Place {
    plan: ServerPlan,
    agents: SocketAddr,
    socket: PathBuf,
    server: Option<RunningServer>,
}

impl Place {
    async fn start(&mut self) {
        let started = server::start(&self.plan).await;
        self.server = Some(started.expect("the server starts"));
    }
}

/// The places of three servers, each of which asks the others.
fn places(world: &World, files: &PeerFiles) -> Vec<Place> {
    let peers: [u16; SERVERS] = std::array::from_fn(|_| ports::free());
    let places = (0..SERVERS).map(|number| {
        let name = format!("server-{number}");
        let port = ports::free();
        let mut args = world.other_args(&port.to_string(), &format!(".{name}"));
        args.extend(files.flags(&name));
        args.push(format!("--server-id={name}"));
        args.push(format!("--server-count={SERVERS}"));
        args.push(format!("--peer-bind=127.0.0.1:{}", peers[number]));
        args.extend(peers.map(|port| format!("--peer=127.0.0.1:{port}")));
        args.push("--proxy-strategies=destHost".to_owned());
        Place {
            plan: server_plan(&args).expect("flags are right"),
            agents: ([127, 0, 0, 1], port).into(),
            socket: world.dir.path().join(format!("connect.{name}")),
            server: None,
        }
    });
    places.collect()
}

/// Dials without a pause, each time the agent after the last one, through the servers in turn. Returns the number of dials.
async fn dial(
    through: Arc<RwLock<Vec<PathBuf>>>,
    port: u16,
    first: usize,
    stop: CancellationToken,
) -> usize {
    let mut dials = 0;
    while !stop.is_cancelled() {
        // While it is held, no server of the list leaves.
        let sockets = through.read().await;
        let agent = (first + dials) % agents();
        reach(&sockets[dials % sockets.len()], agent, port).await;
        drop(sockets);
        dials += 1;
        tokio::task::yield_now().await;
    }
    dials
}

async fn reach(socket: &Path, agent: usize, port: u16) {
    let since = Instant::now();
    let mut stream = connect::open(socket, &format!("{}:{port}", address(agent))).await;
    connect::echo(&mut stream, b"by its own agent").await;
    let took = since.elapsed();
    assert!(took <= SLOWEST, "agent {agent} after {took:?}");
}

/// Each agent is alone in charge of one address, and has links to two of three servers. Each server is replaced in turn. No dial
/// fails that begins at a server which does not leave, and a new server serves from its first dial. At night the agents know one
/// address that leads to all servers in turn, and make at most two links each for a replaced server: those of the servers that stay
/// go on to ask for two of three, and so does a new server whose peers all do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_dial_fails_while_servers_are_replaced_one_by_one() {
    let files = PeerFiles::new();
    let world = World::start(&[]).await;
    let mut places = places(&world, &files);
    for place in &mut places {
        place.start().await;
    }
    if is_nightly() {
        tokio::time::sleep(SETTLED).await;
    }
    let addresses: Vec<SocketAddr> = places.iter().map(|place| place.agents).collect();
    let balancer = Balancer::to(&addresses).await;
    let mut running: Vec<RunningAgent> = Vec::new();
    for number in 0..agents() {
        let second = addresses[(number + 1) % SERVERS];
        let (first, second) = if is_nightly() {
            (balancer.address, None)
        } else {
            (addresses[number % SERVERS], Some(second))
        };
        // Hundreds of agents with lanes would need more descriptors than a process has here.
        let mut flags = vec!["--lanes=0".to_owned()];
        flags.push(format!("--agent-identifiers=ipv4={}", address(number)));
        flags.extend(second.map(|second| format!("--proxy-server-host={second}")));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let id = format!("agent-{number}");
        running.push(world.agent_of(first.port(), &id, &flags).await);
    }
    let servers = |places: &[Place]| -> usize {
        let servers = places.iter().filter_map(|place| place.server.as_ref());
        servers.map(RunningServer::links).sum()
    };
    let limit = Duration::from_secs(if is_nightly() { 180 } else { 30 });
    until_for(limit, "all links", || servers(&places) >= LINKS * agents()).await;
    let knows = |place: &Place| {
        let server = place.server.as_ref().expect("it runs");
        server.linked_peers() == SERVERS - 1
    };
    until("all peers", || places.iter().all(knows)).await;
    let (port, _echo) = targets::echo().await;
    let sockets = places.iter().map(|place| place.socket.clone());
    let through = Arc::new(RwLock::new(sockets.collect::<Vec<_>>()));
    let (stop, mut dialing) = (CancellationToken::new(), JoinSet::new());
    for worker in 0..4 {
        let first = worker * agents() / 4;
        dialing.spawn(dial(Arc::clone(&through), port, first, stop.clone()));
    }
    let made = || {
        balancer
            .calls()
            .iter()
            .filter(|it| **it == Call::Link)
            .count()
    };
    for number in 0..SERVERS {
        let before = made();
        let place = &mut places[number];
        through
            .write()
            .await
            .retain(|socket| *socket != place.socket);
        let old = place.server.take().expect("it runs");
        old.stop(Some(GRACE)).await;
        place.start().await;
        // At once, whether or not an agent has come back to it.
        for agent in [0, agents() / 2, agents() - 1] {
            reach(&place.socket, agent, port).await;
        }
        through.write().await.push(place.socket.clone());
        until_for(limit, "all links again", || {
            servers(&places) >= LINKS * agents()
        })
        .await;
        let links = made() - before;
        println!("MEASURED {links} links for {} agents", agents());
        // In the gate agents know their servers by address, and the balancer sees none.
        assert!(links > 0 || !is_nightly(), "connections are counted");
        assert!(
            links <= 2 * agents(),
            "{links} links for {} agents",
            agents()
        );
    }
    stop.cancel();
    let mut dials = 0;
    while let Some(done) = dialing.join_next().await {
        dials += done.expect("no dial fails");
    }
    println!(
        "MEASURED {dials} dials while {SERVERS} servers were replaced with {} agents",
        agents()
    );
    for agent in running {
        agent.stop().await;
    }
}
