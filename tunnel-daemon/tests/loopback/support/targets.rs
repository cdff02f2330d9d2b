//! Targets on the loopback network. All of 127/8 leads to them, so that a target's address can select its agent.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use adit_net::tasks::Tasks;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;

/// Limit on concurrent connections of one target.
const CONNECTIONS_MAX: usize = 16_384;

/// Serves each connection with `serve`, and returns the port, which is open on every IPv4 address of this host.
pub(crate) async fn serve<H, F>(serve: H) -> (u16, Tasks)
where
    H: Fn(TcpStream) -> F + Send + 'static,
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("0.0.0.0:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    (port, serve_on(listener, serve))
}

pub(crate) fn serve_on<H, F>(listener: TcpListener, serve: H) -> Tasks
where
    H: Fn(TcpStream) -> F + Send + 'static,
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let tasks = Tasks::new(CONNECTIONS_MAX);
    let connections = tasks.clone();
    tasks.spawn_always("target", async move {
        while let Ok((stream, _)) = listener.accept().await {
            let work = serve(stream);
            // A broken connection is no error: many tests break connections on purpose.
            let served = async move { drop(work.await) };
            connections
                .spawn("target-connection", served)
                .expect("room for a connection");
        }
    });
    tasks
}

/// Echoes, and closes when its peer has closed.
pub(crate) async fn echo() -> (u16, Tasks) {
    serve(echo_one).await
}

/// As [`echo`], with its address on 127.0.0.1.
pub(crate) async fn local_echo() -> (String, Tasks) {
    let (port, tasks) = echo().await;
    (format!("127.0.0.1:{port}"), tasks)
}

/// The same on an existing listener.
pub(crate) fn echo_on(listener: TcpListener) -> Tasks {
    serve_on(listener, echo_one)
}

async fn echo_one(mut stream: TcpStream) -> io::Result<()> {
    let _ = stream.set_nodelay(true);
    let (mut read, mut write) = stream.split();
    tokio::io::copy(&mut read, &mut write).await?;
    write.shutdown().await
}

/// Sends a greeting at once, then echoes.
pub(crate) async fn server_first(greeting: &'static [u8]) -> (u16, Tasks) {
    serve(move |mut stream| async move {
        stream.write_all(greeting).await?;
        echo_one(stream).await
    })
    .await
}

/// Reads to EOF or an error and reports the sum of all bytes. Then it answers with the sum, and closes.
pub(crate) async fn summing() -> (u16, Tasks, mpsc::Receiver<Sum>) {
    let (reports, seen) = mpsc::channel(64);
    let (port, tasks) = serve(move |mut stream| {
        let reports = reports.clone();
        async move {
            let mut sum = Sum::default();
            let mut block = vec![0; 64 * 1024];
            let clean = loop {
                match stream.read(&mut block).await {
                    Ok(0) => break true,
                    Ok(count) => sum.add(&block[..count]),
                    Err(_reset) => break false,
                }
            };
            sum.clean = clean;
            let _test_over = reports.send(sum).await;
            stream
                .write_all(format!("{}\n", sum.hash).as_bytes())
                .await?;
            stream.shutdown().await
        }
    })
    .await;
    (port, tasks, seen)
}

/// Sends this many [`pattern`] bytes, then closes.
pub(crate) async fn source(bytes: u64) -> (u16, Tasks) {
    serve(move |stream| send_pattern(stream, bytes)).await
}

/// The same on an existing listener.
pub(crate) fn source_on(listener: TcpListener, bytes: u64) -> Tasks {
    serve_on(listener, move |stream| send_pattern(stream, bytes))
}

async fn send_pattern(mut stream: TcpStream, bytes: u64) -> io::Result<()> {
    let mut at = 0;
    while at < bytes {
        let count = usize::try_from((bytes - at).min(64 * 1024)).unwrap_or(0);
        stream.write_all(&pattern(at, count)).await?;
        at += count as u64;
    }
    stream.shutdown().await
}

/// `count` bytes of the pattern from `at` on. 251 is prime, so that no block size hides a shift.
pub(crate) fn pattern(at: u64, count: usize) -> Vec<u8> {
    (at..at + count as u64).map(|i| (i % 251) as u8).collect()
}

/// A position-dependent checksum (FNV-1a) and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) bytes: u64,
    pub(crate) hash: u64,
    pub(crate) clean: bool,
}

impl Default for Sum {
    fn default() -> Self {
        Self {
            bytes: 0,
            hash: 0xcbf2_9ce4_8422_2325,
            clean: true,
        }
    }
}

impl Sum {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut sum = Self::default();
        sum.add(bytes);
        sum
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        for byte in bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// An address that refuses connections as long as the socket lives. The socket is bound, which reserves the port, and does not
/// listen.
pub(crate) fn closed_port() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(([127, 0, 0, 1], 0).into())
        .expect("a free port");
    let address = socket.local_addr().expect("bound");
    (socket, address)
}

/// An address that answers no dial: its accept queue is full while this lives.
pub(crate) struct SilentHost {
    pub(crate) address: String,
    listener: Socket,
    fillers: Vec<Socket>,
}

impl SilentHost {
    /// Number of this host's sockets that are connecting to the address. The fillers of the queue do not count, since the
    /// kernel decides which of them it accepts.
    pub(crate) fn dials(&self) -> usize {
        const SYN_SENT: &str = "02";
        let port = |address: &str| {
            let (_host, port) = address.rsplit_once(':')?;
            u16::from_str_radix(port, 16).ok()
        };
        let ports: Vec<u16> = self.fillers.iter().filter_map(local_port).collect();
        let own = local_port(&self.listener);
        let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux says so");
        let sockets = table.lines().filter(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_number, local, remote, state, ..] = fields[..] else {
                return false;
            };
            let is_filler = port(local).is_some_and(|port| ports.contains(&port));
            state == SYN_SENT && port(remote) == own && !is_filler
        });
        sockets.count()
    }

    /// The listener, which accepts connections from now on.
    pub(crate) fn revive(self) -> TcpListener {
        self.listener.set_nonblocking(true).expect("a flag");
        self.listener.listen(64).expect("it listens");
        TcpListener::from_std(self.listener.into()).expect("a listener")
    }
}

/// See [`SilentHost`].
pub(crate) fn silent_host() -> SilentHost {
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let listener = socket();
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    listener.bind(&any.into()).expect("a free port");
    listener.listen(0).expect("it listens");
    let address = listener.local_addr().expect("bound");
    let mut fillers = Vec::new();
    // The kernel accepts one connection more than the backlog; further ones wait for an answer.
    for _connection in 0..4 {
        let filler = socket();
        filler.set_nonblocking(true).expect("a flag");
        let _under_way = filler.connect(&address);
        fillers.push(filler);
    }
    let address = address.as_socket().expect("IPv4").to_string();
    SilentHost {
        address,
        listener,
        fillers,
    }
}

fn local_port(socket: &Socket) -> Option<u16> {
    let address = socket.local_addr().ok()?;
    Some(address.as_socket()?.port())
}

/// Resets each connection after its first byte.
pub(crate) async fn resetting() -> (u16, Tasks) {
    serve(|mut stream| async move {
        stream.read_u8().await?;
        SockRef::from(&stream).set_linger(Some(Duration::ZERO))
    })
    .await
}

/// Accepts connections, and neither sends nor reads.
pub(crate) async fn deaf() -> (u16, Tasks) {
    serve(hold).await
}

/// The same on an existing listener.
pub(crate) fn deaf_on(listener: TcpListener) -> Tasks {
    serve_on(listener, hold)
}

async fn hold(stream: TcpStream) -> io::Result<()> {
    std::future::pending::<()>().await;
    drop(stream);
    Ok(())
}

/// A socket with small kernel buffers, for either end of a connection.
fn small_window_socket() -> Socket {
    const BUFFER_BYTES: usize = 16 * 1024;
    /// A sender may queue about ten segments before it has sent one, and segments of the loopback network have 64 KiB.
    const SEGMENT_BYTES: u32 = 1400;
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_send_buffer_size(BUFFER_BYTES).expect("a size");
    socket.set_recv_buffer_size(BUFFER_BYTES).expect("a size");
    socket.set_tcp_mss(SEGMENT_BYTES).expect("a size");
    socket
}

/// A connection with small kernel buffers, to a listener of this host.
pub(crate) fn connect_with_small_window(address: SocketAddr) -> TcpStream {
    let socket = small_window_socket();
    socket.connect(&address.into()).expect("it listens");
    socket.set_nonblocking(true).expect("a flag");
    TcpStream::from_std(socket.into()).expect("a connection")
}

/// A listener on every IPv4 address of this host, and its port. Its connections have small kernel buffers, so that even many
/// paused ones take little memory.
pub(crate) fn with_small_window() -> (TcpListener, u16) {
    let socket = small_window_socket();
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    socket.bind(&any.into()).expect("a free port");
    socket.listen(1024).expect("it listens");
    socket.set_nonblocking(true).expect("a flag");
    let listener = TcpListener::from_std(socket.into()).expect("a listener");
    let port = listener.local_addr().expect("bound").port();
    (listener, port)
}
