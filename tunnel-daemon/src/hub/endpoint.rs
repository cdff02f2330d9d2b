//! The socket at the far end of a tunnel, joined to its leg until the tunnel is over.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::net::TcpStream;

use super::leg::Leg;
use super::pump::{Pump, PumpEnd, PumpOutcome};
use crate::net::socket;

/// Serves one connection to a target to its end. The socket is closed on return, after everything owed is written; by a
/// reset if the tunnel was cut off. `kept` is dropped with it.
///
/// A cancelled call resets the tunnel.
pub fn serve_target<A: AsRef<str> + Unpin, K: Unpin>(
    socket: TcpStream,
    mut leg: Leg,
    address: A,
    kept: K,
) -> impl Future<Output = PumpOutcome> + use<A, K> {
    let pump = Pump::new(&mut leg, Bytes::new());
    ServeTarget(Some(Joined {
        pump,
        leg,
        socket,
        address,
        _kept: kept,
    }))
}

/// Not an `async` function: that would keep socket and leg twice, for as long as the tunnel lives.
struct ServeTarget<A, K>(Option<Joined<A, K>>);

/// Dropped in this order, if it comes to that: the tunnel is reset before its target's connection goes.
struct Joined<A, K> {
    pump: Pump,
    leg: Leg,
    socket: TcpStream,
    address: A,
    _kept: K,
}

impl<A: AsRef<str> + Unpin, K: Unpin> Future for ServeTarget<A, K> {
    type Output = PumpOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<PumpOutcome> {
        let Some(joined) = &mut self.0 else {
            unreachable!("a target's connection is asked again after its end");
        };
        let outcome = ready!(joined.pump.poll(cx, &mut joined.socket, &mut joined.leg));
        joined.over(&outcome);
        self.0 = None;
        Poll::Ready(outcome)
    }
}

impl<A: AsRef<str>, K> Joined<A, K> {
    fn over(&mut self, outcome: &PumpOutcome) {
        let address = self.address.as_ref();
        match &outcome.end {
            PumpEnd::Tunnel(end) => {
                if !end.delivers_rest() {
                    reset_on_close(&self.socket);
                }
            }
            // What was read before the failure still goes to the client, then the reason.
            PumpEnd::ReadFailed(error) | PumpEnd::WriteFailed(error) => {
                self.leg.close_with(&go_text(address, error));
            }
        }
        tracing::debug!(
            target_address = address,
            from_target = outcome.from_socket,
            to_target = outcome.to_socket,
            end = ?outcome.end,
            "target connection over"
        );
    }
}

/// Go's words for a failed read or write, which clients may match.
fn go_text(address: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset => format!("read tcp {address}: connection reset by peer"),
        io::ErrorKind::BrokenPipe => format!("write tcp {address}: broken pipe"),
        io::ErrorKind::TimedOut => format!("read tcp {address}: i/o timeout"),
        _ => format!("tcp {address}: {error}"),
    }
}

/// An abnormal end must not look like a clean one to the other side.
pub fn reset_on_close(socket: &TcpStream) {
    if let Err(error) = socket::set_reset_on_close(socket) {
        tracing::debug!(%error, "cannot reset a connection");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::hub::Mailbox;

    /// What an agent keeps for each tunnel for as long as it lives, beside the lane.
    #[tokio::test]
    async fn the_state_of_a_tunnel_at_its_target_stays_small() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (leg, _conduit) = Leg::new(&Arc::new(Mailbox::default()));
        let bytes = size_of_val(&serve_target(socket, leg, String::new(), [0_u64; 3]));
        assert!(bytes <= 384, "{bytes} bytes");
    }
}
