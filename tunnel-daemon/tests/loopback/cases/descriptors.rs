//! Processes short of file descriptors: they close idle lanes first, then refuse new clients. Open tunnels stay.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use adit_net::tasks::Tasks;
use tokio::net::UnixStream;

use crate::support::lanes::{BUSY, IDLE, LINKS, MISSES, TUNNELS};
use crate::support::process::{Process, value};
use crate::support::raw::Connection;
use crate::support::wait::{within, within_for};
use crate::support::world::World;
use crate::support::{connect, targets};

/// Descriptor limit of the process under test. It opens no lanes from 768 descriptors on, closes idle lanes at 896, and
/// refuses clients at 992.
const LIMIT: u32 = 1024;
const LOW: usize = 896;
/// Tunnels of a burst that leaves idle lanes behind.
const BURST: usize = 60;

const PAUSES: &str = "adit_accept_pauses_total{listener=\"frontend\"}";

/// Limit for new lanes: an agent whose lanes were refused retries only after a backoff.
const LANES_BACK: Duration = Duration::from_secs(90);

async fn until(health: SocketAddr, series: &str, holds: impl Fn(f64) -> bool) {
    until_for(Duration::from_secs(30), health, series, holds).await;
}

async fn until_for(limit: Duration, health: SocketAddr, series: &str, holds: impl Fn(f64) -> bool) {
    within_for(limit, series, async {
        while !holds(value(health, series).await) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

/// Two servers and an agent of both. One of the servers or the agent has few descriptors.
struct Short {
    server: Process,
    _other: Process,
    agent: Process,
    // Declared after the processes, so that the folder with their logs is removed last.
    world: World,
    health: SocketAddr,
    target: String,
    open: Vec<UnixStream>,
    _echo: Tasks,
}

enum Who {
    Server,
    Agent,
}

impl Short {
    /// Leaves 4 tunnels open on lanes and at least 8 lanes idle.
    async fn start(who: Who) -> Self {
        let mut world = World::start(&["--log-format=json"]).await;
        world.stop_server(Duration::ZERO).await;
        let dir = world.dir.path().to_owned();
        let args = world.server_args("0");
        let server = match who {
            Who::Server => Process::start_limited("server", LIMIT, &args, &dir),
            Who::Agent => Process::start("server", &args, &dir),
        };
        let (agents, health) = (server.address("agents"), server.address("health"));
        let other = Process::start("other", &world.other_args("0", ".other"), &dir);
        let both = format!("--proxy-server-host={}", other.address("agents"));
        let flags = ["--log-format=json", &both];
        let args = world.agent_args("a", agents.port(), &flags);
        let agent = match who {
            Who::Server => Process::start("agent", &args, &dir),
            Who::Agent => Process::start_limited("agent", LIMIT, &args, &dir),
        };
        until(health, IDLE, |idle| idle >= 4.0).await;
        until(other.address("health"), IDLE, |idle| idle >= 4.0).await;
        let (port, echo) = targets::echo().await;
        let mut short = Self {
            world,
            server,
            _other: other,
            agent,
            health,
            target: format!("127.0.0.1:{port}"),
            open: Vec::new(),
            _echo: echo,
        };
        let socket = short.world.connect();
        let refused = short
            .open_until(&socket, |short| short.open.len() >= BURST)
            .await;
        assert_eq!(refused, None);
        until(health, BUSY, |busy| busy >= 10.0).await;
        short.open.truncate(4);
        for four in [TUNNELS, BUSY] {
            until(health, four, |open| open == 4.0).await;
        }
        until(health, IDLE, |idle| idle >= 8.0).await;
        short
    }

    /// Opens tunnels until `enough`. Returns status and body of the first refusal, if any.
    async fn open_until(
        &mut self,
        socket: &Path,
        enough: impl Fn(&Self) -> bool,
    ) -> Option<(u16, String)> {
        let head = connect::head(&self.target);
        while !enough(self) {
            let mut answer = connect::request(socket, &head).await;
            if !answer.head.contains(" 200 ") {
                let status = answer.status();
                return Some((status, connect::rest(&mut answer.stream).await));
            }
            connect::echo(&mut answer.stream, b"new").await;
            self.open.push(answer.stream);
            assert!(self.open.len() < 2 * LIMIT as usize, "nobody is refused");
        }
        None
    }

    async fn assert_all_echo(&mut self) {
        for stream in &mut self.open {
            connect::echo(stream, b"not touched").await;
        }
    }

    /// Asserts that another tunnel finds no lane and uses the link.
    async fn assert_rides_the_link(&mut self) {
        let before = value(self.health, MISSES).await;
        let (socket, opened) = (self.world.connect(), self.open.len() + 1);
        let refused = self
            .open_until(&socket, |short| short.open.len() == opened)
            .await;
        assert_eq!(
            (refused, value(self.health, MISSES).await),
            (None, before + 1.0)
        );
    }

    /// Clients that connect and send nothing.
    async fn silent(&self, clients: usize) -> Vec<UnixStream> {
        let mut silent = Vec::new();
        for _client in 0..clients {
            silent.push(self.world.client().await);
        }
        silent
    }

    /// Connects silent clients until the server exceeds `LOW`, but not its next threshold.
    async fn fill_server(&self) -> Vec<UnixStream> {
        let missing = (LOW + 20).saturating_sub(self.server.descriptors());
        self.silent(missing).await
    }

    async fn assert_recovers(mut self) {
        self.open.clear();
        until_for(LANES_BACK, self.health, IDLE, |idle| idle >= 4.0).await;
        self.world.assert_serves(&self.target).await;
        until(self.health, BUSY, |busy| busy == 0.0).await;
        assert_eq!(value(self.health, LINKS).await, 1.0);
    }
}

/// Limit (peers): File descriptors in use
/// Limit (times): A client refused for lack of descriptors | has 2 s to send its request and read the answer
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_short_of_descriptors_closes_idle_lanes_then_refuses_new_clients() {
    let mut short = Short::start(Who::Server).await;
    let (health, socket) = (short.health, short.world.connect());
    let filling = short.fill_server().await;
    until(health, IDLE, |idle| idle == 0.0).await;
    let given_up = "adit_lanes_closed_total{reason=\"descriptors\"}";
    assert!(value(health, given_up).await >= 8.0);
    assert_eq!(value(health, BUSY).await, 4.0, "open tunnels keep theirs");
    short.assert_rides_the_link().await;

    let refused = short.open_until(&socket, |_short| false).await;
    let text = "server is short of file descriptors";
    assert_eq!(refused, Some((503, format!("{text}\r\n"))));
    let (connection, mut call) = Connection::proxied(&short.world).await;
    call.dial(1, &short.target);
    assert_eq!(call.dial_error().await, text);
    let refusals = "adit_dials_refused_total{cap=\"descriptors\"}";
    assert_eq!(value(health, refusals).await, 2.0);

    // More silent clients than free descriptors.
    let silent = short.silent(60).await;
    until(health, PAUSES, |pauses| pauses > 0.0).await;
    let spent = "process_cpu_seconds_total";
    let before = value(health, spent).await;
    for _look in 0..30 {
        assert!(short.server.descriptors() < LIMIT as usize - 4);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let spent = value(health, spent).await - before;
    assert!(spent < 1.0, "{spent} s of 3 s: it spins");
    short.assert_all_echo().await;
    // The server soon closes silent clients, and the next client gets the refusal.
    let head = connect::head(&short.target);
    assert_eq!(Some(connect::refused(&socket, &head).await), refused);
    drop((silent, filling, connection));
    short.assert_recovers().await;
}

/// Limit (peers): File descriptors in use
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_short_of_descriptors_closes_idle_lanes_then_refuses_dials() {
    let mut short = Short::start(Who::Agent).await;
    let (health, socket) = (short.health, short.world.connect());
    // Clients of the other server use up the agent's descriptors while its lanes to this server are idle.
    let other = short.world.dir.path().join("connect.other");
    let refused = short
        .open_until(&other, |short| short.agent.descriptors() >= LOW)
        .await;
    assert_eq!(refused, None);
    until(health, IDLE, |idle| idle == 0.0).await;
    assert!(value(health, "adit_lanes_closed_total{reason=\"drained\"}").await >= 8.0);
    assert_eq!(value(health, BUSY).await, 4.0, "open tunnels keep theirs");
    short.assert_rides_the_link().await;

    let refused = short.open_until(&socket, |_short| false).await;
    let text = format!("dial tcp {}: socket: too many open files", short.target);
    assert_eq!(refused, Some((503, text)));
    assert!(short.agent.descriptors() < LIMIT as usize - 16);
    short.assert_all_echo().await;
    short.assert_recovers().await;
}

/// Connections to a process without descriptors wait in the listen backlog. None is closed without an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_waiting_for_descriptors_are_served_once_some_are_free() {
    let mut short = Short::start(Who::Server).await;
    let filling = short.fill_server().await;
    let silent = short.silent(400).await;
    until(short.health, PAUSES, |pauses| pauses > 0.0).await;
    let (socket, target) = (short.world.connect(), short.target.clone());
    let late = async {
        // The first free descriptors accept this client. Its dial may still get 503 for lack of descriptors.
        let mut stream = loop {
            let answer = connect::request(&socket, &connect::head(&target)).await;
            if answer.head == connect::ESTABLISHED {
                break answer.stream;
            }
            assert!(
                answer.head.starts_with("HTTP/1.1 503 "),
                "{:?}",
                answer.head
            );
        };
        connect::echo(&mut stream, b"late").await;
    };
    let room = async {
        drop((silent, filling));
        short.open.clear();
    };
    within("a tunnel", async { tokio::join!(late, room) }).await;
}
