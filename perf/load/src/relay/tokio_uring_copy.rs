//! The cost of tokio-uring: in each direction the ring reads, then writes, on one thread.

use std::io;
use std::net::Shutdown;
use std::rc::Rc;

use tokio::sync::mpsc;
use tokio_uring::buf::BoundedBuf as _;
use tokio_uring::net::TcpStream;

use super::Connections;

/// Buffer of a direction: the size to which adit-relay's buffers grow.
const BUFFER_BYTES: usize = 256 * 1024;
/// Connections waiting for the thread; the accepting thread blocks beyond that.
const WAITING_MAX: usize = 64;
/// Ring entries: two directions of as many connections as any measurement has.
const ENTRIES: u32 = 4096;

/// Starts the thread. Without io_uring the thread panics, and nothing is relayed.
pub(super) fn start() -> Connections {
    let (connections, received) = mpsc::channel(WAITING_MAX);
    std::thread::spawn(move || {
        let mut ring = tokio_uring::builder();
        ring.entries(ENTRIES).start(relay(received));
    });
    // Keep the sockets blocking: the ring waits for readiness itself, and non-blocking sockets fail with EAGAIN.
    Box::new(move |client, target| {
        connections
            .blocking_send([client, target])
            .map_err(io::Error::other)
    })
}

async fn relay(mut received: mpsc::Receiver<[std::net::TcpStream; 2]>) {
    while let Some(pair) = received.recv().await {
        let [client, target] = pair.map(|stream| Rc::new(TcpStream::from_std(stream)));
        for (from, to) in [(Rc::clone(&client), Rc::clone(&target)), (target, client)] {
            tokio_uring::spawn(async move {
                let end = match copy(&from, &to).await {
                    Ok(()) => Shutdown::Write,
                    // Both peers must see the error, and so must the waiting direction.
                    Err(_broken) => Shutdown::Both,
                };
                let _gone = to.shutdown(end);
            });
        }
    }
}

async fn copy(from: &TcpStream, to: &TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let (read, back) = from.read(buffer).await;
        let count = read?;
        if count == 0 {
            return Ok(());
        }
        let (written, back) = to.write_all(back.slice(..count)).await;
        written?;
        buffer = back.into_inner();
    }
}
