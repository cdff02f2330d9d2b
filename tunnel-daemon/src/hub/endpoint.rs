//! The socket at the far end of a tunnel, joined to its leg until the tunnel is over.

use std::io;

use bytes::Bytes;
use tokio::net::TcpStream;

use super::leg::Leg;
use super::pump::{PumpEnd, PumpOutcome, pump};
use crate::net::socket;

/// Serves one connection to a target to its end. The socket is closed on return, after everything owed is written; by a
/// reset if the tunnel was cut off.
///
/// A cancelled call resets the tunnel.
pub async fn serve_target(mut socket: TcpStream, mut leg: Leg, address: &str) -> PumpOutcome {
    let outcome = pump(&mut socket, &mut leg, Bytes::new()).await;
    match &outcome.end {
        PumpEnd::Tunnel(end) => {
            if !end.delivers_rest() {
                reset_on_close(&socket);
            }
        }
        // What was read before the failure still goes to the client, then the reason.
        PumpEnd::ReadFailed(error) | PumpEnd::WriteFailed(error) => {
            leg.close_with(&go_text(address, error));
        }
    }
    tracing::debug!(
        target_address = address,
        from_target = outcome.from_socket,
        to_target = outcome.to_socket,
        end = ?outcome.end,
        "target connection over"
    );
    outcome
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
