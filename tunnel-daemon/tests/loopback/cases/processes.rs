//! The real binary: killed, ended by signals, and called by other names.

use std::iter;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rand::{Rng as _, SeedableRng as _};
use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::support::lanes::{LINKS, TARGETS};
use crate::support::process::{
    Process, access_events, descriptors_without_lanes, metric, no_descriptor_left,
};
use crate::support::raw::Connection;
use crate::support::wait::{eventually, until, within, within_for};
use crate::support::world::World;
use crate::support::{connect, ports, targets};

/// Limit for new dials to work again after a kill -9.
const RECOVERED: Duration = Duration::from_secs(5);

pub(super) struct Processes {
    pub(super) world: World,
    pub(super) server: Process,
    pub(super) agents: std::net::SocketAddr,
    pub(super) health: std::net::SocketAddr,
}

impl Processes {
    pub(super) async fn start(flags: &[&str]) -> Self {
        let flags = [&["--log-format=json"], flags].concat();
        let mut world = World::start(&flags).await;
        // The in-process server only chose paths and created files.
        world.stop_server(Duration::ZERO).await;
        let server = Process::start("server", &world.server_args("0"), world.dir.path());
        let (agents, health) = (server.address("agents"), server.address("health"));
        Self {
            world,
            server,
            agents,
            health,
        }
    }

    pub(super) fn agent(&self, id: &str, flags: &[&str]) -> Process {
        let flags = [&["--log-format=json"], flags].concat();
        let args = self.world.agent_args(id, self.agents.port(), &flags);
        Process::start(id, &args, self.world.dir.path())
    }

    /// As [`Processes::start`], with a linked agent, `agent-1`.
    pub(super) async fn linked(flags: &[&str], of_agent: &[&str]) -> (Self, Process) {
        let processes = Self::start(flags).await;
        let agent = processes.agent("agent-1", of_agent);
        processes.links(1.0).await;
        (processes, agent)
    }

    /// Waits until the server has this many agents.
    pub(super) async fn links(&self, count: f64) {
        metric(self.health, LINKS, count).await;
    }

    /// Dials until one works; fails after [`RECOVERED`].
    async fn recovered(&self, target: &str) {
        within_for(RECOVERED, "new dials", async {
            loop {
                if let Ok(mut stream) = UnixStream::connect(self.world.connect()).await {
                    use tokio::io::AsyncWriteExt as _;
                    let asked = stream.write_all(&connect::head(target)).await;
                    if asked.is_ok() && connect::read_head(&mut stream).await.contains(" 200 ") {
                        return connect::echo(&mut stream, b"recovered").await;
                    }
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }
}

/// Echoes on this many tunnels, until dropped or cut.
fn load(processes: &Processes, target: &str, tunnels: usize) -> JoinSet<()> {
    let mut jobs = JoinSet::new();
    for _tunnel in 0..tunnels {
        let (socket, target) = (processes.world.connect(), target.to_owned());
        jobs.spawn(async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            let mut block = vec![5; 30_000];
            let mut stream = connect::open(&socket, &target).await;
            while stream.write_all(&block).await.is_ok()
                && stream.read_exact(&mut block).await.is_ok()
            {}
        });
    }
    jobs
}

/// A seed spreads the moments of the kills. The assertions hold at any moment.
///
/// Limit (times): New dials after an agent or server was killed | served within 5 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_agents_servers_and_clients_end_only_their_own_tunnels() {
    let (port, _target) = targets::echo().await;
    let mut processes = Processes::start(&["--proxy-strategies=destHost"]).await;
    let kept = processes.agent("kept", &["--agent-identifiers=ipv4=127.0.0.2"]);
    let kept_health = kept.address("health");
    let (killed_target, kept_target) = (format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}"));
    let flags = ["--agent-identifiers=ipv4=127.0.0.1"];
    let mut agent = processes.agent("killed", &flags);
    processes.links(2.0).await;
    processes.world.assert_serves(&kept_target).await;
    metric(kept_health, TARGETS, 0.0).await;
    let server_fds = descriptors_without_lanes(&processes.server, processes.health).await;
    let kept_fds = descriptors_without_lanes(&kept, kept_health).await;
    let mut random = rand::rngs::StdRng::seed_from_u64(15);
    let mut moment = || Duration::from_millis(random.random_range(50..250));

    for _round in 0..3 {
        let mut witness = connect::open(&processes.world.connect(), &kept_target).await;
        let mut doomed = load(&processes, &killed_target, 8);
        let mut clients = load(&processes, &kept_target, 8);
        // Load at full speed until a random moment.
        let _over = tokio::time::timeout(moment(), async {
            while doomed.join_next().await.is_some() {}
        })
        .await;
        agent.kill();
        within("the killed agent's tunnels to end", async {
            while doomed.join_next().await.is_some() {}
        })
        .await;
        connect::echo(&mut witness, b"of another agent").await;
        agent = processes.agent("killed", &flags);
        processes.recovered(&killed_target).await;
        // All clients leave at once, in the middle of their bytes.
        clients.shutdown().await;
        connect::echo(&mut witness, b"of another client").await;
    }
    for gauge in [
        "established_connections",
        "pending_backend_dials",
        "http_connections",
    ] {
        let series = format!("konnectivity_network_proxy_server_{gauge}");
        metric(processes.health, &series, 0.0).await;
    }
    metric(processes.health, "adit_held_bytes", 0.0).await;
    metric(kept_health, TARGETS, 0.0).await;
    metric(kept_health, "adit_held_bytes", 0.0).await;
    no_descriptor_left(&processes.server, processes.health, server_fds).await;
    no_descriptor_left(&kept, kept_health, kept_fds).await;

    // The server is killed, too: its agents find the next one on the same port.
    let mut cut = load(&processes, &kept_target, 8);
    let _over =
        tokio::time::timeout(moment(), async { while cut.join_next().await.is_some() {} }).await;
    processes.server.kill();
    within("all tunnels to end", async {
        while cut.join_next().await.is_some() {}
    })
    .await;
    metric(kept_health, TARGETS, 0.0).await;
    let args = processes
        .world
        .server_args(&processes.agents.port().to_string());
    processes.server = Process::start("server-2", &args, processes.world.dir.path());
    processes.health = processes.server.address("health");
    processes.recovered(&kept_target).await;
    processes.recovered(&killed_target).await;
    processes.links(2.0).await;
    no_descriptor_left(&kept, kept_health, kept_fds).await;
}

/// Upstream's server hangs while a client stream is open.
///
/// Limit (times): SIGTERM to exit, native mode
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_ends_both_programs_within_their_grace_whatever_clients_do() {
    let (target, _echo) = targets::local_echo().await;
    let grace = Duration::from_secs(1);
    let flags = ["--shutdown-grace=1s"];
    let (mut processes, mut agent) = Processes::linked(&flags, &flags).await;
    let (connection, mut call) = Connection::proxied(&processes.world).await;
    let conn = call.open(1, &target).await;
    call.echo(conn, b"open").await;
    let _idle = connection.proxy().await;
    let mut stream = connect::open(&processes.world.connect(), &target).await;

    let limit = grace + Duration::from_secs(5);
    let start = Instant::now();
    agent.signal(Signal::TERM);
    // While it drains, open tunnels continue. So do new dials, because this is the only agent.
    connect::echo(&mut stream, b"while draining").await;
    assert!(agent.wait(limit).success());
    assert!(
        start.elapsed() >= grace / 2,
        "it did not wait for its tunnels"
    );

    processes.links(0.0).await;
    let agent = processes.agent("b", &[]);
    processes.links(1.0).await;
    let mut call = connection.proxy().await;
    call.open(2, &target).await;
    processes.server.signal(Signal::TERM);
    assert!(processes.server.wait(limit).success());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_signal_ends_the_server_at_once() {
    let (target, _echo) = targets::local_echo().await;
    let (mut processes, _agent) = Processes::linked(&["--shutdown-grace=60s"], &[]).await;
    let _open = connect::open(&processes.world.connect(), &target).await;
    processes.server.signal(Signal::TERM);
    processes.server.logs("shutting down").await;
    processes.server.signal(Signal::TERM);
    let status = processes.server.wait(Duration::from_secs(20));
    assert_eq!(status.code(), Some(1), "as upstream");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn symlinks_with_upstreams_names_take_upstreams_flags() {
    let (target, _echo) = targets::local_echo().await;
    let world = compat().await;
    let (_server, mut agent, health) = upstreams_flags(&world, "-mode=http-connect", &[]).await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"drop-in").await;
    // As in upstream, the first signal drains without limit, and the second ends the agent with code 0.
    agent.signal(Signal::TERM);
    let drained = "konnectivity_network_proxy_server_stream_packets_total{packet_type=\"DRAIN\",segment=\"from_agent\"}";
    metric(health, drained, 1.0).await;
    connect::echo(&mut stream, b"draining").await;
    agent.signal(Signal::TERM);
    assert!(agent.wait(Duration::from_secs(20)).success());
}

/// A world without a server, for programs with upstream's names.
async fn compat() -> World {
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    linked(&world);
    world
}

/// Upstream's flags of a server with this socket, and with agent, health and admin ports.
pub(super) fn compat_server(world: &World, socket: PathBuf, ports: [u16; 3]) -> Vec<String> {
    let file = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let [agents, health, admin] = ports;
    vec![
        file("uds-name", socket),
        "--server-port=0".to_owned(),
        format!("--agent-port={agents}"),
        format!("--health-port={health}"),
        format!("--admin-port={admin}"),
        file("cluster-cert", world.files.cert("server")),
        file("cluster-key", world.files.key("server")),
        file("cluster-ca-cert", world.files.ca_file()),
    ]
}

/// Upstream's flags of an agent of the server at this port, with health and admin ports.
pub(super) fn compat_agent(world: &World, server: u16, ports: [u16; 2]) -> Vec<String> {
    let file = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let [health, admin] = ports;
    vec![
        "--proxy-server-host=127.0.0.1".to_owned(),
        format!("--proxy-server-port={server}"),
        format!("--health-server-port={health}"),
        format!("--admin-server-port={admin}"),
        file("ca-cert", world.files.ca_file()),
        file("agent-cert", world.files.cert("agent")),
        file("agent-key", world.files.key("agent")),
    ]
}

/// A linked server and agent with upstream's names and flags, and the server's health port.
pub(super) async fn upstreams_flags(
    world: &World,
    mode: &str,
    flags: &[&str],
) -> (Process, Process, std::net::SocketAddr) {
    // Upstream's flags do not accept port 0. No other test gets these ports.
    let [agents, health, admin, agent_health, agent_admin] = free_ports();
    let dir = world.dir.path();
    let socket = if mode.ends_with("grpc") {
        world.grpc()
    } else {
        world.connect()
    };
    let start = |name: &str, own: Vec<String>, flags: &[&str]| {
        let program = dir.join(name);
        let called = program.display().to_string();
        let flags = flags.iter().map(|flag| (*flag).to_owned());
        let args: Vec<String> = iter::once(called).chain(own).chain(flags).collect();
        Process::start_program(&format!("compat-{name}"), &program, &args, dir)
    };
    let own = compat_server(world, socket, [agents, health, admin]);
    let server = start("proxy-server", own, &[&[mode, "--v=2"], flags].concat());
    let own = compat_agent(world, agents, [agent_health, agent_admin]);
    let agent = start("proxy-agent", own, &[]);
    let health = std::net::SocketAddr::from(([127, 0, 0, 1], health));
    eventually("the server listens", async || {
        tokio::net::TcpStream::connect(health).await.is_ok()
    })
    .await;
    metric(health, LINKS, 1.0).await;
    (server, agent, health)
}

/// klog's `--stderrthreshold` is ERROR by default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_file_lines_below_error_stay_off_standard_error() {
    let world = compat().await;
    let path = world.dir.path().join("klog");
    let file = format!("--log-file={}", path.display());
    let flags = ["--logtostderr=false", file.as_str()];
    let (server, _agent, _health) = upstreams_flags(&world, "--mode=grpc", &flags).await;
    until("the line in the file", || {
        std::fs::read_to_string(&path).is_ok_and(|lines| lines.contains("server is up"))
    })
    .await;
    assert_eq!(server.log(), "");
}

/// Upstream's programs log the failure and continue, whether the port is taken or the host does not resolve.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compat_server_runs_without_its_admin_port() {
    let [taken] = free_ports();
    let _holder = std::net::TcpListener::bind(("127.0.0.1", taken)).expect("it is free");
    // A DNS label has at most 63 bytes, so no name server is asked.
    let no_name = "x".repeat(64);
    for flag in [
        format!("--admin-port={taken}"),
        format!("--admin-bind-address={no_name}"),
    ] {
        let world = compat().await;
        let (server, _agent, _health) = upstreams_flags(&world, "--mode=grpc", &[&flag]).await;
        server.logs("going on without it").await;
    }
}

/// Upstream's server waits without limit for a client that keeps its stream open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compat_server_exits_within_its_grace_with_a_client_stream_open() {
    let (target, _echo) = targets::local_echo().await;
    for (flag, grace) in [
        ("--graceful-shutdown-timeout=0s", Duration::ZERO),
        ("--graceful-shutdown-timeout=1s", Duration::from_secs(1)),
    ] {
        let world = compat().await;
        let (mut server, _agent, _health) = upstreams_flags(&world, "--mode=grpc", &[flag]).await;
        let (_connection, mut call) = Connection::proxied(&world).await;
        let conn = call.open(1, &target).await;
        call.echo(conn, b"open").await;
        let start = Instant::now();
        server.signal(Signal::TERM);
        assert_eq!(server.wait(grace + Duration::from_secs(10)).code(), Some(0));
        assert!(start.elapsed() >= grace / 2, "it did not wait");
    }
}

/// Each tunnel and each failed dial is logged once, with its byte counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_client_has_one_access_event_with_its_bytes_and_end() {
    let (port, _target) = targets::echo().await;
    let (_held, closed) = targets::closed_port();
    let (target, closed) = (format!("127.0.0.1:{port}"), closed.to_string());
    let (processes, _agent) = Processes::linked(&[], &[]).await;
    let mut stream = connect::open(&processes.world.connect(), &target).await;
    connect::echo(&mut stream, b"five.").await;
    drop(stream);
    let (connection, mut call) = Connection::proxied(&processes.world).await;
    let conn = call.open(1, &target).await;
    call.echo(conn, b"and seven").await;
    drop(call);
    let refused = connect::refused(&processes.world.connect(), &connect::head(&closed)).await;
    assert!(refused.1.contains("connection refused"), "{refused:?}");
    let events = || access_events(&processes.server.log());
    until("three events", || events().len() >= 3).await;
    drop(connection);
    let mut seen: Vec<[String; 6]> = events()
        .iter()
        .map(|event| {
            let is_open = event["message"] != "dial failed";
            for time in ["dial_seconds", "life_seconds"] {
                let is_due = is_open || time == "dial_seconds";
                assert_eq!(
                    event[time].as_f64().is_some_and(|time| time < 60.0),
                    is_due,
                    "{event}"
                );
            }
            [
                "client_dialect",
                "agent",
                "destination",
                "bytes_to_target",
                "bytes_to_client",
                "end",
            ]
            .map(|field| event[field].to_string().replace('"', ""))
        })
        .collect();
    seen.sort();
    let expected = [
        ["grpc", "agent-1", &target, "9", "9", "client_gone"],
        ["http-connect", "", &closed, "null", "null", "other"],
        ["http-connect", "agent-1", &target, "5", "5", "clean"],
    ];
    assert_eq!(seen, expected.map(|row| row.map(str::to_owned)));
}

/// The Go client library gives up a tunnel whose user does not read. The log must name the client as the cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_after_a_stall_of_ten_seconds_is_logged() {
    let (port, _target) = targets::source(1 << 30).await;
    let (processes, _agent) = Processes::linked(&[], &[]).await;
    let (connection, mut call) = Connection::proxied(&processes.world).await;
    call.open(1, &format!("127.0.0.1:{port}")).await;
    // The client's window fills, and the client reads no more. The subject of this test is the time.
    tokio::time::sleep(Duration::from_secs(11)).await;
    drop((call, connection));
    processes.server.logs("\"client_stalled\"").await;
    let log = processes.server.log();
    let event = log.lines().find(|line| line.contains("client_stalled"));
    assert!(
        event.is_some_and(|event| event.contains("client_gone")),
        "{log}"
    );
}

/// Creates symlinks with the names of upstream's programs.
pub(super) fn linked(world: &World) {
    for name in ["proxy-server", "proxy-agent"] {
        let link = world.dir.path().join(name);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_adit"), link).expect("a link");
    }
}

/// Ports that upstream's flags accept: below the ephemeral range.
pub(super) fn free_ports<const N: usize>() -> [u16; N] {
    std::array::from_fn(|_| ports::free())
}
