//! How long agents take to link all servers behind a load balancer, from a cold start and after a restart of all servers.
//!
//! Measurements, not tests: `cargo test -p adit --test loopback linking_times -- --ignored --nocapture --test-threads=1`.
//! `ADIT_PROGRAM` names another build of Adit, `ADIT_GO_AGENT` upstream's agent.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use adit::server::{self, RunningServer};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::processes::compat_agent;
use crate::support::balancer::{Balancer, Call, Order};
use crate::support::ports;
use crate::support::process::Process;
use crate::support::wait::within;
use crate::support::world::{World, sample, server_plan};

/// Agents of a row. Each has a balancer of its own, so that they do not take each other's turns.
const STARTS: usize = 20;
/// Numbers of servers.
const SIZES: [usize; 3] = [2, 5, 8];
/// Time between the starts of two agents, which share the processors.
const STAGGER: Duration = Duration::from_millis(200);
/// An agent that needs longer is counted with this time.
const LIMIT: Duration = Duration::from_secs(150);
const LOOK: Duration = Duration::from_millis(20);
const LINKED: &str = "konnectivity_network_proxy_agent_open_server_connections";

/// Which agent, and its additional flags.
#[derive(Clone)]
enum Kind {
    Adit(&'static [&'static str]),
    Upstream(PathBuf),
}

/// One agent's time and connections until all servers were linked.
struct Sample {
    seconds: f64,
    links: f64,
    lanes: f64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement: prints a table after some minutes"]
async fn adit_with_lanes() {
    table("adit", &Kind::Adit(&[])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement: prints a table after some minutes"]
async fn adit_without_lanes() {
    table("adit --lanes=0", &Kind::Adit(&["--lanes=0"])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement: prints a table after some minutes"]
async fn upstream() {
    let program = std::env::var_os("ADIT_GO_AGENT").expect("ADIT_GO_AGENT names upstream's agent");
    table("upstream", &Kind::Upstream(program.into())).await;
}

async fn table(name: &str, kind: &Kind) {
    println!("| agent | balancer | servers | start | median s | 10 % to 90 % | links | lanes |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for order in [Order::RoundRobin, Order::Random] {
        for servers in SIZES {
            let [cold, again] = row(kind, order, servers).await;
            for (start, samples) in [("cold", cold), ("restart of all", again)] {
                let of = |value: fn(&Sample) -> f64| {
                    let mut values: Vec<f64> = samples.iter().map(value).collect();
                    values.sort_by(f64::total_cmp);
                    values
                };
                let middle = |values: Vec<f64>| values[values.len() / 2];
                let seconds = of(|sample| sample.seconds);
                let (low, high) = (seconds[STARTS / 10], seconds[STARTS - 1 - STARTS / 10]);
                println!(
                    "| {name} | {order:?} | {servers} | {start} | {:.1} | {low:.1} to {high:.1} | {} | {} |",
                    middle(seconds),
                    middle(of(|sample| sample.links)),
                    middle(of(|sample| sample.lanes)),
                );
            }
        }
    }
}

async fn row(kind: &Kind, order: Order, servers: usize) -> [Vec<Sample>; 2] {
    let mut world = World::start(&[&format!("--server-count={servers}")]).await;
    // The first server only wrote the files.
    world.stop_server(Duration::ZERO).await;
    let running = serve(&world, &vec![0; servers]).await;
    let addresses: Vec<_> = running.iter().map(|server| server.agents).collect();
    let mut agents = Vec::new();
    for number in 0..STARTS {
        let balancer = Balancer::in_order(order, &addresses).await;
        let health = ports::free();
        let began = Instant::now();
        let process = start(&world, kind, number, balancer.address.port(), health);
        agents.push((
            balancer,
            SocketAddr::from(([127, 0, 0, 1], health)),
            began,
            process,
        ));
        tokio::time::sleep(STAGGER).await;
    }
    let cold = agents.iter().map(|(balancer, health, began, _process)| {
        until_linked(balancer, *health, servers, *began, 0)
    });
    let cold = join_all(cold).await;
    stop(running).await;
    for (_, health, ..) in &agents {
        while linked(*health).await != Some(0.0) {
            tokio::time::sleep(LOOK).await;
        }
    }
    let before: Vec<usize> = agents
        .iter()
        .map(|(balancer, ..)| balancer.calls().len())
        .collect();
    let ports: Vec<u16> = addresses.iter().map(SocketAddr::port).collect();
    let running = serve(&world, &ports).await;
    let began = Instant::now();
    let again = std::iter::zip(&agents, before).map(|((balancer, health, ..), before)| {
        until_linked(balancer, *health, servers, began, before)
    });
    let again = join_all(again).await;
    drop(agents);
    stop(running).await;
    [cold, again]
}

async fn serve(world: &World, ports: &[u16]) -> Vec<RunningServer> {
    let servers = ports.iter().enumerate().map(|(number, port)| async move {
        let args = world.other_args(&port.to_string(), &format!(".{number}.sock"));
        let plan = server_plan(&args).expect("flags are right");
        server::start(&plan).await.expect("the server starts")
    });
    join_all(servers).await
}

async fn stop(servers: Vec<RunningServer>) {
    let stopping = servers
        .into_iter()
        .map(|server| server.stop(Some(Duration::ZERO)));
    within("the servers' end", join_all(stopping)).await;
}

fn start(world: &World, kind: &Kind, number: usize, port: u16, health: u16) -> Process {
    let id = format!("agent-{number}");
    match kind {
        Kind::Adit(flags) => {
            let health = format!("--health-server-port={health}");
            let mut all = vec![
                "!--sync-interval",
                "!--sync-interval-cap",
                "!--health-server-port",
                &health,
            ];
            all.extend_from_slice(flags);
            Process::start(&id, &world.agent_args(&id, port, &all), world.dir.path())
        }
        Kind::Upstream(program) => {
            let mut args = vec!["proxy-agent".to_owned(), format!("--agent-id={id}")];
            args.extend(compat_agent(world, port, [health, ports::free()]));
            Process::start_program(&id, program, &args, world.dir.path())
        }
    }
}

async fn until_linked(
    balancer: &Balancer,
    health: SocketAddr,
    servers: usize,
    began: Instant,
    before: usize,
) -> Sample {
    let servers = f64::from(u32::try_from(servers).expect("a few"));
    while linked(health).await != Some(servers) && began.elapsed() < LIMIT {
        tokio::time::sleep(LOOK).await;
    }
    let calls = &balancer.calls()[before..];
    let count = |kind| calls.iter().filter(|call| **call == kind).count() as f64;
    Sample {
        seconds: began.elapsed().as_secs_f64(),
        links: count(Call::Link),
        lanes: count(Call::Lane),
    }
}

/// Number of servers with a link; `None`: the agent does not answer yet.
async fn linked(health: SocketAddr) -> Option<f64> {
    let mut stream = TcpStream::connect(health).await.ok()?;
    stream
        .write_all(b"GET /metrics HTTP/1.0\r\nHost: a\r\n\r\n")
        .await
        .ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    sample(&text, LINKED)
}
