//! SIGTERM with unresponsive clients: both programs exit within their grace period.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use adit_net::tasks::Tasks;
use rustix::process::Signal;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpStream, UnixStream};

use super::metrics::full;
use super::processes::Processes;
use crate::support::lanes::TUNNELS;
use crate::support::process::{Process, metric};
use crate::support::raw::{Call, Connection};
use crate::support::targets::{SilentHost, silent_host};
use crate::support::{connect, targets};

const PENDING: &str = "konnectivity_network_proxy_server_pending_backend_dials";
const GRACE: Duration = Duration::from_secs(1);
/// The grace period, 2 s, and a margin for a busy machine. A program that waits for one of these clients exceeds it: dials
/// and heads last 60 s, lingering bytes 30 s, and streams never end.
const LIMIT: Duration = Duration::from_secs(1 + 2 + 4);
const FLAGS: [&str; 2] = ["--shutdown-grace=1s", "--dial-timeout=60s"];
/// Blocks of an upload: more than all socket buffers of a lane hold.
const UPLOAD_BLOCKS: usize = 2048;

/// Clients that read nothing, send incomplete requests, or wait for answers that never come. None of them closes.
struct Deaf {
    _calls: Vec<Call>,
    _connection: Connection,
    _clients: Vec<UnixStream>,
    _strangers: Vec<TcpStream>,
    _silent: SilentHost,
    _targets: [Tasks; 2],
}

async fn says(path: &Path, words: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(path).await.expect("it listens");
    stream.write_all(words).await.expect("taken");
    stream
}

async fn knocks(address: SocketAddr, words: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(words).await.expect("taken");
    stream
}

impl Deaf {
    async fn start(processes: &Processes) -> Self {
        let (world, health) = (&processes.world, processes.health);
        let ((source, source_port), (sink, sink_port)) =
            (targets::with_small_window(), targets::with_small_window());
        let targets = [targets::source_on(source, u64::MAX), targets::deaf_on(sink)];
        let (source, sink) = (
            format!("127.0.0.1:{source_port}"),
            format!("127.0.0.1:{sink_port}"),
        );
        let silent = silent_host();
        let connection = Connection::client(world).await;

        // Downloads that no client reads and uploads that no target reads, in both dialects.
        let mut download = connection.proxy().await;
        download.open(1, &source).await;
        let mut upload = connection.proxy().await;
        let conn = upload.open(2, &sink).await;
        upload.upload(conn, UPLOAD_BLOCKS);
        let unread = connect::open(&world.connect(), &source).await;
        let untaken = connect::open(&world.connect(), &sink).await;
        let block = vec![7; 64 * 1024];
        // Fills the socket buffer. The upload need not be blocked yet, because it never ends.
        while untaken.try_write(&block).is_ok() {}
        metric(health, TUNNELS, 4.0).await;
        metric(health, &full("Connect"), 2.0).await;

        // Unanswered dials, a call without a dial, and incomplete requests of every kind.
        let mut dialing = connection.proxy().await;
        dialing.dial(3, &silent.address);
        let idle = connection.proxy().await;
        let clients = vec![
            unread,
            untaken,
            says(&world.connect(), &connect::head(&silent.address)).await,
            says(&world.connect(), b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost").await,
            says(&world.connect(), b"").await,
            says(&world.grpc(), b"PRI * HTTP/2.0\r\n").await,
            says(&world.grpc(), b"").await,
        ];
        let strangers = vec![
            knocks(processes.agents, b"").await,
            knocks(processes.agents, b"\x16\x03\x01\x02\x00\x01").await,
            knocks(health, b"GET /metrics HTTP/1.1\r\nHost").await,
        ];
        metric(health, PENDING, 2.0).await;
        Self {
            _calls: vec![download, upload, dialing, idle],
            _connection: connection,
            _clients: clients,
            _strangers: strangers,
            _silent: silent,
            _targets: targets,
        }
    }
}

/// Ends a program by SIGTERM, and asserts success within `LIMIT`.
fn leaves(process: &mut Process) {
    let start = Instant::now();
    process.signal(Signal::TERM);
    let status = process.wait(LIMIT);
    assert_eq!(status.code(), Some(0), "{status}");
    let took = start.elapsed();
    assert!(
        took >= GRACE / 2,
        "it did not wait for its tunnels: {took:?}"
    );
}

/// Upstream's server waits forever for each of these clients.
///
/// Limit (times): SIGTERM to exit, native mode | 25 s, and 1 s for the last packets
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_exits_within_its_grace_beside_clients_that_neither_read_nor_close() {
    for lanes in [&["--lanes-per-link=0"][..], &[]] {
        let flags = [&FLAGS[..], lanes].concat();
        let (mut processes, _agent) = Processes::linked(&flags, &FLAGS).await;
        let _deaf = Deaf::start(&processes).await;
        leaves(&mut processes.server);
        for socket in [processes.world.connect(), processes.world.grpc()] {
            assert!(!socket.exists(), "{} is left", socket.display());
        }
    }
}

/// The unresponsive clients are at the far end of the agent's link.
///
/// Limit (times): SIGTERM to exit, native mode
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_exits_within_its_grace_beside_clients_that_neither_read_nor_close() {
    for lanes in [&["--lanes-per-link=0"][..], &[]] {
        let flags = [&FLAGS[..], lanes].concat();
        let (processes, mut agent) = Processes::linked(&flags, &FLAGS).await;
        let _deaf = Deaf::start(&processes).await;
        leaves(&mut agent);
        processes.links(0.0).await;
        metric(processes.health, PENDING, 0.0).await;
    }
}
