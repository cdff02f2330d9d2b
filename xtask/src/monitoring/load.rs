//! Clients and targets: echoes, dials that are refused, and a client that does not read.

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};

/// Sent and echoed on each tunnel.
static PAYLOAD: [u8; 64 << 10] = [7; 64 << 10];
/// Between two rounds.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest wait for a byte.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest head of an answer.
const HEAD_MAX: usize = 4096;

/// What all clients share.
#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    echoed: AtomicUsize,
    refused: AtomicUsize,
}

/// It goes on until dropped.
pub(super) struct Load(Arc<Shared>);

impl Load {
    /// Starts targets, and clients at each of the sockets.
    ///
    /// # Errors
    /// No port is free.
    pub(super) fn start(frontends: &[PathBuf]) -> anyhow::Result<Self> {
        let echo = target(|mut stream| {
            let mut writer = stream.try_clone()?;
            std::io::copy(&mut stream, &mut writer).map(drop)
        })?;
        let source = target(|mut stream| {
            loop {
                stream.write_all(&PAYLOAD)?;
            }
        })?;
        let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let shared = Arc::new(Shared::default());
        for frontend in frontends {
            let (frontend, shared) = (frontend.clone(), Arc::clone(&shared));
            thread::spawn(move || client(&frontend, &shared, echo, source, closed));
        }
        Ok(Self(shared))
    }

    /// Whether there were tunnels and refused dials.
    ///
    /// # Errors
    /// There were none.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let (echoed, refused) = (of(&self.0.echoed), of(&self.0.refused));
        println!("monitoring: {echoed} tunnels and {refused} refused dials");
        ensure!(
            echoed > 0 && refused > 0,
            "the load did not reach its targets"
        );
        Ok(())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Serves each connection on a thread. The listener lives as long as the process.
fn target(serve: fn(TcpStream) -> std::io::Result<()>) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // An error is the end of its tunnel.
            thread::spawn(move || serve(stream).ok());
        }
    });
    Ok(address)
}

/// Opens tunnels one after the other. Before agents are there, they fail.
fn client(
    frontend: &Path,
    shared: &Shared,
    echo: SocketAddr,
    source: SocketAddr,
    closed: SocketAddr,
) {
    let mut paused: Option<UnixStream> = None;
    while !shared.is_over.load(Ordering::Relaxed) {
        if one_echo(frontend, echo).is_ok() {
            shared.echoed.fetch_add(1, Ordering::Relaxed);
        }
        if connect(frontend, closed).is_ok_and(|(status, _stream)| status == 502) {
            shared.refused.fetch_add(1, Ordering::Relaxed);
        }
        if paused.is_none() {
            let opened = connect(frontend, source);
            paused = opened
                .ok()
                .and_then(|(status, stream)| (status == 200).then_some(stream));
        }
        thread::sleep(PAUSE);
    }
}

fn one_echo(frontend: &Path, echo: SocketAddr) -> anyhow::Result<()> {
    let (status, mut stream) = connect(frontend, echo)?;
    ensure!(status == 200, "status {status}");
    stream.write_all(&PAYLOAD)?;
    let mut back = vec![0; PAYLOAD.len()];
    stream.read_exact(&mut back)?;
    ensure!(back == PAYLOAD, "another echo");
    Ok(())
}

/// The status of a CONNECT, and the tunnel behind it.
///
/// # Errors
/// There is no answer, or none of HTTP.
pub(crate) fn connect(frontend: &Path, target: SocketAddr) -> anyhow::Result<(u16, UnixStream)> {
    let mut stream = UnixStream::connect(frontend)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
    )?;
    let mut head = Vec::new();
    // Byte by byte: what follows belongs to the tunnel.
    while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_MAX {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head);
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    Ok((status.context("a status")?, stream))
}
