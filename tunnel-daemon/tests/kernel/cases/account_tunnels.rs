//! Accounting in server and agent: kernel and relay engines count the same bytes.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use adit::demo::grpc_client::GrpcTunnel;
use adit::{agent, server};
use adit_account::Options;
use adit_config::{Command as Parsed, parse};
use adit_relay::{Preference, probe};
use adit_telemetry::Scrape;
use adit_testkit::certificates::ThrowawayFiles;
use aya::programs::loaded_programs;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::Endpoint;

use crate::support::accounting::{Accounting, bytes, lines, of, sample, seconds};
use crate::support::privilege::{ready, skip};
use crate::support::wait::until;

const TARGETS: &str = r#"agent="agent-1",destination_class="127.0.0.0/8""#;
pub(super) const AGENT: &str = r#"agent="agent-1",destination_class="""#;
const ANSWER: usize = "HTTP/1.1 200 Connection Established\r\n\r\n".len();
/// Bytes to the target and to the client, for tunnels that relays move: tiny tunnels, and sizes on either side of 256 KiB.
/// Relays splice beyond 256 KiB.
const RELAYED: [(usize, usize); 7] = [
    (1, 3),
    (0, 70_001),
    (70_003, 0),
    (262_145, 17),
    (9, 3_000_007),
    BULK,
    (5, 1),
];
const BULK: (usize, usize) = (5_000_011, 4_000_037);
/// Most additional tunnels of size [`BULK`] until a relay splices. Splicing takes a socket that fills faster than it is
/// emptied, which may take several tunnels on a busy host.
const BULKS_MAX: usize = 16;
const COPIED: &str = "adit_relay_bytes_total{mover=\"copy\"}";
const SPLICED: &str = "adit_relay_bytes_total{mover=\"splice\"}";

/// A server with a plaintext frontend on TCP, and one agent.
pub(super) struct World {
    pub(super) server: server::RunningServer,
    pub(super) agent: agent::RunningAgent,
    _files: ThrowawayFiles,
}

impl World {
    /// Starts both programs with the additional flags `further`.
    pub(super) async fn start(lanes: &str, further: &[&str]) -> Self {
        let further = further.iter().map(|flag| (*flag).to_owned());
        let further: Vec<String> = further.collect();
        Self::start_with(lanes, further.clone(), further).await
    }

    /// Starts server and agent with additional flags for each.
    pub(super) async fn start_with(
        lanes: &str,
        of_server: Vec<String>,
        of_agent: Vec<String>,
    ) -> Self {
        let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).unwrap();
        let file = |flag: &str, path: std::path::PathBuf| format!("--{flag}={}", path.display());
        let mut server = vec![
            "--frontend=http-connect=tcp:127.0.0.1:0".to_owned(),
            "--frontend=grpc=tcp:127.0.0.1:0".to_owned(),
            "--insecure-plaintext-frontend".to_owned(),
            file("cluster-cert", files.cert("server")),
            file("cluster-key", files.key("server")),
            file("cluster-ca-cert", files.ca_file().to_path_buf()),
            "--agent-bind-address=127.0.0.1".to_owned(),
            "--agent-port=0".to_owned(),
            "--health-bind-address=127.0.0.1".to_owned(),
            "--health-port=0".to_owned(),
            "--admin-port=off".to_owned(),
            "--admin-socket=off".to_owned(),
            format!("--lanes-per-link={lanes}"),
            "--account=on".to_owned(),
        ];
        server.extend(of_server);
        let Parsed::Server(plan) = command("server", &server) else {
            panic!("no server");
        };
        let server = server::start(&plan).await.unwrap();
        let mut agent = vec![
            format!("--proxy-server-host={}", server.agents),
            file("ca-cert", files.ca_file().to_path_buf()),
            file("agent-cert", files.cert("agent")),
            file("agent-key", files.key("agent")),
            "--agent-id=agent-1".to_owned(),
            "--allow-target=127.0.0.0/8".to_owned(),
            "--health-server-host=127.0.0.1".to_owned(),
            "--health-server-port=0".to_owned(),
            "--admin-server-port=off".to_owned(),
            "--admin-socket=off".to_owned(),
            "--account=on".to_owned(),
        ];
        agent.extend(of_agent);
        let Parsed::Agent(plan) = command("agent", &agent) else {
            panic!("no agent");
        };
        let agent = agent::start(&plan).await.unwrap();
        let linked = || server.links() == 1;
        until("a link", linked, String::new).await;
        Self {
            server,
            agent,
            _files: files,
        }
    }

    /// Opens a tunnel, and returns it with the size of the request.
    pub(super) async fn open(&self, target: &str) -> (TcpStream, usize) {
        let mut stream = TcpStream::connect(self.server.frontends[0]).await.unwrap();
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = [0; ANSWER];
        stream.read_exact(&mut answer).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
        (stream, request.len())
    }
}

fn command(role: &str, flags: &[String]) -> Parsed {
    let args = ["adit", role].map(str::to_owned);
    let args = args.iter().chain(flags).map(std::ffi::OsString::from);
    parse(args, &|_name| None).unwrap().command
}

/// Sends `bytes` and shuts down writing, either before (`first`) or after it has read EOF.
async fn half(socket: &mut TcpStream, bytes: usize, first: bool) -> usize {
    let mut received = Vec::new();
    let block = vec![5; bytes];
    if first {
        let (mut read, mut write) = socket.split();
        let sending = async {
            write.write_all(&block).await.unwrap();
            write.shutdown().await.unwrap();
        };
        let (_sent, read) = tokio::join!(sending, read.read_to_end(&mut received));
        return read.unwrap();
    }
    let read = socket.read_to_end(&mut received).await.unwrap();
    socket.write_all(&block).await.unwrap();
    socket.shutdown().await.unwrap();
    read
}

/// Expected counts.
#[derive(Default)]
pub(super) struct Moved {
    tunnels: u64,
    to_target: u64,
    to_client: u64,
    /// Bytes of request heads.
    heads: u64,
}

/// Opens tunnels of these sizes, one after the other. The target closes every second tunnel first.
pub(super) async fn drive(world: &World, sizes: &[(usize, usize)], moved: &mut Moved) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    for (up, down) in sizes.iter().copied() {
        let client_first = moved.tunnels.is_multiple_of(2);
        let (client, accepted) = tokio::join!(world.open(&target), listener.accept());
        let ((mut client, head), mut accepted) = (client, accepted.unwrap().0);
        let (at_client, at_target) = tokio::join!(
            half(&mut client, up, client_first),
            half(&mut accepted, down, !client_first)
        );
        assert_eq!((at_client, at_target), (down, up));
        moved.tunnels += 1;
        moved.to_target += up as u64;
        moved.to_client += down as u64;
        moved.heads += head as u64;
    }
}

/// Random sizes from a fixed seed.
pub(super) fn odd_sizes<const N: usize>() -> [(usize, usize); N] {
    let mut random = rand::rngs::StdRng::seed_from_u64(32);
    std::array::from_fn(|_| {
        let mut size = || random.random_range(0..600_000);
        (size(), size())
    })
}

async fn the_kernel_counts_what_the_engines_count(lanes: &str) {
    let (world, mut moved, began) = (
        World::start(lanes, &[]).await,
        Moved::default(),
        Instant::now(),
    );
    drive(&world, &odd_sizes::<24>(), &mut moved).await;
    let role = if lanes == "0" { "link" } else { "lane" };
    counted_alike(&world, &moved, role, began).await;
    world.agent.stop().await;
    world.server.stop(Some(std::time::Duration::ZERO)).await;
}

/// Checks the kernel's counts at both ends of tunnels that began after `began`, on lanes or links.
async fn counted_alike(world: &World, moved: &Moved, role: &str, began: Instant) {
    let Moved {
        tunnels,
        to_target,
        to_client,
        heads,
    } = *moved;
    let (server, agent) = (world.server.metrics.scrape(), world.agent.metrics.scrape());
    let count = Some(tunnels);
    let done = || {
        of(&agent, "connections_total", TARGETS, "", "target") == count
            && of(&server, "connections_total", AGENT, "", "client") == count
            && engine(&server, "to_client") == Some(to_client)
    };
    until("ends", done, || lines(&agent) + &lines(&server)).await;
    assert_eq!(engine(&server, "to_target"), Some(to_target));
    assert_eq!(bytes(&agent, TARGETS, "target"), (to_target, to_client));
    // For clients, the request and its answer count as payload.
    let answers = ANSWER as u64 * tunnels;
    let client = bytes(&server, AGENT, "client");
    assert_eq!(client, (to_client + answers, to_target + heads));
    times(&agent, TARGETS, "target", tunnels, began);
    times(&server, AGENT, "client", tunnels, began);
    // Links and lanes carry frames besides payload, so the test only checks that their counts are positive.
    let carried = || {
        [&agent, &server].iter().all(|scrape| {
            of(scrape, "bytes_total", AGENT, "sent", role) > Some(0)
                && of(scrape, "bytes_total", AGENT, "received", role) > Some(0)
        })
    };
    until("bytes of links and lanes", carried, || {
        lines(&agent) + &lines(&server)
    })
    .await;
    for scrape in [&agent, &server] {
        assert_eq!(sample(scrape, "adit_ebpf_account_attached"), Some(1));
        let lost = sample(
            scrape,
            r#"adit_ebpf_account_lost_total{reason="ring_full"}"#,
        );
        assert_eq!(lost, Some(0));
    }
}

/// Checks round-trip times and lifetimes of ended connections that began after `began`.
#[expect(clippy::cast_precision_loss, reason = "a few tunnels")]
fn times(scrape: &Scrape, labels: &str, role: &str, connections: u64, began: Instant) {
    let rtt = seconds(scrape, "rtt", labels, role);
    let lifetime = seconds(scrape, "lifetime", labels, role);
    for name in ["rtt_seconds_count", "lifetime_seconds_count"] {
        let count = of(scrape, name, labels, "", role);
        assert_eq!(count, Some(connections), "{role}: {name}");
    }
    // A round trip on loopback takes less than a second.
    let connections = connections as f64;
    assert!(rtt > 0.0 && rtt < connections, "{role}: {rtt} s");
    let longest = connections * began.elapsed().as_secs_f64();
    assert!(
        lifetime > 0.0 && lifetime < longest,
        "{role}: {lifetime} s of {longest}"
    );
}

/// Bytes that relays copied and spliced for ended tunnels.
fn relayed(scrape: &Scrape) -> [u64; 2] {
    [COPIED, SPLICED].map(|series| sample(scrape, series).unwrap())
}

/// On plaintext lanes tunnels use raw lanes, and relays move their bytes.
async fn the_kernel_counts_what_relays_move(engine: &str) {
    let engine_flag = format!("--relay-engine={engine}");
    let flags = ["--lane-security=plaintext", &engine_flag];
    let (world, mut moved, began) = (
        World::start("64", &flags).await,
        Moved::default(),
        Instant::now(),
    );
    let (server, agent) = (world.server.metrics.scrape(), world.agent.metrics.scrape());
    let driver = format!(r#"adit_relay_tunnels{{driver="{engine}"}}"#);
    for scrape in [&server, &agent] {
        assert_eq!(sample(scrape, &driver), Some(0));
    }
    // With fewer idle lanes the next tunnel would stay framed.
    let idle = || sample(&server, r#"adit_lanes{state="idle"}"#) >= Some(3);
    let all_spliced = || {
        [&server, &agent]
            .iter()
            .all(|scrape| relayed(scrape)[1] > 0)
    };
    let sizes = RELAYED.into_iter().chain([BULK; BULKS_MAX]);
    for (at, size) in sizes.enumerate() {
        if at >= RELAYED.len() && all_spliced() {
            break;
        }
        until("idle lanes", idle, String::new).await;
        drive(&world, &[size], &mut moved).await;
    }
    let raw = r#"adit_tunnels_opened_total{path="raw-lane"}"#;
    assert_eq!(sample(&server, raw), Some(moved.tunnels));
    counted_alike(&world, &moved, "lane", began).await;
    // The relay counters sum both directions, at either end.
    let both = moved.to_target + moved.to_client;
    let counted = || {
        [&server, &agent]
            .iter()
            .all(|scrape| relayed(scrape).iter().sum::<u64>() == both)
    };
    until("the counts of relays", counted, || {
        format!(
            "{both}, and server {:?}, agent {:?}",
            relayed(&server),
            relayed(&agent)
        )
    })
    .await;
    assert!(all_spliced(), "{:?}", relayed(&agent));
    assert!(relayed(&server)[0] > 0 && relayed(&agent)[0] > 0);
    world.agent.stop().await;
    world.server.stop(Some(std::time::Duration::ZERO)).await;
}

fn engine(scrape: &Scrape, direction: &str) -> Option<u64> {
    sample(
        scrape,
        &format!(r#"adit_tunnel_bytes_total{{direction="{direction}"}}"#),
    )
}

/// Limit (accounting): Payload bytes of cleanly closed plaintext connections
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kernel_and_engine_byte_counts_agree_on_lanes() {
    if ready("accounting for tunnels on lanes") {
        the_kernel_counts_what_the_engines_count("64").await;
    }
}

/// Limit (accounting): Payload bytes of cleanly closed plaintext connections
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kernel_and_engine_byte_counts_agree_on_the_link() {
    if ready("accounting for tunnels on the link") {
        the_kernel_counts_what_the_engines_count("0").await;
    }
}

/// A gRPC client's connection carries several tunnels, so it has its own role. The agent's sockets to targets count each
/// tunnel.
///
/// Limit (accounting): Connections from node to control plane and of gRPC clients
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_client_connections_have_their_own_role_and_tunnels_are_counted_at_targets() {
    const OF_NO_AGENT: &str = r#"agent="",destination_class="""#;
    const TUNNELS: u64 = 3;
    const SIZE: usize = 20_000;
    if !ready("accounting for tunnels of a gRPC client") {
        return;
    }
    let world = World::start("64", &[]).await;
    let frontend = world.server.frontends[1];
    let endpoint = Endpoint::from_shared(format!("http://{frontend}")).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    for _ in 0..TUNNELS {
        let (tunnel, accepted) = tokio::join!(
            GrpcTunnel::open(channel.clone(), &target),
            listener.accept()
        );
        let (mut tunnel, mut accepted) = (tunnel.unwrap(), accepted.unwrap().0);
        tunnel.write(vec![5; SIZE].into()).await.unwrap();
        accepted.read_exact(&mut [0; SIZE]).await.unwrap();
        accepted.write_all(b"answer").await.unwrap();
        let mut received = 0;
        while received < b"answer".len() {
            received += tunnel.read().await.unwrap().unwrap().len();
        }
        tunnel.close().await.unwrap();
        assert_eq!(accepted.read(&mut [0]).await.unwrap(), 0);
    }
    drop(channel);
    // A connection that closes after the handshake counts, too.
    let mut stranger = TcpStream::connect(frontend).await.unwrap();
    stranger.shutdown().await.unwrap();
    let _settings = stranger.read_to_end(&mut Vec::new()).await;
    let mut moved = Moved::default();
    drive(&world, &[(1, 1)], &mut moved).await;

    let (server, agent) = (world.server.metrics.scrape(), world.agent.metrics.scrape());
    let done = || {
        of(&agent, "connections_total", TARGETS, "", "target") == Some(TUNNELS + 1)
            && of(&server, "connections_total", AGENT, "", "client") == Some(1)
            // Each end is either delivered or counted as lost, so both ends arrived. The shared cgroup also counts losses of
            // the agent.
            && of(&server, "connections_total", OF_NO_AGENT, "", "grpc-client") == Some(2)
    };
    until("ends", done, || lines(&agent) + &lines(&server)).await;
    let (up, down) = (TUNNELS * SIZE as u64, TUNNELS * 6);
    assert_eq!(bytes(&agent, TARGETS, "target"), (up + 1, down + 1));
    // The total includes frame headers, and payload counts only once.
    let (to_client, to_server) = bytes(&server, OF_NO_AGENT, "grpc-client");
    assert!(to_client > down, "{to_client} of {down}");
    assert!(to_server > up && to_server < 2 * up, "{to_server} of {up}");
    world.agent.stop().await;
    world.server.stop(Some(std::time::Duration::ZERO)).await;
}

/// Limit (accounting): Payload bytes of cleanly closed plaintext connections
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kernel_and_relay_byte_counts_agree_on_raw_lanes_with_epoll() {
    if ready("accounting for tunnels that relays move") {
        the_kernel_counts_what_relays_move("epoll").await;
    }
}

/// Limit (accounting): Payload bytes of cleanly closed plaintext connections
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kernel_and_relay_byte_counts_agree_on_raw_lanes_with_io_uring() {
    let test = "accounting for tunnels that relays move by io_uring";
    if !ready(test) {
        return;
    }
    match probe(Preference::IoUring) {
        Ok(_) => the_kernel_counts_what_relays_move("io-uring").await,
        Err(error) => skip(test, error),
    }
}

/// Starts a test of this binary in a child process.
pub(super) fn child(test: &str, edit: impl FnOnce(&mut Command)) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    edit(&mut command);
    command.spawn().unwrap()
}

/// Returns what a child prints after `key`.
pub(super) fn said(child: &mut Child, key: &str) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut values = lines.map_while(Result::ok);
    let found = values.find_map(|line| line.split_once(key).map(|(_, value)| value.to_owned()));
    found.unwrap_or_else(|| panic!("the child never said {key}"))
}

/// Limit (accounting): eBPF programs of a killed process | removed
#[tokio::test]
async fn a_killed_process_leaves_no_program_behind() {
    if !ready("the end of programs") {
        return;
    }
    let mut child = child("cases::account_tunnels::child_that_accounts", |_command| ());
    let program: u32 = said(&mut child, "program ").parse().unwrap();
    let loaded = || {
        let mut all = loaded_programs().filter_map(Result::ok);
        all.any(|info| info.id() == program)
    };
    assert!(loaded());
    child.kill().unwrap();
    child.wait().unwrap();
    until("the end of a program", || !loaded(), String::new).await;
}

#[tokio::test]
#[ignore = "run by a_killed_process_leaves_no_program_behind"]
async fn child_that_accounts() {
    let accounting = Accounting::start(Options::with_series_max(1));
    println!("program {}", accounting.table.program().unwrap());
    // Runs until standard input is closed.
    let _line = std::io::stdin().lines().next();
}
