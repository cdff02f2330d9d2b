//! The cost of a relay of tasks: tokio's own bidirectional copy, on one thread.

use std::net::TcpStream;

use tokio::io::copy_bidirectional_with_sizes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{BUFFER_BYTES, Connections, WAITING_MAX, in_thread};

/// Starts the thread.
///
/// # Errors
/// A thread or runtime is not available.
pub(super) fn start() -> anyhow::Result<Connections> {
    let (connections, received) = mpsc::channel(WAITING_MAX);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    in_thread(move || runtime.block_on(relay(received)))?;
    Ok(Box::new(move |client, target| {
        for stream in [&client, &target] {
            stream.set_nonblocking(true)?;
        }
        connections
            .blocking_send([client, target])
            .map_err(std::io::Error::other)
    }))
}

async fn relay(mut received: mpsc::Receiver<[TcpStream; 2]>) {
    let mut connections = JoinSet::new();
    while let Some(pair) = received.recv().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            let [client, target] = pair.map(tokio::net::TcpStream::from_std);
            let (Ok(mut client), Ok(mut target)) = (client, target) else {
                return;
            };
            // Both peers see how the connection ended.
            let _over =
                copy_bidirectional_with_sizes(&mut client, &mut target, BUFFER_BYTES, BUFFER_BYTES)
                    .await;
        });
    }
}
