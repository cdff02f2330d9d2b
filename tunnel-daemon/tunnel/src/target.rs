//! Serves a target's socket: joins it to its endpoint until the tunnel is over.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

use crate::closing::{GracefulClose, reset_on_close};
use crate::copy::{BidirectionalCopy, CopyEnd, CopyOutcome};
use crate::endpoint::Endpoint;
use adit_tls::stream::Connection;

/// Serves one connection to a target to its end. `ended` receives the outcome as soon as the tunnel is over. On return all
/// bytes owed are delivered and the socket is closed, by RST if the tunnel was cut off. `kept` is dropped with it.
///
/// A cancelled call resets the tunnel. It also resets the socket, unless FIN was sent. The kernel does the same for a process
/// that is killed.
pub fn serve_target<S, A, K, F>(
    socket: S,
    mut endpoint: Endpoint,
    address: A,
    kept: K,
    ended: F,
) -> impl Future<Output = ()> + use<S, A, K, F>
where
    S: Connection,
    A: AsRef<str> + Unpin,
    K: Unpin,
    F: FnOnce(&CopyOutcome) + Unpin,
{
    if let Some(socket) = socket.tcp() {
        reset_on_close(socket);
    }
    let copy = BidirectionalCopy::new(&mut endpoint, Bytes::new());
    ServeTarget {
        tunnel: Some(Tunnel {
            copy,
            endpoint,
            address,
            ended,
        }),
        graceful: None,
        socket: Some(socket),
        _kept: kept,
    }
}

/// Not an `async` function: its future would hold socket and endpoint twice, for the tunnel's lifetime.
///
/// Fields drop in this order: the tunnel is reset before its target's connection closes.
struct ServeTarget<S, A, K, F> {
    /// `None` once the tunnel is over.
    tunnel: Option<Tunnel<A, F>>,
    /// Set once the tunnel is over.
    graceful: Option<GracefulClose>,
    /// Kept until the socket is closed.
    socket: Option<S>,
    _kept: K,
}

struct Tunnel<A, F> {
    copy: BidirectionalCopy,
    endpoint: Endpoint,
    address: A,
    ended: F,
}

impl<S, A, K, F> Future for ServeTarget<S, A, K, F>
where
    S: Connection,
    A: AsRef<str> + Unpin,
    K: Unpin,
    F: FnOnce(&CopyOutcome) + Unpin,
{
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let Some(socket) = &mut this.socket else {
            unreachable!("a target's connection is asked again after its end");
        };
        if let Some(tunnel) = &mut this.tunnel {
            let outcome = ready!(tunnel.copy.poll(cx, socket, &mut tunnel.endpoint));
            this.graceful = outcome.closing().map(GracefulClose::new);
            if let Some(tunnel) = this.tunnel.take() {
                tunnel.over(&outcome);
            }
        }
        if let Some(graceful) = &mut this.graceful {
            ready!(graceful.poll(cx, socket));
        }
        this.socket = None;
        Poll::Ready(())
    }
}

impl<A: AsRef<str>, F: FnOnce(&CopyOutcome)> Tunnel<A, F> {
    fn over(mut self, outcome: &CopyOutcome) {
        let address = self.address.as_ref();
        if let CopyEnd::ReadFailed(error) | CopyEnd::WriteFailed(error) = &outcome.end {
            // Bytes read before the failure still go to the client, then the reason.
            self.endpoint.close_with(&go_text(address, error));
        }
        tracing::debug!(
            target_address = address,
            from_target = outcome.from_socket,
            to_target = outcome.to_socket,
            end = %outcome.end,
            "target connection over"
        );
        let Self {
            endpoint, ended, ..
        } = self;
        drop(endpoint);
        ended(outcome);
    }
}

/// Go's text for a failed read or write, which clients may match.
fn go_text(address: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset => format!("read tcp {address}: connection reset by peer"),
        io::ErrorKind::BrokenPipe => format!("write tcp {address}: broken pipe"),
        io::ErrorKind::TimedOut => format!("read tcp {address}: i/o timeout"),
        _ => format!("tcp {address}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::Arc;

    use tokio::net::TcpStream;

    use super::*;
    use crate::DirtyList;

    /// State that an agent keeps for each tunnel while it lives, in addition to the lane.
    #[tokio::test]
    async fn the_state_of_a_tunnel_at_its_target_stays_small() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (endpoint, _channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        let serving = serve_target(socket, endpoint, String::new(), [0_u64; 3], |_outcome| ());
        let bytes = size_of_val(&serving);
        assert!(bytes <= 400, "{bytes} bytes");
    }

    /// As when an agent shuts down after its grace period: a truncated upload must not look complete.
    #[tokio::test]
    async fn a_target_whose_task_is_dropped_is_reset() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut target, _address) = listener.accept().unwrap();
        let (endpoint, _channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        let mut serving = Box::pin(serve_target(socket, endpoint, "", (), |_outcome| ()));
        assert!(futures_util::poll!(&mut serving).is_pending());
        drop(serving);
        let read = target.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(read, Err(io::ErrorKind::ConnectionReset));
    }
}
