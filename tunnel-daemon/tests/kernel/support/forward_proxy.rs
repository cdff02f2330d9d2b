//! A forward proxy that connects to one server only.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Serves until the process ends.
pub(crate) struct ForwardProxy {
    /// Address of its listener.
    pub(crate) at: SocketAddr,
    tunnels: Arc<AtomicUsize>,
}

impl ForwardProxy {
    /// Starts it in the network namespace of this thread.
    pub(crate) fn start(ip: &str, server: SocketAddr) -> Self {
        let listener = TcpListener::bind((ip, 0)).expect("loopback is up");
        let at = listener.local_addr().expect("bound");
        let tunnels = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&tunnels);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                let counted = Arc::clone(&counted);
                std::thread::spawn(move || {
                    let _left = serve(stream, server, &counted);
                });
            }
        });
        Self { at, tunnels }
    }

    /// Number of tunnels to the server so far.
    pub(crate) fn tunnels(&self) -> usize {
        self.tunnels.load(SeqCst)
    }
}

fn serve(mut agent: TcpStream, server: SocketAddr, tunnels: &AtomicUsize) -> std::io::Result<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        agent.read_exact(&mut byte)?;
        head.extend_from_slice(&byte);
    }
    let asked = format!("CONNECT {server} HTTP/1.1\r\n");
    if !head.starts_with(asked.as_bytes()) {
        return agent.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n");
    }
    let mut server = TcpStream::connect(server)?;
    tunnels.fetch_add(1, SeqCst);
    agent.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
    let (mut from_agent, mut to_server) = (agent.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || {
        let _cut = std::io::copy(&mut from_agent, &mut to_server);
        let _ended = to_server.shutdown(Shutdown::Write);
    });
    let _cut = std::io::copy(&mut server, &mut agent);
    agent.shutdown(Shutdown::Write)
}
